"""Everything at once, from both ends, on hosts and wires that stall: exact bytes, every completion, nothing stops.

Each work request has a slot of its own in source and target; all memory is compared at the end.
"""

import random

import pytest
from tests.rules import rule

from rnic_sim.enums import AccessFlags, SendFlags, WCOpcode, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.qp import QP, QPCap, QPInitAttr
from rnic_sim.verbs import CQ, MR, PD, SGE, RecvWR, SendWR

ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
Op = WROpcode
OPERATIONS = [Op.SEND, Op.SEND_WITH_IMM, Op.RDMA_WRITE, Op.RDMA_WRITE_WITH_IMM, Op.RDMA_READ, Op.ATOMIC_FETCH_AND_ADD]
TAKES_RECEIVE = (Op.SEND, Op.SEND_WITH_IMM, Op.RDMA_WRITE_WITH_IMM)
GUARD, RING = 40, 8


def cut(rng: random.Random, at: int, length: int, key: int, pieces: int) -> list[SGE]:
    """A list of up to ``pieces`` elements, empty ones among them (R-WQ-4)."""
    ends = sorted(rng.choice((0, length, rng.randint(0, length))) for _ in range(rng.randrange(pieces)))
    return [SGE(at + a, b - a, key if b > a else 0xBAD) for a, b in zip([0, *ends], [*ends, length], strict=True)]


class End:
    """One end: its share of the work requests on all QPs, and what they must leave behind."""

    def __init__(self, index: int, pds: list[PD], rng: random.Random, count: int, lengths, operations):
        self.index, self.rng = index, rng
        self.jobs = [(rng.choice(operations), rng.choice(lengths)(rng)) for _ in range(count)]
        self.slots, size = [], GUARD
        for _, length in self.jobs:
            self.slots.append(size + rng.randrange(64))
            size += 64 + max(length, 8) + GUARD
        near, far = (lambda: MR(pds[index], size, ALL, offset=rng.randrange(4096))), (
            lambda: MR(pds[1 - index], size, ALL, offset=rng.randrange(4096)))  # fmt: skip
        self.near, self.inbox, self.far, self.outbox = near(), near(), far(), far()
        self.data = [rng.randbytes(size), rng.randbytes(size)]  # of near and far: sources
        self.near.write(self.data[0])
        self.far.write(self.data[1])
        self.images = [bytearray(b"\xa5") * size, bytearray(b"\x5a") * size]  # of inbox (READs) and outbox
        self.inbox.write(bytes(self.images[0]))
        self.outbox.write(bytes(self.images[1]))
        self.words = MR(pds[1 - index], 64, ALL)
        self.words.write(bytes(64))
        self.olds: list[int] = []  # where the old values of the atomics are

    def requests(self, n: int) -> tuple[SendWR, RecvWR | None]:
        """Work request ``n`` and the receive it needs."""
        (op, length), slot, rng = self.jobs[n], self.slots[n], self.rng
        if op == Op.ATOMIC_FETCH_AND_ADD:
            wr = SendWR(n, op, [SGE(self.inbox.buf + slot, 8, self.inbox.lkey)])
            wr.set_wr_atomic(self.words.rkey, self.words.buf + 8 * (-self.words.buf % 8 != 0), 1, 0)
            self.olds.append(slot)
            return wr, None
        if op == Op.RDMA_READ:
            wr = SendWR(n, op, cut(rng, self.inbox.buf + slot, length, self.inbox.lkey, 2))
            wr.set_wr_rdma(self.far.rkey, self.far.buf + slot)
            self.images[0][slot : slot + length] = self.data[1][slot : slot + length]
            return wr, None
        self.images[1][slot : slot + length] = self.data[0][slot : slot + length]
        wr = SendWR(n, op, cut(rng, self.near.buf + slot, length, self.near.lkey, 2), SendFlags.SIGNALED, n)
        wr.set_wr_rdma(self.outbox.rkey, self.outbox.buf + slot)
        if op not in TAKES_RECEIVE:
            return wr, None
        if op == Op.RDMA_WRITE_WITH_IMM:
            return wr, RecvWR(n, [])
        return wr, RecvWR(n, cut(rng, self.outbox.buf + slot, length + rng.randrange(3), self.outbox.lkey, 4))

    def compare(self) -> None:
        """All memory of this end's work requests."""
        olds = []
        for slot in self.olds:
            old = self.inbox.read(8, slot)
            olds.append(int.from_bytes(old, "little"))
            self.images[0][slot : slot + 8] = old
        assert sorted(olds) == list(range(len(olds)))  # R-AT-4: each once
        assert self.inbox.read(len(self.images[0])) == self.images[0]
        assert self.outbox.read(len(self.images[1])) == self.images[1]
        assert self.near.read(len(self.data[0])) == self.data[0] and self.far.read(len(self.data[1])) == self.data[1]


