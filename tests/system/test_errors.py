"""Every row of rules.md 8.1 (the responder's checks), and of the requester's errors (7.4 and 10), as one table.

A real requester posts; a man in the middle turns its frame into the faulty one. Judged: the NAK on the wire and its PSN, the
completions of both ends, the QP state of both ends, the asynchronous event, and the responder's memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from tests.rules import rule
from tests.system.middle import MiddleLab
from tests.system.test_slice import ALL, Region

from rnic.wire.frame import Frame
from rnic.wire.opcode import Opcode
from rnic_sim.enums import AccessFlags, EventType, QPAttrMask, QPState, SendFlags, WCStatus, WROpcode
from rnic_sim.qp import QP, QPAttr, QPCap, QPInitAttr
from rnic_sim.verbs import CQ, MR, PD, SGE, RecvWR, SendWR

MTU = 256
PSN = 0xFFFFFE  # of the first request: the packets of a case wrap
SIZE = 1200
S = SendFlags.SIGNALED
W = WCStatus
Op = Opcode
NONE, REQ, ACC = None, EventType.QP_REQ_ERR, EventType.QP_ACCESS_ERR
INVALID, ACCESS, OPERATIONAL, RNR = 0x61, 0x62, 0x63, 0x20 | 12


class Bench:
    """The lab all cases share; a case has a fresh pair of QPs."""

    def __init__(self):
        self.lab = MiddleLab("tiny", seed=31)
        self.cqs = [CQ(context, 32) for context in self.lab.contexts]
        self.pds = [PD(context) for context in self.lab.contexts]
        self.data = bytes(i * 7 + 1 & 0xFF for i in range(SIZE))
        self.source, self.inbox = Region(self.pds[0], SIZE, fill=0x11), Region(self.pds[1], SIZE, fill=0x77)
        self.targets: dict[int, Region] = {}  # by rights
        self.other = MR(PD(self.lab.contexts[1]), SIZE, ALL)  # another PD

    def begin(self, *, receives: int, access: int = 15, memory: int = ALL, recv_sge: Callable | None = None,
              recv_bytes: int = 600, **attributes) -> None:  # fmt: skip
        lab = self.lab
        lab.forget()
        self.qps = [QP(pd, QPInitAttr(cq, cq, cap=QPCap(8, 8))) for pd, cq in zip(self.pds, self.cqs, strict=True)]
        settings = dict(retry_cnt=0, rnr_retry=0, min_rnr_timer=12, access=access) | attributes
        lab.connect(*self.qps, mtu=MTU, psns=(PSN, 0x222000), **settings)
        self.a, self.b = self.qps
        if memory not in self.targets:
            self.targets[memory] = Region(self.pds[1], SIZE, access=memory)
        self.target = self.targets[memory]
        for region in (self.source, self.target, self.inbox):
            region.clear()
        self.source.put(self.data)
        sge = recv_sge(self) if recv_sge else self.inbox.sge(recv_bytes)
        for i in range(receives):
            self.b.post_recv(RecvWR(100 + i, [sge]))

    def end(self) -> None:
        for qp in self.qps:
            qp.close()

    def states(self) -> tuple[QPState, QPState]:
        for qp in self.qps:
            qp.query()
        return self.a.qp_state, self.b.qp_state

    def events(self) -> list:
        context = self.lab.contexts[1]
        context.events.service()
        found = [(e.event_type, e.number) for e in context.events.asynchronous]
        context.events.asynchronous.clear()
        return found

    # ---- work requests
    def send(self, length, wr_id=1, opcode=WROpcode.SEND):
        return SendWR(wr_id, opcode, [self.source.sge(length)] if length else [], S)

    def write(self, length, wr_id=1, *, rkey=None, addr=None, opcode=WROpcode.RDMA_WRITE, at=0):
        wr = SendWR(wr_id, opcode, [self.source.sge(length)] if length else [], S)
        wr.set_wr_rdma(self.target.mr.rkey if rkey is None else rkey, self.target.addr + at if addr is None else addr)
        return wr

    def read(self, length, wr_id=1, *, rkey=None, addr=None, at=0):
        wr = SendWR(wr_id, WROpcode.RDMA_READ, [self.source.sge(length)] if length else [], S)
        wr.set_wr_rdma(self.target.mr.rkey if rkey is None else rkey, self.target.addr + at if addr is None else addr)
        return wr

    def atomic(self, opcode=WROpcode.ATOMIC_FETCH_AND_ADD, wr_id=1, *, rkey=None, addr=None, shift=0):
        wr = SendWR(wr_id, opcode, [self.source.sge(8)], S)
        word = self.target.addr + -self.target.addr % 8
        wr.set_wr_atomic(self.target.mr.rkey if rkey is None else rkey, word + shift if addr is None else addr, 5, 6)
        return wr


@pytest.fixture(scope="module")
def shared():
    made = Bench()
    yield made
    made.lab.close()


@pytest.fixture
def bench(shared):
    yield shared
    shared.end()


@dataclass
class Case:
    """One faulty request. ``post(bench)`` gives the work requests; ``change`` maps the number of a request frame to changed
    fields, a function of the frame, or None (dropped).

    Expected: ``syndrome`` of the only NAK (None: none) with the PSN of request packet ``at``; ``status`` per WR at the requester
    (the rest are flushed); ``receives`` posted receive WQEs and ``recv``, the status of those that do not end flushed or stay;
    ``event`` at the responder; ``dies``: the responder's QP goes to ERR; ``written``: bytes of the data that are in the target.
    """

    row: int
    name: str
    rule: str
    post: Callable
    change: dict = field(default_factory=dict)
    syndrome: int | None = INVALID
    at: int = 0
    status: tuple = (W.REM_INV_REQ_ERR,)
    receives: int = 0
    recv: tuple = ()
    event: EventType | None = REQ
    dies: bool = True
    written: int = 0
    placed: int = 0  # bytes in the receive buffer
    begin: dict = field(default_factory=dict)


def shorter(n):
    return lambda f: replace(f, payload=f.payload[:n])


def longer(n):
    return lambda f: replace(f, payload=f.payload.ljust(n, b"\x99"))


LQP = (W.LOC_QP_OP_ERR,)
OK1 = (W.SUCCESS, W.REM_INV_REQ_ERR)

ROWS = [
    # ---- 2: order of opcodes
    *(Case(2, f"{op.name} begins a message", "R-LEN-1", lambda b: [b.send(20)], {0: dict(opcode=op)}, receives=2)
      for op in (Op.RC_SEND_MIDDLE, Op.RC_SEND_LAST, Op.RC_SEND_LAST_IMM, Op.RC_SEND_LAST_INV)),
    *(Case(2, f"{op.name} begins a message", "R-LEN-1", lambda b: [b.write(20)], {0: dict(opcode=op)})
      for op in (Op.RC_WRITE_MIDDLE, Op.RC_WRITE_LAST, Op.RC_WRITE_LAST_IMM)),
    *(Case(2, f"{op.name} inside a SEND", "8.2", lambda b: [b.send(600)], {1: dict(opcode=op, payload=b"", dma_length=8)}, at=1,
           receives=2, recv=LQP, event=NONE, placed=256)
      for op in (Op.RC_SEND_ONLY, Op.RC_SEND_ONLY_IMM, Op.RC_WRITE_ONLY, Op.RC_READ_REQUEST, Op.RC_CMP_SWAP, Op.RC_FETCH_ADD,
                 Op.RC_SEND_ONLY_INV, Op.RC_WRITE_ONLY_IMM)),
    *(Case(2, f"{op.name} inside a SEND", "8.2", lambda b: [b.send(600)], {1: dict(opcode=op)}, at=1,
           receives=2, recv=LQP, event=NONE, placed=256)
      for op in (Op.RC_SEND_FIRST, Op.RC_WRITE_FIRST, Op.RC_WRITE_MIDDLE)),
    *(Case(2, f"{op.name} inside a SEND", "8.2", lambda b: [b.send(600)], {2: dict(opcode=op)}, at=2,
           receives=2, recv=LQP, event=NONE, placed=512) for op in (Op.RC_WRITE_LAST, Op.RC_WRITE_LAST_IMM)),
    *(Case(2, f"{op.name} inside a WRITE", "8.2", lambda b: [b.write(600)], {1: dict(opcode=op)}, at=1, written=256, receives=1)
      for op in (Op.RC_WRITE_FIRST, Op.RC_SEND_FIRST, Op.RC_SEND_MIDDLE)),
    *(Case(2, f"{op.name} inside a WRITE", "8.2", lambda b: [b.write(600)], {1: dict(opcode=op, payload=b"")}, at=1, written=256)
      for op in (Op.RC_WRITE_ONLY, Op.RC_SEND_ONLY, Op.RC_READ_REQUEST, Op.RC_FETCH_ADD)),
    *(Case(2, f"{op.name} inside a WRITE", "8.2", lambda b: [b.write(600)], {2: dict(opcode=op)}, at=2, written=512)
      for op in (Op.RC_SEND_LAST, Op.RC_SEND_LAST_IMM, Op.RC_SEND_LAST_INV)),
    # ---- 3: rights of the QP
    Case(3, "WRITE", "8.1", lambda b: [b.write(600)], begin=dict(access=AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC)),
    Case(3, "WRITE of nothing", "R-RES-2", lambda b: [b.write(0)], begin=dict(access=AccessFlags.REMOTE_READ)),
    Case(3, "WRITE with immediate", "8.1", lambda b: [b.write(9, opcode=WROpcode.RDMA_WRITE_WITH_IMM)], receives=1,
         begin=dict(access=AccessFlags.REMOTE_READ)),
    Case(3, "READ", "8.1", lambda b: [b.read(600)], begin=dict(access=AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC)),
    Case(3, "READ of nothing", "R-RES-2", lambda b: [b.read(0)], begin=dict(access=AccessFlags.REMOTE_WRITE)),
    *(Case(3, op.name, "R-AT-1", lambda b, op=op: [b.atomic(op)],
           begin=dict(access=AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ))
      for op in (WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD)),
    Case(3, "before the R_Key", "8.1", lambda b: [b.write(8, rkey=0xBAD00)], begin=dict(access=0)),
    # ---- 4: READs and ATOMICs open
    Case(4, "READ, none allowed", "R-REQ-4", lambda b: [b.read(8)], begin=dict(max_dest_rd_atomic=0)),
    Case(4, "ATOMIC, none allowed", "R-REQ-4", lambda b: [b.atomic()], begin=dict(max_dest_rd_atomic=0)),
    # ---- 5: no receive WQE
    *(Case(5, f"{op.name} of {n}", "R-RNR-4", lambda b, op=op, n=n: [b.send(n, opcode=op)], syndrome=RNR,
           status=(W.RNR_RETRY_EXC_ERR,), event=NONE, dies=False)
      for op in (WROpcode.SEND, WROpcode.SEND_WITH_IMM) for n in (0, 20, 600)),
    Case(5, "WRITE_ONLY_IMM", "R-OPC-2", lambda b: [b.write(20, opcode=WROpcode.RDMA_WRITE_WITH_IMM)], syndrome=RNR,
         status=(W.RNR_RETRY_EXC_ERR,), event=NONE, dies=False),
    Case(5, "WRITE_LAST_IMM", "R-RES-4", lambda b: [b.write(600, opcode=WROpcode.RDMA_WRITE_WITH_IMM)], syndrome=RNR, at=2,
         status=(W.RNR_RETRY_EXC_ERR,), event=NONE, dies=False, written=512),
    Case(5, "before the length", "R-RES-6", lambda b: [b.send(20)], {0: longer(300)}, syndrome=RNR,
         status=(W.RNR_RETRY_EXC_ERR,), event=NONE, dies=False),
    # ---- 6: lengths
    Case(6, "SEND_FIRST short", "R-LEN-1", lambda b: [b.send(600)], {0: shorter(252)}, receives=2, recv=LQP, event=NONE),
    Case(6, "SEND_FIRST long", "R-LEN-1", lambda b: [b.send(600)], {0: longer(260)}, receives=2, recv=LQP, event=NONE),
    Case(6, "SEND_FIRST with pad", "R-PAD-2", lambda b: [b.send(600)], {0: shorter(255)}, receives=2, recv=LQP, event=NONE),
    Case(6, "SEND_MIDDLE short", "R-LEN-1", lambda b: [b.send(600)], {1: shorter(0)}, at=1, receives=2, recv=LQP, event=NONE,
         placed=256),
    Case(6, "SEND_LAST of nothing", "R-LEN-1", lambda b: [b.send(300)], {1: shorter(0)}, at=1, receives=2, recv=LQP, event=NONE,
         placed=256),
    Case(6, "SEND_LAST long", "R-LEN-1", lambda b: [b.send(300)], {1: longer(257)}, at=1, receives=2, recv=LQP, event=NONE,
         placed=256),
    Case(6, "SEND_ONLY long", "R-LEN-1", lambda b: [b.send(20)], {0: longer(257)}, receives=2, recv=LQP, event=NONE),
    Case(6, "WRITE_FIRST short", "R-LEN-1", lambda b: [b.write(600)], {0: shorter(128)}),
    Case(6, "WRITE_MIDDLE long", "R-LEN-1", lambda b: [b.write(700)], {1: longer(300)}, at=1, written=256),
    Case(6, "WRITE_LAST of nothing", "R-LEN-1", lambda b: [b.write(300)], {1: shorter(0)}, at=1, written=256),
    Case(6, "WRITE_ONLY long", "R-LEN-1", lambda b: [b.write(20)], {0: lambda f: replace(longer(300)(f), dma_length=300)}),
    Case(6, "WRITE_ONLY_IMM long", "R-RES-5", lambda b: [b.write(20, opcode=WROpcode.RDMA_WRITE_WITH_IMM)],
         {0: lambda f: replace(longer(300)(f), dma_length=300)}, receives=1),
    Case(6, "WRITE of more than 2^31", "R-LEN-2", lambda b: [b.write(600)], {0: dict(dma_length=(1 << 31) + 1)}),
    Case(6, "READ of more than 2^31", "R-LEN-2", lambda b: [b.read(600)], {0: dict(dma_length=(1 << 31) + 1)}),
    Case(6, "READ with payload", "R-LEN-4", lambda b: [b.read(8)], {0: longer(4)}),
    *(Case(6, f"{op.name} with payload", "R-LEN-4", lambda b, op=op: [b.atomic(op)], {0: longer(8)})
      for op in (WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD)),
    # ---- 7: R_Key
    *(Case(7, f"{kind}: {what}", rule_id, lambda b, kind=kind, size=size, how=how: [getattr(b, kind)(*size, **how(b))],
           syndrome=ACCESS, status=(W.REM_ACCESS_ERR,), event=ACC)
      for kind, size in (("write", (600,)), ("read", (600,)), ("atomic", ()))
      for what, rule_id, how in (
          ("stale variant", "R-MR-1", lambda b: dict(rkey=b.target.mr.rkey ^ 1)),
          ("unused index", "R-MR-1", lambda b: dict(rkey=0xF00 | b.target.mr.rkey & 0xFF)),
          ("index out of range", "R-MR-1", lambda b: dict(rkey=0xFFFFFF00 | b.target.mr.rkey & 0xFF)),
          ("other PD", "R-MR-4", lambda b: dict(rkey=b.other.rkey, addr=b.other.buf)),
          ("below", "R-MR-2", lambda b: dict(addr=b.target.mr.buf - 8 & ~7)),
          ("above", "R-MR-2", lambda b: dict(addr=b.target.mr.buf + b.target.mr.length + 7 & ~7)),
          ("wrapping", "R-MR-2", lambda b: dict(addr=(1 << 64) - 8)),
      )),
    *(Case(7, f"{kind}: last byte outside", "R-MR-2",
           lambda b, kind=kind: [getattr(b, kind)(600, addr=b.target.mr.buf + b.target.mr.length - 599)],
           syndrome=ACCESS, status=(W.REM_ACCESS_ERR,), event=ACC) for kind in ("write", "read")),
    Case(7, "WRITE without the MR's right", "R-RES-1", lambda b: [b.write(600)], syndrome=ACCESS, status=(W.REM_ACCESS_ERR,),
         event=ACC, begin=dict(memory=AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ)),
    Case(7, "READ without the MR's right", "R-RES-1", lambda b: [b.read(600)], syndrome=ACCESS, status=(W.REM_ACCESS_ERR,),
         event=ACC, begin=dict(memory=AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE)),
    Case(7, "ATOMIC without the MR's right", "R-AT-1", lambda b: [b.atomic()], syndrome=ACCESS, status=(W.REM_ACCESS_ERR,),
         event=ACC, begin=dict(memory=AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ)),
    Case(7, "WRITE_ONLY_IMM with a bad key", "R-RES-5",
         lambda b: [b.write(20, rkey=0xBAD00, opcode=WROpcode.RDMA_WRITE_WITH_IMM)], syndrome=ACCESS, status=(W.REM_ACCESS_ERR,),
         event=ACC, receives=1),
    Case(7, "after a WRITE that was right", "R-ERR-3", lambda b: [b.write(100), b.write(20, 2, rkey=0xBAD00), b.write(20, 3)],
         syndrome=ACCESS, status=(W.SUCCESS, W.REM_ACCESS_ERR), at=1, event=ACC, written=100),
    # ---- 8: WRITE against its RETH length
    Case(8, "WRITE_ONLY with less", "R-LEN-3", lambda b: [b.write(20)], {0: shorter(19)}),
    Case(8, "WRITE_ONLY with more", "R-LEN-3", lambda b: [b.write(20)], {0: longer(21)}),
    Case(8, "WRITE_ONLY of a longer message", "R-LEN-3", lambda b: [b.write(20)], {0: dict(dma_length=600)}),
    Case(8, "WRITE_ONLY with data, RETH length 0", "R-LEN-3", lambda b: [b.write(20)], {0: dict(dma_length=0)}),
    Case(8, "WRITE_ONLY_IMM with less", "R-RES-5", lambda b: [b.write(20, opcode=WROpcode.RDMA_WRITE_WITH_IMM)], {0: shorter(16)},
         receives=1),
    Case(8, "WRITE_FIRST of one packet", "R-LEN-3", lambda b: [b.write(512)], {0: dict(dma_length=256)}),
    Case(8, "WRITE_MIDDLE with the last bytes", "R-LEN-3", lambda b: [b.write(700)], {0: dict(dma_length=512)}, at=1,
         written=256),
    Case(8, "WRITE_LAST with less", "R-LEN-3", lambda b: [b.write(300)], {1: shorter(43)}, at=1, written=256),
    Case(8, "WRITE_LAST with more", "R-LEN-3", lambda b: [b.write(300)], {1: longer(45)}, at=1, written=256),
    Case(8, "WRITE_LAST too early", "R-LEN-3", lambda b: [b.write(700)], {1: dict(opcode=Op.RC_WRITE_LAST)}, at=1, written=256),
    Case(8, "behind the R_Key", "8.1", lambda b: [b.write(20, rkey=0xBAD00)], {0: shorter(16)}, syndrome=ACCESS,
         status=(W.REM_ACCESS_ERR,), event=ACC),
    # ---- 9: ATOMIC not on a multiple of 8
    *(Case(9, f"{op.name} at {shift}", "R-AT-1", lambda b, op=op, shift=shift: [b.atomic(op, shift=shift)])
      for op in (WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD) for shift in (1, 2, 4, 7)),
    # ---- 10: SEND longer than its receive WQE
    Case(10, "in one packet", "8.1", lambda b: [b.send(32)], receives=2, recv=(W.LOC_LEN_ERR,), event=NONE,
         begin=dict(recv_bytes=31)),
    Case(10, "in the second packet", "8.1", lambda b: [b.send(512)], receives=2, recv=(W.LOC_LEN_ERR,), event=NONE, at=1,
         placed=256, begin=dict(recv_bytes=511)),
    Case(10, "in the third packet", "8.1", lambda b: [b.send(600)], receives=2, recv=(W.LOC_LEN_ERR,), event=NONE, at=2,
         placed=512, begin=dict(recv_bytes=512)),
    # ---- 11: bad SGE of a receive WQE
    *(Case(11, what, rule_id, lambda b: [b.send(32)], syndrome=OPERATIONAL, status=(W.REM_OP_ERR,), receives=2,
           recv=(W.LOC_PROT_ERR,), event=NONE, begin=dict(recv_sge=how))
      for what, rule_id, how in (
          ("stale variant", "R-MR-1", lambda b: b.inbox.sge(64, lkey=b.inbox.mr.lkey ^ 1)),
          ("index out of range", "R-MR-1", lambda b: b.inbox.sge(64, lkey=0xFFFFFF00)),
          ("other PD", "R-MR-4", lambda b: SGE(b.other.buf, 64, b.other.lkey)),
          ("outside", "R-MR-2", lambda b: SGE(b.inbox.mr.buf + b.inbox.mr.length - 31, 64, b.inbox.mr.lkey)),
          ("below", "R-MR-2", lambda b: SGE(b.inbox.mr.buf - 1, 64, b.inbox.mr.lkey)),
      )),
    Case(11, "in the second packet", "R-MR-2", lambda b: [b.send(300)], syndrome=OPERATIONAL, status=(W.REM_OP_ERR,), receives=2,
         recv=(W.LOC_PROT_ERR,), event=NONE, at=1, placed=256,
         begin=dict(recv_sge=lambda b: SGE(b.inbox.mr.buf + b.inbox.mr.length - 256, 600, b.inbox.mr.lkey))),
]  # fmt: skip


def params(cases: list, section: str) -> list:
    """The cases as parameters that carry their rule."""
    return [pytest.param(c, id=f"{getattr(c, section)} {c.name}", marks=[rule(c.rule)] if c.rule.startswith("R-") else [])
            for c in cases]  # fmt: skip


@pytest.mark.parametrize("case", params(ROWS, "row"))
@rule("R-ERR-1", "R-ERR-2", "R-ERR-3", "R-ERR-4", "R-MSN-1")
def test_refused_request(bench, case):
    """Rows 2 to 11 of 8.1."""
    bench.begin(receives=case.receives, **case.begin)
    lab, a, b = bench.lab, bench.a, bench.b

    def change(n, frame):
        if n not in case.change:
            return None
        how = case.change[n]
        return [how(frame) if callable(how) else replace(frame, **how)]

    lab.on(0, change)
    wrs = case.post(bench)
    a.post_send(*wrs, bench.send(4, 9))  # the last one must be flushed
    sent = lab.drain(a.scq, len(wrs) + 1)
    statuses = [(w.wr_id, w.status) for w in sent]
    wanted = [*case.status, *[W.WR_FLUSH_ERR] * (len(wrs) + 1 - len(case.status))]
    assert statuses == list(zip([w.wr_id for w in wrs] + [9], wanted, strict=True))
    assert all(w.vendor_err == 0 for w in sent if w.status == W.WR_FLUSH_ERR)
    naks = [f for f in lab.answers(1) if f.syndrome & 0x60]
    expected_psn = PSN + case.at & 0xFFFFFF
    assert [(f.syndrome, f.psn) for f in naks] == [(case.syndrome, expected_psn)]
    assert naks[0].msn == sum(s == W.SUCCESS for s in case.status)
    received = [(w.wr_id, w.status) for w in b.rcq.poll(32)[1]]
    flushed = [W.WR_FLUSH_ERR] * (case.receives - len(case.recv)) if case.dies else []
    assert received == list(enumerate([*case.recv, *flushed], start=100))
    assert bench.states() == (QPState.ERR, QPState.ERR if case.dies else QPState.RTS)
    assert bench.events() == ([(case.event, b.qp_num)] if case.event else [])
    bench.target.expect(bench.data[: case.written])
    if case.row != 11:
        bench.inbox.expect(bench.data[: case.placed])


ROW_1 = [1, 2, (1 << 23) - 1]


@pytest.mark.parametrize("ahead", ROW_1)
@rule("R-SEQ-1", "R-SEQ-4", "R-PSN-1")
def test_row_1_ahead(bench, ahead):
    """Sequence NAK with the expected PSN, once; the requester has no retry; the responder goes on."""
    bench.begin(receives=3)
    lab, a, b = bench.lab, bench.a, bench.b
    lab.on(0, lambda n, f: [replace(f, psn=f.psn + ahead & 0xFFFFFF), replace(f, psn=f.psn + 1 & 0xFFFFFF)])
    a.post_send(bench.send(20))
    assert [(w.wr_id, w.status) for w in lab.drain(a.scq, 1)] == [(1, W.RETRY_EXC_ERR)]
    assert [(f.syndrome, f.psn, f.msn) for f in lab.answers(1)] == [(0x60, PSN, 0)]
    assert bench.states() == (QPState.ERR, QPState.RTS)
    assert b.rcq.poll()[0] == 0 and bench.events() == []
    bench.inbox.expect(b"")
    # the right one is still taken
    first = next(f for m, f in lab.seen if m == 0)
    lab.world.nic[1].inject(first.pack())
    assert [w.status for w in lab.drain(b.rcq, 1)] == [W.SUCCESS]


@pytest.mark.parametrize("behind", [1, 2, 3, 1 << 23])
@rule("R-DUP-1", "R-DUP-8", "R-PSN-1", "R-SEQ-3")
def test_row_1_behind(bench, behind):
    """A duplicate is acknowledged with the last PSN and does nothing."""
    bench.begin(receives=2)
    lab, a, b = bench.lab, bench.a, bench.b
    a.post_send(*(bench.write(50, n, at=100 * n) for n in range(3)))
    assert [w.status for w in lab.drain(a.scq, 3)] == [W.SUCCESS] * 3
    old = [f for m, f in lab.seen if m == 0][-1]
    lab.forget()
    bench.target.clear()
    next_psn = PSN + 3
    for opcode in (Op.RC_WRITE_ONLY, Op.RC_SEND_ONLY):
        lab.world.nic[1].inject(replace(old, opcode=opcode, psn=next_psn - behind & 0xFFFFFF).pack())
        lab.relax(500)
    assert [(f.syndrome, f.psn, f.msn) for f in lab.answers(1)] == [(0x1F, next_psn - 1 & 0xFFFFFF, 3)] * 2
    bench.target.expect(b"")
    assert bench.states() == (QPState.RTS, QPState.RTS) and b.rcq.poll()[0] == 0
    a.post_send(bench.send(20, 7))
    assert [w.status for w in lab.drain(a.scq, 1)] == [W.SUCCESS]
    assert [w.status for w in b.rcq.poll(4)[1]] == [W.SUCCESS]


@pytest.mark.parametrize("second", [Op.RC_READ_REQUEST, Op.RC_FETCH_ADD])
@rule("R-REQ-4", "R-DUP-6")
def test_row_4_one_too_many(bench, second):
    """A second READ or ATOMIC while the first is not answered, one allowed: NAK at its place, after the first's answer."""
    bench.begin(receives=0)
    lab, a, b = bench.lab, bench.a, bench.b
    word = bench.target.addr + -bench.target.addr % 8
    held = []

    def together(n, frame):
        held.append(frame if n == 0 else
                    replace(frame, opcode=second, payload=b"", va=word, rkey=bench.target.mr.rkey, dma_length=8))  # fmt: skip
        return held if n == 1 else []

    lab.on(0, together)
    lab.world.nic[1].bus(read_latency=700)
    a.post_send(bench.read(8), bench.send(4, 2))
    sent = lab.drain(a.scq, 2)
    lab.world.nic[1].bus(read_latency=64)
    assert [(w.wr_id, w.status) for w in sent] == [(1, W.SUCCESS), (2, W.REM_INV_REQ_ERR)]
    assert [(f.opcode, f.syndrome & 0x60, f.psn) for f in lab.answers(1)] == [
        (Op.RC_READ_RESP_ONLY, 0, PSN), (Op.RC_ACK, 0x60, PSN + 1 & 0xFFFFFF)]
    assert bench.states() == (QPState.ERR, QPState.ERR)
    assert bench.events() == [(REQ, b.qp_num)]


