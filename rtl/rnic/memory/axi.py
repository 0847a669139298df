"""AXI4 and AXI4-Lite as signatures of individual signals, and a protocol checker.

The members carry the plain AXI names, so that a top can name its ports ``m_axi_awaddr``, ``s_axil_awvalid`` and so on.
Source: AMBA AXI protocol specification, IHI 0022.
"""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import enum, memory, wiring
from amaranth.lib.wiring import In, Out

from rnic.stream.check import StreamChecker

__all__ = ["AxiChecker", "AxiLiteSignature", "AxiReadSignature", "AxiSignature", "AxiWriteSignature", "Burst", "Resp",
           "connect_host"]

ADDR_BITS = 64
BOUNDARY = 4096  # bytes; no burst crosses a multiple of it
MAX_BEATS = 256


class Burst(enum.IntEnum, shape=2):
    """AxBURST."""

    FIXED = 0
    INCR = 1
    WRAP = 2


class Resp(enum.IntEnum, shape=2):
    """BRESP, RRESP. Bit 1 is set in both errors."""

    OKAY = 0
    EXOKAY = 1
    SLVERR = 2
    DECERR = 3


def _check_sizes(data_width: int, id_width: int) -> None:
    if data_width not in (32, 64, 128, 256, 512, 1024):
        raise ValueError(f"AXI data_width is {data_width}, must be a power of two 32..1024")
    if id_width < 1:
        raise ValueError(f"AXI id_width is {id_width}, must be at least 1")


