"""What goes into and comes out of the translation window."""

from amaranth.lib import data

from ..abi import inline_bytes
from ..config import Params
from ..records import XlateStatus

__all__ = ["PacketPieces", "TranslatedJob", "inline_beats", "window_shape"]


def window_shape(p: Params) -> tuple[int, int]:
    """Packets in translation at once (a power of two above `desc_depth`, at most 16: half of them may wait for a page table),
    and bits of a segment number within a packet."""
    return 1 << min(4, p.desc_depth.bit_length()), max(1, (p.max_sge - 1).bit_length())


def inline_beats(p: Params) -> int:
    """Beats of the largest inline payload."""
    return -(-inline_bytes(7) // p.lanes)


class TranslatedJob(data.StructLayout):
    """A packet in the order in which its payload is read. ``status`` other than OK: nothing of it is read.

    Parameter ``job``, shape: TxJob or what is left of it."""

    def __init__(self, job):
        super().__init__({"job": job, "status": XlateStatus})


class PacketPieces(data.StructLayout):
    """Where a segment lies: ``span_0`` bytes at ``address_0`` and, with ``two``, ``span_1`` bytes at ``address_1``.
    ``last`` closes the packet."""

    def __init__(self, p: Params):
        super().__init__({
            "address_0": 64, "span_0": 13, "two": 1, "address_1": 64, "span_1": 13, "last": 1,
            "qpn": p.qpn_bits, "psn": 24,
        })  # fmt: skip
