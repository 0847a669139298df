"""Queue pairs with the names of pyverbs: `QP`, `QPAttr`, `QPInitAttr`, `QPCap`, `AHAttr`."""

import errno
from dataclasses import dataclass, field

from rnic import abi
from rnic.abi import Attr, Command, QpType, WqeOpcode

from .driver import RDMAError, join_words
from .enums import MTU, AccessFlags, QPAttrMask, QPState, QPType, SendFlags, WROpcode
from .verbs import CQ, PD, RecvWR, SendWR, gid_bytes

__all__ = ["AHAttr", "QP", "QPAttr", "QPCap", "QPInitAttr", "flow_label_to_sport"]

_MASKS = {
    QPAttrMask.CUR_STATE: Attr.CUR_STATE, QPAttrMask.EN_SQD_ASYNC_NOTIFY: Attr.EN_SQD_ASYNC_NOTIFY,
    QPAttrMask.ACCESS_FLAGS: Attr.ACCESS, QPAttrMask.PKEY_INDEX: Attr.PKEY_INDEX, QPAttrMask.PORT: Attr.PORT,
    QPAttrMask.QKEY: Attr.QKEY, QPAttrMask.AV: Attr.AV, QPAttrMask.PATH_MTU: Attr.PATH_MTU,
    QPAttrMask.TIMEOUT: Attr.TIMEOUT, QPAttrMask.RETRY_CNT: Attr.RETRY_CNT, QPAttrMask.RNR_RETRY: Attr.RNR_RETRY,
    QPAttrMask.RQ_PSN: Attr.RQ_PSN, QPAttrMask.MAX_QP_RD_ATOMIC: Attr.MAX_RD_ATOMIC,
    QPAttrMask.MIN_RNR_TIMER: Attr.MIN_RNR_TIMER, QPAttrMask.SQ_PSN: Attr.SQ_PSN,
    QPAttrMask.MAX_DEST_RD_ATOMIC: Attr.MAX_DEST_RD_ATOMIC, QPAttrMask.DEST_QPN: Attr.DEST_QPN,
}  # fmt: skip

_TYPES = {QPType.RC: QpType.RC, QPType.UC: QpType.UC, QPType.UD: QpType.UD}

_OPCODES = {
    WROpcode.SEND: WqeOpcode.SEND, WROpcode.SEND_WITH_IMM: WqeOpcode.SEND_IMM, WROpcode.SEND_WITH_INV: WqeOpcode.SEND_INV,
    WROpcode.RDMA_WRITE: WqeOpcode.WRITE, WROpcode.RDMA_WRITE_WITH_IMM: WqeOpcode.WRITE_IMM,
    WROpcode.RDMA_READ: WqeOpcode.READ, WROpcode.ATOMIC_CMP_AND_SWP: WqeOpcode.CMP_SWAP,
    WROpcode.ATOMIC_FETCH_AND_ADD: WqeOpcode.FETCH_ADD, WROpcode.LOCAL_INV: WqeOpcode.LOCAL_INV,
    WROpcode.BIND_MW: WqeOpcode.BIND_MW,
}  # fmt: skip

_IMM = (WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM)
_ATOMICS = (WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD)
_UC = (WROpcode.SEND, WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE, WROpcode.RDMA_WRITE_WITH_IMM, WROpcode.SEND_WITH_INV)
_ALLOWED = {QPType.RC: tuple(WROpcode), QPType.UC: _UC, QPType.UD: (WROpcode.SEND, WROpcode.SEND_WITH_IMM)}  # R-WQ-7


def flow_label_to_sport(flow_label: int, lqpn: int, rqpn: int) -> int:
    """UDP source port of a QP (R-ADR-4)."""
    if not flow_label:
        v = lqpn * rqpn
        v ^= v >> 20
        v ^= v >> 40
        flow_label = v & 0xFFFFF
    return (flow_label & 0x3FFF) ^ (flow_label >> 14) | 0xC000


@dataclass
class QPCap:
    """Sizes asked for; the QP's ``cap`` holds what it has (at least that, R-WQ-3)."""

    max_send_wr: int = 16
    max_recv_wr: int = 16
    max_send_sge: int = 2
    max_recv_sge: int = 1
    max_inline_data: int = 0


