"""Judges an answer while READs or ATOMICs are unanswered, and every response that carries data."""

from amaranth import *
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi import VendorError, WcStatus, WqeOpcode
from ..config import Params
from ..records import ReadEntry
from ..wire.opcode import Opcode
from ..wire.syndrome import SYNDROME, AethType

__all__ = ["DATA_OPCODES", "ResponseCheck"]

_FIRST, _MIDDLE, _LAST, _ONLY = (
    Opcode.RC_READ_RESP_FIRST.value, Opcode.RC_READ_RESP_MIDDLE.value, Opcode.RC_READ_RESP_LAST.value,
    Opcode.RC_READ_RESP_ONLY.value,
)  # fmt: skip
DATA_OPCODES = (_FIRST, _MIDDLE, _LAST, _ONLY, Opcode.RC_ATOMIC_ACK.value)
"""Wire opcodes of responses that only a READ or ATOMIC can have."""


class ResponseCheck(wiring.Component):
    """One answer inside [una, next PSN) against the oldest READ or ATOMIC that is not fully answered.

    That one expects PSN ``una`` once a part of its data came, else its first PSN. An answer past the expected PSN, or an ACK
    that names it, is an ``implied`` NAK (R-RSP-3, R-RSP-4). A response with data is accepted (``accept``) only with exactly
    the expected PSN. Otherwise ``status`` says why it fails, in this order: no READ or ATOMIC expects it, wrong kind, AETH not
    an ACK, MIDDLE or LAST as the first response (BAD_RESP_ERR); FIRST or MIDDLE without exactly PMTU bytes or without more to
    come, LAST or ONLY without exactly the rest (R-RSP-5: LOC_LEN_ERR). After data has come, FIRST and ONLY are as good as
    MIDDLE and LAST: a retried READ may go on either way (R-RSP-6).

    Ports in: ``opcode``, ``syndrome``, ``length`` (payload bytes) of the answer, ``ahead`` its PSN - una; ``una``; ``open``, a
    READ or ATOMIC is unanswered, ``entry`` is its entry and ``received`` its bytes so far; ``path_mtu``.
    Out: ``accept``, ``final`` (the READ or ATOMIC is answered with it), ``passes`` (it acknowledges SENDs or WRITEs),
    ``next_received``; ``implied``, ``expected`` (PSN - una); ``wrong``, ``status``.

    Timing: outputs are those of the inputs 2 cycles before, of ``opcode`` 3 cycles before; register stages, no control.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "opcode": In(8), "syndrome": In(SYNDROME), "length": In(13), "ahead": In(24), "una": In(24), "open": In(1),
            "entry": In(ReadEntry(p)), "received": In(32), "path_mtu": In(3),
            "accept": Out(1), "final": Out(1), "passes": Out(1), "next_received": Out(32),
            "implied": Out(1), "expected": Out(24), "wrong": Out(1), "status": Out(WcStatus), "vendor_err": Out(VendorError),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        entry = self.entry
        # ---- what depends on the answer alone
        follows, ends, atomic, with_aeth, data = (
            Signal(name=n) for n in ("follows", "ends", "atomic", "with_aeth", "data"))  # fmt: skip
        m.d.sync += [sig.eq(0) for sig in (follows, ends, atomic, with_aeth, data)]
        with m.Switch(self.opcode):  # a cycle before stage 1
            for code in DATA_OPCODES:
                with m.Case(code):
                    m.d.sync += [
                        data.eq(1),
                        atomic.eq(code == Opcode.RC_ATOMIC_ACK.value),
                        follows.eq(code in (_MIDDLE, _LAST)),
                        ends.eq(code in (_LAST, _ONLY, Opcode.RC_ATOMIC_ACK.value)),
                        with_aeth.eq(code != _MIDDLE),
                    ]
        pmtu = Signal(13)
        is_ack_aeth = Signal()
        m.d.comb += [pmtu.eq((1 << 7) << self.path_mtu), is_ack_aeth.eq(self.syndrome.type == AethType.ACK)]
        # ---- stage 1: distances, and the checks without any
        gap, remaining = Signal(24, name="gap"), Signal(32, name="remaining")
        plain, data_1, ends_1, atomic_1, fits_1, empty, full = (
            Signal(name=n)
            for n in ("plain_ack", "data_1", "ends_1", "atomic_1", "fits_1", "empty", "full"))  # fmt: skip
        started = Signal()
        m.d.comb += started.eq(self.received != 0)
        m.d.sync += [
            gap.eq(Mux(started, 0, entry.first_psn - self.una)),
            remaining.eq(entry.length - self.received),
            plain.eq(~data & is_ack_aeth),
            data_1.eq(data),
            ends_1.eq(ends),
            atomic_1.eq(atomic),
            # R-RSP-5, R-RSP-6
            fits_1.eq(((entry.opcode == WqeOpcode.READ) ^ atomic) & (~with_aeth | is_ack_aeth) & (started | ~follows)),
            empty.eq(self.length == 0),
            full.eq(self.length == pmtu),
        ]
        # ---- stage 2: compares
        at, past, more, rest, length_ok = (
            Signal(name=n) for n in ("at", "past", "more", "rest_is_length", "length_ok"))  # fmt: skip
        m.d.comb += [
            more.eq((remaining >> 7 >> self.path_mtu).any() & (remaining != pmtu)),  # than one packet holds; R-RSP-5
            rest.eq(remaining == self.length),
        ]
        m.d.sync += [
            self.expected.eq(gap),
            at.eq(self.open & (self.ahead == gap)),  # R-RSP-3
            past.eq(self.open & (self.ahead > gap)),  # R-RSP-3, R-RSP-4
            self.implied.eq(self.open & Mux(plain, self.ahead >= gap, self.ahead > gap)),  # R-RSP-3
            length_ok.eq(Mux(atomic_1, empty, Mux(ends_1, rest & ~more, full & more))),  # R-RSP-5
            self.passes.eq(gap != 0),
            self.next_received.eq(Mux(ends_1, 0, self.received + pmtu)),
        ]
        # ---- verdict
        fits = Signal()
        m.d.comb += [
            fits.eq(at & fits_1),
            self.accept.eq(data_1 & fits & length_ok),
            self.final.eq(ends_1),
            self.wrong.eq(data_1 & ~past & ~(fits & length_ok)),
            self.status.eq(Mux(fits, WcStatus.LOC_LEN_ERR, WcStatus.BAD_RESP_ERR)),
            self.vendor_err.eq(VendorError.BAD_RESPONSE),
        ]
        with m.If(self.implied):
            m.d.comb += [self.status.eq(WcStatus.RETRY_EXC_ERR), self.vendor_err.eq(VendorError.NAK_SEQUENCE)]
        return m
