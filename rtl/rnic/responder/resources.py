"""The answers of a QP in PSN order: ACKs and NAKs, READ responses, ATOMIC ACKs; and the store for duplicates."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import RESPONDER_CFG, CtxTable
from ..clash import NO_CLASH
from ..config import Params
from ..qp.table import ContextTable
from ..records import AckJob, CtxBus, QpError
from ..stream.fifo import StreamFifo
from ..wire.syndrome import NakCode, nak_syndrome
from .atomic import Released
from .read_response import COUNT_BITS, ResponseFailure, ResponsePacket
from .records import Answer, JobKind
from .resource_records import NUMBER_BITS, Ack, Entry, State
from .resource_turns import ResourceTurns

__all__ = ["Resources"]

QUANTUM = 4  # packets a QP sends in a turn


class Resources(ResourceTurns):
    """Keeps the READs and ATOMICs of every QP in a ring of ``p.max_rd_atomic`` places and answers in PSN order.

    ACKs and NAKs of a QP without unanswered requests pass. Otherwise the newest waits behind the last request (R-ACK-2: an
    ACK replaces one before it, never across a request) and goes out before the next request's answer (R-ACK-4). READs are
    answered from memory by `ReadResponse`, ``QUANTUM`` packets a turn, QPs in turn. While packets of a QP are on their way
    there, its ACKs take that way too, so that nothing overtakes; else they go by ``ack``, the urgent way. An ACK or NAK whose
    way has no room waits for a turn as the ``tail``: no request waits for the wire, or two RNICs with full stores would
    wait for each other.

    A duplicate READ or ATOMIC whose request is in the ring, and which asks for nothing outside it (R-DUP-3, R-DUP-5), takes
    the QP back to that request: it is answered again from the duplicate's PSN on, and all requests behind it after it, as a
    requester that goes back asks for them anyway; a stream under way stops. A duplicate of what is yet to be answered is
    dropped. ATOMICs are answered from their saved value. The ring keeps what was asked first (R-DUP-4).

    A READ that fails is answered by a NAK when it had never been answered (R-RES-1), and the QP goes to ERR; a failing
    duplicate is dropped (R-DUP-7).

    Timing: ACKs pass combinationally while no QP has anything to answer, else 3 cycles each; a READ takes 3 cycles when it
    comes, 6 when it is released, and 2 per packet; a duplicate 7 per request looked at.

    Members: ``i`` Answer, ``release`` Released, ``failure``, ``drain`` (qpn), ``clear`` (qpn; the QP starts anew) in; ``ack``
    AckJob, ``packet`` ResponsePacket, ``qp_error``, ``forget`` (qpn, for ReadResponse.clear) out: streams; ``ctx``;
    ``level``, ``gone``, ``count_addr``, ``count`` of `ReadResponse`; ``finished_addr``/``finished``: number of requests
    answered, 2 cycles; ``drained``, ``drained_qpn``: pulse, all answers of a drained QP have left.
    """

    def __init__(self, p: Params, depth: int):
        self.p, self.depth = p, depth
        self.slot_bits = (p.max_rd_atomic - 1).bit_length()
        super().__init__({
            "i": In(stream.Signature(Answer(p))),
            "release": In(stream.Signature(Released(p))),
            "failure": In(stream.Signature(ResponseFailure(p))),
            "drain": In(stream.Signature(p.qpn_bits)),
            "clear": In(stream.Signature(p.qpn_bits)),
            "ctx": In(CtxBus(p)),
            "ack": Out(stream.Signature(AckJob(p))),
            "packet": Out(stream.Signature(ResponsePacket(p))),
            "qp_error": Out(stream.Signature(QpError(p))),
            "forget": Out(stream.Signature(p.qpn_bits)),
            "level": In(range(depth + 1)),
            "gone": In(1),
            "count_addr": Out(p.qpn_bits),
            "count": In(COUNT_BITS),
            "finished_addr": In(p.qpn_bits),
            "finished": Out(NUMBER_BITS),
            "drained": Out(1),
            "drained_qpn": Out(p.qpn_bits),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        places = p.num_qps << self.slot_bits
        m.submodules.states = states = memory.Memory(shape=State(), depth=p.num_qps, init=[], attrs=NO_CLASH)
        m.submodules.entries = entries = memory.Memory(shape=Entry(), depth=places, init=[], attrs=NO_CLASH)
        m.submodules.results = results = memory.Memory(shape=data.StructLayout({"original": 64, "error": 1}), depth=places,
                                                       init=[], attrs=NO_CLASH)
        m.submodules.answered = answered = memory.Memory(shape=NUMBER_BITS, depth=p.num_qps, init=[])
        m.submodules.cfg = cfg = ContextTable(p, CtxTable.RESPONDER_CFG, RESPONDER_CFG, p.num_qps)
        m.submodules.turns = self._turns = StreamFifo(p.qpn_bits, p.num_qps)
        wiring.connect(m, wiring.flipped(self.ctx), cfg.ctx)
        self._state_write, self._state_read = states.write_port(), states.read_port()
        self._entry_write, self._entry_read = entries.write_port(), entries.read_port()
        self._result_write, self._result_read = results.write_port(), results.read_port()
        answered_write, answered_read = answered.write_port(), answered.read_port()
        cfg_index, self._cfg = cfg.read(0)

        self._qpn = Signal(p.qpn_bits)  # of the QP at hand
        self._s = Signal(State())
        self._e = Signal(Entry())
        self._number = Signal(NUMBER_BITS)  # of the entry that is read
        self._rested = Signal()  # the QP had nothing to answer when its state was read
        self._empty = Signal()  # no packet of the QP was on its way then
        self._sent = Signal()  # it has got one since
        self._budget = Signal(range(QUANTUM + 1))
        self._save = Signal()
        self._rests = Signal()
        active = Signal(range(p.num_qps + 1))  # QPs with something to answer
        self._flying = Signal(COUNT_BITS)  # packets on their way
        self._quiet = Signal()
        address = Signal(p.qpn_bits)
        s = self._s
        self._address = address
        m.d.sync += Assert(active <= p.num_qps, Format("responder: {} QPs have answers to give", active))
        m.d.comb += [
            address.eq(self._qpn),
            cfg_index.eq(address),
            self._state_read.addr.eq(address),
            self._state_write.addr.eq(self._qpn),
            self._state_write.data.eq(s),
            self._state_write.en.eq(self._save),
            self.count_addr.eq(address),
            answered_write.addr.eq(self._qpn),
            answered_write.data.eq(s.finished),
            answered_write.en.eq(self._save),
            answered_read.addr.eq(self.finished_addr),
            self._entry_read.addr.eq(self._place(self._number)),
            self._result_read.addr.eq(self._place(self._number)),
            self._rests.eq((s.next == s.registered) & ~s.tail.valid & ~s.dead),
            self._quiet.eq((active == 0) & (self._flying == 0)),
            self.drained_qpn.eq(self._qpn),
        ]
        m.d.sync += [
            self.finished.eq(answered_read.data),
            self._flying.eq(self._flying + (self.packet.valid & self.packet.ready) - self.gone),
        ]
        # A device reset forgets who is on the list and what is on its way: the memories follow before the first event.
        self._sweeping = Signal(init=1, name="sweeping")
        swept, counted = Signal(p.num_qps.bit_length()), Signal()
        fresh = Signal(State())
        m.d.comb += fresh.issued.eq(self.count)
        with m.If(self._sweeping):
            m.d.comb += [
                address.eq(swept), self._state_write.addr.eq(swept), self._state_write.data.eq(fresh),
                self._state_write.en.eq(counted),
            ]  # fmt: skip
            m.d.sync += [counted.eq(~counted), swept.eq(swept + counted)]
            with m.If(counted & (swept == p.num_qps - 1)):
                m.d.sync += self._sweeping.eq(0)
        with m.If(self._save):
            m.d.sync += active.eq(active + self._rested - self._rests)
        with m.If(self.packet.valid & self.packet.ready):
            m.d.sync += [s.issued.eq(s.issued + 1), self._sent.eq(1)]

        self._pmtu = Signal(13)
        self._last, self._length = Signal(), Signal(13)  # of the next packet of a READ
        self._answer = Signal(Ack())  # what "Send" sends
        self._original = Signal(64)
        self._atomic = Signal()
        self._kills = Signal()  # and then the QP is dead
        self._resume = Signal()  # and then the turn goes on, else it ends
        # Each part makes its logic up to its `yield`, and its states behind it.
        parts = [part(m) for part in (self._idle, self._act, self._turn, self._read, self._send, self._scan, self._drain)]
        for part in parts:
            next(part)
        with m.FSM(name="resources"):
            for part in parts:
                next(part, None)
        return m

    def _place(self, number):
        """Where request ``number`` of the QP at hand is kept."""
        return Cat(number[: self.slot_bits], self._qpn)

    # ------------------------------------------------------------------------------------------------ events
    def _idle(self, m):
        """Chooses what to do; ACKs pass at once while nobody has anything to answer."""
        self._event = Signal(range(6))
        self._clear, self._fail, self._rel, self._item, self._drn, self._trn = range(6)
        chosen = Signal(range(6))
        any_event = Signal()
        passes = Signal()
        room = self._room = Signal()  # for a turn
        others_first = Signal()  # releases and turns, after an answer
        pending = [self.clear, self.failure, self.release, self.i, self.drain, self._turns.o]
        qpns = [self.clear.payload, self.failure.p.qpn, self.release.p.qpn, self.i.p.qpn, self.drain.payload,
                self._turns.o.payload]
        waiting = Signal(6)
        m.d.comb += [
            room.eq(self.level < self.depth - QUANTUM),
            waiting.eq(Cat(port.valid for port in pending[:5])),
            waiting[self._fail].eq(self.failure.valid & self.ack.ready),
            waiting[self._trn].eq(self._turns.o.valid & room & self.ack.ready),
            any_event.eq(waiting.any() & ~self._sweeping),
        ]
        # The last one wins. A drain waits for all answers before it.
        with m.If(others_first):
            for event in (self._drn, self._item, self._trn, self._rel, self._fail, self._clear):
                with m.If(waiting[event]):
                    m.d.comb += chosen.eq(event)
        with m.Else():
            for event in (self._trn, self._drn, self._rel, self._item, self._fail, self._clear):
                with m.If(waiting[event]):
                    m.d.comb += chosen.eq(event)
        direct = self.i.p
        self._direct = passes
        yield
        with m.State("Idle"):
            m.d.comb += passes.eq(
                self._quiet & ~self._sweeping & self.i.valid & (self.i.p.kind == JobKind.NONE) & self.ack.ready)
            with m.If(passes):
                m.d.comb += [
                    self.ack.valid.eq(1),
                    self.ack.p.qpn.eq(direct.qpn),
                    self.ack.p.psn.eq(direct.psn),
                    self.ack.p.syndrome.eq(direct.syndrome),
                    self.ack.p.msn.eq(direct.msn),
                    self.i.ready.eq(1),
                ]
            with m.Elif(any_event):
                m.d.sync += [self._event.eq(chosen), self._sent.eq(0), self._kills.eq(0), self._atomic.eq(0),
                             self._budget.eq(QUANTUM)]
                with m.Switch(chosen):
                    for event, qpn in enumerate(qpns):
                        with m.Case(event):
                            m.d.comb += self._address.eq(qpn)
                            m.d.sync += self._qpn.eq(qpn)
                m.next = "Load"
        with m.State("Load"):
            loaded = self._state_read.data
            m.d.sync += [
                self._s.eq(loaded),
                self._rested.eq((loaded.next == loaded.registered) & ~loaded.tail.valid & ~loaded.dead),
                self._empty.eq(loaded.issued == self.count),
            ]
            with m.If(self._event == self._trn):
                m.d.comb += self._turns.o.ready.eq(1)
                m.d.sync += self._s.listed.eq(0)
            m.d.sync += others_first.eq(self._event == self._item)
            m.next = "Act"

    def _forget_all(self, m):
        """The QP has nothing to answer any more."""
        s = self._s
        m.d.sync += [s.next.eq(s.registered), s.released.eq(s.registered), s.tail.valid.eq(0), s.streaming.eq(0), s.replay.eq(0),
                     s.opened.eq(0)]  # fmt: skip

    def _act(self, m):
        s, item = self._s, self.i.p
        newer, sendable = Signal(), Signal()
        self._sendable = sendable  # an ACK of the QP at hand has room on its way
        distance = Signal(24)
        unanswered = Signal(NUMBER_BITS)
        depth = 1 << self.slot_bits
        entry = self._entry_write
        m.d.comb += [
            unanswered.eq(s.registered - s.next),
            distance.eq(item.psn - s.tail.psn),
            newer.eq(~s.tail.valid | ~distance[-1]),
            sendable.eq(Mux(self._empty & ~self._sent, self.ack.ready, self._room)),
            entry.addr.eq(self._place(s.registered)),
            entry.data.psn.eq(item.psn),
            entry.data.va.eq(item.va),
            entry.data.rkey.eq(item.rkey),
            entry.data.length.eq(Mux(item.kind == JobKind.READ, item.length, 0)),
            entry.data.msn.eq(item.msn),
            entry.data.op.eq(item.op),
            entry.data.before.eq(s.tail),  # R-ACK-4
            self._result_write.addr.eq(self._place(s.released)),
            self._result_write.data.original.eq(self.release.p.original),
            self._result_write.data.error.eq(self.release.p.error),
        ]
        failure = self.failure.p
        yield
        with m.State("Act"):
            m.d.sync += [self._answer.psn.eq(item.psn), self._answer.syndrome.eq(item.syndrome), self._answer.msn.eq(item.msn)]
            m.d.sync += [self._resume.eq(0), self._number.eq(s.registered - 1)]
            m.next = "Save"
            with m.Switch(self._event):
                with m.Case(self._clear):  # R-QP-4
                    m.d.comb += self.clear.ready.eq(1)
                    m.d.sync += s.as_value().eq(0)
                    m.d.sync += [s.issued.eq(s.issued), s.listed.eq(s.listed)]
                    m.next = "Forget"
                with m.Case(self._fail):
                    m.d.comb += self.failure.ready.eq(1)
                    with m.If(failure.quiet):  # R-DUP-7
                        with m.If(s.streaming & (s.next != s.finished)):
                            m.d.sync += [s.next.eq(s.next + 1), s.opened.eq(0)]
                        m.d.sync += [s.streaming.eq(0), s.replay.eq(0)]
                        m.next = "Wait"
                    with m.Elif(~s.dead):
                        # 8.2: what was sent before it has left; nothing follows.
                        m.d.sync += [
                            self._answer.psn.eq(failure.psn),
                            self._answer.msn.eq(failure.msn),
                            self._answer.syndrome.eq(Mux(failure.bus, nak_syndrome(NakCode.REMOTE_OPERATIONAL),
                                                         nak_syndrome(NakCode.REMOTE_ACCESS))),
                            self._kills.eq(1),
                            self._empty.eq(1),
                        ]
                        m.next = "Send"
                with m.Case(self._rel):
                    with m.If(s.dead | self.release.p.dead):
                        m.d.comb += self.release.ready.eq(1)
                        m.d.sync += s.dead.eq(1)
                        self._forget_all(m)
                    with m.Elif(s.released == s.registered):  # the request itself is still in a queue
                        m.next = "Idle"
                    with m.Else():
                        m.d.comb += [self.release.ready.eq(1), self._result_write.en.eq(self.release.p.atomic)]
                        m.d.sync += s.released.eq(s.released + 1)
                        # With nothing else to answer, "Turn" would choose it.
                        with m.If((s.next == s.released) & self._room & self.ack.ready):
                            m.d.sync += self._number.eq(s.next)
                            m.next = "Entry"
                        with m.Else():
                            m.next = "Turn"
                with m.Case(self._item):
                    m.d.comb += self.i.ready.eq(1)
                    with m.If(s.dead):
                        pass
                    with m.Elif(item.kind == JobKind.REPLAY):
                        m.next = "Scan"
                    with m.Elif(item.kind != JobKind.NONE):
                        m.d.comb += entry.en.eq(1)
                        m.d.sync += [s.registered.eq(s.registered + 1), s.tail.valid.eq(0)]
                        with m.If((s.registered + 1)[: NUMBER_BITS] == depth):
                            m.d.sync += s.wrapped.eq(1)
                        with m.If(unanswered == depth):  # a duplicate whose place is taken: its requester has gone on
                            m.d.sync += [s.next.eq(s.next + 1), s.streaming.eq(0), s.replay.eq(0), s.opened.eq(0)]
                    with m.Elif((unanswered == 0) & ~s.tail.valid & sendable):
                        m.next = "Send"
                    with m.Else():  # R-ACK-2
                        with m.If(newer):
                            m.d.sync += [s.tail.psn.eq(item.psn), s.tail.syndrome.eq(item.syndrome), s.tail.msn.eq(item.msn)]
                        m.d.sync += s.tail.valid.eq(1)
                        with m.If(unanswered == 0):
                            self._list(m)
                with m.Case(self._drn):
                    # The NAK that ends the QP goes out first, and an ACK that waits only for room.
                    with m.If(~s.dead & s.tail.valid & ((s.tail.syndrome[5:7] == 3) | (unanswered == 0))):
                        m.d.comb += self.drain.ready.eq(1)
                        m.d.sync += s.draining.eq(1)
                    with m.Else():
                        m.d.sync += [s.dead.eq(0), s.draining.eq(0)]
                        self._forget_all(m)
                        with m.If(self._empty):  # else once more
                            m.d.comb += [self.drain.ready.eq(1), self.drained.eq(1)]
                with m.Case(self._trn):
                    with m.If(~s.dead):
                        m.next = "Turn"
        with m.State("Forget"):
            m.d.comb += [self.forget.valid.eq(1), self.forget.payload.eq(self._qpn)]
            with m.If(self.forget.ready):
                m.next = "Save"
        with m.State("Save"):
            with m.If(s.draining & (s.next == s.registered) & ~s.tail.valid):
                m.d.sync += [s.draining.eq(0), s.dead.eq(0), self._event.eq(self._drn)]
                m.next = "Wait"
            with m.Else():
                m.d.comb += self._save.eq(1)
                m.next = "Idle"
