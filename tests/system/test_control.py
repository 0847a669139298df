"""Control plane under traffic: events and their races, CQ errors, ends of objects, device reset."""

import random

import pytest
from tests.rules import rule

from rnic import abi
from rnic_sim.enums import AccessFlags, EventType, QPAttrMask, QPState, SendFlags, WCOpcode, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.qp import QP, QPAttr, QPCap, QPInitAttr
from rnic_sim.verbs import CQ, MR, PD, SGE, CompChannel, RDMAError, RecvWR, SendWR

ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
CONFIG = "tiny"


def write(wr_id, source, target, length, *, flags=SendFlags.SIGNALED, rkey=None, at=0):
    wr = SendWR(wr_id, WROpcode.RDMA_WRITE, [SGE(source.buf + at, length, source.lkey)], flags)
    wr.set_wr_rdma(target.rkey if rkey is None else rkey, target.buf + at)
    return wr


def read(wr_id, local, remote, length):
    wr = SendWR(wr_id, WROpcode.RDMA_READ, [SGE(local.buf, length, local.lkey)], SendFlags.SIGNALED)
    wr.set_wr_rdma(remote.rkey, remote.buf)
    return wr


def send(wr_id, source, length, flags=SendFlags.SIGNALED):
    return SendWR(wr_id, WROpcode.SEND, [SGE(source.buf, length, source.lkey)], flags)


def state(qp):
    qp.query()
    return qp.qp_state


def to_reset(qp):
    qp.modify(QPAttr(qp_state=QPState.RESET), QPAttrMask.STATE)


def no_event(context):
    with pytest.raises(TimeoutError):
        context.get_async_event(max_cycles=500)


# ---------------------------------------------------------------------------------------------- completion events
@rule("R-CQ-5")
def test_arm_race():
    """C95: the CQ armed around the cycle in which the CQE is written. Either the event fires, or a poll after the arming finds
    the CQE; never neither. Both ways occur."""
    with Lab(CONFIG, seed=3) as lab:
        ca, cb = lab.contexts
        channel = CompChannel(ca)
        cq, other = CQ(ca, 16, channel=channel), CQ(cb, 16)
        a = QP(PD(ca), QPInitAttr(cq, cq, cap=QPCap(8, 8)))
        b = QP(PD(cb), QPInitAttr(other, other, cap=QPCap(8, 8)))
        lab.connect(a, b)
        source, target = MR(a.pd, 64, ALL), MR(b.pd, 64, ALL)

        def post(n):
            a.post_send(write(n, source, target, 16))
            return lab.world.cycle

        start = post(0)
        while not cq.poll()[0]:
            lab.relax(1)
        usual = lab.world.cycle - start  # cycles to the CQE
        by_event = by_poll = 0
        for n in range(1, 161):
            start = post(n)
            lab.relax(max(1, usual - 100 + n))
            cq.req_notify()
            _, found = cq.poll()
            if found:
                by_poll += 1
                # The CQE may have been visible before the arming, or have used it up.
                lab.relax(300)
                channel.pending.clear()
            else:
                assert channel.get_cq_event(max_cycles=2000) is cq
                by_event += 1
                _, found = cq.poll()
            assert [wc.wr_id for wc in found] == [n]
            lab.relax(200)
            ca.events.service()
            channel.pending.clear()
        assert by_event > 20 and by_poll > 20


@rule("R-CQ-5")
def test_solicited_events():
    """One event per arming; solicited-only ignores other receives and fires for SE and for errors; disarmed: none."""
    with Lab(CONFIG, seed=4) as lab:
        ca, cb = lab.contexts
        channel = CompChannel(cb)
        sends, cq = CQ(ca, 32), CQ(cb, 32, channel=channel)
        a = QP(PD(ca), QPInitAttr(sends, sends, cap=QPCap(8, 8)))
        b = QP(PD(cb), QPInitAttr(cq, cq, cap=QPCap(8, 8)))
        lab.connect(a, b)
        source, target = MR(a.pd, 64, ALL), MR(b.pd, 64, ALL)

        def deliver(solicited):
            b.post_recv(RecvWR(1, [SGE(target.buf, 64, target.lkey)]))
            a.post_send(send(1, source, 8, SendFlags.SIGNALED | (SendFlags.SOLICITED if solicited else 0)))
            lab.wait_wc(sends)
            lab.wait_wc(cq)

        def events():
            lab.relax(300)
            cb.events.service()
            count = len(channel.pending)
            channel.pending.clear()
            return count

        deliver(True)
        assert events() == 0
        cq.req_notify(solicited_only=True)
        deliver(False)
        assert events() == 0
        deliver(True)
        assert events() == 1
        deliver(True)
        assert events() == 0, "one shot"
        cq.req_notify()
        deliver(False)
        deliver(False)
        assert events() == 1
        cq.req_notify(solicited_only=True)
        b.post_recv(RecvWR(9, []))
        b.modify(QPAttr(qp_state=QPState.ERR), QPAttrMask.STATE)
        (wc,) = lab.wait_wc(cq)
        assert (wc.wr_id, wc.status) == (9, WCStatus.WR_FLUSH_ERR)
        assert events() == 1, "an error counts as solicited"
        with pytest.raises(RDMAError):
            CQ(cb, 4).req_notify()


