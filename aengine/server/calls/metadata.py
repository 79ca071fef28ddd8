"""The metadata of a call: how large they are, and the ids that come with them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

Metadata = Iterable[tuple[str, str | bytes]]

REQUEST_ID_KEY = "x-request-id"
FIELD_BYTES = 32
"""Bytes that HTTP/2 counts for an entry of metadata beside its own."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-[0-9a-f]{2}(?P<rest>-.*)?")


def size_of(metadata: Metadata) -> int:
    """Bytes, as HTTP/2 counts them."""
    return sum(len(key) + len(value) + FIELD_BYTES for key, value in metadata)


def values_of(metadata: Metadata, name: str) -> list[str]:
    return [str(value) for key, value in metadata if key == name]


def request_id_of(metadata: Metadata) -> str:
    """The client's, if it is usable; else a random one."""
    given = values_of(metadata, REQUEST_ID_KEY)
    return given[0] if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) else uuid.uuid4().hex


def trace_id_of(metadata: Metadata) -> str | None:
    """The trace id of the `traceparent` of W3C Trace Context, level 1. None without one, and for one that is not valid."""
    given = values_of(metadata, "traceparent")
    match = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if match is None or match["version"] == "ff" or not int(match["trace"], 16) or not int(match["parent"], 16):
        return None
    if match["version"] == "00" and match["rest"] is not None:  # later versions may have more fields, this one has not
        return None
    return match["trace"]
