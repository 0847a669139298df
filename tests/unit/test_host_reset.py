"""The gates of a device reset: what was begun ends, nothing else begins."""

import pytest
from amaranth.sim import Simulator

from rnic.host.reset import DeviceReset, FrameDrop, FrameGate, HostGate

from .streams import seeded


def simulate(dut, bench):
    sim = Simulator(dut)
    sim.add_clock(4e-9)
    sim.add_testbench(bench)
    sim.run()


@pytest.mark.parametrize("seed", range(6))
def test_host_gate(seed):
    """Random bursts and stalls; stopped at some cycle: valid stays until ready, every burst whose address passed gets its W beats
    and its response, no later one passes, then ``quiet``; opened again the rest passes."""
    rng = seeded(seed)
    dut = HostGate(64, 2)
    stop_at, open_at = rng.randrange(20, 120), 500

    async def bench(ctx):
        i, o = dut.i, dut.o
        ctx.set(i.bready, 1)
        ctx.set(i.rready, 1)
        bursts = [rng.randint(1, 5) for _ in range(60)]  # beats of write bursts
        reads = 60
        aw = ar = 0  # bursts of the core whose address was taken
        w_burst, w_beat = 0, 0
        answers, read_answers = [], []  # port side: bursts accepted, not answered
        seen_last = 0
        before = None
        quiet_at = None
        for cycle in range(1300):
            stop = stop_at <= cycle < open_at
            ctx.set(dut.stop, stop)
            ctx.set(i.awvalid, aw < len(bursts))
            ctx.set(i.arvalid, ar < reads)
            ctx.set(i.awid, aw % 2)
            # W of the core: never before its AW is offered.
            w_offered = w_burst < min(len(bursts), aw + 1)
            ctx.set(i.wvalid, w_offered)
            ctx.set(i.wlast, w_offered and w_beat == bursts[w_burst] - 1)
            ready = {c: rng.random() < 0.4 for c in ("ar", "aw", "w")}
            for channel, value in ready.items():
                ctx.set(getattr(o, f"{channel}ready"), value)
            b = bool(answers) and answers[0] < cycle - 10 and seen_last > 0 and rng.random() < 0.3
            r = bool(read_answers) and read_answers[0] < cycle - 25 and rng.random() < 0.3
            ctx.set(o.bvalid, b)
            ctx.set(o.rvalid, r)
            ctx.set(o.rlast, r)
            values = (await ctx.tick().sample(
                i.awready, i.arready, i.wready, o.awvalid, o.arvalid, o.wvalid, o.wlast, i.bvalid, i.rvalid, dut.quiet))[2:]
            i_aw, i_ar, i_w, o_aw, o_ar, o_w, o_last, i_b, i_r, quiet = values
            assert (i_b, i_r) == (b, r)
            if before is not None:
                for now, (valid, taken), name in zip((o_aw, o_ar, o_w), before, ("aw", "ar", "w"), strict=True):
                    assert now or not valid or taken, f"{name}valid fell"
            before = [(o_aw, ready["aw"]), (o_ar, ready["ar"]), (o_w, ready["w"])]
            if i_aw and aw < len(bursts):
                assert o_aw and ready["aw"]
                aw += 1
                answers.append(cycle)
            if i_ar and ar < reads:
                ar += 1
                read_answers.append(cycle)
            if o_w and ready["w"]:
                assert i_w
                w_beat += 1
                if o_last:
                    w_burst, w_beat, seen_last = w_burst + 1, 0, seen_last + 1
            if b:
                answers.pop(0)
                seen_last -= 1
            if r:
                read_answers.pop(0)
            if quiet and quiet_at is None:
                quiet_at = cycle
                assert not answers and not read_answers and w_burst == aw and w_beat == 0
                frozen = (aw, ar, w_burst)
            if quiet_at is not None and cycle < open_at:
                assert (aw, ar, w_burst) == frozen
        assert quiet_at is not None and stop_at < quiet_at < open_at
        assert (aw, ar, w_burst) == (60, 60, 60)

    simulate(dut, bench)


