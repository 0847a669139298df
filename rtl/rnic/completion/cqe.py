"""Completion queue writer."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import CQ_CONSUMER, CQ_CTX, CQE, CqeFlags, CtxTable, EventType, WcStatus
from ..abi.queues import CQE_BYTES
from ..config import Params
from ..memory.ordered import OrderedXlate
from ..qp.table import ContextTable
from ..records import (
    CqeRequest,
    CtxBus,
    DmaWriteSignature,
    Doorbell,
    EventRequest,
    Probe,
    ProbeEvent,
    XlateSignature,
    XlateStatus,
)
from ..stream.check import watch
from ..stream.fifo import StreamFifo

__all__ = ["CqeWriter"]

NO_EQ = 255  # event queue number of a CQ without one
ARM_NEXT, ARM_SOLICITED = 1, 2  # doorbell arm codes

TAG_BITS = 3
CQE_LOG_BYTES = CQE_BYTES.bit_length() - 1


class _Item(data.StructLayout):
    """A CQE on its way to the ring."""

    def __init__(self, p: Params):
        super().__init__({"cqn": p.cqn_bits, "cqe": 8 * CQE_BYTES})


class _Written(data.StructLayout):
    """What is remembered of a CQE until its write response."""

    def __init__(self, p: Params):
        super().__init__({"cqn": p.cqn_bits, "qpn": 24, "index": 16, "opcode": 8, "status": 8, "solicited": 1})


class _Visible(data.StructLayout):
    """A CQE that is in memory; ``solicited``: a receive with SE, or an error (R-CQ-5)."""

    def __init__(self, p: Params):
        super().__init__({"cqn": p.cqn_bits, "solicited": 1})


class CqeWriter(wiring.Component):
    """Writes CQEs to their rings in host memory.

    A CQE goes to entry ``producer`` mod size of the ring (translation table entry ``tpt_cq_base + cqn``), whole, in one
    write; its phase bit is 1 in the first round and toggles each round (R-CQ-9); its stamp is ``cycle``. ``producer``
    lives in CqCtx, the consumer counter comes by doorbell.

    When the ring is full (producer - consumer == size) nothing is overwritten: ``overflow`` pulses, the CQ is put in error
    (``valid`` 0) and named on ``cq_error`` (R-CQ-6). A CQE that cannot be translated or written does the same, without
    ``overflow``. A CQ that is not valid swallows its CQEs. One CQ is named once, though CQEs under way may fail together; there
    is room for all names.

    A doorbell with an arm code arms the CQ (R-CQ-5): the next CQE (1), or the next that is solicited or an error (2), makes one
    event for the CQ's event queue when it is in memory, and disarms. A CQE whose write was answered after the arming always
    does; one that became visible earlier is found by a poll after the arming.

    Timing: one CQE per 4 cycles; translations and writes of several CQEs are under way, in order, so the CQEs of a CQ become
    visible in order. No more writes are under way than there is room for their responses.

    Members: ``cqe``, ``doorbell``, ``ctx``, ``cycle`` (64) in; ``xlate``, ``write`` clients; ``cq_error`` (CQN) stream;
    ``overflow`` pulse; ``event`` EventRequest stream; ``mark`` pulse, answered by ``marked`` when no CQE taken in before is under
    way; ``probe_doorbell`` (CQ_DOORBELL), ``probe`` (CQE_WRITTEN).
    """

    tag_bits = TAG_BITS

    def __init__(self, p: Params):
        self.p = p
        self.under_way = 8 + 2 * p.desc_depth  # CQEs between the context and their write response
        super().__init__({
            "cqe": In(stream.Signature(CqeRequest(p))),
            "doorbell": In(stream.Signature(Doorbell(p.cqn_bits))),
            "ctx": In(CtxBus(p)),
            "cycle": In(64),
            "xlate": Out(XlateSignature(p, TAG_BITS)),
            "write": Out(DmaWriteSignature(p)),
            "cq_error": Out(stream.Signature(p.cqn_bits)),
            "overflow": Out(1),
            "event": Out(stream.Signature(EventRequest(p))),
            "mark": In(1),
            "marked": Out(1),
            "probe_doorbell": Out(Probe()),
            "probe": Out(Probe()),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.cqs = cqs = ContextTable(p, CtxTable.CQ, CQ_CTX, p.num_cqs, read_ports=2, engine_writes=True,
                                              exclusive=True)  # fmt: skip
        m.submodules.consumers = consumers = ContextTable(p, CtxTable.CQ_CONSUMER, CQ_CONSUMER, p.num_cqs, read_ports=2,
                                                          engine_writes=True)  # fmt: skip
        m.submodules.translate = translate = OrderedXlate(p, TAG_BITS, _Item(p))
        m.submodules.failures = failures = StreamFifo(p.cqn_bits, self.under_way)
        m.submodules.errors = errors = StreamFifo(p.cqn_bits, p.num_cqs)
        wiring.connect(m, translate.xlate, wiring.flipped(self.xlate))
        wiring.connect(m, errors.o, wiring.flipped(self.cq_error))

        m.submodules.visible = self._visible = StreamFifo(_Visible(p), self.under_way)
        self._returned = Signal(2)  # CQEs that ended in this cycle
        self._answered = Signal()  # a translated CQE went to the bus, or failed
        self._credits = Signal(range(self.under_way + 1), init=self.under_way)
        self._disarm = Signal()
        self._doorbells(m, consumers)
        self._notify(m, cqs, consumers)
        self._choose(m, cqs, consumers, translate, failures, errors)
        self._write(m, translate.response, failures)
        watch(m, "write_data", self.write.data)
        watch(m, "write_command", self.write.command)
        watch(m, "cq_error", self.cq_error)
        watch(m, "event", self.event)
        return m

    def _doorbells(self, m, consumers):
        m.d.comb += [
            self.doorbell.ready.eq(~self._disarm),
            consumers.write_en.eq(self.doorbell.valid | self._disarm),
            consumers.write_data.value.eq(self.doorbell.p.counter),
            self.probe_doorbell.valid.eq(self.doorbell.valid & self.doorbell.ready),
            self.probe_doorbell.event.eq(ProbeEvent.CQ_DOORBELL),
            self.probe_doorbell.index.eq(self.doorbell.p.counter[:16]),
            self.probe_doorbell.length.eq(self.doorbell.p.counter),
        ]
        with m.If(self._disarm):
            m.d.comb += [consumers.write_index.eq(self._visible.o.p.cqn), consumers.write_words.eq(0b10)]
        with m.Else():
            m.d.comb += [
                consumers.write_index.eq(self.doorbell.p.id),
                consumers.write_words.eq(Cat(1, self.doorbell.p.arm != 0)),
                consumers.write_data.arm.eq(self.doorbell.p.arm),
            ]

    def _notify(self, m, cqs, consumers):
        """Visible CQEs, oldest first: an armed CQ makes its event (R-CQ-5)."""
        visible = self._visible.o
        arm = consumers.read(1)[1].arm
        eqn = cqs.read(1)[1].eqn
        fires = Signal()
        m.d.comb += [
            cqs.read(1)[0].eq(visible.p.cqn),
            consumers.read(1)[0].eq(visible.p.cqn),
            self.event.p.type.eq(EventType.COMPLETION),
        ]
        with m.FSM(name="notify"):
            with m.State("Idle"):
                with m.If(visible.valid & ~self.event.valid):
                    m.next = "Read"
            with m.State("Read"):
                m.next = "Judge"
            with m.State("Judge"):
                m.d.sync += fires.eq(
                    (eqn != NO_EQ) & ((arm == ARM_NEXT) | ((arm == ARM_SOLICITED) & visible.p.solicited)))  # R-CQ-5
                m.next = "Decide"
            with m.State("Decide"):
                # An arming between the read and now gets the event of this CQE, which was visible before it.
                m.d.comb += [visible.ready.eq(1), self._disarm.eq(fires)]
                m.d.sync += [self.event.valid.eq(fires), self.event.p.eqn.eq(eqn), self.event.p.id.eq(visible.p.cqn)]
                m.next = "Idle"
        with m.If(self.event.valid & self.event.ready):
            m.d.sync += self.event.valid.eq(0)

    def _choose(self, m, cqs, consumers, translate, failures, errors):
        """Reads the CQ's context, gives the CQE its place, or puts the CQ in error. One CQE or failure at a time."""
        p = self.p
        cqn = Signal(p.cqn_bits)  # being worked on
        offered_cqn = Signal(p.cqn_bits)
        failing = Signal()  # a failed CQE's CQ goes to error
        start = Signal()
        working = Signal()
        asks = Signal()  # a command writes to a CQ: the engine comes to rest and lets it
        credits = self._credits
        spent = self._spent = Signal(name="spent")
        used = Signal(24)  # CQEs in the ring
        mask, size = Signal(24), Signal(24)  # ring size - 1, ring size
        full = Signal()
        is_cq, hold = Signal(), Signal()
        context, consumer = cqs.read(0)[1], consumers.read(0)[1]
        write, bus = cqs.write_data, self.ctx.payload

        m.d.comb += [
            offered_cqn.eq(Mux(failures.o.valid, failures.o.payload, self.cqe.p.cqn)),
            start.eq(~working & ~asks & (failures.o.valid | (self.cqe.valid & (credits != 0)))),
            cqs.read(0)[0].eq(Mux(working, cqn, offered_cqn)),
            consumers.read(0)[0].eq(Mux(working, cqn, offered_cqn)),
            # A command's write must not fall between the read and the write of this engine.
            is_cq.eq(bus.table == CtxTable.CQ),
            hold.eq(is_cq & (working | ~asks)),
            self.ctx.ready.eq(~hold & consumers.ctx.ready),
            cqs.ctx.valid.eq(self.ctx.valid & ~hold),
            consumers.ctx.valid.eq(self.ctx.valid),
            cqs.ctx.payload.eq(bus),
            consumers.ctx.payload.eq(bus),
            cqs.write_index.eq(cqn),
            write.valid.eq(0),
            write.log_size.eq(context.log_size),
            write.eqn.eq(context.eqn),
            write.producer.eq(context.producer + 1),
            errors.i.payload.eq(cqn),
            full.eq((used & ~mask).any()),  # R-CQ-6
        ]
        m.d.sync += [
            asks.eq(self.ctx.valid & is_cq & ~self.ctx.ready),
            credits.eq(credits - spent + self._returned),
            Assert(credits + self._returned <= self.under_way + spent, Format("CQE writer: {} credits", credits)),
        ]

        # The CQE as it is asked for; held while the translation block does not take it.
        request, cqe = self.cqe.p, Signal(CQE.layout)
        asked = translate.request
        held = Signal(asked.payload.shape())
        m.d.comb += [
            *(cqe[name].eq(request[name]) for name in
              ("byte_len", "imm", "qpn", "flags", "src_qp", "vendor_err", "wqe_counter", "opcode", "status")),
            cqe.stamp.eq(self.cycle),
            cqe.phase.eq(~(context.producer & size).any()),  # R-CQ-9: the bit above the index, inverted
            asked.payload.eq(held),
        ]
        asked_valid = Signal()
        m.d.comb += asked.valid.eq(asked_valid)
        with m.If(asked.ready):
            m.d.sync += asked_valid.eq(0)
        m.d.sync += self.overflow.eq(0)
        with m.FSM(name="cqe_writer") as fsm:
            m.d.comb += working.eq(~fsm.ongoing("Idle"))
            with m.State("Idle"):
                m.d.sync += [cqn.eq(offered_cqn), failing.eq(failures.o.valid)]
                with m.If(start):
                    m.d.comb += failures.o.ready.eq(1)
                    m.next = "Read"
            with m.State("Read"):
                m.next = "Measure"
            with m.State("Measure"):
                m.d.sync += [used.eq(context.producer - consumer.value), mask.eq((1 << context.log_size) - 1),  # R-CQ-6
                             size.eq(1 << context.log_size)]
                m.next = "Decide"
            with m.State("Decide"):
                with m.If(~asked_valid):
                    m.d.sync += [
                        held.ring.eq(1),
                        held.key.eq(p.tpt_cq_base + cqn),
                        held.pd.eq(0),
                        held.rights.eq(0),
                        held.va.eq((context.producer & mask) << CQE_LOG_BYTES),
                        held.length.eq(CQE_BYTES),
                        held.meta.cqn.eq(cqn),
                        held.meta.cqe.eq(cqe),
                    ]
                with m.If(~context.valid):
                    m.d.comb += self.cqe.ready.eq(~failing)
                    m.next = "Idle"
                with m.Elif(failing | full):
                    # R-CQ-6. Nothing in memory changes.
                    m.d.comb += [self.cqe.ready.eq(~failing), cqs.write_en.eq(1), cqs.write_words.eq(1)]
                    m.d.sync += self.overflow.eq(~failing)
                    m.next = "Error"
                with m.Elif(~asked_valid):  # else translation has not even taken the one before
                    m.d.comb += [self.cqe.ready.eq(1), spent.eq(1), cqs.write_en.eq(1), cqs.write_words.eq(2)]
                    m.d.sync += asked_valid.eq(1)
                    m.next = "Idle"
            with m.State("Error"):
                m.d.comb += errors.i.valid.eq(1)
                with m.If(errors.i.ready):
                    m.next = "Idle"

    def _write(self, m, answer, failures):
        """Writes a translated CQE; follows it to its write response."""
        p = self.p
        m.submodules.pending = pending = StreamFifo(_Written(p), self.under_way)
        beats = max(1, CQE_BYTES // p.lanes)
        width = 8 * CQE_BYTES // beats
        cqe = Signal(CQE.layout)
        command, beat, done = self.write.command, self.write.data, self.write.done
        usable, looked = Signal(), Signal()  # registers: verdict on the answer, and that there is one
        commanded = Signal()  # the command has been taken
        sent = Signal(range(beats + 1))  # beats taken
        finish = Signal()
        bad_answer = Signal()
        bad_write = Signal()
        responded = Signal()
        m.d.comb += [
            cqe.eq(answer.p.meta.cqe),
            command.valid.eq(looked & usable & ~commanded),
            command.p.address.eq(answer.p.address),
            command.p.length.eq(CQE_BYTES),
            beat.valid.eq(looked & usable & (sent != beats)),
            beat.p.data.eq(answer.p.meta.cqe.word_select(sent, width)),
            beat.p.keep.eq((1 << width // 8) - 1),
            beat.p.last.eq(sent == beats - 1),
            finish.eq((commanded | (command.valid & command.ready))
                      & ((sent == beats) | (beat.valid & beat.ready & beat.p.last))),
            # The memory of `pending` is at most 3 cycles behind a response.
            done.ready.eq(pending.o.valid & self._visible.i.ready),
            responded.eq(done.valid & done.ready),
            bad_write.eq(responded & done.payload),
            bad_answer.eq(looked & ~usable & ~bad_write),
            answer.ready.eq(finish | bad_answer),
            self._answered.eq(answer.ready),
            self.write.accepted.ready.eq(1),
            self._visible.i.valid.eq(responded & ~done.payload),
            self._visible.i.p.cqn.eq(pending.o.p.cqn),
            self._visible.i.p.solicited.eq(pending.o.p.solicited),
            pending.o.ready.eq(done.valid & self._visible.i.ready),
            failures.i.valid.eq(bad_write | bad_answer),
            failures.i.payload.eq(Mux(bad_write, pending.o.p.cqn, answer.p.meta.cqn)),
            self.probe.valid.eq(responded & ~done.payload),
            self.probe.event.eq(ProbeEvent.CQE_WRITTEN),
            self.probe.qpn.eq(pending.o.p.qpn),
            self.probe.index.eq(pending.o.p.index),
            self.probe.opcode.eq(pending.o.p.opcode),
            self.probe.length.eq(pending.o.p.status),
        ]
        m.d.sync += [
            looked.eq(answer.valid & ~answer.ready),
            # An entry whose physical address is no multiple of its size is treated as unwritable.
            usable.eq((answer.p.status == XlateStatus.OK) & (answer.p.address[:CQE_LOG_BYTES] == 0)),
            self._returned.eq(responded + bad_answer),
            pending.i.valid.eq(finish),
            pending.i.p.cqn.eq(answer.p.meta.cqn),
            pending.i.p.qpn.eq(cqe.qpn),
            pending.i.p.index.eq(cqe.wqe_counter),
            pending.i.p.opcode.eq(cqe.opcode),
            pending.i.p.status.eq(cqe.status),
            pending.i.p.solicited.eq(((cqe.flags & CqeFlags.SOLICITED.value) != 0) | (cqe.status != WcStatus.SUCCESS)),
        ]
        with m.If(answer.ready):
            m.d.sync += [commanded.eq(0), sent.eq(0)]
        with m.Else():
            with m.If(command.valid & command.ready):
                m.d.sync += commanded.eq(1)
            with m.If(beat.valid & beat.ready):
                m.d.sync += sent.eq(sent + 1)
        self._marks(m, pending, responded)
        m.d.sync += [
            Assert(~failures.i.valid | failures.i.ready, "CQE writer: failures overflow"),
            Assert(~pending.i.valid | pending.i.ready, "CQE writer: writes overflow"),
        ]

    def _marks(self, m, pending, responded):
        """Counts out the CQEs that were under way at the mark: first until they are translated, then until they are written."""
        translating = Signal.like(self._credits, init=0)  # CQEs that have a place and are not translated
        left = Signal.like(self._credits, init=0)
        m.d.sync += translating.eq(translating + self._spent - self._answered)
        with m.FSM(name="mark"):
            with m.State("Idle"):
                m.d.sync += left.eq(translating - self._answered)
                with m.If(self.mark):
                    m.next = "Translating"
            with m.State("Translating"):
                m.d.sync += left.eq(left - self._answered)
                with m.If(left == 0):
                    m.d.sync += left.eq(pending.level + (pending.i.valid & pending.i.ready) - responded)
                    m.next = "Writing"
            with m.State("Writing"):
                m.d.sync += left.eq(left - responded)
                with m.If(left == 0):
                    m.d.comb += self.marked.eq(1)
                    m.next = "Idle"
