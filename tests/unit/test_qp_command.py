"""Command engine: every object command, every refusal, errors; what it wrote is seen on the context bus."""


import pytest
from amaranth import ResetInserter

from rnic import abi
from rnic.abi import Access, CmdStatus, Command, CtxTable, EventType, QpState, QpType
from rnic.qp.port import PortTable
from tests.rules import rule
from tests.unit.command_bench import CFG, HOT, Bench, base_objects, cq_words, eq_words, qp_words, ring
from tests.unit.streams import simulate


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
        ctx.set(table.gid_index_1, 1)
        assert ctx.get(table.mtu) == 5
        assert [ctx.get(table.pkeys[i]) for i in range(p.num_pkeys)] == [0xFFFF] + [0] * (p.num_pkeys - 1)
        for number, (which, index, word, mask, value) in enumerate(recorded):
            ctx.set(table.ctx.payload, {"table": which, "index": index, "word": word, "bytes": mask, "data": value})
            ctx.set(table.ctx.valid, 1)
            assert ctx.get(table.ctx.ready)
            await ctx.tick()
            valid = abi.GID_ENTRY.unpack(ctx.get(table.gid_1.as_value()))["valid"]
            assert not valid or which != CtxTable.GID or all(w[0] != CtxTable.GID for w in recorded[number + 1 :])
        ctx.set(table.ctx.valid, 0)
        assert ctx.get(table.mtu) == 3
        assert [ctx.get(table.pkeys[i]) for i in range(2)] == [0xFFFF, 0x8123]
        assert abi.GID_ENTRY.unpack(ctx.get(table.gid_1.as_value())) == entry
        assert ctx.get(table.gid_0.as_value()) == 0

    simulate(table, replay)


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
    bench = Bench(seed=62, share=False)
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
