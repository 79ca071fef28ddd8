"""`Drafter`: what proposes tokens that may follow those of a sequence."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from aengine.scheduler.plan import NO_INTS, IntArray

BY_MODEL = -1
"""Stands for a token that a draft model will propose, when the step that checks it is launched."""


class DraftSource(enum.Enum):
    """Where a draft comes from. The value is its name in statistics."""

    GRAMMAR = "grammar"  # text that a grammar forces
    NGRAM = "ngram"  # what followed the same tokens before
    MODEL = "draft"  # a smaller model
    HEAD = "eagle"  # a head that reads hidden states of the model
    MTP = "mtp"  # layers of the model's checkpoint for tokens after the next


class Draft(NamedTuple):
    token_ids: IntArray  # ids, or `BY_MODEL` alone; may be empty
    source: DraftSource

    @property
    def by_model(self) -> bool:
        return bool(len(self.token_ids)) and int(self.token_ids[0]) == BY_MODEL


NO_DRAFT = Draft(NO_INTS, DraftSource.NGRAM)


class Drafter(Protocol):
    """Has a state for each row. Called by the scheduler, from its thread."""

    def assign(self, row: int) -> None:
        """The row is assigned to another sequence."""

    def propose(self, row: int, tokens: IntArray, most: int) -> Draft:
        """Up to `most` tokens that may follow `tokens`, all of the sequence so far, which begin with those of the call before."""