@rule("R-SEQ-2", "R-RNR-4")
def test_row_5_then_posted(bench):
    """Behind an RNR NAK all is dropped silently until the packet comes again, then it is taken."""
    bench.begin(receives=0)
    lab, a, b = bench.lab, bench.a, bench.b
    a.post_send(bench.send(20), bench.write(8, 2), bench.write(8, 3))
    assert [w.status for w in lab.drain(a.scq, 3)] == [W.RNR_RETRY_EXC_ERR, W.WR_FLUSH_ERR, W.WR_FLUSH_ERR]
    assert [(f.syndrome, f.psn) for f in lab.answers(1)] == [(RNR, PSN)]
    b.post_recv(RecvWR(5, [bench.inbox.sge(64)]))
    requests = [f for m, f in lab.seen if m == 0]
    for frame in requests:
        lab.world.nic[1].inject(frame.pack())
    assert [(w.wr_id, w.status, w.byte_len) for w in lab.drain(b.rcq, 1)] == [(5, W.SUCCESS, 20)]
    bench.inbox.expect(bench.data[:20])


@rule("8.1#12")
@pytest.mark.parametrize("how", ["unknown", "other PD", "stale"])
def test_row_12_key_that_cannot_be_invalidated(bench, how):
    """No NAK; the receive completes in error, the responder's QP goes to ERR."""
    bench.begin(receives=2)
    lab, a, b = bench.lab, bench.a, bench.b
    wr = bench.send(20, opcode=WROpcode.SEND_WITH_INV)
    wr.invalidate_rkey = {"unknown": 0x123400, "other PD": bench.other.rkey, "stale": bench.target.mr.rkey ^ 1}[how]
    a.post_send(wr)
    received = lab.drain(b.rcq, 2, 600)
    assert not [f for f in lab.answers(1) if f.syndrome & 0x60]
    assert [w.wr_id for w in received] == [100, 101]
    assert received[0].status not in (W.SUCCESS, W.WR_FLUSH_ERR) and received[1].status == W.WR_FLUSH_ERR
    assert bench.states()[1] == QPState.ERR


