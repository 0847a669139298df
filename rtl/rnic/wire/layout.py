"""Network-order header layouts: declared in wire order, usable by hardware and by Python from the same declaration."""

from collections.abc import Mapping

from amaranth import *
from amaranth.lib import data

__all__ = ["WireLayout", "swap_bytes", "wire_layout"]


class WireLayout(data.StructLayout):
    """A header whose first listed field is first on the wire (most significant bits of the big-endian number).

    In hardware, take the header's bytes from the bus (byte 0 in bits 7:0) and pass them through :func:`swap_bytes`
    before looking at them through this layout. In Python, :meth:`pack` and :meth:`unpack` convert to and from bytes.

    Parameters: ``fields``, field name to shape in wire order; the sum of the widths must be whole bytes (ValueError).
    """

    def __init__(self, fields: Mapping):
        super().__init__(dict(reversed(list(fields.items()))))
        if self.size % 8:
            raise ValueError(f"header is {self.size} bits, must be whole bytes")

    @property
    def size_bytes(self) -> int:
        """Size on the wire in bytes."""
        return self.size // 8

    def pack(self, **values: int) -> bytes:
        """Wire bytes; a field not named is 0. ValueError on an unknown field or a value that does not fit."""
        word = 0
        for name, value in values.items():
            if name not in self.members:
                raise ValueError(f"header has no field {name!r}")
            field = self[name]
            if not 0 <= int(value) < 1 << field.width:
                raise ValueError(f"field {name} is {int(value):#x}, must fit {field.width} bits")
            word |= int(value) << field.offset
        return word.to_bytes(self.size_bytes, "big")

    def unpack(self, raw: bytes) -> dict[str, int]:
        """Fields as plain ints from exactly ``self.size_bytes`` wire bytes (ValueError on another length)."""
        if len(raw) != self.size_bytes:
            raise ValueError(f"header is {len(raw)} bytes, must be {self.size_bytes}")
        word = int.from_bytes(raw, "big")
        return {name: word >> field.offset & (1 << field.width) - 1 for name, field in self}


def wire_layout(fields: Mapping) -> WireLayout:
    """:class:`WireLayout` of ``fields`` (name to shape, wire order)."""
    return WireLayout(fields)


def swap_bytes(value) -> Value:
    """``value`` (whole bytes) with its bytes in reverse order: bus order to network order and back. No logic."""
    value = Value.cast(value)
    if len(value) % 8:
        raise ValueError(f"value is {len(value)} bits, must be whole bytes")
    return Cat(*(value.word_select(i, 8) for i in reversed(range(len(value) // 8))))
