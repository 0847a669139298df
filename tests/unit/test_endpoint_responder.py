"""The software endpoint as RC responder: one test per check of rules.md 8.1 and per R-SEQ, R-DUP, R-ACK, R-RES rule."""

from __future__ import annotations

import pytest

from rnic.wire.frame import Frame
from rnic.wire.opcode import Opcode as Op
from rnic_tb.endpoint import (
    ALL_ACCESS,
    Access,
    AddressVector,
    Event,
    PeerPolicy,
    QpState,
    RecvWr,
    Sge,
    SharedReceiveQueue,
    WcFlag,
    WcOp,
    WcStatus,
)
from rnic_tb.endpoint.constants import NakCode
from rnic_tb.endpoint.pair import ACK, PD, Pair, nak, rnr
from tests.rules import rule

DATA = bytes(range(256))
INVALID = nak(NakCode.INVALID_REQUEST)
ACCESS = nak(NakCode.REMOTE_ACCESS)


def answers(frames: list[Frame], pair: Pair) -> list[tuple[Op, int, int, int]]:
    """(opcode, PSN from a's first, syndrome, MSN) of what b sent."""
    return [(f.opcode, (f.psn - pair.psn_a) & 0xFFFFFF, f.syndrome, f.msn) for f in frames]


def acks(frames: list[Frame], pair: Pair) -> list[tuple[int, int, int]]:
    """(PSN, syndrome, MSN); everything must be an ACK packet."""
    assert all(f.opcode is Op.RC_ACK for f in frames)
    return [row[1:] for row in answers(frames, pair)]


def write(pair: Pair, psn: int, data: bytes = b"abcd", offset: int = 0, **fields) -> Frame:
    return pair.frame(
        Op.RC_WRITE_ONLY, psn, payload=data, **(pair.write_fields(len(data), offset) | {"ackreq": True} | fields)
    )


def send(pair: Pair, psn: int, data: bytes = b"abcd", op: Op = Op.RC_SEND_ONLY, **fields) -> Frame:
    return pair.frame(op, psn, payload=data, **({"ackreq": True} | fields))


def read(pair: Pair, psn: int, length: int, offset: int = 0, **fields) -> Frame:
    return pair.frame(Op.RC_READ_REQUEST, psn, **(pair.write_fields(length, offset) | {"ackreq": True} | fields))


def fadd(pair: Pair, psn: int, add: int, offset: int = 0, op: Op = Op.RC_FETCH_ADD, **fields) -> Frame:
    where = {"va": pair.b.base + offset, "rkey": pair.b.key}
    return pair.frame(op, psn, **(where | {"swap": add, "ackreq": True} | fields))


def fatal(pair: Pair, frame: Frame, code: int, psn: int = 0, event: Event | None = Event.QP_REQ_ERR) -> None:
    """`frame` draws one fatal NAK and sends b to ERR; later packets draw nothing (8.2)."""
    assert acks(pair.b.take(frame), pair) == [(psn, code, pair.b.qp.responder.msn)]
    assert pair.b.qp.state is QpState.ERR
    assert pair.b.qp.events == ([event] if event else [])
    assert pair.b.take(write(pair, psn)) == []


# ---- 8.1, in order -------------------------------------------------------------------------------------------


@rule("R-PSN-1", "R-SEQ-1", "R-SEQ-4")
def test_check_1_ahead_draws_one_sequence_nak() -> None:
    pair = Pair(psn_a=0xFFFFFF)
    assert acks(pair.b.take(write(pair, 1)), pair) == [(0, nak(NakCode.PSN_SEQUENCE), 0)]
    assert pair.b.take(write(pair, 2), write(pair, 5)) == []
    assert acks(pair.b.take(write(pair, 0)), pair) == [(0, ACK, 1)]
    assert acks(pair.b.take(write(pair, 2)), pair) == [(1, nak(NakCode.PSN_SEQUENCE), 1)]


@rule("R-PSN-2")
def test_half_the_psn_space_behind_is_a_duplicate() -> None:
    pair = Pair(psn_a=0x500)
    pair.b.take(write(pair, 0))
    assert acks(pair.b.take(write(pair, 1 - (1 << 23))), pair) == [(0, ACK, 1)]
    assert acks(pair.b.take(write(pair, (1 << 23))), pair) == [(1, nak(NakCode.PSN_SEQUENCE), 1)]