def run(lab: Lab, *, seed: int, count: int, lengths, qps: int, mtu: int, operations=OPERATIONS, patience: int = 400_000) -> None:
    """``count`` work requests from each end over ``qps`` QPs."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    pds = [PD(context) for context in lab.contexts]
    scqs, rcqs = ([CQ(context, 2 * RING * qps) for context in lab.contexts] for _ in range(2))
    depth = lab.config.max_rd_atomic
    pairs = []
    for _ in range(qps):
        cap = QPCap(RING, 2 * RING, 2, 4)
        pair = [QP(pd, QPInitAttr(s, r, cap=cap)) for pd, s, r in zip(pds, scqs, rcqs, strict=True)]
        psns = rng.getrandbits(24), rng.getrandbits(24)
        lab.connect(*pair, mtu=mtu, psns=psns, max_rd_atomic=depth, max_dest_rd_atomic=depth)
        pairs.append(pair)
    ends = [End(i, pds, rng, count, lengths, operations) for i in range(2)]
    sent: list[dict[int, list[int]]] = [{}, {}]
    got: list[dict[int, list[int]]] = [{}, {}]
    free = [{pair[i].qp_num: RING for pair in pairs} for i in range(2)]
    posted, done, receives, received = [0, 0], [0, 0], [0, 0], [0, 0]
    wanted: list[dict[int, list[int]]] = [{}, {}]
    end_cycle = lab.world.cycle + patience
    while min(done) < count or received != receives:
        for i, end in enumerate(ends):
            for pair in pairs:
                qp, peer = pair[i], pair[1 - i]
                batch = []
                while posted[i] < count and free[i][qp.qp_num] and rng.random() < 0.7:
                    wr, rwr = end.requests(posted[i])
                    if rwr is not None:
                        peer.post_recv(rwr)
                        receives[1 - i] += 1
                        wanted[1 - i].setdefault(peer.qp_num, []).append(rwr.wr_id)
                    batch.append(wr)
                    sent[i].setdefault(qp.qp_num, []).append(wr.wr_id)
                    free[i][qp.qp_num] -= 1
                    posted[i] += 1
                if batch:
                    qp.post_send(*batch)
            for wc in scqs[i].poll(scqs[i].cqe)[1]:
                assert wc.status == WCStatus.SUCCESS, wc
                got[i].setdefault(wc.qp_num, []).append(wc.wr_id)
                free[i][wc.qp_num] += 1
                done[i] += 1
            for wc in rcqs[i].poll(rcqs[i].cqe)[1]:
                assert wc.status == WCStatus.SUCCESS, wc
                op, length = ends[1 - i].jobs[wc.wr_id]
                opcode = WCOpcode.RECV_RDMA_WITH_IMM if op == Op.RDMA_WRITE_WITH_IMM else WCOpcode.RECV
                assert (wc.opcode, wc.byte_len) == (opcode, length)
                assert op == Op.SEND or wc.imm_data == wc.wr_id
                assert wc.wr_id == wanted[i][wc.qp_num].pop(0)
                received[i] += 1
        lab.relax(32)
        assert lab.world.cycle < end_cycle, f"stopped: {done} of {count}, {received} of {receives} receives"
    assert got == sent
    for end in ends:
        end.compare()
    for context in lab.contexts:
        lost = {name: n for name, n in context.driver.counters().items() if n and name.startswith(("rx_bad", "rx_no", "rx_out"))}
        assert not lost and context.driver.counters()["tx_naks"] == 0


SHORT = [lambda r: r.randrange(70), lambda r: r.choice((0, 1, 63, 64, 65, 255, 256, 257))]
LONG = [*SHORT, lambda r: r.randrange(9000), lambda r: r.choice((4095, 4096, 4097, 8192, 8193))]


@pytest.mark.parametrize("latency", [1, 64, 700])
@pytest.mark.parametrize("mtu", [256, 4096])
@pytest.mark.parametrize("config", ["tiny", "hundred"])
@rule("R-ORD-1", "R-CQ-1", "R-CQ-3", "R-AT-4", "R-WQ-4", "R-WQ-8", "R-OPC-2")
def test_host_latency(config, mtu, latency):
    """All operations from both ends; both stores are full again and again, and nobody waits for the other for ever."""
    with Lab(config, seed=latency + mtu, host_latency=latency, write_latency=max(1, latency // 4)) as lab:
        run(lab, seed=41 + latency, count=60 if config == "tiny" else 160, lengths=LONG, qps=6, mtu=mtu)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("config", ["tiny", "hundred"])
@rule("R-ORD-1", "R-ACK-2", "R-ACK-3", "R-AT-4")
def test_stalls_everywhere(config, seed):
    """Every stream of the host and of the wire stalls at random, responses are reordered and interleaved."""
    rng = random.Random(seed)
    with Lab(config, seed=seed, host_latency=rng.choice((1, 20, 200)), link_latency=rng.choice((1, 50, 400))) as lab:
        for host in lab.world.nic:
            host.bus(read_jitter=rng.randrange(100), write_jitter=rng.randrange(100), reorder=True, interleave=True,
                     **{f"{name}_stall": rng.choice((0, 0.3, 0.7)) for name in ("ar", "r", "aw", "w", "b")})  # fmt: skip
            host.wire.configure(tx_stall=rng.choice((0, 0.4)), rx_stall=rng.choice((0, 0.4)), rate=rng.choice((1, 0.3)))
        run(lab, seed=seed, count=50 if config == "tiny" else 120, lengths=LONG, qps=6, mtu=rng.choice((256, 1024, 4096)))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_slow_wire(operation):
    """One operation from both ends over a wire of a twentieth of the bus: all queues fill up against the flow."""
    with Lab("tiny", seed=5) as lab:
        for host in lab.world.nic:
            host.wire.configure(rate=0.05)
        run(lab, seed=43, count=24, lengths=[lambda r: r.randrange(3000)], qps=6, mtu=1024, operations=[operation])
