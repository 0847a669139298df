"""The software endpoint as RC requester: R-REQ, R-RSP, R-RTY, R-RTC, R-TMO, R-RNR, R-ORD and R-ERR rules one by one."""

from __future__ import annotations

import pytest

from rnic.wire.opcode import Opcode as Op
from rnic_tb.endpoint import Access, MwBind, PeerPolicy, QpState, Sge, WcOp, WcStatus, WrOp
from rnic_tb.endpoint.pair import ACK, PD, Pair, rnr
from tests.rules import rule
from tests.unit.endpoint_answers import (
    FIRST,
    LAST,
    MIDDLE,
    OK,
    ONLY,
    SEQ,
    T,
    atomic_ack,
    fadd,
    psns,
    read,
    response,
    shape,
    write,
)

# ---- sending ---------------------------------------------------------------------------------------------------


@rule("R-REQ-1", "R-REQ-2", "R-REQ-3", "R-PSN-3", "R-LEN-1")
def test_segmentation() -> None:
    pair = Pair(psn_a=0xFFFFFE)
    pair.a.write(0, bytes(i % 253 for i in range(600)))
    pair.a.post(WrOp.SEND_IMM, 1, 0, 513, imm=0xAABBCCDD, solicited=True)
    write(pair, 2, 256, solicited=True)
    pair.a.post(WrOp.SEND_INV, 3, 0, 0, inv_rkey=0x99)
    pair.a.post(WrOp.WRITE_IMM, 4, 0, 257, remote_addr=0x77, rkey=0x88, imm=9)
    frames = pair.a.sent()
    assert shape(frames, pair) == [
        (Op.RC_SEND_FIRST, 0, False), (Op.RC_SEND_MIDDLE, 1, False), (Op.RC_SEND_LAST_IMM, 2, True),
        (Op.RC_WRITE_ONLY, 3, True), (Op.RC_SEND_ONLY_INV, 4, True), (Op.RC_WRITE_FIRST, 5, False),
        (Op.RC_WRITE_LAST_IMM, 6, True),
    ]  # fmt: skip
    assert [f.se for f in frames] == [False, False, True, False, False, False, False]
    assert b"".join(f.payload for f in frames[:3]) == pair.a.read(0, 513)
    assert frames[2].imm == 0xAABBCCDD and frames[4].rkey == 0x99
    assert (frames[5].va, frames[5].rkey, frames[5].dma_length) == (0x77, 0x88, 257)


@rule("R-REQ-2")
def test_ackreq_at_least_every_so_often() -> None:
    pair = Pair(policy_a=PeerPolicy(ack_interval=4))
    write(pair, 1, 256 * 10)
    assert [psn for _, psn, ackreq in shape(pair.a.sent(), pair) if ackreq] == [3, 7, 9]


@rule("R-PSN-3", "R-PSN-4")
def test_read_takes_a_psn_per_response() -> None:
    pair = Pair(psn_a=0xFFFFFF)
    for wr_id, length in enumerate((0, 1, 257, 513)):
        read(pair, wr_id, length)
    assert shape(pair.a.sent(), pair) == [(Op.RC_READ_REQUEST, psn, True) for psn in (0, 1, 2, 4)]
    assert pair.a.qp.requester.outstanding == 7


@rule("R-REQ-4")
def test_read_depth_stops_the_whole_queue() -> None:
    pair = Pair(max_rd_atomic=2)
    read(pair, 1, 8)
    fadd(pair, 2)
    read(pair, 3, 8)
    write(pair, 4, 8)
    assert psns(pair.a.sent(), pair) == [0, 1]
    assert psns(pair.a.take(response(pair, ONLY, 0, 8)), pair) == [2, 3]


@rule("R-ORD-2")
def test_fence_waits_for_all_reads_and_not_for_writes() -> None:
    pair = Pair()
    write(pair, 1, 8)
    read(pair, 2, 8)
    fadd(pair, 3)
    write(pair, 4, 8, fence=True)
    assert psns(pair.a.sent(), pair) == [0, 1, 2]
    assert pair.a.take(response(pair, ONLY, 1, 8)) == []
    assert psns(pair.a.take(atomic_ack(pair, 2)), pair) == [3]
    write(pair, 5, 8, fence=True)
    assert psns(pair.a.sent(), pair) == [4]


