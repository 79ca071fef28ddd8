"""Allowed ids, banned ids, bad words, end-of-sequence ids before min_tokens, and logit bias.

Owns which (row, id) pairs they touch, as sparse index arrays that are built when the rows of a step change and not in every step. The
last token of a bad word of several is masked where the row's last tokens are the others: these are kept on the host, and the scheduler
lets such rows wait for each token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.upload import to_device
from aengine.sampling.processors import Processor, StepRows
from aengine.scheduler.plan import Features, NewRow, RowParams

_Ids = NDArray[np.int64]
_Words = NDArray[np.int32]  # [w, longest], a word per line, at its end, with _ANY before it
_ANY = -1
_NOTHING = -2  # where a sequence has no token yet; matches no word


@dataclass(frozen=True, slots=True)
class _RowMask:
    allowed: _Ids | None
    banned: _Ids
    short_words: _Ids  # bad words of one token
    long_words: _Words  # and of several
    stops: _Ids  # banned until the row has min_tokens
    biased: _Ids
    biases: NDArray[np.float32]

    @classmethod
    def of(cls, params: RowParams) -> _RowMask:
        return cls(
            allowed=None if params.allowed_token_ids is None else np.asarray(params.allowed_token_ids, dtype=np.int64),
            banned=np.array(params.banned_token_ids, dtype=np.int64),
            short_words=np.array([word[0] for word in params.bad_words if len(word) == 1], dtype=np.int64),
            long_words=_joined([np.array([word], dtype=np.int32) for word in params.bad_words if len(word) > 1]),
            stops=np.array(params.stop_ids if params.min_tokens > 0 else (), dtype=np.int64),
            biased=np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64),
            biases=np.array([bias for _, bias in params.logit_bias], dtype=np.float32),
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    """The masks of a step's rows. Tensors are on the device and int64, but for `biases`; flat indices are batch index * vocab_size + id."""

    restricted: Tensor  # batch indices of the rows with allowed ids
    allowed: Tensor  # flat
    banned: Tensor  # flat
    biased: Tensor  # flat
    biases: Tensor  # float32
    long_words: _Words
    word_indices: _Ids  # [w], batch indices of the rows with these words


