"""Walk: from a job to the regions of memory its payload goes to."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import Access, VendorError
from ..config import Params
from ..memory.ordered import OrderedRequest
from .records import JobKind, Piece, PlaceTicket, Walked, list_sges

__all__ = ["Walk"]


class Walk(wiring.Component):
    """Asks for the translation of every region a packet's payload goes to.

    WRITE: one region; the whole rest of the message is checked with it (R-RES-1), nothing when it has no bytes (R-RES-2); a
    job with ``nak_after_key`` is only checked. READ: the whole range, checked only. ATOMIC: its 8 bytes. SEND: the SGEs of the
    receive WQE from byte ``resid`` of the message on;
    SGEs of length 0 are passed over (R-WQ-4); a message that goes on behind the last SGE is ``too_long`` (check 10). A landing
    is a SEND to the SGEs of a send WQE. A job that waited for a page table goes on behind the bytes that have their place.

    All requests are ``hit_only``: an answer comes at once.

    Timing: one WRITE or job without payload per cycle; a SEND takes 1 cycle, 2 per SGE passed over, 3 per SGE used; 2 more for a
    job that goes on.

    Members: ``i`` PlaceTicket, ``o`` Walked, ``request`` OrderedRequest with a `Piece`: streams.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(PlaceTicket(p))),
            "o": Out(stream.Signature(Walked(p))),
            "request": Out(stream.Signature(OrderedRequest(p, Piece()))),
        })

    def elaborate(self, platform):
        m = Module()
        ticket, fetched, note = self.i.p, self.i.p.job, self.i.p.note
        job = fetched.job
        request = self.request
        final = Signal()  # the job's last request

        needs_key = Signal()
        walks = Signal()
        reads, atomic = Signal(), Signal()
        m.d.comb += [
            reads.eq(job.kind == JobKind.READ),
            atomic.eq(job.kind == JobKind.ATOMIC),
            # R-RES-2
            needs_key.eq(Mux(reads | atomic, job.starts, (job.kind == JobKind.WRITE) & (job.has_data | job.nak_after_key))),
            walks.eq((job.kind == JobKind.SEND) & job.has_data & (fetched.wqe_error == VendorError.NONE)),
            *(self.o.p[name].eq(ticket[name]) for name in ("qpn", "slot", "again", "barrier", "color", "note")),
            self.o.p.job.eq(job),
            request.p.hit_only.eq(1),
            self.o.p.wqe_error.eq(Mux(job.kind == JobKind.SEND, fetched.wqe_error, VendorError.NONE)),
            request.p.pd.eq(job.pd),
            self.i.ready.eq(self.o.valid & self.o.ready),
        ]

        sge = Signal.like(fetched.sges[0])
        number = Signal(range(list_sges(self.p)))
        offset = Signal(32)  # message bytes before the packet, less those of SGEs passed over
        left = Signal(13)  # bytes of the packet without a place
        pieces = Signal(3)
        remains = Signal(33)  # bytes of the SGE behind `offset`; negative: it ends before
        low = Signal(33)
        va = Signal(64)
        take = Signal(13)
        covers = Signal()
        beyond = Signal()
        m.d.comb += [
            sge.eq(fetched.sges[number]),
            covers.eq(~remains[32] & (remains[:32] != 0)),  # R-WQ-4
            beyond.eq(number == list_sges(self.p) - 1),
        ]

        goes_on = Signal()  # some bytes have their place already
        resid = Signal(32)
        m.d.comb += goes_on.eq(note.done != 0)

        def next_sge():
            m.d.sync += number.eq(number + 1)
            with m.If(beyond):
                m.next = "TooLong"
            with m.Else():
                m.next = "Measure"

        with m.FSM(name="walk"):
            with m.State("Start"):
                # A WRITE, READ or ATOMIC, or a job without payload, goes through in this state.
                m.d.comb += [
                    request.p.key.eq(job.rkey),
                    # 8.1#7
                    request.p.rights.eq(Mux(reads, Access.REMOTE_READ, Mux(atomic, Access.REMOTE_ATOMIC, Access.REMOTE_WRITE))),
                    request.p.va.eq(job.va),
                    request.p.length.eq(job.resid),  # R-RES-1
                    request.p.meta.va.eq(job.va),
                    request.p.meta.key.eq(job.rkey),
                    request.p.meta.length.eq(Mux(job.nak_after_key | reads, 0, job.length)),
                    self.o.p.pieces.eq(needs_key),
                    request.valid.eq(self.i.valid & ~goes_on & needs_key & self.o.ready),
                    self.o.valid.eq(self.i.valid & ~goes_on & ~walks & (request.ready | ~needs_key)),
                ]
                m.d.sync += [
                    number.eq(0), offset.eq(job.resid + note.done), left.eq(job.length - note.done), pieces.eq(0),
                    low.eq(job.va[:32] + note.done), resid.eq(job.resid - note.done),
                ]  # fmt: skip
                with m.If(self.i.valid & goes_on):
                    m.next = "Behind"
                with m.Elif(self.i.valid & walks):
                    m.next = "Measure"
            with m.State("Behind"):
                m.d.sync += va.eq(Cat(low[:32], job.va[32:] + low[32]))
                with m.If(walks & (left != 0)):
                    m.next = "Measure"
                with m.Else():
                    m.next = "Rest"
            with m.State("Rest"):  # of a WRITE, or nothing
                m.d.comb += [
                    request.p.key.eq(job.rkey),
                    request.p.rights.eq(Access.REMOTE_WRITE),
                    request.p.va.eq(va),
                    request.p.length.eq(resid),
                    request.p.meta.va.eq(va),
                    request.p.meta.key.eq(job.rkey),
                    request.p.meta.length.eq(left),
                    self.o.p.pieces.eq(left != 0),
                    request.valid.eq((left != 0) & self.o.ready),
                    self.o.valid.eq(request.ready | (left == 0)),
                ]
                with m.If(self.o.valid & self.o.ready):
                    m.next = "Start"
            with m.State("Measure"):
                m.d.sync += [remains.eq(sge.length - offset), low.eq(sge.addr[:32] + offset)]
                m.next = "Choose"
            with m.State("Choose"):
                m.d.sync += [
                    va.eq(Cat(low[:32], sge.addr[32:] + low[32])),
                    take.eq(Mux(remains[:32] < left, remains, left)),
                    final.eq(remains[:32] >= left),
                ]
                with m.If(covers):
                    m.d.sync += offset.eq(0)
                    m.next = "Ask"
                with m.Else():
                    m.d.sync += offset.eq(0 - remains[:32])
                    next_sge()
            with m.State("Ask"):
                m.d.comb += [
                    request.p.key.eq(sge.lkey),
                    request.p.rights.eq(Access.LOCAL_WRITE),  # R-MR-4
                    request.p.va.eq(va),
                    request.p.length.eq(take),
                    request.p.meta.va.eq(va),
                    request.p.meta.key.eq(sge.lkey),
                    request.p.meta.length.eq(take),
                    self.o.p.pieces.eq(pieces + 1),
                    request.valid.eq(~final | self.o.ready),
                    self.o.valid.eq(final & request.ready),
                ]
                with m.If(request.valid & request.ready):
                    m.d.sync += [left.eq(left - take), pieces.eq(pieces + 1)]
                    with m.If(final):
                        m.next = "Start"
                    with m.Else():
                        next_sge()
            with m.State("TooLong"):  # 8.1#10
                m.d.comb += [self.o.valid.eq(1), self.o.p.pieces.eq(pieces), self.o.p.too_long.eq(1)]
                with m.If(self.o.ready):
                    m.next = "Start"
        return m
