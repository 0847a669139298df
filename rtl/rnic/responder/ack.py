"""ACK policy and receive completions: what goes back to the peer, and what to the receive CQ, and when."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import RESPONDER_HOT, CtxTable, EventType, VendorError, WcOpcode, WcStatus
from ..config import Params
from ..records import CqeRequest, CtxBus, LandResult, Probe, ProbeEvent, QpError
from ..stream.buffer import HalfRegister, SkidBuffer
from ..stream.fifo import StreamFifo
from ..wire.syndrome import NakCode
from .lookup import Lookup
from .queue import Queue
from .records import Answer, JobKind, Placed, Release

__all__ = ["Ack", "Collect", "Complete", "Completion", "Finished"]

RQ_INDEX_WORD = RESPONDER_HOT.fields["rq_index"].offset // 32


class Ack(wiring.Component):
    """Answers a job when all its write commands were accepted by the host, and hands it to `Complete` (R-ACK-3).

    What can lose the effect after that is a host-bus error alone; the job's place in the order of completions is taken in
    the cycle of the answer. One answer a job that asks for one, in order: MSN as the job says (R-MSN-1). A READ, ATOMIC or
    REPLAY takes its place among the answers here.

    Timing: 1 cycle per write command, at least 1 per job.

    Members: ``i`` Placed, ``accepted`` in; ``ack`` Answer, ``o`` Placed out: streams; ``probe_placed`` (DATA_PLACED),
    ``probe_ack`` (ACK_SENT).
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(Placed(p))),
            "accepted": In(stream.Signature(1)),
            "ack": Out(stream.Signature(Answer(p))),
            "o": Out(stream.Signature(Placed(p))),
            "probe_placed": Out(Probe()),
            "probe_ack": Out(Probe()),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.acks = acks = Queue(Answer(p), p.desc_depth)
        wiring.connect(m, acks.o, wiring.flipped(self.ack))
        m.submodules.collect = collect = Collect(p)
        wiring.connect(m, wiring.flipped(self.i), collect.i)
        wiring.connect(m, wiring.flipped(self.accepted), collect.done)
        job = collect.o.p
        goes_on = Signal()
        done = Signal()
        request = Signal()  # the answer is no ACK or NAK
        m.d.comb += [
            goes_on.eq((job.writes != 0) | job.complete | job.fatal | job.land | (job.kind == JobKind.FLUSH)
                       | (job.kind == JobKind.READ) | (job.kind == JobKind.ATOMIC)),
            request.eq(((job.kind == JobKind.READ) | (job.kind == JobKind.ATOMIC) | (job.kind == JobKind.REPLAY)) & ~job.fatal),
            done.eq(collect.o.valid & acks.i.ready & self.o.ready),  # R-ACK-3
            collect.o.ready.eq(acks.i.ready & self.o.ready),
            self.o.valid.eq(done & goes_on),
            *(self.o.p[name].eq(job[name]) for name in Placed(p).members),
            acks.i.valid.eq(done & job.respond),  # R-ACK-1
            acks.i.p.qpn.eq(job.qpn),
            acks.i.p.psn.eq(job.response_psn),
            acks.i.p.syndrome.eq(job.syndrome),
            acks.i.p.msn.eq(job.msn),
            acks.i.p.kind.eq(Mux(request, job.kind, JobKind.NONE)),
            acks.i.p.va.eq(job.va),
            acks.i.p.rkey.eq(job.imm),
            acks.i.p.length.eq(job.byte_len),
            acks.i.p.op.eq(job.flags[:2]),
        ]
        m.d.comb += [
            self.probe_placed.valid.eq(done & (job.writes != 0)),
            self.probe_placed.event.eq(ProbeEvent.DATA_PLACED),
            self.probe_placed.qpn.eq(job.qpn),
            self.probe_placed.psn.eq(job.psn),
            self.probe_placed.length.eq(job.length),
            self.probe_ack.valid.eq(acks.i.valid & ~request),
            self.probe_ack.event.eq(ProbeEvent.ACK_SENT),
            self.probe_ack.qpn.eq(job.qpn),
            self.probe_ack.psn.eq(job.response_psn),
            self.probe_ack.opcode.eq(job.syndrome),
        ]
        return m


