"""Command engine: every command, every transition, every refusal; what it wrote is seen on the context bus."""

import itertools

import pytest
from amaranth import Cat, Module, ResetInserter, Signal
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from rnic import abi
from rnic.abi import Access, Attr, CmdStatus, Command, CtxTable, EventType, QpState, QpType
from rnic.config import CONFIGS, Params
from rnic.qp.command import CommandEngine
from rnic.qp.port import PortTable
from tests.rules import rule
from tests.unit.streams import seeded, simulate

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
    def __init__(self, config="tiny", seed=0, p_stall=0.0):
        self.rng = seeded(seed)
        self.p = Params(CONFIGS[config])
        self.dut = Wrapper(self.p)
        self.engine = self.dut.engine
        self.p_stall = p_stall
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
                ctx.set(port.ready, 1)
        for i in range(24):
            ctx.set(self.dut.mailbox.data[i], words[i] if i < len(words) else self.rng.getrandbits(32))
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


# ------------------------------------------------------------------------------------------------------ objects
def test_unknown_commands_and_nop():
    bench = Bench()

    async def run(ctx):
        await bench.done(ctx, Command.NOP, [])
        for code in (max(Command) + 1, 30, 31, 32, 33, 34, 35, 200, 255):
            await bench.refused(ctx, CmdStatus.BAD_COMMAND, code, [])

    simulate(bench.dut, run)


@rule("R-MR-1", "R-MR-3")
def test_memory_regions():
    bench = Bench(seed=1, p_stall=0.3)
    entry = {"valid": 1, "levels": 2, "variant": 0x77, "rights": 15, "log_page": 21, "pd": 0xABCDEF, "base": 0x1122334455667788,
             "length": (1 << 40) + 3, "table_addr": 0x99AABBCCDDEEFF00}
    body = abi.TPT_ENTRY.words(**entry)

    def bad(**changes):
        return [0x5A3, *abi.TPT_ENTRY.words(**entry | changes)]

    async def run(ctx):
        for words in (bad(valid=0), bad(levels=3), bad(log_page=11), bad(log_page=31), bad(log_page=0x80 | 12),
                      bad(rights=int(Access.REMOTE_WRITE)), bad(rights=int(Access.REMOTE_ATOMIC | Access.REMOTE_READ))):
            await bench.refused(ctx, CmdStatus.BAD_PARAM, Command.CREATE_MR, words)
        for key in (bench.p.num_mrs << 8, 0xFFFF_FF00):
            await bench.refused(ctx, CmdStatus.BAD_INDEX, Command.CREATE_MR, [key, *body])
            await bench.refused(ctx, CmdStatus.BAD_INDEX, Command.DESTROY_MR, [key])
        await bench.refused(ctx, CmdStatus.NOT_FOUND, Command.DESTROY_MR, [0x5A3])
        await bench.done(ctx, Command.CREATE_MR, [0x5A3, *body])
        assert bench.fields(CtxTable.TPT, abi.TPT_ENTRY, 5) == entry | {"variant": 0xA3}
        assert bench.writes[-1][2] == 0, "the valid bit comes last"
        assert not any(w[2] == 0 and w[3] & 1 for w in bench.writes[:-1])
        await bench.refused(ctx, CmdStatus.IN_USE, Command.CREATE_MR, [0x5A4, *body])
        await bench.refused(ctx, CmdStatus.NOT_FOUND, Command.DESTROY_MR, [0x5A4])  # stale variant
        await bench.done(ctx, Command.DESTROY_MR, [0x5A3])
        assert bench.fields(CtxTable.TPT, abi.TPT_ENTRY, 5)["valid"] == 0
        assert bench.fences == [1] == [len(bench.writes)], "the entry goes first, then its DMA has to end"
        await bench.refused(ctx, CmdStatus.NOT_FOUND, Command.DESTROY_MR, [0x5A3])
        await bench.done(ctx, Command.CREATE_MR, [0x5A4, *abi.TPT_ENTRY.words(**entry | {"rights": int(Access.REMOTE_READ)})])

    simulate(bench.dut, run, limit=20000)


