"""`Processor`: what changes the logits of some rows before their tokens are sampled. `Sampler` runs all of them, in the pinned order.

`CustomProcessors` are those of users. It owns the tokens that they are shown, on the host: the scheduler lets these rows wait for each
token. What one of them raises fails its row and no other.

Repetition, frequency and presence penalties.

Owns, on the device and for penalised rows only, which tokens a row has seen. They are kept as lists, not as tables over the vocabulary: a
step touches as many logits as a row has tokens. Sampled tokens are added on the device, so that the next step need not wait for this one.
Knows nothing of the other processors.

Allowed ids, banned ids, bad words, end-of-sequence ids before min_tokens, and logit bias.

Owns which (row, id) pairs they touch, as sparse index arrays that are built when the rows of a step change and not in every step. The
last token of a bad word of several is masked where the row's last tokens are the others: these are kept on the host, and the scheduler
lets such rows wait for each token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.params import LogitsProcessor
from aengine.kernels.arrays import Numbers
from aengine.kernels.params import HIGHEST_LOGIT
from aengine.sampling.arrays import Arrays
from aengine.scheduler.plan import Features, NewRow, RowParams


@dataclass(frozen=True, slots=True)
class StepRows:
    """The m tokens of a step that are to be sampled. Processors add those that cannot be.

    Without drafts each token is of another row. With drafts the tokens of a row follow each other, and processors take the drafts before a
    token as sampled: it counts only if they are.
    """

    rows: NDArray[np.int32]  # [m]
    positions: NDArray[np.int32]  # [m]
    drafts: NDArray[np.int32] | None = None  # [m], -1 for a row's last token
    failures: dict[int, Exception] = field(default_factory=dict)  # why a row's first token cannot be sampled, by row
    postponed: set[int] = field(default_factory=set)
    """Which of the m cannot be sampled in this step, for lack of time, or since it would fail: a row fails at its first token alone."""
    firsts: NDArray[np.int64] = field(init=False)  # [rows], of each row its first token's index
    numbers: NDArray[np.int64] = field(init=False)  # [m], of a token among those of its row

    def __post_init__(self) -> None:
        firsts = np.arange(len(self.rows))
        numbers = np.zeros_like(firsts)
        if self.drafts is not None:
            ends = (self.drafts < 0).nonzero()[0] + 1
            numbers, firsts = firsts, ends.copy()
            firsts[0], firsts[1:] = 0, ends[:-1]
            numbers -= firsts.repeat(ends - firsts)
        object.__setattr__(self, "firsts", firsts)
        object.__setattr__(self, "numbers", numbers)

    def drafts_before(self, index: int) -> list[int]:
        """The drafts of the token's row that come before the token at `index` of the m; empty without drafts."""
        return [] if self.drafts is None else self.drafts[index - self.numbers[index] : index].tolist()


class Processor:
    """Has a state for each row with its feature. `members` [k] are the indices of these rows' tokens among the m of a step."""

    feature: ClassVar[int]
    """Of `Features`."""

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Drops the state of these rows, and makes a new one for those with the feature. It may be called again after it raised."""
        raise NotImplementedError

    def apply(self, logits: Numbers, step: StepRows, members: NDArray[np.int64]) -> None:
        """Changes the lines `members` of the [m, vocab_size] float32 logits in place."""
        raise NotImplementedError

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> Mapping[int, Exception]:
        """The next tokens of rows with the feature, as soon as the host has them; several of a row follow each other. Returns the rows that
        cannot go on with their token, with the reason. Called for rows with `Features.LAST_TOKEN` at least."""
        return {}

    def limits(self, row: int, position: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """The parameters that limit which token a row with the feature may have at `position`, with the tokens [vocab_size] that each
        leaves."""
        yield from ()


class CustomProcessors(Processor):
    feature = int(Features.PROCESSORS)

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._rows: dict[int, tuple[tuple[LogitsProcessor, ...], list[int]]] = {}  # processors, and the tokens so far

    def update(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            self._rows.pop(new.row, None)
            if new.params.processors:
                self._rows[new.row] = new.params.processors, new.tokens.tolist()

    def apply(self, logits: Numbers, step: StepRows, members: NDArray[np.int64]) -> None:
        """Runs the users' processors on the rows' lines, in place. An infinite logit becomes `HIGHEST_LOGIT`. What a processor raises fails
        its row, or postpones the token if drafts precede it."""
        for index, row in zip(members.tolist(), step.rows[members].tolist(), strict=True):
            if index in step.postponed:
                continue
            processors, tokens = self._rows[row]
            drafts = step.drafts_before(index)
            try:
                line = self._arrays.tensor_of(logits[index])
                for processor in processors:
                    processor(line, tokens + drafts)  # a new list, which it may keep or change
                self._arrays.at_most(logits[index], HIGHEST_LOGIT)
            except BaseException as error:  # belongs to this row alone: this thread is nobody's to exit or to interrupt
                if drafts:
                    step.postponed.add(index)
                else:
                    step.failures[row] = _as_exception(error)

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> Mapping[int, Exception]:
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._rows[row][1].append(token)
        return {}


def _as_exception(error: BaseException) -> Exception:
    """What a reader of the stream can catch without ending its own program or task."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a logits processor raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


