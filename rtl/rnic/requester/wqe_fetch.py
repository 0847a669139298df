"""Reads send WQEs from the rings in host memory."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import DmaReadSignature, FetchedWqe, FetchJob, Probe, ProbeEvent, XlateSignature, XlateStatus
from ..stream.arbiter import RoundRobin
from ..stream.buffer import HalfRegister
from ..stream.fifo import StreamFifo
from .fetch_share import FetchShare
from .unit_fifo import UnitFifo

__all__ = ["WqeFetch"]

RING_ALIGN_BITS = 6  # a ring starts at a multiple of 64 bytes: every WQE then is whole bus words, every host read whole units
MAX_SLOTS = 8
UNIT_BITS = 512  # a WQE is one or two units


class WqeFetch(FetchShare):
    """Fetch jobs to `FetchedWqe`s.

    A job waits in one of up to 8 slots for its translation; jobs of other QPs overtake it, jobs of one QP keep their order.
    A translated job becomes a host read (two or more when the translation is good for less than the job: nothing else is
    issued in between), and its data is held back until the last word: a read error marks *every* WQE of the job with
    ``error``, as a failed translation or a ring that is not 64-byte aligned in host memory does. A marker job reads nothing; it
    leaves, as a FetchedWqe with ``marker`` and ``error``, behind all jobs that came before it, of any QP.

    A QP may have as many slots as are free besides. When it has them and its translations are slow, further jobs of it are
    thrown away, and a FetchedWqe with ``bounced`` and the epoch of the last of them follows the WQEs of the last job that was
    not: the segmenter rewinds the QP, so they come again, unless that has happened since. Until the slots are there or the
    translations are slow, at most ``2 * 2**TICK_BITS`` cycles, it waits.

    ``alone``: everything in here, and the job that waits, is of QP ``alone_qpn``, and no job has waited for long; from a
    register.

    Ports: ``job``; ``xlate`` (client, ring entries; tag width ``tag_bits``), ``read`` (client); ``wqe``; ``probe``
    (WQE_FETCH, one per host read).

    Timing: 1 cycle from a job to its translation request, 5 while any job has a slot; 3 from the response to the read
    command, 2 from a job's last word to its first WQE. One job per 5 cycles, one bus word per cycle in and out (a 64-byte WQE
    per cycle at 512 bits). A slow consumer stops the words, then the commands.
    """

    tag_bits = (MAX_SLOTS - 1).bit_length()

    def __init__(self, p: Params):
        self.p = p
        self.slots = min(p.desc_depth, MAX_SLOTS)
        super().__init__({
            "job": In(stream.Signature(FetchJob(p))),
            "xlate": Out(XlateSignature(p, self.tag_bits)),
            "read": Out(DmaReadSignature(p)),
            "wqe": Out(stream.Signature(FetchedWqe(p))),
            "alone": Out(1),
            "alone_qpn": Out(p.qpn_bits),
            "probe": Out(Probe()),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        self._job_shape = data.StructLayout({
            "qpn": p.qpn_bits, "index": 16, "count": p.wqe_batch_bits, "epoch": 8, "wide": 1, "marker": 1,
        })  # fmt: skip
        self._intake = Signal(name="intake_now")
        self._max_units = 2 * p.wqe_batch  # of 64 bytes, in a job
        token_shape = data.StructLayout({"job": self._job_shape, "error": 1, "bounce": 1, "bounced_epoch": 8,
                                         "units": range(self._max_units + 1)})
        piece_shape = data.StructLayout({"job": self._job_shape, "error": 1, "bounce": 1, "bounced_epoch": 8, "end": 1})
        m.submodules.pieces = pieces = StreamFifo(piece_shape, p.desc_depth)
        m.submodules.units = units = UnitFifo(p.data_width, UNIT_BITS, 2 * self._max_units)
        m.submodules.tokens = tokens = StreamFifo(token_shape, p.desc_depth)
        self._elaborate_translate(m, pieces.i)
        m.submodules.piece_out = piece_out = HalfRegister(piece_shape)  # no FIFO behind the bus words
        wiring.connect(m, pieces.o, piece_out.i)
        self._elaborate_words(m, piece_out.o, units, tokens.i)
        self._elaborate_assemble(m, units.o, tokens.o)
        self._elaborate_alone(m, tokens.o)
        return m

    def _elaborate_translate(self, m, piece):
        """Jobs wait in slots for their addresses; an issued slot makes a host read and a `piece`."""
        p, n = self.p, self.slots
        slot_shape = data.StructLayout({
            "job": self._job_shape, "va": 23, "left": 13, "address": 64, "span": 13, "error": 1,
        })  # fmt: skip
        m.submodules.turn = turn = RoundRobin(n, spaced=True)
        slots = Signal(data.ArrayLayout(slot_shape, n))
        used, translated = Signal(n), Signal(n)
        whole = Signal(n)  # a translated slot's answer covers all that is left of it, or there is nothing to read
        waits = Signal(n)  # waits_for of the slot is not 0; set with the job, so it may fall a cycle late
        waits_for = Signal(data.ArrayLayout(n, n))  # slot i goes after these older ones of the same QP
        job = self.job.payload
        request, response = self.xlate.request, self.xlate.response

        # ---- a job takes the lowest free slot and asks for its address
        free = Signal(range(n))
        request_free = Signal()
        intake = Signal()
        again = Signal()  # the slot `pick` needs the address of its rest
        place = Signal(16)
        length = Signal(13)
        same_qp = Signal(n)
        issue = Signal()
        done_mask = Signal(n)
        # The free slot is looked for a cycle ahead, so not in the cycle after it was taken.
        some_free = Signal()
        just_taken = Signal()
        m.d.sync += [some_free.eq(~used.all()), just_taken.eq(intake)]
        bounce = Signal(n)  # jobs behind this one were thrown away
        bounced_epoch = Signal(data.ArrayLayout(8, n))  # of the last of them
        newest = Signal(n)  # the last slot of its QP
        empty, take, drop, target = Signal(), Signal(), Signal(), Signal(n)
        issued = Signal(n)  # slot whose read, or a part of it, goes out
        for i in reversed(range(n)):
            with m.If(~used[i]):
                m.d.sync += free.eq(i)
            m.d.comb += same_qp[i].eq(used[i] & (slots[i].job.qpn == job.qpn))
        wide = Signal()
        m.d.comb += [
            wide.eq(job.log_stride == 7),
            request_free.eq(~request.valid),  # a job takes 2 cycles anyway
            empty.eq(~used.any()),
            self._intake.eq(intake),
            intake.eq(self.job.valid & some_free & ~just_taken & request_free & ~again & (empty | take)),
            self.job.ready.eq(intake | (drop & ~issue)),
            place.eq(job.index & ((1 << job.log_sq) - 1)),
            length.eq(Mux(wide, job.count << 7, job.count << 6)),
        ]
        with m.If(request.ready):
            m.d.sync += request.valid.eq(0)
        m.d.sync += [waits_for[i].eq(waits_for[i] & ~done_mask) for i in range(n)]
        m.d.sync += [waits[i].eq((waits_for[i] & ~done_mask).any()) for i in range(n)]
        with m.If(intake):
            m.d.sync += [
                request.valid.eq(~job.marker),
                request.payload.tag.eq(free),
                request.payload.ring.eq(1),
                request.payload.key.eq(p.tpt_sq_base + job.qpn),
                request.payload.va.eq(Mux(wide, place << 7, place << 6)),
                request.payload.length.eq(length),
                slots[free].job.qpn.eq(job.qpn),
                slots[free].job.index.eq(job.index),
                slots[free].job.count.eq(job.count),
                slots[free].job.epoch.eq(job.epoch),
                slots[free].job.wide.eq(wide),
                slots[free].job.marker.eq(job.marker),
                slots[free].error.eq(job.marker),  # nothing to read
                whole.bit_select(free, 1).eq(job.marker),
                newest.eq((newest & ~same_qp) | (1 << free)),
                waits.bit_select(free, 1).eq(1),
                slots[free].va.eq(Mux(wide, place << 7, place << 6)),
                slots[free].left.eq(length),
                waits_for[free].eq(Mux(job.marker, used, same_qp) & ~done_mask),
                Assert(length <= 4096, Format("WqeFetch: job of {} bytes", length)),
            ]

        self._elaborate_share(m, used, translated, same_qp, newest, bounce, bounced_epoch, done_mask, take, drop, target, intake,
                              issue, issued, free)  # fmt: skip

        # ---- addresses come back in any order
        m.d.comb += response.ready.eq(1)
        arrived = slots[response.payload.tag]
        bad = (response.payload.status != XlateStatus.OK) | (response.payload.address[:RING_ALIGN_BITS] != 0)
        with m.If(response.valid):
            m.d.sync += [
                arrived.address.eq(response.payload.address),
                arrived.span.eq(response.payload.span),
                arrived.error.eq(bad),
                whole.bit_select(response.payload.tag, 1).eq(bad | (response.payload.span >= arrived.left)),
            ]  # fmt: skip

        # ---- pick a translated slot, then issue it
        command = self.read.command
        pick = Signal(range(n))
        picked = Signal()
        m.d.comb += issued.eq(issue << pick)
        alone = Signal()  # the slot `pick` is half issued: nothing may come between its pieces
        pick_now = Signal()
        chosen = Signal(slot_shape)
        rest = Signal(13)
        rest_va, rest_left = Signal(23), Signal(13)
        all_of_it = Signal()
        m.d.comb += [
            turn.requests.eq(Cat(translated[i] & ~waits[i] & (~alone | (pick == i)) for i in range(n))),
            pick_now.eq(~picked & turn.requests.any()),
            turn.advance.eq(pick_now),
            chosen.eq(slots[pick]),
            rest.eq(chosen.left - chosen.span),
            all_of_it.eq(whole.bit_select(pick, 1)),
            issue.eq(picked & piece.ready & ~command.valid & ~again),
            piece.valid.eq(issue),
            piece.payload.job.eq(chosen.job),
            piece.payload.error.eq(chosen.error),
            piece.payload.bounce.eq(bounce.bit_select(pick, 1)),
            piece.payload.bounced_epoch.eq(bounced_epoch[pick]),
            piece.payload.end.eq(all_of_it),
        ]
        with m.If(pick_now):
            m.d.sync += [picked.eq(1), pick.eq(turn.grant)]
        with m.If(command.ready):
            m.d.sync += command.valid.eq(0)
        with m.If(issue):
            m.d.sync += [picked.eq(0), alone.eq(~all_of_it), again.eq(~all_of_it)]
            with m.If(~chosen.error):
                m.d.sync += [
                    command.valid.eq(1),
                    command.payload.address.eq(chosen.address),
                    command.payload.length.eq(Mux(all_of_it, chosen.left, chosen.span)),
                ]
            m.d.sync += [rest_va.eq(chosen.va + chosen.span), rest_left.eq(rest)]
        with m.If(again & request_free):
            m.d.sync += [
                again.eq(0),
                slots[pick].va.eq(rest_va),
                slots[pick].left.eq(rest_left),
                request.valid.eq(1),
                request.payload.tag.eq(pick),
                request.payload.va.eq(rest_va),
                request.payload.length.eq(rest_left),
                request.payload.key.eq(p.tpt_sq_base + chosen.job.qpn),
            ]
        m.d.sync += [
            done_mask.eq((issue & all_of_it) << pick),  # the slot is free a cycle after its last read was issued
            used.eq((used | (intake << free)) & ~done_mask),
            translated.eq((translated | (response.valid << response.payload.tag) | ((intake & job.marker) << free))
                          & ~issued),
            Assert((response.valid << response.payload.tag) & ~used == 0, Format("WqeFetch: answer to an empty slot")),
            self.probe.valid.eq(issue & ~chosen.error),
            self.probe.event.eq(ProbeEvent.WQE_FETCH),
            self.probe.qpn.eq(chosen.job.qpn),
            self.probe.index.eq(chosen.job.index),
            self.probe.length.eq(Mux(all_of_it, chosen.left, chosen.span)),
        ]

    def _elaborate_words(self, m, piece, units, token):
        """Bus words become units in their FIFO; a token follows when a job has all of its units, or none will come."""
        p = self.p
        word = self.read.word
        count = Signal(range(self._max_units + 1))
        failed = Signal()
        take, unit_done, ends = Signal(), Signal(), Signal()
        m.d.comb += [
            word.ready.eq(piece.valid & ~piece.payload.error & units.i.ready & token.ready),
            take.eq(word.ready & word.valid),
            unit_done.eq(take & units.ends),
            units.i.valid.eq(take),
            units.i.payload.eq(word.payload.data),
            ends.eq(piece.valid & token.ready & (piece.payload.error | (units.i.ready & word.valid & word.payload.last))),
            piece.ready.eq(ends),
            token.valid.eq(ends & piece.payload.end),
            token.payload.job.eq(piece.payload.job),
            token.payload.bounce.eq(piece.payload.bounce),
            token.payload.bounced_epoch.eq(piece.payload.bounced_epoch),
            token.payload.error.eq(piece.payload.error | failed | (take & word.payload.err)),
            token.payload.units.eq(count + unit_done),
        ]
        with m.If(token.valid):
            m.d.sync += [count.eq(0), failed.eq(0)]
        with m.Else():
            m.d.sync += [count.eq(count + unit_done), failed.eq(failed | (take & word.payload.last & word.payload.err))]
        with m.If(take):
            m.d.sync += [
                Assert((word.payload.first == 0) & (word.payload.count == p.lanes),
                       Format("WqeFetch: word of {} bytes from lane {}", word.payload.count, word.payload.first)),
                Assert(~word.payload.last | unit_done, Format("WqeFetch: host read ends inside a WQE")),
            ]

    def _elaborate_assemble(self, m, units, token):
        """Units to WQEs; the units of a failed job are thrown away first."""
        out = self.wqe
        job = token.payload.job
        wqe = out.payload.wqe
        second = Signal()  # the upper half of a 128-byte WQE comes next
        done = Signal(self.p.wqe_batch_bits)  # WQEs of this job already out
        dropped = Signal(range(self._max_units + 1))
        drained, drop = Signal(), Signal()
        equal, checked = Signal(), Signal()  # the units thrown away are all there are, as of the cycle before
        extra = Signal()  # all WQEs are out; now that jobs behind were thrown away
        final = Signal()
        free, step, emit = Signal(), Signal(), Signal()
        m.d.comb += [
            free.eq(~out.valid),  # no path from the decoder; it takes a WQE in 4 cycles
            drained.eq(equal & checked),
        ]
        m.d.sync += [equal.eq(dropped == token.payload.units), checked.eq(token.valid & ~token.ready & ~drop)]
        with m.If(extra):
            m.d.comb += emit.eq(free)
        with m.Elif(token.payload.error):
            m.d.comb += [
                units.ready.eq(checked & ~equal),
                drop.eq(units.valid & units.ready),
                emit.eq(token.valid & drained & free),
            ]
        with m.Else():
            m.d.comb += [
                units.ready.eq(token.valid & free),
                step.eq(units.valid & units.ready),
                emit.eq(step & (~job.wide | second)),
            ]
        m.d.comb += [
            final.eq(emit & ~extra & (done + 1 == job.count)),
            token.ready.eq((final & ~token.payload.bounce) | (emit & extra)),
        ]

        with m.If(out.ready):
            m.d.sync += out.valid.eq(0)
        with m.If(step):
            m.d.sync += second.eq(job.wide & ~second)
            with m.If(second):
                m.d.sync += wqe[UNIT_BITS:].eq(units.payload)
            with m.Else():
                m.d.sync += wqe.eq(units.payload)
        with m.If(drop):
            m.d.sync += dropped.eq(dropped + 1)
        with m.If(emit):
            m.d.sync += [
                out.valid.eq(1),
                out.payload.qpn.eq(job.qpn),
                out.payload.index.eq(job.index + done),
                out.payload.epoch.eq(Mux(extra, token.payload.bounced_epoch, job.epoch)),
                out.payload.marker.eq(job.marker),
                out.payload.bounced.eq(extra),
                out.payload.error.eq(token.payload.error),
                done.eq(Mux(token.ready | final, 0, done + 1)),
                extra.eq(final & token.payload.bounce),
            ]
            with m.If(token.ready):
                m.d.sync += dropped.eq(0)
