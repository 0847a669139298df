"""The records that move between blocks: the contract of the inside, as `rnic.abi` is that of the outside.

Every record is a layout built from `Params` and travels on an ``amaranth.lib.stream`` (valid, ready, payload). The order
rule that holds on every stream of descriptors: **items of one QP keep their order; items of different QPs may overtake**.
So a block may park the descriptors of one QP that waits and let the others pass, without its neighbours noticing.

Payload moves on `stream.Beat` streams, packed: byte 0 of the packet in lane 0, no beat for a packet of zero bytes.
"""

from amaranth.lib import data, enum, stream
from amaranth.lib.wiring import In, Out, Signature

from .abi import CtxTable, EventType, VendorError, WcOpcode, WcStatus
from .abi.queues import SGE
from .config import Params

__all__ = [
    "AckJob", "CqeRequest", "CtxBus", "CtxWrite", "DmaCommand", "DmaReadSignature", "DmaWriteSignature", "Doorbell",
    "EventRequest", "FetchJob", "FetchedWqe", "GatherSegment", "LandJob", "LandResult", "LandTag", "Outstanding", "Probe",
    "ProbeEvent", "QpError", "QpEvent", "ReadEntry", "ReadWord", "RequestDesc", "ResponseDesc", "Rewind", "RxDrop",
    "SendFailure", "SqFlush", "TxHeader", "TxJob", "XlateRequest", "XlateResponse", "XlateSignature", "XlateStatus",
]  # fmt: skip

SGE_LAYOUT = data.FlexibleLayout(SGE.layout.size, dict(SGE.layout))


# ---------------------------------------------------------------------------------------------------------- receive
class RxDrop(enum.Enum, shape=5):
    """Why a received frame went no further; the value is the index of its counter (`abi.registers.COUNTERS`)."""

    ACCEPTED = 0
    BAD_LENGTH = 2
    BAD_IP = 3
    BAD_ICRC = 4
    BAD_BTH = 5
    MAC_ERROR = 6
    NO_SPACE = 7
    ETH_OVERFLOW = 8
    NOT_FOR_US = 9
    NO_QP = 10
    BAD_TYPE = 11
    BAD_PKEY = 12
    BAD_QKEY = 13
    BAD_ADDRESS = 14
    DUPLICATE = 15
    OUT_OF_SEQUENCE = 16
    BAD_RESPONSE = 17
    QP_ERROR = 24


class RequestDesc(data.StructLayout):
    """An inbound request that passed the filter: the QP exists, runs, and the packet is from its peer.

    ``head`` names the first packet-store cell; meaningful when ``length`` is not 0. Whoever ends the packet reads the
    cells (which frees them) or frees them.
    """

    def __init__(self, p: Params):
        super().__init__({
            "qpn": p.qpn_bits,
            "opcode": 8,  # wire.Opcode
            "psn": 24,
            "solicited": 1,
            "ackreq": 1,
            "pad": 2,
            "length": 13,  # payload bytes 0..4096, pad not counted (larger is dropped by the parser)
            "head": p.cell_bits,
            "va": 64,  # RETH or AtomicETH
            "rkey": 32,
            "dma_length": 32,
            "swap": 64,
            "compare": 64,
            "imm": 32,  # ImmDt bytes as on the wire, or the IETH key as a number
            "src_qp": 24,  # DETH
            "ce": 1,  # ECN congestion mark (R-CC-2)
        })  # fmt: skip


class ResponseDesc(data.StructLayout):
    """An inbound response (ACK, NAK, READ response, ATOMIC ACK) that passed the filter."""

    def __init__(self, p: Params):
        super().__init__({
            "qpn": p.qpn_bits,
            "opcode": 8,
            "psn": 24,
            "pad": 2,
            "length": 13,
            "head": p.cell_bits,
            "syndrome": 8,
            "msn": 24,
            "original": 64,  # AtomicAckETH
        })  # fmt: skip


# --------------------------------------------------------------------------------------------------------- transmit
class TxHeader(data.StructLayout):
    """What the builder needs besides the address context of ``qpn``; travels with (before) its payload packet."""

    def __init__(self, p: Params):
        super().__init__({
            "qpn": p.qpn_bits,
            "opcode": 8,
            "psn": 24,
            "solicited": 1,
            "ackreq": 1,
            "length": 13,  # payload bytes, 0..4096; 0: no payload packet follows
            "va": 64,
            "rkey": 32,
            "dma_length": 32,
            "swap": 64,  # also the original value of an ATOMIC ACK
            "compare": 64,
            "imm": 32,  # bytes as on the wire (ImmDt) or number (IETH)
            "syndrome": 8,
            "msn": 24,
        })  # fmt: skip


