"""Drafters for measurements: they are told what will come, so that their drafts are right as often as is wanted, whatever the model is.

Each satisfies `Drafter`. A request is known by the first `PROMPT` tokens of its prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from aengine.api.outputs import DraftSource
from aengine.scheduler.drafters import Acceptance, Draft, Drafter, NgramDrafter
from aengine.scheduler.plan import NO_INTS, IntArray

PROMPT = 32
EDITED = 0.05
"""Share of a document's places at which its edited copy has another token, one more, or one less."""


class Planted(Drafter, Protocol):
    def plant(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """`output` will follow `prompt`."""


class PlantedDrafter:
    """Knows what comes, and makes each draft wrong with probability 1 - `acceptance`."""

    def __init__(self) -> None:
        self.acceptance = 0.0
        self._known: dict[bytes, IntArray] = {}  # prompt and output
        self._of_rows: dict[int, IntArray] = {}
        self._rng = random.Random(0)
        self._measured = Acceptance(0.5)

    def plant(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._known[_name(prompt)] = np.array([*prompt, *output], np.int32)

    def assign(self, row: int, group: object = None, context: IntArray = NO_INTS) -> None:
        self._of_rows.pop(row, None)

    def release(self, row: int, tokens: object) -> None:
        pass

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        if row not in self._of_rows:
            self._of_rows[row] = self._known.get(_name(tokens), tokens)
        following = self._of_rows[row][len(tokens) : len(tokens) + most]
        wrong = [self._rng.random() >= self.acceptance for _ in following]
        return Draft(np.where(wrong, np.abs(following - 1), following), DraftSource.NGRAM, self._measured.value)

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        self._measured.add_drafts(len(draft.token_ids), num_accepted)


class EditDrafter:
    """N-grams of a document and of the output, which is an edited copy of it, as where a prompt asks for that."""

    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self._ngrams = NgramDrafter(vocab_size, max_rows)
        self._documents: dict[bytes, IntArray] = {}
        self._of_rows: dict[int, IntArray] = {}

    def plant(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        rng, document = random.Random(0), list[int]()
        for token in output:
            # What was another token, was not there yet, or was there beside it.
            edit = rng.choice(([abs(token - 1)], [], [token, token])) if rng.random() < EDITED else [token]
            document += edit
        self._documents[_name(prompt)] = np.array(document, np.int32)

    def assign(self, row: int, group: object = None, context: IntArray = NO_INTS) -> None:
        self._ngrams.assign(row, group, context)
        self._of_rows.pop(row, None)

    def release(self, row: int, tokens: object) -> None:
        pass

    def propose(self, row: int, tokens: IntArray, most: int, *, by_model: bool = True) -> Draft:
        if row not in self._of_rows:
            self._of_rows[row] = self._documents.get(_name(tokens), tokens[:0])
        return self._ngrams.propose(row, np.concatenate((self._of_rows[row], tokens)), most)

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        self._ngrams.observe(row, num_tokens, draft, num_accepted)


def _name(tokens: Sequence[int] | IntArray) -> bytes:
    return np.array(tokens[:PROMPT], np.int32).tobytes()
