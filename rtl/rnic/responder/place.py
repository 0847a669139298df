"""Place: the memory checks of a packet, all of them before its first byte moves."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import Access, VendorError, WcStatus
from ..abi.queues import CqeFlags
from ..clash import NO_CLASH
from ..config import Params
from ..memory.join import XlateJoin
from ..memory.ordered import OrderedRequest, OrderedXlate
from ..records import Probe, ProbeEvent, XlateSignature, XlateStatus
from ..stream.buffer import HalfRegister
from ..stream.fifo import StreamFifo
from ..wire.syndrome import NakCode, nak_syndrome
from .parking import Parking
from .queue import Queue
from .receive_queue import FAST_BITS, vendor_of
from .records import FetchedJob, JobKind, Piece, Placed, Progress, Segment, Walked, max_segments
from .segment_ring import SegmentRing
from .source import PayloadPlace
from .walk import Walk

__all__ = ["Place"]

WINDOW = 8  # jobs of a QP on their way once more; as many as there are in the pipe


class _Cold(data.StructLayout):
    """A piece whose page table has to be read: of the job in ``slot``, ``count`` segments and ``done`` bytes behind its
    beginning, ``length`` bytes long; or a key to invalidate (``ends``)."""

    def __init__(self, p: Params):
        super().__init__({"slot": range(p.parking_slots), "count": range(max_segments(p) + 1), "done": 13,
                          "length": 13, "flip": 1, "ends": 1})  # fmt: skip


class Place(wiring.Component):
    """Checks and translates every byte's place, then lets the packet's data go (8.1, checks 7, 10, 11).

    The pieces `Walk` found are translated several at a time; a piece whose answer spans less than it has bytes is asked for
    again from there. Only when all segments of the packet are known do they leave on ``segment``, its store cells on
    ``payload_at``, the job on ``o``. An ATOMIC has one segment and no cells; a READ is only checked. A packet that fails or has
    nothing to place has its cells freed (``free``).

    A job whose page table has to be read waits aside with what is known of it, and all that follows in its QP behind it
    (`Parking`), while a translation that waits for the page table is asked for; so does one of the next jobs of the QP each.
    Other QPs pass. Every such translation brings its job on by a segment, whatever happens to the translation cache.

    The last packet of a SEND with invalidate waits aside as well, first of its QP, until its key is no more (8.1, check 12;
    19.2): its data has its place then, its completion comes later. A key that must not be invalidated ends the QP without a NAK.

    A failing packet poisons its QP: its later packets are thrown away here (``error_drop``). ``poison`` sets (1) or clears
    (0) the mark from outside. FLUSH jobs always go through, that of QP 0 behind everything of all QPs; other jobs go on only if
    they answer or complete something. Landings (data of own READs and ATOMICs) neither poison nor heed the mark, and always go
    on.

    Timing: Walked to ``o`` 3 cycles after the last answer; 1 cycle per piece and two more per job; a second part of a piece takes
    5 cycles and its translation.

    Members: ``i`` FetchedJob (with ``i_barrier``: `is_barrier`), ``o`` Placed, ``segment``, ``payload_at`` PayloadPlace,
    ``free``, ``poison`` {qpn, state}: streams; ``xlate`` client (tag width ``tag_bits``); ``error_drop`` pulse; ``probe``
    (REMOTE_TRANSLATED; LOCAL_TRANSLATED for a landing).
    """

    @staticmethod
    def tag_bits(p: Params) -> int:
        return XlateJoin.width([1, p.cold_bits, FAST_BITS])

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(FetchedJob(p))),
            "i_barrier": In(1),
            "o": Out(stream.Signature(Placed(p))),
            "segment": Out(stream.Signature(Segment())),
            "payload_at": Out(stream.Signature(PayloadPlace(p))),
            "free": Out(stream.Signature(p.cell_bits)),
            "poison": In(stream.Signature(data.StructLayout({"qpn": p.qpn_bits, "state": 1}))),
            "xlate": Out(XlateSignature(p, self.tag_bits(p))),
            "error_drop": Out(1),
            "probe": Out(Probe()),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        slots = p.parking_slots
        m.submodules.parking = parking = Parking(  # the mark: poisoned
            FetchedJob(p), Walked(p), slots, WINDOW, p.num_qps, note=Progress(p), mark=1, parts=4, half_rate=True)
        m.submodules.walk = walk = Walk(p)
        m.submodules.requests = requests = HalfRegister(OrderedRequest(p, Piece()))
        m.submodules.translate = translate = OrderedXlate(p, FAST_BITS, Piece())
        m.submodules.walked = walked = Queue(Walked(p), p.desc_depth, direct=True)
        m.submodules.placed = placed = Queue(Placed(p), p.desc_depth, direct=True)
        m.submodules.reads = reads = Queue(PayloadPlace(p), p.desc_depth)
        m.submodules.frees = frees = Queue(p.cell_bits, p.desc_depth)
        wiring.connect(m, wiring.flipped(self.i), parking.i)
        # Nothing but a SEND needs SGEs, which lie behind all the rest.
        assert 2 * FetchedJob(p)["sges"].offset < FetchedJob(p).size
        m.d.comb += [parking.i_barrier.eq(self.i_barrier), parking.i_short.eq(self.i.p.job.kind != JobKind.SEND)]
        wiring.connect(m, parking.enter, walk.i)
        wiring.connect(m, walk.o, walked.i)
        wiring.connect(m, walk.request, requests.i)
        wiring.connect(m, requests.o, translate.request)
        wiring.connect(m, walked.o, parking.leave)
        wiring.connect(m, wiring.flipped(self.poison), parking.poke)
        wiring.connect(m, placed.o, wiring.flipped(self.o))
        wiring.connect(m, reads.o, wiring.flipped(self.payload_at))
        wiring.connect(m, frees.o, wiring.flipped(self.free))
        m.submodules.ring = self._ring = ring = SegmentRing(p)
        wiring.connect(m, ring.segment, wiring.flipped(self.segment))
        again = XlateSignature(p, 1).create()  # second parts of pieces
        self._cold(m, parking, translate, again)
        self._collect(m, parking.o, translate.response, again)
        self._verdict(m, parking, placed, reads, frees)
        return m

    def _cold(self, m, parking, translate, again):
        """Translations that wait for their page table; the answer brings the job on."""
        p = self.p
        m.submodules.join = join = XlateJoin(p, [1, p.cold_bits, FAST_BITS])
        m.submodules.patient = patient = OrderedXlate(p, p.cold_bits, _Cold(p))
        names = ("va", "key", "pd", "rights", "invalidate")
        kept = {name: OrderedRequest(p, 0).members[name] for name in names}
        kept_meta = {name: _Cold(p).members[name] for name in ("slot", "count", "done", "length", "flip")}
        m.submodules.cold = cold = StreamFifo(data.StructLayout({**kept, **kept_meta}), p.parking_slots)
        wiring.connect(m, again, join.client_0)
        wiring.connect(m, patient.xlate, join.client_1)
        wiring.connect(m, translate.xlate, join.client_2)
        wiring.connect(m, join.xlate, wiring.flipped(self.xlate))
        patiently = patient.request
        m.d.comb += [
            patiently.valid.eq(cold.o.valid),
            cold.o.ready.eq(patiently.ready),
            *(patiently.p[name].eq(cold.o.p[name]) for name in kept),
            *(patiently.p.meta[name].eq(cold.o.p[name]) for name in kept_meta),
            patiently.p.length.eq(Mux(cold.o.p.invalidate, 1, cold.o.p.length)),
            patiently.p.meta.ends.eq(cold.o.p.invalidate),
        ]
        self._waits = Signal()  # asks for the page table of
        self._missing = Signal(OrderedRequest(p, _Cold(p)))
        # Per slot, whether an answer is to come: a bit that changes with the question, one that follows with the answer.
        m.submodules.asked = asked = memory.Memory(shape=1, depth=p.parking_slots, init=[])
        m.submodules.told = told = memory.Memory(shape=1, depth=p.parking_slots, init=[])
        ask, tell, was_asked, was_told = asked.write_port(), told.write_port(), asked.read_port(), told.read_port()
        self._under_way, self._flip = Signal(), Signal()  # an answer for the job at hand is to come
        slot = parking.o.p.job.slot
        m.d.comb += [
            was_asked.addr.eq(slot), was_told.addr.eq(slot), ask.addr.eq(slot), ask.data.eq(self._flip), ask.en.eq(self._waits),
        ]  # fmt: skip
        with m.If(parking.sweeping):
            m.d.comb += [
                ask.addr.eq(parking.sweep_index), ask.data.eq(0), ask.en.eq(1),
                tell.addr.eq(parking.sweep_index), tell.data.eq(0), tell.en.eq(1),
            ]  # fmt: skip
        m.d.sync += [self._under_way.eq(was_asked.data != was_told.data), self._flip.eq(~was_asked.data)]
        answer, piece, note = patient.response, patient.response.p.meta, parking.wake.p.note
        part, fine = Signal(13), Signal()
        m.d.comb += [
            cold.i.valid.eq(self._waits),
            *(cold.i.p[name].eq(self._missing[name]) for name in kept),
            *(cold.i.p[name].eq(self._missing.meta[name]) for name in kept_meta),
            fine.eq(answer.p.status == XlateStatus.OK),
            part.eq(Mux(answer.p.span < piece.length, answer.p.span, piece.length)),
            parking.wake.valid.eq(answer.valid),
            parking.wake.p.slot.eq(piece.slot),
            answer.ready.eq(parking.wake.ready),
            note.count.eq(piece.count),
            note.address.eq(answer.p.address),
            note.bytes.eq(part),
            note.done.eq(Mux(fine, piece.done + part, piece.done)),
            note.ended.eq(piece.ends),
            note.vendor_err.eq(vendor_of(answer.p.status)),
        ]
        with m.If(answer.valid & answer.ready):
            m.d.comb += [tell.addr.eq(piece.slot), tell.data.eq(piece.flip), tell.en.eq(1)]
        m.d.sync += Assert(~cold.i.valid | cold.i.ready, "responder: more jobs wait for page tables than are kept")

    def _collect(self, m, looked, answer, again):
        """Turns answers into segments; ``self._complete`` when the job's are all in."""
        walked = looked.p.job
        job, note = walked.job, walked.note
        depth = self.p.parking_slots << (max_segments(self.p) - 1).bit_length()
        m.submodules.known = known = memory.Memory(shape=data.StructLayout({"address": 64, "length": 13}), depth=depth, init=[],
                                                   attrs=NO_CLASH)
        keep, remembered = known.write_port(), known.read_port()
        useless = Signal()  # nothing of this job will be placed
        pieces = Signal(3)  # answers taken
        self._vendor = Signal(VendorError)  # of the first failing piece
        self._missed = Signal()  # a page table has to be read
        self._complete = Signal()
        left = Signal(13)  # bytes of the packet without a segment
        left_now = Signal(13)
        fresh = Signal(init=1)
        resumed = Signal()  # what is known from an earlier attempt has been taken over
        rest_low, rest_va = Signal(33), Signal(64)
        rest = Signal(13)  # bytes of the piece behind the segment
        source_status = Signal.like(answer.p.status)
        span = Signal(13)
        whole = Signal(13)  # bytes of the piece, or of its rest
        ends = Signal()
        bytes_here = Signal(13)
        rights = Signal(8)
        missing = self._missing
        m.d.comb += [
            useless.eq((looked.p.mark & ~job.land) | walked.too_long | (self._vendor != VendorError.NONE) | self._missed),
            left_now.eq(Mux(fresh, job.length, left)),
            rights.eq(Mux(job.kind == JobKind.WRITE, Access.REMOTE_WRITE,
                          Mux(job.kind == JobKind.ATOMIC, Access.REMOTE_ATOMIC, Access.LOCAL_WRITE))),
            again.request.p.hit_only.eq(1),
            again.request.p.key.eq(answer.p.meta.key),
            again.request.p.pd.eq(job.pd),
            again.request.p.rights.eq(rights),
            again.request.p.va.eq(rest_va),
            again.request.p.length.eq(rest),
            ends.eq(span >= whole),  # R-MR-5
            bytes_here.eq(Mux(ends, whole, span)),
            self._ring.put_segment.length.eq(bytes_here),
            self._ring.put_segment.last.eq(left_now == bytes_here),
            self._ring.put_segment.atomic.eq(job.kind == JobKind.ATOMIC),
            # Kept with the job, should it have to wait.
            keep.en.eq(self._ring.put),
            keep.addr.eq(Cat(self._ring.count[: (max_segments(self.p) - 1).bit_length()], walked.slot)),
            keep.data.address.eq(self._ring.put_segment.address),
            keep.data.length.eq(bytes_here),
            remembered.addr.eq(Cat(self._ring.count[: (max_segments(self.p) - 1).bit_length()], walked.slot)),
        ]

        def put():
            """The segment goes into the ring."""
            m.d.comb += self._ring.put.eq(1)
            m.d.sync += [left.eq(left_now - bytes_here), fresh.eq(0)]

        def place(address, status, length, base_va, take):
            """One answer for ``length`` bytes at ``base_va``: a segment, an error, or nothing; ``take`` it."""
            m.d.comb += [self._ring.put_segment.address.eq(address), source_status.eq(status), whole.eq(length)]
            missed = source_status == XlateStatus.MISS
            failed = (source_status != XlateStatus.OK) & ~missed
            with m.If(failed | missed | useless | (whole == 0)):
                m.d.comb += take.eq(1)
                m.d.sync += pieces.eq(pieces + 1)
                with m.If(failed & ~useless):
                    m.d.sync += self._vendor.eq(vendor_of(source_status))
                with m.If(missed & ~useless & (whole != 0)):
                    m.d.sync += [
                        self._missed.eq(1), missing.invalidate.eq(0), missing.va.eq(base_va),
                        missing.key.eq(answer.p.meta.key),
                        missing.meta.length.eq(whole),
                    ]  # fmt: skip
                m.next = "Pieces"
            with m.Elif(self._ring.room):
                m.d.comb += take.eq(1)
                put()
                m.d.sync += [
                    rest.eq(whole - span),  # R-MR-5
                    rest_low.eq(base_va[:32] + span),
                    rest_va[32:].eq(base_va[32:]),
                ]
                with m.If(ends):
                    m.d.sync += pieces.eq(pieces + 1)
                    m.next = "Pieces"
                with m.Else():
                    m.next = "Add"

        take_first, take_again, hold = Signal(), Signal(), Signal()
        resumes, invalidates = Signal(), Signal()
        m.d.comb += [
            answer.ready.eq((take_first & ~hold) | (take_again & ~hold)),
            resumes.eq(looked.valid & walked.again & ~resumed),
        ]
        with m.FSM(name="place"):
            with m.State("Pieces"):
                m.d.comb += span.eq(answer.p.span)
                with m.If(resumes):
                    m.d.sync += self._vendor.eq(note.vendor_err)
                    m.next = "Known"
                    with m.If((note.done == 0) | useless):
                        m.d.sync += resumed.eq(1)
                        m.next = "Pieces"
                with m.Elif(looked.valid & (pieces == walked.pieces)):
                    m.next = "Verdict"
                    with m.If(walked.again | self._missed | invalidates):
                        m.next = "Settle"
                    with m.If(invalidates):
                        m.d.sync += [self._missed.eq(1), missing.invalidate.eq(1), missing.key.eq(job.imm),
                                     missing.meta.length.eq(0)]  # fmt: skip
                with m.Elif(looked.valid & answer.valid):
                    place(answer.p.address, answer.p.status, answer.p.meta.length, answer.p.meta.va, take_first)
                    # A piece of several segments stays until its last one, for its key.
                    m.d.comb += hold.eq(self._ring.put & ~ends)
            with m.State("Known"):  # the memory's output is segment `_count` of the job
                m.d.comb += [
                    self._ring.put_segment.address.eq(remembered.data.address), span.eq(remembered.data.length),
                    whole.eq(remembered.data.length),
                ]  # fmt: skip
                with m.If(self._ring.count == note.count):
                    m.d.comb += [self._ring.put_segment.address.eq(note.address), span.eq(note.bytes), whole.eq(note.bytes)]
                with m.If((self._vendor != VendorError.NONE) | ((self._ring.count == note.count) & (note.bytes == 0))):
                    m.d.sync += resumed.eq(1)  # the last one could not be found, or was no segment
                    m.next = "Pieces"
                with m.Elif(self._ring.room):
                    put()
                    m.next = "Latch"
                    with m.If(self._ring.count == note.count):
                        m.d.sync += resumed.eq(1)
                        m.next = "Pieces"
            with m.State("Latch"):
                m.next = "Known"
            with m.State("Settle"):  # what the memories say of the job's slot
                m.next = "Look"
            with m.State("Look"):
                m.next = "Verdict"
            with m.State("Verdict"):
                m.d.comb += self._complete.eq(1)
                with m.If(self._ring.commit | self._ring.rollback):
                    m.next = "Pieces"
            with m.State("Add"):
                m.d.sync += rest_va.eq(Cat(rest_low[:32], rest_va[32:] + rest_low[32]))
                m.next = "Ask"
            with m.State("Ask"):
                m.d.comb += again.request.valid.eq(1)
                with m.If(again.request.ready):
                    m.next = "Answer"
            with m.State("Answer"):
                m.d.comb += [span.eq(again.response.p.span), again.response.ready.eq(take_again)]
                with m.If(again.response.valid):
                    place(again.response.p.address, again.response.p.status, rest, rest_va, take_again)
                    m.d.comb += hold.eq(self._ring.put & ~ends)
        m.d.comb += [
            # Not for a packet that fails, and only once.
            invalidates.eq((job.kind == JobKind.SEND) & ~job.land & job.complete & (job.flags & CqeFlags.WITH_INV).any()
                           & ~note.ended & ~useless & (walked.wqe_error == VendorError.NONE)),
            missing.pd.eq(job.pd),
            missing.rights.eq(Mux(missing.invalidate, Access.REMOTE_INVALIDATE, rights)),
            missing.meta.slot.eq(walked.slot),
            missing.meta.flip.eq(self._flip),
            missing.meta.count.eq(self._ring.count),
            missing.meta.done.eq(job.length - left_now),
        ]
        with m.If(self._ring.commit | self._ring.rollback):
            m.d.sync += [pieces.eq(0), self._vendor.eq(VendorError.NONE), self._missed.eq(0), fresh.eq(1), resumed.eq(0)]

    def _verdict(self, m, parking, placed, reads, frees):
        walked, out = parking.o.p.job, placed.i.p
        job = walked.job
        dead = Signal()
        goes = Signal()  # neither waits nor has to
        keeps_key = Signal()
        failed = Signal()
        packet = Signal()
        moves = Signal()
        syndrome = Signal(8)
        status, reason, vendor = Signal(WcStatus), Signal(VendorError), Signal(VendorError)
        ends_badly = Signal()
        bus = Signal()
        hands_on = Signal()
        done = Signal()
        atomic = Signal()
        invalid, access, operational = (
            nak_syndrome(code) for code in (NakCode.INVALID_REQUEST, NakCode.REMOTE_ACCESS, NakCode.REMOTE_OPERATIONAL)
        )
        m.d.comb += [
            dead.eq(parking.o.p.mark & ~job.land),  # R-ERR-8
            parking.park.eq(self._missed | (walked.again & self._under_way)),
            goes.eq(~parking.blocked & ~parking.park),
            self._waits.eq(done & self._missed & ~(walked.again & self._under_way)
                           & (~parking.blocked | (~walked.again & parking.short & ~self._missing.invalidate))),
            packet.eq(job.kind != JobKind.FLUSH),
            bus.eq(vendor == VendorError.HOST_BUS),
            ends_badly.eq(packet & ~dead & (
                walked.too_long | (walked.wqe_error != VendorError.NONE) | (self._vendor != VendorError.NONE)
                | job.nak_after_key)),
        ]
        with m.If(walked.wqe_error != VendorError.NONE):  # check 11
            m.d.comb += reason.eq(walked.wqe_error)
        with m.Elif(walked.too_long):  # check 10
            m.d.comb += reason.eq(VendorError.RECV_TOO_SMALL)
        with m.Elif(self._vendor != VendorError.NONE):  # checks 7 and 11
            m.d.comb += reason.eq(self._vendor)
        with m.Elif(job.nak_after_key | job.fatal):  # check 8, and those of the sequence stage
            m.d.comb += reason.eq(VendorError.BAD_REQUEST)
        # The state before the verdict lets this settle in registers.
        m.d.sync += [vendor.eq(reason), failed.eq(ends_badly)]
        m.d.comb += keeps_key.eq(walked.note.ended)  # so that was the failure: 8.1#12
        with m.If(vendor == VendorError.RECV_TOO_SMALL):
            m.d.comb += [syndrome.eq(invalid), status.eq(WcStatus.LOC_LEN_ERR)]
        with m.Elif(vendor == VendorError.BAD_REQUEST):
            m.d.comb += [syndrome.eq(invalid), status.eq(WcStatus.LOC_QP_OP_ERR)]
        with m.Else():
            m.d.comb += [
                syndrome.eq(Mux((job.kind != JobKind.SEND) & ~bus, access, operational)),  # 8.1#7, 8.1#11
                status.eq(Mux(bus | keeps_key, WcStatus.LOC_QP_OP_ERR, WcStatus.LOC_PROT_ERR)),
            ]

        m.d.comb += [
            atomic.eq(job.kind == JobKind.ATOMIC),
            moves.eq(goes & packet & ~dead & ~failed & (job.kind != JobKind.NONE) & (job.has_data | atomic)),
            *(out[name].eq(job[name]) for name in Placed(self.p).members
              if name not in ("respond", "syndrome", "msn", "fatal", "complete", "writes", "status", "vendor_err")),
            out.respond.eq(Mux(failed, ~job.land & ~keeps_key, job.respond)),
            out.syndrome.eq(Mux(failed, syndrome, job.syndrome)),
            out.msn.eq(Mux(failed, job.msn_before, job.msn)),  # 8.2; R-MSN-1
            out.fatal.eq(job.fatal | failed),
            out.complete.eq(job.complete & ~failed),
            out.writes.eq(Mux(moves & ~atomic, self._ring.count, 0)),
            out.status.eq(status),
            out.vendor_err.eq(vendor),
        ]
        # A failing packet answers with its own PSN; so does every packet that may fail.
        m.d.comb += [
            hands_on.eq(goes & (~packet | job.land | (~dead & (job.respond | failed | job.complete | moves)))),
            done.eq(self._complete & placed.i.ready & reads.i.ready & frees.i.ready),
            placed.i.valid.eq(done & hands_on),
            reads.i.valid.eq(done & moves & ~atomic),
            reads.i.p.head.eq(job.head),
            reads.i.p.length.eq(job.length),  # R-PAD-3: bytes without pad
            reads.i.p.immediate.eq(job.immediate),
            reads.i.p.value.eq(job.va),
            frees.i.valid.eq(done & goes & packet & ~moves & job.has_data & ~job.immediate),
            frees.i.payload.eq(job.head),
            self._ring.commit.eq(done & moves),  # R-RES-3
            self._ring.rollback.eq(done & ~moves),
            parking.o.ready.eq(done),
            parking.mark_update.eq(goes & ~job.land & (failed | (packet & job.fatal))),
            parking.mark_value.eq(1),
            self.error_drop.eq(done & goes & packet & (dead | job.dropped)),
            self.probe.valid.eq(done & moves),
            self.probe.event.eq(Mux(job.land, ProbeEvent.LOCAL_TRANSLATED, ProbeEvent.REMOTE_TRANSLATED)),
            self.probe.qpn.eq(job.qpn),
            self.probe.psn.eq(job.psn),
            self.probe.length.eq(job.length),
        ]
        m.d.sync += Assert(~self._ring.commit | (self._ring.count != 0), "responder: packet without segments")
