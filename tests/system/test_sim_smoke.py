"""The running model itself, on a stand-in NIC: every part of the harness does what it says."""

import random
import struct

import pytest
from tests.system.standin import (
    IDENTITY,
    PROBE_WIDTH,
    REG_ASSERT,
    REG_BEATS,
    REG_BREAK,
    REG_ERROR,
    REG_GO,
    REG_ID,
    REG_IRQ,
    REG_SCRATCH,
    REG_SOURCE,
    REG_TARGET,
)
from tests.unit.test_sim_build import lz4_decode

from rnic_sim.link import Fault
from rnic_sim.native import (
    AssertionFailed,
    CsrError,
    EventKind,
    MemoryFault,
    Port,
    ProtocolViolation,
    SimError,
    Timeout,
)
from rnic_sim.waves import recording
from rnic_sim.world import World

WIDTHS = (64, 512)


def start_copy(host, source: int, target: int, beats: int) -> None:
    """Programs the stand-in's copy engine by posted writes."""
    for register, value in ((REG_SOURCE, source), (REG_TARGET, target)):
        host.csr_post(register, value & 0xFFFFFFFF)
        host.csr_post(register + 4, value >> 32)
    host.csr_post(REG_BEATS, beats - 1)
    host.csr_post(REG_GO, 1)


def pattern(length: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length)


@pytest.mark.parametrize("width", WIDTHS)
def test_registers_memory_and_interrupt(standin, width):
    with World(standin(width), seed=1) as world:
        for host in world.nic:
            assert host.csr_read(REG_ID) == IDENTITY
            host.csr_write(REG_SCRATCH, 0xDEAD0000 + host._index)
            source, target = host.alloc_pages(2)
            length = 16 * width // 8
            host.mem_write(source, pattern(4096))
            start_copy(host, source, target, 16)
            host.wait_irq(1000)
            assert host.mem_read(target, length) == pattern(4096)[:length]
            assert host.mem_read(target + length, 4096 - length) == bytes(4096 - length)
            host.csr_write(REG_IRQ, 0)
            world.step(1)
            assert not host.irq()
        assert [host.csr_read(REG_SCRATCH) for host in world.nic] == [0xDEAD0000, 0xDEAD0001]
        with pytest.raises(CsrError, match="response 2"):
            world.nic[0].csr_read(REG_ERROR)


def test_bus_latencies_are_what_was_asked_for(standin):
    with World(standin(64), nics=1, host_latency=37, write_latency=11) as world:
        world.monitor(events=True)
        host = world.nic[0]
        source, target = host.alloc_pages(2)
        start_copy(host, source, target, 8)
        host.wait_irq(1000)
        at = {event.kind: event.cycle for event in world.events()}
        assert at[EventKind.R_FIRST] - at[EventKind.AR] == 37
        assert at[EventKind.R_LAST] - at[EventKind.R_FIRST] == 7
        assert at[EventKind.B] - at[EventKind.W_LAST] == 11
        host.bus(read_rate=0.25)
        start_copy(host, source, target, 8)
        host.csr_write(REG_IRQ, 0)
        host.wait_irq(1000)
        at = {event.kind: event.cycle for event in world.events()}
        assert 24 <= at[EventKind.R_LAST] - at[EventKind.R_FIRST] <= 28  # the limiter lets two beats run ahead


