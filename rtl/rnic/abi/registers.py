"""The CSR space (AXI4-Lite, 32-bit registers, byte addresses) and its doorbell pages."""

from dataclasses import dataclass

__all__ = [
    "ABI_VERSION", "COUNTERS", "COUNTER_BASE", "CSR_ADDR_BITS", "DB_CQ", "DB_EQ", "DB_RQ", "DB_SQ", "DB_SRQ", "MAGIC",
    "MAILBOX_BASE", "MAILBOX_WORDS", "REGISTERS", "WATCHDOG_CYCLES", "WATCHED", "Register", "register",
]  # fmt: skip

MAGIC = 0x434E4952  # "RNIC" in ASCII, little-endian
ABI_VERSION = 1
CSR_ADDR_BITS = 20
MAILBOX_BASE = 0x400
MAILBOX_WORDS = 64
COUNTER_BASE = 0x800
WATCHDOG_CYCLES = 1 << 17  # a host or a peer that takes longer than this for one beat is a fault to be named

# Doorbell pages: address = base + 4 * id. The datum is the producer counter; for a CQ or an EQ bits 29:0 are the consumer
# counter and bits 31:30 the arm code (CQ: 0 no change, 1 next CQE, 2 next solicited CQE or error; EQ: bit 31 arms).
DB_SQ = 0x1_0000
DB_RQ = 0x2_0000
DB_SRQ = 0x3_0000
DB_CQ = 0x4_0000
DB_EQ = 0x5_0000


@dataclass(frozen=True)
class Register:
    """One 32-bit register. ``access``: RO, RW or W1C (write one clears)."""

    name: str
    offset: int
    access: str
    doc: str


REGISTERS = [
    Register("MAGIC", 0x00, "RO", "0x434E4952"),
    Register("ABI_VERSION", 0x04, "RO", "version of this contract"),
    Register("CLOCK_HZ", 0x08, "RO", "clock frequency"),
    Register("DATA_WIDTH", 0x0C, "RO", "bus width in bits"),
    Register("NUM_QPS", 0x10, "RO", "QPN 0..n-1; QPN 0 and 1 are not usable for RC/UC"),
    Register("NUM_MRS", 0x14, "RO", "key index 0..n-1"),
    Register("NUM_CQS", 0x18, "RO", "CQN 0..n-1"),
    Register("NUM_EQS", 0x1C, "RO", "EQN 0..n-1"),
    Register("NUM_GIDS", 0x20, "RO", "entries of the GID table"),
    Register("NUM_PKEYS", 0x24, "RO", "entries of the P_Key table"),
    Register("MAX_SGE", 0x28, "RO", "SGEs of a send WQE (receive WQEs have 4)"),
    Register("MAX_RD_ATOMIC", 0x2C, "RO", "outstanding READ/ATOMIC per QP and direction"),
    Register("MAX_LOG_RING", 0x30, "RO", "largest log2 of SQ, RQ (bits 7:0) and CQ (bits 15:8) entries"),
    Register("MAX_PMTU", 0x34, "RO", "largest path MTU code (1..5 = 256..4096)"),
    Register("FEATURES", 0x38, "RO", "bit 0 probe port, bit 1 rx_drop"),
    Register("SQ_OUTSTANDING", 0x3C, "RO", "send WQEs of a QP that may be on their way at once"),
    Register("CONTROL", 0x100, "RW", "bit 0 device reset (self clearing)"),
    Register("STATUS", 0x104, "RO", "bit 0 device fatal, bit 1 reset under way"),
    Register("TIMER_SCALE", 0x108, "RW", "cycles of one 4.096 us timer unit (default from CLOCK_HZ)"),
    Register("IRQ_CAUSE", 0x10C, "W1C", "one bit per EQ"),
    Register("IRQ_MASK", 0x110, "RW", "one bit per EQ, 1 lets the interrupt out"),
    Register("CYCLE_LO", 0x114, "RO", "cycle counter, low word; reading latches the high word"),
    Register("CYCLE_HI", 0x118, "RO", "cycle counter, high word as latched"),
    Register("WATCHDOG_LIMIT", 0x11C, "RW", "cycles a stream or a job may wait before the watchdog names it; 0 turns it off"),
    Register("WATCHDOG", 0x120, "W1C", "bit 31 tripped (writing 1 clears it), bits 7:0 who: index into WATCHED"),
    Register("CMD_OP", 0x200, "RW", "writing a command code (abi.commands.Command) starts it; operands lie in the mailbox"),
    Register("CMD_STATUS", 0x204, "RO", "bit 31 busy; bits 7:0 abi.commands.CmdStatus of the last command"),
]