@pytest.mark.parametrize(
    "opened,then",
    [
        (None, Op.RC_WRITE_MIDDLE),
        (None, Op.RC_SEND_LAST),
        (Op.RC_WRITE_FIRST, Op.RC_SEND_MIDDLE),
        (Op.RC_WRITE_FIRST, Op.RC_WRITE_ONLY),
        (Op.RC_WRITE_FIRST, Op.RC_READ_REQUEST),
        (Op.RC_WRITE_FIRST, Op.RC_CMP_SWAP),
    ],
)
@rule("8.1#2")
def test_check_2_opcode_sequence(opened: Op | None, then: Op) -> None:
    pair = Pair()
    fields = pair.write_fields(600)
    psn = 0
    if opened is not None:
        assert pair.b.take(pair.frame(opened, 0, payload=DATA, **fields)) == []
        psn = 1
    fatal(pair, pair.frame(then, psn, payload=b"" if then in (Op.RC_READ_REQUEST, Op.RC_CMP_SWAP) else DATA, **fields),
          INVALID, psn)  # fmt: skip


@rule("8.1#3", "R-RES-2", "R-AT-1")
@pytest.mark.parametrize(
    "lacks,frame",
    [
        (Access.REMOTE_WRITE, lambda p: write(p, 0)),
        (Access.REMOTE_WRITE, lambda p: write(p, 0, b"")),
        (Access.REMOTE_READ, lambda p: read(p, 0, 4)),
        (Access.REMOTE_READ, lambda p: read(p, 0, 0)),
        (Access.REMOTE_ATOMIC, lambda p: fadd(p, 0, 1)),
    ],
)
def test_check_3_qp_rights_are_an_invalid_request(lacks: Access, frame) -> None:
    pair = Pair(b_attrs={"access": ALL_ACCESS & ~lacks})
    fatal(pair, frame(pair), INVALID)


@rule("8.1#4", "R-REQ-4")
@pytest.mark.parametrize("depth", [0, 2])
def test_check_4_too_many_reads(depth: int) -> None:
    pair = Pair(b_attrs={"max_dest_rd_atomic": depth})
    for psn in range(depth):
        pair.b.device.receive(read(pair, psn, 4).pack())
    frames = pair.b.take(fadd(pair, depth, 1))
    assert frames[-1].syndrome == INVALID and frames[-1].psn == pair.psn_a + depth
    assert [f.opcode for f in frames[:-1]] == [Op.RC_READ_RESP_ONLY] * depth


@rule("8.1#5", "R-RNR-4", "R-RES-4", "R-RES-6", "R-RNR-3")
@pytest.mark.parametrize("timer", [0, 14, 31])
def test_check_5_no_receive_draws_rnr(timer: int) -> None:
    pair = Pair(b_attrs={"min_rnr_timer": timer})
    oversize = send(pair, 0, bytes(300))  # R-RES-6: RNR although the length is wrong too
    assert acks(pair.b.take(oversize), pair) == [(0, rnr(timer), 0)]
    imm = pair.frame(Op.RC_WRITE_ONLY_IMM, 0, payload=b"wxyz", imm=7, ackreq=True, **pair.write_fields(4))
    assert acks(pair.b.take(imm), pair) == [(0, rnr(timer), 0)]
    pair.b.recv(9)
    assert acks(pair.b.take(imm), pair) == [(0, ACK, 1)]
    (wc,) = pair.b.wcs()
    assert (wc.wr_id, wc.opcode, wc.byte_len, wc.imm, wc.flags) == (9, WcOp.RECV_RDMA_WITH_IMM, 4, 7, WcFlag.WITH_IMM)


@rule("8.1#6", "R-LEN-1", "R-LEN-2", "R-LEN-4", "R-PAD-2")
@pytest.mark.parametrize(
    "build",
    [
        lambda p: p.frame(Op.RC_WRITE_FIRST, 0, payload=bytes(252), **p.write_fields(600)),
        lambda p: p.frame(Op.RC_WRITE_FIRST, 0, payload=bytes(260), **p.write_fields(600)),
        lambda p: p.frame(Op.RC_WRITE_FIRST, 0, payload=bytes(253), **p.write_fields(600)),
        lambda p: p.frame(Op.RC_WRITE_ONLY, 0, payload=bytes(260), **p.write_fields(260)),
        lambda p: read(p, 0, (1 << 31) + 1),
        lambda p: p.frame(Op.RC_READ_REQUEST, 0, payload=bytes(4), **p.write_fields(4)),
        lambda p: fadd(p, 0, 1, payload=bytes(8)),
    ],
)
def test_check_6_length_rules(build) -> None:
    pair = Pair()
    fatal(pair, build(pair), INVALID)
    assert pair.b.read(0, 300) == bytes(300)