# ------------------------------------------------------------------------------------------------------ requester's errors
@dataclass
class Answer:
    """An answer changed on its way to the requester. ``change`` gets the number and the frame of an answer."""

    rule: str
    name: str
    post: Callable
    change: Callable
    status: tuple
    alive: bool = False  # the requester's QP stays in RTS
    landed: int | None = None


def nak(syndrome, at=0):
    """Replace answer number ``at`` by an ACK packet with ``syndrome``."""
    return lambda n, f: [Frame(**{k: getattr(f, k) for k in FRAME_BASE}, opcode=Op.RC_ACK, psn=f.psn, syndrome=syndrome,
                               msn=0)] if n == at else None


FRAME_BASE = ("dest_qpn", "dst_mac", "src_mac", "src_ip", "dst_ip", "sport")


def only(n, how):
    return lambda k, f: [how(f)] if k == n else None


BAD = (W.BAD_RESP_ERR,)
LEN = (W.LOC_LEN_ERR,)
ANSWERS = [
    *(Answer("7.4", f"NAK {code}", lambda b: [b.write(20)], nak(0x60 | code), (status,))
      for code, status in ((0, W.RETRY_EXC_ERR), (1, W.REM_INV_REQ_ERR), (2, W.REM_ACCESS_ERR), (3, W.REM_OP_ERR))),
    *(Answer("7.4", f"NAK {code} for a READ", lambda b: [b.read(20)], nak(0x60 | code), (status,))
      for code, status in ((0, W.RETRY_EXC_ERR), (1, W.REM_INV_REQ_ERR), (2, W.REM_ACCESS_ERR), (3, W.REM_OP_ERR))),
    *(Answer("7.4", f"syndrome {syndrome:#x} is ignored", lambda b: [b.write(20), b.write(20, 2)],
             lambda n, f, s=syndrome: [replace(f, syndrome=s)] if n == 0 and f.syndrome < 0x20 else None,
             (W.SUCCESS, W.SUCCESS), alive=True) for syndrome in (0x64, 0x65, 0x7F, 0x40, 0x5F)),
    *(Answer("R-RTC-2", f"RNR NAK code {code}", lambda b: [b.send(20)], nak(0x20 | code), (W.RNR_RETRY_EXC_ERR,))
      for code in (0, 12, 31)),
    *(Answer("R-CRD-1", f"ACK with credits {code}", lambda b: [b.write(20)],
             only(0, lambda f, code=code: replace(f, syndrome=code)), (W.SUCCESS,), alive=True) for code in (0, 1, 30)),
    # READ responses
    Answer("R-RSP-5", "ONLY too short", lambda b: [b.read(20)], only(0, shorter(19)), LEN),
    Answer("R-RSP-5", "ONLY too long", lambda b: [b.read(20)], only(0, longer(21)), LEN),
    Answer("R-RSP-5", "ONLY of nothing", lambda b: [b.read(20)], only(0, shorter(0)), LEN),
    Answer("R-RSP-5", "FIRST too short", lambda b: [b.read(600)], only(0, shorter(255)), LEN),
    Answer("R-RSP-5", "MIDDLE too long", lambda b: [b.read(600)], only(1, longer(257)), LEN),
    Answer("R-RSP-5", "MIDDLE too short", lambda b: [b.read(600)], only(1, shorter(0)), LEN),
    Answer("R-RSP-5", "LAST too short", lambda b: [b.read(600)], only(2, shorter(87)), LEN),
    Answer("R-RSP-5", "LAST too long", lambda b: [b.read(600)], only(2, longer(89)), LEN),
    *(Answer("R-RSP-5", f"{op.name} at {at} of {size} bytes", lambda b, size=size: [b.read(size)],
             only(at, lambda f, op=op: replace(f, opcode=op)), status)
      for op, at, size, status in (
          (Op.RC_READ_RESP_LAST, 1, 600, LEN), (Op.RC_READ_RESP_ONLY, 0, 600, LEN), (Op.RC_READ_RESP_FIRST, 0, 256, LEN),
          (Op.RC_READ_RESP_MIDDLE, 0, 600, BAD), (Op.RC_READ_RESP_LAST, 0, 20, BAD))),
    Answer("R-RSP-5", "ATOMIC_ACK for READ", lambda b: [b.read(20)],
           only(0, lambda f: replace(f, opcode=Op.RC_ATOMIC_ACK, payload=b"")), BAD),
    Answer("R-RSP-5", "READ response for ATOMIC", lambda b: [b.atomic()],
           only(0, lambda f: replace(f, opcode=Op.RC_READ_RESP_ONLY, payload=bytes(8))), BAD),
    *(Answer("R-RSP-5", f"AETH {syndrome:#x} in a READ response", lambda b: [b.read(20)],
             only(0, lambda f, s=syndrome: replace(f, syndrome=s)), BAD) for syndrome in (0x20, 0x60, 0x62)),
    Answer("R-RSP-5", "READ response for WRITE", lambda b: [b.write(20)],
           only(0, lambda f: replace(f, opcode=Op.RC_READ_RESP_ONLY, payload=bytes(20))), BAD),
    Answer("R-RSP-5", "ATOMIC_ACK for SEND", lambda b: [b.write(20)],
           only(0, lambda f: replace(f, opcode=Op.RC_ATOMIC_ACK)), BAD),
    Answer("R-RSP-3", "ACK for a READ", lambda b: [b.read(20)], nak(0x1F), (W.RETRY_EXC_ERR,)),
    Answer("R-RSP-3", "ACK past a READ", lambda b: [b.read(20), b.write(20, 2)], lambda n, f: [] if n == 0 else None,
           (W.RETRY_EXC_ERR, W.WR_FLUSH_ERR)),
    Answer("R-RSP-4", "READ response with a gap", lambda b: [b.read(600)], lambda n, f: [] if n == 1 else None,
           (W.RETRY_EXC_ERR,)),
    Answer("R-RSP-1", "ACK of the future", lambda b: [b.write(20)],
           lambda n, f: [replace(f, psn=f.psn + 1 & 0xFFFFFF), f] if n == 0 else None, (W.SUCCESS,), alive=True),
    Answer("R-RSP-1", "ACK of the past", lambda b: [b.write(20)],
           lambda n, f: [replace(f, psn=f.psn - 1 & 0xFFFFFF, syndrome=0x61), f] if n == 0 else None, (W.SUCCESS,), alive=True),
]  # fmt: skip


