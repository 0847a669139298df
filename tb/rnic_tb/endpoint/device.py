"""A software RoCEv2 device: receive filter, queue pairs, keys, frames out.

`receive` takes one Ethernet frame without FCS at a time in nanoseconds; `poll_tx` gives the frames that can leave now;
`advance` lets timers fire. Nothing is random and nothing happens by itself.
Source: rules.md section 5 (filter order), R-CC-2 (CNP).
"""

from __future__ import annotations

from collections import Counter, deque

from rnic.wire.frame import Frame, FrameError, parse_frame
from rnic.wire.opcode import OPCODES, Opcode, OpcodeInfo, Transport

from .constants import GRH_BYTES, QP1_QKEY, QpState, QpType
from .memory import KeyTable
from .qp import PeerPolicy, QueuePair
from .queues import AddressVector, CompletionQueue, SharedReceiveQueue

#: States in which a request, and an answer, is taken (section 5, step 5).
REQUEST_STATES = frozenset({QpState.RTR, QpState.RTS, QpState.SQD, QpState.SQE})
ANSWER_STATES = frozenset({QpState.RTS, QpState.SQD})
CNP_INTERVAL_NS = 4_000  # R-CC-2


class Device:
    """One endpoint. `drops` counts discarded frames by cause, `seen` received frames by opcode.

    `vlan` is the VLAN of its addresses; None: untagged (a tag with VID 0 carries priority only and is untagged too).
    """

    def __init__(
        self,
        mac: bytes,
        ips: list[bytes],
        port_mtu: int = 4096,
        send_cnps: bool = False,
        ident: int = 0,
        vlan: int | None = None,
    ):
        self.vlan = vlan
        self.mac = mac
        self.ips = list(ips)
        self.port_mtu = port_mtu
        self.send_cnps = send_cnps
        self.pkeys = [0xFFFF]
        self.keys = KeyTable()
        self.qps: dict[int, QueuePair] = {}
        self.drops: Counter[str] = Counter()
        self.seen: Counter[Opcode] = Counter()
        self.now = 0
        self._ident = ident
        self._frames: deque[Frame] = deque()  # frames no QP keeps (CNPs)
        self._last_cnp: dict[tuple[bytes, int], int] = {}
        self._turn = 0

    def create_qp(
        self,
        qpn: int,
        kind: QpType,
        pd: int,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        srq: SharedReceiveQueue | None = None,
        policy: PeerPolicy | None = None,
        **limits,
    ) -> QueuePair:
        """A queue pair with the chosen number. Raises ValueError when the number is in use or reserved."""
        if qpn in self.qps or not 0 < qpn < 0xFFFFFF:
            raise ValueError(f"QPN {qpn:#x} is in use or reserved")
        self.qps[qpn] = QueuePair(self, qpn, kind, pd, send_cq, recv_cq, srq, policy=policy, **limits)
        return self.qps[qpn]

    def destroy_qp(self, qpn: int) -> None:
        """Legal in any state (R-QP-7)."""
        del self.qps[qpn]

    def next_ident(self) -> int:
        """IPv4 identification of the next frame (R-FRM-4: any value)."""
        self._ident = (self._ident + 1) & 0xFFFF
        return self._ident

    # ---- in ------------------------------------------------------------------------------------------------

    def receive(self, raw: bytes, now: int | None = None) -> None:
        """Take one frame; whatever the filter refuses is dropped silently and counted."""
        self._set_time(now)
        try:
            frame = parse_frame(raw)
        except FrameError as error:
            self.drops[error.reason.name.lower()] += 1
            return
        cause = self._filter(frame)
        if cause is not None:
            self.drops[cause] += 1

    def _filter(self, frame: Frame) -> str | None:
        """Section 5; the cause of a drop, or None when the frame was handed on."""
        if frame.dst_mac != self.mac:
            return "dst_mac"
        if frame.dst_ip not in self.ips:  # step 2
            return "dst_ip"
        if (frame.vlan[1] if frame.vlan else 0) != (self.vlan or 0):  # R-FRM-7: the VLAN of the GID
            return "vlan"
        info = OPCODES[frame.opcode]
        qp = self.qps.get(frame.dest_qpn)
        if qp is None:  # step 4
            return "no_qp"
        if info.transport is Transport.CNP:
            self.seen[info.opcode] += 1
            return None  # R-CC-3: no PSN, no state
        cause = self._qp_filter(qp, frame, info)
        if cause is not None:
            return cause
        self.seen[info.opcode] += 1
        self._notify_congestion(qp, frame)
        self._hand_on(qp, frame, info)
        return None

    def _qp_filter(self, qp: QueuePair, frame: Frame, info: OpcodeInfo) -> str | None:
        if info.transport.name != qp.type.name:  # step 5, R-OPC-1
            return "transport"
        if qp.state not in (REQUEST_STATES if info.is_request else ANSWER_STATES):
            return "qp_state"
        if not self._pkey_matches(qp, frame.pkey):  # step 6
            return "pkey"
        if qp.is_ud:
            wanted = QP1_QKEY if qp.qpn == 1 else qp.attrs.qkey
            return None if frame.qkey == wanted else "qkey"  # step 7, R-QKEY-1
        av = qp.attrs.av
        if av is None or frame.src_ip != av.dst_ip or frame.dst_ip != av.src_ip:  # step 8
            return "src_ip"
        return None

    def _pkey_matches(self, qp: QueuePair, pkey: int) -> bool:
        """R-PKEY-1: low 15 bits equal, at least one side a full member."""
        own = self.pkeys if qp.qpn == 1 else [qp.attrs.pkey]
        return any((pkey ^ entry) & 0x7FFF == 0 and (pkey | entry) & 0x8000 for entry in own)

    def _hand_on(self, qp: QueuePair, frame: Frame, info: OpcodeInfo) -> None:
        if info.is_response:
            qp.requester.receive(frame, self.now)
            return
        qp.note_arrival()
        if qp.is_ud:
            qp.responder.receive(frame, self.now, grh_area(frame))
        else:
            qp.responder.receive(frame, self.now)

    def _notify_congestion(self, qp: QueuePair, frame: Frame) -> None:
        """R-CC-2: a CE mark is answered by a CNP, at most one per interval."""
        if not self.send_cnps or frame.traffic_class & 3 != 3:
            return
        peer_qpn = frame.src_qp if qp.is_ud else qp.attrs.dest_qpn
        last = self._last_cnp.get((frame.src_ip, peer_qpn))
        if last is not None and self.now - last < CNP_INTERVAL_NS:
            return
        self._last_cnp[frame.src_ip, peer_qpn] = self.now
        to = AddressVector(frame.src_mac, frame.src_ip, frame.dst_ip, traffic_class=48 << 2, udp_sport=0, vlan=frame.vlan)
        self._frames.append(qp.frame(Opcode.CNP, 0, av=to, dest_qpn=peer_qpn, becn=True))

    # ---- out -----------------------------------------------------------------------------------------------

    def poll_tx(self, limit: int | None = None) -> list[bytes]:
        """Up to `limit` frames that can leave now: CNPs, answers, then requests, QPs in turn."""
        out: list[bytes] = []
        while limit is None or len(out) < limit:
            frame = self._next_frame()
            if frame is None:
                break
            out.append(frame.pack())
        return out

    def _next_frame(self) -> Frame | None:
        if self._frames:
            return self._frames.popleft()
        order = list(self.qps.values())
        for step in range(len(order)):
            qp = order[(self._turn + step) % len(order)]
            frame = qp.responder.pull() or qp.requester.pull(self.now)
            if frame is not None:
                self._turn = (self._turn + step + 1) % len(order)
                return frame
        return None

    # ---- time ----------------------------------------------------------------------------------------------

    def _set_time(self, now: int | None) -> None:
        if now is None:
            return
        if now < self.now:
            raise ValueError(f"time goes back: {now} < {self.now}")
        self.now = now

    def advance(self, ns: int) -> None:
        """`ns` nanoseconds pass; timers fire at their own times, in order."""
        end = self.now + ns
        while True:
            due = self.next_deadline()
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            for qp in list(self.qps.values()):
                qp.requester.advance(self.now)
        self.now = end

    def next_deadline(self) -> int | None:
        """When the next timer fires, or None."""
        times = [t for qp in self.qps.values() if (t := qp.requester.next_deadline()) is not None]
        return min(times, default=None)


def grh_area(frame: Frame) -> bytes:
    """The 40 bytes in front of a UD payload: IPv6 header, or 20 zeros and the IPv4 header (R-UD-2)."""
    datagram = frame.datagram()
    return datagram[:GRH_BYTES] if frame.is_ipv6 else bytes(20) + datagram[:20]
