"""Device reset with traffic under way: what stands between the core and its ports meanwhile."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..memory.axi import AxiSignature

__all__ = ["DeviceReset", "FrameDrop", "FrameGate", "HostGate"]

RESET_CYCLES = 4
COUNT_BITS = 12  # bursts outstanding


class DeviceReset(wiring.Component):
    """The steps of a device reset.

    First ``stop_frames``: frames that have begun go out, no other begins (payload is still being read); when all gates are
    ``frames_quiet``, ``stop_host``: bursts that have begun end, no other begins; when ``host_quiet``, ``reset`` for
    ``RESET_CYCLES``; then the gates open. ``busy`` from the request until the core's tables are clear (``sweeping``).

    Ports: ``request`` pulse; ``stop_frames``, ``frames_quiet``, ``stop_host``, ``host_quiet``, ``reset``, ``sweeping``, ``busy``.
    A wire that never takes the rest of a frame, or a host that never answers, holds the reset up.
    """

    def __init__(self):
        super().__init__({
            "request": In(1), "stop_frames": Out(1), "frames_quiet": In(1), "stop_host": Out(1), "host_quiet": In(1),
            "reset": Out(1), "sweeping": In(1), "busy": Out(1),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        left = Signal(range(RESET_CYCLES + 4))
        with m.FSM(name="device_reset") as fsm:
            m.d.comb += [self.busy.eq(self.request | ~fsm.ongoing("Idle")), self.reset.eq(fsm.ongoing("Reset"))]
            with m.State("Idle"):
                with m.If(self.request):
                    m.next = "Frames"
            with m.State("Frames"):
                m.d.comb += self.stop_frames.eq(1)
                with m.If(self.frames_quiet):
                    m.next = "Host"
            with m.State("Host"):
                m.d.comb += [self.stop_frames.eq(1), self.stop_host.eq(1)]
                m.d.sync += left.eq(RESET_CYCLES - 1)
                with m.If(self.host_quiet):
                    m.next = "Reset"
            with m.State("Reset"):
                m.d.comb += [self.stop_frames.eq(1), self.stop_host.eq(1)]
                m.d.sync += left.eq(left - 1)
                with m.If(left == 0):
                    m.d.sync += left.eq(RESET_CYCLES + 3)
                    m.next = "Begin"
            with m.State("Begin"):  # the command engine begins to sweep
                m.d.sync += left.eq(left - 1)
                with m.If(left == 0):
                    m.next = "Sweep"
            with m.State("Sweep"):
                with m.If(~self.sweeping):
                    m.next = "Idle"
        return m


class HostGate(wiring.Component):
    """Passes the host bus from ``i`` (the core) to ``o``; with ``stop`` no address passes that was not offered before, and only
    the W beats of addresses offered. ``quiet``: nothing is offered or outstanding. Timing: combinational.

    Parameters: ``data_width``, ``id_width`` of the port.
    """

    def __init__(self, data_width: int, id_width: int):
        signature = AxiSignature(data_width, id_width)
        super().__init__({"i": In(signature), "o": Out(signature), "stop": In(1), "quiet": Out(1)})

    def elaborate(self, platform):
        m = Module()
        i, o = self.i, self.o
        for name, member in o.signature.members.items():
            if name.endswith(("valid", "ready")):
                continue
            if member.flow == Out:
                m.d.comb += getattr(o, name).eq(getattr(i, name))
            else:
                m.d.comb += getattr(i, name).eq(getattr(o, name))
        held = {}
        for channel in ("ar", "aw"):
            held[channel] = Signal(name=f"{channel}_held")
            passes = Signal(name=f"{channel}_passes")
            valid, ready = getattr(o, f"{channel}valid"), getattr(o, f"{channel}ready")
            m.d.comb += [
                passes.eq(~self.stop | held[channel]),
                valid.eq(getattr(i, f"{channel}valid") & passes),
                getattr(i, f"{channel}ready").eq(ready & passes),
            ]
            m.d.sync += held[channel].eq(valid & ~ready)
        # W beats of addresses not offered wait: a burst's beats end with the core's reset or pass as a whole.
        owed = Signal(signed(COUNT_BITS))  # addresses offered, less bursts whose last beat has passed
        new = Signal()
        owes = Signal()
        final = Signal()
        m.d.comb += [
            new.eq(o.awvalid & ~held["aw"]),
            # Not stopped, the core sees to it itself; stopped, no new address passes.
            owes.eq(~self.stop | (owed > 0)),
            o.wvalid.eq(i.wvalid & owes),
            i.wready.eq(o.wready & owes),
            final.eq(o.wvalid & o.wready & o.wlast),
            i.bvalid.eq(o.bvalid), o.bready.eq(i.bready), i.rvalid.eq(o.rvalid), o.rready.eq(i.rready),
        ]  # fmt: skip
        reads, writes = Signal(COUNT_BITS), Signal(COUNT_BITS)  # accepted and not answered
        m.d.sync += [
            owed.eq(owed + new - final),
            reads.eq(reads + (o.arvalid & o.arready) - (o.rvalid & o.rready & o.rlast)),
            writes.eq(writes + (o.awvalid & o.awready) - (o.bvalid & o.bready)),
            self.quiet.eq(self.stop & ~held["ar"] & ~held["aw"] & ~o.arvalid & ~o.awvalid & ~o.bvalid & ~o.rvalid
                          & (owed == 0) & (reads == 0) & (writes == 0)),
            Assert(owed >= 0, "HostGate: W beats ahead of their address"),
        ]  # fmt: skip
        return m


class FrameGate(wiring.Component):
    """Passes outgoing frames (AXI4-Stream signals); with ``stop`` a frame that has begun, or was offered, ends, no other begins.
    ``quiet``: between frames, stopped. Timing: combinational.

    Members: ``i_valid``, ``i_ready``, ``i_last`` of the core; ``o_valid``, ``o_ready`` of the port.
    """

    def __init__(self):
        super().__init__({
            "i_valid": In(1), "i_ready": Out(1), "i_last": In(1), "o_valid": Out(1), "o_ready": In(1), "stop": In(1),
            "quiet": Out(1),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        begun = Signal()  # a frame is offered or inside
        passes = Signal()
        m.d.comb += [
            passes.eq(~self.stop | begun),
            self.o_valid.eq(self.i_valid & passes),
            self.i_ready.eq(self.o_ready & passes),
            self.quiet.eq(self.stop & ~begun),
        ]
        with m.If(self.o_valid):
            m.d.sync += begun.eq(~(self.o_ready & self.i_last))
        return m


class FrameDrop(wiring.Component):
    """Passes incoming frames; with ``reset`` everything is dropped, and afterwards the rest of the frame that was under way.
    Timing: combinational.

    Members: ``i_valid``, ``i_ready``, ``i_last`` of the port; ``o_valid``, ``o_ready`` of the core.
    """

    def __init__(self):
        super().__init__({
            "i_valid": In(1), "i_ready": Out(1), "i_last": In(1), "o_valid": Out(1), "o_ready": In(1), "reset": In(1),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        inside = Signal()  # a frame has begun and not ended
        dropping = Signal()
        drops = Signal()
        m.d.comb += [
            drops.eq(self.reset | dropping),
            self.o_valid.eq(self.i_valid & ~drops),
            self.i_ready.eq(drops | self.o_ready),
        ]
        with m.If(self.i_valid & self.i_ready):
            m.d.sync += inside.eq(~self.i_last)
        m.d.sync += dropping.eq(drops & Mux(self.i_valid, ~self.i_last, inside))
        return m