class GatherSegment(data.StructLayout):
    """A piece of a packet's payload in host memory. ``last`` closes the packet; packets without payload have none."""

    def __init__(self, p: Params):
        super().__init__({
            "va": 64,
            "lkey": 32,
            "length": 13,  # 0..4096; 0 touches nothing (R-WQ-4)
            "last": 1,
        })  # fmt: skip


class TxJob(data.StructLayout):
    """Segmenter to payload fetch: one packet; its `GatherSegment`s follow on their own stream in the same order."""

    def __init__(self, p: Params):
        super().__init__({
            "header": TxHeader(p),
            "pd": 24,
            "wqe_index": 16,
            "marker": 1,  # no packet: leaves the payload fetch when all packets before it have left (qp.fence)
            "inline": 1,  # payload comes on the segmenter's inline stream (R-WQ-5), there are no segments
        })  # fmt: skip


class SendFailure(data.StructLayout):
    """A send WQE that failed locally (segmenter: before its first packet; payload fetch: after its PSNs were given out).
    The completer reports it when it is the oldest (R-ERR-7)."""

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits, "wqe_index": 16, "status": WcStatus, "vendor_err": VendorError})


class AckJob(data.StructLayout):
    """An ACK or NAK to send; with ``atomic`` an ATOMIC ACK with the ``original`` value."""

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits, "psn": 24, "syndrome": 8, "msn": 24, "atomic": 1, "original": 64})


# -------------------------------------------------------------------------------------------------------- requester
class QpEvent(data.StructLayout):
    """A QP has something to do (SQ doorbell, progress of the completer, state change)."""

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits})


class Doorbell(data.StructLayout):
    """A doorbell whose id is in range. ``counter``: SQ, RQ 16 bits used; CQ 24 bits used. ``arm``: CQ bits 31:30."""

    def __init__(self, id_bits: int):
        super().__init__({"id": id_bits, "counter": 24, "arm": 2})


class Rewind(data.StructLayout):
    """Segmenter to scheduler: fetch again from ``index``; what was fetched under an older epoch will be thrown away.
    ``sleep``: not before another event of the QP (fence, READ limit)."""

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits, "index": 16, "epoch": 8, "sleep": 1})


class SqFlush(data.StructLayout):
    """Scheduler to completer: the QP is in ERR and its SQ has WQEs up to ``producer`` to flush (R-ERR-3, R-ERR-5)."""

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits, "producer": 16})


class FetchJob(data.StructLayout):
    """Read ``count`` consecutive send WQEs of a QP from ring counter ``index`` on; never past the end of the ring."""

    def __init__(self, p: Params):
        super().__init__({
            "qpn": p.qpn_bits,
            "index": 16,
            "count": p.wqe_batch_bits,
            "marker": 1,  # no WQE: passes the street behind everything before it (qp.fence); count is 1
            "epoch": 8,
            "log_sq": 4,
            "log_stride": 4,
        })  # fmt: skip


class FetchedWqe(data.StructLayout):
    """A send WQE as read from the ring (128 bytes; with a 64-byte stride the upper half is 0)."""

    def __init__(self, p: Params):
        super().__init__({
            "qpn": p.qpn_bits,
            "index": 16,
            "epoch": 8,
            "marker": 1,  # not a WQE (FetchJob.marker)
            "bounced": 1,  # not a WQE: fetch jobs behind this, up to this epoch, were thrown away
            "error": 1,  # the ring could not be read
            "wqe": 1024,
        })  # fmt: skip


class Outstanding(data.StructLayout):
    """What is remembered of a send WQE from its first packet until it is retired; one memory, entry
    ``qpn * sq_outstanding + index % sq_outstanding``, written by the segmenter, read by the completer."""

    def __init__(self, p: Params):
        super().__init__({
            "last_psn": 24,
            "first_psn": 24,
            "opcode": 4,  # abi.WqeOpcode, 15 when it has more bits
            "signaled": 1,
            "length": 32,
        })  # fmt: skip


class ReadEntry(data.StructLayout):
    """A READ or ATOMIC from its request until its data has landed; one memory, entry
    ``qpn * max_rd_atomic + number % max_rd_atomic``, written by the segmenter, read by the completer."""

    def __init__(self, p: Params):
        super().__init__({
            "first_psn": 24,
            "last_psn": 24,
            "opcode": 4,  # abi.WqeOpcode
            "length": 32,
            "wqe_index": 16,
            "sges": data.ArrayLayout(SGE_LAYOUT, p.max_sge),
        })  # fmt: skip


