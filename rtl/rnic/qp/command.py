"""The command engine: runs the micro-programs of the commands and of QP errors."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import MAILBOX_WORDS, Access, Attr, CmdStatus, CtxTable, EventType, QpState, QpType
from ..config import Params
from ..records import CtxBus, EventRequest, Probe, ProbeEvent, QpError, QpEvent
from ..stream.fifo import StreamFifo
from .micro_op import ATTR_BITS, NO_EQ, Action, Guard, Kind, Op, Register, Source, Test, micro_op_layout
from .microcode import (
    BAD_COMMAND_ENTRY,
    BROKEN_CQ_ENTRY,
    ERROR_ENTRY,
    RESET_MTU,
    SEARCH_ENTRY,
    programs,
    transition_rom,
)
from .state import ObjectTable, QpImage
from .sweep import Sweep

__all__ = ["CommandEngine"]


class CommandEngine(wiring.Component):
    """Executes commands from the mailbox, and moves QPs to ERR when an engine asks; the only writer of QP state.

    Ports: ``command`` a code, ``result`` its status when it has ended; ``mailbox_index`` / ``mailbox_value`` (two cycles later),
    ``mailbox_write`` / ``mailbox_data`` as of `host.csr.Csr`; ``qp_error`` (a QP that does not exist or does not run is left
    alone); ``cq_error``, a CQ that is in error; ``ctx`` the context bus; ``sq_kick`` when a QP has gone to RTS or ERR,
    ``rq_flush`` to ERR; ``event`` async events; ``fence_start`` pulses with ``fence_qpn``, ``fence_done`` answers (`qp.fence`);
    ``sweeping`` while the tables are cleared after a reset; ``probe`` COMMAND (opcode the code, length the status),
    ``probe_error`` QP_ERROR, both when the new state is in force.

    A command that fails has written nothing anywhere (R-QP-1). Commands and errors run one after the other, errors first. A CQ
    in error is marked, then all QPs are searched for those that use it, one between two commands, and put in ERR (R-CQ-6).
    ``qp_error`` and ``cq_error`` never wait for a command: an engine that reports may be the one a command waits for.

    Timing: 8 cycles per micro-operation, 2 when its guard does not hold: MODIFY_QP 200 to 550 cycles, CREATE_QP 1100, plus what
    the context bus makes it wait (each word of a translation entry about 20). ``ctx``, ``sq_kick``, ``rq_flush`` may stall.
    """

    def __init__(self, p: Params):
        self.p = p
        self.objects = ObjectTable(p)
        self.image = QpImage(p)
        super().__init__({
            "command": In(stream.Signature(8)),
            "result": Out(stream.Signature(8)),
            "mailbox_index": Out(range(MAILBOX_WORDS)),
            "mailbox_value": In(32),
            "mailbox_write": Out(1),
            "mailbox_data": Out(32),
            "qp_error": In(stream.Signature(QpError(p))),
            "cq_error": In(stream.Signature(p.cqn_bits)),
            "event": Out(stream.Signature(EventRequest(p))),
            "fence_start": Out(1),
            "fence_qpn": Out(p.qpn_bits),
            "fence_done": In(1),
            "sweeping": Out(1),
            "ctx": Out(CtxBus(p)),
            "sq_kick": Out(stream.Signature(QpEvent(p))),
            "rq_flush": Out(stream.Signature(QpEvent(p))),
            "probe": Out(Probe()),
            "probe_error": Out(Probe()),
        })

    def elaborate(self, platform):
        m = Module()
        p = self.p
        m.submodules.objects = self.objects
        m.submodules.image = self.image
        # An engine reports a QP once in its life, a CQ is reported once: there is always room.
        m.submodules.qp_errors = self._qp_errors = StreamFifo(QpError(p), 2 * p.num_qps)
        m.submodules.cq_errors = self._cq_errors = StreamFifo(p.cqn_bits, p.num_cqs)
        m.submodules.sweep = self._sweep = Sweep(p)
        wiring.connect(m, wiring.flipped(self.qp_error), self._qp_errors.i)
        wiring.connect(m, wiring.flipped(self.cq_error), self._cq_errors.i)
        ops = programs(p)
        m.submodules.rom = rom = memory.Memory(shape=micro_op_layout(), depth=len(ops), init=[op.const() for op in ops])
        m.submodules.transitions = transitions = memory.Memory(shape=2 * ATTR_BITS + 1, depth=256, init=transition_rom())
        self._rom = rom.read_port()
        self._rule_port = transitions.read_port()

        self._op = Signal(micro_op_layout())
        self._value = Signal(32)  # from the source
        self._rotated = Signal(32)
        self._field = Signal(32)
        self._outside = Signal()
        self._execute = Signal()
        self._code = Signal(8)
        self._is_error = Signal()  # the program under way is that of a QP error, a CQ error or of the search
        self._error_id = Signal(max(p.qpn_bits, p.cqn_bits))
        self._error_event = Signal(EventType)
        self._search_qpn = Signal(p.qpn_bits)  # where the search for QPs of CQs in error is
        self._searching = Signal()
        # Registers of the micro-programs.
        self._index = Signal(32)
        self._attrs = Signal(32)
        self._state, self._new_state = Signal(3), Signal(3)
        self._type = Signal(2)
        self._mtu = Signal(3, init=RESET_MTU)
        self._exists, self._users, self._link, self._broken = Signal(), Signal(16), Signal(8), Signal()
        self._rule = Signal(2 * ATTR_BITS + 1)

        self._sequencer(m, len(ops))
        self._datapath(m)
        self._probes(m)
        return m

    def _guard(self, m):
        """Whether the micro-operation is done."""
        holds = Signal()
        with m.Switch(self._op.guard):
            for attr in Attr:
                with m.Case(int(attr).bit_length() - 1):
                    m.d.comb += holds.eq((self._attrs & int(attr)) != 0)
            for guard, value in {
                Guard.UD: self._type == QpType.UD,
                Guard.NOT_UD: self._type != QpType.UD,
                Guard.TO_RESET: self._new_state == QpState.RESET,
                Guard.TO_ERR: self._new_state == QpState.ERR,
                Guard.TO_RTS: self._new_state == QpState.RTS,
                Guard.NOT_RUNNING: (self._state == QpState.RESET) | (self._state == QpState.ERR),
                Guard.HAS_LINK: self._link != NO_EQ,
                Guard.GONE: ~self._exists,
                Guard.BROKEN: self._broken,
                Guard.HAS_EVENT: self._error_event != EventType.NONE,
                Guard.IN_RESET: self._state == QpState.RESET,
                Guard.ALWAYS: 1,
            }.items():
                with m.Case(int(guard)):
                    m.d.comb += holds.eq(value)
        return holds

    def _test(self, m):
        """Whether the command fails here."""
        fails = Signal()
        field, rule = self._field, self._rule
        exists, required = rule[0], rule[1 : ATTR_BITS + 1]
        allowed = Signal(32)
        remote = int(Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
        extra, missing = Signal(), Signal()
        m.d.comb += allowed.eq(rule[ATTR_BITS + 1 :])  # bits that are no attribute are never allowed
        m.d.sync += [extra.eq((self._attrs & ~allowed) != 0), missing.eq((required & ~self._attrs) != 0)]
        with m.Switch(self._op.test):
            for test, value in {
                Test.ALWAYS: 1,
                Test.OUTSIDE: self._outside,
                Test.OVER_MTU: field > self._mtu,
                Test.RIGHTS: ((field & remote) != 0) & ((field & int(Access.LOCAL_WRITE)) == 0),  # R-MR-3
                Test.STATE_DIFFERS: field != self._state,
                Test.ABSENT: ~self._exists,
                Test.PRESENT: self._exists,
                Test.USED: self._users != 0,
                Test.LINK_DIFFERS: field != self._link,
                Test.NO_TRANSITION: ~exists,
                Test.EXTRA: extra,
                Test.MISSING: missing,
                Test.BAD_TYPE: (field == 2) | (field > 3),
                Test.BROKEN: self._broken,
            }.items():
                with m.Case(test):
                    m.d.comb += fails.eq(value)
        return fails

    # ------------------------------------------------------------------------------------------------- control
    def _sequencer(self, m, length):
        p, op = self.p, self._op
        pc = Signal(range(max(length, 1 << 8)))
        wait = Signal(24)
        holds, fails = self._guard(m), self._test(m)
        status = Signal(CmdStatus)
        events = (self.sq_kick, self.rq_flush, self.event)
        object_port = self.objects
        m.d.comb += [
            self._rom.addr.eq(pc),
            self._rule_port.addr.eq(Cat(self._new_state, self._state, self._type)),
            self.result.payload.eq(status),
            self.mailbox_index.eq(Mux(self.mailbox_write, op.place, op.word)),
        ]
        m.d.sync += self._rule.eq(self._rule_port.data)
        for event in events[:2]:
            m.d.comb += event.payload.qpn.eq(self._index)
        qp_error, cq_error = self._qp_errors.o, self._cq_errors.o
        used = Signal(reset_less=True)  # a command ran since the tables were last clear
        step = Signal()  # the program under way is a step of the search
        m.d.comb += [
            self.event.payload.eqn.eq(0),
            self.event.payload.type.eq(self._error_event),
            self.event.payload.id.eq(self._error_id),
            self.fence_qpn.eq(Mux(op.select == Kind.QP, self._index, 0)),
            self.sweeping.eq(self._sweep.busy),
        ]
        with m.FSM(name="command"):
            with m.State("Start"):
                m.next = "Idle"
                with m.If(used):
                    m.d.comb += self._sweep.start.eq(1)
                    m.next = "Sweep"
            with m.State("Sweep"):
                with m.If(~self._sweep.busy):
                    m.d.sync += used.eq(0)
                    m.next = "Idle"
            with m.State("Idle"):
                m.d.sync += [self._is_error.eq(1), step.eq(0)]
                with m.If(qp_error.valid):
                    m.d.comb += qp_error.ready.eq(1)
                    m.d.sync += [
                        pc.eq(ERROR_ENTRY),
                        self._error_id.eq(qp_error.payload.qpn),
                        self._error_event.eq(qp_error.payload.event),
                    ]
                    m.next = "Fetch"
                with m.Elif(cq_error.valid):
                    m.d.comb += cq_error.ready.eq(1)
                    m.d.sync += [
                        pc.eq(BROKEN_CQ_ENTRY), self._error_id.eq(cq_error.payload), self._error_event.eq(EventType.CQ_ERR),
                    ]  # fmt: skip
                    m.next = "Fetch"
                with m.Elif(self.command.valid):
                    known = self.command.payload < ERROR_ENTRY
                    m.d.comb += self.command.ready.eq(1)
                    m.d.sync += [
                        self._is_error.eq(0),
                        used.eq(1),
                        self._code.eq(self.command.payload),
                        pc.eq(Mux(known, self.command.payload, BAD_COMMAND_ENTRY)),
                    ]
                    m.next = "Fetch"
                with m.Elif(self._searching):
                    m.d.sync += [pc.eq(SEARCH_ENTRY), self._error_id.eq(self._search_qpn), step.eq(1)]
                    m.next = "Fetch"
            with m.State("Fetch"):
                m.next = "Decode"
            with m.State("Decode"):
                m.d.sync += [op.eq(self._rom.data), pc.eq(pc + 1)]
                m.next = "Guard"
            with m.State("Guard"):  # `pc` names the next micro-operation already
                m.next = "Latch"
                with m.If(~holds):
                    m.next = "Decode"
            with m.State("Latch"):
                m.next = "Select"
            with m.State("Select"):
                m.next = "Rotate"
            with m.State("Rotate"):
                m.next = "Field"
            with m.State("Field"):
                m.next = "Compare"
            with m.State("Compare"):
                m.next = "Execute"
            with m.State("Execute"):
                m.d.comb += self._execute.eq(1)
                m.next = "Decode"
                with m.Switch(op.op):
                    with m.Case(Op.FAIL_IF):
                        with m.If(fails):
                            m.d.sync += [
                                status.eq(op.status),
                                Assert(~self._is_error, "the program of a QP error cannot fail"),
                            ]
                            m.next = "Result"
                    with m.Case(Op.LOOK, Op.OBJECT):
                        m.next = "ObjectAddress"
                    with m.Case(Op.CTX):
                        m.d.comb += self.ctx.valid.eq(1)
                        with m.If(~self.ctx.ready):
                            m.next = "Execute"
                    with m.Case(Op.MAIL):
                        m.d.comb += self.mailbox_write.eq(1)
                    with m.Case(Op.EVENT):
                        for number, event in enumerate(events):
                            with m.If(op.select == number):
                                m.d.comb += event.valid.eq(1)
                                with m.If(~event.ready):
                                    m.next = "Execute"
                    with m.Case(Op.JUMP):
                        m.d.sync += pc.eq(op.high)
                        m.next = "Fetch"
                    with m.Case(Op.FENCE):
                        m.d.comb += self.fence_start.eq(1)
                        m.next = "Fence"
                    with m.Case(Op.WAIT):
                        m.d.sync += wait.eq(op.high)
                        m.next = "Wait"
                    with m.Case(Op.DONE):
                        m.d.sync += status.eq(CmdStatus.OK)
                        m.next = "Result"
            with m.State("ObjectAddress"):
                m.next = "ObjectLatch"
            with m.State("ObjectLatch"):
                m.next = "ObjectRegister"
            with m.State("ObjectRegister"):
                m.next = "Object"
            with m.State("Object"):
                m.next = "Decode"
                with m.If(op.op == Op.LOOK):
                    m.d.sync += [
                        self._exists.eq(object_port.object.exists),
                        self._users.eq(object_port.object.users),
                        self._link.eq(object_port.object.link),
                        self._broken.eq(object_port.object.broken),
                    ]
                with m.Else():
                    m.d.comb += object_port.write.eq(1)
            with m.State("Wait"):
                m.d.sync += wait.eq(wait - 1)
                with m.If(wait == 0):
                    m.next = "Decode"
            with m.State("Fence"):
                with m.If(self.fence_done):
                    m.next = "Decode"
            with m.State("Result"):
                m.next = "Idle"
                with m.If(step):
                    m.d.sync += self._search_qpn.eq(self._search_qpn + 1)
                    with m.If(self._search_qpn == p.num_qps - 1):
                        m.d.sync += self._searching.eq(0)
                with m.If(~self._is_error):
                    m.d.comb += self.result.valid.eq(1)
                    with m.If(~self.result.ready):
                        m.next = "Result"

    # ------------------------------------------------------------------------------------------------ datapath
    def _datapath(self, m):
        p, op, image = self.p, self._op, self.image
        m.d.comb += [image.qpn.eq(self._index), image.word.eq(op.word)]

        # Source, rotation, field, limits: one register each.
        source = Signal(32)
        with m.Switch(op.source):
            for number, value in {
                Source.CONST: op.high, Source.MAILBOX: self.mailbox_value, Source.IMAGE: image.value, Source.LINK: self._link,
                Source.ERROR: self._error_id, Source.MTU: self._mtu, Source.MINUS_ONE: self.mailbox_value - 1,
            }.items():  # fmt: skip
                with m.Case(number):
                    m.d.comb += source.eq(value)
        stages = [self._value]
        for bit in range(5):
            stage = Signal(32, name=f"rotate_{1 << bit}")
            m.d.comb += stage.eq(Mux(op.rotate[bit], stages[-1].rotate_right(1 << bit), stages[-1]))
            stages.append(stage)
        mask = Cat(op.width > bit for bit in range(32))
        m.d.sync += [
            self._value.eq(source),
            self._rotated.eq(stages[-1]),
            self._field.eq(self._rotated & mask),
            self._outside.eq((self._field < op.low) | (self._field > op.high)),
        ]
        self._loads(m)
        self._object_writes(m)

        # Writes: context bus, image, mailbox.
        bus = self.ctx.payload
        base = Signal(range(p.tpt_entries))
        with m.Switch(op.select):
            for kind, value in {
                Kind.SQ_RING: p.tpt_sq_base, Kind.RQ_RING: p.tpt_rq_base, Kind.CQ_RING: p.tpt_cq_base,
                Kind.EQ_RING: p.tpt_eq_base,
            }.items():  # fmt: skip
                with m.Case(int(kind)):
                    m.d.comb += base.eq(value)
        index = Signal(len(bus.index))
        word = Signal(len(bus.word))
        m.d.sync += [index.eq(base + self._index), word.eq(op.place)]
        with m.If(op.table == CtxTable.PORT):  # one record: the index counts its words
            m.d.sync += [index.eq(0), word.eq(op.place + self._index)]
        m.d.comb += [
            bus.table.eq(op.table), bus.index.eq(index), bus.word.eq(word), bus.bytes.eq(op.bytes), bus.data.eq(self._rotated),
            self._sweep.ready.eq(self.ctx.ready),
            image.write_word.eq(op.place), image.data.eq(self._rotated), image.mask.eq(op.bytes),
            self.mailbox_data.eq(self._rotated),
        ]  # fmt: skip
        with m.If(self._sweep.busy):
            m.d.comb += [
                self.ctx.valid.eq(self._sweep.valid), bus.table.eq(self._sweep.table), bus.index.eq(self._sweep.index),
                bus.word.eq(0), bus.bytes.eq(15), bus.data.eq(0),
            ]  # fmt: skip

    def _loads(self, m):
        op, field = self._op, self._field
        with m.If(self._execute & (op.op == Op.LOAD)):
            with m.Switch(op.select):
                with m.Case(int(Register.INDEX)):
                    m.d.sync += self._index.eq(field)
                with m.Case(int(Register.ATTRS)):
                    m.d.sync += self._attrs.eq(field)
                with m.Case(int(Register.NEW_STATE)):
                    m.d.sync += self._new_state.eq(field)
                with m.Case(int(Register.STATE)):
                    m.d.sync += [self._state.eq(field[:3]), self._type.eq(field[16:18])]
                with m.Case(int(Register.TYPE)):
                    m.d.sync += self._type.eq(field)
                with m.Case(int(Register.LINK)):
                    m.d.sync += self._link.eq(field)
                with m.Case(int(Register.MTU)):
                    m.d.sync += self._mtu.eq(field)
                with m.Case(int(Register.SEARCH)):
                    m.d.sync += [self._searching.eq(1), self._search_qpn.eq(0)]
        m.d.comb += self.image.write.eq(self._execute & (op.op == Op.IMAGE))

    def _object_writes(self, m):
        op, objects = self._op, self.objects
        old, new = objects.object, objects.new
        m.d.comb += [
            objects.kind.eq(op.select),
            objects.number.eq(self._field),
            new.exists.eq(op.place != Action.DESTROY),
            new.link.eq(old.link),
            new.broken.eq(old.broken),
        ]
        with m.Switch(op.place):
            with m.Case(int(Action.CREATE)):
                m.d.comb += [new.link.eq(self._link), new.broken.eq(0)]
            with m.Case(int(Action.BREAK)):
                m.d.comb += [new.users.eq(old.users), new.broken.eq(1)]
            with m.Case(int(Action.USE)):
                m.d.comb += new.users.eq(old.users + 1)
            with m.Case(int(Action.UNUSE)):
                m.d.comb += new.users.eq(old.users - 1)
        with m.If(self._sweep.busy):
            m.d.comb += [
                objects.kind.eq(self._sweep.object_kind), objects.number.eq(self._sweep.object_number),
                objects.write.eq(self._sweep.object_write), new.eq(0),
            ]  # fmt: skip
        with m.If(~self._sweep.busy & objects.write):
            m.d.sync += [
                Assert(old.exists == (op.place != Action.CREATE), Format("object {} of kind {}: exists is {}",
                                                                         self._field, op.select, old.exists)),
                Assert((op.place != Action.UNUSE) | (old.users != 0), "an object has fewer users than none"),
                Assert((op.place != Action.DESTROY) | (old.users == 0), "an object in use is destroyed"),
            ]

    def _probes(self, m):
        if not self.p.probe:
            return
        flushed = Signal()
        m.d.comb += flushed.eq(self.rq_flush.valid & self.rq_flush.ready & self._is_error)
        m.d.sync += [
            self.probe.valid.eq(self.result.valid & self.result.ready),
            self.probe.event.eq(ProbeEvent.COMMAND),
            self.probe.qpn.eq(self._index),
            self.probe.opcode.eq(self._code),
            self.probe.length.eq(self.result.payload),
            self.probe_error.valid.eq(flushed),
            self.probe_error.event.eq(ProbeEvent.QP_ERROR),
            self.probe_error.qpn.eq(self._index),
        ]
