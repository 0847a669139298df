"""Writes host memory for several clients over one AXI4 port."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.memory.axi import AxiWriteSignature, Burst
from rnic.memory.burst import BurstCommand, BurstSplitter, max_block
from rnic.records import DmaCommand
from rnic.stream.align import Scatter, lane_bits, words_of
from rnic.stream.arbiter import StreamArbiter
from rnic.stream.beat import Beat
from rnic.stream.buffer import SkidBuffer
from rnic.stream.check import watch
from rnic.stream.fifo import StreamFifo
from rnic.stream.fork import Fork

__all__ = ["DmaWrite"]


class Start(data.StructLayout):
    """An access that may go to the bus; ``end``: number of its last byte, counted from its address block; ``single``,
    ``double``: it lies in one bus word, in two.

    Parameters: ``width`` of the bus in bits.
    """

    def __init__(self, width: int):
        super().__init__({"command": DmaCommand(), "end": range(max_block(width) + (1 << 16)), "single": 1, "double": 1})


class _WriteChannel(wiring.Component):
    """One client's half: lets commands pass while there are places, counts responses, reports to the client.

    Members: ``command``, ``start``, in and out; ``data_valid``, the client's data has a beat; ``delivered``, pulse:
    the last beat of the client's access has been taken; ``accept``, pulse: the bus has taken all of an access;
    ``response``, pulse with ``response_err``: a write response of this client; ``accepted``, ``done``, streams to the
    client; ``busy``.
    """

    def __init__(self, width: int, name: str, outstanding: int):
        self.width = width
        self.name = name
        self.outstanding = outstanding
        self.block = max_block(width)
        super().__init__({
            "command": In(stream.Signature(DmaCommand())),
            "start": Out(stream.Signature(Start(width))),
            "data_valid": In(1),
            "delivered": In(1),
            "accept": In(1),
            "response": In(1),
            "response_err": In(1),
            "accepted": Out(stream.Signature(1)),
            "done": Out(stream.Signature(1)),
            "busy": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        block_bits = (self.block - 1).bit_length()
        m.submodules.bursts = bursts = StreamFifo(range((1 << 16) // self.block + 1), self.outstanding)
        m.submodules.results = results = StreamFifo(1, self.outstanding)
        wiring.connect(m, results.o, wiring.flipped(self.done))

        # An access has its place until the client has taken both reports of it.
        unaccepted = Signal(range(self.outstanding + 1))
        undone = Signal(range(self.outstanding + 1))
        waiting = Signal(range(self.outstanding + 1))  # `accepted` items the client has not taken
        has_place = Signal(init=1)
        streaming = Signal()  # the data's head belongs to an access already started
        may_start = Signal()
        started = Signal()
        end_byte = Signal(range(self.block + (1 << 16)))
        lanes = self.width // 8
        single, double = words_of(lanes, self.command.payload.address[: lane_bits(self.width)], self.command.payload.length)
        # A cycle late: an access that starts is `streaming` in the next cycle and lets none start.
        m.d.sync += has_place.eq((unaccepted != self.outstanding) & (undone != self.outstanding))
        m.d.comb += [
            may_start.eq(self.data_valid & ~streaming & has_place),
            self.start.valid.eq(self.command.valid & may_start),
            self.start.payload.command.eq(self.command.payload),
            self.start.payload.end.eq(end_byte),
            self.start.payload.single.eq(single),
            self.start.payload.double.eq(double),
            self.command.ready.eq(self.start.ready & may_start),
            started.eq(self.start.valid & self.start.ready),
            end_byte.eq(self.command.payload.address[:block_bits] + self.command.payload.length - 1),
            bursts.i.valid.eq(started),
            bursts.i.payload.eq(end_byte >> block_bits),  # bursts of the access, less one
            self.accepted.valid.eq(waiting != 0),
            self.busy.eq(undone != 0),
        ]
        with m.If(started):
            m.d.sync += streaming.eq(1)
        with m.Elif(self.delivered):
            m.d.sync += streaming.eq(0)

        accepted_taken = Signal()
        done_taken = Signal()
        m.d.comb += [
            accepted_taken.eq(self.accepted.valid & self.accepted.ready),
            done_taken.eq(self.done.valid & self.done.ready),
        ]
        m.d.sync += [
            unaccepted.eq(unaccepted + started - accepted_taken),
            undone.eq(undone + started - done_taken),
            waiting.eq(waiting + self.accept - accepted_taken),
        ]

        # Responses of one ID come in order.
        received = Signal.like(bursts.o.payload)
        failed = Signal()
        complete = Signal()
        m.d.comb += [
            complete.eq(self.response & (received == bursts.o.payload)),
            bursts.o.ready.eq(complete),
            results.i.valid.eq(complete),
            results.i.payload.eq(failed | self.response_err),
        ]
        with m.If(self.response):
            m.d.sync += [
                received.eq(Mux(complete, 0, received + 1)),
                failed.eq(~complete & (failed | self.response_err)),
            ]

        watch(m, "command", self.command)
        watch(m, "start", self.start)
        watch(m, "accepted", self.accepted)
        watch(m, "done", self.done)
        m.d.sync += [
            Assert(~started | bursts.i.ready, f"DmaWrite {self.name}: burst counts overflow"),
            Assert(~complete | results.i.ready, f"DmaWrite {self.name}: results overflow"),
            Assert(~self.response | bursts.o.valid, f"DmaWrite {self.name}: response without an access"),
            Assert(waiting <= unaccepted, f"DmaWrite {self.name}: more accepted than started"),
        ]
        return m


class DmaWrite(wiring.Component):
    """DMA write engine: each client gives accesses and their bytes, and learns when the bus has them.

    Client number i uses AXI ID i. Round robin access by access: an access starts when its command and the first beat
    of its data are there, and then holds the bus until its last W beat. **A client must have the whole data of an
    access at hand before it gives its first beat**, else it keeps all others waiting. Data packets are packed (byte 0
    in lane 0) and have exactly the command's length (Assert); ``err`` of a beat is not looked at. Bursts are INCR of
    full-width beats, cut at 4 KiB and 256 beats, unaligned ends by WSTRB. The W beats of a burst are offered no
    earlier than its AW.

    To each client, in the order of its commands: ``accepted`` one item an access when AW and all W beats of it have
    been taken; ``done`` one item when all its responses have come, payload 1 when one was an error. BREADY is
    constantly 1. A client has at most ``outstanding`` accesses whose two items it has not both taken.

    Timing: command to AWVALID 3 cycles, to WVALID 3 cycles at 64 bits, 4 above; one W beat per cycle also from one
    access to the next; one access per cycle. Last of AW, W taken to ``accepted`` 1 cycle; last B to ``done`` 2 cycles.

    Parameters: ``width`` of the bus in bits; ``clients``, names; ``outstanding`` >= 1 per client. Raises ValueError.
    Members: for each client a port of its name with ``command`` (stream of DmaCommand, 1..65535 bytes, any alignment),
    ``data`` (stream of Beat), ``accepted``, ``done`` (streams of 1 bit), seen from the client; ``axi``,
    AxiWriteSignature; ``busy``, an access is under way.
    """

    def __init__(self, width: int, clients: list[str], *, outstanding: int = 16):
        if not clients or len(set(clients)) != len(clients):
            raise ValueError(f"clients are {clients}, must be one or more with different names")
        if "axi" in clients or "busy" in clients:
            raise ValueError(f"clients are {clients}, must not be named axi or busy")
        if outstanding < 1:
            raise ValueError(f"outstanding is {outstanding}, must be at least 1")
        self.width = width
        self.clients = list(clients)
        self.outstanding = outstanding
        self.id_width = max(1, (len(clients) - 1).bit_length())
        port = wiring.Signature({
            "command": Out(stream.Signature(DmaCommand())),
            "data": Out(stream.Signature(Beat(width))),
            "accepted": In(stream.Signature(1)),
            "done": In(stream.Signature(1)),
        })
        super().__init__({name: In(port) for name in clients} | {
            "axi": Out(AxiWriteSignature(width, self.id_width)),
            "busy": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        block = max_block(self.width)
        m.submodules.arbiter = arbiter = StreamArbiter(Start(self.width), len(self.clients), skid=True)
        job = data.StructLayout({"start": Start(self.width), "client": self.id_width})
        m.submodules.fork = fork = Fork(job, 2)
        m.submodules.splitter = splitter = BurstSplitter(self.width, block, self.id_width)
        m.submodules.aw = aw = SkidBuffer(BurstCommand(self.id_width))
        wiring.connect(m, splitter.o, aw.i)
        m.submodules.scatter = scatter = Scatter(self.width, block=block, tag_width=self.id_width)

        channels = []
        for number, name in enumerate(self.clients):
            m.submodules[name] = channel = _WriteChannel(self.width, name, self.outstanding)
            port = getattr(self, name)
            wiring.connect(m, wiring.flipped(port.command), channel.command)
            wiring.connect(m, channel.accepted, wiring.flipped(port.accepted))
            wiring.connect(m, channel.done, wiring.flipped(port.done))
            wiring.connect(m, channel.start, arbiter.i[number])
            m.d.comb += [
                channel.data_valid.eq(port.data.valid),
                channel.delivered.eq(port.data.valid & port.data.ready & port.data.payload.last),
            ]
            watch(m, f"{name}_data", port.data)
            channels.append(channel)
        m.d.comb += self.busy.eq(Cat(channel.busy for channel in channels).any())

        # The chosen access goes to the address side and to the data side.
        address_job, data_job = fork.o[0], fork.o[1]
        m.d.comb += [
            fork.i.valid.eq(arbiter.o.valid),
            fork.i.payload.start.eq(arbiter.o.payload),
            fork.i.payload.client.eq(arbiter.source),
            arbiter.o.ready.eq(fork.i.ready),
            splitter.i.valid.eq(address_job.valid),
            splitter.i.payload.eq(address_job.payload.start.command),
            splitter.tag.eq(address_job.payload.client),
            address_job.ready.eq(splitter.i.ready),
            scatter.command.valid.eq(data_job.valid),
            scatter.command.payload.start.eq(data_job.payload.start.command.address[: (block - 1).bit_length()]),
            scatter.command.payload.end.eq(data_job.payload.start.end),
            scatter.command.payload.single.eq(data_job.payload.start.single),
            scatter.command.payload.double.eq(data_job.payload.start.double),
            scatter.command.payload.tag.eq(data_job.payload.client),
            data_job.ready.eq(scatter.command.ready),
        ]
        self._select_data(m, scatter, data_job)
        aw_done, w_done = self._bus(m, aw.o, scatter.o)
        self._accept(m, channels, aw.o.payload.tag, aw_done, scatter.o.payload.tag, w_done)

        response = Signal()
        response_id = Signal(self.id_width)
        response_err = Signal()
        m.d.comb += self.axi.bready.eq(1)
        m.d.sync += [
            response.eq(self.axi.bvalid),
            response_id.eq(self.axi.bid),
            response_err.eq(self.axi.bresp[1]),
            Assert(~response | (response_id < len(self.clients)), Format("DmaWrite: B with ID {}", response_id)),
        ]
        for number, channel in enumerate(channels):
            m.d.comb += [
                channel.response.eq(response & (response_id == number)),
                channel.response_err.eq(response_err),
            ]
        return m

    def _select_data(self, m, scatter, job):
        """The data of the access's client, up to its last beat: what follows belongs to another access."""
        with m.Switch(job.payload.client):
            for number, name in enumerate(self.clients):
                port = getattr(self, name).data
                with m.Case(number):
                    m.d.comb += [
                        scatter.i.valid.eq(port.valid & job.valid & ~scatter.tail),
                        scatter.i.payload.eq(port.payload),
                        port.ready.eq(scatter.i.ready),
                    ]

    def _bus(self, m, bursts, words):
        """Drives AW and W; returns the pulses of an access's last AW and last W beat being taken."""
        axi = self.axi
        burst, word = bursts.payload, words.payload
        m.d.comb += [
            axi.awid.eq(burst.tag),
            axi.awaddr.eq(burst.address),
            axi.awlen.eq(burst.len),
            axi.awsize.eq(lane_bits(self.width)),
            axi.awburst.eq(Burst.INCR),
            axi.awvalid.eq(bursts.valid),
            bursts.ready.eq(axi.awready),
            axi.wdata.eq(word.data),
            axi.wstrb.eq(word.strb),
            axi.wlast.eq(word.block_last),
        ]
        # A burst's W beats wait for its AW to be offered. AW and W come from one list of accesses, so counting is
        # enough.
        offered = Signal()  # the burst on AW has been counted
        new = Signal()
        ahead = Signal(range(128))  # bursts offered whose W has not begun; at most those of two accesses
        some_ahead = Signal()  # ahead != 0
        inside = Signal()  # a burst's W has begun and not ended
        begin = Signal()
        taken = Signal()
        may_go = Signal()
        m.d.comb += [
            new.eq(axi.awvalid & ~offered),
            may_go.eq(inside | some_ahead | new),
            axi.wvalid.eq(words.valid & may_go),
            words.ready.eq(axi.wready & may_go),
            taken.eq(axi.wvalid & axi.wready),
            begin.eq(taken & ~inside),
        ]
        m.d.sync += [
            offered.eq(axi.awvalid & ~axi.awready),
            ahead.eq(ahead + new - begin),
            some_ahead.eq(Mux(new == begin, some_ahead, new | (ahead != 1))),
            Assert(some_ahead == (ahead != 0), "DmaWrite: flag and count differ"),
            Assert(ahead < 127, "DmaWrite: AW too far ahead of W"),
        ]
        with m.If(taken):
            m.d.sync += inside.eq(~axi.wlast)
        aw_done = Signal()
        w_done = Signal()
        m.d.comb += [
            aw_done.eq(axi.awvalid & axi.awready & burst.last),
            w_done.eq(taken & word.last),
        ]
        return aw_done, w_done

    def _accept(self, m, channels, aw_client, aw_done, w_client, w_done):
        """An access is accepted when the later of its AW and its W side is done. Both sides have the same order."""
        aw_ahead = Signal(range(16))  # accesses whose AW side is done and whose W side is not
        w_ahead = Signal(range(16))
        some_aw, some_w = Signal(), Signal()  # the counts are not 0
        accept = Signal()
        client = Signal(self.id_width)
        m.d.comb += [
            accept.eq((aw_done & w_done) | (aw_done & some_w) | (w_done & some_aw)),
            client.eq(Mux(some_w, aw_client, w_client)),
        ]
        with m.If(aw_done & ~w_done):
            with m.If(some_w):
                m.d.sync += [w_ahead.eq(w_ahead - 1), some_w.eq(w_ahead != 1)]
            with m.Else():
                m.d.sync += [aw_ahead.eq(aw_ahead + 1), some_aw.eq(1)]
        with m.If(w_done & ~aw_done):
            with m.If(some_aw):
                m.d.sync += [aw_ahead.eq(aw_ahead - 1), some_aw.eq(aw_ahead != 1)]
            with m.Else():
                m.d.sync += [w_ahead.eq(w_ahead + 1), some_w.eq(1)]
        for number, channel in enumerate(channels):
            m.d.comb += channel.accept.eq(accept & (client == number))
        m.d.sync += [
            Assert((some_aw == (aw_ahead != 0)) & (some_w == (w_ahead != 0)), "DmaWrite: flags and counts differ"),
            Assert(aw_ahead < 15, "DmaWrite: AW too many accesses ahead of W"),
            Assert(w_ahead < 15, "DmaWrite: W too many accesses ahead of AW"),
        ]
