"""The whole RNIC (configuration ``tiny``) against the software endpoint, which was written from the transport rules alone.

One machine with the RNIC, driven through the verbs API, its wire tied to the endpoint. Memory on both sides is compared as
a whole, so that a byte outside a target is noticed; completions on both sides are compared field by field.
"""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cocotb
from cocotb.task import bridge
from cocotb.triggers import ClockCycles

from rnic.config import RnicConfig, named_config
from rnic_sim.enums import MTU, AccessFlags, QPType, WCOpcode, WCStatus, WROpcode
from rnic_sim.qp import QP, AHAttr, QPAttr, QPCap, QPInitAttr
from rnic_sim.verbs import CQ, MR, PD, SGE, WC, Context, RecvWR, SendWR, gid_bytes, mac_bytes
from rnic_tb.endpoint import (
    ALL_ACCESS,
    AddressVector,
    CompletionQueue,
    Device,
    Faults,
    MemoryRegion,
    QpState,
    QueuePair,
    RecvWr,
    SendWr,
    Sge,
    WcOp,
    WcStatus,
    WorkCompletion,
    WrOp,
)
from rnic_tb.endpoint import QpType as PeerQpType

from .clock import bench, start
from .machine import BenchHost, Wire

CONFIG: RnicConfig = named_config("tiny")
MAC, PEER_MAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
ADDRESSES = {4: ("192.0.2.1", "192.0.2.2"), 6: ("2001:db8::1", "2001:db8::2")}
REGION = 24 << 10  # bytes of each side's region: six pages, at an odd offset
PEER_KEY = 0x2B17
PEER_BASE = 0x7F00_0000_0123
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 63, 64, 65, 255, 256, 257, 1000, 1023, 1024, 1025, 4095, 4096, 4097)


def ip_bytes(address: str) -> bytes:
    gid = gid_bytes(address)
    return gid[12:] if gid.startswith(bytes(10) + b"\xff\xff") else gid


@dataclass
class Connection:
    """An RC connection: the RNIC's QP and the endpoint's, with what their CQs gave so far."""

    qp: QP
    cq: CQ
    peer: QueuePair
    peer_cq: CompletionQueue
    wcs: list[WC] = field(default_factory=list)
    peer_wcs: list[WorkCompletion] = field(default_factory=list)


