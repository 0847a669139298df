"""The answering half of `Resources`: turns, READ packets, ACKs, duplicates, draining."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import wiring

from ..wire.opcode import Opcode
from ..wire.syndrome import NakCode, ack_syndrome, nak_syndrome
from .records import Answer, AtomicOp
from .resource_records import NUMBER_BITS

__all__ = ["ResourceTurns"]


class ResourceTurns(wiring.Component):
    """Parts of the FSM of `Resources`, which sets the attributes and the ports: each makes its logic up to its ``yield``, and its
    states behind it."""

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
            ends.eq(((s.next + 1)[:NUMBER_BITS] == s.released) & ~s.tail.valid),
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
        back = Signal(NUMBER_BITS)  # requests before the newest one
        known = Signal(NUMBER_BITS)
        unanswered = Signal(NUMBER_BITS)
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
