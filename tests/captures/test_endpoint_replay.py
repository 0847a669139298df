"""The software endpoint against a Linux peer's captures: each end is replaced by the endpoint in turn.

The recorded frames of the other end are fed to it in recorded order, its own frames are compared header for header.
Where an implementation is free or the peer deviates (rules.md section 21), `EXCEPTIONS` and `LEFT_OUT` of
`rnic_tb.captures` say so.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rnic.wire.frame import Frame, parse_frame
from rnic.wire.opcode import Opcode
from rnic.wire.psn import psn_add, psn_packets
from rnic_tb import captures as cap
from rnic_tb import endpoint as ep

PD = 7
QKEY = 0x11111111
WINDOW_BASE, WINDOW_BYTES = 0x1000, 4096  # where rc_send_inv binds its windows

AS_PEER = ep.PeerPolicy(read_gap_retry=False, read_restart_with_first=False)  # section 21 #4, #5
TRANSPORTS = ("rc_", "uc_", "ud_", "crafted_")
#: Test -> which captures it takes.
REPLAYED = {
    "test_requester": lambda name: name.startswith(TRANSPORTS) and (name, "a") not in cap.LEFT_OUT,
    "test_repeated_read_starts_again": lambda name: name in ("rc_loss_read_resp_middle", "rc_loss_read_resp_last"),
    "test_responder": lambda name: name.startswith(TRANSPORTS[:3]) and (name, "b") not in cap.LEFT_OUT,
}


class EndUnderTest:
    """One software endpoint set up as one end of a scenario; `sent` collects what it sent, `wcs` its completions."""

    def __init__(self, scenario: cap.Scenario, side: str, policy: ep.PeerPolicy):
        self.scenario, self.side, self.policy = scenario, side, policy
        self.me, self.peer = scenario.end(side), scenario.end("b" if side == "a" else "a")
        self.device = ep.Device(self.me.mac, [self.me.ip])
        self.cq = ep.CompletionQueue(4096)
        self.srq = ep.SharedReceiveQueue(128, 16) if side == "b" and scenario.setup.b_srq else None
        self.region = self._memory()
        self.qp = self._queue_pair()
        self.wcs: list[cap.ExpectedWc] = []
        self.sent: list[bytes] = []
        self.pending: list[bytes] = []
        self._prepare()

    def _memory(self) -> ep.MemoryRegion:
        rights = ep.ALL_ACCESS
        for name in self.scenario.setup.b_mr_lacks if self.side == "b" else ():
            rights &= ~ep.Access[name]
        base = self.me.addr
        region = self.device.keys.register(self.me.rkey or 0x100, PD, rights, base, cap.BUFFER_BYTES)
        for offset, data in self.scenario.initial_memory(self.side):
            region.write(base + offset, data)
        return region

    def _queue_pair(self) -> ep.QueuePair:
        s = self.scenario
        qp = self.device.create_qp(
            self.me.qpn, ep.QpType(s.transport), PD, self.cq, self.cq, self.srq, policy=self.policy, max_recv_wr=512
        )
        access = ep.ALL_ACCESS
        for name in s.setup.b_qp_lacks if self.side == "b" else ():
            access &= ~ep.Access[name]
        depth = s.setup.a_max_dest_rd_atomic if self.side == "a" and s.setup.a_max_dest_rd_atomic else s.rd_atomic
        qp.connect(
            self.address(), self.peer.qpn, access=access, qkey=QKEY, path_mtu=s.mtu, sq_psn=self.me.psn,
            rq_psn=self.peer.psn, max_rd_atomic=s.rd_atomic, max_dest_rd_atomic=depth, min_rnr_timer=s.min_rnr_timer,
            timeout=s.timeout, retry_cnt=s.retry_cnt, rnr_retry=s.rnr_retry,
        )  # fmt: skip
        return qp

    def address(self) -> ep.AddressVector:
        return ep.AddressVector(
            self.peer.mac, self.peer.ip, self.me.ip, self.me.traffic_class, self.me.hop_limit,
            udp_sport=self.me.udp_sport,
        )  # fmt: skip

    def _prepare(self) -> None:
        setup = self.scenario.setup
        if self.side == "a":
            if setup.a_recv is not None:
                wr_id, length = setup.a_recv
                self.qp.post_recv(ep.RecvWr(wr_id, (ep.Sge(self.me.addr, length, self.me.lkey),)))
            return
        if setup.b_recv is not None:
            wr_id, length = setup.b_recv
            lkey = self.me.lkey ^ (0xFF if setup.b_recv_bad_lkey else 0)
            wr = ep.RecvWr(wr_id, (ep.Sge(self.me.addr, length, lkey),))
            self.srq.post(wr) if self.srq is not None else self.qp.post_recv(wr)
        if setup.b_state != "RTS":
            self.qp.modify(ep.QpState[setup.b_state])

    # ---- steps ------------------------------------------------------------------------------------------------

    def post(self, step: cap.Post) -> None:
        if step.fill is not None:
            self.region.write(self.me.addr + step.fill[0], step.fill[1])
        for number in range(step.count):
            wr = self._send_wr(step, step.wr_id + number)
            self.qp.post_send(self.qp.inline_data(wr) if step.inline else wr)

    def _send_wr(self, step: cap.Post, wr_id: int) -> ep.SendWr:
        return ep.SendWr(
            wr_id=wr_id, op=ep.WrOp(step.op), fence=step.fence, remote_addr=step.remote_addr, rkey=step.rkey,
            sges=tuple(ep.Sge(self.me.addr + off, length, self.me.lkey) for off, length in step.sges),
            imm=step.imm, inv_rkey=step.inv_rkey, compare=step.compare, swap=step.swap, add=step.add,
            ah=self.address(), remote_qpn=step.remote_qpn, remote_qkey=step.remote_qkey,
        )  # fmt: skip

    def recv(self, step: cap.Recv) -> None:
        self.qp.post_recv(ep.RecvWr(step.wr_id, (ep.Sge(self.me.addr + step.offset, step.length, self.me.lkey),)))

    def bind(self, step: cap.WindowBound) -> None:
        bind = ep.MwBind(step.rkey, self.me.lkey, ep.Access.REMOTE_WRITE, self.me.addr + WINDOW_BASE, WINDOW_BYTES)
        self.qp.post_send(ep.SendWr(77, ep.WrOp.BIND_MW, bind=bind))
        assert not self.device.poll_tx()

    # ---- frames -----------------------------------------------------------------------------------------------

    def next_frame(self) -> bytes | None:
        """The next frame this end sends; waits for its timers when it has none."""
        if self.pending:
            return self.pending.pop(0)
        for _ in range(3):
            frames = self.device.poll_tx(1)
            if frames:
                return frames[0]
            due = self.device.next_deadline()
            if due is None:
                return None
            self.device.advance(due - self.device.now)
        return None

    def receive(self, raw: bytes) -> None:
        """Take a frame; an end that only answers does so at once, as the peer does."""
        self.device.receive(raw)
        if not len(self.qp.requester):
            self.drain()

    def drain(self) -> None:
        """Send everything that can leave now."""
        self.pending += self.device.poll_tx()

    def completions(self) -> list[cap.ExpectedWc]:
        self.wcs += [
            cap.ExpectedWc(
                wc.wr_id, wc.status, wc.byte_len, wc.opcode, wc.inv_rkey if wc.flags & ep.WcFlag.WITH_INV else wc.imm,
                int(wc.flags),
            )
            for wc in self.cq.poll()
        ]  # fmt: skip
        return self.wcs


class Replay:
    """Walks a scenario with one end under test. `problems` collects every difference."""

    def __init__(self, scenario: cap.Scenario, side: str, policy: ep.PeerPolicy = AS_PEER):
        self.scenario, self.side = scenario, side
        self.end = EndUnderTest(scenario, side, policy)
        self.problems: list[str] = []
        self.frames = list(scenario.frames)
        self.waiting_completions = 0
        self.next_psn: int | None = None
        self.last_atomic: cap.Post | None = None
        self.posted = False
        self.passed = 0

    def run(self) -> list[str]:
        for step in self.scenario.steps:
            self._step(step)
        while self.frames:
            self._one_frame()
        self._leftovers()
        return self.problems

    def _step(self, step: cap.Step) -> None:
        mine = step.side == self.side
        self.posted = self.posted or isinstance(step, cap.Post)
        match step:
            case cap.Completions():
                self._wait_for(step, mine)
            case cap.FrameStep():
                self._crafted_frame(step)
            case cap.AtomicResult():
                self._atomic(step)
            case cap.Post() if step.side == "a" and step.op in ("fadd", "cas"):
                self.last_atomic = step
                if mine:
                    self.end.post(step)
            case cap.Post() if mine:
                self.end.post(step)
            case cap.Recv() if mine:
                self._until_last_rnr()
                self.end.recv(step)
            case cap.MemorySet() if mine:
                self.end.region.write(self.end.me.addr + step.offset, step.data)
            case cap.MemoryIs() if mine:
                self._memory(step.offset, step.data, "memory")
            case cap.WindowBound() if mine:
                self.end.bind(step)
            case cap.GrhArea() if mine:
                self._memory(0, step.data, "GRH area")

    def _until_last_rnr(self) -> None:
        """A receive posted after messages were: it came after the last RNR NAK."""
        rnr = [f.number for f in self.frames if f.sender == self.side and is_rnr_nak(f.data)]
        while self.posted and rnr and self.frames[0].number <= rnr[-1]:
            self._one_frame()

    def _memory(self, offset: int, data: bytes, what: str) -> None:
        have = self.end.region.read(self.end.me.addr + offset, len(data))
        if have != data:
            self.problems.append(f"{what} at {offset}: {have.hex()[:64]}, recorded {data.hex()[:64]}")

    def _atomic(self, step: cap.AtomicResult) -> None:
        post = self.last_atomic
        assert post is not None
        if self.side == "a":
            self._memory(post.sges[0][0], step.returned, "returned value")
        else:
            self._memory(post.remote_addr - self.end.me.addr, step.memory, "atomic target")

    # ---- completions --------------------------------------------------------------------------------------------

    def _wait_for(self, step: cap.Completions, mine: bool) -> None:
        """Let frames pass until the end under test has what came, or, watching from b, until a's messages are through."""
        if not mine:
            self._pass_other(step)
            return
        done = self.waiting_completions
        wanted = step.entries
        while len(self.end.completions()) < done + len(wanted) and self.frames:
            self._one_frame()
        self._let_timers_run(done + len(wanted))
        have = self.end.completions()[done : done + len(wanted)]
        self.waiting_completions += len(wanted)
        if len(have) < len(wanted):
            self.problems.append(f"{len(have)} completions, recorded {len(wanted)}: {wanted}")
        for want, had in zip(wanted, have, strict=False):
            self.problems += cap.compare_completion(want, had, self.scenario.name)

    def _let_timers_run(self, wanted: int) -> None:
        """The last timeout, behind the last frame, ends a message that is never answered."""
        due = self.end.device.next_deadline()
        if len(self.end.completions()) < wanted and due is not None:
            self.end.device.advance(due - self.end.device.now)

    def _pass_other(self, step: cap.Completions) -> None:
        """The other end reported completions: everything up to the frame that caused them has passed."""
        if self.side == "b" and not self.scenario.crafted:
            self.passed += len(step.entries)
            target = progress(self.scenario).get(self.passed, 0)
            while self.frames and self.frames[0].number <= target:
                self._one_frame()

    # ---- frames -------------------------------------------------------------------------------------------------

    def _crafted_frame(self, step: cap.FrameStep) -> None:
        assert self.frames[0].sender == step.side
        self._one_frame()

    def _one_frame(self) -> None:
        frame = self.frames.pop(0)
        if frame.sender == self.side:
            self._expect(frame)
            return
        if self.side == "a" and not self.scenario.crafted:
            self._crossing(frame)
        late = self.frames.pop(0) if frame.late and self.frames and self.frames[0].sender == frame.sender else None
        for raw in (late.delivered() if late else []) + frame.delivered():
            self.end.receive(raw)

    def _crossing(self, frame: cap.CapturedFrame) -> None:
        """Frames recorded behind a NAK that go on where the sender was had left before the NAK arrived."""
        if parse_frame(frame.data).opcode is not Opcode.RC_ACK or parse_frame(frame.data).syndrome >> 5 == 0:
            return
        while self.frames and self.frames[0].sender == "a" and parse_frame(self.frames[0].data).psn == self.next_psn:
            self._expect(self.frames.pop(0))

    def _expect(self, frame: cap.CapturedFrame) -> None:
        have = self.end.next_frame()
        if have is None:
            self.problems.append(f"frame {frame.number}: nothing sent, recorded {parse_frame(frame.data).opcode}")
            return
        self.problems += map(str, cap.compare_frame(frame.data, have, self.scenario.name, frame.number))
        sent = parse_frame(frame.data)
        read = sent.opcode is Opcode.RC_READ_REQUEST
        self.next_psn = psn_add(sent.psn, psn_packets(sent.dma_length, self.scenario.mtu) if read else 1)

    def _leftovers(self) -> None:
        left = self.end.pending + self.end.device.poll_tx()
        self.problems += [f"sent though not recorded: {parse_frame(raw)}" for raw in left]
        final = self.scenario.final.get(self.side)
        if final is not None and int(self.end.qp.state) != final.state:
            self.problems.append(f"state {self.end.qp.state.name}, recorded {final.state}")
        if final is not None and final.state == ep.QpState.RTS and not self.end.qp.is_ud:
            psns = (self.end.qp.requester.nxt, self.end.qp.responder.epsn)
            if psns != (final.sq_psn, final.rq_psn):
                self.problems.append(f"next PSNs {psns}, recorded {final}")
        extra = self.end.completions()[self.waiting_completions :]
        if extra and not self.scenario.crafted:
            self.problems.append(f"completions not recorded: {extra}")


