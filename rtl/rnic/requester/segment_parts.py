"""The parts of the segmenter around its state machine."""

from amaranth import *
from amaranth.lib import data, wiring

from ..abi import REQUESTER_HOT, SGE, SGE_BYTES, CtxTable, WcStatus, WqeOpcode
from ..config import MAX_PMTU
from ..records import ProbeEvent
from ..wire.opcode import Kind, Transport, opcode_of
from .wqe_decode import DecodedWqe

__all__ = ["MIN_PMTU_BITS", "SGE_BITS", "SegmenterParts"]

MIN_PMTU_BITS = 8
SGE_BITS = 8 * SGE_BYTES

_KINDS = {  # operation: kind of its packets, immediate, invalidate
    WqeOpcode.SEND: (Kind.SEND, False, False),
    WqeOpcode.SEND_IMM: (Kind.SEND, True, False),
    WqeOpcode.SEND_INV: (Kind.SEND, False, True),
    WqeOpcode.WRITE: (Kind.WRITE, False, False),
    WqeOpcode.WRITE_IMM: (Kind.WRITE, True, False),
}
_READS = {WqeOpcode.READ: Kind.READ_REQ, WqeOpcode.CMP_SWAP: Kind.CMP_SWAP, WqeOpcode.FETCH_ADD: Kind.FETCH_ADD}


