"""What surrounds the responder in its unit tests: host memory, translation, packet store, command engine; and a model.

`Bench` drives every stream of a `Responder` with random stalls; `Model` says in plain Python what must come out.
"""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

from amaranth.hdl import Cat, Shape, Value

from rnic.abi import RECV_WQE, RESPONDER_CFG, RESPONDER_HOT, SGE, Access, CtxTable, QpState, WcOpcode, WcStatus
from rnic.abi.queues import CqeFlags
from rnic.config import Params
from rnic.records import XlateStatus
from rnic.responder.responder import Responder
from rnic.wire.opcode import OPCODES, Kind, Opcode, Transport

from .streams import shared, simulate

PAGE = 4096
ACK, SEQ_NAK, INVALID, ACCESS, OPERATIONAL, RNR = 0x1F, 0x60, 0x61, 0x62, 0x63, 0x20


@dataclass
class Region:
    """A memory region (or ring): ``pages`` None means contiguous from ``phys``."""

    key: int
    pd: int
    rights: int
    base: int
    length: int
    phys: int = 0
    pages: list[int] | None = None

    def where(self, va: int) -> int:
        if self.pages is None:
            return self.phys + va - self.base
        page = (va >> 12) - (self.base >> 12)
        return self.pages[page] + va % PAGE


@dataclass
class Packet:
    qpn: int
    opcode: Opcode
    psn: int
    payload: bytes = b""
    va: int = 0
    rkey: int = 0
    dma_length: int = 0
    imm: int = 0
    ackreq: int = 1
    solicited: int = 0
    pad: int | None = None

    @property
    def pad_count(self) -> int:
        return -len(self.payload) % 4 if self.pad is None else self.pad


@dataclass
class Qp:
    qpn: int
    pd: int
    cqn: int
    epsn: int
    log_rq: int = 3
    path_mtu: int = 1
    access: int = int(Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC)
    rnr_timer: int = 5
    state: QpState = QpState.RTS
    ring_phys: int = 0
    # model state
    msn: int = 0
    message: Kind | None = None
    produced: int = 0
    taken: int = 0
    completed: int = 0
    ring: dict = field(default_factory=dict)  # counter: (SGEs, physical address)
    current: list = field(default_factory=list)
    offset: int = 0
    va: int = 0
    rkey: int = 0
    resid: int = 0
    total: int = 0
    nak_state: int = 0
    ack_psn: int | None = None
    dead: bool = False