class Setup:
    """Both machines, and a model of both regions: what they must hold."""

    def __init__(self, host: BenchHost, wire: Wire, rng: random.Random):
        self.host, self.wire, self.rng = host, wire, rng
        self.context = context = Context(host)
        context.set_port(MTU.MTU_4096)
        context.set_pkey(0, 0xFFFF)
        for index, (own, other) in enumerate(ADDRESSES.values()):
            context.set_gid(index, own, MAC)
            context.neighbors[gid_bytes(other)] = mac_bytes(PEER_MAC)
        self.pd = PD(context)
        self.mr = MR(self.pd, REGION, ALL_ACCESS_NIC, offset=rng.randrange(1, 4096))
        self.near = bytearray(rng.randbytes(REGION))
        self.mr.write(bytes(self.near))
        self.far = bytearray(rng.randbytes(REGION))
        self.region: MemoryRegion = wire.device.keys.register(PEER_KEY, 5, ALL_ACCESS, PEER_BASE, REGION)
        self.region.write(PEER_BASE, bytes(self.far))
        self.connections: list[Connection] = []
        self.slice = (0, REGION)  # where messages lie, in both regions: first byte, length

    def connect(self, *, mtu: int = 1024, version: int = 4, cap: QPCap | None = None, **attributes: Any) -> Connection:
        """A connection in RTS on both sides, PSNs drawn (now and then just before the wrap)."""
        rng, device = self.rng, self.wire.device
        gid = list(ADDRESSES).index(version)
        own, other = ADDRESSES[version]
        psn, peer_psn = (rng.choice((rng.getrandbits(24), 0xFFFFFF - rng.randrange(4))) for _ in range(2))
        cq = CQ(self.context, 64)
        init = QPInitAttr(cq, cq, QPType.RC, cap or QPCap(max_send_wr=8, max_recv_wr=8))
        qp = QP(self.pd, init)
        peer_cq = CompletionQueue(256)
        peer = device.create_qp(rng.randrange(0x100, 1 << 24), PeerQpType.RC, 5, peer_cq, peer_cq)
        qp.to_rts(QPAttr(ah_attr=AHAttr(dgid=other, sgid_index=gid), path_mtu=MTU.of(mtu), dest_qp_num=peer.qpn,
                         rq_psn=peer_psn, sq_psn=psn, qp_access_flags=15, min_rnr_timer=1))  # fmt: skip
        peer.connect(AddressVector(mac_bytes(MAC), ip_bytes(own), ip_bytes(other)), qp.qp_num, path_mtu=mtu, rq_psn=psn,
                     sq_psn=peer_psn, access=ALL_ACCESS, **{"timeout": 14} | attributes)  # fmt: skip
        self.connections.append(Connection(qp, cq, peer, peer_cq))
        return self.connections[-1]

    def close(self) -> None:
        """Destroys everything: a reset of the simulation leaves the RNIC's tables as they are."""
        for conn in self.connections:
            conn.qp.close()
            conn.cq.close()
        self.mr.close()

    # ---- one message of each kind; the models of the regions follow ---------------------------------------------------

    def _place(self, length: int) -> int:
        first, size = self.slice
        return first + self.rng.randrange(size - length + 1)

    def near_sge(self, length: int) -> tuple[int, SGE]:
        at = self._place(length)
        return at, SGE(self.mr.buf + at, length, self.mr.lkey)

    def far_sge(self, length: int) -> tuple[int, Sge]:
        at = self._place(length)
        return at, Sge(PEER_BASE + at, length, PEER_KEY)

    def pieces(self, sge: SGE) -> list[SGE]:
        """The same bytes as one or two elements."""
        cut = self.rng.randrange(sge.length + 1)
        if self.rng.random() < 0.6:
            return [sge]
        return [SGE(sge.addr, cut, sge.lkey), SGE(sge.addr + cut, sge.length - cut, sge.lkey)]

    def nic_write(self, conn: Connection, length: int, wr_id: int, imm: int | None = None) -> None:
        (at, sge), (to, _) = self.near_sge(length), self.far_sge(length)
        opcode = WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM
        if imm is not None:
            conn.peer.post_recv(RecvWr(wr_id))
        conn.qp.post_send(SendWR(wr_id, opcode, self.pieces(sge), rkey=PEER_KEY, remote_addr=PEER_BASE + to,
                                 imm_data=swapped(imm or 0)))  # fmt: skip
        self.far[to : to + length] = self.near[at : at + length]

    def nic_send(self, conn: Connection, length: int, wr_id: int, imm: int | None = None) -> None:
        (at, sge), (to, target) = self.near_sge(length), self.far_sge(length)
        conn.peer.post_recv(RecvWr(wr_id, (target,)))
        opcode = WROpcode.SEND if imm is None else WROpcode.SEND_WITH_IMM
        conn.qp.post_send(SendWR(wr_id, opcode, self.pieces(sge), imm_data=swapped(imm or 0)))
        self.far[to : to + length] = self.near[at : at + length]

    def peer_write(self, conn: Connection, length: int, wr_id: int, imm: int | None = None) -> None:
        (at, sge), (to, _) = self.far_sge(length), self.near_sge(length)
        if imm is not None:
            conn.qp.post_recv(RecvWR(wr_id))
        conn.peer.post_send(SendWr(wr_id, WrOp.WRITE if imm is None else WrOp.WRITE_IMM, (sge,), rkey=self.mr.rkey,
                                   remote_addr=self.mr.buf + to, imm=imm or 0))  # fmt: skip
        self.near[to : to + length] = self.far[at : at + length]

    def peer_send(self, conn: Connection, length: int, wr_id: int, imm: int | None = None) -> None:
        (at, sge), (to, target) = self.far_sge(length), self.near_sge(length)
        conn.qp.post_recv(RecvWR(wr_id, self.pieces(target)))
        conn.peer.post_send(SendWr(wr_id, WrOp.SEND if imm is None else WrOp.SEND_IMM, (sge,), imm=imm or 0))
        self.near[to : to + length] = self.far[at : at + length]

    # ---- waiting and comparing ------------------------------------------------------------------------------------------

    def wait(self, conn: Connection, near: int, far: int, cycles: int = 30_000) -> None:
        """Poll both CQs until ``near`` and ``far`` completions are there since the last time."""
        conn.wcs, conn.peer_wcs = [], []
        end = self.host.now() + cycles
        while len(conn.wcs) < near or len(conn.peer_wcs) < far:
            conn.wcs += conn.cq.poll(16)[1]
            conn.peer_wcs += conn.peer_cq.poll()
            if self.host.now() > end:
                raise AssertionError(f"after {cycles} cycles {len(conn.wcs)} of {near} completions of the RNIC, "
                                     f"{len(conn.peer_wcs)} of {far} of the endpoint")  # fmt: skip
            self.host.relax(24)

    def check_memory(self) -> None:
        for name, got, wanted in (("RNIC's", self.mr.read(REGION), self.near), ("endpoint's", self.region.read(PEER_BASE, REGION),
                                  self.far)):  # fmt: skip
            wrong = [at for at in range(REGION) if got[at] != wanted[at]]
            assert not wrong, f"{len(wrong)} bytes of the {name} memory wrong, from {wrong[0]:#x} to {wrong[-1]:#x}"

    def check_quiet(self, **allowed: int) -> None:
        """No frame was refused on either side, no DMA went astray, nothing was counted as an error except ``allowed``."""
        assert not self.host.faults, self.host.faults
        assert not self.wire.device.drops, f"the endpoint refused {dict(self.wire.device.drops)}"
        fine = ("rx_frames", "tx_frames", "tlb_hits", "tlb_misses")
        odd = {name: count for name, count in self.context.driver.counters().items() if count and name not in fine}
        assert odd == allowed, f"counters {odd}"