@rule("R-REQ-5", "R-ORD-3", "R-CQ-1")
def test_local_operations_complete_in_order() -> None:
    pair = Pair()
    write(pair, 1, 8)
    bind = MwBind(0x9901, pair.a.key, Access.REMOTE_READ, pair.a.base, 64)
    pair.a.post(WrOp.BIND_MW, 2, sges=(), bind=bind)
    pair.a.post(WrOp.LOCAL_INV, 3, inv_rkey=0x9901, fence=True)
    write(pair, 4, 8)
    assert psns(pair.a.sent(), pair) == [0]
    assert pair.a.completions() == []
    assert psns(pair.a.take(pair.ack(0)), pair) == [1]
    assert pair.a.completions() == [(1, OK), (2, OK), (3, OK)]
    pair.a.post(WrOp.LOCAL_INV, 5, inv_rkey=0x9901)
    assert pair.a.take(pair.ack(1)) == []
    assert pair.a.completions() == [(4, OK), (5, WcStatus.LOC_QP_OP_ERR)]


@rule("R-REQ-2", "R-PSN-6")
def test_packet_that_fills_the_window_asks_for_an_ack() -> None:
    pair = Pair(policy_a=PeerPolicy(window=3))
    write(pair, 1, 256 * 8)
    assert shape(pair.a.sent(), pair)[-1] == (Op.RC_WRITE_MIDDLE, 2, True)
    assert shape(pair.a.take(pair.ack(2)), pair)[-1] == (Op.RC_WRITE_MIDDLE, 5, True)


@rule("R-PSN-6")
def test_window_of_unacked_psns() -> None:
    pair = Pair(policy_a=PeerPolicy(window=4))
    for wr_id in range(10):
        write(pair, wr_id, 4)
    assert psns(pair.a.sent(), pair) == [0, 1, 2, 3]
    assert psns(pair.a.take(pair.ack(2)), pair) == [4, 5, 6]
    assert pair.a.completions() == [(0, OK), (1, OK), (2, OK)]


@rule("R-WQ-4", "R-WQ-5")
def test_gather_with_empty_elements_and_inline() -> None:
    pair = Pair()
    pair.a.write(0, b"abcdefgh")
    parts = tuple(pair.a.sge(i, n) for i, n in ((0, 1), (2, 2), (5, 3))) + (Sge(0, 0, 0xBAD),)
    pair.a.post(WrOp.SEND, 1, sges=parts)
    pair.a.post(WrOp.SEND, 2, sges=())
    pair.a.post(WrOp.SEND, 3, sges=(), inline=b"inline")
    assert [f.payload for f in pair.a.sent()] == [b"acdfgh", b"", b"inline"]


# ---- responses -------------------------------------------------------------------------------------------------


@rule("R-RSP-1", "R-PSN-2")
@pytest.mark.parametrize("first", [0x100, 0xFFFFFE])
def test_ghost_acks_are_ignored(first: int) -> None:
    pair = Pair(psn_a=first)
    for wr_id in range(3):
        write(pair, wr_id, 4)
    pair.a.sent()
    for psn in (-1, 3, 1000, 1 << 23):
        assert pair.a.take(pair.ack(psn), pair.ack(psn, SEQ), pair.ack(psn, rnr(1))) == []
    assert pair.a.completions() == [] and pair.a.qp.requester.counters["ghosts"] == 12
    pair.a.take(pair.ack(2))
    assert pair.a.completions() == [(0, OK), (1, OK), (2, OK)]


@rule("R-RSP-2")
def test_acks_are_cumulative() -> None:
    pair = Pair()
    for wr_id in range(8):
        pair.a.post(WrOp.SEND, wr_id, length=300)
    pair.a.sent()
    pair.a.take(pair.ack(8))
    assert pair.a.completions() == [(wr_id, OK) for wr_id in range(4)]
    pair.a.take(pair.ack(9))
    assert pair.a.completions() == [(4, OK)]
    pair.a.take(pair.ack(15))
    assert pair.a.completions() == [(5, OK), (6, OK), (7, OK)]


