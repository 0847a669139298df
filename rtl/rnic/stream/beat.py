"""The one packet-beat layout every data stream of the RNIC uses."""

from amaranth.lib import data

__all__ = ["Beat", "keep_of_count"]


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
