"""Declarations of memory structures shared by software and hardware.

A `Struct` is a fixed number of bytes, little-endian, made of `Field`s at fixed bit offsets. One declaration gives the
Amaranth layout (`Struct.layout`), the Python packer (`Struct.pack`, `Struct.unpack`) and the tables of the documentation and
the C header (`rnic.abi.export`).
"""

from __future__ import annotations

from dataclasses import dataclass

from amaranth.lib import data

__all__ = ["Field", "Struct"]


@dataclass(frozen=True)
class Field:
    """``width`` bits from bit ``offset`` of the structure (bit 0 is bit 0 of byte 0)."""

    name: str
    offset: int
    width: int
    doc: str

    @property
    def mask(self) -> int:
        return (1 << self.width) - 1


class Struct:
    """A structure of ``size`` bytes.

    ``fields`` is a list of ``(name, byte, bits, doc)`` or ``(name, (byte, bit), bits, doc)``. Overlap or a field past the
    end raises ``ValueError``.
    """

    def __init__(self, name: str, size: int, doc: str, fields: list):
        self.name, self.size, self.doc = name, size, doc
        self.fields: dict[str, Field] = {}
        used = 0
        for fname, where, width, fdoc in fields:
            byte, bit = where if isinstance(where, tuple) else (where, 0)
            field = Field(fname, 8 * byte + bit, width, fdoc)
            if field.offset + width > 8 * size:
                raise ValueError(f"{name}.{fname} ends at bit {field.offset + width}, the structure has {8 * size}")
            if used & field.mask << field.offset:
                raise ValueError(f"{name}.{fname} overlaps another field")
            used |= field.mask << field.offset
            self.fields[fname] = field
        self.layout = data.FlexibleLayout(
            8 * size, {f.name: data.Field(f.width, f.offset) for f in self.fields.values()}
        )

    def pack_int(self, **values: int) -> int:
        """The structure as one integer; fields not named are 0. ``ValueError`` for a value that does not fit."""
        total = 0
        for name, value in values.items():
            if name not in self.fields:
                raise ValueError(f"{self.name} has no field {name}")
            field = self.fields[name]
            if not 0 <= int(value) <= field.mask:
                raise ValueError(f"{self.name}.{name} is {value}, must be 0..{field.mask:#x}")
            total |= int(value) << field.offset
        return total

    def pack(self, **values: int) -> bytes:
        """The structure as bytes."""
        return self.pack_int(**values).to_bytes(self.size, "little")

    def words(self, **values: int) -> list[int]:
        """The structure as 32-bit words."""
        raw = self.pack_int(**values)
        return [raw >> 32 * i & 0xFFFF_FFFF for i in range((self.size + 3) // 4)]

    def unpack(self, raw: bytes | int) -> dict[str, int]:
        """All fields of ``raw`` (bytes, little-endian, or an integer)."""
        value = raw if isinstance(raw, int) else int.from_bytes(raw[: self.size], "little")
        return {f.name: value >> f.offset & f.mask for f in self.fields.values()}

    def unpack_words(self, words: list[int]) -> dict[str, int]:
        """All fields of a list of 32-bit words."""
        return self.unpack(sum(w << 32 * i for i, w in enumerate(words)))
