"""Which QP gets the next turn on the transmit street."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import COUNTER, REQUESTER_CFG, SQ_FETCH, CtxTable, QpState
from ..config import Params
from ..qp.table import ContextTable
from ..records import CtxBus, Doorbell, FetchJob, Probe, ProbeEvent, QpEvent, Rewind, SqFlush
from ..stream.arbiter import StreamArbiter
from ..stream.fifo import StreamFifo

__all__ = ["Scheduler"]

PAGE_BYTES = 4096
REQUEUE, REWIND, WAKE, KICK, DOORBELL = range(5)  # sources of events, in the order of the arbiter's inputs


class Scheduler(wiring.Component):
    """Ready list of QPs and the decision how many send WQEs a turn fetches.

    An event (doorbell, completer progress, rewind, state change) puts its QP on the ready list unless it is on it: a FIFO of
    QPNs and one in-list bit per QP in memory. A turn takes the oldest QP, clears its bit, and only then reads the counters, so
    whatever happens later puts the QP back: no wake-up is lost. A rewind with ``sleep`` does not: until any other event of that
    QP its turns give nothing.

    A turn of a QP in RTS fetches ``count`` WQEs: no more than are posted, than the outstanding table and the ring have room for
    beyond ``done_index``, than ``wqe_batch``, and not past the ring's end or a 4 KiB page of it. A QP in ERR gives the
    completer a `SqFlush` (R-ERR-5); any other state gives nothing. All counters are modulo 2^16. A producer counter further
    ahead of ``done_index`` than the ring holds (a driver fault) counts as a full ring.

    Ports: ``doorbell`` (SQ; writes SQ_PRODUCER), ``wake``, ``kick`` (state change), ``rewind`` (writes SQ_FETCH); ``ctx``;
    ``done_index_addr`` / ``done_index`` a 2-cycle read of the completer; ``fetch``, ``flush``; ``probe`` (SCHEDULED),
    ``probe_doorbell`` (SQ_DOORBELL).

    Timing: one event per cycle (one per 3 cycles of one QP) and never blocked by the outputs; one turn per 7 cycles; 12 cycles
    from a doorbell to ``fetch`` when idle. For ``num_qps`` cycles after reset the in-list bits are cleared; events wait.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "doorbell": In(stream.Signature(Doorbell(p.qpn_bits))),
            "wake": In(stream.Signature(QpEvent(p))),
            "kick": In(stream.Signature(QpEvent(p))),
            "rewind": In(stream.Signature(Rewind(p))),
            "ctx": In(CtxBus(p)),
            "done_index_addr": Out(p.qpn_bits),
            "done_index": In(16),
            "fetch": Out(stream.Signature(FetchJob(p))),
            "flush": Out(stream.Signature(SqFlush(p))),
            "probe": Out(Probe()),
            "probe_doorbell": Out(Probe()),
        })  # fmt: skip

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.cfg = cfg = ContextTable(p, CtxTable.REQUESTER_CFG, REQUESTER_CFG, p.num_qps)
        m.submodules.sq_fetch = sq_fetch = ContextTable(p, CtxTable.SQ_FETCH, SQ_FETCH, p.num_qps, engine_writes=True)
        m.submodules.producer = producer = ContextTable(p, CtxTable.SQ_PRODUCER, COUNTER, p.num_qps, engine_writes=True)
        m.submodules.ready_list = ready_list = StreamFifo(unsigned(p.qpn_bits), p.num_qps)
        event_shape = data.StructLayout({"qpn": p.qpn_bits, "index": 16, "epoch": 8, "sleep": 1})
        m.submodules.events = events = StreamArbiter(event_shape, 5, skid=True, ahead=True)
        m.submodules.in_list = in_list = memory.Memory(shape=unsigned(1), depth=p.num_qps, init=[])
        m.submodules.asleep = asleep = memory.Memory(shape=unsigned(1), depth=p.num_qps, init=[])
        bit_write = in_list.write_port()
        bit_read = in_list.read_port()
        sleep_write, sleep_read = asleep.write_port(), asleep.read_port()

        qpn = Signal(p.qpn_bits)  # whose turn it is
        take = Signal()
        turn_busy = Signal()  # counters are being read or written: SQ_FETCH of `qpn` must not change
        turn_write = Signal()
        requeue = Signal()  # the QP `requeue_qpn` goes back on the list
        requeue_qpn = Signal(p.qpn_bits)

        # ---- context bus. A turn's read-modify-write of SQ_FETCH must not undo a write of the command engine.
        # Its write in the cycle in which a turn starts is still before the turn's read.
        ctx_fetch, ctx_waits = Signal(), Signal()
        m.d.sync += ctx_waits.eq(ctx_fetch)
        m.d.comb += ctx_fetch.eq(self.ctx.valid & (self.ctx.payload.table == CtxTable.SQ_FETCH))
        for table in (cfg, sq_fetch, producer):
            m.d.comb += [table.ctx.payload.eq(self.ctx.payload), table.ctx.valid.eq(self.ctx.valid)]
        m.d.comb += [
            sq_fetch.ctx.valid.eq(self.ctx.valid & ~turn_busy),
            self.ctx.ready.eq(cfg.ctx.ready & producer.ctx.ready & sq_fetch.ctx.ready & ~(ctx_fetch & turn_busy)),
        ]

        # ---- events: one stream, then the in-list bit is read, registered, and set if it was not.
        for source, port in ((REWIND, self.rewind), (WAKE, self.wake), (KICK, self.kick), (DOORBELL, self.doorbell)):
            i = events.i[source]
            m.d.comb += [i.valid.eq(port.valid), port.ready.eq(i.ready)]
            m.d.comb += i.payload.qpn.eq(port.payload.id if source == DOORBELL else port.payload.qpn)
        m.d.comb += [
            events.i[REQUEUE].valid.eq(requeue),
            events.i[REQUEUE].payload.qpn.eq(requeue_qpn),
            events.i[REWIND].payload.index.eq(self.rewind.payload.index),
            events.i[REWIND].payload.epoch.eq(self.rewind.payload.epoch),
            events.i[REWIND].payload.sleep.eq(self.rewind.payload.sleep),
            events.i[DOORBELL].payload.index.eq(self.doorbell.payload.counter),
        ]
        event = events.o.payload
        is_rewind = Signal()
        is_doorbell = Signal()
        event_blocked = Signal()
        event_taken = Signal()
        sweep = Signal(range(p.num_qps))  # clears the in-list bits after reset
        sweeping = Signal(init=1)
        s1_valid, s2_valid, s2_bit = Signal(), Signal(), Signal()
        s1_qpn, s2_qpn = Signal(p.qpn_bits), Signal(p.qpn_bits)
        put = Signal()
        m.d.comb += [
            is_rewind.eq(events.source == REWIND),
            is_doorbell.eq(events.source == DOORBELL),
            event_blocked.eq(
                sweeping
                | (s1_valid & (s1_qpn == event.qpn))
                | (s2_valid & (s2_qpn == event.qpn))
                | (is_rewind & turn_busy & ((qpn == event.qpn) | turn_write))
            ),
            event_taken.eq(events.o.valid & ~event_blocked),
            events.o.ready.eq(~event_blocked),
            bit_read.addr.eq(event.qpn),
            put.eq(s2_valid & ~s2_bit),
            ready_list.i.valid.eq(put),
            ready_list.i.payload.eq(s2_qpn),
            producer.write_en.eq(event_taken & is_doorbell),
            producer.write_index.eq(event.qpn),
            producer.write_words.eq(1),
            producer.write_data.value.eq(event.index),
        ]
        m.d.sync += [
            s1_valid.eq(event_taken & ~event.sleep), s1_qpn.eq(event.qpn),
            s2_valid.eq(s1_valid), s2_qpn.eq(s1_qpn), s2_bit.eq(bit_read.data),
            Assert(~put | ready_list.i.ready, Format("Scheduler: ready list full at QP {}", s2_qpn)),
        ]  # fmt: skip
        with m.If(sweeping):
            m.d.sync += [sweep.eq(sweep + 1), sweeping.eq(sweep != p.num_qps - 1)]
            m.d.comb += [
                bit_write.en.eq(1), bit_write.addr.eq(sweep), bit_write.data.eq(0),
                sleep_write.en.eq(1), sleep_write.addr.eq(sweep), sleep_write.data.eq(0),
            ]  # fmt: skip
        with m.Elif(put):
            m.d.comb += [bit_write.en.eq(1), bit_write.addr.eq(s2_qpn), bit_write.data.eq(1)]
        with m.Elif(take):
            m.d.comb += [bit_write.en.eq(1), bit_write.addr.eq(ready_list.o.payload), bit_write.data.eq(0)]
        with m.If(events.i[REQUEUE].ready):
            m.d.sync += requeue.eq(0)
        with m.If(~sweeping):
            m.d.comb += [
                sleep_write.en.eq(event_taken & (events.source != REQUEUE)),
                sleep_write.addr.eq(event.qpn),
                sleep_write.data.eq(event.sleep),
            ]

        m.d.comb += sleep_read.addr.eq(qpn)
        self._elaborate_turn(m, cfg, sq_fetch, producer, ready_list, qpn, take, turn_busy, turn_write, requeue,
                             requeue_qpn, sleep_read.data, blocked=sweeping | put | ctx_waits)

        with m.If(~turn_write):
            m.d.comb += [
                sq_fetch.write_en.eq(event_taken & is_rewind),
                sq_fetch.write_index.eq(event.qpn),
                sq_fetch.write_data.index.eq(event.index),
                sq_fetch.write_data.epoch.eq(event.epoch),
            ]
        m.d.comb += sq_fetch.write_words.eq(1)
        m.d.sync += [
            self.probe_doorbell.valid.eq(event_taken & is_doorbell),
            self.probe_doorbell.event.eq(ProbeEvent.SQ_DOORBELL),
            self.probe_doorbell.qpn.eq(event.qpn),
            self.probe_doorbell.index.eq(event.index),
        ]
        return m

    def _elaborate_turn(self, m, cfg, sq_fetch, producer, ready_list, qpn, take, turn_busy, turn_write, requeue,
                        requeue_qpn, asleep, *, blocked):  # fmt: skip
        """The FSM of a turn: seven states, none waits on anything outside."""
        p = self.p
        fetch_free, flush_free = Signal(), Signal()
        state = Signal(QpState)
        index, tail, pending, used, ahead, done = (Signal(16, name=n) for n in
                                                   ("index", "tail", "pending", "used", "ahead", "done"))  # fmt: skip
        ring, ring_left = Signal(16), Signal(16)  # entries of the ring (1..2^15), from `index` to its end
        page_left = Signal(range(PAGE_BYTES // 64 + 1))
        capacity = Signal(range(p.sq_outstanding + 1))
        room = Signal(range(p.sq_outstanding + 1))
        overrun = Signal()
        sleeps = Signal()
        page_near, ring_near, near, count = (Signal(p.wqe_batch_bits, name=n) for n in
                                             ("page_near", "ring_near", "near", "count"))  # fmt: skip
        log_sq, log_stride, epoch = Signal(4), Signal(4), Signal(8)
        cfg_now, fetch_now, producer_now = cfg.read_0, sq_fetch.read_0, producer.read_0

        def at_most(value, bound: int):
            return Mux(value > bound, bound, value)

        m.d.comb += [
            fetch_free.eq(~self.fetch.valid | self.fetch.ready),
            flush_free.eq(~self.flush.valid | self.flush.ready),
            cfg.read_index_0.eq(qpn),
            sq_fetch.read_index_0.eq(qpn),
            producer.read_index_0.eq(qpn),
            self.done_index_addr.eq(qpn),
            self.probe.event.eq(ProbeEvent.SCHEDULED),
            self.probe.qpn.eq(self.fetch.payload.qpn),
            self.probe.index.eq(self.fetch.payload.index),
            self.probe.length.eq(self.fetch.payload.count),
        ]
        m.d.sync += self.probe.valid.eq(0)
        with m.If(self.fetch.ready):
            m.d.sync += self.fetch.valid.eq(0)
        with m.If(self.flush.ready):
            m.d.sync += self.flush.valid.eq(0)

        with m.FSM(name="turn") as turn:
            m.d.comb += turn_busy.eq(~turn.ongoing("IDLE"))
            with m.State("IDLE"):
                # The in-list bit goes first, the counters are read from the next cycle on.
                m.d.comb += [
                    take.eq(ready_list.o.valid & fetch_free & ~requeue & ~blocked),
                    ready_list.o.ready.eq(take),
                ]
                with m.If(take):
                    m.d.sync += qpn.eq(ready_list.o.payload)
                    m.next = "READ"
            with m.State("READ"):
                m.next = "WAIT"
            with m.State("WAIT"):
                m.next = "DIFFERENCES"
            with m.State("DIFFERENCES"):
                m.d.sync += [
                    state.eq(cfg_now.state),
                    sleeps.eq(asleep),
                    index.eq(fetch_now.index),
                    epoch.eq(fetch_now.epoch),
                    tail.eq(producer_now.value[:16]),
                    done.eq(self.done_index),
                    log_sq.eq(cfg_now.log_sq),
                    log_stride.eq(cfg_now.log_stride),
                    pending.eq(producer_now.value[:16] - fetch_now.index),
                    used.eq(fetch_now.index - self.done_index),
                    ahead.eq(producer_now.value[:16] - self.done_index),
                    ring.eq(1 << cfg_now.log_sq),
                    ring_left.eq((~fetch_now.index & ((1 << cfg_now.log_sq) - 1)) + 1),
                    page_left.eq(Mux(cfg_now.log_stride == 7, 32 - fetch_now.index[:5], 64 - fetch_now.index[:6])),
                ]
                m.next = "LIMITS"
            with m.State("LIMITS"):
                m.d.comb += [
                    capacity.eq(at_most(ring, p.sq_outstanding)),
                    page_near.eq(at_most(page_left, p.wqe_batch)),
                    ring_near.eq(at_most(ring_left, p.wqe_batch)),
                ]
                m.d.sync += [
                    room.eq(Mux(used < capacity, capacity - used, 0)),
                    near.eq(Mux(page_near < ring_near, page_near, ring_near)),
                    overrun.eq(ahead > ring),
                ]
                m.next = "COUNT"
            with m.State("COUNT"):
                m.d.sync += count.eq(near)
                with m.If((pending < room) & (pending < near)):
                    m.d.sync += count.eq(pending)
                with m.Elif(room < near):
                    m.d.sync += count.eq(room)
                m.next = "GRANT"
            with m.State("GRANT"):
                with m.If((state == QpState.RTS) & (count != 0) & ~sleeps):
                    m.d.comb += [
                        turn_write.eq(1),
                        sq_fetch.write_en.eq(1),
                        sq_fetch.write_index.eq(qpn),
                        sq_fetch.write_data.index.eq(index + count),
                        sq_fetch.write_data.epoch.eq(epoch),
                    ]
                    m.d.sync += [
                        self.fetch.valid.eq(1),
                        self.fetch.payload.qpn.eq(qpn),
                        self.fetch.payload.index.eq(index),
                        self.fetch.payload.count.eq(count),
                        self.fetch.payload.epoch.eq(epoch),
                        self.fetch.payload.log_sq.eq(log_sq),
                        self.fetch.payload.log_stride.eq(log_stride),
                        self.probe.valid.eq(1),
                        requeue.eq((pending > count) & (room > count)),
                        Assert(fetch_free, Format("Scheduler: fetch job of QP {} lost", qpn)),
                    ]
                with m.Elif((state == QpState.ERR) & (ahead != 0)):
                    with m.If(flush_free):  # R-ERR-5
                        m.d.sync += [
                            self.flush.valid.eq(1),
                            self.flush.payload.qpn.eq(qpn),
                            self.flush.payload.producer.eq(Mux(overrun, done + ring, tail)),
                        ]
                    with m.Else():
                        m.d.sync += requeue.eq(1)  # others must not wait for a busy completer
                m.d.sync += requeue_qpn.eq(qpn)
                m.next = "IDLE"
