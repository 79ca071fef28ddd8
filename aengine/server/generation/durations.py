"""google.protobuf.Duration -> seconds, strictly. Knows no field by name."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from aengine.errors import FieldViolation
from aengine.wire import seconds_of

MAX_SECONDS = 315_576_000_000
"""About 10,000 years, which is all that the type may hold."""
MAX_NANOS = 999_999_999


def read_seconds(duration: Duration, field: str, violations: list[FieldViolation]) -> float | None:
    """None, and a violation of `field`, for a message that is no duration: out of the type's range, or of two signs."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) <= MAX_SECONDS and abs(nanos) <= MAX_NANOS and seconds * nanos >= 0:
        return seconds_of(duration)
    rule = f"seconds must be in [-{MAX_SECONDS}, {MAX_SECONDS}], nanos in [-{MAX_NANOS}, {MAX_NANOS}], and both of one sign"
    violations.append(FieldViolation(field, f"{seconds} s and {nanos} ns are no duration: {rule}"))
    return None
