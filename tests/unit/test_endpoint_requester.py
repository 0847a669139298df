"""The software endpoint as RC requester: R-REQ, R-RSP, R-RTY, R-RTC, R-TMO, R-RNR, R-ORD and R-ERR rules one by one."""

from __future__ import annotations

import pytest

from rnic.wire.frame import Frame
from rnic.wire.opcode import Opcode as Op
from rnic_tb.endpoint import Access, Event, MwBind, PeerPolicy, QpState, Sge, WcOp, WcStatus, WrOp
from rnic_tb.endpoint.constants import RNR_TIMER_NS, NakCode, ack_timeout_ns
from rnic_tb.endpoint.pair import ACK, PD, Pair, nak, rnr
from tests.rules import rule

OK = WcStatus.SUCCESS
SEQ = nak(NakCode.PSN_SEQUENCE)
T = ack_timeout_ns(8)
assert T is not None


def shape(frames: list[Frame], pair: Pair) -> list[tuple[Op, int, bool]]:
    """(opcode, PSN from the first, AckReq)."""
    return [(f.opcode, (f.psn - pair.psn_a) & 0xFFFFFF, f.ackreq) for f in frames]


def psns(frames: list[Frame], pair: Pair) -> list[int]:
    return [psn for _, psn, _ in shape(frames, pair)]


def write(pair: Pair, wr_id: int, length: int, **fields) -> None:
    pair.a.post(WrOp.WRITE, wr_id, 0, length, remote_addr=pair.b.base, rkey=pair.b.key, **fields)


def read(pair: Pair, wr_id: int, length: int, offset: int = 0, **fields) -> None:
    pair.a.post(WrOp.READ, wr_id, offset, length, remote_addr=pair.b.base, rkey=pair.b.key, **fields)


def fadd(pair: Pair, wr_id: int, **fields) -> None:
    pair.a.post(WrOp.FETCH_ADD, wr_id, 64, 8, remote_addr=pair.b.base, rkey=pair.b.key, **({"add": 1} | fields))


def response(pair: Pair, op: Op, psn: int, size: int = 256, code: int = ACK) -> Frame:
    data = bytes((psn + i) & 255 for i in range(size))
    return pair.answer(op, psn, payload=data, syndrome=code, msn=1)


def atomic_ack(pair: Pair, psn: int, original: int = 5) -> Frame:
    return pair.answer(Op.RC_ATOMIC_ACK, psn, original=original, syndrome=ACK, msn=1)


FIRST, MIDDLE, LAST, ONLY = Op.RC_READ_RESP_FIRST, Op.RC_READ_RESP_MIDDLE, Op.RC_READ_RESP_LAST, Op.RC_READ_RESP_ONLY

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


# ---- retry -----------------------------------------------------------------------------------------------------


@rule("R-RTY-1", "R-RTY-2", "R-RTY-3")
def test_go_back_n_inside_a_message() -> None:
    pair = Pair()
    pair.a.write(0, bytes(i % 253 for i in range(1024)))
    write(pair, 1, 1024)
    write(pair, 2, 300)
    first = pair.a.sent()
    again = pair.a.take(pair.ack(2, SEQ))
    assert [f.transport() for f in again] == [f.transport() for f in first[2:]]
    assert again[0].opcode is Op.RC_WRITE_MIDDLE and again[1].opcode is Op.RC_WRITE_LAST
    pair.a.take(pair.ack(5))
    assert pair.a.completions() == [(1, OK), (2, OK)]


@rule("R-RTY-1")
def test_retried_atomic_is_identical() -> None:
    pair = Pair()
    fadd(pair, 1, add=77)
    (first,) = pair.a.sent()
    (again,) = pair.a.wait(T)
    assert again.transport() == first.transport()


@rule("R-RTY-4")
def test_one_retry_per_loss_event() -> None:
    pair = Pair()
    write(pair, 1, 1024)
    pair.a.sent()
    for _ in range(2):
        pair.a.device.receive(pair.ack(1, SEQ).pack())
    assert psns(pair.a.sent(), pair) == [1, 2, 3]
    assert pair.a.take(pair.ack(1, SEQ)) == []
    assert pair.a.qp.requester.counters["retries"] == 1


@rule("R-RTY-4")
def test_late_ack_shortens_a_replay() -> None:
    pair = Pair()
    write(pair, 1, 1024)
    pair.a.sent()
    pair.a.device.receive(pair.ack(0, SEQ).pack())
    assert psns(pair.a.sent(1), pair) == [0]
    assert psns(pair.a.take(pair.ack(2)), pair) == [3]
    pair.a.take(pair.ack(3))
    assert pair.a.completions() == [(1, OK)]


@rule("R-RTY-4")
def test_post_during_a_replay_goes_behind_it() -> None:
    pair = Pair()
    write(pair, 1, 512)
    pair.a.sent()
    pair.a.device.receive(pair.ack(0, SEQ).pack())
    pair.a.sent(1)
    write(pair, 2, 4)
    assert psns(pair.a.sent(), pair) == [1, 2]