# Counters, 32 bits each, wrapping, at COUNTER_BASE + 4 * index. The order is part of the contract.
COUNTERS = [
    ("rx_frames", "RoCEv2 frames accepted by the parser"),
    ("rx_eth_frames", "frames handed to eth_rx"),
    ("rx_bad_length", "IP, UDP or BTH length does not fit the frame (R-FRM-3)"),
    ("rx_bad_ip", "IP header bad: version, IHL, checksum (R-FRM-4, R-FRM-5)"),
    ("rx_bad_icrc", "ICRC wrong (R-ICRC-7)"),
    ("rx_bad_bth", "opcode unknown, TVer not 0, DestQP 0"),
    ("rx_mac_error", "frame ended with tuser"),
    ("rx_no_space", "packet store full"),
    ("rx_eth_overflow", "eth_rx consumer too slow"),
    ("rx_not_for_us", "destination address in no GID entry"),
    ("rx_no_qp", "QPN out of range or QP in a state that does not receive"),
    ("rx_bad_type", "opcode of another transport than the QP (R-OPC-1)"),
    ("rx_bad_pkey", "P_Key mismatch (R-PKEY-1)"),
    ("rx_bad_qkey", "Q_Key mismatch (R-QKEY-1)"),
    ("rx_bad_address", "source address is not the peer's"),
    ("rx_duplicate", "request with a PSN behind the expected one"),
    ("rx_out_of_sequence", "request with a PSN ahead of the expected one"),
    ("rx_bad_response", "response with a PSN outside the outstanding window"),
    ("tx_frames", "frames sent"),
    ("tx_naks", "NAKs sent, RNR included"),
    ("db_bad_id", "doorbell with an id out of range"),
    ("dma_read_errors", "error responses to host reads"),
    ("dma_write_errors", "error responses to host writes"),
    ("cq_overflows", "CQEs lost because the ring was full (R-CQ-6)"),
    ("rx_qp_error_drop", "packets dropped because their QP went to ERR before them"),
    ("tlb_hits", "translations answered by the cache or a contiguous region"),
    ("tlb_misses", "translations that read a page table"),
]

# What the watchdog looks at, by index in the WATCHDOG register. A stream waits while its item is not taken, a job while it is
# under way and does not end.
WATCHED = [
    ("command", "job: a command of the mailbox"),
    ("context_write", "a write of the command engine to the context tables"),
    ("doorbell_sq", "send doorbells at the scheduler"),
    ("doorbell_rq", "receive doorbells at the responder"),
    ("doorbell_cq", "CQ doorbells at the CQE writer"),
    ("wqe", "fetched send WQEs at the segmenter"),
    ("tx_job", "packets to be built at the payload fetch"),
    ("tx_segment", "pieces of payload at the payload fetch"),
    ("tx_header", "request headers at the transmit arbiter"),
    ("ack_header", "ACK headers at the transmit arbiter"),
    ("response_header", "READ response headers at the transmit arbiter"),
    ("frame", "beats of built frames"),
    ("net_tx", "beats at the port net_tx"),
    ("net_rx", "beats at the port net_rx"),
    ("rx_header", "parsed headers at the filter"),
    ("rx_payload", "payload beats at the packet store"),
    ("request", "requests at the responder"),
    ("response", "responses at the completer"),
    ("land", "READ data on its way to memory"),
    ("ack", "ACKs at the ACK sender"),
    ("free", "cells on their way back to the packet store"),
    ("send_failure", "failed send WQEs at the completer"),
    ("sq_flush", "flushes of send queues at the completer"),
    ("rq_flush", "flushes of receive queues at the responder"),
    ("cqe", "CQEs at the CQE writer"),
    ("event", "events at the EQE writer"),
    ("qp_error", "QPs in error at the command engine"),
    ("walk", "page-table reads"),
    ("host_read", "job: a read burst without data"),
    ("host_write", "job: a write burst without response"),
]


def register(name: str) -> int:
    """Byte offset of a register."""
    for reg in REGISTERS:
        if reg.name == name:
            return reg.offset
    raise KeyError(name)