def is_rnr_nak(raw: bytes) -> bool:
    frame = parse_frame(raw)
    return frame.opcode is Opcode.RC_ACK and frame.syndrome >> 5 == 1


def progress(scenario: cap.Scenario) -> dict[int, int]:
    """Completions of a -> number of the frame that brought the last of them, from a replay of a."""
    replay = Replay(replace(scenario, final={}), "a")
    reached = {0: 0}
    original = replay._one_frame

    def watched() -> None:
        number = replay.frames[0].number
        original()
        reached.setdefault(len(replay.end.completions()), number)

    replay._one_frame = watched
    replay.run()
    top = 0
    return {count: (top := max(top, reached.get(count, 0))) for count in range(max(reached) + 1)}


def test_every_capture_loads(scenario: cap.Scenario) -> None:
    assert scenario.frames and scenario.steps
    assert all(frame.data for frame in scenario.frames)


def test_requester(scenario: cap.Scenario) -> None:
    """The endpoint as a (the end that posts, and the real end of hand-made exchanges)."""
    problems = Replay(scenario, "a").run()
    assert not problems, "\n".join(problems)


def test_responder(scenario: cap.Scenario) -> None:
    """The endpoint as b (the end that answers)."""
    problems = Replay(scenario, "b").run()
    assert not problems, "\n".join(problems)


