"""MODIFY_QP: every transition and every refusal; attributes reach their tables."""

import itertools

import pytest

from rnic import abi
from rnic.abi import Attr, CmdStatus, Command, CtxTable, QpState, QpType
from tests.rules import rule
from tests.unit.command_bench import CFG, FIELDS, HOT, Bench, base_objects, modify_words, qp_words
from tests.unit.streams import simulate


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
