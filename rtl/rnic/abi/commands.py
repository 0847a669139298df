"""Commands: operands go to the mailbox words, the code to CMD_OP, the status comes back in CMD_STATUS.

A command that fails changes nothing (R-QP-1). Mailbox word 0 always names the object (key, QPN, CQN, index).
"""

from dataclasses import dataclass

from amaranth.lib import enum

from .contexts import QpState, QpType
from .fields import Struct

__all__ = [
    "ATTRS", "Attr", "CMD_CREATE_CQ", "CMD_CREATE_EQ", "CMD_CREATE_MR", "CMD_CREATE_QP", "CMD_MODIFY_QP", "CMD_OBJECT",
    "CMD_SET_GID", "CMD_SET_PKEY", "CMD_SET_PORT", "CmdStatus", "Command", "QP_TRANSITIONS", "Transition",
]  # fmt: skip


class Command(enum.IntEnum, shape=8):
    """Command codes."""

    NOP = 0
    SET_PORT = 1
    SET_GID = 2
    SET_PKEY = 3
    CREATE_EQ = 4
    DESTROY_EQ = 5
    CREATE_CQ = 6
    DESTROY_CQ = 7
    CREATE_MR = 8
    DESTROY_MR = 9
    CREATE_QP = 10
    MODIFY_QP = 11
    QUERY_QP = 12
    DESTROY_QP = 13
    QUERY_PORT = 14


class CmdStatus(enum.IntEnum, shape=8):
    """Result of a command. The driver turns it into an errno."""

    OK = 0
    BAD_COMMAND = 1  # ENOSYS: unknown code
    BAD_INDEX = 2  # EINVAL: object number out of range
    NOT_FOUND = 3  # ENOENT: object does not exist
    IN_USE = 4  # EBUSY: object exists already, or others use it
    BAD_PARAM = 5  # EINVAL: a value out of its limits
    BAD_STATE = 6  # EINVAL: transition not allowed, or cur_state wrong
    MISSING_ATTR = 7  # EINVAL: a required attribute is missing
    EXTRA_ATTR = 8  # EINVAL: an attribute not allowed here


CMD_OBJECT = Struct("CmdObject", 4, "DESTROY_*, QUERY_*: the object.", [("id", 0, 32, "key, QPN, CQN or EQN")])

CMD_SET_PORT = Struct("CmdSetPort", 8, "SET_PORT.", [("mtu", 4, 3, "active path MTU code 1..5")])

CMD_SET_GID = Struct(
    "CmdSetGid", 32, "SET_GID: word 0 is the index, words 1..7 are contexts.GID_ENTRY.",
    [("index", 0, 32, "table index"), ("entry", 4, 224, "GidEntry")],
)  # fmt: skip

CMD_SET_PKEY = Struct("CmdSetPkey", 8, "SET_PKEY.", [("index", 0, 32, "table index"), ("pkey", 4, 16, "value")])

CMD_CREATE_MR = Struct(
    "CmdCreateMr", 36, "CREATE_MR: word 0 is the key, words 1..8 are contexts.TPT_ENTRY (variant = low byte of the key).",
    [("key", 0, 32, "index << 8 | variant"), ("entry", 4, 256, "TptEntry")],
)  # fmt: skip

CMD_CREATE_CQ = Struct(
    "CmdCreateCq", 48, "CREATE_CQ.",
    [
        ("cqn", 0, 32, "CQN"),
        ("log_size", 5, 5, "log2 of the entries, 1..16"),
        ("eqn", 6, 8, "event queue; 255: none"),
        ("valid", (4, 0), 1, "must be 1"),
        ("ring", 16, 256, "TptEntry of the ring"),
    ],
)  # fmt: skip

CMD_CREATE_EQ = Struct(
    "CmdCreateEq", 48, "CREATE_EQ.",
    [
        ("eqn", 0, 32, "EQN"),
        ("log_size", 5, 5, "log2 of the entries, 1..16"),
        ("valid", (4, 0), 1, "must be 1"),
        ("ring", 16, 256, "TptEntry of the ring"),
    ],
)  # fmt: skip

CMD_CREATE_QP = Struct(
    "CmdCreateQp", 96, "CREATE_QP: the QP is in RESET afterwards.",
    [
        ("qpn", 0, 32, "QPN"),
        ("type", 4, 2, "QpType"),
        ("log_sq", 5, 4, "log2 of the SQ entries, 0..15"),
        ("log_rq", 6, 4, "log2 of the RQ entries, 0..15"),
        ("log_stride", 7, 4, "log2 of the SQ stride, 6 or 7"),
        ("pd", 8, 24, "protection domain"),
        ("sig_all", (11, 0), 1, "every send WQE is signaled"),
        ("send_cqn", 12, 24, "send CQ"),
        ("recv_cqn", 16, 24, "receive CQ"),
        ("srqn", 20, 24, "SRQ"),
        ("has_srq", (23, 0), 1, "receive WQEs come from the SRQ"),
        ("sq_ring", 32, 256, "TptEntry of the SQ ring"),
        ("rq_ring", 64, 256, "TptEntry of the RQ ring"),
    ],
)  # fmt: skip

