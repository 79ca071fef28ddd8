"""What a failure looks like to a client: exceptions -> status code, reason and details.

Owns the whole mapping, once; it is rendered as the status of a call (`to_status`) or as a message within one (`to_error`). Every
failure carries a reason that a program can switch on; the text is for people. What is not expected is a bug: the client gets an
incident id, the log gets the traceback.
"""

from __future__ import annotations

import logging
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from aengine.errors import (
    AEngineError,
    ContextLengthError,
    EngineDeadError,
    EngineStateError,
    FieldError,
    FieldViolation,
    InvalidRequestError,
    KVCapacityError,
    NothingToChooseError,
    NoTokenizerError,
    QueueFullError,
    RequestIdInUseError,
)
from aengine.v1.error_pb2 import Error
from aengine.wire import DOMAIN

RETRY_DELAY = timedelta(seconds=1)
# Details travel in the trailers, and a client drops the whole answer when those pass 8 KiB: the details there in base64, the message
# twice, once percent-encoded. All limits are bytes of UTF-8.
MAX_TEXT = 400
MAX_MESSAGE = 480
MAX_DETAILS = 3000
MAX_VIOLATIONS = 64

UNTOLD = "(nothing more is known)"
"""Stands for a text that is empty."""

logger = logging.getLogger(__name__)


class ModelNotFoundError(AEngineError):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: str) -> None:
        self.name = name
        super().__init__(f"model {clip(name)!r} is not served here; there is {served!r}")


class RequestNotFoundError(AEngineError):
    """Nothing is known of a request, or the caller may not know of it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request {clip(request_id)!r} is not in flight and nothing of it is kept")


class NotResumableError(AEngineError):
    """The request was not asked to be resumable."""


class EventsDroppedError(AEngineError):
    """Events that a reader asks for are no longer kept."""


class ReaderReplacedError(AEngineError):
    """Another reader has taken over the stream."""


class ReaderStalledError(AEngineError):
    """The client has not read for longer than the server waits."""


class SenderStalledError(AEngineError):
    """The client has begun a call and not sent its message for longer than the server waits."""


class TooManyCallsError(AEngineError):
    """As many calls are under way as the server takes."""


class MetadataTooLargeError(AEngineError):
    """The metadata of the call are larger than the server takes."""


class AnswerTooLargeError(AEngineError):
    """A message of the answer would be larger than the server sends."""


class MethodNotFoundError(AEngineError):
    """The server has no such method."""


class DrainingError(AEngineError):
    """The server is shutting down and takes no new work."""


class DeadlinePassedError(AEngineError):
    """The gRPC deadline of the call has passed."""


class NoCredentialsError(AEngineError):
    """The call needs a token and has none."""


class BadCredentialsError(AEngineError):
    """The call's token is none of those that are accepted."""


class AdminOnlyError(AEngineError):
    """The call needs the permission to administrate the server."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure in the words of the schema."""

    code: grpc.StatusCode
    reason: str
    message: str
    violations: tuple[FieldViolation, ...] = ()
    resource: tuple[str, str] | None = None  # type and name of what was not found
    retry_delay: timedelta | None = None
    info: Mapping[str, str] = field(default_factory=dict)
    incident_id: str = ""
    traceback: str = ""  # for clients only on a server that was configured to tell it