class Masks(Processor):
    feature = int(Features.MASKS)

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._masks: dict[int, _RowMask] = {}
        self._min_len = np.zeros(max_rows, dtype=np.int64)  # tokens of prompt and output before which `stops` are banned
        self._last_tokens = np.full((max_rows, 1), _NOTHING, dtype=np.int32)  # of rows with long words, latest at the end
        self._composition: tuple[bytes, bytes] | None = None  # what `_batch` was built for
        self._batch: _Batch

    def update(self, new_rows: Sequence[NewRow]) -> None:
        self._composition = None
        for new in new_rows:
            self._masks.pop(new.row, None)
            if int(new.params.features) & self.feature:
                self._masks[new.row] = mask = _RowMask.of(new.params)
                self._min_len[new.row] = new.prompt_len + new.params.min_tokens
                if len(mask.long_words):
                    self._set_last_tokens(new, mask.long_words.shape[1] - 1)

    def _set_last_tokens(self, new: NewRow, count: int) -> None:
        missing = count - self._last_tokens.shape[1]
        if missing > 0:
            self._last_tokens = np.pad(self._last_tokens, ((0, 0), (missing, 0)), constant_values=_NOTHING)
        last_tokens = self._last_tokens[new.row]
        known = new.tokens[-len(last_tokens) :]
        last_tokens[:] = _NOTHING
        last_tokens[len(last_tokens) - len(known) :] = known

    def apply(self, logits: Tensor, step: StepRows, members: NDArray[np.int64]) -> None:
        rows = step.rows[members]
        early = step.positions[members] < self._min_len[rows]
        composition = step.rows.tobytes(), early.tobytes()
        if composition != self._composition:
            self._batch = self._build(rows.tolist(), members.tolist(), early.tolist())
            self._composition = composition
        batch, flat = self._batch, logits.view(-1)
        if len(batch.restricted):
            allowed = flat.index_select(0, batch.allowed)
            logits.index_fill_(0, batch.restricted, -math.inf)
            flat.index_copy_(0, batch.allowed, allowed)
        if len(batch.banned):
            flat.index_fill_(0, batch.banned, -math.inf)
        if len(batch.biased):
            flat.index_add_(0, batch.biased, batch.biases)
        if len(batch.long_words):
            completed = _completed(batch.long_words, self._last_tokens_of(step, batch.word_indices))
            if completed.any():
                banned = batch.word_indices[completed] * self._vocab_size + batch.long_words[completed, -1]
                flat.index_fill_(0, to_device(banned, self._device), -math.inf)

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> Mapping[int, Exception]:
        while len(rows):
            firsts = np.append(True, rows[1:] != rows[:-1]).nonzero()[0]
            distinct = rows[firsts]
            self._last_tokens[distinct, :-1] = self._last_tokens[distinct, 1:]
            self._last_tokens[distinct, -1] = tokens[firsts]
            rows, tokens = np.delete(rows, firsts), np.delete(tokens, firsts)
        return {}

    def limits(self, row: int, position: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        mask = self._masks[row]
        if mask.allowed is not None:
            yield "allowed_token_ids", _tokens_in(mask.allowed, self._vocab_size)
        completed = _completed(mask.long_words, self._last_tokens[np.full(len(mask.long_words), row)])
        bad_words = np.concatenate((mask.short_words, mask.long_words[completed, -1]))
        early = mask.stops[: len(mask.stops) if position < self._min_len[row] else 0]
        for name, ids in (("banned_token_ids", mask.banned), ("bad_words", bad_words), ("min_tokens", early)):
            if len(ids):
                yield name, ~_tokens_in(ids, self._vocab_size)

    def _last_tokens_of(self, step: StepRows, indices: _Ids) -> NDArray[np.int32]:
        """[w, longest]: the tokens before those at `indices` [w] of the step."""
        last_tokens = self._last_tokens[step.rows[indices]]
        for line, index in enumerate(indices.tolist() if step.drafts is not None else ()):
            if drafts := step.drafts_before(index)[-last_tokens.shape[1] :]:
                last_tokens[line] = np.append(last_tokens[line, len(drafts) :], drafts)
        return last_tokens

    def _build(self, rows: list[int], indices: list[int], early: list[bool]) -> _Batch:
        masks = [(index, index * self._vocab_size, self._masks[row]) for row, index in zip(rows, indices, strict=True)]
        banned = [ids + base for _, base, mask in masks for ids in (mask.banned, mask.short_words)]
        banned += [mask.stops + base for (_, base, mask), is_early in zip(masks, early, strict=True) if is_early]
        restricted = [(index, mask.allowed + base) for index, base, mask in masks if mask.allowed is not None]
        return _Batch(
            restricted=self._put(np.array([index for index, _ in restricted], dtype=np.int64)),
            allowed=self._put(np.concatenate([np.zeros(0, dtype=np.int64), *(ids for _, ids in restricted)])),
            banned=self._put(np.concatenate(banned)),
            biased=self._put(np.concatenate([mask.biased + base for _, base, mask in masks])),
            biases=self._put(np.concatenate([mask.biases for _, _, mask in masks])),
            long_words=_joined([mask.long_words for _, _, mask in masks if len(mask.long_words)]),
            word_indices=np.repeat(indices, [len(mask.long_words) for _, _, mask in masks]),
        )

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)


def _completed(words: _Words, last_tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[w]: the words of which all tokens but the last are the `last_tokens` [w, longest]."""
    others = words[:, :-1]
    completed: NDArray[np.bool_] = ((others == last_tokens[:, last_tokens.shape[1] - others.shape[1] :]) | (others == _ANY)).all(axis=1)
    return completed


def _joined(words: Sequence[_Words]) -> _Words:
    """All of them in one array."""
    out = np.full((sum(map(len, words)), max((some.shape[1] for some in words), default=1)), _ANY, dtype=np.int32)
    begin = 0
    for some in words:
        out[begin : begin + len(some), out.shape[1] - some.shape[1] :] = some
        begin += len(some)
    return out


def _tokens_in(ids: NDArray[np.integer], vocab_size: int) -> NDArray[np.bool_]:
    """[vocab_size]: which ids are among `ids`."""
    found = np.zeros(vocab_size, dtype=np.bool_)
    found[ids] = True
    return found
