"""Object contexts inside the RNIC, word by word (32 bits), and what a command may write where.

One table per role. ``*_CFG`` tables are written by commands only and read by an engine; ``*_HOT`` tables belong to an engine
and are written by commands only while the QP does not run (RESET and the state changes that load PSNs). QP state is kept in
every table that needs it, always in byte 0 of word 0; the command engine is the only one that writes it.
"""

from amaranth.lib import enum

from .fields import Struct

__all__ = [
    "ADDRESS_CTX", "COMPLETER_CFG", "COMPLETER_HOT", "COUNTER", "CQ_CONSUMER", "CQ_CTX", "Access", "CtxTable", "EQ_CTX",
    "GID_ENTRY", "PORT_CFG", "QpState", "QpType", "REQUESTER_CFG", "REQUESTER_HOT", "RESPONDER_CFG", "RESPONDER_HOT", "SQ_FETCH",
    "TPT_ENTRY",
]  # fmt: skip


class QpState(enum.IntEnum, shape=4):
    """QP states (numbers of ibv_qp_state)."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class QpType(enum.IntEnum, shape=2):
    """Transport service; the numbers are bits 6:5 of the wire opcode."""

    RC = 0
    UC = 1
    UD = 3


class Access(enum.IntFlag, shape=8):
    """Rights of an MR, and of a QP for inbound requests (numbers of ibv_access_flags)."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    MW_BIND = 16
    REMOTE_INVALIDATE = 128  # no flag of verbs: a SEND with invalidate may end the MR


class CtxTable(enum.IntEnum, shape=4):
    """Number of a table on the context bus (records.CtxWrite).

    ``*_PRODUCER`` and ``CQ_CONSUMER`` hold the doorbell counters; commands zero them when the object is created or reset.
    """

    TPT = 0
    ADDRESS = 1
    REQUESTER_CFG = 2
    REQUESTER_HOT = 3
    COMPLETER_CFG = 4
    COMPLETER_HOT = 5
    RESPONDER_CFG = 6
    RESPONDER_HOT = 7
    CQ = 8
    EQ = 9
    GID = 10
    PORT = 11
    SQ_FETCH = 12
    SQ_PRODUCER = 13
    RQ_PRODUCER = 14
    CQ_CONSUMER = 15


# Translation and protection table: MRs at their key index, then one entry per ring (config.Params.tpt_*_base).
TPT_ENTRY = Struct(
    "TptEntry", 32, "One memory region or ring.",
    [
        ("valid", (0, 0), 1, "entry is in use"),
        ("levels", (0, 1), 2, "0: contiguous, table_addr + (va - base); 1: table of page addresses; 2: table of tables "
         "(each lower table is one 4 KiB page of 512 entries)"),
        ("variant", 1, 8, "low byte of the key (R-MR-1)"),
        ("rights", 2, 8, "Access"),
        ("log_page", 3, 8, "log2 of the page size, 12..30"),
        ("pd", 4, 24, "protection domain; rings: 0"),
        ("base", 8, 64, "first virtual address; rings: 0"),
        ("length", 16, 64, "bytes"),
        ("table_addr", 24, 64, "physical: of byte `base` (levels 0) or of the page table. Page-table entries are 64-bit "
         "physical page addresses; entry 0 is the page that holds `base`"),
    ],
)  # fmt: skip

ADDRESS_CTX = Struct(
    "AddressCtx", 48, "Peer of a QP: read by the builder (transmit) and by the receive filter.",
    [
        ("state", 0, 4, "QpState"),
        ("type", 1, 2, "QpType"),
        ("pkey_index", 2, 8, "P_Key table entry"),
        ("sgid_index", 3, 8, "GID table entry: own MAC and IP"),
        ("dest_qpn", 4, 24, "peer's QPN"),
        ("path_mtu", 7, 3, "1..5 = 256..4096"),
        ("qkey", 8, 32, "Q_Key (UD)"),
        ("dmac", 12, 48, "destination MAC, first byte on the wire in bits 7:0"),
        ("vlan_tci", 18, 16, "PCP, DEI, VID"),
        ("sport", 20, 16, "UDP source port (R-ADR-4)"),
        ("hop_limit", 22, 8, "TTL or hop limit"),
        ("traffic_class", 23, 8, "TOS or traffic class"),
        ("flow_label", 24, 20, "IPv6 flow label"),
        ("vlan", (27, 0), 1, "send a VLAN tag"),
        ("ipv6", (27, 1), 1, "dip is IPv6; else IPv4 in the last four bytes (R-ADR-1)"),
        ("dip", 32, 128, "destination address, first byte on the wire in bits 7:0"),
    ],
)  # fmt: skip

