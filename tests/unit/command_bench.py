"""Bench of the command engine: mailbox, recorded writes and events, words of commands with legal values."""


from amaranth import Cat, Module, Signal
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from rnic import abi
from rnic.abi import Attr, CmdStatus, Command, CtxTable, EventType, QpType
from rnic.config import CONFIGS, Params
from rnic.qp.command import CommandEngine
from tests.unit.streams import seeded, shared

CFG = {CtxTable.ADDRESS: abi.ADDRESS_CTX, CtxTable.REQUESTER_CFG: abi.REQUESTER_CFG,
       CtxTable.COMPLETER_CFG: abi.COMPLETER_CFG, CtxTable.RESPONDER_CFG: abi.RESPONDER_CFG}
HOT = {CtxTable.REQUESTER_HOT: abi.REQUESTER_HOT, CtxTable.COMPLETER_HOT: abi.COMPLETER_HOT,
       CtxTable.RESPONDER_HOT: abi.RESPONDER_HOT, CtxTable.SQ_FETCH: abi.SQ_FETCH, CtxTable.SQ_PRODUCER: abi.COUNTER,
       CtxTable.RQ_PRODUCER: abi.COUNTER}
AV_FIELDS = ["sgid_index", "dmac", "vlan_tci", "sport", "hop_limit", "traffic_class", "flow_label", "vlan", "ipv6", "dip"]
FIELDS = {  # attribute: its fields in the command, and the tables that have a copy
    Attr.PKEY_INDEX: (["pkey_index"], [CtxTable.ADDRESS]),
    Attr.ACCESS: (["access"], [CtxTable.RESPONDER_CFG]),
    Attr.QKEY: (["qkey"], [CtxTable.ADDRESS]),
    Attr.AV: (AV_FIELDS, [CtxTable.ADDRESS]),
    Attr.PATH_MTU: (["path_mtu"], list(CFG)),
    Attr.DEST_QPN: (["dest_qpn"], [CtxTable.ADDRESS]),
    Attr.MAX_DEST_RD_ATOMIC: (["max_dest_rd_atomic"], [CtxTable.RESPONDER_CFG]),
    Attr.MIN_RNR_TIMER: (["min_rnr_timer"], [CtxTable.RESPONDER_CFG]),
    Attr.TIMEOUT: (["timeout"], [CtxTable.COMPLETER_CFG]),
    Attr.RETRY_CNT: (["retry_cnt"], [CtxTable.COMPLETER_CFG]),
    Attr.RNR_RETRY: (["rnr_retry"], [CtxTable.COMPLETER_CFG]),
    Attr.MAX_RD_ATOMIC: (["max_rd_atomic"], [CtxTable.REQUESTER_CFG]),
    Attr.RQ_PSN: (["rq_psn"], []),
    Attr.SQ_PSN: (["sq_psn"], []),
}


FENCE_CYCLES = 40


class Delay(wiring.Component):
    """A pulse, ``cycles`` later."""

    def __init__(self, cycles):
        self.cycles = cycles
        super().__init__({"i": In(1), "o": Out(1)})

    def elaborate(self, platform):
        m = Module()
        line = Signal(self.cycles)
        m.d.sync += line.eq(Cat(self.i, line))
        m.d.comb += self.o.eq(line[-1])
        return m


class Wrapper(wiring.Component):
    """The engine with a mailbox memory."""

    def __init__(self, p):
        self.engine = CommandEngine(p)
        self.fence = Delay(FENCE_CYCLES)
        self.reset = Signal()
        self.mailbox = memory.Memory(shape=32, depth=abi.MAILBOX_WORDS, init=[])
        super().__init__({})

    def elaborate(self, platform):
        m = Module()
        m.submodules.engine = engine = self.engine
        m.submodules.mailbox = mailbox = self.mailbox
        read, write = mailbox.read_port(), mailbox.write_port()
        m.d.comb += [
            read.addr.eq(engine.mailbox_index), write.addr.eq(engine.mailbox_index), write.en.eq(engine.mailbox_write),
            write.data.eq(engine.mailbox_data),
        ]
        m.d.sync += engine.mailbox_value.eq(read.data)
        # The fence takes a while.
        m.submodules.fence = fence = self.fence
        m.d.comb += [fence.i.eq(engine.fence_start), engine.fence_done.eq(fence.o)]
        return m


