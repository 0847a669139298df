"""Verbs with the names of pyverbs: `Context`, `PD`, `MR`, `CQ`, `SGE`, `SendWR`, `RecvWR`, `WC` (queue pairs: `rnic_sim.qp`).

Errors are `RDMAError` (an ``OSError`` with ``errno``). Nothing here looks inside the RNIC: rings, doorbells, commands only.
"""

import errno
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rnic import abi
from rnic.abi import Command

from .driver import Driver, RDMAError, join_words
from .enums import AccessFlags, SendFlags, WCFlags, WCOpcode, WCStatus, WROpcode
from .events import AsyncEvent, CompChannel, EventQueue
from .seam import Host
from .vm import PAGE, AddressSpace, Mapping

_NO_EQ = 255

if TYPE_CHECKING:
    from .qp import QP

__all__ = [
    "AsyncEvent", "CQ", "CompChannel", "Context", "MR", "PD", "RDMAError", "RecvWR", "SGE", "SendWR", "WC", "gid_bytes",
    "mac_bytes",
]  # fmt: skip


def gid_bytes(address: str) -> bytes:
    """The 16-byte GID of an IP address (R-ADR-1: IPv4 as ::ffff:a.b.c.d)."""
    ip = ipaddress.ip_address(address)
    return bytes(10) + b"\xff\xff" + ip.packed if ip.version == 4 else ip.packed


def mac_bytes(mac: str) -> bytes:
    """Six bytes of ``aa:bb:cc:dd:ee:ff``."""
    raw = bytes.fromhex(mac.replace(":", ""))
    if len(raw) != 6:
        raise ValueError(f"mac is {mac!r}, must be six bytes")
    return raw


class Context:
    """An opened device.

    ``neighbors`` maps GIDs to MACs: what ARP or neighbour discovery would answer (the RNIC has none inside, R-ADR-2).
    ``on_event(name, cycle, details)`` is called at each software step (post, doorbell, poll) when set.
    """

    def __init__(self, host: Host):
        self.host = host
        self.driver = Driver(host)
        self.memory = AddressSpace(host)
        self.neighbors: dict[bytes, bytes] = {}
        self.gids: dict[int, tuple[bytes, bytes]] = {}
        self.qps: dict[int, QP] = {}
        self.cqs: dict[int, CQ] = {}
        self.on_event: Callable[[str, int, dict[str, Any]], None] | None = None
        self._pds = iter(range(1, 1 << 24))
        self.events = EventQueue(self)

    @property
    def caps(self) -> dict[str, int]:
        """Capability registers by name."""
        return self.driver.caps

    def note(self, name: str, **details: Any) -> None:
        """Report a software step."""
        if self.on_event is not None:
            self.on_event(name, self.host.now(), details)

    def set_port(self, mtu: int) -> None:
        """Active MTU code of the port (R-MTU-1)."""
        self.driver.command(Command.SET_PORT, abi.CMD_SET_PORT.words(mtu=mtu))

    def set_gid(self, index: int, address: str, mac: str, vlan: int | None = None) -> None:
        """An own address: IP, MAC and VLAN id."""
        gid, own = gid_bytes(address), mac_bytes(mac)
        entry = abi.GID_ENTRY.pack_int(
            ip=int.from_bytes(gid, "little"), mac=int.from_bytes(own, "little"), valid=1,
            vlan=int(vlan is not None), vlan_vid=vlan or 0,
        )  # fmt: skip
        self.driver.command(Command.SET_GID, abi.CMD_SET_GID.words(index=index, entry=entry))
        self.gids[index] = (gid, own)

    def set_pkey(self, index: int, pkey: int) -> None:
        """An entry of the P_Key table."""
        self.driver.command(Command.SET_PKEY, abi.CMD_SET_PKEY.words(index=index, pkey=pkey))

    def get_async_event(self, *, max_cycles: int = 100_000) -> AsyncEvent:
        """The oldest asynchronous event (R-EVT-1); waits for the interrupt. ``TimeoutError`` after about ``max_cycles``."""
        self.events.wait(self.events.asynchronous, max_cycles)
        return self.events.asynchronous.popleft()

    def new_pd(self) -> int:
        return next(self._pds)


class PD:
    """Protection domain."""

    def __init__(self, context: Context):
        self.context = context
        self.handle = context.new_pd()


