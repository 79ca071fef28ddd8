"""What bounds the cost of a call's messages: how many fields one may have, counted in its bytes before it is decoded, and how large its
metadata are. Knows the wire format of Protocol Buffers.

Bytes do not bound what a message costs. Two of them can be an empty message of a list, which takes 50 bytes of memory and, with all the
others, seconds of the event loop; the bytes of a text cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from google.protobuf.descriptor import Descriptor

from aengine.api.errors import InvalidRequestError

UNCOUNTED_BYTES = 256 * 1024
"""Messages up to here are decoded in some 10 ms, whatever they hold."""
MAX_FIELDS = 65536
"""Most fields of a larger message, with all messages in it. An entry of a map is one field, and so are 64 bytes of a packed list."""
_PACKED_BYTES = 64
_VARINT_BYTES = 10
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # types on the wire; the two others are the borders of groups


def check_fields(raw: bytes, kind: Descriptor) -> None:
    """Raises `InvalidRequestError` for the bytes of a message of `kind` that has too many fields. Does not say whether they are such a
    message."""
    if len(raw) > UNCOUNTED_BYTES and _has_too_many(raw, kind):
        description = f"{len(raw)} bytes with more than {MAX_FIELDS} fields; only up to {UNCOUNTED_BYTES} bytes may be so many"
        raise InvalidRequestError.of("request", description)


def _has_too_many(raw: bytes, kind: Descriptor) -> bool:
    left, at, end, fields = MAX_FIELDS, 0, len(raw), _fields(kind)
    outer: list[tuple[int, Mapping[int, Descriptor | None]]] = []  # the messages around this one: where they end
    while True:
        while at >= end:
            if not outer:
                return False
            end, fields = outer.pop()
        try:
            tag, at = _read_varint(raw, at)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, at = _read_varint(raw, at)
            elif wire_type == _LENGTH:
                length, at = _read_varint(raw, at)
                if (inner := fields.get(tag >> 3)) is not None:
                    outer.append((end, fields))
                    end, fields = at + length, _fields(inner)
                else:
                    at += length
                    left -= length // _PACKED_BYTES if tag >> 3 in fields else 0
            elif wire_type in (_EIGHT_BYTES, _FOUR_BYTES):
                at += 8 if wire_type == _EIGHT_BYTES else 4
        except (IndexError, ValueError):
            return False  # it is no message, as decoding it will show
        left -= 1
        if left < 0:
            return True


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends. Raises IndexError or ValueError for what is none."""
    byte = raw[at]
    if byte < 0x80:
        return byte, at + 1
    value = 0
    for place in range(_VARINT_BYTES):
        byte = raw[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number that is too long")


@lru_cache(maxsize=1024)
def _fields(kind: Descriptor) -> Mapping[int, Descriptor | None]:
    """The fields that are messages, except for entries of maps, by number; and those that are packed lists of numbers, with None."""
    messages = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
    return {
        **{field.number: None for field in kind.fields if field.is_packed},
        **{number: inner for number, inner in messages.items() if not inner.GetOptions().map_entry},
    }


Metadata = Iterable[tuple[str, str | bytes]]

FIELD_BYTES = 32
"""Bytes that HTTP/2 counts for an entry of metadata beside its own."""


def size_of(metadata: Metadata) -> int:
    """The bytes that HTTP/2 counts for metadata."""
    return sum(len(key) + len(value) + FIELD_BYTES for key, value in metadata)


def values_of(metadata: Metadata, name: str) -> list[str]:
    return [str(value) for key, value in metadata if key == name]
