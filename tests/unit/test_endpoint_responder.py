"""The software endpoint as RC responder: one test per R-SEQ, R-DUP, R-ACK, R-RES rule."""

from __future__ import annotations

import pytest

from rnic.wire.opcode import Opcode as Op
from rnic_tb.endpoint import (
    ALL_ACCESS,
    AddressVector,
    Event,
    PeerPolicy,
    QpState,
    RecvWr,
    SharedReceiveQueue,
    WcOp,
    WcStatus,
)
from rnic_tb.endpoint.pair import ACK, Pair, rnr
from tests.rules import rule
from tests.unit.endpoint_requests import DATA, INVALID, acks, answers, fadd, read, send, write

# ---- order, messages, atomics ----------------------------------------------------------------------------------


@rule("R-MSN-1", "R-PSN-3", "R-PSN-4", "R-CRD-1")
def test_msn_counts_messages_and_psns_count_packets() -> None:
    pair = Pair(psn_a=0xFFFFFE)
    pair.b.recv(1)
    frames = pair.b.take(
        pair.frame(Op.RC_WRITE_FIRST, 0, payload=DATA, **pair.write_fields(257)),
        pair.frame(Op.RC_WRITE_LAST, 1, payload=b"!", ackreq=True),
        read(pair, 2, 513),
        fadd(pair, 5, 1),
        send(pair, 6),
    )
    assert answers(frames, pair) == [
        (Op.RC_ACK, 1, ACK, 1),
        (Op.RC_READ_RESP_FIRST, 2, ACK, 2),
        (Op.RC_READ_RESP_MIDDLE, 3, 0, 0),
        (Op.RC_READ_RESP_LAST, 4, ACK, 2),
        (Op.RC_ATOMIC_ACK, 5, ACK, 3),
        (Op.RC_ACK, 6, ACK, 4),
    ]
    assert [len(f.payload) for f in frames[1:4]] == [256, 256, 1]


@rule("R-AT-2", "R-AT-3", "R-OPC-3")
def test_atomics() -> None:
    pair = Pair()
    value = 0x0102030405060708
    pair.b.write(8, value.to_bytes(8, "little"))
    swap = {"op": Op.RC_CMP_SWAP, "offset": 8}
    frames = pair.b.take(
        fadd(pair, 0, 0xFF, offset=8),
        fadd(pair, 1, (1 << 64) - 1, offset=8),
        fadd(pair, 2, 77, compare=value + 0xFE ^ 1 << 63, **swap),
        fadd(pair, 3, 77, compare=value + 0xFE, **swap),
    )
    assert [f.original for f in frames] == [value, value + 0xFF, value + 0xFE, value + 0xFE]
    assert int.from_bytes(pair.b.read(8, 8), "little") == 77


@rule("R-WQ-8", "R-CQ-3", "R-PAD-3")
def test_send_fills_part_of_a_receive_and_no_pad_byte() -> None:
    pair = Pair()
    pair.b.write(0, b"\xee" * 64)
    pair.b.recv(1)
    pair.b.recv(2, 32)
    pair.b.take(send(pair, 0, b"abcde"), send(pair, 1, b""))
    assert [(wc.wr_id, wc.byte_len, wc.opcode) for wc in pair.b.wcs()] == [(1, 5, WcOp.RECV), (2, 0, WcOp.RECV)]
    assert pair.b.read(0, 64) == b"abcde" + b"\xee" * 59


@rule("R-OPC-2", "R-RES-5", "R-RES-4")
def test_write_imm_takes_its_receive_at_the_last_packet() -> None:
    pair = Pair()
    first = pair.frame(Op.RC_WRITE_FIRST, 0, payload=DATA, **pair.write_fields(260))
    last = pair.frame(Op.RC_WRITE_LAST_IMM, 1, payload=b"tail", imm=0x01020304, ackreq=True)
    assert acks(pair.b.take(first, last), pair) == [(1, rnr(1), 0)]
    pair.b.recv(8, length=0)
    assert acks(pair.b.take(last), pair) == [(1, ACK, 1)]
    (wc,) = pair.b.wcs()
    assert (wc.wr_id, wc.byte_len, wc.imm) == (8, 260, 0x01020304)
    assert pair.b.read(0, 260) == DATA + b"tail"