class LandTag(enum.Enum, shape=2):
    """What a landing job is for; comes back in its result."""

    PART = 0  # data, the READ goes on
    LAST = 1  # data, the READ or ATOMIC ends with it
    SWEEP = 2  # no data: passes the street behind all landings before it; then the QP's error is reported
    FLUSH = 3  # no data: as SWEEP, then the send queue is flushed up to `index`


class LandJob(data.StructLayout):
    """Completer to the responder's data mover: payload of a READ response, or the value of an ATOMIC ACK, to the SGEs of a
    send WQE from byte ``offset`` on. Every job has one `LandResult`, in order."""

    def __init__(self, p: Params):
        super().__init__({
            "qpn": p.qpn_bits,
            "tag": LandTag,
            "psn": 24,
            "pd": 24,
            "index": 16,  # counter of the send WQE; FLUSH: producer
            "head": p.cell_bits,
            "length": 13,  # payload bytes; 0 without data
            "offset": 32,
            "immediate": 1,  # the 8 bytes are `value` (R-AT-2: little-endian in memory), not in the packet store
            "value": 64,
            "sges": data.ArrayLayout(SGE_LAYOUT, p.max_sge),
        })  # fmt: skip


class LandResult(data.StructLayout):
    """A landing job's end: all its write responses came, or it failed with ``status``."""

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits, "tag": LandTag, "index": 16, "status": WcStatus, "vendor_err": VendorError})


# ----------------------------------------------------------------------------------------------------- completion
class CqeRequest(data.StructLayout):
    """A CQE to write; the CQE writer adds stamp and phase."""

    def __init__(self, p: Params):
        super().__init__({
            "cqn": p.cqn_bits,
            "qpn": 24,
            "wqe_counter": 16,
            "opcode": WcOpcode,
            "status": WcStatus,
            "vendor_err": VendorError,
            "byte_len": 32,
            "imm": 32,
            "src_qp": 24,
            "flags": 8,  # abi.CqeFlags
        })  # fmt: skip


class QpError(data.StructLayout):
    """An engine found an error that ends the QP: the command engine moves it to ERR, then both sides flush. ``event`` goes to
    event queue 0 when no CQE reports the error; NONE otherwise."""

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits, "event": EventType})


class EventRequest(data.StructLayout):
    """An EQE to write; the event queue writer adds stamp and phase."""

    def __init__(self, p: Params):
        super().__init__({"eqn": p.eqn_bits, "type": EventType, "id": 24})


# -------------------------------------------------------------------------------------------------------- memory
class XlateStatus(enum.Enum, shape=3):
    """Outcome of a protection check and translation (numbers of VendorError minus 2, OK apart)."""

    OK = 0
    KEY = 1  # no such key or stale variant (R-MR-1)
    PD = 2  # R-MR-4
    RIGHTS = 3
    BOUNDS = 4  # R-MR-2
    HOST_BUS = 5  # the page table could not be read
    MISS = 6  # to `hit_only` alone: the access is allowed, its page table has to be read


class XlateRequest(data.StructLayout):
    """Check an access and translate its first byte.

    ``ring`` 0: ``key`` is an lkey/rkey: index, variant, PD and rights are checked. ``ring`` 1: ``key`` is the entry
    number in the translation table (config.Params.tpt_*_base + id) and only the bounds are checked.
    The whole range [va, va + length) is checked (R-MR-2); length 0 is never sent. ``hit_only``: answer MISS at once instead of
    waiting for a page table. ``invalidate``: no bounds are checked and nothing is translated; the answer, OK, comes when the
    entry is not valid any more and no translation of it is left (19.2).
    """

    def __init__(self, p: Params, tag_bits: int):
        super().__init__({
            "tag": tag_bits,
            "ring": 1,
            "key": 32,
            "pd": 24,
            "rights": 8,  # abi.Access bits that must all be set; 0 for a local read
            "va": 64,
            "length": 32,  # 1..2^31
            "hit_only": 1,
            "invalidate": 1,
        })  # fmt: skip


class XlateResponse(data.StructLayout):
    """``address`` is physical, good for ``span`` bytes (1..4096, at most the request's length): up to the page's end.

    A client asks again for the rest. Responses to one client come in any order; the tag tells which.
    """

    def __init__(self, p: Params, tag_bits: int):
        super().__init__({"tag": tag_bits, "status": XlateStatus, "address": 64, "span": 13})


def XlateSignature(p: Params, tag_bits: int):  # noqa: N802 (a signature)
    """A client's two streams to the translation block (client side: request out, response in)."""
    return Signature({
        "request": Out(stream.Signature(XlateRequest(p, tag_bits))),
        "response": In(stream.Signature(XlateResponse(p, tag_bits))),
    })  # fmt: skip


