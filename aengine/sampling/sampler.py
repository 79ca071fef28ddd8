"""Logprobs of tokens under given logits: natural log-softmax in float32, rank, and the likeliest alternatives. Keeps no state.

The sampler: one batch of logits with mixed per-row parameters to one token per row.

Owns the pinned order: grammar mask, allowed ids, bad words, min_tokens, logit bias, repetition, frequency and presence penalty, custom
processors, draw; logprobs are those of the logits before all of it. What no row of a step needs is not run. A row's token depends on that
row alone; of a row with drafts those count up to the first that is not its draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.errors import NothingToChooseError
from aengine.api.params import GREEDY_BELOW
from aengine.kernels.arrays import Numbers
from aengine.kernels.params import DRAW_PARAMS, DrawParams
from aengine.sampling.arrays import Arrays, on_host
from aengine.sampling.grammar import Grammars
from aengine.sampling.processors import CustomProcessors, Masks, Penalties, Processor, StepRows
from aengine.scheduler.plan import Features, NewRow, RowParams, TokenLogprobs

_BLOCK_ELEMENTS = 1 << 20  # logits worked on at a time: 4 MiB, so that the passes over them meet in a cache
Draw = Callable[[Numbers, NDArray[np.void], Any, Numbers], Numbers]
"""What `draw.Draw` is, but that the parameters on the device are None where logits are on the host."""
LogSums = Callable[[Numbers, Numbers], tuple[Numbers, Numbers]]
"""[m, V] float32 logits, which stay as they are, and [m, 1] of them -> [m, 1] float32, the log of the sum of exp of each row, which depends
on the row alone; and [m] int64, how many of a row are greater than the one of them."""


class DeviceLogprobs(NamedTuple):
    """`TokenLogprobs` where the logits are: the ids are int64."""

    token_logprobs: Numbers
    ranks: Numbers
    top_ids: Numbers
    top_logprobs: Numbers

    def on_host(self) -> TokenLogprobs:
        """Returns the logprobs as arrays with int32 ids. Tensors must be in host memory already."""
        return TokenLogprobs(
            token_logprobs=on_host(self.token_logprobs),
            ranks=on_host(self.ranks).astype(np.int32),
            top_ids=on_host(self.top_ids).astype(np.int32),
            top_logprobs=on_host(self.top_logprobs),
        )


def token_logprobs(arrays: Arrays, logits: Numbers, tokens: Numbers, count: int, sums: LogSums) -> DeviceLogprobs:
    """[m, V] logits and [m] int64 tokens -> logprob and rank of each token, and the `count` likeliest. `sums`: how rows are added up.

    A token's rank is 1 + how many logits are greater than its own; the likeliest are in the order of (logit, -id).
    """
    step = max(1, _BLOCK_ELEMENTS // logits.shape[1] if arrays.on_host or logits.device.type == "cpu" else len(tokens))
    parts = [_block(arrays, logits[at : at + step], tokens[at : at + step], count, sums) for at in range(0, len(tokens), step)]
    return parts[0] if len(parts) == 1 else join(arrays, parts)


def join(arrays: Arrays, parts: list[DeviceLogprobs]) -> DeviceLogprobs:
    return DeviceLogprobs(*(arrays.joined(list(columns)) for columns in zip(*parts, strict=True)))


def _block(arrays: Arrays, logits: Numbers, tokens: Numbers, count: int, sums: LogSums) -> DeviceLogprobs:
    logits = arrays.floats(logits)
    own = arrays.of_columns(logits, tokens[:, None])
    normaliser, greater = sums(logits, own)
    top, top_ids = arrays.top_candidates(logits, min(count, logits.shape[1])) if count else (own[:, :0], tokens[:, None][:, :0])
    return DeviceLogprobs((own - normaliser)[:, 0], greater + 1, top_ids, top - normaliser)


_RANDOM, _PROCESSED, _LAST_TOKEN = int(Features.RANDOM), int(Features.PROCESSED), int(Features.LAST_TOKEN)
_MORE_THAN_A_DRAW = int(Features.PROCESSED | Features.LOGPROBS)
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The m tokens that were sampled in a step. Tensors are on the device and may not be there yet; the rest is known at once."""

    tokens: Numbers  # [m] int64
    chosen: Numbers  # [m], their logits as they were left
    logprobs: DeviceLogprobs | None = None  # of the w rows in `logprob_rows`
    logprob_rows: NDArray[np.int64] | None = None  # [w], which of the m, ascending
    accepted: Numbers | None = None
    """[rows] int32: how many of each row's tokens count. 0: there was no time for the row. None: one of each."""
    step: StepRows | None = None  # with what grammars and custom code raised; None: no logits were processed, and there are no drafts

    @property
    def impossible(self) -> Numbers:
        """[m] bool, where `chosen` is: the tokens that were left no choice, whose logits are NaN or minus infinity."""
        return ~(self.chosen > -math.inf)


