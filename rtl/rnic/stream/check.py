"""Rules of streams as Asserts; blocks put a checker on each of their ports with `watch`."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import wiring
from amaranth.lib.wiring import In

from rnic.stream.beat import Beat

__all__ = ["BeatChecker", "StreamChecker", "watch"]


class StreamChecker(wiring.Component):
    """Asserts that an item, once offered, stays offered and unchanged until taken.

    Passive: no outputs, nothing of it remains after synthesis. A violation shows one cycle after it happened.

    Parameters: ``shape``, the payload; ``label``, the stream's name in the message.
    Members: ``valid``, ``ready``, ``payload``.
    """

    def __init__(self, shape, label: str = "stream"):
        self.shape = shape
        self.label = label
        super().__init__({"valid": In(1), "ready": In(1), "payload": In(shape)})

    def elaborate(self, platform):
        m = Module()
        now = Value.cast(self.payload)
        waiting = Signal()
        before = Signal.like(now)
        m.d.sync += [waiting.eq(self.valid & ~self.ready), before.eq(now)]
        with m.If(waiting):
            m.d.sync += [
                Assert(self.valid, Format("{}: valid dropped before ready", self.label)),
                Assert(now == before, Format("{}: payload changed before ready", self.label)),
            ]
        return m


class BeatChecker(wiring.Component):
    """StreamChecker for ``Beat(width)``, and the keep rules: contiguous from lane 0, full except on the last beat, no
    empty beat except as the only one of its packet.

    Parameters: ``width`` in bits; ``label``. Members: ``valid``, ``ready``, ``payload``.
    """

    def __init__(self, width: int, label: str = "beats"):
        self.width = width
        self.label = label
        super().__init__({"valid": In(1), "ready": In(1), "payload": In(Beat(width))})

    def elaborate(self, platform):
        m = Module()
        m.submodules.stable = stable = StreamChecker(Beat(self.width), self.label)
        m.d.comb += [stable.valid.eq(self.valid), stable.ready.eq(self.ready), stable.payload.eq(self.payload)]

        inside = Signal()  # a beat of the present packet has passed
        keep = self.payload.keep
        # A hole shows as a lane kept behind one that is not.
        holes = Signal(len(keep) - 1)
        m.d.comb += holes.eq(keep[1:] & ~keep[:-1])
        with m.If(self.valid):
            m.d.sync += [
                Assert(holes == 0, Format("{}: keep {:#x} is not contiguous from lane 0", self.label, keep)),
                Assert(self.payload.last | keep.all(),
                       Format("{}: keep {:#x} is not full before the last beat", self.label, keep)),
                Assert(keep[0] | ~inside, Format("{}: empty beat inside a packet", self.label)),
            ]
            with m.If(self.ready):
                m.d.sync += inside.eq(~self.payload.last)
        return m


def watch(m: Module, name: str, port) -> None:
    """Put a checker on the stream ``port``: a BeatChecker when its payload is a Beat, else a StreamChecker.

    The checker becomes submodule ``<name>_check`` of ``m``; ``name`` stands in the messages.
    """
    shape = port.signature.payload_shape if hasattr(port.signature, "payload_shape") else port.payload.shape()
    if isinstance(shape, Beat):
        checker = BeatChecker(len(port.payload.data), name)
    else:
        checker = StreamChecker(shape, name)
    m.submodules[f"{name}_check"] = checker
    m.d.comb += [checker.valid.eq(port.valid), checker.ready.eq(port.ready), checker.payload.eq(port.payload)]