class World:
    """Physical memory and regions."""

    def __init__(self, rng: random.Random, pages: int = 64):
        self.rng = rng
        self.memory = bytearray(rng.randbytes(pages * PAGE))
        self.free = [PAGE * i for i in range(1, pages)]
        self.regions: dict[int, Region] = {}
        self.rings: dict[int, Region] = {}
        self.unreadable: set[int] = set()  # physical addresses of RWQEs whose read fails
        self.gone: set[int] = set()  # keys that were invalidated
        self.misses = lambda key: False  # does a `hit_only` translation of this key miss?

    def pages(self, count: int, contiguous: bool = False) -> list[int]:
        if contiguous:
            run = self.free[-count:]
            assert run[-1] - run[0] == (count - 1) * PAGE
            del self.free[-count:]
            return run
        return [self.free.pop(self.rng.randrange(0, len(self.free) // 2)) for _ in range(count)]

    def region(self, key: int, pd: int, rights: int, base: int, length: int, contiguous: bool = False) -> Region:
        count = (base % PAGE + length + PAGE - 1) // PAGE
        pages = self.pages(count, contiguous)
        region = Region(key, pd, rights, base, length,
                        pages[0] + (base % PAGE if not contiguous else 77), None if contiguous else pages)
        self.regions[key] = region
        return region

    def check(self, key: int, pd: int, rights: int, va: int, length: int, ring: int, gone=frozenset()) -> XlateStatus:
        region = (self.rings if ring else self.regions).get(key)
        if region is None or key in gone:
            return XlateStatus.KEY
        if not ring and region.pd != pd:
            return XlateStatus.PD
        if not ring and rights & ~region.rights:
            return XlateStatus.RIGHTS
        if va < region.base or va + length > region.base + region.length:
            return XlateStatus.BOUNDS
        return XlateStatus.OK

    def translate(self, request) -> dict:
        region = (self.rings if request.ring else self.regions).get(int(request.key))
        va, length = int(request.va), int(request.length)
        if request.invalidate and region is not None:
            va, length = region.base, 1
        status = self.check(int(request.key), int(request.pd), int(request.rights), va, length, int(request.ring), self.gone)
        if status != XlateStatus.OK or region is None or request.invalidate:
            if status == XlateStatus.OK:
                self.gone.add(int(request.key))
            return {"tag": int(request.tag), "status": status, "address": 0xDEAD, "span": 1}
        if request.hit_only and self.misses(int(request.key)):
            return {"tag": int(request.tag), "status": XlateStatus.MISS, "address": 0xDEAD, "span": 1}
        address = region.where(int(request.va))
        span = min(int(request.length), PAGE - address % PAGE)
        return {"tag": int(request.tag), "status": status, "address": address, "span": span}

    def virtual(self, key: int, va: int, length: int) -> list[int]:
        """Physical address of each byte."""
        return [self.regions[key].where(va + i) for i in range(length)]


class Model:
    """The responder of rules.md 8 for RC SEND and WRITE, one packet at a time."""

    def __init__(self, world: World, qps: dict[int, Qp]):
        self.world, self.qps = world, qps
        self.memory = bytearray(world.memory)
        self.acks: dict[int, list] = defaultdict(list)  # (syndrome, psn, msn)
        self.cqes: dict[int, list] = defaultdict(list)
        self.duplicates = self.out_of_sequence = 0
        self.gone: set[int] = set()  # keys that were invalidated

    def post(self, qp: Qp, sges: list[tuple[int, int, int]]) -> tuple[int, bytes]:
        """A receive WQE; returns its physical address and bytes."""
        raw = sum(SGE.pack_int(addr=a, length=n, lkey=k) << 128 * i for i, (a, n, k) in enumerate(sges))
        at = qp.ring_phys + qp.produced % (1 << qp.log_rq) * RECV_WQE.size
        qp.ring[qp.produced] = (sges, at)
        qp.produced = (qp.produced + 1) % 65536
        self.memory[at : at + 64] = raw.to_bytes(64, "little")
        return at, raw.to_bytes(64, "little")

    def complete(self, qp: Qp, index: int, status, **more) -> None:
        assert index == qp.completed
        qp.completed = (qp.completed + 1) % 65536
        self.cqes[qp.qpn].append({"wqe_counter": index, "status": WcStatus(status), "cqn": qp.cqn, **more})

    def finish(self) -> None:
        """Flush what is left on dead QPs."""
        for qp in self.qps.values():
            while qp.dead and qp.completed != qp.produced:
                self.complete(qp, qp.completed, WcStatus.WR_FLUSH_ERR)

    def answer(self, qp: Qp, syndrome: int, psn: int) -> None:
        self.acks[qp.qpn].append((syndrome, psn, qp.msn))

    def fatal(self, qp: Qp, packet: Packet, syndrome: int, in_use: int | None, status=WcStatus.LOC_QP_OP_ERR) -> None:
        self.answer(qp, syndrome, packet.psn)
        if in_use is not None:
            self.complete(qp, in_use, status)
        qp.dead = True

    def packet(self, packet: Packet) -> None:
        qp = self.qps[packet.qpn]
        info = OPCODES[packet.opcode]
        if qp.dead or qp.state not in (QpState.RTR, QpState.RTS, QpState.SQD, QpState.SQE):
            return
        distance = (packet.psn - qp.epsn) % (1 << 24)
        if distance >= 1 << 23:
            self.duplicates += 1
            if info.kind in (Kind.SEND, Kind.WRITE):
                self.answer(qp, ACK, (qp.epsn - 1) % (1 << 24) if qp.ack_psn is None else qp.ack_psn)
            return
        if distance:
            self.out_of_sequence += 1
            if qp.nak_state == 0:
                self.answer(qp, SEQ_NAK, qp.epsn)
                qp.nak_state = 1
            return
        size, pmtu = len(packet.payload), 128 << qp.path_mtu
        send_in_use = (qp.taken - 1) % 65536 if qp.message == Kind.SEND else None
        if (qp.message is not None) if info.starts else (qp.message != info.kind):
            return self.fatal(qp, packet, INVALID, send_in_use)
        needed = {Kind.WRITE: Access.REMOTE_WRITE, Kind.READ_REQ: Access.REMOTE_READ, Kind.CMP_SWAP: Access.REMOTE_ATOMIC,
                  Kind.FETCH_ADD: Access.REMOTE_ATOMIC}.get(info.kind, 0)
        if needed & ~qp.access or info.kind not in (Kind.SEND, Kind.WRITE):
            return self.fatal(qp, packet, INVALID, send_in_use)
        if info.takes_rwqe and qp.taken == qp.produced:
            qp.nak_state = 2
            return self.answer(qp, RNR | qp.rnr_timer, packet.psn)
        index = qp.taken if info.takes_rwqe else (qp.taken - 1) % 65536
        if info.kind == Kind.SEND:
            send_in_use = index
        legal = info.payload_ok(size, pmtu) and (size + packet.pad_count) % 4 == 0
        if info.first or info.middle:
            legal = legal and packet.pad_count == 0
        legal = legal and not (info.has_reth and packet.dma_length > 1 << 31)
        if not legal:
            return self.fatal(qp, packet, INVALID, send_in_use)
        targets: list[int] = []
        if info.kind == Kind.WRITE:
            if info.starts:
                qp.va, qp.rkey, qp.resid, qp.total = packet.va, packet.rkey, packet.dma_length, packet.dma_length
            if qp.resid:
                if self.world.check(qp.rkey, qp.pd, Access.REMOTE_WRITE, qp.va, qp.resid, 0, self.gone) != XlateStatus.OK:
                    return self.fatal(qp, packet, ACCESS, None)
            good = (size == qp.resid) if info.ends else (qp.resid > pmtu)
            if not good:
                return self.fatal(qp, packet, INVALID, None)
            targets = self.world.virtual(qp.rkey, qp.va, size) if size else []
            qp.va += size
            qp.resid -= size
        else:
            if info.starts:
                qp.offset = 0
                sges, at = qp.ring[index]
                if at in self.world.unreadable:
                    return self.fatal(qp, packet, OPERATIONAL, index)
                qp.current = sges
            pieces, left, at = [], size, qp.offset
            for address, length, key in qp.current:
                if at >= length:
                    at -= length
                    continue
                take = min(left, length - at)
                if take:
                    pieces.append((key, address + at, take))
                left -= take
                at = 0
            if left:
                return self.fatal(qp, packet, INVALID, index, WcStatus.LOC_LEN_ERR)
            for key, va, count in pieces:
                if self.world.check(key, qp.pd, Access.LOCAL_WRITE, va, count, 0, self.gone) != XlateStatus.OK:
                    return self.fatal(qp, packet, OPERATIONAL, index, WcStatus.LOC_PROT_ERR)
                targets += self.world.virtual(key, va, count)
            qp.offset += size
        if info.has_ieth:  # check 12: no NAK
            ended = self.world.regions.get(packet.imm)
            base = 0 if ended is None else ended.base
            if self.world.check(packet.imm, qp.pd, Access.REMOTE_INVALIDATE, base, 1, 0, self.gone) != XlateStatus.OK:
                self.complete(qp, index, WcStatus.LOC_QP_OP_ERR)
                qp.dead = True
                return
            self.gone.add(packet.imm)
        for target, byte in zip(targets, packet.payload, strict=True):
            self.memory[target] = byte
        qp.epsn = (qp.epsn + 1) % (1 << 24)
        qp.ack_psn = packet.psn
        qp.nak_state = 0
        qp.message = None if info.ends else info.kind
        if info.takes_rwqe:
            qp.taken = (qp.taken + 1) % 65536
        if info.ends:
            qp.msn = (qp.msn + 1) % (1 << 24)
        if packet.ackreq:
            self.answer(qp, ACK, packet.psn)
        if info.makes_cqe:
            flags = (CqeFlags.WITH_IMM if info.has_imm else 0) | (CqeFlags.WITH_INV if info.has_ieth else 0) \
                | (CqeFlags.SOLICITED if packet.solicited else 0)
            write = info.kind == Kind.WRITE
            self.complete(qp, index, WcStatus.SUCCESS, byte_len=qp.total if write else qp.offset, flags=int(flags),
                          imm=packet.imm if info.has_imm or info.has_ieth else 0,
                          opcode=WcOpcode.RECV_RDMA_WITH_IMM if write else WcOpcode.RECV)


class Port:
    """One stream of the device: ``queue`` feeds an input, ``got`` collects an output. Stalls with probability p."""

    def __init__(self, stream, rng, stall: float, *, feeds: bool):
        self.stream, self.rng, self.stall, self.feeds = stream, rng, stall, feeds
        self.queue: deque = deque()
        self.offered = False
        self.hold = False
        self.ready: bool | None = None
        self.got: list = []

    def drive(self, ctx):
        if self.feeds:
            if not self.offered and self.queue and not self.hold and self.rng.random() >= self.stall:
                item = self.queue[0]
                if isinstance(item, int):
                    ctx.set(Value.cast(self.stream.payload), item)
                else:
                    ctx.set(self.stream.payload, item)
                ctx.set(self.stream.valid, 1)
                self.offered = True
        else:
            ready = not self.hold and self.rng.random() >= self.stall
            if ready != self.ready:  # setting a signal runs the simulator
                ctx.set(self.stream.ready, ready)
                self.ready = ready

    def settle(self, ctx) -> None:
        """An item has passed at the clock edge."""
        if self.feeds:
            self.queue.popleft()
            self.offered = False
            ctx.set(self.stream.valid, 0)


class Sampler:
    """Ports and other values as one number a cycle, which costs less than a sample of each: what moved, the rest on demand."""

    def __init__(self, ports: dict[str, Port], others):
        streams = [port.stream for port in ports.values()]
        self.count = len(streams)
        values = [*others, *(stream.payload for stream in streams)]
        self.value = Cat(*(stream.valid for stream in streams), *(stream.ready for stream in streams), *map(Value.cast, values))
        self.fields = []
        at = 2 * self.count
        for value in values:
            width = len(Value.cast(value))
            self.fields.append((value.shape(), at, (1 << width) - 1))
            at += width
        self.payloads = self.fields[len(others) :]

    def moved(self, raw: int, number: int) -> int:
        """Whether an item passed at port ``number``."""
        return raw >> number & raw >> self.count + number & 1

    @staticmethod
    def _read(raw: int, shape, at: int, mask: int):
        bits = raw >> at & mask
        return bits if isinstance(shape, Shape) else shape.from_bits(bits)

    def other(self, raw: int, number: int):
        return self._read(raw, *self.fields[number])

    def payload(self, raw: int, number: int):
        return self._read(raw, *self.payloads[number])


class Bench:
    """Runs ``actions`` in order: a Packet, ("post", qp, sges), ("wait", cycles), ("idle",), ("call", function)."""

    def __init__(self, config, rng: random.Random, stall: float = 0.3, epsn=lambda rng: rng.randrange(1 << 24), num_qps=4):
        self.p = Params(config)
        self.rng = rng
        self.dut = shared(Responder, self.p)
        self.world = World(rng)
        self.qps: dict[int, Qp] = {}
        for qpn in range(2, 2 + num_qps):
            qp = Qp(qpn, pd=100 + qpn, cqn=qpn % self.p.num_cqs, epsn=epsn(rng))
            qp.ring_phys = self.world.pages(1)[0]
            self.world.rings[self.p.tpt_rq_base + qpn] = Region(0, 0, 0, 0, 64 << qp.log_rq, 0, [qp.ring_phys])
            self.qps[qpn] = qp
        self.model = Model(self.world, self.qps)
        d = self.dut
        self.ports = {
            name: Port(stream, rng, stall, feeds=feeds)
            for name, stream, feeds in [
                ("request", d.request, True), ("doorbell", d.doorbell, True), ("flush", d.flush, True), ("ctx", d.ctx, True),
                ("store_data", d.store_data, True), ("ring_answer", d.xlate_ring.response, True),
                ("place_answer", d.xlate_place.response, True), ("word", d.read.word, True),
                ("accepted", d.write.accepted, True), ("done", d.write.done, True),
                ("ack", d.ack, False), ("cqe", d.cqe, False),
                ("qp_error", d.qp_error, False), ("store_read", d.store_read, False),
                ("free", d.free, False), ("ring_ask", d.xlate_ring.request, False), ("place_ask", d.xlate_place.request, False),
                ("read", d.read.command, False), ("write", d.write.command, False), ("data", d.write.data, False),
            ]
        }
        self.ports["ack"].stall = 0.0  # else ACKs are merged (R-ACK-2), and the model gives each
        self.later: list = []  # (cycle, port, item)
        self.cells: dict[int, bytes] = {}
        self.bad_writes: set[int] = set()  # physical addresses: error response
        self.commands: deque = deque()
        self.beats: list = []
        self.writes_open = 0
        self.acks: dict[int, list] = defaultdict(list)
        self.acked: dict[int, list[int]] = defaultdict(list)  # cycles of the acks
        self.cqes: dict[int, list] = defaultdict(list)
        self.errors: list[int] = []
        self.duplicates = self.out_of_sequence = self.error_drop = self.drained = 0
        self.cycle = 0
        self.latency = (1, 12)
        self.walk: tuple[int, int] | None = None  # latency of translations that may wait for a page table
        self.times: dict[str, list[int]] = defaultdict(list)

    # ------------------------------------------------------------------------------------------------ stimulus
    def context_writes(self, qp: Qp) -> list[dict]:
        cfg = RESPONDER_CFG.words(state=qp.state, type=0, path_mtu=qp.path_mtu, access=qp.access, pd=qp.pd, log_rq=qp.log_rq,
                                  cqn=qp.cqn, min_rnr_timer=qp.rnr_timer)
        hot = RESPONDER_HOT.words(epsn=qp.epsn, msn=qp.msn, rq_index=qp.taken)
        rows = [(CtxTable.RESPONDER_HOT, i, w) for i, w in enumerate(hot)]
        rows += [(CtxTable.RQ_PRODUCER, 0, qp.produced)]
        rows += [(CtxTable.RESPONDER_CFG, i, w) for i, w in enumerate(cfg)]
        return [{"table": t, "index": qp.qpn, "word": i, "bytes": 15, "data": w} for t, i, w in rows]

    def state_write(self, qpn: int, state: QpState) -> dict:
        return {"table": CtxTable.RESPONDER_CFG, "index": qpn, "word": 0, "bytes": 1, "data": int(state)}

    def send(self, packet: Packet) -> None:
        head = 0
        if packet.payload:
            free = [c for c in range(self.p.rx_cells) if c not in self.cells]
            head = self.rng.choice(free)
            self.cells[head] = packet.payload
        self.model.packet(packet)
        self.ports["request"].queue.append({
            "qpn": packet.qpn, "opcode": packet.opcode.value, "psn": packet.psn, "solicited": packet.solicited,
            "ackreq": packet.ackreq, "pad": packet.pad_count, "length": len(packet.payload), "head": head, "va": packet.va,
            "rkey": packet.rkey, "dma_length": packet.dma_length, "imm": packet.imm,
        })

    def post(self, qp: Qp, sges) -> None:
        at, raw = self.model.post(qp, sges)
        self.world.memory[at : at + 64] = raw
        self.ports["doorbell"].queue.append({"id": qp.qpn, "counter": qp.produced})

    # ------------------------------------------------------------------------------------------------ surroundings
    def soon(self, port: str, item) -> None:
        self.later.append((self.cycle + self.rng.randint(*self.latency), port, item))

    def in_order(self, port: str, item) -> None:
        self.ports[port].queue.append(item)

    def react(self, name: str, item) -> None:
        p, lanes = self.p, self.p.lanes
        self.times[name].append(self.cycle)
        if name in ("ring_ask", "place_ask"):
            answer = self.world.translate(item)
            walked = self.walk is not None and not item.hit_only and answer["status"] == XlateStatus.OK
            at = self.cycle + self.rng.randint(*(self.walk if walked and self.walk else self.latency))
            self.later.append((at, name.replace("ask", "answer"), answer))
        elif name == "read":
            address = int(item.address)
            bad = address in self.world.unreadable
            for at in range(0, int(item.length), lanes):
                chunk = self.world.memory[address + at : address + at + lanes]
                self.in_order("word", {"data": int.from_bytes(chunk, "little"), "first": 0, "count": lanes,
                                       "last": int(at + lanes >= int(item.length)), "err": int(bad)})
        elif name == "store_read":
            payload = self.cells.pop(int(item.head))
            assert len(payload) == int(item.length)
            for at in range(0, len(payload), lanes):
                part = payload[at : at + lanes]
                self.in_order("store_data", {"data": int.from_bytes(part, "little"), "keep": (1 << len(part)) - 1,
                                             "last": int(at + lanes >= len(payload)), "err": 0})
        elif name == "free":
            del self.cells[int(item)]
        elif name == "write":
            self.commands.append((int(item.address), int(item.length)))
            self.writes_open += 1
        elif name == "data":
            self.beats.append(item)
        elif name == "ack":
            self.acked[int(item.qpn)].append(self.cycle)
            self.acks[int(item.qpn)].append((int(item.syndrome), int(item.psn), int(item.msn)))
        elif name == "cqe":
            entry = {"wqe_counter": int(item.wqe_counter), "status": item.status, "cqn": int(item.cqn)}
            if item.status == WcStatus.SUCCESS:
                entry |= {"byte_len": int(item.byte_len), "flags": int(item.flags), "imm": int(item.imm), "opcode": item.opcode}
            assert int(item.opcode.value) & 0x80
            self.cqes[int(item.qpn)].append(entry)
        elif name == "qp_error":
            qpn = int(item.qpn)
            self.errors.append(qpn)
            self.in_order("ctx", self.state_write(qpn, QpState.ERR))
            self.later.append((self.cycle + 30, "flush", {"qpn": qpn}))
        self._run_writes(p)

    def _run_writes(self, p) -> None:
        while self.commands and any(beat.last for beat in self.beats):
            address, length = self.commands.popleft()
            raw = b""
            while True:
                beat = self.beats.pop(0)
                count = int(beat.keep).bit_count()
                raw += int(beat.data).to_bytes(p.lanes, "little")[:count]
                if beat.last:
                    break
            assert len(raw) == length, f"command of {length} bytes, {len(raw)} came"
            self.world.memory[address : address + length] = raw
            self.in_order("accepted", 1)
            self.in_order("done", int(any(a in self.bad_writes for a in range(address, address + length))))

    def quiet(self) -> bool:
        return not (self.later or self.cells or self.commands or self.beats or any(port.queue for port in self.ports.values()))

    # ------------------------------------------------------------------------------------------------ run
    def run(self, actions, limit: int = 4000, settle: int = 150) -> None:
        """Runs until all actions are through and nothing has moved for ``settle`` cycles."""
        d = self.dut
        actions = deque(actions)
        names = list(self.ports)
        ports = [self.ports[n] for n in names]
        sampler = Sampler(self.ports, [d.duplicate, d.out_of_sequence, d.error_drop, d.drained])

        async def bench(ctx):
            ctx.set(self.ports["ctx"].stream.valid, 0)
            for qp in self.qps.values():
                self.ports["ctx"].queue.extend(self.context_writes(qp))
            still, wait = 0, 0
            started = False
            while actions or still < settle:
                self.cycle += 1
                if self.cycle >= limit:
                    raise TimeoutError(f"{limit} cycles; queues {({n: len(q.queue) for n, q in self.ports.items()})}")
                if not started:
                    started = not self.ports["ctx"].queue and self.cycle > max(self.p.num_qps, self.p.parking_slots)
                elif wait:
                    wait -= 1
                elif actions and not self.ports["request"].queue and not self.ports["doorbell"].queue:
                    if actions[0] == ("idle",):
                        if still > settle // 2 and self.quiet():
                            actions.popleft()
                    elif isinstance(actions[0], Packet):
                        if len(self.cells) < self.p.rx_cells:
                            self.send(actions.popleft())
                    else:
                        what, *args = actions.popleft()
                        if what == "post":
                            self.post(*args)
                        elif what == "wait":
                            wait = args[0]
                        else:
                            args[0](self)
                for entry in [e for e in self.later if e[0] <= self.cycle]:
                    self.later.remove(entry)
                    self.ports[entry[1]].queue.append(entry[2])
                for port in ports:
                    port.drive(ctx)
                _, _, raw = await ctx.tick().sample(sampler.value)
                self.duplicates += sampler.other(raw, 0)
                self.out_of_sequence += sampler.other(raw, 1)
                self.error_drop += sampler.other(raw, 2)
                self.drained += sampler.other(raw, 3)
                moved = False
                for i, (name, port) in enumerate(zip(names, ports, strict=True)):
                    if sampler.moved(raw, i):
                        moved = True
                        port.settle(ctx)
                        if not port.feeds:
                            self.react(name, sampler.payload(raw, i))
                        else:
                            self.times[name].append(self.cycle)
                still = 0 if moved or self.later else still + 1

        simulate(self.dut, bench, limit=None)

    def compare(self) -> None:
        """Everything that came out is what the model says."""
        self.model.finish()
        for qpn in self.qps:
            assert self.acks[qpn] == self.model.acks[qpn], f"QP {qpn}"
            assert self.cqes[qpn] == self.model.cqes[qpn], f"QP {qpn}"
        assert not self.cells, "packet store cells were neither read nor freed"
        assert self.world.memory == self.model.memory
        assert sorted(self.errors) == sorted(q.qpn for q in self.qps.values() if q.dead)


def rc(kind: Kind, **role) -> Opcode:
    from rnic.wire.opcode import opcode_of

    return opcode_of(Transport.RC, kind, **role)
