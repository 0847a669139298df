"""The RTL against a Linux peer's captures: each end is replaced by the simulated RNIC in turn (docs: tb/rnic_tb/replay.py).

`SUPPORTED` says how much of a capture the RTL can do; whatever it leaves out is skipped with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch

import pytest
from tests.captures.conftest import DEFAULT

from rnic_tb import captures as cap
from rnic_tb.endpoint_end import progress
from rnic_tb.replay import READ_ATOMIC, Replay, cut
from rnic_tb.rtl_end import RtlEnd


@dataclass(frozen=True)
class Until:
    """Messages of a up to the first that `stop` holds for."""

    stop: Callable[[cap.Post], bool]


ALL = Until(lambda post: False)

RETRY = "retransmission"
MERGED = "a duplicate of a request not yet answered gets no answer of its own (R-DUP-5: the first one is on its way)"
AGAIN = "a duplicate is answered together with every answer behind it; the peer resends one (R-DUP-3, R-DUP-5)"
DEPTH = "a READ beyond max_dest_rd_atomic gets NAK invalid request (8.1 row 4); the peer recycles silently (section 21 #11)"
NEWER = "a READ may return what a later WRITE placed (R-ORD-1)"

#: Capture names -> what the RTL does as a and as b: messages up to a limit, or the reason why not. The first match counts.
SUPPORTED: tuple[tuple[str, Until | str, Until | str], ...] = (
    ("rc_write_*", ALL, ALL),
    ("rc_send_*", ALL, ALL),
    ("rc_inline", ALL, ALL),
    ("rc_ipv4_tos", ALL, ALL),
    ("rc_flow_label0", ALL, ALL),
    ("rc_multi_sge", ALL, ALL),
    ("rc_psn_wrap*", ALL, ALL),
    ("rc_ecn_ce", ALL, ALL),
    ("rc_err_badrkey_write*", ALL, ALL),
    ("rc_err_perm_write", ALL, ALL),
    ("rc_err_recv_lkey", ALL, ALL),
    ("rc_err_send_too_long", ALL, ALL),
    ("rc_err_peer_in_*", RETRY, ALL),
    ("rc_err_qpperm_read", ALL, ALL),
    ("rc_err_*", ALL, ALL),
    ("rc_dup_ack", ALL, ALL),
    ("rc_dup_send_only", ALL, ALL),
    ("rc_dup_write", ALL, ALL),
    ("rc_dup_fadd", ALL, MERGED),
    ("rc_dup_*", ALL, ALL),
    ("rc_loss_exhausted", RETRY, ALL),
    ("rc_loss_write_*", RETRY, ALL),
    ("rc_loss_send_*", RETRY, ALL),
    ("rc_loss_multi_ack1", ALL, ALL),
    ("rc_loss_mixed_read_resp", RETRY, AGAIN),
    ("rc_loss_*", RETRY, ALL),
    ("rc_swap_read_resp", RETRY, ALL),
    ("rc_rnr_*", RETRY, ALL),
    ("rc_srq", ALL, "shared receive queues"),
    ("rc_*read*", ALL, ALL),
    ("rc_cas", ALL, ALL),
    ("rc_fence", ALL, ALL),
    ("crafted_atomic_unaligned", ALL, ""),
    ("crafted_atomic_ok_and_dup", AGAIN, ""),
    ("crafted_*atomic*", ALL, ""),
    ("crafted_read_many", DEPTH, ""),
    ("crafted_read_then_write", NEWER, ""),
    ("crafted_req_read_acked", RETRY, ""),
    ("crafted_req_read_retry_first", RETRY, ""),
    ("crafted_*read*", ALL, ""),
    ("crafted_send_inv_*", ALL, ""),
    ("crafted_req_ack_partial", RETRY, ""),
    ("crafted_req_nak_seq_twice", RETRY, ""),
    ("crafted_req_rnr*", RETRY, ""),
    ("crafted_req_timeout_backoff", RETRY, ""),
    ("crafted_uc_*", "UC", ""),
    ("crafted_*", ALL, ""),
    ("uc_*", "UC", "UC"),
    ("ud_*", "UD", "UD"),
)


#: Test -> which captures it takes.
REPLAYED = {
    "test_rtl_on_a_bad_bus": lambda name: fnmatch(name, "rc_*_mtu1024") and "read" not in name or name == "rc_multi_sge",
    "test_a_wrong_number_is_seen": lambda name: name == "rc_dup_send_only",
    "test_cut": lambda name: name == "rc_multi_sge",
}
BAD_BUS = {
    "read_latency": 300, "read_jitter": 200, "write_latency": 90, "write_jitter": 70, "reorder": True, "interleave": True,
    "ar_stall": 0.3, "r_stall": 0.4, "aw_stall": 0.3, "w_stall": 0.4, "b_stall": 0.3,
}  # fmt: skip


def supported(scenario: cap.Scenario, side: str) -> Until:
    """How much to replay; skips the test with the reason when nothing."""
    if scenario.transport is None:
        pytest.skip("traffic of a stock tool: no queue pair is recorded")
    if scenario.crafted and side == "b":
        pytest.skip("b is hand-made frames")
    reason = cap.LEFT_OUT.get((scenario.name, side))
    if reason:
        pytest.skip(f"left out for any implementation: {reason}")
    for names, a, b in SUPPORTED:
        if fnmatch(scenario.name, names):
            does = a if side == "a" else b
            if isinstance(does, str):
                pytest.skip(f"not in the RTL yet: {does}")
            return does
    pytest.skip("a capture SUPPORTED does not name")


def problems_of(scenario: cap.Scenario, side: str, **settings) -> list[str]:
    """Differences of the RTL as one end."""
    with RtlEnd(scenario, side, **settings) as end:
        return Replay(scenario, side, end, progress).run()


@pytest.mark.parametrize("side", ["a", "b"])
def test_rtl(scenario: cap.Scenario, side: str) -> None:
    """Frames header for header, completions, memory and state as the peer's, but for `captures.EXCEPTIONS`."""
    problems = problems_of(cut(scenario, supported(scenario, side).stop), side)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("side", ["a", "b"])
