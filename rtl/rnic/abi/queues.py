"""Work queue, completion queue and event queue elements in host memory, and the numbers in them."""

from amaranth.lib import enum

from .fields import Struct

__all__ = [
    "CQE", "CQE_BYTES", "EQE", "EQE_BYTES", "EventType", "RECV_WQE", "RECV_SGES", "SEND_WQE", "SGE", "SGE_BYTES", "CqeFlags",
    "SendFlags", "VendorError", "WcOpcode", "WcStatus", "WqeOpcode", "MIN_LOG_STRIDE", "MAX_LOG_STRIDE", "inline_bytes",
    "send_sges",
]  # fmt: skip

MIN_LOG_STRIDE = 6  # a send WQE takes 64 or 128 bytes (per QP); a receive WQE always 64
MAX_LOG_STRIDE = 7
SGE_BYTES = 16
CQE_BYTES = 32
EQE_BYTES = 16
RECV_SGES = 4


class WqeOpcode(enum.IntEnum, shape=8):
    """Operation of a send WQE."""

    SEND = 0
    SEND_IMM = 1
    SEND_INV = 2
    WRITE = 3
    WRITE_IMM = 4
    READ = 5
    CMP_SWAP = 6
    FETCH_ADD = 7
    LOCAL_INV = 8
    BIND_MW = 9


class SendFlags(enum.IntFlag, shape=8):
    """Flags of a send WQE."""

    SIGNALED = 1  # a CQE on success
    SOLICITED = 2  # SE bit on the last packet (R-REQ-3)
    FENCE = 4  # wait for all earlier READs and ATOMICs (R-ORD-2)
    INLINE = 8  # data lies in the WQE from byte 32 on (R-WQ-5)


class WcStatus(enum.IntEnum, shape=8):
    """Completion status; the numbers are those of ibv_wc_status (rules.md 10)."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21


class WcOpcode(enum.IntEnum, shape=8):
    """Operation in a CQE (R-CQ-2); the numbers are those of ibv_wc_opcode."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    RECV = 0x80
    RECV_RDMA_WITH_IMM = 0x81


class CqeFlags(enum.IntFlag, shape=8):
    """Flags of a CQE."""

    WITH_IMM = 1
    WITH_INV = 2
    GRH = 4
    SOLICITED = 8


class EventType(enum.IntEnum, shape=8):
    """What an EQE reports (rules.md 16). ``id`` of the EQE is the QPN or the CQN."""

    NONE = 0
    COMPLETION = 1  # an armed CQ has a new CQE (R-CQ-5)
    CQ_ERR = 2  # the CQ is in error (R-CQ-6)
    QP_FATAL = 3  # a host-bus error of the QP that no CQE reports
    QP_REQ_ERR = 4  # the peer's request was invalid and no receive WQE was in use (8.2)
    QP_ACCESS_ERR = 5  # the peer had no right to what it asked for, and no receive WQE was in use (8.2)


class VendorError(enum.IntEnum, shape=8):
    """Why a completion failed, in the model's own terms (``vendor_err`` of a CQE; 0 for success and flush, R-ERR-2)."""

    NONE = 0
    BAD_WQE_OPCODE = 1  # operation unknown or not allowed on this QP type
    BAD_WQE_LENGTH = 2  # longer than 2^31, or SGE list does not fit the WQE
    KEY_INVALID = 3  # no such key, or stale variant (R-MR-1)
    KEY_PD = 4  # PD of the key is not that of the QP (R-MR-4)
    KEY_RIGHTS = 5  # the MR lacks the right
    KEY_BOUNDS = 6  # outside the MR (R-MR-2)
    HOST_BUS = 7  # error response on the host bus
    RECV_TOO_SMALL = 8  # message longer than the receive WQE
    REMOTE_NAK = 9  # the responder answered a NAK; the status says which
    NAK_SEQUENCE = 10  # sequence NAK and no retry left
    RNR = 11  # RNR NAK and no retry left
    TIMEOUT = 12  # no answer and no retry left
    BAD_RESPONSE = 13  # a response that does not fit the request
    BAD_REQUEST = 14  # responder: an inbound request broke a rule while a receive WQE was in use