class Bench:
    def __init__(self, config="tiny", seed=0, p_stall=0.0, share=True):
        self.rng = seeded(seed)
        self.p = Params(CONFIGS[config])
        self.dut = shared(Wrapper, self.p) if share else Wrapper(self.p)
        self.engine = self.dut.engine
        self.p_stall = p_stall
        self.junk = [self.rng.getrandbits(32) for _ in range(24)]  # in the mailbox behind a command
        self.tables: dict[tuple[CtxTable, int], list[int]] = {}
        self.writes: list[tuple[CtxTable, int, int, int, int]] = []
        self.events: list[tuple[str, int]] = []
        self.fences: list[int] = []  # writes done when the fence began
        self.used = 0  # cycles of the last command
        e = self.engine
        moved = [port.valid & port.ready for port in (e.ctx, e.sq_kick, e.rq_flush, e.result, e.event)]
        self._moved = Cat(*moved, e.command.ready, e.qp_error.ready, e.fence_start, e.result.payload, e.ctx.payload.as_value())

    async def cycle(self, ctx):
        """One cycle; records what moved. Returns result taken, its status, command taken, error
        taken."""
        e = self.engine
        if self.p_stall:
            for port in (e.ctx, e.sq_kick, e.rq_flush, e.result, e.event):
                ctx.set(port.ready, self.rng.random() >= self.p_stall)
        _, _, moved = await ctx.tick().sample(self._moved)  # one number: sampling costs more than the simulation
        flags, status = moved & 0xFF, moved >> 8 & 0xFF
        if flags & 1:
            write = e.ctx.payload.shape().from_bits(moved >> 16)
            self.writes.append((CtxTable(write.table), write.index, write.word, write.bytes, write.data))
            words = self.tables.setdefault((CtxTable(write.table), write.index), [0] * 32)
            keep = sum(0xFF << 8 * b for b in range(4) if not write.bytes >> b & 1)
            words[write.word] = words[write.word] & keep | write.data & ~keep & 0xFFFF_FFFF
        if flags & 2:
            self.events.append(("kick", ctx.get(e.sq_kick.payload.qpn)))
        if flags & 4:
            self.events.append(("flush", ctx.get(e.rq_flush.payload.qpn)))
        if flags & 16:
            event = ctx.get(e.event.payload)
            self.events.append((EventType(event.type).name, event.id))
        if flags & 128:
            self.fences.append(len(self.writes))
        return flags & 8, status, flags & 32, flags & 64

    async def run(self, ctx, code, words=()):
        """Execute a command; its status."""
        e = self.engine
        self.writes.clear()
        self.events.clear()
        self.fences.clear()
        if not self.p_stall:
            for port in (e.ctx, e.sq_kick, e.rq_flush, e.result, e.event):
                if not ctx.get(port.ready):
                    ctx.set(port.ready, 1)
        for i, value in enumerate([*words, *self.junk[len(words) :]]):
            if ctx.get(self.dut.mailbox.data[i]) != value:  # setting a word runs the simulator
                ctx.set(self.dut.mailbox.data[i], value)
        ctx.set(e.command.payload, int(code))
        ctx.set(e.command.valid, 1)
        for self.used in range(6000):
            done, status, taken, _ = await self.cycle(ctx)
            if taken:
                ctx.set(e.command.valid, 0)
            if done:
                return CmdStatus(status)
        raise TimeoutError(f"{code!r} does not end")

    async def refused(self, ctx, status, code, words):
        """The command fails with ``status`` and nothing changed (R-QP-1)."""
        before = ctx_image(self, ctx)
        got = await self.run(ctx, code, words)
        assert got == status, f"{code!r}: {got!r}, wanted {status!r}"
        assert not self.writes and not self.events
        assert ctx_image(self, ctx) == before

    async def done(self, ctx, code, words):
        got = await self.run(ctx, code, words)
        assert got == CmdStatus.OK, f"{code!r}: {got!r}"

    def fields(self, table, struct, index):
        return struct.unpack_words(self.tables.get((table, index), [0] * 32))

    async def error(self, ctx, qpn, cycles=400, event=EventType.NONE):
        """Report an engine's error of a QP; what was written and sent within ``cycles`` is recorded."""
        e = self.engine
        ctx.set(e.qp_error.payload.event, event)
        self.writes.clear()
        self.events.clear()
        ctx.set(e.qp_error.payload.qpn, qpn)
        ctx.set(e.qp_error.valid, 1)
        for _ in range(cycles):
            done, _, _, taken = await self.cycle(ctx)
            assert not done, "an error is not a command"
            if taken:
                ctx.set(e.qp_error.valid, 0)

    def set_state(self, ctx, qpn, typ, state):
        """Put a QP straight into a state (SQE is reached by no command)."""
        ctx.set(self.engine.image.memory.data[32 * qpn + 2], int(state) | int(typ) << 16)