@rule("R-TMO-1", "R-RTC-1", "R-ERR-1", "R-ERR-3")
@pytest.mark.parametrize("code,retries", [(1, 0), (8, 2), (14, 7)])
def test_timeout_and_retry_count(code: int, retries: int) -> None:
    pair = Pair(timeout=code, retry_cnt=retries, rnr_retry=7)
    write(pair, 1, 4, signaled=False)
    write(pair, 2, 4, signaled=False)
    wait = 4096 << code
    assert len(pair.a.sent()) == 2
    for _ in range(retries):
        assert pair.a.wait(wait - 1) == []
        assert psns(pair.a.wait(1), pair) == [0, 1]
    assert pair.a.completions() == []
    assert pair.a.wait(wait) == []
    assert pair.a.completions() == [(1, WcStatus.RETRY_EXC_ERR), (2, WcStatus.WR_FLUSH_ERR)]
    assert pair.a.qp.state is QpState.ERR


@rule("R-TMO-1")
def test_timeout_0_is_never() -> None:
    pair = Pair(timeout=0)
    write(pair, 1, 4)
    pair.a.sent()
    assert pair.a.device.next_deadline() is None
    assert pair.a.wait(10**13) == []


@rule("R-RTC-1")
def test_sequence_and_implied_naks_burn_retries() -> None:
    pair = Pair(retry_cnt=2)
    read(pair, 1, 4)
    write(pair, 2, 4)
    pair.a.sent()
    assert psns(pair.a.take(pair.ack(1)), pair) == [0, 1]
    assert psns(pair.a.wait(T), pair) == [0, 1]
    pair.a.wait(T)
    assert pair.a.completions() == [(1, WcStatus.RETRY_EXC_ERR), (2, WcStatus.WR_FLUSH_ERR)]


# ---- RNR -------------------------------------------------------------------------------------------------------


@rule("R-RNR-1", "R-RNR-3", "R-RNR-4", "R-TMO-2")
@pytest.mark.parametrize("code", range(32))
def test_rnr_wait_of_every_code(code: int) -> None:
    pair = Pair(timeout=1, retry_cnt=0)
    for wr_id in range(4):
        pair.a.post(WrOp.SEND, wr_id, length=4)
    pair.a.sent()
    assert pair.a.take(pair.ack(2, rnr(code))) == []
    assert pair.a.completions() == [(0, OK), (1, OK)]
    assert pair.a.wait(RNR_TIMER_NS[code] - 1) == []
    assert psns(pair.a.wait(1), pair) == [2, 3]
    pair.a.take(pair.ack(3))
    assert pair.a.completions() == [(2, OK), (3, OK)]


@rule("R-RNR-3")
def test_rnr_table_by_its_own_rule() -> None:
    """Steps double every two codes; 0 is the longest."""
    assert RNR_TIMER_NS[0] == 655_360_000 == max(RNR_TIMER_NS)
    assert RNR_TIMER_NS[1] == 10_000 and RNR_TIMER_NS[14] == 1_280_000 and RNR_TIMER_NS[31] == 491_520_000
    assert all(RNR_TIMER_NS[n + 2] == 2 * RNR_TIMER_NS[n] for n in range(4, 30))


@rule("R-RNR-2")
def test_sequence_nak_during_the_wait_changes_nothing() -> None:
    pair = Pair(retry_cnt=0)
    for wr_id in range(3):
        pair.a.post(WrOp.SEND, wr_id, length=4)
    pair.a.sent()
    assert pair.a.take(pair.ack(0, rnr(14)), pair.ack(0, SEQ), pair.ack(0, rnr(14))) == []
    assert pair.a.wait(RNR_TIMER_NS[14] - 1) == []
    assert psns(pair.a.wait(1), pair) == [0, 1, 2]
    assert pair.a.qp.requester.counters["rnr_naks"] == 1


@rule("R-RNR-1", "R-RTY-4")
def test_loss_after_an_rnr_wait_is_a_new_loss_event() -> None:
    pair = Pair(timeout=0)
    for wr_id in range(2):
        pair.a.post(WrOp.SEND, wr_id, length=4)
    pair.a.sent()
    assert psns(pair.a.take(pair.ack(0, SEQ)), pair) == [0, 1]
    pair.a.take(pair.ack(0, rnr(1)))
    assert psns(pair.a.wait(RNR_TIMER_NS[1]), pair) == [0, 1]
    assert psns(pair.a.take(pair.ack(0, SEQ)), pair) == [0, 1]


@rule("R-RTC-2")
@pytest.mark.parametrize("budget", [0, 2])
def test_rnr_retries_used_up(budget: int) -> None:
    pair = Pair(rnr_retry=budget, retry_cnt=7)
    pair.a.post(WrOp.SEND, 1, length=4)
    pair.a.post(WrOp.SEND, 2, length=4)
    sent = len(pair.a.sent())
    for _ in range(budget):
        pair.a.take(pair.ack(0, rnr(1)))
        sent += len(pair.a.wait(RNR_TIMER_NS[1]))
    pair.a.take(pair.ack(0, rnr(1)))
    assert sent == 2 * (budget + 1)
    assert pair.a.completions() == [(1, WcStatus.RNR_RETRY_EXC_ERR), (2, WcStatus.WR_FLUSH_ERR)]