@pytest.mark.parametrize("width", WIDTHS)
def test_stalled_copies_are_right(standin, width):
    with World(standin(width), nics=1, seed=7) as world:
        host = world.nic[0]
        host.bus(ar_stall=0.5, r_stall=0.4, aw_stall=0.5, w_stall=0.6, b_stall=0.5, read_jitter=20, write_jitter=9,
                 reorder=True, interleave=True)
        pages = host.alloc_pages(8)
        for number, (source, target) in enumerate(zip(pages[::2], pages[1::2], strict=True)):
            data = pattern(4096, number)
            host.mem_write(source, data)
            beats = min(256, 4096 // (width // 8))
            start_copy(host, source, target, beats)
            host.wait_write(target, 1, 20_000)
            host.wait_irq()
            host.csr_write(REG_IRQ, 0)
            assert host.mem_read(target, beats * width // 8) == data[:beats * width // 8]
        counters = host.bus_counters
        assert (counters["reads"], counters["writes"], counters["unmapped"]) == (4, 4, 0)


def test_dma_outside_allocated_memory_is_an_error(standin):
    with World(standin(64), nics=1) as world:
        host = world.nic[0]
        (page,) = host.alloc_pages(1)
        start_copy(host, page ^ 0x1000, page, 1)
        host.wait_irq(1000)
        assert host.bus_counters["unmapped"] == 1 and host.bus_counters["read_errors"] == 1
        assert host.mem_read(page, 8) == b"\xa5" * 8
        host.csr_write(REG_IRQ, 0)
        host.bus_error(page, 64, writes=2, count=1)
        start_copy(host, page + 128, page, 1)
        host.wait_irq(1000)
        assert host.bus_counters["write_errors"] == 1 and host.mem_read(page, 8) == b"\xa5" * 8
        host.free_pages([page])
        with pytest.raises(MemoryFault, match="leaves allocated memory"):
            host.mem_read(page, 1)


def test_frames_pass_the_link_with_its_latency(standin):
    with World(standin(64), link_latency=25) as world:
        world.monitor(frames=tuple(Port))
        first, second = world.nic
        first.inject(pattern(100))
        sent = first.wait_frame(1000)
        assert sent.data == pattern(100) and not sent.error
        world.run_until(lambda: len(second.frames) >= 1, 1000)
        arrived = second.frames[0]
        assert arrived.port == Port.NET_RX and arrived.data == sent.data
        assert (arrived.first - sent.first, arrived.last - sent.last) == (25, 25)
        assert sent.last - sent.first == 12
        first.inject(pattern(33), port=Port.ETH_TX, error=True)
        frame = first.wait_frame(1000, Port.ETH_RX)
        assert frame.data == pattern(33) and frame.error


def test_python_can_be_the_far_end(standin):
    with World(standin(64)) as world:
        world.connect(0, None)
        host = world.nic[0]
        host.inject(pattern(61))
        assert host.wait_frame(1000).data == pattern(61)
        world.step(200)
        assert host.receive() is None
        assert world.nic[1].receive() is None


def wire_world(standin, **settings):
    """A world in which what is injected at a passes the wire to b, where Python sees it leave; nothing comes back."""
    world = World(standin(64), **settings)
    world.nic[1].wire.fault(Fault.DROP, 1.0)
    return world


def sent_through(world, frames: list[bytes], cycles: int = 3000) -> list[bytes]:
    for frame in frames:
        world.nic[0].inject(frame)
    world.step(cycles)
    received = []
    while (frame := world.nic[1].receive()) is not None:
        received.append(frame.data)
    return received


FRAMES = [bytes([number]) * (60 + number) for number in range(8)]


@pytest.mark.parametrize(("fault", "expected"), [
    (Fault.DROP, [0, 1, 3, 4, 5, 6, 7]),
    (Fault.DUPLICATE, [0, 1, 2, 2, 3, 4, 5, 6, 7]),
    (Fault.REORDER, [0, 1, 3, 2, 4, 5, 6, 7]),
])
def test_fault_on_the_nth_frame(standin, fault, expected):
    with wire_world(standin) as world:
        world.nic[0].wire.fault_nth(fault, 2)
        assert sent_through(world, FRAMES) == [FRAMES[number] for number in expected]
        assert world.nic[0].wire.hits[fault] == 1 and world.nic[0].wire.frames == 8


def test_reordered_last_frame_is_not_lost(standin):
    with wire_world(standin) as world:
        world.nic[0].wire.configure(reorder_timeout=500)
        world.nic[0].wire.fault_nth(Fault.REORDER, 7)
        assert sent_through(world, FRAMES) == FRAMES


def test_corruption_flips_one_bit(standin):
    with wire_world(standin, seed=3) as world:
        world.nic[0].wire.configure(corrupt_first=14)
        world.nic[0].wire.fault(Fault.CORRUPT, 1.0)
        received = sent_through(world, FRAMES)
        world.nic[0].wire.clear_faults()
        for before, after in zip(FRAMES, received, strict=True):
            difference = int.from_bytes(before, "little") ^ int.from_bytes(after, "little")
            assert difference.bit_count() == 1 and difference.bit_length() > 14 * 8
        assert sent_through(world, FRAMES) == FRAMES


def test_ce_mark_and_opcode_rule(standin):
    scapy = pytest.importorskip("scapy.all")
    from scapy.contrib.roce import BTH

    def packet(opcode: int):
        return (scapy.Ether(dst="02:00:00:00:00:02", src="02:00:00:00:00:01")
                / scapy.IP(src="10.0.0.1", dst="10.0.0.2", tos=2)
                / scapy.UDP(sport=49152, dport=4791, chksum=0) / BTH(opcode=opcode, psn=opcode) / scapy.Raw(bytes(16)))

    frames = [bytes(packet(opcode)) for opcode in (4, 10, 4, 10)]
    with wire_world(standin) as world:
        world.nic[0].wire.fault_nth(Fault.CE, 1, opcode=10)
        world.nic[0].wire.fault_nth(Fault.DROP, 1, opcode=4)
        received = sent_through(world, frames)
        marked = packet(10)
        marked[scapy.IP].tos = 3
        assert received == [frames[0], frames[1], bytes(marked)]  # scapy computed the new header checksum


def busy_run(model, seed: int) -> tuple:
    """Everything at once, and all that was seen."""
    with World(model, seed=seed, link_latency=9) as world:
        world.monitor(events=True, frames=tuple(Port))
        for host in world.nic:
            host.bus(r_stall=0.3, w_stall=0.2, read_jitter=30, b_stall=0.3)
            host.wire.configure(tx_stall=0.1, rx_stall=0.1)
            host.wire.fault(Fault.DROP, 0.1)
            host.wire.fault(Fault.REORDER, 0.1)
            host.inject(pattern(200, seed=5))
            source, target = host.alloc_pages(2)
            host.mem_write(source, pattern(4096))
            start_copy(host, source, target, 32)
        world.step(3000)
        return world.events(), world.probe_events(), list(world.frames), world.cycle


def test_same_seed_same_run(standin):
    first, again, other = busy_run(standin(64), 5), busy_run(standin(64), 5), busy_run(standin(64), 6)
    assert first == again
    assert len(first[0]) > 50 and first[0] != other[0]


def test_waves_do_not_change_the_run(standin, tmp_path):
    def run(path):
        with World(standin(64), seed=2) as world:
            world.monitor(events=True)
            world.nic[0].inject(pattern(90))
            if path:
                world.waves_on(path)
            world.step(400)
            return world.events()

    assert run(tmp_path / "run.fst") == run(None)


def test_probe_records(standin):
    with World(standin(64)) as world:
        host = world.nic[1]
        source, target = host.alloc_pages(2)
        start_copy(host, source, target, 1)
        host.wait_irq()
        records = world.probe_events()
        assert [(r.nic, r.slot, r.bits >> 1 & 0x3FF) for r in records] == [(1, 0, 1), (1, 2, 2)]
        for record in records:  # the stand-in puts its own cycle counter above bit 11
            assert record.bits & 1 and record.bits < 1 << PROBE_WIDTH
        assert records[1].cycle - records[0].cycle == (records[1].bits >> 11) - (records[0].bits >> 11)


def test_burst_across_4_kib_is_caught(standin):
    with World(standin(64)) as world:
        host = world.nic[1]
        page = host.alloc(8192)
        start_copy(host, page + 4096 - 8, page, 2)
        with pytest.raises(ProtocolViolation, match=r"nic b, port m_axi, cycle \d+: AR .*4 KiB"):
            host.wait_irq(1000)
        with pytest.raises(ProtocolViolation):
            world.step(1)


def test_withdrawn_valid_is_caught(standin):
    with World(standin(64)) as world:
        host = world.nic[0]
        host.wire.configure(tx_stall=0.9)
        for _ in range(30):
            host.inject(pattern(60))
        host.csr_post(REG_BREAK, 0)
        world.step(50)
        host.csr_post(REG_BREAK, 1)
        with pytest.raises(ProtocolViolation, match="nic a, port net_tx, cycle .*: tvalid fell before tready"):
            for _ in range(20):
                world.step(50)
                host.csr_post(REG_BREAK, world.cycle & 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_failed_assertion_raises_with_its_text(standin, width):
    with World(standin(width)) as world:
        world.nic[1].csr_write(REG_ASSERT, 99)
        world.step(10)
        world.nic[1].csr_post(REG_ASSERT, 100)
        with pytest.raises(AssertionFailed, match=r"(?s)cycle \d+.*level 100 is not below 100.*in b\."):
            world.step(20)


def test_timeout_tells_the_cycle(standin):
    with World(standin(64)) as world:
        with pytest.raises(Timeout, match="interrupt 0 did not rise") as caught:
            world.nic[0].wait_irq(123)
        assert caught.value.cycle == world.cycle
    with pytest.raises(SimError, match="closed"):
        world.step(1)


def test_reset_forgets_what_was_under_way(standin):
    with World(standin(64)) as world:
        host = world.nic[0]
        source, target = host.alloc_pages(2)
        host.mem_write(source, pattern(4096))
        start_copy(host, source, target, 64)
        world.step(100)
        world.reset()
        host.mem_write(target, bytes(512))
        world.step(300)
        assert host.csr_read(REG_SOURCE) == 0
        assert host.mem_read(target, 512) == bytes(512)
        start_copy(host, source, target, 64)
        host.wait_irq(1000)
        assert host.mem_read(target, 512) == pattern(4096)[:512]


def test_two_widths_in_one_process(standin):
    with World(standin(64)) as narrow, World(standin(512)) as wide:
        for _ in range(3):
            narrow.step(10)
            wide.step(20)
        assert wide.cycle - narrow.cycle == 30
        assert narrow.nic[0].csr_read(REG_ID) == wide.nic[0].csr_read(REG_ID) == IDENTITY


def fst_blocks(raw: bytes) -> dict[int, bytes]:
    """The blocks of an FST file by type: a byte of type, then 8 bytes of length (big-endian) that count themselves."""
    blocks, at = {}, 0
    while at < len(raw):
        length = int.from_bytes(raw[at + 1:at + 9], "big")
        blocks[raw[at]] = raw[at + 9:at + 1 + length]
        at += 1 + length
    assert at == len(raw)
    return blocks


def test_waves_are_a_valid_fst_of_both_nics(standin, tmp_path):
    path = tmp_path / "waves" / "run.fst"
    with World(standin(64)) as world:
        with recording(world, path):
            world.nic[0].inject(pattern(90))
            world.step(300)
        size = path.stat().st_size
        world.step(300)
        assert path.stat().st_size == size  # off means off
        with recording(world, tmp_path / "again.fst"):
            world.step(50)
        period = 10**12 // world.clock_hz
        start = world.cycle - 650
    blocks = fst_blocks(path.read_bytes())
    header = blocks[0]
    assert len(header) == 329 - 8 and struct.unpack_from("<d", header, 16)[0] == pytest.approx(2.718281828459045)
    first, last = struct.unpack_from(">QQ", header)
    assert first == (start + 1) * period and last == (start + 300) * period + period // 2
    assert set(blocks) == {0, 3, 6, 8}  # header, geometry, hierarchy, value changes
    names = lz4_decode(blocks[6][8:])
    for name in (b"\0a\0", b"\0b\0", b"rnic_shell\0", b"net_tx_tdata [63:0]\0", b"cycles [63:0]\0", b"copier_state [2:0]\0"):
        assert name in names
    assert b"_$" not in names and b"$auto" not in names  # anonymous signals stay out
    assert (tmp_path / "again.fst").stat().st_size > 1000
