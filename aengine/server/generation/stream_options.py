"""How the events of a request are sent: `StreamOptions` of the schema, read and checked. Knows nothing of how it is done."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.errors import FieldViolation
from aengine.server.generation.durations import read_seconds
from aengine.v1.generation_pb2 import StreamOptions

MAX_DELTA_TOKENS = 1024
MAX_DELAY_SECONDS = 1.0
MAX_RETAIN_SECONDS = 600.0
DEFAULT_RETAIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StreamPolicy:
    """Stream options with their defaults applied."""

    delta_tokens: int = 1  # most in one delta
    delay_seconds: float = 0.0  # how long a token may wait for others
    resumable: bool = False
    retain_seconds: float = DEFAULT_RETAIN_SECONDS


def read_stream_options(options: StreamOptions, violations: list[FieldViolation]) -> StreamPolicy:
    """What is out of range is added to `violations`."""
    delta_tokens = options.max_tokens_per_delta if options.HasField("max_tokens_per_delta") else 1
    if not 1 <= delta_tokens <= MAX_DELTA_TOKENS:
        violations.append(FieldViolation("spec.stream.max_tokens_per_delta", f"{delta_tokens} is not in [1, {MAX_DELTA_TOKENS}]"))
    delay = read_seconds(options.max_delay, "spec.stream.max_delay", violations)
    if delay is not None and not 0 <= delay <= MAX_DELAY_SECONDS:
        violations.append(FieldViolation("spec.stream.max_delay", f"{delay:g} s is not in [0, {MAX_DELAY_SECONDS:g}] s"))
    retain: float | None = DEFAULT_RETAIN_SECONDS
    if options.HasField("retain"):
        retain = read_seconds(options.retain, "spec.stream.retain", violations)
    if retain is not None and not 0 < retain <= MAX_RETAIN_SECONDS:
        violations.append(FieldViolation("spec.stream.retain", f"{retain:g} s is not in (0, {MAX_RETAIN_SECONDS:g}] s"))
    return StreamPolicy(delta_tokens, delay or 0.0, options.resumable, retain or DEFAULT_RETAIN_SECONDS)