@rule("R-LEN-1")
def test_last_without_payload_is_invalid() -> None:
    pair = Pair()
    pair.b.take(pair.frame(Op.RC_WRITE_FIRST, 0, payload=DATA, **pair.write_fields(300)))
    fatal(pair, pair.frame(Op.RC_WRITE_LAST, 1), INVALID, 1)


@rule("8.1#7", "R-MR-1", "R-MR-2", "R-MR-4", "R-RES-5", "8.2")
@pytest.mark.parametrize(
    "change",
    [
        {"rkey": 0x2B01},  # stale variant
        {"rkey": 0xDEADBEEF},
        {"rkey": 0x3C00},  # other protection domain
        {"va": 0x1FFFFFFF},
        {"va": 0x20000000 + 0xFFFD},
        {"va": 0xFFFFFFFFFFFFFFFC},
        {"va": 0},
    ],
)
@pytest.mark.parametrize("op", [Op.RC_WRITE_ONLY_IMM, Op.RC_READ_REQUEST, Op.RC_WRITE_ONLY])
def test_check_7_keys_and_bounds(change: dict, op: Op) -> None:
    pair = Pair()
    pair.b.recv(3)
    pair.b.device.keys.register(0x3C00, PD + 1, ALL_ACCESS, 0x20000000, 4096)
    payload = b"" if op is Op.RC_READ_REQUEST else b"abcd"
    fatal(pair, pair.frame(op, 0, payload=payload, **(pair.write_fields(4) | change)), ACCESS,
          event=Event.QP_ACCESS_ERR)  # fmt: skip
    assert pair.b.completions() == [(3, WcStatus.WR_FLUSH_ERR)]  # a failed WRITE_IMM used no receive


@rule("R-MR-2")
def test_access_at_the_edges_of_the_region() -> None:
    pair = Pair()
    assert acks(pair.b.take(write(pair, 0, b"z", 0xFFFF), write(pair, 1, b"", 0x10000)), pair) == [
        (0, ACK, 1),
        (1, ACK, 2),
    ]
    assert pair.b.read(0xFFFF, 1) == b"z"


@rule("8.1#7", "R-AT-1")
@pytest.mark.parametrize("right", [Access.REMOTE_WRITE, Access.REMOTE_READ, Access.REMOTE_ATOMIC])
def test_check_7_rights_of_the_region(right: Access) -> None:
    pair = Pair()
    pair.b.device.keys.register(0x7700, PD, ALL_ACCESS & ~right, 0x7000, 4096)
    build = {Access.REMOTE_WRITE: write(pair, 0, va=0x7000, rkey=0x7700),
             Access.REMOTE_READ: read(pair, 0, 4, va=0x7000, rkey=0x7700),
             Access.REMOTE_ATOMIC: fadd(pair, 0, 1, va=0x7000, rkey=0x7700)}  # fmt: skip
    fatal(pair, build[right], ACCESS, event=Event.QP_ACCESS_ERR)


@rule("R-RES-1")
def test_region_retired_inside_a_write_and_a_read() -> None:
    pair = Pair()
    pair.b.take(pair.frame(Op.RC_WRITE_FIRST, 0, payload=DATA, **pair.write_fields(300)))
    pair.b.device.keys.deregister(pair.b.key)
    fatal(pair, pair.frame(Op.RC_WRITE_LAST, 1, payload=bytes(44)), ACCESS, 1, Event.QP_ACCESS_ERR)
    pair = Pair()
    pair.b.device.receive(read(pair, 0, 600).pack())
    assert pair.b.sent(1)[0].opcode is Op.RC_READ_RESP_FIRST
    pair.b.device.keys.deregister(pair.b.key)
    assert acks(pair.b.sent(), pair) == [(1, ACCESS, 1)]
    assert pair.b.qp.state is QpState.ERR