@pytest.mark.parametrize("case", params(ANSWERS, "rule"))
@rule("R-ERR-1", "R-ERR-3")
def test_answer(bench, case):
    """7.4 and the requester's rows of section 10: what the answer does to the WQE and to the QP; later WQEs are flushed."""
    bench.begin(receives=1)
    lab, a = bench.lab, bench.a
    lab.on(1, case.change)
    before = lab.contexts[0].driver.counters()["rx_bad_response"]
    wrs = case.post(bench)
    a.post_send(*wrs)
    sent = lab.drain(a.scq, len(wrs))
    if not case.alive:  # a WQE posted later is flushed
        a.post_send(bench.write(4, 9))
        sent += lab.drain(a.scq, 1)
        assert (sent[-1].wr_id, sent.pop().status) == (9, W.WR_FLUSH_ERR)
    assert [(w.wr_id, w.status) for w in sent] == list(zip([w.wr_id for w in wrs], case.status, strict=True))
    assert bench.states() == (QPState.RTS if case.alive else QPState.ERR, QPState.RTS)
    counted = lab.contexts[0].driver.counters()["rx_bad_response"] - before
    assert counted == ("future" in case.name or "ignored" in case.name)
    guard = bench.source.mr.read(32) + bench.source.mr.read(32, SIZE + 32)
    assert guard == b"\x11" * 64


