"""The hierarchy of an FST file, read without a library: what a wave viewer gets to know of names and enum tables."""

import gzip
import struct
from pathlib import Path

__all__ = ["hierarchy"]


def _lz4(data: bytes, size: int) -> bytes:
    """An LZ4 block."""
    out, at = bytearray(), 0

    def more(count: int) -> int:
        nonlocal at
        if count == 15:
            while True:
                byte = data[at]
                at += 1
                count += byte
                if byte != 255:
                    break
        return count

    while at < len(data):
        token = data[at]
        at += 1
        literals = more(token >> 4)
        out += data[at : at + literals]
        at += literals
        if at >= len(data):
            break
        offset = data[at] | data[at + 1] << 8
        at += 2
        for _ in range(4 + more(token & 15)):
            out.append(out[-offset])
    assert len(out) == size
    return bytes(out)


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    return data[at:end].decode(), end + 1


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 128:
            return value, at


def hierarchy(path: Path) -> tuple[dict[str, str | None], dict[str, list[str]]]:
    """(variables: dotted path as GTKWave calls it -> name of its enum type or None, enum types: the names of their values)."""
    raw, at = path.read_bytes(), 0
    data = b""
    while at < len(raw):
        kind, length = raw[at], struct.unpack_from(">Q", raw, at + 1)[0]
        body = raw[at + 9 : at + 1 + length]
        if kind in (4, 6):
            size = struct.unpack_from(">Q", body)[0]
            data = gzip.decompress(body[8:]) if kind == 4 else _lz4(body[8:], size)
        at += 1 + length
    scopes: list[str] = []
    variables: dict[str, str | None] = {}
    tables: dict[int, tuple[str, list[str]]] = {}
    pending, at = None, 0
    while at < len(data):
        tag = data[at]
        at += 1
        if tag == 254:  # scope
            name, at = _text(data, at + 1)
            _, at = _text(data, at)
            scopes.append(name)
        elif tag == 255:
            scopes.pop()
        elif tag == 252:  # attribute
            name, after = _text(data, at + 2)
            number, after = _number(data, after)
            if data[at] == 0 and data[at + 1] == 7:  # an enum table, or the use of one by the next variable
                if name:
                    words = name.split(" ")
                    tables[number] = (words[0], words[2 : 2 + int(words[1])])
                else:
                    pending = number
            at = after
        elif tag != 253:  # variable of type `tag`
            name, at = _text(data, at + 1)
            _, at = _number(data, at)
            _, at = _number(data, at)
            variables[".".join([*scopes, name.replace(" [", "[")])] = None if pending is None else tables[pending][0]
            pending = None
    return variables, dict(tables.values())
