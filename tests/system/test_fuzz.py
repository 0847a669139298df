"""Frames nobody should send, at one RNIC whose peer is this file: no byte outside what the peer may write, no frame uncounted, no
hang. What is right about a frame is as often as not right, so that the damage gets deep."""

import random
from dataclasses import replace

import pytest
from tests.rules import rule

from rnic.wire.frame import Frame
from rnic.wire.opcode import OPCODES, Opcode, PayloadRule
from rnic_sim.enums import MTU, AccessFlags, QPAttrMask, QPState, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.qp import QP, AHAttr, QPAttr, QPCap, QPInitAttr
from rnic_sim.verbs import CQ, MR, PD, SGE, RecvWR, SendWR, gid_bytes

ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
PEER = "192.0.2.77"
PSN, PEER_QPN, PMTU, SIZE = 0xFFFFE0, 0x4321, 256, 8192
PARSER = ("rx_eth_frames", "rx_bad_length", "rx_bad_ip", "rx_bad_icrc", "rx_bad_bth", "rx_mac_error", "rx_eth_overflow")
FILTER = ("rx_no_qp", "rx_not_for_us", "rx_bad_type", "rx_bad_pkey", "rx_bad_address", "rx_bad_qkey", "rx_no_space")


class Victim:
    """One RNIC with a QP, memory the peer may write (``open``) and memory it may not (``closed``, and what lies around)."""

    def __init__(self, config: str, seed: int):
        self.rng = random.Random(seed)
        print(f"seed {seed}")
        self.lab = Lab(config, nics=1, seed=seed)
        self.host = self.lab.world.nic[0]
        self.lab.world.connect(0, None)
        context = self.lab.contexts[0]
        context.neighbors[gid_bytes(PEER)] = bytes.fromhex("020000000099")
        self.pd = PD(context)
        self.scq, self.rcq = CQ(context, 256), CQ(context, 256)
        self.open, self.inbox = MR(self.pd, SIZE, ALL, offset=100), MR(self.pd, SIZE, AccessFlags.LOCAL_WRITE, offset=50)
        self.closed = MR(self.pd, SIZE, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_READ)
        self.alien = MR(PD(context), SIZE, ALL)
        self.qp = QP(self.pd, QPInitAttr(self.scq, self.rcq, cap=QPCap(8, 8)))
        self.injected = 0
        self.start()

    def start(self) -> None:
        """A new life of the QP, work posted in both queues."""
        qp, rng = self.qp, self.rng
        if qp.qp_state != QPState.RESET:
            qp.modify(QPAttr(qp_state=QPState.RESET), QPAttrMask.STATE)
        self.scq.poll(256)
        self.rcq.poll(256)
        qp.to_rts(QPAttr(ah_attr=AHAttr(PEER), path_mtu=MTU.of(PMTU), dest_qp_num=PEER_QPN, rq_psn=PSN, sq_psn=PSN,
                         qp_access_flags=rng.choice((15, 15, 15, 0, 3)), max_rd_atomic=1, max_dest_rd_atomic=1))  # fmt: skip
        for n in range(rng.randrange(9)):
            qp.post_recv(RecvWR(n, [SGE(self.inbox.buf + 700 * n, rng.choice((0, 10, 256, 700)), self.inbox.lkey)]))
        for n in range(rng.randrange(5)):
            wr = SendWR(n, rng.choice((WROpcode.SEND, WROpcode.RDMA_WRITE, WROpcode.RDMA_READ)),
                        [SGE(self.inbox.buf + 6000 + 400 * n, rng.choice((1, 300)), self.inbox.lkey)])  # fmt: skip
            wr.set_wr_rdma(0x777, 0x1000)
            qp.post_send(wr)
        self.psn = PSN

    def frame(self) -> Frame:
        """A request or an answer, each field right with a chance."""
        rng = self.rng
        opcode = rng.choice(list(Opcode)) if rng.random() < 0.1 else rng.choice([o for o in Opcode if o.value < 0x18])
        rule_ = OPCODES[opcode].payload
        size = {PayloadRule.ZERO: 0, PayloadRule.PMTU: PMTU}.get(rule_, rng.choice((0, 1, 4, 100, 255, 256)))
        if rng.random() < 0.1:
            size = rng.choice((0, 1, 255, 257, 300, 4096))
        mr = rng.choice((self.open, self.open, self.open, self.closed, self.alien, self.inbox))
        sizes = (size, size, size, size, PMTU, 300, 0, 1 << 31, (1 << 31) + 1, 0xFFFFFFFF)
        length = rng.choice(sizes) if opcode is not Opcode.RC_READ_REQUEST else rng.choice((0, 1, 300, 3000, 1 << 31))
        at = rng.choice((0, 0, 8, 1001, SIZE - length, SIZE - length + 1, -1, -8, 1 << 63, SIZE))
        psn = self.psn if rng.random() < 0.8 else self.psn + rng.choice((-1, 1, -5, 7, 1 << 23, (1 << 23) - 1))
        if OPCODES[opcode].is_request and psn == self.psn:
            self.psn = self.psn + max(1, -(-length // PMTU) if opcode is Opcode.RC_READ_REQUEST else 1) & 0xFFFFFF
        if OPCODES[opcode].is_response:
            psn = PSN + rng.randrange(-2, 12)
        return Frame(
            opcode, rng.choice((self.qp.qp_num,) * 15 + (0, 1, 3, 0xFFFFFF)), psn & 0xFFFFFF, rng.randbytes(size),
            dst_mac=bytes.fromhex("020000000001"), src_mac=bytes.fromhex("020000000099"), src_ip=gid_bytes(PEER)[12:],
            dst_ip=gid_bytes("192.0.2.1")[12:], va=mr.buf + at & 0xFFFF_FFFF_FFFF_FFFF,
            rkey=mr.rkey ^ (0 if rng.random() < 0.9 else rng.choice((1, 0x100, 0xFF000000))), dma_length=length & 0xFFFF_FFFF,
            ackreq=rng.random() < 0.5, se=rng.random() < 0.3, swap=rng.getrandbits(64), compare=rng.getrandbits(64),
            syndrome=rng.choice((0x1F, 0x1F, 0, 0x60, 0x61, 0x63, 0x2C, 0x40, 0x7F)), msn=rng.getrandbits(24),
            imm=rng.getrandbits(32),
        )  # fmt: skip

    def damaged(self) -> bytes:
        """The bytes of a frame, damaged with a chance."""
        rng, frame = self.rng, self.frame()
        wrong = rng.random()
        if wrong < 0.6:
            return frame.pack()
        if wrong < 0.75:
            change = rng.choice((
                dict(pkey=0x1234), dict(pkey=0x7FFF), dict(tver=3), dict(src_ip=bytes(4)), dict(dst_ip=b"\x0a\0\0\1"),
                dict(dst_mac=bytes(6)), dict(vlan=(1, 7)), dict(raw_pad=rng.randrange(4)), dict(raw_udp_length=rng.randrange(90)),
                dict(raw_ip_length=rng.randrange(2000)), dict(raw_ip_checksum=3), dict(raw_ext=rng.randbytes(rng.randrange(44))),
                dict(dport=4790), dict(opcode=rng.randrange(256)),
            ))  # fmt: skip
            return replace(frame, **change).pack()
        raw = bytearray(frame.pack())
        if wrong < 0.85:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        elif wrong < 0.95:
            raw = raw[: rng.randrange(1, len(raw) + 1)]
        else:
            raw = bytearray(rng.randbytes(rng.choice((1, 14, 60, 64, 300))))
        return bytes(raw)

    def throw(self, count: int) -> None:
        for _ in range(count):
            self.host.inject(self.damaged(), error=self.rng.random() < 0.03)
            self.injected += 1
            if self.rng.random() < 0.3:
                self.lab.relax(self.rng.randrange(80))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("config", ["tiny", "hundred"])
@rule("R-MR-1", "R-MR-2", "R-MR-4", "R-RES-1", "R-ICRC-7", "R-FRM-3", "R-OPC-1", "R-QP-4")
def test_fuzz(config, seed):
    """500 frames in 25 lives of a QP."""
    victim = Victim(config, seed)
    with victim.lab as lab:
        context = lab.contexts[0]
        alien, closed = victim.rng.randbytes(SIZE), victim.rng.randbytes(SIZE)
        victim.alien.write(alien)
        victim.closed.write(closed)
        around = [(m.va, bytearray(context.memory.read(m.va, m.end - m.va)), mr) for mr in (victim.open, victim.inbox)
                  for m in [context.memory.find(mr.buf, 1)]]  # fmt: skip
        opcodes = set()
        for _ in range(25):
            victim.throw(20)
            lab.relax(600)
            victim.qp.query()
            opcodes.add(victim.qp.qp_state)
            victim.start()
        lab.relax(2000)
        assert opcodes == {QPState.RTS, QPState.ERR}
        counters = context.driver.counters()
        assert counters["rx_frames"] + sum(counters[name] for name in PARSER) == victim.injected
        passed = counters["rx_frames"] - sum(counters[name] for name in FILTER)
        assert passed > 50 and all(counters[name] for name in (*PARSER[:-1], "rx_no_qp", "rx_bad_pkey", "rx_not_for_us"))
        assert victim.alien.read(SIZE) == alien and victim.closed.read(SIZE) == closed
        for va, before, mr in around:
            now = bytearray(context.memory.read(va, len(before)))
            start = mr.buf - va
            now[start : start + SIZE] = before[start : start + SIZE]
            assert now == before
        assert victim.host.bus_counters["unmapped"] == 0
        # it lives: a request and an answer
        victim.host.inject(replace(victim.frame(), opcode=Opcode.RC_ACK, psn=0).pack())
        victim.qp.modify(QPAttr(qp_state=QPState.RESET), QPAttrMask.STATE)
        victim.qp.to_rts(QPAttr(ah_attr=AHAttr(PEER), path_mtu=MTU.of(PMTU), dest_qp_num=PEER_QPN, rq_psn=PSN, sq_psn=PSN,
                                qp_access_flags=15))  # fmt: skip
        while victim.host.receive() is not None:
            pass
        good = replace(victim.frame(), opcode=Opcode.RC_WRITE_ONLY, dest_qpn=victim.qp.qp_num, psn=PSN, payload=b"alive",
                       va=victim.open.buf, rkey=victim.open.rkey, dma_length=5, ackreq=True)  # fmt: skip
        victim.host.inject(good.pack())
        assert victim.host.wait_frame(3000)
        assert victim.open.read(5) == b"alive"
        victim.qp.post_send(SendWR(1, WROpcode.SEND, [SGE(victim.inbox.buf, 9, victim.inbox.lkey)]))
        assert victim.host.wait_frame(3000)
        victim.host.inject(replace(good, opcode=Opcode.RC_ACK, payload=b"", syndrome=0x1F).pack())
        assert lab.wait_wc(victim.scq)[0].status == WCStatus.SUCCESS