class Finished(data.StructLayout):
    """A job with all its write responses; ``bus_error``: one of them was an error."""

    def __init__(self, p: Params):
        super().__init__({**dict(Placed(p).members), "bus_error": 1})


class Collect(wiring.Component):
    """Waits for one item on ``done`` per write command of each job, in order: acceptances or responses.

    Timing: 1 cycle per write command, at least 1 per job; ``i.ready`` follows ``o.ready``.

    Members: ``i`` Placed, ``done`` in; ``o`` Finished out: streams.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(Placed(p))),
            "done": In(stream.Signature(1)),
            "o": Out(stream.Signature(Finished(p))),
        })

    def elaborate(self, platform):
        m = Module()
        job = Signal(Placed(self.p))
        held = Signal()
        left = Signal(4)  # items of `job` to come
        error = Signal()
        final = Signal()
        complete = Signal()
        leave = Signal()
        m.d.comb += [
            final.eq((left == 1) & self.done.valid),
            complete.eq((left == 0) | final),  # R-ACK-3, R-ORD-4
            self.o.valid.eq(held & complete),
            *(self.o.p[name].eq(job[name]) for name in Placed(self.p).members),
            self.o.p.bus_error.eq(error | (final & self.done.payload)),
            leave.eq(self.o.valid & self.o.ready),
            self.i.ready.eq(~held | leave),
            self.done.ready.eq(held & ((left > 1) | ((left == 1) & self.o.ready))),
        ]
        with m.If(self.done.valid & self.done.ready):
            m.d.sync += [left.eq(left - 1), error.eq(error | self.done.payload)]
        with m.If(self.i.ready):
            m.d.sync += [held.eq(self.i.valid), job.eq(self.i.payload), left.eq(self.i.p.writes), error.eq(0)]
        return m


class Completion(data.StructLayout):
    """Per-QP state of `Complete`: counter of the next receive WQE to complete; ``dead``: the QP failed."""

    def __init__(self):
        super().__init__({"next": 16, "dead": 1})


class Complete(wiring.Component):
    """Completes receive WQEs in post order, each once (R-ERR-3, R-ERR-4).

    A job's completion waits for the write responses of all jobs before it. An error response makes the receive WQE in use
    complete with LOC_QP_OP_ERR and HOST_BUS, raises ``qp_error`` and poisons the QP for `Place`. A job that ends the QP (8.2)
    completes the receive WQE in use with its status. A landing ends on ``landed`` and touches no state here. After either,
    only a FLUSH of the QP completes anything: all receive WQEs up to its index, WR_FLUSH_ERR (R-ERR-3, R-ERR-5). ``drained``
    says when a FLUSH is through.

    A READ or ATOMIC is released when the write responses of all jobs before it came (C117); what follows an ATOMIC of its
    QP waits until it is executed (``executing``), so that no later completion is seen before its effect (R-ORD-1).

    The state starts again when a command writes the RQ counters of ResponderHot.

    Timing: 1 cycle per write command, at least 1 per job; a FLUSH 3 cycles and 2 per receive WQE.

    Members: ``i`` Placed, ``done`` in; ``cqe`` CqeRequest, ``qp_error`` QpError, ``poison`` {qpn, state}, ``landed`` LandResult,
    ``release``, ``drained`` (qpn) out: streams; ``ctx``; ``executing``, ``executing_qpn``.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(Placed(p))),
            "done": In(stream.Signature(1)),
            "ctx": In(CtxBus(p)),
            "cqe": Out(stream.Signature(CqeRequest(p))),
            "qp_error": Out(stream.Signature(QpError(p))),
            "poison": Out(stream.Signature(data.StructLayout({"qpn": p.qpn_bits, "state": 1}))),
            "landed": Out(stream.Signature(LandResult(p))),
            "release": Out(stream.Signature(Release(p))),
            "executing": In(1),
            "executing_qpn": In(p.qpn_bits),
            "drained": Out(stream.Signature(p.qpn_bits)),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.waiting = waiting = Queue(Placed(p), 2 * p.desc_depth, direct=True)
        m.submodules.collect = collect = Collect(p)
        m.submodules.finished = finished = HalfRegister(Finished(p))
        m.submodules.states = states = Lookup(Finished(p), Completion(), p.num_qps, half_rate=True)
        m.submodules.cqes = cqes = Queue(CqeRequest(p), p.desc_depth)
        m.submodules.errors = errors = Queue(QpError(p), p.desc_depth)
        m.submodules.poisons = poisons = StreamFifo(self.poison.payload.shape(), 2)
        m.submodules.landings = landings = SkidBuffer(LandResult(p))
        wiring.connect(m, wiring.flipped(self.i), waiting.i)
        wiring.connect(m, waiting.o, collect.i)
        wiring.connect(m, wiring.flipped(self.done), collect.done)
        wiring.connect(m, collect.o, finished.i)
        wiring.connect(m, finished.o, states.i)
        wiring.connect(m, cqes.o, wiring.flipped(self.cqe))
        wiring.connect(m, errors.o, wiring.flipped(self.qp_error))
        wiring.connect(m, poisons.o, wiring.flipped(self.poison))
        wiring.connect(m, landings.o, wiring.flipped(self.landed))

        write = self.ctx.payload
        restart = Signal()
        m.d.comb += [
            restart.eq((write.table == CtxTable.RESPONDER_HOT) & (write.word == RQ_INDEX_WORD)),
            states.poke.valid.eq(self.ctx.valid & restart),
            states.poke.p.qpn.eq(write.index),
            states.poke.p.state.next.eq(write.data[:16]),
            self.ctx.ready.eq(~restart | states.poke.ready),
        ]

        job, state = states.o.p.job, states.o.p.state
        room = Signal()
        done = Signal()
        drains = Signal()
        releases = Signal()
        m.submodules.drained = drained = StreamFifo(p.qpn_bits, 2)
        wiring.connect(m, drained.o, wiring.flipped(self.drained))
        m.d.comb += [
            room.eq(cqes.i.ready & errors.i.ready & poisons.i.ready & landings.i.ready & drained.i.ready
                    & ~(self.executing & (self.executing_qpn == job.qpn))),  # R-ORD-1
            releases.eq(((job.kind == JobKind.READ) | (job.kind == JobKind.ATOMIC)) & ~job.fatal),  # R-ACK-3
            self.release.valid.eq(states.o.valid & room & releases),
            self.release.p.qpn.eq(job.qpn),
            self.release.p.atomic.eq(job.kind == JobKind.ATOMIC),
            self.release.p.op.eq(job.flags[:2]),
            self.release.p.index.eq(job.index),
            self.release.p.dead.eq(state.dead),
            drained.i.valid.eq(drains),
            drained.i.payload.eq(job.qpn),
            states.o.ready.eq(done),
        ]

        flush_next = Signal(16)
        flushed = Signal()
        after = Signal(16)
        cqe = cqes.i
        m.d.comb += [
            cqe.p.cqn.eq(job.cqn),
            cqe.p.qpn.eq(job.qpn),
            cqe.p.wqe_counter.eq(job.index),
            cqe.p.opcode.eq(Mux(job.write_imm, WcOpcode.RECV_RDMA_WITH_IMM, WcOpcode.RECV)),  # R-CQ-2
            errors.i.p.qpn.eq(job.qpn),
            poisons.i.p.qpn.eq(job.qpn),
            poisons.i.p.state.eq(1),
            states.update_state.eq(state),
            after.eq(state.next + 1),  # R-WQ-8, R-ERR-4
        ]
        with m.FSM(name="complete"):
            with m.State("Jobs"):
                m.d.sync += flush_next.eq(state.next)
                with m.If(states.o.valid & room):
                    with m.If(job.kind == JobKind.FLUSH):
                        with m.If(job.complete):
                            m.next = "FlushLook"
                        with m.Else():
                            m.d.comb += [done.eq(1), drains.eq(1)]
                    with m.Elif(releases):
                        m.d.comb += done.eq(self.release.ready)
                    with m.Else():
                        m.d.comb += done.eq(1)
                        with m.If(job.land):
                            self._land(m, job, landings.i)
                        with m.Elif(~state.dead):
                            self._finish(m, job, cqe, errors.i, poisons.i)
                        m.d.comb += [
                            states.update.eq(cqe.valid | errors.i.valid),
                            states.update_state.next.eq(Mux(cqe.valid, after, state.next)),
                            states.update_state.dead.eq(state.dead | errors.i.valid),
                        ]
                        m.d.sync += Assert(
                            ~cqe.valid | (job.index == state.next),
                            Format("QP {} completes receive WQE {} instead of {}", job.qpn, job.index, state.next))
            with m.State("FlushLook"):
                m.d.sync += flushed.eq(flush_next == job.index)  # R-ERR-3, R-ERR-5
                m.next = "Flush"
            with m.State("Flush"):
                m.d.comb += [
                    cqe.p.wqe_counter.eq(flush_next),
                    cqe.p.opcode.eq(WcOpcode.RECV),
                    cqe.p.status.eq(WcStatus.WR_FLUSH_ERR),  # R-ERR-2: no vendor code
                    states.update_state.next.eq(flush_next),
                    states.update_state.dead.eq(1),
                ]
                with m.If(flushed):
                    m.d.comb += [done.eq(1), states.update.eq(1), drains.eq(1)]
                    m.next = "Jobs"
                with m.Else():
                    m.d.comb += cqe.valid.eq(1)
                    with m.If(cqe.ready):
                        m.d.sync += flush_next.eq(flush_next + 1)
                        m.next = "FlushLook"
        return m

    def _land(self, m, job, landed):
        """All bytes of a landing are in memory, or it failed (R-RSP-8)."""
        m.d.comb += [
            landed.valid.eq(1),
            landed.p.qpn.eq(job.qpn),
            landed.p.tag.eq(job.tag),
            landed.p.index.eq(job.index),
            landed.p.status.eq(WcStatus.SUCCESS),
        ]
        with m.If(job.fatal):
            m.d.comb += [landed.p.status.eq(job.status), landed.p.vendor_err.eq(job.vendor_err)]
        with m.Elif(job.bus_error):
            m.d.comb += [landed.p.status.eq(WcStatus.LOC_QP_OP_ERR), landed.p.vendor_err.eq(VendorError.HOST_BUS)]

    def _finish(self, m, job, cqe, error, poison):
        """What a packet's job does to its receive WQE and its QP."""
        with m.If(job.fatal):  # 8.2
            m.d.comb += [
                error.valid.eq(1),
                cqe.valid.eq(job.in_use),  # 8.2
                cqe.p.status.eq(job.status),
                cqe.p.vendor_err.eq(job.vendor_err),
            ]
            with m.If(~job.in_use):
                with m.Switch(job.syndrome[:5]):
                    with m.Case(NakCode.INVALID_REQUEST, NakCode.INVALID_RD_REQUEST):
                        m.d.comb += error.p.event.eq(EventType.QP_REQ_ERR)
                    with m.Case(NakCode.REMOTE_ACCESS):
                        m.d.comb += error.p.event.eq(EventType.QP_ACCESS_ERR)
                    with m.Default():
                        m.d.comb += error.p.event.eq(EventType.QP_FATAL)
        with m.Elif(job.bus_error):
            m.d.comb += [
                error.valid.eq(1),
                error.p.event.eq(EventType.QP_FATAL),
                poison.valid.eq(1),
                cqe.valid.eq(job.in_use | job.complete),
                cqe.p.status.eq(WcStatus.LOC_QP_OP_ERR),
                cqe.p.vendor_err.eq(VendorError.HOST_BUS),
            ]
        with m.Elif(job.complete):
            m.d.comb += [
                cqe.valid.eq(1),
                cqe.p.status.eq(WcStatus.SUCCESS),
                cqe.p.byte_len.eq(job.byte_len),  # R-CQ-3, R-PAD-3
                cqe.p.imm.eq(job.imm),  # R-CQ-4
                cqe.p.flags.eq(job.flags),
            ]