def ctx_image(bench, ctx):
    """QP images and mailbox-independent memory of the engine."""
    data = bench.engine.image.memory.data
    return [ctx.get(data[32 * qpn + word]) for qpn in range(bench.p.num_qps) for word in (2, 3, 4, 6, 7, 8)]


def ring(levels=0, **changes):
    return {"valid": 1, "levels": levels, "log_page": 12, "base": 0, "length": 4096, "table_addr": 0x1_0000_2000} | changes


def eq_words(eqn, **changes):
    entry = changes.pop("entry", ring())
    return abi.CMD_CREATE_EQ.words(**{"eqn": eqn, "log_size": 4, "valid": 1, "ring": abi.TPT_ENTRY.pack_int(**entry)} | changes)


def cq_words(cqn, **changes):
    entry = changes.pop("entry", ring())
    fields = {"cqn": cqn, "log_size": 6, "eqn": 255, "valid": 1, "ring": abi.TPT_ENTRY.pack_int(**entry)}
    return abi.CMD_CREATE_CQ.words(**fields | changes)


def qp_words(qpn, typ=QpType.RC, **changes):
    sq, rq = changes.pop("sq", ring()), changes.pop("rq", ring(levels=1))
    fields = {"qpn": qpn, "type": int(typ), "log_sq": 5, "log_rq": 7, "log_stride": 6, "pd": 0x123456, "sig_all": 1,
              "send_cqn": 1, "recv_cqn": 2, "sq_ring": abi.TPT_ENTRY.pack_int(**sq), "rq_ring": abi.TPT_ENTRY.pack_int(**rq)}
    return abi.CMD_CREATE_QP.words(**fields | changes)


def modify_words(rng, p, qpn, new, mask, **changes):
    """A MODIFY_QP with legal random values in all fields."""
    fields = {
        "qpn": qpn, "new_state": int(new), "attr_mask": int(mask), "pkey_index": rng.randrange(p.num_pkeys),
        "sgid_index": rng.randrange(p.num_gids), "access": rng.getrandbits(4), "min_rnr_timer": rng.getrandbits(5),
        "dest_qpn": rng.getrandbits(24), "path_mtu": rng.randint(1, 5), "qkey": rng.getrandbits(32),
        "rq_psn": rng.choice([0, rng.getrandbits(24)]), "max_dest_rd_atomic": rng.randint(0, p.max_rd_atomic),
        "sq_psn": rng.getrandbits(24), "max_rd_atomic": rng.randint(0, p.max_rd_atomic), "timeout": rng.getrandbits(5),
        "retry_cnt": rng.getrandbits(3), "rnr_retry": rng.getrandbits(3), "dmac": rng.getrandbits(48),
        "vlan_tci": rng.getrandbits(16), "sport": rng.getrandbits(16), "hop_limit": rng.randint(1, 255),
        "traffic_class": rng.getrandbits(8), "flow_label": rng.getrandbits(20), "vlan": rng.getrandbits(1),
        "ipv6": rng.getrandbits(1), "dip": rng.getrandbits(128),
    }  # fmt: skip
    fields |= changes
    return abi.CMD_MODIFY_QP.words(**fields), fields


async def base_objects(bench, ctx):
    await bench.done(ctx, Command.CREATE_CQ, cq_words(1))
    await bench.done(ctx, Command.CREATE_CQ, cq_words(2))