class Sampler:
    """Samples for rows 0 .. `max_rows` - 1 over `vocab_size` ids."""

    def __init__(self, max_rows: int, vocab_size: int, arrays: Arrays, draw: Draw, sums: LogSums) -> None:
        """`arrays`: where the logits are. `sums`: as of `token_logprobs`."""
        self._sums = sums
        self.vocab_size = vocab_size
        self._arrays = arrays
        self._features = np.zeros(max_rows, dtype=np.int32)  # of `Features`
        self._greedy = np.zeros(max_rows, dtype=np.bool_)  # whose token is the argmax, without logprobs
        self._later: set[int] = set()  # rows whose grammar limits them later; it is not among their features
        self._limited_from = np.full(max_rows, _NEVER, dtype=np.int32)  # from which position on
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int32)
        self._draw_params = np.zeros(max_rows, dtype=DRAW_PARAMS)
        self._device_params: Numbers
        self._draw = draw
        self._penalties = Penalties(max_rows, arrays)
        self._custom = CustomProcessors(arrays)
        # In the pinned order. Masks and bias are added up in any order: minus infinity plus a bias is minus infinity.
        self._grammars = Grammars(vocab_size, arrays)
        self._processors: tuple[Processor, ...] = (
            self._grammars,
            Masks(max_rows, vocab_size, arrays),
            self._penalties,
            self._custom,
        )

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Rows are assigned to new sequences. What it raises may be the fault of any of them; it can be called again with the others."""
        if not new_rows:
            return
        for new in new_rows:
            features = int(new.params.features)
            self._later.discard(new.row)
            self._limited_from[new.row] = _NEVER
            if new.params.grammar_from and features & Features.GRAMMAR:
                features &= ~int(Features.GRAMMAR)
                self._later.add(new.row)
                self._limited_from[new.row] = new.prompt_len + new.params.grammar_from
            self._features[new.row] = features
            self._greedy[new.row] = not features & (_RANDOM | _MORE_THAN_A_DRAW)
            self._num_logprobs[new.row] = -1 if new.params.logprobs is None else min(new.params.logprobs, self.vocab_size)
            self._draw_params[new.row] = _draw_params(new.params, self.vocab_size)
        if not self._arrays.on_host:  # of all rows, which is one small upload
            self._device_params = self._arrays.put_array(self._draw_params.view(np.int32).reshape(len(self._draw_params), -1))
        for processor in self._processors:
            processor.update(new_rows)

    def is_greedy(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> bool:
        """Whether all that `sample` gives for these rows at `positions` is the argmax of the model's logits."""
        if int(np.count_nonzero(self._greedy[rows])) < len(rows):  # faster than all(), and called in every step
            return False
        return not self._later or not np.count_nonzero(positions >= self._limited_from[rows])

    def processes(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> bool:
        """Whether logits of some of these rows at `positions` change before a token is sampled."""
        return bool(np.count_nonzero(self._features_at(rows, positions) & _PROCESSED))

    def _features_at(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """[m]. A grammar that limits a row later is among the features of all its tokens in a step, if it limits one of them."""
        features = self._features[rows]
        if self._later:
            limited = rows[positions >= self._limited_from[rows]]
            if len(limited):
                features[np.isin(rows, limited)] |= int(Features.GRAMMAR)
        return features

    def draw_params(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.void] | None:
        """[m] `DRAW_PARAMS` of tokens of these rows at `positions`, if all that `sample` does is to draw them from the model's logits;
        else None."""
        if np.count_nonzero(self._features_at(rows, positions) & _MORE_THAN_A_DRAW):
            return None
        params = self._draw_params[rows]
        params["position"] = positions
        return params

    def draft_params(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.void] | None:
        """[m] `DRAW_PARAMS` with the noise of these rows at `positions`, for logits of another model, which nothing else changes; None if
        all are greedy."""
        if not np.count_nonzero(self._features[rows] & _RANDOM):
            return None
        params = self._draw_params[rows]
        params["position"] = positions
        return params

    def device_params(self, device_rows: Numbers, device_positions: Numbers) -> DrawParams:
        """The draw parameters of rows [m] at positions [m], both on the device, gathered there without waiting for it."""
        return DrawParams(self._device_params.index_select(0, device_rows), device_positions)

    def sample(
        self,
        logits: Numbers,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        device_rows: Numbers,
        device_positions: Numbers,
        drafts: NDArray[np.int32] | None = None,
    ) -> SampledTokens:
        """[m, vocab_size] logits -> a token for each of m rows, without waiting for the device. Rows with processors are distinct.

        `positions` [m] are those of the tokens to be sampled, and key their noise; `device_*` are the same on the device. Logits of rows
        with processors are changed in place; they must then be float32 and contiguous, for all rows.

        With `drafts` [m] some rows have several consecutive tokens, each with its draft, or -1 for the last: a token counts if all before
        it are their drafts. A row that would fail behind an accepted draft fails in the next step, which begins there.
        """
        features = self._features_at(rows, positions)
        present = int(np.bitwise_or.reduce(features))
        step = StepRows(rows, positions, drafts) if present & _PROCESSED or drafts is not None else None
        logprob_rows, raw = self._raw_logits(logits, rows, present) if present & Features.LOGPROBS else (None, None)
        if step is not None:
            for processor in self._processors:
                if present & processor.feature:
                    members = (features & processor.feature).nonzero()[0]
                    processor.apply(logits, step, members if processor is not self._custom else members[step.numbers[members] == 0])
        draw_params: NDArray[np.void] | None = None
        if present & _RANDOM:
            draw_params = self._draw_params[rows]
            draw_params["position"] = positions
        sampled = self._draw_tokens(logits, draw_params, device_rows, device_positions)
        tokens = sampled.tokens
        if step is not None:
            if drafts is not None and present & CustomProcessors.feature:
                self._sample_behind_drafts(logits, step, sampled, draw_params, device_rows, device_positions)
            accepted = self._num_accepted(step, sampled) if drafts is not None or step.postponed else None
            if present & Penalties.feature:
                self._penalties.record(step, (features & Penalties.feature).nonzero()[0], tokens)
            sampled = replace(sampled, accepted=accepted, step=step)
        if raw is None or logprob_rows is None:
            return sampled
        return self._with_logprobs(sampled, rows, logprob_rows, raw)

    def _draw_tokens(
        self, logits: Numbers, params: NDArray[np.void] | None, device_rows: Numbers, device_positions: Numbers
    ) -> SampledTokens:
        if params is None:
            return SampledTokens(*self._arrays.likeliest(logits))
        chosen = self._arrays.empty((len(logits),))
        on_device = None if self._arrays.on_host else self.device_params(device_rows, device_positions)
        return SampledTokens(self._draw(logits, params, on_device, chosen), chosen)

    def _sample_behind_drafts(
        self,
        logits: Numbers,
        step: StepRows,
        sampled: SampledTokens,
        draw_params: NDArray[np.void] | None,
        device_rows: Numbers,
        device_positions: Numbers,
    ) -> None:
        """Samples the tokens behind drafts for rows with custom processors, token by token, as processors may keep a state and must see no
        draft that was not sampled. Writes into `sampled`. Waits for the device."""
        assert step.drafts is not None
        members = ((self._features[step.rows] & CustomProcessors.feature != 0) & (step.numbers == 0)).nonzero()[0]
        while True:
            goes_on = [
                index not in step.postponed and row not in step.failures for index, row in zip(members, step.rows[members], strict=True)
            ]
            members = members[goes_on]
            at = self._arrays.put_array(members)
            found = (sampled.tokens[at] == self._arrays.put_array(step.drafts[members])) & (sampled.chosen[at] > -math.inf)
            members = members[on_host(found if self._arrays.on_host else found.cpu())] + 1
            if not len(members):
                return
            self._custom.apply(logits, step, members)
            at = self._arrays.put_array(members)
            params = None if draw_params is None else draw_params[members]
            one = self._draw_tokens(logits[at], params, device_rows[at], device_positions[at])
            sampled.tokens[at], sampled.chosen[at] = one.tokens, one.chosen

    def _num_accepted(self, step: StepRows, sampled: SampledTokens) -> Numbers:
        """[rows] int32, on the device: how many of each row's tokens count; 0 for a postponed row. A row's first token counts even if it is
        impossible, as the row fails with it."""
        tokens = sampled.tokens
        drafts = np.full(len(tokens), -1, np.int32) if step.drafts is None else step.drafts.copy()
        drafts[[index - 1 for index in step.postponed]] = -1  # before a row's first token: of another row's last, which has none
        there, firsts = self._arrays.put_array(drafts), step.firsts
        there[:-1][sampled.impossible[1:]] = -1
        accepted = self._arrays.num_accepted(tokens, there, firsts)
        if step.postponed:
            accepted *= self._arrays.put_array(~np.isin(firsts, list(step.postponed)))
        return accepted

    def _raw_logits(self, logits: Numbers, rows: NDArray[np.int32], present: int) -> tuple[NDArray[np.int64], Numbers]:
        """Which of the m ask for logprobs, and [w, vocab_size] their logits as they are now."""
        logprob_rows = np.flatnonzero(self._num_logprobs[rows] >= 0)
        unchanged = len(logprob_rows) == len(rows) and not present & _PROCESSED
        return logprob_rows, logits if unchanged else logits[self._arrays.put_array(logprob_rows)]

    def _with_logprobs(
        self, sampled: SampledTokens, rows: NDArray[np.int32], logprob_rows: NDArray[np.int64], raw: Numbers
    ) -> SampledTokens:
        tokens = sampled.tokens if len(logprob_rows) == len(rows) else sampled.tokens[self._arrays.put_array(logprob_rows)]
        logprobs = token_logprobs(self._arrays, raw, tokens, int(self._num_logprobs[rows].max()), self._sums)
        return replace(sampled, logprobs=logprobs, logprob_rows=logprob_rows)

    def observe(self, sampled: SampledTokens) -> dict[int, Exception]:
        """The tokens of a step are in host memory. Must precede the next step of rows with `Features.LAST_TOKEN`.

        Returns the rows that have no token, or cannot go on with it, with the reason.
        """
        step = sampled.step
        if step is None:
            return {}
        rows, failures = step.rows, dict(step.failures)
        features = self._features_at(rows, step.positions)
        present = int(np.bitwise_or.reduce(features))
        counts = np.ones(len(rows), np.bool_)
        if sampled.accepted is not None:
            counts = step.numbers < on_host(sampled.accepted)[(step.numbers == 0).cumsum() - 1]
        failures = {**self._refusals(rows, step.positions, on_host(sampled.impossible) & counts), **failures}
        if present & _LAST_TOKEN:
            if failures:
                counts &= ~np.isin(rows, list(failures))
            tokens = on_host(sampled.tokens)
            features = self._features[rows]
            for processor in self._processors:
                if present & processor.feature:
                    members = ((features & processor.feature != 0) & counts).nonzero()[0]
                    failures.update(processor.observe(rows[members], tokens[members]))
        return failures

    def refusals(
        self, rows: NDArray[np.int32], positions: NDArray[np.int32], impossible: NDArray[np.bool_], accepted: NDArray[np.int32] | None
    ) -> dict[int, Exception]:
        """Why rows of a step have no token: those that count of its [m] tokens and are `impossible`. `accepted`: as of `SampledTokens`."""
        if not np.count_nonzero(impossible):
            return {}
        return self._refusals(rows, positions, impossible if accepted is None else impossible & _counting(rows, accepted))

    def _refusals(self, rows: NDArray[np.int32], positions: NDArray[np.int32], impossible: NDArray[np.bool_]) -> dict[int, Exception]:
        found: dict[int, Exception] = {}
        for index in np.flatnonzero(impossible).tolist():
            row = int(rows[index])
            if row not in found:
                found[row] = self._refusal(row, int(positions[index]))
        return found

    def observe_later(
        self, rows: NDArray[np.int32], tokens: NDArray[np.int32 | np.int64], accepted: NDArray[np.int32] | None
    ) -> Mapping[int, Exception]:
        """Advances the grammars that limit their rows only later, by all [m] tokens of a step. Returns the rows that cannot go on with
        their token, with the reason. `accepted`: as of `SampledTokens`."""
        if not self._later:
            return {}
        members = np.isin(rows, list(self._later))
        if accepted is not None:
            members &= _counting(rows, accepted)
        failures = self._grammars.observe(rows[members], tokens[members].astype(np.int64))
        for row in [row for row in self._later if not self._grammars.has(row)]:
            self._later.remove(row)
            self._limited_from[row] = _NEVER
        return failures

    def forced(self, rows: NDArray[np.int32]) -> dict[int, NDArray[np.int32]]:
        """The likely next tokens of rows on which a grammar forces a text, or has just done so. Their latest tokens were observed."""
        return self._grammars.forced(rows)

    def _refusal(self, row: int, position: int) -> NothingToChooseError:
        features = self._features_at(np.array([row], np.int32), np.array([position], np.int32))[0]
        left = np.ones(self.vocab_size, dtype=np.bool_)
        others: list[str] = []
        limits = (limit for one in self._processors if features & one.feature for limit in one.limits(row, position))
        for parameter, allowed in limits:
            left &= allowed
            if not left.any():
                among = f" of those that {' and '.join(others)} leave" if others else ""
                return NothingToChooseError.of(parameter, f"no token can be chosen at position {position}: it leaves none{among}")
            others += [parameter] * (parameter not in others)
        culprit = "logits_processors" if features & CustomProcessors.feature else "model"
        return NothingToChooseError.of(culprit, f"no token can be chosen at position {position}: no logit that is left is a number")


def _counting(rows: NDArray[np.int32], accepted: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[m]: which tokens of a step count, of [m] rows with consecutive tokens each. `accepted`: as of `SampledTokens`."""
    firsts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    lengths = np.diff(firsts, append=len(rows))
    counting: NDArray[np.bool_] = np.arange(len(rows)) - firsts.repeat(lengths) < accepted.repeat(lengths)
    return counting


def _draw_params(params: RowParams, vocab_size: int) -> tuple[float, ...]:
    """A record of `DRAW_PARAMS`, of the row's parameters by their names, without the position."""
    values = {name: 0 if name in ("position", "unused") else getattr(params, name) for name in DRAW_PARAMS.names or ()}
    values["temperature"] = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
    values["top_k"] = params.top_k if params.top_k < vocab_size else 0
    return tuple(values.values())