class ToldError(AEngineError):
    """A failure that was described before: it says the same to everyone, and is logged once."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


_PLAIN: Mapping[type[Exception], tuple[grpc.StatusCode, str]] = {
    RequestIdInUseError: (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE"),
    KVCapacityError: (grpc.StatusCode.FAILED_PRECONDITION, "KV_CAPACITY"),
    ContextLengthError: (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED"),
    InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    NothingToChooseError: (grpc.StatusCode.INVALID_ARGUMENT, "NOTHING_TO_CHOOSE"),
    NoTokenizerError: (grpc.StatusCode.FAILED_PRECONDITION, "NO_TOKENIZER"),
    ModelNotFoundError: (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    RequestNotFoundError: (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND"),
    DeadlinePassedError: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_PASSED"),
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    TooManyCallsError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS"),
    MetadataTooLargeError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "METADATA_TOO_LARGE"),
    AnswerTooLargeError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "ANSWER_TOO_LARGE"),
    DrainingError: (grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    EngineStateError: (grpc.StatusCode.UNAVAILABLE, "NOT_READY"),
    EngineDeadError: (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD"),
    ReaderReplacedError: (grpc.StatusCode.ABORTED, "READER_REPLACED"),
    ReaderStalledError: (grpc.StatusCode.ABORTED, "READER_STALLED"),
    SenderStalledError: (grpc.StatusCode.ABORTED, "SENDER_STALLED"),
    NotResumableError: (grpc.StatusCode.FAILED_PRECONDITION, "NOT_RESUMABLE"),
    EventsDroppedError: (grpc.StatusCode.DATA_LOSS, "EVENTS_DROPPED"),
    NoCredentialsError: (grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIALS"),
    BadCredentialsError: (grpc.StatusCode.UNAUTHENTICATED, "BAD_CREDENTIALS"),
    AdminOnlyError: (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_ONLY"),
    MethodNotFoundError: (grpc.StatusCode.UNIMPLEMENTED, "METHOD_NOT_FOUND"),
}
_TEMPORARY = (QueueFullError, TooManyCallsError, DrainingError, EngineStateError)


def describe(error: Exception, *, answered: bool = False) -> Failure:
    """What `error` means. `answered` tells whether the client already has a part of the answer. A bug is logged."""
    if isinstance(error, ToldError):
        return error.failure
    kind = next((kind for kind in type(error).__mro__ if kind in _PLAIN), None)
    if kind is None:
        return _bug(error)
    code, reason = _PLAIN[kind]
    if answered and isinstance(error, EngineDeadError):
        code = grpc.StatusCode.ABORTED  # before the first event a retry elsewhere is safe; after it the client must decide
    resource: tuple[str, str] | None = None
    if isinstance(error, ModelNotFoundError):
        resource = ("model", error.name)
    elif isinstance(error, RequestNotFoundError):
        resource = ("request", error.request_id)
    return Failure(
        code,
        reason,
        clip(str(error), MAX_MESSAGE),
        violations=error.violations if isinstance(error, FieldError) else (),
        resource=resource,
        retry_delay=RETRY_DELAY if isinstance(error, _TEMPORARY) else None,
        info={"limit": str(error.limit), "got": str(error.got)} if isinstance(error, ContextLengthError | KVCapacityError) else {},
    )


def to_status(failure: Failure, *, debug: bool = False) -> status_pb2.Status:
    """The status that ends a call. `debug` adds the traceback of a bug."""
    info = {**failure.info, "incident_id": failure.incident_id} if failure.incident_id else dict(failure.info)
    status = status_pb2.Status(code=failure.code.value[0], message=failure.message)
    for detail in (error_details_pb2.ErrorInfo(reason=failure.reason, domain=DOMAIN, metadata=info), *_details(failure)):
        status.details.add().Pack(detail)
    if debug and failure.traceback:
        room = MAX_DETAILS - status.ByteSize()
        status.details.add().Pack(error_details_pb2.DebugInfo(detail=_last(failure.traceback, room)))
    return status


def to_error(error: Exception, *, answered: bool = False) -> Error:
    """The same as a message, for one of several requests. Says what `to_status` says."""
    failure = describe(error, answered=answered)
    told = Error(code=failure.code.value[0], reason=failure.reason, message=failure.message, incident_id=failure.incident_id)
    for violation in _bounded(failure.violations):
        told.field_violations.add(field=violation.field, description=violation.description)
    if failure.retry_delay is not None:
        told.retry_delay.FromTimedelta(failure.retry_delay)
    return told


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """`text` in one line, cut to `limit` bytes of UTF-8, with a space for what cannot be printed and none around it; never empty."""
    raw = "".join(char if char.isprintable() else " " for char in text.strip()[: limit + 1]).strip().encode("utf-8", "replace")
    if len(raw) > limit:
        raw = raw[: limit - 3].decode("utf-8", "ignore").rstrip().encode() + b"..."
    return raw.decode() or UNTOLD


def _bug(error: Exception) -> Failure:
    incident = uuid.uuid4().hex
    logger.error("incident %s: %s", incident, type(error).__name__, exc_info=error)
    return Failure(
        grpc.StatusCode.INTERNAL,
        "BUG",
        f"internal error; the server's log explains incident {incident}",
        incident_id=incident,
        traceback="".join(traceback.format_exception(error)),
    )


def _details(failure: Failure) -> Iterator[Message]:
    """The details beside ErrorInfo."""
    if failure.violations:
        bad = error_details_pb2.BadRequest()
        for violation in _bounded(failure.violations):
            bad.field_violations.add(field=violation.field, description=violation.description)
        yield bad
    if failure.resource is not None:
        kind, name = failure.resource
        yield error_details_pb2.ResourceInfo(resource_type=kind, resource_name=clip(name), description=failure.message)
    if failure.retry_delay is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(failure.retry_delay)
        yield retry


def _bounded(violations: Sequence[FieldViolation]) -> Iterator[FieldViolation]:
    """As many as fit, from the first on, each cut to what a reader needs."""
    room = MAX_DETAILS - MAX_MESSAGE
    for violation in violations[:MAX_VIOLATIONS]:
        short = FieldViolation(clip(violation.field), clip(violation.description))
        room -= len(short.field.encode()) + len(short.description.encode()) + 8
        if room < 0:
            return
        yield short


def _last(text: str, limit: int) -> str:
    """The end of `text`, which is what tells most of a traceback."""
    return text.encode("utf-8", "replace")[-limit:].decode("utf-8", "ignore")
