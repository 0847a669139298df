"""Frame builder: headers in front of the payload, padding, ICRC."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import ADDRESS_CTX, GID_ENTRY
from ..config import Params
from ..records import Probe, ProbeEvent, TxHeader
from ..stream.beat import Beat
from ..stream.buffer import StreamRegister
from ..stream.check import watch
from ..stream.fifo import StreamFifo
from .headers import HIDDEN_BYTES, MAX_HEADER_BYTES, FrameHeader, HeaderAssembler
from .icrc import DEPTH, BodyBeat, IcrcInsert

__all__ = ["Builder", "FrameMerge"]

_FRAMES = DEPTH + 4  # frames between the assembler and the output: one-beat frames in every place
_CHECKSUM_BYTE = 24  # of an IPv4 frame; with VLAN tag 28, in the same beat of every bus width


class FrameMerge(wiring.Component):
    """Joins header bytes and payload into frame beats: one rotate, one merge.

    Header bytes shift out beat by beat; in the beat of the header's end the payload begins, rotated by the header's length
    mod lanes (always 2 mod 4). Pad bytes, and the places of ICRC and checksum, are zero (R-PAD-1). A payload packet that
    ends with ``err`` ends the frame there, with ``err``.

    Timing: latency 1 cycle from header or payload to ``o`` when idle; one beat per cycle; no idle cycle between frames when
    the next header is there (one for frames of a single beat, whose headers come every second cycle).

    Parameters: ``p``. Members: ``header`` FrameHeader, ``payload`` Beat packets (one for a header with length, none
    without), ``o`` BodyBeat.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "header": In(stream.Signature(FrameHeader(p))),
            "payload": In(stream.Signature(Beat(p.data_width))),
            "o": Out(stream.Signature(BodyBeat(p.data_width))),
        })

    def elaborate(self, platform):
        m = Module()
        lanes = self.p.lanes
        words = lanes // 4
        bits = (words - 1).bit_length()
        m.submodules.out = out = StreamRegister(BodyBeat(self.p.data_width))
        wiring.connect(m, out.o, wiring.flipped(self.o))
        head = self.header.payload

        # What both phases of a frame need: the header phase from the waiting header, the payload phase from a copy, so that
        # the next header can move up meanwhile.
        control = data.StructLayout({
            "left": len(head.end) - bits,  # beats behind the present one
            "tail": bits,  # the frame ends with byte 4 * tail + 1 of its last beat
            "shift": bits,  # the header ends with byte 4 * shift + 1 of a beat
            "payload": 1,  # payload beats are still to come
            "final": 1,  # left == 0
        })  # fmt: skip
        waiting = Signal(control)
        under_way = Signal(control)
        now = Signal(control)
        payload_phase = Signal()
        header_valid = Signal()
        beats_of_bytes = -(-8 * MAX_HEADER_BYTES // self.p.data_width)
        header_bytes = Signal(beats_of_bytes * self.p.data_width)
        hide = Signal(-(-HIDDEN_BYTES // lanes) * lanes)
        header_beats = Signal(range(MAX_HEADER_BYTES // lanes + 1))  # before the one in which the header ends
        index = Signal.like(header_beats)
        vlan = Signal()
        ipv6 = Signal()
        m.d.comb += now.eq(Mux(payload_phase, under_way.as_value(), waiting.as_value()))

        # Decide this cycle's beat.
        joint = Signal()  # the header ends in this beat
        header_ends = Signal()  # index == header_beats
        wants = Signal()  # a payload beat goes into it
        offered = Signal()
        fire = Signal()
        payload_end = Signal()
        cut = Signal()
        last = Signal()
        split = Signal()  # the ICRC begins in the last but one beat
        m.d.comb += [
            joint.eq(~payload_phase & header_ends),
            wants.eq((joint | payload_phase) & now.payload),
            offered.eq((payload_phase | header_valid) & (~wants | self.payload.valid)),
            fire.eq(offered & out.i.ready),
            self.payload.ready.eq(out.i.ready & wants & (payload_phase | header_valid)),
            payload_end.eq(wants & self.payload.payload.last),
            cut.eq(payload_end & self.payload.payload.err),
            last.eq(now.final | cut),
            split.eq(now.tail == 0),
        ]

        with m.If(fire):
            with m.If(payload_phase):
                m.d.sync += [
                    under_way.left.eq(under_way.left - 1), under_way.final.eq(under_way.left == 1), payload_phase.eq(~last),
                ]  # fmt: skip
                with m.If(payload_end):
                    m.d.sync += under_way.payload.eq(0)
            with m.Else():
                m.d.sync += [
                    index.eq(index + 1), header_ends.eq((index + 1)[: len(index)] == header_beats),
                    waiting.left.eq(waiting.left - 1), waiting.final.eq(waiting.left == 1),
                ]  # fmt: skip
                with m.If(joint):
                    m.d.sync += [
                        payload_phase.eq(~last),
                        under_way.eq(waiting),
                        under_way.left.eq(waiting.left - 1),
                        under_way.final.eq(waiting.left == 1),
                        under_way.payload.eq(waiting.payload & ~payload_end),
                    ]
        m.d.comb += self.header.ready.eq(~header_valid | (fire & joint))
        with m.If(self.header.ready):
            m.d.sync += header_valid.eq(self.header.valid)
            with m.If(self.header.valid):
                m.d.sync += [
                    index.eq(0), vlan.eq(head.vlan), ipv6.eq(head.ipv6),
                    header_beats.eq(head.words >> bits), header_ends.eq((head.words >> bits) == 0),
                    waiting.left.eq(head.end >> bits), waiting.final.eq((head.end >> bits) == 0),
                    waiting.tail.eq(head.end[:bits]),
                    waiting.shift.eq(head.words[:bits]),
                    waiting.payload.eq(head.length != 0),
                ]  # fmt: skip

        # The wide registers: what they hold without a header does not matter, so one enable does for loading and shifting.
        with m.If(self.header.ready | (fire & ~payload_phase)):
            m.d.sync += [
                header_bytes.eq(Mux(self.header.ready, head.bytes, header_bytes >> self.p.data_width)),
                hide.eq(Mux(self.header.ready, head.hide, hide >> lanes)),
            ]

        self._merge(m, out.i.payload, now, header_bytes, payload_phase, joint, wants, fire)
        o = out.i.payload
        m.d.comb += [
            out.i.valid.eq(offered),
            o.last.eq(last),
            o.err.eq(cut),
            o.first.eq(~payload_phase & (index == 0)),
            o.icrc.eq(~cut & (now.left == split)),
            o.spare.eq(-now.tail),  # words behind the ICRC's first half: the end is one word further
            o.checksum.eq(~payload_phase & (index == _CHECKSUM_BYTE // lanes) & ~ipv6),
            o.hide.eq(Mux(payload_phase, 0, hide[:lanes])),
            o.vlan.eq(vlan),
            o.ipv6.eq(ipv6),
        ]
        with m.If(fire):
            m.d.sync += [
                Assert((now.final == (now.left == 0)) & (payload_phase | (header_ends == (index == header_beats))),
                       "FrameMerge: flags and counts differ"),
                Assert(~last | ~now.payload | payload_end, Format("FrameMerge: the payload goes on behind the frame's end")),
                Assert(~payload_end | cut | (now.left <= 2), Format("FrameMerge: payload ends {} beats early", now.left)),
            ]
        for name in ("header", "payload", "o"):
            watch(m, name, getattr(self, name))
        return m

    def _merge(self, m, o, now, header_bytes, payload_phase, joint, wants, fire):
        """Data and keep of the beat ``o``."""
        lanes, width = self.p.lanes, self.p.data_width
        kept = Signal(width)
        m.d.comb += kept.eq(self.payload.payload.data
                            & Cat(bit.replicate(8) for bit in self.payload.payload.keep & wants.replicate(lanes)))
        rotated = kept.rotate_left(16)
        for stage in range(len(now.shift)):
            turned = Signal(width, name=f"turned_{stage}")
            m.d.comb += turned.eq(Mux(now.shift[stage], rotated.rotate_left(32 << stage), rotated))
            rotated = turned
        carry = Signal(width)  # the last payload beat, rotated: its upper part waits here for the next frame beat
        with m.If(fire):
            m.d.sync += carry.eq(rotated)
        before = Signal(width)
        m.d.comb += before.eq(Mux(payload_phase, carry, header_bytes[:width]))
        header_only = Signal()
        last = Signal()
        m.d.comb += [header_only.eq(~payload_phase & ~joint), last.eq(now.final)]
        for half in range(lanes // 2):
            old = Signal(name=f"old_{half}")  # these two bytes come from the header or the payload beat before
            bits = slice(16 * half, 16 * half + 16)
            # Header bytes 0 .. 4 * shift + 1 of the joint beat.
            m.d.comb += [
                old.eq(header_only | (now.shift >= (half + 1) // 2)),
                o.data[bits].eq(Mux(old, before[bits], rotated[bits])),
                o.keep[2 * half : 2 * half + 2].eq((~last | (now.tail >= (half + 1) // 2)).replicate(2)),
            ]


class Builder(wiring.Component):
    """Whole Ethernet frames (no FCS) from packet descriptors and payload.

    ``header`` takes a `TxHeader`; ``payload`` exactly one packed packet of ``length`` bytes for a header with length, none
    for one without. A payload packet that ends with ``err`` cuts its frame short, ``frame`` then ends with ``err``: whoever
    is behind drops it. ``own``, with every beat of a frame: it goes to the MAC it comes from. UD headers: see
    `HeaderAssembler`.

    The address context of ``header.qpn`` is read through ``addr_index`` / ``addr`` (``p.address_cycles``, stays while the index
    stays: an `AddressTable` read port); ``gid`` and ``pkey`` follow ``gid_index`` and ``pkey_index`` in the same cycle.

    Rules: R-FRM-2, R-FRM-4, R-FRM-6, R-FRM-7, R-PAD-1, R-ICRC-1..5, R-ICRC-8.

    Timing: header in at cycle t, first beat on ``frame`` at t + 6 + ``p.address_cycles``; one beat per cycle; frames follow each
    other without an idle cycle, except single-beat frames (one every 2 cycles), while headers come in time: at least
    2 + ``p.address_cycles`` cycles before the frame before it ends.

    Probe: FRAME_OUT with the frame's first beat.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "header": In(stream.Signature(TxHeader(p))),
            "payload": In(stream.Signature(Beat(p.data_width))),
            "addr_index": Out(p.qpn_bits), "addr": In(ADDRESS_CTX.layout),
            "gid_index": Out(p.gid_bits), "gid": In(GID_ENTRY.layout),
            "pkey_index": Out(p.pkey_bits), "pkey": In(16),
            "frame": Out(stream.Signature(Beat(p.data_width))),
            "own": Out(1),
            "probe": Out(Probe()),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        p = self.p
        m.submodules.headers = headers = HeaderAssembler(p)
        m.submodules.merge = merge = FrameMerge(p)
        m.submodules.insert = insert = IcrcInsert(p.data_width)
        m.submodules.checksums = checksums = StreamFifo(16, _FRAMES)

        wiring.connect(m, wiring.flipped(self.header), headers.header)
        wiring.connect(m, wiring.flipped(self.payload), merge.payload)
        wiring.connect(m, merge.o, insert.i)
        wiring.connect(m, checksums.o, insert.checksum)
        wiring.connect(m, insert.frame, wiring.flipped(self.frame))
        m.d.comb += [
            self.addr_index.eq(headers.addr_index),
            headers.addr.eq(self.addr),
            self.gid_index.eq(headers.gid_index),
            headers.gid.eq(self.gid),
            self.pkey_index.eq(headers.pkey_index),
            headers.pkey.eq(self.pkey),
            checksums.i.valid.eq(headers.checksum_valid),
            checksums.i.payload.eq(headers.checksum),
        ]
        m.d.sync += Assert(~checksums.i.valid | checksums.i.ready, "Builder: more checksums than frames")
        m.submodules.owns = owns = StreamFifo(1, _FRAMES)
        m.d.comb += [
            owns.i.valid.eq(headers.o.valid & headers.o.ready),
            owns.i.payload.eq(headers.o.payload.own),
            owns.o.ready.eq(self.frame.valid & self.frame.ready & self.frame.payload.last),
            self.own.eq(owns.o.payload),
        ]
        m.d.sync += [
            Assert(~owns.i.valid | owns.i.ready, "Builder: more frames under way than expected"),
            Assert(~self.frame.valid | owns.o.valid, "Builder: a frame without destination"),
        ]

        if not p.probe:
            wiring.connect(m, headers.o, merge.header)
            return m

        # The frame's identity travels beside it to the probe; its room never decides anything.
        identity = data.StructLayout({"qpn": p.qpn_bits, "psn": 24, "opcode": 8, "length": 13})
        m.submodules.identities = identities = StreamFifo(identity, _FRAMES)
        head = headers.o.payload
        sent = Signal()
        wiring.connect(m, headers.o, merge.header)
        m.d.comb += [
            identities.i.valid.eq(headers.o.valid & headers.o.ready),
            identities.i.payload.qpn.eq(head.qpn),
            identities.i.payload.psn.eq(head.psn),
            identities.i.payload.opcode.eq(head.opcode),
            identities.i.payload.length.eq(head.length),
            sent.eq(self.frame.valid & self.frame.ready & insert.first),
            identities.o.ready.eq(sent),
        ]
        m.d.comb += [
            self.probe.valid.eq(sent),
            self.probe.event.eq(ProbeEvent.FRAME_OUT),
            self.probe.qpn.eq(identities.o.payload.qpn),
            self.probe.psn.eq(identities.o.payload.psn),
            self.probe.opcode.eq(identities.o.payload.opcode),
            self.probe.length.eq(identities.o.payload.length),
        ]
        m.d.sync += [
            Assert(~identities.i.valid | identities.i.ready, "Builder: more identities than frames"),
            Assert(~sent | identities.o.valid, "Builder: a frame without identity"),
        ]
        return m
