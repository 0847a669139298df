"""Completer: READ responses and ATOMIC ACKs, their landings, and what happens around them."""

import pytest

from rnic.abi import QpState, VendorError, WcStatus, WqeOpcode
from rnic.config import CONFIGS, Params
from rnic.records import LandTag
from rnic.wire.opcode import Opcode
from rnic.wire.syndrome import NakCode, nak_syndrome, rnr_syndrome
from tests.rules import rule
from tests.unit.requester import offer
from tests.unit.streams import seeded
from tests.unit.test_requester_complete import ACK, PD, READS, Bench, Qp

Op, St, Ve = WqeOpcode, WcStatus, VendorError
FIRST, MIDDLE, LAST, ONLY, ATOMIC_ACK = (
    Opcode.RC_READ_RESP_FIRST, Opcode.RC_READ_RESP_MIDDLE, Opcode.RC_READ_RESP_LAST, Opcode.RC_READ_RESP_ONLY,
    Opcode.RC_ATOMIC_ACK,
)  # fmt: skip
PMTU = 256
ACCESS_NAK = nak_syndrome(NakCode.REMOTE_ACCESS)


def params(name="tiny", **changes):
    return Params(CONFIGS[name].replace(**{"num_qps": 4, "sq_outstanding": 16, "max_rd_atomic": 4, **changes}))


