"""Every (length mod 2 W, source mod W, target mod W) through the blocks that align and place, at 64 and 512 bits.

1,024 and 524,288 packets, one after the other, in a compiled model; all memory is compared, guards included.
"""

import random

import pytest

from rnic.wire.frame import Frame
from rnic.wire.opcode import OPCODES, Opcode, PayloadRule
from rnic_sim.build import build_model
from rnic_sim.native import Port
from rnic_sim.world import World
from tests.block.copier import REG_SPLIT, SLOT, TARGET_OFFSET, copier_model
from tests.rules import rule
from tests.system.standin import REG_BEATS, REG_GO, REG_IRQ, REG_SOURCE, REG_TARGET

STALLS = {"ar_stall": 0.3, "r_stall": 0.3, "aw_stall": 0.3, "w_stall": 0.3, "b_stall": 0.3, "interleave": True, "reorder": True}


class Copies:
    """The model with its two regions."""

    def __init__(self, width: int, seed: int, **bus):
        self.lanes = width // 8
        self.rng = random.Random(seed)
        print(f"seed {seed}")
        self.world = World(build_model(*copier_model(width)), 1, seed, host_latency=4, write_latency=2)
        self.host = self.world.nic[0]
        self.host.bus(**bus)
        self.world.monitor(probes=False, frames=())
        self.size = SLOT * self.lanes**2
        self.source, self.target = self.host.alloc(self.size), self.host.alloc(self.size)
        self.data = self.rng.randbytes(self.size)
        self.host.mem_write(self.source, self.data)
        for register, address in ((REG_SOURCE, self.source), (REG_TARGET, self.target)):
            self.host.csr_write(register, address & 0xFFFF_FFFF)
            self.host.csr_write(register + 4, address >> 32)

    def check(self, length: int, split: int = 0) -> None:
        """All pairs of offsets at one length."""
        image = bytearray(b"\xa5") * self.size
        self.host.mem_write(self.target, bytes(image))
        self.host.csr_write(REG_IRQ, 0)
        self.host.csr_write(REG_BEATS, length)
        self.host.csr_write(REG_SPLIT, split)
        self.host.csr_write(REG_GO, 1)
        self.host.wait_irq(1_000_000)
        lanes = self.lanes
        for i in range(lanes**2):
            src, dst = SLOT * i + i % lanes, SLOT * i + TARGET_OFFSET + i // lanes
            image[dst : dst + length] = self.data[src : src + length]
        got = self.host.mem_read(self.target, self.size)
        if got != image:
            i = next(at for at in range(self.size) if got[at] != image[at])
            raise AssertionError(f"{length} bytes, {split} of them in the first segment: offsets {i // SLOT % lanes} to "
                                 f"{i // SLOT // lanes}: byte {i % SLOT - TARGET_OFFSET - i // SLOT // lanes}")  # fmt: skip


@pytest.mark.parametrize("width", [64, 512])
@rule("R-MR-5", "R-PAD-3")
def test_every_length_and_offset_pair(width):
    copies = Copies(width, width)
    with copies.world:
        for length in range(1, 2 * copies.lanes + 1):
            copies.check(length)


@pytest.mark.parametrize("bus", [{}, STALLS], ids=["smooth", "stalls"])
@rule("R-MR-5")
def test_two_segments_at_64_bits(bus):
    """Every place where a page end may cut the packet."""
    copies = Copies(64, 3, **bus)
    with copies.world:
        for length in range(2, 2 * copies.lanes + 1):
            for split in range(1, length):
                copies.check(length, split)


@rule("R-MR-5")
def test_two_segments_at_512_bits():
    """Cuts at the first and the last byte, around the bus word, and drawn ones; the host bus stalls."""
    copies = Copies(512, 4, **STALLS)
    with copies.world:
        for length, split in ((2, 1), (64, 63), (65, 64), (65, 1), (128, 64), (128, 65), (127, 63)):
            copies.check(length, split)
        for _ in range(5):
            length = copies.rng.randrange(3, 129)
            copies.check(length, copies.rng.randrange(1, length))


FORMATS = [Opcode.RC_SEND_MIDDLE, Opcode.RC_READ_RESP_LAST, Opcode.UD_SEND_ONLY, Opcode.UD_SEND_ONLY_IMM, Opcode.RC_WRITE_ONLY,
           Opcode.RC_WRITE_ONLY_IMM]  # fmt: skip


def payload_starts(opcodes, lanes: int) -> set[int]:
    """Lanes of the bus a payload can begin in."""
    return {
        (len(Frame(opcode, 5, payload=bytes(4), vlan=vlan, src_ip=address, dst_ip=address).pack()) - 8) % lanes
        for opcode in opcodes for vlan in (None, (1, 2)) for address in (bytes(4), bytes(16))
    }  # fmt: skip


@pytest.mark.parametrize("width", [64, 512])
@rule("R-FRM-1", "R-FRM-7", "R-PAD-3", "R-HDR-1")
def test_every_payload_in_every_frame_format(width):
    """The receive aligner: all lengths up to two bus words behind all headers that precede a payload, IPv4 and IPv6, with and
    without VLAN tag: every lane a payload can begin in, every one it can end in. The wire stalls too."""
    rng = random.Random(width)
    print(f"seed {width}")
    every = [code for code, info in OPCODES.items() if info.payload != PayloadRule.ZERO]
    assert payload_starts(FORMATS, width // 8) == payload_starts(every, width // 8)
    with World(build_model(*copier_model(width)), 1, width) as world:
        world.connect(0, None)
        host = world.nic[0]
        frames = []
        for opcode in FORMATS:
            for vlan in (None, (1, 2)):
                for address in (bytes(4), bytes(16)):
                    for length in range(1, 2 * width // 8 + 1):
                        frame = Frame(opcode, 5, payload=rng.randbytes(length), vlan=vlan, src_ip=address, dst_ip=address)
                        frames.append(frame)
        rng.shuffle(frames)
        for n, frame in enumerate(frames):
            if n % 500 == 250:
                host.wire.configure(tx_stall=rng.choice((0, 0.4)), rx_stall=rng.choice((0, 0.3)))
            host.inject(frame.pack() + rng.randbytes(rng.choice((0, 0, 1, 5, 64))))
            if n % 100 == 99:
                world.step(3000)
        world.step(20_000)
        got = [f for f in world.frames if f.port == Port.NET_TX]
        assert [f.data for f in got] == [f.payload for f in frames] and not any(f.error for f in got)