LOCAL = [
    ("stale key", "R-MR-1", lambda b: SGE(b.source.addr, 8, b.source.mr.lkey ^ 1), W.LOC_PROT_ERR),
    ("index out of range", "R-MR-1", lambda b: SGE(b.source.addr, 8, 0xFFFFFF00), W.LOC_PROT_ERR),
    ("past the end", "R-MR-2", lambda b: SGE(b.source.mr.buf + b.source.mr.length - 7, 8, b.source.mr.lkey), W.LOC_PROT_ERR),
    ("below", "R-MR-2", lambda b: SGE(b.source.mr.buf - 1, 8, b.source.mr.lkey), W.LOC_PROT_ERR),
    ("wrapping", "R-MR-2", lambda b: SGE((1 << 64) - 4, 8, b.source.mr.lkey), W.LOC_PROT_ERR),
]


@pytest.mark.parametrize("operation", ["send", "write", "read", "atomic"])
@pytest.mark.parametrize("name, rule, sge, status", LOCAL, ids=lambda v: v if isinstance(v, str) else "")
@rule("R-ERR-7", "R-RSP-8", "R-MR-1", "R-MR-2", "R-MR-4")
def test_bad_local_sge(bench, operation, name, rule, sge, status):
    """Section 10, rows 1 and 6: LOC_PROT_ERR behind what was right before; nothing of later WQEs leaves; the peer goes on."""
    bench.begin(receives=1)
    lab, a = bench.lab, bench.a
    wr = bench.atomic(wr_id=2) if operation == "atomic" else getattr(bench, operation)(8, 2)
    wr.sg = [sge(bench)]
    a.post_send(bench.write(8), wr, bench.write(30, 3))
    assert [(w.wr_id, w.status) for w in lab.drain(a.scq, 3)] == [(1, W.SUCCESS), (2, status), (3, W.WR_FLUSH_ERR)]
    assert bench.states() == (QPState.ERR, QPState.RTS)
    sent = [f for m, f in lab.seen if m == 0]
    if operation in ("send", "write"):
        assert len(sent) == 1  # R-ERR-7
        bench.target.expect(bench.data[:8])


