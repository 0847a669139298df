"""Sequence stage of the responder: what a request's header and its QP's context decide."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import RESPONDER_CFG, RESPONDER_HOT, Access, CtxTable, QpState, QpType
from ..abi.contexts import COUNTER
from ..abi.queues import CqeFlags
from ..config import Params
from ..qp.halves import HalvedTable
from ..qp.table import ContextTable
from ..records import CtxBus, Doorbell, Probe, ProbeEvent, QpEvent, RequestDesc
from ..stream.buffer import StreamRegister
from ..wire.opcode import Kind, OpcodeFlags, PayloadRule, decode
from ..wire.syndrome import NakCode, ack_syndrome, nak_syndrome
from .atomic import Operands
from .queue import Queue
from .records import AtomicOp, Job, JobKind
from .sequence_records import SECOND_HALF, Cfg, Checked, Hot, Item, Judged, Message, NakState

__all__ = ["Sequence"]


class Sequence(wiring.Component):
    """Checks 1 to 6, 8 and the resource part of rules.md 8.1, in that order, and the QP's receive state.

    Every request becomes exactly one `Job`, in order: to place, to answer, or to throw away (its cells are freed further
    on). The order of checks 7 and 8 is kept by ``nak_after_key``. A READ or ATOMIC takes its PSNs here, its operands leave on
    ``operands_*``; a duplicate of one becomes a REPLAY job.
    Only RC requests are accepted, in RTR, RTS, SQD and SQE; others become dropped jobs.

    A flush event, or a doorbell, of a QP in ERR becomes a FLUSH job behind that QP's packets (R-ERR-3, R-ERR-5). A flush event
    of a QP in another state becomes one that completes nothing: it shows when the QP has drained (R-QP-4, R-QP-7).

    Timing: a pipe of 4 stages without back-pressure, since the job FIFO (``p.desc_depth``) is reserved at its entrance;
    request to job 7 cycles, 6 where the FIFO does without an entry register (`Queue`); one request every 2 cycles for different
    QPs, one per 4 cycles for one QP, whose next request waits for the write-back. Doorbells go first, then flushes, then
    requests.

    Members: ``request``, ``doorbell`` (RQ), ``flush``, ``ctx`` in; ``job`` out; ``finished_addr``/``finished``, READs and
    ATOMICs of a QP answered, 2 cycles; pulses ``duplicate``, ``out_of_sequence``;
    ``probe_checked``, ``probe_taken``, ``probe_doorbell``.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "request": In(stream.Signature(RequestDesc(p))),
            "doorbell": In(stream.Signature(Doorbell(p.qpn_bits))),
            "flush": In(stream.Signature(QpEvent(p))),
            "ctx": In(CtxBus(p)),
            "job": Out(stream.Signature(Job(p))),
            "finished_addr": Out(p.qpn_bits),
            "finished": In(8),
            "operands_en": Out(1),
            "operands_qpn": Out(p.qpn_bits),
            "operands_index": Out(16),
            "operands_data": Out(Operands()),
            "duplicate": Out(1),
            "out_of_sequence": Out(1),
            "probe_checked": Out(Probe()),
            "probe_taken": Out(Probe()),
            "probe_doorbell": Out(Probe()),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.cfg = cfg = ContextTable(p, CtxTable.RESPONDER_CFG, RESPONDER_CFG, p.num_qps)
        fields = [RESPONDER_HOT.fields[name] for name in SECOND_HALF]
        seconds = {field.offset // 32 + i for field in fields for i in range(-(-field.width // 32))}
        m.submodules.hot = hot = HalvedTable(p, CtxTable.RESPONDER_HOT, RESPONDER_HOT, p.num_qps, tuple(sorted(seconds)))
        m.submodules.producer = producer = ContextTable(p, CtxTable.RQ_PRODUCER, COUNTER, p.num_qps, engine_writes=True,
                                                    transparent=True)
        m.submodules.jobs = jobs = Queue(Job(p), p.desc_depth, direct=True)
        wiring.connect(m, jobs.o, wiring.flipped(self.job))
        self._hot, self._jobs = hot, jobs
        self._made = Signal()  # stage 4 makes a job
        self._hot_waits = Signal()  # a command wants to write the hot table

        # Four stages: 1 and 2 wait for the tables, 3 and 4 hold results of the checks. An item stays in the entrance's register
        # while it enters and in stage 1, in another one in stages 2 and 3: one enters every other cycle.
        self._valid = [Signal(name=f"stage{i}_valid") for i in range(1, 5)]
        self._writes_second = Signal()  # stage 4 was valid in the cycle before: the second half of the state is written
        self._item, self._flags = Signal(Item(p)), Signal(OpcodeFlags)  # in stages 2 and 3
        self._stage3 = Signal(Judged(p))
        self._stage4 = Signal(Checked(p))

        entry = self._entrance(m, producer)
        for table in (cfg, producer):
            m.d.comb += table.read(0)[0].eq(entry.desc.qpn)
        m.d.comb += [
            hot.read_index.eq(entry.desc.qpn),
            hot.read_second.eq(self._valid[0]),  # while the item enters the first half is asked for, in stage 1 the second
            self.finished_addr.eq(entry.desc.qpn),
        ]
        flags1 = decode(m, entry.desc.opcode, name="flags1")
        for i in range(1, 4):
            m.d.sync += self._valid[i].eq(self._valid[i - 1])
        m.d.sync += self._writes_second.eq(self._valid[3])
        with m.If(self._valid[0]):
            m.d.sync += [self._item.eq(entry), self._flags.eq(flags1)]

        self._context_bus(m, (cfg, hot, producer))
        self._check(m, self._item, self._flags, cfg.read(0)[1], hot.first, producer.read(0)[1])
        self._arithmetic(m)
        self._decide(m)
        return m

    def _entrance(self, m, producer):
        """Chooses what enters the pipe; returns the item."""
        p = self.p
        m.submodules.chosen = chosen = StreamRegister(Item(p))
        choice, entry = chosen.i.payload, chosen.o.payload
        busy = Signal()  # an earlier item of this QP has not written back
        room = Signal()
        enter = Signal()
        credits = Signal(range(p.desc_depth + 1), init=p.desc_depth)  # job FIFO places not promised to anyone
        stored = Signal()  # the counter of the doorbell at hand, which waits
        m.d.sync += stored.eq(chosen.o.valid & ~chosen.o.ready)
        m.d.comb += [
            # The counter (in the PSN's place) is seen by what enters with it or later. Written once: a command may wait.
            producer.write_en.eq(chosen.o.valid & entry.event & entry.doorbell & ~stored),
            producer.write_index.eq(entry.desc.qpn),
            producer.write_words.eq(1),
            producer.write_data.value.eq(entry.desc.psn[:16]),
            self.probe_doorbell.valid.eq(self.doorbell.valid & self.doorbell.ready),
            self.probe_doorbell.event.eq(ProbeEvent.RQ_DOORBELL),
            self.probe_doorbell.qpn.eq(self.doorbell.p.id),
            self.probe_doorbell.index.eq(self.doorbell.p.counter[:16]),
            room.eq(credits != 0),
            chosen.i.valid.eq(self.doorbell.valid | self.flush.valid | self.request.valid),
            enter.eq(chosen.o.valid & ~self._valid[0] & room & ~busy & ~self._hot_waits),
            chosen.o.ready.eq(self._valid[0]),
            self.doorbell.ready.eq(chosen.i.ready),
            choice.desc.eq(self.request.payload),
        ]
        with m.If(self.doorbell.valid):
            m.d.comb += [
                choice.event.eq(1), choice.doorbell.eq(1), choice.desc.qpn.eq(self.doorbell.p.id),
                choice.desc.psn.eq(self.doorbell.p.counter),
            ]  # fmt: skip
        with m.Elif(self.flush.valid):
            m.d.comb += [choice.event.eq(1), choice.desc.qpn.eq(self.flush.p.qpn), self.flush.ready.eq(chosen.i.ready)]
        with m.Else():
            m.d.comb += self.request.ready.eq(chosen.i.ready)

        # Stage 4 writes what is read in its cycle.
        m.d.comb += busy.eq((self._valid[1] | self._valid[2]) & (self._item.desc.qpn == entry.desc.qpn))
        m.d.sync += self._valid[0].eq(enter)
        returned = Signal()  # a job left, or an event made none
        unused = Signal()
        m.d.comb += [
            returned.eq(self._jobs.o.valid & self._jobs.o.ready),
            unused.eq(self._valid[3] & ~self._made),
        ]
        m.d.sync += [
            credits.eq(credits - enter + returned + unused),
            Assert(credits <= p.desc_depth, Format("responder: {} credits of {}", credits, p.desc_depth)),
        ]
        return entry

    def _context_bus(self, m, tables):
        """A command's write to the hot table waits until no packet is about to write it; meanwhile none enters."""
        write = self.ctx.payload
        conflict = Signal()
        m.d.comb += [
            self._hot_waits.eq(self.ctx.valid & (write.table == CtxTable.RESPONDER_HOT)),
            conflict.eq((write.table == CtxTable.RESPONDER_HOT) & Cat(self._valid, self._writes_second).any()),
            self.ctx.ready.eq(~conflict & Cat(table.ctx.ready for table in tables).all()),
        ]
        for table in tables:
            m.d.comb += [table.ctx.valid.eq(self.ctx.valid & ~conflict), table.ctx.payload.eq(write)]

    def _check(self, m, item, flags, cfg, hot, producer):
        """Stage 2 to 3: checks 2 to 6 of 8.1, each on its own."""
        desc = item.desc
        out = self._stage3
        is_send, is_write, is_read, is_atomic = Signal(), Signal(), Signal(), Signal()
        aligned = Signal()
        pmtu = Signal(13)
        is_pmtu, over_pmtu = Signal(), Signal()
        inside = Signal()  # the packet goes on with the message under way
        length_ok = Signal()
        with m.Switch(cfg.path_mtu):
            for code in range(1, 6):
                with m.Case(code):
                    m.d.comb += pmtu.eq(128 << code)
        m.d.comb += [
            is_send.eq(flags.kind == Kind.SEND),
            is_write.eq(flags.kind == Kind.WRITE),
            is_read.eq(flags.kind == Kind.READ_REQ),
            is_atomic.eq((flags.kind == Kind.CMP_SWAP) | (flags.kind == Kind.FETCH_ADD)),
            aligned.eq(~is_atomic | (desc.va[:3] == 0)),  # check 9 (R-AT-1), before check 7
            inside.eq((is_send & (hot.message == Message.SEND)) | (is_write & (hot.message == Message.WRITE))),
            is_pmtu.eq(desc.length == pmtu),  # R-LEN-1
            over_pmtu.eq(desc.length > pmtu),
        ]
        with m.Switch(flags.payload):
            with m.Case(PayloadRule.ZERO):  # R-LEN-4
                m.d.comb += length_ok.eq(desc.length == 0)
            with m.Case(PayloadRule.PMTU):  # R-LEN-1, R-PAD-2
                m.d.comb += length_ok.eq(is_pmtu & (desc.pad == 0))
            with m.Case(PayloadRule.ONE_TO_PMTU):
                m.d.comb += length_ok.eq((desc.length != 0) & ~over_pmtu)  # R-LEN-1
            with m.Default():
                m.d.comb += length_ok.eq(~over_pmtu)

        long_write, long_send, pad_ok = Signal(), Signal(), Signal()
        m.d.comb += [
            # R-LEN-2: a RETH above 2^31; a SEND goes above 2^31 only from a packet border, PMTU divides it.
            long_write.eq((is_write | is_read) & flags.starts & desc.dma_length[31] & desc.dma_length[:31].any()),
            long_send.eq(is_send & ~flags.starts & hot.resid[31]),
            pad_ok.eq((desc.length[:2] + desc.pad)[:2] == 0),  # R-PAD-1
        ]
        state_ok, wants = Signal(), Signal(8)
        with m.Switch(cfg.state):
            with m.Case(QpState.RTR, QpState.RTS, QpState.SQD, QpState.SQE):  # R-QP-2, R-QP-5
                m.d.comb += state_ok.eq(1)
        with m.Switch(flags.kind):
            with m.Case(Kind.WRITE):  # 8.1#3
                m.d.comb += wants.eq(Access.REMOTE_WRITE)
            with m.Case(Kind.READ_REQ):
                m.d.comb += wants.eq(Access.REMOTE_READ)
            with m.Case(Kind.CMP_SWAP, Kind.FETCH_ADD):
                m.d.comb += wants.eq(Access.REMOTE_ATOMIC)
        m.d.sync += [
            *(out.cfg[name].eq(cfg[name]) for name in Cfg(self.p).members),
            *(out.hot[name].eq(hot[name]) for name in Hot().members),
            out.producer.eq(producer.value),
            out.has_data.eq(desc.length != 0),
            out.drop.eq(~(state_ok & (cfg.type == QpType.RC) & flags.is_request) | (hot.nak_state == NakState.FATAL)),
            out.in_error.eq(cfg.state == QpState.ERR),
            out.order_ok.eq(Mux(flags.starts, hot.message == Message.NONE, inside)),  # 8.1#2
            out.access_ok.eq((wants & ~cfg.access) == 0),  # 8.1#3
            out.open_requests.eq(hot.requests - self.finished),  # R-DUP-6, 8.1#4
            out.no_rwqe.eq(flags.takes_rwqe & (producer.value[:16] == hot.rq_index)),  # 8.1#5, R-OPC-2
            out.length_ok.eq(length_ok & pad_ok & aligned & ~long_write & ~long_send),  # 8.1#6, 8.1#9
            out.is_send.eq(is_send),
            out.is_write.eq(is_write),
            out.is_read.eq(is_read),
            out.is_atomic.eq(is_atomic),
            out.op.eq(Mux(is_read, AtomicOp.READ, Mux(flags.kind == Kind.CMP_SWAP, AtomicOp.CMP_SWAP, AtomicOp.FETCH_ADD))),
            # SEND: bytes before this packet. Others: bytes from this packet on.
            # R-RES-1
            out.resid.eq(Mux(is_atomic, 8, Mux(flags.starts, desc.dma_length & (is_write | is_read).replicate(32), hot.resid))),
        ]
        self._delta3 = Signal(24)
        self._pmtu3 = Signal(13)
        self._mtu3 = Signal(3)
        self._before_last3 = Signal(32)  # READ: offset of the last byte
        m.d.sync += [
            self._delta3.eq(desc.psn - hot.epsn),  # 8.1#1
            self._pmtu3.eq(pmtu),
            self._mtu3.eq(cfg.path_mtu),
            self._before_last3.eq((desc.dma_length - 1) & (is_read & (desc.dma_length != 0)).replicate(32)),
        ]

    def _arithmetic(self, m):
        """Stage 3 to 4: comparisons of 24 and 32 bits, sums."""
        stage, out = self._stage3, self._stage4
        desc, hot, flags = self._item.desc, stage.hot, self._flags
        second = self._hot.second
        fits = Signal()
        va = Signal(64)
        more_psns = Signal(24)  # R-PSN-3
        m.d.comb += [
            va.eq(Mux(flags.starts, desc.va, second.va)),
            fits.eq(stage.resid <= self._pmtu3),
            more_psns.eq(self._before_last3[7:] >> self._mtu3),
        ]
        self._here, self._behind = Signal(), Signal()
        self._early, self._length_bad, self._resid_bad = Signal(), Signal(), Signal()
        resid_bad = Signal()
        # R-LEN-3: the last packet carries exactly the rest, and no packet before it may.
        m.d.comb += resid_bad.eq(stage.is_write & Mux(flags.ends, stage.resid != desc.length, fits))
        self._next_psn, self._next_msn = Signal(24), Signal(24)
        self._resource = Signal()  # READ or ATOMIC
        self._next_resid, self._va4 = Signal(32), Signal(64)
        self._next_rq = Signal(16)
        self._next_va_low, self._reack_psn = Signal(33), Signal(24)
        # What stage 4 decides from stays one more cycle, for the second half of the state.
        results = [
            out.item.eq(self._item),
            out.flags.eq(flags),
            *(out[name].eq(stage[name]) for name in Judged(self.p).members),
            out.rkey.eq(Mux(flags.starts, desc.rkey, second.rkey)),  # R-RES-1
            out.total.eq(Mux(flags.starts, desc.dma_length, second.total)),
            self._here.eq(self._delta3 == 0),  # 8.1#1
            self._behind.eq(self._delta3[23]),  # R-PSN-1: a distance of 2^23 is behind
            self._early.eq(~stage.order_ok | ~stage.access_ok | (
                (stage.is_read | stage.is_atomic) & (stage.open_requests >= stage.cfg.max_dest_rd_atomic))),
            self._resid_bad.eq(resid_bad),
            self._length_bad.eq(~stage.length_ok | (resid_bad & (stage.resid == 0))),
            self._next_psn.eq((Cat(Const(1, 1), hot.epsn) + Cat(Const(1, 1), more_psns))[1:]),  # one adder with carry in
            self._resource.eq(stage.is_read | stage.is_atomic),
            self._next_msn.eq(hot.msn + 1),  # R-MSN-1
            self._next_rq.eq(hot.rq_index + 1),  # R-WQ-8
            self._reack_psn.eq(Mux(second.accepted, second.ack_psn, hot.epsn - 1)),  # R-DUP-1, R-DUP-2
            self._next_resid.eq(Mux(stage.is_write, stage.resid - desc.length, stage.resid + desc.length)),  # R-LEN-3
            self._va4.eq(va),
            self._next_va_low.eq(va[:32] + desc.length),
        ]
        with m.If(self._valid[2]):
            m.d.sync += results

    def _decide(self, m):
        """Stage 4: the verdict in the order of 8.1, the new state, the job."""
        stage, write = self._stage4, self._hot.write_data
        job = Signal(Job(self.p))
        desc, hot, flags = stage.item.desc, stage.hot, stage.flags
        valid = self._valid[3]
        nak_state = Signal(2)
        accept = Signal()  # the packet changes the QP's state
        note = Signal()  # only nak_state changes
        fatal = Signal()
        takes = Signal()
        replay = Signal()
        packet = Signal()
        invalid = nak_syndrome(NakCode.INVALID_REQUEST)

        m.d.comb += [
            packet.eq(valid & ~stage.item.event),
            job.qpn.eq(desc.qpn),
            job.psn.eq(desc.psn),
            job.length.eq(desc.length),
            job.head.eq(desc.head),
            job.has_data.eq(stage.has_data & ~stage.item.event),
            job.response_psn.eq(desc.psn),
            job.msn.eq(hot.msn),
            job.msn_before.eq(hot.msn),  # 8.2
            job.cqn.eq(stage.cfg.cqn),
            job.pd.eq(stage.cfg.pd),
            job.log_rq.eq(stage.cfg.log_rq),
            job.write_imm.eq(stage.is_write),
            job.flags.eq(Mux(
                self._resource, stage.op,
                Mux(flags.has_imm, CqeFlags.WITH_IMM, 0) | Mux(flags.has_ieth, CqeFlags.WITH_INV, 0)  # R-CQ-4
                | Mux(desc.solicited, CqeFlags.SOLICITED, 0)
            )),
            job.imm.eq(Mux(self._resource, stage.rkey, desc.imm & (flags.has_imm | flags.has_ieth).replicate(32))),
            job.byte_len.eq(Mux(stage.is_write | stage.is_read, stage.total, self._next_resid)),  # R-CQ-3
            job.va.eq(self._va4),
            job.rkey.eq(stage.rkey),
            job.resid.eq(stage.resid),
            job.starts.eq(flags.starts),
            job.index.eq(Mux(takes, hot.rq_index, hot.cqe_index)),
            job.fatal.eq(fatal),
            self._made.eq(valid & ~(stage.item.doorbell & ~stage.in_error)),
            takes.eq(flags.takes_rwqe & accept),
        ]
        with m.If(stage.item.event):
            m.d.comb += [
                job.kind.eq(JobKind.FLUSH),
                job.complete.eq(stage.in_error),
                job.index.eq(stage.producer),
                job.length.eq(0),
            ]
        with m.Elif(stage.drop):
            m.d.comb += job.dropped.eq(1)
        with m.Elif(self._behind):
            # Only a cumulative ACK, or the answer once more; no change of state.
            m.d.comb += [
                self.duplicate.eq(packet),  # R-SEQ-3, R-DUP-7
                replay.eq(self._resource & stage.length_ok & ~stage.has_data),  # R-DUP-3, R-DUP-5
                job.kind.eq(Mux(replay, JobKind.REPLAY, JobKind.NONE)),
                job.respond.eq(stage.is_send | stage.is_write | replay),  # R-DUP-1, R-DUP-2, R-DUP-8
                job.syndrome.eq(ack_syndrome()),
                job.response_psn.eq(Mux(replay, desc.psn, self._reack_psn)),
            ]
        with m.Elif(~self._here):
            # R-SEQ-1, R-SEQ-2, R-SEQ-4: one NAK a gap, none after an RNR NAK.
            m.d.comb += [
                self.out_of_sequence.eq(packet),
                job.respond.eq(hot.nak_state == NakState.NONE),  # R-SEQ-1, R-SEQ-2
                job.syndrome.eq(nak_syndrome(NakCode.PSN_SEQUENCE)),
                job.response_psn.eq(hot.epsn),  # R-SEQ-4
                note.eq(job.respond),
                nak_state.eq(NakState.SEQUENCE),
            ]
        with m.Elif(self._early):  # checks 2, 3, 4 (R-DUP-6)
            # 8.2: the receive WQE of a SEND under way completes in error.
            m.d.comb += [
                fatal.eq(1),
                job.in_use.eq(hot.message == Message.SEND),  # 8.2
            ]
        with m.Elif(stage.no_rwqe):  # check 5 (R-RES-4, R-RES-6, R-RNR-4)
            m.d.comb += [
                job.respond.eq(1),
                job.syndrome.eq(Cat(stage.cfg.min_rnr_timer, Const(1, 3))),  # R-RNR-4
                note.eq(1),
                nak_state.eq(NakState.RNR),  # R-SEQ-2
            ]
        with m.Elif(self._length_bad):  # check 6; 8 where R-RES-2 skips 7; 9
            # R-RES-5: a WRITE with immediate data gives its receive WQE back.
            m.d.comb += [
                fatal.eq(1),
                job.in_use.eq(stage.is_send),
                job.index.eq(Mux(flags.takes_rwqe, hot.rq_index, hot.cqe_index)),
            ]
        with m.Elif(self._resid_bad):  # check 8, behind check 7
            m.d.comb += [
                job.kind.eq(JobKind.WRITE),
                job.nak_after_key.eq(1),
                note.eq(1),
                nak_state.eq(NakState.FATAL),
            ]
        with m.Elif(self._resource):
            m.d.comb += [
                accept.eq(1),
                job.kind.eq(Mux(stage.is_read, JobKind.READ, JobKind.ATOMIC)),
                job.respond.eq(1),
                job.msn.eq(self._next_msn),  # R-MSN-1
                job.length.eq(Mux(stage.is_atomic, 8, 0)),
                job.starts.eq(stage.is_atomic | (stage.resid != 0)),  # R-RES-2
                job.index.eq(hot.requests),
                self.operands_en.eq(packet & stage.is_atomic),
            ]
        with m.Else():
            m.d.comb += [
                accept.eq(1),
                job.kind.eq(Mux(stage.is_send, JobKind.SEND, JobKind.WRITE)),
                job.in_use.eq(stage.is_send),
                job.complete.eq(flags.makes_cqe),
                job.fetch.eq(stage.is_send & flags.takes_rwqe),
                job.respond.eq(desc.ackreq),  # R-ACK-1
                job.syndrome.eq(ack_syndrome()),  # R-CRD-1
                job.msn.eq(Mux(flags.ends, self._next_msn, hot.msn)),  # R-MSN-1
                nak_state.eq(NakState.NONE),
            ]
        with m.If(fatal):
            m.d.comb += [job.respond.eq(1), job.syndrome.eq(invalid), note.eq(1), nak_state.eq(NakState.FATAL)]

        m.d.comb += [
            # Perhaps no word: the choice of the address shall not wait for the verdict.
            self._hot.write_en.eq((valid | self._writes_second) & ~stage.item.event),
            self._hot.write_index.eq(desc.qpn),
            self._hot.write_second.eq(self._writes_second),
            self._hot.write_words.eq(Mux(accept, -1, note)),
            write.epsn.eq(Mux(accept, self._next_psn, hot.epsn)),  # R-PSN-3, R-RES-7
            write.nak_state.eq(nak_state),
            write.msn.eq(job.msn),
            write.message.eq(Mux(flags.ends, Message.NONE, Mux(stage.is_send, Message.SEND, Message.WRITE))),  # R-DUP-8, 8.1#2
            write.rq_index.eq(Mux(takes, self._next_rq, hot.rq_index)),
            write.cqe_index.eq(Mux(takes, hot.rq_index, hot.cqe_index)),
            write.resid.eq(self._next_resid),  # R-RES-1
            write.va.eq(Cat(self._next_va_low[:32], self._va4[32:] + self._next_va_low[32])),
            write.rkey.eq(stage.rkey),
            write.ack_psn.eq(Mux(self._resource, self._reack_psn, desc.psn)),  # never inside a READ (R-DUP-2)
            write.requests.eq(hot.requests + self._resource),
            self.operands_qpn.eq(desc.qpn),
            self.operands_index.eq(hot.requests),
            self.operands_data.swap.eq(desc.swap),
            self.operands_data.compare.eq(desc.compare),
            write.accepted.eq(1),
            write.total.eq(stage.total),
            self.probe_checked.valid.eq(packet),
            self.probe_checked.event.eq(ProbeEvent.REQUEST_CHECKED),
            self.probe_checked.qpn.eq(desc.qpn),
            self.probe_checked.psn.eq(desc.psn),
            self.probe_checked.opcode.eq(desc.opcode),
            self.probe_checked.length.eq(desc.length),
            self.probe_taken.valid.eq(packet & takes),
            self.probe_taken.event.eq(ProbeEvent.RECV_WQE_TAKEN),
            self.probe_taken.qpn.eq(desc.qpn),
            self.probe_taken.index.eq(hot.rq_index),
            self.probe_taken.psn.eq(desc.psn),
        ]
        m.d.comb += [self._jobs.i.valid.eq(self._made), self._jobs.i.payload.eq(job)]
        m.d.sync += [
            Assert(~self._jobs.i.valid | self._jobs.i.ready, "responder: job FIFO overflows"),
        ]