@rule("R-CQ-8")
def test_queues_and_their_users():
    bench = Bench(seed=2, p_stall=0.2)
    p = bench.p

    async def run(ctx):
        # event queues
        await bench.refused(ctx, CmdStatus.BAD_INDEX, Command.CREATE_EQ, eq_words(p.num_eqs))
        for changes in ({"log_size": 0}, {"log_size": 17}, {"valid": 0}, {"entry": ring(base=1)}, {"entry": ring(base=1 << 32)},
                        {"entry": ring(valid=0)}, {"entry": ring(levels=3)}, {"entry": ring(log_page=31)}):
            await bench.refused(ctx, CmdStatus.BAD_PARAM, Command.CREATE_EQ, eq_words(1, **changes))
            await bench.refused(ctx, CmdStatus.BAD_PARAM, Command.CREATE_CQ, cq_words(3, **changes))
        await bench.done(ctx, Command.CREATE_EQ, eq_words(1))
        assert bench.fields(CtxTable.EQ, abi.EQ_CTX, 1) == {
            "valid": 1, "log_size": 4, "producer": 0, "consumer": 0, "armed": 0}
        assert bench.fields(CtxTable.TPT, abi.TPT_ENTRY, p.tpt_eq_base + 1) == {
            "variant": 0, "pd": 0, "rights": int(Access.LOCAL_WRITE)} | ring()
        await bench.refused(ctx, CmdStatus.IN_USE, Command.CREATE_EQ, eq_words(1))
        # completion queues
        await bench.refused(ctx, CmdStatus.BAD_INDEX, Command.CREATE_CQ, cq_words(p.num_cqs))
        await bench.refused(ctx, CmdStatus.BAD_INDEX, Command.CREATE_CQ, cq_words(3, eqn=p.num_eqs))
        await bench.refused(ctx, CmdStatus.NOT_FOUND, Command.CREATE_CQ, cq_words(3, eqn=0))
        await bench.done(ctx, Command.CREATE_CQ, cq_words(3, eqn=1))
        assert bench.fields(CtxTable.CQ, abi.CQ_CTX, 3) == {"valid": 1, "log_size": 6, "eqn": 1, "producer": 0}
        assert bench.tables[CtxTable.CQ_CONSUMER, 3][0] == 0
        assert bench.fields(CtxTable.TPT, abi.TPT_ENTRY, p.tpt_cq_base + 3)["valid"] == 1
        assert bench.writes[-1][:3] == (CtxTable.CQ, 3, 0)
        await bench.done(ctx, Command.CREATE_CQ, cq_words(4, eqn=255))
        await bench.refused(ctx, CmdStatus.IN_USE, Command.CREATE_CQ, cq_words(4, eqn=255))
        await bench.refused(ctx, CmdStatus.IN_USE, Command.DESTROY_EQ, [1])
        # both queues of a QP, first the same, then different ones
        await bench.done(ctx, Command.CREATE_QP, qp_words(2, send_cqn=3, recv_cqn=3))
        await bench.done(ctx, Command.CREATE_QP, qp_words(3, send_cqn=4, recv_cqn=3))
        for cqn in (3, 4):
            await bench.refused(ctx, CmdStatus.IN_USE, Command.DESTROY_CQ, [cqn])
        await bench.done(ctx, Command.DESTROY_QP, [3])
        await bench.done(ctx, Command.DESTROY_CQ, [4])
        await bench.refused(ctx, CmdStatus.IN_USE, Command.DESTROY_CQ, [3])
        await bench.refused(ctx, CmdStatus.NOT_FOUND, Command.DESTROY_QP, [3])
        await bench.done(ctx, Command.DESTROY_QP, [2])
        await bench.done(ctx, Command.DESTROY_CQ, [3])
        assert bench.fields(CtxTable.CQ, abi.CQ_CTX, 3)["valid"] == 0
        assert bench.fields(CtxTable.TPT, abi.TPT_ENTRY, p.tpt_cq_base + 3)["valid"] == 0
        await bench.refused(ctx, CmdStatus.NOT_FOUND, Command.DESTROY_CQ, [3])
        await bench.done(ctx, Command.DESTROY_EQ, [1])
        await bench.refused(ctx, CmdStatus.NOT_FOUND, Command.DESTROY_EQ, [1])
        for command in (Command.DESTROY_CQ, Command.DESTROY_EQ, Command.DESTROY_QP, Command.QUERY_QP):
            for number in (max(p.num_qps, p.num_cqs), 1 << 24, 1 << 31):
                await bench.refused(ctx, CmdStatus.BAD_INDEX, command, [number])

    simulate(bench.dut, run, limit=60000)