def test_rtl_on_a_bad_bus(scenario: cap.Scenario, side: str) -> None:
    """A slow host bus that stalls, reorders and interleaves changes nothing on the wire."""
    problems = problems_of(cut(scenario, supported(scenario, side).stop), side, seed=5, **BAD_BUS)
    assert not problems, "\n".join(problems)


def test_a_wrong_number_is_seen(scenario: cap.Scenario) -> None:
    """The replay reports what differs: the PSN at a, the memory at b, a frame too many at a, an answer too many at b."""
    assert scenario.a is not None
    scenario = replace(scenario, timeout=8)  # what never comes is waited for
    wrong = replace(scenario, a=replace(scenario.a, psn=scenario.a.psn + 1))
    assert any("psn is 0x111001, recorded 0x111000" in text for text in problems_of(wrong, "a"))
    steps = [replace(step, data=bytes(len(step.data))) if isinstance(step, cap.MemoryIs) else step for step in scenario.steps]
    assert any(text.startswith("memory at 0") for text in problems_of(replace(scenario, steps=tuple(steps)), "b"))
    lost = replace(scenario, frames=scenario.frames[1:])
    assert problems_of(lost, "b") and problems_of(lost, "a")


def test_cut(scenario: cap.Scenario) -> None:
    part = cut(scenario, lambda post: post.op in READ_ATOMIC)
    assert len(part.frames) == 6 and not part.final
    assert [step.op for step in part.steps if isinstance(step, cap.Post)] == ["write", "send"]
    assert cut(scenario, lambda post: False) is scenario


def test_every_capture_is_named() -> None:
    """What SUPPORTED leaves out of the captures kept here it leaves out for a reason."""
    names = [scenario.name for scenario in cap.load_all(DEFAULT) if scenario.transport is not None]
    assert len(names) > 100
    assert [name for name in names if not any(fnmatch(name, row[0]) for row in SUPPORTED)] == []
