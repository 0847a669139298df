"""The simulated RNIC as one end of a capture's scenario, for `rnic_tb.replay.Replay`.

One NIC whose wire ends in Python, driven by the verbs API alone: posted by doorbells, judged by its frames, its CQEs in host
memory and the bytes of its region.
"""

from __future__ import annotations

import ipaddress
from dataclasses import replace

from rnic.config import RnicConfig, named_config
from rnic.wire.frame import FrameError, parse_frame
from rnic_sim.enums import MTU, AccessFlags, QPAttrMask, QPState, QPType, SendFlags, WCFlags, WCOpcode, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.native import Timeout
from rnic_sim.qp import QP, AHAttr, QPAttr, QPCap, QPInitAttr, flow_label_to_sport
from rnic_sim.verbs import CQ, MR, PD, SGE, WC, RecvWR, SendWR, gid_bytes

from . import captures as cap

__all__ = ["CONFIG", "RtlEnd"]

CONFIG: RnicConfig = named_config("gigabit").replace(clock_hz=1_000_000)
"""The one model of all captures. 128 QPs and MRs hold the captures' QPNs and keys; the slow clock makes the peer's timers
(up to seconds) short in cycles: their codes are used as recorded."""

ALL_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
QUEUE_DEPTH, CQ_DEPTH = 64, 256
SETTLE_CYCLES = 3000  # far more than a 4096-byte packet takes from the wire to memory and its CQE
FRAME_CYCLES = 20_000  # a frame that has not come by then does not come without a timer
POLL_CYCLES = 64
WINDOW_BASE, WINDOW_BYTES = 0x1000, 4096  # where the captures bind their memory windows
_PEER_WITH_INV = 4  # the kernel's flag; verbs: WCFlags.WITH_INV

OPS = {
    "write": WROpcode.RDMA_WRITE, "write_imm": WROpcode.RDMA_WRITE_WITH_IMM, "send": WROpcode.SEND,
    "send_imm": WROpcode.SEND_WITH_IMM, "send_inv": WROpcode.SEND_WITH_INV, "read": WROpcode.RDMA_READ,
    "cas": WROpcode.ATOMIC_CMP_AND_SWP, "fadd": WROpcode.ATOMIC_FETCH_AND_ADD,
}  # fmt: skip


def _swapped(word: int) -> int:
    """The captures print the big-endian word of an immediate as a number, verbs read it in little-endian memory."""
    return int.from_bytes(word.to_bytes(4, "big"), "little")


