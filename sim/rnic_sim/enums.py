"""The verbs constants a user writes, with the names and numbers of libibverbs (as ``pyverbs.enums``)."""

from enum import IntEnum, IntFlag

__all__ = [
    "AccessFlags", "EventType", "MTU", "QPAttrMask", "QPState", "QPType", "SendFlags", "WCFlags", "WCOpcode", "WCStatus",
    "WROpcode",
]  # fmt: skip


class WROpcode(IntEnum):
    """``ibv_wr_opcode``."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9


class SendFlags(IntFlag):
    """``ibv_send_flags``."""

    FENCE = 1
    SIGNALED = 2
    SOLICITED = 4
    INLINE = 8


class AccessFlags(IntFlag):
    """``ibv_access_flags``."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    MW_BIND = 16
    REMOTE_INVALIDATE = 128  # ours: a SEND with invalidate may end the MR


class QPType(IntEnum):
    """``ibv_qp_type``."""

    RC = 2
    UC = 3
    UD = 4


class QPState(IntEnum):
    """``ibv_qp_state``."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class MTU(IntEnum):
    """``ibv_mtu``: path MTU codes."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5

    @property
    def bytes(self) -> int:
        return 128 << self.value

    @classmethod
    def of(cls, size: int) -> "MTU":
        """The code of a size in bytes; ``ValueError`` when it is none of 256, 512, 1024, 2048, 4096."""
        for code in cls:
            if code.bytes == size:
                return code
        raise ValueError(f"mtu is {size}, must be 256, 512, 1024, 2048 or 4096")


class QPAttrMask(IntFlag):
    """``ibv_qp_attr_mask``."""

    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    DEST_QPN = 1 << 20


class WCStatus(IntEnum):
    """``ibv_wc_status``."""

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


class WCOpcode(IntEnum):
    """``ibv_wc_opcode``."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    RECV = 0x80
    RECV_RDMA_WITH_IMM = 0x81


class EventType(IntEnum):
    """``ibv_event_type`` of the events there are."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3


class WCFlags(IntFlag):
    """``ibv_wc_flags``."""

    GRH = 1
    WITH_IMM = 2
    WITH_INV = 8
