"""READ and ATOMIC at the responder against a plain-Python model (rules.md 8, 12, 19.3)."""

import pytest

from rnic.abi import Access
from rnic.wire.opcode import Opcode
from tests.rules import rule

from .responder_bench import Packet
from .responder_reads import ReadBench, Request
from .streams import seeded
from .test_responder_street import interleave, messages

ALL = int(Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC)
KEY, BASE = 0x900, 0x55_0000_0FF0  # the region begins 16 bytes before a page ends


def bench_of(seed=1, config="gigabit", stall=0.2, length=5 * 4096, **more):
    """A bench and its first QP with one MR, key `KEY`."""
    bench = ReadBench(config, seeded(seed), stall, **more)
    qp = bench.qps[2]
    return bench, qp, bench.world.region(KEY, qp.pd, ALL, base=BASE, length=length)


def read(qp, ahead, length, at=0, **fields):
    fields = {"rkey": KEY, "va": BASE + at, **fields}
    return Request(qp.qpn, Opcode.RC_READ_REQUEST, qp.epsn + ahead & 0xFFFFFF, dma_length=length, **fields)


def atomic(qp, ahead, op, at, swap, compare=0, **fields):
    fields = {"rkey": KEY, "va": BASE + at, **fields}
    return Request(qp.qpn, Opcode["RC_" + op], qp.epsn + ahead & 0xFFFFFF, swap=swap, compare=compare, **fields)


def write(qp, ahead, data, at=0, **fields):
    return Packet(qp.qpn, Opcode.RC_WRITE_ONLY, qp.epsn + ahead & 0xFFFFFF, data, BASE + at, KEY, len(data), **fields)


