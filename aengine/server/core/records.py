"""Records of calls and generations that have ended: plain data for the access log and the metrics.

Filled in by the code that runs the call; handed to the `Observers` at the end. Knows nothing of logs or metrics.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from aengine.api.histogram import Histogram
from aengine.api.outputs import FinishReason, Timing, Usage

RecordT = TypeVar("RecordT")

MAX_LABEL = 128
"""Characters of the name of a tenant."""

logger = logging.getLogger(__name__)

ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, as far as that was checked."""

    name: str | None = None  # of the token or of the certificate; None for those that need neither
    sees_all: bool = True  # whether the requests of others are shown to it: to administrators, and where nobody is asked who they are

    @property
    def tenant(self) -> str:
        """Whose share its requests count for unless they say so: its own; that of all where nobody is asked who he is."""
        name = self.name or ""
        return name if len(name) <= MAX_LABEL else hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class CallRecord:
    """One call of a client: an RPC, or an HTTP request."""

    method: str  # "/aengine.v1.GenerationService/Generate", "POST /v1/chat/completions"
    peer: str  # "ipv4:127.0.0.1:40000"
    request_id: str  # of the call: the client's x-request-id, or a random one
    trace_id: str | None = None  # of the W3C traceparent, if one came
    caller: Caller = Caller()
    start: float = field(default_factory=time.monotonic)
    messages_sent: int = 0
    code: str = ""  # how it ended: "INVALID_ARGUMENT" with gRPC, "400" with HTTP
    reason: str = ""  # of the error; empty without one, and for calls that the client ended
    seconds: float = 0.0
    prompt_tokens: int = 0  # of the generations that ended while the call lasted
    completion_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    is_polled: bool = False  # whether its method is one that is asked again and again, as /metrics is

    @property
    def owner(self) -> str:
        """Whose limits it counts for: the name of the caller, or else its address."""
        return self.caller.name or self.peer.rpartition(":")[0]


@dataclass(slots=True)
class GenerationRecord:
    """One request to the engine. Several may belong to one call."""

    request_id: str
    start: float = field(default_factory=time.monotonic)
    usage: Usage = field(default_factory=Usage)
    finish_reason: FinishReason = FinishReason.CANCELLED  # of the sequence that ended last; ERROR and CANCELLED come after all others
    timing: Timing = field(default_factory=Timing)
    total_seconds: float = 0.0
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS))


@dataclass(frozen=True, slots=True)
class Observers:
    """Functions that are called in the event loop with each record, once. They must be quick."""

    on_call_end: list[Callable[[CallRecord], None]] = field(default_factory=list)
    on_generation_end: list[Callable[[GenerationRecord], None]] = field(default_factory=list)


def notify(observers: Iterable[Callable[[RecordT], None]], record: RecordT) -> None:
    """Call all. One that raises is a bug: it is logged, and the others are called all the same."""
    for observer in observers:
        try:
            observer(record)
        except Exception:
            logger.exception("an observer failed")


CURRENT_CALL: ContextVar[CallRecord | None] = ContextVar("CURRENT_CALL", default=None)
"""The call that a task works for. Tasks that a call starts inherit it."""


def current_caller() -> Caller:
    """Who made the call that the task works for."""
    call = CURRENT_CALL.get()
    return Caller() if call is None else call.caller
