"""Turns send WQEs into packets: opcodes, PSNs, gather lists."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import REQUESTER_HOT, CtxTable, QpState, VendorError, WcStatus
from ..config import Params
from ..qp.table import ContextTable
from ..records import (
    CtxBus,
    FetchedWqe,
    GatherSegment,
    Outstanding,
    Probe,
    ReadEntry,
    Rewind,
    SendFailure,
    TxJob,
)
from ..stream.beat import Beat
from .segment_parts import MIN_PMTU_BITS, SGE_BITS, SegmenterParts
from .wqe_decode import WqeDecoder

__all__ = ["Segmenter"]

ACK_EVERY = 64  # packets of a message; R-REQ-2


class Segmenter(SegmenterParts):
    """Send WQEs to packets (`TxJob`) and their gather lists (`GatherSegment`, or Beats for inline data).

    A WQE is thrown away when it was fetched under another epoch, is not the one the QP is at (``send_index``), when the QP does
    not run or has stopped. In SQD a WQE not yet begun is put back by a rewind (R-QP-3). A WQE that fails its checks
    (`WqeDecoder`) gives a `SendFailure` and an outstanding entry without a PSN, and stops the QP (R-ERR-7) until a command
    writes word 0 of its REQUESTER_HOT.

    Packets: FIRST/MIDDLE/LAST/ONLY (R-REQ-1), one PSN each (R-PSN-3), AckReq on the last and whenever the PSN's low four bits
    are 15 (R-REQ-2), SE on the last (R-REQ-3). Segments of length 0 are not emitted (R-WQ-4); inline payload is (R-WQ-5).
    A message longer than ``quantum`` bytes gives way when another WQE waits: its offset is kept, the epoch goes up, and the
    scheduler is told to fetch again. The same happens with ``psn_window`` PSNs unacknowledged (R-PSN-6); a message of more
    PSNs than that starts only when none are.

    A READ is one packet and takes a PSN per response (R-PSN-3), an ATOMIC one; both write the read table too. A WQE that may
    not start (fence, R-ORD-2; READ limit, R-REQ-4; PSN window) stops its QP: rewind with ``sleep``. When the scheduler has
    taken that, the counters are read again; if they moved on, a second rewind wakes the QP: what happens later wakes it
    through the completer. So no wake-up is lost and nothing spins. As long as nothing of another QP is behind it (``alone``,
    ``alone_qpn``) and no command writes, it waits here instead, and what was fetched is not fetched again.

    A QP that has its share of the translation window (`WindowShare`: ``share_qpn``, ``share_none``, ``share_one``, ``slow``)
    makes no packet; when it waits for page tables and others are behind it, it is stopped in the same way, and ``note`` has the
    window wake it. ``bounced`` (a fetch job of the QP was thrown away) is answered by a rewind.

    REQUESTER_HOT and the outstanding entry are written in the cycle in which a packet is offered: an answer finds both.

    Ports: ``wqe``; ``ctx`` (a command's write to the REQUESTER_HOT of a QP that is being worked on waits); ``una_addr`` /
    ``una``, ``landed`` 2-cycle read of the completer; ``job``, ``segment``, ``inline``; ``rewind``, ``failure``; ``remember_en``,
    ``remember_index``, ``remember_data`` write of the outstanding table; ``read_en``, ``read_index``, ``read_data`` write of the
    read table; ``hot_addr`` / ``hot_psn``, ``hot_send_index``, ``hot_reads`` 2-cycle read; ``probe`` (PACKET_MADE), ``probe_wqe``
    (WQE_PARSED, LOCAL_FAILED).

    Timing: 8 cycles from ``wqe`` to ``job``; a one-packet message with one SGE per 4 cycles; every further segment takes 2
    cycles, every further packet 3; fence, READ, ATOMIC and messages from 1 GiB on take one more.

    Parameters: ``quantum`` bytes (default 1024 bus words, long enough to hide the fetch), ``psn_window`` a power of two up to
    2^22. Raises ValueError.
    """

    def __init__(self, p: Params, *, quantum: int | None = None, psn_window: int = 1 << 22):
        if psn_window & (psn_window - 1) or not 1 <= psn_window <= 1 << 22:
            raise ValueError(f"psn_window is {psn_window}, must be a power of two 1..2^22")
        self.p = p
        self.quantum = 1024 * p.lanes if quantum is None else quantum
        self.psn_window = psn_window
        self.entry_bits = (p.num_qps * p.sq_outstanding - 1).bit_length()
        self.read_bits = (p.num_qps * p.max_rd_atomic - 1).bit_length()
        super().__init__({
            "wqe": In(stream.Signature(FetchedWqe(p))),
            "ctx": In(CtxBus(p)),
            "una_addr": Out(p.qpn_bits),
            "una": In(24),
            "landed": In(8),
            "job": Out(stream.Signature(TxJob(p))),
            "segment": Out(stream.Signature(GatherSegment(p))),
            "inline": Out(stream.Signature(Beat(p.data_width))),
            "rewind": Out(stream.Signature(Rewind(p))),
            "failure": Out(stream.Signature(SendFailure(p))),
            "alone": In(1),
            "alone_qpn": In(p.qpn_bits),
            "share_qpn": Out(p.qpn_bits),
            "share_none": In(1),
            "share_one": In(1),
            "slow": In(1),
            "note": Out(1),
            "noted": In(1),
            "remember_en": Out(1),
            "remember_index": Out(self.entry_bits),
            "remember_data": Out(Outstanding(p)),
            "read_en": Out(1),
            "read_index": Out(self.read_bits),
            "read_data": Out(ReadEntry(p)),
            "hot_addr": In(p.qpn_bits),
            "hot_psn": Out(24),
            "hot_send_index": Out(16),
            "hot_reads": Out(8),
            "probe": Out(Probe()),
            "probe_wqe": Out(Probe()),
        })  # fmt: skip

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.decoder = self._decoder = decoder = WqeDecoder(p)
        m.submodules.hot = table = ContextTable(p, CtxTable.REQUESTER_HOT, REQUESTER_HOT, p.num_qps, read_ports=2,
                                                engine_writes=True)  # fmt: skip
        m.submodules.stopped = stopped_mem = memory.Memory(shape=unsigned(1), depth=p.num_qps, init=[])
        wiring.connect(m, wiring.flipped(self.wqe), decoder.wqe)

        self._declare(m)
        m.d.comb += [
            self.una_addr.eq(Mux(self._again, self._wqe.qpn, decoder.qpn)),
            table.read_index_0.eq(decoder.qpn),
            table.read_index_1.eq(self.hot_addr),
            self.hot_psn.eq(table.read_1.psn),
            self.hot_send_index.eq(table.read_1.send_index),
            self.hot_reads.eq(table.read_1.rd_atomic),
        ]
        stopped_read = stopped_mem.read_port()
        stopped_write = stopped_mem.write_port()
        stopped_now = Signal()
        m.d.comb += stopped_read.addr.eq(decoder.qpn)
        m.d.sync += stopped_now.eq(stopped_read.data)

        self._elaborate_ctx(m, table, stopped_write)
        self._elaborate_load(m, table, stopped_now)
        self._elaborate_packet(m)
        self._elaborate_fsm(m, table, stopped_write)
        return m

    def _elaborate_fsm(self, m, table, stopped_write):
        p = self.p
        wqe, hot, head = self._wqe, self._hot, self._head
        job, segment, inline = self.job, self.segment, self.inline
        # ---- output registers
        job_free, segment_free, inline_free, rewind_free, failure_free = (
            Signal(name=f"{n}_free") for n in ("job", "segment", "inline", "rewind", "failure"))  # fmt: skip
        for port, free in ((job, job_free), (segment, segment_free), (inline, inline_free), (self.rewind, rewind_free),
                           (self.failure, failure_free)):  # fmt: skip
            m.d.comb += free.eq(~port.valid | port.ready)
            with m.If(port.ready):
                m.d.sync += port.valid.eq(0)
        commit, full = self._elaborate_tables(m, table)
        self._elaborate_probes(m)
        m.d.sync += [self.probe.valid.eq(0), self.probe_wqe.valid.eq(0)]

        # ---- what the WQE meets
        mine, running, window_full, failed = (Signal(name=n) for n in ("mine", "running", "window_full", "failed"))
        unacked = Signal(24)
        gated, blocked = Signal(name="gated"), Signal(name="blocked")
        m.d.comb += [
            mine.eq((wqe.epoch == hot.epoch) & (wqe.index == hot.send_index) & ~self._stopped),  # R-REQ-1
            running.eq((wqe.state == QpState.RTS) | ((wqe.state == QpState.SQD) & ~self._starts)),  # R-QP-2, R-QP-3
            unacked.eq(hot.psn - self._una),
            window_full.eq(unacked[(self.psn_window - 1).bit_length() :].any()),  # R-PSN-6
            failed.eq(wqe.status != WcStatus.SUCCESS),
            gated.eq(self._starts & (wqe.fence | wqe.reads | window_full | wqe.length[30:].any())),
            blocked.eq(
                (wqe.fence & (self._open != 0))  # R-ORD-2
                | (wqe.reads & (self._open >= wqe.rd_limit))  # R-REQ-4
                | (self._unacked & self._extra[(self.psn_window - 1).bit_length() :].any())  # R-PSN-6
                | self._window_full),
        ]
        # ---- the head of the SGE list against what this packet still needs
        covers, uses_up, packet_done, give_way = (Signal(name=n) for n in ("covers", "uses_up", "packet_done", "give_way"))
        piece = Signal(13)
        advance_by = Signal(13)
        shift_head = Signal()
        finished = Signal()  # this packet has all its segments
        m.d.comb += [
            covers.eq(head.length >= self._to_gather),
            uses_up.eq(head.length <= self._to_gather),
            piece.eq(Mux(covers, self._to_gather, head.length)),
            give_way.eq((self._turn >= self.quantum) & self._others),
        ]

        def offer_segment():
            """Put the next piece of payload out and say what to do with the SGE."""
            m.d.sync += [
                segment.valid.eq(head.length != 0),  # R-WQ-4
                segment.payload.va.eq(head.addr),
                segment.payload.lkey.eq(head.lkey),
                segment.payload.length.eq(piece),
                segment.payload.last.eq(covers),
                advance_by.eq(piece),
                shift_head.eq(uses_up),
                finished.eq(covers),
            ]
            m.next = "ADVANCE"
            with m.If(covers & self._ends):
                m.next = "IDLE"

        with m.FSM(name="segment") as fsm:
            m.d.comb += self._working.eq(~fsm.ongoing("IDLE"))
            with m.State("IDLE"):
                m.d.comb += self._load.eq(1)
                with m.If(self._decoder.o.valid):
                    m.next = "CHECK"
            with m.State("CHECK"):
                m.d.sync += [
                    self._left.eq(wqe.length - hot.offset),
                    self._extra.eq(Mux(wqe.length == 0, 0, (wqe.length - 1) >> (MIN_PMTU_BITS - 1) >> wqe.path_mtu)),
                    self._seek.eq(hot.offset),
                    self._shrunk.eq(wqe.length <= hot.offset),
                    self._open.eq(hot.rd_atomic - self._landed),  # R-REQ-4, R-ORD-2
                    self._unacked.eq(unacked != 0),
                    self._window_full.eq(window_full),
                ]
                m.next = "IDLE"
                with m.If(wqe.marker):
                    m.next = "CHECK"
                    with m.If(job_free):
                        m.d.sync += [
                            job.valid.eq(1), job.payload.marker.eq(1), job.payload.inline.eq(0), job.payload.header.length.eq(0),
                        ]  # fmt: skip
                        m.next = "IDLE"
                with m.Elif(wqe.bounced):
                    with m.If((wqe.epoch == hot.epoch) & ((wqe.state == QpState.RTS) | (wqe.state == QpState.SQD))):
                        m.next = "YIELD"
                with m.Elif(mine):
                    with m.If(running):
                        m.next = "PACKET"
                        with m.If(failed):
                            m.next = "FAIL"
                        with m.Elif(gated):
                            m.next = "GATE"
                        with m.Elif(window_full):  # R-PSN-6
                            m.next = "YIELD"
                        with m.Elif(~self._starts):
                            m.next = "SEEK"
                        m.d.sync += self.probe_wqe.valid.eq(~failed & ~gated & ~window_full & self._starts)
                    with m.Elif(wqe.state == QpState.SQD):  # R-QP-3
                        m.next = "YIELD"
            with m.State("GATE"):
                m.next = "PACKET"
                m.d.sync += self._staying.eq(~self._others)
                with m.If(blocked):
                    m.next = "AGAIN"
                    with m.If(self._others):
                        m.next = "SLEEP"
                m.d.sync += self.probe_wqe.valid.eq(~blocked)
            with m.State("SEEK"):  # a message goes on: find the SGE and the place in it
                m.d.sync += shift_head.eq(head.length <= self._seek)
                m.next = "SEEK_STEP"
                with m.If(self._shrunk):
                    m.d.sync += [wqe.status.eq(WcStatus.LOC_QP_OP_ERR), wqe.vendor_err.eq(VendorError.BAD_WQE_LENGTH)]
                    m.next = "FAIL"
            with m.State("SEEK_STEP"):
                with m.If(shift_head):
                    m.d.sync += [wqe.body.eq(wqe.body >> SGE_BITS), self._seek.eq(self._seek - head.length)]
                    m.next = "SEEK"
                with m.Else():
                    m.d.sync += [head.addr.eq(head.addr + self._seek), head.length.eq(head.length - self._seek)]
                    m.next = "PACKET"
            with m.State("PACKET"):
                number = Signal(range(ACK_EVERY), name="packet_number")  # in the message, modulo
                m.d.comb += number.eq(hot.offset >> (MIN_PMTU_BITS - 1) >> wqe.path_mtu)
                m.d.sync += [
                    self._asks.eq(number.all()),
                    self._ends.eq(self._left <= self._pmtu),  # R-REQ-1, R-LEN-1
                    self._size.eq(Mux(self._left <= self._pmtu, self._left, self._pmtu)),
                    self._to_gather.eq(Mux(self._left <= self._pmtu, self._left, self._pmtu)),
                    self._last_psn.eq(hot.psn + self._extra),  # R-PSN-3
                ]
                with m.If(wqe.reads):  # one packet without payload, whatever the length
                    m.d.sync += [self._ends.eq(1), self._size.eq(0), self._to_gather.eq(0)]
                m.next = "COMMIT"
            with m.State("COMMIT"):
                with m.If(full & self.slow & self._others):
                    m.d.sync += self._by_share.eq(1)
                    m.next = "SLEEP"
                m.d.comb += commit.eq(~full & job_free & segment_free)
                with m.If(commit):
                    # R-PSN-3. Written before the packet can be seen: whoever answers finds it.
                    self._write_hot(
                        m,
                        psn=Mux(wqe.reads, self._last_psn, hot.psn) + 1,  # R-PSN-3
                        offset=Mux(self._ends, 0, hot.offset + self._size),
                        send_index=hot.send_index + self._ends,
                        rd_atomic=hot.rd_atomic + wqe.reads,  # R-REQ-4
                    )  # fmt: skip
                    m.d.sync += [
                        self._remember.eq(self._starts), self._read_now.eq(wqe.reads), self._read_number.eq(hot.rd_atomic),
                    ]  # fmt: skip
                    self._offer_job(m)
                    m.d.sync += [
                        self._left.eq(self._left - self._size),
                        self.probe.valid.eq(1),
                    ]
                    with m.If(self._turn < self.quantum):
                        m.d.sync += self._turn.eq(self._turn + self._size)
                    with m.If(self._size == 0):
                        m.next = "IDLE"
                    with m.Elif(wqe.inline):
                        m.next = "INLINE"
                    with m.Else():
                        offer_segment()
            with m.State("ADVANCE"):
                m.d.sync += self._to_gather.eq(self._to_gather - advance_by)
                with m.If(shift_head):
                    m.d.sync += wqe.body.eq(wqe.body >> SGE_BITS)
                with m.Else():
                    m.d.sync += [head.addr.eq(head.addr + advance_by), head.length.eq(head.length - advance_by)]
                m.next = "SEGMENT"
                with m.If(finished):
                    m.next = "PACKET"
                    with m.If(give_way):
                        m.next = "YIELD"
            with m.State("SEGMENT"):
                with m.If(segment_free):
                    offer_segment()
            with m.State("INLINE"):
                with m.If(inline_free):
                    m.d.sync += [
                        inline.valid.eq(1),
                        inline.payload.data.eq(wqe.body[: p.data_width]),
                        inline.payload.keep.eq(Cat(self._to_gather[:7] > lane for lane in range(p.lanes))),
                        inline.payload.last.eq(self._to_gather <= p.lanes),
                        wqe.body.eq(wqe.body >> p.data_width),
                        self._to_gather.eq(self._to_gather - p.lanes),
                    ]
                    with m.If(self._to_gather <= p.lanes):
                        m.next = "IDLE"
            with m.State("YIELD"):
                with m.If(rewind_free):
                    self._rewind(m, sleep=0)
                    m.next = "IDLE"
            with m.State("SLEEP"):
                with m.If(rewind_free):
                    self._rewind(m, sleep=1)
                    m.next = "ASLEEP"
            with m.State("ASLEEP"):  # the scheduler takes it; what the completer does from now on wakes the QP
                m.d.sync += self._staying.eq(0)
                with m.If(self.rewind.ready):
                    m.next = "AGAIN"
                    with m.If(self._by_share):
                        m.next = "NOTE"
            with m.State("NOTE"):
                m.d.comb += self.note.eq(1)
                m.d.sync += self._by_share.eq(0)
                m.next = "NOTED"
            with m.State("NOTED"):  # what it waits for has left: nobody else will wake it
                with m.If(~self.noted):
                    m.d.sync += [self.rewind.valid.eq(1), self.rewind.payload.sleep.eq(0)]
                m.next = "IDLE"
            with m.State("AGAIN"):
                m.d.comb += self._again.eq(1)
                m.next = "AGAIN_WAIT"
            with m.State("AGAIN_WAIT"):
                m.d.comb += self._again.eq(1)
                m.next = "AGAIN_TAKE"
            with m.State("AGAIN_TAKE"):
                m.d.sync += [self._una.eq(self.una), self._landed.eq(self.landed)]
                m.next = "AGAIN_COUNT"
            with m.State("AGAIN_COUNT"):
                m.d.sync += [
                    self._open.eq(hot.rd_atomic - self._landed),
                    self._unacked.eq(unacked != 0),
                    self._window_full.eq(window_full),
                ]
                m.next = "AWAKE"
                with m.If(self._staying):
                    m.next = "GATE"
            with m.State("AWAKE"):
                with m.If(~blocked):
                    m.d.sync += [self.rewind.valid.eq(1), self.rewind.payload.sleep.eq(0)]
                m.next = "IDLE"
            with m.State("FAIL"):
                with m.If(failure_free):
                    self._write_hot(m, send_index=hot.send_index + 1, offset=0)
                    m.d.comb += [
                        stopped_write.en.eq(1),
                        stopped_write.addr.eq(wqe.qpn),
                        stopped_write.data.eq(1),  # R-ERR-7
                    ]
                    m.d.sync += [
                        self._remember.eq(1),
                        self._fails.eq(1),
                        self._stopped.eq(1),
                        self.failure.valid.eq(1),
                        self.failure.payload.qpn.eq(wqe.qpn),
                        self.failure.payload.wqe_index.eq(wqe.index),
                        self.failure.payload.status.eq(wqe.status),
                        self.failure.payload.vendor_err.eq(wqe.vendor_err),
                        self.probe_wqe.valid.eq(1),
                    ]
                    m.next = "IDLE"
        with m.If((fsm.ongoing("SEEK") & ~self._shrunk) | fsm.ongoing("SEGMENT")):
            m.d.sync += Assert(wqe.body.any(), Format("Segmenter: QP {} WQE {} ran out of SGEs", wqe.qpn, wqe.index))
