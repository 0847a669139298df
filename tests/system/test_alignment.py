"""Lengths and byte offsets of both ends, system level: thousands of messages side by side in one region, compared at once.

A message has a slot of its own in the source and in the target region, at an offset below 64 in each; everything else of the
target is guard. The region is compared as a whole when all completions are there.
"""

import random

import pytest
from tests.rules import rule

from rnic_sim.enums import AccessFlags, SendFlags, WCOpcode, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.qp import QP, QPCap, QPInitAttr
from rnic_sim.verbs import CQ, MR, PD, SGE, RecvWR, SendWR

ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
GUARD = 64  # bytes on both sides of a slot's offsets
OFFSETS = 64
RING = 64  # work requests posted between two waits, per QP
QPS = 6  # all that `tiny` has
CONFIGS = ["tiny", "hundred"]
OPERATIONS = [WROpcode.SEND, WROpcode.RDMA_WRITE, WROpcode.RDMA_READ]


class Bench:
    """Six connected QPs. `run` sends messages (length, source offset, target offset), half of them from each end, and compares
    all memory."""

    def __init__(self, config: str, operation: WROpcode, mtu: int, seed: int, **latency: int):
        self.lab, self.operation, self.rng = Lab(config, seed=seed, **latency), operation, random.Random(seed)
        print(f"seed {seed}")
        self.pds = [PD(context) for context in self.lab.contexts]
        self.send_cqs, self.receive_cqs = ([CQ(context, QPS * RING) for context in self.lab.contexts] for _ in range(2))
        cap = QPCap(max_send_wr=RING, max_recv_wr=RING)
        self.pairs = []
        depth = self.lab.config.max_rd_atomic
        for _ in range(QPS):
            pair = [QP(pd, QPInitAttr(*cqs, cap=cap)) for pd, *cqs in zip(self.pds, self.send_cqs, self.receive_cqs, strict=True)]
            self.lab.connect(*pair, mtu=mtu, max_rd_atomic=depth, max_dest_rd_atomic=depth)
            self.pairs.append(pair)

    def run(self, messages: list[tuple[int, int, int]]) -> None:
        ends = [_End(self, i, messages[i::2]) for i in range(2)]
        for at in range(0, -(-len(messages) // 2), QPS * RING):
            for end in ends:
                end.post(at)
            for end in ends:
                end.wait()
        for end in ends:
            end.compare()


class _End:
    """One end's messages and its regions."""

    def __init__(self, bench: Bench, index: int, messages: list[tuple[int, int, int]]):
        self.bench, self.index, self.messages = bench, index, messages
        self.slots, size = [], 0
        for length, _, _ in messages:
            self.slots.append(size + GUARD)
            size += GUARD + OFFSETS + length
        self.size = size + GUARD
        near, far = (MR(bench.pds[i], self.size, ALL, offset=bench.rng.randrange(4096)) for i in (index, 1 - index))
        self.read = bench.operation == WROpcode.RDMA_READ
        self.source, self.target = (far, near) if self.read else (near, far)
        data = bench.rng.randbytes(self.size)
        self.source.write(data)
        self.image = bytearray(b"\xa5") * self.size
        self.target.write(bytes(self.image))
        self.jobs = []
        for slot, (length, src, dst) in zip(self.slots, messages, strict=True):
            self.image[slot + dst : slot + dst + length] = data[slot + src : slot + src + length]
            self.jobs.append((length, slot + src, slot + dst))

    def post(self, at: int) -> None:
        """Work requests of one batch, the QPs in turn; only the last of a QP is signaled."""
        jobs = self.jobs[at : at + QPS * RING]
        source, target, self.sent, self.expected = self.source, self.target, 0, {}
        for k, pair in enumerate(self.bench.pairs):
            sender, receiver = pair[self.index], pair[1 - self.index]
            mine = jobs[k::QPS]
            wrs, rwrs = [], []
            for n, (length, src, dst) in enumerate(mine):
                local, remote = (target.buf + dst, source.buf + src) if self.read else (source.buf + src, target.buf + dst)
                key, rkey = (target.lkey, source.rkey) if self.read else (source.lkey, target.rkey)
                wr = SendWR(n, self.bench.operation, [SGE(local, length, key)],
                            SendFlags.SIGNALED if n == len(mine) - 1 else 0)  # fmt: skip
                wr.set_wr_rdma(rkey, remote)
                wrs.append(wr)
                rwrs.append(RecvWR(n, [SGE(target.buf + dst, length, target.lkey)]))
            self.sent += bool(mine)
            if self.bench.operation == WROpcode.SEND:
                receiver.post_recv(*rwrs)
                self.expected[receiver.qp_num] = [(n, length) for n, (length, _, _) in enumerate(mine)]
            sender.post_send(*wrs)

    def wait(self) -> None:
        """All completions of the batch."""
        lab = self.bench.lab
        for wc in lab.wait_wc(self.bench.send_cqs[self.index], self.sent, max_cycles=200_000):
            assert wc.status == WCStatus.SUCCESS, wc
        got: dict[int, list] = {qpn: [] for qpn in self.expected}
        for wc in lab.wait_wc(self.bench.receive_cqs[1 - self.index], sum(map(len, self.expected.values())), max_cycles=200_000):
            assert (wc.status, wc.opcode) == (WCStatus.SUCCESS, WCOpcode.RECV), wc
            got[wc.qp_num].append((wc.wr_id, wc.byte_len))
        assert got == self.expected

    def compare(self) -> None:
        """The whole target: exact bytes, guards untouched."""
        got = self.target.read(self.size)
        if got != self.image:
            bad = next(i for i in range(self.size) if got[i] != self.image[i])
            n = max(i for i, slot in enumerate(self.slots) if slot - GUARD <= bad)
            length, src, dst = self.messages[n]
            raise AssertionError(
                f"{self.bench.operation.name} of {length} bytes from end {self.index}, offsets {src} to {dst}: byte "
                f"{bad - self.slots[n] - dst} is {got[bad]:#x} for {self.image[bad]:#x}"
            )
        self.source.close()
        self.target.close()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
@pytest.mark.parametrize("config", CONFIGS)
@rule("R-LEN-1", "R-PAD-1", "R-PAD-3", "R-MR-5", "R-REQ-1", "R-RES-2", "R-CQ-3")
def test_every_length(config, operation):
    """Each length from 0 to 300 and those around the PMTU, each at eight drawn offset pairs."""
    bench = Bench(config, operation, 256, seed=21)
    with bench.lab:
        lengths = [*range(301), *(n for mtu in (256,) for n in (mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu + 7))]
        messages = [(length, bench.rng.randrange(OFFSETS), bench.rng.randrange(OFFSETS)) for length in lengths for _ in range(8)]
        bench.rng.shuffle(messages)
        bench.run(messages)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
@pytest.mark.parametrize("config", CONFIGS)
@rule("R-LEN-1", "R-PAD-3", "R-MR-5")
def test_larger_path_mtus(config, operation):
    for mtu in (512, 1024, 2048, 4096):
        bench = Bench(config, operation, mtu, seed=mtu)
        with bench.lab:
            bench.run([(length, bench.rng.randrange(OFFSETS), bench.rng.randrange(OFFSETS))
                       for length in (mtu - 1, mtu, mtu + 1, 2 * mtu, 3 * mtu + 7) for _ in range(8)])  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
@pytest.mark.parametrize("config", CONFIGS)
@rule("R-PAD-3", "R-MR-5")
def test_every_offset_pair(config, operation):
    """All 64 x 64 pairs of source and target offsets at one byte, around a bus word, and one byte more than a packet."""
    mtu = 256
    bench = Bench(config, operation, mtu, seed=22, host_latency=4, write_latency=2)
    lanes = bench.lab.config.data_width // 8
    with bench.lab:
        for length in (1, lanes - 1, lanes + 1, mtu + 1):
            bench.run([(length, src, dst) for src in range(OFFSETS) for dst in range(OFFSETS)])
