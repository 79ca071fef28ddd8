"""Messages as bytes, for what no library would send."""

from __future__ import annotations


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def field(number: int, content: bytes) -> bytes:
    """A text, a message or a packed list."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def unpacked(number: int, value: int) -> bytes:
    """An entry of a list of numbers."""
    return varint(number << 3) + varint(value)
