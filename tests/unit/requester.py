"""Helpers of the requester's unit tests: context writes, 2-cycle read ports, runs with background benches."""

from amaranth.sim import Simulator

__all__ = ["ctx_write", "ctx_words", "offer", "read_port", "run"]


async def offer(ctx, port, payload):
    """One item on a stream; returns after the cycle that took it."""
    ctx.set(port.payload, payload)
    ctx.set(port.valid, 1)
    ready = False
    while not ready:
        _, _, ready = await ctx.tick().sample(port.ready)
    ctx.set(port.valid, 0)


async def ctx_write(ctx, dut, table, index, word, value, mask=0xF):
    """One write of the command engine."""
    await offer(ctx, dut.ctx, {"table": table, "index": index, "word": word, "bytes": mask, "data": value})


async def ctx_words(ctx, dut, table, index, words):
    """A whole record from its words."""
    for word, value in enumerate(words):
        await ctx_write(ctx, dut, table, index, word, value)


def read_port(addr, outputs):
    """A background bench that answers a 2-cycle read port as a context table does.

    ``outputs``: list of (signal, function of the address). A change made in cycle c is seen by an address of cycle c + 1,
    not by one of cycle c.
    """
    async def bench(ctx):
        depth = 1 << len(addr)
        shown = {n: [f(n) for _, f in outputs] for n in range(depth)}
        pending = shown[0]
        async for _, _, at in ctx.tick().sample(addr):
            for (signal, _), value in zip(outputs, pending, strict=True):
                ctx.set(signal, value)
            pending = shown[at]
            shown = {n: [f(n) for _, f in outputs] for n in range(depth)}
    return bench


def run(dut, *benches, background=(), limit=2000, vcd=None):
    """Run ``benches`` until all returned; TimeoutError after ``limit`` cycles."""
    left = len(benches)

    def counted(bench):
        async def main(ctx):
            nonlocal left
            await bench(ctx)
            left -= 1
        return main

    async def watchdog(ctx):
        for _ in range(limit):
            await ctx.tick()
            if not left:
                return
        raise TimeoutError(f"{left} of {len(benches)} benches still wait after {limit} cycles")

    sim = Simulator(dut)
    sim.add_clock(8e-9)
    for bench in background:
        sim.add_testbench(bench, background=True)
    for bench in benches:
        sim.add_testbench(counted(bench))
    sim.add_testbench(watchdog)
    if vcd is None:
        sim.run()
    else:
        with sim.write_vcd(vcd):
            sim.run()
