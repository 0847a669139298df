"""Events with the names of pyverbs: `CompChannel` and `AsyncEvent`, over the event queue of a context."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rnic import abi
from rnic.abi import Command

from .driver import join_words
from .enums import AccessFlags, EventType

if TYPE_CHECKING:
    from .verbs import CQ, Context

__all__ = ["AsyncEvent", "CompChannel", "EventQueue"]

_LOG_ENTRIES = 8  # one page
_WAIT_CYCLES = 16  # between two looks at the interrupt
_PATIENCE = 100_000

_ASYNC = {
    abi.EventType.CQ_ERR: EventType.CQ_ERR, abi.EventType.QP_FATAL: EventType.QP_FATAL,
    abi.EventType.QP_REQ_ERR: EventType.QP_REQ_ERR, abi.EventType.QP_ACCESS_ERR: EventType.QP_ACCESS_ERR,
}  # fmt: skip


@dataclass
class AsyncEvent:
    """An asynchronous event; ``number`` is the QPN or the CQN it is about, ``stamp`` the RNIC's cycle."""

    event_type: EventType
    number: int
    stamp: int


class EventQueue:
    """Event queue 0 of a device: completion events go to their channels, all others to the context."""

    def __init__(self, context: Context, eqn: int = 0):
        self.context, self.eqn = context, eqn
        self.asynchronous: deque[AsyncEvent] = deque()
        self._consumer = 0
        size = abi.EQE_BYTES << _LOG_ENTRIES
        self._mapping = context.memory.map(size)
        ring, self._tables = context.memory.describe(self._mapping.va, size, rights=AccessFlags.LOCAL_WRITE, base=0)
        driver = context.driver
        driver.command(
            Command.CREATE_EQ, abi.CMD_CREATE_EQ.words(eqn=eqn, log_size=_LOG_ENTRIES, valid=1, ring=join_words(ring))
        )
        context.host.csr_write(abi.register("IRQ_MASK"), driver.reg("IRQ_MASK") | 1 << eqn)
        self._arm()

    def _arm(self) -> None:
        self.context.driver.doorbell(abi.DB_EQ, self.eqn, 1 << 31 | self._consumer)

    def service(self) -> bool:
        """What an interrupt handler does: when the cause is set, clear it, take all EQEs, arm again. An EQE that comes in
        between raises the interrupt at the arming. Returns whether the cause was set."""
        host = self.context.host
        if not self.context.driver.reg("IRQ_CAUSE") >> self.eqn & 1:
            return False
        host.csr_write(abi.register("IRQ_CAUSE"), 1 << self.eqn)
        while True:
            slot = self._consumer & (1 << _LOG_ENTRIES) - 1
            eqe = abi.EQE.unpack(self.context.memory.read(self._mapping.va + slot * abi.EQE_BYTES, abi.EQE_BYTES))
            if eqe["phase"] == self._consumer >> _LOG_ENTRIES & 1:  # 1 in the first round
                break
            self._consumer = self._consumer + 1 & 0xFF_FFFF
            self._dispatch(eqe)
        self._arm()
        return True

    def _dispatch(self, eqe: dict[str, int]) -> None:
        kind = abi.EventType(eqe["type"])
        self.context.note("event", type=kind.name, number=eqe["id"])
        if kind == abi.EventType.COMPLETION:
            cq = self.context.cqs.get(eqe["id"])
            if cq is not None and cq.channel is not None:  # it may have been destroyed since
                cq.channel.pending.append(cq)
        else:
            self.asynchronous.append(AsyncEvent(_ASYNC[kind], eqe["id"], eqe["stamp"]))

    def wait(self, queue: deque, max_cycles: int) -> None:
        """Sleep until ``queue`` has an entry. ``TimeoutError`` after ``max_cycles``."""
        for _ in range(-(-max_cycles // _WAIT_CYCLES)):
            self.service()
            if queue:
                return
            self.context.host.relax(_WAIT_CYCLES)
        raise TimeoutError(f"no event within {max_cycles} cycles")


class CompChannel:
    """Completion channel: where the events of its CQs arrive."""

    def __init__(self, context: Context):
        self.context = context
        self.pending: deque[CQ] = deque()

    def get_cq_event(self, *, max_cycles: int = _PATIENCE) -> CQ:
        """The CQ of the oldest event; waits for the interrupt. ``TimeoutError`` after about ``max_cycles``."""
        self.context.events.wait(self.pending, max_cycles)
        return self.pending.popleft()
