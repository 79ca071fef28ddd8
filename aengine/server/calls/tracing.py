"""The `traceparent` of W3C Trace Context, level 1. Reads it as strictly as the specification says; knows nothing of calls."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Where a call belongs in a distributed trace."""

    trace_id: str  # 32 hexadecimal digits
    parent_id: str  # 16
    sampled: bool


def parse_traceparent(value: str) -> TraceParent | None:
    """None for what is not valid: such a header is to be treated as if it had not come."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or match["version"] == "ff" or not int(match["trace"], 16) or not int(match["parent"], 16):
        return None
    if match["version"] == "00" and match["rest"] is not None:  # later versions may have more fields, this one has not
        return None
    return TraceParent(match["trace"], match["parent"], bool(int(match["flags"], 16) & 1))
