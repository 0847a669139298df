"""The translation cache: physical pages of recently used virtual pages."""

from amaranth import *
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params

__all__ = ["PAGE_BITS", "TranslationCache"]

PAGE_BITS = 52  # page numbers: 64-bit addresses, pages of 4 KiB at least


class TranslationCache(wiring.Component):
    """Direct mapped, ``p.tlb_entries`` entries, found by (entry of the translation table, page number), full compare.

    Look-up: ``index`` and ``page`` in cycle t; ``address`` (bits 63:12 of the cached page-table entry, meaningful on a
    hit only) in t+2; ``hit`` in t+3. One look-up per cycle; a fill in the cycle of a look-up, or later, is not seen by
    it.

    Fill: ``fill_en`` for one cycle with ``fill_index``, ``fill_page``, ``fill_address``; always taken.

    Sweep: ``sweep`` for one cycle; every entry of ``sweep_index`` (held meanwhile) that was there is gone when
    ``sweep_done`` rises for one cycle, 2 cycles per cache entry later plus one per fill. Entries of others may go as
    well when a fill falls into the moment.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "index": In(p.tpt_bits),
            "page": In(PAGE_BITS),
            "address": Out(PAGE_BITS),
            "hit": Out(1),
            "fill_en": In(1),
            "fill_index": In(p.tpt_bits),
            "fill_page": In(PAGE_BITS),
            "fill_address": In(PAGE_BITS),
            "sweep": In(1),
            "sweep_index": In(p.tpt_bits),
            "sweep_done": Out(1),
        })

    def _place(self, index, page):
        """Cache entry of a page: neighbouring pages and neighbouring rings do not collide."""
        bits = (self.p.tlb_entries - 1).bit_length()
        return (page[:bits] ^ index[:bits])[:bits]

    def elaborate(self, platform):
        m = Module()
        p = self.p
        tag = data.StructLayout({"index": p.tpt_bits, "page": PAGE_BITS})
        line = data.StructLayout({"valid": 1, "tag": tag, "address": PAGE_BITS})
        m.submodules.lines = lines = memory.Memory(shape=line, depth=p.tlb_entries, init=[])
        # Whose entry it is, once more: so that a sweep reads without disturbing the look-ups.
        m.submodules.owners = owners = memory.Memory(shape=p.tpt_bits, depth=p.tlb_entries, init=[])
        look = lines.read_port()
        write = lines.write_port()
        owner_look = owners.read_port()
        owner_write = owners.write_port()

        # Look-up: memory latch, register, compare.
        wanted = [Signal(tag, name=f"wanted_{i}") for i in range(3)]
        found = Signal(line)
        m.d.comb += [
            look.addr.eq(self._place(self.index, self.page)),
            wanted[0].index.eq(self.index),
            wanted[0].page.eq(self.page),
            self.address.eq(found.address),
        ]
        m.d.sync += [
            wanted[1].eq(wanted[0]),
            wanted[2].eq(wanted[1]),
            found.eq(look.data),
            self.hit.eq(found.valid & (found.tag.as_value() == wanted[2].as_value())),
        ]

        # Sweep: read an owner, next cycle kill the line if it is the one looked for.
        at = Signal(range(p.tlb_entries))
        mine = Signal()
        kill = Signal()
        m.d.comb += [
            owner_look.addr.eq(at),
            mine.eq(owner_look.data == self.sweep_index),
        ]
        with m.FSM(name="sweep"):
            with m.State("Idle"):
                m.d.sync += at.eq(0)
                with m.If(self.sweep):
                    m.next = "Read"
            with m.State("Read"):
                m.next = "Kill"
            with m.State("Kill"):
                with m.If(~self.fill_en):
                    m.d.comb += kill.eq(mine)
                    m.d.sync += at.eq(at + 1)
                    m.next = "Read"
                    with m.If(at == p.tlb_entries - 1):
                        m.d.comb += self.sweep_done.eq(1)
                        m.next = "Idle"

        # A fill has the write port first; a kill waits for it.
        fill_place = Signal(range(p.tlb_entries))
        m.d.comb += [
            fill_place.eq(self._place(self.fill_index, self.fill_page)),
            write.en.eq(self.fill_en | kill),
            write.addr.eq(Mux(self.fill_en, fill_place, at)),
            write.data.valid.eq(self.fill_en),
            write.data.tag.index.eq(self.fill_index),
            write.data.tag.page.eq(self.fill_page),
            write.data.address.eq(self.fill_address),
            owner_write.en.eq(self.fill_en),
            owner_write.addr.eq(fill_place),
            owner_write.data.eq(self.fill_index),
        ]
        return m
