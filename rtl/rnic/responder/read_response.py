"""READ response packets, and the other answers that must not overtake them."""

from amaranth import *
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import Access, CtxTable, WcStatus
from ..config import Params
from ..records import DmaReadSignature, TxHeader, XlateSignature
from ..stream.beat import Beat
from ..stream.fifo import StreamFifo
from ..tx.gather import Gather

__all__ = ["ReadResponse", "ResponseFailure", "ResponsePacket"]

COUNT_BITS = 16  # packets under way, free running


class ResponsePacket(data.StructLayout):
    """One answer packet. ``length`` bytes from ``va`` under ``rkey`` follow the headers; ``quiet``: no NAK when they cannot be
    read (R-DUP-7)."""

    def __init__(self, p: Params):
        super().__init__({
            "qpn": p.qpn_bits,
            "opcode": 8,
            "psn": 24,
            "length": 13,
            "va": 64,
            "rkey": 32,
            "pd": 24,
            "syndrome": 8,
            "msn": 24,
            "original": 64,
            "quiet": 1,
        })  # fmt: skip


class ResponseJob(data.StructLayout):
    """What of a TxJob an answer packet uses: the other fields of its header are 0, ``wqe_index`` is ``quiet``."""

    def __init__(self, p: Params):
        header = {name: shape for name, shape in TxHeader(p).members.items()
                  if name in ("qpn", "opcode", "psn", "length", "swap", "syndrome", "msn")}  # fmt: skip
        super().__init__({"header": data.StructLayout(header), "pd": 24, "wqe_index": 1, "marker": 1, "inline": 1})


class ResponseFailure(data.StructLayout):
    """A packet whose payload could not be read; ``bus``: by a host-bus error, else for its key."""

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits, "psn": 24, "msn": 24, "quiet": 1, "bus": 1})