# ----------------------------------------------------------------------------------------------------- CQ errors
@rule("R-CQ-6", "R-EVT-1")
@pytest.mark.parametrize("how", ["overflow", "bus"])
def test_cq_error_takes_its_qps_along(how):
    """A full CQ, or one that cannot be written: CQ_ERR, its QPs in ERR, nothing overwritten, others go on."""
    with Lab(CONFIG, seed=5) as lab:
        ca, cb = lab.contexts
        small, large, far = CQ(ca, 4), CQ(ca, 32), CQ(cb, 32)
        pd, pdb = PD(ca), PD(cb)
        pairs = []
        for cqs in ((small, large), (large, small), (large, large)):
            cap = QPCap(16, 4)
            qa, qb = QP(pd, QPInitAttr(*cqs, cap=cap)), QP(pdb, QPInitAttr(far, far, cap=cap))
            lab.connect(qa, qb)
            pairs.append((qa, qb))
        source, target = MR(pd, 64, ALL), MR(pdb, 64, ALL)
        first = pairs[0][0]
        if how == "bus":
            page = ca.memory.find(small._mapping.va, 1).pages[0]
            lab.world.nic[0].bus_error(page, 4096, writes=2)
        first.post_send(*(write(n, source, target, 8) for n in range(6)))
        event = ca.get_async_event(max_cycles=20_000)
        assert (event.event_type, event.number) == (EventType.CQ_ERR, small.cqn)
        lab.relax(3000)
        assert [state(qa) for qa, _ in pairs] == [QPState.ERR, QPState.ERR, QPState.RTS]
        if how == "overflow":
            assert [wc.wr_id for wc in small.poll(10)[1]] == [0, 1, 2, 3]
            assert ca.driver.counters()["cq_overflows"] == 1
        else:
            assert small.poll(10)[0] == 0
        good = pairs[2][0]
        good.post_send(write(77, source, target, 8))
        assert [wc.wr_id for wc in lab.wait_wc(large)] == [77]
        no_event(ca)
        with pytest.raises(RDMAError):
            QP(pd, QPInitAttr(small, large))
        for qa, _ in pairs[:2]:
            qa.close()
        small.close()
        lab.world.nic[0].clear_bus_errors()
        again = CQ(ca, 4)  # a CQ that is new works
        qa = QP(pd, QPInitAttr(again, again, cap=QPCap(4, 4)))
        to_reset(pairs[0][1])
        lab.connect(qa, pairs[0][1])
        qa.post_send(write(5, source, target, 8))
        assert lab.wait_wc(again)[0].status == WCStatus.SUCCESS


@rule("R-EVT-1")
@pytest.mark.parametrize("how", ["access", "request", "bus"])
def test_async_events_of_qps(how):
    """Rules 8.2: a fatal NAK with no receive WQE to blame is an async event; a SEND in error has its CQE instead."""
    wanted = {"access": EventType.QP_ACCESS_ERR, "request": EventType.QP_REQ_ERR, "bus": EventType.QP_FATAL}[how]
    with Lab(CONFIG, seed=6) as lab:
        a, b = lab.rc_pair(access=AccessFlags.REMOTE_READ if how == "request" else 15)
        source, target = MR(a.pd, 64, ALL), MR(b.pd, 64, ALL)
        if how == "bus":
            page = b.context.memory.find(target.buf, 1).pages[0]
            lab.world.nic[1].bus_error(page, 4096, writes=2)
        a.post_send(write(1, source, target, 64, rkey=target.rkey ^ 1 if how == "access" else None))
        event = b.context.get_async_event(max_cycles=20_000)
        assert (event.event_type, event.number) == (wanted, b.qp_num)
        assert state(b) == QPState.ERR
        no_event(b.context)
        no_event(a.context)


