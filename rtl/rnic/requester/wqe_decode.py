"""Takes a send WQE apart, checks it, and adds the QP's configuration."""

from amaranth import *
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import (
    REQUESTER_CFG,
    SEND_WQE,
    SGE,
    SGE_BYTES,
    CtxTable,
    QpState,
    QpType,
    SendFlags,
    VendorError,
    WcStatus,
    WqeOpcode,
    inline_bytes,
    send_sges,
)
from ..config import Params
from ..qp.table import ContextTable
from ..records import CtxBus, FetchedWqe

__all__ = ["BODY_BYTES", "DecodedWqe", "OPERATIONS", "WqeDecoder"]

BODY_BYTES = 96  # SGEs or inline data: bytes 32..127 of a WQE

OPERATIONS = {
    QpType.RC: (
        WqeOpcode.SEND, WqeOpcode.SEND_IMM, WqeOpcode.SEND_INV, WqeOpcode.WRITE, WqeOpcode.WRITE_IMM, WqeOpcode.READ,
        WqeOpcode.CMP_SWAP, WqeOpcode.FETCH_ADD,
    ),
    QpType.UC: (),
    QpType.UD: (),
}
"""Operations a QP of a type carries out (R-WQ-7); any other completes with LOC_QP_OP_ERR, BAD_WQE_OPCODE."""

ATOMICS = (WqeOpcode.CMP_SWAP, WqeOpcode.FETCH_ADD)
ATOMIC_BYTES = 8


class DecodedWqe(data.StructLayout):
    """A checked WQE with what its packets need of the QP's configuration. ``status`` not SUCCESS: it must fail."""

    def __init__(self, p: Params):
        super().__init__({
            "qpn": p.qpn_bits,
            "index": 16,
            "epoch": 8,
            "marker": 1,
            "bounced": 1,
            "state": QpState,
            "type": QpType,
            "path_mtu": 3,
            "pd": 24,
            "opcode": 8,
            "solicited": 1,  # R-REQ-3: asked for, and the operation can carry it
            "signaled": 1,
            "inline": 1,
            "fence": 1,  # R-ORD-2
            "reads": 1,  # READ or ATOMIC: counts against the QP's limit
            "atomic": 1,
            "rd_limit": 8,  # READ and ATOMIC outstanding at most (R-REQ-4)
            "length": 32,
            "imm": 32,
            "remote_addr": 64,
            "rkey": 32,
            "status": WcStatus,
            "vendor_err": VendorError,
            "body": 8 * BODY_BYTES,
        })  # fmt: skip


