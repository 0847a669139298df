"""Two QPs of one host: frames to the own address never see the wire, and all else is as with two hosts."""

import random

import pytest
from tests.system.test_slice import Region, frames_of, write_wr

from rnic_sim.enums import SendFlags, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.qp import QPCap
from rnic_sim.verbs import RecvWR, SendWR


def read_wr(wr_id, sg, rkey, addr):
    wr = SendWR(wr_id, WROpcode.RDMA_READ, sg, SendFlags.SIGNALED)
    wr.set_wr_rdma(rkey, addr)
    return wr


@pytest.mark.parametrize("seed", range(2))
def test_write_read_send_to_the_own_host(seed):
    print("seed", seed)
    rng = random.Random(seed)
    with Lab("tiny", seed=seed) as lab:
        a, b = lab.rc_pair(hosts=(0, 0), cap=QPCap(max_send_wr=4, max_recv_wr=4))
        source, target, back = (Region(qp.pd, 9000, offset=rng.randrange(64)) for qp in (a, b, a))
        data = rng.randbytes(9000)
        source.put(data)
        a.post_send(write_wr(1, [source.sge()], target.mr.rkey, target.addr))
        (wc,) = lab.wait_wc(a.scq, 1, 60_000)
        assert (wc.wr_id, wc.status) == (1, WCStatus.SUCCESS)
        target.expect(data)

        a.post_send(read_wr(2, [back.sge()], target.mr.rkey, target.addr))
        (wc,) = lab.wait_wc(a.scq, 1, 60_000)
        assert (wc.wr_id, wc.status) == (2, WCStatus.SUCCESS)
        back.expect(data)

        target.clear()
        b.post_recv(RecvWR(3, [target.sge()]))
        a.post_send(SendWR(4, WROpcode.SEND, [source.sge(5000)], SendFlags.SIGNALED))
        (received,) = lab.wait_wc(b.rcq, 1, 60_000)
        (sent,) = lab.wait_wc(a.scq, 1, 60_000)
        assert (received.wr_id, received.byte_len, sent.wr_id) == (3, 5000, 4)
        assert received.status == sent.status == WCStatus.SUCCESS
        target.expect(data[:5000])
        assert frames_of(lab, 0) == [] and frames_of(lab, 1) == []


def test_both_at_once():
    """Traffic over the wire and round the corner, both ways, with a small packet store: all of it arrives."""
    rng = random.Random(5)
    print("seed 5")
    with Lab("tiny", seed=5) as lab:
        pairs = [lab.rc_pair(hosts=hosts, cap=QPCap(max_send_wr=8)) for hosts in ((0, 0), (0, 1), (1, 0))]
        jobs = []
        for qp, peer in pairs:
            source, target = Region(qp.pd, 6000, offset=rng.randrange(64)), Region(peer.pd, 6000, offset=rng.randrange(64))
            data = rng.randbytes(6000)
            source.put(data)
            jobs.append((qp, target, data))
            for part in range(6):
                qp.post_send(write_wr(part, [source.sge(1000, 1000 * part)], target.mr.rkey, target.addr + 1000 * part))
        for qp, target, data in jobs:
            assert [wc.status for wc in lab.wait_wc(qp.scq, 6, 100_000)] == [WCStatus.SUCCESS] * 6
            target.expect(data)
        assert frames_of(lab, 0) and frames_of(lab, 1)
