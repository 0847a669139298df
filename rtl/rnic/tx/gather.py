"""Payload fetch: from packet descriptors and gather lists to packets with payload."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import CtxTable, VendorError, WcStatus
from ..config import Params
from ..records import (
    CtxBus,
    DmaReadSignature,
    GatherSegment,
    Probe,
    ProbeEvent,
    QpEvent,
    SendFailure,
    TxJob,
    XlateSignature,
    XlateStatus,
)
from ..stream.align import Packer
from ..stream.beat import Beat
from ..stream.buffer import SkidBuffer
from ..stream.check import watch
from ..stream.fifo import StreamFifo
from .window import TranslateWindow
from .window_records import TranslatedJob, inline_beats

__all__ = ["Gather"]


class Gather(wiring.Component):
    """Fetches the payload of outgoing packets and hands packets on, those of one QP in order.

    All segments of a packet are translated before its first byte is read (`TranslateWindow`); reads are issued in the order
    in which packets leave; up to ``2 * desc_depth`` packets may wait for their payload, and as many bytes as the DMA engine
    allows this client. A header appears on ``header`` when its first payload beat is there. Packets without payload pass in
    order without a read. Inline payload comes on ``inline``, packets in the order of their jobs (R-WQ-5). A packet that waits
    for its translation holds up those behind it in its QP only; ``share_qpn``, ``share_ahead``, ``share``, ``slow``, ``note``,
    ``noted`` and ``wake`` say how much of the window a QP fills, and when it may go on (`WindowShare`).

    Errors (R-ERR-7): a packet that cannot be translated, or whose read fails, makes one `SendFailure` (LOC_PROT_ERR with the
    reason, or LOC_QP_OP_ERR / HOST_BUS; in the latter case the packet leaves with ``err`` on its last beat) and poisons its
    QP: that packet and all later ones of the QP are dropped, until a context write to word 0 of REQUESTER_HOT.

    Timing: job to read command 11 cycles plus the translation; first word to first payload beat as `Packer` (2 or
    3 cycles), header one cycle later; one beat per cycle, one idle cycle between packets; one packet every 3 cycles.

    ``gone`` pulses when a packet has left, failed or been dropped; ``at_hand`` is its header, and that of the packet a
    ``failure`` is about. ``rights``: abi.Access bits the memory must allow (0: a local read).
    A marker (TxJob.marker) makes no packet: ``marker_out`` pulses when all packets before it have left here.

    Parameters: ``job``, a shape with the fields of TxJob that its packets use (None: TxJob); ``header`` carries its header;
    ``inline`` False: no job has inline payload.

    Ports: see docs/architecture.md; ``tag_bits`` is the tag width of the ``xlate`` client. Probes: ``probe_translated``
    LOCAL_TRANSLATED, ``probe_read`` PAYLOAD_READ, ``probe_arrived`` PAYLOAD_ARRIVED.
    """

    def __init__(self, p: Params, rights: int = 0, job=None, *, inline: bool = True):
        self.p = p
        self._inline = inline
        self.packets = 2 * p.desc_depth
        self._job = TxJob(p) if job is None else job
        self.window = TranslateWindow(p, rights, self._job)
        header = self._job.members["header"]
        self.tag_bits = self.window.tag_bits
        beats = stream.Signature(Beat(p.data_width))
        super().__init__({
            "job": In(stream.Signature(self._job)),
            "segment": In(stream.Signature(GatherSegment(p))),
            "inline": In(beats),
            "ctx": In(CtxBus(p)),
            "header": Out(stream.Signature(header)),
            "payload": Out(beats),
            "failure": Out(stream.Signature(SendFailure(p))),
            "gone": Out(1),
            "at_hand": Out(header),
            "marker_out": Out(1),
            "share_qpn": In(p.qpn_bits),
            "share_ahead": In(range(self.window.slots + 1)),
            "share": Out(range(self.window.slots // 2 + 1)),
            "share_none": Out(1),
            "share_one": Out(1),
            "slow": Out(1),
            "note": In(1),
            "noted": Out(1),
            "wake": Out(stream.Signature(QpEvent(p))),
            "xlate": Out(XlateSignature(p, self.tag_bits)),
            "read": Out(DmaReadSignature(p)),
            "probe_translated": Out(Probe()),
            "probe_read": Out(Probe()),
            "probe_arrived": Out(Probe()),
        })

    def elaborate(self, platform):
        m = Module()
        p = self.p
        m.submodules.window = window = self.window
        m.submodules.flight = flight = StreamFifo(TranslatedJob(self._job), self.packets, direct=True)
        m.submodules.packer = packer = Packer(p.data_width)
        beats = stream.Signature(Beat(p.data_width)).create(path=("inline_out",))

        wiring.connect(m, wiring.flipped(self.job), window.job)
        wiring.connect(m, wiring.flipped(self.segment), window.segment)
        wiring.connect(m, window.xlate, wiring.flipped(self.xlate))
        wiring.connect(m, window.o, flight.i)
        wiring.connect(m, wiring.flipped(self.inline), window.inline)
        if self._inline:
            # Of packets that leave next: the window keeps those of the others.
            m.submodules.inline_beats = inline = StreamFifo(Beat(p.data_width), 2 * inline_beats(p))
            wiring.connect(m, window.inline_o, inline.i)
            m.d.comb += [beats.valid.eq(inline.o.valid), beats.payload.eq(inline.o.payload), inline.o.ready.eq(beats.ready)]
        wiring.connect(m, window.wake, wiring.flipped(self.wake))
        m.d.comb += [
            self.probe_translated.eq(window.probe),
            window.share_qpn.eq(self.share_qpn),
            window.share_ahead.eq(self.share_ahead),
            self.share.eq(window.share),
            self.slow.eq(window.slow),
            self.share_none.eq(window.share_none),
            self.share_one.eq(window.share_one),
            window.note.eq(self.note),
            self.noted.eq(window.noted),
        ]

        self._read(m, window, packer)
        self._emit(m, flight, packer.o, beats)
        for name in ("job", "segment", "inline", "header", "payload", "failure"):
            watch(m, name, getattr(self, name))
        watch(m, "command", self.read.command)
        return m

    def _read(self, m, window, packer):
        """Pieces to read commands, words to packets."""
        pieces = window.pieces
        piece = pieces.payload
        # Commands under way: 1 for the last of its packet.
        m.submodules.ends = ends = StreamFifo(1, 2 * self.packets)
        m.submodules.end = end = SkidBuffer(1)  # no FIFO behind a word's ready
        wiring.connect(m, ends.o, end.i)
        rest = Signal()  # the second piece is due
        issued = Signal()
        command, word = self.read.command, self.read.word
        m.d.comb += [
            command.valid.eq(pieces.valid & ends.i.ready),
            command.payload.address.eq(Mux(rest, piece.address_1, piece.address_0)),
            command.payload.length.eq(Mux(rest, piece.span_1, piece.span_0)),
            issued.eq(command.valid & command.ready),
            ends.i.valid.eq(issued),
            ends.i.payload.eq(piece.last & (rest | ~piece.two)),
            pieces.ready.eq(issued & (rest | ~piece.two)),
        ]
        with m.If(issued):
            m.d.sync += rest.eq(piece.two & ~rest)
        m.d.comb += [
            packer.i.valid.eq(word.valid & end.o.valid),
            word.ready.eq(packer.i.ready & end.o.valid),
            packer.i.payload.data.eq(word.payload.data),
            packer.i.payload.first.eq(word.payload.first),
            packer.i.payload.count.eq(word.payload.count),
            packer.i.payload.last.eq(word.payload.last & end.o.payload),
            packer.i.payload.err.eq(word.payload.err & word.payload.last),
            end.o.ready.eq(word.valid & word.ready & word.payload.last),
        ]
        if self.p.probe:
            m.d.comb += [
                self.probe_read.valid.eq(issued),
                self.probe_read.event.eq(ProbeEvent.PAYLOAD_READ),
                self.probe_read.qpn.eq(piece.qpn),
                self.probe_read.psn.eq(piece.psn),
                self.probe_read.length.eq(command.payload.length),
            ]

    def _emit(self, m, flight, packed, inline):
        """Packets leave in order; here, and only here, failures are seen, so that all before them has left."""
        p = self.p
        m.submodules.poison = poison = memory.Memory(shape=1, depth=p.num_qps, init=[])  # R-ERR-7
        poison_write = poison.write_port()
        following = Signal()  # the next packet becomes the one at hand
        job = Signal(self._job)  # the packet at hand
        status = Signal(XlateStatus)
        here = Signal()
        # What is left to do for it, all in registers.
        header_left = Signal()
        payload_left = Signal()
        failure_left = Signal()
        dropped = Signal()  # its QP is poisoned
        host_error = Signal()  # the payload could not be read
        first = Signal()  # no beat of it has passed
        offered = Signal()  # its header is on `header`
        finished = Signal()
        poison_set = Signal()

        source = stream.Signature(Beat(p.data_width)).create(path=("source",))  # its payload
        from_inline = Signal()
        m.d.comb += from_inline.eq(job.inline if self._inline else 0)
        taken = Signal()
        m.d.comb += [
            source.valid.eq(Mux(from_inline, inline.valid, packed.valid)),
            source.payload.eq(Mux(from_inline, inline.payload.as_value(), packed.payload.as_value())),
            source.ready.eq(payload_left & (dropped | self.payload.ready)),
            packed.ready.eq(source.ready & ~from_inline),
            inline.ready.eq(source.ready & from_inline),
            taken.eq(source.valid & source.ready),
            self.header.valid.eq(offered),
            self.header.payload.eq(job.header),
            self.payload.valid.eq(payload_left & ~dropped & source.valid),
            self.payload.payload.eq(source.payload),
            finished.eq(here & ~header_left & ~payload_left & ~failure_left),
            self.marker_out.eq(finished & job.marker),
            self.failure.valid.eq(failure_left & ~header_left & ~payload_left),
            self.gone.eq(finished & ~job.marker),
            self.at_hand.eq(job.header),
            self.failure.payload.qpn.eq(job.header.qpn),
            self.failure.payload.wqe_index.eq(job.wqe_index),
            self.failure.payload.status.eq(Mux(host_error, WcStatus.LOC_QP_OP_ERR, WcStatus.LOC_PROT_ERR)),
            # The outcomes of a translation are numbered like the reasons (records.XlateStatus).
            self.failure.payload.vendor_err.eq(Mux(host_error, VendorError.HOST_BUS, (status.as_value() + 2)[:4])),
            poison_set.eq(self.failure.valid & self.failure.ready),
        ]
        with m.If(header_left & ~offered & (~payload_left | ~first | source.valid)):
            m.d.sync += offered.eq(1)
        with m.If(self.header.valid & self.header.ready):
            m.d.sync += [offered.eq(0), header_left.eq(0)]
        with m.If(taken):
            m.d.sync += [first.eq(0), payload_left.eq(~source.payload.last)]
            with m.If(source.payload.last & source.payload.err & ~dropped):
                m.d.sync += [host_error.eq(1), failure_left.eq(1)]
        with m.If(poison_set):
            m.d.sync += failure_left.eq(0)

        # The QP's poison is looked up while the packet is the next one, and again when a failure may have changed it.
        poison_read = poison.read_port()
        looked = Signal(2)
        next_dropped = Signal()
        next_failed = Signal()
        m.d.comb += [
            poison_read.addr.eq(flight.o.payload.job.header.qpn),
            next_failed.eq(flight.o.payload.status != XlateStatus.OK),
            # Nothing is left to do: no packet at hand, or it is finished.
            flight.o.ready.eq(looked[1] & ~header_left & ~payload_left & ~failure_left),
            following.eq(flight.o.valid & flight.o.ready),
        ]
        m.d.sync += [
            looked.eq(Mux(following | poison_set, 0, Cat(flight.o.valid, looked[0]))),
            next_dropped.eq(poison_read.data),
        ]
        with m.If(finished):
            m.d.sync += here.eq(0)
        with m.If(following):
            m.d.sync += [
                job.eq(flight.o.payload.job),
                status.eq(flight.o.payload.status),
                here.eq(1),
                header_left.eq(~next_failed & ~next_dropped & ~flight.o.payload.job.marker),
                payload_left.eq(~next_failed & (flight.o.payload.job.header.length != 0)),
                failure_left.eq(next_failed & ~next_dropped),
                dropped.eq(next_dropped),
                host_error.eq(0),
                first.eq(1),
            ]

        # The engine sets; the command engine clears, one cycle later and after the engine.
        bus = self.ctx.payload
        clear = Signal()
        clear_qpn = Signal(p.qpn_bits)
        m.d.comb += [
            self.ctx.ready.eq(~clear),
            poison_write.en.eq(poison_set | clear),
            poison_write.addr.eq(Mux(poison_set, job.header.qpn, clear_qpn)),
            poison_write.data.eq(poison_set),
        ]
        with m.If(~clear):
            m.d.sync += [
                clear.eq(self.ctx.valid & (bus.table == CtxTable.REQUESTER_HOT) & (bus.word == 0)),
                clear_qpn.eq(bus.index),
            ]
        with m.Elif(~poison_set):
            m.d.sync += clear.eq(0)
        if p.probe:
            m.d.comb += [
                self.probe_arrived.valid.eq(taken & first & ~job.inline),
                self.probe_arrived.event.eq(ProbeEvent.PAYLOAD_ARRIVED),
                self.probe_arrived.qpn.eq(job.header.qpn),
                self.probe_arrived.psn.eq(job.header.psn),
                self.probe_arrived.length.eq(job.header.length),
            ]
        m.d.sync += Assert(~packed.valid | ~packed.payload.last | packed.payload.keep.any(), "Gather: empty packet")
