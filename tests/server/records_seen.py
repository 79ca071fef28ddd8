"""An observer that keeps what it hears."""

from __future__ import annotations

from aengine.server.calls.records import CallRecord, GenerationRecord


class Seen:
    def __init__(self) -> None:
        self.calls: list[CallRecord] = []
        self.generations: list[GenerationRecord] = []

    def on_call_end(self, record: CallRecord) -> None:
        self.calls.append(record)

    def on_generation_end(self, record: GenerationRecord) -> None:
        self.generations.append(record)
