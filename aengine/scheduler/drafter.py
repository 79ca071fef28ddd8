"""`Drafter`: what proposes tokens that may follow those of a sequence."""

from __future__ import annotations

from typing import Protocol

from aengine.scheduler.plan import IntArray


class Drafter(Protocol):
    """Has a state for each row. Called by the scheduler, from its thread."""

    def assign(self, row: int) -> None:
        """The row is assigned to another sequence."""

    def propose(self, row: int, tokens: IntArray, most: int) -> IntArray:
        """Up to `most` drafts that may follow `tokens`, all of the sequence so far, which begin with those of the call before."""