class ReadResponse(wiring.Component):
    """Sends answer packets in order, those with payload through a `Gather` of its own with the right REMOTE_READ.

    ``count_addr``/``count``: packets of a QP that have left, failed or been dropped since power-up, modulo 2**16; 1 cycle.
    After a failure all later packets of the QP are dropped until it is taken from ``clear``. ``marked`` pulses when all packets
    that were being translated or read at the ``mark`` pulse have left.

    Timing: see `Gather`; ``depth`` packets wait in front of it.

    Members: ``i`` ResponsePacket, ``clear`` (qpn) in; ``header``, ``payload``, ``failure`` ResponseFailure out: streams;
    ``xlate``, ``read`` clients; ``level``, packets waiting; ``share_qpn``/``share``, packets a QP may add (`WindowShare`).
    """

    def __init__(self, p: Params, depth: int):
        self.p, self.depth = p, depth
        self.gather = Gather(p, int(Access.REMOTE_READ), ResponseJob(p), inline=False)
        self.tag_bits = self.gather.tag_bits
        super().__init__({
            "i": In(stream.Signature(ResponsePacket(p))),
            "clear": In(stream.Signature(p.qpn_bits)),
            "header": Out(stream.Signature(TxHeader(p))),
            "payload": Out(stream.Signature(Beat(p.data_width))),
            "failure": Out(stream.Signature(ResponseFailure(p))),
            "count_addr": In(p.qpn_bits),
            "count": Out(COUNT_BITS),
            "gone": Out(1),
            "mark": In(1),
            "marked": Out(1),
            "level": Out(range(depth + 1)),
            "share_qpn": In(p.qpn_bits),
            "share": Out(range(self.gather.window.slots // 2 + 1)),
            "xlate": Out(XlateSignature(p, self.tag_bits)),
            "read": Out(DmaReadSignature(p)),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.gather = gather = self.gather
        m.submodules.waiting = waiting = StreamFifo(ResponsePacket(p), self.depth, direct=True)
        wiring.connect(m, wiring.flipped(self.i), waiting.i)
        m.d.comb += [
            self.header.valid.eq(gather.header.valid),
            gather.header.ready.eq(self.header.ready),
            *(self.header.p[name].eq(gather.header.p[name]) for name in gather.header.p.shape().members),
        ]
        wiring.connect(m, gather.payload, wiring.flipped(self.payload))
        wiring.connect(m, gather.xlate, wiring.flipped(self.xlate))
        wiring.connect(m, gather.read, wiring.flipped(self.read))

        packet, job, segment = waiting.o.p, gather.job, gather.segment
        # Job and segment go together, each taken once.
        segment_taken = Signal()
        wanted, marker = Signal(), Signal()  # a marker goes behind the packet that is offered
        has_payload = Signal()
        m.d.comb += [
            has_payload.eq(packet.length != 0),
            segment.valid.eq(waiting.o.valid & ~marker & has_payload & ~segment_taken),
            segment.p.va.eq(packet.va),
            segment.p.lkey.eq(packet.rkey),
            segment.p.length.eq(packet.length),
            segment.p.last.eq(1),
            job.valid.eq(waiting.o.valid | marker),
            job.p.marker.eq(marker),
            waiting.o.ready.eq(job.ready & ~marker),
            self.marked.eq(gather.marker_out),
            job.p.header.qpn.eq(packet.qpn),
            job.p.header.opcode.eq(packet.opcode),
            job.p.header.psn.eq(packet.psn),
            job.p.header.length.eq(Mux(marker, 0, packet.length)),
            job.p.header.swap.eq(packet.original),
            job.p.header.syndrome.eq(packet.syndrome),
            job.p.header.msn.eq(packet.msn),
            job.p.pd.eq(packet.pd),
            job.p.wqe_index.eq(packet.quiet),
            self.level.eq(waiting.level),
            gather.share_qpn.eq(self.share_qpn),
            gather.share_ahead.eq(Mux(waiting.level > gather.window.slots, gather.window.slots, waiting.level)),
            self.share.eq(gather.share),
            gather.wake.ready.eq(1),
        ]
        with m.If(self.mark):
            m.d.sync += wanted.eq(1)
        with m.If(marker & job.ready):
            m.d.sync += marker.eq(0)
        with m.Elif(wanted & ~marker & (~waiting.o.valid | job.ready)):
            m.d.sync += [wanted.eq(0), marker.eq(1)]
        with m.If(job.valid & job.ready):
            m.d.sync += segment_taken.eq(0)
        with m.Elif(segment.valid & segment.ready):
            m.d.sync += segment_taken.eq(1)

        failure = gather.failure.p
        m.d.comb += [
            self.failure.valid.eq(gather.failure.valid),
            gather.failure.ready.eq(self.failure.ready),
            self.failure.p.qpn.eq(failure.qpn),
            self.failure.p.psn.eq(gather.at_hand.psn),
            self.failure.p.msn.eq(gather.at_hand.msn),
            self.failure.p.quiet.eq(failure.wqe_index[0]),
            self.failure.p.bus.eq(failure.status == WcStatus.LOC_QP_OP_ERR),
            # What the payload fetch takes for a reset of the QP.
            gather.ctx.valid.eq(self.clear.valid),
            gather.ctx.p.table.eq(CtxTable.REQUESTER_HOT),
            gather.ctx.p.index.eq(self.clear.payload),
            gather.ctx.p.bytes.eq(15),
            self.clear.ready.eq(gather.ctx.ready),
        ]
        self._count(m, gather)
        return m

    def _count(self, m, gather):
        p = self.p
        m.submodules.counts = counts = memory.Memory(shape=COUNT_BITS, depth=p.num_qps, init=[])
        write, show = counts.write_port(), counts.read_port()
        read = counts.read_port(transparent_for=(write,))  # of two dropped packets of a QP one may go right behind the other
        qpn = Signal(p.qpn_bits)
        adding = Signal()
        m.d.comb += [
            self.gone.eq(gather.gone),
            read.addr.eq(gather.at_hand.qpn),
            write.addr.eq(qpn),
            write.data.eq(read.data + 1),
            write.en.eq(adding),
            show.addr.eq(self.count_addr),
            self.count.eq(show.data),
        ]
        m.d.sync += [adding.eq(gather.gone), qpn.eq(gather.at_hand.qpn)]