@dataclass
class QPInitAttr:
    """What a QP is created with."""

    scq: CQ
    rcq: CQ
    qp_type: QPType = QPType.RC
    cap: QPCap = field(default_factory=QPCap)
    sq_sig_all: bool = False


@dataclass
class AHAttr:
    """Address vector. ``dgid`` is the peer's IP address; its MAC comes from the context's neighbours unless given."""

    dgid: str
    sgid_index: int = 0
    flow_label: int = 0
    hop_limit: int = 64  # R-ADR-3
    traffic_class: int = 0
    dmac: bytes | None = None
    vlan: int | None = None


@dataclass
class QPAttr:
    """Attributes of ``modify``; names as in pyverbs."""

    qp_state: QPState = QPState.RESET
    cur_qp_state: QPState = QPState.RESET
    pkey_index: int = 0
    port_num: int = 1
    qp_access_flags: AccessFlags | int = 0
    qkey: int = 0
    ah_attr: AHAttr | None = None
    path_mtu: MTU | int = MTU.MTU_1024
    dest_qp_num: int = 0
    rq_psn: int = 0
    max_dest_rd_atomic: int = 1
    min_rnr_timer: int = 12
    sq_psn: int = 0
    timeout: int = 14
    retry_cnt: int = 7
    rnr_retry: int = 7
    max_rd_atomic: int = 1