class WqeDecoder(wiring.Component):
    """One WQE at a time: field extraction, REQUESTER_CFG, checks.

    Checks, the first that fails decides: the ring could be read (else LOC_QP_OP_ERR, HOST_BUS); the operation is one this QP
    type carries out (R-WQ-7: LOC_QP_OP_ERR, BAD_WQE_OPCODE); length at most 2^31 (R-LEN-2: LOC_LEN_ERR, BAD_WQE_LENGTH); the
    SGEs fit the stride and ``max_sge`` and add up to the length, inline data fits the stride and is no READ's or ATOMIC's, an
    ATOMIC has one SGE of 8 bytes (R-WQ-4, R-WQ-5, R-WQ-6: LOC_QP_OP_ERR, BAD_WQE_LENGTH). A READ or ATOMIC on a QP that may
    have none outstanding counts as an operation it does not carry out.

    Ports: ``wqe``, ``ctx``, ``o`` (DecodedWqe, driven from registers); ``holds``, a WQE is inside; ``qpn``, its QP.

    Timing: 4 cycles from ``wqe`` to ``o``, one WQE per 4 cycles. A command that writes the QP's REQUESTER_CFG while its WQE is
    inside has it read again.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "wqe": In(stream.Signature(FetchedWqe(p))),
            "ctx": In(CtxBus(p)),
            "o": Out(stream.Signature(DecodedWqe(p))),
            "holds": Out(1),
            "qpn": Out(p.qpn_bits),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.cfg = table = ContextTable(p, CtxTable.REQUESTER_CFG, REQUESTER_CFG, p.num_qps)
        m.d.comb += [
            table.ctx.payload.eq(self.ctx.payload),
            table.ctx.valid.eq(self.ctx.valid),
            self.ctx.ready.eq(table.ctx.ready),
        ]
        held = Signal(FetchedWqe(p))
        cfg = Signal(REQUESTER_CFG.layout)
        fields = data.View(SEND_WQE.layout, held.wqe[:512])
        body = held.wqe[8 * (128 - BODY_BYTES) :]
        slots = send_sges(7)
        sges = [data.View(SGE.layout, body[8 * SGE_BYTES * i : 8 * SGE_BYTES * (i + 1)]) for i in range(slots)]
        pair_sums = [Signal(33, name=f"pair_sum_{i}") for i in range(slots // 2)]
        total = Signal(35)
        wide, known, too_long, too_many, sum_ok, inline_ok = (
            Signal(name=n) for n in ("wide", "known", "too_long", "too_many", "sum_ok", "inline_ok"))  # fmt: skip
        self._reads, self._atomic, self._atomic_ok = (
            Signal(name=n) for n in ("reads", "atomic", "atomic_ok"))  # fmt: skip
        self._rd_limit = Signal(8, name="rd_limit")
        load = Signal()
        may_load = Signal()
        ctx_cfg, held_changes, next_changes = Signal(), Signal(), Signal()

        m.d.comb += [
            table.read_index_0.eq(Mux(may_load, self.wqe.payload.qpn, held.qpn)),
            ctx_cfg.eq(self.ctx.valid & (self.ctx.payload.table == CtxTable.REQUESTER_CFG)),
            held_changes.eq(ctx_cfg & (self.ctx.payload.index == held.qpn)),
            next_changes.eq(ctx_cfg & (self.ctx.payload.index == self.wqe.payload.qpn)),
            self.qpn.eq(held.qpn),
            self.wqe.ready.eq(load),
            wide.eq(table.read_0.log_stride == 7),
        ]
        with m.If(load):
            m.d.sync += held.eq(self.wqe.payload)

        def unless(changes, state):
            """The next state, or AGAIN when the configuration being read changes."""
            m.next = state
            with m.If(changes):
                m.next = "AGAIN"

        with m.FSM(name="decode") as fsm:
            m.d.comb += [self.holds.eq(~fsm.ongoing("IDLE")), may_load.eq(fsm.ongoing("IDLE") | fsm.ongoing("OFFER"))]
            with m.State("IDLE"):
                m.d.comb += load.eq(self.wqe.valid)
                with m.If(load):
                    unless(next_changes, "PAIRS")
            with m.State("AGAIN"):
                unless(held_changes, "PAIRS")
            with m.State("PAIRS"):
                for i in range(slots // 2):
                    used = [Mux(fields.num_sge > 2 * i + k, sges[2 * i + k].length, 0) for k in range(2)]  # R-WQ-4
                    m.d.sync += pair_sums[i].eq(used[0] + used[1])
                atomic = (fields.opcode == ATOMICS[0]) | (fields.opcode == ATOMICS[1])
                m.d.sync += [self._atomic.eq(atomic), self._reads.eq(atomic | (fields.opcode == WqeOpcode.READ))]
                unless(held_changes, "TOTAL")
            with m.State("TOTAL"):
                m.d.sync += [
                    total.eq(sum(pair_sums[1:], pair_sums[0])),  # R-WQ-4: more than 32 bits
                    cfg.eq(table.read_0),
                    too_many.eq(fields.num_sge > Mux(wide, min(p.max_sge, send_sges(7)), min(p.max_sge, send_sges(6)))),
                    inline_ok.eq(fields.length <= Mux(wide, inline_bytes(7), inline_bytes(6))),  # R-WQ-5
                    self._atomic_ok.eq((fields.num_sge == 1) & (fields.length == ATOMIC_BYTES)
                                       & (sges[1].length == ATOMIC_BYTES)),  # R-WQ-6
                    # Never more than the read table has entries for.
                    self._rd_limit.eq(Mux(table.read_0.max_rd_atomic > p.max_rd_atomic, p.max_rd_atomic,
                                          table.read_0.max_rd_atomic)),
                    too_long.eq(fields.length[31] & fields.length[:31].any()),  # R-LEN-2
                ]
                unless(held_changes, "CHECK")
            with m.State("CHECK"):
                m.d.sync += [sum_ok.eq(total == fields.length), known.eq(0), inline_ok.eq(inline_ok & ~self._reads)]
                with m.Switch(cfg.type):
                    for kind, operations in OPERATIONS.items():
                        with m.Case(kind):
                            for operation in operations:
                                limited = operation in (WqeOpcode.READ, *ATOMICS)
                                with m.If(fields.opcode == operation):
                                    m.d.sync += known.eq((self._rd_limit != 0) if limited else 1)  # R-WQ-7
                unless(held_changes, "OFFER")
            with m.State("OFFER"):
                m.d.comb += self.o.valid.eq(1)  # a change in the cycle in which it is taken came too late
                with m.If(self.o.ready):
                    m.d.comb += load.eq(self.wqe.valid)
                    m.next = "IDLE"
                    with m.If(load):
                        unless(next_changes, "PAIRS")
                with m.Elif(held_changes):
                    m.next = "AGAIN"

        self._elaborate_output(m, held, fields, cfg, body, known, too_long, too_many, sum_ok, inline_ok)
        return m

    def _elaborate_output(self, m, held, fields, cfg, body, known, too_long, too_many, sum_ok, inline_ok):
        o = self.o.payload
        inline = Signal()
        solicitable = Signal()
        m.d.comb += [
            inline.eq((fields.flags & SendFlags.INLINE.value) != 0),
            solicitable.eq((fields.opcode != WqeOpcode.WRITE) & ~self._reads),  # R-REQ-3
            o.qpn.eq(held.qpn),
            o.index.eq(held.index),
            o.epoch.eq(held.epoch),
            o.marker.eq(held.marker),
            o.bounced.eq(held.bounced),
            o.state.eq(cfg.state),
            o.type.eq(cfg.type),
            o.path_mtu.eq(cfg.path_mtu),
            o.pd.eq(cfg.pd),
            o.opcode.eq(Mux(held.error, WqeOpcode.SEND, fields.opcode)),
            o.solicited.eq(solicitable & ((fields.flags & SendFlags.SOLICITED.value) != 0)),
            o.signaled.eq(cfg.sig_all | ((fields.flags & SendFlags.SIGNALED.value) != 0)),  # R-CQ-1
            o.inline.eq(inline),
            o.fence.eq((fields.flags & SendFlags.FENCE.value) != 0),
            o.reads.eq(self._reads),
            o.atomic.eq(self._atomic),
            o.rd_limit.eq(self._rd_limit),
            o.length.eq(fields.length),
            o.imm.eq(fields.imm),
            o.remote_addr.eq(fields.remote_addr),
            o.rkey.eq(fields.rkey),
            o.body.eq(body),
            o.status.eq(WcStatus.SUCCESS),
            o.vendor_err.eq(VendorError.NONE),
        ]

        def fail(status, vendor_err):
            m.d.comb += [o.status.eq(status), o.vendor_err.eq(vendor_err)]

        with m.If(held.error):
            fail(WcStatus.LOC_QP_OP_ERR, VendorError.HOST_BUS)
        with m.Elif(~known):  # R-WQ-7
            fail(WcStatus.LOC_QP_OP_ERR, VendorError.BAD_WQE_OPCODE)
        with m.Elif(too_long):  # R-LEN-2
            fail(WcStatus.LOC_LEN_ERR, VendorError.BAD_WQE_LENGTH)
        with m.Elif(Mux(inline, ~inline_ok, Mux(self._atomic, ~self._atomic_ok, too_many | ~sum_ok))):  # R-WQ-4..6
            fail(WcStatus.LOC_QP_OP_ERR, VendorError.BAD_WQE_LENGTH)
