"""The sampler: one batch of logits with mixed per-row parameters to one token per row.

Owns the pinned order: grammar mask, allowed ids, bad words, min_tokens, logit bias, repetition, frequency and presence penalty, custom
processors, draw; logprobs are those of the logits before all of it. What no row of a step needs is not run. A row's token depends on that
row alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.errors import NothingToChooseError
from aengine.kernels.draw_params import DRAW_PARAMS, DrawParams
from aengine.kernels.upload import to_device
from aengine.params import GREEDY_BELOW
from aengine.sampling.acceptance import num_accepted
from aengine.sampling.custom import CustomProcessors
from aengine.sampling.draw import Draw, select_draw
from aengine.sampling.grammar import Grammars
from aengine.sampling.logprobs import DeviceLogprobs, token_logprobs
from aengine.sampling.masks import Masks
from aengine.sampling.penalties import Penalties
from aengine.sampling.processors import Processor, StepRows
from aengine.scheduler.plan import Features, NewRow, RowParams

_RANDOM, _PROCESSED, _LAST_TOKEN = int(Features.RANDOM), int(Features.PROCESSED), int(Features.LAST_TOKEN)
_MORE_THAN_A_DRAW = int(Features.PROCESSED | Features.LOGPROBS)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was sampled for the m rows of a step. Tensors are on the device and may not be there yet; the rest is known at once."""

    tokens: Tensor  # [m] int64
    logprobs: DeviceLogprobs | None = None  # of the w rows in `logprob_rows`
    logprob_rows: NDArray[np.int64] | None = None  # [w], which of the m, ascending
    impossible: Tensor | None = None  # [p] bool: of the rows whose logits were processed, those that were left no token
    failures: Mapping[int, Exception] = field(default_factory=dict)  # what grammars and custom code raised, by row
    postponed: frozenset[int] = frozenset()  # rows for which there was no time
    accepted: Tensor | None = None  # [rows] int32, of a step with drafts: how many of each row's tokens count


