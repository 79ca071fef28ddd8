"""An observer that keeps what it hears."""

from __future__ import annotations

from typing import Any

from aengine.server.core.calls_in_flight import CallRecord, GenerationRecord, Observers


class Seen:
    def __init__(self) -> None:
        self.calls: list[CallRecord] = []
        self.generations: list[GenerationRecord] = []

    def on_call_end(self, record: CallRecord) -> None:
        self.calls.append(record)

    def on_generation_end(self, record: GenerationRecord) -> None:
        self.generations.append(record)


def watch(observers: Observers, observer: Any) -> None:
    """Have `observer` called with all records."""
    observers.on_call_end.append(observer.on_call_end)
    observers.on_generation_end.append(observer.on_generation_end)
