"""What a failed call means to this client: status and details, or an `Error` message -> the exceptions that the engine raises in process.

Owns that mapping and the waits between attempts; does not decide what is retried.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc import aio

from aengine.api.errors import (
    ERROR_REASONS,
    AEngineError,
    ConnectionLostError,
    ContextLengthError,
    EngineStateError,
    FieldError,
    FieldViolation,
    KVCapacityError,
    QueueFullError,
    RequestIdInUseError,
    ServerError,
)
from aengine.v1.error_pb2 import Error
from aengine.wire.names import DOMAIN, PUSHBACK_KEY, field_of, seconds_of

FIRST_BACKOFF = 0.1  # seconds; doubled for each attempt
LONGEST_BACKOFF = 2.0
LONGEST_PUSHBACK = 30.0  # the client does not wait longer than this

_DETAILS_KEY = "grpc-status-details-bin"
_KINDS: Mapping[str, type[AEngineError]] = {
    **{reason: kind for kind, reason in ERROR_REASONS.items()},
    "TOO_MANY_CALLS": QueueFullError,
    "DRAINING": EngineStateError,
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Failure:
    """A call to a server that failed."""

    error: AEngineError  # what to raise
    code: grpc.StatusCode
    pushback: float | None  # seconds after which the server asks to be retried; negative: not at all

    @property
    def temporary(self) -> bool:
        """Whether the same call may succeed soon, and has done nothing yet if it returned nothing."""
        return self.code is grpc.StatusCode.UNAVAILABLE and (self.pushback is None or 0 <= self.pushback <= LONGEST_PUSHBACK)


class Backoff:
    """The waits between the attempts of one call."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, after an attempt that succeeded."""
        self.count = 0  # waits so far
        self._since: float | None = None  # of the first wait, on time.monotonic

    @property
    def seconds(self) -> float:
        """How long ago the first wait began."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    async def wait(self, failure: Failure | None) -> None:
        self._since = self._since or time.monotonic()
        await asyncio.sleep(self.next_seconds(failure))

    def next_seconds(self, failure: Failure | None) -> float:
        """Return how many seconds to wait: a little longer than the server asks for, else longer each time. A random factor keeps
        clients from coming back together."""
        own = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(self.count, 10)) * random.uniform(0.5, 1.5)
        self.count += 1
        pushback = failure.pushback if failure is not None else None
        return own if pushback is None or pushback < 0 else pushback * random.uniform(1.0, 1.2)


def read_failure(error: aio.AioRpcError, address: str) -> Failure:
    """`address` is the server's, for the message where it could not be reached."""
    metadata = dict(error.trailing_metadata() or ())
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    with suppress(DecodeError):  # details that something between here and the server wrote: then the status itself is all there is
        for detail in status_pb2.Status.FromString(metadata.get(_DETAILS_KEY, b"")).details:
            for known in (info, bad, retry):
                detail.Unpack(known)
    if info.domain != DOMAIN:
        info.Clear()
    pushback = seconds_of(retry.retry_delay) if retry.HasField("retry_delay") else None
    if PUSHBACK_KEY in metadata:  # which is gRPC's own, and wins; where it is not a number, there must be no further attempt
        try:
            pushback = int(str(metadata[PUSHBACK_KEY])) / 1000
        except ValueError:
            pushback = -1.0
    fields = [(one.field, one.description) for one in bad.field_violations]
    return Failure(_exception(error.code(), error.details(), info.reason, info.metadata, fields, address), error.code(), pushback)


def read_error(message: Error, address: str) -> AEngineError:
    """The exception that a call of its own would have ended with."""
    code = _CODES.get(message.code, grpc.StatusCode.UNKNOWN)
    facts = {**message.info, "incident_id": message.incident_id} if message.incident_id else message.info
    fields = [(one.field, one.description) for one in message.field_violations]
    return _exception(code, message.message, message.reason, facts, fields, address)


def _exception(
    code: grpc.StatusCode, text: str | None, reason: str, facts: Mapping[str, str], fields: Iterable[tuple[str, str]], address: str
) -> AEngineError:
    """`fields`: their paths in the request message, and what is wrong with them."""
    text, kind = text or "no details", _KINDS.get(reason)
    violations = tuple(FieldViolation(field_of(path), description) for path, description in fields)
    if kind is not None and issubclass(kind, ContextLengthError | KVCapacityError):
        limit, got = facts.get("limit", ""), facts.get("got", "")
        if limit.isdecimal() and got.isdecimal():
            return kind(violations or [FieldViolation("prompt", text)], int(limit), int(got))
    elif kind is not None and issubclass(kind, FieldError):
        return kind(violations or [FieldViolation("request_id" if kind is RequestIdInUseError else "request", text)])
    elif kind is not None:
        return kind(text)
    if code is grpc.StatusCode.UNAVAILABLE and not reason:
        return ConnectionLostError(f"no connection to {address}: {text}")
    return ServerError(f"{code.name}: {text}", code.name, reason, facts.get("incident_id"))