ALL_ACCESS_NIC = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC


def swapped(imm: int) -> int:
    """Immediate data as verbs hand it over: the bytes of the wire, read as a little-endian number."""
    return int.from_bytes(imm.to_bytes(4, "big"), "little")


async def play(dut: Any, name: str, pauses: str, scenario: Callable[[Setup, random.Random], None],
               faults: Faults = Faults()) -> None:  # fmt: skip
    """Sets both machines up and runs ``scenario(setup, rng)`` in a thread. ``pauses``: of AXI, net_tx and net_rx."""
    rng = random.Random(f"{cocotb.RANDOM_SEED} {name} {pauses}")
    device = Device(mac_bytes(PEER_MAC), [ip_bytes(other) for _, other in ADDRESSES.values()])
    host = BenchHost(dut, rng.getrandbits(30), pauses, rng)
    wire = Wire(dut, device, pauses, pauses, rng, faults)
    await start(dut, name)
    await ClockCycles(dut.clk, 16)

    def run() -> None:
        setup = Setup(host, wire, rng)
        try:
            scenario(setup, rng)
        except BaseException:
            for line in wire.log:  # every line is marked, so that the runner shows it
                print(f"ERROR wire {line}")
            with contextlib.suppress(Exception):
                setup.close()
            raise
        setup.close()

    await bridge(run)()


def checked_pair(conn: Connection, wr_id: int, length: int, *, nic_op: WCOpcode | None, peer_op: WcOp | None,
                 imm: int | None = None) -> None:  # fmt: skip
    """Exactly the completions of one message; the immediate data on the side that received it."""
    got = [(wc.wr_id, wc.status, wc.opcode) for wc in conn.wcs]
    assert got == ([(wr_id, WCStatus.SUCCESS, nic_op)] if nic_op is not None else []), got
    peer = [(wc.wr_id, wc.status, wc.opcode) for wc in conn.peer_wcs]
    assert peer == ([(wr_id, WcStatus.SUCCESS, peer_op)] if peer_op is not None else []), peer
    for wc in conn.wcs:
        if wc.opcode & 0x80:
            assert wc.byte_len == length and (imm is None or wc.imm_data == swapped(imm)), wc
    for wc in conn.peer_wcs:
        if wc.opcode & 0x80:
            assert wc.byte_len == length and (imm is None or wc.imm == imm), wc


