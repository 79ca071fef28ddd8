"""Errors for clients: exceptions -> a reason, a text and what belongs to them.

Owns the whole mapping, once; each door renders it in its own form. Every error carries a reason that a program can switch on; the text
is for people. What is not expected is a bug: the client gets an incident id, the log gets the traceback.
"""

from __future__ import annotations

import logging
import traceback
import uuid
from datetime import timedelta

from aengine.api.errors import (
    ERROR_REASONS,
    AEngineError,
    ContextLengthError,
    EngineDeadError,
    FieldError,
    FieldViolation,
    KVCapacityError,
    ServerError,
)

REASONS = frozenset(
    {
        "REQUEST_ID_IN_USE",
        "ADAPTER_NOT_FOUND",
        "BAD_ADAPTER",
        "BAD_WEIGHTS",
        "INSUFFICIENT_MEMORY",
        "REQUESTS_IN_FLIGHT",
        "KV_CAPACITY",
        "CONTEXT_LENGTH_EXCEEDED",
        "INVALID_FIELD",
        "NOTHING_TO_CHOOSE",
        "REQUEST_ENDED",
        "NO_TOKENIZER",
        "MODEL_NOT_FOUND",
        "REQUEST_NOT_FOUND",  # nothing is known of it, or the caller may not know of it
        "DEADLINE_PASSED",  # of the call, not a time limit of the request
        "QUEUE_FULL",
        "TOO_MANY_CALLS",
        "METADATA_TOO_LARGE",
        "ANSWER_TOO_LARGE",
        "DRAINING",
        "NOT_READY",
        "ENGINE_DEAD",
        "NO_REPLICA",
        "POISON_REQUEST",
        "READER_REPLACED",  # another reader reads the stream now
        "READER_STALLED",
        "SENDER_STALLED",
        "NOT_RESUMABLE",
        "EVENTS_DROPPED",
        "NO_CREDENTIALS",
        "BAD_CREDENTIALS",
        "ADMIN_ONLY",
        "FOREIGN_HOST",  # the request names a host that the server is not
        "FOREIGN_ORIGIN",  # of a web page that may not call it
        "METHOD_NOT_FOUND",
        "BUG",
    }
)
"""All reasons. Each door has a table of what it makes of them."""
_TEMPORARY = frozenset({"QUEUE_FULL", "TOO_MANY_CALLS", "DRAINING", "NOT_READY", "NO_REPLICA"})
RETRY_DELAY = timedelta(seconds=1)
# Details travel in the trailers, and a client drops the whole response when those pass 8 KiB: the details there in base64, the message
# twice, once percent-encoded. All limits are bytes of UTF-8.
MAX_TEXT = 400
MAX_MESSAGE = 480
MAX_DETAILS = 3000
MAX_VIOLATIONS = 64

NO_TEXT = "(nothing more is known)"
"""Shown in place of an empty text."""

logger = logging.getLogger(__name__)


class ServiceError(AEngineError):
    """How a call, or a request within one, ends in an error. The server raises its own refusals as such."""

    def __init__(self, reason: str, message: str, *, resource: tuple[str, str] | None = None) -> None:
        """`reason`: one of `REASONS`. `resource`: type and name of what was not found."""
        assert reason in REASONS
        self.reason = reason
        self.message = clip(message, MAX_MESSAGE)
        self.resource = resource
        self.retry_delay = RETRY_DELAY if reason in _TEMPORARY else None
        self.violations: tuple[FieldViolation, ...] = ()
        self.info: dict[str, str] = {}
        self.answered = False  # whether the client already has a part of the response
        self.incident_id = ""
        self.stack = ""  # of a bug, for clients only on a server that was configured to show it
        super().__init__(self.message)

    @property
    def may_pass(self) -> float | None:
        """The seconds after which the same may be asked again, by whoever has time; None: it would end in the same way."""
        delay = RETRY_DELAY if self.reason == "ENGINE_DEAD" else self.retry_delay  # another process may have the journal next
        return None if delay is None else delay.total_seconds()


def request_not_found(request_id: str) -> ServiceError:
    message = f"request {clip(request_id)!r} is not in flight and nothing of it is kept"
    return ServiceError("REQUEST_NOT_FOUND", message, resource=("request", request_id))


def draining() -> ServiceError:
    return ServiceError("DRAINING", "the server is shutting down")


def describe(error: Exception, *, answered: bool = False) -> ServiceError:
    """The error for a client. `answered`: whether it already has a part of the response. A bug is logged."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, ServerError) and error.reason in REASONS:  # of a replica, which has logged it if it is a bug
        told = ServiceError(error.reason, str(error))
        told.answered, told.incident_id = answered, error.incident_id or ""
        return told
    kind = next((kind for kind in type(error).__mro__ if kind in ERROR_REASONS), None)
    if kind is None:
        return _bug(error)
    # What killed an engine may tell of its host: paths, and lines that its processes logged.
    status = ServiceError(ERROR_REASONS[kind], "the engine is dead; the server's log says why" if kind is EngineDeadError else str(error))
    status.answered = answered
    if isinstance(error, FieldError):
        status.violations = error.violations
    if isinstance(error, ContextLengthError | KVCapacityError):
        status.info = {"limit": str(error.limit), "got": str(error.got)}
    return status


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """`text` in one line, cut to `limit` bytes of UTF-8, with a space for what cannot be printed and none around it; never empty."""
    raw = "".join(char if char.isprintable() else " " for char in text.strip()[: limit + 1]).strip().encode("utf-8", "replace")
    if len(raw) > limit:
        raw = raw[: limit - 3].decode("utf-8", "ignore").rstrip().encode() + b"..."
    return raw.decode() or NO_TEXT


def _bug(error: Exception) -> ServiceError:
    incident = uuid.uuid4().hex
    logger.error("incident %s: %s", incident, type(error).__name__, exc_info=error)
    status = ServiceError("BUG", f"internal error; the server's log explains incident {incident}")
    status.incident_id, status.stack = incident, "".join(traceback.format_exception(error))
    return status