@rule("8.1#7", "8.1#8")
def test_check_7_comes_before_8_inside_a_message() -> None:
    pair = Pair()
    pair.b.take(pair.frame(Op.RC_WRITE_FIRST, 0, payload=DATA, **pair.write_fields(300)))
    pair.b.device.keys.deregister(pair.b.key)
    fatal(pair, pair.frame(Op.RC_WRITE_LAST, 1, payload=bytes(9)), ACCESS, 1, Event.QP_ACCESS_ERR)


@rule("R-RES-2")
def test_zero_length_needs_no_key() -> None:
    pair = Pair()
    bad = {"va": 0, "rkey": 0xDEADBEEF, "dma_length": 0}
    frames = pair.b.take(pair.frame(Op.RC_WRITE_ONLY, 0, ackreq=True, **bad), pair.frame(Op.RC_READ_REQUEST, 1, **bad))
    assert answers(frames, pair) == [(Op.RC_ACK, 0, ACK, 1), (Op.RC_READ_RESP_ONLY, 1, ACK, 2)]
    assert frames[1].payload == b""


@rule("8.1#8", "R-LEN-3", "R-RES-3")
@pytest.mark.parametrize(
    "length,packets",
    [
        (32, [(Op.RC_WRITE_ONLY, 16)]),
        (16, [(Op.RC_WRITE_ONLY, 32)]),
        (400, [(Op.RC_WRITE_FIRST, 256), (Op.RC_WRITE_LAST, 44)]),
        (520, [(Op.RC_WRITE_FIRST, 256), (Op.RC_WRITE_MIDDLE, 256), (Op.RC_WRITE_LAST, 88)]),
        (600, [(Op.RC_WRITE_FIRST, 256), (Op.RC_WRITE_LAST, 256)]),
        (300, [(Op.RC_WRITE_ONLY, 256)]),
        (256, [(Op.RC_WRITE_FIRST, 256)]),
        (512, [(Op.RC_WRITE_FIRST, 256), (Op.RC_WRITE_MIDDLE, 256)]),
    ],
)
def test_check_8_payload_against_the_reth_length(length: int, packets: list) -> None:
    pair = Pair()
    pair.b.write(0, b"\xee" * 1024)
    for psn, (op, size) in enumerate(packets[:-1]):
        assert pair.b.take(pair.frame(op, psn, payload=bytes(size), **pair.write_fields(length))) == []
    last = len(packets) - 1
    op, size = packets[-1]
    fatal(pair, pair.frame(op, last, payload=bytes(size), **pair.write_fields(length)), INVALID, last)
    assert pair.b.read(256 * last, 64) == b"\xee" * 64


@rule("8.1#9", "R-AT-1")
def test_check_9_atomic_alignment() -> None:
    pair = Pair()
    fatal(pair, fadd(pair, 0, 1, offset=4), INVALID)


@rule("8.1#9", "8.1#7")
def test_check_7_comes_before_9() -> None:
    pair = Pair()
    fatal(pair, fadd(pair, 0, 1, offset=4, rkey=1), ACCESS, event=Event.QP_ACCESS_ERR)


@rule("8.1#10")
def test_check_10_send_longer_than_the_receive() -> None:
    pair = Pair()
    pair.b.recv(4, length=300)
    pair.b.recv(5)
    assert pair.b.take(send(pair, 0, DATA, Op.RC_SEND_FIRST, ackreq=False)) == []
    fatal(pair, send(pair, 1, bytes(256), Op.RC_SEND_MIDDLE), INVALID, 1, event=None)
    assert pair.b.completions() == [(4, WcStatus.LOC_LEN_ERR), (5, WcStatus.WR_FLUSH_ERR)]


@rule("8.1#11", "R-WQ-4")
def test_check_11_receive_element_bad() -> None:
    pair = Pair()
    pair.b.qp.post_recv(RecvWr(6, (Sge(0, 0, 0xBAD), Sge(pair.b.base, 64, 0xBAD))))
    fatal(pair, send(pair, 0), nak(NakCode.REMOTE_OPERATIONAL), event=None)
    assert pair.b.completions() == [(6, WcStatus.LOC_PROT_ERR)]


@rule("R-MR-4")
def test_receive_needs_local_write() -> None:
    pair = Pair()
    pair.b.device.keys.register(0x7700, PD, Access.REMOTE_READ, 0x7000, 4096)
    pair.b.qp.post_recv(RecvWr(6, (Sge(0x7000, 64, 0x7700),)))
    fatal(pair, send(pair, 0), nak(NakCode.REMOTE_OPERATIONAL), event=None)


