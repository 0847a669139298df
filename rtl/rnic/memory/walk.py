"""Page-table walks: several under way, each answered on its own."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import DmaCommand, DmaReadSignature, XlateStatus
from ..stream.arbiter import RoundRobin
from ..stream.fifo import StreamFifo
from .cache import PAGE_BITS

__all__ = ["TABLE_BITS", "WalkAnswer", "WalkRequest", "Walker", "page_mask"]

PTE_BYTES = 8
TABLE_BITS = 9  # log2 of the entries of a lower table


class WalkRequest(data.StructLayout):
    """A checked request whose page is not in the cache. ``address`` of the answer = page | ``offset``."""

    def __init__(self, p: Params, client_bits: int, tag_bits: int):
        super().__init__({
            "client": client_bits,
            "tag": tag_bits,
            "index": p.tpt_bits,
            "page": PAGE_BITS,
            "two_level": 1,
            "table": 64,  # physical address of the (upper) table, a multiple of 8
            "offset": 30,  # inside the page
            "shift": 5,  # log2 of the page size - 12
            "span": 13,
        })


class WalkAnswer(data.StructLayout):
    """What goes into the client's response queue."""

    def __init__(self, p: Params, client_bits: int, tag_bits: int):
        super().__init__({"client": client_bits, "tag": tag_bits, "status": XlateStatus, "address": 64, "span": 13})


def page_mask(shift):
    """Bits 29:12 of an address that lie inside a page of ``2**(12 + shift)`` bytes (18 bits, from a 5-bit signal)."""
    return Cat(shift > bit for bit in range(18))


