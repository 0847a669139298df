"""Keys, rights, bounds and page tables: from a virtual range to a physical address."""

from collections.abc import Sequence

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import TPT_ENTRY, CtxTable
from ..clash import NO_CLASH
from ..config import Params
from ..qp.table import ContextTable
from ..records import CtxBus, DmaReadSignature, XlateRequest, XlateSignature, XlateStatus
from ..stream.arbiter import RoundRobin
from ..stream.buffer import SkidBuffer
from ..stream.fifo import StreamFifo
from .cache import TranslationCache
from .translate_pipe import RESPONSES, STAGES, TranslatePipe
from .walk import WalkAnswer, Walker

__all__ = ["Translate"]


class Translate(TranslatePipe):
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
        m.submodules.store = store = memory.Memory(shape=stored, depth=self.places, init=[], attrs=NO_CLASH)
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
            ended.ready.eq(~valid[STAGES] & ~walker.answer.valid),  # in a gap, whoever it is for: a short path
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
