"""The responder's bench with READ and ATOMIC: response ports, memory effects at the write response, a model of the answers."""

import itertools
from dataclasses import dataclass

from rnic.abi import RESPONDER_CFG, RESPONDER_HOT, Access, CtxTable
from rnic.config import CONFIGS
from rnic.records import XlateStatus
from rnic.wire.opcode import OPCODES, Kind, Opcode

from .responder_bench import ACCESS, ACK, INVALID, PAGE, Bench, Model, Packet, Port

ATOMICS = (Kind.CMP_SWAP, Kind.FETCH_ADD)
MASK64 = (1 << 64) - 1


@dataclass
class Request(Packet):
    """A packet with AtomicETH operands; ``again`` says that it is a duplicate the model must answer."""

    swap: int = 0
    compare: int = 0


class ReadModel(Model):
    """Adds READ and ATOMIC. ``answers`` of a QP in order: (opcode, PSN, MSN, syndrome, payload or original value)."""

    def __init__(self, world, qps):
        super().__init__(world, qps)
        self.answers = {qpn: [] for qpn in qps}
        self.limit = 4
        self.saved = {qpn: [] for qpn in qps}  # (packet, PSNs, MSN, original value)

    def answer(self, qp, syndrome, psn):
        super().answer(qp, syndrome, psn)
        self.answers[qp.qpn].append((Opcode.RC_ACK, psn, qp.msn, syndrome, None))

    def respond(self, qp, va, rkey, length, psn, msn):
        pmtu = 128 << qp.path_mtu
        count = max(1, -(-length // pmtu))
        for i in range(count):
            take = min(pmtu, length - i * pmtu)
            payload = bytes(self.memory[a] for a in self.world.virtual(rkey, va + i * pmtu, take)) if take else b""
            name = "ONLY" if count == 1 else "FIRST" if i == 0 else "LAST" if i == count - 1 else "MIDDLE"
            self.answers[qp.qpn].append((Opcode[f"RC_READ_RESP_{name}"], (psn + i) & 0xFFFFFF, msn, ACK, payload))

    def word(self, packet) -> int:
        return self.world.virtual(packet.rkey, packet.va, 1)[0]

    def packet(self, packet):
        qp, kind = self.qps[packet.qpn], OPCODES[packet.opcode].kind
        if qp.dead or kind not in (Kind.READ_REQ, *ATOMICS):
            return super().packet(packet)
        distance = (packet.psn - qp.epsn) % (1 << 24)
        if distance >= 1 << 23:
            self.duplicates += 1
            return self.again(qp, packet, kind)
        if distance:
            return super().packet(packet)
        needed = Access.REMOTE_READ if kind == Kind.READ_REQ else Access.REMOTE_ATOMIC
        rkey, length = packet.rkey, packet.dma_length if kind == Kind.READ_REQ else 8
        aligned = kind == Kind.READ_REQ or not packet.va % 8
        if needed & ~qp.access or not self.limit or length > 1 << 31 or packet.payload or not aligned:
            return self.fatal(qp, packet, INVALID, None)
        if length and self.world.check(rkey, qp.pd, needed, packet.va, length, 0) != XlateStatus.OK:
            return self.fatal(qp, packet, ACCESS, None)
        count = 1
        qp.msn = (qp.msn + 1) & 0xFFFFFF
        qp.nak_state = 0
        original = None
        if kind == Kind.READ_REQ:
            count = max(1, -(-length // (128 << qp.path_mtu)))
            self.respond(qp, packet.va, rkey, length, packet.psn, qp.msn)
        else:
            at = self.word(packet)
            original = int.from_bytes(self.memory[at : at + 8], "little")
            new = original + packet.swap & MASK64 if kind == Kind.FETCH_ADD else packet.swap
            if kind == Kind.FETCH_ADD or original == packet.compare:
                self.memory[at : at + 8] = new.to_bytes(8, "little")
            self.answers[qp.qpn].append((Opcode.RC_ATOMIC_ACK, packet.psn, qp.msn, ACK, original))
        if qp.ack_psn is None:
            qp.ack_psn = (qp.epsn - 1) & 0xFFFFFF
        qp.epsn = (qp.epsn + count) & 0xFFFFFF
        self.saved[qp.qpn].append((packet, count, qp.msn, original))

    def again(self, qp, packet, kind):
        """A duplicate: answered from the saved requests, everything behind it too."""
        saved = self.saved[qp.qpn][-self.world_depth :]
        for i, (old, count, msn, original) in enumerate(saved):
            offset = (packet.psn - old.psn) & 0xFFFFFF
            if old.opcode != packet.opcode or old.rkey != packet.rkey or offset >= count:
                continue
            skip = offset * (128 << qp.path_mtu)
            if kind == Kind.READ_REQ:
                if packet.va != old.va + skip or skip + packet.dma_length > old.dma_length:
                    continue
                self.respond(qp, packet.va, packet.rkey, packet.dma_length, packet.psn, msn)
            else:
                self.answers[qp.qpn].append((Opcode.RC_ATOMIC_ACK, old.psn, msn, ACK, original))
            for later, _, later_msn, later_original in saved[i + 1 :]:
                if later.opcode == Opcode.RC_READ_REQUEST:
                    self.respond(qp, later.va, later.rkey, later.dma_length, later.psn, later_msn)
                else:
                    self.answers[qp.qpn].append((Opcode.RC_ATOMIC_ACK, later.psn, later_msn, ACK, later_original))
            return

    world_depth = 4


class _EffectPort(Port):
    """``done`` of a write client: the bytes reach memory in the cycle in which its response is offered, some after the data."""

    def __init__(self, bench, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bench = bench
        self.effects = []  # (cycle, address, bytes)

    def drive(self, ctx):
        while self.effects and self.effects[0][0] <= self.bench.cycle and not self.hold:
            _, address, raw = self.effects.pop(0)
            self.bench.world.memory[address : address + len(raw)] = raw
            self.queue.append(int(any(a in self.bench.bad_writes for a in range(address, address + len(raw)))))
        super().drive(ctx)


class ReadBench(Bench):
    """``answers`` of a QP: as in the model, in the order of the headers on both ways out."""

    def __init__(self, config: str, rng, stall: float = 0.3, limit: int | None = None, **more):
        super().__init__(CONFIGS[config], rng, stall, **more)
        d = self.dut
        self.model = ReadModel(self.world, self.qps)
        self.model.world_depth = self.p.max_rd_atomic
        self.model.limit = self.limit = self.p.max_rd_atomic if limit is None else limit
        for name, stream, feeds in [
            ("response_answer", d.xlate_response.response, True), ("response_word", d.read_response.word, True),
            ("atomic_word", d.read_atomic.word, True), ("atomic_accepted", d.write_atomic.accepted, True),
            ("response_ask", d.xlate_response.request, False), ("response_read", d.read_response.command, False),
            ("header", d.response_header, False), ("payload", d.response_payload, False),
            ("atomic_read", d.read_atomic.command, False), ("atomic_write", d.write_atomic.command, False),
            ("atomic_data", d.write_atomic.data, False),
        ]:
            self.ports[name] = Port(stream, rng, stall, feeds=feeds)
        self.ports["done"] = _EffectPort(self, d.write.done, rng, stall, feeds=True)
        self.ports["atomic_done"] = _EffectPort(self, d.write_atomic.done, rng, stall, feeds=True)
        self.write_delay = (1, 40)
        self.answers = {qpn: [] for qpn in self.qps}
        self.headers: list = []  # with payload still to come
        self.payload = b""
        self.atomic_command = self.atomic_beat = None
        self.bad_from: dict[int, int] = {}  # rkey: va from which translation for responses fails
        self.on_header = lambda header: None
        self.order: list[int] = []  # QPN of each header

    def context_writes(self, qp):
        cfg = RESPONDER_CFG.words(state=qp.state, type=0, path_mtu=qp.path_mtu, access=qp.access, pd=qp.pd, log_rq=qp.log_rq,
                                  cqn=qp.cqn, min_rnr_timer=qp.rnr_timer, max_dest_rd_atomic=self.limit)
        hot = RESPONDER_HOT.words(epsn=qp.epsn, msn=qp.msn, rq_index=qp.taken)
        rows = [(CtxTable.RESPONDER_HOT, i, w) for i, w in enumerate(hot)]
        rows += [(CtxTable.RQ_PRODUCER, 0, qp.produced)]
        rows += [(CtxTable.RESPONDER_CFG, i, w) for i, w in enumerate(cfg)]
        return [{"table": t, "index": qp.qpn, "word": i, "bytes": 15, "data": w} for t, i, w in rows]

    def send(self, packet):
        super().send(packet)
        if isinstance(packet, Request):
            self.ports["request"].queue[-1] |= {"swap": packet.swap, "compare": packet.compare}

    def _words(self, port, address, length):
        """The raw bus words of a read."""
        lanes = self.p.lanes
        at, end = address, address + length
        while at < end:
            base = at - at % lanes
            count = min(end, base + lanes) - at
            self.in_order(port, {"data": int.from_bytes(self.world.memory[base : base + lanes], "little"), "first": at % lanes,
                                 "count": count, "last": int(at + count == end), "err": 0})
            at += count

    def react(self, name, item):
        if name == "response_ask":
            self.times[name].append(self.cycle)
            answer = self.world.translate(item)
            if int(item.va) >= self.bad_from.get(int(item.key), 1 << 64):
                answer |= {"status": XlateStatus.KEY, "span": 1}
            self.soon("response_answer", answer)
        elif name in ("response_read", "atomic_read"):
            self._words(name.replace("read", "word"), int(item.address), int(item.length))
        elif name == "header":
            self.times[name].append(self.cycle)
            qpn, opcode = int(item.qpn), Opcode(int(item.opcode))
            self.order.append(qpn)
            assert opcode in (Opcode.RC_ACK, Opcode.RC_ATOMIC_ACK) or OPCODES[opcode].kind == Kind.READ_RESP
            entry = [opcode, int(item.psn), int(item.msn), int(item.syndrome), int(item.length)]
            self.answers[qpn].append(entry)
            if opcode == Opcode.RC_ATOMIC_ACK:
                entry[4] = int(item.swap)
            elif opcode == Opcode.RC_ACK:
                entry[4] = None
            elif item.length:
                self.headers.append(entry)
            else:
                entry[4] = b""
            self._match()
            self.on_header(item)
        elif name == "payload":
            count = int(item.keep).bit_count()
            self.payload += int(item.data).to_bytes(self.p.lanes, "little")[:count]
            if item.last:
                self.headers.append(self.payload)
                self.payload = b""
                self._match()
        elif name == "atomic_write":
            self.atomic_command = int(item.address)
            assert item.length == 8
        elif name == "atomic_data":
            assert item.keep == 255 and item.last
            self.atomic_beat = int(item.data) & MASK64
        else:
            super().react(name, item)
            if name == "ack":
                opcode = Opcode.RC_ATOMIC_ACK if item.atomic else Opcode.RC_ACK
                self.answers[int(item.qpn)].append([opcode, int(item.psn), int(item.msn), int(item.syndrome),
                                                    int(item.original) if item.atomic else None])
        if self.atomic_command is not None and self.atomic_beat is not None:
            self.in_order("atomic_accepted", 1)
            self.ports["atomic_done"].effects.append(
                (self.cycle + self.rng.randint(*self.write_delay), self.atomic_command, self.atomic_beat.to_bytes(8, "little")))
            self.atomic_command = self.atomic_beat = None

    def _match(self):
        """Joins the oldest header and the oldest payload, whichever came first."""
        entries = [h for h in self.headers if isinstance(h, list)]
        payloads = [h for h in self.headers if isinstance(h, bytes)]
        for entry, payload in zip(entries, payloads, strict=False):
            assert entry[4] == len(payload)
            entry[4] = payload
        done = min(len(entries), len(payloads))
        self.headers = entries[done:] + payloads[done:]

    def _run_writes(self, p):
        while self.commands and any(beat.last for beat in self.beats):
            address, length = self.commands.popleft()
            raw = b""
            while True:
                beat = self.beats.pop(0)
                raw += int(beat.data).to_bytes(p.lanes, "little")[: int(beat.keep).bit_count()]
                if beat.last:
                    break
            assert len(raw) == length
            self.in_order("accepted", 1)
            port = self.ports["done"]
            at = max([self.cycle + self.rng.randint(*self.write_delay), *(e[0] for e in port.effects[-1:])])
            port.effects.append((at, address, raw))

    def quiet(self):
        return super().quiet() and not any(self.ports[n].effects for n in ("done", "atomic_done"))

    def compare(self, *, cqes: bool = True):
        """All answers are those of the model, ACKs between two requests' answers perhaps replaced by the last of them."""
        self.model.finish()
        for qpn in self.qps:
            got = [tuple(a) for a in self.answers[qpn]]
            match(got, self.model.answers[qpn], f"QP {qpn}")
            if cqes:
                assert self.cqes[qpn] == self.model.cqes[qpn], f"QP {qpn}"
        assert not self.cells and not self.headers
        assert self.world.memory == self.model.memory
        assert sorted(self.errors) == sorted(q.qpn for q in self.qps.values() if q.dead)


def match(got, want, what):
    """Same answers; of a run of plain ACKs only the last must be there (R-ACK-2)."""
    def plain(a):
        return a[0] == Opcode.RC_ACK and a[3] == ACK

    def runs(answers):
        return [(key, list(group)) for key, group in itertools.groupby(answers, plain)]

    gaps = runs(got), runs(want)
    assert [k for k, _ in gaps[0]] == [k for k, _ in gaps[1]], f"{what}: {short(got)} instead of {short(want)}"
    for (acks, mine), (_, theirs) in zip(*gaps, strict=True):
        if acks:
            assert mine[-1] == theirs[-1] and all(a in theirs for a in mine), f"{what}: {short(mine)} instead of {short(theirs)}"
        else:
            assert mine == theirs, f"{what}: {short(mine)} instead of {short(theirs)}"


def short(answers):
    return [(a[0].name[3:], hex(a[1]), a[2], hex(a[3]), a[4] if isinstance(a[4], int) or not a[4] else a[4][:8].hex())
            for a in answers]


__all__ = ["ATOMICS", "PAGE", "ReadBench", "ReadModel", "Request", "match"]
