"""Which packet goes out next."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import MAX_PMTU, Params
from ..records import TxHeader
from ..stream.beat import Beat
from ..stream.buffer import SkidBuffer
from ..stream.check import watch
from ..stream.fifo import StreamFifo

__all__ = ["OVERHEAD_BYTES", "QUANTUM_BYTES", "TxArbiter"]

OVERHEAD_BYTES = 64
"""What a packet costs besides its payload (headers), in the arbiter's account."""
QUANTUM_BYTES = MAX_PMTU + OVERHEAD_BYTES
"""Credit of a turn: at least the largest packet, so that a turn always allows one."""
_PAYLOAD_BEATS = 8  # input buffer of a source: hides the way from a grant to the packet's first payload beat
# Packets granted whose payload has not passed: fewer than the beats of an input buffer, so that a source with one-beat packets
# still shows the next one while its granted ones wait behind a long packet.
_GRANTS = 4


class TxArbiter(wiring.Component):
    """``n`` sources of packets (header stream, payload stream) into one.

    Source 0 is for packets without payload (ACK, NAK) and always goes first. The others share by bytes: deficit round robin,
    `QUANTUM_BYTES` a turn; a source that has nothing to send keeps no credit, one that overdrew pays back later. A source is
    eligible when its header is there and, for a packet with payload, the first payload beat too. Packets of a source keep
    their order; payloads are never interleaved. The header of the next packet leaves while the payload of the one before is
    still passing.

    Timing: header latency 2 cycles, one packet every 2 cycles (3 of each, without payload and not of source 0); payload 2
    cycles behind its header's move, one beat per cycle, no idle cycle between packets; every ``ready`` depends on registers
    only.

    Parameters: ``p``; ``n`` >= 2 sources. Members: arrays ``header_i``, ``payload_i`` (index 0 takes nothing), ``header``,
    ``payload``.
    """

    def __init__(self, p: Params, n: int):
        if n < 2:
            raise ValueError(f"number of sources is {n}, must be at least 2")
        self.p = p
        self.n = n
        headers, beats = stream.Signature(TxHeader(p)), stream.Signature(Beat(p.data_width))
        super().__init__({
            "header_i": In(headers).array(n), "payload_i": In(beats).array(n),
            "header": Out(headers), "payload": Out(beats),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        n = self.n

        eligible = Signal(n)
        grant = Signal(range(n))
        granted = Signal()
        taken = Signal(n)  # a packet of this source whose payload has begun to arrive is granted
        fifos, begun = self._buffers(m, taken)
        grants = self._payload_path(m, fifos)
        moved = Signal()  # the chosen header is taken
        chosen = Signal(range(n))
        m.d.comb += eligible[0].eq(self.header_i[0].valid)
        for source in range(1, n):
            header = self.header_i[source]
            empty = Signal(name=f"empty_{source}")  # a packet without payload: known one cycle after its header came
            m.d.sync += empty.eq(header.valid & (header.payload.length == 0) & ~(moved & (chosen == source)))
            m.d.comb += eligible[source].eq(header.valid & (begun[source] | empty))
        m.d.sync += Assert(~self.header_i[0].valid | (self.header_i[0].payload.length == 0),
                           "TxArbiter: source 0 has payload")

        self._choose(m, eligible, grant, granted)

        # Choose in one cycle, move the header in the next: what was eligible stays so until it is taken.
        moving = Signal()
        header = Signal(TxHeader(self.p))
        m.d.comb += [
            granted.eq(eligible.any() & ~moving),
            moved.eq(moving & ~self.header.valid & grants.i.ready),
        ]
        with m.If(granted):
            m.d.sync += [moving.eq(1), chosen.eq(grant)]
        with m.Elif(moved):
            m.d.sync += moving.eq(0)
        with m.Switch(chosen):
            for source in range(n):
                with m.Case(source):
                    m.d.comb += [header.eq(self.header_i[source].payload), self.header_i[source].ready.eq(moved)]
        m.d.comb += [
            grants.i.valid.eq(moved & (header.length != 0)),
            grants.i.payload.eq(chosen),
        ]
        with m.If(moved):
            m.d.sync += [self.header.valid.eq(1), self.header.payload.eq(header)]
        with m.Elif(self.header.ready):
            m.d.sync += self.header.valid.eq(0)
        for source in range(n):
            m.d.comb += taken[source].eq(grants.i.valid & (chosen == source))
        watch(m, "header", self.header)
        watch(m, "payload", self.payload)
        return m

    def _buffers(self, m, taken):
        """Payload FIFOs of sources 1.., and for each source whether a packet not yet granted has begun in it."""
        fifos = []
        begun = [Const(1)]
        m.d.comb += self.payload_i[0].ready.eq(0)
        for source in range(1, self.n):
            fifo = StreamFifo(Beat(self.p.data_width), _PAYLOAD_BEATS)
            m.submodules[f"payload_{source}"] = fifo
            fifos.append(fifo)
            wiring.connect(m, wiring.flipped(self.payload_i[source]), fifo.i)
            watch(m, f"payload_{source}", self.payload_i[source])
            inside = Signal(name=f"inside_{source}")  # the packet at the FIFO's input has begun
            first = Signal(name=f"first_{source}")
            count = Signal(range(_PAYLOAD_BEATS + 1), name=f"begun_{source}")
            m.d.comb += first.eq(fifo.i.valid & fifo.i.ready & ~inside)
            with m.If(fifo.i.valid & fifo.i.ready):
                m.d.sync += inside.eq(~fifo.i.payload.last)
            m.d.sync += [
                count.eq(count + first - taken[source]),
                Assert(count <= _PAYLOAD_BEATS, Format("TxArbiter: {} packets begun at source {}", count, source)),
            ]
            begun.append(count != 0)
        return fifos, begun

    def _payload_path(self, m, fifos):
        """Payload packets leave in the order of the grants; returns the FIFO of grants."""
        m.submodules.grants = grants = StreamFifo(range(self.n), _GRANTS)
        m.submodules.out = out = SkidBuffer(Beat(self.p.data_width))
        wiring.connect(m, out.o, wiring.flipped(self.payload))
        with m.Switch(grants.o.payload):
            for source, fifo in enumerate(fifos, 1):
                with m.Case(source):
                    m.d.comb += [
                        out.i.valid.eq(grants.o.valid & fifo.o.valid),
                        out.i.payload.eq(fifo.o.payload),
                        fifo.o.ready.eq(grants.o.valid & out.i.ready),
                    ]
        m.d.comb += grants.o.ready.eq(out.i.valid & out.i.ready & out.i.payload.last)
        return grants

    def _choose(self, m, eligible, grant, granted):
        """Source 0, else the source whose turn it is while it has credit, else the next eligible one in turn. The choice is
        paid for in the cycle after it, in which there is no other."""
        n = self.n
        turn = Signal(range(n), init=min(1, n - 1))
        credit_shape = signed(QUANTUM_BYTES.bit_length() + 1)
        # One less than the credit: credit is left while the sign is 0.
        credit = [Signal(credit_shape, init=-1, name=f"credit_{source}") for source in range(n)]
        keeps = Signal()  # the turn goes on
        following = Signal(range(n))
        with m.Switch(turn):
            for owner in range(1, n):
                with m.Case(owner):
                    m.d.comb += [following.eq(owner), keeps.eq(eligible[owner] & ~credit[owner][-1])]
                    for distance in range(n - 2, 0, -1):
                        candidate = 1 + (owner - 1 + distance) % (n - 1)
                        with m.If(eligible[candidate]):
                            m.d.comb += following.eq(candidate)
        m.d.comb += grant.eq(Mux(eligible[0], 0, Mux(keeps, turn, following)))
        new_turn = Signal()
        m.d.comb += new_turn.eq(granted & ~eligible[0] & ~keeps)
        with m.If(new_turn):
            m.d.sync += turn.eq(following)
        for source in range(1, n):
            paying = Signal(name=f"paying_{source}")
            cost = Signal(range(QUANTUM_BYTES + 1), name=f"cost_{source}")
            # A new turn adds the quantum to a debt; credit left over is lost.
            account = Signal(credit_shape, name=f"account_{source}")
            m.d.sync += [
                paying.eq(granted & (grant == source)),
                cost.eq(self.header_i[source].payload.length + OVERHEAD_BYTES),
                account.eq(credit[source]),
            ]
            with m.If(new_turn & (grant == source)):
                m.d.sync += account.eq(Mux(credit[source][-1], credit[source] + QUANTUM_BYTES, QUANTUM_BYTES - 1))
            with m.If(paying):
                m.d.sync += credit[source].eq(account - cost)
            m.d.sync += Assert((credit[source] >= -QUANTUM_BYTES) & (credit[source] < QUANTUM_BYTES - 1),
                               Format("TxArbiter: credit of source {} is {} + 1", source, credit[source]))