@rule("R-RSP-2")
def test_read_response_acknowledges_older_writes() -> None:
    pair = Pair()
    write(pair, 1, 300)
    read(pair, 2, 8)
    pair.a.sent()
    pair.a.take(response(pair, ONLY, 2, 8))
    assert pair.a.completions() == [(1, OK), (2, OK)]


@rule("R-RSP-3", "R-RTY-1", "R-RTY-3")
def test_ack_past_an_unanswered_read_is_an_implied_nak() -> None:
    pair = Pair()
    write(pair, 1, 4)
    read(pair, 2, 8)
    pair.a.post(WrOp.SEND, 3, length=4)
    first = pair.a.sent()
    again = pair.a.take(pair.ack(2))
    assert pair.a.completions() == [(1, OK)]
    assert [(f.opcode, f.psn, f.va) for f in again] == [(f.opcode, f.psn, f.va) for f in first[1:]]
    pair.a.take(response(pair, ONLY, 1, 8), pair.ack(2))
    assert pair.a.completions() == [(2, OK), (3, OK)]
    assert pair.a.qp.requester.counters["retries"] == 1


@rule("R-RSP-4", "R-RTY-4")
@pytest.mark.parametrize("retries", [True, False])
def test_gap_in_a_read_answer(retries: bool) -> None:
    pair = Pair(policy_a=PeerPolicy(read_gap_retry=retries))
    read(pair, 1, 1000)
    pair.a.sent()
    assert pair.a.take(response(pair, FIRST, 0)) == []
    again = pair.a.take(response(pair, MIDDLE, 2))
    if not retries:
        assert again == []
        again = pair.a.wait(T)
    (request,) = again
    assert (request.psn - pair.psn_a, request.va, request.dma_length) == (1, pair.b.base + 256, 744)
    assert pair.a.take(response(pair, LAST, 3, 232)) == []
    pair.a.take(response(pair, FIRST, 1), response(pair, MIDDLE, 2), response(pair, LAST, 3, 232))
    assert pair.a.completions() == [(1, OK)]
    assert pair.a.read(256, 2) == b"\1\2" and pair.a.read(768, 2) == b"\3\4"


@rule("R-RSP-6")
@pytest.mark.parametrize("op", [FIRST, MIDDLE])
def test_repeated_read_may_start_with_first_or_go_on(op: Op) -> None:
    pair = Pair()
    read(pair, 1, 700)
    pair.a.sent()
    pair.a.take(response(pair, FIRST, 0))
    assert psns(pair.a.wait(T), pair) == [1]
    pair.a.take(response(pair, op, 1), response(pair, LAST, 2, 188))
    assert pair.a.completions() == [(1, OK)]


@rule("R-RSP-5")
@pytest.mark.parametrize(
    "length,answer,status",
    [
        (600, (MIDDLE, 0, 256, ACK), WcStatus.BAD_RESP_ERR),
        (600, (LAST, 0, 256, ACK), WcStatus.BAD_RESP_ERR),
        (600, (FIRST, 0, 256, SEQ), WcStatus.BAD_RESP_ERR),
        (600, (FIRST, 0, 256, rnr(1)), WcStatus.BAD_RESP_ERR),
        (600, (ONLY, 0, 100, ACK), WcStatus.LOC_LEN_ERR),
        (600, (FIRST, 0, 252, ACK), WcStatus.LOC_LEN_ERR),
        (100, (ONLY, 0, 99, ACK), WcStatus.LOC_LEN_ERR),
        (100, (ONLY, 0, 101, ACK), WcStatus.LOC_LEN_ERR),
        (100, (LAST, 0, 100, ACK), WcStatus.BAD_RESP_ERR),
        (256, (FIRST, 0, 256, ACK), WcStatus.BAD_RESP_ERR),
    ],
)
def test_bad_read_responses(length: int, answer: tuple, status: WcStatus) -> None:
    pair = Pair()
    write(pair, 1, 4, signaled=False)
    read(pair, 2, length)
    write(pair, 3, 4)
    pair.a.sent()
    op, psn, size, code = answer
    assert pair.a.take(response(pair, op, psn + 1, size, code)) == []
    assert pair.a.completions() == [(2, status), (3, WcStatus.WR_FLUSH_ERR)]
    assert pair.a.qp.state is QpState.ERR