@rule("R-RES-7", "R-ACK-2")
@pytest.mark.parametrize("coalesce", [False, True])
def test_answers_leave_in_psn_order(coalesce: bool) -> None:
    pair = Pair(policy_b=PeerPolicy(coalesce_acks=coalesce))
    frames = pair.b.take(write(pair, 0), write(pair, 1), read(pair, 2, 300), write(pair, 4), write(pair, 5))
    psns = [row[:2] for row in answers(frames, pair)]
    reads = [(Op.RC_READ_RESP_FIRST, 2), (Op.RC_READ_RESP_LAST, 3)]
    both = [(Op.RC_ACK, 0), (Op.RC_ACK, 1), *reads, (Op.RC_ACK, 4), (Op.RC_ACK, 5)]
    assert psns == ([(Op.RC_ACK, 1), *reads, (Op.RC_ACK, 5)] if coalesce else both)


@rule("R-ACK-1")
def test_ack_only_when_asked() -> None:
    pair = Pair()
    assert pair.b.take(write(pair, 0, ackreq=False), write(pair, 1, ackreq=False)) == []
    assert acks(pair.b.take(write(pair, 2)), pair) == [(2, ACK, 3)]


@rule("R-ACK-3", "R-CQ-6")
def test_no_ack_when_the_completion_is_lost() -> None:
    pair = Pair(cq_depth=1)
    for wr_id in (1, 2, 3):
        pair.b.recv(wr_id)
    assert acks(pair.b.take(send(pair, 0), send(pair, 1)), pair) == []
    assert pair.b.qp.state is QpState.ERR and pair.b.cq.events == [Event.CQ_ERR]
    assert pair.b.completions() == [(1, WcStatus.SUCCESS)]


# ---- sequence and duplicates -----------------------------------------------------------------------------------


@rule("R-SEQ-2")
def test_silent_behind_an_rnr_nak() -> None:
    pair = Pair()
    assert acks(pair.b.take(send(pair, 0), send(pair, 1), send(pair, 2)), pair) == [(0, rnr(1), 0)]


@rule("R-SEQ-3")
def test_duplicate_keeps_the_nak_state() -> None:
    pair = Pair()
    pair.b.take(write(pair, 0), write(pair, 2))
    assert acks(pair.b.take(write(pair, 0), write(pair, 3)), pair) == [(0, ACK, 1)]


@rule("R-DUP-1", "R-MSN-1")
def test_duplicate_send_is_acked_and_not_executed() -> None:
    pair = Pair()
    pair.b.recv(1)
    pair.b.recv(2, 64)
    pair.b.take(send(pair, 0, b"first"), write(pair, 1, b"data", 1024))
    pair.b.write(0, bytes(16))
    assert acks(pair.b.take(send(pair, 0, b"again"), write(pair, 1, b"DATA", 1024)), pair) == [(1, ACK, 2)] * 2
    assert pair.b.completions() == [(1, WcStatus.SUCCESS)] and len(pair.b.qp.rq) == 1
    assert pair.b.read(0, 16) == bytes(16) and pair.b.read(1024, 4) == b"data"


@rule("R-DUP-2")
def test_repeated_ack_does_not_pass_an_unsent_read() -> None:
    pair = Pair()
    pair.b.take(write(pair, 0))
    pair.b.device.receive(read(pair, 1, 300).pack())
    psns = [row[:2] for row in answers(pair.b.take(write(pair, 0)), pair)]
    assert psns == [(Op.RC_READ_RESP_FIRST, 1), (Op.RC_READ_RESP_LAST, 2), (Op.RC_ACK, 0)]