class RtlEnd:
    """One RNIC set up as one end of a scenario. Use as a context manager or call `close`.

    The RNIC has no memory windows: a region that a SEND with invalidate may end stands for one. Its key is smaller than that of
    the window, so the keys are exchanged in frames on their way in and in completions.

    `seed` sets page placement; `bus` are settings of `rnic_sim.world.Host.bus`. Raises ValueError for what verbs cannot
    express.
    """

    eager = True

    def __init__(self, scenario: cap.Scenario, side: str, *, config: RnicConfig = CONFIG, seed: int = 0, **bus: float):
        self.scenario, self.side = scenario, side
        self.me, self.peer = scenario.end(side), scenario.end("b" if side == "a" else "a")
        if side == "b" and scenario.setup.b_srq:
            raise ValueError("a shared receive queue")
        self.lab = Lab(config, nics=1, seed=seed)
        self.world, self.host = self.lab.world, self.lab.world.nic[0]
        self.world.connect(0, None)
        self.host.bus(**bus)
        self.context = self.lab.contexts[0]
        self.timeout_cycles = 4 * (4096 << scenario.timeout) * config.clock_hz // 10**9  # R-TMO-1: at most four times
        self.wcs: list[cap.ExpectedWc] = []
        self.sent: list[bytes] = []
        self.windows: dict[int, int] = {}  # key in the capture to own key
        self._addresses()
        self.pd, self.cq = PD(self.context), CQ(self.context, CQ_DEPTH)
        self.mr = self._memory()
        self.qp = self._queue_pair()
        self._prepare()

    def close(self) -> None:
        """End the simulation."""
        self.lab.close()

    def __enter__(self) -> RtlEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- setup --------------------------------------------------------------------------------------------------

    def _addresses(self) -> None:
        self.context.set_gid(0, str(ipaddress.ip_address(self.me.ip)), self.me.mac.hex(":"))
        self.peer_ip = str(ipaddress.ip_address(self.peer.ip))
        self.context.neighbors[gid_bytes(self.peer_ip)] = self.peer.mac

    def _memory(self) -> MR:
        access = ALL_ACCESS
        for name in self.scenario.setup.b_mr_lacks if self.side == "b" else ():
            access &= ~AccessFlags[name]
        key = self.me.rkey or None
        mr = MR(self.pd, cap.BUFFER_BYTES, access, address=self.me.addr or None, key=key)
        for offset, data in self.scenario.initial_memory(self.side):
            mr.write(data, offset)
        return mr

    def _queue_pair(self) -> QP:
        s = self.scenario
        sizes = QPCap(QUEUE_DEPTH, QUEUE_DEPTH, CONFIG.max_sge, 1, max_inline_data=64)
        qp = QP(self.pd, QPInitAttr(self.cq, self.cq, QPType[str(s.transport).upper()], sizes), qpn=self.me.qpn)
        access = ALL_ACCESS
        for name in s.setup.b_qp_lacks if self.side == "b" else ():
            access &= ~AccessFlags[name]
        depth = s.setup.a_max_dest_rd_atomic if self.side == "a" and s.setup.a_max_dest_rd_atomic else s.rd_atomic
        address = AHAttr(
            dgid=self.peer_ip, flow_label=self._flow_label(), hop_limit=self.me.hop_limit, traffic_class=self.me.traffic_class
        )
        qp.to_rts(QPAttr(
            ah_attr=address, path_mtu=MTU.of(s.mtu), dest_qp_num=self.peer.qpn, qp_access_flags=access, rq_psn=self.peer.psn,
            sq_psn=self.me.psn, max_dest_rd_atomic=depth, max_rd_atomic=s.rd_atomic, min_rnr_timer=s.min_rnr_timer,
            timeout=s.timeout, retry_cnt=s.retry_cnt, rnr_retry=s.rnr_retry,
        ))  # fmt: skip
        return qp

    def _flow_label(self) -> int:
        """0, or a label that gives the recorded source port where the QPNs do not (R-ADR-4)."""
        sport = self.me.udp_sport
        if sport is None or sport == flow_label_to_sport(0, self.me.qpn, self.peer.qpn):
            return 0
        return sport & 0x3FFF

    def _prepare(self) -> None:
        setup = self.scenario.setup
        if self.side == "a":
            if setup.a_recv is not None:
                self._post_recv(setup.a_recv[0], 0, setup.a_recv[1], self.mr.lkey)
            return
        if setup.b_recv is not None:
            self._post_recv(setup.b_recv[0], 0, setup.b_recv[1], self.mr.lkey ^ (0xFF if setup.b_recv_bad_lkey else 0))
        if setup.b_state != "RTS":
            self.qp.modify(QPAttr(qp_state=QPState[setup.b_state]), QPAttrMask.STATE)

    # ---- steps --------------------------------------------------------------------------------------------------

    def post(self, step: cap.Post) -> None:
        if step.fill is not None:
            self.mr.write(step.fill[1], step.fill[0])
        self.qp.post_send(*(self._send_wr(step, step.wr_id + number) for number in range(step.count)))

    def _send_wr(self, step: cap.Post, wr_id: int) -> SendWR:
        flags = SendFlags.SIGNALED
        if step.inline:
            flags |= SendFlags.INLINE
        if step.fence:
            flags |= SendFlags.FENCE
        sges = [SGE(self.mr.buf + offset, length, self.mr.lkey) for offset, length in step.sges]
        wr = SendWR(wr_id, OPS[step.op], sges, flags, _swapped(step.imm), invalidate_rkey=step.inv_rkey)
        if step.op in ("cas", "fadd"):
            wr.set_wr_atomic(step.rkey, step.remote_addr, step.add if step.op == "fadd" else step.compare, step.swap)
        else:
            wr.set_wr_rdma(step.rkey, step.remote_addr)
        return wr

    def recv(self, step: cap.Recv) -> None:
        self._post_recv(step.wr_id, step.offset, step.length, self.mr.lkey)

    def _post_recv(self, wr_id: int, offset: int, length: int, lkey: int) -> None:
        self.qp.post_recv(RecvWR(wr_id, [SGE(self.mr.buf + offset, length, lkey)]))

    def bind(self, step: cap.WindowBound) -> None:
        access = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_INVALIDATE
        mr = MR(self.pd, WINDOW_BYTES, access, address=self.mr.buf + WINDOW_BASE, backing=self.mr.backing)
        self.windows[step.rkey] = mr.rkey
        self.wcs.append(cap.ExpectedWc(77, 0, 0, int(WCOpcode.BIND_MW), 0, 0))

    def write_memory(self, offset: int, data: bytes) -> None:
        self.mr.write(data, offset)

    def read_memory(self, offset: int, length: int) -> bytes:
        """After a while: an ACK may come before its data is visible (R-ACK-3)."""
        self.lab.relax(SETTLE_CYCLES)
        return self.mr.read(length, offset)

    # ---- frames -------------------------------------------------------------------------------------------------

    def receive(self, raw: bytes) -> None:
        if self.windows:
            try:
                frame = parse_frame(raw)
            except FrameError:
                pass
            else:
                raw = replace(frame, rkey=self.windows.get(frame.rkey, frame.rkey)).pack()
        self.host.inject(raw)

    def next_frame(self, repeated: bool) -> bytes | None:
        if not self._has_frame():
            try:
                return self.host.wait_frame(FRAME_CYCLES + repeated * self.timeout_cycles).data
            except Timeout:
                return None
        return self.sent.pop(0)

    def leftovers(self) -> list[bytes]:
        self.lab.relax(SETTLE_CYCLES)
        self._has_frame()
        return self.sent

    def _has_frame(self) -> bool:
        """Is there a frame to be taken?"""
        self.sent += [frame.data for frame in iter(self.host.receive, None)]
        return bool(self.sent)

    # ---- results ------------------------------------------------------------------------------------------------

    def completions(self, wanted: int = 0, or_frame: bool = False) -> list[cap.ExpectedWc]:
        self._poll_until(wanted, SETTLE_CYCLES, or_frame)
        return self.wcs

    def run_timers(self, wanted: int) -> None:
        self._poll_until(wanted, FRAME_CYCLES + self.timeout_cycles)

    def _poll_until(self, wanted: int, cycles: int, or_frame: bool = False) -> None:
        end = self.world.cycle + cycles
        while True:
            self.wcs += [_recorded(wc, self.windows) for wc in self.cq.poll(CQ_DEPTH)[1]]
            if len(self.wcs) >= wanted or self.world.cycle >= end or (or_frame and self._has_frame()):
                return
            self.lab.relax(POLL_CYCLES)

    def final_problems(self, final: cap.FinalState) -> list[str]:
        """The state; PSNs as queried are those that were set (R-QP-6)."""
        self.qp.query()
        return [] if self.qp.qp_state == final.state else [f"state {self.qp.qp_state.name}, recorded {final.state}"]


def _recorded(wc: WC, windows: dict[int, int]) -> cap.ExpectedWc:
    """A completion in the captures' terms."""
    imm = 0  # means something with one of the flags alone
    flags = int(wc.wc_flags)
    if wc.wc_flags & WCFlags.WITH_IMM:
        imm = _swapped(wc.imm_data)
    elif wc.wc_flags & WCFlags.WITH_INV:
        imm = next((key for key, own in windows.items() if own == wc.invalidated_rkey), wc.invalidated_rkey)
        flags = flags & ~int(WCFlags.WITH_INV) | _PEER_WITH_INV
    return cap.ExpectedWc(wc.wr_id, int(wc.status), wc.byte_len, int(wc.opcode), imm, flags)
