"""Records between the blocks of the responder."""

from amaranth import Value
from amaranth.lib import data, enum

from ..abi import VendorError, WcStatus
from ..abi.queues import RECV_SGES
from ..config import Params
from ..records import SGE_LAYOUT, LandTag
from .parking import Ticket

__all__ = [
    "Answer", "AtomicOp", "FetchedJob", "Job", "JobKind", "Piece", "PlaceTicket", "Placed", "Progress", "Release", "Segment",
    "Walked", "is_barrier", "list_sges", "max_segments",
]  # fmt: skip


def list_sges(p: Params) -> int:
    """SGEs of the longest list data goes to: that of a receive WQE, or of a READ."""
    return max(RECV_SGES, p.max_sge)


def max_segments(p: Params) -> int:
    """Segments of a packet: 4096 bytes over a list of SGEs, each crossing at most one 4 KiB border."""
    return 2 * list_sges(p)


class JobKind(enum.Enum, shape=3):
    """What a job asks of memory."""

    NONE = 0  # nothing: an answer, or a packet to throw away
    WRITE = 1  # payload to va under rkey
    SEND = 2  # payload to the SGEs of the receive WQE
    FLUSH = 3  # no packet: with `complete`, complete all receive WQEs up to `index` with WR_FLUSH_ERR (R-ERR-3)
    READ = 4  # a READ request: its key is checked here, its data is read when the answers before it are sent
    ATOMIC = 5  # CMP_SWAP or FETCH_ADD: key and address are found here; executed when all writes before it are done
    REPLAY = 6  # a duplicate READ or ATOMIC (R-DUP-3, R-DUP-5): nothing but an answer, if it is still known


class AtomicOp(enum.Enum, shape=2):
    """What a READ, ATOMIC or REPLAY job asks for (in `flags` of the job)."""

    READ = 0
    CMP_SWAP = 1
    FETCH_ADD = 2


def _answer(p: Params) -> dict:
    """The part of a job that decides on the answer and the completion: it lives until the end of the street."""
    return {
        "kind": JobKind,
        "qpn": p.qpn_bits,
        "psn": 24,
        "length": 13,  # payload bytes
        "respond": 1,  # an ACK or NAK goes out when the job is done
        "syndrome": 8,
        "response_psn": 24,
        "msn": 24,  # in that answer
        "fatal": 1,  # the answer ends the QP (8.2)
        "in_use": 1,  # a failure of this job completes receive WQE `index` in error (8.2)
        "complete": 1,  # success completes receive WQE `index`
        "index": 16,  # counter of the receive WQE; FLUSH: producer; ATOMIC: number of its operands
        "cqn": p.cqn_bits,
        "write_imm": 1,  # the completion is RECV_RDMA_WITH_IMM, else RECV
        "flags": 8,  # abi.CqeFlags; READ, ATOMIC, REPLAY: AtomicOp
        "imm": 32,  # READ, ATOMIC, REPLAY: R_Key
        "byte_len": 32,  # R-CQ-3; READ, REPLAY: bytes to read
        "va": 64,
        "land": 1,  # no request but data of an own READ or ATOMIC (kind SEND); `index` is its send WQE
        "tag": LandTag,
    }


class Job(data.StructLayout):
    """An inbound request after the checks that need only its header and its QP's context; also a flush."""

    def __init__(self, p: Params):
        super().__init__({
            **_answer(p),
            "head": p.cell_bits,
            "has_data": 1,  # length is not 0
            "msn_before": 24,  # in the NAK when placing fails (R-MSN-1)
            "dropped": 1,  # thrown away because the QP is in error (counted)
            "rkey": 32,
            # WRITE, READ, ATOMIC: bytes from this packet to the message's end; SEND: bytes before this packet
            "resid": 32,
            "pd": 24,
            "nak_after_key": 1,  # check 8 failed: NAK invalid request, unless the key check before it fails
            "starts": 1,  # first packet of its message; READ, ATOMIC: has bytes, so that its key is checked (R-RES-2)
            "fetch": 1,  # read receive WQE `index`
            "log_rq": 4,
            "immediate": 1,  # landing: the payload is the 8 bytes of `va` (result of an ATOMIC)
        })  # fmt: skip


