"""Reads host memory for several clients over one AXI4 port."""

from dataclasses import dataclass

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.memory.axi import AxiReadSignature, Burst
from rnic.memory.burst import BurstCommand, BurstSplitter, max_block
from rnic.records import DmaCommand
from rnic.stream.align import RawWord, lane_bits, words_of
from rnic.stream.arbiter import StreamArbiter
from rnic.stream.buffer import StreamRegister
from rnic.stream.check import watch
from rnic.stream.fifo import StreamFifo

__all__ = ["DmaRead", "ReadClient"]


@dataclass(frozen=True, kw_only=True)
class ReadClient:
    """A client of DmaRead.

    Parameters: ``name`` of the client and of its port; ``buffer_beats``, bus words it may have under way or waiting, at
    least 2; ``commands``, accesses it may have under way (None: ``buffer_beats``, at most 256).
    """

    name: str
    buffer_beats: int
    commands: int | None = None

    def __post_init__(self):
        if self.buffer_beats < 2:
            raise ValueError(f"buffer_beats of {self.name} is {self.buffer_beats}, must be at least 2")
        if self.commands is not None and self.commands < 1:
            raise ValueError(f"commands of {self.name} is {self.commands}, must be at least 1")

    @property
    def depth(self) -> int:
        """Accesses under way."""
        return min(self.buffer_beats, 256) if self.commands is None else self.commands


