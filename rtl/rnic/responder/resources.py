"""The answers of a QP in PSN order: ACKs and NAKs, READ responses, ATOMIC ACKs; and the store for duplicates."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import RESPONDER_CFG, CtxTable
from ..config import Params
from ..qp.table import ContextTable
from ..records import AckJob, CtxBus, QpError
from ..stream.fifo import StreamFifo
from ..wire.opcode import Opcode
from ..wire.syndrome import NakCode, ack_syndrome, nak_syndrome
from .atomic import Released
from .read_response import COUNT_BITS, ResponseFailure, ResponsePacket
from .records import Answer, AtomicOp, JobKind

__all__ = ["Resources"]

QUANTUM = 4  # packets a QP sends in a turn
_NUMBER = 8  # bits of the numbers of requests, free running; p.max_rd_atomic is at most 128


class Ack(data.StructLayout):
    """An ACK or NAK that waits for the requests before it."""

    def __init__(self):
        super().__init__({"valid": 1, "psn": 24, "syndrome": 8, "msn": 24})


class Entry(data.StructLayout):
    """A READ or ATOMIC as it came, kept until its place is needed (R-DUP-3 to R-DUP-6). ``before``: goes out before its answer
    (R-ACK-4)."""

    def __init__(self):
        super().__init__({"psn": 24, "va": 64, "rkey": 32, "length": 32, "msn": 24, "op": AtomicOp, "before": Ack()})


class State(data.StructLayout):
    """Of a QP. Requests have numbers: ``registered`` of the next to come, ``next`` to answer, ``released`` the first that may
    not be answered yet, ``finished`` the first never answered; ``next`` goes back for a duplicate. ``replay``: request ``next``
    is answered for ``length`` bytes from PSN ``psn`` on; ``streaming``: it is being answered, from there on. ``tail``: the
    ACK or NAK behind all requests; ``opened``: what goes out before the answer of request ``next`` has gone."""

    def __init__(self):
        super().__init__({
            "registered": _NUMBER,
            "released": _NUMBER,
            "next": _NUMBER,
            "finished": _NUMBER,
            "wrapped": 1,  # all places of the store are in use
            "listed": 1,
            "dead": 1,  # nothing is answered any more
            "draining": 1,
            "replay": 1,
            "streaming": 1,
            "first": 1,  # no packet of the stream has been made
            "opened": 1,
            "psn": 24,
            "left": 32,
            "va": 64,
            "tail": Ack(),
            "issued": COUNT_BITS,  # packets given to the READ response sender since power-up
        })  # fmt: skip


class Resources(wiring.Component):
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
            "finished": Out(_NUMBER),
            "drained": Out(1),
            "drained_qpn": Out(p.qpn_bits),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        places = p.num_qps << self.slot_bits
        m.submodules.states = states = memory.Memory(shape=State(), depth=p.num_qps, init=[])
        m.submodules.entries = entries = memory.Memory(shape=Entry(), depth=places, init=[])
        m.submodules.results = results = memory.Memory(shape=data.StructLayout({"original": 64, "error": 1}), depth=places,
                                                       init=[])
        m.submodules.answered = answered = memory.Memory(shape=_NUMBER, depth=p.num_qps, init=[])
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
        self._number = Signal(_NUMBER)  # of the entry that is read
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
        unanswered = Signal(_NUMBER)
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
                        with m.If((s.registered + 1)[: _NUMBER] == depth):
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

    def _list(self, m):
        """Gives the QP another turn."""
        with m.If(~self._s.listed):
            m.d.comb += self._turns.i.valid.eq(1)
            m.d.sync += self._s.listed.eq(1)
        m.d.sync += Assert(self._s.listed | self._turns.i.ready, "responder: more turns than QPs")

    # ------------------------------------------------------------------------------------------------ answering
    def _turn(self, m):
        s, e, packet = self._s, self._e, self.packet
        room = self._room
        m.d.comb += self._turns.i.payload.eq(self._qpn)
        m.d.comb += packet.p.quiet.eq(s.next != s.finished)
        yield
        with m.State("Turn"):
            m.d.sync += self._number.eq(s.next)
            with m.If(s.dead):
                m.next = "Save"
            with m.Elif(s.next == s.released):  # R-RES-7
                m.next = "Save"
                with m.If((s.next == s.registered) & s.tail.valid):
                    with m.If(self._sendable):
                        m.d.sync += [self._answer.eq(s.tail), s.tail.valid.eq(0), self._resume.eq(0)]
                        m.next = "Send"
                    with m.Else():
                        self._list(m)
            with m.Elif((self._budget == 0) | ~room | ~self.ack.ready):
                self._list(m)
                m.next = "Save"
            with m.Else():
                m.next = "Entry"
        with m.State("Entry"):
            m.next = "Found"
        with m.State("Found"):
            found = self._entry_read.data
            m.d.sync += [e.eq(found), self._original.eq(self._result_read.data.original), self._resume.eq(1)]
            with m.If(found.before.valid & ~s.streaming & ~s.opened):  # R-ACK-4
                m.d.sync += self._answer.eq(found.before)
                m.next = "Before"
            with m.Else():
                m.next = "Begin"
        with m.State("Begin"):
            with m.If(e.op == AtomicOp.READ):
                with m.If(s.streaming):
                    m.next = "Measure"
                with m.Else():
                    m.d.sync += [s.streaming.eq(1), s.first.eq(1)]
                    with m.If(s.replay):
                        m.next = "Offset"
                    with m.Else():
                        m.d.sync += [s.psn.eq(e.psn), s.va.eq(e.va), s.left.eq(e.length)]
                        self._measure(m, e.length)
                        m.next = "Packet"
            with m.Elif(~self._sendable):  # what went before it took the room
                m.d.sync += s.opened.eq(1)
                self._list(m)
                m.next = "Save"
            with m.Else():
                self._past(m)
                m.d.sync += [
                    self._answer.psn.eq(e.psn),
                    self._answer.syndrome.eq(ack_syndrome()),
                    self._answer.msn.eq(e.msn),
                    self._atomic.eq(1),
                    self._budget.eq(self._budget - 1),
                ]
                with m.If(self._result_read.data.error):
                    m.d.sync += [self._answer.syndrome.eq(nak_syndrome(NakCode.REMOTE_OPERATIONAL)), self._atomic.eq(0),
                                 self._kills.eq(1)]
                m.next = "Send"

    def _measure(self, m, left):
        """The next packet of a READ with ``left`` bytes to come."""
        m.d.sync += [self._last.eq(left <= self._pmtu), self._length.eq(Mux(left <= self._pmtu, left, self._pmtu))]

    def _past(self, m):
        """Request ``next`` is answered."""
        s = self._s
        m.d.sync += [s.next.eq(s.next + 1), s.streaming.eq(0), s.replay.eq(0), s.opened.eq(0)]
        with m.If(s.next == s.finished):
            m.d.sync += s.finished.eq(s.finished + 1)

    def _read(self, m):
        """Packets of a READ (R-PSN-4)."""
        s, e, packet = self._s, self._e, self.packet
        shift = Signal(3)  # PMTU is 128 << shift bytes
        offset, offset_bytes = Signal(24), Signal(36)
        low, high = Signal(33), Signal(32)
        last, length = self._last, self._length
        ends = Signal()  # the turn ends with this READ
        m.d.comb += [
            shift.eq(self._cfg.path_mtu), self._pmtu.eq(128 << shift),
            ends.eq(((s.next + 1)[:_NUMBER] == s.released) & ~s.tail.valid),
        ]  # fmt: skip
        self._shift = shift
        m.d.comb += [
            packet.p.qpn.eq(self._qpn),
            packet.p.va.eq(s.va),
            packet.p.rkey.eq(e.rkey),
            packet.p.pd.eq(self._cfg.pd),
            packet.p.original.eq(self._original),
        ]
        yield
        with m.State("Offset"):  # R-DUP-3
            m.d.sync += offset.eq(s.psn - e.psn)
            m.next = "Bytes"
        with m.State("Bytes"):
            m.d.sync += offset_bytes.eq((offset << 7) << shift)
            m.next = "Low"
        with m.State("Low"):
            m.d.sync += [low.eq(e.va[:32] + offset_bytes[:32]), high.eq(e.va[32:] + offset_bytes[32:])]
            m.next = "High"
        with m.State("High"):
            m.d.sync += s.va.eq(Cat(low[:32], high + low[32]))
            m.next = "Measure"
        with m.State("Measure"):
            self._measure(m, s.left)
            m.next = "Packet"
        with m.State("Packet"):
            m.d.comb += [
                packet.valid.eq(1),
                packet.p.opcode.eq(Mux(
                    s.first,
                    Mux(last, Opcode.RC_READ_RESP_ONLY, Opcode.RC_READ_RESP_FIRST),
                    Mux(last, Opcode.RC_READ_RESP_LAST, Opcode.RC_READ_RESP_MIDDLE))),
                packet.p.psn.eq(s.psn),  # R-PSN-4
                packet.p.length.eq(length),
                packet.p.msn.eq(e.msn),
                packet.p.syndrome.eq(ack_syndrome()),
            ]
            m.d.sync += [low.eq(s.va[:32] + length), high.eq(s.va[32:])]
            with m.If(packet.ready):
                m.d.sync += [
                    s.first.eq(0), s.psn.eq(s.psn + 1), s.left.eq(s.left - length), self._budget.eq(self._budget - 1),  # R-PSN-4
                ]  # fmt: skip
                with m.If(last):
                    self._past(m)
                    m.next = "Turn"
                    with m.If(ends):
                        m.next = "Save"
                with m.Else():
                    m.next = "Step"
        with m.State("Step"):
            m.d.sync += s.va.eq(Cat(low[:32], high + low[32]))
            with m.If(self._budget == 0):
                self._list(m)
                m.next = "Save"
            with m.Else():
                self._measure(m, s.left)
                m.next = "Packet"

    def _send(self, m):
        """An answer without payload: the urgent way when nothing of its QP is on the other."""
        answer, urgent = self._answer, Signal()
        sent = Signal()
        m.d.comb += urgent.eq(self._empty & ~self._sent)
        m.d.comb += self.qp_error.p.qpn.eq(self._qpn)
        with m.If(~self._direct):
            m.d.comb += [
                self.ack.p.qpn.eq(self._qpn),
                self.ack.p.psn.eq(answer.psn),
                self.ack.p.syndrome.eq(answer.syndrome),
                self.ack.p.msn.eq(answer.msn),
                self.ack.p.atomic.eq(self._atomic),
                self.ack.p.original.eq(self._original),
            ]

        def offer():
            m.d.comb += [self.ack.valid.eq(urgent), self.packet.valid.eq(~urgent),
                         sent.eq(Mux(urgent, self.ack.ready, self.packet.ready)),
                         self.packet.p.opcode.eq(Mux(self._atomic, Opcode.RC_ATOMIC_ACK, Opcode.RC_ACK)),
                         self.packet.p.psn.eq(answer.psn), self.packet.p.msn.eq(answer.msn),
                         self.packet.p.syndrome.eq(answer.syndrome)]  # fmt: skip

        yield
        with m.State("Before"):
            offer()
            with m.If(sent):
                m.next = "Begin"
        with m.State("Send"):
            offer()
            with m.If(sent):
                m.d.sync += self._atomic.eq(0)
                with m.If(self._kills):
                    m.d.sync += self._s.dead.eq(1)
                    self._forget_all(m)
                    m.next = "Error"
                with m.Elif(self._resume):
                    m.next = "Turn"
                with m.Else():
                    m.next = "Save"
        with m.State("Error"):
            m.d.comb += self.qp_error.valid.eq(1)
            with m.If(self.qp_error.ready):
                m.next = "Save"

    # ------------------------------------------------------------------------------------------------ duplicates
    def _scan(self, m):
        """Looks for the request of a duplicate, the newest first (R-DUP-3, R-DUP-5)."""
        s, e = self._s, self._e
        item = Signal(Answer(self.p))  # the duplicate
        back = Signal(_NUMBER)  # requests before the newest one
        known = Signal(_NUMBER)
        unanswered = Signal(_NUMBER)
        offset, position = Signal(24), Signal(36)
        same, inside, fits, low_same = Signal(), Signal(), Signal(), Signal()
        low = Signal(33)
        end = Signal(37)
        m.d.comb += [
            known.eq(Mux(s.wrapped, 1 << self.slot_bits, s.registered)),  # R-DUP-6
            unanswered.eq(s.registered - s.next),
        ]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [item.eq(self.i.p), back.eq(0)]
        yield
        with m.State("Scan"):
            with m.If(back == known):
                m.next = "Save"  # R-DUP-7
            with m.Else():
                m.next = "Look"
        with m.State("Look"):
            m.next = "Diff"
        with m.State("Diff"):
            found = self._entry_read.data
            m.d.sync += [
                e.eq(found),
                offset.eq(item.psn - found.psn),
                same.eq((found.op == item.op) & (found.rkey == item.rkey)),  # R-DUP-3, R-DUP-5
            ]
            m.next = "Position"
        with m.State("Position"):
            m.d.sync += [position.eq((offset << 7) << self._shift), end.eq(item.length)]
            m.next = "Sum"
        with m.State("Sum"):
            m.d.sync += [
                low.eq(e.va[:32] + position[:32]),
                inside.eq((position == 0) | ((e.op == AtomicOp.READ) & (position < e.length))),  # R-DUP-3
                end.eq(position + end),
            ]
            m.next = "Compare"
        with m.State("Compare"):
            m.d.sync += [
                low_same.eq(low[:32] == item.va[:32]),
                fits.eq((end <= e.length) | (e.op != AtomicOp.READ)),  # R-DUP-3, R-DUP-4
            ]
            m.next = "Judge"
        with m.State("Judge"):
            with m.If(same & inside & fits & low_same & ((e.va[32:] + low[32])[:32] == item.va[32:])):
                m.next = "Save"
                # Answered, or being answered: back to it. To be answered: nothing more to do.
                with m.If((back >= unanswered) | ((back + 1 == unanswered) & s.streaming)):  # R-DUP-3
                    m.d.sync += [
                        s.next.eq(self._number), s.replay.eq(e.op == AtomicOp.READ), s.streaming.eq(0), s.psn.eq(item.psn),
                        s.left.eq(item.length), s.opened.eq(0),
                    ]  # fmt: skip
                    self._list(m)
            with m.Else():
                m.d.sync += [back.eq(back + 1), self._number.eq(self._number - 1)]
                m.next = "Scan"

    # ------------------------------------------------------------------------------------------------ draining
    def _drain(self, m):
        """Until nothing of the QP is on its way; nothing else is done meanwhile."""
        wait = Signal(2)  # the count of the cycle before last is compared
        empty = Signal()
        m.d.sync += empty.eq(self._s.issued == self.count)
        yield
        with m.State("Wait"):
            m.d.sync += wait.eq(Mux(wait == 3, 3, wait + 1))
            with m.If((wait == 3) & empty):
                m.d.sync += wait.eq(0)
                with m.If(self._event == self._drn):
                    m.d.comb += self.drained.eq(1)
                    m.next = "Save"
                with m.Else():
                    self._list(m)
                    m.next = "Forget"