def test_repeated_read_starts_again(scenario: cap.Scenario) -> None:
    """A responder that starts a repeated READ with FIRST passes by the exceptions for it (R-RSP-6)."""
    problems = Replay(scenario, "b", ep.PeerPolicy()).run()
    assert not problems, "\n".join(problems)


def test_comparison_sees_every_field() -> None:
    """Each header field of a WRITE that differs is reported."""
    base = Frame(Opcode.RC_WRITE_ONLY, 0x11, psn=5, payload=b"abcde", va=0x1000, rkey=7, dma_length=5)
    changes = {
        "opcode": Opcode.RC_WRITE_FIRST, "dest_qpn": 0x12, "psn": 6, "payload": b"abcdf", "va": 0x1001, "rkey": 8,
        "dma_length": 6, "sport": 0xC001, "traffic_class": 4, "hop_limit": 63, "dont_fragment": False, "se": True,
        "migreq": True, "pkey": 0x7FFF, "fecn": True, "becn": True, "ackreq": True, "resv7": 1, "udp_checksum": 9,
        "src_ip": bytes(4), "dst_ip": bytes(4), "src_mac": bytes(6), "dst_mac": bytes(6), "vlan": (0, 5),
        "raw_pad_bytes": b"\1\0\0",
    }  # fmt: skip
    for field, value in changes.items():
        changed = replace(base, **{field: value}).pack()
        seen = {difference.field for difference in cap.compare_frame(base.pack(), changed, "any")}
        assert field in seen, field
    assert not cap.compare_frame(base.pack(), replace(base, ident=9).pack(), "any")
    broken = base.pack()[:-1] + bytes([base.pack()[-1] ^ 1])
    assert [d.field for d in cap.compare_frame(base.pack(), broken, "any")] == ["frame"]


def test_unknown_step_is_an_error() -> None:
    for text in ("a: dances", "a: post id=0 op=write colour=3", "a: completions wr=1 status=0"):
        with pytest.raises(cap.CaptureError):
            cap.parse_step(text)


def test_compare_frames_covers_coalesced_acks() -> None:
    acks = [Frame(Opcode.RC_ACK, 0x11, psn=psn, syndrome=0x1F, msn=psn).pack() for psn in (0xFFFFFF, 0, 1)]
    assert not cap.compare_frames(acks, acks, "any")
    assert not cap.compare_frames(acks, [acks[2]], "any", coalesced_acks=True)
    assert cap.compare_frames(acks, [acks[2]], "any")
    assert cap.compare_frames(acks, acks[:2], "any", coalesced_acks=True)
    assert cap.compare_frames(acks[:2], acks, "any")
