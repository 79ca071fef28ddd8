"""Bad words of several tokens: the last token of a word is masked where the tokens before it are the word's others.

Owns the last few tokens of the rows that have such words, on the host: the scheduler lets these rows wait for each token. Words of
one token are masks like any other and are not handled here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.upload import to_device
from aengine.scheduler.plan import NewRow

_Words = NDArray[np.int32]  # [w, longest], a word per line, at its end, with _ANY before it
_ANY = -1
_NOTHING = -2  # where a sequence has no token yet; matches no word


class BadWords:
    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._words: dict[int, _Words] = {}
        self._has = np.zeros(max_rows, dtype=np.bool_)
        self._tails = np.full((max_rows, 1), _NOTHING, dtype=np.int32)  # the last tokens, latest at the end
        self._composition: bytes | None = None  # the rows that `_members` and `_batch` are of
        self._members: NDArray[np.int64]  # [W], batch index of each word
        self._batch: _Words  # [W, longest]

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Takes over the words and the last tokens of rows that changed hands."""
        self._composition = None
        for new in new_rows:
            words = [word for word in new.params.bad_words if len(word) > 1]
            self._words.pop(new.row, None)
            self._has[new.row] = bool(words)
            if words:
                self._words[new.row] = _aligned(words)
                self._start(new, max(map(len, words)) - 1)

    def _start(self, new: NewRow, needed: int) -> None:
        width = self._tails.shape[1]
        if needed > width:
            missing = np.full((len(self._tails), needed - width), _NOTHING, dtype=np.int32)
            self._tails = np.concatenate((missing, self._tails), axis=1)
            width = needed
        last = new.tokens[-width:]
        self._tails[new.row] = _NOTHING
        self._tails[new.row, width - len(last) :] = last

    def apply(self, logits: Tensor, rows: NDArray[np.int32]) -> None:
        """Changes the [m, V] logits of `rows` in place."""
        has = self._has[rows]
        if not has.any():
            return
        composition = rows.tobytes()
        if composition != self._composition:
            members = np.flatnonzero(has)
            words = [self._words[int(rows[at])] for at in members]
            self._members = np.repeat(members, [len(one) for one in words])
            longest = max(one.shape[1] for one in words)
            self._batch = np.concatenate([np.pad(one, ((0, 0), (longest - one.shape[1], 0)), constant_values=_ANY) for one in words])
            self._composition = composition
        completed = self._completed(self._batch, rows[self._members])
        if completed.any():
            flat = self._members[completed] * logits.shape[1] + self._batch[completed, -1]
            logits.view(-1).index_fill_(0, to_device(flat, self._device), -math.inf)

    def _completed(self, words: _Words, rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """[w]: of which words the row [w] has all tokens but the last."""
        prefixes = words[:, :-1]
        tails = self._tails[rows, self._tails.shape[1] - prefixes.shape[1] :]
        completed: NDArray[np.bool_] = ((prefixes == tails) | (prefixes == _ANY)).all(axis=1)
        return completed

    def completing(self, row: int) -> NDArray[np.int32]:
        """Ids that would complete a word of a row."""
        words = self._words.get(row)
        if words is None:
            return np.zeros(0, dtype=np.int32)
        lasts: NDArray[np.int32] = words[self._completed(words, np.full(len(words), row)), -1]
        return lasts

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Appends the [m] tokens to `rows`."""
        has = self._has[rows]
        rows = rows[has]
        self._tails[rows, :-1] = self._tails[rows, 1:]
        self._tails[rows, -1] = tokens[has]


def _aligned(words: Sequence[Sequence[int]]) -> _Words:
    out = np.full((len(words), max(map(len, words))), _ANY, dtype=np.int32)
    for line, word in zip(out, words, strict=True):
        line[len(line) - len(word) :] = word
    return out
