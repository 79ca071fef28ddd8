"""Errors for clients: exceptions -> status code, reason and details.

Owns the whole mapping, once; it is rendered as the status of a call (`to_status`) or as a message within one (`to_error`). Every
error carries a reason that a program can switch on; the text is for people. What is not expected is a bug: the client gets an
incident id, the log gets the traceback.
"""

from __future__ import annotations

import logging
import traceback
import uuid
from collections.abc import Mapping
from datetime import timedelta

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from aengine.errors import (
    AEngineError,
    ContextLengthError,
    EngineDeadError,
    FieldError,
    FieldViolation,
    KVCapacityError,
)
from aengine.v1.error_pb2 import Error
from aengine.wire import DOMAIN, ERROR_REASONS

CODES: Mapping[str, grpc.StatusCode] = {
    "REQUEST_ID_IN_USE": grpc.StatusCode.ALREADY_EXISTS,
    "ADAPTER_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "BAD_ADAPTER": grpc.StatusCode.FAILED_PRECONDITION,
    "BAD_WEIGHTS": grpc.StatusCode.FAILED_PRECONDITION,
    "INSUFFICIENT_MEMORY": grpc.StatusCode.FAILED_PRECONDITION,
    "REQUESTS_IN_FLIGHT": grpc.StatusCode.FAILED_PRECONDITION,
    "KV_CAPACITY": grpc.StatusCode.FAILED_PRECONDITION,
    "CONTEXT_LENGTH_EXCEEDED": grpc.StatusCode.INVALID_ARGUMENT,
    "INVALID_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
    "NOTHING_TO_CHOOSE": grpc.StatusCode.INVALID_ARGUMENT,
    "NO_TOKENIZER": grpc.StatusCode.FAILED_PRECONDITION,
    "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "REQUEST_NOT_FOUND": grpc.StatusCode.NOT_FOUND,  # nothing is known of it, or the caller may not know of it
    "DEADLINE_PASSED": grpc.StatusCode.DEADLINE_EXCEEDED,  # of the call, not a time limit of the request
    "QUEUE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "TOO_MANY_CALLS": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "METADATA_TOO_LARGE": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "ANSWER_TOO_LARGE": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "NOT_READY": grpc.StatusCode.UNAVAILABLE,
    "ENGINE_DEAD": grpc.StatusCode.UNAVAILABLE,
    "READER_REPLACED": grpc.StatusCode.ABORTED,  # another reader reads the stream now
    "READER_STALLED": grpc.StatusCode.ABORTED,
    "SENDER_STALLED": grpc.StatusCode.ABORTED,
    "NOT_RESUMABLE": grpc.StatusCode.FAILED_PRECONDITION,
    "EVENTS_DROPPED": grpc.StatusCode.DATA_LOSS,
    "NO_CREDENTIALS": grpc.StatusCode.UNAUTHENTICATED,
    "BAD_CREDENTIALS": grpc.StatusCode.UNAUTHENTICATED,
    "ADMIN_ONLY": grpc.StatusCode.PERMISSION_DENIED,
    "METHOD_NOT_FOUND": grpc.StatusCode.UNIMPLEMENTED,
    "BUG": grpc.StatusCode.INTERNAL,
}
"""All reasons, with the status codes of the calls that end with them."""
_TEMPORARY = frozenset({"QUEUE_FULL", "TOO_MANY_CALLS", "DRAINING", "NOT_READY"})
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


class StatusError(AEngineError):
    """An error in the words of the schema: how a call, or a request within one, ends. The server raises its own refusals as such."""

    def __init__(self, reason: str, message: str, *, resource: tuple[str, str] | None = None) -> None:
        """`reason`: one of `CODES`. `resource`: type and name of what was not found."""
        self.reason = reason
        self.code = CODES[reason]
        self.message = clip(message, MAX_MESSAGE)
        self.resource = resource
        self.retry_delay = RETRY_DELAY if reason in _TEMPORARY else None
        self.violations: tuple[FieldViolation, ...] = ()
        self.info: dict[str, str] = {}
        self.incident_id = ""
        self.stack = ""  # of a bug, for clients only on a server that was configured to show it
        super().__init__(self.message)


