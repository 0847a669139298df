"""The software endpoint as one end of a capture's scenario, for `rnic_tb.replay.Replay`."""

from __future__ import annotations

from dataclasses import replace

from . import captures as cap
from . import endpoint as ep
from .replay import Replay

__all__ = ["AS_PEER", "EndpointEnd", "progress", "replay_endpoint"]

PD = 7
QKEY = 0x11111111
WINDOW_BASE, WINDOW_BYTES = 0x1000, 4096  # where rc_send_inv binds its windows

AS_PEER = ep.PeerPolicy(read_gap_retry=False, read_restart_with_first=False)  # section 21 #4, #5


class EndpointEnd:
    """One software endpoint set up as one end of a scenario; `wcs` collects its completions."""

    eager = False

    def __init__(self, scenario: cap.Scenario, side: str, policy: ep.PeerPolicy = AS_PEER):
        self.scenario, self.side, self.policy = scenario, side, policy
        self.me, self.peer = scenario.end(side), scenario.end("b" if side == "a" else "a")
        self.device = ep.Device(self.me.mac, [self.me.ip])
        self.cq = ep.CompletionQueue(4096)
        self.srq = ep.SharedReceiveQueue(128, 16) if side == "b" and scenario.setup.b_srq else None
        self.region = self._memory()
        self.qp = self._queue_pair()
        self.wcs: list[cap.ExpectedWc] = []
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

    def write_memory(self, offset: int, data: bytes) -> None:
        self.region.write(self.me.addr + offset, data)

    def read_memory(self, offset: int, length: int) -> bytes:
        return self.region.read(self.me.addr + offset, length)

    # ---- frames -----------------------------------------------------------------------------------------------

    def next_frame(self, repeated: bool = True) -> bytes | None:
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
            self.pending += self.device.poll_tx()

    def leftovers(self) -> list[bytes]:
        return self.pending + self.device.poll_tx()

    # ---- results ----------------------------------------------------------------------------------------------

    def completions(self, wanted: int = 0, or_frame: bool = False) -> list[cap.ExpectedWc]:
        self.wcs += [
            cap.ExpectedWc(
                wc.wr_id, wc.status, wc.byte_len, wc.opcode, wc.inv_rkey if wc.flags & ep.WcFlag.WITH_INV else wc.imm,
                int(wc.flags),
            )
            for wc in self.cq.poll()
        ]  # fmt: skip
        return self.wcs

    def run_timers(self, wanted: int) -> None:
        """The last timeout, behind the last frame, ends a message that is never answered."""
        due = self.device.next_deadline()
        if len(self.completions()) < wanted and due is not None:
            self.device.advance(due - self.device.now)

    def final_problems(self, final: cap.FinalState) -> list[str]:
        """State; in RTS also the next PSNs."""
        out = []
        if int(self.qp.state) != final.state:
            out.append(f"state {self.qp.state.name}, recorded {final.state}")
        if final.state == ep.QpState.RTS and not self.qp.is_ud:
            psns = (self.qp.requester.nxt, self.qp.responder.epsn)
            if psns != (final.sq_psn, final.rq_psn):
                out.append(f"next PSNs {psns}, recorded {final}")
        return out


def progress(scenario: cap.Scenario) -> dict[int, int]:
    """Completions of a -> number of the frame that brought the last of them, from a replay of a."""
    end = EndpointEnd(scenario, "a")
    replay = Replay(replace(scenario, final={}), "a", end)
    reached = {0: 0}
    original = replay.one_frame

    def watched() -> None:
        number = replay.frames[0].number
        original()
        reached.setdefault(len(end.completions()), number)

    replay.one_frame = watched
    replay.run()
    top = 0
    return {count: (top := max(top, reached.get(count, 0))) for count in range(max(reached) + 1)}


def replay_endpoint(scenario: cap.Scenario, side: str, policy: ep.PeerPolicy = AS_PEER) -> list[str]:
    """Problems of the endpoint as one end."""
    return Replay(scenario, side, EndpointEnd(scenario, side, policy), progress).run()
