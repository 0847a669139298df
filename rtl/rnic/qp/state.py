"""What the command engine remembers of the objects: who exists, who uses whom, and the QP attributes as set."""

from amaranth import *
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from ..clash import NO_CLASH
from ..config import Params
from .micro_op import IMAGE_WORDS, Kind

__all__ = ["ObjectState", "ObjectTable", "QpImage"]


class ObjectState(data.StructLayout):
    """One object. ``link``: MR: variant; CQ: its event queue. ``broken``: the CQ is in error (R-CQ-6)."""

    def __init__(self):
        super().__init__({"exists": 1, "broken": 1, "users": 16, "link": 8})


class ObjectTable(wiring.Component):
    """MRs, CQs, EQs and QPs in one memory, none exists after power-up (`qp.sweep` after any other reset).

    Ports: ``kind`` (microcode.Kind, the first four) and ``number`` (in range) choose the object; ``object`` is its state three
    cycles later; ``write`` for one cycle writes ``new``, with ``kind`` and ``number`` stable since the cycle before.
    """

    def __init__(self, p: Params):
        self.counts = {Kind.MR: p.num_mrs, Kind.CQ: p.num_cqs, Kind.EQ: p.num_eqs, Kind.QP: p.num_qps}
        self.number_bits = max(1, (max(self.counts.values()) - 1).bit_length())
        super().__init__({
            "kind": In(2), "number": In(self.number_bits), "object": Out(ObjectState()), "write": In(1), "new": In(ObjectState()),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        depth = sum(self.counts.values())
        m.submodules.store = objects = memory.Memory(shape=ObjectState(), depth=depth, init=[], attrs=NO_CLASH)
        read, write = objects.read_port(), objects.write_port()
        address = Signal(range(depth))
        with m.Switch(self.kind):
            base = 0
            for kind, count in self.counts.items():
                with m.Case(int(kind)):
                    m.d.sync += address.eq(base + self.number)
                base += count
        m.d.comb += [read.addr.eq(address), write.addr.eq(address), write.data.eq(self.new), write.en.eq(self.write)]
        m.d.sync += self.object.eq(read.data)
        return m


class QpImage(wiring.Component):
    """``IMAGE_WORDS`` words per QP: the attributes as set, in the layout of abi.CMD_MODIFY_QP, and the QP's CQs.

    Ports: ``qpn`` and ``word`` choose; ``value`` is the word two cycles later. ``write`` for one cycle writes the bytes ``mask``
    of ``data`` to word ``write_word`` of ``qpn``. ``memory`` is the memory, for tests.
    """

    def __init__(self, p: Params):
        words = range(IMAGE_WORDS)
        self.memory = memory.Memory(shape=unsigned(32), depth=p.num_qps * IMAGE_WORDS, init=[], attrs=NO_CLASH)
        super().__init__({
            "qpn": In(p.qpn_bits), "word": In(words), "value": Out(32), "write": In(1), "write_word": In(words), "data": In(32),
            "mask": In(4),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        m.submodules.store = image = self.memory
        read, write = image.read_port(), image.write_port(granularity=8)
        m.d.comb += [
            read.addr.eq(Cat(self.word, self.qpn)),
            write.addr.eq(Cat(self.write_word, self.qpn)),
            write.data.eq(self.data),
            write.en.eq(self.mask & self.write.replicate(4)),
        ]
        m.d.sync += self.value.eq(read.data)
        return m
