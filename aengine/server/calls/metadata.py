"""The metadata of a call: how large they are, and the values of a key."""

from __future__ import annotations

from collections.abc import Iterable

Metadata = Iterable[tuple[str, str | bytes]]

FIELD_BYTES = 32
"""Bytes that HTTP/2 counts for an entry of metadata beside its own."""


def size_of(metadata: Metadata) -> int:
    """Bytes, as HTTP/2 counts them."""
    return sum(len(key) + len(value) + FIELD_BYTES for key, value in metadata)


def values_of(metadata: Metadata, name: str) -> list[str]:
    return [str(value) for key, value in metadata if key == name]
