"""Clears what a reset leaves in memories: which objects exist, and the word that makes an object work in each table."""

from amaranth import *
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..abi import CtxTable
from ..config import Params
from .micro_op import Kind

__all__ = ["Sweep"]


class Sweep(wiring.Component):
    """Word 0 of every entry of the context tables that decide whether an object works becomes 0 (state RESET, not valid), and
    every object of the command engine's table ceases to exist. Whatever else a table holds is written when an object is
    created. The translation cache forgets by the writes of the translation table.

    Ports: ``start`` pulse; ``busy`` from the start's cycle on; ``valid``, ``table``, ``index``, ``ready``: writes for the context
    bus; ``object_write``, ``object_kind``, ``object_number``: entries of `qp.state.ObjectTable`.

    Timing: one cycle per context entry plus what the bus makes it wait (translation entries about 20 each), two per object.
    """

    def __init__(self, p: Params):
        self.tables = {
            CtxTable.ADDRESS: p.num_qps, CtxTable.RESPONDER_CFG: p.num_qps, CtxTable.COMPLETER_CFG: p.num_qps,
            CtxTable.REQUESTER_CFG: p.num_qps, CtxTable.CQ: p.num_cqs, CtxTable.EQ: p.num_eqs, CtxTable.TPT: p.tpt_entries,
        }  # fmt: skip
        self.kinds = {Kind.MR: p.num_mrs, Kind.CQ: p.num_cqs, Kind.EQ: p.num_eqs, Kind.QP: p.num_qps}
        most = max(*self.tables.values(), *self.kinds.values())
        super().__init__({
            "start": In(1), "busy": Out(1), "valid": Out(1), "ready": In(1), "table": Out(CtxTable), "index": Out(range(most)),
            "object_write": Out(1), "object_kind": Out(2), "object_number": Out(range(most)),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        steps = [*self.tables.items(), *self.kinds.items()]
        step = Signal(range(len(steps)))
        last_index = Signal.like(self.index)
        running = Signal()
        settled = Signal()  # the object table has seen kind and number for a cycle
        moved = Signal()
        m.d.comb += [
            self.busy.eq(self.start | running),
            self.object_number.eq(self.index),
            moved.eq((self.valid & self.ready) | self.object_write),
        ]
        with m.Switch(step):
            for number, (what, count) in enumerate(steps):
                with m.Case(number):
                    m.d.comb += last_index.eq(count - 1)
                    if isinstance(what, CtxTable):
                        m.d.comb += [self.table.eq(what), self.valid.eq(running)]
                    else:
                        m.d.comb += [self.object_kind.eq(int(what)), self.object_write.eq(running & settled)]
        m.d.sync += settled.eq(running & ~moved)
        with m.If(self.start):
            m.d.sync += [running.eq(1), step.eq(0), self.index.eq(0)]
        with m.Elif(moved):
            m.d.sync += self.index.eq(self.index + 1)
            with m.If(self.index == last_index):
                m.d.sync += [self.index.eq(0), step.eq(step + 1)]
                with m.If(step == len(steps) - 1):
                    m.d.sync += [running.eq(0), step.eq(0)]
        return m