@pytest.mark.parametrize("bad, status", [
    (dict(opcode=0x3F), W.LOC_QP_OP_ERR), (dict(length=9), W.LOC_QP_OP_ERR), (dict(num_sge=5), W.LOC_QP_OP_ERR),
    (dict(length=(1 << 31) + 1), W.LOC_LEN_ERR),
])  # fmt: skip
@rule("R-WQ-7", "R-WQ-4", "R-LEN-2")
def test_bad_wqe(bench, bad, status):
    """Section 10, rows 2 and 3: a WQE that the driver would never post."""
    from rnic import abi

    bench.begin(receives=0)
    lab, a = bench.lab, bench.a
    a.post_send(bench.write(8), bench.write(8, 2), bench.write(8, 3), ring=False)
    at = a._sq.va + (1 << a._log_stride)
    wqe = abi.SEND_WQE.unpack(a.context.memory.read(at, 64)[:64]) | bad
    a.context.memory.write(at, abi.SEND_WQE.pack(**wqe)[:32])
    a.ring_sq()
    assert [(w.wr_id, w.status) for w in lab.drain(a.scq, 3)] == [(1, W.SUCCESS), (2, status), (3, W.WR_FLUSH_ERR)]
    assert len([f for m, f in lab.seen if m == 0]) == 1
    assert bench.states() == (QPState.ERR, QPState.RTS)