@rule("R-RSP-5")
@pytest.mark.parametrize("kind", ["read for write", "atomic for read", "read for atomic", "first"])
def test_response_of_the_wrong_kind(kind: str) -> None:
    pair = Pair()
    if kind in ("read for write",):
        write(pair, 1, 4)
    elif kind in ("atomic for read", "first"):
        read(pair, 1, 700)
    else:
        fadd(pair, 1)
    pair.a.sent()
    if kind == "first":
        pair.a.take(response(pair, FIRST, 0), response(pair, FIRST, 1))
    elif kind == "atomic for read":
        pair.a.take(atomic_ack(pair, 0))
    else:
        pair.a.take(response(pair, ONLY, 0, 4))
    assert pair.a.completions() == [(1, WcStatus.BAD_RESP_ERR)]


@rule("R-RSP-3", "R-DUP-2")
@pytest.mark.parametrize("atomic", [True, False])
def test_plain_ack_that_names_an_unanswered_read_or_atomic(atomic: bool) -> None:
    """A responder whose answer was lost may name the request in a repeated ACK: asked again, not an error."""
    pair = Pair()
    if atomic:
        fadd(pair, 1)
    else:
        read(pair, 1, 8)
    pair.a.sent()
    assert psns(pair.a.take(pair.ack(0)), pair) == [0]
    pair.a.take(atomic_ack(pair, 0) if atomic else response(pair, ONLY, 0, 8))
    assert pair.a.completions() == [(1, OK)]


@rule("R-RSP-7")
def test_progress_reloads_budgets_and_restarts_the_timer() -> None:
    pair = Pair(retry_cnt=1)
    read(pair, 1, 256 * 20)
    pair.a.sent()
    for psn in range(19):
        assert pair.a.wait(T - 1) == []
        pair.a.take(response(pair, FIRST if psn == 0 else MIDDLE, psn))
    assert pair.a.qp.requester.counters["timeouts"] == 0
    assert psns(pair.a.wait(T), pair) == [19]
    pair.a.take(response(pair, ONLY, 19))
    assert pair.a.completions() == [(1, OK)]
    assert pair.a.device.next_deadline() is None


@rule("R-RSP-8", "R-MR-4")
@pytest.mark.parametrize("atomic", [True, False])
def test_result_that_cannot_be_stored(atomic: bool) -> None:
    pair = Pair()
    pair.a.device.keys.register(0x7700, PD, Access.NONE, 0x7000, 4096)
    op = WrOp.FETCH_ADD if atomic else WrOp.READ
    pair.a.post(op, 1, sges=(Sge(0x7000, 8, 0x7700),), remote_addr=pair.b.base, rkey=pair.b.key, signaled=False)
    write(pair, 2, 4)
    pair.a.sent()
    pair.a.take(atomic_ack(pair, 0) if atomic else response(pair, ONLY, 0, 8))
    assert pair.a.completions() == [(1, WcStatus.LOC_PROT_ERR), (2, WcStatus.WR_FLUSH_ERR)]


@rule("R-AT-2", "R-CQ-2", "R-CQ-3")
def test_atomic_result_is_in_host_order() -> None:
    pair = Pair()
    fadd(pair, 1)
    pair.a.sent()
    pair.a.take(atomic_ack(pair, 0, 0x0102030405060708))
    assert pair.a.read(64, 8) == bytes(range(8, 0, -1))
    (wc,) = pair.a.wcs()
    assert (wc.opcode, wc.byte_len) == (WcOp.FETCH_ADD, 8)
