"""The responder: inbound requests become data in memory, answers and receive completions."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import RESPONDER_HOT, CtxTable
from ..config import Params
from ..records import (
    AckJob,
    CqeRequest,
    CtxBus,
    DmaReadSignature,
    DmaWriteSignature,
    Doorbell,
    LandJob,
    LandResult,
    Probe,
    QpError,
    QpEvent,
    RequestDesc,
    TxHeader,
    XlateSignature,
)
from ..stream.arbiter import PriorityArbiter, StreamArbiter
from ..stream.beat import Beat
from ..stream.buffer import SkidBuffer
from ..stream.check import watch
from ..stream.fifo import StreamFifo
from ..stream.packet_store import ReadCommand
from .ack import Ack, Complete
from .atomic import Atomic
from .land import LandMerge
from .move import Move
from .place import Place
from .read_response import ReadResponse
from .receive_queue import ReceiveQueue
from .resources import QUANTUM, Resources
from .sequence import Sequence
from .source import PayloadSource

__all__ = ["Responder"]

EPSN_WORD = RESPONDER_HOT.fields["epsn"].offset // 32


class Responder(wiring.Component):
    """`Sequence` -> `ReceiveQueue` -> `Place` -> `Ack` -> `Complete`, and `Move` beside them for the data.

    READs and ATOMICs go the same way. `Ack` gives them their place among the answers in `Resources`; `Complete` releases
    them when the writes before them are done, ATOMICs through `Atomic`, which executes them; READs are answered by
    `ReadResponse`.

    Jobs keep the order of the requests. A QP that fails is dropped in `Place` until a command writes word 0 of its
    ResponderHot (ePSN). A flush event ends with ``drained`` for one cycle: nothing of that QP is left inside. ``mark`` is
    answered by ``marked`` when the READ responses being translated or read at that moment have left.

    ``land`` brings data of own READs and ATOMICs, which shares everything from `Place` on (`LandMerge`); every item has its
    answer on ``landed``, in order.

    Timing: see the blocks; a 64-byte WRITE is answered 43 cycles after it came at 512 bits, 11 of them translation; one every 4
    cycles.

    Members: as in docs/architecture.md; translation clients ``xlate_ring``, ``xlate_place``,
    ``xlate_response`` (tag widths: attributes ``ring_tag_bits``, ``place_tag_bits``, ``response_tag_bits``).
    """

    PROBES = ("probe_checked", "probe_taken", "probe_doorbell", "probe_fetched", "probe_translated", "probe_placed", "probe_ack")

    def __init__(self, p: Params):
        self.p = p
        self.response = ReadResponse(p, 2 * QUANTUM + 2)
        self.response_tag_bits = self.response.tag_bits
        self.ring_tag_bits, self.place_tag_bits = ReceiveQueue.tag_bits(p), Place.tag_bits(p)
        super().__init__({
            "request": In(stream.Signature(RequestDesc(p))),
            "doorbell": In(stream.Signature(Doorbell(p.qpn_bits))),
            "flush": In(stream.Signature(QpEvent(p))),
            "land": In(stream.Signature(LandJob(p))),
            "landed": Out(stream.Signature(LandResult(p))),
            "ctx": In(CtxBus(p)),
            "ack": Out(stream.Signature(AckJob(p))),
            "cqe": Out(stream.Signature(CqeRequest(p))),
            "qp_error": Out(stream.Signature(QpError(p))),
            "store_read": Out(stream.Signature(ReadCommand(p.rx_cells))),
            "store_data": In(stream.Signature(Beat(p.data_width))),
            "free": Out(stream.Signature(p.cell_bits)),
            "xlate_ring": Out(XlateSignature(p, self.ring_tag_bits)),
            "xlate_place": Out(XlateSignature(p, self.place_tag_bits)),
            "read": Out(DmaReadSignature(p)),
            "write": Out(DmaWriteSignature(p)),
            "response_header": Out(stream.Signature(TxHeader(p))),
            "response_payload": Out(stream.Signature(Beat(p.data_width))),
            "xlate_response": Out(XlateSignature(p, self.response_tag_bits)),
            "read_response": Out(DmaReadSignature(p)),
            "read_atomic": Out(DmaReadSignature(p)),
            "write_atomic": Out(DmaWriteSignature(p)),
            "duplicate": Out(1),
            "out_of_sequence": Out(1),
            "error_drop": Out(1),
            "drained": Out(1),
            "drained_qpn": Out(p.qpn_bits),
            "mark": In(1),
            "marked": Out(1),
            **{name: Out(Probe()) for name in self.PROBES},
        })

    def elaborate(self, platform):
        m = Module()
        p = self.p
        m.submodules.sequence = sequence = Sequence(p)
        m.submodules.receive_queue = receive_queue = ReceiveQueue(p)
        m.submodules.place = place = Place(p)
        m.submodules.move = move = Move(p)
        m.submodules.land_merge = land_merge = LandMerge(p)
        m.submodules.source = source = PayloadSource(p)
        m.submodules.ack = ack = Ack(p)
        m.submodules.complete = complete = Complete(p)
        m.submodules.atomic = atomic = Atomic(p)
        m.submodules.resources = resources = Resources(p, self.response.depth)
        m.submodules.response = response = self.response

        wiring.connect(m, wiring.flipped(self.request), sequence.request)
        wiring.connect(m, wiring.flipped(self.doorbell), sequence.doorbell)
        wiring.connect(m, wiring.flipped(self.flush), sequence.flush)
        wiring.connect(m, sequence.job, receive_queue.i)
        wiring.connect(m, receive_queue.o, land_merge.i)
        wiring.connect(m, wiring.flipped(self.land), land_merge.land)
        wiring.connect(m, land_merge.o, place.i)
        m.d.comb += place.i_barrier.eq(land_merge.barrier)
        wiring.connect(m, place.o, ack.i)
        wiring.connect(m, ack.o, complete.i)
        wiring.connect(m, place.segment, move.segment)
        wiring.connect(m, move.accepted, ack.accepted)
        wiring.connect(m, move.done, complete.done)

        wiring.connect(m, receive_queue.xlate, wiring.flipped(self.xlate_ring))
        wiring.connect(m, receive_queue.read, wiring.flipped(self.read))
        wiring.connect(m, place.xlate, wiring.flipped(self.xlate_place))
        wiring.connect(m, place.payload_at, source.i)
        wiring.connect(m, source.store_read, wiring.flipped(self.store_read))
        m.submodules.stored = stored = SkidBuffer(Beat(p.data_width))
        wiring.connect(m, wiring.flipped(self.store_data), stored.i)
        wiring.connect(m, stored.o, source.store_data)
        wiring.connect(m, source.o, move.packet)
        wiring.connect(m, place.free, wiring.flipped(self.free))
        wiring.connect(m, move.write, wiring.flipped(self.write))
        wiring.connect(m, ack.ack, resources.i)
        wiring.connect(m, resources.ack, wiring.flipped(self.ack))
        wiring.connect(m, complete.cqe, wiring.flipped(self.cqe))
        m.submodules.qp_errors = qp_errors = StreamArbiter(QpError(p), 2, skid=True)
        wiring.connect(m, complete.qp_error, qp_errors.i[0])
        wiring.connect(m, resources.qp_error, qp_errors.i[1])
        wiring.connect(m, qp_errors.o, wiring.flipped(self.qp_error))
        wiring.connect(m, complete.landed, wiring.flipped(self.landed))
        self._answers(m, sequence, move, complete, atomic, resources, response)
        self._context_bus(m, sequence, place, complete, resources)

        m.d.comb += [
            self.duplicate.eq(sequence.duplicate),
            self.out_of_sequence.eq(sequence.out_of_sequence),
            self.error_drop.eq(place.error_drop),
            self.drained.eq(resources.drained),
            self.drained_qpn.eq(resources.drained_qpn),
            response.mark.eq(self.mark),
            self.marked.eq(response.marked),
            self.probe_checked.eq(sequence.probe_checked),
            self.probe_taken.eq(sequence.probe_taken),
            self.probe_doorbell.eq(sequence.probe_doorbell),
            self.probe_fetched.eq(receive_queue.probe),
            self.probe_translated.eq(place.probe),
            self.probe_placed.eq(ack.probe_placed),
            self.probe_ack.eq(ack.probe_ack),
        ]
        for name in ("ack", "cqe", "qp_error", "store_read", "free"):
            watch(m, name, getattr(self, name))
        watch(m, "write_data", self.write.data)
        return m

    def _answers(self, m, sequence, move, complete, atomic, resources, response):
        """The ways of READs and ATOMICs from their release to the wire."""
        wiring.connect(m, complete.release, atomic.i)
        wiring.connect(m, move.atomic, atomic.word)
        wiring.connect(m, atomic.o, resources.release)
        wiring.connect(m, complete.drained, resources.drain)
        wiring.connect(m, resources.packet, response.i)
        wiring.connect(m, resources.forget, response.clear)
        wiring.connect(m, response.failure, resources.failure)
        wiring.connect(m, response.header, wiring.flipped(self.response_header))
        wiring.connect(m, response.payload, wiring.flipped(self.response_payload))
        wiring.connect(m, response.xlate, wiring.flipped(self.xlate_response))
        wiring.connect(m, response.read, wiring.flipped(self.read_response))
        wiring.connect(m, atomic.read, wiring.flipped(self.read_atomic))
        wiring.connect(m, atomic.write, wiring.flipped(self.write_atomic))
        m.d.comb += [
            complete.executing.eq(atomic.executing),
            complete.executing_qpn.eq(atomic.executing_qpn),
            resources.level.eq(response.level),
            resources.gone.eq(response.gone),
            response.count_addr.eq(resources.count_addr),
            resources.count.eq(response.count),
            resources.finished_addr.eq(sequence.finished_addr),
            sequence.finished.eq(resources.finished),
            atomic.store_en.eq(sequence.operands_en),
            atomic.store_qpn.eq(sequence.operands_qpn),
            atomic.store_index.eq(sequence.operands_index),
            atomic.store_data.eq(sequence.operands_data),
        ]

    def _context_bus(self, m, sequence, place, complete, resources):
        """A write goes to the tables, to `Complete`, and, for ePSN, clears the poison mark and the answers; all at the same
        time."""
        m.submodules.restart = restart = StreamFifo(self.p.qpn_bits, 1)
        wiring.connect(m, restart.o, resources.clear)
        m.submodules.poisons = poisons = PriorityArbiter(place.poison.payload.shape(), 2)
        m.submodules.clear = clear = StreamFifo(place.poison.payload.shape(), 1)
        wiring.connect(m, complete.poison, poisons.i[0])
        wiring.connect(m, clear.o, poisons.i[1])
        wiring.connect(m, poisons.o, place.poison)
        write = self.ctx.payload
        clears = Signal()
        take = Signal()
        m.d.comb += [
            clears.eq((write.table == CtxTable.RESPONDER_HOT) & (write.word == EPSN_WORD)),
            # `ready` of none of them depends on `valid`.
            self.ctx.ready.eq(sequence.ctx.ready & complete.ctx.ready & resources.ctx.ready
                              & (~clears | (clear.i.ready & restart.i.ready))),
            resources.ctx.valid.eq(self.ctx.valid),
            resources.ctx.payload.eq(write),
            restart.i.payload.eq(write.index),
            restart.i.valid.eq(take & clears),
            take.eq(self.ctx.valid & self.ctx.ready),
            sequence.ctx.valid.eq(self.ctx.valid),
            sequence.ctx.payload.eq(write),
            complete.ctx.valid.eq(self.ctx.valid),
            complete.ctx.payload.eq(write),
            clear.i.p.qpn.eq(write.index),
            clear.i.p.state.eq(0),
            clear.i.valid.eq(take & clears),
        ]