class Walker(wiring.Component):
    """``p.walks`` walks at once; every walk reads one 8-byte page-table entry per level through ``walk``, fills the
    cache and answers by itself, so a walk comes to its end whatever happens to the cache entry it filled.

    Ports: ``start`` for one cycle with ``request`` takes a free slot (only while ``free`` is not 0; asserted);
    ``free`` slots, from a register; ``some_free``, that they are not 0, too. ``answer`` a stream; an entry that cannot be read
    gives status HOST_BUS.
    ``fill_*`` to the cache. ``mark`` for one cycle: walks of ``purge_index`` that are under way will not fill the
    cache; ``marked`` is 1 until they have been answered. ``purge_index`` is stable from the cycle before ``mark`` on.

    Timing: each host read costs the walker about 8 cycles, plus the latency of the host; walks overlap in the latter.
    """

    def __init__(self, p: Params, client_bits: int, tag_bits: int):
        self.p, self.client_bits, self.tag_bits = p, client_bits, tag_bits
        super().__init__({
            "start": In(1),
            "request": In(WalkRequest(p, client_bits, tag_bits)),
            "free": Out(range(p.walks + 1), init=p.walks),
            "some_free": Out(1, init=1),
            "walk": Out(DmaReadSignature(p)),
            "answer": Out(stream.Signature(WalkAnswer(p, client_bits, tag_bits))),
            "fill_en": Out(1),
            "fill_index": Out(p.tpt_bits),
            "fill_page": Out(PAGE_BITS),
            "fill_address": Out(PAGE_BITS),
            "mark": In(1),
            "purge_index": In(p.tpt_bits),
            "marked": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        p = self.p
        walks = p.walks
        slot_shape = range(walks)
        m.submodules.slots = slots = memory.Memory(shape=self.request.shape(), depth=walks, init=[])
        # The page-table entry of the upper level.
        m.submodules.uppers = uppers = memory.Memory(shape=PAGE_BITS, depth=walks, init=[])
        # One command per walk at most: these two never overflow, so a word is taken without waiting for a command.
        m.submodules.commands = commands = StreamFifo(DmaCommand(), walks)
        m.submodules.order = order = StreamFifo(slot_shape, walks)
        m.submodules.turn = turn = RoundRobin(walks)
        wiring.connect(m, commands.o, wiring.flipped(self.walk.command))
        slot_write, slot_read = slots.write_port(), slots.read_port()
        upper_write, upper_read = uppers.write_port(), uppers.read_port()

        busy = Signal(walks)
        wants = Signal(walks)  # has a command to give
        lower = Signal(walks)  # the next entry it reads is of the lower level
        old = Signal(walks)  # a purge waits for it
        indices = [Signal(p.tpt_bits, name=f"index_{i}") for i in range(walks)]
        matches = Signal(walks)
        chosen = Signal(slot_shape)  # slot the next walk takes
        for i in reversed(range(walks)):
            with m.If(~busy[i]):
                m.d.comb += chosen.eq(i)

        slot = Signal(slot_shape)  # the one the walker looks at
        record = Signal(self.request.shape())
        upper = Signal(PAGE_BITS)
        step = Signal(PAGE_BITS)  # entry number in the table
        entry = Signal(64)  # what came from the host
        failed = Signal()
        entry_address = Signal(64)
        finish = Signal()
        slot_bit = Signal(walks)
        m.d.comb += [
            slot_write.addr.eq(chosen),
            slot_write.data.eq(self.request),
            slot_write.en.eq(self.start),
            slot_read.addr.eq(slot),
            upper_read.addr.eq(slot),
            upper_write.addr.eq(slot),
            upper_write.data.eq(entry[12:]),
            slot_bit.eq(1 << slot),
            turn.requests.eq(wants),
            commands.i.payload.address.eq(entry_address),
            commands.i.payload.length.eq(PTE_BYTES),
            order.i.payload.eq(slot),
        ]
        m.d.sync += [record.eq(slot_read.data), upper.eq(upper_read.data)]

        # The aligned 8 bytes of a raw bus word.
        word = self.walk.word
        lanes = Signal(64)
        if p.lane_bits > 3:
            m.d.comb += lanes.eq(word.payload.data.word_select(word.payload.first[3:], 64))
        else:
            m.d.comb += lanes.eq(word.payload.data)

        with m.FSM(name="walker"):
            with m.State("Idle"):
                m.d.comb += word.ready.eq(order.o.valid)
                m.d.sync += slot.eq(order.o.payload)
                with m.If(word.valid & order.o.valid):
                    m.d.comb += order.o.ready.eq(1)
                    m.d.sync += [
                        entry.eq(lanes), failed.eq(word.payload.err),
                        Assert(word.payload.last, "page-table entry does not come in one word"),
                    ]
                    m.next = "EntryLatch"
                with m.Elif(wants.any()):
                    m.d.comb += turn.advance.eq(1)
                    m.d.sync += slot.eq(turn.grant)
                    m.next = "IssueLatch"
            with m.State("IssueLatch"):
                m.next = "IssueRead"
            with m.State("IssueRead"):
                m.next = "IssueStep"
            with m.State("IssueStep"):
                m.d.sync += step.eq(Mux(record.two_level, record.page >> TABLE_BITS, record.page))
                m.next = "IssueAdd"
            with m.State("IssueAdd"):
                with m.If((lower & slot_bit).any()):
                    m.d.sync += entry_address.eq(Cat(Const(0, 3), record.page[:TABLE_BITS], upper))
                with m.Else():
                    m.d.sync += entry_address.eq(Cat(Const(0, 3), (record.table[3:] + step)[:61]))
                m.next = "Issue"
            with m.State("Issue"):
                m.d.comb += [commands.i.valid.eq(1), order.i.valid.eq(1)]
                m.d.sync += [
                    wants.eq(wants & ~slot_bit),
                    Assert(commands.i.ready & order.i.ready, "more commands than walks"),
                ]
                m.next = "Idle"
            with m.State("EntryLatch"):
                m.next = "EntryRead"
            with m.State("EntryRead"):
                m.next = "Entry"
            with m.State("Entry"):
                with m.If(record.two_level & ~(lower & slot_bit).any() & ~failed):
                    m.d.comb += upper_write.en.eq(1)
                    m.d.sync += [lower.eq(lower | slot_bit), wants.eq(wants | slot_bit)]
                    m.next = "Idle"
                with m.Else():
                    m.d.comb += self.fill_en.eq(~failed)
                    m.d.sync += [
                        self.answer.valid.eq(1),
                        self.answer.payload.client.eq(record.client),
                        self.answer.payload.tag.eq(record.tag),
                        self.answer.payload.status.eq(Mux(failed, XlateStatus.HOST_BUS, XlateStatus.OK)),
                        self.answer.payload.span.eq(record.span),
                        self.answer.payload.address.eq(
                            Cat(record.offset[:12], entry[12:30] & ~page_mask(record.shift) | record.offset[12:],
                            entry[30:])
                        ),
                    ]
                    m.next = "Answer"
            with m.State("Answer"):
                with m.If(self.answer.ready):
                    m.d.comb += finish.eq(1)
                    m.d.sync += self.answer.valid.eq(0)
                    m.next = "Idle"

        m.d.comb += [
            self.fill_index.eq(record.index),
            self.fill_page.eq(record.page),
            self.fill_address.eq(entry[12:]),
            self.marked.eq((old & busy).any()),
        ]
        with m.If(finish):
            m.d.sync += [busy.eq(busy & ~slot_bit), old.eq(old & ~slot_bit)]
        for i in range(walks):
            m.d.sync += matches[i].eq(indices[i] == self.purge_index)
            with m.If(self.mark & busy[i] & matches[i]):
                m.d.sync += old[i].eq(~(finish & slot_bit[i]))
            with m.If(self.start & (chosen == i)):
                m.d.sync += [
                    busy[i].eq(1), wants[i].eq(1), lower[i].eq(0), old[i].eq(0), indices[i].eq(self.request.index),
                ]
        m.d.sync += [
            self.free.eq(self.free + finish - self.start),
            self.some_free.eq(Mux(finish == self.start, self.some_free, finish | (self.free != 1))),
            Assert(self.some_free == (self.free != 0), "Walker: flag and count differ"),
        ]
        with m.If(self.start):
            m.d.sync += Assert(~busy.all(), "walk started without a free slot")
        m.d.sync += Assert(self.free + sum(busy[i] for i in range(walks)) == walks,
                           Format("{} slots free, busy {:b}", self.free, busy))
        return m