@bench(400_000)
@cocotb.parametrize(
    (("pauses", "mtu", "version"), [("none", 1024, 4), ("half", 256, 6), ("bursts", 4096, 4), ("rare", 512, 6)])
)
async def one_at_a_time(dut: Any, pauses: str, mtu: int, version: int) -> None:
    """WRITE and SEND both ways, with and without immediate data, of lengths around beats, cells, MTU and pages."""

    def scenario(setup: Setup, rng: random.Random) -> None:
        conn = setup.connect(mtu=mtu, version=version)
        for wr_id, length in enumerate(rng.sample(LENGTHS, 12) + [0, 9001]):
            imm = rng.choice((None, rng.getrandbits(32)))
            plain = imm is None
            setup.nic_write(conn, length, wr_id, imm)
            setup.wait(conn, 1, 0 if plain else 1)
            checked_pair(conn, wr_id, length, nic_op=WCOpcode.RDMA_WRITE, imm=imm,
                         peer_op=None if plain else WcOp.RECV_RDMA_WITH_IMM)  # fmt: skip
            setup.nic_send(conn, length, wr_id, imm)
            setup.wait(conn, 1, 1)
            checked_pair(conn, wr_id, length, nic_op=WCOpcode.SEND, peer_op=WcOp.RECV, imm=imm)
            setup.peer_write(conn, length, wr_id, imm)
            setup.wait(conn, 0 if plain else 1, 1)
            checked_pair(conn, wr_id, length, nic_op=None if plain else WCOpcode.RECV_RDMA_WITH_IMM,
                         peer_op=WcOp.RDMA_WRITE, imm=imm)  # fmt: skip
            setup.peer_send(conn, length, wr_id, imm)
            setup.wait(conn, 1, 1)
            checked_pair(conn, wr_id, length, nic_op=WCOpcode.RECV, peer_op=WcOp.SEND, imm=imm)
            setup.check_memory()
        setup.check_quiet()

    await play(dut, "one_at_a_time", pauses, scenario)


