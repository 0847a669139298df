"""The software endpoint as RC responder: one test per check of rules.md 8.1, in order."""

from __future__ import annotations

import pytest

from rnic.wire.opcode import Opcode as Op
from rnic_tb.endpoint import (
    ALL_ACCESS,
    Access,
    Event,
    QpState,
    RecvWr,
    Sge,
    WcFlag,
    WcOp,
    WcStatus,
)
from rnic_tb.endpoint.constants import NakCode
from rnic_tb.endpoint.pair import ACK, PD, Pair, nak, rnr
from tests.rules import rule
from tests.unit.endpoint_requests import ACCESS, DATA, INVALID, acks, answers, fadd, fatal, read, send, write


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
