"""The software endpoint as RC requester: retries, RNR NAKs, fatal NAKs, errors."""

from __future__ import annotations

import pytest

from rnic.wire.opcode import Opcode as Op
from rnic_tb.endpoint import Event, QpState, Sge, WcStatus, WrOp
from rnic_tb.endpoint.constants import RNR_TIMER_NS, NakCode
from rnic_tb.endpoint.pair import Pair, nak, rnr
from tests.rules import rule
from tests.unit.endpoint_answers import OK, ONLY, SEQ, T, fadd, psns, read, response, write

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
