"""The software endpoint against a Linux peer's captures: each end is replaced by the endpoint in turn.

The recorded frames of the other end are fed to it in recorded order, its own frames are compared header for header.
Where an implementation is free or the peer deviates (rules.md section 21), `EXCEPTIONS` and `LEFT_OUT` of
`rnic_tb.captures` say so.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rnic.wire.frame import Frame
from rnic.wire.opcode import Opcode
from rnic_tb import captures as cap
from rnic_tb import endpoint as ep
from rnic_tb.endpoint_end import replay_endpoint

TRANSPORTS = ("rc_", "uc_", "ud_", "crafted_")
#: Test -> which captures it takes.
REPLAYED = {
    "test_requester": lambda name: name.startswith(TRANSPORTS) and (name, "a") not in cap.LEFT_OUT,
    "test_repeated_read_starts_again": lambda name: name in ("rc_loss_read_resp_middle", "rc_loss_read_resp_last"),
    "test_responder": lambda name: name.startswith(TRANSPORTS[:3]) and (name, "b") not in cap.LEFT_OUT,
}


def test_every_capture_loads(scenario: cap.Scenario) -> None:
    assert scenario.frames and scenario.steps
    assert all(frame.data for frame in scenario.frames)


def test_requester(scenario: cap.Scenario) -> None:
    """The endpoint as a (the end that posts, and the real end of hand-made exchanges)."""
    problems = replay_endpoint(scenario, "a")
    assert not problems, "\n".join(problems)


def test_responder(scenario: cap.Scenario) -> None:
    """The endpoint as b (the end that answers)."""
    problems = replay_endpoint(scenario, "b")
    assert not problems, "\n".join(problems)


def test_repeated_read_starts_again(scenario: cap.Scenario) -> None:
    """A responder that starts a repeated READ with FIRST passes by the exceptions for it (R-RSP-6)."""
    problems = replay_endpoint(scenario, "b", ep.PeerPolicy())
    assert not problems, "\n".join(problems)


def test_comparison_sees_every_field() -> None:
    """Each header field of a WRITE that differs is reported."""
    base = Frame(Opcode.RC_WRITE_ONLY, 0x11, psn=5, payload=b"abcde", va=0x1000, rkey=7, dma_length=5)
    changes = {
        "opcode": Opcode.RC_WRITE_FIRST, "dest_qpn": 0x12, "psn": 6, "payload": b"abcdf", "va": 0x1001, "rkey": 8,
        "dma_length": 6, "sport": 0xC001, "traffic_class": 4, "hop_limit": 63, "dont_fragment": False, "se": True,
        "migreq": True, "pkey": 0x7FFF, "fecn": True, "becn": True, "ackreq": True, "resv7": 1, "udp_checksum": 9,
        "src_ip": bytes(4), "dst_ip": bytes(4), "src_mac": bytes(6), "dst_mac": bytes(6), "vlan": (0, 5),
        "raw_pad_bytes": b"\1\0\0",
    }  # fmt: skip
    for field, value in changes.items():
        changed = replace(base, **{field: value}).pack()
        seen = {difference.field for difference in cap.compare_frame(base.pack(), changed, "any")}
        assert field in seen, field
    assert not cap.compare_frame(base.pack(), replace(base, ident=9).pack(), "any")
    broken = base.pack()[:-1] + bytes([base.pack()[-1] ^ 1])
    assert [d.field for d in cap.compare_frame(base.pack(), broken, "any")] == ["frame"]


def test_unknown_step_is_an_error() -> None:
    for text in ("a: dances", "a: post id=0 op=write colour=3", "a: completions wr=1 status=0"):
        with pytest.raises(cap.CaptureError):
            cap.parse_step(text)


def test_compare_frames_covers_coalesced_acks() -> None:
    acks = [Frame(Opcode.RC_ACK, 0x11, psn=psn, syndrome=0x1F, msn=psn).pack() for psn in (0xFFFFFF, 0, 1)]
    assert not cap.compare_frames(acks, acks, "any")
    assert not cap.compare_frames(acks, [acks[2]], "any", coalesced_acks=True)
    assert cap.compare_frames(acks, [acks[2]], "any")
    assert cap.compare_frames(acks, acks[:2], "any", coalesced_acks=True)
    assert cap.compare_frames(acks[:2], acks, "any")
