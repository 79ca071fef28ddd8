"""Who is told of calls and generations that are over, and which call a generation belongs to. Knows nothing of what they do with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from aengine.server.calls.records import Caller, CallRecord, GenerationRecord, Observer

CURRENT_CALL: ContextVar[CallRecord | None] = ContextVar("CURRENT_CALL", default=None)
"""The call that a task works for. Tasks that a call starts inherit it."""


def current_caller() -> Caller:
    """Who made the call that the task works for."""
    call = CURRENT_CALL.get()
    return Caller() if call is None else call.caller


Record = TypeVar("Record")

logger = logging.getLogger(__name__)


class Observers:
    """Passes on to all. One that raises is a bug: it is logged, and the others hear of it all the same."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def on_call_end(self, record: CallRecord) -> None:
        for observer in self._observers:
            _tell(observer.on_call_end, record)

    def on_generation_end(self, record: GenerationRecord) -> None:
        call = CURRENT_CALL.get()
        if call is not None:
            call.prompt_tokens += record.usage.prompt_tokens
            call.completion_tokens += record.usage.completion_tokens
        for observer in self._observers:
            _tell(observer.on_generation_end, record)


def _tell(hear: Callable[[Record], None], record: Record) -> None:
    try:
        hear(record)
    except Exception:
        logger.exception("an observer failed")