@rule("R-EVT-1", "8.2")
def test_an_error_with_a_receive_wqe_makes_no_event():
    with Lab(CONFIG) as lab:
        a, b = lab.rc_pair()
        source, target = MR(a.pd, 64, ALL), MR(b.pd, 64, ALL)
        b.post_recv(RecvWR(9, [SGE(target.buf, 31, target.lkey)]))
        a.post_send(send(1, source, 32))
        assert lab.wait_wc(b.rcq)[0].status == WCStatus.LOC_LEN_ERR
        no_event(b.context)


# --------------------------------------------------------------------------------------------------- ends of objects
@rule("R-QP-4", "R-QP-7", "R-CQ-8")
@pytest.mark.parametrize("seed", range(3))
def test_reset_and_reuse_under_traffic(seed):
    """Both ends reset in the middle of traffic, at many moments, and connected again at once: nothing of the old life shows."""
    rng = random.Random(seed)
    print("seed", seed)
    with Lab(CONFIG, seed=seed, host_latency=rng.choice([20, 64, 150])) as lab:
        a, b = lab.rc_pair(cap=QPCap(16, 16), cqe=64)
        source, target = MR(a.pd, 4096, ALL), MR(b.pd, 4096, ALL)
        for round_ in range(12):
            for n in range(8):
                b.post_recv(RecvWR(n, [SGE(target.buf, 4096, target.lkey)]))
            for n in range(16):
                length = rng.choice([1, 64, 500, 3000])
                kind = (write, send, read)[rng.randrange(3)]
                a.post_send(kind(n, source, length) if kind is send else kind(n, source, target, length), ring=False)
            a.ring_sq()
            lab.relax(rng.randrange(40, 2500))
            for qp in (a, b) if rng.random() < 0.5 else (b, a):
                to_reset(qp)
                lab.relax(rng.randrange(1, 200))
            assert a.scq.poll(64)[0] == 0 and b.rcq.poll(64)[0] == 0
            lab.connect(a, b, psns=(rng.getrandbits(24), rng.getrandbits(24)))
            data = rng.randbytes(700)
            source.write(data)
            target.write(bytes(4096))
            b.post_recv(RecvWR(100, [SGE(target.buf, 4096, target.lkey)]))
            a.post_send(send(200, source, 700))
            assert [(wc.wr_id, wc.status) for wc in lab.wait_wc(a.scq)] == [(200, WCStatus.SUCCESS)]
            (got,) = lab.wait_wc(b.rcq)
            assert (got.wr_id, got.status, got.byte_len, got.opcode) == (100, WCStatus.SUCCESS, 700, WCOpcode.RECV)
            assert target.read(4096) == data + bytes(3396)
            assert (state(a), state(b)) == (QPState.RTS, QPState.RTS), round_
            for qp in (a, b):
                to_reset(qp)
            lab.connect(a, b, psns=(rng.getrandbits(24), rng.getrandbits(24)))


@rule("R-QP-7", "R-QP-8")
@pytest.mark.parametrize("seed", range(2))
def test_destroy_and_create_again_under_traffic(seed):
    """C44, C73: B destroyed while A streams: B is silent, its memory untouched from then on and free at once; a QP of the same
    number with another PSN drops old packets and works."""
    rng = random.Random(seed)
    print("seed", seed)
    with Lab(CONFIG, seed=40 + seed) as lab:
        a, b = lab.rc_pair(cap=QPCap(16, 16))
        for _ in range(6):
            source, target = MR(a.pd, 1024, ALL), MR(b.pd, 1024, ALL)
            source.write(bytes([0xEE]) * 1024)
            a.post_send(*(write(n, source, target, 1024) for n in range(16)))
            lab.relax(rng.randrange(100, 4000))
            number, pd, cq = b.qp_num, b.pd, b.scq
            b.close()
            target.write(bytes(1024))
            sent = [f for f in lab.world.frames if f.nic == 1]
            frames = [f for f in lab.world.frames if f.nic == 0]
            lab.relax(1500)
            assert target.read(1024) == bytes(1024)
            target.close()
            quiet = len([f for f in lab.world.frames if f.nic == 1])
            assert quiet - len(sent) <= 4, "answers of before may still have been on their way"
            counters = lab.world.nic[1].bus_counters
            a.close()
            b = QP(pd, QPInitAttr(cq, cq, cap=QPCap(16, 16)), qpn=number)
            a = QP(source.pd, QPInitAttr(a.scq, a.rcq, cap=QPCap(16, 16)))
            psns = rng.getrandbits(24), rng.getrandbits(24)
            lab.connect(a, b, psns=psns)
            target = MR(b.pd, 1024, ALL)
            target.write(bytes(1024))
            lab.world.nic[1].inject(frames[-1].data)  # a packet of the old life
            lab.relax(500)
            assert target.read(1024) == bytes(1024)
            a.post_send(write(50, source, target, 300))
            assert [(wc.wr_id, wc.status) for wc in lab.wait_wc(a.scq)] == [(50, WCStatus.SUCCESS)]
            assert target.read(1024) == bytes([0xEE]) * 300 + bytes(724)
            assert lab.world.nic[1].bus_counters["unmapped"] == counters["unmapped"] == 0
            source.close()
            target.close()