@rule("8.1#12")
def test_check_12_key_that_may_not_be_invalidated() -> None:
    pair = Pair()
    pair.b.recv(7)
    assert pair.b.take(send(pair, 0, op=Op.RC_SEND_ONLY_INV, rkey=pair.b.key)) == []
    assert pair.b.qp.state is QpState.ERR
    assert pair.b.completions() == [(7, WcStatus.LOC_QP_OP_ERR)]


@rule("8.1#12", "R-CQ-4")
def test_send_with_invalidate_retires_a_window() -> None:
    pair = Pair()
    keys = pair.b.device.keys
    keys.bind_window(0x9901, pair.b.region, pair.b.qp.qpn, Access.REMOTE_WRITE, pair.b.base, 64)
    pair.b.recv(7)
    pair.b.take(write(pair, 0, rkey=0x9901), send(pair, 1, op=Op.RC_SEND_ONLY_INV, rkey=0x9901))
    (wc,) = pair.b.wcs()
    assert (wc.flags, wc.inv_rkey, wc.status) == (WcFlag.WITH_INV, 0x9901, WcStatus.SUCCESS)
    fatal(pair, write(pair, 2, rkey=0x9901), ACCESS, 2, Event.QP_ACCESS_ERR)


@rule("R-MR-4")
def test_window_only_on_its_qp_and_inside_itself() -> None:
    pair = Pair()
    keys = pair.b.device.keys
    keys.bind_window(0x9901, pair.b.region, 0x99, Access.REMOTE_WRITE, pair.b.base, 64)
    fatal(pair, write(pair, 0, rkey=0x9901), ACCESS, event=Event.QP_ACCESS_ERR)
    pair = Pair()
    pair.b.device.keys.bind_window(0x9901, pair.b.region, pair.b.qp.qpn, Access.REMOTE_WRITE, pair.b.base, 64)
    fatal(pair, write(pair, 0, offset=62, rkey=0x9901), ACCESS, event=Event.QP_ACCESS_ERR)


# ---- order, messages, atomics ----------------------------------------------------------------------------------


@rule("R-MSN-1", "R-PSN-3", "R-PSN-4", "R-CRD-1")
def test_msn_counts_messages_and_psns_count_packets() -> None:
    pair = Pair(psn_a=0xFFFFFE)
    pair.b.recv(1)
    frames = pair.b.take(
        pair.frame(Op.RC_WRITE_FIRST, 0, payload=DATA, **pair.write_fields(257)),
        pair.frame(Op.RC_WRITE_LAST, 1, payload=b"!", ackreq=True),
        read(pair, 2, 513),
        fadd(pair, 5, 1),
        send(pair, 6),
    )
    assert answers(frames, pair) == [
        (Op.RC_ACK, 1, ACK, 1),
        (Op.RC_READ_RESP_FIRST, 2, ACK, 2),
        (Op.RC_READ_RESP_MIDDLE, 3, 0, 0),
        (Op.RC_READ_RESP_LAST, 4, ACK, 2),
        (Op.RC_ATOMIC_ACK, 5, ACK, 3),
        (Op.RC_ACK, 6, ACK, 4),
    ]
    assert [len(f.payload) for f in frames[1:4]] == [256, 256, 1]


@rule("R-AT-2", "R-AT-3", "R-OPC-3")
def test_atomics() -> None:
    pair = Pair()
    value = 0x0102030405060708
    pair.b.write(8, value.to_bytes(8, "little"))
    swap = {"op": Op.RC_CMP_SWAP, "offset": 8}
    frames = pair.b.take(
        fadd(pair, 0, 0xFF, offset=8),
        fadd(pair, 1, (1 << 64) - 1, offset=8),
        fadd(pair, 2, 77, compare=value + 0xFE ^ 1 << 63, **swap),
        fadd(pair, 3, 77, compare=value + 0xFE, **swap),
    )
    assert [f.original for f in frames] == [value, value + 0xFF, value + 0xFE, value + 0xFE]
    assert int.from_bytes(pair.b.read(8, 8), "little") == 77


