"""Registers, mailbox and doorbells over AXI4-Lite with random timing of all channels."""

import pytest

from rnic.abi import (
    COUNTER_BASE,
    COUNTERS,
    DB_CQ,
    DB_EQ,
    DB_RQ,
    DB_SQ,
    DB_SRQ,
    MAGIC,
    MAILBOX_BASE,
    MAILBOX_WORDS,
    REGISTERS,
    register,
)  # fmt: skip
from rnic.config import CONFIGS, Params
from rnic.host.csr import Csr, timer_scale
from tests.unit.streams import seeded, simulate


class Host:
    """An AXI4-Lite manager whose channels start and stall at random."""

    def __init__(self, dut, rng, p_stall=0.5):
        self.bus, self.rng, self.p_stall = dut.axil, rng, p_stall

    def _wait(self):
        return self.rng.randrange(4) if self.rng.random() < self.p_stall else 0

    async def write(self, ctx, address, value, strobes=15, limit=200):
        """The cycles it took; None when there was no answer within ``limit``."""
        bus = self.bus
        begin = {"aw": self._wait(), "w": self._wait()}
        ctx.set(bus.awaddr, address)
        ctx.set(bus.wdata, value)
        ctx.set(bus.wstrb, strobes)
        open_channels = {"aw", "w"}
        for cycle in range(limit):
            for channel in open_channels:
                ctx.set(getattr(bus, channel + "valid"), cycle >= begin[channel])
            ctx.set(bus.bready, self.rng.random() >= self.p_stall)
            _, _, aw, w, b, bready, resp = await ctx.tick().sample(
                bus.awready & bus.awvalid, bus.wready & bus.wvalid, bus.bvalid, bus.bready, bus.bresp)
            for channel, taken in (("aw", aw), ("w", w)):
                if taken and channel in open_channels:
                    open_channels.remove(channel)
                    ctx.set(getattr(bus, channel + "valid"), 0)
            if b:
                assert not open_channels, "answer before address and data were taken"
                assert resp == 0
                if bready:
                    ctx.set(bus.bready, 0)
                    return cycle
        return None

    async def read(self, ctx, address):
        bus = self.bus
        for _ in range(self._wait()):
            await ctx.tick()
        ctx.set(bus.araddr, address)
        ctx.set(bus.arvalid, 1)
        await ctx.tick().until(bus.arready)
        ctx.set(bus.arvalid, 0)
        for _ in range(100):
            ctx.set(bus.rready, self.rng.random() >= self.p_stall)
            _, _, valid, ready, value, resp = await ctx.tick().sample(bus.rvalid, bus.rready, bus.rdata, bus.rresp)
            if valid and ready:
                assert resp == 0
                ctx.set(bus.rready, 0)
                return value
        raise TimeoutError("no read data")


def _dut(config="tiny"):
    p = Params(CONFIGS[config])
    return p, Csr(p)


@pytest.mark.parametrize("config", ["tiny", "hundred"])
def test_capabilities(config):
    p, dut = _dut(config)
    host = Host(dut, seeded(1))
    wanted = {
        "MAGIC": MAGIC, "CLOCK_HZ": p.config.clock_hz, "DATA_WIDTH": p.data_width, "NUM_QPS": p.num_qps, "NUM_MRS": p.num_mrs,
        "NUM_CQS": p.num_cqs, "NUM_EQS": p.num_eqs, "NUM_GIDS": p.num_gids, "NUM_PKEYS": p.num_pkeys, "MAX_SGE": p.max_sge,
        "MAX_RD_ATOMIC": p.max_rd_atomic, "MAX_PMTU": 5, "MAX_LOG_RING": 0x100F, "FEATURES": 1, "ABI_VERSION": 1,
        "SQ_OUTSTANDING": p.sq_outstanding, "STATUS": 0, "IRQ_CAUSE": 0, "IRQ_MASK": 0, "CMD_STATUS": 0,
        "TIMER_SCALE": {"tiny": 512, "hundred": 1024}[config],
    }  # fmt: skip

    async def bench(ctx):
        for name, value in wanted.items():
            assert await host.read(ctx, register(name)) == value, name
            await host.write(ctx, register(name), 0xFFFF_FFFF, 0)  # no strobes: no change
            assert await host.read(ctx, register(name)) == value, name
        for address in (0x40, 0x11C, 0x3FC, 0x500, COUNTER_BASE + 4 * len(COUNTERS), 0xFFC, 0x8000, DB_SQ, DB_EQ, 0xFFFFC):
            await host.write(ctx, address, 0)
            assert await host.read(ctx, address) == 0, hex(address)

    simulate(dut, bench, limit=6000)


def test_timer_scale_of_odd_clocks():
    assert [timer_scale(hz) for hz in (125_000_000, 250_000_000, 100_000_000, 1_000_000)] == [512, 1024, 410, 4]