REQUESTER_CFG = Struct(
    "RequesterCfg", 12, "Send side of a QP.",
    [
        ("state", 0, 4, "QpState"),
        ("type", 1, 2, "QpType"),
        ("path_mtu", 2, 3, "1..5"),
        ("log_sq", 3, 4, "log2 of the SQ ring entries"),
        ("pd", 4, 24, "protection domain"),
        ("log_stride", 7, 4, "log2 of the SQ stride in bytes, 6 or 7"),
        ("max_rd_atomic", 8, 8, "outstanding READ and ATOMIC"),
        ("sig_all", (9, 0), 1, "every WQE is signaled"),
    ],
)  # fmt: skip

REQUESTER_HOT = Struct(
    "RequesterHot", 16, "What the requester changes. All zero after RESET; psn loaded at RTR->RTS.",
    [
        ("psn", 0, 24, "next PSN to send"),
        ("epoch", 3, 8, "goes up at every rewind; WQEs fetched under another epoch are thrown away"),
        ("send_index", 4, 16, "counter of the WQE being segmented"),
        ("offset", 8, 32, "bytes of that WQE's message already segmented"),
        ("rd_atomic", 12, 8, "READ and ATOMIC started"),
    ],
)  # fmt: skip

SQ_FETCH = Struct(
    "SqFetch", 4, "Where the scheduler reads the SQ next. All zero after RESET.",
    [
        ("index", 0, 16, "counter of the next WQE to fetch"),
        ("epoch", 2, 8, "epoch of the fetches (RequesterHot.epoch)"),
    ],
)  # fmt: skip

COUNTER = Struct(
    "Counter", 4, "A doorbell's counter (SQ, RQ: 16 bits).", [("value", 0, 24, "free running")]
)  # fmt: skip

CQ_CONSUMER = Struct(
    "CqConsumer", 8, "What the doorbells of a CQ said.",
    [
        ("value", 0, 24, "CQEs taken by software, free running"),
        ("arm", 4, 2, "0 not armed, 1 next CQE, 2 next solicited CQE or error (R-CQ-5); engine clears"),
    ],
)  # fmt: skip

COMPLETER_CFG = Struct(
    "CompleterCfg", 12, "Answers to own requests.",
    [
        ("state", 0, 4, "QpState"),
        ("type", 1, 2, "QpType"),
        ("timeout", 2, 5, "R-TMO-1 exponent"),
        ("retry_cnt", 3, 3, "R-RTC-1"),
        ("cqn", 4, 24, "send CQ"),
        ("rnr_retry", 7, 3, "R-RTC-2"),
        ("pd", 8, 24, "protection domain"),
        ("path_mtu", 11, 3, "1..5"),
    ],
)  # fmt: skip

COMPLETER_HOT = Struct(
    "CompleterHot", 12, "What the completer changes. All zero after RESET; una loaded at RTR->RTS.",
    [
        ("una", 0, 24, "oldest PSN not acknowledged"),
        ("retries", 3, 3, "retry_cnt used"),
        ("rnr_retries", (3, 4), 3, "rnr_retry used"),
        ("more", (3, 7), 1, "SEND or WRITE WQEs behind a READ that lands are acknowledged"),
        ("done_index", 4, 16, "counter of the oldest WQE not retired"),
        ("answered", 6, 8, "READ and ATOMIC with all responses"),
        ("landed", 7, 8, "READ and ATOMIC with all data in memory (RequesterHot.rd_atomic of them started)"),
        ("received", 8, 32, "bytes received of the oldest READ not answered"),
    ],
)  # fmt: skip