@rule("R-WQ-8", "R-CQ-3", "R-PAD-3")
def test_send_fills_part_of_a_receive_and_no_pad_byte() -> None:
    pair = Pair()
    pair.b.write(0, b"\xee" * 64)
    pair.b.recv(1)
    pair.b.recv(2, 32)
    pair.b.take(send(pair, 0, b"abcde"), send(pair, 1, b""))
    assert [(wc.wr_id, wc.byte_len, wc.opcode) for wc in pair.b.wcs()] == [(1, 5, WcOp.RECV), (2, 0, WcOp.RECV)]
    assert pair.b.read(0, 64) == b"abcde" + b"\xee" * 59


@rule("R-OPC-2", "R-RES-5", "R-RES-4")
def test_write_imm_takes_its_receive_at_the_last_packet() -> None:
    pair = Pair()
    first = pair.frame(Op.RC_WRITE_FIRST, 0, payload=DATA, **pair.write_fields(260))
    last = pair.frame(Op.RC_WRITE_LAST_IMM, 1, payload=b"tail", imm=0x01020304, ackreq=True)
    assert acks(pair.b.take(first, last), pair) == [(1, rnr(1), 0)]
    pair.b.recv(8, length=0)
    assert acks(pair.b.take(last), pair) == [(1, ACK, 1)]
    (wc,) = pair.b.wcs()
    assert (wc.wr_id, wc.byte_len, wc.imm) == (8, 260, 0x01020304)
    assert pair.b.read(0, 260) == DATA + b"tail"


@rule("R-RES-7", "R-ACK-2")
@pytest.mark.parametrize("coalesce", [False, True])
def test_answers_leave_in_psn_order(coalesce: bool) -> None:
    pair = Pair(policy_b=PeerPolicy(coalesce_acks=coalesce))
    frames = pair.b.take(write(pair, 0), write(pair, 1), read(pair, 2, 300), write(pair, 4), write(pair, 5))
    psns = [row[:2] for row in answers(frames, pair)]
    reads = [(Op.RC_READ_RESP_FIRST, 2), (Op.RC_READ_RESP_LAST, 3)]
    both = [(Op.RC_ACK, 0), (Op.RC_ACK, 1), *reads, (Op.RC_ACK, 4), (Op.RC_ACK, 5)]
    assert psns == ([(Op.RC_ACK, 1), *reads, (Op.RC_ACK, 5)] if coalesce else both)


@rule("R-ACK-1")
def test_ack_only_when_asked() -> None:
    pair = Pair()
    assert pair.b.take(write(pair, 0, ackreq=False), write(pair, 1, ackreq=False)) == []
    assert acks(pair.b.take(write(pair, 2)), pair) == [(2, ACK, 3)]


@rule("R-ACK-3", "R-CQ-6")
def test_no_ack_when_the_completion_is_lost() -> None:
    pair = Pair(cq_depth=1)
    for wr_id in (1, 2, 3):
        pair.b.recv(wr_id)
    assert acks(pair.b.take(send(pair, 0), send(pair, 1)), pair) == []
    assert pair.b.qp.state is QpState.ERR and pair.b.cq.events == [Event.CQ_ERR]
    assert pair.b.completions() == [(1, WcStatus.SUCCESS)]


# ---- sequence and duplicates -----------------------------------------------------------------------------------


@rule("R-SEQ-2")
def test_silent_behind_an_rnr_nak() -> None:
    pair = Pair()
    assert acks(pair.b.take(send(pair, 0), send(pair, 1), send(pair, 2)), pair) == [(0, rnr(1), 0)]


@rule("R-SEQ-3")
def test_duplicate_keeps_the_nak_state() -> None:
    pair = Pair()
    pair.b.take(write(pair, 0), write(pair, 2))
    assert acks(pair.b.take(write(pair, 0), write(pair, 3)), pair) == [(0, ACK, 1)]


@rule("R-DUP-1", "R-MSN-1")
def test_duplicate_send_is_acked_and_not_executed() -> None:
    pair = Pair()
    pair.b.recv(1)
    pair.b.recv(2, 64)
    pair.b.take(send(pair, 0, b"first"), write(pair, 1, b"data", 1024))
    pair.b.write(0, bytes(16))
    assert acks(pair.b.take(send(pair, 0, b"again"), write(pair, 1, b"DATA", 1024)), pair) == [(1, ACK, 2)] * 2
    assert pair.b.completions() == [(1, WcStatus.SUCCESS)] and len(pair.b.qp.rq) == 1
    assert pair.b.read(0, 16) == bytes(16) and pair.b.read(1024, 4) == b"data"