class SegmenterParts(wiring.Component):
    """Registers of `Segmenter` and what its states have in common; the FSM is there."""

    def _declare(self, m):
        """The registers of the WQE under way and of its QP."""
        p = self.p
        self._wqe = Signal(DecodedWqe(p), name="current")
        self._hot = Signal(REQUESTER_HOT.layout, name="hot_now")
        self._stopped = Signal(name="stopped_now")
        self._cached = Signal(name="hot_cached")  # _hot and _stopped are those of QP _wqe.qpn
        self._una = Signal(24, name="una_now")
        self._landed = Signal(8, name="landed_now")
        self._again = Signal(name="una_again")  # una and landed of QP _wqe.qpn are being read once more
        self._open = Signal(8, name="reads_open")  # READ and ATOMIC not landed
        self._unacked = Signal(name="psns_unacknowledged")
        self._window_full = Signal(name="window_full_now")
        self._working = Signal(name="working")
        self._others = Signal(name="others_wait")  # another QP, or a command, waits behind this WQE
        self._staying = Signal(name="staying")  # the counters are read again without a rewind
        self._by_share = Signal(name="stopped_by_share")
        self._hot_write = Signal(name="hot_write")  # _hot goes into the table
        self._remember = Signal(name="remember_now")
        self._fails = Signal(name="remember_failure")
        self._read_now = Signal(name="read_now")
        self._read_number = Signal(max(1, (p.max_rd_atomic - 1).bit_length()), name="read_number")
        self._load = Signal(name="load")
        self._left = Signal(32, name="left")  # message bytes to go
        self._extra = Signal(24, name="extra_psns")  # PSNs of the message beyond the first
        self._last_psn = Signal(24, name="last_psn")
        self._size = Signal(13, name="size")  # payload of this packet
        self._ends = Signal(name="ends")
        self._asks = Signal(name="asks_for_ack")  # inside a message, too
        self._pmtu = Signal(13, name="pmtu")
        self._to_gather = Signal(13, name="to_gather")  # payload bytes of this packet without a segment so far
        self._seek = Signal(32, name="seek")
        self._shrunk = Signal(name="shrunk")  # the WQE was read again and is now shorter than what was sent of it
        self._turn = Signal(range(self.quantum + MAX_PMTU + 1), name="turn_bytes")
        self._head = data.View(SGE.layout, self._wqe.body[:SGE_BITS])
        m.d.comb += self._pmtu.eq((1 << MIN_PMTU_BITS - 1) << self._wqe.path_mtu)

    def _elaborate_ctx(self, m, table, stopped_write):
        """A command's write must not meet a QP whose hot record is being worked on."""
        bus = self.ctx.payload
        is_hot, hold, clears = Signal(), Signal(), Signal()
        decoder_ctx = self._decoder.ctx
        same = [
            self._decoder.holds & (bus.index == self._decoder.qpn),
            self._working & (bus.index == self._wqe.qpn),
            self.rewind.valid & (bus.index == self.rewind.payload.qpn),
            self.failure.valid & (bus.index == self.failure.payload.qpn),
        ]
        m.d.comb += [
            is_hot.eq(bus.table == CtxTable.REQUESTER_HOT),
            hold.eq(is_hot & Cat(same).any()),
            table.ctx.payload.eq(bus),
            decoder_ctx.payload.eq(bus),
            table.ctx.valid.eq(self.ctx.valid & ~hold),
            decoder_ctx.valid.eq(self.ctx.valid),
            self.ctx.ready.eq(table.ctx.ready & decoder_ctx.ready & ~hold),
            clears.eq(self.ctx.valid & self.ctx.ready & is_hot & (bus.word == 0)),
        ]
        with m.If(clears):
            m.d.comb += [stopped_write.en.eq(1), stopped_write.addr.eq(bus.index), stopped_write.data.eq(0)]
        with m.If(self.ctx.valid & self.ctx.ready & is_hot & (bus.index == self._wqe.qpn)):
            m.d.sync += self._cached.eq(0)

    def _elaborate_load(self, m, table, stopped_now):
        """Hand-over from the decoder. The QP's state comes from the table, or from here when it is the same QP."""
        i = self._decoder.o
        m.d.comb += i.ready.eq(self._load)
        with m.If(self._load & i.valid):
            m.d.sync += [
                self._wqe.eq(i.payload), self._una.eq(self.una), self._landed.eq(self.landed), self._turn.eq(0),
                self._cached.eq(1),
            ]  # fmt: skip
            with m.If(~self._cached | (i.payload.qpn != self._wqe.qpn)):
                m.d.sync += [self._hot.eq(table.read_0), self._stopped.eq(stopped_now)]

    def _elaborate_packet(self, m):
        """Wire opcode of the packet: one lookup of operation and place in the message."""
        self._wire_opcode = wire_opcode = Signal(8, name="wire_opcode")
        self._starts = Signal(name="starts")
        m.d.comb += self._starts.eq(self._hot.offset == 0)
        with m.Switch(Cat(self._ends, self._starts, self._wqe.opcode)):
            for operation, (kind, imm, inv) in _KINDS.items():
                for place in range(4):
                    starts, ends = bool(place & 2), bool(place & 1)
                    with m.Case(operation.value << 2 | place):
                        code = opcode_of(Transport.RC, kind, starts=starts, ends=ends, imm=imm and ends, inv=inv and ends)
                        m.d.comb += wire_opcode.eq(code.value)
            for operation, kind in _READS.items():
                with m.Case(*(operation.value << 2 | place for place in range(4))):
                    m.d.comb += wire_opcode.eq(opcode_of(Transport.RC, kind).value)

    def _elaborate_tables(self, m, table):
        """Writes of the tables, a cycle after they are decided; the share of the window. Returns `commit`, to be driven, and
        `full`."""
        p, wqe, hot, job = self.p, self._wqe, self._hot, self.job
        recent = Signal(3, name="recent")  # a packet was made 1, 2, 3 cycles ago: not in the share yet
        commit = Signal(name="commit")
        full = Signal(name="share_full")
        m.d.sync += [
            self._hot_write.eq(0), self._remember.eq(0), self._fails.eq(0), self._read_now.eq(0),
            recent.eq(Cat(commit, recent)),
            self._others.eq(~self.alone | (self.alone_qpn != wqe.qpn) | self.ctx.valid
                            | (self._decoder.holds & (self._decoder.qpn != wqe.qpn))),
        ]  # fmt: skip
        m.d.comb += [
            self.share_qpn.eq(Mux(self._working, wqe.qpn, self._decoder.qpn)),
            full.eq(self.share_none | (self.share_one & recent[2])),
            # All of it stays for the cycle after the one in which it is decided.
            table.write_en.eq(self._hot_write),
            table.write_data.eq(hot),
            table.write_index.eq(wqe.qpn),
            table.write_words.eq(~0),
            self.remember_en.eq(self._remember),
            self.read_en.eq(self._read_now),
            self.remember_index.eq(Cat(wqe.index[: (p.sq_outstanding - 1).bit_length()], wqe.qpn)),
            # Without packets: an entry whose last PSN is the next PSN, which no answer reaches.
            self.remember_data.first_psn.eq(Mux(self._fails, hot.psn, job.payload.header.psn)),
            self.remember_data.last_psn.eq(Mux(self._fails, hot.psn, self._last_psn)),
            self.remember_data.opcode.eq(Mux(wqe.opcode[4:].any(), 15, wqe.opcode[:4])),
            self.remember_data.signaled.eq(wqe.signaled),
            self.remember_data.length.eq(wqe.length),
            self.read_index.eq(Cat(self._read_number[: (p.max_rd_atomic - 1).bit_length()], wqe.qpn)),
            self.read_data.first_psn.eq(job.payload.header.psn),
            self.read_data.last_psn.eq(self._last_psn),
            self.read_data.opcode.eq(wqe.opcode),
            self.read_data.length.eq(wqe.length),
            self.read_data.wqe_index.eq(wqe.index),
            self.read_data.sges.as_value().eq(Mux(wqe.atomic, wqe.body[SGE_BITS : 2 * SGE_BITS],
                                                  wqe.body[: p.max_sge * SGE_BITS])),
        ]
        return commit, full

    def _write_hot(self, m, **changes):
        """Write the QP's hot record with some fields changed: here, and a cycle later in the table."""
        m.d.sync += self._hot_write.eq(1)
        for name, value in changes.items():
            m.d.sync += self._hot[name].eq(value)

    def _rewind(self, m, *, sleep):
        """Throw away what is fetched of this QP; it comes again, or sleeps until another event of it."""
        rewind, hot = self.rewind, self._hot
        self._write_hot(m, epoch=hot.epoch + 1)
        m.d.sync += [
            rewind.valid.eq(1),
            rewind.payload.qpn.eq(self._wqe.qpn),
            rewind.payload.index.eq(hot.send_index),
            rewind.payload.epoch.eq(hot.epoch + 1),
            rewind.payload.sleep.eq(sleep),
        ]

    def _offer_job(self, m):
        wqe, job = self._wqe, self.job.payload
        header = job.header
        psn = self._hot.psn
        m.d.sync += [
            self.job.valid.eq(1),
            header.qpn.eq(wqe.qpn),
            header.opcode.eq(self._wire_opcode),
            header.psn.eq(psn),
            header.solicited.eq(self._ends & wqe.solicited),  # R-REQ-3
            header.ackreq.eq(self._asks | self._ends),  # R-REQ-2
            header.length.eq(self._size),
            header.va.eq(wqe.remote_addr),
            header.rkey.eq(wqe.rkey),
            header.dma_length.eq(wqe.length),
            header.swap.eq(wqe.body[:64]),  # R-OPC-3: FETCH_ADD's operand too
            header.compare.eq(wqe.body[64:128]),
            header.imm.eq(wqe.imm),
            job.pd.eq(wqe.pd),
            job.wqe_index.eq(wqe.index),
            job.inline.eq(wqe.inline & ~wqe.reads),  # R-WQ-5
            job.marker.eq(0),
        ]

    def _elaborate_probes(self, m):
        wqe, job = self._wqe, self.job.payload
        failed = Signal()
        m.d.comb += [
            failed.eq(wqe.status != WcStatus.SUCCESS),
            self.probe.event.eq(ProbeEvent.PACKET_MADE),
            self.probe.qpn.eq(job.header.qpn),
            self.probe.index.eq(job.wqe_index),
            self.probe.psn.eq(job.header.psn),
            self.probe.opcode.eq(job.header.opcode),
            self.probe.length.eq(job.header.length),
            self.probe_wqe.event.eq(Mux(failed, ProbeEvent.LOCAL_FAILED, ProbeEvent.WQE_PARSED)),
            self.probe_wqe.qpn.eq(wqe.qpn),
            self.probe_wqe.index.eq(wqe.index),
            self.probe_wqe.psn.eq(self._hot.psn),
            self.probe_wqe.opcode.eq(Mux(failed, wqe.status, wqe.opcode)),
            self.probe_wqe.length.eq(wqe.length),
        ]