def request_not_found(request_id: str) -> StatusError:
    message = f"request {clip(request_id)!r} is not in flight and nothing of it is kept"
    return StatusError("REQUEST_NOT_FOUND", message, resource=("request", request_id))


def draining() -> StatusError:
    return StatusError("DRAINING", "the server is shutting down")


def describe(error: Exception, *, answered: bool = False) -> StatusError:
    """The error as a status. `answered`: whether the client already has a part of the response. A bug is logged."""
    if isinstance(error, StatusError):
        return error
    kind = next((kind for kind in type(error).__mro__ if kind in ERROR_REASONS), None)
    if kind is None:
        return _bug(error)
    status = StatusError(ERROR_REASONS[kind], str(error))
    if answered and isinstance(error, EngineDeadError):
        status.code = grpc.StatusCode.ABORTED  # before the first event a retry elsewhere is safe; after it the client must decide
    if isinstance(error, FieldError):
        status.violations = error.violations
    if isinstance(error, ContextLengthError | KVCapacityError):
        status.info = {"limit": str(error.limit), "got": str(error.got)}
    return status


def to_status(error: StatusError, *, debug: bool = False) -> status_pb2.Status:
    """The status that ends a call. `debug` adds the traceback of a bug."""
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    info = {**error.info, "incident_id": error.incident_id} if error.incident_id else error.info
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=info)]
    if error.violations:
        details.append(error_details_pb2.BadRequest())
        _add_violations(error, details[-1])
    if error.resource is not None:
        kind, name = error.resource
        details.append(error_details_pb2.ResourceInfo(resource_type=kind, resource_name=clip(name), description=error.message))
    if error.retry_delay is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(error.retry_delay)
        details.append(retry)
    for detail in details:
        status.details.add().Pack(detail)
    if debug and error.stack:  # its end says most
        end = error.stack.encode("utf-8", "replace")[status.ByteSize() - MAX_DETAILS :].decode("utf-8", "ignore")
        status.details.add().Pack(error_details_pb2.DebugInfo(detail=end))
    return status


def to_error(error: Exception, *, answered: bool = False) -> Error:
    """The same as a message, for one of several requests. Says what `to_status` says."""
    status = describe(error, answered=answered)
    message = Error(code=status.code.value[0], reason=status.reason, message=status.message, incident_id=status.incident_id)
    _add_violations(status, message)
    if status.retry_delay is not None:
        message.retry_delay.FromTimedelta(status.retry_delay)
    return message


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """`text` in one line, cut to `limit` bytes of UTF-8, with a space for what cannot be printed and none around it; never empty."""
    raw = "".join(char if char.isprintable() else " " for char in text.strip()[: limit + 1]).strip().encode("utf-8", "replace")
    if len(raw) > limit:
        raw = raw[: limit - 3].decode("utf-8", "ignore").rstrip().encode() + b"..."
    return raw.decode() or NO_TEXT


def _bug(error: Exception) -> StatusError:
    incident = uuid.uuid4().hex
    logger.error("incident %s: %s", incident, type(error).__name__, exc_info=error)
    status = StatusError("BUG", f"internal error; the server's log explains incident {incident}")
    status.incident_id, status.stack = incident, "".join(traceback.format_exception(error))
    return status


def _add_violations(error: StatusError, message: error_details_pb2.BadRequest | Error) -> None:
    """Add as many violations as fit, from the first on, each cut to `MAX_TEXT` bytes a text."""
    room = MAX_DETAILS - MAX_MESSAGE
    for violation in error.violations[:MAX_VIOLATIONS]:
        field, description = clip(violation.field), clip(violation.description)
        room -= len(field.encode()) + len(description.encode()) + 8
        if room < 0:
            return
        message.field_violations.add(field=field, description=description)
