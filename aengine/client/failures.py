"""What a failed call means to this client: status and details -> the exceptions that the engine raises in process.

Owns that mapping and the waits between attempts; does not decide what is tried again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc import aio

from aengine.errors import (
    AEngineError,
    ConnectionLostError,
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
    ServerError,
)
from aengine.wire import DOMAIN, PUSHBACK_KEY, field_of

FIRST_BACKOFF = 0.1  # seconds; doubled for each attempt
LONGEST_BACKOFF = 2.0
LONGEST_PUSHBACK = 30.0  # a server that wants to be left alone for longer is not waited for

_STATUS_KEY = "grpc-status-details-bin"

_PLAIN: Mapping[str, type[AEngineError]] = {
    "QUEUE_FULL": QueueFullError,
    "TOO_MANY_CALLS": QueueFullError,
    "NOT_READY": EngineStateError,
    "DRAINING": EngineStateError,
    "ENGINE_DEAD": EngineDeadError,
    "NO_TOKENIZER": NoTokenizerError,
}
# With the field that they are about, should the details not name it.
_ABOUT_FIELDS: Mapping[str, tuple[type[FieldError], str]] = {
    "INVALID_FIELD": (InvalidRequestError, "request"),
    "REQUEST_ID_IN_USE": (RequestIdInUseError, "request_id"),
    "NOTHING_TO_CHOOSE": (NothingToChooseError, "request"),
}
_CAPACITIES: Mapping[str, type[ContextLengthError] | type[KVCapacityError]] = {
    "CONTEXT_LENGTH_EXCEEDED": ContextLengthError,
    "KV_CAPACITY": KVCapacityError,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that failed."""

    error: AEngineError  # what to raise
    code: grpc.StatusCode
    reason: str  # of ErrorInfo; empty where the failure did not come from aengine
    pushback: float | None  # seconds after which the server wants to be tried again; negative: not at all

    @property
    def temporary(self) -> bool:
        """Whether the same call may succeed soon, and did nothing yet if nothing was answered."""
        return self.code is grpc.StatusCode.UNAVAILABLE and (self.pushback is None or 0 <= self.pushback <= LONGEST_PUSHBACK)


@dataclass(slots=True)
class Backoff:
    """The waits between the attempts of one call."""

    count: int = 0  # waits so far

    async def wait(self, failure: Failure | None) -> None:
        await asyncio.sleep(self.next_seconds(failure))

    def next_seconds(self, failure: Failure | None) -> float:
        """As long as the server asks for, else longer each time; never the same for two clients."""
        own = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(self.count, 10)) * random.uniform(0.5, 1.5)
        self.count += 1
        told = failure.pushback if failure is not None else None
        return own if told is None or told < 0 else told * random.uniform(1.0, 1.2)


def read_failure(error: aio.AioRpcError, address: str) -> Failure:
    """`address` is the server's, for the message where it could not be reached."""
    code, text = error.code(), error.details() or "no details"
    metadata = dict(error.trailing_metadata() or ())
    details = _Details(metadata.get(_STATUS_KEY))
    reason = details.info.reason
    pushback = _pushback(details, metadata.get(PUSHBACK_KEY))
    return Failure(_exception(code, text, details, address), code, reason, pushback)


def _exception(code: grpc.StatusCode, text: str, details: _Details, address: str) -> AEngineError:
    reason, info = details.info.reason, details.info.metadata
    if reason in _PLAIN:
        return _PLAIN[reason](text)
    if reason in _ABOUT_FIELDS:
        kind, field = _ABOUT_FIELDS[reason]
        return kind(details.violations or (FieldViolation(field, text),))
    limit, got = info.get("limit", ""), info.get("got", "")
    if reason in _CAPACITIES and limit.isdecimal() and got.isdecimal():
        return _CAPACITIES[reason](details.violations or (FieldViolation("prompt", text),), int(limit), int(got))
    if code is grpc.StatusCode.UNAVAILABLE and not reason:
        return ConnectionLostError(f"no connection to {address}: {text}")
    return ServerError(f"{code.name}: {text}", code.name, reason, info.get("incident_id"))


class _Details:
    """The google.rpc details of a status, as far as they are known here."""

    def __init__(self, packed: object) -> None:
        self.info = error_details_pb2.ErrorInfo()
        self.violations: tuple[FieldViolation, ...] = ()
        self.retry_delay: float | None = None  # seconds
        if not isinstance(packed, bytes):
            return
        try:
            status = status_pb2.Status.FromString(packed)
            for detail in status.details:
                self._add(detail)
        except DecodeError:
            return  # from something between here and the server: the status itself is all there is

    def _add(self, detail: object) -> None:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):  # type: ignore[attr-defined]
            if info.domain == DOMAIN:
                self.info = info
        elif detail.Unpack(bad):  # type: ignore[attr-defined]
            self.violations = tuple(FieldViolation(field_of(one.field), one.description) for one in bad.field_violations)
        elif detail.Unpack(retry):  # type: ignore[attr-defined]
            self.retry_delay = retry.retry_delay.ToTimedelta().total_seconds()


def _pushback(details: _Details, told: object) -> float | None:
    """gRPC's own word counts more than that of aengine; one that is not a number means no further attempt."""
    if told is None:
        return details.retry_delay
    try:
        return int(str(told)) / 1000
    except ValueError:
        return -1.0
