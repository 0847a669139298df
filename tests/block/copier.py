"""The way of every byte from host memory to host memory, without what decides: `DmaRead`, `Packer`, `Move` (`Packer` again) and
`DmaWrite` (`Scatter`) in a row, behind the ports of the stand-in NIC.

One write to the GO register copies a packet of ``length`` bytes for every pair of offsets below the bus width: pair i,
source offset i mod W, target offset i / W, has a slot of 256 bytes in both regions. ``split`` > 0 makes two segments of it, as
a page end would.

Frames on ``net_rx`` go through the parser; their payloads, aligned, come out on ``net_tx``, with ``tuser`` where it refuses them.
"""

from amaranth import *
from amaranth.lib import wiring

from rnic.config import CONFIGS, Params
from rnic.memory.dma_read import DmaRead, ReadClient
from rnic.memory.dma_write import DmaWrite
from rnic.responder.move import Move
from rnic.responder.records import Segment
from rnic.rx.parse import Parser
from rnic.stream.align import Packer
from rnic.stream.fifo import StreamFifo
from rnic.verilog import to_verilog
from tests.system.standin import PROBE_SLOTS, PROBE_WIDTH, REG_BEATS, REG_IRQ, REG_SOURCE, REG_TARGET, StandIn

__all__ = ["REG_SPLIT", "SLOT", "TARGET_OFFSET", "Copier", "copier_model"]

SLOT = 256
TARGET_OFFSET = 64  # of offset 0 in the target's slot: guard in front
REG_SPLIT = 0x2C


class Copier(StandIn):
    """See the module. ``width`` is the bus width in bits; REG_BEATS is the length in bytes."""

    def _copier(self, m: Module, registers: Array, go: Signal) -> None:
        p = Params(CONFIGS["tiny"].replace(data_width=self.width))
        lanes, bits = p.lanes, p.lane_bits
        m.submodules.read = read = DmaRead(self.width, [ReadClient(name="source", buffer_beats=64, commands=8)])
        m.submodules.write = write = DmaWrite(self.width, ["place"], outstanding=Move.writes(p))
        m.submodules.packer = packer = Packer(self.width)
        m.submodules.move = move = Move(p)
        m.submodules.segments = segments = StreamFifo(Segment(), 4)
        wiring.connect(m, read.source.word, packer.i)
        wiring.connect(m, packer.o, move.packet)
        wiring.connect(m, segments.o, move.segment)
        wiring.connect(m, move.write, write.place)
        for part in (read.axi, write.axi):
            for name, member in part.signature.members.items():
                outer, inner = getattr(self, f"m_axi_{name}"), getattr(part, name)
                m.d.comb += outer.eq(inner) if member.flow == wiring.Out else inner.eq(outer)

        cases = lanes * lanes
        length, split = registers[REG_BEATS // 4][:13], registers[REG_SPLIT // 4][:13]
        asked, placed, done = (Signal(range(cases + 1), init=cases, name=name) for name in ("asked", "placed", "done"))
        rest = Signal()  # the second segment is due
        source, target = (Cat(registers[r // 4], registers[r // 4 + 1]) for r in (REG_SOURCE, REG_TARGET))
        command, segment = read.source.command, segments.i
        at = Signal(64)
        last = Signal()
        m.d.comb += [
            command.valid.eq(asked != cases),
            command.payload.address.eq(source + SLOT * asked + asked[:bits]),
            command.payload.length.eq(length),
            at.eq(target + SLOT * placed + TARGET_OFFSET + placed[bits : 2 * bits]),
            last.eq(rest | (split == 0)),
            segment.valid.eq(placed != cases),
            segment.payload.address.eq(Mux(rest, at + split, at)),
            segment.payload.length.eq(Mux(rest, length - split, Mux(split == 0, length, split))),
            segment.payload.last.eq(last),
            move.accepted.ready.eq(1),
            move.done.ready.eq(1),
        ]
        with m.If(command.valid & command.ready):
            m.d.sync += asked.eq(asked + 1)
        with m.If(segment.valid & segment.ready):
            m.d.sync += [rest.eq(~last), placed.eq(placed + last)]
        second = Signal()
        with m.If(move.done.valid):
            m.d.sync += second.eq(~second & (split != 0))
            with m.If(second | (split == 0)):
                m.d.sync += done.eq(done + 1)
                with m.If(done == cases - 1):
                    m.d.sync += registers[REG_IRQ // 4].eq(1)
        m.d.comb += self.probe[0].eq(go)
        with m.If(go):
            m.d.sync += [asked.eq(0), placed.eq(0), done.eq(0)]

    def _forward(self, m: Module, name: str, source: str, target: str, stop: Value) -> None:
        if name != "net":
            return super()._forward(m, name, source, target, stop)
        m.submodules.parser = parser = Parser(self.width)
        m.d.comb += [
            parser.i.payload.data.eq(self.net_rx_tdata),
            parser.i.payload.keep.eq(self.net_rx_tkeep),
            parser.i.payload.last.eq(self.net_rx_tlast),
            parser.i.payload.err.eq(self.net_rx_tuser),
            parser.i.valid.eq(self.net_rx_tvalid),
            self.net_rx_tready.eq(parser.i.ready),
            self.net_tx_tdata.eq(parser.payload.payload.data),
            self.net_tx_tkeep.eq(parser.payload.payload.keep),
            self.net_tx_tlast.eq(parser.payload.payload.last),
            self.net_tx_tuser.eq(parser.payload.payload.err),
            self.net_tx_tvalid.eq(parser.payload.valid),
            parser.payload.ready.eq(self.net_tx_tready),
            parser.hdr.ready.eq(1),
            parser.eth.ready.eq(1),
        ]


def copier_model(width: int) -> tuple[str, dict]:
    """(Verilog, manifest) as `rnic_sim.build.build_model` takes them."""
    facts = {"data_width": width, "probe_slots": PROBE_SLOTS, "probe_width": PROBE_WIDTH, "clock_hz": 250_000_000}
    return to_verilog(Copier(width)), facts
