"""Executes CMP_SWAP and FETCH_ADD on host memory."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..clash import NO_CLASH
from ..config import Params
from ..records import DmaReadSignature, DmaWriteSignature
from .records import AtomicOp, Release

__all__ = ["Atomic", "Operands", "Released"]

_BYTES = 8
_HALF = 32


class Operands(data.StructLayout):
    """Of an ATOMIC: swap (or what is added) and compare."""

    def __init__(self):
        super().__init__({"swap": 64, "compare": 64})


class Released(data.StructLayout):
    """As `Release`, after the ATOMIC is executed: ``original`` value; ``error``: memory could not be read or written."""

    def __init__(self, p: Params):
        super().__init__({"qpn": p.qpn_bits, "atomic": 1, "dead": 1, "error": 1, "original": 64})


class Atomic(wiring.Component):
    """One ATOMIC at a time: reads 8 bytes, computes, writes 8 bytes, waits for the write response (R-AT-3, R-AT-4).

    Memory is little-endian (R-AT-2). A failing compare writes nothing. The word is held in `Move` until it is taken from
    ``word``, which happens when the ATOMIC is over. Releases of READs pass in order; while an ATOMIC is under way
    (``executing``) the next release waits.

    Operands: ``store_en`` writes ``store_data`` as number ``store_index`` of ``store_qpn``; numbers count modulo
    ``p.max_rd_atomic``.

    Timing: a READ's release passes combinationally; an ATOMIC takes 9 cycles, a host read and a host write.

    Members: ``i`` Release, ``word`` (address) in; ``o`` Released out: streams; ``store_*``; ``read``, ``write`` clients;
    ``executing``, ``executing_qpn``.
    """

    def __init__(self, p: Params):
        self.p = p
        self.slot_bits = (p.max_rd_atomic - 1).bit_length()
        super().__init__({
            "i": In(stream.Signature(Release(p))),
            "word": In(stream.Signature(64)),
            "o": Out(stream.Signature(Released(p))),
            "store_en": In(1),
            "store_qpn": In(p.qpn_bits),
            "store_index": In(16),
            "store_data": In(Operands()),
            "read": Out(DmaReadSignature(p)),
            "write": Out(DmaWriteSignature(p)),
            "executing": Out(1),
            "executing_qpn": Out(p.qpn_bits),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.kept = kept = memory.Memory(shape=Operands(), depth=p.num_qps << self.slot_bits, init=[], attrs=NO_CLASH)
        store, look = kept.write_port(), kept.read_port()

        job = Signal(Release(p))
        operands = Signal(Operands())
        original = Signal(64)
        result = Signal(64)
        low = Signal(_HALF + 1)
        equal = Signal(4)
        bad = Signal()
        lane = Signal(p.lane_bits)  # of the first byte
        command, arrived = self.read.command, self.read.word
        out, beat = self.write.command, self.write.data
        m.d.comb += [
            store.en.eq(self.store_en),
            store.addr.eq(Cat(self.store_index[: self.slot_bits], self.store_qpn)),
            store.data.eq(self.store_data),
            look.addr.eq(Cat(job.index[: self.slot_bits], job.qpn)),
            self.executing_qpn.eq(job.qpn),
            command.p.address.eq(self.word.payload),
            command.p.length.eq(_BYTES),
            lane.eq(self.word.payload[: p.lane_bits]),
            out.p.address.eq(self.word.payload),
            out.p.length.eq(_BYTES),
            beat.p.data.eq(result),  # R-AT-2
            beat.p.keep.eq((1 << _BYTES) - 1),
            beat.p.last.eq(1),
            self.write.accepted.ready.eq(1),
            self.o.p.qpn.eq(Mux(self.executing, job.qpn, self.i.p.qpn)),
            self.o.p.dead.eq(Mux(self.executing, job.dead, self.i.p.dead)),
            self.o.p.atomic.eq(self.executing),
            self.o.p.original.eq(original),
            self.o.p.error.eq(bad),
        ]
        with m.FSM(name="atomic"):
            with m.State("Idle"):
                m.d.comb += self.o.valid.eq(self.i.valid & ~self.i.p.atomic)
                m.d.comb += self.i.ready.eq(self.i.p.atomic | self.o.ready)
                m.d.sync += [job.eq(self.i.p), bad.eq(0)]
                with m.If(self.i.valid & self.i.p.atomic):
                    m.d.sync += self.executing.eq(1)  # R-AT-4
                    m.next = "Look"
            with m.State("Look"):
                with m.If(job.dead & self.word.valid):
                    m.next = "Answer"
                with m.Elif(self.word.valid):
                    m.next = "Read"
            with m.State("Read"):
                m.d.comb += command.valid.eq(1)
                m.d.sync += operands.eq(look.data)
                with m.If(command.ready):
                    m.next = "Word"
            with m.State("Word"):
                m.d.comb += arrived.ready.eq(1)
                with m.If(arrived.valid):
                    m.d.sync += [
                        original.eq(arrived.p.data.word_select(lane[3:], 64)),
                        bad.eq(arrived.p.err),
                        Assert(arrived.p.last & (arrived.p.count == _BYTES) & (arrived.p.first == lane),
                               Format("responder: an ATOMIC read {} bytes", arrived.p.count)),
                    ]
                    m.next = "Low"
            with m.State("Low"):
                m.d.sync += low.eq(original[:_HALF] + operands.swap[:_HALF])  # R-AT-3
                for i in range(4):
                    m.d.sync += equal[i].eq(original[16 * i : 16 * i + 16] == operands.compare[16 * i : 16 * i + 16])  # R-AT-3
                m.next = "High"
            with m.State("High"):
                with m.If(job.op == AtomicOp.FETCH_ADD):
                    m.d.sync += result.eq(Cat(low[:_HALF], (original[_HALF:] + operands.swap[_HALF:] + low[_HALF])[:_HALF]))
                with m.Else():
                    m.d.sync += result.eq(operands.swap)
                with m.If(bad | ((job.op == AtomicOp.CMP_SWAP) & ~equal.all())):  # R-AT-3
                    m.next = "Answer"
                with m.Else():
                    m.next = "Write"
            with m.State("Write"):
                # The write engine takes the command when the data is there, and the data after the command.
                m.d.comb += [out.valid.eq(1), beat.valid.eq(1)]
                with m.If(out.ready & beat.ready):
                    m.next = "Done"
                with m.Elif(out.ready):
                    m.next = "Data"
                with m.Elif(beat.ready):
                    m.next = "Command"
            with m.State("Data"):
                m.d.comb += beat.valid.eq(1)
                with m.If(beat.ready):
                    m.next = "Done"
            with m.State("Command"):
                m.d.comb += out.valid.eq(1)
                with m.If(out.ready):
                    m.next = "Done"
            with m.State("Done"):
                m.d.comb += self.write.done.ready.eq(1)
                with m.If(self.write.done.valid):
                    m.d.sync += bad.eq(self.write.done.payload)
                    m.next = "Answer"
            with m.State("Answer"):
                m.d.comb += [self.o.valid.eq(1), self.word.ready.eq(self.o.ready)]
                with m.If(self.o.ready):
                    m.d.sync += self.executing.eq(0)
                    m.next = "Idle"
        return m