@rule("R-QP-5", "R-ERR-3", "R-ERR-5")
def test_modify_to_err(bench):
    """Section 10, last row: both queues are flushed in post order, also what is posted later; the peer hears nothing more."""
    bench.begin(receives=3)
    lab, a, b = bench.lab, bench.a, bench.b
    b.modify(QPAttr(qp_state=QPState.ERR), QPAttrMask.STATE)
    assert [(w.wr_id, w.status) for w in lab.drain(b.rcq, 3)] == [(100 + i, W.WR_FLUSH_ERR) for i in range(3)]
    b.post_recv(RecvWR(200, []))
    b.post_send(bench.send(0, 201))
    assert sorted((w.wr_id, w.status) for w in lab.drain(b.rcq, 2)) == [(200, W.WR_FLUSH_ERR), (201, W.WR_FLUSH_ERR)]
    before = lab.contexts[1].driver.counters()["rx_no_qp"]
    a.post_send(bench.write(8))
    assert lab.drain(a.scq, 1, 500) == [] and lab.answers(1) == []  # R-ERR-8
    assert lab.contexts[1].driver.counters()["rx_no_qp"] == before + 1
    a.modify(QPAttr(qp_state=QPState.ERR), QPAttrMask.STATE)
    assert [(w.wr_id, w.status) for w in lab.drain(a.scq, 1)] == [(1, W.WR_FLUSH_ERR)]
    bench.target.expect(b"")
