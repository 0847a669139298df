"""The RTL against a Linux peer's captures: each end is replaced by the simulated RNIC in turn (docs: tb/rnic_tb/replay.py).

`SUPPORTED` says how much of a capture the RTL can do; whatever it leaves out is skipped with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch

import pytest

from rnic_tb import captures as cap
from rnic_tb.endpoint_end import progress
from rnic_tb.replay import READ_ATOMIC, Replay, cut
from rnic_tb.rtl_end import RtlEnd


@dataclass(frozen=True)
class Until:
    """Messages of a up to the first that `stop` holds for."""

    stop: Callable[[cap.Post], bool]


ALL = Until(lambda post: False)
WRITE_SEND = Until(lambda post: post.op in READ_ATOMIC)

READ = "READ and ATOMIC"
RETRY = "retransmission"
WINDOW = "memory windows and invalidation"

#: Capture names -> what the RTL does as a and as b: messages up to a limit, or the reason why not. The first match counts.
SUPPORTED: tuple[tuple[str, Until | str, Until | str], ...] = (
    ("rc_write_*", ALL, ALL),
    ("rc_send_inv", WINDOW, WINDOW),
    ("rc_send_*", ALL, ALL),
    ("rc_inline", ALL, ALL),
    ("rc_ipv4_tos", ALL, ALL),
    ("rc_flow_label0", ALL, ALL),
    ("rc_multi_sge", WRITE_SEND, WRITE_SEND),
    ("rc_psn_wrap", WRITE_SEND, WRITE_SEND),
    ("rc_ecn_ce", ALL, ALL),
    ("rc_err_badrkey_write*", ALL, ALL),
    ("rc_err_perm_write", ALL, ALL),
    ("rc_err_recv_lkey", ALL, ALL),
    ("rc_err_send_too_long", ALL, ALL),
    ("rc_err_peer_in_*", RETRY, ALL),
    ("rc_err_*", READ, READ),
    ("rc_dup_ack", ALL, ALL),
    ("rc_dup_send_only", ALL, ALL),
    ("rc_dup_write", ALL, ALL),
    ("rc_dup_*", READ, READ),
    ("rc_loss_exhausted", RETRY, ALL),
    ("rc_loss_write_*", RETRY, ALL),
    ("rc_loss_send_*", RETRY, ALL),
    ("rc_loss_multi_ack1", RETRY, ALL),
    ("rc_loss_*", READ, READ),
    ("rc_rnr_*", RETRY, ALL),
    ("rc_srq", ALL, "shared receive queues"),
    ("rc_*read*", READ, READ),
    ("rc_cas", READ, READ),
    ("rc_fence", READ, READ),
    ("rc_swap_*", READ, READ),
    ("crafted_*atomic*", READ, ""),
    ("crafted_*read*", READ, ""),
    ("crafted_send_inv_*", WINDOW, ""),
    ("crafted_req_*", RETRY, ""),
    ("crafted_uc_*", "UC", ""),
    ("crafted_*", ALL, ""),
    ("uc_*", "UC", "UC"),
    ("ud_*", "UD", "UD"),
)


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


@pytest.mark.parametrize("side", ["a", "b"])
def test_rtl(scenario: cap.Scenario, side: str) -> None:
    """Frames header for header, completions, memory and state as the peer's, but for `captures.EXCEPTIONS`."""
    scenario_part = cut(scenario, supported(scenario, side).stop)
    if not scenario_part.frames:
        pytest.skip("begins with a message the RTL does not do yet")
    with RtlEnd(scenario_part, side) as end:
        problems = Replay(scenario_part, side, end, progress).run()
    assert not problems, "\n".join(problems)
