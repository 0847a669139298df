"""Event queue writer."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import EQ_CTX, EQE, EQE_BYTES, CtxTable
from ..config import Params
from ..qp.table import ContextTable
from ..records import (
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

__all__ = ["EqWriter"]

EQE_LOG_BYTES = EQE_BYTES.bit_length() - 1
ARM_BIT = 1  # of the doorbell's arm field: bit 31 of the datum
EVENT_DEPTH = 4


class EqWriter(wiring.Component):
    """Writes EQEs to their rings in host memory and raises the interrupts.

    An EQE goes to entry ``producer`` mod size of the ring (translation table entry ``tpt_eq_base + eqn``), whole, in one write;
    its phase bit is 1 in the first round and toggles each round; its stamp is ``cycle``. The interrupt of an EQ pulses
    (``eq_event``) once for each arming, by a doorbell with bit 31: when its next EQE is in memory, or at once when software has
    not taken all there are.

    An EQE that finds its ring full, or that cannot be written, is lost and sets ``fatal``, which stays until reset; nothing is
    overwritten. Events of an EQ that does not exist vanish.

    Timing: one thing at a time: a doorbell 4 cycles, an EQE 8 cycles plus its translation and its write response. EQEs of an EQ
    become visible in order. ``event`` and ``doorbell`` wait meanwhile; nothing here waits for anything but the host bus.

    Members: ``event`` EventRequest, ``doorbell``, ``ctx``, ``cycle`` (64) in; ``xlate``, ``write`` clients; ``eq_event`` pulses,
    one bit an EQ; ``fatal``; ``busy``, ``ended``, pulse after each event or doorbell; ``probe`` (EQE_WRITTEN).
    """

    tag_bits = 1
    holds = 2 * EVENT_DEPTH + 2  # events and doorbells inside at most

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "event": In(stream.Signature(EventRequest(p))),
            "doorbell": In(stream.Signature(Doorbell(p.eqn_bits))),
            "ctx": In(CtxBus(p)),
            "cycle": In(64),
            "xlate": Out(XlateSignature(p, self.tag_bits)),
            "write": Out(DmaWriteSignature(p)),
            "eq_event": Out(p.num_eqs),
            "fatal": Out(1),
            "busy": Out(1),
            "ended": Out(1),
            "probe": Out(Probe()),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.eqs = eqs = ContextTable(p, CtxTable.EQ, EQ_CTX, p.num_eqs, engine_writes=True)
        m.submodules.events = events = StreamFifo(EventRequest(p), EVENT_DEPTH)
        m.submodules.doorbells = doorbells = StreamFifo(Doorbell(p.eqn_bits), EVENT_DEPTH)
        wiring.connect(m, wiring.flipped(self.event), events.i)
        wiring.connect(m, wiring.flipped(self.doorbell), doorbells.i)

        request = Signal(EventRequest(p))
        rung = Signal(Doorbell(p.eqn_bits))
        is_doorbell = Signal()
        eqn = Signal(p.eqn_bits)
        context = Signal(EQ_CTX.layout)
        used = Signal(24)  # EQEs in the ring that software has not taken
        mask, size = Signal(24), Signal(24)  # ring size - 1, ring size
        working = Signal()
        idle = Signal()
        was_idle = Signal(init=1)
        fire = Signal()
        eqe = Signal(EQE.layout)
        offset = Signal(24)
        write = eqs.write_data
        bus = self.ctx.payload
        conflict = Signal()
        m.d.comb += [
            # A command's write must not fall between the read and the write of this engine.
            conflict.eq((bus.table == CtxTable.EQ) & working & (bus.index[: p.eqn_bits] == eqn)),
            self.ctx.ready.eq(~conflict & eqs.ctx.ready),
            eqs.ctx.valid.eq(self.ctx.valid & ~conflict),
            eqs.ctx.payload.eq(bus),
            eqs.read(0)[0].eq(eqn),
            eqs.write_index.eq(eqn),
            write.eq(context),
            self.busy.eq(~idle | events.o.valid | doorbells.o.valid),
            self.ended.eq(idle & ~was_idle),
            self.eq_event.eq(Mux(fire, 1 << eqn, 0)),
        ]
        m.d.sync += [self.probe.valid.eq(0), was_idle.eq(idle)]
        with m.FSM(name="eq_writer") as fsm:
            m.d.comb += idle.eq(fsm.ongoing("Idle"))
            m.d.comb += working.eq(fsm.ongoing("Latch") | fsm.ongoing("Read") | fsm.ongoing("Measure") | fsm.ongoing("Decide")
                                   | fsm.ongoing("Place") | fsm.ongoing("Again") | fsm.ongoing("Visible"))  # fmt: skip
            with m.State("Idle"):
                m.d.sync += [
                    is_doorbell.eq(doorbells.o.valid),
                    rung.eq(doorbells.o.payload),
                    request.eq(events.o.payload),
                    eqn.eq(Mux(doorbells.o.valid, doorbells.o.p.id, events.o.p.eqn)),
                ]
                m.d.comb += [doorbells.o.ready.eq(1), events.o.ready.eq(~doorbells.o.valid)]
                with m.If(doorbells.o.valid | events.o.valid):
                    m.next = "Latch"
            with m.State("Latch"):
                m.next = "Read"
            with m.State("Read"):
                m.next = "Measure"
            with m.State("Measure"):
                now = eqs.read(0)[1]
                m.d.sync += [
                    context.eq(now),
                    used.eq(now.producer - Mux(is_doorbell, rung.counter, now.consumer)),
                    mask.eq((1 << now.log_size) - 1),
                    size.eq(1 << now.log_size),
                ]
                m.next = "Decide"
            with m.State("Decide"):
                m.next = "Idle"
                with m.If(is_doorbell):
                    m.d.comb += [
                        eqs.write_en.eq(context.valid),
                        eqs.write_words.eq(0b100),
                        fire.eq(context.valid & rung.arm[ARM_BIT] & (used != 0)),
                        write.consumer.eq(rung.counter),
                        write.armed.eq((context.armed | rung.arm[ARM_BIT]) & ~fire),
                    ]
                with m.Elif(context.valid & (used & ~mask).any()):
                    m.d.sync += self.fatal.eq(1)  # the ring is full
                with m.Elif(context.valid):
                    m.next = "Ask"
                m.d.sync += [
                    offset.eq((context.producer & mask) << EQE_LOG_BYTES),
                    eqe.type.eq(request.type),
                    eqe.id.eq(request.id),
                    eqe.stamp.eq(self.cycle),
                    eqe.phase.eq(~(context.producer & size).any()),  # the bit above the index, inverted
                ]
            with m.State("Ask"):
                m.d.comb += self.xlate.request.valid.eq(1)
                with m.If(self.xlate.request.ready):
                    m.next = "Answer"
            self._elaborate_write(m, eqe)
            # In memory. The context is read again: a command may have taken the EQ away meanwhile.
            with m.State("Again"):
                m.next = "Place"
            with m.State("Place"):
                m.next = "Visible"
            with m.State("Visible"):
                now = eqs.read(0)[1]
                m.d.comb += [
                    eqs.write_en.eq(now.valid),
                    eqs.write_words.eq(0b110),
                    write.eq(now),
                    write.producer.eq(now.producer + 1),
                    write.armed.eq(0),
                    fire.eq(now.valid & now.armed),
                ]
                m.d.sync += self.probe.valid.eq(1)
                m.next = "Idle"
        m.d.comb += [
            self.xlate.request.p.ring.eq(1),
            self.xlate.request.p.key.eq(p.tpt_eq_base + eqn),
            self.xlate.request.p.va.eq(offset),
            self.xlate.request.p.length.eq(EQE_BYTES),
            self.probe.event.eq(ProbeEvent.EQE_WRITTEN),
            self.probe.qpn.eq(request.id),
            self.probe.index.eq(eqn),
            self.probe.opcode.eq(request.type),
        ]
        watch(m, "write_command", self.write.command)
        watch(m, "write_data", self.write.data)
        watch(m, "request", self.xlate.request)
        return m

    def _elaborate_write(self, m, eqe):
        """States from the translation's answer to the write response."""
        p = self.p
        beats = max(1, EQE_BYTES // p.lanes)
        width = 8 * EQE_BYTES // beats
        answer, command, beat = self.xlate.response, self.write.command, self.write.data
        address = Signal(64)
        sent = Signal(range(beats + 1))
        commanded = Signal()
        m.d.comb += [
            command.p.address.eq(address),
            command.p.length.eq(EQE_BYTES),
            beat.p.data.eq(eqe.as_value().word_select(sent, width)),
            beat.p.keep.eq((1 << width // 8) - 1),
            beat.p.last.eq(sent == beats - 1),
            self.write.accepted.ready.eq(1),
        ]
        with m.State("Answer"):
            m.d.comb += answer.ready.eq(1)
            m.d.sync += [address.eq(answer.p.address), sent.eq(0), commanded.eq(0)]
            with m.If(answer.valid):
                m.next = "Write"
                # An entry whose physical address is no multiple of its size is treated as unwritable.
                with m.If((answer.p.status != XlateStatus.OK) | (answer.p.address[:EQE_LOG_BYTES] != 0)):
                    m.d.sync += self.fatal.eq(1)
                    m.next = "Idle"
        with m.State("Write"):
            m.d.comb += [command.valid.eq(~commanded), beat.valid.eq(sent != beats)]
            with m.If(command.ready):
                m.d.sync += commanded.eq(1)
            with m.If(beat.valid & beat.ready):
                m.d.sync += sent.eq(sent + 1)
            with m.If(commanded & (sent == beats)):
                m.next = "Done"
        with m.State("Done"):
            m.d.comb += self.write.done.ready.eq(1)
            with m.If(self.write.done.valid):
                m.next = "Again"
                with m.If(self.write.done.payload):
                    m.d.sync += self.fatal.eq(1)
                    m.next = "Idle"
