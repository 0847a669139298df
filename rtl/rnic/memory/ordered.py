"""A translation client that gets its answers in the order of its questions."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import XlateRequest, XlateResponse, XlateSignature

__all__ = ["OrderedRequest", "OrderedResponse", "OrderedXlate"]


class OrderedRequest(data.StructLayout):
    """A translation request without tag; ``meta`` comes back with the answer."""

    def __init__(self, p: Params, meta):
        fields = {name: shape for name, shape in XlateRequest(p, 1).members.items() if name != "tag"}
        super().__init__({**fields, "meta": meta})


class OrderedResponse(data.StructLayout):
    """A translation response without tag."""

    def __init__(self, p: Params, meta):
        fields = {name: shape for name, shape in XlateResponse(p, 1).members.items() if name != "tag"}
        super().__init__({**fields, "meta": meta})


class OrderedXlate(wiring.Component):
    """Numbers requests with tags, keeps answers that come early, and hands them on in request order.

    Timing: a request passes combinationally; an answer to the oldest request shows on ``response`` 2 cycles after it
    came, one per cycle. At most ``2**tag_bits`` requests are under way, answered ones not yet taken included, so the
    answers of the translation block never wait for this client.

    Parameters: ``tag_bits`` of the client; ``meta``, a shape carried from request to response.
    Members: ``request``, ``response`` streams; ``xlate``, the client.
    """

    def __init__(self, p: Params, tag_bits: int, meta=0):
        self.p, self.tag_bits, self.meta = p, tag_bits, meta
        super().__init__({
            "request": In(stream.Signature(OrderedRequest(p, meta))),
            "response": Out(stream.Signature(OrderedResponse(p, meta))),
            "xlate": Out(XlateSignature(p, tag_bits)),
        })

    def elaborate(self, platform):
        m = Module()
        slots = 1 << self.tag_bits
        answer_shape = XlateResponse(self.p, self.tag_bits)
        m.submodules.answers = answers = memory.Memory(shape=answer_shape, depth=slots, init=[])
        answer_write, answer_read = answers.write_port(), answers.read_port(domain="comb")

        next_tag = Signal(self.tag_bits)
        oldest = Signal(self.tag_bits)
        pending = Signal(range(slots + 1))  # slots in use
        waiting = Signal(slots)  # slot's answer has not come
        room = Signal()
        asked = Signal()
        answered = Signal()
        out_free = Signal()
        take = Signal()

        request, answer = self.xlate.request, self.xlate.response
        m.d.comb += [
            room.eq(pending != slots),
            request.valid.eq(self.request.valid & room),
            self.request.ready.eq(request.ready & room),
            asked.eq(request.valid & request.ready),
            request.p.tag.eq(next_tag),
            *(request.p[name].eq(self.request.p[name]) for name in XlateRequest(self.p, 1).members if name != "tag"),
            answer.ready.eq(1),
            answered.eq(answer.valid),
            answer_write.en.eq(answered),
            answer_write.addr.eq(answer.p.tag),
            answer_write.data.eq(answer.payload),
            answer_read.addr.eq(oldest),
            out_free.eq(~self.response.valid | self.response.ready),
            take.eq(out_free & (pending != 0) & ~waiting.bit_select(oldest, 1)),
        ]
        with m.If(asked):
            m.d.sync += [next_tag.eq(next_tag + 1), waiting.bit_select(next_tag, 1).eq(1)]
        with m.If(answered):
            m.d.sync += [
                waiting.bit_select(answer.p.tag, 1).eq(0),
                Assert(waiting.bit_select(answer.p.tag, 1), Format("translation answer with tag {} nobody waits for",
                                                                   answer.p.tag)),
            ]
        m.d.sync += pending.eq(pending + asked - take)
        with m.If(take):
            m.d.sync += oldest.eq(oldest + 1)
        with m.If(out_free):
            m.d.sync += self.response.valid.eq(take)
            with m.If(take):
                m.d.sync += [
                    *(self.response.p[name].eq(answer_read.data[name])
                      for name in answer_shape.members if name != "tag"),
                ]
        if Shape.cast(self.meta).width:  # there are no memories of zero width
            m.submodules.metas = metas = memory.Memory(shape=self.meta, depth=slots, init=[])
            meta_write, meta_read = metas.write_port(), metas.read_port(domain="comb")
            m.d.comb += [
                meta_write.en.eq(asked),
                meta_write.addr.eq(next_tag),
                meta_write.data.eq(self.request.p.meta),
                meta_read.addr.eq(oldest),
            ]
            with m.If(take):
                m.d.sync += self.response.p.meta.eq(meta_read.data)
        return m
