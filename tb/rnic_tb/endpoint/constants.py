"""Numbers and names of the transport that both ends agree on: statuses, opcodes, rights, timers.

Shapes: enums of ints as verbs and the wire number them; times in nanoseconds.
Source: rules.md sections 9 (syndromes, RNR timer), 10 (statuses), 11 (WC opcodes), 14 (states), R-TMO-1.
"""

from __future__ import annotations

import enum

PSN_MASK = 0xFFFFFF
MAX_MESSAGE = 1 << 31  # R-LEN-2
NO_CREDIT_LIMIT = 0x1F  # R-CRD-1: credit code "no limit", in every ACK
GRH_BYTES = 40  # R-UD-2
QP1_QKEY = 0x80010000  # R-QKEY-1


class QpType(enum.Enum):
    RC = "rc"
    UC = "uc"
    UD = "ud"


class QpState(enum.IntEnum):
    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class Access(enum.IntFlag):
    """Rights of an MR, of a memory window and of a QP (ibv_access_flags)."""

    NONE = 0
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    MW_BIND = 16


ALL_ACCESS = (
    Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC | Access.MW_BIND
)


class WrOp(enum.Enum):
    """What a send work request asks for."""

    SEND = "send"
    SEND_IMM = "send_imm"
    SEND_INV = "send_inv"
    WRITE = "write"
    WRITE_IMM = "write_imm"
    READ = "read"
    CMP_SWAP = "cas"
    FETCH_ADD = "fadd"
    LOCAL_INV = "local_inv"
    BIND_MW = "bind_mw"


SEND_OPS = frozenset({WrOp.SEND, WrOp.SEND_IMM, WrOp.SEND_INV})
WRITE_OPS = frozenset({WrOp.WRITE, WrOp.WRITE_IMM})
ATOMIC_OPS = frozenset({WrOp.CMP_SWAP, WrOp.FETCH_ADD})
LOCAL_OPS = frozenset({WrOp.LOCAL_INV, WrOp.BIND_MW})

#: R-WQ-7: what may be posted on which QP type.
POSTABLE = {
    QpType.RC: frozenset(WrOp),
    QpType.UC: SEND_OPS | WRITE_OPS | LOCAL_OPS,
    QpType.UD: frozenset({WrOp.SEND, WrOp.SEND_IMM}),
}


class WcStatus(enum.IntEnum):
    """Completion status (ibv_wc_status), rules.md section 10."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13


class WcOp(enum.IntEnum):
    """Completion opcode by side (R-CQ-2)."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    RECV = 128
    RECV_RDMA_WITH_IMM = 129


WC_OP_OF = {
    WrOp.SEND: WcOp.SEND,
    WrOp.SEND_IMM: WcOp.SEND,
    WrOp.SEND_INV: WcOp.SEND,
    WrOp.WRITE: WcOp.RDMA_WRITE,
    WrOp.WRITE_IMM: WcOp.RDMA_WRITE,
    WrOp.READ: WcOp.RDMA_READ,
    WrOp.CMP_SWAP: WcOp.COMP_SWAP,
    WrOp.FETCH_ADD: WcOp.FETCH_ADD,
    WrOp.LOCAL_INV: WcOp.LOCAL_INV,
    WrOp.BIND_MW: WcOp.BIND_MW,
}


class WcFlag(enum.IntFlag):
    """Completion flags (ibv_wc_flags)."""

    NONE = 0
    GRH = 1
    WITH_IMM = 2
    WITH_INV = 4


class NakCode(enum.IntEnum):
    """Low five bits of a NAK syndrome (rules.md section 7.4)."""

    PSN_SEQUENCE = 0
    INVALID_REQUEST = 1
    REMOTE_ACCESS = 2
    REMOTE_OPERATIONAL = 3
    INVALID_RD_REQUEST = 4


class AethType(enum.IntEnum):
    """Bits 6:5 of an AETH syndrome (rules.md section 9)."""

    ACK = 0
    RNR = 1
    RESERVED = 2
    NAK = 3


def syndrome(kind: AethType, value: int) -> int:
    """Syndrome byte of an AETH; `value` is the 5-bit credit, timer or NAK code."""
    return int(kind) << 5 | value & 0x1F


class Event(enum.Enum):
    """Asynchronous events (rules.md section 16)."""

    QP_REQ_ERR = "qp_req_err"
    QP_ACCESS_ERR = "qp_access_err"
    COMM_EST = "comm_est"
    SQ_DRAINED = "sq_drained"
    QP_LAST_WQE_REACHED = "qp_last_wqe_reached"
    CQ_ERR = "cq_err"
    SRQ_LIMIT_REACHED = "srq_limit_reached"


#: RNR timer code -> nanoseconds (rules.md section 9); code 0 is the longest (R-RNR-3).
RNR_TIMER_NS = tuple(
    hundredths * 10_000
    for hundredths in (
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
        256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    )
)  # fmt: skip


def ack_timeout_ns(code: int) -> int | None:
    """Local ACK timeout of the 5-bit `code`: 4.096 us * 2**code; None (never) for 0 (R-TMO-1)."""
    return None if code == 0 else 4096 << code


RNR_RETRY_INFINITE = 7  # R-RTC-2
