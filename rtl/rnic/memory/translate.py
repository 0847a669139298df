"""Keys, rights, bounds and page tables: from a virtual range to a physical address."""

from collections.abc import Sequence

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import TPT_ENTRY, CtxTable
from ..config import Params
from ..qp.table import ContextTable
from ..records import CtxBus, DmaReadSignature, XlateRequest, XlateSignature, XlateStatus
from ..stream.arbiter import RoundRobin
from ..stream.buffer import SkidBuffer
from ..stream.fifo import StreamFifo
from .cache import PAGE_BITS, TranslationCache
from .walk import WalkAnswer, Walker, page_mask

__all__ = ["Translate"]

RESPONSES = 16  # room for responses per client: more than the latency, so that one client alone has full rate
STAGES = 10  # registers between the clients and the outcome
MIN_LOG_PAGE = 12
_VALID = TPT_ENTRY.fields["valid"].offset  # bit


class Translate(wiring.Component):
    """Checks accesses against the translation and protection table (TPT) and translates their first byte.

    The checks come in this order: key (range, valid, variant; R-MR-1), protection domain (R-MR-4), rights, bounds
    (R-MR-2: va >= base, len <= mlen, va - base <= mlen - len, nothing added that could wrap). Ring entries have no
    variant, domain or rights. The span of an OK answer never crosses a 4 KiB boundary, whatever the page size.

    Ports: one per client, named as the client (service side of `XlateSignature`); ``ctx``, the TPT is written there;
    ``walk``, a read client for page tables (table addresses and entries are multiples of 8; page addresses multiples
    of their page); ``hit``, ``miss``: one pulse per translation that did not, or did, read a page table.

    Timing: one request per cycle over all clients, round robin; an answer without a walk comes 11 cycles after its request
    was taken. The pipe never stops: a miss goes into one of ``p.walks`` slots, or waits and passes the pipe again, in order
    of arrival, when a slot is free, while hits go on. A client gets no more than ``RESPONSES`` requests in, or as many as it
    asks for if it takes every answer at once (asserted), and there is room for those of all clients: neither one that does
    not take its answers nor one whose requests miss holds others up. A miss of a request with ``hit_only`` is answered by
    MISS at once. Answers to one client come in any order.

    A request with ``invalidate`` that passes the checks of key, domain and rights ends its entry in the same way (R-MR-1): it is
    answered when that is done. The command engine never writes an entry that a request may end meanwhile: before a key is used
    again, its DESTROY has waited for all requests (qp.fence).

    A write of any word of TPT entry i is taken by the table at once, but ``ctx.ready`` rises only when no request that
    saw the old entry is left in the pipe or in a walk and the cache holds no page of i: about 19 cycles, more with
    walks of i under way, and 2 cycles per cache entry when i may have pages there. The command that destroys a region
    therefore ends after its last translation.

    Parameters: ``clients``, list of (name, tag bits) or, of one that takes every answer at once, (name, tag bits, requests
    it may have inside). ValueError for none or for a name twice.
    """

    def __init__(self, p: Params, clients: Sequence[tuple[str, int] | tuple[str, int, int]]):
        names = [name for name, *_ in clients]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"client names are {names}, must be different and at least one")
        self.p, self.clients = p, [(name, bits) for name, bits, *_ in clients]
        self.credits = {name: more[0] if more else RESPONSES for name, _, *more in clients}
        self.tag_bits = max(bits for _, bits in self.clients)
        self.client_bits = max(1, (len(clients) - 1).bit_length())
        self.places = 1 << (sum(self.credits.values()) - 1).bit_length()  # of requests in the pipe or waiting for a walk
        super().__init__({
            **{name: In(XlateSignature(p, bits)) for name, bits in self.clients},
            "ctx": In(CtxBus(p)),
            "walk": Out(DmaReadSignature(p)),
            "hit": Out(1),
            "miss": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        p = self.p
        m.submodules.tpt = self._tpt = ContextTable(p, CtxTable.TPT, TPT_ENTRY, p.tpt_entries)
        m.submodules.cache = self._cache = cache = TranslationCache(p)
        m.submodules.walker = self._walker = walker = Walker(p, self.client_bits, self.tag_bits)
        wiring.connect(m, walker.walk, wiring.flipped(self.walk))
        m.d.comb += [
            cache.fill_en.eq(walker.fill_en),
            cache.fill_index.eq(walker.fill_index),
            cache.fill_page.eq(walker.fill_page),
            cache.fill_address.eq(walker.fill_address),
        ]
        self._item = data.StructLayout({
            "client": self.client_bits,
            "handle": range(self.places),
            "again": 1,  # has waited for a walk slot, one is reserved for it
            "request": XlateRequest(p, self.tag_bits),
        })
        self._valid = Signal(STAGES + 1)  # _valid[i]: pipe register i holds a request
        self._first = Signal(self._item)  # pipe register 1
        self._outcome = Signal(WalkAnswer(p, self.client_bits, self.tag_bits))  # pipe register 10
        self._handle = Signal(range(self.places))  # of the outcome
        self._again = Signal()
        self._walk_needed = Signal()  # the outcome is: not in the cache
        self._hit_only = Signal()  # and: which is the answer
        self._ends = Signal()  # the outcome is: entry `_end_index` ends, answer later
        self._ended = stream.Signature(data.StructLayout({"client": self.client_bits, "tag": self.tag_bits})).create()
        self._end_index = Signal(p.tpt_bits)
        self._wait = Signal()  # or: no slot, try again later
        self._entrance(m)
        self._checks(m)
        self._purge(m)
        return m

    # ------------------------------------------------------------------------------------------------ both ends
    def _entrance(self, m):
        """Choice of the next request, memory of the waiting ones, response queues."""
        n = len(self.clients)
        valid, walker = self._valid, self._walker
        m.submodules.turn = turn = RoundRobin(n)
        stored = data.StructLayout({name: self._item.members[name] for name in ("client", "request")})
        m.submodules.store = store = memory.Memory(shape=stored, depth=self.places, init=[])
        m.submodules.waiting = waiting = StreamFifo(range(self.places), self.places)
        store_write, store_read = store.write_port(), store.read_port()
        asked = Signal(n, init=1)  # client whose request may come in

        # Free places of `store`: those never used since reset from a counter, those given back from a FIFO.
        m.submodules.places = places = StreamFifo(range(self.places), self.places)
        unused = Signal(range(self.places + 1), init=self.places)
        some_unused = Signal(init=1)
        # No FIFO behind the choice of a request.
        m.submodules.place = place = SkidBuffer(range(self.places))
        in_use = Signal(range(self.places + 1))
        m.d.comb += [
            place.i.valid.eq(places.o.valid | some_unused),
            place.i.payload.eq(Mux(places.o.valid, places.o.payload, unused - 1)),
            places.o.ready.eq(place.i.ready),
        ]

        # A walk's answer needs a cycle in which the pipe gives none: leave a gap when there is none on its way. Seen a
        # cycle late, so that the clients' ready comes from registers; a gap too many does no harm.
        gap = Signal()
        m.d.sync += gap.eq((walker.answer.valid | self._ended.valid) & valid[1:STAGES].all())
        open_now = Signal()  # a new request may come in
        take_new = Signal()
        take_again = Signal()
        again_ready = Signal()
        new = Signal(self._item)
        m.d.comb += [
            take_again.eq(again_ready & ~gap),
            open_now.eq(place.o.valid & ~again_ready & ~gap),
            place.o.ready.eq(take_new),
            take_new.eq((turn.requests & asked).any() & open_now),
            turn.advance.eq(open_now & turn.requests.any()),
            new.client.eq(Cat(Cat(asked[i] for i in range(n) if i >> bit & 1).any() for bit in range(self.client_bits))),
            new.handle.eq(place.o.payload),
            store_write.addr.eq(place.o.payload),
            store_write.data.client.eq(new.client),
            store_write.data.request.eq(new.request),
            store_write.en.eq(take_new),
        ]
        # The choice is made a cycle ahead and kept while nothing may come in.
        with m.If(turn.advance):
            m.d.sync += asked.eq(turn.chosen)
        room = Signal(n, init=(1 << n) - 1)  # credit is left: registers
        for i, (name, _) in enumerate(self.clients):
            request = getattr(self, name).request
            m.d.comb += [
                turn.requests[i].eq(request.valid & room[i]),
                request.ready.eq(open_now & room[i] & asked[i]),
            ]
            with m.If(asked[i]):
                m.d.comb += [
                    new.request[field].eq(request.payload[field])
                    for field in ("tag", "ring", "key", "pd", "rights", "va", "length", "hit_only", "invalidate")
                ]
        m.d.sync += valid[1].eq(take_new | take_again)
        with m.If(again_ready):
            m.d.sync += [
                self._first.client.eq(store_read.data.client), self._first.request.eq(store_read.data.request),
                self._first.handle.eq(store_read.addr), self._first.again.eq(1),
            ]  # fmt: skip
        with m.Else():
            m.d.sync += self._first.eq(new)
        for i in range(2, STAGES + 1):
            m.d.sync += valid[i].eq(valid[i - 1])

        # Misses without a slot: each reserves one, then passes the pipe again.
        reserved = Signal(range(self.p.walks + 1))
        reserve = Signal()
        release = Signal()
        none_reserved, none_waiting = Signal(init=1), Signal(init=1)  # the counts are 0
        push = Signal()
        with m.FSM(name="again"):
            with m.State("Idle"):
                m.d.comb += reserve.eq(waiting.o.valid & (walker.free != reserved))
                m.d.sync += store_read.addr.eq(waiting.o.payload)
                with m.If(reserve):
                    m.next = "Latch"
            with m.State("Latch"):
                m.next = "Go"
            with m.State("Go"):
                m.d.comb += again_ready.eq(1)
                with m.If(take_again):
                    m.next = "Idle"
        m.d.comb += [
            waiting.o.ready.eq(reserve),
            waiting.i.valid.eq(push),
            waiting.i.payload.eq(self._handle),
            push.eq(valid[STAGES] & self._wait),
            release.eq(valid[STAGES] & self._again),
        ]
        m.d.sync += [
            reserved.eq(reserved + reserve - release),
            none_reserved.eq(Mux(reserve == release, none_reserved, release & (reserved == 1))),
            none_waiting.eq(~push & (none_waiting | (reserve & (waiting.level == 1)))),
            Assert((none_reserved == (reserved == 0)) & (none_waiting == (waiting.level == 0)),
                   "translate: flags and counts differ"),
        ]
        self._slot_for_new = Signal()  # a miss that has not waited may take a slot
        m.d.comb += self._slot_for_new.eq(walker.some_free & none_waiting & none_reserved)

        given_back = Signal()
        m.d.comb += [
            given_back.eq(valid[STAGES] & ~self._wait),
            places.i.valid.eq(given_back),
            places.i.payload.eq(self._handle),
        ]
        with m.If(place.i.ready & ~places.o.valid & some_unused):
            m.d.sync += [unused.eq(unused - 1), some_unused.eq(unused != 1)]
        m.d.sync += [
            in_use.eq(in_use + take_new - given_back),
            Assert(~given_back | places.i.ready, "more places of waiting requests than there are"),
            Assert(in_use <= self.places, Format("{} requests inside", in_use)),
        ]

        # Response queues: the pipe first, a walk's answer in a gap.
        outcome, ended = self._outcome, self._ended
        answered = Signal()  # by the pipe
        same = Signal()  # both have an answer for one client
        m.d.comb += [
            answered.eq(valid[STAGES] & ~self._ends & (~self._walk_needed | self._hit_only)),
            same.eq(answered & (outcome.client == walker.answer.payload.client)),
            walker.answer.ready.eq(~same),
            ended.ready.eq(~(answered & (outcome.client == ended.p.client))
                           & ~(walker.answer.valid & (walker.answer.payload.client == ended.p.client))),
        ]
        for i, (name, _) in enumerate(self.clients):
            port = getattr(self, name)
            m.submodules[f"responses_{name}"] = fifo = StreamFifo(port.response.payload.shape(), RESPONSES)
            wiring.connect(m, fifo.o, wiring.flipped(port).response)
            from_pipe = Signal(name=f"from_pipe_{name}")
            from_walk = Signal(name=f"from_walk_{name}")
            from_end = Signal(name=f"from_end_{name}")
            most = self.credits[name]
            credit = Signal(range(most + 1), init=most, name=f"credit_{name}")
            done = walker.answer.payload
            m.d.comb += [
                from_pipe.eq(answered & (outcome.client == i)),
                from_walk.eq(walker.answer.valid & (done.client == i) & ~same),
                from_end.eq(ended.valid & ended.ready & (ended.p.client == i)),
                fifo.i.valid.eq(from_pipe | from_walk | from_end),
            ]
            for field in ("tag", "status", "address", "span"):
                walked = Mux(from_end, ended.p.tag, done[field]) if field == "tag" else done[field]
                if field == "status":
                    walked = Mux(from_end, XlateStatus.OK, walked)
                m.d.comb += fifo.i.payload[field].eq(Mux(from_pipe, outcome[field], walked))
            taken = Signal(name=f"taken_{name}")  # one more request
            given = Signal(name=f"given_{name}")  # one more response
            m.d.comb += [
                taken.eq(port.request.valid & port.request.ready),
                given.eq(port.response.valid & port.response.ready),
            ]
            with m.If(taken != given):
                m.d.sync += credit.eq(credit + Mux(taken, -1, 1))
            m.d.sync += [
                room[i].eq(given | (room[i] & ~(taken & (credit == 1)))),
                Assert(room[i] == (credit != 0), "translate: flag and credit differ"),
                Assert((most == RESPONSES) | ~port.response.valid | port.response.ready,
                       f"translate: {name} does not take an answer"),
            ]
            with m.If(fifo.i.valid):
                m.d.sync += Assert(fifo.i.ready, f"response queue of {name} overflows")
        m.d.sync += [
            Assert(~push | waiting.i.ready, "queue of waiting requests overflows"),
            Assert(reserved <= walker.free, Format("{} slots reserved, {} free", reserved, walker.free)),
        ]

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