@rule("R-MR-1", "R-RES-1")
@pytest.mark.parametrize("operation", [write, read])
@pytest.mark.parametrize("side", ["remote", "local"])
def test_destroy_mr_under_traffic(side, operation):
    """When DESTROY_MR ends no DMA of that key is left: its pages go back at once and are never touched."""
    rng = random.Random(side)
    with Lab(CONFIG, seed=9, host_latency=120, write_latency=60) as lab:
        a, b = lab.rc_pair(cap=QPCap(16, 16))
        for n in range(10):
            source, target = MR(a.pd, 2048, ALL), MR(b.pd, 2048, ALL)
            a.post_send(*(operation(k, source, target, 1500) for k in range(16)))
            lab.relax(rng.randrange(50, 3000))
            (target if side == "remote" else source).close()
            done = lab.wait_wc(a.scq, 16)
            assert {wc.status for wc in done} <= {
                WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR, WCStatus.REM_ACCESS_ERR if side == "remote" else WCStatus.LOC_PROT_ERR}
            for host in lab.world.nic:
                assert host.bus_counters["unmapped"] == 0, n
            (source if side == "remote" else target).close()
            for qp in (a, b):
                to_reset(qp)
            lab.connect(a, b)


# ---------------------------------------------------------------------------------------------------- device reset
def reopen(lab, index):
    """A context after a device reset, set up as the lab did it."""
    from rnic_sim.verbs import Context, gid_bytes, mac_bytes

    context = Context(lab.machines[index])
    context.set_port(5)
    context.set_pkey(0, 0xFFFF)
    for n, address in enumerate(lab.addresses(index)):
        context.set_gid(n, address, lab.mac(index))
    for j in range(2):
        for address in lab.addresses(j):
            context.neighbors[gid_bytes(address)] = mac_bytes(lab.mac(j))
    lab.contexts[index] = context


@pytest.mark.parametrize("seed", range(3))
def test_device_reset_under_traffic(seed):
    """Both devices in turn, at random moments with DMA outstanding and frames on the wires both ways; whatever the old life had
    in memory is free at once, and the device set up again works."""
    rng = random.Random(seed)
    print("seed", seed)
    with Lab(CONFIG, seed=70 + seed, host_latency=rng.choice([64, 200])) as lab:
        for _ in range(4):
            pair = lab.rc_pair(cap=QPCap(16, 16))
            a, b = pair
            source, target = MR(a.pd, 4096, ALL), MR(b.pd, 4096, ALL)
            back, there = MR(b.pd, 4096, ALL), MR(a.pd, 4096, ALL)
            a.post_send(*(write(n, source, target, 3000) for n in range(16)))
            b.post_send(*((read, write)[n % 2](n, back, there, 2000) for n in range(16)))
            lab.relax(rng.randrange(200, 4000))
            for index in rng.sample([0, 1], 2):
                driver = lab.contexts[index].driver
                driver.reset()
                lab.relax(rng.randrange(1, 400))
            for mr in (source, target, back, there):  # without a command: the devices have forgotten them
                mr.pd.context.memory.unmap(mr._mapping)
            errors = [host.bus_counters["unmapped"] for host in lab.world.nic]
            for index in (0, 1):
                reopen(lab, index)
                assert lab.contexts[index].driver.reg("STATUS") == 0
            for qp in pair:  # numbers are free
                with pytest.raises(RDMAError):
                    lab.contexts[pair.index(qp)].driver.command(abi.Command.QUERY_QP, [qp.qp_num])
            a, b = lab.rc_pair(cap=QPCap(4, 4))
            source, target = MR(a.pd, 1024, ALL), MR(b.pd, 1024, ALL)
            data = rng.randbytes(1024)
            source.write(data)
            a.post_send(write(7, source, target, 1024))
            assert [(wc.wr_id, wc.status) for wc in lab.wait_wc(a.scq)] == [(7, WCStatus.SUCCESS)]
            assert target.read(1024) == data
            lab.relax(2000)
            assert [host.bus_counters["unmapped"] for host in lab.world.nic] == errors == [0, 0]
            for index in (0, 1):
                lab.contexts[index].driver.reset()
                reopen(lab, index)