@pytest.mark.parametrize("seed", range(3))
def test_registers_and_mailbox_against_a_model(seed):
    """Random writes with random strobes; read-only registers do not change."""
    p, dut = _dut()
    rng = seeded(seed)
    host = Host(dut, rng)
    memory = {MAILBOX_BASE + 4 * i: 0 for i in range(MAILBOX_WORDS)}
    memory |= {register("TIMER_SCALE"): 512, register("IRQ_MASK"): 0}
    masks = {register("IRQ_MASK"): (1 << p.num_eqs) - 1}
    read_only = [reg.offset for reg in REGISTERS if reg.access == "RO" and not reg.name.startswith(("CYCLE", "CMD"))]

    async def bench(ctx):
        for address in read_only:
            memory[address] = await host.read(ctx, address)
        for address in memory:  # a mailbox word is random after power-up as far as software knows
            if address >= MAILBOX_BASE:
                await host.write(ctx, address, 0)
        for _ in range(150):
            address, value, strobes = rng.choice(list(memory)), rng.getrandbits(32), rng.getrandbits(4)
            if rng.random() < 0.5:
                await host.write(ctx, address | rng.randrange(4), value, strobes)
                if address not in read_only:
                    keep = sum(0xFF << 8 * b for b in range(4) if not strobes >> b & 1)
                    memory[address] = (memory[address] & keep | value & ~keep) & masks.get(address, 0xFFFF_FFFF)
            else:
                assert await host.read(ctx, address | rng.randrange(4)) == memory[address], hex(address)

    simulate(dut, bench, limit=8000)


def test_doorbells():
    p, dut = _dut()
    rng = seeded(3)
    host = Host(dut, rng)
    ports = {DB_SQ: (dut.doorbell_sq, p.num_qps), DB_RQ: (dut.doorbell_rq, p.num_qps), DB_CQ: (dut.doorbell_cq, p.num_cqs),
             DB_EQ: (dut.doorbell_eq, p.num_eqs)}
    got, wanted = [], []
    bad = wanted_bad = 0
    over = False

    async def monitor(ctx):
        nonlocal bad
        while not over:
            for port, _ in ports.values():
                ctx.set(port.ready, rng.random() < 0.4)
            sampled = await ctx.tick().sample(
                dut.bad_id, *(port.valid & port.ready for port, _ in ports.values()),
                *(port.payload for port, _ in ports.values()))
            bad += sampled[2]
            for base, moved, payload in zip(ports, sampled[3:7], sampled[7:], strict=True):
                if moved:
                    got.append((base, payload.id, payload.counter, payload.arm))

    async def bench(ctx):
        nonlocal wanted_bad, over
        for _ in range(80):
            base = rng.choice([*ports, DB_SRQ])
            count = ports[base][1] if base in ports else 1
            number = rng.choice([rng.randrange(count), count - 1, count, 0x3FFF, rng.randrange(1 << 14)])
            value, strobes = rng.getrandbits(32), rng.choice([15, 15, 15, rng.getrandbits(4)])
            if strobes == 15 and base in ports and number < count:
                wanted.append((base, number, value & 0xFF_FFFF, value >> 30))
            elif strobes == 15:
                wanted_bad += 1
            assert await host.write(ctx, base + 4 * number, value, strobes) is not None
            assert got == wanted  # before the write is answered
        over = True

    simulate(dut, bench, monitor, limit=8000)
    assert bad == wanted_bad > 5 and len(wanted) > 20


def test_stalled_doorbell_holds_the_answer():
    _, dut = _dut()
    host = Host(dut, seeded(4), 0)

    async def bench(ctx):
        assert await host.write(ctx, DB_SQ + 4, 7, limit=60) is None
        ctx.set(dut.doorbell_sq.ready, 1)
        await ctx.tick().until(dut.axil.bvalid)
        ctx.set(dut.axil.bready, 1)
        await ctx.tick()
        ctx.set(dut.axil.bready, 0)
        assert await host.write(ctx, DB_SQ + 4, 8) < 10

    simulate(dut, bench)


