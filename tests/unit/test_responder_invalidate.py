"""SEND with invalidate at the responder (rules.md 8.1 row 12, 19.2)."""

import pytest

from rnic.abi import Access, WcStatus
from tests.rules import rule
from tests.unit.test_responder_street import BUFFER, quiet_bench, send, write_only

RIGHTS = int(Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_INVALIDATE)


@rule("R-CQ-4", "R-MR-1", "8.1#12")
@pytest.mark.parametrize("size", [0, 16, 300])
def test_invalidate(size):
    """The key works until the SEND, and never after; the CQE names it and comes when it is no more. A CQE without immediate and
    key has 0 there."""
    bench, qp, _ = quiet_bench(size)
    qp.path_mtu = 1
    bench.world.region(0x700, qp.pd, RIGHTS, base=0x10_0000, length=4096)
    bench.walk = (300, 300)  # the invalidation takes its time
    first = [send(qp, 1, "FIRST", 256), send(qp, 2, "LAST_INV", size - 256, imm=0x700)] if size > 256 else [
        send(qp, 1, "ONLY_INV", size, imm=0x700)]  # fmt: skip
    after = 1 + len(first)
    log = []
    bench.run([("post", qp, BUFFER), ("post", qp, BUFFER), ("post", qp, BUFFER), write_only(qp, 0, rkey=0x700), *first,
               ("wait", 140), ("call", lambda b: log.append((len(b.cqes[2]), 0x700 in b.world.gone))),
               send(qp, after, "ONLY", 8, imm=0x1234), write_only(qp, after + 1, rkey=0x700)], settle=320)  # fmt: skip
    bench.compare()
    assert qp.dead and bench.world.gone == {0x700}, "the WRITE behind the SEND was not refused"
    assert log == [(0, True)], "the CQE did not wait"
    assert [(c["status"], c.get("imm")) for c in bench.cqes[2]] == [
        (WcStatus.SUCCESS, 0x700), (WcStatus.SUCCESS, 0), (WcStatus.WR_FLUSH_ERR, None)]  # fmt: skip
    assert [a[0] for a in bench.acks[2]] == [0x1F] * (2 + len(first)) + [0x62]


@rule("8.1#12", "R-MR-1", "R-MR-4", "R-ERR-4")
@pytest.mark.parametrize("why", ["unknown", "variant", "pd", "right", "twice"])
def test_not_invalidated(why):
    """A key that is none, of another domain, or whose region was made without the right: no answer, error CQE, QP in ERR; the key
    goes on working for others."""
    bench, qp, _ = quiet_bench(len(why))
    other = bench.qps[3]
    rights = RIGHTS & ~int(Access.REMOTE_INVALIDATE) if why == "right" else RIGHTS
    bench.world.region(0x700, other.pd if why in ("pd", "unknown", "variant") else qp.pd, rights, base=0x10_0000, length=4096)
    key = {"unknown": 0xABCD00, "variant": 0x701}.get(why, 0x700)
    sends = [send(qp, n, "ONLY_INV", 8, imm=key) for n in range(2 if why == "twice" else 1)]
    bench.run([*[("post", qp, BUFFER)] * 3, *sends, write_only(qp, len(sends))], settle=120)
    bench.compare()
    assert qp.dead and bench.errors == [2] and bench.error_drop == 1
    good, bad, flushed = WcStatus.SUCCESS, WcStatus.LOC_QP_OP_ERR, WcStatus.WR_FLUSH_ERR
    assert [c["status"] for c in bench.cqes[2]] == ([good, bad, flushed] if why == "twice" else [bad, flushed, flushed])
    assert len(bench.acks[2]) == len(sends) - 1 and bench.world.gone == ({0x700} if why == "twice" else set())
