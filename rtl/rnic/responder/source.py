"""Where the payload of a placed packet comes from: the packet store, or the job itself."""

from amaranth import *
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..stream.beat import Beat
from ..stream.fifo import StreamFifo
from ..stream.packet_store import ReadCommand

__all__ = ["PayloadPlace", "PayloadSource"]


class PayloadPlace(data.StructLayout):
    """A packet's payload: ``length`` bytes from store cell ``head`` on, or with ``immediate`` the 8 bytes of ``value``."""

    def __init__(self, p: Params):
        super().__init__({"head": p.cell_bits, "length": 13, "immediate": 1, "value": 64})


class PayloadSource(wiring.Component):
    """Delivers the payload of each item on ``i`` as a packet of beats on ``o``, in order.

    A value (result of an ATOMIC) is little-endian in memory, that is in host order (R-AT-2), and one beat at every width.

    Timing: 1 cycle more than the packet store; ``desc_depth`` items may be under way.

    Members: ``i`` PayloadPlace, ``o`` Beat streams; ``store_read`` ReadCommand out, ``store_data`` Beat in: the packet store.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(PayloadPlace(p))),
            "o": Out(stream.Signature(Beat(p.data_width))),
            "store_read": Out(stream.Signature(ReadCommand(p.rx_cells))),
            "store_data": In(stream.Signature(Beat(p.data_width))),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        item_shape = data.StructLayout({"immediate": 1, "value": 64})
        m.submodules.order = order = StreamFifo(item_shape, p.desc_depth)
        command = self.store_read
        place, item = self.i.payload, order.o.payload
        stored = Signal()
        told = Signal()  # the item is in `order`; the store takes its command only with the packet's last word
        m.d.comb += [
            stored.eq(~place.immediate),
            command.valid.eq(self.i.valid & stored & (told | order.i.ready)),
            command.payload.head.eq(place.head),
            command.payload.length.eq(place.length),
            self.i.ready.eq((told | order.i.ready) & (command.ready | ~stored)),
            order.i.valid.eq(self.i.valid & ~told),
            order.i.payload.immediate.eq(place.immediate),
            order.i.payload.value.eq(place.value),
        ]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += told.eq(0)
        with m.Elif(order.i.valid & order.i.ready):
            m.d.sync += told.eq(1)
        with m.If(item.immediate):
            m.d.comb += [
                self.o.valid.eq(order.o.valid),
                self.o.payload.data.eq(item.value),
                self.o.payload.keep.eq(0xFF),
                self.o.payload.last.eq(1),
                order.o.ready.eq(self.o.ready),
            ]
        with m.Else():
            m.d.comb += [
                self.o.valid.eq(order.o.valid & self.store_data.valid),
                self.o.payload.eq(self.store_data.payload),
                self.store_data.ready.eq(order.o.valid & self.o.ready),
                order.o.ready.eq(self.store_data.valid & self.store_data.payload.last & self.o.ready),
            ]
        return m
