"""Translation of outgoing packets: several under way, those that are ready overtake those of other QPs that wait."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import GatherSegment, Probe, ProbeEvent, TxJob, XlateSignature, XlateStatus
from ..stream.arbiter import RoundRobin
from ..stream.buffer import SkidBuffer, StreamRegister
from ..stream.fifo import StreamFifo

__all__ = ["PacketPieces", "TranslateWindow", "TranslatedJob", "window_shape"]


def window_shape(p: Params) -> tuple[int, int]:
    """Packets in translation at once (a power of two, at most 8), and bits of a segment number within a packet."""
    return 1 << min(3, p.desc_depth.bit_length() - 1), max(1, (p.max_sge - 1).bit_length())


class TranslatedJob(data.StructLayout):
    """A packet in the order in which its payload is read. ``status`` other than OK: nothing of it is read."""

    def __init__(self, p: Params):
        super().__init__({"job": TxJob(p), "status": XlateStatus})


class PacketPieces(data.StructLayout):
    """Where a segment lies: ``span_0`` bytes at ``address_0`` and, with ``two``, ``span_1`` bytes at ``address_1``.
    ``last`` closes the packet."""

    def __init__(self, p: Params):
        super().__init__({
            "address_0": 64, "span_0": 13, "two": 1, "address_1": 64, "span_1": 13, "last": 1,
            "qpn": p.qpn_bits, "psn": 24,
        })  # fmt: skip


class TranslateWindow(wiring.Component):
    """Takes jobs and their segments, translates all segments, hands on jobs whose segments are all translated.

    A packet leaves when all its segments are answered and no older packet of its QP is left; packets of different QPs
    overtake each other, packets with inline payload keep their order among all QPs; a marker leaves behind all before it. A
    segment is asked for as a whole (PD of the job, ``rights``: abi.Access bits, 0 for a local read) and, when the answer
    covers less, once more for the rest: a span ends at a 4 KiB page or with
    the segment, which has at most 4096 bytes, so there are no third pieces (Assert). Segments of length 0 are skipped
    (R-WQ-4). The first error of a packet is its status.

    Ports: ``job``, ``segment`` (as the segmenter sends them), ``xlate`` client; ``o`` jobs, ``pieces`` the segments of those
    jobs that have some and status OK, same order.

    Timing: one segment per cycle, one packet every 2 cycles, of one QP every 3; 8 cycles from job to ``o``
    besides the translation itself (9 without a segment to translate).

    Probe: LOCAL_TRANSLATED (psn, length) when a segment is translated.
    """

    def __init__(self, p: Params, rights: int = 0):
        self.p = p
        self.rights = rights
        self.slots, self.segment_bits = window_shape(p)
        self.slot_bits = (self.slots - 1).bit_length()
        # Tag: piece (0 first, 1 rest), segment, slot.
        self.tag_bits = 1 + self.segment_bits + self.slot_bits
        self.entries = self.slots << self.segment_bits
        super().__init__({
            "job": In(stream.Signature(TxJob(p))),
            "segment": In(stream.Signature(GatherSegment(p))),
            "o": Out(stream.Signature(TranslatedJob(p))),
            "pieces": Out(stream.Signature(PacketPieces(p))),
            "xlate": Out(XlateSignature(p, self.tag_bits)),
            "probe": Out(Probe()),
        })

    def elaborate(self, platform):
        m = Module()
        p = self.p
        slots = self.slots
        asked_for = data.StructLayout({
            "va": 64, "key": 32, "pd": 24, "length": 13, "qpn": p.qpn_bits, "psn": 24,
        })  # fmt: skip
        self._piece = data.StructLayout({"address": 64, "span": 13, "two": 1})
        m.submodules.segments = self._segments = memory.Memory(shape=asked_for, depth=self.entries, init=[])
        m.submodules.piece_0 = self._piece_0 = memory.Memory(shape=self._piece, depth=self.entries, init=[])
        m.submodules.piece_1 = self._piece_1 = memory.Memory(shape=self._piece, depth=self.entries, init=[])
        m.submodules.jobs = self._jobs = memory.Memory(shape=TxJob(p), depth=slots, init=[])

        # Per slot: `busy` from the first look at the job to the last read of its pieces, `waiting` while it may be picked.
        self._busy = Signal(slots)
        self._waiting = Signal(slots)
        self._inline = Signal(slots)
        self._bad = Signal(slots)
        self._status = Signal(data.ArrayLayout(XlateStatus, slots))
        self._count = Signal(data.ArrayLayout(self.segment_bits + 1, slots))  # segments with bytes
        self._pending = Signal(data.ArrayLayout(self.segment_bits + 1, slots))  # not yet translated
        self._qpn = Signal(data.ArrayLayout(p.qpn_bits, slots))
        self._blocked = Signal(data.ArrayLayout(slots, slots))  # older packets that must leave before
        self._opened = Signal(slots)  # set busy
        self._closed = Signal(slots)  # set waiting
        self._asked = Signal(slots)  # one more segment is being translated
        self._answered = Signal(slots)  # one less
        self._picked = Signal(slots)
        self._freed = Signal(slots)
        m.d.sync += [
            self._busy.eq((self._busy | self._opened) & ~self._freed),
            self._waiting.eq((self._waiting | self._closed) & ~self._picked),
        ]
        for slot in range(slots):
            with m.If(self._asked[slot] != self._answered[slot]):
                m.d.sync += self._pending[slot].eq(self._pending[slot] + Mux(self._answered[slot], -1, 1))
            with m.If(~self._closed[slot]):
                m.d.sync += self._blocked[slot].eq(self._blocked[slot] & ~self._picked)

        request = self._requests(m)
        self._intake(m, request)
        self._answers(m)
        self._leave(m)
        return m

    # ------------------------------------------------------------------------------------------------------- requests
    def _requests(self, m):
        """New requests, and those for the rest of a segment, which go first; returns the port for new ones."""
        m.submodules.request_out = out = SkidBuffer(self.xlate.request.payload.shape())
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

    def _intake(self, m, request):
        job = self.job.payload
        m.submodules.segment_in = segment_in = StreamRegister(
            data.StructLayout({"segment": GatherSegment(self.p), "has_bytes": 1}))
        m.d.comb += [
            segment_in.i.valid.eq(self.segment.valid),
            segment_in.i.payload.segment.eq(self.segment.payload),
            segment_in.i.payload.has_bytes.eq(self.segment.payload.length != 0),
            self.segment.ready.eq(segment_in.i.ready),
        ]
        segment_valid, segment_ready = segment_in.o.valid, segment_in.o.ready
        segment, has_bytes = segment_in.o.payload.segment, segment_in.o.payload.has_bytes

        slot = Signal(range(self.slots))  # of the packet being taken in
        slot_valid = Signal()
        number = Signal(self.segment_bits + 1)  # segments with bytes so far
        known = Signal()  # a job has been looked at and has a slot: it is one of these two
        open_packet = Signal()  # its segments are taken
        bare_packet = Signal()  # has none
        take = Signal()  # a segment is taken
        ask = Signal()
        close = Signal()
        here = Signal(self.slots)
        m.d.comb += [
            request.valid.eq(open_packet & segment_valid & has_bytes),
            segment_ready.eq(open_packet & (request.ready | ~has_bytes)),
            take.eq(segment_valid & segment_ready),
            ask.eq(request.valid & request.ready),
            close.eq(bare_packet | (take & segment.last)),
            known.eq(self.job.valid & ~close & (slot_valid | ~self._busy.all())),
            self.job.ready.eq(close),
            here.eq(1 << slot),
        ]
        m.d.sync += [
            open_packet.eq(known & (job.header.length != 0) & ~job.inline),
            bare_packet.eq(known & ((job.header.length == 0) | job.inline)),
        ]

        # A slot is taken before its packet is there.
        free = Signal(range(self.slots))
        for candidate in reversed(range(self.slots)):
            with m.If(~self._busy[candidate]):
                m.d.comb += free.eq(candidate)
        with m.If(~slot_valid):
            m.d.sync += [slot.eq(free), slot_valid.eq(~self._busy.all()), number.eq(0)]
            m.d.comb += self._opened.eq(Mux(self._busy.all(), 0, 1 << free))
        with m.Elif(close):
            m.d.sync += slot_valid.eq(0)

        index = Cat(number[: self.segment_bits], slot)
        write = self._segments.write_port()
        m.d.comb += [
            request.payload.tag.eq(Cat(Const(0, 1), index)),
            request.payload.key.eq(segment.lkey),
            request.payload.pd.eq(job.pd),
            request.payload.rights.eq(self.rights),
            request.payload.va.eq(segment.va),
            request.payload.length.eq(segment.length),
            write.addr.eq(index),
            write.en.eq(ask),
            write.data.va.eq(segment.va),
            write.data.key.eq(segment.lkey),
            write.data.pd.eq(job.pd),
            write.data.length.eq(segment.length),
            write.data.qpn.eq(job.header.qpn),
            write.data.psn.eq(job.header.psn),
            self._asked.eq(Mux(ask, here, 0)),
        ]
        with m.If(ask & ~close):
            m.d.sync += number.eq(number + 1)

        job_write = self._jobs.write_port()
        m.d.comb += [job_write.addr.eq(slot), job_write.en.eq(close), job_write.data.eq(job)]
        # The packet joins the waiting ones a cycle later, when that comes from registers: before the next one does.
        closed = Signal(data.StructLayout({
            "qpn": self.p.qpn_bits, "inline": 1, "behind": self.slots, "count": self.segment_bits + 1,
        }))  # fmt: skip
        m.d.sync += [
            self._closed.eq(Mux(close, here, 0)),
            closed.qpn.eq(job.header.qpn),
            closed.inline.eq(job.inline),
            closed.behind.eq(Cat(  # those it has to leave behind, if they wait
                (self._qpn[other] == job.header.qpn) | (self._inline[other] & job.inline) | job.marker
                for other in range(self.slots))),
            closed.count.eq(number + ask),
        ]
        older = Signal(self.slots)
        m.d.comb += older.eq(self._waiting & ~self._picked & closed.behind)
        for other in range(self.slots):
            with m.If(self._closed[other]):
                m.d.sync += [
                    self._count[other].eq(closed.count),
                    self._qpn[other].eq(closed.qpn),
                    self._inline[other].eq(closed.inline),
                    self._blocked[other].eq(older),
                ]

        gathered = Signal(14)  # bytes of the packet's segments so far
        with m.If(take):
            m.d.sync += [
                gathered.eq(Mux(segment.last, 0, gathered + segment.length)),
                Assert(~segment.last | (gathered + segment.length == job.header.length),
                       Format("TranslateWindow: QP {} PSN {} has {} bytes of segments, length {}", job.header.qpn,
                              job.header.psn, gathered + segment.length, job.header.length)),
                Assert(~ask | (number < 1 << self.segment_bits), "TranslateWindow: too many segments"),
            ]  # fmt: skip

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

    # ---------------------------------------------------------------------------------------------------------- leave
    def _leave(self, m):
        m.submodules.pick = pick = RoundRobin(self.slots)
        m.submodules.piece_out = pieces = SkidBuffer(PacketPieces(self.p))
        wiring.connect(m, pieces.o, wiring.flipped(self.pieces))
        complete = Signal(self.slots)
        for slot in range(self.slots):
            m.d.sync += complete[slot].eq(
                self._waiting[slot] & ~self._picked[slot] & ~self._pending[slot].any() & ~self._blocked[slot].any())
        m.d.comb += pick.requests.eq(complete)

        # Pick a packet; its job is read in the same cycle and is on `o` two cycles later.
        picking = Signal()
        job_read = self._jobs.read_port()
        job_latched = Signal()
        slot = Signal(range(self.slots))
        left = Signal(self.segment_bits + 1)  # segments whose pieces are still to read
        number = Signal(self.segment_bits)
        reading = Signal()
        bad = Signal()
        status = Signal(XlateStatus)
        m.d.comb += [
            picking.eq(pick.requests.any() & ~reading & ~job_latched & (~self.o.valid | self.o.ready)),
            pick.advance.eq(picking),
            job_read.addr.eq(pick.grant),
            job_read.en.eq(picking),
        ]
        # Counts a cycle later: in between there is no pick.
        m.d.sync += self._picked.eq(Mux(picking, pick.chosen, 0))
        m.d.sync += job_latched.eq(picking)
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(job_latched):
            m.d.sync += [
                self.o.valid.eq(1),
                self.o.payload.job.eq(job_read.data),
                self.o.payload.status.eq(Mux(bad, status, XlateStatus.OK)),
            ]
        with m.If(picking):
            m.d.sync += [
                slot.eq(pick.grant), number.eq(0), reading.eq(1),
                left.eq(self._count[pick.grant]), bad.eq(self._bad.bit_select(pick.grant, 1)),
                status.eq(self._status[pick.grant]),
            ]  # fmt: skip

        # Read its pieces, one segment per cycle; then the slot is free.
        read = Signal()
        none = Signal()
        final = Signal()
        latched = Signal()  # a segment's pieces are at the memories' outputs
        last = Signal()
        index = Cat(number, slot)
        m.d.comb += [
            none.eq(bad | (left == 0)),
            read.eq(reading & ~none & (pieces.level + latched < 2)),  # room in the skid buffer
            final.eq(reading & (none | (read & (left == 1)))),
            self._freed.eq(Mux(final, 1 << slot, 0)),
        ]
        with m.If(read):
            m.d.sync += [number.eq(number + 1), left.eq(left - 1)]
        with m.If(final):
            m.d.sync += reading.eq(0)
        m.d.sync += [latched.eq(read), last.eq(left == 1)]
        port_0, port_1 = self._piece_0.read_port(), self._piece_1.read_port()
        header = job_read.data.header  # stays until the next pick, one cycle after the last read at the earliest
        piece = pieces.i.payload
        m.d.comb += [
            port_0.addr.eq(index),
            port_1.addr.eq(index),
            pieces.i.valid.eq(latched),
            piece.address_0.eq(port_0.data.address),
            piece.span_0.eq(port_0.data.span),
            piece.two.eq(port_0.data.two),
            piece.address_1.eq(port_1.data.address),
            piece.span_1.eq(port_1.data.span),
            piece.last.eq(last),
            piece.qpn.eq(header.qpn),
            piece.psn.eq(header.psn),
        ]
        m.d.sync += Assert(~latched | pieces.i.ready, "TranslateWindow: no room for a piece")
        self._check_lengths(m, pieces.i, header)

    @staticmethod
    def _check_lengths(m, pieces, header):
        """What is read is what was asked for."""
        piece = pieces.payload
        before = Signal(14)
        total = Signal(14)
        m.d.comb += total.eq(before + piece.span_0 + Mux(piece.two, piece.span_1, 0))
        with m.If(pieces.valid):
            m.d.sync += [
                before.eq(Mux(piece.last, 0, total)),
                Assert(~piece.last | (total == header.length),
                       Format("TranslateWindow: QP {} PSN {}: {} bytes translated, length {}", header.qpn, header.psn, total,
                              header.length)),
            ]  # fmt: skip
