"""`RandomDrafts`: a drafter that knows what comes, and proposes it, something else, or both."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from kv_oracle import Truth

from aengine.api.outputs import DraftSource
from aengine.scheduler.drafters import BY_MODEL, Draft


class RandomDrafts:
    """Satisfies `Drafter`. Drafts are right, wrong and half right, also behind the end of a sequence."""

    def __init__(self, truth_of: Callable[[int], Truth], rng: random.Random, *, has_model: bool = False) -> None:
        """`truth_of`: the solo run of the request that has a row. `has_model`: half of the drafts are those of a draft model."""
        self._truth_of = truth_of
        self._has_model = has_model
        self._rng = rng
        self._known: dict[int, list[int]] = {}  # by row

    def assign(self, row: int, group: object = None, context: object = None) -> None:
        self._known[row] = []

    def release(self, row: int, tokens: object) -> None:
        pass

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        assert self._known[row][:num_tokens] == self._truth_of(row).tokens[:num_tokens].tolist()

    def propose(self, row: int, tokens: np.ndarray, most: int, *, by_model: bool = True) -> Draft:
        assert tokens[: len(self._known[row])].tolist() == self._known[row]
        self._known[row] = tokens.tolist()
        truth = self._truth_of(row).tokens
        num_tokens = self._rng.randint(0, most)
        if self._has_model and self._rng.random() < 0.5:
            return Draft(np.full(num_tokens, BY_MODEL, np.int32), DraftSource.MODEL)
        num_right = self._rng.choice([0, self._rng.randint(0, num_tokens), num_tokens])
        right = truth[len(tokens) : len(tokens) + num_right].tolist()
        return Draft(np.array((right + [self._rng.randrange(50) for _ in range(num_tokens)])[:num_tokens], np.int32), DraftSource.NGRAM)