@bench(200_000)
@cocotb.parametrize(pauses=["none", "half", "bursts"])
async def both_ways_at_once(dut: Any, pauses: str) -> None:
    """Two connections, both ends post several messages at once; each side completes its own in order."""

    def scenario(setup: Setup, rng: random.Random) -> None:
        conns = [setup.connect(mtu=256, version=4), setup.connect(mtu=1024, version=6)]
        kinds = (setup.nic_write, setup.nic_send, setup.peer_write, setup.peer_send)
        for _ in range(2):
            # Messages of one round do not overlap in memory: each has a slice of both regions for itself.
            posted: list[list[tuple[int, int]]] = [[], []]  # of each connection: kind, wr_id
            for wr_id, part in enumerate(rng.sample(range(16), 16)):
                setup.slice = part * REGION // 16, REGION // 16
                kind, length = rng.randrange(4), rng.choice((rng.randrange(40), rng.randrange(REGION // 16)))
                kinds[kind](conns[wr_id % 2], length, wr_id)
                posted[wr_id % 2].append((kind, wr_id))
            for conn, messages in zip(conns, posted, strict=True):
                sends, peer_sends = ([n for kind, n in messages if kind in mine] for mine in ((0, 1), (2, 3)))
                peer_recvs, recvs = ([n for kind, n in messages if kind == send] for send in (1, 3))
                setup.wait(conn, len(sends + recvs), len(peer_sends + peer_recvs), 60_000)
                assert all(wc.status == WCStatus.SUCCESS for wc in conn.wcs), conn.wcs
                assert all(wc.status is WcStatus.SUCCESS for wc in conn.peer_wcs), conn.peer_wcs
                for got, send_ids, recv_ids in ((conn.wcs, sends, recvs), (conn.peer_wcs, peer_sends, peer_recvs)):
                    assert [wc.wr_id for wc in got if not wc.opcode & 0x80] == send_ids
                    assert [wc.wr_id for wc in got if wc.opcode & 0x80] == recv_ids
            setup.check_memory()
        setup.check_quiet()

    await play(dut, "both_ways_at_once", pauses, scenario)


@bench(60_000)
@cocotb.parametrize(who=["rnic", "endpoint"])
async def wrong_key(dut: Any, who: str) -> None:
    """A WRITE with a stale rkey: NAK, REM_ACCESS_ERR at the sender, both QPs in error, memory untouched (R-MR-1)."""

    def scenario(setup: Setup, rng: random.Random) -> None:
        conn = setup.connect()
        if who == "rnic":
            _, sge = setup.near_sge(100)
            conn.qp.post_send(SendWR(1, WROpcode.RDMA_WRITE, [sge], rkey=PEER_KEY ^ 1, remote_addr=PEER_BASE))
            setup.wait(conn, 1, 0)
            assert [(wc.wr_id, wc.status) for wc in conn.wcs] == [(1, WCStatus.REM_ACCESS_ERR)]
            naks = {}
        else:
            _, sge = setup.far_sge(100)
            conn.peer.post_send(SendWr(1, WrOp.WRITE, (sge,), rkey=setup.mr.rkey ^ 1, remote_addr=setup.mr.buf))
            setup.wait(conn, 0, 1)
            assert [(wc.wr_id, wc.status) for wc in conn.peer_wcs] == [(1, WcStatus.REM_ACCESS_ERR)]
            naks = {"tx_naks": 1}
        setup.host.relax(200)
        assert conn.qp.query()["new_state"] == 6 and conn.peer.state is QpState.ERR
        setup.check_memory()
        setup.check_quiet(**naks)

    await play(dut, f"wrong_key {who}", "rare", scenario)


@bench(60_000)
async def receiver_not_ready(dut: Any) -> None:
    """A SEND that finds no receive WQE: RNR NAK, the endpoint tries again, and the receive posted meanwhile takes it."""

    def scenario(setup: Setup, rng: random.Random) -> None:
        conn = setup.connect()
        for length in (0, 700):
            at, sge = setup.far_sge(length)
            conn.peer.post_send(SendWr(length, WrOp.SEND, (sge,)))
            setup.host.relax(1500)
            assert conn.peer_cq.poll() == []
            to, near = setup.near_sge(length)
            conn.qp.post_recv(RecvWR(length, [near]))
            setup.near[to : to + length] = setup.far[at : at + length]
            setup.wait(conn, 1, 1)
            checked_pair(conn, length, length, nic_op=WCOpcode.RECV, peer_op=WcOp.SEND)
            setup.check_memory()
        naks = setup.context.driver.counters()["tx_naks"]
        assert naks >= 2
        setup.host.relax(100)
        assert not setup.host.faults and not setup.wire.device.drops

    await play(dut, "receiver_not_ready", "rare", scenario)


@bench(1_000_000)
@cocotb.parametrize(seed=range(3))
async def bad_wire(dut: Any, seed: int) -> None:
    """The endpoint's WRITEs and SENDs over a wire that loses, repeats, swaps and corrupts frames: each message is done once,
    in order, and nothing else is written (R-SEQ, R-DUP: sequence NAKs, repeated ACKs, duplicates not executed again)."""

    def scenario(setup: Setup, rng: random.Random) -> None:
        conn = setup.connect(mtu=256, timeout=4, retry_cnt=7)
        kinds = (setup.peer_write, setup.peer_send)
        for _ in range(4):
            sent, received = [], []
            for wr_id, part in enumerate(rng.sample(range(8), 8)):
                setup.slice = part * REGION // 8, REGION // 8
                kind, imm = rng.randrange(2), rng.choice((None, rng.getrandbits(32)))
                kinds[kind](conn, rng.choice((rng.randrange(20), rng.randrange(2000))), wr_id, imm)
                sent.append(wr_id)
                received += [wr_id] if kind or imm is not None else []
            setup.wait(conn, len(received), len(sent), 200_000)
            assert [(wc.wr_id, wc.status) for wc in conn.peer_wcs] == [(n, WcStatus.SUCCESS) for n in sent]
            assert [(wc.wr_id, wc.status) for wc in conn.wcs] == [(n, WCStatus.SUCCESS) for n in received]
            setup.check_memory()
        struck = setup.wire.struck
        assert len(struck) == 4, struck
        assert not setup.host.faults
        assert conn.qp.query()["new_state"] == 3 and conn.peer.state is QpState.RTS

    await play(dut, f"bad_wire {seed}", "rare", scenario, Faults(loss=0.04, duplicate=0.04, reorder=0.04, corrupt=0.04))
