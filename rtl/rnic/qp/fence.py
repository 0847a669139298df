"""Waits until nothing that began before is left in the streets."""

from dataclasses import dataclass

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import FetchJob, QpEvent

__all__ = ["Access", "Fence", "Watch"]

QUIET = 15  # cycles without an item after which nothing is left in the stages before a stream
ACCESS_BITS = 12


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A stream whose old items must have passed: ``holds`` items at most can be in front of it, its own register included.
    ``phase``: streams of a phase are watched when those of the phase before have passed."""

    name: str
    phase: int
    holds: int


@dataclass(frozen=True, kw_only=True)
class Access:
    """A client of a DMA engine: its accesses end in the order of their beginning."""

    name: str


MARKER_PHASE = 2  # in which the markers and the flush event of QP 0 go out
QP_PHASE = 3  # in which the flush event of the QP goes out


class Fence(wiring.Component):
    """Waits, once asked, until everything that was in the NIC at that moment has left it.

    The queue pair or object whose end waits has been stopped before (state RESET, entry not valid), so nothing new of it
    comes in; traffic of others goes on meanwhile. A marker follows the transmit street (a fetch job that is no WQE) and comes
    out behind the payload fetch, another one (``mark``) does so in the READ response sender. A flush event of QP 0, which is
    the number of no RC or UC queue pair, follows the receive street of the responder and comes out behind its last write
    response; then one of the QP that ends comes back when its answers have left. Streams beside these are watched: an old
    item has passed when ``holds`` items have, or when none came for a while. At last the accesses of each DMA client that are
    under way are counted out.

    Ports: ``start`` pulse with ``qpn`` (0 when no QP ends), ``done`` pulse; ``fetch_i`` to ``fetch_o``, the fetch jobs, where
    the marker goes in, and ``marker_out`` pulse; ``mark`` and ``marked`` pulses; ``flush_i`` to ``flush_o``, the flush
    events, and ``drained`` with ``drained_qpn``, pulse when one is through; per `Watch` ``valid_<name>`` and
    ``ready_<name>``; per `Access` ``begin_<name>``, ``end_<name>`` pulses.

    Timing: about 16 cycles a phase plus what the streets take; ``fetch`` and ``flush`` pass combinationally.
    """

    def __init__(self, p: Params, watches: list[Watch], accesses: list[Access]):
        self.p = p
        self.watches, self.accesses = watches, accesses
        self.phases = max(QP_PHASE, *(w.phase for w in watches)) + 1
        super().__init__({
            "start": In(1), "qpn": In(p.qpn_bits), "done": Out(1), "mark": Out(1), "marked": In(1),
            "fetch_i": In(stream.Signature(FetchJob(p))), "fetch_o": Out(stream.Signature(FetchJob(p))), "marker_out": In(1),
            "flush_i": In(stream.Signature(QpEvent(p))), "flush_o": Out(stream.Signature(QpEvent(p))), "drained": In(1),
            "drained_qpn": In(p.qpn_bits),
            **{f"valid_{w.name}": In(1) for w in watches}, **{f"ready_{w.name}": In(1) for w in watches},
            **{f"begin_{a.name}": In(1) for a in accesses}, **{f"end_{a.name}": In(1) for a in accesses},
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        phase = Signal(range(self.phases + 2))  # the last one waits for the accesses
        running = Signal()
        fresh = Signal()  # first cycle of a phase
        advance = Signal()
        passed = Signal(len(self.watches) + len(self.accesses) + 1)
        all_passed = Signal()
        marked, flushed, answered = Signal(), Signal(), Signal()
        qpn, flush_qpn = Signal(self.p.qpn_bits), Signal(self.p.qpn_bits)
        m.d.comb += [
            advance.eq(running & ~fresh & all_passed),
            self.done.eq(advance & (phase == self.phases)),
        ]
        m.d.sync += [fresh.eq(self.start | advance), all_passed.eq(~fresh & passed.all())]  # what has passed stays so
        with m.If(self.start):
            m.d.sync += [running.eq(1), phase.eq(0), qpn.eq(self.qpn)]
        with m.Elif(self.done):
            m.d.sync += running.eq(0)
        with m.Elif(advance):
            m.d.sync += phase.eq(phase + 1)

        go, go_qp = Signal(), Signal()
        m.d.comb += [
            go.eq(fresh & (phase == MARKER_PHASE)),
            go_qp.eq(fresh & (phase == QP_PHASE)),
            self.mark.eq(go),
            passed[-1].eq(((phase != MARKER_PHASE) | (marked & answered & flushed)) & ((phase != QP_PHASE) | flushed)),
        ]
        marker_waits = self._insert(m, "marker", go, self.fetch_i, self.fetch_o)
        flush_waits = self._insert(m, "flush", go | go_qp, self.flush_i, self.flush_o)
        with m.If(marker_waits):
            m.d.comb += [self.fetch_o.payload.eq(0), self.fetch_o.payload.marker.eq(1), self.fetch_o.payload.count.eq(1)]
        with m.If(flush_waits):
            m.d.comb += self.flush_o.payload.qpn.eq(flush_qpn)
        with m.If(go):
            m.d.sync += [marked.eq(0), answered.eq(0), flushed.eq(0), flush_qpn.eq(0)]
        with m.Elif(go_qp):
            m.d.sync += [flushed.eq(0), flush_qpn.eq(qpn)]
        with m.Else():
            m.d.sync += [
                marked.eq(marked | self.marker_out),
                answered.eq(answered | self.marked),
                flushed.eq(flushed | (self.drained & (self.drained_qpn == flush_qpn))),
            ]

        for i, watch in enumerate(self.watches):
            valid, ready = getattr(self, f"valid_{watch.name}"), getattr(self, f"ready_{watch.name}")
            here = Signal(name=f"here_{watch.name}")
            quiet = Signal(range(QUIET + 1), name=f"quiet_{watch.name}")
            left = Signal(range(watch.holds + 1), name=f"left_{watch.name}")
            m.d.comb += [
                here.eq(phase == watch.phase),
                passed[i].eq(~here | (quiet == QUIET) | (left == 0)),
            ]
            with m.If(fresh):
                m.d.sync += [quiet.eq(0), left.eq(watch.holds)]
            with m.Elif(here & ~passed[i]):
                m.d.sync += quiet.eq(Mux(valid, 0, quiet + 1))
                with m.If(valid & ready):
                    m.d.sync += left.eq(left - 1)
        for i, access in enumerate(self.accesses):
            begin, end = getattr(self, f"begin_{access.name}"), getattr(self, f"end_{access.name}")
            under_way = Signal(ACCESS_BITS, name=f"under_way_{access.name}")
            left = Signal(ACCESS_BITS, name=f"left_{access.name}")
            m.d.comb += passed[len(self.watches) + i].eq((phase != self.phases) | (left == 0))
            m.d.sync += [
                under_way.eq(under_way + begin - end),
                Assert(~end | (under_way != 0) | begin, f"Fence: an access of {access.name} ends that never began"),
            ]
            with m.If(fresh):
                m.d.sync += left.eq(under_way - end)
            with m.Elif(left != 0):
                m.d.sync += left.eq(left - end)
        return m

    def _insert(self, m, name, go, i, o):
        """An item of our own between those that pass from ``i`` to ``o``: at once when none waits, else behind the one that
        does. Returns whether it is offered; its payload is the caller's."""
        wanted = Signal(name=f"{name}_wanted")
        offered = Signal(name=f"{name}_offered")
        m.d.comb += [
            o.valid.eq(offered | i.valid),
            o.payload.eq(i.payload),
            i.ready.eq(o.ready & ~offered),
        ]
        with m.If(go):
            m.d.sync += wanted.eq(1)
        with m.If(offered & o.ready):
            m.d.sync += offered.eq(0)
        with m.Elif(wanted & ~offered & (~i.valid | o.ready)):
            m.d.sync += [wanted.eq(0), offered.eq(1)]
        return offered