class _ReadChannel(wiring.Component):
    """One client's half: bursts within its credit, response buffer, words back in order.

    Members: ``command``, ``word``, the client; ``burst``, offered only while the buffer has room for all its beats;
    ``beat``, a bus word for this client (without back-pressure: the room was reserved); ``busy``.
    """

    def __init__(self, width: int, client: ReadClient):
        self.width = width
        self.client = client
        # Half the buffer a burst at most, so that one can be under way while the other is drained.
        half = client.buffer_beats // 2
        self.block = min(max_block(width), (1 << (half.bit_length() - 1)) * (width // 8))
        super().__init__({
            "command": In(stream.Signature(DmaCommand())),
            "word": Out(stream.Signature(RawWord(width))),
            "burst": Out(stream.Signature(BurstCommand())),
            "beat": In(stream.Signature(data.StructLayout({"data": width, "err": 1}), always_ready=True)),
            "busy": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        bits = lane_bits(self.width)
        depth = self.client.buffer_beats
        lanes = self.width // 8
        # An access as its words need it: first lane, number of words less one, that there is one only, lane of the last byte.
        access = data.StructLayout({"first": bits, "words": 17 - bits, "single": 1, "end": bits})
        end_byte = Signal(17)
        m.submodules.splitter = splitter = BurstSplitter(self.width, self.block)
        m.submodules.accesses = accesses = StreamFifo(access, self.client.depth)
        m.submodules.buffer = buffer = StreamFifo(self.beat.payload.shape(), depth)

        # A command goes to the splitter and to the list of accesses together. It waits for an empty splitter: `head` takes a
        # burst every second cycle anyway, and so `ready` comes from registers.
        m.d.comb += [
            self.command.ready.eq(~splitter.busy & accesses.i.ready),
            splitter.i.valid.eq(self.command.valid & self.command.ready),
            splitter.i.payload.eq(self.command.payload),
            accesses.i.valid.eq(splitter.i.valid),
            accesses.i.payload.first.eq(self.command.payload.address[:bits]),
            end_byte.eq(self.command.payload.address[:bits] + self.command.payload.length - 1),
            accesses.i.payload.words.eq(end_byte >> bits),
            accesses.i.payload.end.eq(end_byte[:bits]),
            accesses.i.payload.single.eq(words_of(lanes, self.command.payload.address[:bits], self.command.payload.length)[0]),
            self.busy.eq(accesses.level != 0),
        ]

        # Credit: a burst is offered only when every beat of it has a place, so R never waits. Its places are taken with the
        # first cycle it is offered; `head` is filled after that at the earliest, so `room` is up to date when it is compared.
        # A place given back counts a cycle later.
        room = Signal(range(depth + 1), init=depth)
        head = Signal(BurstCommand())
        head_valid = Signal()
        offered = Signal()  # head_valid, and the burst has its places
        taking = Signal()  # first cycle of `offered`
        fits = Signal()
        leaves = Signal()
        returned = Signal()
        m.d.comb += [
            splitter.o.ready.eq(~head_valid),
            self.burst.valid.eq(offered),
            self.burst.payload.eq(head),
            leaves.eq(offered & self.burst.ready),
            # The largest burst is a power of two of beats: an OR says at once that any burst fits.
            fits.eq(Mux(head_valid, room > head.len,
                        splitter.o.valid & (room >> (self.block // lanes - 1).bit_length() != 0))),
            buffer.i.valid.eq(self.beat.valid),
            buffer.i.payload.eq(self.beat.payload),
        ]
        with m.If(~head_valid):
            m.d.sync += [head.eq(splitter.o.payload), head_valid.eq(splitter.o.valid)]
        with m.Elif(leaves):
            m.d.sync += head_valid.eq(0)
        with m.If(offered):
            m.d.sync += offered.eq(~self.burst.ready)
        with m.Else():
            m.d.sync += offered.eq(fits)
        m.d.sync += [
            taking.eq(~offered & fits),
            returned.eq(buffer.o.valid & buffer.o.ready),
            room.eq(room + returned - Mux(taking, head.len + 1, 0)),
        ]

        self._words(m, accesses.o, buffer.o)
        watch(m, "command", self.command)
        watch(m, "burst", self.burst)
        watch(m, "word", self.word)
        name = self.client.name
        m.d.sync += [
            Assert(~buffer.i.valid | buffer.i.ready, f"DmaRead {name}: response buffer overflows"),
            Assert(room + buffer.level <= depth,
                   Format("DmaRead " + name + ": room {} and {} words held", room, buffer.level)),
        ]
        return m

    def _words(self, m, access, beat):
        """Says of each bus word which bytes of it belong to the access."""
        lanes = self.width // 8
        m.submodules.out = out = StreamRegister(RawWord(self.width))
        wiring.connect(m, out.o, wiring.flipped(self.word))

        inside = Signal()
        words = Signal.like(access.payload.words)  # still to come, less one, while `inside`
        last = Signal()  # inside, and words == 0
        failed = Signal()
        now_first = Signal(lane_bits(self.width))
        now_words = Signal.like(access.payload.words)
        now_end = Signal(lane_bits(self.width))
        final = Signal()
        m.d.comb += [
            now_first.eq(Mux(inside, 0, access.payload.first)),
            now_words.eq(Mux(inside, words, access.payload.words)),
            final.eq(Mux(inside, last, access.payload.single)),
            now_end.eq(Mux(final, access.payload.end, lanes - 1)),
            out.i.valid.eq(access.valid & beat.valid),
            beat.ready.eq(access.valid & out.i.ready),
            access.ready.eq(beat.valid & out.i.ready & final),
            out.i.payload.data.eq(beat.payload.data),
            out.i.payload.first.eq(now_first),
            out.i.payload.count.eq(now_end - now_first + 1),
            out.i.payload.last.eq(final),
            out.i.payload.err.eq(final & (failed | beat.payload.err)),
        ]
        with m.If(out.i.valid & out.i.ready):
            m.d.sync += [
                inside.eq(~final),
                Assert(final == (now_words == 0), "DmaRead: an access's count and its end differ"),
                words.eq(now_words - 1),
                last.eq(now_words == 1),
                failed.eq(~final & (failed | beat.payload.err)),
            ]


class DmaRead(wiring.Component):
    """DMA read engine: each client gives accesses and gets their bytes as raw bus words, in order.

    Client number i uses AXI ID i. Bursts are INCR of full-width beats; an access is cut at 4 KiB, at 256 beats and at
    half the client's buffer. A burst is asked for only when the client's buffer has room for all of it, so RREADY is
    constantly 1, a slow client holds nobody, and a client without room does not take part in the round robin between
    clients' bursts. Several bursts of a client are under way at once; one ID keeps them in order.

    A word carries ``first`` and ``count`` as ``stream.align.Packer`` takes them; ``last`` ends the access. A bus error
    sets ``err`` on that access's last word; all its words come nevertheless, with whatever data the bus gave.

    Timing: command to ARVALID 3 cycles; one AR per cycle, of one client one per 2 cycles; R beat to word 2 cycles; one
    word per cycle.

    Parameters: ``width`` of the bus in bits; ``clients``, list of ReadClient. Raises ValueError.
    Members: for each client a port of its name with ``command`` (stream of DmaCommand, 1..65535 bytes, any alignment)
    and ``word`` (stream of RawWord), seen from the client; ``axi``, AxiReadSignature; ``busy``, an access is under
    way.
    """

    def __init__(self, width: int, clients: list[ReadClient]):
        names = [client.name for client in clients]
        if not clients or len(set(names)) != len(names):
            raise ValueError(f"clients are {names}, must be one or more with different names")
        if "axi" in names or "busy" in names:
            raise ValueError(f"clients are {names}, must not be named axi or busy")
        self.width = width
        self.clients = list(clients)
        self.id_width = max(1, (len(clients) - 1).bit_length())
        port = wiring.Signature({
            "command": Out(stream.Signature(DmaCommand())),
            "word": In(stream.Signature(RawWord(width))),
        })
        super().__init__({name: In(port) for name in names} | {
            "axi": Out(AxiReadSignature(width, self.id_width)),
            "busy": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        m.submodules.arbiter = arbiter = StreamArbiter(BurstCommand(), len(self.clients))
        axi = self.axi
        burst = arbiter.o.payload
        m.d.comb += [
            axi.arid.eq(arbiter.source),
            axi.araddr.eq(burst.address),
            axi.arlen.eq(burst.len),
            axi.arsize.eq(lane_bits(self.width)),
            axi.arburst.eq(Burst.INCR),
            axi.arvalid.eq(arbiter.o.valid),
            arbiter.o.ready.eq(axi.arready),
            axi.rready.eq(1),
        ]
        busy = []
        for number, client in enumerate(self.clients):
            m.submodules[client.name] = channel = _ReadChannel(self.width, client)
            port = getattr(self, client.name)
            wiring.connect(m, wiring.flipped(port.command), channel.command)
            wiring.connect(m, channel.word, wiring.flipped(port.word))
            wiring.connect(m, channel.burst, arbiter.i[number])
            m.d.comb += [
                channel.beat.valid.eq(axi.rvalid & (axi.rid == number)),
                channel.beat.payload.data.eq(axi.rdata),
                channel.beat.payload.err.eq(axi.rresp[1]),
            ]
            busy.append(channel.busy)
        m.d.comb += self.busy.eq(Cat(*busy).any())
        m.d.sync += Assert(~axi.rvalid | (axi.rid < len(self.clients)), Format("DmaRead: R with ID {}", axi.rid))
        return m
