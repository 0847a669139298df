"""An AXI4 memory in Python for pysim: random latency and stalls, errors in chosen address ranges."""

from collections import deque

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from rnic.memory.axi import AxiChecker

__all__ = ["AxiMemory", "WithChecker"]

SLVERR = 2


class WithChecker(wiring.Component):
    """``dma`` with an AxiChecker on its port ``axi``."""

    def __init__(self, dma, width):
        self.dma = dma
        self.width = width
        super().__init__({"idle": Out(1)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.dma = self.dma
        m.submodules.check = check = AxiChecker(self.width, self.dma.id_width)
        check.watch(m, self.dma.axi)
        m.d.comb += self.idle.eq(~check.busy)
        return m


class AxiMemory:
    """Serves the read and write channels of ``axi`` from ``data``, which lies at address ``base``.

    ``latency``: (min, max) cycles from AR to the first beat of its burst, from the last W to B. ``p_stall``: probability
    that a channel pauses in a cycle. ``bad``: list of (low, high) addresses answered with SLVERR. Bursts of one ID stay in
    order, those of different IDs overtake. ``stop`` set to True ends the benches.
    """

    def __init__(self, axi, width, base, size, rng, latency=(1, 1), p_stall=0.0, bad=()):
        self.axi = axi
        self.lanes = width // 8
        self.base = base
        self.data = bytearray(rng.randbytes(size))
        self.rng = rng
        self.latency = latency
        self.p_stall = p_stall
        self.bad = bad
        self.stop = False
        self.ar_times, self.aw_times, self.w_times = [], [], []

    def _is_bad(self, low, high):
        return any(low < bad_high and high > bad_low for bad_low, bad_high in self.bad)

    def _at(self, address):
        assert self.base <= address <= self.base + len(self.data) - self.lanes, f"address {address:#x} outside"
        return address - self.base

    async def read_bench(self, ctx):
        """AR and R."""
        axi, rng = self.axi, self.rng
        queues = {}  # ID -> deque of [ready time, address, beats left]
        current = None  # beat on R
        cycle = 0
        while not self.stop:
            ctx.set(axi.arready, rng.random() >= self.p_stall)
            if current is None and rng.random() >= self.p_stall:
                ready_ids = [i for i, queue in queues.items() if queue and queue[0][0] <= cycle]
                if ready_ids:
                    current = rng.choice(ready_ids)
                    burst = queues[current][0]
                    at = self._at(burst[1])
                    ctx.set(axi.rid, current)
                    ctx.set(axi.rdata, int.from_bytes(self.data[at : at + self.lanes], "little"))
                    ctx.set(axi.rresp, SLVERR if self._is_bad(burst[1], burst[1] + self.lanes) else 0)
                    ctx.set(axi.rlast, burst[2] == 1)
                    ctx.set(axi.rvalid, 1)
            _, _, ar, arready, arid, araddr, arlen, rready = await ctx.tick().sample(
                axi.arvalid, axi.arready, axi.arid, axi.araddr, axi.arlen, axi.rready)
            if current is not None:
                assert rready, "RREADY is low"
                burst = queues[current][0]
                burst[1] += self.lanes
                burst[2] -= 1
                if not burst[2]:
                    queues[current].popleft()
                current = None
                ctx.set(axi.rvalid, 0)
            if ar and arready:
                self.ar_times.append(cycle)
                queues.setdefault(arid, deque()).append([cycle + rng.randint(*self.latency), araddr, arlen + 1])
            cycle += 1

    async def write_bench(self, ctx):
        """AW, W and B."""
        axi, rng = self.axi, self.rng
        addresses = deque()  # (id, address, beats) accepted
        words = deque()  # (data, strb, last) accepted
        responses = {}  # ID -> deque of (ready time, resp)
        current = None
        position = 0
        error = False
        cycle = 0
        while not self.stop:
            ctx.set(axi.awready, rng.random() >= self.p_stall)
            ctx.set(axi.wready, rng.random() >= self.p_stall)
            if current is None and rng.random() >= self.p_stall:
                ready_ids = [i for i, queue in responses.items() if queue and queue[0][0] <= cycle]
                if ready_ids:
                    current = rng.choice(ready_ids)
                    ctx.set(axi.bid, current)
                    ctx.set(axi.bresp, responses[current][0][1])
                    ctx.set(axi.bvalid, 1)
            _, _, aw, awready, awid, awaddr, awlen, w, wready, wdata, wstrb, wlast, bready = await ctx.tick().sample(
                axi.awvalid, axi.awready, axi.awid, axi.awaddr, axi.awlen,
                axi.wvalid, axi.wready, axi.wdata, axi.wstrb, axi.wlast, axi.bready)
            if current is not None:
                assert bready, "BREADY is low"
                responses[current].popleft()
                current = None
                ctx.set(axi.bvalid, 0)
            if aw and awready:
                self.aw_times.append(cycle)
                addresses.append((awid, awaddr, awlen + 1))
            if w and wready:
                self.w_times.append(cycle)
                words.append((wdata, wstrb, wlast))
            while addresses and words:
                number, address, beats = addresses[0]
                word, strb, last = words.popleft()
                at = self._at(address + position * self.lanes)
                error |= self._is_bad(self.base + at, self.base + at + self.lanes)
                for lane in range(self.lanes):
                    if strb >> lane & 1:
                        self.data[at + lane] = word >> 8 * lane & 0xFF
                position += 1
                assert last == (position == beats)
                if last:
                    addresses.popleft()
                    responses.setdefault(number, deque()).append(
                        (cycle + rng.randint(*self.latency), SLVERR if error else 0))
                    position = 0
                    error = False
            cycle += 1
