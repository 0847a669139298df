"""Translation of outgoing packets: several under way, those that are ready overtake those of other QPs that wait."""

from functools import reduce
from operator import or_

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..clash import NO_CLASH
from ..config import Params
from ..records import GatherSegment, Probe, QpEvent, TxJob, XlateSignature, XlateStatus
from ..stream.arbiter import RoundRobin
from ..stream.beat import Beat, StoredBeat
from ..stream.buffer import SkidBuffer, StreamRegister
from .share import WindowShare
from .window_answers import WindowAnswers
from .window_records import PacketPieces, TranslatedJob, inline_beats, window_shape

__all__ = ["TranslateWindow"]


class TranslateWindow(WindowAnswers):
    """Takes jobs and their segments, translates all segments, hands on jobs whose segments are all translated.

    A packet leaves when all its segments are answered and no older packet of its QP is left; packets of different QPs
    overtake each other, also those with inline payload, which waits here with its packet; a marker leaves behind all before
    it. How many packets a QP may have here is `WindowShare`'s to say and the sender's to keep. A segment is asked for as a whole
    (PD of the job, ``rights``: abi.Access bits, 0 for a local read) and, when the answer covers less, once more for the rest: a
    span ends at a 4 KiB page or with the segment, which has at most 4096 bytes, so there are no third pieces (Assert). Segments
    of length 0 are skipped (R-WQ-4). The first error of a packet is its status.

    Ports: ``job``, ``segment``, ``inline`` (as the segmenter sends them), ``xlate`` client; ``o`` jobs, ``pieces`` the segments
    of those jobs that have some and status OK, ``inline_o`` the inline payload, same order; ``share_qpn``, ``share_ahead``,
    ``share``, ``slow``, ``note``, ``noted``, ``wake`` of `WindowShare`.

    Timing: one segment or packet every 2 cycles, packets of one QP every 3; 7 cycles from job to ``o`` besides the translation
    itself (8 without a segment to translate).

    Parameters: ``job``, a shape with the fields of TxJob that are used here, or None for TxJob.

    Probe: LOCAL_TRANSLATED (psn, length) when a segment is translated.
    """

    def __init__(self, p: Params, rights: int = 0, job=None):
        self.p = p
        self.rights = rights
        self._job = TxJob(p) if job is None else job
        self.slots, self.segment_bits = window_shape(p)
        self.slot_bits = (self.slots - 1).bit_length()
        # Tag: piece (0 first, 1 rest), segment, slot.
        self.tag_bits = 1 + self.segment_bits + self.slot_bits
        self.entries = self.slots << self.segment_bits
        self.beat_bits = max(1, (inline_beats(p) - 1).bit_length())
        self.count_bits = max(self.segment_bits, self.beat_bits) + 1
        beats = stream.Signature(Beat(p.data_width))
        super().__init__({
            "job": In(stream.Signature(self._job)),
            "segment": In(stream.Signature(GatherSegment(p))),
            "inline": In(beats),
            "o": Out(stream.Signature(TranslatedJob(self._job))),
            "pieces": Out(stream.Signature(PacketPieces(p))),
            "inline_o": Out(beats),
            "xlate": Out(XlateSignature(p, self.tag_bits)),
            "share_qpn": In(p.qpn_bits),
            "share_ahead": In(range(self.slots + 1)),
            "share": Out(range(self.slots // 2 + 1)),
            "share_none": Out(1),
            "share_one": Out(1),
            "slow": Out(1),
            "note": In(1),
            "noted": Out(1),
            "wake": Out(stream.Signature(QpEvent(p))),
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
        m.submodules.segments = self._segments = memory.Memory(shape=asked_for, depth=self.entries, init=[], attrs=NO_CLASH)
        m.submodules.piece_0 = self._piece_0 = memory.Memory(shape=self._piece, depth=self.entries, init=[], attrs=NO_CLASH)
        m.submodules.piece_1 = self._piece_1 = memory.Memory(shape=self._piece, depth=self.entries, init=[], attrs=NO_CLASH)
        m.submodules.jobs = self._jobs = memory.Memory(shape=self._job, depth=slots, init=[], attrs=NO_CLASH)
        m.submodules.inline_beats = self._beats = memory.Memory(
            shape=StoredBeat(p.data_width), depth=slots << self.beat_bits, init=[], attrs=NO_CLASH)
        m.submodules.window_share = self._share = WindowShare(p, slots)

        # Per slot: `busy` from the first look at the job to the last read of its pieces, `waiting` while it may be picked.
        self._busy = Signal(slots)
        self._waiting = Signal(slots)
        self._bad = Signal(slots)
        self._status = Signal(data.ArrayLayout(XlateStatus, slots))
        self._count = Signal(data.ArrayLayout(self.count_bits, slots))  # segments with bytes, or beats of inline payload
        self._pending = Signal(data.ArrayLayout(self.segment_bits + 1, slots))  # not yet translated
        self._qpn = Signal(data.ArrayLayout(p.qpn_bits, slots))
        # In a QP each packet waits for the one before it: `_blocked`, by slot `_before`. `_newest`: the next waits for this one.
        self._blocked = Signal(slots)
        self._before = Signal(data.ArrayLayout(self.slot_bits, slots))
        self._newest = Signal(slots)
        self._marker = Signal(slots)  # slot of the marker
        self._before_marker = Signal(slots)  # packets that must leave before it
        self._opened = Signal(slots)  # set busy
        self._closed = Signal(slots)  # set waiting
        self._asked = Signal(slots)  # one more segment is being translated
        self._answered = Signal(slots)  # one less
        self._picked = Signal(slots)
        self._picked_slot = Signal(range(slots))
        self._freed = Signal(slots)
        m.d.sync += [
            self._busy.eq((self._busy | self._opened) & ~self._freed),
            self._waiting.eq((self._waiting | self._closed) & ~self._picked),
        ]
        for slot in range(slots):
            with m.If(self._asked[slot] != self._answered[slot]):
                m.d.sync += self._pending[slot].eq(self._pending[slot] + Mux(self._answered[slot], -1, 1))
            with m.If(~self._closed[slot] & self._picked.any() & (self._before[slot] == self._picked_slot)):
                m.d.sync += self._blocked[slot].eq(0)

        request = self._requests(m)
        self._intake(m, request)
        self._answers(m)
        self._leave(m)
        share = self._share
        m.d.comb += [
            share.qpn.eq(self.share_qpn),
            share.ahead.eq(self.share_ahead),
            self.share.eq(share.share),
            self.slow.eq(share.slow),
            self.share_none.eq(share.none),
            self.share_one.eq(share.one),
            share.note.eq(self.note),
            self.noted.eq(share.noted),
            share.waiting.eq(self._waiting),
            share.heads.eq(~self._blocked),
            share.pending.eq(Cat(count.any() for count in self._pending)),
            share.qpns.eq(self._qpn),
            share.closed.eq(self._closed),
            share.freed.eq(self._freed.any()),
            share.picked.eq(self._picked),
            share.picked_slot.eq(self._picked_slot),
        ]
        wiring.connect(m, share.wake, wiring.flipped(self.wake))
        return m

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
        inline_packet = Signal()  # has beats instead
        beat = Signal(range(inline_beats(self.p)))
        under_way = Signal()  # one of these
        ends = Signal()  # with its last segment or beat
        marker_inside = Signal()  # one marker at a time
        take = Signal()  # a segment is taken
        ask = Signal()
        close = Signal()
        here = Signal(self.slots)
        m.d.comb += [
            request.valid.eq(open_packet & segment_valid & has_bytes),
            segment_ready.eq(open_packet & (request.ready | ~has_bytes)),
            take.eq(segment_valid & segment_ready),
            ask.eq(request.valid & request.ready),
            self.inline.ready.eq(inline_packet),
            ends.eq((take & segment.last) | (inline_packet & self.inline.valid & self.inline.payload.last)),
            close.eq(bare_packet | ends),
            under_way.eq(open_packet | bare_packet | inline_packet),
            known.eq(self.job.valid & ~under_way & (slot_valid | ~self._busy.all()) & ~(job.marker & marker_inside)),
            self.job.ready.eq(close),
            here.eq(1 << slot),
        ]
        m.d.sync += [
            open_packet.eq((open_packet & ~ends) | (known & (job.header.length != 0) & ~job.inline)),
            bare_packet.eq(known & (job.header.length == 0)),
            inline_packet.eq((inline_packet & ~ends) | (known & (job.header.length != 0) & job.inline)),
            marker_inside.eq((marker_inside & ~(self._marker & self._picked).any()) | (close & job.marker)),
        ]
        beat_write = self._beats.write_port()
        m.d.comb += [
            beat_write.addr.eq(Cat(beat, Const(0, self.beat_bits - len(beat)), slot)),
            StoredBeat.put(beat_write.data, self.inline.payload),
            beat_write.en.eq(inline_packet & self.inline.valid),
        ]
        with m.If(beat_write.en):
            m.d.sync += beat.eq(Mux(self.inline.payload.last, 0, beat + 1))

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
            "qpn": self.p.qpn_bits, "marker": 1, "same": self.slots, "count": self.count_bits,
        }))  # fmt: skip
        m.d.sync += [
            self._closed.eq(Mux(close, here, 0)),
            closed.qpn.eq(job.header.qpn),
            closed.marker.eq(job.marker),
            # The newest packet of its QP, if that waits.
            closed.same.eq(Cat(self._newest[other] & (self._qpn[other] == job.header.qpn) for other in range(self.slots))),
            closed.count.eq(Mux(inline_packet, beat + 1, number + ask)),
        ]
        before = Signal(self.slots)
        before_slot = Signal(self.slot_bits)
        here_before = Signal(self.slots)  # all that wait
        m.d.comb += [
            here_before.eq(self._waiting & ~self._picked),
            before.eq(here_before & closed.same),
            before_slot.eq(Cat(Cat(before[i] for i in range(self.slots) if i >> bit & 1).any() for bit in range(self.slot_bits))),
            self._share.close.eq(close),
            self._share.closed_qpn.eq(closed.qpn),
            self._share.intake.eq(self.job.valid),
            self._share.intake_qpn.eq(job.header.qpn),
        ]
        for other in range(self.slots):
            with m.If(self._closed[other]):
                m.d.sync += [
                    self._count[other].eq(closed.count),
                    self._qpn[other].eq(closed.qpn),
                    self._blocked[other].eq(before.any()),
                    self._before[other].eq(before_slot),
                    self._newest[other].eq(1),
                    self._marker[other].eq(closed.marker),
                ]
            with m.Elif(self._closed.any() & closed.same[other]):
                m.d.sync += self._newest[other].eq(0)
        m.d.sync += self._before_marker.eq(Mux(self._closed.any() & closed.marker, here_before,
                                               self._before_marker & ~self._picked))

        gathered = Signal(14)  # bytes of the packet's segments so far
        with m.If(take):
            m.d.sync += [
                gathered.eq(Mux(segment.last, 0, gathered + segment.length)),
                Assert(~segment.last | (gathered + segment.length == job.header.length),
                       Format("TranslateWindow: QP {} PSN {} has {} bytes of segments, length {}", job.header.qpn,
                              job.header.psn, gathered + segment.length, job.header.length)),
                Assert(~ask | (number < 1 << self.segment_bits), "TranslateWindow: too many segments"),
            ]  # fmt: skip

    # ---------------------------------------------------------------------------------------------------------- leave
    def _leave(self, m):
        m.submodules.pick = pick = RoundRobin(self.slots, spaced=True)
        m.submodules.piece_out = pieces = SkidBuffer(PacketPieces(self.p))
        m.submodules.inline_out = beats = SkidBuffer(Beat(self.p.data_width))
        wiring.connect(m, pieces.o, wiring.flipped(self.pieces))
        wiring.connect(m, beats.o, wiring.flipped(self.inline_o))
        complete = Signal(self.slots)
        marker_held = Signal()
        m.d.comb += marker_held.eq(self._before_marker.any())
        for slot in range(self.slots):
            m.d.sync += complete[slot].eq(
                self._waiting[slot] & ~self._picked[slot] & ~self._pending[slot].any() & ~self._blocked[slot]
                & ~(self._marker[slot] & marker_held))
        m.d.comb += pick.requests.eq(complete)

        # Pick a packet; its job is read in the same cycle and on `o` in the next.
        picking = Signal()
        job_read = self._jobs.read_port()
        job_latched = Signal()
        slot = Signal(range(self.slots))
        left = Signal(self.count_bits)  # segments whose pieces, or beats that are still to read
        number = Signal(self.count_bits - 1)
        reading = Signal()
        bad = Signal()
        status = Signal(XlateStatus)
        m.d.comb += [
            picking.eq(pick.requests.any() & ~reading & ~job_latched & (~self.o.valid | self.o.ready) & ~self.wake.valid),
            pick.advance.eq(picking),
            job_read.addr.eq(pick.grant),
            job_read.en.eq(picking),
            self.o.payload.job.eq(job_read.data),
            self.o.payload.status.eq(Mux(bad, status, XlateStatus.OK)),
        ]

        def picked(values):
            """That of the picked slot: from the one bit per slot, which is known before the number."""
            return reduce(or_, (Value.cast(values[i]) & pick.chosen[i].replicate(len(Value.cast(values[i])))
                                for i in range(self.slots)))

        # Counts a cycle later: in between there is no pick.
        m.d.sync += self._picked.eq(Mux(picking, pick.chosen, 0))
        m.d.comb += self._picked_slot.eq(slot)
        m.d.sync += job_latched.eq(picking)
        with m.If(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(picking):
            m.d.sync += [
                self.o.valid.eq(1), slot.eq(pick.grant), number.eq(0), reading.eq(1),
                left.eq(picked(self._count)), bad.eq((self._bad & pick.chosen).any()), status.eq(picked(self._status)),
            ]  # fmt: skip

        # Read its pieces, one segment per cycle, or its beats; then the slot is free.
        read = Signal()
        none = Signal()
        final = Signal()
        latched = Signal()  # a segment's pieces are at the memories' outputs
        latched_beat = Signal()
        last = Signal()
        inline = Signal()
        index = Cat(number[: self.segment_bits], slot)
        m.d.comb += [
            none.eq(bad | (left == 0)),
            inline.eq(job_read.data.inline & ~job_read.data.marker),
            # room in both skid buffers: which it is for is known a cycle later
            read.eq(reading & ~none & (pieces.level + latched < 2) & (beats.level + latched_beat < 2)),
            final.eq(reading & (none | (read & (left == 1)))),
            self._freed.eq(Mux(final, 1 << slot, 0)),
        ]
        with m.If(read):
            m.d.sync += [number.eq(number + 1), left.eq(left - 1)]
        with m.If(final):
            m.d.sync += reading.eq(0)
        m.d.sync += [latched.eq(read & ~inline), latched_beat.eq(read & inline), last.eq(left == 1)]
        beat_port = self._beats.read_port()
        m.d.comb += [
            beat_port.addr.eq(Cat(number[: self.beat_bits], slot)),
            beats.i.valid.eq(latched_beat),
            StoredBeat.get(beats.i.payload, beat_port.data),
        ]
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
        m.d.sync += [
            Assert(~latched | pieces.i.ready, "TranslateWindow: no room for a piece"),
            Assert(~latched_beat | beats.i.ready, "TranslateWindow: no room for a beat"),
        ]
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
