"""A stand-in for the NIC: all its ports, almost no function. Tests of the simulator run on it in seconds.

Registers (byte addresses): 0x00 identity, 0x04 scratch, 0x08/0x0C source, 0x10/0x14 destination, 0x18 beats - 1,
0x1C go (copies one burst by DMA, then raises irq 0), 0x20 writes the interrupt level, 0x24 writes the value an assertion
wants below 100, 0x28 bit 0 makes net_tx withdraw its valid. Reads of 0x3C are answered SLVERR.
Frames pass from net_rx to net_tx and from eth_tx to eth_rx.
"""

from amaranth import *
from amaranth.back import verilog
from amaranth.hdl import Assert, Format
from amaranth.lib import fifo, wiring
from amaranth.lib.wiring import In, Out

IDENTITY = 0x524E4943
ID_WIDTH = 4
PROBE_SLOTS = 3
PROBE_WIDTH = 75  # no multiple of 8: slots share bytes

REG_ID, REG_SCRATCH, REG_SOURCE, REG_TARGET, REG_BEATS, REG_GO, REG_IRQ, REG_ASSERT, REG_BREAK, REG_ERROR = (
    0x00, 0x04, 0x08, 0x10, 0x18, 0x1C, 0x20, 0x24, 0x28, 0x3C)


