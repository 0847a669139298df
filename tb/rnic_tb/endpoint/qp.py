"""A queue pair: attributes and states (rules.md section 14), its two sides, posting, completing, flushing."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from rnic.wire.frame import Frame
from rnic.wire.opcode import Opcode

from .constants import (
    ATOMIC_OPS,
    POSTABLE,
    WC_OP_OF,
    Access,
    Event,
    QpState,
    QpType,
    WcOp,
    WcStatus,
    WrOp,
)
from .memory import ProtectionError
from .queues import (
    AddressVector,
    CompletionQueue,
    PostError,
    QueueFull,
    ReceiveQueue,
    RecvWr,
    SendWr,
    SharedReceiveQueue,
    WorkCompletion,
    gather,
)
from .requester import RcRequester
from .responder import RcResponder
from .uc_ud import DatagramRequester, UcResponder, UdResponder

if TYPE_CHECKING:
    from .device import Device


@dataclass(frozen=True)
class QpAttributes:
    """What modify sets and query returns (R-QP-6). `timeout` and `min_rnr_timer` are codes, sizes bytes."""

    pkey: int = 0xFFFF
    access: Access = Access.NONE
    qkey: int = 0
    av: AddressVector | None = None
    path_mtu: int = 1024
    dest_qpn: int = 0
    rq_psn: int = 0
    sq_psn: int = 0
    max_dest_rd_atomic: int = 0
    max_rd_atomic: int = 0
    min_rnr_timer: int = 0
    timeout: int = 0
    retry_cnt: int = 0
    rnr_retry: int = 0


@dataclass(frozen=True)
class PeerPolicy:
    """What a peer may choose freely.

    `ack_interval`: AckReq at least on every so-many-th packet (R-REQ-2). `window`: PSNs outstanding (R-PSN-6).
    `read_gap_retry`: a gap in a READ answer is an implied NAK, or is left to the timer (R-RSP-4).
    `read_restart_with_first`: a repeated READ starts with FIRST, or goes on with MIDDLE (R-RSP-6).
    `reack_names_atomics`: a repeated ACK may name an answered ATOMIC, as rxe's does, or only SEND and WRITE (R-DUP-2).
    `ackreq_unacked`: AckReq on UC and UD packets, as old rxe sets it (R-UD-3).
    """

    coalesce_acks: bool = False
    migreq: bool = False
    ack_interval: int = 64
    window: int = 128
    read_gap_retry: bool = True
    read_restart_with_first: bool = True
    reack_names_atomics: bool = False
    ackreq_unacked: bool = False


_RC_RTR = frozenset({"av", "path_mtu", "dest_qpn", "rq_psn", "max_dest_rd_atomic", "min_rnr_timer"})
_RC_RTS = frozenset({"sq_psn", "timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"})
_SQD = _RC_RTS - {"sq_psn"} | {"av", "max_dest_rd_atomic", "access", "pkey", "min_rnr_timer"}

#: (from, to) -> per type (required, optional); rules.md section 14.
TRANSITIONS: dict[tuple[QpState, QpState], dict[QpType, tuple[frozenset[str], frozenset[str]]]] = {
    (QpState.RESET, QpState.INIT): {
        QpType.RC: (frozenset({"pkey", "access"}), frozenset()),
        QpType.UC: (frozenset({"pkey", "access"}), frozenset()),
        QpType.UD: (frozenset({"pkey", "qkey"}), frozenset()),
    },
    (QpState.INIT, QpState.INIT): {
        QpType.RC: (frozenset(), frozenset({"pkey", "access"})),
        QpType.UC: (frozenset(), frozenset({"pkey", "access"})),
        QpType.UD: (frozenset(), frozenset({"pkey", "qkey"})),
    },
    (QpState.INIT, QpState.RTR): {
        QpType.RC: (_RC_RTR, frozenset({"access", "pkey"})),
        QpType.UC: (frozenset({"av", "path_mtu", "dest_qpn", "rq_psn"}), frozenset({"access", "pkey"})),
        QpType.UD: (frozenset(), frozenset({"pkey", "qkey"})),
    },
    (QpState.RTR, QpState.RTS): {
        QpType.RC: (_RC_RTS, frozenset({"access", "min_rnr_timer"})),
        QpType.UC: (frozenset({"sq_psn"}), frozenset({"access"})),
        QpType.UD: (frozenset({"sq_psn"}), frozenset({"qkey"})),
    },
    (QpState.RTS, QpState.RTS): {
        QpType.RC: (frozenset(), frozenset({"access", "min_rnr_timer"})),
        QpType.UC: (frozenset(), frozenset({"access"})),
        QpType.UD: (frozenset(), frozenset({"qkey"})),
    },
    (QpState.RTS, QpState.SQD): {kind: (frozenset(), frozenset()) for kind in QpType},
    (QpState.SQD, QpState.SQD): {
        QpType.RC: (frozenset(), _SQD),
        QpType.UC: (frozenset(), frozenset({"av", "access", "pkey"})),
        QpType.UD: (frozenset(), frozenset({"pkey", "qkey"})),
    },
    (QpState.SQD, QpState.RTS): {
        QpType.RC: (frozenset(), frozenset({"access", "min_rnr_timer"})),
        QpType.UC: (frozenset(), frozenset({"access"})),
        QpType.UD: (frozenset(), frozenset({"qkey"})),
    },
    (QpState.SQE, QpState.RTS): {
        QpType.UC: (frozenset(), frozenset({"access"})),
        QpType.UD: (frozenset(), frozenset({"qkey"})),
    },
}


class QueuePair:
    """One queue pair of a device; made by `Device.create_qp`."""

    def __init__(
        self,
        device: Device,
        qpn: int,
        kind: QpType,
        pd: int,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        srq: SharedReceiveQueue | None = None,
        max_send_wr: int = 128,
        max_recv_wr: int = 128,
        max_sge: int = 16,
        max_inline: int = 256,
        sq_sig_all: bool = False,
        policy: PeerPolicy | None = None,
    ):
        self.device = device
        self.qpn = qpn
        self.type = kind
        self.pd = pd
        self.keys = device.keys
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.srq = srq
        self.max_send_wr = max_send_wr
        self.max_sge = max_sge
        self.max_inline = max_inline
        self.sq_sig_all = sq_sig_all
        self.policy = policy or PeerPolicy()
        self.rq = ReceiveQueue(max_recv_wr, max_sge)
        self.state = QpState.RESET
        self.attrs = QpAttributes()
        self.events: list[Event] = []
        self.established = False
        self.requester = RcRequester(self) if kind is QpType.RC else DatagramRequester(self)
        self.responder: RcResponder | UcResponder | UdResponder
        if kind is QpType.RC:
            self.responder = RcResponder(self)
        elif kind is QpType.UC:
            self.responder = UcResponder(self)
        else:
            self.responder = UdResponder(self)

    @property
    def is_ud(self) -> bool:
        return self.type is QpType.UD

    @property
    def port_mtu(self) -> int:
        """MTU of the port: what a UD message may be long (R-UD-1)."""
        return self.device.port_mtu

    # ---- states --------------------------------------------------------------------------------------------

    def modify(self, state: QpState, cur_state: QpState | None = None, **attrs) -> None:
        """Go to `state` with new attributes. Raises ValueError and changes nothing when not allowed (R-QP-1)."""
        if cur_state is not None and cur_state is not self.state:
            raise ValueError(f"cur_state {cur_state.name}, but the QP is in {self.state.name}")
        if state is QpState.RESET:
            self._reset()
        elif state is QpState.ERR:
            if self.state is QpState.RESET:
                raise ValueError("RESET to ERR is no transition")
            self.enter_error()
        else:
            self._transition(state, attrs)

    def _transition(self, state: QpState, attrs: dict) -> None:
        rules = TRANSITIONS.get((self.state, state), {}).get(self.type)
        if rules is None:
            raise ValueError(f"{self.type.name}: no transition {self.state.name} to {state.name}")
        required, optional = rules
        missing, extra = required - attrs.keys(), attrs.keys() - required - optional
        if missing or extra:
            raise ValueError(f"missing {sorted(missing)}, not allowed {sorted(extra)}")
        if self.state is QpState.SQD and state is QpState.RTS and self._draining():
            raise ValueError("still draining")  # R-QP-3
        if attrs.get("path_mtu", 0) > self.port_mtu:
            raise ValueError("path MTU above the port's")  # R-MTU-1
        self.attrs = replace(self.attrs, **attrs)
        old, self.state = self.state, state
        self._entered(old, state)

    def _entered(self, old: QpState, state: QpState) -> None:
        if state is QpState.RTR:
            self.responder.load(self.attrs.rq_psn)  # R-PSN-5
        elif old is QpState.RTR and state is QpState.RTS:
            self.requester.load(self.attrs.sq_psn)
        elif old is QpState.RTS and state is QpState.SQD:
            if isinstance(self.requester, RcRequester):
                self.requester.drain_reported = False
            self.requester.report_drained()

    def _draining(self) -> bool:
        started = self.requester.started if isinstance(self.requester, RcRequester) else ()
        return bool(started)

    def _reset(self) -> None:
        """R-QP-4: everything gone, no completions."""
        self.rq.drain()
        self.requester.clear()
        self.responder.clear()
        self.attrs = QpAttributes()
        self.established = False
        self.state = QpState.RESET

    def enter_error(self, keep_answers: bool = False) -> None:
        """R-QP-5: to ERR, both queues flushed in order.

        `keep_answers`: the responder itself found the error, its NAK and what is before it still leave.
        """
        if self.state is QpState.ERR:
            return
        self.state = QpState.ERR
        self.responder.fail_receive(WcStatus.WR_FLUSH_ERR)
        if not keep_answers and isinstance(self.responder, RcResponder):
            self.responder.jobs.clear()  # R-ERR-8
        self.requester.flush()
        self._flush_receives()
        if self.srq is not None:
            self.raise_event(Event.QP_LAST_WQE_REACHED)  # R-SRQ-3

    def enter_sqe(self) -> None:
        """R-ERR-6: the SQ of a UC or UD QP stops and flushes."""
        if self.state in (QpState.RTS, QpState.SQD):
            self.state = QpState.SQE
        self.requester.flush()

    def _flush_receives(self) -> None:
        for wr in self.rq.drain():
            self.complete_receive(WorkCompletion(wr.wr_id, WcStatus.WR_FLUSH_ERR, WcOp.RECV, self.qpn))

    def connect(self, peer: AddressVector | None, dest_qpn: int = 0, **attrs) -> None:
        """Walk from RESET to RTS; attributes not given keep sensible values."""
        given = {
            "pkey": 0xFFFF, "access": Access.NONE, "qkey": 0x11111111, "path_mtu": 1024, "rq_psn": 0, "sq_psn": 0,
            "max_dest_rd_atomic": 4, "max_rd_atomic": 4, "min_rnr_timer": 1, "timeout": 8, "retry_cnt": 7,
            "rnr_retry": 7,
        } | attrs | {"av": peer, "dest_qpn": dest_qpn}  # fmt: skip
        unknown = given.keys() - {field.name for field in fields(QpAttributes)}
        if unknown:
            raise ValueError(f"unknown attributes {sorted(unknown)}")
        path = (QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS)
        for old, new in zip(path, path[1:], strict=False):
            required = TRANSITIONS[old, new][self.type][0]
            self.modify(new, **{name: given[name] for name in required})

    # ---- posting -------------------------------------------------------------------------------------------

    def post_send(self, wr: SendWr) -> None:
        """Queue a send. Raises PostError (EINVAL) or QueueFull (ENOMEM); flushed at once in ERR (R-ERR-5)."""
        if self.state in (QpState.RESET, QpState.INIT, QpState.RTR):
            raise PostError(f"post_send in {self.state.name}")  # R-WQ-1
        self._check_send(wr)
        if len(self.requester) >= self.max_send_wr:
            raise QueueFull
        self.requester.post(wr)
        if self.state in (QpState.ERR, QpState.SQE):
            self.requester.flush()

    def _check_send(self, wr: SendWr) -> None:
        if wr.op not in POSTABLE[self.type]:
            raise PostError(f"{wr.op.name} on {self.type.name}")  # R-WQ-7
        if len(wr.sges) > self.max_sge:
            raise PostError("too many elements")  # R-WQ-2
        if wr.inline is not None:
            self._check_inline(wr)
        if wr.op in ATOMIC_OPS and (len(wr.sges) != 1 or wr.sges[0].length != 8):
            raise PostError("an atomic has one element of 8 bytes")  # R-WQ-6
        if (wr.op is WrOp.READ or wr.op in ATOMIC_OPS) and self.attrs.max_rd_atomic == 0:
            raise PostError("max_rd_atomic is 0")
        if self.is_ud and wr.ah is None:
            raise PostError("UD needs an address handle")

    def _check_inline(self, wr: SendWr) -> None:
        """R-WQ-5."""
        if wr.op is WrOp.READ or wr.op in ATOMIC_OPS:
            raise PostError("no inline data for READ and ATOMIC")
        if wr.length > self.max_inline:
            raise PostError("inline data too long")

    def inline_data(self, wr: SendWr) -> SendWr:
        """`wr` with its elements copied to inline data, as a driver does at post time (R-WQ-5: no lkey check)."""
        data = gather(self.keys, self.pd, wr.sges, 0, wr.length)
        return replace(wr, sges=(), inline=data)

    def post_recv(self, wr: RecvWr) -> None:
        """Queue a receive. Raises PostError in RESET or with an SRQ, QueueFull; flushed at once in ERR."""
        if self.state is QpState.RESET:
            raise PostError("post_recv in RESET")  # R-WQ-1
        if self.srq is not None:
            raise PostError("the QP has an SRQ")
        self.rq.post(wr)
        if self.state is QpState.ERR:
            self._flush_receives()  # R-ERR-5

    # ---- services for the two sides ------------------------------------------------------------------------

    def frame(self, opcode: Opcode, psn: int, av: AddressVector | None = None, dest_qpn: int | None = None, **kw) -> Frame:
        """A packet of this QP with addresses, P_Key and policy bits filled in."""
        to = av or self.attrs.av
        if to is None:
            raise RuntimeError("no address vector")
        target = self.attrs.dest_qpn if dest_qpn is None else dest_qpn
        return Frame(
            opcode=opcode,
            dest_qpn=target,
            psn=psn,
            dst_mac=to.dst_mac,
            src_mac=self.device.mac,
            vlan=to.vlan,
            src_ip=to.src_ip,
            dst_ip=to.dst_ip,
            traffic_class=to.traffic_class,
            hop_limit=to.hop_limit,
            flow_label=to.flow_label if len(to.dst_ip) == 16 else 0,
            ident=self.device.next_ident() if len(to.dst_ip) == 4 else 0,
            sport=to.udp_sport if to.udp_sport is not None else udp_source_port(to.flow_label, self.qpn, target),
            migreq=self.policy.migreq,
            pkey=self.attrs.pkey,
            **kw,
        )

    def complete_send(self, wr: SendWr, status: WcStatus) -> None:
        """A send completion, when asked for or in error (R-CQ-1, R-ERR-1)."""
        if status is WcStatus.SUCCESS and not (wr.signaled or self.sq_sig_all):
            return
        length = wr.length if status is WcStatus.SUCCESS else 0
        self._push(self.send_cq, WorkCompletion(wr.wr_id, status, WC_OP_OF[wr.op], self.qpn, byte_len=length))

    def complete_receive(self, wc: WorkCompletion) -> None:
        """A receive completion."""
        self._push(self.recv_cq, wc)

    def _push(self, cq: CompletionQueue, wc: WorkCompletion) -> None:
        if not cq.push(wc):
            self.enter_error()  # R-CQ-6

    def receive_available(self) -> bool:
        return len(self.srq if self.srq is not None else self.rq) > 0

    def take_receive(self) -> RecvWr | None:
        """The next receive WQE, from the SRQ if there is one."""
        return (self.srq if self.srq is not None else self.rq).take()

    def give_back_receive(self, wr: RecvWr, always: bool = False) -> bool:
        """Use a taken receive again; False with an SRQ, which does not take it back (R-UC-1)."""
        if self.srq is not None and not always:
            return False
        (self.srq if self.srq is not None else self.rq).give_back(wr)
        return True

    def run_local(self, wr: SendWr) -> WcStatus:
        """LOCAL_INV and BIND_MW (R-REQ-5)."""
        try:
            if wr.op is WrOp.LOCAL_INV:
                self.keys.invalidate_window(wr.inv_rkey)
            elif wr.bind is not None:
                bind = wr.bind
                region = self.keys.local(bind.lkey, self.pd, bind.base, bind.length, Access.NONE)
                self.keys.bind_window(bind.key, region, self.qpn, bind.access, bind.base, bind.length)
        except ProtectionError:
            return WcStatus.MW_BIND_ERR if wr.op is WrOp.BIND_MW else WcStatus.LOC_QP_OP_ERR
        return WcStatus.SUCCESS

    def raise_event(self, event: Event) -> None:
        self.events.append(event)

    def note_arrival(self) -> None:
        """First packet in RTR: COMM_EST, once (R-QP-2)."""
        if self.state is QpState.RTR and not self.established:
            self.established = True
            self.raise_event(Event.COMM_EST)


def udp_source_port(flow_label: int, lqpn: int, rqpn: int) -> int:
    """UDP source port of a QP (R-ADR-4)."""
    if flow_label == 0:
        mixed = lqpn * rqpn
        mixed ^= mixed >> 20
        mixed ^= mixed >> 40
        flow_label = mixed & 0xFFFFF
    return (flow_label & 0x3FFF) ^ (flow_label >> 14) | 0xC000
