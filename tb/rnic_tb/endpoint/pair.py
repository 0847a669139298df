"""Two connected endpoints, and either of them with hand-made frames: the set-up most tests start from."""

from __future__ import annotations

from dataclasses import dataclass

from rnic.wire.frame import Frame, parse_frame
from rnic.wire.opcode import Opcode

from .constants import ALL_ACCESS, AethType, NakCode, QpType, WcStatus, WrOp, syndrome
from .device import Device
from .link import Faults, Link
from .memory import MemoryRegion
from .qp import PeerPolicy, QueuePair
from .queues import AddressVector, CompletionQueue, RecvWr, SendWr, Sge, SharedReceiveQueue, WorkCompletion

PD = 5
REGION_BYTES = 1 << 16
ACK = syndrome(AethType.ACK, 0x1F)


def nak(code: NakCode) -> int:
    """Syndrome of a NAK."""
    return syndrome(AethType.NAK, code)


def rnr(timer: int) -> int:
    """Syndrome of an RNR NAK."""
    return syndrome(AethType.RNR, timer)


@dataclass
class End:
    """One side: device, queue pair, one CQ for everything, one region of 64 KiB at `base` under `key`."""

    device: Device
    qp: QueuePair
    cq: CompletionQueue
    region: MemoryRegion

    @property
    def base(self) -> int:
        return self.region.base

    @property
    def key(self) -> int:
        return self.region.key

    def sge(self, offset: int, length: int) -> Sge:
        return Sge(self.base + offset, length, self.key)

    def post(self, op: WrOp, wr_id: int = 1, offset: int = 0, length: int = 0, **fields) -> None:
        """Post a send over one element of the region."""
        sges = fields.pop("sges", (self.sge(offset, length),))
        self.qp.post_send(SendWr(wr_id, op, sges, **fields))

    def recv(self, wr_id: int = 1, offset: int = 0, length: int = 4096) -> None:
        """Post a receive over one element of the region."""
        self.qp.post_recv(RecvWr(wr_id, (self.sge(offset, length),)))

    def sent(self, limit: int | None = None) -> list[Frame]:
        """The frames that leave now."""
        return [parse_frame(raw) for raw in self.device.poll_tx(limit)]

    def take(self, *frames: Frame) -> list[Frame]:
        """Give frames to the device; what it answers."""
        for frame in frames:
            self.device.receive(frame.pack())
        return self.sent()

    def wait(self, ns: int) -> list[Frame]:
        """Let time pass; what leaves then."""
        self.device.advance(ns)
        return self.sent()

    def completions(self) -> list[tuple[int, WcStatus]]:
        """(wr_id, status) of what completed since the last call."""
        return [(wc.wr_id, wc.status) for wc in self.wcs()]

    def wcs(self) -> list[WorkCompletion]:
        return self.cq.poll()

    def read(self, offset: int, length: int) -> bytes:
        return self.region.read(self.base + offset, length)

    def write(self, offset: int, data: bytes) -> None:
        self.region.write(self.base + offset, data)


class Pair:
    """Two endpoints "a" and "b" with one connected QP each.

    `psn_a`, `psn_b` are the first PSNs they send; other keywords are QP attributes of both ends; `a_attrs`, `b_attrs`
    of one. `limits` go to create_qp of both.
    """

    def __init__(
        self,
        kind: QpType = QpType.RC,
        psn_a: int = 0x100,
        psn_b: int = 0x900,
        policy_a: PeerPolicy | None = None,
        policy_b: PeerPolicy | None = None,
        srq: SharedReceiveQueue | None = None,
        cq_depth: int = 1 << 16,
        a_attrs: dict | None = None,
        b_attrs: dict | None = None,
        limits: dict | None = None,
        **attrs,
    ):
        macs, ips = (b"\x02\0\0\0\0\x01", b"\x02\0\0\0\0\x02"), (b"\x0a\0\0\x01", b"\x0a\0\0\x02")
        common = {"path_mtu": 256, "access": ALL_ACCESS} | attrs
        made = []
        for i, (policy, extra) in enumerate(((policy_a, a_attrs), (policy_b, b_attrs))):
            device = Device(macs[i], [ips[i]])
            cq = CompletionQueue(cq_depth)
            base, key = (0x10000000, 0x1A00) if i == 0 else (0x20000000, 0x2B00)
            region = device.keys.register(key, PD, ALL_ACCESS, base, REGION_BYTES)
            qp = device.create_qp(
                0x11 + i, kind, PD, cq, cq, srq if i else None, policy=policy, **(limits or {})
            )
            psns = {"sq_psn": psn_a, "rq_psn": psn_b} if i == 0 else {"sq_psn": psn_b, "rq_psn": psn_a}
            qp.connect(AddressVector(macs[1 - i], ips[1 - i], ips[i]), 0x12 - i, **(common | psns | (extra or {})))
            made.append(End(device, qp, cq, region))
        self.a, self.b = made
        self.psn_a, self.psn_b = psn_a, psn_b

    def link(self, faults: Faults | None = None, seed: int = 0, **options) -> Link:
        """A wire between the two."""
        return Link(self.a.device, self.b.device, faults or Faults(), seed, **options)

    def frame(self, opcode: Opcode, psn: int, **fields) -> Frame:
        """A frame as a would send it to b; `psn` counts from a's first PSN for requests to b."""
        return self.a.qp.frame(opcode, (self.psn_a + psn) & 0xFFFFFF, **fields)

    def answer(self, opcode: Opcode, psn: int, **fields) -> Frame:
        """A frame as b would send it to a; `psn` counts from a's first PSN."""
        return self.b.qp.frame(opcode, (self.psn_a + psn) & 0xFFFFFF, **fields)

    def ack(self, psn: int, code: int = ACK, msn: int = 0) -> Frame:
        """An ACK or NAK from b to a."""
        return self.answer(Opcode.RC_ACK, psn, syndrome=code, msn=msn)

    def write_fields(self, length: int, offset: int = 0) -> dict:
        """RETH fields of a WRITE or READ in b's region."""
        return {"va": self.b.base + offset, "rkey": self.b.key, "dma_length": length}
