"""How much of the WQE fetch one QP may fill."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import wiring

__all__ = ["FetchShare"]

TICK_BITS = 4  # a translation is slow after one to two times 2**TICK_BITS cycles; a job that is not taken for as long is stuck


class FetchShare(wiring.Component):
    """Which jobs `WqeFetch` takes while slots are in use, and whether all it holds is of one QP."""

    def _elaborate_share(self, m, used, translated, same_qp, newest, bounce, bounced_epoch, done_mask, take, drop, target, intake,
                         issue, issued, free):  # fmt: skip
        """What happens to the job that waits, when slots are in use: decided in three steps, from registers."""
        n = self.slots
        job = self.job
        leaves = Signal()  # the job is another one in the next cycle
        dropped = Signal()  # and this one is thrown away
        waited = Signal(3)
        match = Signal(n)
        count, free_slots = Signal(range(n + 1)), Signal(range(n + 1))
        crowded, slow, slow_now = Signal(), Signal(), Signal()
        tick = Signal(TICK_BITS)
        middle, old = Signal(n), Signal(n)
        m.d.comb += [
            leaves.eq(job.valid & job.ready),
            target.eq(match & used & newest & ~done_mask),
        ]
        m.d.sync += [
            tick.eq(tick + 1),
            waited.eq(Mux(leaves, 0, Cat(job.valid, waited))),
            match.eq(same_qp),
            count.eq(sum(match[1:], match[0])),
            free_slots.eq(n - sum(used[1:], used[0])),
            slow.eq((match & used & old & ~translated).any()),
            slow_now.eq(slow),
            crowded.eq(count >= free_slots),
            take.eq(waited[2] & ~leaves & (~target.any() | (~crowded & ~(target & bounce).any()) | job.payload.marker)),
            drop.eq(waited[2] & ~leaves & ~issue & ~job.payload.marker & target.any()
                    & ((crowded & slow_now) | (target & bounce).any())),
        ]
        m.d.comb += dropped.eq(drop & ~issue)
        with m.If(dropped):
            m.d.sync += bounce.eq(bounce | target)
            for i in range(n):
                with m.If(target[i]):
                    m.d.sync += bounced_epoch[i].eq(job.payload.epoch)
        for i in range(n):
            with m.If(intake & (free == i)):
                m.d.sync += [middle[i].eq(0), old[i].eq(0), bounce[i].eq(0)]
            with m.Elif(issued[i]):  # what is slow is a translation, not the consumer
                m.d.sync += [middle[i].eq(0), old[i].eq(0)]
            with m.Elif(tick.all()):
                m.d.sync += [middle[i].eq(1), old[i].eq(middle[i])]
        m.d.sync += Assert(~dropped | (job.valid & target.any()), "WqeFetch: a job is thrown away and nobody will tell")

    def _elaborate_alone(self, m, token):
        p = self.p
        job, out = self.job, self.wqe
        most = self.slots + 2 * p.desc_depth + 8
        inside = Signal(range(most + 1))  # jobs
        run = Signal(range(most + 1))  # the newest of them that are of one QP
        leaves = Signal()
        blocked = Signal(TICK_BITS + 1)  # cycles
        mine = Signal()
        m.d.comb += [
            leaves.eq(token.valid & token.ready),
            mine.eq((job.payload.qpn == self.alone_qpn) & ~job.payload.marker),
        ]
        with m.If(self._intake != leaves):
            m.d.sync += inside.eq(inside + Mux(leaves, -1, 1))
        with m.If(self._intake):
            m.d.sync += [self.alone_qpn.eq(job.payload.qpn), run.eq(1)]
            with m.If(mine):
                m.d.sync += run.eq(Mux(run == most, most, run + 1))
        m.d.sync += [
            blocked.eq(Mux(job.valid & ~job.ready, Mux(blocked[-1], blocked, blocked + 1), 0)),
            self.alone.eq((run >= inside) & (~job.valid | mine) & ~blocked[-1]
                          & (~out.valid | (out.payload.qpn == self.alone_qpn))),
            Assert(inside <= most, "WqeFetch: more jobs than places"),
        ]
