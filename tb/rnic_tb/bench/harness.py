"""Components that make blocks drivable from outside: hardware for benches only."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.abi import ADDRESS_CTX, GID_ENTRY
from rnic.config import Params
from rnic.host.csr import Csr
from rnic.memory.axi import AxiChecker, AxiSignature, connect_host
from rnic.memory.dma_read import DmaRead, ReadClient
from rnic.memory.dma_write import DmaWrite
from rnic.records import DmaCommand
from rnic.rx.parse import Parser
from rnic.stream.align import Packer
from rnic.stream.beat import Beat
from rnic.stream.fifo import StreamFifo
from rnic.tx.build import Builder

__all__ = ["CopyCommand", "CopyEngine", "HostHarness", "PacketHarness"]


class CopyCommand(data.StructLayout):
    """Copy ``length`` bytes (1..`CopyEngine.MAX_BYTES`) from ``source`` to ``target``, physical addresses."""

    def __init__(self):
        super().__init__({"source": 64, "target": 64, "length": 16})


class _CopyChannel(wiring.Component):
    """One copy after the other is read as a whole, then written. Members: ``command``; ``done``: one item a copy, in order,
    bit 0 the read failed, bit 1 the write; ``read``, ``write``: clients of the DMA engines."""

    def __init__(self, width: int, max_bytes: int, read, write):
        self.width, self.max_bytes = width, max_bytes
        super().__init__({
            "command": In(stream.Signature(CopyCommand())), "done": Out(stream.Signature(2)),
            "read": Out(read), "write": Out(write),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        m.submodules.packer = packer = Packer(self.width)
        # an access that ends in another lane than it begins has one beat more
        m.submodules.store = store = StreamFifo(Beat(self.width), 2 * self.max_bytes * 8 // self.width)
        m.submodules.targets = targets = StreamFifo(DmaCommand(), 4)
        m.submodules.read_errors = read_errors = StreamFifo(1, 32)
        command, wanted = self.command, self.command.payload
        whole = Signal(range(2 * self.max_bytes + 1))  # packets that are in the store to their last beat
        enters, leaves = Signal(), Signal()

        # The command goes to the read engine and, as the write that follows, to the list of targets.
        m.d.comb += [
            command.ready.eq(self.read.command.ready & targets.i.ready),
            self.read.command.valid.eq(command.valid & targets.i.ready),
            self.read.command.payload.address.eq(wanted.source),
            self.read.command.payload.length.eq(wanted.length),
            targets.i.valid.eq(command.valid & self.read.command.ready),
            targets.i.payload.address.eq(wanted.target),
            targets.i.payload.length.eq(wanted.length),
        ]
        wiring.connect(m, wiring.flipped(self.read.word), packer.i)
        wiring.connect(m, targets.o, wiring.flipped(self.write.command))

        # A write begins when its data is there as a whole: DmaWrite asks for that.
        beat_in, beat_out = packer.o, store.o
        m.d.comb += [
            store.i.valid.eq(beat_in.valid & (~beat_in.payload.last | read_errors.i.ready)),
            store.i.payload.eq(beat_in.payload),
            beat_in.ready.eq(store.i.ready & (~beat_in.payload.last | read_errors.i.ready)),
            enters.eq(beat_in.valid & beat_in.ready & beat_in.payload.last),
            read_errors.i.valid.eq(enters),
            read_errors.i.payload.eq(beat_in.payload.err),
            self.write.data.valid.eq(beat_out.valid & (whole != 0)),
            self.write.data.payload.eq(beat_out.payload),
            beat_out.ready.eq(self.write.data.ready & (whole != 0)),
            leaves.eq(self.write.data.valid & self.write.data.ready & beat_out.payload.last),
        ]
        m.d.sync += whole.eq(whole + enters - leaves)

        m.d.comb += [
            self.write.accepted.ready.eq(1),
            self.done.valid.eq(self.write.done.valid & read_errors.o.valid),
            self.done.payload.eq(Cat(read_errors.o.payload, self.write.done.payload)),
            self.write.done.ready.eq(self.done.ready & read_errors.o.valid),
            read_errors.o.ready.eq(self.done.ready & self.write.done.valid),
        ]
        m.d.sync += Assert(~command.valid | ((wanted.length != 0) & (wanted.length <= self.max_bytes)),
                           Format("copy of {} bytes", wanted.length))
        return m


class CopyEngine(wiring.Component):
    """Copies host memory with `DmaRead` and `DmaWrite` behind one AXI4 port, ``channels`` copies of different sizes at once.

    Members: ``command_<n>``, stream of `CopyCommand`; ``done_<n>``, stream of 2 bits; ``m_axi``.
    """

    MAX_BYTES = 9000

    def __init__(self, width: int, channels: int = 2):
        self.width, self.channels = width, channels
        names = [f"channel_{n}" for n in range(channels)]
        # Buffers of different sizes: a large one, and one so small that its bursts are a few beats.
        self.reader = DmaRead(width, [ReadClient(name=name, buffer_beats=(64, 6)[n % 2]) for n, name in enumerate(names)])
        self.writer = DmaWrite(width, names, outstanding=4)
        self.id_width = max(self.reader.id_width, self.writer.id_width)
        super().__init__(
            {f"command_{n}": In(stream.Signature(CopyCommand())) for n in range(channels)}
            | {f"done_{n}": Out(stream.Signature(2)) for n in range(channels)}
            | {"m_axi": Out(AxiSignature(width, self.id_width))}
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.reader = reader = self.reader
        m.submodules.writer = writer = self.writer
        m.submodules.checker = checker = AxiChecker(self.width, self.id_width)
        for n in range(self.channels):
            read, write = getattr(reader, f"channel_{n}"), getattr(writer, f"channel_{n}")
            channel = _CopyChannel(self.width, self.MAX_BYTES, read.signature.flip(), write.signature.flip())
            m.submodules[f"channel_{n}"] = channel
            wiring.connect(m, wiring.flipped(getattr(self, f"command_{n}")), channel.command)
            wiring.connect(m, channel.done, wiring.flipped(getattr(self, f"done_{n}")))
            wiring.connect(m, channel.read, read)
            wiring.connect(m, channel.write, write)
        connect_host(m, self.m_axi, reader.axi, writer.axi)
        checker.watch(m, self.m_axi)
        return m


class HostHarness(wiring.Component):
    """The host's side of the RNIC in one model: a `CopyEngine` (``copy``), and a `Csr` (``csr``) whose mailbox and counters
    come from the bench."""

    def __init__(self, p: Params):
        self.p = p
        self.copy_engine = CopyEngine(p.data_width)
        self.registers = Csr(p)
        super().__init__({"copy": Out(self.copy_engine.signature), "csr": Out(self.registers.signature)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.copy_engine = self.copy_engine
        m.submodules.registers = self.registers
        wiring.connect(m, self.copy_engine, wiring.flipped(self.copy))
        wiring.connect(m, self.registers, wiring.flipped(self.csr))
        return m


class PacketHarness(wiring.Component):
    """The frame's way in and out in one model: a `Parser` (``parse``) and a `Builder` (``build``) with its tables.

    ``context_*`` writes the address context of a QP; ``gid_<n>``, ``pkey_<n>`` are the port's tables.
    """

    def __init__(self, p: Params):
        self.p = p
        self.parser = Parser(p.data_width)
        self.builder = builder = Builder(p)
        super().__init__({
            "parse": Out(self.parser.signature),
            "build_header": In(builder.header.signature.flip()),
            "build_payload": In(builder.payload.signature.flip()),
            "build_frame": Out(builder.frame.signature),
            "context_write": In(1), "context_qpn": In(p.qpn_bits), "context_value": In(ADDRESS_CTX.layout),
            **{f"gid_{n}": In(GID_ENTRY.layout) for n in range(p.num_gids)},
            **{f"pkey_{n}": In(16) for n in range(p.num_pkeys)},
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        p, builder = self.p, self.builder
        m.submodules.parser = self.parser
        m.submodules.builder = builder
        m.submodules.contexts = contexts = memory.Memory(shape=ADDRESS_CTX.layout, depth=p.num_qps, init=[])
        writer, reader = contexts.write_port(), contexts.read_port()
        wiring.connect(m, self.parser, wiring.flipped(self.parse))
        wiring.connect(m, wiring.flipped(self.build_header), builder.header)
        wiring.connect(m, wiring.flipped(self.build_payload), builder.payload)
        wiring.connect(m, builder.frame, wiring.flipped(self.build_frame))
        m.d.comb += [
            writer.en.eq(self.context_write), writer.addr.eq(self.context_qpn), writer.data.eq(self.context_value),
            reader.addr.eq(builder.addr_index),
            builder.gid.eq(Array(getattr(self, f"gid_{n}").as_value() for n in range(p.num_gids))[builder.gid_index]),
            builder.pkey.eq(Array(getattr(self, f"pkey_{n}") for n in range(p.num_pkeys))[builder.pkey_index]),
        ]  # fmt: skip
        m.d.sync += builder.addr.eq(reader.data)
        return m