class Sampler:
    """Samples for rows 0 .. `max_rows` - 1 over `vocab_size` ids."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, draw: Draw | None = None) -> None:
        """`draw`: None is what is best on the device."""
        self.vocab_size = vocab_size
        self.device = device
        self._features = np.zeros(max_rows, dtype=np.int32)  # of `Features`
        self._greedy = np.zeros(max_rows, dtype=np.bool_)  # whose token is the argmax, without logprobs
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int32)
        self._draw_params = np.zeros(max_rows, dtype=DRAW_PARAMS)
        self._device_params: Tensor
        self._draw = draw or select_draw(vocab_size, device)
        self._penalties = Penalties(max_rows, device)
        # In the pinned order. Masks and bias are added up in any order: minus infinity plus a bias is minus infinity.
        self._grammars = Grammars(vocab_size)
        self._processors: tuple[Processor, ...] = (
            self._grammars,
            Masks(max_rows, vocab_size, device),
            self._penalties,
            CustomProcessors(),
        )

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Rows are assigned to new sequences. What it raises may be the fault of any of them; it can be called again with the others."""
        if not new_rows:
            return
        for new in new_rows:
            self._features[new.row] = features = int(new.params.features)
            self._greedy[new.row] = not features & (_RANDOM | _MORE_THAN_A_DRAW)
            self._num_logprobs[new.row] = -1 if new.params.logprobs is None else min(new.params.logprobs, self.vocab_size)
            self._draw_params[new.row] = _draw_params(new.params, self.vocab_size)
        # Of all rows, which is one small upload, and none on a CPU: there it is the same memory.
        self._device_params = to_device(self._draw_params.view(np.int32).reshape(len(self._draw_params), -1), self.device)
        for processor in self._processors:
            processor.update(new_rows)

    def is_greedy(self, rows: NDArray[np.int32]) -> bool:
        """Whether all that `sample` gives for these rows is the argmax of the model's logits."""
        return int(np.count_nonzero(self._greedy[rows])) == len(rows)  # faster than all(), and called in every step

    def processes(self, rows: NDArray[np.int32]) -> bool:
        """Whether logits of some of these rows change before a token is sampled."""
        return bool(np.count_nonzero(self._features[rows] & _PROCESSED))

    def draw_params(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.void] | None:
        """[m] `DRAW_PARAMS` of tokens of these rows at `positions`, if all that `sample` does is to draw them from the model's logits;
        else None."""
        if np.count_nonzero(self._features[rows] & _MORE_THAN_A_DRAW):
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

    def device_params(self, device_rows: Tensor, device_positions: Tensor) -> DrawParams:
        """The same on the device."""
        return DrawParams(self._device_params.index_select(0, device_rows), device_positions)

    def sample(
        self, logits: Tensor, rows: NDArray[np.int32], positions: NDArray[np.int32], device_rows: Tensor, device_positions: Tensor
    ) -> SampledTokens:
        """[m, vocab_size] float32 logits of m rows -> a token for each, without waiting for the device. Rows with processors are distinct.

        `positions` [m] are those of the tokens to be sampled, and key their noise; `device_*` are the same on the device. Logits of
        rows with processors are changed in place; they must then be contiguous.
        """
        logprob_rows, raw = self._raw_logits(logits, rows)
        sampled = self._choose(logits, rows, positions, device_rows, device_positions)
        return self._with_logprobs(sampled, rows, logprob_rows, raw)

    def verify(
        self,
        logits: Tensor,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        device_rows: Tensor,
        device_positions: Tensor,
        drafts: NDArray[np.int32],
    ) -> SampledTokens:
        """As `sample`, for m consecutive tokens of some rows, with [m] drafts of them, -1 for a row's last. What is sampled at a position
        counts while all drafts before it are what was sampled.

        Where logits are processed, position by position, since a token depends on those before it: this waits for the device. The tokens
        are observed. A row that fails behind an accepted draft gets no failure: it fails in the next step, where it begins with that.
        """
        logprob_rows, raw = self._raw_logits(logits, rows)
        firsts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        if not self.processes(rows):
            sampled = self._choose(logits, rows, positions, device_rows, device_positions)
            accepted = num_accepted(sampled.tokens, self._put(drafts), self._put(firsts.astype(np.int32)))
            return self._with_logprobs(replace(sampled, accepted=accepted), rows, logprob_rows, raw)
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
        counts, alive = np.zeros(len(firsts), np.int32), np.arange(len(firsts))
        failures: dict[int, Exception] = {}
        for number in range(len(rows)):
            index = firsts[alive] + number
            if not len(index):
                break
            at = self._put(index)
            chosen = self._choose(logits[at], rows[index], positions[index], device_rows[at], device_positions[at])
            failed = self.observe(rows[index], positions[index], chosen)
            tokens[at] = chosen.tokens
            has_token = ~np.isin(rows[index], [*failed, *chosen.postponed])
            if number == 0:
                failures = failed
                has_token |= np.isin(rows[index], [*failed])
            counts[alive] += has_token
            alive = alive[has_token & (chosen.tokens.cpu().numpy() == drafts[index])]
        sampled = SampledTokens(tokens, failures=failures, accepted=self._put(counts))
        return self._with_logprobs(sampled, rows, logprob_rows, raw)

    def _raw_logits(self, logits: Tensor, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], Tensor | None]:
        """Which of the m ask for logprobs, and [w, vocab_size] their logits as they are now; None if there are none."""
        logprob_rows = np.flatnonzero(self._num_logprobs[rows] >= 0)
        if not len(logprob_rows):
            return logprob_rows, None
        unchanged = len(logprob_rows) == len(rows) and not np.count_nonzero(self._features[rows] & _PROCESSED)
        return logprob_rows, logits if unchanged else logits.index_select(0, self._put(logprob_rows))

    def _with_logprobs(
        self, sampled: SampledTokens, rows: NDArray[np.int32], logprob_rows: NDArray[np.int64], raw: Tensor | None
    ) -> SampledTokens:
        if raw is None:
            return sampled
        tokens = sampled.tokens if len(logprob_rows) == len(rows) else sampled.tokens.index_select(0, self._put(logprob_rows))
        logprobs = token_logprobs(raw, tokens, int(self._num_logprobs[rows].max()))
        return replace(sampled, logprobs=logprobs, logprob_rows=logprob_rows)

    def _choose(
        self, logits: Tensor, rows: NDArray[np.int32], positions: NDArray[np.int32], device_rows: Tensor, device_positions: Tensor
    ) -> SampledTokens:
        """As `sample`, without logprobs. Rows whose logits are processed are distinct."""
        features = self._features[rows]
        processed = np.flatnonzero(features & _PROCESSED)
        step = StepRows(rows, positions)
        if len(processed):
            for processor in self._processors:
                members = np.flatnonzero(features & processor.feature)
                if len(members):
                    processor.apply(logits, step, members)
        if np.count_nonzero(features & _RANDOM):
            params = self._draw_params[rows]
            params["position"] = positions
            tokens = self._draw(logits, params, self.device_params(device_rows, device_positions))
        else:
            tokens = logits.argmax(-1)
        impossible: Tensor | None = None
        if len(processed):
            at = self._put(processed)
            impossible = ~(logits[at, tokens[at]] > -math.inf)  # also where it is NaN
            penalised = np.flatnonzero(features & Penalties.feature)
            if step.postponed:
                penalised = penalised[~np.isin(rows[penalised], list(step.postponed))]
            if len(penalised):
                self._penalties.record(step, penalised, tokens)
        return SampledTokens(tokens, impossible=impossible, failures=step.failures, postponed=frozenset(step.postponed))

    def observe(self, rows: NDArray[np.int32], positions: NDArray[np.int32], sampled: SampledTokens) -> dict[int, Exception]:
        """What was sampled for [m] rows at `positions` is in host memory. Must precede the next step of rows with `Features.LAST_TOKEN`.

        Returns the rows that have no token, or cannot go on with it, with the reason.
        """
        features = self._features[rows]
        failures = dict(sampled.failures)
        if sampled.impossible is not None:
            for index in np.flatnonzero(features & _PROCESSED)[sampled.impossible.numpy()].tolist():
                row = int(rows[index])
                if row not in failures:
                    failures[row] = self._refusal(row, int(positions[index]))
        if np.count_nonzero(features & _LAST_TOKEN):
            tokens = sampled.tokens.numpy()
            without_token = np.isin(rows, [*failures, *sampled.postponed])
            for processor in self._processors:
                members = np.flatnonzero(((features & processor.feature) != 0) & ~without_token)
                if len(members):
                    failures.update(processor.observe(rows[members], tokens[members]))
        return failures

    def forced(self, rows: NDArray[np.int32]) -> dict[int, NDArray[np.int32]]:
        """The tokens that must follow in some of the rows, whose latest tokens were observed."""
        return self._grammars.forced(rows[(self._features[rows] & Features.GRAMMAR) != 0])

    def _refusal(self, row: int, position: int) -> NothingToChooseError:
        features = self._features[row]
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

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self.device)


def _draw_params(params: RowParams, vocab_size: int) -> tuple[float, float, float, int, int, int, int]:
    """A record of `DRAW_PARAMS`, without the position."""
    temperature = params.temperature if params.temperature >= GREEDY_BELOW else 0.0
    top_k = params.top_k if params.top_k < vocab_size else 0
    return temperature, params.top_p, params.min_p, top_k, params.seed, 0, 0
