"""The control and status registers, the command mailbox and the doorbells behind AXI4-Lite."""

from amaranth import *
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from .. import abi
from ..abi import register
from ..config import MAX_PMTU, Params
from ..memory.axi import AxiLiteSignature
from ..records import Doorbell

__all__ = ["Csr"]

PAGE_BITS = 16  # a doorbell page is 64 KiB
MAX_LOG_WQ = 15  # half of the 16-bit counters
MAX_LOG_CQ = 16
MAILBOX_BYTES = 4 * abi.MAILBOX_WORDS
BAD_CODE = 0xFF  # what the command engine sees of a code that does not fit 8 bits


def timer_scale(clock_hz: int) -> int:
    """Cycles of 4.096 us, rounded, at least 1."""
    return max(1, (clock_hz * 4096 + 500_000_000) // 1_000_000_000)


class Csr(wiring.Component):
    """Registers (`abi.REGISTERS`), mailbox, counters and doorbell pages as one AXI4-Lite subordinate.

    Every access is answered OKAY. Unknown addresses read 0 and ignore writes; address bits 1:0 are ignored. Byte strobes
    count in the RW registers and the mailbox; a doorbell or a command needs all four, otherwise it is ignored.

    A doorbell goes out on its stream before the write is answered: a stream that is not ready holds the write response. A
    doorbell whose id is out of range is dropped with a pulse on ``bad_id``; so is every doorbell of the SRQ page, there are no
    SRQs.

    Commands: a write to CMD_OP sends the code on ``command`` and sets busy until ``result`` (always ready) brings the status;
    a second write while busy is ignored. The mailbox belongs to the engine while busy (writes of the host are ignored):
    ``mailbox_index``, then ``mailbox_value`` two cycles later; ``mailbox_write`` with ``mailbox_data`` writes the word.

    Ports besides: ``doorbell_sq``, ``_rq``, ``_cq``, ``_eq``; ``counter_index`` and, two cycles later, ``counter_value``
    (`debug.counters.Counters`); ``eq_event`` pulses set bits of IRQ_CAUSE; ``irq``, one line per EQ, cause & mask; ``fatal``,
    ``reset_busy`` read in STATUS; ``reset_request`` pulses when software writes CONTROL bit 0 (the top does the reset);
    ``cycle``, cycles since reset; ``timer_scale``; ``busy``, a command is under way; ``watchdog_limit``, ``watchdog_clear`` and
    ``watchdog``, the value of the WATCHDOG register (`debug.watchdog.Watchdog`). While ``reset_busy``, doorbells and commands
    are dropped, and the registers software sets have their reset values.

    Timing: a write takes 3 cycles from its last channel to BVALID plus the wait for the doorbell's stream; a read 5 cycles.
    """

    def __init__(self, p: Params):
        self.p = p
        self.doorbells = {  # page: (stream, number of objects, id bits)
            abi.DB_SQ: ("doorbell_sq", p.num_qps, p.qpn_bits),
            abi.DB_RQ: ("doorbell_rq", p.num_qps, p.qpn_bits),
            abi.DB_CQ: ("doorbell_cq", p.num_cqs, p.cqn_bits),
            abi.DB_EQ: ("doorbell_eq", p.num_eqs, max(1, (p.num_eqs - 1).bit_length())),
        }
        super().__init__({
            "axil": In(AxiLiteSignature(abi.CSR_ADDR_BITS)),
            **{name: Out(stream.Signature(Doorbell(bits))) for name, _, bits in self.doorbells.values()},
            "bad_id": Out(1),
            "command": Out(stream.Signature(8)),
            "result": In(stream.Signature(8)),
            "mailbox_index": In(range(abi.MAILBOX_WORDS)),
            "mailbox_value": Out(32),
            "mailbox_write": In(1),
            "mailbox_data": In(32),
            "counter_index": Out(range(len(abi.COUNTERS))),
            "counter_value": In(32),
            "eq_event": In(p.num_eqs),
            "irq": Out(p.num_eqs),
            "fatal": In(1),
            "reset_busy": In(1),
            "reset_request": Out(1),
            "watchdog_limit": Out(32, init=abi.WATCHDOG_CYCLES),
            "watchdog_clear": Out(1),
            "watchdog": In(32),
            "busy": Out(1),
            "cycle": Out(64),
            "timer_scale": Out(32, init=timer_scale(p.config.clock_hz)),
        })

    def elaborate(self, platform):
        m = Module()
        m.submodules.mailbox_words = self._mailbox = memory.Memory(shape=32, depth=abi.MAILBOX_WORDS, init=[])
        self._busy = Signal()
        self._code = Signal(8)
        self._status = Signal(8)
        self._cause = Signal(self.p.num_eqs)
        self._mask = Signal(self.p.num_eqs)
        m.d.sync += [self.cycle.eq(self.cycle + 1), self.irq.eq(self._cause & self._mask)]
        self._writes(m)
        self._reads(m)

        m.d.comb += [self.busy.eq(self._busy), self.command.payload.eq(self._code), self.result.ready.eq(1)]
        with m.If(self.command.valid & self.command.ready):
            m.d.sync += self.command.valid.eq(0)
        with m.If(self.result.valid):
            m.d.sync += [self._busy.eq(0), self._status.eq(self.result.payload)]
        with m.If(self.reset_busy):
            m.d.sync += [
                self._busy.eq(0), self._status.eq(0), self.command.valid.eq(0), self._cause.eq(0), self._mask.eq(0),
                self.timer_scale.eq(self.timer_scale.init), self.watchdog_limit.eq(self.watchdog_limit.init),
            ]  # fmt: skip
        return m

    # -------------------------------------------------------------------------------------------------- writes
    def _writes(self, m):
        bus = self.axil
        address = Signal(abi.CSR_ADDR_BITS)
        datum = Signal(32)
        strobes = Signal(4)
        have_address, have_data = Signal(), Signal()
        m.d.comb += [bus.awready.eq(~have_address), bus.wready.eq(~have_data), bus.bresp.eq(0)]
        with m.If(bus.awvalid & bus.awready):
            m.d.sync += [address.eq(bus.awaddr), have_address.eq(1)]
        with m.If(bus.wvalid & bus.wready):
            m.d.sync += [datum.eq(bus.wdata), strobes.eq(bus.wstrb), have_data.eq(1)]

        id_now = address[2:PAGE_BITS]
        page = address[PAGE_BITS:]
        full = Signal()
        act = Signal()  # registers and mailbox take the write
        to_low = Signal()
        to_mailbox = Signal()
        to_doorbell = Signal(len(self.doorbells))
        bad_id = Signal()
        doorbell_ready = Signal(len(self.doorbells))
        with m.FSM(name="write"):
            with m.State("Collect"):
                with m.If(have_address & have_data):
                    m.next = "Decode"
            with m.State("Decode"):
                m.d.sync += [
                    full.eq(strobes.all()),
                    to_low.eq((page == 0) & (address[:PAGE_BITS] < abi.MAILBOX_BASE)),
                    to_mailbox.eq(address // MAILBOX_BYTES == abi.MAILBOX_BASE // MAILBOX_BYTES),
                    bad_id.eq(strobes.all() & (page == abi.DB_SRQ >> PAGE_BITS)),
                ]
                for i, (base, (_, count, _)) in enumerate(self.doorbells.items()):
                    with m.If(strobes.all() & (page == base >> PAGE_BITS)):
                        m.d.sync += [to_doorbell[i].eq(id_now < count), bad_id.eq(id_now >= count)]
                m.next = "Act"
            with m.State("Act"):
                m.d.comb += self.bad_id.eq(bad_id)
                m.d.comb += act.eq(~to_doorbell.any())
                with m.If(~to_doorbell.any() | (to_doorbell & doorbell_ready).any() | self.reset_busy):
                    m.d.sync += [to_doorbell.eq(0), bad_id.eq(0), bus.bvalid.eq(1)]
                    m.next = "Respond"
            with m.State("Respond"):
                with m.If(bus.bready):
                    m.d.sync += [bus.bvalid.eq(0), have_address.eq(0), have_data.eq(0)]
                    m.next = "Collect"

        self._registers(m, act & to_low, address, datum, strobes, full)
        self._doorbells(m, id_now, datum, to_doorbell, doorbell_ready)

        # One write port: the host's while no command runs, then the engine's.
        port = self._mailbox.write_port(granularity=8)
        m.d.comb += [
            port.addr.eq(Mux(self._busy, self.mailbox_index, address[2:])),
            port.data.eq(Mux(self._busy, self.mailbox_data, datum)),
            port.en.eq(Mux(self._busy, self.mailbox_write.replicate(4), strobes & (act & to_mailbox).replicate(4))),
        ]

    def _registers(self, m, write, address, datum, strobes, full):
        def merged(old):
            """``old`` with the bytes that are strobed replaced."""
            width = len(old)
            old_bytes, new_bytes = Cat(old, Const(0, 32 - width)) if width < 32 else old, datum
            both = Cat(Mux(strobes[b], new_bytes.word_select(b, 8), old_bytes.word_select(b, 8)) for b in range(4))
            return both[:width]

        strobed = Cat(strobes[b].replicate(8) for b in range(4))
        cause_clear = Signal(self.p.num_eqs)
        m.d.sync += [
            self.reset_request.eq(0),
            self.watchdog_clear.eq(0),
            self._cause.eq(self._cause & ~cause_clear | self.eq_event),
        ]
        with m.If(write):
            with m.Switch(address[2:10]):
                with m.Case(register("CONTROL") // 4):
                    m.d.sync += self.reset_request.eq(datum[0] & strobes[0])
                with m.Case(register("TIMER_SCALE") // 4):
                    m.d.sync += self.timer_scale.eq(merged(self.timer_scale))
                with m.Case(register("IRQ_CAUSE") // 4):
                    m.d.comb += cause_clear.eq((datum & strobed)[: self.p.num_eqs])
                with m.Case(register("IRQ_MASK") // 4):
                    m.d.sync += self._mask.eq(merged(self._mask))
                with m.Case(register("WATCHDOG_LIMIT") // 4):
                    m.d.sync += self.watchdog_limit.eq(merged(self.watchdog_limit))
                with m.Case(register("WATCHDOG") // 4):
                    m.d.sync += self.watchdog_clear.eq(datum[31] & strobes[3])
                with m.Case(register("CMD_OP") // 4):
                    with m.If(full & ~self._busy):
                        m.d.sync += [
                            self._code.eq(Mux(datum[8:].any(), BAD_CODE, datum[:8])),
                            self._busy.eq(1),
                            self.command.valid.eq(1),
                        ]

    def _doorbells(self, m, number, datum, chosen, ready):
        for i, (name, _, _) in enumerate(self.doorbells.values()):
            port = getattr(self, name)
            m.d.comb += [
                port.valid.eq(chosen[i] & ~self.reset_busy),
                port.payload.id.eq(number),
                port.payload.counter.eq(datum[:24]),
                port.payload.arm.eq(datum[30:]),
                ready[i].eq(port.ready),
            ]

    # --------------------------------------------------------------------------------------------------- reads
    def _reads(self, m):
        p, bus = self.p, self.axil
        constants = {
            "MAGIC": abi.MAGIC, "ABI_VERSION": abi.ABI_VERSION, "CLOCK_HZ": p.config.clock_hz, "DATA_WIDTH": p.data_width,
            "NUM_QPS": p.num_qps, "NUM_MRS": p.num_mrs, "NUM_CQS": p.num_cqs, "NUM_EQS": p.num_eqs, "NUM_GIDS": p.num_gids,
            "NUM_PKEYS": p.num_pkeys, "MAX_SGE": p.max_sge, "MAX_RD_ATOMIC": p.max_rd_atomic,
            "MAX_LOG_RING": MAX_LOG_CQ << 8 | MAX_LOG_WQ, "MAX_PMTU": (MAX_PMTU // 256).bit_length(),
            "FEATURES": int(p.probe) | int(p.rx_drop) << 1, "SQ_OUTSTANDING": p.sq_outstanding,
        }  # fmt: skip
        cycle_high = Signal(32)
        values = constants | {
            "CONTROL": 0, "STATUS": Cat(self.fatal, self.reset_busy), "TIMER_SCALE": self.timer_scale, "IRQ_CAUSE": self._cause,
            "IRQ_MASK": self._mask, "CYCLE_LO": self.cycle[:32], "CYCLE_HI": cycle_high, "CMD_OP": self._code,
            "WATCHDOG_LIMIT": self.watchdog_limit, "WATCHDOG": self.watchdog,
            "CMD_STATUS": Cat(self._status, Const(0, 23), self._busy),
        }  # fmt: skip

        address = Signal(abi.CSR_ADDR_BITS)
        low_value = Signal(32)
        mailbox_value = Signal(32)
        in_low, in_mailbox, in_counters = Signal(), Signal(), Signal()
        host_port, engine_port = self._mailbox.read_port(), self._mailbox.read_port()
        counter = Signal(range(abi.MAILBOX_WORDS))
        m.d.comb += [
            bus.rresp.eq(0),
            host_port.addr.eq(address[2:]),
            engine_port.addr.eq(self.mailbox_index),
            counter.eq(address[2:]),
            self.counter_index.eq(Mux(counter < len(abi.COUNTERS), counter, 0)),
        ]
        m.d.sync += [mailbox_value.eq(host_port.data), self.mailbox_value.eq(engine_port.data)]
        m.d.sync += low_value.eq(0)
        with m.Switch(address[2:10]):
            for reg in abi.REGISTERS:
                with m.Case(reg.offset // 4):
                    m.d.sync += low_value.eq(values[reg.name])
        area = address // MAILBOX_BYTES
        m.d.sync += [
            in_low.eq(address < abi.MAILBOX_BASE),
            in_mailbox.eq(area == abi.MAILBOX_BASE // MAILBOX_BYTES),
            in_counters.eq((area == abi.COUNTER_BASE // MAILBOX_BYTES) & (counter < len(abi.COUNTERS))),
        ]
        with m.FSM(name="read"):
            with m.State("Idle"):
                m.d.comb += bus.arready.eq(1)
                with m.If(bus.arvalid):
                    m.d.sync += address.eq(bus.araddr)
                    m.next = "Address"
            with m.State("Address"):
                with m.If(address[2:] == register("CYCLE_LO") // 4):
                    m.d.sync += cycle_high.eq(self.cycle[32:])
                m.next = "Latch"
            with m.State("Latch"):
                # Register values of the cycle before have been caught; memories need one more.
                m.next = "Memory"
                with m.If(in_low):
                    m.d.sync += [bus.rdata.eq(low_value), bus.rvalid.eq(1)]
                    m.next = "Respond"
            with m.State("Memory"):
                m.d.sync += bus.rdata.eq(0)
                with m.If(in_mailbox):
                    m.d.sync += bus.rdata.eq(mailbox_value)
                with m.Elif(in_counters):
                    m.d.sync += bus.rdata.eq(self.counter_value)
                m.d.sync += bus.rvalid.eq(1)
                m.next = "Respond"
            with m.State("Respond"):
                with m.If(bus.rready):
                    m.d.sync += bus.rvalid.eq(0)
                    m.next = "Idle"
