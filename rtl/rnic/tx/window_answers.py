"""The part of the translation window that asks and takes the answers."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring

from ..records import ProbeEvent, XlateStatus
from ..stream.buffer import HalfRegister
from ..stream.fifo import StreamFifo

__all__ = ["WindowAnswers"]


class WindowAnswers(wiring.Component):
    """The translation client of `TranslateWindow`, which sets the attributes: requests, and answers beside their segments."""

    # ------------------------------------------------------------------------------------------------------- requests
    def _requests(self, m):
        """New requests, and those for the rest of a segment, which go first; returns the port for new ones."""
        m.submodules.request_out = out = HalfRegister(self.xlate.request.payload.shape())
        wiring.connect(m, out.o, wiring.flipped(self.xlate.request))
        new = stream.Signature(out.i.payload.shape()).create(path=("request_new",))
        self._rest = stream.Signature(out.i.payload.shape()).create(path=("request_rest",))
        m.d.comb += [
            out.i.valid.eq(new.valid | self._rest.valid),
            out.i.payload.eq(Mux(self._rest.valid, self._rest.payload.as_value(), new.payload.as_value())),
            self._rest.ready.eq(out.i.ready),
            new.ready.eq(out.i.ready & ~self._rest.valid),
        ]
        return new

    # -------------------------------------------------------------------------------------------------------- answers
    def _answers(self, m):
        """Answers pass in two steps beside the segment they are for. They are never held up: the rest of a segment, if any,
        waits in a FIFO that has room for all segments, and is asked for when no answer uses the segment memory."""
        response = self.xlate.response
        m.submodules.rests = rests = StreamFifo(
            data.StructLayout({"index": self.entries.bit_length() - 1, "span": 13}), self.entries)
        read = self._segments.read_port()
        lookup = Signal()  # the rest of a segment is looked up in this cycle
        rest_busy = Signal()
        m.d.comb += [
            response.ready.eq(1),
            lookup.eq(rests.o.valid & ~response.valid & ~rest_busy),
            read.addr.eq(Mux(response.valid, response.payload.tag[1:], rests.o.payload.index)),
        ]

        latched = Signal(response.payload.shape())
        answer = Signal(response.payload.shape())
        segment = Signal(self._segments.shape)
        differs = Signal()  # the answer does not cover the segment
        valid = Signal(2)
        m.d.sync += [
            valid.eq(Cat(response.valid, valid)),
            latched.eq(response.payload),
            answer.eq(latched),
            segment.eq(read.data),
            differs.eq(latched.span != read.data.length),
        ]

        slot = answer.tag[1 + self.segment_bits :]
        second = answer.tag[0]
        bad = Signal()
        more = Signal()
        done = Signal()
        m.d.comb += [
            bad.eq(answer.status != XlateStatus.OK),
            more.eq(~bad & ~second & differs),
            done.eq(valid[1] & ~more),
            rests.i.valid.eq(valid[1] & more),
            rests.i.payload.index.eq(answer.tag[1:]),
            rests.i.payload.span.eq(answer.span),
            self._answered.eq(Mux(done, 1 << slot, 0)),
        ]
        for other in range(self.slots):
            with m.If(self._opened[other]):
                m.d.sync += self._bad[other].eq(0)
            with m.Elif(valid[1] & bad & (slot == other) & ~self._bad[other]):
                m.d.sync += [self._bad[other].eq(1), self._status[other].eq(answer.status)]
        for piece, store in enumerate((self._piece_0, self._piece_1)):
            write = store.write_port()
            m.d.comb += [
                write.addr.eq(answer.tag[1:]),
                write.en.eq(valid[1] & (second == piece)),
                write.data.address.eq(answer.address),
                write.data.span.eq(answer.span),
                write.data.two.eq(more),
            ]
        m.d.sync += [
            Assert(~rests.i.valid | rests.i.ready, "TranslateWindow: more rests than segments"),
            Assert(~valid[1] | bad | ((answer.span != 0) & (answer.span <= segment.length)),
                   Format("TranslateWindow: answer of {} bytes for {}", answer.span, segment.length)),
        ]  # fmt: skip
        if self.p.probe:
            m.d.comb += [
                self.probe.valid.eq(done & ~bad),
                self.probe.event.eq(ProbeEvent.LOCAL_TRANSLATED),
                self.probe.qpn.eq(segment.qpn),
                self.probe.psn.eq(segment.psn),
                self.probe.length.eq(segment.length),
            ]

        # The rest of a segment: look up, read, add low half, add high half, ask.
        rest = Signal(rests.o.payload.shape())
        step = Signal(4)
        low = Signal(33)
        ready = Signal()
        request = self._rest
        m.d.comb += [
            rests.o.ready.eq(lookup),
            request.valid.eq(ready),
            request.payload.tag.eq(Cat(Const(1, 1), rest.index)),
            request.payload.rights.eq(self.rights),
        ]
        m.d.sync += step.eq(Cat(lookup, step))
        with m.If(lookup):
            m.d.sync += [rest.eq(rests.o.payload), rest_busy.eq(1)]
        with m.If(step[1]):
            m.d.sync += [
                low.eq(segment.va[:32] + rest.span),
                request.payload.va[32:].eq(segment.va[32:]),
                request.payload.key.eq(segment.key),
                request.payload.pd.eq(segment.pd),
                request.payload.length.eq(segment.length - rest.span),
            ]
        with m.If(step[2]):
            m.d.sync += [
                request.payload.va.eq(Cat(low[:32], request.payload.va[32:] + low[32])),
                ready.eq(1),
            ]
        with m.If(request.valid & request.ready):
            m.d.sync += [ready.eq(0), rest_busy.eq(0)]
