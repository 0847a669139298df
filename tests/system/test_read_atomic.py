"""READ and ATOMIC between two RNICs, judged by memory and completions."""

import pytest

from rnic_sim.enums import SendFlags, WCOpcode, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.verbs import SGE, SendWR

from .test_slice import Region

MASK = (1 << 64) - 1


def read_wr(wr_id, sg, rkey, addr):
    wr = SendWR(wr_id, WROpcode.RDMA_READ, sg, SendFlags.SIGNALED)
    wr.set_wr_rdma(rkey, addr)
    return wr


def atomic_wr(wr_id, opcode, sg, rkey, addr, compare_add, swap=0):
    wr = SendWR(wr_id, opcode, sg, SendFlags.SIGNALED)
    wr.set_wr_atomic(rkey, addr, compare_add, swap)
    return wr


@pytest.mark.parametrize("config", ["tiny"])
def test_read_lengths(config):
    """READs of every kind of length, three pages, odd offsets; guards untouched."""
    with Lab(config, seed=3) as lab:
        a, b = lab.rc_pair(mtu=256)
        target, source = Region(a.pd, 3000, offset=5), Region(b.pd, 3000, offset=4000)
        content = bytes(i * 7 & 255 for i in range(3000))
        source.put(content)
        for n, length in enumerate([1, 7, 255, 256, 257, 512, 1000, 3000]):
            target.clear()
            a.post_send(read_wr(n, [target.sge(length)], source.mr.rkey, source.addr))
            (wc,) = lab.wait_wc(a.scq, 1)
            assert (wc.status, wc.opcode, wc.byte_len, wc.wr_id) == (WCStatus.SUCCESS, WCOpcode.RDMA_READ, length, n)
            target.expect(content[:length])


def test_atomics_and_order():
    """FETCH_ADD and CMP_SWAP, and a READ behind a WRITE of the same QP, whose write responses come late."""
    with Lab("tiny", seed=4, host_latency=60) as lab:
        a, b = lab.rc_pair()
        result, source, target = Region(a.pd, 64), Region(a.pd, 64), Region(b.pd, 64)
        at = target.addr + -target.addr % 8
        value = 0x0102030405060708
        source.put(value.to_bytes(8, "little"))
        write = SendWR(1, WROpcode.RDMA_WRITE, [source.sge(8)], SendFlags.SIGNALED)
        write.set_wr_rdma(target.mr.rkey, at)

        def sge(offset):
            return [SGE(result.addr + offset, 8, result.mr.lkey)]

        for wr in (
            write,
            atomic_wr(2, WROpcode.ATOMIC_FETCH_AND_ADD, sge(0), target.mr.rkey, at, 0xFF),
            atomic_wr(3, WROpcode.ATOMIC_CMP_AND_SWP, sge(8), target.mr.rkey, at, value, 5),
            atomic_wr(4, WROpcode.ATOMIC_CMP_AND_SWP, sge(16), target.mr.rkey, at, value + 0xFF, MASK),
            read_wr(5, sge(24), target.mr.rkey, at),
        ):
            a.post_send(wr)
            if wr.wr_id % 2 == 0:
                lab.wait_wc(a.scq, 2 if wr.wr_id == 2 else 2 if wr.wr_id == 4 else 1)
        (wc,) = lab.wait_wc(a.scq, 1)
        assert (wc.status, wc.wr_id) == (WCStatus.SUCCESS, 5)
        words = [int.from_bytes(result.mr.read(8, result.addr - result.mr.buf + 8 * i), "little") for i in range(4)]
        assert words == [value, value + 0xFF, value + 0xFF, MASK]