_FIRST_ENTRIES = 256
_LEAST = float(np.finfo(np.float32).tiny)  # repetition_penalty divides, and less may be zero in float32


class Penalties(Processor):
    """Penalised rows take slots, which are made as they are needed. A slot lists the distinct tokens of a row's prompt, where a penalty
    looks at them, and then its output; drafts take the places of the tokens that they stand for.

    A token may be listed several times: all of its entries lead to the same new logit, so that it does not matter which is written last.
    For the same reason entries that a row does not have yet are replaced by its first one; an empty list has token 0, with factors and a
    count that change nothing.
    """

    feature = int(Features.PENALTIES)

    def __init__(self, max_rows: int, arrays: Arrays) -> None:
        self._arrays = arrays
        self._slots = np.full(max_rows, -1, dtype=np.int64)
        self._offsets = np.zeros(max_rows, dtype=np.int64)  # the token at position p has entry offset + p
        self._outputs = np.zeros(max_rows, dtype=np.int64)  # the first entry of the output
        self._free: list[int] = []
        self._lists = arrays.zeros((0, _FIRST_ENTRIES), np.int64)  # [slots, entries]: token ids
        self._factors = arrays.zeros((0, 3), np.float32)  # repetition, frequency, presence
        self._buffer = arrays.empty((0, 0))

    def update(self, new_rows: Sequence[NewRow]) -> None:
        for new in new_rows:
            slot = int(self._slots[new.row])
            if slot >= 0:
                self._free.append(slot)
                self._slots[new.row] = -1
        penalised = [new for new in new_rows if int(new.params.features) & self.feature]
        if not penalised:
            return
        lists = [_prompt_entries(new) for new in penalised]
        ends = [len(ids) + len(new.tokens) - new.prompt_len for new, ids in zip(penalised, lists, strict=True)]
        self._reserve(len(penalised), max(ends))
        packed = np.zeros((len(penalised), self._lists.shape[1]), dtype=np.int64)
        slots = np.empty(len(penalised), dtype=np.int64)
        for i, (new, ids, end) in enumerate(zip(penalised, lists, ends, strict=True)):
            packed[i, : len(ids)], packed[i, len(ids) : end] = ids, new.tokens[new.prompt_len :]
            slots[i] = self._slots[new.row] = self._free.pop()
            self._outputs[new.row], self._offsets[new.row] = len(ids), end - len(new.tokens)
        factors = np.array(
            [(max(p.repetition_penalty, _LEAST), p.frequency_penalty, p.presence_penalty) for p in (new.params for new in penalised)],
            dtype=np.float32,
        )
        at = self._arrays.put_array(slots)
        self._lists[at] = self._arrays.put_array(packed)
        self._factors[at] = self._arrays.put_array(factors)

    def apply(self, logits: Numbers, step: StepRows, members: NDArray[np.int64]) -> None:
        rows, ends = step.rows[members], self._ends(step, members)
        self._reserve(0, int(ends.max()) + 1)  # for what will be sampled, too
        if step.drafts is not None and len(drafted := members[step.drafts[members] >= 0]):
            self._write(step, drafted, self._arrays.put_array(step.drafts[drafted].astype(np.int64)))
        arrays = self._arrays
        at = arrays.put_array(np.stack((members * logits.shape[1], self._slots[rows], self._outputs[rows], ends)))
        lines, slots, outputs, limits = at[:, :, None]
        entries = arrays.arange(max(1, int(ends.max())))
        there = entries < limits
        ids = self._lists[:, : len(entries)][slots[:, 0]]
        ids = arrays.where(there, ids, ids[:, :1])
        is_output = arrays.floats(there & (entries >= outputs))
        counts = arrays.sums_by_id(self._table(len(ids), logits.shape[1]), ids, is_output)
        factors = self._factors[slots[:, 0]][:, :, None]
        repetition, frequency, presence = factors[:, 0], factors[:, 1], factors[:, 2]
        flat, at = arrays.flat(logits), arrays.flat(ids + lines)
        scores = flat[at].reshape(ids.shape)
        scores = arrays.at_most(arrays.where(scores < 0, scores * repetition, scores / repetition), HIGHEST_LOGIT)
        scores = scores - frequency * counts - presence * (counts > 0)
        flat[at] = arrays.flat(scores)

    def record(self, step: StepRows, members: NDArray[np.int64], tokens: Numbers) -> None:
        """Adds the tokens of `members`, of [m] int64 `tokens` on the device. Those that do not count are overwritten."""
        self._write(step, members, tokens[self._arrays.put_array(members)])

    def _write(self, step: StepRows, members: NDArray[np.int64], tokens: Numbers) -> None:
        """Into the entries of these tokens of a step."""
        slots, entries = self._arrays.put_array(np.stack((self._slots[step.rows[members]], self._ends(step, members))))
        self._lists[slots, entries] = tokens

    def _ends(self, step: StepRows, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many entries the rows of these tokens have before them, those of drafts included."""
        return self._offsets[step.rows[members]] + step.positions[members]

    def _table(self, rows: int, vocab_size: int) -> Numbers:
        """[rows, vocab_size] float32, any numbers. On the host it is kept: the first writes to new memory would take longer than all
        else."""
        if not self._arrays.on_host:
            return self._arrays.empty((rows, vocab_size))
        if len(self._buffer) < rows:
            self._buffer = self._arrays.empty((rows, vocab_size))
        return self._buffer[:rows]

    def _reserve(self, slots: int, entries: int) -> None:
        """Makes room for this many more slots, and for this many entries in each."""
        num_slots, width = self._lists.shape
        missing = max(0, slots - len(self._free))
        if missing == 0 and entries <= width:
            return
        more_slots = max(missing, num_slots) if missing else 0
        more_entries = max(width, entries - width) if entries > width else 0
        lists = self._arrays.zeros((num_slots + more_slots, width + more_entries), np.int64)
        lists[:num_slots, :width] = self._lists
        self._lists = lists
        self._factors = self._arrays.joined([self._factors, self._arrays.zeros((more_slots, 3), np.float32)])
        self._free.extend(range(num_slots, num_slots + more_slots))


def _prompt_entries(new: NewRow) -> NDArray[np.int32]:
    """The distinct tokens of the prompt, where a penalty looks at them."""
    ids = np.sort(new.tokens[: 0 if new.params.repetition_penalty == 1.0 else new.prompt_len])
    distinct: NDArray[np.int32] = ids[np.append(True, ids[1:] != ids[:-1])[: len(ids)]]  # `np.unique` imports at its first use
    return distinct


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
    """The masks of a step's rows. What is of `Numbers` is int64, but for `biases`; flat indices are batch index * vocab_size + id."""

    restricted: Numbers  # batch indices of the rows with allowed ids
    allowed: Numbers  # flat
    banned: Numbers  # flat
    biased: Numbers  # flat
    biases: Numbers  # float32
    long_words: _Words
    word_indices: _Ids  # [w], batch indices of the rows with these words


class Masks(Processor):
    feature = int(Features.MASKS)

    def __init__(self, max_rows: int, vocab_size: int, arrays: Arrays) -> None:
        self._vocab_size = vocab_size
        self._arrays = arrays
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

    def apply(self, logits: Numbers, step: StepRows, members: NDArray[np.int64]) -> None:
        rows = step.rows[members]
        early = step.positions[members] < self._min_len[rows]
        composition = step.rows.tobytes(), early.tobytes()
        if composition != self._composition:
            self._batch = self._build(rows.tolist(), members.tolist(), early.tolist())
            self._composition = composition
        batch, flat = self._batch, self._arrays.flat(logits)
        if len(batch.restricted):
            allowed = flat[batch.allowed]
            logits[batch.restricted] = -math.inf
            flat[batch.allowed] = allowed
        if len(batch.banned):
            flat[batch.banned] = -math.inf
        if len(batch.biased):
            self._arrays.add_at(flat, batch.biased, batch.biases)
        if len(batch.long_words):
            completed = _completed(batch.long_words, self._last_tokens_of(step, batch.word_indices))
            if completed.any():
                banned = batch.word_indices[completed] * self._vocab_size + batch.long_words[completed, -1]
                flat[self._arrays.put_array(banned)] = -math.inf

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
            restricted=self._arrays.put_array(np.array([index for index, _ in restricted], dtype=np.int64)),
            allowed=self._arrays.put_array(np.concatenate([np.zeros(0, dtype=np.int64), *(ids for _, ids in restricted)])),
            banned=self._arrays.put_array(np.concatenate(banned)),
            biased=self._arrays.put_array(np.concatenate([mask.biased + base for _, base, mask in masks])),
            biases=self._arrays.put_array(np.concatenate([mask.biases for _, _, mask in masks])),
            long_words=_joined([mask.long_words for _, _, mask in masks if len(mask.long_words)]),
            word_indices=np.repeat(indices, [len(mask.long_words) for _, _, mask in masks]),
        )


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
