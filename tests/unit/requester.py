"""Helpers of the requester's unit tests: context writes, 2-cycle read ports, one item on a stream."""

from .streams import send

__all__ = ["ctx_write", "ctx_words", "offer", "read_port"]


async def offer(ctx, port, payload):
    """One item on a stream; returns after the cycle that took it."""
    await send(ctx, port, [payload])


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
