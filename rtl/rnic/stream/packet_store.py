"""Random-access packet memory of linked cells."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.clash import NO_CLASH
from rnic.stream.align import words_of
from rnic.stream.arbiter import PriorityArbiter
from rnic.stream.beat import Beat, keep_of_count
from rnic.stream.buffer import StreamRegister
from rnic.stream.check import watch
from rnic.stream.fifo import StreamFifo

__all__ = ["PacketHandle", "PacketStore", "ReadCommand"]

LENGTH_BITS = 16


class PacketHandle(data.StructLayout):
    """A packet in the store: first cell and bytes. ``head`` is meaningless for ``length`` 0 (no cell is used) and for
    ``dropped`` (there was no room; nothing is stored, ``length`` is 0).

    Parameters: ``cells`` of the store.
    """

    def __init__(self, cells: int):
        super().__init__({"head": range(cells), "length": LENGTH_BITS, "dropped": 1})


class ReadCommand(data.StructLayout):
    """Read ``length`` bytes from the packet at ``head``; its cells are freed as they are read unless ``keep``.

    ``length`` may be less than the stored length by so much that the number of cells stays the same.

    Parameters: ``cells`` of the store.
    """

    def __init__(self, cells: int):
        super().__init__({"head": range(cells), "length": LENGTH_BITS, "keep": 1})


class PacketStore(wiring.Component):
    """Keeps whole packets until somebody reads or frees them, in any order.

    A packet is a chain of cells: a memory links each cell to the next one, another marks the last of a chain. Free
    cells wait in a FIFO; cells never used since reset come from a counter.

    Write side (``i``): a packet whose last beat has ``err`` is forgotten: its cells are freed, no handle comes. All
    others get a handle each, in order of arrival. Without ``stall`` a packet that finds no free cell is dropped as a whole,
    its cells are freed, its handle says so; the input never waits for room. It waits only for the taker of handles,
    ``cells`` of them late, and for the walker that frees the chains of forgotten and dropped packets, four of them late.
    With ``stall`` the input waits for a free cell and nothing is dropped.

    Read side: ``read`` gives a packet as beats on ``o``; unused lanes of its last beat are zero. ``free`` frees the
    chain of a packet with at least one byte without reading it.

    Timing: one beat per cycle in and out at the same time, no cycle between packets when a cell has three words or
    more; last beat in to handle 2 cycles; read command to first beat 2 cycles. The walker takes 2 cycles a cell, so
    that a one-beat packet every 2 cycles may be bad forever.

    Parameters: ``width`` of the bus in bits; ``cells`` >= 2; ``cell_bytes``, a power of two of at least one word; ``stall``.
    Raises ValueError.
    Members: ``i``, ``o`` streams of ``Beat``; ``handle``, stream of ``PacketHandle``; ``read``, stream of
    ``ReadCommand``; ``free``, stream of cell numbers; ``free_cells``, cells that hold nothing (one cycle late);
    ``aborted``, ``dropped``, pulses for counters.
    """

    def __init__(self, width: int, cells: int, cell_bytes: int = 256, *, stall: bool = False):
        lanes = width // 8
        if cells < 2:
            raise ValueError(f"cells is {cells}, must be at least 2")
        if cell_bytes < lanes or cell_bytes & (cell_bytes - 1):
            raise ValueError(f"cell_bytes is {cell_bytes}, must be a power of two of at least {lanes}")
        self.width = width
        self.cells = cells
        self.cell_bytes = cell_bytes
        self.stall = stall
        super().__init__({
            "i": In(stream.Signature(Beat(width))),
            "handle": Out(stream.Signature(PacketHandle(cells))),
            "read": In(stream.Signature(ReadCommand(cells))),
            "o": Out(stream.Signature(Beat(width))),
            "free": In(stream.Signature(range(cells))),
            "free_cells": Out(range(cells + 1), init=cells),
            "aborted": Out(1),
            "dropped": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        words = self.cell_bytes // (self.width // 8)
        store = m.submodules.store = memory.Memory(shape=self.width, depth=self.cells * words, init=[], attrs=NO_CLASH)
        links = m.submodules.links = memory.Memory(shape=range(self.cells), depth=self.cells, init=[])
        tails = m.submodules.tails = memory.Memory(shape=1, depth=self.cells, init=[])
        m.submodules.free_list = free_list = StreamFifo(range(self.cells), self.cells)
        m.submodules.walks = walks = PriorityArbiter(range(self.cells), 2, skid=True)  # 0: the writer's, 1: `free`
        m.submodules.walk_queue = walk_queue = StreamFifo(range(self.cells), 4)
        wiring.connect(m, walk_queue.o, walks.i[0])
        wiring.connect(m, wiring.flipped(self.free), walks.i[1])

        offer = self._allocator(m, free_list)
        taken = Signal()
        m.d.comb += taken.eq(offer.valid & offer.ready)
        self._writer(m, offer, store.write_port(), links.write_port(), tails.write_port(), walk_queue.i)
        reader_frees = self._reader(m, store.read_port(), links.read_port(), tails.read_port())
        walker_frees = self._walker(m, walks.o, links.read_port(), tails.read_port())

        # Both sources free at most one cell a cycle; the reader goes first. The list has room for all cells.
        reader_freed = Signal()
        reader_cell = Signal(range(self.cells))
        taken_before = Signal()
        m.d.comb += [
            walker_frees.ready.eq(~reader_freed),
            free_list.i.valid.eq(reader_freed | walker_frees.valid),
            free_list.i.payload.eq(Mux(reader_freed, reader_cell, walker_frees.payload)),
        ]
        m.d.sync += [
            reader_freed.eq(reader_frees.valid),
            reader_cell.eq(reader_frees.payload),
            taken_before.eq(taken),
            self.free_cells.eq(self.free_cells + free_list.i.valid - taken_before),
        ]

        watch(m, "i", self.i)
        watch(m, "handle", self.handle)
        watch(m, "read", self.read)
        watch(m, "o", self.o)
        watch(m, "free", self.free)
        self._check_ownership(m, offer, taken, free_list)
        return m

    def _allocator(self, m, free_list):
        """The next free cell as a stream: out of the list, or else one not used since reset."""
        offer = stream.Signature(range(self.cells)).create()
        fresh = Signal(range(self.cells))  # cells below it have been used since reset
        some_fresh = Signal(init=1)  # and not all
        m.d.comb += [
            offer.valid.eq(free_list.o.valid | some_fresh),
            offer.payload.eq(Mux(free_list.o.valid, free_list.o.payload, fresh)),
            free_list.o.ready.eq(offer.ready),
        ]
        with m.If(offer.ready & offer.valid & ~free_list.o.valid):
            m.d.sync += [fresh.eq(fresh + 1), some_fresh.eq(fresh != self.cells - 1)]
        return offer

    def _writer(self, m, offer, data_port, link_port, tail_port, walk):
        words = self.cell_bytes // (self.width // 8)
        lanes = self.width // 8
        beat = self.i.payload
        m.submodules.handles = handles = StreamFifo(PacketHandle(self.cells), self.cells)
        m.submodules.handle_out = handle_out = StreamRegister(PacketHandle(self.cells))
        wiring.connect(m, handle_out.o, handles.i)
        wiring.connect(m, handles.o, wiring.flipped(self.handle))

        inside = Signal()  # a beat of the present packet has been taken
        dropping = Signal()  # the present packet found no cell
        head = Signal(range(self.cells))
        cell = Signal(range(self.cells))  # of the beat before
        offset = Signal(range(words))  # word within the cell
        at_start = Signal(init=1)  # offset == 0: a byte here asks for a new cell
        length = Signal(LENGTH_BITS)  # bytes of the full beats before

        has_bytes = Signal()
        wants_cell = Signal()
        no_cell = Signal()
        lost = Signal()  # this packet is not stored
        write_cell = Signal(range(self.cells))
        first_cell = Signal(range(self.cells))
        chain_exists = Signal()  # cells have been taken for this packet before this beat
        forget = Signal()  # the chain goes to the walker
        step = Signal()
        may_step = Signal()
        m.d.comb += [
            has_bytes.eq(beat.keep[0]),
            wants_cell.eq(has_bytes & at_start & ~dropping),
            no_cell.eq(wants_cell & ~offer.valid),
            lost.eq(dropping | no_cell),
            write_cell.eq(Mux(wants_cell, offer.payload, cell)),
            first_cell.eq(Mux(inside, head, offer.payload)),
            chain_exists.eq(inside & ~dropping),
            # Both takers may be needed by any beat: no beat moves without room in both.
            may_step.eq(handle_out.i.ready & walk.ready & (offer.valid | ~at_start if self.stall else 1)),
            self.i.ready.eq(may_step),
            step.eq(self.i.valid & may_step),
            offer.ready.eq(step & wants_cell),
            forget.eq((no_cell & chain_exists) | (beat.last & beat.err & ~lost & (has_bytes | chain_exists))),
            walk.valid.eq(step & forget),
            walk.payload.eq(first_cell),
            handle_out.i.valid.eq(step & beat.last & ~beat.err),
            handle_out.i.payload.head.eq(first_cell),
            handle_out.i.payload.dropped.eq(lost),
            self.dropped.eq(step & beat.last & lost),
            self.aborted.eq(step & beat.last & beat.err & ~lost),
        ]
        # The keep mask of the last beat is contiguous: its byte count is the number of its ones.
        count = Signal(range(lanes + 1))
        for ones in range(1, lanes + 1):
            with m.If(beat.keep[ones - 1]):
                m.d.comb += count.eq(ones)
        m.d.comb += handle_out.i.payload.length.eq(Mux(lost, 0, length + count))

        with m.If(step):
            m.d.sync += [
                inside.eq(~beat.last),
                dropping.eq(~beat.last & lost),
                length.eq(Mux(beat.last, 0, length + lanes)),
                offset.eq(Mux(beat.last, 0, offset + 1)),
                at_start.eq(beat.last | (offset == words - 1)),
                cell.eq(write_cell),
            ]
            with m.If(~inside):
                m.d.sync += head.eq(offer.payload)

        # The tail mark follows the packet: set for the cell of the last beat, and for the last one there is when no
        # further cell is found.
        m.d.comb += [
            data_port.addr.eq(write_cell * words + offset),
            data_port.data.eq(beat.data),
            data_port.en.eq(step & has_bytes & ~lost),
            link_port.addr.eq(cell),
            link_port.data.eq(offer.payload),
            link_port.en.eq(offer.valid & offer.ready & inside),
            tail_port.addr.eq(Mux(no_cell, cell, write_cell)),
            tail_port.data.eq(beat.last | no_cell),
            tail_port.en.eq(step & has_bytes & (~lost | (no_cell & chain_exists))),
        ]
        m.d.sync += Assert(~step | beat.last | (length <= (1 << LENGTH_BITS) - 2 * lanes),
                           "PacketStore: packet above 65535 bytes")

    def _reader(self, m, data_port, link_port, tail_port):
        """Reads packets; returns the stream (without back-pressure) of the cells it frees."""
        words = self.cell_bytes // (self.width // 8)
        lanes = self.width // 8
        bits = (lanes - 1).bit_length()
        command = self.read.payload
        result = data.StructLayout({"keep": lanes, "last": 1})

        # Address stage: a command is taken with its first word. `cell`, `offset` and so on belong to the words behind it.
        inside = Signal()
        cell = Signal(range(self.cells))
        offset = Signal(range(words))
        starts, ends = Signal(), Signal()  # offset is 0, is words - 1
        beats = Signal(LENGTH_BITS - bits)  # words not yet addressed, less one
        last = Signal()  # beats == 0
        keeps = Signal()  # the command's `keep`
        tail = Signal(bits)  # last lane of the packet's last word
        link_wait = Signal()  # the link memory is being read for the cell entered one cycle ago
        link_valid = Signal()
        link = Signal(range(self.cells))
        now_cell = Signal(range(self.cells))
        now_offset = Signal(range(words))
        new_cell = Signal()
        now_tail = Signal(bits)
        empty = Signal()
        final = Signal()
        cell_end = Signal()
        step = Signal()
        single, double = words_of(lanes, Const(0, bits), command.length)
        m.d.comb += [
            empty.eq(~inside & (command.length == 0)),
            now_tail.eq(Mux(inside, tail, command.length[:bits] - 1)),
            new_cell.eq(~inside | starts),
            now_cell.eq(Mux(inside, Mux(starts, link, cell), command.head)),
            now_offset.eq(Mux(inside, offset, 0)),
            final.eq(Mux(inside, last, single)),
            cell_end.eq(final | Mux(inside, ends, words == 1)),
        ]
        latched = Signal()  # the data memory's output holds the word of `held`
        held = Signal(result)
        out_free = Signal()
        may_step = Signal()
        m.d.comb += [
            may_step.eq((~inside | ~starts | link_valid) & (~latched | out_free)),
            step.eq(may_step & (inside | self.read.valid)),
            self.read.ready.eq(may_step & ~inside),
            data_port.addr.eq(now_cell * words + now_offset),
            data_port.en.eq(step),
            link_port.addr.eq(now_cell),
            link_port.en.eq(step & new_cell),
            tail_port.addr.eq(now_cell),
            tail_port.en.eq(step & new_cell),
        ]
        with m.If(step):
            m.d.sync += [
                inside.eq(~final),
                cell.eq(now_cell),
                offset.eq(now_offset + 1),
                starts.eq(Mux(inside, ends, words == 1)),
                ends.eq(Mux(inside, offset == max(0, words - 2), words <= 2)),
                beats.eq(Mux(inside, beats - 1, (command.length - (lanes + 1)) >> bits)),
                last.eq(Mux(inside, beats == 1, double)),
                tail.eq(now_tail),
                held.keep.eq(keep_of_count(lanes, lanes)),
                held.last.eq(final),
            ]
            with m.If(~inside):
                m.d.sync += keeps.eq(command.keep)
            with m.If(final):
                last_keep = Signal(lanes)
                for lane in range(lanes):
                    m.d.comb += last_keep[lane].eq(~empty & (now_tail >= lane))
                m.d.sync += held.keep.eq(last_keep)

        # The link of a cell is fetched when the cell is entered, so it is there when the cell ends.
        m.d.sync += link_wait.eq(step & new_cell & ~final)
        with m.If(step & new_cell):
            m.d.sync += link_valid.eq(0)
        with m.Elif(link_wait):
            m.d.sync += [link.eq(link_port.data), link_valid.eq(1)]

        # Memory output to output register.
        m.d.comb += out_free.eq(~self.o.valid | self.o.ready)
        with m.If(step):
            m.d.sync += latched.eq(1)
        with m.Elif(out_free):
            m.d.sync += latched.eq(0)
        with m.If(out_free):
            m.d.sync += self.o.valid.eq(latched)
            with m.If(latched):
                m.d.sync += [
                    self.o.payload.data.eq(data_port.data & Cat(bit.replicate(8) for bit in held.keep)),
                    self.o.payload.keep.eq(held.keep),
                    self.o.payload.last.eq(held.last),
                ]

        frees = stream.Signature(range(self.cells), always_ready=True).create()
        m.d.comb += [
            frees.valid.eq(step & cell_end & ~Mux(inside, keeps, command.keep) & ~empty),
            frees.payload.eq(now_cell),
        ]
        tail_wait = Signal()
        tail_expected = Signal()
        m.d.sync += [
            tail_wait.eq(step & new_cell & ~empty),
            # Whether the packet ends in the cell just entered.
            tail_expected.eq(Mux(inside, beats, (command.length - 1) >> bits) < words),
        ]
        with m.If(tail_wait):
            m.d.sync += Assert(tail_port.data == tail_expected, "PacketStore: read length does not fit the packet")
        return frees

    def _walker(self, m, jobs, link_port, tail_port):
        """Frees the chain of each job; returns the stream of freed cells."""
        frees = stream.Signature(range(self.cells)).create()
        cell = Signal(range(self.cells))
        m.d.comb += [
            link_port.addr.eq(cell),
            tail_port.addr.eq(cell),
            link_port.en.eq(frees.valid),
            tail_port.en.eq(frees.valid),
            frees.payload.eq(cell),
        ]
        with m.FSM(name="walker"):
            with m.State("Idle"):
                m.d.comb += jobs.ready.eq(1)
                m.d.sync += cell.eq(jobs.payload)
                with m.If(jobs.valid):
                    m.next = "Free"
            with m.State("Free"):
                m.d.comb += frees.valid.eq(1)
                with m.If(frees.ready):
                    m.next = "Look"
            with m.State("Look"):  # the memories' outputs belong to the cell just freed
                m.d.comb += jobs.ready.eq(tail_port.data)
                m.d.sync += cell.eq(Mux(tail_port.data, jobs.payload, link_port.data))
                with m.If(~tail_port.data | jobs.valid):
                    m.next = "Free"
                with m.Else():
                    m.next = "Idle"
        return frees

    def _check_ownership(self, m, offer, taken, free_list):
        """A cell is freed only while it is in use; the count of free cells stays true."""
        owned = m.submodules.owned = memory.Memory(shape=1, depth=self.cells, init=[])
        take_port, free_port, look_port = owned.write_port(), owned.write_port(), owned.read_port(domain="comb")
        freed = free_list.i.valid
        m.d.comb += [
            take_port.addr.eq(offer.payload), take_port.data.eq(1), take_port.en.eq(taken),
            free_port.addr.eq(free_list.i.payload), free_port.data.eq(0), free_port.en.eq(freed),
            look_port.addr.eq(free_list.i.payload),
        ]
        m.d.sync += [
            Assert(~freed | look_port.data, Format("PacketStore: cell {} freed twice", free_list.i.payload)),
            Assert(~freed | free_list.i.ready, "PacketStore: free list overflows"),
            Assert(self.free_cells <= self.cells, Format("PacketStore: {} free cells", self.free_cells)),
            Assert(free_list.level <= self.free_cells, "PacketStore: more cells listed than free"),
        ]
