"""What moves through the pipe of the responder's sequence stage."""

from amaranth.lib import data

from ..config import Params
from ..records import RequestDesc
from ..wire.opcode import OpcodeFlags
from .records import AtomicOp

__all__ = ["Cfg", "Checked", "Hot", "Item", "Judged", "Message", "NakState", "SECOND_HALF"]


class NakState:
    """Values of ResponderHot.nak_state."""

    NONE, SEQUENCE, RNR, FATAL = range(4)


class Message:
    """Values of ResponderHot.message."""

    NONE, SEND, WRITE = range(3)


class Item(data.StructLayout):
    """What enters the pipe: a request, or (``event``) a flush or (``doorbell`` also set) a doorbell of ``desc.qpn``."""

    def __init__(self, p: Params):
        super().__init__({"desc": RequestDesc(p), "event": 1, "doorbell": 1})


class Cfg(data.StructLayout):
    """What the later stages need of RESPONDER_CFG."""

    def __init__(self, p: Params):
        super().__init__({"pd": 24, "log_rq": 4, "cqn": p.cqn_bits, "min_rnr_timer": 5, "max_dest_rd_atomic": 8})


class Hot(data.StructLayout):
    """What the later stages need of the first half of RESPONDER_HOT as read."""

    def __init__(self):
        super().__init__({
            "epsn": 24, "nak_state": 2, "msn": 24, "message": 2, "rq_index": 16, "cqe_index": 16, "requests": 8,
        })  # fmt: skip


SECOND_HALF = ("va", "rkey", "ack_psn", "total")  # fields of RESPONDER_HOT in the second half of its record


class Judged(data.StructLayout):
    """What stage 3 adds to the item."""

    def __init__(self, p: Params):
        super().__init__({
            "cfg": Cfg(p),
            "hot": Hot(),
            "producer": 16,
            "has_data": 1,
            "drop": 1,
            "in_error": 1,
            "order_ok": 1,  # check 2
            "access_ok": 1,  # check 3
            "open_requests": 8,  # READs and ATOMICs not yet answered
            "no_rwqe": 1,  # check 5
            "length_ok": 1,  # check 6
            "is_send": 1,
            "is_write": 1,
            "is_read": 1,
            "is_atomic": 1,
            "op": AtomicOp,
            "resid": 32,
        })  # fmt: skip


class Checked(data.StructLayout):
    """All that stage 4 needs."""

    def __init__(self, p: Params):
        super().__init__({"item": Item(p), "flags": OpcodeFlags, "rkey": 32, "total": 32, **Judged(p).members})
