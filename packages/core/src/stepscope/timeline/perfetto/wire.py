"""Protocol buffers as bytes on the wire: the four kinds of fields that a trace needs.

Source: "Encoding" of the Protocol Buffers documentation.
"""

from __future__ import annotations

import struct

_SMALL = 1 << 14


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_VARINTS = [_varint(value) for value in range(_SMALL)]
_FIRSTS = [bytes((value & 0x7F | 0x80, value >> 7 | 0x80)) for value in range(_SMALL)]
"""The same 14 bits where more follow."""


def varint(value: int) -> bytes:
    """Of an unsigned number, or of a negative one as int32 and int64 have it."""
    if 0 <= value < _SMALL:
        return _VARINTS[value]
    if value < 0:
        value &= 0xFFFF_FFFF_FFFF_FFFF
    out = b""
    while value >= _SMALL:
        out += _FIRSTS[value & _SMALL - 1]
        value >>= 14
    return out + _VARINTS[value]


def number(field: int, value: int) -> bytes:
    """A field of any integer type, an enum or a bool."""
    return _VARINTS[field << 3] + varint(value)


def fixed(field: int, value: int) -> bytes:
    """A fixed64 field."""
    return _VARINTS[field << 3 | 1] + value.to_bytes(8, "little")


def double(field: int, value: float) -> bytes:
    return _VARINTS[field << 3 | 1] + struct.pack("<d", value)


def block(field: int, content: bytes) -> bytes:
    """A field of bytes, or of another message."""
    return _VARINTS[field << 3 | 2] + varint(len(content)) + content


def text(field: int, value: str) -> bytes:
    return block(field, value.encode(errors="replace"))
