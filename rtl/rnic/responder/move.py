"""Move: cuts packets from the store into host writes, one a segment."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import DmaWriteSignature
from ..stream.align import Packer, RawWord
from ..stream.beat import Beat
from ..stream.buffer import SkidBuffer
from ..stream.fifo import StreamFifo
from ..stream.fork import Fork
from .atomic_hold import AtomicHold
from .records import Segment, max_segments

__all__ = ["Move"]


class Move(wiring.Component):
    """Writes the packets on ``packet`` to the segments on ``segment``: the segments up to ``last`` have together exactly the
    packet's bytes.

    Each segment becomes one write command and one packet of beats, realigned to lane 0. At most ``Move.writes(p)`` commands
    are under way until their outcome is taken from ``done``, so the write engine's ``accepted`` and ``done`` never wait here.

    The segment of an ATOMIC makes no command: its word shows on ``atomic`` until it is taken there, and until then no
    later segment that touches the word goes on (R-AT-4); two such words at once.

    Timing: one beat per cycle inside a segment; a beat that holds a border between segments takes two; latency of the packer
    and 3; one cycle more per segment while a word is held.

    Members: ``segment``, ``packet`` (Beat) in; ``write`` client; ``accepted``, ``done`` (1: error) out: streams, one item a
    command, in order; ``atomic``, stream of addresses, in order.
    """

    @staticmethod
    def writes(p: Params) -> int:
        """Write commands under way at most; a packet may need `max_segments`."""
        return max_segments(p) + 2 * p.desc_depth

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "segment": In(stream.Signature(Segment())),
            "packet": In(stream.Signature(Beat(p.data_width))),
            "write": Out(DmaWriteSignature(p)),
            "accepted": Out(stream.Signature(1)),
            "done": Out(stream.Signature(1)),
            "atomic": Out(stream.Signature(64)),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.hold = hold = AtomicHold()
        m.submodules.fork = fork = Fork(Segment(), 2)
        m.submodules.commands = commands = StreamFifo(Segment(), 2)
        m.submodules.cuts = cuts = StreamFifo(Segment(), 2)
        m.submodules.packer = packer = Packer(p.data_width)
        m.submodules.words = words = SkidBuffer(RawWord(p.data_width))
        m.submodules.outcomes = outcomes = StreamFifo(1, self.writes(p))
        wiring.connect(m, wiring.flipped(self.segment), hold.i)
        wiring.connect(m, hold.o, fork.i)
        wiring.connect(m, hold.atomic, wiring.flipped(self.atomic))
        wiring.connect(m, fork.o[0], commands.i)
        wiring.connect(m, fork.o[1], cuts.i)
        wiring.connect(m, words.o, packer.i)
        wiring.connect(m, packer.o, wiring.flipped(self.write.data))
        wiring.connect(m, wiring.flipped(self.write.done), outcomes.i)
        wiring.connect(m, outcomes.o, wiring.flipped(self.done))
        self._issue(m, commands.o, outcomes)
        self._cut(m, cuts.o, words.i)
        return m

    def _issue(self, m, segment, outcomes):
        """Commands within the bound; counts what was accepted."""
        most = self.writes(self.p)
        under_way = Signal(range(most + 1))  # outcome not yet taken
        accepted = Signal(range(most + 1))  # accepted, not yet told
        room = Signal()
        issued, told, arrived, finished = Signal(), Signal(), Signal(), Signal()
        command = self.write.command
        m.d.comb += [
            room.eq(under_way != most),
            command.valid.eq(segment.valid & room),
            command.p.address.eq(segment.p.address),
            command.p.length.eq(segment.p.length),
            segment.ready.eq(command.ready & room),
            issued.eq(command.valid & command.ready),
            self.write.accepted.ready.eq(1),
            arrived.eq(self.write.accepted.valid),
            self.accepted.valid.eq(accepted != 0),
            told.eq(self.accepted.valid & self.accepted.ready),
            finished.eq(self.done.valid & self.done.ready),
        ]
        m.d.sync += [
            under_way.eq(under_way + issued - finished),
            accepted.eq(accepted + arrived - told),
            Assert(~outcomes.i.valid | outcomes.i.ready, "responder: outcomes of writes overflow"),
            Assert(~arrived | (accepted != most), "responder: more writes accepted than issued"),
        ]

    def _cut(self, m, segment, word):
        """A beat goes to the packer once, or twice when a segment ends inside it."""
        lanes = self.p.lanes
        first = Signal(self.p.lane_bits)  # first lane not yet sent
        left = Signal(13)  # bytes of the segment not yet sent
        left_now = Signal(13)
        begun = Signal()
        here = Signal(self.p.lane_bits + 1)  # lanes from `first` on
        ends = Signal()  # the segment ends in this beat
        packet_ends = Signal()
        beat_ends = Signal()
        step = Signal()
        m.d.comb += [
            left_now.eq(Mux(begun, left, segment.p.length)),
            here.eq(lanes - first),
            ends.eq(left_now <= here),
            packet_ends.eq(ends & segment.p.last),
            beat_ends.eq(packet_ends | ~ends | (left_now == here)),
            word.p.data.eq(self.packet.p.data),
            word.p.first.eq(first),
            word.p.count.eq(Mux(ends, left_now[: len(here)], here)),
            word.p.last.eq(ends),
            word.valid.eq(self.packet.valid & segment.valid),
            step.eq(word.valid & word.ready),
            self.packet.ready.eq(step & beat_ends),
            segment.ready.eq(step & ends),
        ]
        with m.If(step):
            m.d.sync += [
                begun.eq(~ends),
                left.eq(left_now - here),
                first.eq(Mux(beat_ends, 0, first + left_now)),
                Assert(~beat_ends | (self.packet.p.last == packet_ends),
                       Format("responder: packet and segments differ, {} bytes left", left_now)),
                Assert(beat_ends | ~self.packet.p.last | ~packet_ends, "responder: packet shorter than its segments"),
            ]
