"""What a failed call looks like to a client: exceptions -> status code plus google.rpc details.

Owns the whole mapping. Every status carries an `ErrorInfo` of domain "aengine" whose reason a program can switch on; the text
is for people. What is not expected is a bug: the client gets an incident id, the log gets the traceback.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from datetime import timedelta

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from aengine.errors import AEngineError, EngineDeadError, EngineStateError, InvalidRequestError, QueueFullError, RequestIdInUseError

DOMAIN = "aengine"
RETRY_DELAY = timedelta(seconds=1)
# Details travel in a header, and a client drops the whole answer when its headers pass 8 KiB.
MAX_VIOLATIONS = 16
MAX_TEXT = 200

logger = logging.getLogger(__name__)


class ModelNotFoundError(AEngineError):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: str) -> None:
        self.name = name
        super().__init__(f"model {clip(name)!r} is not served here; there is {served!r}")


class DrainingError(AEngineError):
    """The server is shutting down and takes no new work."""


class DeadlinePassedError(AEngineError):
    """The gRPC deadline of the call has passed."""


_TEMPORARY = {
    QueueFullError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    DrainingError: (grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    EngineStateError: (grpc.StatusCode.UNAVAILABLE, "NOT_READY"),
}


def to_status(error: Exception, *, answered: bool = False) -> status_pb2.Status:
    """The status that ends a call with `error`. `answered` tells whether the client already has a part of the answer."""
    if isinstance(error, RequestIdInUseError):
        return _status(grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE", str(error))
    if isinstance(error, InvalidRequestError):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=clip(violation.field), description=clip(violation.description))
            for violation in error.violations[:MAX_VIOLATIONS]
        ]
        text = "; ".join(f"{violation.field}: {violation.description}" for violation in violations[:4])
        return _status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", text, [error_details_pb2.BadRequest(field_violations=violations)])
    if isinstance(error, ModelNotFoundError):
        resource = error_details_pb2.ResourceInfo(resource_type="model", resource_name=clip(error.name), description=str(error))
        return _status(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", str(error), [resource])
    if isinstance(error, DeadlinePassedError):
        return _status(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_PASSED", str(error))
    for kind, (code, reason) in _TEMPORARY.items():
        if isinstance(error, kind):
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromTimedelta(RETRY_DELAY)
            return _status(code, reason, str(error), [retry])
    if isinstance(error, EngineDeadError):
        # Before the first event a retry elsewhere is safe; after it the client must decide what to do with half an answer.
        code = grpc.StatusCode.ABORTED if answered else grpc.StatusCode.UNAVAILABLE
        return _status(code, "ENGINE_DEAD", str(error))
    incident = uuid.uuid4().hex
    logger.error("incident %s: %r", incident, error, exc_info=error)
    text = f"internal error; the server's log explains incident {incident}"
    return _status(grpc.StatusCode.INTERNAL, "BUG", text, incident_id=incident)


def clip(text: str) -> str:
    """`text`, cut to what fits into a header."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def _status(code: grpc.StatusCode, reason: str, text: str, details: Iterable[Message] = (), **metadata: str) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=text[: 4 * MAX_TEXT])
    for detail in (error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata), *details):
        status.details.add().Pack(detail)
    return status
