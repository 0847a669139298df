"""The receive parser: what is a good RoCEv2 frame, its header, its payload; everything else goes another way."""

import math

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.records import Probe, ProbeEvent, RxDrop
from rnic.rx.capture import HeaderCapture, RawHeader
from rnic.rx.eth_fifo import EthFifo
from rnic.rx.header import RxHeader
from rnic.rx.header_queue import HeaderQueue
from rnic.rx.icrc_check import IcrcCheck, IpChecksum
from rnic.rx.payload_align import MAX_PAYLOAD, PayloadAlign, PayloadGeometry, PayloadWord
from rnic.stream.beat import Beat
from rnic.stream.buffer import SkidBuffer
from rnic.stream.check import watch
from rnic.stream.fifo import StreamFifo
from rnic.wire import headers as h
from rnic.wire.layout import swap_bytes
from rnic.wire.opcode import OpcodeFlags, decode

__all__ = ["Parser"]


# The opcode is decoded on the way into the queue: what is behind begins at the output of its memory.
_QueuedHeader = data.StructLayout({"raw": RawHeader, "flags": OpcodeFlags})


class Parser(wiring.Component):
    """Checks every frame and splits RoCEv2 into header and payload (R-FRM-1..7, R-LEN-4, R-ICRC-1..8).

    Which frames are RoCEv2, and the order of the checks, is defined by `wire.frame.parse_frame`.

    Members
    - ``i``: stream of Beat, one Ethernet frame without FCS a packet; ``err`` on its last beat: the MAC aborted it.
    - ``hdr``: stream of RxHeader, one item for each accepted frame, in order, offered when the whole frame has passed
      every check.
    - ``payload``: stream of Beat: the payload from lane 0 on, without pad. Beats come as the frame comes, the last one
      with the verdict: ``err`` 0, the frame was accepted and has a ``hdr`` item; ``err`` 1, it was not: roll back. A frame
      without payload has no beats (its ``hdr.payload_len`` is 0). A refused frame has beats or not. Unused lanes of the
      last beat are unspecified.
    - ``eth``: stream of Beat, frames that are not RoCEv2, whole and unchanged. Never blocks ``i``: stored in a FIFO of
      about two largest frames (`EthFifo`), dropped when they do not fit.
    - ``drop``: ``valid`` for one cycle, with ``cause``, for each frame that went neither way, RoCEv2 or not.
    - ``probe_drop``: FRAME_DROPPED with ``drop`` (FRAME_IN is reported by the filter behind).

    Timing: a beat per cycle, no idle cycle between frames; from the last beat taken to ``hdr.valid`` 6 cycles at 256 and
    512 bits, 7 below. ``i.ready`` comes from a register; it falls when ``hdr`` or ``payload`` are not taken for long.

    Parameters: ``data_width`` in bits (64, 128, 256, 512); ``eth_frame_bytes``, the largest frame ``eth`` must pass.
    """

    def __init__(self, data_width: int, *, eth_frame_bytes: int = h.max_frame_bytes(MAX_PAYLOAD)):
        self.data_width = data_width
        beats = -(-2 * eth_frame_bytes // (data_width // 8))
        self.eth_depth = 1 << round(math.log2(beats))  # a few beats above a power of two would double the memory
        super().__init__({
            "i": In(stream.Signature(Beat(data_width))),
            "hdr": Out(stream.Signature(RxHeader)),
            "payload": Out(stream.Signature(Beat(data_width))),
            "eth": Out(stream.Signature(Beat(data_width))),
            "drop": Out(data.StructLayout({"valid": 1, "cause": RxDrop})),
            "probe_drop": Out(Probe()),
        })

    def elaborate(self, platform):
        m = Module()
        width = self.data_width
        header_depth = 16 if width >= 256 else 8  # frames; twice what is between two of its ends without stalls
        payload_depth = 16
        m.submodules.capture = capture = HeaderCapture(width)
        m.submodules.checksum = checksum = IpChecksum(width)
        m.submodules.icrc = icrc = IcrcCheck(width)
        m.submodules.geometry = geometry = PayloadGeometry()
        m.submodules.align = align = PayloadAlign(width)
        m.submodules.eth_fifo = eth_fifo = EthFifo(width, self.eth_depth)
        m.submodules.header_queue = header_queue = HeaderQueue(_QueuedHeader, header_depth)
        m.submodules.payload_fifo = payload_fifo = StreamFifo(PayloadWord(width), payload_depth)

        # Intake. The pipeline cannot stop, so there is room in the FIFOs for all that is in it when ready falls: four
        # beats on the way to the header queue, seven to the payload FIFO.
        ready = Signal()
        m.d.sync += ready.eq((header_queue.level <= header_depth - 4) & (payload_fifo.level <= payload_depth - 7))
        m.d.comb += [
            self.i.ready.eq(ready),
            capture.valid.eq(self.i.valid & ready),
            capture.beat.eq(self.i.payload),
        ]

        # Stage 1: header fields captured.
        valid_1, beat_1, info_1 = capture.o_valid, capture.o_beat, capture.info
        last_1 = Signal()
        m.d.comb += [
            last_1.eq(valid_1 & beat_1.last),
            checksum.valid.eq(valid_1), checksum.data.eq(beat_1.data), checksum.index.eq(capture.o_index),
            checksum.vlan.eq(info_1.vlan),
            icrc.valid.eq(valid_1), icrc.beat.eq(beat_1), icrc.index.eq(capture.o_index), icrc.info.eq(info_1),
            geometry.info.eq(info_1),
            header_queue.write.eq(capture.raw_done),
            header_queue.item.raw.eq(capture.raw),
            header_queue.item.flags.eq(decode(m, capture.raw.bth.opcode)),
        ]  # fmt: skip

        # Stages 2 and 3: lengths, checksum, masked data.
        early = data.StructLayout({"last": 1, "roce": 1, "mac_error": 1, "bad_ip": 1, "bad_bth": 1})
        early_1 = Signal(early)
        m.d.comb += [
            early_1.last.eq(last_1), early_1.roce.eq(info_1.roce), early_1.mac_error.eq(beat_1.err),
            early_1.bad_ip.eq(info_1.bad_ip),
            early_1.bad_bth.eq(info_1.bad_tver | (capture.raw.bth.dest_qpn == 0)),
        ]  # fmt: skip
        early_2, early_3 = Signal(early), Signal(early)
        valid_3, ipv6_2, ipv6_3, overflow_3 = Signal(), Signal(), Signal(), Signal()
        index_2, index_3 = Signal.like(capture.o_index), Signal.like(capture.o_index)
        m.d.sync += [
            early_2.eq(early_1), early_3.eq(early_2), valid_3.eq(icrc.valid_2), overflow_3.eq(eth_fifo.overflow),
            ipv6_2.eq(info_1.ipv6), ipv6_3.eq(ipv6_2), index_2.eq(capture.o_index), index_3.eq(index_2),
        ]  # fmt: skip
        m.d.comb += [
            header_queue.wanted.eq(early_2.roce),
            eth_fifo.valid.eq(icrc.valid_2), eth_fifo.beat.eq(icrc.beat_2),
            eth_fifo.commit.eq(~early_2.roce & ~early_2.mac_error),
        ]  # fmt: skip
        wiring.connect(m, eth_fifo.o, wiring.flipped(self.eth))
        m.d.comb += [
            align.valid.eq(valid_3), align.data.eq(icrc.o_data), align.last.eq(early_3.last), align.index.eq(index_3),
            align.enable.eq(early_3.roce & geometry.fits & (geometry.length != 0)),
            align.start.eq(geometry.start), align.length.eq(geometry.length),
            payload_fifo.i.valid.eq(align.o_valid),
            payload_fifo.i.payload.eq(align.o),
        ]  # fmt: skip

        # Stage 4: all but the ICRC is decided.
        late = data.StructLayout({
            "last": 1, "roce": 1, "mac_error": 1, "overflow": 1, "bad_ip": 1, "bad_length": 1, "bad_bth": 1,
            "length": 13, "has_payload": 1,
        })  # fmt: skip
        late_4, decided = Signal(late), Signal(late)
        m.d.sync += [
            late_4.last.eq(early_3.last), late_4.roce.eq(early_3.roce), late_4.mac_error.eq(early_3.mac_error),
            late_4.overflow.eq(overflow_3),
            late_4.bad_ip.eq(early_3.bad_ip | (~ipv6_3 & ~checksum.ok)),  # R-FRM-4, R-FRM-5
            late_4.bad_length.eq(geometry.bad_length | icrc.short),  # R-FRM-1, R-FRM-2, R-FRM-3
            late_4.bad_bth.eq(early_3.bad_bth | ~geometry.known),
            late_4.length.eq(geometry.length),
        ]  # fmt: skip
        m.d.comb += [decided.eq(late_4), decided.has_payload.eq(align.has_payload)]
        if icrc.latency == 4:
            late_5 = Signal(late)
            m.d.sync += late_5.eq(decided)
            decided = late_5
        self._verdict(m, decided, icrc.good, header_queue, payload_fifo, header_depth, payload_depth)

        m.d.comb += [
            self.probe_drop.valid.eq(self.drop.valid),
            self.probe_drop.event.eq(ProbeEvent.FRAME_DROPPED),
            self.probe_drop.opcode.eq(self.drop.cause.as_value()),
        ]  # fmt: skip

        watch(m, "i", self.i)
        watch(m, "hdr", self.hdr)
        watch(m, "payload", self.payload)
        full = payload_fifo.i.valid & ~payload_fifo.i.ready
        m.d.sync += Assert(~full, Format("Parser: payload FIFO overflows at level {}", payload_fifo.level))
        return m

    def _verdict(self, m, late, icrc_good, header_queue, payload_fifo, header_depth, payload_depth) -> None:
        """Stage 5: the verdict goes to the header's and to the payload's end; refused frames are reported."""
        m.submodules.header_verdict = header_verdict = StreamFifo(
            data.StructLayout({"ok": 1, "payload_len": 13}), header_depth
        )
        m.submodules.payload_verdict = payload_verdict = StreamFifo(1, payload_depth)
        refused, dropped = Signal(), Signal()
        cause = Signal(RxDrop)
        with m.If(late.mac_error):
            m.d.comb += cause.eq(RxDrop.MAC_ERROR)
        with m.Elif(~late.roce):
            m.d.comb += cause.eq(RxDrop.ETH_OVERFLOW)
        with m.Elif(late.bad_ip):
            m.d.comb += cause.eq(RxDrop.BAD_IP)
        with m.Elif(late.bad_length):
            m.d.comb += cause.eq(RxDrop.BAD_LENGTH)
        with m.Elif(late.bad_bth):
            m.d.comb += cause.eq(RxDrop.BAD_BTH)
        with m.Else():
            m.d.comb += cause.eq(RxDrop.BAD_ICRC)  # R-ICRC-7
        m.d.comb += [
            refused.eq(late.mac_error | late.bad_ip | late.bad_length | late.bad_bth | ~icrc_good),
            dropped.eq(Mux(late.roce, refused, late.mac_error | late.overflow)),
        ]
        verdict_valid, verdict_payload, verdict_ok = Signal(), Signal(), Signal()
        verdict_length = Signal(13)
        m.d.sync += [
            verdict_valid.eq(late.last & late.roce),
            verdict_payload.eq(late.last & late.has_payload),
            verdict_ok.eq(~refused),
            verdict_length.eq(late.length),
            self.drop.valid.eq(late.last & dropped),
            self.drop.cause.eq(cause),
        ]
        m.d.comb += [
            header_verdict.i.valid.eq(verdict_valid),
            header_verdict.i.payload.ok.eq(verdict_ok),
            header_verdict.i.payload.payload_len.eq(verdict_length),
            payload_verdict.i.valid.eq(verdict_payload),
            payload_verdict.i.payload.eq(~verdict_ok),
        ]
        for name, fifo in (("header", header_verdict), ("payload", payload_verdict)):
            m.d.sync += Assert(~fifo.i.valid | fifo.i.ready, Format("Parser: {} verdict FIFO overflows", name))

        # Header and its verdict leave together.
        judged, header_taken = Signal(), Signal()
        m.d.comb += [
            judged.eq(header_queue.o.valid & header_verdict.o.valid),
            self.hdr.valid.eq(judged & header_verdict.o.payload.ok),
            header_taken.eq(judged & (self.hdr.ready | ~header_verdict.o.payload.ok)),
            header_queue.o.ready.eq(header_taken),
            header_verdict.o.ready.eq(header_taken),
            self.hdr.payload.payload_len.eq(header_verdict.o.payload.payload_len),
        ]
        self._header(m, header_queue.o.payload)

        # Payload beats pass, the last one waits for its verdict.
        word = payload_fifo.o.payload
        lanes = self.data_width // 8
        payload_taken = Signal()
        # Cuts the way of ready from the packet store; the header takes longer through the filter than this.
        m.submodules.payload_out = payload_out = SkidBuffer(Beat(self.data_width))
        wiring.connect(m, payload_out.o, wiring.flipped(self.payload))
        payload = payload_out.i.payload
        m.d.comb += [
            payload_out.i.valid.eq(payload_fifo.o.valid & (~word.last | payload_verdict.o.valid)),
            payload_taken.eq(payload_out.i.valid & payload_out.i.ready),
            payload_fifo.o.ready.eq(payload_taken),
            payload_verdict.o.ready.eq(payload_taken & word.last),
            payload.data.eq(word.data),
            payload.last.eq(word.last),
            payload.err.eq(word.last & payload_verdict.o.payload),
            payload.keep.eq(Cat(word.count_less_1 >= lane for lane in range(lanes))),
        ]

    def _header(self, m, queued) -> None:
        """RxHeader of a captured header: wires, and a choice of the immediate's place."""
        out = self.hdr.payload
        raw, flags = queued.raw, queued.flags

        def address(value) -> Value:  # R-ADR-1
            return Mux(raw.ipv6, value, Cat(value[:32], Const(0xFFFF, 96)))

        def ext(layout, at: int = 0) -> data.View:
            """The extended header ``layout`` at byte ``at`` behind the BTH."""
            top = 8 * (h.MAX_EXT_HEADER_BYTES - at)
            return data.View(layout, raw.ext[top - layout.size : top])

        immediate = Signal(32)
        with m.If(flags.has_reth):
            m.d.comb += immediate.eq(ext(h.IMM_DT, h.RETH.size_bytes).imm)
        with m.Elif(flags.has_deth):
            m.d.comb += immediate.eq(ext(h.IMM_DT, h.DETH.size_bytes).imm)
        with m.Else():
            m.d.comb += immediate.eq(ext(h.IMM_DT).imm)
        bth, reth, atomic, aeth, deth = raw.bth, ext(h.RETH), ext(h.ATOMIC_ETH), ext(h.AETH), ext(h.DETH)
        m.d.comb += [
            out.opcode.eq(bth.opcode), out.flags.eq(flags), out.se.eq(bth.se), out.pad.eq(bth.pad),
            out.pkey.eq(bth.pkey), out.dest_qpn.eq(bth.dest_qpn), out.ackreq.eq(bth.ackreq), out.psn.eq(bth.psn),
            out.is_ipv6.eq(raw.ipv6), out.vlan_valid.eq(raw.vlan), out.vlan_vid.eq(Mux(raw.vlan, raw.vlan_tci[:12], 0)),
            out.src_ip.eq(address(raw.src_ip)), out.dst_ip.eq(address(raw.dst_ip)),
            out.dst_mac.eq(raw.dst_mac), out.src_mac.eq(raw.src_mac), out.ecn.eq(raw.ecn),
            out.va.eq(reth.va), out.rkey.eq(reth.rkey), out.dma_len.eq(reth.length),
            out.swap.eq(atomic.swap), out.compare.eq(atomic.compare),  # R-HDR-1, R-OPC-3
            out.aeth_syndrome.eq(aeth.syndrome), out.aeth_msn.eq(aeth.msn),
            out.original.eq(ext(h.ATOMIC_ACK_ETH, h.AETH.size_bytes).original),
            out.imm.eq(Mux(flags.has_ieth, immediate, swap_bytes(immediate))),  # R-CQ-4
            out.qkey.eq(deth.qkey), out.src_qp.eq(deth.src_qp),
        ]  # fmt: skip
