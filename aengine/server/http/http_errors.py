"""Errors as HTTP: reasons of the core -> statuses, and bodies in the shape of OpenAI or of Anthropic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from aengine.api.dataclass import dataclass
from aengine.server.core.calls_in_flight import CURRENT_CALL
from aengine.server.core.errors import MAX_VIOLATIONS, ServiceError

STATUSES: Mapping[str, int] = {
    "REQUEST_ID_IN_USE": 409,
    "ADAPTER_NOT_FOUND": 404,
    "BAD_ADAPTER": 409,
    "BAD_WEIGHTS": 409,
    "INSUFFICIENT_MEMORY": 409,
    "REQUESTS_IN_FLIGHT": 409,
    "KV_CAPACITY": 400,
    "CONTEXT_LENGTH_EXCEEDED": 400,
    "INVALID_FIELD": 400,
    "NOTHING_TO_CHOOSE": 400,
    "REQUEST_ENDED": 408,
    "NO_TOKENIZER": 400,
    "MODEL_NOT_FOUND": 404,
    "REQUEST_NOT_FOUND": 404,
    "DEADLINE_PASSED": 504,
    "QUEUE_FULL": 429,
    "TOO_MANY_CALLS": 429,
    "METADATA_TOO_LARGE": 431,
    "ANSWER_TOO_LARGE": 400,
    "DRAINING": 503,
    "NOT_READY": 503,
    "ENGINE_DEAD": 503,
    "NO_REPLICA": 503,
    "POISON_REQUEST": 500,
    "READER_REPLACED": 409,
    "READER_STALLED": 408,
    "SENDER_STALLED": 408,
    "NOT_RESUMABLE": 409,
    "EVENTS_DROPPED": 410,
    "NO_CREDENTIALS": 401,
    "BAD_CREDENTIALS": 401,
    "ADMIN_ONLY": 403,
    "FOREIGN_HOST": 403,
    "FOREIGN_ORIGIN": 403,
    "METHOD_NOT_FOUND": 404,
    "BUG": 500,
}
"""All reasons of the core."""
CLIENT_LEFT = 499
"""Recorded for a call whose client went away; nobody is told."""

_OPENAI_TYPES: Mapping[int, str] = {
    **{401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"},
    **{500: "server_error", 503: "overloaded_error", 504: "timeout_error"},
}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"},
    **{500: "api_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error"},
}

_write = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
Headers = Sequence[tuple[bytes, bytes]]


class HttpError(ServiceError):
    """One that has a status of its own."""

    def __init__(self, reason: str, message: str, status: int, headers: Headers = ()) -> None:
        super().__init__(reason, message)
        self.status = status
        self.headers = headers


def _openai_body(error: ServiceError, status: int, debug: bool) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`; `code` is the reason in lower case, `param` the path of the first field."""
    body: dict[str, Any] = {
        "message": error.message,
        "type": _OPENAI_TYPES.get(status, "invalid_request_error"),
        "param": error.violations[0].field if error.violations else None,
        "code": error.reason.lower(),
        **_details(error, debug),
    }
    return {"error": body}


def _anthropic_body(error: ServiceError, status: int, debug: bool) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
    call = CURRENT_CALL.get()
    details = {"code": error.reason.lower(), **_details(error, debug)}
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message, **details},
        "request_id": None if call is None else call.request_id,
    }


@dataclass(frozen=True, slots=True)
class ErrorStyle:
    """How an API tells of errors."""

    body_of: Callable[[ServiceError, int, bool], dict[str, Any]]  # with the status; the flag adds the traceback of a bug
    event: bytes = b""  # the line that names the event of an error in a stream
    start: bytes = b"data: "  # before an error in a stream, and
    end: bytes = b"\n\n"  # behind it
    statuses: Mapping[str, int] = field(default_factory=dict)  # for reasons that have another one than in `STATUSES`

    def status(self, error: ServiceError) -> int:
        return error.status if isinstance(error, HttpError) else self.statuses.get(error.reason) or STATUSES[error.reason]

    def body(self, error: ServiceError, debug: bool = False) -> bytes:
        return to_json(self.body_of(error, self.status(error), debug))

    def stream_event(self, error: ServiceError, debug: bool = False) -> bytes:
        """The last event of a stream that fails."""
        return self.event + self.start + self.body(error, debug) + self.end


OPENAI = ErrorStyle(_openai_body)
ANTHROPIC = ErrorStyle(_anthropic_body, event=b"event: error\n", statuses={"QUEUE_FULL": 529})


def error_headers(error: ServiceError, status: int) -> list[tuple[bytes, bytes]]:
    headers = list(error.headers) if isinstance(error, HttpError) else []
    if error.retry_delay is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_delay.total_seconds()))))
    elif status == 409:
        headers.append((b"x-should-retry", b"false"))  # the clients of OpenAI and Anthropic would
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def to_json(value: Any) -> bytes:
    return _write(value).encode("utf-8", "replace")


def _details(error: ServiceError, debug: bool) -> dict[str, Any]:
    """What is ours."""
    details: dict[str, Any] = dict(error.info)
    if error.violations:
        details["violations"] = [{"field": one.field, "message": one.description} for one in error.violations[:MAX_VIOLATIONS]]
    if error.incident_id:
        details["incident_id"] = error.incident_id
    if debug and error.stack:
        details["stack"] = error.stack
    return details