@rule("R-DUP-3", "R-DUP-4")
def test_duplicate_reads_of_any_part() -> None:
    pair = Pair()
    pair.b.write(0, bytes(i % 251 for i in range(1000)))
    pair.b.take(read(pair, 0, 1000))
    pair.b.write(512, b"fresh")  # read again, not replayed from a store
    tail = pair.b.take(read(pair, 2, 488, 512))
    assert [(f.opcode, f.psn - pair.psn_a) for f in tail] == [(Op.RC_READ_RESP_FIRST, 2), (Op.RC_READ_RESP_LAST, 3)]
    assert b"".join(f.payload for f in tail) == pair.b.read(512, 488)
    whole = pair.b.take(read(pair, 0, 1000))
    assert b"".join(f.payload for f in whole) == pair.b.read(0, 1000)
    assert pair.b.qp.responder.msn == 1


@rule("R-DUP-3", "R-DUP-7")
@pytest.mark.parametrize("change", [{"rkey": 0x2B01}, {"offset": 1}, {"length": 1001}, {"psn": 1}])
def test_duplicate_read_of_something_else_is_dropped(change: dict) -> None:
    pair = Pair()
    pair.b.take(read(pair, 0, 1000))
    what = {"psn": 0, "length": 1000} | change
    assert pair.b.take(read(pair, what.pop("psn"), what.pop("length"), **what)) == []
    assert pair.b.qp.state is QpState.RTS


@rule("R-DUP-3", "R-PSN-4")
def test_duplicate_read_replaces_a_running_stream() -> None:
    pair = Pair()
    pair.b.write(0, bytes(i % 251 for i in range(1200)))
    pair.b.device.receive(read(pair, 0, 1200).pack())
    first = pair.b.sent(4)
    pair.b.device.receive(fadd(pair, 5, 1, 2048).pack())
    rest = pair.b.take(read(pair, 2, 688, 512))
    assert [f.psn - pair.psn_a for f in first + rest] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert rest[0].payload == pair.b.read(512, 256) and rest[-1].opcode is Op.RC_ATOMIC_ACK


@rule("R-DUP-3")
def test_duplicates_do_not_count_against_the_read_depth() -> None:
    pair = Pair(b_attrs={"max_dest_rd_atomic": 1})
    pair.b.take(read(pair, 0, 600))
    for _ in range(3):
        pair.b.device.receive(read(pair, 0, 600).pack())
    frames = pair.b.take(read(pair, 3, 4))
    assert [f.psn - pair.psn_a for f in frames] == [0, 1, 2, 3]


@rule("8.1#4", "R-DUP-3")
def test_a_read_asked_again_before_its_answer_still_counts_once() -> None:
    pair = Pair(b_attrs={"max_dest_rd_atomic": 1})
    for _ in range(2):
        pair.b.device.receive(read(pair, 0, 4).pack())
    frames = pair.b.take(read(pair, 1, 4))
    assert [(f.opcode, f.syndrome) for f in frames] == [(Op.RC_READ_RESP_ONLY, ACK), (Op.RC_ACK, INVALID)]


@rule("R-DUP-5", "R-AT-4")
def test_duplicate_atomic_returns_the_saved_value() -> None:
    pair = Pair()
    pair.b.take(fadd(pair, 0, 5), fadd(pair, 1, 7))
    frames = pair.b.take(fadd(pair, 0, 5), fadd(pair, 1, 7))
    assert [(f.opcode, f.original, f.msn) for f in frames] == [(Op.RC_ATOMIC_ACK, 0, 2), (Op.RC_ATOMIC_ACK, 5, 2)]
    assert pair.b.read(0, 8) == (12).to_bytes(8, "little")


@rule("R-DUP-5")
def test_duplicate_of_another_kind_is_dropped() -> None:
    pair = Pair()
    pair.b.take(read(pair, 0, 8), fadd(pair, 1, 1))
    assert pair.b.take(fadd(pair, 0, 9, op=Op.RC_CMP_SWAP), fadd(pair, 1, 9, op=Op.RC_CMP_SWAP), read(pair, 1, 8)) == []
    assert pair.b.read(0, 8) == (1).to_bytes(8, "little")