@rule("R-DUP-2")
def test_repeated_ack_does_not_pass_an_unsent_read() -> None:
    pair = Pair()
    pair.b.take(write(pair, 0))
    pair.b.device.receive(read(pair, 1, 300).pack())
    psns = [row[:2] for row in answers(pair.b.take(write(pair, 0)), pair)]
    assert psns == [(Op.RC_READ_RESP_FIRST, 1), (Op.RC_READ_RESP_LAST, 2), (Op.RC_ACK, 0)]


@rule("R-DUP-3", "R-DUP-4")
def test_duplicate_reads_of_any_part() -> None:
    pair = Pair()
    pair.b.write(0, bytes(i % 251 for i in range(1000)))
    pair.b.take(read(pair, 0, 1000))
    pair.b.write(512, b"fresh")  # read again, not replayed from a store
    tail = pair.b.take(read(pair, 2, 488, 512))
    assert [(f.opcode, f.psn - pair.psn_a) for f in tail] == [(Op.RC_READ_RESP_FIRST, 2), (Op.RC_READ_RESP_LAST, 3)]
    assert b"".join(f.payload for f in tail) == pair.b.read(512, 488)
    whole = pair.b.take(read(pair, 0, 1000))
    assert b"".join(f.payload for f in whole) == pair.b.read(0, 1000)
    assert pair.b.qp.responder.msn == 1


@rule("R-DUP-3", "R-DUP-7")
@pytest.mark.parametrize("change", [{"rkey": 0x2B01}, {"offset": 1}, {"length": 1001}, {"psn": 1}])
def test_duplicate_read_of_something_else_is_dropped(change: dict) -> None:
    pair = Pair()
    pair.b.take(read(pair, 0, 1000))
    what = {"psn": 0, "length": 1000} | change
    assert pair.b.take(read(pair, what.pop("psn"), what.pop("length"), **what)) == []
    assert pair.b.qp.state is QpState.RTS


@rule("R-DUP-3", "R-PSN-4")
def test_duplicate_read_replaces_a_running_stream() -> None:
    pair = Pair()
    pair.b.write(0, bytes(i % 251 for i in range(1200)))
    pair.b.device.receive(read(pair, 0, 1200).pack())
    first = pair.b.sent(4)
    pair.b.device.receive(fadd(pair, 5, 1, 2048).pack())
    rest = pair.b.take(read(pair, 2, 688, 512))
    assert [f.psn - pair.psn_a for f in first + rest] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert rest[0].payload == pair.b.read(512, 256) and rest[-1].opcode is Op.RC_ATOMIC_ACK


@rule("R-DUP-3")
def test_duplicates_do_not_count_against_the_read_depth() -> None:
    pair = Pair(b_attrs={"max_dest_rd_atomic": 1})
    pair.b.take(read(pair, 0, 600))
    for _ in range(3):
        pair.b.device.receive(read(pair, 0, 600).pack())
    frames = pair.b.take(read(pair, 3, 4))
    assert [f.psn - pair.psn_a for f in frames] == [0, 1, 2, 3]


@rule("8.1#4", "R-DUP-3")
def test_a_read_asked_again_before_its_answer_still_counts_once() -> None:
    pair = Pair(b_attrs={"max_dest_rd_atomic": 1})
    for _ in range(2):
        pair.b.device.receive(read(pair, 0, 4).pack())
    frames = pair.b.take(read(pair, 1, 4))
    assert [(f.opcode, f.syndrome) for f in frames] == [(Op.RC_READ_RESP_ONLY, ACK), (Op.RC_ACK, INVALID)]


@rule("R-DUP-5", "R-AT-4")
def test_duplicate_atomic_returns_the_saved_value() -> None:
    pair = Pair()
    pair.b.take(fadd(pair, 0, 5), fadd(pair, 1, 7))
    frames = pair.b.take(fadd(pair, 0, 5), fadd(pair, 1, 7))
    assert [(f.opcode, f.original, f.msn) for f in frames] == [(Op.RC_ATOMIC_ACK, 0, 2), (Op.RC_ATOMIC_ACK, 5, 2)]
    assert pair.b.read(0, 8) == (12).to_bytes(8, "little")


@rule("R-DUP-5")
def test_duplicate_of_another_kind_is_dropped() -> None:
    pair = Pair()
    pair.b.take(read(pair, 0, 8), fadd(pair, 1, 1))
    assert pair.b.take(fadd(pair, 0, 9, op=Op.RC_CMP_SWAP), fadd(pair, 1, 9, op=Op.RC_CMP_SWAP), read(pair, 1, 8)) == []
    assert pair.b.read(0, 8) == (1).to_bytes(8, "little")


