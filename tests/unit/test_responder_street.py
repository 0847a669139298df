"""The whole responder against a plain-Python model: data, answers, completions (rules.md 8)."""

import pytest

from rnic.abi import Access
from rnic.config import CONFIGS
from rnic.wire.opcode import Kind, Opcode
from tests.rules import rule

from .responder_bench import Bench, Packet, rc
from .streams import seeded

RW = int(Access.LOCAL_WRITE | Access.REMOTE_WRITE)


def messages(bench: Bench, qp, rng, count: int):
    """Actions of ``count`` random good messages on ``qp``, receive WQEs included."""
    key = 0x100 * qp.qpn
    region = bench.world.region(key, qp.pd, RW, base=(qp.qpn << 36) + 0xFFFF_EF00, length=5 * 4096 + 77)
    actions = []
    psn = qp.epsn
    pmtu = 128 << qp.path_mtu
    for _ in range(count):
        kind = rng.choice([Kind.SEND, Kind.WRITE])
        imm = rng.random() < 0.4
        inv = kind == Kind.SEND and not imm and rng.random() < 0.2
        length = rng.choice([0, 1, 3, pmtu - 1, pmtu, pmtu + 1, 2 * pmtu, rng.randrange(3 * pmtu)])
        # From the beginning, over a page end, over a 4 GiB border, anywhere.
        start = region.base + rng.choice([0, 0x100 - 1, 0x1100 - 1, 0x1100 - pmtu, rng.randrange(region.length - length)])
        start = min(start, region.base + region.length - length)
        payload = rng.randbytes(length)
        if kind == Kind.SEND or imm:
            sges, at, left = [], start, length
            for slot in range(4):
                part = left if slot == 3 else rng.choice([0, left, rng.randrange(left + 1)])
                extra = rng.randrange(9) if part == left and at + part + 9 < region.base + region.length else 0
                sges.append((at, part + extra, key) if part else (0xBAD, 0, 0xBAD))
                at += part
                left -= part
                if extra and not left:
                    break
            actions.append(("post", qp, sges))
        ended = 0x8000 + 0x100 * len(bench.world.regions)  # the key that a SEND ends
        if inv:
            bench.world.region(ended, qp.pd, int(Access.REMOTE_INVALIDATE), base=0x5000, length=64, contiguous=True)
        packets = max(1, -(-length // pmtu))
        for i in range(packets):
            starts, ends = i == 0, i == packets - 1
            has_reth = kind == Kind.WRITE and starts
            actions.append(Packet(
                qp.qpn, rc(kind, starts=starts, ends=ends, imm=imm and ends, inv=inv and ends), psn,
                payload[i * pmtu : (i + 1) * pmtu], start if has_reth else 0,
                (key if length else 0xBAD) if has_reth else 0, length if has_reth else 0,
                imm=rng.randrange(1 << 32) if (imm or inv) and ends else 0xBAD, ackreq=int(ends or rng.random() < 0.3),
                solicited=rng.randrange(2) if ends else 0))
            if inv and ends:
                actions[-1].imm = ended
            psn = (psn + 1) % (1 << 24)
    return actions


def interleave(rng, lists):
    lists = [list(x) for x in lists]
    while any(lists):
        chosen = rng.choice([x for x in lists if x])
        yield chosen.pop(0)


@rule(
    "R-MSN-1", "R-CRD-1", "R-ACK-1", "R-PAD-3", "R-MR-5", "R-OPC-2", "R-CQ-2", "R-CQ-3", "R-WQ-4", "R-RES-2", "R-WQ-8",
    "R-CQ-4", "R-RES-3", "R-REQ-3", "R-RES-7", "R-LEN-3",
)  # fmt: skip
@pytest.mark.parametrize(("config", "stall", "seed"), [("tiny", 0.3, 1), ("tiny", 0.0, 2), ("hundred", 0.2, 3)])
def test_good_traffic(config, stall, seed):
    rng = seeded(seed)
    bench = Bench(CONFIGS[config], rng, stall)
    bench.qps[3].path_mtu = 2
    actions = list(interleave(rng, [messages(bench, qp, rng, 5) for qp in bench.qps.values()]))
    bench.run(actions)
    bench.compare()
    assert not bench.errors
    assert sum(isinstance(a, Packet) for a in actions) >= 24


def quiet_bench(seed: int = 1, config: str = "tiny", stall: float = 0.2, **more):
    """A bench and its first QP with one MR: key 0x200, three pages in pieces."""
    bench = Bench(CONFIGS[config], seeded(seed), stall, **more)
    qp = bench.qps[2]
    return bench, qp, bench.world.region(0x200, qp.pd, RW, base=0x10_0000, length=3 * 4096)


def write_only(qp, ahead: int = 0, **fields) -> Packet:
    """A good 16-byte WRITE at ePSN + ahead unless ``fields`` say otherwise."""
    fields = {"payload": bytes(range(16)), "va": 0x10_0000 + 16 * ahead, "rkey": 0x200, **fields}
    fields.setdefault("dma_length", len(fields["payload"]))
    fields.setdefault("opcode", Opcode.RC_WRITE_ONLY)
    return Packet(qp.qpn, psn=(qp.epsn + ahead) % (1 << 24), **fields)


def send(qp, ahead: int, kind: str, size: int, **fields) -> Packet:
    return Packet(qp.qpn, Opcode["RC_SEND_" + kind], (qp.epsn + ahead) % (1 << 24), bytes(i & 255 for i in range(size)), **fields)


def write(qp, ahead: int, kind: str, size: int, total: int = 0, **fields) -> Packet:
    fields = {"va": 0x10_0000, "rkey": 0x200, **fields}
    return Packet(qp.qpn, Opcode["RC_WRITE_" + kind], (qp.epsn + ahead) % (1 << 24), bytes(255 - i & 255 for i in range(size)),
                  dma_length=total, **fields)


@rule("R-ACK-1", "R-ACK-2")
@pytest.mark.parametrize("config", ["tiny", "hundred"])
def test_no_request_waits_for_the_wire(config):
    """No ACK can leave: far more requests than all queues hold reach memory all the same; one ACK a QP is enough at the end."""
    count = 12 if config == "tiny" else 60
    bench = Bench(CONFIGS[config], seeded(12), 0.1)
    bench.ports["ack"].hold = True
    for qp in bench.qps.values():
        bench.world.region(qp.qpn << 8, qp.pd, RW, base=0x10_0000, length=4096)

    def release(bench):
        assert not any(bench.acks.values())
        bench.ports["ack"].hold = False

    requests = [write_only(qp, n, rkey=qp.qpn << 8) for n in range(count) for qp in bench.qps.values()]
    bench.run([*requests, ("idle",), ("call", release)], limit=8000)
    bench.model.finish()
    assert bench.world.memory == bench.model.memory
    for qpn in bench.qps:
        got, each = bench.acks[qpn], bench.model.acks[qpn]
        assert len(each) == count and got[-1] == each[-1] and len(got) <= count // 2 and all(ack in each for ack in got)


BUFFER = [(0x10_0000, 2048, 0x200)]
BAD_CASES = {  # name: (rules, receive WQEs, packets)
    "middle_first": ("8.1#2", 1, lambda q: [send(q, 0, "MIDDLE", 256)]),
    "write_in_send": ("8.1#2 8.2", 3, lambda q: [send(q, 0, "FIRST", 256), write_only(q, 1)]),  # WQE in use
    "first_in_send": ("8.1#2", 3, lambda q: [send(q, 0, "FIRST", 256), send(q, 1, "FIRST", 256)]),
    "send_last_in_write": ("8.1#2", 1, lambda q: [write(q, 0, "FIRST", 256, 300), send(q, 1, "LAST", 44)]),
    "read": ("8.1#3 8.1#4", 1, lambda q: [write_only(q, opcode=Opcode.RC_READ_REQUEST, payload=b"", dma_length=8)]),
    "atomic": ("8.1#3 8.1#4", 0, lambda q: [write_only(q, opcode=Opcode.RC_FETCH_ADD, payload=b"")]),
    "first_short": ("8.1#6 R-LEN-1", 1, lambda q: [send(q, 0, "FIRST", 252)]),
    "first_pad": ("8.1#6 R-PAD-2", 1, lambda q: [send(q, 0, "FIRST", 256, pad=1)]),
    "last_zero": ("8.1#6 R-LEN-1", 1, lambda q: [send(q, 0, "FIRST", 256), send(q, 1, "LAST", 0)]),
    "only_long": ("8.1#6 R-LEN-1", 0, lambda q: [write_only(q, payload=bytes(300))]),
    "send_long": ("8.1#6 R-LEN-1", 2, lambda q: [send(q, 0, "ONLY", 260)]),  # with a receive WQE
    "write_imm_long": ("8.1#6 R-RES-5", 2, lambda q: [write(q, 0, "ONLY_IMM", 260, 260)]),  # gives its WQE back
    "reth_huge": ("8.1#6 R-LEN-2", 0, lambda q: [write(q, 0, "FIRST", 256, (1 << 31) + 1)]),
    "key_unknown": ("8.1#7 R-MR-1", 1, lambda q: [write_only(q, rkey=0x201)]),
    "key_pd": ("8.1#7 R-MR-4", 1, lambda q: [write_only(q, rkey=0x300)]),
    "key_rights": ("8.1#7", 0, lambda q: [write_only(q, rkey=0x400)]),
    "key_bounds": ("8.1#7 R-RES-1", 0, lambda q: [write(q, 0, "FIRST", 256, 3 * 4096 + 1)]),  # whole RETH
    "imm_key": ("8.1#7 R-RES-5", 2, lambda q: [write(q, 0, "ONLY_IMM", 16, 16, rkey=0x201)]),
    "key_before_length": ("8.1#7", 0, lambda q: [write(q, 0, "ONLY", 16, 32, rkey=0x201)]),  # before 8
    "dma_longer": ("8.1#8 R-LEN-3", 0, lambda q: [write(q, 0, "ONLY", 16, 32)]),
    "dma_shorter": ("8.1#8 R-LEN-3", 0, lambda q: [write(q, 0, "ONLY", 32, 16)]),
    "dma_zero": ("8.1#8 R-RES-2", 0, lambda q: [write(q, 0, "ONLY", 32, 0, rkey=0xBAD)]),  # no key check
    "first_is_all": ("8.1#8 R-LEN-3", 0, lambda q: [write(q, 0, "FIRST", 256, 256)]),
    "multi_short": ("8.1#8 R-LEN-3 R-RES-3", 0, lambda q: [write(q, 0, "FIRST", 256, 400), write(q, 1, "LAST", 44)]),
    "multi_long": ("8.1#8 R-LEN-3", 0,
                   lambda q: [write(q, 0, "FIRST", 256, 520), write(q, 1, "MIDDLE", 256), write(q, 2, "LAST", 88)]),
    "too_long": ("8.1#10", 2, lambda q: [send(q, 0, "ONLY", 101)]),  # see the test
    "too_long_last": ("8.1#10", 2, lambda q: [send(q, 0, "FIRST", 256), send(q, 1, "LAST", 1)]),  # in the second packet
    "sge_key": ("8.1#11", 2, lambda q: [send(q, 0, "ONLY", 64)]),
    "sge_bounds": ("8.1#11", 2, lambda q: [send(q, 0, "ONLY", 64)]),
    "wqe_unreadable": ("8.1#11", 2, lambda q: [send(q, 0, "ONLY", 64)]),
}
SGES = {
    "too_long": [(0x10_0000, 50, 0x200), (0, 0, 0), (0x10_1000, 50, 0x200)],
    "too_long_last": [(0x10_0000, 100, 0x200), (0x10_0FFF, 156, 0x200)],
    "sge_key": [(0x10_0000, 32, 0x200), (0x10_1000, 32, 0x201)],
    "sge_bounds": [(0x10_0000, 32, 0x200), (0x10_3000 - 31, 32, 0x200)],
}


@rule("R-ERR-3", "R-ERR-4", "R-ERR-5", "8.2", "R-MSN-1", "R-ERR-8")
@pytest.mark.parametrize("case", [pytest.param(name, marks=rule(*ids.split())) for name, (ids, *_) in BAD_CASES.items()])
def test_fatal(case):
    """A packet that breaks a rule: one NAK with its PSN, the receive WQE in use completes in error, the others are flushed,
    later packets and other QPs are as they should be, the flush goes on for WQEs posted in ERR."""
    bench, qp, _ = quiet_bench(len(case))
    bench.world.region(0x300, qp.pd + 1, RW, base=0x10_0000, length=4096)
    bench.world.region(0x400, qp.pd, int(Access.LOCAL_WRITE), base=0x10_0000, length=4096)
    _, wqes, packets = BAD_CASES[case]
    other = bench.qps[3]
    bench.world.region(0x500, other.pd, RW, base=0x10_0000, length=4096)
    if case == "wqe_unreadable":
        bench.world.unreadable.add(qp.ring_phys)
    actions = [("post", qp, SGES.get(case, BUFFER))] * wqes + packets(qp)
    bad = actions[-1]
    actions += [
        write_only(qp, bad.psn - qp.epsn & 0xFFFFFF), write_only(qp, (bad.psn - qp.epsn & 0xFFFFFF) + 1),
        write_only(other, rkey=0x500), ("idle",), ("post", qp, BUFFER), ("idle",), ("post", qp, BUFFER), ("post", qp, BUFFER),
        write_only(other, 1, rkey=0x500),
    ]
    bench.run(actions, settle=80)
    bench.compare()
    assert qp.dead and not other.dead and bench.errors == [2]
    assert sum(a[0] != 0x1F for a in bench.acks[2]) == 1
    assert len(bench.cqes[2]) == wqes + 3
    assert bench.error_drop == 2


@rule("R-RES-2", "8.1#3", "8.2")
def test_access_flags():
    """Check 3: a QP without REMOTE_WRITE answers invalid request, not access error, zero length included (R-RES-2)."""
    for payload in (b"", b"12"):
        bench, qp, _ = quiet_bench(len(payload))
        qp.access = int(Access.REMOTE_READ | Access.REMOTE_ATOMIC)
        bench.run([write_only(qp, payload=payload, rkey=0xBAD)], settle=60)
        bench.compare()
        assert bench.acks[2] == [(0x61, qp.epsn, 0)]


@rule(
    "R-SEQ-1", "R-SEQ-2", "R-SEQ-3", "R-RNR-4", "R-RES-4", "R-RES-6", "R-DUP-1", "R-DUP-2", "R-DUP-7", "R-DUP-8", "8.1#1",
    "R-SEQ-4", "8.1#5", "R-PSN-1", "R-PSN-2", "R-DUP-3", "R-DUP-5",
)  # fmt: skip
@pytest.mark.parametrize("epsn", [0x500, 0xFFFFFE, 0])
def test_sequence(epsn):
    """Gaps, RNR and duplicates, also in the middle of a message and around the wrap of PSNs, MSNs and ring counters."""
    bench, qp, region = quiet_bench(epsn % 97, epsn=lambda rng: epsn)
    qp.msn, qp.taken, qp.produced, qp.completed = 0xFFFFFF, 0xFFFE, 0xFFFE, 0xFFFE
    first, last = write(qp, 3, "FIRST", 256, 260), write(qp, 4, "LAST_IMM", 4, imm=0x01020304, solicited=1)
    actions = [
        write_only(qp, -1), write_only(qp, -1 << 23),  # duplicates before anything was accepted
        write_only(qp, 1), write_only(qp, 2), write_only(qp, -2), write_only(qp, 2),  # one NAK
        write_only(qp), write_only(qp, 2), write_only(qp, 1),  # accepted, gap again, filled
        write_only(qp), write_only(qp, opcode=Opcode.RC_READ_REQUEST, payload=b"", rkey=0xBAD),  # duplicates
        send(qp, 2, "ONLY", 300), send(qp, 3, "ONLY", 4),  # RNR before the length check, then silence
        send(qp, 2, "ONLY", 8), ("post", qp, BUFFER), send(qp, 3, "ONLY", 8), send(qp, 2, "ONLY", 8),
        first, write_only(qp, 2), write_only(qp, 1, ackreq=0), last, write_only(qp, 5),
        ("post", qp, BUFFER), ("post", qp, BUFFER), last, send(qp, 5, "ONLY_IMM", 0, imm=7), send(qp, 4, "ONLY", 7),
        write_only(qp, (1 << 23) + 5), write_only(qp, (1 << 23) + 6),
        send(qp, 5, "ONLY_IMM", 0, imm=7),  # a duplicate without payload is no READ
        send(qp, 6, "ONLY", 3),
    ]
    bench.run(actions)
    bench.compare()
    assert (bench.duplicates, bench.out_of_sequence) == (bench.model.duplicates, bench.model.out_of_sequence)
    assert {a[0] for a in bench.acks[2]} == {0x1F, 0x60, 0x25} and len(bench.cqes[2]) == 3
    assert not qp.dead and region


@rule("R-QP-5", "R-ERR-2", "R-ERR-3", "R-ERR-5")
def test_flush_by_command():
    """A QP moved to ERR by a command in the middle of a SEND: the WQE in use and the rest are flushed; then every post."""
    bench, qp, _ = quiet_bench(5)

    def to_error(b):
        b.ports["ctx"].queue.append(b.state_write(2, 6))
        b.later.append((b.cycle + 25, "flush", {"qpn": 2}))
        qp.dead = True

    actions = [("post", qp, BUFFER)] * 4 + [
        send(qp, 0, "ONLY", 5), send(qp, 1, "FIRST", 256), ("idle",), ("call", to_error), ("wait", 40), send(qp, 2, "LAST", 5),
        ("idle",), ("post", qp, BUFFER), ("idle",), ("post", qp, BUFFER),
    ]
    bench.run(actions, settle=80)
    bench.errors.append(2)  # the command, not the responder
    bench.compare()
    assert [c["status"].value for c in bench.cqes[2]] == [0] + [5] * 5 and bench.drained == 3
    assert bench.error_drop == 1


@rule("R-ACK-3", "R-CQ-3", "R-ORD-4")
@pytest.mark.parametrize("config", ["tiny", "hundred"])
def test_what_waits_for_what(config):
    """No ACK before the host accepted all of the packet's writes; no completion before their responses (C117), also
    not for a WRITE with immediate of zero bytes behind a WRITE; ACKs do not wait for responses."""
    bench, qp, _ = quiet_bench(3, config)
    accepted, done = bench.ports["accepted"], bench.ports["done"]
    seen = []

    def look(b):
        seen.append((len(b.acks[2]), len(b.cqes[2]), len(b.errors)))

    def let(port, on):
        return ("call", lambda b: setattr(b.ports[port], "hold", not on))

    actions = [
        let("accepted", False), let("done", False), ("post", qp, BUFFER), ("post", qp, BUFFER),
        write_only(qp, 0, payload=bytes(200), va=0x10_0FF0), write(qp, 1, "ONLY_IMM", 0, 0, imm=1), send(qp, 2, "ONLY", 9),
        ("wait", 150), ("call", look), let("accepted", True), ("wait", 100), ("call", look), let("done", True),
        ("wait", 60), ("call", look),
    ]
    bench.run(actions)
    bench.compare()
    assert seen == [(0, 0, 0), (3, 0, 0), (3, 2, 0)]
    assert accepted.hold == done.hold == 0


@rule("R-ACK-3", "R-ERR-3", "R-ERR-4")
@pytest.mark.parametrize("which", ["send", "write", "write_imm", "send_middle"])
def test_bus_error(which):
    """An error response to a write: the receive WQE in use completes with LOC_QP_OP_ERR, the QP goes to ERR, the rest is
    flushed; completions before it are good, other QPs go on."""
    bench, qp, region = quiet_bench(len(which))
    other = bench.qps[3]
    bench.world.region(0x500, other.pd, RW, base=0x10_0000, length=4096)
    bench.bad_writes.add(region.where(0x10_0008))
    bad = {
        "send": [send(qp, 1, "ONLY", 20)],
        "write": [write_only(qp, 1)],
        "write_imm": [write(qp, 1, "ONLY_IMM", 16, 16)],
        "send_middle": [send(qp, 1, "FIRST", 256), send(qp, 2, "LAST", 5)],
    }[which]
    bad[0].va = 0x10_0000
    good = [(0x10_2000, 64, 0x200)]
    actions = [("post", qp, good), ("post", qp, BUFFER), ("post", qp, BUFFER), send(qp, 0, "ONLY", 7), *bad, ("wait", 100),
               send(qp, len(bad) + 1, "ONLY", 7), write_only(other, rkey=0x500), ("idle",), ("post", qp, BUFFER)]
    bench.run(actions)
    assert bench.errors == [2]
    status = [c["status"].value for c in bench.cqes[2]]
    assert status == ([0, 5, 5, 5] if which == "write" else [0, 2, 5, 5])
    assert [c["wqe_counter"] for c in bench.cqes[2]] == [0, 1, 2, 3]
    assert bench.acks[3] == [(0x1F, other.epsn - 1 & 0xFFFFFF, 1)]
    assert not any(psn == qp.epsn for _, psn, _ in bench.acks[2][2:])


@rule("R-QP-4", "R-QP-7")
def test_reset_and_reuse():
    """A failed QP is drained, reset and used again: nothing of its old life shows."""
    bench, qp, _ = quiet_bench(9)

    def reset(b):
        b.model.finish()
        b.ports["ctx"].queue.append(b.state_write(2, 0))
        b.later.append((b.cycle + 20, "flush", {"qpn": 2}))

    def create(b):
        assert b.drained >= 2, "the flush event of the reset has not come through"
        qp.epsn, qp.msn, qp.taken, qp.produced, qp.completed, qp.dead, qp.nak_state = 0x77, 0, 0, 0, 0, False, 0
        qp.message, qp.ack_psn = None, None
        b.ports["ctx"].queue.extend(b.context_writes(qp))

    second = [Packet(2, Opcode.RC_SEND_ONLY, 0x77, b"hello"), Packet(2, Opcode.RC_WRITE_ONLY, 0x78, b"abc", 0x10_0000, 0x200, 3)]
    bench.run([("post", qp, BUFFER), ("post", qp, BUFFER), send(qp, 0, "FIRST", 256), write_only(qp, 1, rkey=0xBAD), ("idle",),
               write_only(qp, 1), ("call", reset), ("wait", 80), ("call", create), ("wait", 60), ("post", qp, BUFFER), *second])
    bench.errors.clear()
    bench.compare()
    assert [c["status"].value for c in bench.cqes[2]] == [2, 5, 0]
    assert bench.acks[2][-2:] == [(0x1F, 0x77, 1), (0x1F, 0x78, 2)]


@pytest.mark.parametrize(("kind", "limit"), [("WRITE", 6), ("SEND", 8)])
def test_rate(kind, limit):
    """64-byte messages of one QP at 512 bits, translations of 11 cycles, write responses after many: cycles a message."""
    bench, qp, _ = quiet_bench(2, "hundred", 0.0)
    qp.log_rq = 6
    bench.world.rings[bench.p.tpt_rq_base + 2].length = 64 << 6
    bench.latency = (11, 11)
    payload = bytes(64)
    packets = [write_only(qp, i, payload=payload, va=0x10_0000) if kind == "WRITE" else send(qp, i, "ONLY", 64)
               for i in range(40)]
    posts = [("post", qp, BUFFER)] * 40 if kind == "SEND" else []
    bench.run([*posts, ("idle",), ("call", lambda b: [b.send(packet) for packet in packets])])
    bench.compare()
    times = bench.times["ack"]
    spacing = (times[-1] - times[5]) / (len(times) - 6)
    print(f"{kind}: {spacing:.2f} cycles a message, {times[0] - bench.times['request'][0]} to the first ACK")
    assert len(times) == 40 and spacing <= limit