@rule("R-DUP-6")
def test_replay_store_keeps_the_newest() -> None:
    pair = Pair(b_attrs={"max_dest_rd_atomic": 2})
    for psn in range(3):
        pair.b.take(fadd(pair, psn, 1))
    assert pair.b.take(fadd(pair, 0, 1)) == []
    assert [f.original for f in pair.b.take(fadd(pair, 1, 1), fadd(pair, 2, 1))] == [1, 2]


@rule("R-DUP-7")
def test_no_nak_for_a_duplicate_whose_region_is_gone() -> None:
    pair = Pair()
    pair.b.take(read(pair, 0, 300))
    pair.b.device.keys.deregister(pair.b.key)
    assert pair.b.take(read(pair, 0, 300)) == []
    assert pair.b.qp.state is QpState.RTS


@rule("R-DUP-8")
def test_duplicate_inside_a_message_does_not_disturb_it() -> None:
    pair = Pair()
    pair.b.recv(1)
    pair.b.take(write(pair, 0), send(pair, 1, DATA, Op.RC_SEND_FIRST, ackreq=False))
    assert acks(pair.b.take(write(pair, 0)), pair) == [(1, ACK, 1)]
    assert acks(pair.b.take(send(pair, 2, b"end", Op.RC_SEND_LAST)), pair) == [(2, ACK, 2)]
    assert [wc.byte_len for wc in pair.b.wcs()] == [259]


# ---- shared receive queue, states ------------------------------------------------------------------------------


@rule("R-SRQ-1", "R-SRQ-2", "R-SRQ-3")
def test_shared_receive_queue() -> None:
    srq = SharedReceiveQueue(16, 4)
    pair = Pair(srq=srq)
    assert acks(pair.b.take(send(pair, 0)), pair) == [(0, rnr(1), 0)]
    for wr_id in range(10):
        srq.post(RecvWr(wr_id, (pair.b.sge(64 * wr_id, 64),)))
    srq.arm_limit(7)
    for psn in range(3):
        pair.b.take(send(pair, psn))
    assert srq.events == []
    pair.b.take(send(pair, 3))
    assert srq.events == [Event.SRQ_LIMIT_REACHED] and srq.limit == 0
    assert [wr_id for wr_id, _ in pair.b.completions()] == [0, 1, 2, 3]
    pair.b.qp.modify(QpState.ERR)
    assert len(srq) == 6 and pair.b.qp.events == [Event.QP_LAST_WQE_REACHED]


@rule("R-QP-2", "R-QP-5", "R-ERR-8")
def test_request_in_every_state() -> None:
    for state in (QpState.RESET, QpState.ERR):
        pair = Pair()
        pair.b.qp.modify(state)
        assert pair.b.take(write(pair, 0)) == []
        assert pair.b.device.drops["qp_state"] == 1
    pair = Pair()
    pair.b.qp.modify(QpState.RESET)
    pair.b.qp.modify(QpState.INIT, pkey=0xFFFF, access=ALL_ACCESS)
    assert pair.b.take(write(pair, 0)) == []
    pair.b.qp.modify(
        QpState.RTR, av=AddressVector(pair.a.device.mac, pair.a.device.ips[0], pair.b.device.ips[0]), path_mtu=256,
        dest_qpn=0x11, rq_psn=0x100, max_dest_rd_atomic=1, min_rnr_timer=1,
    )  # fmt: skip
    assert acks(pair.b.take(write(pair, 0), write(pair, 1)), pair) == [(0, ACK, 1), (1, ACK, 2)]
    assert pair.b.qp.events == [Event.COMM_EST]


@rule("R-CQ-5")
def test_solicited_arm() -> None:
    pair = Pair()
    for wr_id in range(4):
        pair.b.recv(wr_id)
    pair.b.cq.arm(solicited_only=True)
    pair.b.take(send(pair, 0))
    assert pair.b.cq.notifications == 0
    pair.b.take(send(pair, 1, se=True), send(pair, 2, se=True))
    assert pair.b.cq.notifications == 1
    pair.b.cq.arm(solicited_only=True)
    pair.b.qp.modify(QpState.ERR)
    assert pair.b.cq.notifications == 2
