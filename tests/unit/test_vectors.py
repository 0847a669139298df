"""tests/data/vectors.txt: which frame goes through the ICRC engine, the parser and the builder, and why one does not."""

import re
from pathlib import Path

import pytest

from rnic.stream.crc32 import INIT, Crc32Unstep, Crc32Word
from rnic.wire.icrc import masked_datagram
from tests.rules import rule
from tests.unit import test_rx_parse, test_tx_build
from tests.unit.streams import simulate

TEXT = (Path(__file__).parent.parent / "data" / "vectors.txt").read_text()
VECTORS = {name: bytes.fromhex(raw) for name, raw in re.findall(r"^## (\w+) .*\nlen.*\n([0-9a-f]+)$", TEXT, re.M)}

V1 = "RoCEv1: raw bytes in the engine; the parser hands it to eth_rx; never built"
FOREIGN = "another sender's IP identification, ports or UDP checksum, which the builder does not have"
NEVER = "has bits set that the builder never sends"

NOT_PARSED = {"V3": V1, "V4": V1}
NOT_BUILT = {"V1": FOREIGN, "V2": FOREIGN, "V3": V1, "V4": V1, "V5": FOREIGN, "B4": NEVER + ": FECN", "B6": NEVER + ": no DF",
             "B8": NEVER + ": MigReq"}  # fmt: skip


def test_every_vector_is_somewhere():
    """The engine takes all (below), the parser and the builder all but those with a reason."""
    assert len(VECTORS) == 34
    assert test_rx_parse.VECTORS == VECTORS and test_tx_build.vectors() == VECTORS
    assert {*test_tx_build.BUILT, "B5"} == VECTORS.keys() - NOT_BUILT.keys()  # B5: B1 again, one identification later
    assert NOT_PARSED.keys() < VECTORS.keys()  # test_rx_parse.test_vectors: all others, and these two on eth


@pytest.mark.parametrize("width", [64, 512])
@rule("R-ICRC-1", "R-ICRC-2", "R-ICRC-5", "R-ICRC-8", "R-ICRC-9")
def test_engine(width):
    """All 34 masked frames behind the stand-in LRH, RoCEv1 as well, through the CRC by words; the zeros that
    fill the last word are taken back."""
    lanes = width // 8
    engine, back = Crc32Word(width), Crc32Unstep(width)
    cases = [(masked_datagram(raw[14:-4]), raw[-4:]) for raw in VECTORS.values()]
    states = []

    async def feed(ctx):
        for body, _ in cases:
            message = b"\xff" * 8 + body
            message += bytes(-len(message) % lanes)
            for at in range(0, len(message), lanes):
                ctx.set(engine.valid, 1)
                ctx.set(engine.start, at == 0)
                ctx.set(engine.data, int.from_bytes(message[at : at + lanes], "little"))
                await ctx.tick()
        ctx.set(engine.valid, 0)

    async def drain(ctx):
        for body, _ in cases:
            for _ in range(-(-(8 + len(body)) // lanes)):
                done = 0
                while not done:
                    _, _, done, state = await ctx.tick().sample(engine.done, engine.state)
            states.append(state)

    simulate(engine, feed, drain)

    async def take_back(ctx):
        for (body, _), state in zip(cases, states, strict=True):
            ctx.set(back.valid, 1)
            ctx.set(back.state, state)
            ctx.set(back.count, -(8 + len(body)) % lanes // 4)
            await ctx.tick()
        ctx.set(back.valid, 0)

    async def check(ctx):
        await ctx.tick().repeat(back.stages)
        for _, wire in cases:
            _, _, valid, state = await ctx.tick().sample(back.o_valid, back.o_state)
            assert valid and (state ^ INIT).to_bytes(4, "little") == wire

    simulate(back, take_back, check)