@rule("R-RTC-2")
def test_rnr_retry_7_is_infinite() -> None:
    pair = Pair(rnr_retry=7, retry_cnt=0)
    pair.a.post(WrOp.SEND, 1, length=4)
    pair.a.sent()
    for _ in range(50):
        pair.a.take(pair.ack(0, rnr(1)))
        assert psns(pair.a.wait(RNR_TIMER_NS[1]), pair) == [0]
    pair.a.take(pair.ack(0))
    assert pair.a.completions() == [(1, OK)]


# ---- NAKs and errors -------------------------------------------------------------------------------------------


@rule("R-ERR-3", "R-ERR-4", "7.4")
@pytest.mark.parametrize(
    "code,status",
    [
        (NakCode.INVALID_REQUEST, WcStatus.REM_INV_REQ_ERR),
        (NakCode.REMOTE_ACCESS, WcStatus.REM_ACCESS_ERR),
        (NakCode.REMOTE_OPERATIONAL, WcStatus.REM_OP_ERR),
    ],
)
def test_fatal_nak_names_its_request(code: NakCode, status: WcStatus) -> None:
    pair = Pair()
    pair.a.recv(90)
    for wr_id in range(4):
        write(pair, wr_id, 300)
    pair.a.sent()
    pair.a.take(pair.ack(3, nak(code)))
    flush = WcStatus.WR_FLUSH_ERR
    assert pair.a.completions() == [(0, OK), (1, status), (2, flush), (3, flush), (90, flush)]
    write(pair, 9, 4)
    pair.a.recv(91)
    assert pair.a.completions() == [(9, flush), (91, flush)]
    assert pair.a.sent() == [] and pair.a.device.next_deadline() is None


@rule("R-RSP-3", "7.4")
def test_fatal_nak_behind_an_unanswered_read() -> None:
    pair = Pair()
    read(pair, 1, 4)
    write(pair, 2, 4)
    pair.a.sent()
    assert psns(pair.a.take(pair.ack(1, nak(NakCode.REMOTE_ACCESS))), pair) == [0, 1]
    pair.a.take(response(pair, ONLY, 0, 4), pair.ack(1, nak(NakCode.REMOTE_ACCESS)))
    assert pair.a.completions() == [(1, OK), (2, WcStatus.REM_ACCESS_ERR)]


@rule("7.4")
@pytest.mark.parametrize("code", [0x64, 0x65, 0x7F, 0x40, 0x5F])
def test_reserved_syndromes_are_ignored(code: int) -> None:
    pair = Pair()
    write(pair, 1, 4)
    pair.a.sent()
    assert pair.a.take(pair.ack(0, code)) == []
    assert pair.a.completions() == [] and pair.a.qp.state is QpState.RTS


@rule("R-ERR-7", "R-ERR-1")
def test_local_error_waits_for_older_requests() -> None:
    pair = Pair()
    write(pair, 1, 4)
    pair.a.post(WrOp.SEND, 2, sges=(Sge(pair.a.base, 4, 0xBAD),), signaled=False)
    write(pair, 3, 4)
    assert psns(pair.a.sent(), pair) == [0]
    assert pair.a.completions() == []
    pair.a.take(pair.ack(0))
    assert pair.a.completions() == [(1, OK), (2, WcStatus.LOC_PROT_ERR), (3, WcStatus.WR_FLUSH_ERR)]


@rule("R-LEN-2")
def test_message_longer_than_2_to_the_31() -> None:
    pair = Pair()
    read(pair, 1, 1 << 31)
    (request,) = pair.a.sent()
    assert request.dma_length == 1 << 31
    pair = Pair()
    read(pair, 1, (1 << 31) + 1)
    assert pair.a.sent() == []
    assert pair.a.completions() == [(1, WcStatus.LOC_LEN_ERR)]


@rule("R-QP-3")
def test_drain() -> None:
    pair = Pair()
    write(pair, 1, 300)
    assert len(pair.a.sent(1)) == 1
    pair.a.qp.modify(QpState.SQD)
    write(pair, 2, 4)
    assert psns(pair.a.sent(), pair) == [1]
    with pytest.raises(ValueError, match="draining"):
        pair.a.qp.modify(QpState.RTS)
    assert pair.a.qp.events == []
    pair.a.take(pair.ack(1))
    assert pair.a.qp.events == [Event.SQ_DRAINED]
    pair.a.qp.modify(QpState.RTS)
    assert psns(pair.a.sent(), pair) == [2]


@rule("R-CQ-1")
def test_unsignaled_success_is_silent() -> None:
    pair = Pair(limits={"max_send_wr": 4})
    for wr_id in range(4):
        write(pair, wr_id, 4, signaled=wr_id == 3)
    pair.a.sent()
    pair.a.take(pair.ack(3))
    assert pair.a.completions() == [(3, OK)]
    pair = Pair(limits={"sq_sig_all": True})
    write(pair, 1, 4, signaled=False)
    pair.a.sent()
    pair.a.take(pair.ack(0))
    assert pair.a.completions() == [(1, OK)]
