"""The one packet-beat layout every data stream of the RNIC uses."""

from amaranth import Cat
from amaranth.lib import data

__all__ = ["Beat", "StoredBeat", "keep_of_count"]


class Beat(data.StructLayout):
    """One bus word of a packet.

    Byte 0 of the packet is ``data[7:0]`` of the first beat. ``keep`` is contiguous from bit 0 and full except on the
    last beat; no beat is without a byte, except that a packet of zero bytes is one beat with ``keep == 0`` and
    ``last == 1``.
    ``err`` is meaningful on the last beat only: the producer could not deliver the packet (bus error, abort), the bytes
    are not to be used.

    Parameters: ``width``, bus width in bits (64, 128, 256 or 512).
    """

    def __init__(self, width: int):
        if width not in (64, 128, 256, 512):
            raise ValueError(f"data_width is {width}, must be 64, 128, 256 or 512")
        super().__init__({"data": width, "keep": width // 8, "last": 1, "err": 1})


def keep_of_count(count: int, lanes: int) -> int:
    """Keep mask of ``count`` bytes (0..lanes) as a Python int."""
    if not 0 <= count <= lanes:
        raise ValueError(f"count is {count}, must be 0..{lanes}")
    return (1 << count) - 1


class StoredBeat(data.StructLayout):
    """A `Beat` of at least one byte as a memory holds it: the number of its bytes, less 1, for ``keep``.

    Parameters: ``width``, bus width in bits.
    """

    def __init__(self, width: int):
        super().__init__({"data": width, "count_less_1": range(width // 8), "last": 1, "err": 1})

    @staticmethod
    def put(into, beat) -> list:
        """Statements: ``into`` holds ``beat``."""
        keep, count = beat.keep, into.count_less_1
        ends = [keep[lane] & ~keep[lane + 1] for lane in range(len(keep) - 1)] + [keep[-1]]  # the last lane with a byte
        return [
            *(into[name].eq(beat[name]) for name in ("data", "last", "err")),
            *(count[bit].eq(Cat(end for lane, end in enumerate(ends) if lane >> bit & 1).any()) for bit in range(len(count))),
        ]

    @staticmethod
    def get(beat, stored) -> list:
        """Statements: ``beat`` is what ``stored`` holds."""
        return [
            *(beat[name].eq(stored[name]) for name in ("data", "last", "err")),
            beat.keep.eq(Cat(stored.count_less_1 >= lane for lane in range(len(beat.keep)))),
        ]
