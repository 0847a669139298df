"""Several translation clients of one block on one port of the translation block."""

from amaranth import *
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import XlateRequest, XlateResponse, XlateSignature
from ..stream.arbiter import PriorityArbiter
from ..stream.buffer import HalfRegister

__all__ = ["XlateJoin"]


class XlateJoin(wiring.Component):
    """Gives clients of tag widths ``bits`` one port ``xlate``; the first client is the most urgent.

    A client must take its answers at once or have room for all it asks for: a waiting answer stops those of its neighbours.

    Timing: one cycle each way, one item every 2 cycles; all outputs from registers but the clients' ``request.ready``. Order is
    kept per client.

    Members: ``client_0``, ``client_1``...: service side; ``xlate``, the client, of tag width ``tag_bits``.
    """

    def __init__(self, p: Params, bits: list[int]):
        self.p, self.bits = p, bits
        self.tag_bits = self.width(bits)
        super().__init__({
            **{f"client_{n}": In(XlateSignature(p, width)) for n, width in enumerate(bits)},
            "xlate": Out(XlateSignature(p, self.tag_bits)),
        })

    @staticmethod
    def width(bits: list[int]) -> int:
        """Tag width of the port for clients of widths ``bits``."""
        return max(bits) + (len(bits) - 1).bit_length()

    def elaborate(self, platform):
        p, most = self.p, max(self.bits)
        m = Module()
        m.submodules.requests = requests = PriorityArbiter(XlateRequest(p, self.tag_bits), len(self.bits), half=True)
        m.submodules.answers = answers = HalfRegister(XlateResponse(p, self.tag_bits))
        wiring.connect(m, requests.o, wiring.flipped(self.xlate.request))
        wiring.connect(m, wiring.flipped(self.xlate.response), answers.i)
        answer = answers.o
        for n, width in enumerate(self.bits):
            client, mine = getattr(self, f"client_{n}"), Signal(name=f"mine_{n}")
            asks, gets = client.request, client.response
            m.d.comb += [
                requests.i[n].valid.eq(asks.valid),
                asks.ready.eq(requests.i[n].ready),
                *(requests.i[n].p[name].eq(asks.p[name]) for name in XlateRequest(p, 1).members if name != "tag"),
                requests.i[n].p.tag.eq(Cat(asks.p.tag, Const(0, most - width), Const(n, self.tag_bits - most))),
                mine.eq(answer.p.tag[most:] == n),
                gets.valid.eq(answer.valid & mine),
                *(gets.p[name].eq(answer.p[name]) for name in XlateResponse(p, 1).members),
            ]
            with m.If(mine):
                m.d.comb += answer.ready.eq(gets.ready)
        return m
