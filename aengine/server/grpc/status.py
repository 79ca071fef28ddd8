"""What bounds the cost of a call's messages: how many fields one may have, counted in its bytes before it is decoded, and how large its
metadata are. Knows the wire format of Protocol Buffers.

Bytes do not bound what a message costs. Two of them can be an empty message of a list, which takes 50 bytes of memory and, with all the
others, seconds of the event loop; the bytes of a text cost next to nothing.

Errors in gRPC's form: a `ServiceError` as the status of a call (`to_status`), or as a message within one (`to_error`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from aengine.api.errors import InvalidRequestError
from aengine.server.core.errors import MAX_DETAILS, MAX_MESSAGE, MAX_VIOLATIONS, ServiceError, clip, describe
from aengine.v1.error_pb2 import Error
from aengine.wire.names import DOMAIN

UNCOUNTED_BYTES = 256 * 1024
"""Messages up to here are decoded in some 10 ms, whatever they hold."""
MAX_FIELDS = 65536
"""Most fields of a larger message, with all messages in it. An entry of a map is one field, and so are 64 bytes of a packed list."""
_PACKED_BYTES = 64
_VARINT_BYTES = 10
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # types on the wire; the two others are the borders of groups


def check_fields(raw: bytes, kind: Descriptor) -> None:
    """Raises `InvalidRequestError` for the bytes of a message of `kind` that has too many fields. Does not say whether they are such a
    message."""
    if len(raw) > UNCOUNTED_BYTES and _has_too_many(raw, kind):
        description = f"{len(raw)} bytes with more than {MAX_FIELDS} fields; only up to {UNCOUNTED_BYTES} bytes may be so many"
        raise InvalidRequestError.of("request", description)


def _has_too_many(raw: bytes, kind: Descriptor) -> bool:
    left, at, end, fields = MAX_FIELDS, 0, len(raw), _fields(kind)
    outer: list[tuple[int, Mapping[int, Descriptor | None]]] = []  # the messages around this one: where they end
    while True:
        while at >= end:
            if not outer:
                return False
            end, fields = outer.pop()
        try:
            tag, at = _read_varint(raw, at)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, at = _read_varint(raw, at)
            elif wire_type == _LENGTH:
                length, at = _read_varint(raw, at)
                if (inner := fields.get(tag >> 3)) is not None:
                    outer.append((end, fields))
                    end, fields = at + length, _fields(inner)
                else:
                    at += length
                    left -= length // _PACKED_BYTES if tag >> 3 in fields else 0
            elif wire_type in (_EIGHT_BYTES, _FOUR_BYTES):
                at += 8 if wire_type == _EIGHT_BYTES else 4
        except (IndexError, ValueError):
            return False  # it is no message, as decoding it will show
        left -= 1
        if left < 0:
            return True


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends. Raises IndexError or ValueError for what is none."""
    byte = raw[at]
    if byte < 0x80:
        return byte, at + 1
    value = 0
    for place in range(_VARINT_BYTES):
        byte = raw[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number that is too long")


@lru_cache(maxsize=1024)
def _fields(kind: Descriptor) -> Mapping[int, Descriptor | None]:
    """The fields that are messages, except for entries of maps, by number; and those that are packed lists of numbers, with None."""
    messages = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
    return {
        **{field.number: None for field in kind.fields if field.is_packed},
        **{number: inner for number, inner in messages.items() if not inner.GetOptions().map_entry},
    }


Metadata = Iterable[tuple[str, str | bytes]]

FIELD_BYTES = 32
"""Bytes that HTTP/2 counts for an entry of metadata beside its own."""


def size_of(metadata: Metadata) -> int:
    """The bytes that HTTP/2 counts for metadata."""
    return sum(len(key) + len(value) + FIELD_BYTES for key, value in metadata)


def values_of(metadata: Metadata, name: str) -> list[str]:
    return [str(value) for key, value in metadata if key == name]


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
    "REQUEST_ENDED": grpc.StatusCode.ABORTED,
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
    "NO_REPLICA": grpc.StatusCode.UNAVAILABLE,
    "POISON_REQUEST": grpc.StatusCode.ABORTED,
    "READER_REPLACED": grpc.StatusCode.ABORTED,  # another reader reads the stream now
    "READER_STALLED": grpc.StatusCode.ABORTED,
    "SENDER_STALLED": grpc.StatusCode.ABORTED,
    "NOT_RESUMABLE": grpc.StatusCode.FAILED_PRECONDITION,
    "EVENTS_DROPPED": grpc.StatusCode.DATA_LOSS,
    "NO_CREDENTIALS": grpc.StatusCode.UNAUTHENTICATED,
    "BAD_CREDENTIALS": grpc.StatusCode.UNAUTHENTICATED,
    "ADMIN_ONLY": grpc.StatusCode.PERMISSION_DENIED,
    "FOREIGN_HOST": grpc.StatusCode.PERMISSION_DENIED,
    "FOREIGN_ORIGIN": grpc.StatusCode.PERMISSION_DENIED,
    "METHOD_NOT_FOUND": grpc.StatusCode.UNIMPLEMENTED,
    "BUG": grpc.StatusCode.INTERNAL,
}
"""The reasons of `aengine.server.core.errors`, with the status codes of the calls that end with them."""


def code_of(error: ServiceError) -> grpc.StatusCode:
    """The status code of a call that ends with `error`."""
    if error.reason == "ENGINE_DEAD" and error.answered:
        return grpc.StatusCode.ABORTED  # before the first event a retry elsewhere is safe; after it the client must decide
    return CODES[error.reason]


def to_status(error: ServiceError, *, debug: bool = False) -> status_pb2.Status:
    """The status that ends a call. `debug` adds the traceback of a bug."""
    status = status_pb2.Status(code=code_of(error).value[0], message=error.message)
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
    """An error as a message within a response, for one of several requests. Reason and text are those that `to_status` gives. `answered`:
    as of `describe`."""
    status = describe(error, answered=answered)
    message = Error(
        code=code_of(status).value[0], reason=status.reason, message=status.message, incident_id=status.incident_id, info=status.info
    )
    _add_violations(status, message)
    if status.retry_delay is not None:
        message.retry_delay.FromTimedelta(status.retry_delay)
    return message


def _add_violations(error: ServiceError, message: error_details_pb2.BadRequest | Error) -> None:
    """Add as many violations as fit, from the first on, each cut to `MAX_TEXT` bytes a text."""
    room = MAX_DETAILS - MAX_MESSAGE
    for violation in error.violations[:MAX_VIOLATIONS]:
        field, description = clip(violation.field), clip(violation.description)
        room -= len(field.encode()) + len(description.encode()) + 8
        if room < 0:
            return
        message.field_violations.add(field=field, description=description)