def _stream(prefix: str, width: int, flow) -> dict:
    back = In if flow is Out else Out
    return {f"{prefix}_tdata": flow(width), f"{prefix}_tkeep": flow(width // 8), f"{prefix}_tlast": flow(1),
            f"{prefix}_tuser": flow(1), f"{prefix}_tvalid": flow(1), f"{prefix}_tready": back(1)}


class StandIn(wiring.Component):
    """See the module. ``width`` is the bus width in bits."""

    def __init__(self, width: int):
        self.width = width
        axil = {"awaddr": In(32), "awvalid": In(1), "awready": Out(1), "wdata": In(32), "wstrb": In(4), "wvalid": In(1),
                "wready": Out(1), "bresp": Out(2), "bvalid": Out(1), "bready": In(1), "araddr": In(32), "arvalid": In(1),
                "arready": Out(1), "rdata": Out(32), "rresp": Out(2), "rvalid": Out(1), "rready": In(1)}
        axi = {"awid": Out(ID_WIDTH), "awaddr": Out(64), "awlen": Out(8), "awsize": Out(3), "awburst": Out(2),
               "awvalid": Out(1), "awready": In(1), "wdata": Out(width), "wstrb": Out(width // 8), "wlast": Out(1),
               "wvalid": Out(1), "wready": In(1), "bid": In(ID_WIDTH), "bresp": In(2), "bvalid": In(1), "bready": Out(1),
               "arid": Out(ID_WIDTH), "araddr": Out(64), "arlen": Out(8), "arsize": Out(3), "arburst": Out(2),
               "arvalid": Out(1), "arready": In(1), "rid": In(ID_WIDTH), "rdata": In(width), "rresp": In(2),
               "rlast": In(1), "rvalid": In(1), "rready": Out(1)}
        super().__init__({f"s_axil_{k}": v for k, v in axil.items()} | {f"m_axi_{k}": v for k, v in axi.items()}
                         | _stream("net_tx", width, Out) | _stream("net_rx", width, In)
                         | _stream("eth_tx", width, In) | _stream("eth_rx", width, Out)
                         | {"irq": Out(2), "probe": Out(PROBE_SLOTS * PROBE_WIDTH)})

    def elaborate(self, platform) -> Module:
        m = Module()
        registers = Array(Signal(32, name=f"register_{i}") for i in range(16))
        go = Signal()
        write = self.s_axil_awvalid & self.s_axil_wvalid & ~self.s_axil_bvalid
        m.d.comb += [self.s_axil_awready.eq(write), self.s_axil_wready.eq(write), go.eq(0)]
        with m.If(write):
            m.d.sync += [registers[self.s_axil_awaddr[2:6]].eq(self.s_axil_wdata), self.s_axil_bvalid.eq(1)]
            m.d.comb += go.eq(self.s_axil_awaddr[:8] == REG_GO)
        with m.Elif(self.s_axil_bready):
            m.d.sync += self.s_axil_bvalid.eq(0)
        m.d.comb += self.s_axil_arready.eq(~self.s_axil_rvalid)
        with m.If(self.s_axil_arvalid & self.s_axil_arready):
            index = self.s_axil_araddr[2:6]
            m.d.sync += [self.s_axil_rvalid.eq(1), self.s_axil_rdata.eq(Mux(index == 0, IDENTITY, registers[index])),
                         self.s_axil_rresp.eq(Mux(index == REG_ERROR // 4, 2, 0))]
        with m.Elif(self.s_axil_rready):
            m.d.sync += self.s_axil_rvalid.eq(0)
        m.d.sync += Assert(registers[REG_ASSERT // 4] < 100, Format("level {} is not below 100", registers[REG_ASSERT // 4]))

        self._copier(m, registers, go)
        self._forward(m, "net", "net_rx", "net_tx", stop=registers[REG_BREAK // 4][0])
        self._forward(m, "eth", "eth_tx", "eth_rx", stop=C(0))
        m.d.comb += self.irq[0].eq(registers[REG_IRQ // 4][0])
        return m

    def _copier(self, m: Module, registers: Array, go: Signal) -> None:
        """One burst in, one burst out, one interrupt."""
        beats, sent = Signal(8), Signal(8)
        m.submodules.data = data = fifo.SyncFIFOBuffered(width=self.width, depth=256)
        cycles = Signal(64)
        done = Signal()
        m.d.sync += cycles.eq(cycles + 1)
        m.d.comb += [
            beats.eq(registers[REG_BEATS // 4][:8]),
            self.m_axi_araddr.eq(Cat(registers[REG_SOURCE // 4], registers[REG_SOURCE // 4 + 1])), self.m_axi_arlen.eq(beats),
            self.m_axi_awaddr.eq(Cat(registers[REG_TARGET // 4], registers[REG_TARGET // 4 + 1])), self.m_axi_awlen.eq(beats),
            self.m_axi_arsize.eq((self.width // 8).bit_length() - 1), self.m_axi_awsize.eq(self.m_axi_arsize),
            self.m_axi_arburst.eq(1), self.m_axi_awburst.eq(1), self.m_axi_arid.eq(3), self.m_axi_awid.eq(5),
            data.w_data.eq(self.m_axi_rdata), data.w_en.eq(self.m_axi_rvalid), self.m_axi_rready.eq(data.w_rdy),
            self.m_axi_wdata.eq(data.r_data), self.m_axi_wstrb.eq(~0), self.m_axi_wlast.eq(sent == beats),
            self.m_axi_bready.eq(1),
            self.probe[:PROBE_WIDTH].eq(Cat(go, C(1, 10), cycles)),
            self.probe[2 * PROBE_WIDTH:].eq(Cat(done, C(2, 10), cycles)),
        ]
        with m.FSM(name="copier"):
            with m.State("IDLE"):
                with m.If(go):
                    m.next = "READ"
            with m.State("READ"):
                m.d.comb += self.m_axi_arvalid.eq(1)
                with m.If(self.m_axi_arready):
                    m.next = "ADDRESS"
            with m.State("ADDRESS"):
                m.d.comb += self.m_axi_awvalid.eq(1)
                with m.If(self.m_axi_awready):
                    m.d.sync += sent.eq(0)
                    m.next = "WRITE"
            with m.State("WRITE"):
                m.d.comb += [self.m_axi_wvalid.eq(data.r_rdy), data.r_en.eq(self.m_axi_wready)]
                with m.If(self.m_axi_wvalid & self.m_axi_wready):
                    m.d.sync += sent.eq(sent + 1)
                    with m.If(self.m_axi_wlast):
                        m.next = "RESPONSE"
            with m.State("RESPONSE"):
                with m.If(self.m_axi_bvalid):
                    m.d.comb += done.eq(1)
                    m.d.sync += registers[REG_IRQ // 4].eq(1)
                    m.next = "IDLE"

    def _forward(self, m: Module, name: str, source: str, target: str, stop: Value) -> None:
        def pin(prefix: str, field: str) -> Signal:
            return getattr(self, f"{prefix}_{field}")

        payload = ("tdata", "tkeep", "tlast", "tuser")
        queue = fifo.SyncFIFOBuffered(width=sum(len(pin(source, f)) for f in payload), depth=4)
        m.submodules[f"{name}_queue"] = queue
        m.d.comb += [
            queue.w_data.eq(Cat(pin(source, f) for f in payload)), queue.w_en.eq(pin(source, "tvalid")),
            pin(source, "tready").eq(queue.w_rdy),
            Cat(pin(target, f) for f in payload).eq(queue.r_data), pin(target, "tvalid").eq(queue.r_rdy & ~stop),
            queue.r_en.eq(pin(target, "tready") & ~stop),
        ]


def standin_model(width: int) -> tuple[str, dict]:
    """(Verilog, manifest) of the stand-in, as `rnic_sim.build.build_model` takes them."""
    text = verilog.convert(StandIn(width), name="rnic", emit_src=False, strip_internal_attrs=True)
    return text, {"data_width": width, "probe_slots": PROBE_SLOTS, "probe_width": PROBE_WIDTH, "clock_hz": 250_000_000}
