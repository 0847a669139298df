"""Place: the memory checks of a packet, all of them before its first byte moves."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import Access, VendorError, WcStatus
from ..config import Params
from ..memory.ordered import OrderedRequest, OrderedXlate
from ..records import Probe, ProbeEvent, XlateRequest, XlateSignature
from ..stream.arbiter import PriorityArbiter
from ..stream.buffer import SkidBuffer
from ..wire.syndrome import NakCode, nak_syndrome
from .lookup import Lookup
from .queue import Queue
from .receive_queue import TAG_BITS, vendor_of
from .records import FetchedJob, JobKind, Piece, Placed, Segment, Walked, max_segments
from .source import PayloadPlace
from .walk import Walk

__all__ = ["Place"]


class Place(wiring.Component):
    """Checks and translates every byte's place, then lets the packet's data go (8.1, checks 7, 10, 11).

    The pieces `Walk` found are translated several at a time; a piece whose answer spans less than it has bytes is asked for
    again from there. Only when all segments of the packet are known do they leave on ``segment``, its store cells on
    ``payload_at``, the job on ``o``. An ATOMIC has one segment and no cells; a READ is only checked. A packet that fails or has
    nothing to place has its cells freed (``free``).

    A failing packet poisons its QP: its later packets are thrown away here (``error_drop``). ``poison`` sets (1) or clears
    (0) the mark from outside. FLUSH jobs always go through; other jobs go on only if they answer or complete something.
    Landings (data of own READs and ATOMICs) neither poison nor heed the mark, and always go on.

    Timing: Walked to ``o`` 3 cycles after the last answer; 1 cycle per piece and two more per job; a second part of a piece takes
    5 cycles and its translation.

    Members: ``i`` FetchedJob, ``o`` Placed, ``segment``, ``payload_at`` PayloadPlace, ``free``, ``poison`` {qpn, state}: streams;
    ``xlate`` client (tag width ``Place.tag_bits``); ``error_drop`` pulse; ``probe`` (REMOTE_TRANSLATED; LOCAL_TRANSLATED for a
    landing).
    """

    tag_bits = TAG_BITS + 1

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(FetchedJob(p))),
            "o": Out(stream.Signature(Placed(p))),
            "segment": Out(stream.Signature(Segment())),
            "payload_at": Out(stream.Signature(PayloadPlace(p))),
            "free": Out(stream.Signature(p.cell_bits)),
            "poison": In(stream.Signature(data.StructLayout({"qpn": p.qpn_bits, "state": 1}))),
            "xlate": Out(XlateSignature(p, self.tag_bits)),
            "error_drop": Out(1),
            "probe": Out(Probe()),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.walk = walk = Walk(p)
        m.submodules.asked = asked = SkidBuffer(OrderedRequest(p, Piece()))
        m.submodules.translate = translate = OrderedXlate(p, TAG_BITS, Piece())
        m.submodules.walked = walked = Queue(Walked(p), p.desc_depth)
        m.submodules.cut = cut = SkidBuffer(Walked(p))
        m.submodules.poisoned = poisoned = Lookup(Walked(p), 1, p.num_qps)
        m.submodules.placed = placed = Queue(Placed(p), p.desc_depth)
        m.submodules.reads = reads = Queue(PayloadPlace(p), p.desc_depth)
        m.submodules.frees = frees = Queue(p.cell_bits, p.desc_depth)
        wiring.connect(m, wiring.flipped(self.i), walk.i)
        wiring.connect(m, walk.o, walked.i)
        wiring.connect(m, walk.request, asked.i)
        wiring.connect(m, asked.o, translate.request)
        wiring.connect(m, walked.o, cut.i)
        wiring.connect(m, cut.o, poisoned.i)
        wiring.connect(m, wiring.flipped(self.poison), poisoned.poke)
        wiring.connect(m, placed.o, wiring.flipped(self.o))
        wiring.connect(m, reads.o, wiring.flipped(self.payload_at))
        wiring.connect(m, frees.o, wiring.flipped(self.free))
        again = self._clients(m, translate)
        self._segments(m)
        self._collect(m, poisoned.o, translate.response, again)
        self._verdict(m, poisoned, placed, reads, frees)
        return m

    def _clients(self, m, translate):
        """Joins the ordered client (tag bit 3 is 0) and the client for second parts (tag 8). Returns the latter."""
        m.submodules.requests = requests = PriorityArbiter(XlateRequest(self.p, self.tag_bits), 2)
        again = XlateSignature(self.p, self.tag_bits).create()
        wiring.connect(m, requests.o, wiring.flipped(self.xlate.request))
        ordered, answer = translate.xlate, self.xlate.response
        second = answer.p.tag[-1]
        m.d.comb += [
            requests.i[0].valid.eq(again.request.valid),
            requests.i[0].payload.eq(again.request.payload),
            again.request.ready.eq(requests.i[0].ready),
            requests.i[1].valid.eq(ordered.request.valid),
            *(requests.i[1].p[name].eq(ordered.request.p[name]) for name in XlateRequest(self.p, 1).members),
            ordered.request.ready.eq(requests.i[1].ready),
            again.response.valid.eq(answer.valid & second),
            again.response.payload.eq(answer.payload),
            ordered.response.valid.eq(answer.valid & ~second),
            ordered.response.p.tag.eq(answer.p.tag),
            ordered.response.p.status.eq(answer.p.status),
            ordered.response.p.address.eq(answer.p.address),
            ordered.response.p.span.eq(answer.p.span),
            answer.ready.eq(Mux(second, again.response.ready, ordered.response.ready)),
        ]
        return again

    def _segments(self, m):
        """A ring of segments; those of the packet under way become visible, or vanish, at its verdict."""
        most = max_segments(self.p)
        depth = 1 << (2 * most - 1).bit_length()  # a power of two: the counters wrap by themselves
        m.submodules.ring = ring = memory.Memory(shape=Segment(), depth=depth, init=[])
        write, read = ring.write_port(), ring.read_port(domain="comb")
        self._put, self._segment = Signal(), Signal(Segment())
        self._commit, self._rollback = Signal(), Signal()
        self._count = Signal(range(most + 1))  # segments of the packet under way
        committed = Signal(range(depth + 1))  # visible segments not yet taken
        first = Signal(range(depth))
        begin = Signal(range(depth))  # where the packet under way begins
        taken = Signal()
        self._room = Signal()
        m.d.comb += [
            self._room.eq(committed + self._count < depth),
            write.en.eq(self._put),
            write.addr.eq(begin + self._count),
            write.data.eq(self._segment),
            read.addr.eq(first),
            taken.eq((committed != 0) & (~self.segment.valid | self.segment.ready)),
        ]
        with m.If(~self.segment.valid | self.segment.ready):
            m.d.sync += [self.segment.valid.eq(committed != 0), self.segment.payload.eq(read.data)]
        with m.If(taken):
            m.d.sync += first.eq(first + 1)
        with m.If(self._commit):
            m.d.sync += begin.eq(begin + self._count)
        m.d.sync += committed.eq(committed - taken + Mux(self._commit, self._count, 0))
        with m.If(self._commit | self._rollback):
            m.d.sync += self._count.eq(0)
        with m.Elif(self._put):
            m.d.sync += self._count.eq(self._count + 1)
        m.d.sync += [
            Assert(~self._put | (self._count != most), Format("responder: more than {} segments", most)),
            Assert(~self._put | self._room, "responder: segment ring overflows"),
        ]

    def _collect(self, m, looked, answer, again):
        """Turns answers into segments; ``self._complete`` when the job's are all in."""
        walked = looked.p.job
        job = walked.job
        useless = Signal()  # nothing of this job will be placed
        pieces = Signal(3)  # answers taken
        self._vendor = Signal(VendorError)  # of the first failing piece
        self._complete = Signal()
        left = Signal(13)  # bytes of the packet without a segment
        left_now = Signal(13)
        fresh = Signal(init=1)
        rest_low, rest_va = Signal(33), Signal(64)
        rest = Signal(13)  # bytes of the piece behind the segment
        source_status = Signal.like(answer.p.status)
        span = Signal(13)
        whole = Signal(13)  # bytes of the piece, or of its rest
        ends = Signal()
        bytes_here = Signal(13)
        m.d.comb += [
            useless.eq((looked.p.state & ~job.land) | walked.too_long | (self._vendor != VendorError.NONE)),
            left_now.eq(Mux(fresh, job.length, left)),
            again.request.p.tag.eq(1 << TAG_BITS),
            again.request.p.key.eq(answer.p.meta.key),
            again.request.p.pd.eq(job.pd),
            again.request.p.rights.eq(Mux(job.kind == JobKind.WRITE, Access.REMOTE_WRITE, Access.LOCAL_WRITE)),
            again.request.p.va.eq(rest_va),
            again.request.p.length.eq(rest),
            ends.eq(span >= whole),  # R-MR-5
            bytes_here.eq(Mux(ends, whole, span)),
            self._segment.length.eq(bytes_here),
            self._segment.last.eq(left_now == bytes_here),
            self._segment.atomic.eq(job.kind == JobKind.ATOMIC),
        ]

        def place(address, status, length, base_va, take):
            """One answer for ``length`` bytes at ``base_va``: a segment, an error, or nothing; ``take`` it."""
            m.d.comb += [self._segment.address.eq(address), source_status.eq(status), whole.eq(length)]
            failed = Value.cast(source_status) != 0
            with m.If(failed | useless | (whole == 0)):
                m.d.comb += take.eq(1)
                m.d.sync += pieces.eq(pieces + 1)
                with m.If(failed & ~useless):
                    m.d.sync += self._vendor.eq(vendor_of(source_status))
                m.next = "Pieces"
            with m.Elif(self._room):
                m.d.comb += [take.eq(1), self._put.eq(1)]
                m.d.sync += [
                    left.eq(left_now - bytes_here),
                    fresh.eq(0),
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
        m.d.comb += answer.ready.eq((take_first & ~hold) | (take_again & ~hold))
        with m.FSM(name="place"):
            with m.State("Pieces"):
                m.d.comb += span.eq(answer.p.span)
                with m.If(looked.valid & (pieces == walked.pieces)):
                    m.next = "Verdict"
                with m.If(looked.valid & (pieces != walked.pieces) & answer.valid):
                    place(answer.p.address, answer.p.status, answer.p.meta.length, answer.p.meta.va, take_first)
                    # A piece of several segments stays until its last one, for its key.
                    m.d.comb += hold.eq(self._put & ~ends)
            with m.State("Verdict"):
                m.d.comb += self._complete.eq(1)
                with m.If(self._commit | self._rollback):
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
                    m.d.comb += hold.eq(self._put & ~ends)
        with m.If(self._commit | self._rollback):
            m.d.sync += [pieces.eq(0), self._vendor.eq(VendorError.NONE), fresh.eq(1)]

    def _verdict(self, m, poisoned, placed, reads, frees):
        walked, out = poisoned.o.p.job, placed.i.p
        job = walked.job
        dead = Signal()
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
            dead.eq(poisoned.o.p.state & ~job.land),  # R-ERR-8
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
        with m.If(vendor == VendorError.RECV_TOO_SMALL):
            m.d.comb += [syndrome.eq(invalid), status.eq(WcStatus.LOC_LEN_ERR)]
        with m.Elif(vendor == VendorError.BAD_REQUEST):
            m.d.comb += [syndrome.eq(invalid), status.eq(WcStatus.LOC_QP_OP_ERR)]
        with m.Else():
            m.d.comb += [
                syndrome.eq(Mux((job.kind != JobKind.SEND) & ~bus, access, operational)),  # 8.1#7, 8.1#11
                status.eq(Mux(bus, WcStatus.LOC_QP_OP_ERR, WcStatus.LOC_PROT_ERR)),
            ]

        m.d.comb += [
            atomic.eq(job.kind == JobKind.ATOMIC),
            moves.eq(packet & ~dead & ~failed & (job.kind != JobKind.NONE) & (job.has_data | atomic)),
            *(out[name].eq(job[name]) for name in Placed(self.p).members
              if name not in ("respond", "syndrome", "msn", "fatal", "complete", "writes", "status", "vendor_err")),
            out.respond.eq(job.respond | (failed & ~job.land)),
            out.syndrome.eq(Mux(failed, syndrome, job.syndrome)),
            out.msn.eq(Mux(failed, job.msn_before, job.msn)),  # 8.2; R-MSN-1
            out.fatal.eq(job.fatal | failed),
            out.complete.eq(job.complete & ~failed),
            out.writes.eq(Mux(moves & ~atomic, self._count, 0)),
            out.status.eq(status),
            out.vendor_err.eq(vendor),
        ]
        # A failing packet answers with its own PSN; so does every packet that may fail.
        m.d.comb += [
            hands_on.eq(~packet | job.land | (~dead & (job.respond | failed | job.complete | moves))),
            done.eq(self._complete & placed.i.ready & reads.i.ready & frees.i.ready),
            placed.i.valid.eq(done & hands_on),
            reads.i.valid.eq(done & moves & ~atomic),
            reads.i.p.head.eq(job.head),
            reads.i.p.length.eq(job.length),  # R-PAD-3: bytes without pad
            reads.i.p.immediate.eq(job.immediate),
            reads.i.p.value.eq(job.va),
            frees.i.valid.eq(done & packet & ~moves & job.has_data & ~job.immediate),
            frees.i.payload.eq(job.head),
            self._commit.eq(done & moves),  # R-RES-3
            self._rollback.eq(done & ~moves),
            poisoned.o.ready.eq(done),
            poisoned.update.eq(~job.land & (failed | (packet & job.fatal))),
            poisoned.update_state.eq(1),
            self.error_drop.eq(done & packet & (dead | job.dropped)),
            self.probe.valid.eq(done & moves),
            self.probe.event.eq(Mux(job.land, ProbeEvent.LOCAL_TRANSLATED, ProbeEvent.REMOTE_TRANSLATED)),
            self.probe.qpn.eq(job.qpn),
            self.probe.psn.eq(job.psn),
            self.probe.length.eq(job.length),
        ]
        m.d.sync += Assert(~self._commit | (self._count != 0), "responder: packet without segments")