def test_command_handshake_and_mailbox_ownership():
    _, dut = _dut()
    host = Host(dut, seeded(5))
    op, status = register("CMD_OP"), register("CMD_STATUS")

    async def bench(ctx):
        await host.write(ctx, MAILBOX_BASE + 4 * 9, 0x1234_5678)
        await host.write(ctx, op, 5, 0b0111)  # not a whole write: no command
        assert not ctx.get(dut.command.valid)
        await host.write(ctx, op, 11)
        assert ctx.get(dut.command.valid) and ctx.get(dut.command.payload) == 11
        assert await host.read(ctx, status) == 1 << 31
        await host.write(ctx, op, 12)  # busy: ignored
        assert ctx.get(dut.command.payload) == 11
        ctx.set(dut.command.ready, 1)
        await ctx.tick()
        assert not ctx.get(dut.command.valid)
        ctx.set(dut.mailbox_index, 9)
        await ctx.tick().repeat(2)
        assert ctx.get(dut.mailbox_value) == 0x1234_5678
        await host.write(ctx, MAILBOX_BASE + 4 * 9, 1)  # the engine's now
        ctx.set(dut.mailbox_index, 10)
        ctx.set(dut.mailbox_data, 0xABCD)
        ctx.set(dut.mailbox_write, 1)
        await ctx.tick()
        ctx.set(dut.mailbox_write, 0)
        ctx.set(dut.result.payload, 6)
        ctx.set(dut.result.valid, 1)
        await ctx.tick()
        ctx.set(dut.result.valid, 0)
        assert await host.read(ctx, status) == 6
        assert await host.read(ctx, op) == 11
        assert await host.read(ctx, MAILBOX_BASE + 4 * 9) == 0x1234_5678
        assert await host.read(ctx, MAILBOX_BASE + 4 * 10) == 0xABCD
        ctx.set(dut.command.ready, 0)
        await host.write(ctx, op, 0x10B)  # does not fit: an unknown code, not 0x0B
        assert ctx.get(dut.command.valid) and ctx.get(dut.command.payload) == 0xFF

    simulate(dut, bench)


def test_interrupts_status_and_reset_request():
    p, dut = _dut()
    host = Host(dut, seeded(6))
    requests = 0
    over = False

    async def bench(ctx):
        nonlocal over
        ctx.set(dut.eq_event, 0b10)
        await ctx.tick()
        ctx.set(dut.eq_event, 0)
        assert await host.read(ctx, register("IRQ_CAUSE")) == 2
        assert ctx.get(dut.irq) == 0  # masked
        await host.write(ctx, register("IRQ_MASK"), 3)
        await ctx.tick()
        assert ctx.get(dut.irq) == 2
        await host.write(ctx, register("IRQ_CAUSE"), 1)
        assert await host.read(ctx, register("IRQ_CAUSE")) == 2
        await host.write(ctx, register("IRQ_CAUSE"), 0xFFFF_FFFF, 0b1110)  # its byte is not strobed
        assert await host.read(ctx, register("IRQ_CAUSE")) == 2
        await host.write(ctx, register("IRQ_CAUSE"), 2)
        assert await host.read(ctx, register("IRQ_CAUSE")) == 0
        assert ctx.get(dut.irq) == 0
        ctx.set(dut.eq_event, 1)  # a new event in the very cycle of the clear survives
        await host.write(ctx, register("IRQ_CAUSE"), 3)
        ctx.set(dut.eq_event, 0)
        assert await host.read(ctx, register("IRQ_CAUSE")) == 1
        ctx.set(dut.fatal, 1)
        assert await host.read(ctx, register("STATUS")) == 1
        ctx.set(dut.reset_busy, 1)
        assert await host.read(ctx, register("STATUS")) == 3
        await host.write(ctx, register("CONTROL"), 0xFFFF_FFFE)
        assert requests == 0
        await host.write(ctx, register("CONTROL"), 1)
        assert await host.read(ctx, register("CONTROL")) == 0
        over = True

    async def monitor(ctx):
        nonlocal requests
        while not over:
            _, _, pulse = await ctx.tick().sample(dut.reset_request)
            requests += pulse

    simulate(dut, bench, monitor)
    assert requests == 1 and p.num_eqs == 2


def test_cycle_counter_and_counters():
    _, dut = _dut()
    host = Host(dut, seeded(7))

    async def bench(ctx):
        before = ctx.get(dut.cycle)
        low = await host.read(ctx, register("CYCLE_LO"))
        assert before < low < ctx.get(dut.cycle)
        assert await host.read(ctx, register("CYCLE_HI")) == 0

        for i in (0, 5, len(COUNTERS) - 1):
            value = await host.read(ctx, COUNTER_BASE + 4 * i)
            assert value == 0xC000_0000 + i

    async def counters(ctx):
        """The read port of `Counters`: two cycles."""
        pipe = [0, 0]
        for _ in range(150):
            _, _, index = await ctx.tick().sample(dut.counter_index)
            pipe = [0xC000_0000 + index, pipe[0]]
            ctx.set(dut.counter_value, pipe[1])

    simulate(dut, bench, counters)


def test_high_word_of_the_cycle_counter_is_latched():
    """A carry between the two reads does not tear the value."""
    _, dut = _dut()
    host = Host(dut, seeded(8), 0)
    found = []

    async def bench(ctx):
        for start in range(4):
            ctx.set(dut.cycle, (5 << 32) - 4 + start)
            low = await host.read(ctx, register("CYCLE_LO"))
            await ctx.tick().repeat(10)
            high = await host.read(ctx, register("CYCLE_HI"))
            found.append(high << 32 | low)
            assert (5 << 32) - 4 <= found[-1] < (5 << 32) + 20
    simulate(dut, bench)
    assert {value >> 32 for value in found} == {4, 5}
