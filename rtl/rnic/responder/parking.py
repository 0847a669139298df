"""Where the jobs of a QP that must wait step aside, so that the street goes on for all others."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..clash import NO_CLASH
from ..stream.buffer import HalfRegister, SkidBuffer
from ..stream.fifo import StreamFifo
from .lookup import Lookup

__all__ = ["Parking", "Ticket"]

_AGAIN = 4  # copies of a slot's number that may wait to go in again: by the list, by its wake, out of date


class Ticket(data.StructLayout):
    """A job on its way through the user's pipe. ``slot`` is where it is kept, ``again``: it comes from there; ``note`` came
    with its last wake, 0 before; ``barrier``, ``color`` belong to `Parking`."""

    def __init__(self, job, note, slots: int, qpn_bits: int):
        super().__init__({
            "qpn": qpn_bits, "slot": range(slots), "again": 1, "barrier": 1, "color": 1, "note": note, "job": job,
        })  # fmt: skip


class _List(data.StructLayout):
    """Of a QP with jobs aside (``parked``): slots of the first and the last one. ``open``: those from ``head`` to ``last``,
    ``ahead`` of them, are in the pipe again or about to be. ``length``: jobs aside."""

    def __init__(self, slots: int, window: int):
        super().__init__({
            "parked": 1, "open": 1, "head": range(slots), "tail": range(slots), "last": range(slots),
            "ahead": range(window + 1), "length": range(slots + 1),
        })  # fmt: skip


class Parking(wiring.Component):
    """A store of jobs around a pipe of the user that keeps order, with a linked list per QP of those that wait.

    Every job on ``i`` gets a slot of the store and leaves on ``enter`` into the pipe. At its end it comes back on ``leave``,
    perhaps with other fields, and shows on ``o`` for a verdict: with ``blocked`` it is taken and forgotten (it stays aside,
    or is out of date; ``short``: less than twice ``window`` of its QP are); with ``park`` it must wait (for a translation,
    for a receive WQE), and everything of its QP that follows waits behind it; else it goes on and its slot is free. ``wake``
    sends the job of a slot through the pipe once more, with a note; when it goes on, the next ones of its QP follow,
    ``window`` in the pipe at once; should one of these have to wait, those behind it in the pipe come out with ``blocked``.

    A wake for a job that is not the first of its QP, or that has gone on, does no harm. A job with ``i_barrier`` (of no QP) goes
    on when every job that entered before it has.

    After a reset, ``sweeping`` is 1 and ``sweep_index`` counts through all slots and QPs, for what the user keeps by them; no job
    enters until then.

    ``mark`` is a word of the user per QP, shown with the job, written with the verdict (``mark_update``) or by ``poke``.

    Timing: ``i`` to ``enter`` 1 cycle; a job from its slot takes ``parts`` cycles and alternates with new ones;
    ``leave`` to ``o`` 2 cycles; a job on ``o`` may be taken from its second cycle on, one that comes from its slot from its
    third (``settled``); 3 cycles more per job that follows one that has waited. ``i`` waits when all slots are in use; jobs
    from their slots never do. A job is stored in ``parts`` rows, one a cycle, and read so: it keeps the entrance for as long.
    Of a job with ``i_short`` only what lies in the first 2 parts matters. With ``half_rate`` ``leave`` takes one every 2 cycles.

    Parameters: ``job``, shape with a field ``qpn``; ``checked``, shape on ``leave`` with ``Ticket``'s ``qpn``, ``slot``,
    ``again``, ``barrier``, ``color``; ``slots``; ``window``; ``num_qps``; ``note``, ``mark`` shapes;
    ``parts``, a power of two from 2 on; ``half_rate``.
    """

    def __init__(self, job, checked, slots: int, window: int, num_qps: int, *, note=1, mark=1, parts: int = 2,
                 half_rate: bool = False):
        self.parts, self.half_rate = parts, half_rate
        self.job, self.checked, self.slots, self.window, self.num_qps, self.note = job, checked, slots, window, num_qps, note
        self.qpn_bits = max(1, (num_qps - 1).bit_length())
        self.ticket = Ticket(job, note, slots, self.qpn_bits)
        super().__init__({
            "i": In(stream.Signature(job)),
            "i_barrier": In(1),
            "i_short": In(1),
            "enter": Out(stream.Signature(self.ticket)),
            "leave": In(stream.Signature(checked)),
            "o": Out(stream.Signature(data.StructLayout({"job": checked, "mark": mark}))),
            "settled": Out(1),
            "blocked": Out(1),
            "short": Out(1),
            "sweeping": Out(1, init=1),
            "sweep_index": Out(range(max(slots, num_qps))),
            "park": In(1),
            "mark_update": In(1),
            "mark_value": In(mark),
            "poke": In(stream.Signature(data.StructLayout({"qpn": self.qpn_bits, "state": mark}))),
            "wake": In(stream.Signature(data.StructLayout({"slot": range(slots), "note": note}))),
        })
        self.mark = mark

    def elaborate(self, platform):
        m = Module()
        slots = self.slots
        m.submodules.looked = looked = Lookup(self.checked, self.mark, self.num_qps, own=_List(slots, self.window),
                                            half_rate=self.half_rate)
        m.submodules.again = again = StreamFifo(range(slots), _AGAIN * slots)
        wiring.connect(m, wiring.flipped(self.leave), looked.i)
        wiring.connect(m, wiring.flipped(self.poke), looked.poke)
        self._freed, self._freed_color = Signal(), Signal()  # the job at the verdict leaves for good
        self._barrier_left = Signal()
        self._push, self._push_slot = Signal(), Signal(range(slots))  # goes in again, said by the verdict
        self._admits = Signal()  # a new job gets a slot
        self._none_old = Signal(init=1)  # no job of before the barrier is left
        self._aside, self._aside_slot = Signal(), Signal(range(slots))  # the barrier waits
        call = Signal()  # the barrier goes in again
        m.d.comb += [
            call.eq(self._aside & self._none_old & ~self._push),
            again.i.valid.eq(self._push | call | (self.wake.valid & self.wake.ready)),
            again.i.payload.eq(Mux(self._push, self._push_slot, Mux(call, self._aside_slot, self.wake.p.slot))),
            self.wake.ready.eq(~self._push & ~call & ~self._admits),
        ]
        with m.If(call):
            m.d.sync += self._aside.eq(0)
        m.d.sync += Assert(~again.i.valid | again.i.ready, "Parking: more jobs go in again than there are")
        # A device reset empties the registers: the memories follow before the first job.
        m.d.comb += [
            looked.clear.eq(self.sweeping & (self.sweep_index < self.num_qps)),
            looked.clear_index.eq(self.sweep_index),
        ]
        with m.If(self.sweeping):
            m.d.sync += self.sweep_index.eq(self.sweep_index + 1)
            with m.If(self.sweep_index == max(slots, self.num_qps) - 1):
                m.d.sync += self.sweeping.eq(0)
        self._entrance(m, again, looked.o.payload.job.slot)
        self._verdict(m, looked)
        return m

    def _entrance(self, m, again, freed_slot):
        """New jobs into a free slot and the pipe; waiting jobs from their slots, in turn with them."""
        slots, ticket = self.slots, self.ticket
        m.submodules.out = out = HalfRegister(ticket)
        kept_shape = data.StructLayout({"barrier": 1, "color": 1, "job": self.job})
        parts, part_bits = self.parts, -(-kept_shape.size // self.parts)
        item = Signal(kept_shape)  # what is stored of a new job
        m.submodules.store = store = memory.Memory(shape=part_bits, depth=parts * slots, init=[], attrs=NO_CLASH)
        # A note may be read in the cycle it is written: of a job that goes in twice (the list moves on as its answer comes).
        m.submodules.notes = notes = memory.Memory(shape=self.note, depth=slots, init=[])
        # Free slots: those never used since reset from a counter, those given back from a FIFO.
        m.submodules.places = places = StreamFifo(range(slots), slots)
        m.submodules.place = place = SkidBuffer(range(slots))
        unused = Signal(range(slots), init=slots - 1)
        some_unused = Signal(init=1)
        write, note_write, note_read = store.write_port(), notes.write_port(), notes.read_port()
        read = store.read_port()
        part = Signal(range(parts))  # written, or read behind the one at the memory's output (`reads`)
        reads = Signal()
        kept = Signal(part_bits * (parts - 1))  # the parts read so far, the newest on top
        waiting = Signal(kept_shape)  # the waiting job at hand
        entered = Signal()  # the new job at hand has
        barrier, short = Signal(), Signal()  # of it
        last_part = Signal()
        injects, take, admitted = Signal(), Signal(), Signal()
        color, barrier_inside = Signal(), Signal()
        counts = [Signal(range(slots + 1), name=f"inside_{i}") for i in range(2)]
        wiring.connect(m, out.o, wiring.flipped(self.enter))
        m.d.comb += [
            place.i.valid.eq(places.o.valid | some_unused),
            place.i.payload.eq(Mux(places.o.valid, places.o.payload, unused)),
            places.o.ready.eq(place.i.ready),
            places.i.valid.eq(self._freed),
            places.i.payload.eq(freed_slot),
            admitted.eq(place.o.valid & ~self.sweeping & ~(self.i_barrier & barrier_inside)),
            take.eq(self.i.ready),  # not given before there is one
            place.o.ready.eq(take),
            write.addr.eq(Cat(part, place.o.payload)),
            write.data.eq(item.as_value().word_select(part, part_bits)),
            read.addr.eq(Cat(Mux(reads, part, 0), again.o.payload)),
            waiting.eq(Cat(kept, read.data)),
            last_part.eq((part == parts - 1) | (short & (part == 1))),
            item.job.eq(self.i.payload),
            item.color.eq(color),
            item.barrier.eq(self.i_barrier),
            self._admits.eq(take),
            note_write.en.eq(take | self.wake.valid),
            note_write.addr.eq(Mux(take, place.o.payload, self.wake.p.slot)),
            note_write.data.eq(Mux(take, 0, Value.cast(self.wake.p.note))),
            note_read.addr.eq(again.o.payload),
        ]
        with m.If(place.i.ready & ~places.o.valid & some_unused):
            m.d.sync += [unused.eq(unused - 1), some_unused.eq(unused != 0)]
        m.d.comb += [
            out.i.p.again.eq(injects),
            out.i.p.slot.eq(Mux(injects, again.o.payload, place.o.payload)),
            out.i.p.job.eq(Mux(injects, Value.cast(waiting.job), Value.cast(self.i.payload))),
            out.i.p.qpn.eq(out.i.p.job.qpn),
            out.i.p.barrier.eq(Mux(injects, waiting.barrier, self.i_barrier)),
            out.i.p.color.eq(Mux(injects, waiting.color, color)),
            out.i.p.note.eq(Mux(injects, Value.cast(note_read.data), 0)),
        ]
        def look():
            """After this one; no new job passes the one that is being read. Its first part is read in this cycle."""
            m.d.sync += part.eq(0)
            m.next = "New"
            with m.If(again.o.valid):
                m.d.sync += part.eq(1)
                m.next = "Latch"

        with m.FSM(name="entrance"):
            with m.State("New"):
                look()
                with m.If(self.i.valid & admitted):
                    m.d.comb += [out.i.valid.eq(1), write.en.eq(1)]
                    m.d.sync += [part.eq(1), entered.eq(out.i.ready), barrier.eq(self.i_barrier), short.eq(self.i_short)]
                    m.next = "Store"
            with m.State("Store"):
                m.d.comb += [out.i.valid.eq(~entered), write.en.eq(1)]
                m.d.sync += entered.eq(entered | out.i.ready)
                with m.If(~last_part):
                    m.d.sync += part.eq(part + 1)
                with m.Elif(entered | out.i.ready):
                    m.d.comb += self.i.ready.eq(1)
                    look()
            with m.State("Latch"):
                m.d.comb += reads.eq(1)
                m.d.sync += kept.eq(Cat(kept, read.data)[part_bits:])
                with m.If(part == parts - 1):
                    m.next = "Last"
                with m.Else():
                    m.d.sync += part.eq(part + 1)
            with m.State("Last"):
                m.d.comb += [reads.eq(1), injects.eq(1), out.i.valid.eq(1), again.o.ready.eq(out.i.ready)]
                with m.If(out.i.ready):
                    m.d.sync += part.eq(0)
                    m.next = "New"

        # A barrier waits for the jobs of the color that it ends.
        with m.If(take & barrier):
            m.d.sync += [color.eq(~color), barrier_inside.eq(1)]
        with m.Elif(self._barrier_left):
            m.d.sync += barrier_inside.eq(0)
        for i, count in enumerate(counts):
            comes, goes = Signal(name=f"comes_{i}"), Signal(name=f"goes_{i}")
            m.d.comb += [
                comes.eq(take & ~barrier & (color == i)),
                goes.eq(self._freed & ~self._barrier_left & (self._freed_color == i)),
            ]
            m.d.sync += [
                count.eq(count + comes - goes),
                Assert(~goes | (count != 0), Format("Parking: a job of color {} leaves, none is inside", i)),
            ]
        m.d.sync += self._none_old.eq(Mux(color, counts[0] == 0, counts[1] == 0))
        m.d.sync += Assert(~self._freed | places.i.ready, "Parking: more free slots than slots")

    def _verdict(self, m, looked):
        slots, window = self.slots, self.window
        job, own, new = looked.o.p.job, looked.o.p.own, looked.own_state
        m.submodules.nexts = nexts = memory.Memory(shape=range(slots), depth=slots, init=[])
        link, behind_job, behind_last = nexts.write_port(), nexts.read_port(), nexts.read_port()
        is_head, is_tail, all_in, only = Signal(), Signal(), Signal(), Signal()
        settled, filling = Signal(), Signal()
        early, behind, behind_end = Signal(), Signal(range(slots)), Signal(range(slots))  # registers of the memory's outputs
        taken, fills = Signal(), Signal()
        first = Signal(range(slots))  # the next to go in
        last, ahead = Signal(range(slots)), Signal(range(window + 1))  # while more of the list go in
        mark_update, mark_value = Signal(), Signal(self.mark)
        at_end, full = Signal(), Signal()
        head_leaves, appends = Signal(), Signal()
        m.d.sync += [
            is_head.eq(job.slot == own.head),
            is_tail.eq(job.slot == own.tail),
            all_in.eq(own.last == own.tail),
            only.eq(job.slot == own.last),
            self.short.eq(own.length < 2 * window),
            early.eq(looked.o.valid & ~looked.o.ready & ~taken),
            settled.eq(looked.o.valid & ~looked.o.ready & ~taken & (early | ~job.again)),
            behind.eq(behind_job.data),
            behind_end.eq(behind_last.data),
        ]
        m.d.comb += [
            self.o.valid.eq(looked.o.valid & ~filling),
            self.o.p.job.eq(job),
            self.o.p.mark.eq(looked.o.p.state),
            self.settled.eq(settled),
            self.blocked.eq(Mux(job.barrier, ~job.again & ~self._none_old,
                                Mux(job.again, ~(own.parked & is_head), own.parked))),
            taken.eq(self.o.valid & self.o.ready),
            behind_job.addr.eq(job.slot),
            behind_last.addr.eq(Mux(filling, last, own.last)),
            link.addr.eq(own.tail),
            link.data.eq(job.slot),
            self._freed.eq(taken & ~self.blocked & ~self.park),
            self._freed_color.eq(job.color),
            self._barrier_left.eq(self._freed & job.barrier),
            appends.eq(taken & ~job.barrier & ~job.again & own.parked),
            head_leaves.eq(self._freed & job.again & ~job.barrier),
            first.eq(Mux(own.open & ~only, behind_end, behind)),
            looked.update.eq(Mux(filling, mark_update, self.mark_update)),
            looked.update_state.eq(Mux(filling, mark_value, self.mark_value)),
            new.eq(own),
            link.en.eq(appends),
        ]
        m.d.sync += [
            Assert(~taken | settled, "Parking: a job is taken too early"),
            Assert(~(taken & job.barrier & self.park), "Parking: a barrier is parked"),
            Assert(~(taken & job.barrier & job.again & ~self._none_old), "Parking: the barrier came too early"),
        ]
        with m.If(taken & job.barrier & self.blocked):
            m.d.sync += [self._aside.eq(1), self._aside_slot.eq(job.slot)]
        with m.If(appends):
            m.d.comb += [looked.update_own.eq(1), new.tail.eq(job.slot), new.length.eq(own.length + 1)]
            with m.If(own.open & all_in & (own.ahead != window)):
                m.d.comb += [self._push.eq(1), self._push_slot.eq(job.slot), new.last.eq(job.slot), new.ahead.eq(own.ahead + 1)]
        with m.Elif(taken & ~self.blocked & self.park):
            m.d.comb += [looked.update_own.eq(1), new.parked.eq(1), new.open.eq(0)]
            with m.If(~job.again):
                m.d.comb += [new.head.eq(job.slot), new.tail.eq(job.slot), new.length.eq(1)]
        with m.Elif(head_leaves):
            m.d.comb += [looked.update_own.eq(1), new.head.eq(behind), new.open.eq(1), new.length.eq(own.length - 1)]
            with m.If(is_tail):
                m.d.comb += [new.parked.eq(0), new.open.eq(0)]
            with m.Elif(~own.open | ~all_in):
                m.d.comb += [self._push.eq(1), self._push_slot.eq(first), new.last.eq(first)]
                with m.If(~own.open):
                    m.d.comb += [new.ahead.eq(1), fills.eq(window > 1)]
            with m.Else():
                m.d.comb += new.ahead.eq(own.ahead - 1)

        # The first job that goes on after a wait takes more of its list along; nothing else is judged meanwhile.
        with m.FSM(name="fill"):
            with m.State("Judge"):
                m.d.comb += looked.o.ready.eq(taken & ~fills)
                with m.If(taken & fills):
                    m.d.sync += [last.eq(first), ahead.eq(1), mark_update.eq(self.mark_update), mark_value.eq(self.mark_value)]
                    m.d.sync += filling.eq(1)
                    m.next = "Look"
            with m.State("Look"):
                m.d.sync += [at_end.eq(last == own.tail), full.eq(ahead == window)]
                m.next = "Latch"
            with m.State("Latch"):
                m.next = "Push"
            with m.State("Push"):
                m.d.comb += [new.head.eq(behind), new.open.eq(1), new.last.eq(last), new.ahead.eq(ahead),
                             new.length.eq(own.length - 1)]  # fmt: skip
                with m.If(at_end | full):
                    m.d.comb += [looked.o.ready.eq(1), looked.update_own.eq(1)]
                    m.d.sync += filling.eq(0)
                    m.next = "Judge"
                with m.Else():
                    m.d.comb += [self._push.eq(1), self._push_slot.eq(behind_end)]
                    m.d.sync += [last.eq(behind_end), ahead.eq(ahead + 1)]
                    m.next = "Look"
        m.d.sync += Assert(~head_leaves | own.parked, Format("Parking: slot {} leaves a list that is not there", job.slot))