CMD_MODIFY_QP = Struct(
    "CmdModifyQp", 96, "MODIFY_QP, and the answer of QUERY_QP (attributes as set, R-QP-6).",
    [
        ("qpn", 0, 32, "QPN"),
        ("attr_mask", 4, 32, "Attr bits of the attributes given"),
        ("new_state", 8, 4, "QpState after the command"),
        ("cur_state", 9, 4, "with Attr.CUR_STATE: must be the present state"),
        ("type", 10, 2, "QUERY_QP: QpType"),
        ("pkey_index", 12, 8, "Attr.PKEY_INDEX"),
        ("sgid_index", 13, 8, "Attr.AV"),
        ("access", 14, 8, "Attr.ACCESS: Access of inbound requests"),
        ("min_rnr_timer", 15, 5, "Attr.MIN_RNR_TIMER"),
        ("dest_qpn", 16, 24, "Attr.DEST_QPN"),
        ("path_mtu", 19, 3, "Attr.PATH_MTU: 1..5, at most the port's"),
        ("qkey", 20, 32, "Attr.QKEY"),
        ("rq_psn", 24, 24, "Attr.RQ_PSN"),
        ("max_dest_rd_atomic", 27, 8, "Attr.MAX_DEST_RD_ATOMIC"),
        ("sq_psn", 28, 24, "Attr.SQ_PSN"),
        ("max_rd_atomic", 31, 8, "Attr.MAX_RD_ATOMIC"),
        ("timeout", 32, 5, "Attr.TIMEOUT"),
        ("retry_cnt", 33, 3, "Attr.RETRY_CNT"),
        ("rnr_retry", 34, 3, "Attr.RNR_RETRY"),
        ("dmac", 36, 48, "Attr.AV (words 9..16 are AddressCtx words 3..6 and 8..11, see `rnic.qp.microcode`)"),
        ("vlan_tci", 42, 16, "Attr.AV"),
        ("sport", 44, 16, "Attr.AV"),
        ("hop_limit", 46, 8, "Attr.AV"),
        ("traffic_class", 47, 8, "Attr.AV"),
        ("flow_label", 48, 20, "Attr.AV"),
        ("vlan", (51, 0), 1, "Attr.AV"),
        ("ipv6", (51, 1), 1, "Attr.AV"),
        ("dip", 52, 128, "Attr.AV"),
    ],
)  # fmt: skip


class Attr(enum.IntFlag, shape=32):
    """QP attributes of MODIFY_QP."""

    CUR_STATE = 1 << 0
    PKEY_INDEX = 1 << 1
    PORT = 1 << 2  # one port only: the bit must be given where the verbs require it
    ACCESS = 1 << 3
    QKEY = 1 << 4
    AV = 1 << 5
    PATH_MTU = 1 << 6
    DEST_QPN = 1 << 7
    RQ_PSN = 1 << 8
    MAX_DEST_RD_ATOMIC = 1 << 9
    MIN_RNR_TIMER = 1 << 10
    SQ_PSN = 1 << 11
    TIMEOUT = 1 << 12
    RETRY_CNT = 1 << 13
    RNR_RETRY = 1 << 14
    MAX_RD_ATOMIC = 1 << 15
    EN_SQD_ASYNC_NOTIFY = 1 << 16


ATTRS = list(Attr)


@dataclass(frozen=True)
class Transition:
    """Attributes a transition requires and those it allows besides."""

    required: Attr
    optional: Attr


def _transitions() -> dict[tuple[QpType, QpState, QpState], Transition]:
    """The table of rules.md section 14 (R-QP-1)."""
    A, S, T = Attr, QpState, QpType
    none = Attr(0)
    table: dict[tuple[QpType, QpState, QpState], Transition] = {}
    for typ in T:
        ud, rc = typ == T.UD, typ == T.RC
        key_or_access = A.QKEY if ud else A.ACCESS
        init = A.PKEY_INDEX | A.PORT | key_or_access
        table[typ, S.RESET, S.INIT] = Transition(init, none)
        table[typ, S.INIT, S.INIT] = Transition(none, init)
        rtr = none if ud else A.AV | A.PATH_MTU | A.DEST_QPN | A.RQ_PSN
        if rc:
            rtr |= A.MAX_DEST_RD_ATOMIC | A.MIN_RNR_TIMER
        table[typ, S.INIT, S.RTR] = Transition(rtr, key_or_access | A.PKEY_INDEX)
        rts = A.SQ_PSN
        if rc:
            rts |= A.TIMEOUT | A.RETRY_CNT | A.RNR_RETRY | A.MAX_RD_ATOMIC
        running = A.CUR_STATE | key_or_access | (A.MIN_RNR_TIMER if rc else none)
        table[typ, S.RTR, S.RTS] = Transition(rts, running)
        table[typ, S.RTS, S.RTS] = Transition(none, running)
        table[typ, S.RTS, S.SQD] = Transition(none, A.EN_SQD_ASYNC_NOTIFY)
        drained = A.PKEY_INDEX | key_or_access
        if not ud:
            drained |= A.AV
        if rc:
            drained |= (A.TIMEOUT | A.RETRY_CNT | A.RNR_RETRY | A.MAX_RD_ATOMIC | A.MAX_DEST_RD_ATOMIC | A.MIN_RNR_TIMER
                        | A.PORT)  # fmt: skip
        table[typ, S.SQD, S.SQD] = Transition(none, drained)
        table[typ, S.SQD, S.RTS] = Transition(none, running)
        if not rc:
            table[typ, S.SQE, S.RTS] = Transition(none, A.CUR_STATE | key_or_access)
        for state in (S.INIT, S.RTR, S.RTS, S.SQD, S.SQE, S.ERR):
            if not (rc and state == S.SQE):
                table[typ, state, S.ERR] = Transition(none, none)
        for state in S:
            table[typ, state, S.RESET] = Transition(none, none)
    return table


QP_TRANSITIONS = _transitions()