SGE = Struct(
    "Sge", SGE_BYTES, "Scatter/gather element. Length 0 touches nothing and needs no valid key (R-WQ-4).",
    [
        ("addr", 0, 64, "virtual address"),
        ("length", 8, 32, "bytes"),
        ("lkey", 12, 32, "local key"),
    ],
)  # fmt: skip

SEND_WQE = Struct(
    "SendWqe", 64, "Send queue element: the first 64 bytes. SGEs (16 bytes each) or inline data follow from byte 32, for "
    "atomics the SGE is at byte 48. In a 128-byte stride they go on to byte 127.",
    [
        ("opcode", 0, 8, "WqeOpcode"),
        ("flags", 1, 8, "SendFlags"),
        ("num_sge", 2, 8, "SGEs used"),
        ("length", 4, 32, "message bytes: the sum of the SGE lengths, or the inline bytes; 0..2^31"),
        ("imm", 8, 32, "immediate data, bytes as on the wire, or the R_Key to invalidate (little-endian)"),
        ("dest_qpn", 12, 24, "UD: destination QPN"),
        ("remote_addr", 16, 64, "RDMA and atomics: remote virtual address. UD: Q_Key in bits 31:0, address handle in 47:32"),
        ("rkey", 24, 32, "RDMA and atomics: remote key"),
        ("sge0", 32, 128, "first SGE; atomics: swap/add operand (64 bits), compare operand (64 bits)"),
        ("sge1", 48, 128, "second SGE; atomics: the SGE of the result"),
    ],
)  # fmt: skip

RECV_WQE = Struct(
    "RecvWqe", 64, "Receive queue element: four SGEs; those not used have length 0.",
    [(f"sge{i}", 16 * i, 128, f"SGE {i}") for i in range(RECV_SGES)],
)  # fmt: skip

CQE = Struct(
    "Cqe", CQE_BYTES, "Completion queue element, written in one burst, byte 31 last. The driver finds wr_id by qpn, the side "
    "(opcode bit 7) and wqe_counter.",
    [
        ("byte_len", 0, 32, "bytes (R-CQ-3)"),
        ("imm", 4, 32, "immediate data, bytes as on the wire, or the invalidated R_Key (R-CQ-4)"),
        ("qpn", 8, 24, "local QPN"),
        ("flags", 11, 8, "CqeFlags"),
        ("src_qp", 12, 24, "UD: source QPN"),
        ("vendor_err", 15, 8, "VendorError"),
        ("stamp", 16, 64, "cycle counter of the RNIC when the CQE was made"),
        ("wqe_counter", 24, 16, "counter of the WQE in its ring (mod 2^16)"),
        ("opcode", 26, 8, "WcOpcode; valid for the side (bit 7) also in errors"),
        ("status", 27, 8, "WcStatus"),
        ("phase", (31, 0), 1, "toggles each time round the ring; 1 in the first round (R-CQ-9)"),
    ],
)  # fmt: skip

EQE = Struct(
    "Eqe", EQE_BYTES, "Event queue element.",
    [
        ("type", 0, 8, "EventType"),
        ("id", 4, 24, "QPN or CQN"),
        ("stamp", 8, 56, "cycle counter of the RNIC"),
        ("phase", (15, 0), 1, "toggles each time round the ring; 1 in the first round"),
    ],
)  # fmt: skip


def send_sges(log_stride: int) -> int:
    """SGEs a send WQE of ``2**log_stride`` bytes can hold (atomics aside)."""
    return ((1 << log_stride) - 32) // SGE_BYTES


def inline_bytes(log_stride: int) -> int:
    """Inline bytes a send WQE of ``2**log_stride`` bytes can hold."""
    return (1 << log_stride) - 32