@rule("R-DUP-6")
def test_replay_store_keeps_the_newest() -> None:
    pair = Pair(b_attrs={"max_dest_rd_atomic": 2})
    for psn in range(3):
        pair.b.take(fadd(pair, psn, 1))
    assert pair.b.take(fadd(pair, 0, 1)) == []
    assert [f.original for f in pair.b.take(fadd(pair, 1, 1), fadd(pair, 2, 1))] == [1, 2]


@rule("R-DUP-7")
def test_no_nak_for_a_duplicate_whose_region_is_gone() -> None:
    pair = Pair()
    pair.b.take(read(pair, 0, 300))
    pair.b.device.keys.deregister(pair.b.key)
    assert pair.b.take(read(pair, 0, 300)) == []
    assert pair.b.qp.state is QpState.RTS


@rule("R-DUP-8")
def test_duplicate_inside_a_message_does_not_disturb_it() -> None:
    pair = Pair()
    pair.b.recv(1)
    pair.b.take(write(pair, 0), send(pair, 1, DATA, Op.RC_SEND_FIRST, ackreq=False))
    assert acks(pair.b.take(write(pair, 0)), pair) == [(1, ACK, 1)]
    assert acks(pair.b.take(send(pair, 2, b"end", Op.RC_SEND_LAST)), pair) == [(2, ACK, 2)]
    assert [wc.byte_len for wc in pair.b.wcs()] == [259]


# ---- shared receive queue, states ------------------------------------------------------------------------------


@rule("R-SRQ-1", "R-SRQ-2", "R-SRQ-3")
def test_shared_receive_queue() -> None:
    srq = SharedReceiveQueue(16, 4)
    pair = Pair(srq=srq)
    assert acks(pair.b.take(send(pair, 0)), pair) == [(0, rnr(1), 0)]
    for wr_id in range(10):
        srq.post(RecvWr(wr_id, (pair.b.sge(64 * wr_id, 64),)))
    srq.arm_limit(7)
    for psn in range(3):
        pair.b.take(send(pair, psn))
    assert srq.events == []
    pair.b.take(send(pair, 3))
    assert srq.events == [Event.SRQ_LIMIT_REACHED] and srq.limit == 0
    assert [wr_id for wr_id, _ in pair.b.completions()] == [0, 1, 2, 3]
    pair.b.qp.modify(QpState.ERR)
    assert len(srq) == 6 and pair.b.qp.events == [Event.QP_LAST_WQE_REACHED]


@rule("R-QP-2", "R-QP-5", "R-ERR-8")
def test_request_in_every_state() -> None:
    for state in (QpState.RESET, QpState.ERR):
        pair = Pair()
        pair.b.qp.modify(state)
        assert pair.b.take(write(pair, 0)) == []
        assert pair.b.device.drops["qp_state"] == 1
    pair = Pair()
    pair.b.qp.modify(QpState.RESET)
    pair.b.qp.modify(QpState.INIT, pkey=0xFFFF, access=ALL_ACCESS)
    assert pair.b.take(write(pair, 0)) == []
    pair.b.qp.modify(
        QpState.RTR, av=AddressVector(pair.a.device.mac, pair.a.device.ips[0], pair.b.device.ips[0]), path_mtu=256,
        dest_qpn=0x11, rq_psn=0x100, max_dest_rd_atomic=1, min_rnr_timer=1,
    )  # fmt: skip
    assert acks(pair.b.take(write(pair, 0), write(pair, 1)), pair) == [(0, ACK, 1), (1, ACK, 2)]
    assert pair.b.qp.events == [Event.COMM_EST]


@rule("R-CQ-5")
def test_solicited_arm() -> None:
    pair = Pair()
    for wr_id in range(4):
        pair.b.recv(wr_id)
    pair.b.cq.arm(solicited_only=True)
    pair.b.take(send(pair, 0))
    assert pair.b.cq.notifications == 0
    pair.b.take(send(pair, 1, se=True), send(pair, 2, se=True))
    assert pair.b.cq.notifications == 1
    pair.b.cq.arm(solicited_only=True)
    pair.b.qp.modify(QpState.ERR)
    assert pair.b.cq.notifications == 2