class QP:
    """Queue pair in RESET. ``qpn`` fixes the number."""

    def __init__(self, pd: PD, init: QPInitAttr, *, qpn: int | None = None):
        context = pd.context
        self.context, self.pd, self.scq, self.rcq = context, pd, init.scq, init.rcq
        self.qp_type, self.sq_sig_all = init.qp_type, init.sq_sig_all
        self.qp_state = QPState.RESET
        cap = init.cap
        most = 1 << (context.caps["max_log_ring"] & 0xFF)
        for name, value, limit in (
            ("max_send_wr", cap.max_send_wr, most), ("max_recv_wr", cap.max_recv_wr, most),
            ("max_send_sge", cap.max_send_sge, context.caps["max_sge"]), ("max_recv_sge", cap.max_recv_sge, abi.RECV_SGES),
            ("max_inline_data", cap.max_inline_data, abi.inline_bytes(abi.MAX_LOG_STRIDE)),
        ):  # fmt: skip
            if not 0 <= value <= limit:
                raise RDMAError(errno.EINVAL, f"{name} is {value}, must be 0..{limit}")
        self._log_stride = abi.MIN_LOG_STRIDE
        while (abi.send_sges(self._log_stride) < cap.max_send_sge or abi.inline_bytes(self._log_stride) < cap.max_inline_data):
            self._log_stride += 1
        self._log_sq = max(0, (max(1, cap.max_send_wr) - 1).bit_length())
        self._log_rq = max(0, (max(1, cap.max_recv_wr) - 1).bit_length())
        self.cap = QPCap(
            1 << self._log_sq, 1 << self._log_rq, min(abi.send_sges(self._log_stride), context.caps["max_sge"]),
            abi.RECV_SGES, abi.inline_bytes(self._log_stride),
        )  # fmt: skip
        self.qp_num = context.driver.qpns.take(qpn)
        self._sq_ids: dict[int, int] = {}
        self._rq_ids: dict[int, int] = {}
        self._sq_head = self._rq_head = 0  # counters of the next WQE to post
        self._sq_tail = self._rq_tail = 0  # counters of the oldest WQE not completed
        sq_size, rq_size = 1 << self._log_sq + self._log_stride, 64 << self._log_rq
        self._sq, self._rq = context.memory.map(sq_size), context.memory.map(rq_size)
        sq_ring, sq_tables = context.memory.describe(self._sq.va, sq_size, rights=AccessFlags.LOCAL_WRITE, base=0)
        rq_ring, rq_tables = context.memory.describe(self._rq.va, rq_size, rights=AccessFlags.LOCAL_WRITE, base=0)
        self._tables = sq_tables + rq_tables
        words = abi.CMD_CREATE_QP.words(
            qpn=self.qp_num, type=_TYPES[self.qp_type], log_sq=self._log_sq, log_rq=self._log_rq,
            log_stride=self._log_stride, pd=pd.handle, sig_all=int(self.sq_sig_all), send_cqn=self.scq.cqn,
            recv_cqn=self.rcq.cqn, sq_ring=join_words(sq_ring), rq_ring=join_words(rq_ring),
        )  # fmt: skip
        context.driver.command(Command.CREATE_QP, words)
        context.qps[self.qp_num] = self

    # ------------------------------------------------------------------------------------------------ states
    def modify(self, attr: QPAttr, mask: QPAttrMask | int) -> None:
        """MODIFY_QP; EINVAL and nothing changed for a wrong set of attributes (R-QP-1)."""
        mask = QPAttrMask(mask)
        target = attr.qp_state if mask & QPAttrMask.STATE else self.qp_state
        bits = Attr(0)
        for verb, hw in _MASKS.items():
            if mask & verb:
                bits |= hw
        fields: dict[str, int] = {}
        if mask & QPAttrMask.AV:
            fields |= self._av(attr)
        words = abi.CMD_MODIFY_QP.words(
            qpn=self.qp_num, attr_mask=int(bits), new_state=target, cur_state=attr.cur_qp_state, pkey_index=attr.pkey_index,
            access=int(attr.qp_access_flags), min_rnr_timer=attr.min_rnr_timer, dest_qpn=attr.dest_qp_num,
            path_mtu=attr.path_mtu, qkey=attr.qkey, rq_psn=attr.rq_psn, max_dest_rd_atomic=attr.max_dest_rd_atomic,
            sq_psn=attr.sq_psn, max_rd_atomic=attr.max_rd_atomic, timeout=attr.timeout, retry_cnt=attr.retry_cnt,
            rnr_retry=attr.rnr_retry, **fields,
        )  # fmt: skip
        self.context.driver.command(Command.MODIFY_QP, words)
        self.qp_state = target
        if target == QPState.RESET:
            self._clean_cqs()
            self._sq_ids.clear()
            self._rq_ids.clear()
            self._sq_head = self._rq_head = self._sq_tail = self._rq_tail = 0

    def _av(self, attr: QPAttr) -> dict[str, int]:
        ah = attr.ah_attr
        if ah is None:
            raise RDMAError(errno.EINVAL, "an address vector needs a GRH on RoCE")  # R-ADR-2
        gid = gid_bytes(ah.dgid)
        dmac = ah.dmac or self.context.neighbors.get(gid)
        if dmac is None:
            raise RDMAError(errno.EHOSTUNREACH, f"no MAC known for {ah.dgid}")
        if ah.sgid_index not in self.context.gids:
            raise RDMAError(errno.EINVAL, f"sgid_index {ah.sgid_index} has no GID")
        return {
            "sgid_index": ah.sgid_index, "dmac": int.from_bytes(dmac, "little"), "vlan": int(ah.vlan is not None),
            "vlan_tci": ah.vlan or 0, "sport": flow_label_to_sport(ah.flow_label, self.qp_num, attr.dest_qp_num),
            "hop_limit": ah.hop_limit, "traffic_class": ah.traffic_class, "flow_label": ah.flow_label,
            "ipv6": int(gid[:12] != bytes(10) + b"\xff\xff"), "dip": int.from_bytes(gid, "little"),
        }  # fmt: skip

    def to_init(self, attr: QPAttr) -> None:
        """RESET -> INIT."""
        attr.qp_state = QPState.INIT
        M = QPAttrMask
        key = M.QKEY if self.qp_type == QPType.UD else M.ACCESS_FLAGS
        self.modify(attr, M.STATE | M.PKEY_INDEX | M.PORT | key)

    def to_rtr(self, attr: QPAttr) -> None:
        """RESET -> INIT -> RTR."""
        if self.qp_state == QPState.RESET:
            self.to_init(attr)
        attr.qp_state = QPState.RTR
        M = QPAttrMask
        mask = M.STATE
        if self.qp_type != QPType.UD:
            mask |= M.AV | M.PATH_MTU | M.DEST_QPN | M.RQ_PSN
        if self.qp_type == QPType.RC:
            mask |= M.MAX_DEST_RD_ATOMIC | M.MIN_RNR_TIMER
        self.modify(attr, mask)

    def to_rts(self, attr: QPAttr) -> None:
        """Up to RTS, from wherever it is before that."""
        if self.qp_state in (QPState.RESET, QPState.INIT):
            self.to_rtr(attr)
        attr.qp_state = QPState.RTS
        M = QPAttrMask
        mask = M.STATE | M.SQ_PSN
        if self.qp_type == QPType.RC:
            mask |= M.TIMEOUT | M.RETRY_CNT | M.RNR_RETRY | M.MAX_QP_RD_ATOMIC
        self.modify(attr, mask)

    def query(self) -> dict[str, int]:
        """QUERY_QP: attributes as set and the present state (R-QP-6)."""
        self.context.driver.command(Command.QUERY_QP, [self.qp_num])
        got = abi.CMD_MODIFY_QP.unpack_words(self.context.driver.mailbox(abi.CMD_MODIFY_QP.size // 4))
        self.qp_state = QPState(got["new_state"])
        return got

    def close(self) -> None:
        """Destroy."""
        self.context.driver.command(Command.DESTROY_QP, [self.qp_num])
        self._clean_cqs()
        del self.context.qps[self.qp_num]
        self.context.driver.qpns.give(self.qp_num)
        for table in self._tables:
            self.context.host.free_pages([table])
        self.context.memory.unmap(self._sq)
        self.context.memory.unmap(self._rq)

    def _clean_cqs(self) -> None:
        """R-CQ-8: CQEs of this life must not match the next one."""
        for cq in dict.fromkeys((self.scq, self.rcq)):
            cq.clean(self.qp_num)

    # ------------------------------------------------------------------------------------------------ posting
    def post_send(self, *wrs: SendWR, ring: bool = True) -> None:
        """Put work requests on the send queue and ring the doorbell (``ring=False``: later, by `ring_sq`).

        EINVAL: wrong state, operation or SGE list (R-WQ-1, R-WQ-2, R-WQ-7); ENOMEM: the queue is full. Requests before the
        offending one are posted.
        """
        try:
            for wr in wrs:
                self._post_send(wr)
        finally:
            if ring:
                self.ring_sq()

    def ring_sq(self) -> None:
        """SQ doorbell."""
        self.context.note("sq_doorbell", qpn=self.qp_num, producer=self._sq_head)
        self.context.driver.doorbell(abi.DB_SQ, self.qp_num, self._sq_head)

    def _post_send(self, wr: SendWR) -> None:
        if self.qp_state in (QPState.RESET, QPState.INIT, QPState.RTR):
            raise RDMAError(errno.EINVAL, f"post_send in {self.qp_state.name}")  # R-WQ-1
        if wr.opcode not in _ALLOWED[self.qp_type]:
            raise RDMAError(errno.EINVAL, f"{wr.opcode.name} on {self.qp_type.name}")  # R-WQ-7
        inline = bool(wr.send_flags & SendFlags.INLINE)
        length = sum(s.length for s in wr.sg)
        if wr.opcode in _ATOMICS and (len(wr.sg) != 1 or length != 8 or inline):
            raise RDMAError(errno.EINVAL, "an atomic needs one SGE of 8 bytes")  # R-WQ-6
        if inline and (wr.opcode == WROpcode.RDMA_READ or length > self.cap.max_inline_data):
            raise RDMAError(errno.EINVAL, f"{length} bytes inline, at most {self.cap.max_inline_data}")  # R-WQ-5
        if not inline and len(wr.sg) > self.cap.max_send_sge:
            raise RDMAError(errno.EINVAL, f"{len(wr.sg)} SGEs, at most {self.cap.max_send_sge}")  # R-WQ-2
        if length > 1 << 31:
            raise RDMAError(errno.EINVAL, f"message of {length} bytes, at most 2^31")  # R-LEN-2
        if self._sq_head - self._sq_tail & 0xFFFF >= self.cap.max_send_wr:
            raise RDMAError(errno.ENOMEM, "send queue is full")  # R-WQ-2
        flags = 0
        for verb, hw in ((SendFlags.SIGNALED, abi.SendFlags.SIGNALED), (SendFlags.SOLICITED, abi.SendFlags.SOLICITED),
                         (SendFlags.FENCE, abi.SendFlags.FENCE), (SendFlags.INLINE, abi.SendFlags.INLINE)):  # fmt: skip
            if wr.send_flags & verb:
                flags |= hw
        imm = wr.imm_data if wr.opcode in _IMM else wr.invalidate_rkey
        head = abi.SEND_WQE.pack(
            opcode=_OPCODES[wr.opcode], flags=flags, num_sge=0 if inline else len(wr.sg), length=length, imm=imm,
            remote_addr=wr.remote_addr, rkey=wr.rkey,
        )[:32]  # fmt: skip
        if inline:
            body = b"".join(self.context.memory.read(s.addr, s.length) for s in wr.sg if s.length)  # lkey not checked (R-WQ-5)
        else:
            body = b"".join(s.words().to_bytes(16, "little") for s in wr.sg)
        if wr.opcode in _ATOMICS:
            add = wr.opcode == WROpcode.ATOMIC_FETCH_AND_ADD  # R-OPC-3: the addend travels in the swap field
            operands = (wr.compare_add, 0) if add else (wr.swap, wr.compare_add)
            body = b"".join(v.to_bytes(8, "little") for v in operands) + body
        slot = self._sq_head & self.cap.max_send_wr - 1
        stride = 1 << self._log_stride
        self.context.memory.write(self._sq.va + slot * stride, (head + body).ljust(stride, b"\0"))  # R-WQ-9
        self.context.note("post_send", qpn=self.qp_num, index=self._sq_head, wr_id=wr.wr_id, opcode=wr.opcode.name,
                          length=length)  # fmt: skip
        self._sq_ids[self._sq_head] = wr.wr_id
        self._sq_head = self._sq_head + 1 & 0xFFFF

    def post_recv(self, *wrs: RecvWR) -> None:
        """Put receive work requests on the receive queue and ring its doorbell. Errors as for `post_send`."""
        try:
            for wr in wrs:
                self._post_recv(wr)
        finally:
            self.context.note("rq_doorbell", qpn=self.qp_num, producer=self._rq_head)
            self.context.driver.doorbell(abi.DB_RQ, self.qp_num, self._rq_head)

    def _post_recv(self, wr: RecvWR) -> None:
        if self.qp_state == QPState.RESET:
            raise RDMAError(errno.EINVAL, "post_recv in RESET")  # R-WQ-1
        if len(wr.sg) > self.cap.max_recv_sge:
            raise RDMAError(errno.EINVAL, f"{len(wr.sg)} SGEs, at most {self.cap.max_recv_sge}")  # R-WQ-2
        if self._rq_head - self._rq_tail & 0xFFFF >= self.cap.max_recv_wr:
            raise RDMAError(errno.ENOMEM, "receive queue is full")  # R-WQ-2
        body = b"".join(s.words().to_bytes(16, "little") for s in wr.sg)
        slot = self._rq_head & self.cap.max_recv_wr - 1
        self.context.memory.write(self._rq.va + slot * 64, body.ljust(64, b"\0"))  # R-WQ-9
        self.context.note("post_recv", qpn=self.qp_num, index=self._rq_head, wr_id=wr.wr_id)
        self._rq_ids[self._rq_head] = wr.wr_id
        self._rq_head = self._rq_head + 1 & 0xFFFF

    def retire(self, receive: bool, counter: int) -> int:
        """Called by the CQ for a CQE: frees the ring up to ``counter`` (R-CQ-1) and returns its wr_id.

        EIO when the RNIC completes a WQE that is not outstanding (R-ERR-4).
        """
        ids = self._rq_ids if receive else self._sq_ids
        if counter not in ids:
            side = "receive" if receive else "send"
            raise RDMAError(errno.EIO, f"CQE for {side} WQE {counter} of QP {self.qp_num:#x}, which is not outstanding")
        tail = self._rq_tail if receive else self._sq_tail
        wr_id = ids[counter]
        while tail != counter + 1 & 0xFFFF:
            del ids[tail]
            tail = tail + 1 & 0xFFFF
        if receive:
            self._rq_tail = tail
        else:
            self._sq_tail = tail
        return wr_id