def _write_members(data_width: int, id_width: int) -> dict:
    return {
        "awid": Out(id_width), "awaddr": Out(ADDR_BITS), "awlen": Out(8), "awsize": Out(3), "awburst": Out(2),
        "awvalid": Out(1), "awready": In(1),
        "wdata": Out(data_width), "wstrb": Out(data_width // 8), "wlast": Out(1), "wvalid": Out(1), "wready": In(1),
        "bid": In(id_width), "bresp": In(2), "bvalid": In(1), "bready": Out(1),
    }  # fmt: skip


def _read_members(data_width: int, id_width: int) -> dict:
    return {
        "arid": Out(id_width), "araddr": Out(ADDR_BITS), "arlen": Out(8), "arsize": Out(3), "arburst": Out(2),
        "arvalid": Out(1), "arready": In(1),
        "rid": In(id_width), "rdata": In(data_width), "rresp": In(2), "rlast": In(1), "rvalid": In(1), "rready": Out(1),
    }  # fmt: skip


class AxiWriteSignature(wiring.Signature):
    """The write channels (AW, W, B) of an AXI4 manager.

    Parameters: ``data_width`` and ``id_width`` in bits; the address has 64. Raises ValueError.
    """

    def __init__(self, data_width: int, id_width: int):
        _check_sizes(data_width, id_width)
        super().__init__(_write_members(data_width, id_width))


class AxiReadSignature(wiring.Signature):
    """The read channels (AR, R) of an AXI4 manager. Parameters as of AxiWriteSignature."""

    def __init__(self, data_width: int, id_width: int):
        _check_sizes(data_width, id_width)
        super().__init__(_read_members(data_width, id_width))


class AxiSignature(wiring.Signature):
    """All channels of an AXI4 manager. Parameters as of AxiWriteSignature."""

    def __init__(self, data_width: int, id_width: int):
        _check_sizes(data_width, id_width)
        super().__init__(_write_members(data_width, id_width) | _read_members(data_width, id_width))


class AxiLiteSignature(wiring.Signature):
    """AXI4-Lite, 32 data bits, seen from the manager: a subordinate has it as ``In``.

    Parameters: ``addr_width`` in bits. Raises ValueError.
    """

    def __init__(self, addr_width: int = 32):
        if addr_width < 2:
            raise ValueError(f"AXI4-Lite addr_width is {addr_width}, must be at least 2")
        super().__init__({
            "awaddr": Out(addr_width), "awprot": Out(3), "awvalid": Out(1), "awready": In(1),
            "wdata": Out(32), "wstrb": Out(4), "wvalid": Out(1), "wready": In(1),
            "bresp": In(2), "bvalid": In(1), "bready": Out(1),
            "araddr": Out(addr_width), "arprot": Out(3), "arvalid": Out(1), "arready": In(1),
            "rdata": In(32), "rresp": In(2), "rvalid": In(1), "rready": Out(1),
        })  # fmt: skip


def connect_host(m: Module, host, read, write) -> None:
    """Join the read port of a DmaRead and the write port of a DmaWrite to the one AXI4 port ``host``.

    ``host`` has an AxiSignature and is driven as a component's own port; IDs are extended with zeros.
    """
    for part in (read, write):
        for name, member in part.signature.members.items():
            outer, inner = getattr(host, name), getattr(part, name)
            if member.flow == Out:
                m.d.comb += outer.eq(inner)
            else:
                m.d.comb += inner.eq(outer)


class AxiChecker(wiring.Component):
    """Asserts the rules of AXI4 and this NIC's own on a host port: every payload stable until ready, INCR, full-width
    beats, word-aligned addresses, no burst across 4 KiB, WLAST on the last beat of a burst and only there, no W beat
    before its AW is offered, RLAST and responses only for bursts outstanding under that ID.

    Passive. ``busy`` is 1 while any burst is outstanding.

    Parameters: ``data_width``, ``id_width`` of the port; ``outstanding``, write bursts that may wait for their W beats
    (a power of two; Assert when there are more). Raises ValueError.
    Members: all signals of AxiSignature as inputs; ``busy``.
    """

    def __init__(self, data_width: int, id_width: int, *, outstanding: int = 64):
        if id_width > 6:
            raise ValueError(f"AxiChecker id_width is {id_width}, must be at most 6 (one counter an ID)")
        if outstanding < 2 or outstanding & (outstanding - 1):
            raise ValueError(f"AxiChecker outstanding is {outstanding}, must be a power of two of at least 2")
        self.data_width = data_width
        self.id_width = id_width
        self.outstanding = outstanding
        members = AxiSignature(data_width, id_width).members
        super().__init__({name: In(member.shape) for name, member in members.items()} | {"busy": Out(1)})

    def watch(self, m: Module, port) -> None:
        """Connect to the signals of ``port`` (any of the AXI4 signatures); channels it does not have stay idle."""
        for name in port.signature.members:
            m.d.comb += getattr(self, name).eq(getattr(port, name))

    def elaborate(self, platform):
        m = Module()
        channels = {
            "aw": Cat(self.awid, self.awaddr, self.awlen, self.awsize, self.awburst),
            "w": Cat(self.wdata, self.wstrb, self.wlast),
            "b": Cat(self.bid, self.bresp),
            "ar": Cat(self.arid, self.araddr, self.arlen, self.arsize, self.arburst),
            "r": Cat(self.rid, self.rdata, self.rresp, self.rlast),
        }
        for name, payload in channels.items():
            m.submodules[f"{name}_stable"] = stable = StreamChecker(len(payload), f"AXI {name}")
            m.d.comb += [
                stable.valid.eq(getattr(self, f"{name}valid")),
                stable.ready.eq(getattr(self, f"{name}ready")),
                stable.payload.eq(payload),
            ]
        for name in ("aw", "ar"):
            self._check_address(m, name)
        self._check_write_data(m)
        write_busy = self._check_responses(m, "write", self.awid, self.awvalid & self.awready,
                                           self.bid, self.bvalid, self.bvalid & self.bready)
        read_busy = self._check_responses(m, "read", self.arid, self.arvalid & self.arready,
                                          self.rid, self.rvalid, self.rvalid & self.rready & self.rlast)
        m.d.comb += self.busy.eq(write_busy | read_busy)
        return m

    def _check_address(self, m, name):
        lanes = self.data_width // 8
        addr, length = getattr(self, f"{name}addr"), getattr(self, f"{name}len")
        end = Signal(range(BOUNDARY + MAX_BEATS * lanes), name=f"{name}_end")
        m.d.comb += end.eq(addr % BOUNDARY + (length + 1) * lanes)
        with m.If(getattr(self, f"{name}valid")):
            m.d.sync += [
                Assert(getattr(self, f"{name}burst") == Burst.INCR, f"AXI {name}: burst is not INCR"),
                Assert(getattr(self, f"{name}size") == (lanes - 1).bit_length(), f"AXI {name}: beats not full width"),
                Assert(addr % lanes == 0, Format("AXI " + name + ": address {:#x} is not aligned to the bus", addr)),
                Assert(end <= BOUNDARY,
                       Format("AXI " + name + ": {} beats from {:#x} cross 4 KiB", length + 1, addr)),
            ]

    def _check_write_data(self, m):
        # Lengths of bursts whose AW has been offered and whose W beats have not all passed. Read without delay: a
        # checker.
        queue = m.submodules.lengths = memory.Memory(shape=8, depth=self.outstanding, init=[])
        write_port, read_port = queue.write_port(), queue.read_port(domain="comb")
        offered = Signal()  # this AW has been counted already
        new = Signal()
        beat = Signal(8)
        taken = Signal()
        finished = Signal()
        pending = Signal(range(self.outstanding + 1))
        available = Signal()
        length = Signal(8)
        m.d.comb += [
            new.eq(self.awvalid & ~offered),
            write_port.data.eq(self.awlen),
            write_port.en.eq(new),
            taken.eq(self.wvalid & self.wready),
            available.eq((pending != 0) | new),
            length.eq(Mux(pending == 0, self.awlen, read_port.data)),
            finished.eq(taken & self.wlast & available),
        ]
        m.d.sync += [
            offered.eq(self.awvalid & ~self.awready),
            pending.eq(pending + new - finished),
            write_port.addr.eq(write_port.addr + new),
            read_port.addr.eq(read_port.addr + finished),
        ]
        with m.If(taken):
            m.d.sync += beat.eq(Mux(self.wlast, 0, beat + 1))
        with m.If(self.wvalid):
            m.d.sync += [
                Assert(available, "AXI w: beat before its AW"),
                Assert(~available | (self.wlast == (beat == length)),
                       Format("AXI w: WLAST is {} on beat {} of {}", self.wlast, beat + 1, length + 1)),
            ]
        m.d.sync += Assert(~new | (pending != self.outstanding), "AXI aw: more bursts than the checker can hold")

    def _check_responses(self, m, name, request_id, request, response_id, valid, response):
        counters = []
        for number in range(1 << self.id_width):
            count = Signal(16, name=f"{name}_outstanding_{number}")
            counters.append(count)
            up = Signal(name=f"{name}_up_{number}")
            down = Signal(name=f"{name}_down_{number}")
            m.d.comb += [
                up.eq(request & (request_id == number)),
                down.eq(response & (response_id == number)),
            ]
            m.d.sync += count.eq(count + up - down)
            with m.If(valid & (response_id == number)):
                m.d.sync += Assert(count != 0, f"AXI {name}: response for ID {number} without a burst")
        return Cat(count.any() for count in counters).any()