def requests(bench, qp, rng, count, depth):
    """Actions of random READs, ATOMICs, SENDs and WRITEs; never more than ``depth`` READs and ATOMICs open."""
    key, pmtu = 0x40 + qp.qpn << 8, 128 << qp.path_mtu
    region = bench.world.region(key, qp.pd, ALL, base=(qp.qpn << 40) + 0xFFFF_E123, length=3 * 4096)
    others = messages(bench, qp, rng, count)
    packets, psn, opened = [], qp.epsn, 0
    groups, group = [], []
    for action in others:  # a message and its receive WQE stay together
        group.append(action)
        if isinstance(action, Packet) and action.opcode.name.split("_")[2] in ("LAST", "ONLY"):
            groups.append(group)
            group = []
    words = [region.base + 13 + 8 * i for i in (0, 1)]  # no READ looks there: it might see a later value (R-ORD-1)
    for group in groups:
        for action in group:
            if isinstance(action, Packet):
                action.psn = psn
                psn = psn + 1 & 0xFFFFFF
            packets.append(action)
        for _ in range(rng.randrange(3)):
            if opened == depth:
                packets.append(("idle",))
                opened = 0
            opened += 1
            if rng.random() < 0.4:
                op = rng.choice([Opcode.RC_CMP_SWAP, Opcode.RC_FETCH_ADD])
                packets.append(Request(qp.qpn, op, psn, va=rng.choice(words), rkey=key, swap=rng.getrandbits(64),
                                       compare=rng.getrandbits(64)))
                psn = psn + 1 & 0xFFFFFF
            else:
                size = rng.choice([0, 1, 7, pmtu - 1, pmtu, pmtu + 1, 2 * pmtu, 3 * pmtu + 5])
                size = min(size, 2 * 4096)
                at = region.base + 4096 + rng.choice([0, rng.randrange(60)]) if size else 0xDEAD_BEEF
                packets.append(Request(qp.qpn, Opcode.RC_READ_REQUEST, psn, va=at if size else 1, rkey=key if size else 0xBAD,
                                       dma_length=size))
                psn = psn + max(1, -(-size // pmtu)) & 0xFFFFFF
        if opened and rng.random() < 0.3:
            packets.append(("idle",))
            opened = 0
    return packets


@rule("R-PSN-3", "R-PSN-4", "R-RES-2", "R-RES-7", "R-ACK-2", "R-ACK-4", "R-MSN-1", "R-AT-2", "R-AT-3", "R-ORD-1")
@pytest.mark.parametrize(("config", "stall", "seed"), [("tiny", 0.3, 1), ("gigabit", 0.1, 2), ("hundred", 0.2, 3)])
def test_traffic(config, stall, seed):
    """Everything mixed on four QPs: answers in PSN order with the right bytes, numbers and completions."""
    rng = seeded(seed)
    bench = ReadBench(config, rng, stall)
    bench.qps[3].path_mtu = 2
    depth = bench.p.max_rd_atomic
    actions = list(interleave(rng, [requests(bench, qp, rng, 5, depth) for qp in bench.qps.values()]))
    bench.run(actions, limit=12000)
    kinds = {a.opcode for a in actions if isinstance(a, Packet)}
    assert {Opcode.RC_READ_REQUEST, Opcode.RC_CMP_SWAP, Opcode.RC_FETCH_ADD} <= kinds
    bench.compare()
    assert not bench.errors


@rule("R-PSN-1", "R-PSN-3", "R-LEN-2", "R-RES-2")
@pytest.mark.parametrize(("mtu", "config"), [(1, "tiny"), (2, "gigabit"), (3, "gigabit"), (4, "hundred"), (5, "hundred")])
def test_lengths(mtu, config):
    """Every PMTU, lengths around its multiples, over page ends, PSNs and MSNs around their wrap; zero bytes need no key."""
    bench, qp, _ = bench_of(mtu, config, 0.05, epsn=lambda rng: 0xFFFFFD)
    qp.path_mtu, qp.msn = mtu, 0xFFFFFE
    pmtu = 128 << mtu
    ahead, actions = 0, []
    for length in (0, 1, pmtu - 1, pmtu, pmtu + 1, 2 * pmtu, 3 * pmtu + 2):
        key = {} if length else {"rkey": 0xBAD, "va": 1}
        actions += [read(qp, ahead, length, at=15 if length < pmtu else 3, **key), ("idle",)]
        ahead += max(1, -(-length // pmtu))
    bench.run([*actions, write(qp, ahead, b"after")], limit=8000, settle=100)
    bench.compare()
    assert len(bench.answers[2]) == ahead + 1


@rule("R-DUP-3", "R-DUP-4", "R-DUP-5", "R-DUP-6", "R-DUP-7", "R-DUP-2")
def test_duplicates():
    """Duplicates of a READ in all parts; what does not fit the saved request is dropped; an ATOMIC is executed once."""
    bench, qp, region = bench_of(4)
    words = {"FETCH_ADD": 0x100, "CMP_SWAP": 0x108}
    good = [
        read(qp, 0, 1000, at=5), ("idle",),
        read(qp, 2, 488, at=517), ("idle",),  # the last two packets
        read(qp, 0, 1000, at=5), ("idle",),  # wider again (R-DUP-4)
        read(qp, 1, 256, at=261), ("idle",),  # one in the middle
        atomic(qp, 4, "FETCH_ADD", words["FETCH_ADD"], 5), ("idle",), write(qp, 5, b"abc", at=0x200), ("idle",),
        atomic(qp, 4, "FETCH_ADD", words["FETCH_ADD"], 5), ("idle",),  # R-DUP-5
        write(qp, 5, b"abc", at=0x200), ("idle",),  # re-ACK
        atomic(qp, 6, "CMP_SWAP", words["CMP_SWAP"], 1, 2), ("idle",),
        read(qp, 7, 10, at=40), ("idle",),
    ]
    dropped = [
        read(qp, 0, 1001, at=5), read(qp, 1, 800, at=261), read(qp, 1, 256, at=260), read(qp, 0, 1000, at=5, rkey=KEY + 1),
        read(qp, -1, 10, at=5), read(qp, 5, 3, at=0x200), atomic(qp, 0, "FETCH_ADD", 5, 1), read(qp, 4, 8, at=0x100),
        atomic(qp, 4, "CMP_SWAP", words["FETCH_ADD"], 9, 9), atomic(qp, 6, "FETCH_ADD", words["CMP_SWAP"], 9),
        atomic(qp, 5, "FETCH_ADD", 0x200, 9), ("idle",),
    ]
    answered = [
        atomic(qp, 4, "FETCH_ADD", words["FETCH_ADD"], 5), ("idle",),  # and what follows it
        read(qp, 7, 10, at=40), ("idle",),
        read(qp, 8, 300, at=1), ("idle",),  # takes the place of the first READ
        read(qp, 0, 1000, at=5), ("idle",),  # no longer known (R-DUP-6)
        atomic(qp, 4, "FETCH_ADD", words["FETCH_ADD"], 5), ("idle",),
    ]
    counts = []
    look = ("call", lambda b: counts.append(len(b.answers[2])))
    bench.run([*good, look, *dropped, look, *answered, write(qp, 10, b"on")], limit=24000, settle=600)
    bench.compare()
    assert counts[0] == counts[1] and not bench.errors
    at = region.where(BASE + words["FETCH_ADD"])
    original = bench.model.saved[2][1][3]
    assert int.from_bytes(bench.world.memory[at : at + 8], "little") == original + 5 & (1 << 64) - 1


@rule("R-DUP-6", "R-DUP-7")
def test_a_request_that_never_was_is_not_known():
    """A duplicate that equals an entry as it is after power-up gets no answer; nor does one when the first request is known."""
    bench, qp, _ = bench_of(13, epsn=lambda rng: 1)
    never = read(qp, -1, 0, rkey=0, va=0)
    bench.run([never, ("idle",), read(qp, 0, 10), ("idle",), never, ("idle",)], settle=150)
    bench.compare()
    assert [a[1] for a in bench.answers[2]] == [1]


@rule("R-DUP-3", "R-PSN-4")
def test_replaced_stream():
    """A duplicate that comes while its READ is being sent: the stream starts again at its PSN, with the right bytes for every
    PSN, and nothing of the old stream comes behind the new one (C33)."""
    bench, qp, _ = bench_of(5, "hundred", 0.1)
    first, again = read(qp, 0, 78 * 256, at=9), read(qp, 3, 75 * 256, at=9 + 3 * 256)

    def on_header(header):
        if header.psn == qp.epsn - 78 & 0xFFFFFF and not bench.model.duplicates:
            bench.send(again)

    bench.on_header = on_header
    bench.run([first, ("idle",), write(qp, 78, b"x")], limit=6000, settle=200)
    answers = bench.answers[2]
    psns = [a[1] - (qp.epsn - 79) & 0xFFFFFF for a in answers if a[0] != Opcode.RC_ACK]
    restart = psns.index(3, psns.index(3) + 1)
    assert psns == [*range(restart), *range(3, 78)] and 7 <= restart < 78
    for _, psn, _, _, payload in answers[:-1]:
        at = BASE + 9 + 256 * (psn - (qp.epsn - 79) & 0xFFFFFF)
        assert payload == bytes(bench.world.memory[a] for a in bench.world.virtual(KEY, at, 256))
    assert [a[0] for a in answers[restart:]] == [
        Opcode.RC_READ_RESP_FIRST, *[Opcode.RC_READ_RESP_MIDDLE] * 73, Opcode.RC_READ_RESP_LAST, Opcode.RC_ACK]
    assert not bench.errors


BAD = {  # name: (rules, what is set up, packet)
    "no_access_read": ("8.1#3 R-RES-2", lambda b, q: setattr(q, "access", int(Access.REMOTE_WRITE)), lambda q: read(q, 1, 0)),
    "no_access_atomic": ("8.1#3 R-AT-1", lambda b, q: setattr(q, "access", int(Access.REMOTE_READ)),
                         lambda q: atomic(q, 1, "FETCH_ADD", 8, 1)),
    "no_resources": ("8.1#4 R-DUP-6", lambda b, q: setattr(b, "limit", 0) or setattr(b.model, "limit", 0),
                     lambda q: read(q, 1, 8)),
    "huge": ("8.1#6 R-LEN-2", None, lambda q: read(q, 1, (1 << 31) + 1)),
    "read_payload": ("8.1#6 R-LEN-4", None, lambda q: read(q, 1, 8, payload=b"1234")),
    "atomic_payload": ("8.1#6 R-LEN-4", None, lambda q: atomic(q, 1, "CMP_SWAP", 8, 1, payload=b"1234")),
    "unaligned": ("8.1#9 R-AT-1", None, lambda q: atomic(q, 1, "FETCH_ADD", 4, 1)),
    "unaligned_key": ("8.1#9 R-AT-1", None, lambda q: atomic(q, 1, "CMP_SWAP", 4, 1, rkey=0xBAD)),  # before the key
    "key": ("8.1#7 R-RES-1 R-MR-1", None, lambda q: read(q, 1, 8, rkey=KEY + 1)),
    "bounds": ("8.1#7 R-RES-1 R-MR-2", None, lambda q: read(q, 1, 5 * 4096, at=1)),  # nothing is sent
    "rights_read": ("8.1#7", lambda b, q: b.world.region(0xA00, q.pd, ALL & ~4, BASE, 4096), lambda q: read(q, 1, 8, rkey=0xA00)),
    "rights_atomic": ("8.1#7 R-AT-1", lambda b, q: b.world.region(0xA00, q.pd, ALL & ~8, BASE, 4096),
                      lambda q: atomic(q, 1, "FETCH_ADD", 8, 1, rkey=0xA00)),
    "atomic_key": ("8.1#7 R-AT-1", None, lambda q: atomic(q, 1, "CMP_SWAP", 8, 1, rkey=0xBAD)),
    "pd": ("8.1#7 R-MR-4", lambda b, q: b.world.region(0xA00, q.pd + 1, ALL, BASE, 4096), lambda q: read(q, 1, 8, rkey=0xA00)),
}


@rule("8.2")
@pytest.mark.parametrize("case", [pytest.param(name, marks=rule(*ids.split())) for name, (ids, *_) in BAD.items()])
def test_fatal(case):
    """One NAK with the request's PSN, the QP goes to ERR, memory is as it was, other QPs go on."""
    bench, qp, _ = bench_of(len(case))
    _, setup, bad = BAD[case]
    if setup:
        setup(bench, qp)
    other = bench.qps[3]
    bench.world.region(0xB00, other.pd, ALL, BASE, 4096)
    begin = write(qp, 0, b"begin")
    if not qp.access & int(Access.REMOTE_WRITE):
        begin = Packet(qp.qpn, Opcode.RC_SEND_ONLY, qp.epsn, b"begin")
    actions = [("post", qp, [(BASE, 64, KEY)]), begin, bad(qp), write(qp, 2, b"late"),
               Packet(3, Opcode.RC_WRITE_ONLY, other.epsn, b"other", BASE, 0xB00, 5)]
    bench.run(actions, settle=100)
    bench.compare()
    assert bench.errors == [2] and [a[3] for a in bench.answers[2]][-1] in (0x61, 0x62)


@rule("R-DUP-6", "8.1#4", "R-REQ-4")
def test_resources():
    """max_dest_rd_atomic 2: two large READs and a third request, which is one too many; the first two are answered first."""
    bench, qp, _ = bench_of(6, limit=2)
    bench.run([read(qp, 0, 2560), read(qp, 10, 2560, at=7), read(qp, 20, 8)], settle=200)
    assert [a[1] - (qp.epsn - 21) & 0xFFFFFF for a in bench.answers[2]] == [*range(20), 20]
    assert bench.answers[2][-1][3] == 0x61 and bench.answers[2][-1][2] == 2 and bench.errors == [2]


@rule("R-RES-1", "R-DUP-7", "8.2")
def test_key_lost():
    """The MR vanishes while a READ is answered: NAK remote access with the PSN of the packet, nothing behind it. While a
    duplicate is answered: silence, and the QP goes on."""
    bench, qp, _ = bench_of(7)
    other = bench.world.region(0xA00, qp.pd, ALL, base=0x7000, length=4096)

    def lose(b):
        b.bad_from[KEY] = BASE + 520

    actions = [
        read(qp, 0, 1000), ("idle",), ("call", lose), read(qp, 0, 1000), ("idle",), write(qp, 4, b"a"),
        read(qp, 5, 600, at=1), ("idle",), read(qp, 8, 20, rkey=0xA00, va=0x7001), ("idle",), read(qp, 9, 1000), ("idle",),
        write(qp, 13, b"b"),
    ]
    bench.run(actions, limit=6000, settle=200)
    start = qp.epsn - 14
    got = [(a[1] - start & 0xFFFFFF, a[3]) for a in bench.answers[2]]
    assert got == [*((i, 0x1F) for i in range(4)), *((i, 0x1F) for i in (0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11)), (12, 0x62)]
    assert bench.errors == [2] and other


@rule("R-ORD-1", "R-AT-4", "R-ACK-3", "R-RES-7")
@pytest.mark.parametrize("config", ["tiny", "gigabit", "hundred"])
def test_visibility(config):
    """A READ and an ATOMIC see the WRITEs before them although those reach memory late (C117); what comes behind an ATOMIC for
    its word, from any QP, is written behind it."""
    bench, qp, region = bench_of(8, config)
    bench.write_delay = (60, 100)
    other = bench.qps[3]
    bench.world.regions[0xB00] = region.__class__(0xB00, other.pd, ALL, BASE, region.length, region.phys, region.pages)
    word, value = 0x208, bytes(range(1, 9))
    actions = [
        write(qp, 0, value, at=word), atomic(qp, 1, "FETCH_ADD", word, 0xFF), ("wait", 1),
        Packet(3, Opcode.RC_WRITE_ONLY, other.epsn, b"zz", BASE + word + 6, 0xB00, 2), ("idle",),
        write(qp, 2, b"second", at=word), read(qp, 3, 8, at=word), ("idle",),
        write(qp, 4, bytes(40), at=word - 16), atomic(qp, 5, "CMP_SWAP", word, 0x1122334455667788, 0), ("idle",),
        atomic(qp, 6, "CMP_SWAP", word, 5, 0), write(qp, 7, b"end", at=word + 8),
    ]
    bench.run(actions, limit=6000, settle=150)
    # The model takes requests in the order they were sent.
    bench.compare()
    got = [a[4] for a in bench.answers[2] if a[0] == Opcode.RC_ATOMIC_ACK]
    assert got == [int.from_bytes(value, "little"), 0, 0x1122334455667788]


@rule("R-AT-3", "R-OPC-3")
def test_atomics_take_all_64_bits():
    """A compare value that differs in one bit of any byte changes nothing; sums carry into every byte and wrap at 2^64."""
    bench, qp, _ = bench_of(9)
    word, value = 0x300, 0x0123_4567_89AB_CDEF
    actions = [write(qp, 0, value.to_bytes(8, "little"), at=word)]
    for i in range(8):
        actions += [atomic(qp, 1 + i, "CMP_SWAP", word, i, value ^ 1 << 9 * i), ("idle",)]
    actions += [atomic(qp, 9, "CMP_SWAP", word, (1 << 64) - 1, value), ("idle",)]
    expected = [value] * 9
    now = (1 << 64) - 1
    for i, more in enumerate((1, 0xFFFF_FFFF, 1, 0xFF << 56, 1 << 56)):
        actions += [atomic(qp, 10 + i, "FETCH_ADD", word, more), ("idle",)]
        expected.append(now)
        now = now + more & (1 << 64) - 1
    actions += [read(qp, 15, 8, at=word)]
    bench.run(actions, limit=8000, settle=150)
    bench.compare()
    assert [a[4] for a in bench.answers[2] if a[0] == Opcode.RC_ATOMIC_ACK] == expected


@rule("R-ACK-2", "R-ACK-4")
def test_acks_wait():
    """ACKs behind unanswered READs: the newest waits in its place, before the next READ's response; a NAK waits too."""
    bench, qp, _ = bench_of(9, stall=0.0)
    done = bench.ports["done"]
    actions = [
        ("call", lambda b: setattr(done, "hold", True)),
        write(qp, 0, b"0"), read(qp, 1, 300), write(qp, 3, b"1"), write(qp, 4, b"2"), read(qp, 5, 20), write(qp, 6, b"3"),
        write(qp, 10, b"gap"), ("wait", 250), ("call", lambda b: setattr(done, "hold", False)), ("idle",), write(qp, 7, b"4"),
    ]
    bench.run(actions, settle=100)
    start = qp.epsn - 8
    got = [(a[0].name[3:], a[1] - start & 0xFFFFFF, a[2], a[3]) for a in bench.answers[2]]
    assert got == [
        ("ACK", 0, 1, 0x1F), ("READ_RESP_FIRST", 1, 2, 0x1F), ("READ_RESP_LAST", 2, 2, 0x1F), ("ACK", 4, 4, 0x1F),
        ("READ_RESP_ONLY", 5, 5, 0x1F), ("ACK", 7, 6, 0x60), ("ACK", 7, 7, 0x1F)]


@rule("R-QP-4")
def test_drain():
    """A flush of a QP with a long READ under way: it stops, `drained` comes when its last packet has left, and after a reset
    nothing of the old life is known."""
    bench, qp, _ = bench_of(10, "hundred", 0.1, length=31 * 4096)

    def to_error(b):
        b.ports["ctx"].queue.append(b.state_write(2, 6))
        b.later.append((b.cycle + 20, "flush", {"qpn": 2}))

    seen = []

    def again(b):
        seen.append((b.drained, len(b.answers[2])))
        qp.epsn = 0x1234
        b.ports["ctx"].queue.extend(b.context_writes(qp))

    bench.run([read(qp, 0, 30 * 4096), ("wait", 100), ("call", to_error), ("wait", 700), ("call", again), ("wait", 60),
               Packet(2, Opcode.RC_READ_REQUEST, 0x1230, va=BASE, rkey=KEY, dma_length=1),
               Packet(2, Opcode.RC_WRITE_ONLY, 0x1234, b"new", BASE, KEY, 3)], settle=100)
    assert seen[0][0] == 1 and 0 < seen[0][1] < 200
    assert len(bench.answers[2]) == seen[0][1] + 1 and bench.answers[2][-1][:2] == [Opcode.RC_ACK, 0x1234]


@pytest.mark.parametrize(("length", "limit"), [(16 * 256, 8), (64, 16)])
def test_rate(length, limit):
    """512 bits: cycles per response packet of long READs, and per 64-byte READ with 16 under way; 100 cycles memory latency."""
    bench, qp, _ = bench_of(11, "hundred", 0.0)
    bench.latency = (11, 11)
    packets = max(1, length // 256)
    requests = 4 if packets > 1 else 16
    reads = [read(qp, i * packets, length) for i in range(requests)]
    bench.run([("call", lambda b: [b.send(packet) for packet in reads])], settle=150)
    bench.compare()
    times = bench.times["header"]
    spacing = (times[-1] - times[0]) / (len(times) - 1)
    print(f"{length} bytes: {spacing:.2f} cycles a packet, {times[0] - bench.times['request'][0]} to the first")
    assert len(times) == requests * packets and spacing <= limit


@rule("R-RES-7")
def test_fairness():
    """Two QPs with long READs: neither waits for the other's end."""
    bench, qp, _ = bench_of(12, stall=0.0)
    other = bench.qps[3]
    bench.world.region(0xB00, other.pd, ALL, BASE, 4 * 4096)
    bench.run([read(qp, 0, 40 * 256), read(other, 0, 40 * 256, rkey=0xB00)], settle=100)
    bench.compare()
    order = bench.order
    first_end = min(max(i for i, q in enumerate(order) if q == qpn) for qpn in (2, 3))
    assert order[:first_end].count(2) > 30 and order[:first_end].count(3) > 30