def responses(length, how=None):
    """(opcode, payload bytes) of each response to a READ."""
    count = max(1, -(-length // PMTU))
    sizes = [min(PMTU, length - k * PMTU) for k in range(count)]
    codes = [ONLY] if count == 1 else [FIRST, *[MIDDLE] * (count - 2), LAST]
    return list(zip(codes, sizes, strict=True))


async def post_read(ctx, bench, n, length, **fields):
    await bench.post(ctx, n, opcode=Op.READ, packets=max(1, -(-length // PMTU)), length=length, **fields)


@rule("R-RSP-2", "R-RSP-5", "R-RSP-7", "R-ORD-2", "R-ORD-5", "R-CQ-3", "R-AT-2", "R-PSN-4")
@pytest.mark.parametrize("name,seed,stall", [("tiny", 1, 0.3), ("tiny", 2, 0.0), ("hundred", 3, 0.3), ("hundred", 4, 0.0)])
def test_mixed_traffic(name, seed, stall):
    """All kinds of WQEs on several QPs, PSNs and counters wrap, duplicates in between: landings, CQEs, cells, una are right."""
    rng = seeded(seed)
    p = params(name)
    qps = {n: Qp(psn=rng.choice([0, 0xFFFFF4]), start=rng.choice([0, 0xFFF9]), cqn=n) for n in range(3)}
    bench = Bench(p, qps, rng, stall)
    wires = {n: [] for n in qps}  # answers not yet sent: (wqe, packet, opcode, length)
    lands, frees, heads = {n: [] for n in qps}, [], 0

    async def main(ctx):
        nonlocal heads
        await bench.set_up(ctx)
        for _ in range(260):
            n, q = rng.choice(list(qps.items()))
            retired = sum(r[0] == n for r in bench.retired)
            if rng.random() < 0.45 and len(q.wqes) - retired < p.sq_outstanding and len(q.wqes) < 40:
                opcode = rng.choice([Op.READ, Op.READ, Op.CMP_SWAP, Op.FETCH_ADD, Op.WRITE, Op.SEND])
                open_reads = bench.reads[n] - sum(
                    q.wqes[(r[1] - q.start) & 0xFFFF].opcode in READS for r in bench.retired if r[0] == n)
                if opcode in READS and open_reads >= p.max_rd_atomic:
                    continue
                k = len(q.wqes)
                signaled = rng.randrange(2)
                if opcode == Op.READ:
                    length = rng.choice([0, 1, 255, 256, 257, 512, rng.randint(0, 1500)])
                    await post_read(ctx, bench, n, length, signaled=signaled)
                    wires[n] += [(k, i, *r) for i, r in enumerate(responses(length))]
                elif opcode in READS:
                    await bench.post(ctx, n, opcode=opcode, length=8, signaled=signaled)
                    wires[n].append((k, 0, ATOMIC_ACK, 0))
                else:
                    packets = rng.choice([1, 3])
                    await bench.post(ctx, n, opcode=opcode, packets=packets, length=77, signaled=signaled)
                    wires[n] += [(k, i, Opcode.RC_ACK, 0) for i in range(packets)]
            elif rng.random() < 0.15 and q.una:
                heads += 1  # a duplicate: nothing but its cells
                await bench.respond(ctx, n, q.una - rng.choice([1, min(2, q.una)]), ACK, rng.choice([FIRST, MIDDLE, LAST, ONLY]),
                                    length=PMTU, head=heads % p.rx_cells)  # fmt: skip
                frees.append(heads % p.rx_cells)
            elif wires[n]:
                # an ACK may be left out when another answer of the QP follows before the next READ
                while wires[n][0][2] == Opcode.RC_ACK and len(wires[n]) > 1 and rng.random() < 0.5:
                    wires[n].pop(0)
                k, i, opcode, length = wires[n].pop(0)
                w = q.wqes[k]
                q.una = w.first + i + 1
                heads, value = heads + 1, rng.getrandbits(64)
                await bench.respond(ctx, n, w.first + i, ACK, opcode, length, heads % p.rx_cells, value)
                if opcode != Opcode.RC_ACK:
                    final = i == w.packets - 1
                    atomic = opcode == ATOMIC_ACK
                    lands[n].append((
                        q.wire(w.first + i), PD + n, q.index(k), LandTag.LAST if final else LandTag.PART, 8 if atomic else length,
                        i * PMTU, int(atomic), value if atomic else None, None if atomic or not length else heads % p.rx_cells))
        while any(wires.values()):  # the rest, so that everything ends
            for n, q in qps.items():
                if wires[n]:
                    k, i, opcode, length = wires[n].pop(0)
                    w = q.wqes[k]
                    q.una = w.first + i + 1
                    heads += 1
                    await bench.respond(ctx, n, w.first + i, ACK, opcode, length, heads % p.rx_cells, 5)
                    if opcode != Opcode.RC_ACK:
                        atomic = opcode == ATOMIC_ACK
                        lands[n].append((
                            q.wire(w.first + i), PD + n, q.index(k), LandTag.LAST if i == w.packets - 1 else LandTag.PART,
                            8 if atomic else length, i * PMTU, int(atomic), 5 if atomic else None,
                            None if atomic or not length else heads % p.rx_cells))
        await bench.settle(ctx, 400)
        for n, q in qps.items():
            q.retire(q.una)
            assert q.done == len(q.wqes) > 5
            await bench.check(ctx, n)
            assert ctx.get(bench.dut.una) == q.wire(q.una)
            assert ctx.get(bench.dut.landed_count) == bench.reads[n]
            got = [(int(j.psn), int(j.pd), int(j.index), j.tag, int(j.length), int(j.offset), int(j.immediate),
                    int(j.value) if j.immediate else None, None if j.immediate or not j.length else int(j.head))
                   for j in bench.lands if j.qpn == n]  # fmt: skip
            assert got == lands[n]
            assert all(j.sges[0].addr == j.index and j.sges[0].lkey == n for j in bench.lands if j.qpn == n)
        assert bench.frees == frees
        assert not bench.errors and not bench.bad and sum(bench.reads.values()) > 15

    bench.run(main, limit=9000)


READ_BYTES = 700  # three packets; WQE 0 is a WRITE (PSN 0), WQE 1 the READ (1..3), WQE 2 a WRITE (4)
GOOD = [(1, FIRST, ACK, 256), (2, MIDDLE, ACK, 256), (3, LAST, ACK, 188)]
REPLIES = {  # answers, (WQE that fails, status, vendor)
    "gap": ([GOOD[0], GOOD[2]], (1, St.RETRY_EXC_ERR, Ve.NAK_SEQUENCE)),  # R-RSP-4
    "first response lost": ([GOOD[1]], (1, St.RETRY_EXC_ERR, Ve.NAK_SEQUENCE)),
    "ack past": ([(4, Opcode.RC_ACK, ACK, 0)], (1, St.RETRY_EXC_ERR, Ve.NAK_SEQUENCE)),  # R-RSP-3
    "ack past, part came": ([GOOD[0], (4, Opcode.RC_ACK, ACK, 0)], (1, St.RETRY_EXC_ERR, Ve.NAK_SEQUENCE)),
    "ack naming it": ([(1, Opcode.RC_ACK, ACK, 0)], (1, St.RETRY_EXC_ERR, Ve.NAK_SEQUENCE)),
    "ack naming its rest": ([GOOD[0], (2, Opcode.RC_ACK, ACK, 0)], (1, St.RETRY_EXC_ERR, Ve.NAK_SEQUENCE)),
    "nak past": ([(4, Opcode.RC_ACK, ACCESS_NAK, 0)], (1, St.RETRY_EXC_ERR, Ve.NAK_SEQUENCE)),
    "nak": ([(1, Opcode.RC_ACK, ACCESS_NAK, 0)], (1, St.REM_ACCESS_ERR, Ve.REMOTE_NAK)),
    "nak in its middle": ([*GOOD[:2], (3, Opcode.RC_ACK, ACCESS_NAK, 0)], (1, St.REM_ACCESS_ERR, Ve.REMOTE_NAK)),
    "rnr": ([(1, Opcode.RC_ACK, rnr_syndrome(1), 0)], (1, St.RNR_RETRY_EXC_ERR, Ve.RNR)),
    "nak before": ([(0, Opcode.RC_ACK, ACCESS_NAK, 0)], (0, St.REM_ACCESS_ERR, Ve.REMOTE_NAK)),
    "nak behind": ([*GOOD, (4, Opcode.RC_ACK, ACCESS_NAK, 0)], (2, St.REM_ACCESS_ERR, Ve.REMOTE_NAK)),
    "short first": ([(1, FIRST, ACK, 255)], (1, St.LOC_LEN_ERR, Ve.BAD_RESPONSE)),  # R-RSP-5
    "long first": ([(1, FIRST, ACK, 260)], (1, St.LOC_LEN_ERR, Ve.BAD_RESPONSE)),
    "short middle": ([GOOD[0], (2, MIDDLE, ACK, 252)], (1, St.LOC_LEN_ERR, Ve.BAD_RESPONSE)),
    "early last": ([GOOD[0], (2, LAST, ACK, 256)], (1, St.LOC_LEN_ERR, Ve.BAD_RESPONSE)),
    "late middle": ([*GOOD[:2], (3, MIDDLE, ACK, 256)], (1, St.LOC_LEN_ERR, Ve.BAD_RESPONSE)),
    "short last": ([*GOOD[:2], (3, LAST, ACK, 187)], (1, St.LOC_LEN_ERR, Ve.BAD_RESPONSE)),
    "long last": ([*GOOD[:2], (3, LAST, ACK, 192)], (1, St.LOC_LEN_ERR, Ve.BAD_RESPONSE)),
    "only": ([(1, ONLY, ACK, 256)], (1, St.LOC_LEN_ERR, Ve.BAD_RESPONSE)),
    "starts with middle": ([(1, MIDDLE, ACK, 256)], (1, St.BAD_RESP_ERR, Ve.BAD_RESPONSE)),
    "starts with last": ([(1, LAST, ACK, 256)], (1, St.BAD_RESP_ERR, Ve.BAD_RESPONSE)),
    "atomic ack": ([(1, ATOMIC_ACK, ACK, 0)], (1, St.BAD_RESP_ERR, Ve.BAD_RESPONSE)),
    "data with a nak": ([(1, FIRST, ACCESS_NAK, 256)], (1, St.BAD_RESP_ERR, Ve.BAD_RESPONSE)),
    "data for a write": ([(0, ONLY, ACK, 100)], (0, St.BAD_RESP_ERR, Ve.BAD_RESPONSE)),
    "data for a write behind": ([*GOOD, (4, ONLY, ACK, 100)], (2, St.BAD_RESP_ERR, Ve.BAD_RESPONSE)),
}


@rule("R-RSP-3", "R-RSP-4", "R-RSP-5", "R-ERR-3")
@pytest.mark.parametrize("what", list(REPLIES))
@pytest.mark.parametrize("hold", [False, True])
def test_answers_that_do_not_fit(what, hold):
    """WQEs before the failing one succeed, it fails with its own status, the rest is flushed; every cell has one owner."""
    replies, (failing, status, vendor) = REPLIES[what]
    p = params()
    bench = Bench(p, {1: Qp(psn=0xFFFFFE, start=0xFFFF)}, seeded(1), 0.2)
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        await bench.post(ctx, 1, length=1)
        await post_read(ctx, bench, 1, READ_BYTES)
        await bench.post(ctx, 1)
        bench.land_hold = hold
        for head, (psn, opcode, syndrome, length) in enumerate(replies, 10):
            await bench.respond(ctx, 1, psn, syndrome, opcode, length, head)
        if hold:  # nothing is said about the READ, or what is behind it, while its data is on its way
            await bench.settle(ctx)
            data = any(r[1] in (FIRST, MIDDLE, LAST) for r in replies[:-1]) and failing
            assert len(bench.cqes[1]) <= 1 or not data
            assert bool(bench.errors) == (not data)
            bench.land_hold = False
        await bench.settle(ctx)
        q.retire([0, 1, 4][failing])
        assert q.done == failing
        q.fail(status, vendor)
        await bench.check(ctx, 1)
        assert bench.errors == [1] and not bench.bad
        await bench.set_state(ctx, 1, QpState.ERR)
        await offer(ctx, bench.dut.flush, {"qpn": 1, "producer": q.index(3)})
        while q.done < 3:
            q.cqe(q.done, St.WR_FLUSH_ERR)
            q.done += 1
        await bench.settle(ctx)
        await bench.check(ctx, 1)
        landed = [int(j.head) for j in bench.lands if j.length]
        owners = sorted(landed + bench.frees)
        assert owners == [head for head, r in enumerate(replies, 10) if r[3]]

    bench.run(main)


@rule("R-RSP-5")
@pytest.mark.parametrize("opcode,syndrome,length,status", [
    (ONLY, ACK, 8, St.BAD_RESP_ERR), (FIRST, ACK, 256, St.BAD_RESP_ERR), (ATOMIC_ACK, ACCESS_NAK, 0, St.BAD_RESP_ERR),
    (ATOMIC_ACK, ACK, 8, St.LOC_LEN_ERR),
])  # fmt: skip
def test_wrong_answer_to_an_atomic(opcode, syndrome, length, status):
    bench = Bench(params(), {1: Qp()}, seeded(1), 0.2)
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        await bench.post(ctx, 1, opcode=Op.CMP_SWAP, length=8)
        await bench.respond(ctx, 1, 0, syndrome, opcode, length, 3)
        await bench.settle(ctx)
        q.fail(status, Ve.BAD_RESPONSE)
        await bench.check(ctx, 1)
        assert bench.frees == ([3] if length else []) and not bench.lands

    bench.run(main)


@rule("R-RSP-6")
@pytest.mark.parametrize("codes", [(FIRST, FIRST, ONLY), (FIRST, FIRST, LAST), (FIRST, MIDDLE, ONLY)])
def test_restarted_read_goes_on_either_way(codes):
    """R-RSP-6: after a part came, FIRST and ONLY are as good as MIDDLE and LAST."""
    bench = Bench(params(), {1: Qp()}, seeded(1), 0.2)
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        await post_read(ctx, bench, 1, READ_BYTES)
        for k, (opcode, length) in enumerate(zip(codes, (256, 256, 188), strict=True)):
            await bench.respond(ctx, 1, k, ACK, opcode, length, k)
        await bench.settle(ctx)
        q.retire(3)
        await bench.check(ctx, 1)
        assert [(int(j.offset), int(j.length)) for j in bench.lands] == [(0, 256), (256, 256), (512, 188)]

    bench.run(main)


@rule("R-RSP-8", "R-ERR-1", "R-ERR-3")
@pytest.mark.parametrize("replies", [1, 2, 3])
@pytest.mark.parametrize("status,vendor", [(St.LOC_PROT_ERR, Ve.KEY_BOUNDS), (St.LOC_QP_OP_ERR, Ve.HOST_BUS)])
def test_landing_fails(replies, status, vendor):
    """R-RSP-8: the READ ends with the landing's status, later WQEs are flushed, later answers ignored, their cells freed."""
    bench = Bench(params(), {1: Qp(), 2: Qp()}, seeded(replies), 0.2)
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        await bench.post(ctx, 1)
        await post_read(ctx, bench, 1, READ_BYTES, signaled=0)
        await post_read(ctx, bench, 2, 5)
        bench.land_faults[1, 1] = (status, vendor)
        for k in range(replies):
            psn, opcode, syndrome, length = GOOD[k]
            await bench.respond(ctx, 1, psn, syndrome, opcode, length, 10 + k)
        await bench.respond(ctx, 2, 0, ACK, ONLY, 5, 1)
        await bench.settle(ctx, 100)
        q.retire(1)
        q.fail(status, vendor)
        bench.qps[2].retire(1)
        for n in (1, 2):
            await bench.check(ctx, n)
        assert bench.errors == [1]
        await bench.respond(ctx, 1, 3, ACK, LAST, 188, 20)
        await bench.settle(ctx)
        assert bench.frees[-1] == 20 and not bench.bad
        await bench.check(ctx, 1)

    bench.run(main)


@rule("R-ORD-2", "R-CQ-1", "R-ERR-7")
@pytest.mark.parametrize("end", ["acks", "failure", "flush"])
def test_what_waits_behind_a_landing(end):
    """WQEs behind a READ whose data is on its way are acknowledged, fail or are flushed: nothing of it is reported before."""
    bench = Bench(params(), {1: Qp(start=0xFFFE)}, seeded(1), 0.2)
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        await post_read(ctx, bench, 1, 100)
        await bench.post(ctx, 1, packets=2)
        await post_read(ctx, bench, 1, 200)
        await bench.post(ctx, 1)
        bench.land_hold = True
        await bench.respond(ctx, 1, 0, ACK, ONLY, 100, 1)
        if end == "acks":
            await bench.respond(ctx, 1, 2)
            await bench.respond(ctx, 1, 3, ACK, ONLY, 200, 2)
            await bench.respond(ctx, 1, 4)
        elif end == "failure":
            await offer(ctx, bench.dut.failure, {"qpn": 1, "wqe_index": q.index(1), "status": St.LOC_PROT_ERR,
                                                 "vendor_err": Ve.KEY_PD})  # fmt: skip
        else:
            await bench.set_state(ctx, 1, QpState.ERR)
            await offer(ctx, bench.dut.flush, {"qpn": 1, "producer": q.index(4)})
        await bench.settle(ctx)
        assert not bench.cqes[1] and not bench.errors and not bench.retired
        bench.land_hold = False
        await bench.settle(ctx)
        if end == "acks":
            q.retire(5)
        elif end == "failure":
            q.retire(1)
            q.fail(St.LOC_PROT_ERR, Ve.KEY_PD)
        else:
            for k in range(4):
                q.cqe(k, St.WR_FLUSH_ERR)
            q.done = 4
        await bench.check(ctx, 1)

    bench.run(main)


@rule("R-RSP-2", "R-CQ-1")
def test_many_writes_before_a_read():
    """A READ response acknowledges 100 WRITEs: the turn is given up in between, the landing is retired behind all of them."""
    p = params("hundred", sq_outstanding=128)
    bench = Bench(p, {1: Qp(), 2: Qp()}, seeded(1))
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        for _ in range(100):
            await bench.post(ctx, 1)
        await post_read(ctx, bench, 1, 64)
        await bench.post(ctx, 2)
        await bench.respond(ctx, 1, 100, ACK, ONLY, 64, 1)
        await bench.respond(ctx, 2, 0)
        await bench.settle(ctx, 450)
        q.retire(101)
        bench.qps[2].retire(1)
        await bench.check(ctx, 1)
        await bench.check(ctx, 2)
        assert [n for n, _, _ in bench.retired].index(2) <= 2 * bench.dut.TURN

    bench.run(main)


def test_rate_of_small_reads():
    """A 64-byte READ takes at most 12 cycles of the completer, landing included (design budget 3, milestone)."""
    p = params("hundred", max_rd_atomic=16)
    bench = Bench(p, {1: Qp()}, seeded(3))

    async def main(ctx):
        await bench.set_up(ctx)
        for _ in range(16):
            await post_read(ctx, bench, 1, 64)
        start = bench.cycle
        for k in range(16):
            await bench.respond(ctx, 1, k, ACK, ONLY, 64, k)
        while len(bench.retired) < 16:
            await ctx.tick()
        assert bench.cycle - start <= 12 * 16 + 20
        bench.qps[1].retire(16)
        await bench.settle(ctx)
        await bench.check(ctx, 1)

    bench.run(main)
