"""The ids that come with a call: its own and that of its trace."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-[0-9a-f]{2}(?P<rest>-.*)?")


def request_id_of(given: Sequence[str]) -> str:
    """The client's, of the values of `REQUEST_ID_KEY`, if it is usable; else a random one."""
    return given[0] if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) else uuid.uuid4().hex


def trace_id_of(given: Sequence[str]) -> str | None:
    """The trace id of the `traceparent` of W3C Trace Context, level 1, of the values of that header. None without one, and for one that is
    not valid."""
    match = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if match is None or match["version"] == "ff" or not int(match["trace"], 16) or not int(match["parent"], 16):
        return None
    if match["version"] == "00" and match["rest"] is not None:  # later versions may have more fields, this one has not
        return None
    return match["trace"]
