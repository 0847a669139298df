"""The pipe of `Translate`: checks and addresses, and what the end of a key has to wait for."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import data, memory, wiring

from ..abi import TPT_ENTRY, CtxTable
from ..records import XlateRequest, XlateStatus
from ..stream.fifo import StreamFifo
from .cache import PAGE_BITS
from .walk import page_mask

__all__ = ["RESPONSES", "STAGES", "TranslatePipe"]

RESPONSES = 16  # room for responses per client: more than the latency, so that one client alone has full rate
STAGES = 10  # registers between the clients and the outcome
MIN_LOG_PAGE = 12
_VALID = TPT_ENTRY.fields["valid"].offset  # bit


class TranslatePipe(wiring.Component):
    """The half of `Translate` behind the entrance, which sets the attributes and the ports."""

    # ------------------------------------------------------------------------------------------------- the pipe
    def _checks(self, m):
        p = self.p
        valid, walker, cache = self._valid, self._walker, self._cache

        def pass_on(signal, stages):
            """Copies of ``signal``, each one register later than the one before."""
            copies = [signal]
            for i in range(1, stages + 1):
                later = Signal(signal.shape(), name=f"{Value.cast(signal).name}_{i}")
                m.d.sync += later.eq(copies[-1])
                copies.append(later)
            return copies

        # Register 1: the key's range, register 2 to 4: read the TPT. An index out of range reads entry 0 and fails.
        first = Signal(XlateRequest(p, self.tag_bits))
        key_number = Signal(32)
        key_in_range = Signal()
        in_range = Signal()
        index = Signal(p.tpt_bits)
        m.d.comb += [
            first.eq(self._first.request),
            key_number.eq(Mux(first.ring, first.key, first.key[8:])),
            key_in_range.eq(key_number < Mux(first.ring, p.tpt_entries, p.num_mrs)),  # R-MR-1
            self._tpt.read_index_0.eq(index),
        ]
        m.d.sync += [in_range.eq(key_in_range), index.eq(Mux(key_in_range, key_number, 0))]
        client = Signal(self.client_bits)
        handle = Signal(range(self.places))
        again = Signal()
        m.d.comb += [client.eq(self._first.client), handle.eq(self._first.handle), again.eq(self._first.again)]
        tag = Signal(self.tag_bits)
        hit_only, invalidate = Signal(), Signal()
        m.d.comb += [tag.eq(first.tag), hit_only.eq(first.hit_only), invalidate.eq(first.invalidate)]
        clients, handles, agains, tags, hits_only, invalidates = (
            pass_on(s, STAGES - 1) for s in (client, handle, again, tag, hit_only, invalidate))
        requests = pass_on(first, 3)
        ranges = pass_on(in_range, 2)
        indices = pass_on(index, STAGES - 2)
        request, entry = requests[3], self._tpt.read_0

        # Register 5: everything about the entry but the last bounds check.
        key_ok, pd_ok, rights_ok, start_ok, length_ok = (
            Signal(name=n) for n in ("key_ok", "pd_ok", "rights_ok", "start_ok", "length_ok")
        )
        behind = Signal(65)  # va - base, bit 64: borrow
        spare = Signal(65)  # mlen - length
        paged, two_level = Signal(), Signal()
        table = Signal(64)
        shift = Signal(5)
        base_offset = Signal(30)  # of `base` in its page
        length = Signal(32)
        shift_now = Signal(5)
        m.d.comb += shift_now.eq(entry.log_page - MIN_LOG_PAGE)
        m.d.sync += [
            key_ok.eq(ranges[2] & entry.valid & (request.ring | (entry.variant == request.key[:8]))),  # R-MR-1
            pd_ok.eq(request.ring | (entry.pd == request.pd)),  # R-MR-4
            rights_ok.eq(request.ring | ((request.rights & ~entry.rights) == 0)),  # 8.1#7
            behind.eq(request.va - entry.base),  # R-MR-2
            spare.eq(entry.length - request.length),  # R-MR-2, R-MR-6
            paged.eq(entry.levels != 0),
            two_level.eq(entry.levels[1]),
            table.eq(entry.table_addr),
            shift.eq(shift_now),
            base_offset.eq(entry.base[:30] & Cat(Const(0xFFF, 12), page_mask(shift_now))),
            length.eq(request.length),
        ]
        m.d.comb += [start_ok.eq(~behind[64]), length_ok.eq(~spare[64])]
        pageds, two_levels, tables, shifts = (pass_on(s, STAGES - 5) for s in (paged, two_level, table, shift))
        lengths = pass_on(length, 2)

        # Register 6: bounds, and where the access lies.
        status = Signal(XlateStatus)
        linear = Signal(64)  # contiguous: the physical address
        inside = Signal(64)  # paged: bytes behind the start of the page that holds `base`
        m.d.sync += [
            status.eq(XlateStatus.OK),
            linear.eq(table + behind[:64]),
            inside.eq(behind[:64] + base_offset),  # cannot wrap: it is va minus a page boundary; R-MR-5, R-MR-6
        ]
        with m.If(~key_ok):
            m.d.sync += status.eq(XlateStatus.KEY)
        with m.Elif(~pd_ok):
            m.d.sync += status.eq(XlateStatus.PD)
        with m.Elif(~rights_ok):
            m.d.sync += status.eq(XlateStatus.RIGHTS)
        with m.Elif(~invalidates[4] & (~start_ok | ~length_ok | (behind[:64] > spare[:64]))):  # R-MR-2
            m.d.sync += status.eq(XlateStatus.BOUNDS)  # R-MR-2
        statuses = pass_on(status, STAGES - 6)

        # Register 7: page number, offset, bytes to the next 4 KiB boundary.
        page = Signal(PAGE_BITS)
        where = Signal(64)  # paged: offset in the page (30 bits); contiguous: the address
        to_boundary = Signal(13)
        low = Signal(12)
        m.d.comb += low.eq(Mux(pageds[1], inside[:12], linear[:12]))
        m.d.sync += [
            page.eq(inside[12:] >> shifts[1]),
            where.eq(Mux(pageds[1], inside[:30] & Cat(Const(0xFFF, 12), page_mask(shifts[1])), linear)),
            to_boundary.eq(4096 - low),
        ]
        pages = pass_on(page, STAGES - 7)
        wheres = pass_on(where, STAGES - 7)
        m.d.comb += [cache.index.eq(indices[5]), cache.page.eq(page)]

        # Register 8: span (R-MR-5). Registers 8 to 10: the cache.
        span = Signal(13)
        m.d.sync += span.eq(Mux(lengths[2] < to_boundary, lengths[2], to_boundary))
        spans = pass_on(span, STAGES - 8)
        page_part = Signal(64)
        address = Signal(64)
        in_page = page_mask(shifts[4])
        m.d.comb += page_part.eq(Cat(Const(0, 12), cache.address[:18] & ~in_page, cache.address[18:]))
        m.d.sync += address.eq(wheres[2] | Mux(pageds[4], page_part, 0))

        # Register 10: the outcome.
        ok = Signal()
        may_walk = Signal()
        walk_needed = self._walk_needed
        m.d.sync += [
            ok.eq(statuses[-2] == XlateStatus.OK),
            may_walk.eq((statuses[-2] == XlateStatus.OK) & pageds[-2] & ~invalidates[-2]),
        ]
        m.d.comb += [
            walk_needed.eq(may_walk & ~cache.hit),
            walker.start.eq(valid[STAGES] & walk_needed & ~hits_only[-1] & (agains[-1] | self._slot_for_new)),
            self._wait.eq(walk_needed & ~hits_only[-1] & ~agains[-1] & ~self._slot_for_new),
            self._hit_only.eq(hits_only[-1]),
            self._ends.eq(ok & invalidates[-1]),
            self._end_index.eq(indices[-1]),
            self._handle.eq(handles[-1]),
            self._again.eq(agains[-1]),
            self._outcome.client.eq(clients[-1]),
            self._outcome.tag.eq(tags[-1]),
            self._outcome.status.eq(Mux(walk_needed, XlateStatus.MISS, statuses[-1])),
            self._outcome.address.eq(address),
            self._outcome.span.eq(spans[-1]),
            walker.request.client.eq(clients[-1]),
            walker.request.tag.eq(tags[-1]),
            walker.request.index.eq(indices[-1]),
            walker.request.page.eq(pages[-1]),
            walker.request.two_level.eq(two_levels[-1]),
            walker.request.table.eq(tables[-1]),
            walker.request.offset.eq(wheres[-1]),
            walker.request.shift.eq(shifts[-1]),
            walker.request.span.eq(spans[-1]),
        ]
        m.d.sync += [self.hit.eq(valid[STAGES] & ok & ~walk_needed), self.miss.eq(walker.start)]

    # ---------------------------------------------------------------------------------------------------- purge
    def _purge(self, m):
        """A TPT write, or the end of an entry: pass it on, then wait until nothing derived from the old entry is left."""
        p = self.p
        tpt, cache, walker = self._tpt, self._cache, self._walker
        # One bit per TPT entry: the cache may hold pages of it. Spares the sweep for entries that never had any.
        m.submodules.cached = cached = memory.Memory(shape=1, depth=p.tpt_entries, init=[])
        cached_read, cached_write = cached.read_port(), cached.write_port()
        ending = data.StructLayout({"client": self.client_bits, "tag": self.tag_bits, "index": p.tpt_bits})
        m.submodules.endings = endings = StreamFifo(ending, RESPONSES)
        mine = Signal()
        done = Signal()
        told = Signal()  # the entry at hand was ended by a request
        clear = Signal()
        may_hold = Signal()
        index = Signal(p.tpt_bits)
        drain = Signal(range(STAGES + 2))
        m.d.comb += [
            mine.eq(self.ctx.payload.table == CtxTable.TPT),
            tpt.ctx.payload.eq(self.ctx.payload),
            self.ctx.ready.eq(~mine | (done & ~told)),
            endings.i.valid.eq(self._valid[STAGES] & self._ends),
            endings.i.p.client.eq(self._outcome.client),
            endings.i.p.tag.eq(self._outcome.tag),
            endings.i.p.index.eq(self._end_index),
            self._ended.p.client.eq(endings.o.p.client),
            self._ended.p.tag.eq(endings.o.p.tag),
            self._ended.valid.eq(done & told),
            endings.o.ready.eq(self._ended.valid & self._ended.ready),
            walker.purge_index.eq(index),
            cache.sweep_index.eq(index),
            cached_read.addr.eq(index),
            cached_write.en.eq(walker.fill_en | clear),
            cached_write.addr.eq(Mux(walker.fill_en, walker.fill_index, index)),
            cached_write.data.eq(walker.fill_en),
        ]
        m.d.sync += [
            may_hold.eq(cached_read.data),
            Assert(~endings.i.valid | endings.i.ready, "translate: more entries end than requests are inside"),
        ]
        with m.FSM(name="purge"):
            with m.State("Idle"):
                m.d.sync += [index.eq(self.ctx.payload.index), drain.eq(STAGES + 1)]
                with m.If(self.ctx.valid & mine):
                    m.d.comb += tpt.ctx.valid.eq(1)
                    m.d.sync += [told.eq(0), Assert(tpt.ctx.ready, "the TPT has one writer")]
                    m.next = "Drain"
                with m.Elif(endings.o.valid):
                    m.d.comb += [
                        tpt.ctx.valid.eq(1),
                        tpt.ctx.payload.table.eq(CtxTable.TPT),
                        tpt.ctx.payload.index.eq(endings.o.p.index),
                        tpt.ctx.payload.word.eq(_VALID // 32),
                        tpt.ctx.payload.bytes.eq(1 << _VALID % 32 // 8),
                        tpt.ctx.payload.data.eq(0),
                    ]
                    m.d.sync += [told.eq(1), index.eq(endings.o.p.index)]
                    m.next = "Drain"
            with m.State("Drain"):  # requests that read the old entry
                m.d.sync += drain.eq(drain - 1)
                with m.If(drain == 0):
                    m.d.comb += walker.mark.eq(1)
                    m.next = "Marked"
            with m.State("Marked"):
                m.next = "Walks"
            with m.State("Walks"):
                with m.If(~walker.marked):
                    m.next = "Latch"
            with m.State("Latch"):
                m.next = "Register"
            with m.State("Register"):
                m.next = "Look"
            with m.State("Look"):
                m.next = "Clear"
                with m.If(~may_hold):
                    m.next = "Done"
            with m.State("Clear"):
                # The bit goes down before the sweep: a fill of the new entry during the sweep sets it again.
                with m.If(~walker.fill_en):
                    m.d.comb += [clear.eq(1), cache.sweep.eq(1)]
                    m.next = "Sweep"
            with m.State("Sweep"):
                with m.If(cache.sweep_done):
                    m.next = "Done"
            with m.State("Done"):
                m.d.comb += done.eq(1)
                with m.If(~told | self._ended.ready):
                    m.next = "Idle"
        return m
