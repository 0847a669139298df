"""The software endpoint around the RC engines: receive filter, addresses, UC, UD, states, posting, memory, completion queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rnic.wire.frame import Frame, parse_frame
from rnic.wire.opcode import Opcode as Op
from rnic_tb.endpoint import (
    ALL_ACCESS,
    Access,
    AddressVector,
    CompletionQueue,
    Device,
    Event,
    KeyTable,
    PeerPolicy,
    PostError,
    ProtectionError,
    QpState,
    QpType,
    QueueFull,
    RecvWr,
    SendWr,
    Sge,
    SharedReceiveQueue,
    WcFlag,
    WcOp,
    WcStatus,
    WorkCompletion,
    WrOp,
    udp_source_port,
)
from rnic_tb.endpoint.pair import ACK, PD, Pair
from tests.rules import rule

OK, FLUSH = WcStatus.SUCCESS, WcStatus.WR_FLUSH_ERR


def write(pair: Pair, psn: int = 0, **fields) -> Frame:
    return pair.frame(Op.RC_WRITE_ONLY, psn, payload=b"abcd", **({"ackreq": True} | pair.write_fields(4) | fields))


# ---- receive filter --------------------------------------------------------------------------------------------


@rule("R-FRM-1", "R-FRM-4", "R-FRM-5", "R-FRM-6", "R-ICRC-7", "R-OPC-1", "R-PKEY-1")
@pytest.mark.parametrize(
    "change,cause",
    [
        ({"raw_icrc": b"\0\0\0\0"}, "bad_icrc"),
        ({"raw_ip_checksum": 1}, "bad_ip_checksum"),
        ({"raw_udp_length": 16}, "bad_length"),
        ({"opcode": 0x15}, "unknown_opcode"),
        ({"opcode": 0x1F}, "unknown_opcode"),
        ({"tver": 1}, "bad_tver"),
        ({"dest_qpn": 0}, "qp0"),
        ({"dest_qpn": 0x777777}, "no_qp"),
        ({"dport": 4790}, "not_roce"),
        ({"dst_mac": b"\x02\0\0\0\0\x09"}, "dst_mac"),
        ({"dst_ip": b"\x0a\0\0\x09"}, "dst_ip"),
        ({"src_ip": b"\x0a\0\0\x09"}, "src_ip"),
        ({"opcode": Op.UC_WRITE_ONLY}, "transport"),
        ({"opcode": Op.UD_SEND_ONLY}, "transport"),
        ({"pkey": 0x1234}, "pkey"),
    ],
)
def test_filter_drops_silently_and_counts(change: dict, cause: str) -> None:
    pair = Pair()
    assert pair.b.take(replace(write(pair), **change)) == []
    assert dict(pair.b.device.drops) == {cause: 1}
    assert pair.b.read(0, 4) == bytes(4)
    assert [f.syndrome for f in pair.b.take(write(pair))] == [ACK]


@rule("R-PKEY-1")
@pytest.mark.parametrize(
    "own,frame,taken",
    [(0xFFFF, 0x7FFF, True), (0x7FFF, 0xFFFF, True), (0x7FFF, 0x7FFF, False), (0x8001, 0x8001, True), (0x8001, 0xFFFF, False)],
)
def test_pkey_match(own: int, frame: int, taken: bool) -> None:
    pair = Pair(b_attrs={"pkey": own})
    assert len(pair.b.take(replace(write(pair), pkey=frame))) == taken


@rule("R-FRM-1", "R-CC-4", "R-FRM-6", "R-ADR-4")
@pytest.mark.parametrize(
    "change",
    [{"migreq": True}, {"fecn": True}, {"becn": True}, {"resv7": 0x7F}, {"udp_checksum": 0x1234}, {"sport": 1}, {"ident": 77}],
)
def test_what_a_receiver_ignores(change: dict) -> None:
    pair = Pair()
    raw = replace(write(pair), **change).pack() + bytes(29)  # a long trailer
    pair.b.device.receive(raw)
    assert [f.syndrome for f in pair.b.sent()] == [ACK]


@rule("R-FRM-7")
def test_vlan() -> None:
    pair = Pair()
    assert pair.b.take(replace(write(pair), vlan=(3, 0)))  # priority tag only
    pair.b.take(replace(write(pair, 1), vlan=(3, 7)))
    assert pair.b.device.drops == {"vlan": 1}
    pair.b.device.vlan = 7
    pair.b.qp.attrs = replace(pair.b.qp.attrs, av=replace(pair.b.qp.attrs.av, vlan=(5, 7)))
    assert [f.vlan for f in pair.b.take(replace(write(pair, 1), vlan=(3, 7)))] == [(5, 7)]
    assert pair.b.take(write(pair, 2)) == [] and pair.b.device.drops["vlan"] == 2


@rule("R-QP-3")
def test_response_filter() -> None:
    pair = Pair()
    pair.a.post(WrOp.SEND, 1, 0, 4)
    pair.a.sent()
    pair.a.qp.modify(QpState.SQD)
    pair.a.take(pair.ack(0))
    assert pair.a.completions() == [(1, OK)]


@rule("R-ADR-4")
@pytest.mark.parametrize(
    "flow,local,remote,port",
    [(0, 0x13, 0x13, 0xC169), (0, 0x34, 0x34, 0xCA90), (0x2BCDE, 1, 2, 0xFCD4), (0xFFFFF, 1, 2, 0xFFC0), (1, 1, 2, 0xC001)],
)
def test_udp_source_port(flow: int, local: int, remote: int, port: int) -> None:
    assert udp_source_port(flow, local, remote) == port
    assert udp_source_port(flow, remote, local) == port


@rule("R-ADR-3", "R-PSN-5")
def test_address_vector_and_policy_bits_are_on_the_wire() -> None:
    pair = Pair(policy_a=PeerPolicy(migreq=True), psn_a=0xABCDEF)
    av = replace(pair.a.qp.attrs.av, traffic_class=0x6A, hop_limit=9, udp_sport=0xD00D)
    pair.a.qp.attrs = replace(pair.a.qp.attrs, av=av, pkey=0x8123)
    pair.a.post(WrOp.SEND, 1, 0, 5)
    (frame,) = pair.a.sent()
    assert (frame.traffic_class, frame.hop_limit, frame.sport, frame.pkey) == (0x6A, 9, 0xD00D, 0x8123)
    assert frame.migreq and frame.psn == 0xABCDEF and frame.dont_fragment and frame.udp_checksum == 0


@rule("R-CC-2", "R-CC-3")
def test_congestion_notification() -> None:
    pair = Pair()
    pair.b.device.send_cnps = True
    marked = [replace(write(pair, psn), traffic_class=3) for psn in range(3)]
    first = pair.b.take(marked[0], marked[1])
    assert [f.opcode for f in first] == [Op.CNP, Op.RC_ACK, Op.RC_ACK]
    cnp = first[0]
    assert (cnp.dest_qpn, cnp.psn, cnp.becn, cnp.pkey, cnp.ackreq) == (pair.a.qp.qpn, 0, True, 0xFFFF, False)
    pair.b.wait(4000)
    assert [f.opcode for f in pair.b.take(marked[2])] == [Op.CNP, Op.RC_ACK]
    assert pair.a.take(cnp) == [] and pair.a.device.seen[Op.CNP] == 1


# ---- states ----------------------------------------------------------------------------------------------------


def bare_qp(kind: QpType = QpType.RC):
    cq = CompletionQueue(64)
    return Device(bytes(6), [b"\x0a\0\0\1"]).create_qp(5, kind, PD, cq, cq)


RTR = {"av": AddressVector(bytes(6), b"\x0a\0\0\2", b"\x0a\0\0\1"), "path_mtu": 1024, "dest_qpn": 9, "rq_psn": 1,
       "max_dest_rd_atomic": 1, "min_rnr_timer": 1}  # fmt: skip
RTS = {"sq_psn": 1, "timeout": 1, "retry_cnt": 1, "rnr_retry": 1, "max_rd_atomic": 1}


@rule("R-QP-1")
@pytest.mark.parametrize("missing", sorted(RTR))
def test_missing_attribute_changes_nothing(missing: str) -> None:
    qp = bare_qp()
    qp.modify(QpState.INIT, pkey=0xFFFF, access=Access.NONE)
    before = qp.attrs
    with pytest.raises(ValueError, match="missing"):
        qp.modify(QpState.RTR, **{k: v for k, v in RTR.items() if k != missing})
    with pytest.raises(ValueError, match="not allowed"):
        qp.modify(QpState.RTR, **RTR, timeout=3)
    assert qp.attrs == before and qp.state is QpState.INIT
    qp.modify(QpState.RTR, **RTR)
    with pytest.raises(ValueError, match="missing"):
        qp.modify(QpState.RTS, **{k: v for k, v in RTS.items() if k != "timeout"})


@rule("R-QP-1", "R-MTU-1", "R-ERR-6")
def test_transitions_that_do_not_exist() -> None:
    qp = bare_qp()
    for state in (QpState.RTR, QpState.RTS, QpState.SQD, QpState.ERR):
        with pytest.raises(ValueError):
            qp.modify(state)
    qp.modify(QpState.INIT, pkey=0xFFFF, access=Access.NONE)
    with pytest.raises(ValueError, match="path MTU"):
        qp.modify(QpState.RTR, **(RTR | {"path_mtu": 8192}))
    with pytest.raises(ValueError, match="cur_state"):
        qp.modify(QpState.RTR, cur_state=QpState.RTS, **RTR)
    qp.modify(QpState.RTR, **RTR)
    qp.modify(QpState.RTS, **RTS)
    with pytest.raises(ValueError):
        qp.modify(QpState.SQE)
    qp.modify(QpState.ERR)
    with pytest.raises(ValueError):
        qp.modify(QpState.RTS)
    qp.modify(QpState.RESET)
    assert qp.state is QpState.RESET


@rule("R-QP-4")
def test_reset_forgets_without_completions() -> None:
    pair = Pair()
    pair.a.recv(1)
    pair.a.post(WrOp.SEND, 2, 0, 4)
    pair.a.sent()
    pair.a.qp.modify(QpState.RESET)
    assert pair.a.completions() == [] and pair.a.device.next_deadline() is None
    assert pair.a.take(pair.ack(0)) == [] and pair.a.device.drops["qp_state"] == 1


@rule("R-WQ-1", "R-ERR-5")
def test_posting_by_state() -> None:
    qp = bare_qp()
    recv, send = RecvWr(1), SendWr(2, WrOp.SEND)
    with pytest.raises(PostError):
        qp.post_recv(recv)
    for state, attrs in ((QpState.INIT, {"pkey": 0xFFFF, "access": Access.NONE}), (QpState.RTR, RTR)):
        qp.modify(state, **attrs)
        qp.post_recv(recv)
        with pytest.raises(PostError):
            qp.post_send(send)
    qp.modify(QpState.RTS, **RTS)
    qp.post_send(send)
    qp.modify(QpState.ERR)
    qp.post_send(send)
    qp.post_recv(recv)
    assert [(wc.wr_id, wc.status) for wc in qp.send_cq.poll()] == [(2, FLUSH), (1, FLUSH), (1, FLUSH), (2, FLUSH), (1, FLUSH)]


@rule("R-WQ-2", "R-WQ-3", "R-WQ-6", "R-WQ-7", "R-WQ-5")
def test_post_limits() -> None:
    pair = Pair(limits={"max_send_wr": 3, "max_recv_wr": 2, "max_sge": 2, "max_inline": 8})
    three = (Sge(0, 0, 0),) * 3
    for bad in (
        SendWr(1, WrOp.SEND, three), SendWr(1, WrOp.SEND, inline=bytes(9)), SendWr(1, WrOp.READ, inline=b"x"),
        SendWr(1, WrOp.CMP_SWAP), SendWr(1, WrOp.FETCH_ADD, (pair.a.sge(0, 4),)),
        SendWr(1, WrOp.CMP_SWAP, (pair.a.sge(0, 8), pair.a.sge(8, 8))),
    ):  # fmt: skip
        with pytest.raises(PostError):
            pair.a.qp.post_send(bad)
    with pytest.raises(PostError):
        pair.a.qp.post_recv(RecvWr(1, three))
    for wr_id in range(3):
        pair.a.post(WrOp.SEND, wr_id, 0, 4)
    with pytest.raises(QueueFull):
        pair.a.post(WrOp.SEND, 3, 0, 4)
    for wr_id in range(2):
        pair.a.recv(wr_id)
    with pytest.raises(QueueFull):
        pair.a.recv(2)
    uc, ud = Pair(QpType.UC), Pair(QpType.UD)
    for end, op in ((uc.a, WrOp.READ), (uc.a, WrOp.FETCH_ADD), (ud.a, WrOp.WRITE), (ud.a, WrOp.READ), (ud.a, WrOp.SEND_INV)):
        with pytest.raises(PostError):
            end.post(op, 1, 0, 8)


# ---- UC --------------------------------------------------------------------------------------------------------


def uc(pair: Pair, op: Op, psn: int, size: int = 256, **fields) -> Frame:
    return pair.frame(op, psn, payload=bytes([psn + 1]) * size, **fields)


@rule("R-UC-2", "R-UC-4")
def test_uc_completes_when_sent() -> None:
    pair = Pair(QpType.UC)
    pair.a.post(WrOp.WRITE_IMM, 1, 0, 300, remote_addr=pair.b.base, rkey=pair.b.key, imm=5)
    pair.b.recv(9)
    assert pair.a.completions() == []
    frames = pair.a.sent()
    assert [(f.opcode, f.ackreq) for f in frames] == [(Op.UC_WRITE_FIRST, False), (Op.UC_WRITE_LAST_IMM, False)]
    assert pair.a.completions() == [(1, OK)] and pair.a.device.next_deadline() is None
    assert pair.b.take(*frames) == []
    (wc,) = pair.b.wcs()
    assert (wc.wr_id, wc.opcode, wc.byte_len, wc.imm) == (9, WcOp.RECV_RDMA_WITH_IMM, 300, 5)


@rule("R-UC-1")
def test_uc_gap_drops_to_the_next_first_and_reuses_the_receive() -> None:
    pair = Pair(QpType.UC)
    pair.b.recv(1)
    pair.b.recv(2)
    pair.b.take(uc(pair, Op.UC_SEND_FIRST, 0), uc(pair, Op.UC_SEND_LAST, 2, 4))
    assert pair.b.completions() == [] and len(pair.b.qp.rq) == 2
    pair.b.take(uc(pair, Op.UC_SEND_LAST, 3, 4), uc(pair, Op.UC_SEND_FIRST, 9), uc(pair, Op.UC_SEND_LAST, 10, 4))
    assert pair.b.completions() == [(1, OK)] and pair.b.read(0, 1) == b"\x0a"
    pair.b.take(uc(pair, Op.UC_SEND_FIRST, 11), uc(pair, Op.UC_SEND_ONLY, 12, 8))
    assert pair.b.completions() == [(2, OK)] and pair.b.read(0, 8) == b"\x0d" * 8


@rule("R-UC-1")
def test_uc_with_srq_completes_an_abandoned_message_in_error() -> None:
    srq = SharedReceiveQueue(4, 4)
    pair = Pair(QpType.UC, srq=srq)
    for wr_id in (1, 2):
        srq.post(RecvWr(wr_id, (pair.b.sge(0, 1024),)))
    pair.b.take(uc(pair, Op.UC_SEND_FIRST, 0), uc(pair, Op.UC_SEND_ONLY, 5, 4))
    assert pair.b.completions() == [(1, WcStatus.LOC_QP_OP_ERR), (2, OK)]


@rule("R-UC-3")
@pytest.mark.parametrize("trouble", ["rkey", "length", "no receive", "rights"])
def test_uc_trouble_drops_the_message_only(trouble: str) -> None:
    pair = Pair(QpType.UC, b_attrs={"access": Access.NONE} if trouble == "rights" else {})
    fields = pair.write_fields(260)
    if trouble == "no receive":
        frames = [uc(pair, Op.UC_SEND_FIRST, 0), uc(pair, Op.UC_SEND_LAST, 1, 4)]
    elif trouble == "rkey":
        frames = [uc(pair, Op.UC_WRITE_FIRST, 0, **(fields | {"rkey": 1})), uc(pair, Op.UC_WRITE_LAST, 1, 4)]
    elif trouble == "length":
        frames = [uc(pair, Op.UC_WRITE_FIRST, 0, **(fields | {"dma_length": 9})), uc(pair, Op.UC_WRITE_LAST, 1, 4)]
    else:
        frames = [uc(pair, Op.UC_WRITE_FIRST, 0, **fields), uc(pair, Op.UC_WRITE_LAST, 1, 4)]
    assert pair.b.take(*frames) == []
    assert pair.b.qp.state is QpState.RTS and pair.b.read(0, 260) == bytes(260)
    pair.b.recv(3)
    pair.b.take(uc(pair, Op.UC_SEND_ONLY, 2, 4))
    assert pair.b.completions() == [(3, OK)]


@rule("R-ERR-6", "R-ERR-7")
@pytest.mark.parametrize("kind", [QpType.UC, QpType.UD])
def test_local_error_stops_the_send_queue_only(kind: QpType) -> None:
    pair = Pair(kind)
    ah = pair.a.qp.attrs.av or AddressVector(pair.b.device.mac, pair.b.device.ips[0], pair.a.device.ips[0])
    pair.a.post(WrOp.SEND, 1, 0, 4, ah=ah, remote_qpn=5)
    pair.a.post(WrOp.SEND, 2, sges=(Sge(0, 4, 0xBAD),), ah=ah, remote_qpn=5, signaled=False)
    pair.a.post(WrOp.SEND, 3, 0, 4, ah=ah, remote_qpn=5)
    pair.a.recv(4)
    assert len(pair.a.sent()) == 1
    assert pair.a.completions() == [(1, OK), (2, WcStatus.LOC_PROT_ERR), (3, FLUSH)]
    assert pair.a.qp.state is QpState.SQE and len(pair.a.qp.rq) == 1
    pair.a.qp.modify(QpState.RTS)
    pair.a.post(WrOp.SEND, 5, 0, 4, ah=ah, remote_qpn=5)
    assert len(pair.a.sent()) == 1 and pair.a.completions() == [(5, OK)]


# ---- UD --------------------------------------------------------------------------------------------------------


def ud_pair(**attrs) -> tuple[Pair, AddressVector]:
    pair = Pair(QpType.UD, **attrs)
    return pair, AddressVector(pair.b.device.mac, pair.b.device.ips[0], pair.a.device.ips[0], traffic_class=0x10)


def ud_send(pair: Pair, ah: AddressVector, wr_id: int = 1, length: int = 6, **fields) -> list[Frame]:
    given = {"op": WrOp.SEND, "remote_qpn": pair.b.qp.qpn, "remote_qkey": 0x11111111} | fields
    pair.a.post(given.pop("op"), wr_id, 0, length, ah=ah, **given)
    return pair.a.sent()


@rule("R-UD-2", "R-UD-4", "R-UD-5", "R-CQ-3", "R-CQ-4")
def test_ud_message() -> None:
    pair, ah = ud_pair()
    pair.a.write(0, b"abcdef")
    pair.b.recv(7, length=64)
    (frame,) = ud_send(pair, ah, op=WrOp.SEND_IMM, imm=0x01020304)
    assert pair.a.completions() == [(1, OK)]
    assert (frame.opcode, frame.src_qp, frame.qkey) == (Op.UD_SEND_ONLY_IMM, pair.a.qp.qpn, 0x11111111)
    pair.b.take(frame)
    (wc,) = pair.b.wcs()
    assert (wc.wr_id, wc.byte_len, wc.src_qpn, wc.imm) == (7, 46, pair.a.qp.qpn, 0x01020304)
    assert wc.flags == WcFlag.GRH | WcFlag.WITH_IMM
    assert pair.b.read(0, 46) == bytes(20) + frame.pack()[14:34] + b"abcdef"


@rule("R-UD-2")
def test_ud_over_ipv6_has_the_ipv6_header_in_front() -> None:
    pair, _ = ud_pair()
    a6, b6 = b"\x20\1\x0d\xb8" + bytes(11) + b"\1", b"\x20\1\x0d\xb8" + bytes(11) + b"\2"
    pair.b.device.ips.append(b6)
    pair.b.recv(7, length=64)
    (frame,) = ud_send(pair, AddressVector(pair.b.device.mac, b6, a6, hop_limit=3), length=2)
    pair.b.take(frame)
    assert pair.b.read(0, 40) == frame.pack()[14:54]
    assert [wc.byte_len for wc in pair.b.wcs()] == [42]


@rule("R-UD-2", "R-UD-3")
def test_ud_without_room_drops_and_stays_up() -> None:
    pair, ah = ud_pair()
    assert pair.b.take(*ud_send(pair, ah)) == []
    pair.b.recv(7, length=40 + 63)
    pair.b.take(*ud_send(pair, ah, length=64))
    assert pair.b.completions() == [] and pair.b.qp.state is QpState.RTS
    pair.b.take(*ud_send(pair, ah, length=60))
    assert pair.b.completions() == [(7, OK)]


@rule("R-QKEY-1", "R-QKEY-2")
def test_ud_qkeys() -> None:
    pair, ah = ud_pair(a_attrs={"qkey": 0x80000005}, b_attrs={"qkey": 0x80000005})
    pair.b.recv(7)
    (wrong,) = ud_send(pair, ah)
    pair.b.take(wrong)
    assert pair.b.device.drops["qkey"] == 1
    (right,) = ud_send(pair, ah, remote_qkey=0xFFFFFFFF)
    assert right.qkey == 0x80000005
    pair.b.take(right)
    assert pair.b.completions() == [(7, OK)]


@rule("R-UD-1")
def test_ud_longer_than_the_port_mtu() -> None:
    pair, ah = ud_pair()
    assert ud_send(pair, ah, length=4097) == []
    assert pair.a.completions() == [(1, WcStatus.LOC_LEN_ERR)]
    pair, ah = ud_pair()
    assert len(ud_send(pair, ah, length=4096)) == 1


@rule("R-UD-3")
def test_ud_ackreq_is_ignored() -> None:
    pair, ah = ud_pair(policy_a=PeerPolicy(ackreq_unacked=True))
    pair.b.recv(7)
    (frame,) = ud_send(pair, ah)
    assert frame.ackreq and pair.b.take(frame) == []
    assert pair.b.completions() == [(7, OK)]


# ---- memory, completion queue ----------------------------------------------------------------------------------


@rule("R-MR-3")
@pytest.mark.parametrize("right", [Access.REMOTE_WRITE, Access.REMOTE_ATOMIC])
def test_remote_write_needs_local_write(right: Access) -> None:
    with pytest.raises(ValueError, match="local write"):
        KeyTable().register(0x100, PD, right, 0, 16)


@rule("R-MR-2")
@pytest.mark.parametrize(
    "va,length,inside",
    [
        (0x1000, 0x1000, True), (0x1FFF, 1, True), (0x2000, 0, True), (0xFFF, 1, False), (0x1FFF, 2, False),
        (0x1000, 0x1001, False), (0xFFFFFFFFFFFFF000, 0x2000, False), (0x2001, 0, False),
    ],
)  # fmt: skip
def test_range_check(va: int, length: int, inside: bool) -> None:
    region = KeyTable().register(0x100, PD, Access.NONE, 0x1000, 0x1000)
    assert region.covers(va, length) == inside


@rule("R-MR-1")
def test_windows_and_keys() -> None:
    keys = KeyTable()
    region = keys.register(0x100, PD, ALL_ACCESS, 0, 4096)
    plain = keys.register(0x200, PD, Access.LOCAL_WRITE, 0x10000, 16)
    with pytest.raises(ValueError, match="in use"):
        keys.register(0x1FF, PD, ALL_ACCESS, 0, 4096)
    for target, base, length in ((plain, 0x10000, 16), (region, 0, 0), (region, 4090, 10)):
        with pytest.raises(ProtectionError):
            keys.bind_window(0x900, target, 5, Access.REMOTE_READ, base, length)
    keys.bind_window(0x901, region, 5, Access.REMOTE_READ, 0, 64)
    with pytest.raises(ProtectionError, match="window-bound"):
        keys.deregister(0x100)
    with pytest.raises(ProtectionError, match="window-in-use"):
        keys.bind_window(0x902, region, 5, Access.REMOTE_READ, 0, 64)
    keys.invalidate_window(0x901)
    keys.bind_window(0x902, region, 5, Access.REMOTE_READ, 0, 64)
    with pytest.raises(ProtectionError, match="key"):
        keys.remote(0x901, PD, 5, 0, 4, Access.REMOTE_READ)
    assert keys.remote(0x902, PD, 5, 0, 4, Access.REMOTE_READ) is region
    with pytest.raises(ProtectionError, match="window"):
        keys.local(0x902, PD, 0, 4, Access.NONE)
    keys.invalidate_window(0x902)
    keys.deregister(0x100)
    with pytest.raises(ProtectionError):
        keys.remote(0x100, PD, 5, 0, 4, Access.REMOTE_READ)


@rule("R-CQ-5", "R-CQ-6")
def test_completion_queue_arms_once_and_never_overwrites() -> None:
    cq = CompletionQueue(2)
    cq.arm()
    assert cq.push(WorkCompletion(1, OK, WcOp.SEND, 5)) and cq.push(WorkCompletion(2, OK, WcOp.SEND, 5))
    assert cq.notifications == 1
    assert not cq.push(WorkCompletion(3, OK, WcOp.SEND, 5))
    assert cq.failed and cq.events == [Event.CQ_ERR]
    assert [wc.wr_id for wc in cq.poll()] == [1, 2]
    assert not cq.push(WorkCompletion(4, OK, WcOp.SEND, 5)) and cq.events == [Event.CQ_ERR]


@rule("R-SRQ-2", "R-SRQ-4")
def test_srq_limit_at_once_and_resize() -> None:
    srq = SharedReceiveQueue(4, 2)
    srq.post(RecvWr(1))
    srq.arm_limit(2)
    assert srq.events == [Event.SRQ_LIMIT_REACHED]
    for wr_id in (2, 3, 4):
        srq.post(RecvWr(wr_id))
    with pytest.raises(QueueFull):
        srq.post(RecvWr(5))
    with pytest.raises(ValueError, match="more receives"):
        srq.resize(3)
    srq.resize(5)
    srq.post(RecvWr(5))


def test_time_cannot_go_back() -> None:
    pair = Pair()
    pair.a.device.advance(100)
    with pytest.raises(ValueError, match="time"):
        pair.a.device.receive(b"", 99)


def test_frames_are_deterministic() -> None:
    def frames() -> list[bytes]:
        pair = Pair()
        pair.a.post(WrOp.SEND, 1, 0, 600)
        return pair.a.device.poll_tx()

    assert frames() == frames()
    assert [parse_frame(raw).ident for raw in frames()] == [1, 2, 3]
