"""`Drafter`: what proposes tokens that may follow those of a sequence."""

from __future__ import annotations

import enum
import math
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
    acceptance: float = 0.5  # how likely a token of it is right if those before it are, as far as the drafter can tell

    @property
    def by_model(self) -> bool:
        return bool(self.token_ids[:1].tolist() == [BY_MODEL])

    def cut(self, length: int) -> Draft:
        """Its first `length` tokens."""
        return self._replace(token_ids=self.token_ids[:length])


NO_DRAFT = Draft(NO_INTS, DraftSource.NGRAM)


class Drafter(Protocol):
    """Has a state for each row. Called by the scheduler, from its thread."""

    def assign(self, row: int) -> None:
        """The row is assigned to another sequence."""

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        """Up to `most` tokens that may follow `tokens`, all of the sequence so far, which begin with those of the call before. Also called
        to learn whether there would be any. `by_model`: whether those of a draft model are wanted."""

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        """Of a draft for a row that had `num_tokens` tokens so many were accepted."""


_PRIOR_WEIGHT = 4.0  # a prior counts like so many decided tokens


class Acceptance:
    """A running estimate of how likely a drafted token is right if those before it are: the share of accepted ones of those that were
    decided, of which older ones count less."""

    def __init__(self, prior: float | None, memory: float = 64.0) -> None:
        """`memory`: of how many decided tokens it is the mean, about. The prior is forgotten like these; None: `given` is told it."""
        self._memory = memory
        self._decided = 0.0 if prior is None else _PRIOR_WEIGHT
        self._accepted = self._decided * (prior or 0.0)

    @property
    def value(self) -> float:
        return self._accepted / self._decided

    def given(self, prior: float) -> float:
        """The estimate with a prior that is known only now."""
        return (_PRIOR_WEIGHT * prior + self._accepted) / (_PRIOR_WEIGHT + self._decided)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        decided = num_decided(num_drafts, num_accepted)
        kept = math.exp(-decided / self._memory)
        self._decided = kept * self._decided + decided
        self._accepted = kept * self._accepted + num_accepted


def num_decided(num_drafts: int, num_accepted: int) -> int:
    """Of how many drafts it is known whether they were right: those behind a rejected one say nothing."""
    return min(num_accepted + 1, num_drafts)