class FetchedJob(data.StructLayout):
    """A job with the SGEs of its message (SEND: of the receive WQE, landing: of the send WQE); ``wqe_error``: the receive WQE
    could not be read."""

    def __init__(self, p: Params):
        super().__init__({
            "qpn": p.qpn_bits,
            "job": Job(p),
            "sges": data.ArrayLayout(SGE_LAYOUT, list_sges(p)),
            "wqe_error": VendorError,  # NONE: read
        })  # fmt: skip


def is_barrier(job) -> Value:
    """Is it the flush event of QP 0, which comes out behind everything of all QPs (qp.fence)?"""
    return (job.kind == JobKind.FLUSH) & (job.qpn == 0)


class Progress(data.StructLayout):
    """What is known of a job that waited for a page table. ``done`` bytes of its packet have a place: ``count`` segments are
    remembered, and ``bytes`` lie at ``address``, unless that failed (``vendor_err``). ``ended``: the key of a SEND with
    invalidate is no more, unless that failed."""

    def __init__(self, p: Params):
        super().__init__({
            "count": range(max_segments(p) + 1), "done": 13, "address": 64, "bytes": 13, "ended": 1, "vendor_err": VendorError,
        })  # fmt: skip


class PlaceTicket(Ticket):
    """A job on its way through `Place`."""

    def __init__(self, p: Params):
        super().__init__(FetchedJob(p), Progress(p), p.parking_slots, p.qpn_bits)


class Walked(data.StructLayout):
    """A job whose ``pieces`` translations were asked for: pieces of one region each, not yet split at page ends. What is known
    from an earlier attempt is in ``note``."""

    def __init__(self, p: Params):
        members = dict(PlaceTicket(p).members)
        super().__init__({
            **{name: members[name] for name in ("qpn", "slot", "again", "barrier", "color", "note")},
            "job": Job(p),
            "pieces": 3,
            "too_long": 1,  # check 10: the message does not fit the receive WQE
            "wqe_error": VendorError,
        })  # fmt: skip


class Piece(data.StructLayout):
    """What is remembered with a translation: where the piece lies and how much of the packet goes there."""

    def __init__(self):
        super().__init__({"va": 64, "key": 32, "length": 13})


class Placed(data.StructLayout):
    """A job whose data is on its way to memory in ``writes`` write commands, or that failed with ``status``."""

    def __init__(self, p: Params):
        super().__init__({
            **_answer(p),
            "writes": 4,
            "status": WcStatus,  # of receive WQE `index` when `fatal` and `in_use`
            "vendor_err": VendorError,
        })  # fmt: skip


class Segment(data.StructLayout):
    """A run of bytes in physical memory; ``last`` ends a packet. ``atomic``: the word of an ATOMIC, without a packet."""

    def __init__(self):
        super().__init__({"address": 64, "length": 13, "last": 1, "atomic": 1})


class Answer(data.StructLayout):
    """What the jobs of a QP answer, in order. ``kind`` NONE: an ACK or NAK; READ, ATOMIC, REPLAY: the request itself."""

    def __init__(self, p: Params):
        super().__init__({
            "kind": JobKind,
            "qpn": p.qpn_bits,
            "psn": 24,
            "syndrome": 8,
            "msn": 24,
            "va": 64,
            "rkey": 32,
            "length": 32,
            "op": AtomicOp,
        })  # fmt: skip


class Release(data.StructLayout):
    """The oldest READ or ATOMIC of ``qpn`` not yet released may be answered: the writes before it are done.

    ``atomic``: it is the ATOMIC whose operands have number ``index``. ``dead``: the QP failed, nothing is to be executed.
    """

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits, "atomic": 1, "op": AtomicOp, "index": 16, "dead": 1})
