"""Allowed ids, banned ids, end-of-sequence ids before min_tokens, and logit bias.

Owns which (row, id) pairs they touch, as sparse index arrays that are built when the rows of a step change and not in every step.
Knows nothing of words of more than one token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.upload import to_device
from aengine.scheduler.plan import NewRow, RowParams

_Ids = NDArray[np.int64]
_NO_IDS: _Ids = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _RowMask:
    allowed: _Ids | None
    banned: _Ids
    words: _Ids  # bad words of one token, banned as well
    stops: _Ids  # and these until the row has min_tokens
    biased: _Ids
    biases: NDArray[np.float32]

    @classmethod
    def of(cls, params: RowParams) -> _RowMask:
        words = [word[0] for word in params.bad_words if len(word) == 1]
        return cls(
            allowed=None if params.allowed_token_ids is None else np.asarray(params.allowed_token_ids, dtype=np.int64),
            banned=np.array(params.banned_token_ids, dtype=np.int64),
            words=np.array(words, dtype=np.int64),
            stops=np.array(params.stop_ids if params.min_tokens > 0 else (), dtype=np.int64),
            biased=np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64),
            biases=np.array([bias for _, bias in params.logit_bias], dtype=np.float32),
        )

    def __bool__(self) -> bool:
        return self.allowed is not None or len(self.banned) + len(self.words) + len(self.stops) + len(self.biased) > 0


@dataclass(frozen=True, slots=True)
class _Indices:
    """Of one composition of rows, on the device; all int64 but `biases`. Flat indices are batch index * vocab_size + id."""

    restricted: Tensor  # batch indices of the rows with allowed ids
    allowed: Tensor  # flat
    banned: Tensor  # flat
    biased: Tensor  # flat
    biases: Tensor  # float32


class LogitMasks:
    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._masks: dict[int, _RowMask] = {}
        self._masked = np.zeros(max_rows, dtype=np.bool_)
        self._min_len = np.zeros(max_rows, dtype=np.int64)  # tokens of prompt and output before which `stops` are banned
        self._composition: tuple[bytes, bytes] | None = None  # what `_indices` was built for
        self._indices: _Indices

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Takes over the masks of rows that changed hands."""
        self._composition = None
        for new in new_rows:
            mask = _RowMask.of(new.params)
            self._masked[new.row] = bool(mask)
            self._min_len[new.row] = new.prompt_len + new.params.min_tokens
            self._masks.pop(new.row, None)
            if mask:
                self._masks[new.row] = mask

    def apply(self, logits: Tensor, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """Changes the [m, V] logits of `rows` in place; `positions` [m] are those of the tokens that are about to be chosen."""
        masked = self._masked[rows]
        if not masked.any():
            return
        early = masked & (positions < self._min_len[rows])
        composition = (rows.tobytes(), early.tobytes())
        if composition != self._composition:
            self._indices = self._build(rows, np.flatnonzero(masked), early)
            self._composition = composition
        indices, flat = self._indices, logits.view(-1)
        if len(indices.restricted):
            kept = flat.index_select(0, indices.allowed)
            logits.index_fill_(0, indices.restricted, -math.inf)
            flat.index_copy_(0, indices.allowed, kept)
        if len(indices.banned):
            flat.index_fill_(0, indices.banned, -math.inf)
        if len(indices.biased):
            flat.index_add_(0, indices.biased, indices.biases)

    def limits(self, row: int, position: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """The parameters that limit the choice of a row's token at `position`, with the tokens [V] that each leaves."""
        mask = self._masks.get(row)
        if mask is None:
            return
        if mask.allowed is not None:
            yield "allowed_token_ids", tokens_in(mask.allowed, self._vocab_size)
        early = mask.stops if position < self._min_len[row] else _NO_IDS
        for name, ids in (("banned_token_ids", mask.banned), ("bad_words", mask.words), ("min_tokens", early)):
            if len(ids):
                yield name, ~tokens_in(ids, self._vocab_size)

    def _build(self, rows: NDArray[np.int32], members: _Ids, early: NDArray[np.bool_]) -> _Indices:
        restricted, allowed, banned, biased = [], [_NO_IDS], [_NO_IDS], [_NO_IDS]
        biases = [np.zeros(0, dtype=np.float32)]
        for at in members.tolist():
            mask, base = self._masks[int(rows[at])], at * self._vocab_size
            if mask.allowed is not None:
                restricted.append(at)
                allowed.append(mask.allowed + base)
            banned += (mask.banned + base, mask.words + base)
            if early[at]:
                banned.append(mask.stops + base)
            biased.append(mask.biased + base)
            biases.append(mask.biases)
        return _Indices(
            restricted=self._put(np.array(restricted, dtype=np.int64)),
            allowed=self._put(np.concatenate(allowed)),
            banned=self._put(np.concatenate(banned)),
            biased=self._put(np.concatenate(biased)),
            biases=self._put(np.concatenate(biases)),
        )

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)


def tokens_in(ids: NDArray[np.integer], vocab_size: int) -> NDArray[np.bool_]:
    """[vocab_size]: which ids are among `ids`."""
    found = np.zeros(vocab_size, dtype=np.bool_)
    found[ids] = True
    return found