@pytest.mark.parametrize("seed", range(4))
def test_frame_gate(seed):
    """A frame offered or begun ends; then quiet."""
    rng = seeded(seed)
    dut = FrameGate()
    stop_at = rng.randrange(10, 60)

    async def bench(ctx):
        beats = [rng.randint(1, 6) for _ in range(80)]
        frame = beat = 0
        offered = False
        for cycle in range(400):
            stop = stop_at <= cycle < 200
            ctx.set(dut.stop, stop)
            valid = offered or (frame < len(beats) and rng.random() < 0.6)
            ctx.set(dut.i_valid, valid)
            ctx.set(dut.i_last, valid and beat == beats[frame] - 1)
            ready = rng.random() < 0.5
            ctx.set(dut.o_ready, ready)
            _, _, i_ready, o_valid, quiet = await ctx.tick().sample(dut.i_ready, dut.o_valid, dut.quiet)
            offered = valid and not i_ready
            assert o_valid <= valid and (not valid or i_ready == (o_valid and ready))
            if stop and quiet:
                assert beat == 0 and not o_valid
            if stop and cycle > 150:
                assert quiet
            if valid and i_ready:
                beat += 1
                if beat == beats[frame]:
                    frame, beat = frame + 1, 0
        assert frame > 15

    simulate(dut, bench)


@pytest.mark.parametrize("seed", range(4))
def test_frame_drop(seed):
    """The core gets whole frames only: of those that overlap the reset nothing after it."""
    rng = seeded(seed)
    dut = FrameDrop()
    reset_at = rng.randrange(10, 60)

    async def bench(ctx):
        beats = [rng.randint(1, 6) for _ in range(60)]
        frame = beat = 0
        taken = []
        overlaps = set()
        offered = False
        for cycle in range(500):
            reset = reset_at <= cycle < reset_at + 4
            ctx.set(dut.reset, reset)
            valid = offered or (frame < len(beats) and rng.random() < 0.6)
            if reset and (beat or valid):
                overlaps.add(frame)
            ctx.set(dut.i_valid, valid)
            ctx.set(dut.i_last, valid and beat == beats[frame] - 1)
            ready = rng.random() < 0.5
            ctx.set(dut.o_ready, ready)
            _, _, i_ready, o_valid = await ctx.tick().sample(dut.i_ready, dut.o_valid)
            assert not (reset and o_valid)
            offered = valid and not i_ready
            if o_valid and ready:
                taken.append((frame, beat, cycle > reset_at))
            if valid and i_ready:
                beat += 1
                if beat == beats[frame]:
                    frame, beat = frame + 1, 0
        for number in range(frame):
            got = [b for f, b, _ in taken if f == number]
            if number in overlaps:
                assert not [1 for f, _, after in taken if f == number and after]
            else:
                assert got == list(range(beats[number])), number
        assert frame > 40 and overlaps

    simulate(dut, bench)


def test_steps_of_a_reset():
    dut = DeviceReset()

    async def bench(ctx):
        log = []
        for cycle in range(80):
            ctx.set(dut.request, cycle in (5, 30))  # the second comes while the first is under way
            ctx.set(dut.frames_quiet, cycle >= 10)
            ctx.set(dut.host_quiet, cycle >= 20)
            ctx.set(dut.sweeping, 26 <= cycle < 60)
            _, _, frames, host, reset, busy = await ctx.tick().sample(dut.stop_frames, dut.stop_host, dut.reset, dut.busy)
            log.append((frames, host, reset, busy))
        assert log[4] == (0, 0, 0, 0) and log[5][3] == 1
        assert all(entry == (1, 0, 0, 1) for entry in log[6:11])
        assert all(entry == (1, 1, 0, 1) for entry in log[11:21])
        resets = [cycle for cycle, entry in enumerate(log) if entry[2]]
        assert resets == [21, 22, 23, 24] and all(log[cycle][:2] == (1, 1) for cycle in resets)
        assert all(entry == (0, 0, 0, 1) for entry in log[25:61]) and log[62] == (0, 0, 0, 0)

    simulate(dut, bench)