class MR:
    """Memory region of ``length`` bytes, in scattered pages of ``page_size`` bytes.

    ``offset`` bytes into the first page; ``address`` fixes the first virtual address instead. ``key`` fixes the key (index and
    variant); else the driver chooses. ``read`` and ``write`` go to host memory, outside the RNIC.
    """

    def __init__(self, pd: PD, length: int, access: AccessFlags | int, *, address: int | None = None, offset: int = 0,
                 page_size: int = PAGE, key: int | None = None, backing: Mapping | None = None):  # fmt: skip
        context = pd.context
        driver = context.driver
        if access & (AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC) and not access & AccessFlags.LOCAL_WRITE:
            raise RDMAError(errno.EINVAL, "remote write or atomic needs local write")  # R-MR-3
        if length < 1:
            raise RDMAError(errno.EINVAL, "length must be at least 1")
        self.pd, self.length, self.access = pd, length, AccessFlags(access)
        start = address - address % page_size if address is not None else None
        lead = address % page_size if address is not None else offset
        self._own = backing is None
        self._mapping = backing or context.memory.map(lead + length, va=start, page_size=page_size)
        self.buf = address if address is not None else self._mapping.va + lead
        index = driver.keys.take(None if key is None else key >> 8)
        self.lkey = self.rkey = key if key is not None else index << 8 | driver.next_variant(index)
        words, self._tables = context.memory.describe(
            self.buf, length, variant=self.lkey & 0xFF, rights=int(access), pd=pd.handle
        )
        try:
            driver.command(Command.CREATE_MR, [self.lkey, *words])
        except RDMAError:
            driver.keys.give(index)
            raise

    @property
    def backing(self) -> Mapping:
        """Its pages, for further regions on them."""
        return self._mapping

    def read(self, length: int, offset: int = 0) -> bytes:
        """Bytes of the region, straight from host memory."""
        return self.pd.context.memory.read(self.buf + offset, length)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Write the region, straight into host memory."""
        self.pd.context.memory.write(self.buf + offset, data)

    def close(self) -> None:
        """Deregister."""
        context = self.pd.context
        context.driver.command(Command.DESTROY_MR, [self.lkey])
        context.driver.keys.give(self.lkey >> 8)
        for table in self._tables:
            context.host.free_pages([table])
        if self._own:
            context.memory.unmap(self._mapping)


@dataclass
class SGE:
    """Scatter/gather element."""

    addr: int
    length: int
    lkey: int

    def words(self) -> int:
        return abi.SGE.pack_int(addr=self.addr, length=self.length, lkey=self.lkey)


@dataclass
class SendWR:
    """Send work request. ``imm_data`` is what lies in memory as a big-endian word, read as a little-endian number."""

    wr_id: int = 0
    opcode: WROpcode = WROpcode.SEND
    sg: list[SGE] = field(default_factory=list)
    send_flags: SendFlags | int = SendFlags.SIGNALED
    imm_data: int = 0
    rkey: int = 0
    remote_addr: int = 0
    compare_add: int = 0
    swap: int = 0
    invalidate_rkey: int = 0

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        """Remote side of a WRITE or READ."""
        self.rkey, self.remote_addr = rkey, addr

    def set_wr_atomic(self, rkey: int, addr: int, compare_add: int, swap: int) -> None:
        """Remote side of an atomic."""
        self.rkey, self.remote_addr, self.compare_add, self.swap = rkey, addr, compare_add, swap


@dataclass
class RecvWR:
    """Receive work request."""

    wr_id: int = 0
    sg: list[SGE] = field(default_factory=list)


@dataclass
class WC:
    """Work completion. In errors only ``wr_id``, ``status``, ``qp_num``, ``vendor_err`` are valid (R-ERR-2)."""

    wr_id: int
    status: WCStatus
    opcode: WCOpcode
    vendor_err: int
    byte_len: int
    qp_num: int
    imm_data: int
    src_qp: int
    wc_flags: WCFlags
    stamp: int = 0  # cycle of the RNIC at which the CQE was made

    @property
    def invalidated_rkey(self) -> int:
        return self.imm_data


class CQ:
    """Completion queue of at least ``cqe`` entries (a power of two, usable in full, R-WQ-3). Its events go to ``channel``."""

    def __init__(self, context: Context, cqe: int, *, channel: CompChannel | None = None):
        most = 1 << (context.caps["max_log_ring"] >> 8 & 0xFF)
        if not 1 <= cqe <= most:
            raise RDMAError(errno.EINVAL, f"cqe is {cqe}, must be 1..{most}")
        self.context, self.channel = context, channel
        self.log_size = max(1, (cqe - 1).bit_length())
        self.cqe = 1 << self.log_size
        self.cqn = context.driver.cqns.take()
        size = self.cqe * abi.CQE_BYTES
        self._mapping = context.memory.map(size)
        self._consumer = 0
        self._kept: list[dict[str, int]] = []  # CQEs taken off the ring by `clean`
        ring, self._tables = context.memory.describe(self._mapping.va, size, rights=AccessFlags.LOCAL_WRITE, base=0)
        context.driver.command(
            Command.CREATE_CQ,
            abi.CMD_CREATE_CQ.words(
                cqn=self.cqn, log_size=self.log_size, eqn=_NO_EQ if channel is None else context.events.eqn, valid=1,
                ring=join_words(ring),
            ),
        )
        context.cqs[self.cqn] = self

    @property
    def ring(self) -> Mapping:
        """The memory the CQEs are written to."""
        return self._mapping

    def poll(self, num_entries: int = 1) -> tuple[int, list[WC]]:
        """Up to ``num_entries`` completions; ``(count, completions)`` as in pyverbs."""
        found: list[WC] = []
        before = self._consumer
        while len(found) < num_entries and (cqe := self._kept.pop(0) if self._kept else self._next()) is not None:
            found.append(self._wc(cqe))
        if self._consumer != before:
            self.context.driver.doorbell(abi.DB_CQ, self.cqn, self._consumer)
        if found:
            for wc in found:
                self.context.note("poll", cqn=self.cqn, qpn=wc.qp_num, wr_id=wc.wr_id, status=wc.status.name,
                                  opcode=wc.opcode.name)  # fmt: skip
        return len(found), found

    def req_notify(self, solicited_only: bool = False) -> None:
        """Arm: the next CQE (with ``solicited_only`` the next solicited one or error) makes one event on the channel (R-CQ-5).
        What is in the queue already makes none: poll once more afterwards."""
        if self.channel is None:
            raise RDMAError(errno.EINVAL, "the CQ has no completion channel")
        self.context.driver.doorbell(abi.DB_CQ, self.cqn, (2 if solicited_only else 1) << 30 | self._consumer)

    def _next(self) -> dict[str, int] | None:
        """Take the next CQE off the ring."""
        at = self._mapping.va + (self._consumer & self.cqe - 1) * abi.CQE_BYTES
        cqe = abi.CQE.unpack(self.context.memory.read(at, abi.CQE_BYTES))
        if cqe["phase"] == self._consumer >> self.log_size & 1:  # R-CQ-9: 1 in the first round
            return None
        self._consumer = self._consumer + 1 & 0x3FFF_FFFF
        return cqe

    def clean(self, qpn: int) -> None:
        """Throw away the CQEs of a QP that was reset or destroyed (R-CQ-8); those of others stay in order."""
        before = self._consumer
        while (cqe := self._next()) is not None:
            self._kept.append(cqe)
        self._kept = [cqe for cqe in self._kept if cqe["qpn"] != qpn]
        if self._consumer != before:
            self.context.driver.doorbell(abi.DB_CQ, self.cqn, self._consumer)

    def _wc(self, cqe: dict[str, int]) -> WC:
        qp = self.context.qps.get(cqe["qpn"])
        if qp is None:
            raise RDMAError(errno.EIO, f"CQE of unknown QP {cqe['qpn']:#x}")
        receive = bool(cqe["opcode"] & 0x80)
        wr_id = qp.retire(receive, cqe["wqe_counter"])
        flags = WCFlags(0)
        for bit, flag in ((abi.CqeFlags.WITH_IMM, WCFlags.WITH_IMM), (abi.CqeFlags.WITH_INV, WCFlags.WITH_INV),
                          (abi.CqeFlags.GRH, WCFlags.GRH)):  # fmt: skip
            if cqe["flags"] & bit:
                flags |= flag
        return WC(
            wr_id=wr_id, status=WCStatus(cqe["status"]), opcode=WCOpcode(cqe["opcode"]), vendor_err=cqe["vendor_err"],
            byte_len=cqe["byte_len"], qp_num=cqe["qpn"], imm_data=cqe["imm"], src_qp=cqe["src_qp"], wc_flags=flags,
            stamp=cqe["stamp"],
        )  # fmt: skip

    def close(self) -> None:
        """Destroy; EBUSY while a QP uses it."""
        self.context.driver.command(Command.DESTROY_CQ, [self.cqn])
        del self.context.cqs[self.cqn]
        self.context.driver.cqns.give(self.cqn)
        for table in self._tables:
            self.context.host.free_pages([table])
        self.context.memory.unmap(self._mapping)
