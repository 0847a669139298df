"""Where memory is: page ends at every byte of a packet, page sizes, two-level tables, regions above 4 GiB.

`tiny` has a translation cache of two entries, so nearly every access walks the tables.
"""

import random

import pytest
from tests.rules import rule
from tests.system.test_alignment import OPERATIONS, Bench
from tests.system.test_reads import atomic_wr, read_wr
from tests.system.test_slice import write_wr

from rnic.config import named_config
from rnic_sim.enums import AccessFlags, SendFlags, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.qp import QPCap
from rnic_sim.verbs import MR, SGE, RecvWR, SendWR

ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
PAGE, MTU = 4096, 256


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
@pytest.mark.parametrize("config", ["tiny", "hundred"])
@rule("R-MR-5")
def test_page_end_at_every_byte_of_a_packet(config, operation):
    """A packet of 256 bytes whose byte k is the first of a page, at source and target, k from 0 to 256; 4 KiB pages in tables of
    two levels; each message has two pages for itself on both sides."""
    assert named_config("tiny").tlb_entries == 2
    bench = Bench(config, operation, MTU, seed=51, host_latency=8, write_latency=4)
    with bench.lab as lab:
        count = MTU + 1
        size = 2 * PAGE * count
        near, far = (MR(pd, size, ALL) for pd in bench.pds)
        reads = operation == WROpcode.RDMA_READ
        source, target = (far, near) if reads else (near, far)
        data = bench.rng.randbytes(size)
        source.write(data)
        image = bytearray(b"\xa5") * size
        target.write(bytes(image))
        qps = len(bench.pairs)
        for at in range(0, count, 60):
            expected = [0, 0]
            for k in range(at, min(at + 60, count)):
                sender, receiver = bench.pairs[k % qps]
                src, dst = PAGE * (2 * k + 1) - k * 7 % count, PAGE * (2 * k + 1) - k
                image[dst : dst + MTU] = data[src : src + MTU]
                local, remote = (target.buf + dst, source.buf + src) if reads else (source.buf + src, target.buf + dst)
                wr = SendWR(k, operation, [SGE(local, MTU, near.lkey)], SendFlags.SIGNALED)
                wr.set_wr_rdma(far.rkey, remote)
                if operation == WROpcode.SEND:
                    receiver.post_recv(RecvWR(k, [SGE(target.buf + dst, MTU, far.lkey)]))
                    expected[1] += 1
                sender.post_send(wr)
                expected[0] += 1
            for cq, n in ((bench.send_cqs[0], expected[0]), (bench.receive_cqs[1], expected[1])):
                assert all(wc.status == WCStatus.SUCCESS for wc in lab.wait_wc(cq, n, max_cycles=200_000))
        assert target.read(size) == image


@pytest.mark.parametrize("page_size, pages", [(1 << 12, 3), (1 << 16, 3), (1 << 21, 3), (1 << 30, 3), (1 << 12, 700),
                                              (1 << 21, 2100), (1 << 30, 9)])  # fmt: skip
@rule("R-MR-5", "R-MR-6", "R-MR-2")
def test_page_sizes_and_large_regions(page_size, pages):
    """One and two levels, pages up to 1 GiB, lengths up to 9 GiB: both ends of the region, page ends, the place where 32 bits
    wrap; one byte outside is refused."""
    rng = random.Random(pages)
    with Lab("tiny", seed=pages) as lab:
        a, b = lab.rc_pair(mtu=MTU, cap=QPCap(16, 16))
        length = page_size * pages - 300
        far, near = MR(b.pd, length, ALL, offset=100, page_size=page_size), MR(a.pd, 64 * 1024, ALL)
        places = {0, length - 600, page_size - 100 - 300, page_size * (pages - 1) - 100 - 1, length // 2}
        if page_size * pages > 1 << 32:
            assert length > 1 << 32
            places |= {(1 << 32) - 300, (1 << 32) - (far.buf & 0xFFFF_FFFF) % (1 << 32) - 1, (1 << 32) + 1234567}
        for n, at in enumerate(sorted(p for p in places if 0 <= p <= length - 600)):
            out, back = rng.randbytes(600), rng.randbytes(600)
            near.write(out, 1000)
            a.post_send(write_wr(1, [SGE(near.buf + 1000, 600, near.lkey)], far.rkey, far.buf + at))
            assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
            assert far.read(600, at) == out, at
            far.write(back, at)
            a.post_send(read_wr(2, [SGE(near.buf + 2000, 600, near.lkey)], far.rkey, far.buf + at))
            assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
            assert near.read(600, 2000) == back
            b.post_recv(RecvWR(3, [SGE(far.buf + at, 300, far.lkey), SGE(far.buf + at + 300, 300, far.lkey)][:1]))
            a.post_send(SendWR(3, WROpcode.SEND, [SGE(near.buf + 1000, 300, near.lkey)]))
            assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
            assert lab.wait_wc(b.rcq)[0].status == WCStatus.SUCCESS
            assert far.read(600, at) == out[:300] + back[300:]
            word = at + -(far.buf + at) % 8
            far.write((n << 40 | 5).to_bytes(8, "little"), word)
            a.post_send(atomic_wr(4, SGE(near.buf, 8, near.lkey), far.rkey, far.buf + word, add=1 << 36))
            assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
            assert int.from_bytes(far.read(8, word), "little") == (n << 40 | 5) + (1 << 36)
        local = rng.randbytes(700)
        far.write(local, length - 700)  # the far end as a source of its own
        b.post_send(write_wr(5, [SGE(far.buf + length - 700, 700, far.lkey)], near.rkey, near.buf + 3000))
        assert lab.wait_wc(b.scq)[0].status == WCStatus.SUCCESS
        assert near.read(700, 3000) == local
        a.post_send(write_wr(6, [SGE(near.buf, 2, near.lkey)], far.rkey, far.buf + length - 1))
        assert lab.wait_wc(a.scq)[0].status == WCStatus.REM_ACCESS_ERR
        assert far.read(1, length - 1) == local[-1:]
        assert all(m.host.bus_counters["unmapped"] == 0 for m in lab.machines)
