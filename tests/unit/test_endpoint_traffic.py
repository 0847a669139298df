"""Endpoint against endpoint: random messages of every kind over a good and a bad wire; nothing lost, nothing twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rnic_tb.endpoint import Faults, PeerPolicy, QpState, QpType, WcFlag, WcOp, WcStatus, WrOp
from rnic_tb.endpoint.pair import Pair
from tests.rules import rule

SLOT = 1024  # every request has its own bytes at both ends
SEND_AREA = 0x8000
KINDS = (WrOp.SEND, WrOp.SEND_IMM, WrOp.WRITE, WrOp.WRITE_IMM, WrOp.READ, WrOp.CMP_SWAP, WrOp.FETCH_ADD)
BAD_WIRE = Faults(loss=0.05, duplicate=0.05, reorder=0.05, corrupt=0.03)


@dataclass
class Expected:
    """What the messages of one run must leave behind, computed without the endpoint."""

    sends: list[tuple[int, WcStatus]] = field(default_factory=list)
    receives: list[tuple[WcOp, int, int]] = field(default_factory=list)
    remote: list[tuple[int, bytes]] = field(default_factory=list)
    local: list[tuple[int, bytes]] = field(default_factory=list)


def post_random(pair: Pair, rng: random.Random, count: int) -> Expected:
    """Post `count` random requests at a and the receives they need at b."""
    out = Expected()
    for wr_id in range(count):
        op = rng.choice(KINDS)
        length = rng.choice((0, 1, 3, 255, 256, 257, 512, 513, rng.randrange(SLOT)))
        here = there = wr_id * SLOT
        data = rng.randbytes(length)
        where = {"remote_addr": pair.b.base + there, "rkey": pair.b.key, "fence": rng.random() < 0.1}
        imm = rng.getrandbits(32)
        if op in (WrOp.READ, WrOp.CMP_SWAP, WrOp.FETCH_ADD):
            _post_fetching(pair, rng, op, wr_id, data, where, out)
        else:
            pair.a.write(here, data)
            pair.a.post(op, wr_id, here, length, imm=imm, **where)
            _expect_sending(pair, op, wr_id, there, data, imm, out)
        out.sends.append((wr_id, WcStatus.SUCCESS))
    return out


def _expect_sending(pair: Pair, op: WrOp, wr_id: int, there: int, data: bytes, imm: int, out: Expected) -> None:
    if op is not WrOp.WRITE:
        pair.b.recv(wr_id, there, SLOT if op is not WrOp.WRITE_IMM else 0)
        receive = WcOp.RECV_RDMA_WITH_IMM if op is WrOp.WRITE_IMM else WcOp.RECV
        out.receives.append((receive, len(data), imm if op is not WrOp.SEND else 0))
    out.remote.append((there, data))


def _post_fetching(pair: Pair, rng, op: WrOp, wr_id: int, data: bytes, where: dict, out: Expected) -> None:
    here = there = wr_id * SLOT
    if op is WrOp.READ:
        pair.b.write(there, data)
        pair.a.post(op, wr_id, here, len(data), **where)
        out.local.append((here, data))
        return
    old, operand = rng.getrandbits(64), rng.getrandbits(64)
    hit = rng.random() < 0.5
    pair.b.write(there, old.to_bytes(8, "little"))
    pair.a.post(op, wr_id, here, 8, add=operand, compare=old if hit else old ^ 1, swap=operand, **where)
    new = (old + operand) % (1 << 64) if op is WrOp.FETCH_ADD else operand if hit else old
    out.local.append((here, old.to_bytes(8, "little")))
    out.remote.append((there, new.to_bytes(8, "little")))


def check(pair: Pair, out: Expected) -> None:
    assert pair.a.qp.state is QpState.RTS and pair.b.qp.state is QpState.RTS
    assert pair.a.completions() == out.sends
    receives = pair.b.wcs()
    assert all(wc.status is WcStatus.SUCCESS for wc in receives)
    assert [(wc.opcode, wc.byte_len, wc.imm) for wc in receives] == out.receives
    assert all(bool(wc.flags & WcFlag.WITH_IMM) == bool(wc.opcode is WcOp.RECV_RDMA_WITH_IMM) or wc.imm for wc in receives)
    for offset, data in out.remote:
        assert pair.b.read(offset, len(data)) == data
    for offset, data in out.local:
        assert pair.a.read(offset, len(data)) == data


def run(seed: int, faults: Faults, policy_a: PeerPolicy, policy_b: PeerPolicy, psn: int = 0x111000) -> Pair:
    rng = random.Random(seed)
    depth = rng.choice((1, 2, 4))
    pair = Pair(
        psn_a=psn, policy_a=policy_a, policy_b=policy_b, retry_cnt=7, timeout=2, min_rnr_timer=1,
        max_rd_atomic=depth, max_dest_rd_atomic=depth,
    )  # fmt: skip
    out = post_random(pair, rng, 40)
    pair.link(faults, seed).run()
    check(pair, out)
    return pair


policies = st.builds(
    PeerPolicy,
    coalesce_acks=st.booleans(),
    migreq=st.booleans(),
    ack_interval=st.sampled_from((1, 2, 64)),
    window=st.sampled_from((1, 3, 128)),
    read_gap_retry=st.booleans(),
    read_restart_with_first=st.booleans(),
    reack_names_atomics=st.booleans(),
)


@settings(max_examples=25, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(seed=st.integers(0, 2**32), a=policies, b=policies, psn=st.sampled_from((0, 0xFFFFF0, 0x7FFFF8)))
def test_random_messages_without_loss(seed: int, a: PeerPolicy, b: PeerPolicy, psn: int) -> None:
    pair = run(seed, Faults(), a, b, psn)
    counters = pair.a.qp.requester.counters
    assert counters["resent"] == counters["ghosts"] == 0
    assert pair.b.qp.responder.counters["duplicates"] == 0


@settings(max_examples=25, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(seed=st.integers(0, 2**32), a=policies, b=policies, psn=st.sampled_from((0, 0xFFFFF0, 0x7FFFF8)))
def test_random_messages_over_a_bad_wire(seed: int, a: PeerPolicy, b: PeerPolicy, psn: int) -> None:
    run(seed, BAD_WIRE, a, b, psn)


@rule("R-ICRC-7")
def test_the_bad_wire_is_bad() -> None:
    """The faults above do happen: frames are lost, repeated and refused, and everything still arrives."""
    pair = run(11, BAD_WIRE, PeerPolicy(), PeerPolicy())
    assert pair.a.qp.requester.counters["resent"] > 0
    assert pair.b.qp.responder.counters["duplicates"] > 0
    assert sum((pair.a.device.drops + pair.b.device.drops).values()) > 0


@rule("R-RNR-1", "R-SEQ-2")
@pytest.mark.parametrize("seed", range(4))
def test_late_receives(seed: int) -> None:
    """b posts its receives one by one, long after the SENDs: all arrive in order, over RNR waits."""
    pair = Pair(retry_cnt=7, rnr_retry=7, timeout=8, min_rnr_timer=2)
    link = pair.link(Faults(loss=0.02 * seed), seed)
    for wr_id in range(6):
        pair.a.write(wr_id * SLOT, bytes([wr_id]) * 600)
        pair.a.post(WrOp.SEND, wr_id, wr_id * SLOT, 600)
    for wr_id in range(6):
        link.run(lambda naks=wr_id: pair.a.qp.requester.counters["rnr_naks"] > naks)
        pair.b.recv(wr_id, wr_id * SLOT, SLOT)
    link.run()
    assert pair.a.completions() == [(i, WcStatus.SUCCESS) for i in range(6)]
    assert pair.b.completions() == [(i, WcStatus.SUCCESS) for i in range(6)]
    assert all(pair.b.read(i * SLOT, 600) == bytes([i]) * 600 for i in range(6))
    assert pair.a.qp.requester.counters["rnr_naks"] >= 6


@rule("R-TMO-3", "R-DUP-1")
def test_lost_ack_of_the_last_message() -> None:
    pair = Pair()
    pair.b.recv(5)
    pair.a.post(WrOp.SEND, 1, 0, 600)
    pair.link(drop=lambda sender, number: sender == "b" and number == 1).run()
    assert pair.a.completions() == [(1, WcStatus.SUCCESS)] and pair.b.completions() == [(5, WcStatus.SUCCESS)]
    assert pair.a.qp.requester.counters["timeouts"] == 1


@rule("R-ERR-8", "R-QP-7")
def test_peer_gone() -> None:
    pair = Pair(retry_cnt=2)
    pair.b.device.destroy_qp(pair.b.qp.qpn)
    pair.a.post(WrOp.SEND, 1, 0, 4)
    pair.link().run()
    assert pair.a.completions() == [(1, WcStatus.RETRY_EXC_ERR)]
    assert pair.b.device.drops["no_qp"] == 3


@rule("R-UC-1", "R-UC-2")
@pytest.mark.parametrize("seed", range(3))
def test_uc_over_a_bad_wire_delivers_whole_messages_only(seed: int) -> None:
    """Whatever arrives is complete, in order and in its own receive; the sender never waits."""
    pair = Pair(QpType.UC)
    for wr_id in range(40):
        pair.b.recv(wr_id, wr_id * SLOT, SLOT)
    for wr_id in range(40):
        pair.a.write(wr_id * SLOT, bytes([wr_id + 1]) * 700)
        pair.a.post(WrOp.SEND_IMM, wr_id, wr_id * SLOT, 700, imm=wr_id)
    pair.link(Faults(loss=0.1, duplicate=0.05), seed).run()
    assert pair.a.completions() == [(i, WcStatus.SUCCESS) for i in range(40)]
    received = pair.b.wcs()
    assert 0 < len(received) < 40
    assert [wc.wr_id for wc in received] == list(range(len(received)))
    imms = [wc.imm for wc in received]
    assert imms == sorted(set(imms))
    for wc in received:
        assert wc.byte_len == 700 and pair.b.read(wc.wr_id * SLOT, 700) == bytes([wc.imm + 1]) * 700