class DmaCommand(data.StructLayout):
    """A host access: ``length`` bytes (1..65535) from physical ``address``."""

    def __init__(self):
        super().__init__({"address": 64, "length": 16})


class ReadWord(data.StructLayout):
    """One raw bus word of a host read: ``count`` (1..lanes) valid bytes from lane ``first``; ``err`` with ``last``."""

    def __init__(self, p: Params):
        super().__init__({
            "data": p.data_width,
            "first": p.lane_bits,
            "count": p.lane_bits + 1,
            "last": 1,
            "err": 1,
        })  # fmt: skip


def DmaReadSignature(p: Params):  # noqa: N802
    """A client's streams to the DMA read engine (client side). Responses come in request order."""
    return Signature({
        "command": Out(stream.Signature(DmaCommand())),
        "word": In(stream.Signature(ReadWord(p))),
    })  # fmt: skip


def DmaWriteSignature(p: Params):  # noqa: N802
    """A client's streams to the DMA write engine (client side).

    ``accepted`` one item a command, in order, when AW and all W beats are taken; ``done`` one item a command, in order,
    when every write response came (payload 1: an error response).
    """
    from .stream.beat import Beat

    return Signature({
        "command": Out(stream.Signature(DmaCommand())),
        "data": Out(stream.Signature(Beat(p.data_width))),
        "accepted": In(stream.Signature(1)),
        "done": In(stream.Signature(1)),
    })  # fmt: skip


# -------------------------------------------------------------------------------------------------- context bus
class CtxWrite(data.StructLayout):
    """A write of the command engine into a context table: ``bytes`` masks the four bytes of ``word``."""

    def __init__(self, p: Params):
        super().__init__({
            "table": CtxTable,
            "index": max(p.tpt_bits, p.qpn_bits, p.cqn_bits),
            "word": 5,
            "bytes": 4,
            "data": 32,
        })  # fmt: skip


def CtxBus(p: Params):  # noqa: N802
    """The command engine's write bus, broadcast to all tables; a table ready means it took (or ignores) the write."""
    return stream.Signature(CtxWrite(p))


# ------------------------------------------------------------------------------------------------------ debug
class ProbeEvent(enum.Enum, shape=6):
    """What a probe record reports. The order is that of a message's life."""

    NONE = 0
    SQ_DOORBELL = 1  # index = producer counter
    RQ_DOORBELL = 2
    CQ_DOORBELL = 3
    SCHEDULED = 4  # the scheduler gave the QP a turn; index = first WQE, length = WQEs
    WQE_FETCH = 5  # host read of WQEs issued; index, length = bytes
    WQE_PARSED = 6  # index, opcode = WqeOpcode, length = message bytes
    PACKET_MADE = 7  # psn, opcode = wire opcode, length = payload
    LOCAL_TRANSLATED = 8  # psn, length = bytes of this segment
    PAYLOAD_READ = 9  # host read of payload issued; psn, length
    PAYLOAD_ARRIVED = 10  # first payload beat of a packet left the packer; psn
    FRAME_OUT = 11  # first beat of a frame on net_tx; psn, opcode, length = payload
    FRAME_IN = 12  # a frame passed parser and ICRC; psn, opcode, length; qpn = destination QPN
    FRAME_DROPPED = 13  # opcode = RxDrop
    REQUEST_CHECKED = 14  # responder: sequence checks done; psn, opcode
    RECV_WQE_TAKEN = 15  # index
    RECV_WQE_FETCHED = 16  # index
    REMOTE_TRANSLATED = 17  # key checked and address translated; psn, length
    DATA_PLACED = 18  # last write beat accepted by the host; psn, length
    ACK_SENT = 19  # psn, opcode = syndrome
    RESPONSE_IN = 20  # completer took a response; psn, opcode = syndrome
    WQE_RETIRED = 21  # index, opcode = WcStatus
    CQE_WRITTEN = 22  # host took the CQE; index = WQE counter, opcode = WcOpcode, length = status
    QP_ERROR = 23
    COMMAND = 24  # opcode = Command, length = CmdStatus
    LOCAL_FAILED = 25  # send WQE failed locally; index, opcode = WcStatus
    EQE_WRITTEN = 26  # host took the EQE; qpn = its id, index = EQN, opcode = EventType


class Probe(data.StructLayout):
    """One probe record: valid is bit 0 and rises for one cycle per event. Fixed size whatever the configuration."""

    def __init__(self):
        super().__init__({
            "valid": 1,
            "event": ProbeEvent,
            "qpn": 24,
            "index": 16,
            "psn": 24,
            "opcode": 8,
            "length": 32,
        })  # fmt: skip
