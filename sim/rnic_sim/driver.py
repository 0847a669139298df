"""The device driver: commands, object numbers, doorbells. It knows the RNIC only through the seam and `rnic.abi`.

Sizes come from the capability registers, never from a configuration of the model.
"""

import errno
import os

from rnic import abi
from rnic.abi import CmdStatus, Command

from .seam import Host

__all__ = ["Driver", "RDMAError", "join_words"]

_ERRNO = {
    CmdStatus.BAD_COMMAND: errno.ENOSYS,
    CmdStatus.BAD_INDEX: errno.EINVAL,
    CmdStatus.NOT_FOUND: errno.ENOENT,
    CmdStatus.IN_USE: errno.EBUSY,
    CmdStatus.BAD_PARAM: errno.EINVAL,
    CmdStatus.BAD_STATE: errno.EINVAL,
    CmdStatus.MISSING_ATTR: errno.EINVAL,
    CmdStatus.EXTRA_ATTR: errno.EINVAL,
}


def join_words(words: list[int]) -> int:
    """32-bit words as one number, first word lowest."""
    return sum(w << 32 * i for i, w in enumerate(words))


class RDMAError(OSError):
    """A verb failed; ``errno`` says why, ``args`` hold the text."""

    def __init__(self, code: int, text: str):
        super().__init__(code, f"{text}: {os.strerror(code)}")
        self.error_code = code


class Numbers:
    """Free object numbers of one kind; lowest first, a freed number is reused last."""

    def __init__(self, kind: str, numbers: range):
        self.kind, self.free = kind, list(numbers)

    def take(self, wanted: int | None = None) -> int:
        if not self.free:
            raise RDMAError(errno.ENOMEM, f"no {self.kind} left")
        if wanted is None:
            return self.free.pop(0)
        if wanted not in self.free:
            raise RDMAError(errno.EBUSY, f"{self.kind} {wanted:#x} is in use or out of range")
        self.free.remove(wanted)
        return wanted

    def give(self, number: int) -> None:
        self.free.append(number)


class Driver:
    """One RNIC. Raises `RDMAError` with ENODEV when the device is not an rnic of this ABI."""

    COMMAND_POLLS = 10_000

    def __init__(self, host: Host):
        self.host = host
        if self.reg("MAGIC") != abi.MAGIC or self.reg("ABI_VERSION") != abi.ABI_VERSION:
            raise RDMAError(errno.ENODEV, "not an rnic, or of another ABI version")
        self.caps = {
            name.lower(): self.reg(name)
            for name in (
                "CLOCK_HZ", "DATA_WIDTH", "NUM_QPS", "NUM_MRS", "NUM_CQS", "NUM_EQS", "NUM_GIDS", "NUM_PKEYS", "MAX_SGE",
                "MAX_RD_ATOMIC", "MAX_LOG_RING", "MAX_PMTU", "FEATURES", "SQ_OUTSTANDING",
            )
        }  # fmt: skip
        self.qpns = Numbers("QPN", range(2, self.caps["num_qps"]))  # 0 and 1 are the management QPs of the spec
        self.cqns = Numbers("CQN", range(self.caps["num_cqs"]))
        self.keys = Numbers("MR", range(1, self.caps["num_mrs"]))  # index 0 stays unused: key 0 never works
        self._variants: dict[int, int] = {}

    def reg(self, name: str) -> int:
        """A register by name."""
        return self.host.csr_read(abi.register(name))

    def counters(self) -> dict[str, int]:
        """All counters by name."""
        return {name: self.host.csr_read(abi.COUNTER_BASE + 4 * i) for i, (name, _) in enumerate(abi.COUNTERS)}

    def next_variant(self, index: int) -> int:
        """A fresh low byte for a key of this index, so that a stale key does not match (R-MR-1)."""
        self._variants[index] = (self._variants.get(index, 0) + 1) & 0xFF
        return self._variants[index]

    def command(self, code: Command, words: list[int]) -> None:
        """Run a command with its operand words; raises `RDMAError` with the errno of its status."""
        for i, word in enumerate(words):
            self.host.csr_write(abi.MAILBOX_BASE + 4 * i, word)
        self.host.csr_write(abi.register("CMD_OP"), int(code))
        for _ in range(self.COMMAND_POLLS):
            status = self.reg("CMD_STATUS")
            if not status >> 31:
                break
        else:
            raise RDMAError(errno.ETIMEDOUT, f"command {code.name} did not end")
        result = CmdStatus(status & 0xFF)
        if result != CmdStatus.OK:
            raise RDMAError(_ERRNO[result], f"command {code.name} failed with {result.name}")

    def reset(self) -> None:
        """Device reset, also with traffic under way; the device has forgotten everything then. ETIMEDOUT when it does not end."""
        self.host.csr_write(abi.register("CONTROL"), 1)
        for _ in range(self.COMMAND_POLLS):
            if not self.reg("STATUS") & 2:
                return
        raise RDMAError(errno.ETIMEDOUT, "device reset did not end")

    def mailbox(self, count: int) -> list[int]:
        """The first words of the mailbox (answers of QUERY commands)."""
        return [self.host.csr_read(abi.MAILBOX_BASE + 4 * i) for i in range(count)]

    def doorbell(self, page: int, number: int, datum: int) -> None:
        """Ring a doorbell."""
        self.host.csr_write(page + 4 * number, datum & 0xFFFF_FFFF)