RESPONDER_CFG = Struct(
    "ResponderCfg", 20, "Inbound requests.",
    [
        ("state", 0, 4, "QpState"),
        ("type", 1, 2, "QpType"),
        ("path_mtu", 2, 3, "1..5"),
        ("access", 3, 8, "Access: what peers may do"),
        ("pd", 4, 24, "protection domain"),
        ("log_rq", 7, 4, "log2 of the RQ ring entries"),
        ("cqn", 8, 24, "receive CQ"),
        ("min_rnr_timer", 11, 5, "R-RNR-4"),
        ("max_dest_rd_atomic", 12, 8, "READ and ATOMIC a peer may have outstanding"),
        ("has_srq", (13, 0), 1, "receive WQEs come from an SRQ"),
        ("srqn", 16, 24, "SRQ"),
    ],
)  # fmt: skip

RESPONDER_HOT = Struct(
    "ResponderHot", 40, "What the responder changes. All zero after RESET; epsn loaded at INIT->RTR.",
    [
        ("epsn", 0, 24, "expected PSN"),
        ("nak_state", 3, 2, "0 none, 1 sequence NAK sent, 2 RNR NAK sent (R-SEQ-1, R-SEQ-2), 3 fatal NAK: drop all"),
        ("msn", 4, 24, "R-MSN-1"),
        ("message", 7, 2, "0 between messages, 1 inside SEND, 2 inside WRITE"),
        ("rq_index", 8, 16, "counter of the next receive WQE to take"),
        ("cqe_index", 10, 16, "counter of the receive WQE of the message under way"),
        ("resid", 12, 32, "WRITE bytes still to come; SEND bytes placed so far"),
        ("va", 16, 64, "where the next WRITE byte goes"),
        ("rkey", 24, 32, "R_Key of the WRITE under way"),
        ("ack_psn", 28, 24, "newest PSN that may be acknowledged (R-DUP-1, R-DUP-2)"),
        ("accepted", (31, 0), 1, "ack_psn is valid: a request was accepted since RESET"),
        ("total", 32, 32, "bytes of the WRITE under way (R-CQ-3)"),
        ("requests", 36, 8, "READ and ATOMIC accepted since RESET, modulo 256"),
    ],
)  # fmt: skip

CQ_CTX = Struct(
    "CqCtx", 8, "Completion queue.",
    [
        ("valid", (0, 0), 1, "exists and not in error"),
        ("log_size", 1, 5, "log2 of the entries"),
        ("eqn", 2, 8, "event queue"),
        ("producer", 4, 24, "CQEs written (engine)"),
    ],
)  # fmt: skip

EQ_CTX = Struct(
    "EqCtx", 12, "Event queue.",
    [
        ("valid", (0, 0), 1, "exists"),
        ("log_size", 1, 5, "log2 of the entries"),
        ("producer", 4, 24, "EQEs written (engine)"),
        ("consumer", 8, 24, "EQEs taken by software (doorbell)"),
        ("armed", (11, 0), 1, "the next EQE, or one not yet taken, raises the interrupt (doorbell; engine clears)"),
    ],
)  # fmt: skip

GID_ENTRY = Struct(
    "GidEntry", 28, "One own address.",
    [
        ("ip", 0, 128, "address, first byte on the wire in bits 7:0; IPv4 as ::ffff:a.b.c.d"),
        ("mac", 16, 48, "own MAC, first byte on the wire in bits 7:0"),
        ("valid", (22, 0), 1, "entry is in use"),
        ("vlan", (22, 1), 1, "frames of this address carry vlan_vid"),
        ("vlan_vid", 24, 12, "VLAN id"),
    ],
)  # fmt: skip

PORT_CFG = Struct(
    "PortCfg", 68, "Port: P_Key table and MTU. Word 0 is the port word, word 1 + i is P_Key i.",
    [("mtu", 0, 3, "active path MTU code")]
    + [(f"pkey{i}", 4 * (i + 1), 16, f"P_Key {i}; bit 15 = full member") for i in range(16)],
)  # fmt: skip
