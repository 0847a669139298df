"""Several streams into one: item by item, packet by packet, or by priority."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.stream.buffer import HalfRegister, SkidBuffer, StreamRegister

__all__ = ["PacketArbiter", "PriorityArbiter", "RoundRobin", "StreamArbiter"]


class RoundRobin(wiring.Component):
    """Combinational round-robin choice among ``n`` requests.

    Members: ``requests`` (n bits); ``advance``, the grant was used: the next search starts behind it; ``grant``, index
    of the first request behind the last used one (meaningless while there is none); ``chosen``, the same, one bit per
    request, 0 while there is none (earlier than ``grant`` by a logic level).

    Timing: ``grant`` follows ``requests`` in the same cycle; it does not change while ``requests`` and the last used
    grant stay, but a new request may overtake.

    Parameters: ``n`` >= 1 (ValueError); ``spaced``, the user never advances in two cycles in a row (Assert): no logic between
    what is remembered and the choice.
    """

    def __init__(self, n: int, *, spaced: bool = False):
        if n < 1:
            raise ValueError(f"number of requests is {n}, must be at least 1")
        self.n = n
        self.spaced = spaced
        super().__init__({"requests": In(n), "advance": In(1), "grant": Out(range(n)), "chosen": Out(n)})

    def elaborate(self, platform):
        m = Module()
        behind = Signal(self.n)  # requests behind the last used grant: they go first
        first = Signal(self.n)
        none_behind = Signal()
        m.d.comb += [first.eq(self.requests & behind), none_behind.eq(~first.any())]
        for i in range(self.n):
            m.d.comb += self.chosen[i].eq(
                (first[i] & ~first[:i].any()) | (self.requests[i] & none_behind & ~self.requests[:i].any()))
        for bit in range(len(self.grant)):
            m.d.comb += self.grant[bit].eq(Cat(self.chosen[i] for i in range(self.n) if i >> bit & 1).any())
        # What is behind the used grant is worked out from a register, not at the end of the choice's path.
        last = Signal(self.n)  # the last used grant; spaced: the one of the cycle before, if there is one
        after = Cat(last[:i].any() for i in range(self.n))
        used = Signal()
        m.d.comb += used.eq(self.advance & self.requests.any())
        if self.spaced:
            m.d.sync += [last.eq(Mux(used, self.chosen, 0)), Assert(~used | ~last.any(), "RoundRobin: advances are not spaced")]
            with m.If(last.any()):
                m.d.sync += behind.eq(after)
        else:
            m.d.comb += behind.eq(after)
            with m.If(used):
                m.d.sync += last.eq(self.chosen)
        return m


def _or(values):
    """Balanced OR of values of one width."""
    values = list(values)
    while len(values) > 1:
        values = [values[i] | values[i + 1] if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


class _Arbiter(wiring.Component):
    """The part all arbiters share: a choice, a mux, an output register."""

    _round_robin: bool
    _packets: bool

    def __init__(self, shape, n: int, *, skid: bool = False, half: bool = False, ahead: bool = False):
        if n < 1:
            raise ValueError(f"number of inputs is {n}, must be at least 1")
        self.shape = shape
        self.n = n
        assert not ahead or (self._round_robin and not self._packets)
        self.register = HalfRegister if half else SkidBuffer if skid else StreamRegister
        self.ahead = ahead
        super().__init__({
            "i": In(stream.Signature(shape)).array(n),
            "o": Out(stream.Signature(shape)),
            "source": Out(range(n)),
        })

    def elaborate(self, platform):
        m = Module()
        tagged = data.StructLayout({"payload": self.shape, "source": range(self.n)})
        m.submodules.out = out = self.register(tagged)

        waiting = Signal(self.n)
        choice = Signal(self.n)  # one bit per input, as `grant`
        grant = Signal(self.n)
        # Ahead: the one being served is not asked again, as what follows it may not be there.
        m.d.comb += waiting.eq(Cat(port.valid & ~port.ready if self.ahead else port.valid for port in self.i))

        if self._round_robin:
            m.submodules.round_robin = round_robin = RoundRobin(self.n)
            m.d.comb += round_robin.requests.eq(waiting)
            if not self.ahead:
                m.d.comb += choice.eq(round_robin.chosen)
            else:  # kept until it is served
                m.d.comb += round_robin.advance.eq(~choice.any() | out.i.ready)
                with m.If(round_robin.advance):
                    m.d.sync += choice.eq(round_robin.chosen)
        else:
            for index in range(self.n):
                m.d.comb += choice[index].eq(waiting[index] & ~waiting[:index].any())

        taken = Signal()
        m.d.comb += taken.eq(out.i.valid & out.i.ready)
        if self._packets:
            inside = Signal()  # the packet of input `owner` has begun and not ended
            owner = Signal(self.n)
            m.d.comb += [
                grant.eq(Mux(inside, owner, choice)),
                out.i.valid.eq(Mux(inside, (waiting & owner).any(), waiting.any())),
            ]
            with m.If(taken):
                m.d.sync += [inside.eq(~out.i.payload.payload.last), owner.eq(grant)]
            if self._round_robin:
                m.d.comb += round_robin.advance.eq(taken & ~inside)
        else:
            m.d.comb += [grant.eq(choice), out.i.valid.eq((choice if self.ahead else waiting).any())]
            if self._round_robin and not self.ahead:
                m.d.comb += round_robin.advance.eq(taken)

        width = Shape.cast(self.shape).width
        payload = Signal(self.shape)
        m.d.comb += payload.eq(_or(Value.cast(port.payload) & grant[index].replicate(width)
                                   for index, port in enumerate(self.i)))
        m.d.comb += out.i.payload.payload.eq(payload)
        for bit in range(len(out.i.payload.source)):
            m.d.comb += out.i.payload.source[bit].eq(Cat(grant[i] for i in range(self.n) if i >> bit & 1).any())
        for index, port in enumerate(self.i):
            m.d.comb += port.ready.eq(grant[index] & out.i.ready)
        m.d.comb += [
            self.o.valid.eq(out.o.valid),
            self.o.payload.eq(out.o.payload.payload),
            self.source.eq(out.o.payload.source),
            out.o.ready.eq(self.o.ready),
        ]
        return m


class StreamArbiter(_Arbiter):
    """Round robin item by item.

    Timing: latency 1 cycle, one item per cycle; an input waits for at most one item of each other input. Order is kept
    within an input. With ``ahead`` 2 cycles, and one item per 2 cycles of an input that is alone.

    Parameters: ``shape``, the payload; ``n`` >= 1 inputs; ``skid``, two output registers, so that the inputs' ``ready``
    does not depend on ``o.ready`` combinationally; ``ahead``, the choice is among those that waited a cycle before, so that it
    does not depend on the inputs' ``valid`` combinationally. Raises ValueError.
    Members: ``i``, array of ``n`` streams; ``o``, stream; ``source``, index of the input the item on ``o`` came from.
    """

    _round_robin = True
    _packets = False


class PacketArbiter(_Arbiter):
    """Round robin packet by packet: never switches between an item with ``last == 0`` and the next of the same input.

    Timing: latency 1 cycle, one item per cycle, no idle cycle between packets of different inputs. While the chosen
    packet pauses, so does the output.

    Parameters and members as of StreamArbiter; the payload has a field ``last``.
    """

    _round_robin = True
    _packets = True


class PriorityArbiter(_Arbiter):
    """The lowest index with an item wins; with ``packets`` only between packets (the payload then has ``last``).

    Timing: latency 1 cycle, one item per cycle. A busy low index starves the higher ones: the user bounds it.

    Parameters: ``shape``, ``n``, ``skid`` as of StreamArbiter; ``half``, one register for the same, one item per 2 cycles;
    ``packets``. Members as of StreamArbiter.
    """

    _round_robin = False

    def __init__(self, shape, n: int, *, packets: bool = False, skid: bool = False, half: bool = False):
        self._packets = packets
        super().__init__(shape, n, skid=skid, half=half)