@rule("R-WQ-3", "R-QP-8")
def test_create_qp_writes_all_tables():
    bench = Bench(seed=3, p_stall=0.2)
    p, rng = bench.p, bench.rng

    async def run(ctx):
        await base_objects(bench, ctx)
        for status, words in (
            (CmdStatus.BAD_INDEX, qp_words(p.num_qps)), (CmdStatus.BAD_INDEX, qp_words(1)),
            (CmdStatus.BAD_INDEX, qp_words(0, QpType.UC)), (CmdStatus.BAD_PARAM, qp_words(5, 2)),
            (CmdStatus.BAD_PARAM, qp_words(5, log_stride=5)), (CmdStatus.BAD_PARAM, qp_words(5, log_stride=8)),
            (CmdStatus.BAD_PARAM, qp_words(5, has_srq=1)), (CmdStatus.BAD_INDEX, qp_words(5, send_cqn=p.num_cqs)),
            (CmdStatus.NOT_FOUND, qp_words(5, send_cqn=0)), (CmdStatus.BAD_INDEX, qp_words(5, recv_cqn=1 << 23)),
            (CmdStatus.NOT_FOUND, qp_words(5, recv_cqn=3)), (CmdStatus.BAD_PARAM, qp_words(5, sq=ring(base=8))),
            (CmdStatus.BAD_PARAM, qp_words(5, rq=ring(valid=0))), (CmdStatus.BAD_PARAM, qp_words(5, rq=ring(levels=3))),
        ):  # fmt: skip
            await bench.refused(ctx, status, Command.CREATE_QP, words)
        wide = qp_words(5)
        wide[1] |= 0xF0 << 8  # log_sq is 4 bits of a byte: stray bits are refused
        await bench.refused(ctx, CmdStatus.BAD_PARAM, Command.CREATE_QP, wide)
        # Old contents must not shine through.
        for table, struct in (CFG | HOT).items():
            bench.tables[table, 5] = [rng.getrandbits(32) for _ in range(struct.size // 4)] + [0] * 32
        await bench.done(ctx, Command.CREATE_QP, qp_words(5, QpType.UC))
        uc = int(QpType.UC)
        wanted = {
            CtxTable.ADDRESS: {"type": uc},
            CtxTable.REQUESTER_CFG: {"type": uc, "log_sq": 5, "log_stride": 6, "pd": 0x123456, "sig_all": 1},
            CtxTable.COMPLETER_CFG: {"type": uc, "cqn": 1, "pd": 0x123456},
            CtxTable.RESPONDER_CFG: {"type": uc, "log_rq": 7, "cqn": 2, "pd": 0x123456},
        }
        for table, struct in (CFG | HOT).items():
            assert bench.fields(table, struct, 5) == struct.unpack(0) | wanted.get(table, {}), table
        forced = {"variant": 0, "pd": 0, "rights": 1}
        assert bench.fields(CtxTable.TPT, abi.TPT_ENTRY, p.tpt_sq_base + 5) == forced | ring()
        assert bench.fields(CtxTable.TPT, abi.TPT_ENTRY, p.tpt_rq_base + 5) == forced | ring(levels=1)
        await bench.refused(ctx, CmdStatus.IN_USE, Command.CREATE_QP, qp_words(5))
        await bench.done(ctx, Command.CREATE_QP, qp_words(1, QpType.UD))
        await bench.done(ctx, Command.DESTROY_QP, [5])
        for base in (p.tpt_sq_base, p.tpt_rq_base):
            assert bench.fields(CtxTable.TPT, abi.TPT_ENTRY, base + 5)["valid"] == 0
        print("CREATE_QP cycles", bench.used)

    simulate(bench.dut, run, limit=60000)


def test_port_tables():
    bench = Bench(seed=4)
    p = bench.p
    table = PortTable(p)
    entry = {"ip": 0x0102030405060708090A0B0C0D0E0F10, "mac": 0xA1B2C3D4E5F6, "valid": 1, "vlan": 1, "vlan_vid": 0xABC}

    async def run(ctx):
        await bench.done(ctx, Command.QUERY_PORT, [])
        assert ctx.get(bench.dut.mailbox.data[1]) == 5
        for mtu in (0, 6, 7):
            await bench.refused(ctx, CmdStatus.BAD_PARAM, Command.SET_PORT, abi.CMD_SET_PORT.words(mtu=mtu))
        await bench.done(ctx, Command.SET_PORT, abi.CMD_SET_PORT.words(mtu=3))
        recorded.extend(bench.writes)
        await bench.done(ctx, Command.QUERY_PORT, [])
        assert ctx.get(bench.dut.mailbox.data[1]) == 3
        for index in (p.num_gids, 1 << 30):
            words = abi.CMD_SET_GID.words(index=index, entry=abi.GID_ENTRY.pack_int(**entry))
            await bench.refused(ctx, CmdStatus.BAD_INDEX, Command.SET_GID, words)
        await bench.done(ctx, Command.SET_GID, abi.CMD_SET_GID.words(index=1, entry=abi.GID_ENTRY.pack_int(**entry)))
        recorded.extend(bench.writes)
        await bench.refused(ctx, CmdStatus.BAD_INDEX, Command.SET_PKEY, abi.CMD_SET_PKEY.words(index=p.num_pkeys, pkey=1))
        await bench.done(ctx, Command.SET_PKEY, abi.CMD_SET_PKEY.words(index=1, pkey=0x8123))
        recorded.extend(bench.writes)
    recorded = []
    simulate(bench.dut, run)

    async def replay(ctx):
        assert ctx.get(table.mtu) == 5
        assert [ctx.get(table.pkeys[i]) for i in range(p.num_pkeys)] == [0xFFFF] + [0] * (p.num_pkeys - 1)
        for number, (which, index, word, mask, value) in enumerate(recorded):
            ctx.set(table.ctx.payload, {"table": which, "index": index, "word": word, "bytes": mask, "data": value})
            ctx.set(table.ctx.valid, 1)
            assert ctx.get(table.ctx.ready)
            await ctx.tick()
            valid = abi.GID_ENTRY.unpack(ctx.get(table.gids[1].as_value()))["valid"]
            assert not valid or which != CtxTable.GID or all(w[0] != CtxTable.GID for w in recorded[number + 1 :])
        ctx.set(table.ctx.valid, 0)
        assert ctx.get(table.mtu) == 3
        assert [ctx.get(table.pkeys[i]) for i in range(2)] == [0xFFFF, 0x8123]
        assert abi.GID_ENTRY.unpack(ctx.get(table.gids[1].as_value())) == entry
        assert ctx.get(table.gids[0].as_value()) == 0

    simulate(table, replay)


# --------------------------------------------------------------------------------------------------- MODIFY_QP
@rule("R-QP-1")
@pytest.mark.parametrize("typ,half", list(itertools.product(QpType, range(2))))
def test_every_transition_and_every_refused_attribute(typ, half):
    bench = Bench(seed=10 + typ + half)
    rng, p = bench.rng, bench.p
    qpn = 3

    async def run(ctx):
        await base_objects(bench, ctx)
        await bench.done(ctx, Command.CREATE_QP, qp_words(qpn, typ))
        pairs = list(itertools.product(QpState, QpState))
        for old, new in pairs[half::2]:
            rule = abi.QP_TRANSITIONS.get((typ, old, new))
            bench.set_state(ctx, qpn, typ, old)
            if rule is None:
                words, _ = modify_words(rng, p, qpn, new, Attr(rng.getrandbits(17)))
                await bench.refused(ctx, CmdStatus.BAD_STATE, Command.MODIFY_QP, words)
                continue
            optional = Attr(int(rule.optional) & rng.getrandbits(32))
            good = rule.required | optional
            for bit in range(18):
                mask = int(good) ^ 1 << bit
                if rule.required & 1 << bit:
                    status = CmdStatus.MISSING_ATTR
                elif not rule.optional & 1 << bit:
                    status = CmdStatus.EXTRA_ATTR
                else:
                    continue
                words, _ = modify_words(rng, p, qpn, new, mask, cur_state=int(old))
                await bench.refused(ctx, status, Command.MODIFY_QP, words)
            if rule.optional & Attr.CUR_STATE:
                words, _ = modify_words(rng, p, qpn, new, good | Attr.CUR_STATE, cur_state=(old + 1) % 7)
                await bench.refused(ctx, CmdStatus.BAD_STATE, Command.MODIFY_QP, words)

    simulate(bench.dut, run, limit=200_000)


@rule("R-QP-1", "R-QP-4", "R-QP-5", "R-QP-6", "R-PSN-5", "R-MSN-1", "R-UD-1", "R-QP-7")
@pytest.mark.parametrize("typ", list(QpType))
@pytest.mark.parametrize("config", ["tiny", "gigabit"])
def test_attributes_reach_their_tables(typ, config):
    """Random walks over all transitions; after each the tables, the query and the events are what the model says."""
    bench = Bench(config, seed=20 + typ, p_stall=0.2 if typ == QpType.RC else 0)
    rng, p = bench.rng, bench.p
    qpn = p.num_qps - 1

    async def run(ctx):
        await base_objects(bench, ctx)
        await bench.done(ctx, Command.CREATE_QP, qp_words(qpn, typ))
        model = {table: bench.fields(table, struct, qpn) for table, struct in (CFG | HOT).items()}
        image = abi.CMD_MODIFY_QP.unpack(0) | {"type": int(typ)}
        state = QpState.RESET
        route = [QpState.INIT, QpState.INIT, QpState.RTR, QpState.RTS, QpState.RTS, QpState.SQD, QpState.SQD, QpState.RTS,
                 QpState.ERR, QpState.ERR, QpState.RESET, QpState.RESET, QpState.INIT, QpState.RTR, QpState.RESET]
        for new in route:
            rule = abi.QP_TRANSITIONS[typ, state, new]
            mask = rule.required | Attr(int(rule.optional) & rng.getrandbits(32))
            words, given = modify_words(rng, p, qpn, new, mask, cur_state=int(state))
            if new == QpState.RESET:
                for table in HOT:  # what the engines have left there
                    bench.tables[table, qpn] = [rng.getrandbits(32) for _ in range(32)]
            await bench.done(ctx, Command.MODIFY_QP, words)
            for attr, (names, tables) in FIELDS.items():
                if mask & attr:
                    for name in names:
                        image[name] = given[name]
                        for table in tables:
                            model[table][name] = given[name]
            if typ == QpType.UD and new not in (QpState.RESET, QpState.ERR):
                for table in CFG:
                    model[table]["path_mtu"] = 5  # the port's
            for table in CFG:
                model[table]["state"] = int(new)
            if mask & Attr.RQ_PSN:
                model[CtxTable.RESPONDER_HOT] |= {"epsn": given["rq_psn"], "msn": 0, "ack_psn": (given["rq_psn"] - 1) % (1 << 24)}
            if mask & Attr.SQ_PSN:
                model[CtxTable.REQUESTER_HOT]["psn"] = model[CtxTable.COMPLETER_HOT]["una"] = given["sq_psn"]
            if new == QpState.RESET:
                for table, struct in HOT.items():
                    model[table] = struct.unpack(0)
            for table, struct in (CFG | HOT).items():
                assert bench.fields(table, struct, qpn) == model[table], (new, table)
            assert all(index == qpn for _, index, *_ in bench.writes)
            states = [i for i, (table, _, word, mask, _) in enumerate(bench.writes) if table in CFG and word == 0 and mask & 1]
            assert len(states) == len(CFG)
            if new in (QpState.ERR, QpState.RESET):
                assert states == [0, 1, 2, 3], "the state goes first"
                assert bench.fences == ([4] if new == QpState.RESET else [])
                assert bench.writes[0][0] == CtxTable.ADDRESS
            else:
                assert states == [len(bench.writes) - i for i in (4, 3, 2, 1)], "the state comes last"
                assert bench.writes[-1][0] == CtxTable.ADDRESS
            assert bench.events == {QpState.RTS: [("kick", qpn)], QpState.ERR: [("kick", qpn), ("flush", qpn)]}.get(new, [])
            image["new_state"] = int(new)
            state = new
            await bench.done(ctx, Command.QUERY_QP, [qpn])
            assert not bench.writes
            got = abi.CMD_MODIFY_QP.unpack_words([ctx.get(bench.dut.mailbox.data[i]) for i in range(24)])
            assert got == image | {"qpn": qpn}

    simulate(bench.dut, run, limit=80_000)


@rule("R-QP-1", "R-ADR-3", "R-MTU-1")
@pytest.mark.parametrize("config", ["tiny", "hundred"])
def test_values_out_of_their_limits(config):
    bench = Bench(config, seed=30)
    rng, p = bench.rng, bench.p
    qpn = 2
    limits = {  # state from, to, field: (largest, refused)
        (QpState.RESET, QpState.INIT): {"pkey_index": (p.num_pkeys - 1, [p.num_pkeys, 255]), "access": (31, [32, 255])},
        (QpState.INIT, QpState.RTR): {
            "sgid_index": (p.num_gids - 1, [p.num_gids, 255]), "path_mtu": (4, [0, 5, 6, 7]), "hop_limit": (255, [0]),
            "max_dest_rd_atomic": (p.max_rd_atomic, [p.max_rd_atomic + 1, 255]), "min_rnr_timer": (31, []),
        },
        (QpState.RTR, QpState.RTS): {
            "max_rd_atomic": (p.max_rd_atomic, [p.max_rd_atomic + 1, 128 + p.max_rd_atomic]), "timeout": (31, []),
            "retry_cnt": (7, []), "rnr_retry": (7, []),
        },
    }  # fmt: skip
    stray = {"min_rnr_timer": 0xE0, "timeout": 0x20, "retry_cnt": 8, "rnr_retry": 0x80, "new_state": 0x10, "path_mtu": 0x08}

    async def run(ctx):
        await base_objects(bench, ctx)
        await bench.done(ctx, Command.CREATE_QP, qp_words(qpn))
        await bench.done(ctx, Command.SET_PORT, abi.CMD_SET_PORT.words(mtu=4))
        for (old, new), fields in limits.items():
            mask = abi.QP_TRANSITIONS[QpType.RC, old, new].required
            best = {name: value for name, (value, _) in fields.items()}
            best.setdefault("path_mtu", 4)
            for name, (_, refused) in fields.items():
                for value in refused:
                    words, _ = modify_words(rng, p, qpn, new, mask, **best | {name: value})
                    await bench.refused(ctx, CmdStatus.BAD_PARAM, Command.MODIFY_QP, words)
            for name in (*fields, "new_state"):
                if name in stray:  # bits of the byte beside a narrow field
                    words, _ = modify_words(rng, p, qpn, new, mask, **best)
                    word, bit = divmod(abi.CMD_MODIFY_QP.fields[name].offset, 32)
                    words[word] |= stray[name] << bit
                    status = CmdStatus.BAD_STATE if name == "new_state" else CmdStatus.BAD_PARAM
                    await bench.refused(ctx, status, Command.MODIFY_QP, words)
            words, _ = modify_words(rng, p, qpn, new, mask, **best)
            await bench.done(ctx, Command.MODIFY_QP, words)
        for words in ([p.num_qps], [1 << 31 | qpn]):
            await bench.refused(ctx, CmdStatus.BAD_INDEX, Command.MODIFY_QP, words)
        words, _ = modify_words(rng, p, 3, QpState.INIT, Attr(0))
        await bench.refused(ctx, CmdStatus.NOT_FOUND, Command.MODIFY_QP, words)
        # A value whose attribute is not given does not matter.
        words, _ = modify_words(rng, p, qpn, QpState.RTS, Attr(0), pkey_index=255, timeout=31, max_rd_atomic=255, path_mtu=7)
        await bench.done(ctx, Command.MODIFY_QP, words)

    simulate(bench.dut, run, limit=60_000)


@rule("R-QP-5", "R-EVT-1")
@pytest.mark.parametrize("typ", list(QpType))
def test_errors_of_engines(typ):
    bench = Bench(seed=40, p_stall=0.2)
    qpn = 6

    async def run(ctx):
        await bench.error(ctx, qpn)  # no such QP
        assert not bench.writes and not bench.events
        await base_objects(bench, ctx)
        await bench.done(ctx, Command.CREATE_QP, qp_words(qpn, typ))
        for state in QpState:
            bench.set_state(ctx, qpn, typ, state)
            for repeat in range(2):
                await bench.error(ctx, qpn)
                if state in (QpState.RESET, QpState.ERR) or repeat:
                    assert not bench.writes and not bench.events, state
                else:
                    assert bench.events == [("kick", qpn), ("flush", qpn)]
                    assert [(w[0], w[2], w[3], w[4]) for w in bench.writes] == [
                        (t, 0, 1, int(QpState.ERR)) for t in
                        (CtxTable.ADDRESS, CtxTable.RESPONDER_CFG, CtxTable.COMPLETER_CFG, CtxTable.REQUESTER_CFG)]
            await bench.done(ctx, Command.QUERY_QP, [qpn])
            got = abi.CMD_MODIFY_QP.unpack_words([ctx.get(bench.dut.mailbox.data[i]) for i in range(24)])
            assert got["new_state"] == (QpState.RESET if state == QpState.RESET else QpState.ERR)
            assert got["type"] == typ

    simulate(bench.dut, run, limit=40_000)


def test_probe_reports_commands_and_errors():
    bench = Bench(seed=50)
    seen = []
    over = False

    async def watch(ctx):
        e = bench.engine
        while not over:
            _, _, valid, record, evalid, error = await ctx.tick().sample(
                e.probe.valid, e.probe, e.probe_error.valid, e.probe_error)
            if valid:
                seen.append((record.event.name, record.opcode, record.length))
            if evalid:
                seen.append((error.event.name, error.qpn))

    async def run(ctx):
        nonlocal over
        await base_objects(bench, ctx)
        await bench.done(ctx, Command.CREATE_QP, qp_words(4))
        bench.set_state(ctx, 4, QpType.RC, QpState.RTS)
        await bench.error(ctx, 4)
        await bench.error(ctx, 4)
        await bench.run(ctx, Command.DESTROY_CQ, [1])
        await ctx.tick().repeat(2)
        over = True

    simulate(bench.dut, run, watch, limit=8000)
    assert seen == [("COMMAND", 6, 0), ("COMMAND", 6, 0), ("COMMAND", 10, 0), ("QP_ERROR", 4), ("COMMAND", 7, 4)]


@rule("R-CQ-6")
@pytest.mark.parametrize("busy", [False, True])
def test_broken_cq_takes_its_qps_along(busy):
    """Every running QP with the CQ on either side goes to ERR, no other; one event; no new QP may use it; a CQ of the same number
    works again. Also while commands keep coming."""
    bench = Bench(seed=60 + busy, p_stall=0.2)
    p = bench.p
    users = {2: (1, 2), 3: (2, 1), 4: (2, 2), 5: (1, 1), 7: (3, 1)}
    states = {2: QpState.RTS, 3: QpState.RTR, 4: QpState.RTS, 5: QpState.RESET, 7: QpState.INIT}

    async def run(ctx):
        e = bench.engine
        await base_objects(bench, ctx)
        await bench.done(ctx, Command.CREATE_CQ, cq_words(3))
        for qpn, (send, recv) in users.items():
            await bench.done(ctx, Command.CREATE_QP, qp_words(qpn, send_cqn=send, recv_cqn=recv))
            bench.set_state(ctx, qpn, QpType.RC, states[qpn])
        seen = []
        bench.events.clear()
        ctx.set(e.cq_error.payload, 1)
        ctx.set(e.cq_error.valid, 1)
        await bench.cycle(ctx)
        ctx.set(e.cq_error.valid, 0)
        if busy:
            for _ in range(40):
                for _ in range(12):  # what software needs between two commands
                    await bench.cycle(ctx)
                seen += bench.events
                await bench.done(ctx, Command.QUERY_QP, [4])
                seen += bench.events
                bench.events.clear()
        else:
            for _ in range(2500):
                await bench.cycle(ctx)
            seen += bench.events
        assert seen[0] == ("CQ_ERR", 1)
        assert [event for event in seen if event[0] == "flush"] == [("flush", qpn) for qpn in (2, 3, 7)]
        assert len(seen) == 7
        for qpn in users:
            await bench.done(ctx, Command.QUERY_QP, [qpn])
            got = abi.CMD_MODIFY_QP.unpack_words([ctx.get(bench.dut.mailbox.data[i]) for i in range(24)])
            wanted = QpState.ERR if qpn in (2, 3, 7) else states[qpn]
            assert got["new_state"] == wanted
        await bench.refused(ctx, CmdStatus.BAD_STATE, Command.CREATE_QP, qp_words(6, send_cqn=1, recv_cqn=2))
        await bench.refused(ctx, CmdStatus.BAD_STATE, Command.CREATE_QP, qp_words(6, send_cqn=2, recv_cqn=1))
        for qpn in (2, 3, 5, 7):
            await bench.done(ctx, Command.DESTROY_QP, [qpn])
        await bench.done(ctx, Command.DESTROY_CQ, [1])
        ctx.set(e.cq_error.valid, 1)  # reported late: no such CQ any more
        await bench.cycle(ctx)
        ctx.set(e.cq_error.valid, 0)
        await bench.done(ctx, Command.CREATE_CQ, cq_words(1))
        await bench.done(ctx, Command.CREATE_QP, qp_words(6, send_cqn=1, recv_cqn=1))
        assert p.num_qps == 8

    simulate(bench.dut, run, limit=80_000)


@rule("R-EVT-1")
def test_events_of_errors():
    """An error that no CQE reports makes an async event, also of a QP already in ERR, not of one in RESET."""
    bench = Bench(seed=61)

    async def run(ctx):
        await base_objects(bench, ctx)
        await bench.done(ctx, Command.CREATE_QP, qp_words(4))
        await bench.error(ctx, 4, event=EventType.QP_FATAL)
        assert not bench.events
        bench.set_state(ctx, 4, QpType.RC, QpState.RTS)
        await bench.error(ctx, 4, event=EventType.QP_REQ_ERR)
        assert bench.events == [("kick", 4), ("flush", 4), ("QP_REQ_ERR", 4)]
        await bench.error(ctx, 4, event=EventType.QP_ACCESS_ERR)
        assert bench.events == [("QP_ACCESS_ERR", 4)]

    simulate(bench.dut, run, limit=20_000)


def test_a_reset_after_use_sweeps_the_tables():
    """After a reset nothing exists and no table entry works; after power-up there is nothing to sweep."""
    bench = Bench(seed=62)
    p = bench.p
    dut = ResetInserter(bench.dut.reset)(bench.dut)

    async def run(ctx):
        await bench.cycle(ctx)
        await bench.cycle(ctx)
        assert not ctx.get(bench.engine.sweeping)
        await base_objects(bench, ctx)
        await bench.done(ctx, Command.CREATE_EQ, eq_words(1))
        await bench.done(ctx, Command.CREATE_MR, [0x5A3, *abi.TPT_ENTRY.words(**ring())])
        await bench.done(ctx, Command.CREATE_QP, qp_words(4))
        for table in list(bench.tables):
            bench.tables[table][0] |= 0xFF
        ctx.set(bench.dut.reset, 1)
        await bench.cycle(ctx)
        ctx.set(bench.dut.reset, 0)
        bench.events.clear()
        cycles = 0
        while cycles < 3 or ctx.get(bench.engine.sweeping):
            await bench.cycle(ctx)
            cycles += 1
            assert cycles < 2000
        for (table, _), words in bench.tables.items():
            if table in (*CFG, CtxTable.CQ, CtxTable.EQ, CtxTable.TPT):
                assert words[0] == 0, table
        assert not bench.events
        for command, number in ((Command.DESTROY_QP, 4), (Command.DESTROY_CQ, 1), (Command.DESTROY_EQ, 1),
                                (Command.DESTROY_MR, 0x5A3)):
            await bench.refused(ctx, CmdStatus.NOT_FOUND, command, [number])
        await bench.done(ctx, Command.CREATE_CQ, cq_words(1))
        print("sweep took", cycles, "of", p.tpt_entries)

    simulate(dut, run, limit=20_000)
