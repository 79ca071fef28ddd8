"""The sampler: one batch of logits with mixed per-row parameters to one token per row.

Owns the pinned order: grammar mask, allowed ids, bad words, min_tokens, logit bias, repetition, frequency and presence penalty, custom
processors, draw; logprobs are those of the logits before all of it. Each of these is a part with its own rows; a step in which no row
asks for a part does not enter it. A row's token depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.errors import NothingToChooseError
from aengine.kernels.draw_params import DRAW_PARAMS, DrawParams
from aengine.kernels.upload import to_device
from aengine.sampling.bad_words import BadWords
from aengine.sampling.custom import CustomProcessors
from aengine.sampling.draw import Draw, select_draw
from aengine.sampling.logprobs import DeviceLogprobs, token_logprobs
from aengine.sampling.masks import LogitMasks, tokens_in
from aengine.sampling.penalties import Penalties
from aengine.scheduler.plan import Features, NewRow, RowParams

if TYPE_CHECKING:
    from aengine.sampling.grammar import GrammarRows

_RANDOM, _PROCESSED, _LAST_TOKEN = int(Features.RANDOM), int(Features.PROCESSED), int(Features.LAST_TOKEN)
_MORE_THAN_A_DRAW = int(Features.PROCESSED | Features.LOGPROBS)


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """The p of m rows whose logits were changed before the draw, which may have left nothing."""

    at: NDArray[np.int64]  # [p], which of the m
    positions: NDArray[np.int32]  # [p], of their tokens
    impossible: Tensor  # [p] bool: nothing could be chosen, and the token means nothing


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What one step chose for m rows. Tensors are on the device and may not be there yet; the rest is known at once."""

    tokens: Tensor | NDArray[np.int64]  # [m] int64; an array where they are known on the host
    logprobs: DeviceLogprobs | None = None  # of the w rows in `logprob_rows`
    logprob_rows: NDArray[np.int64] | None = None  # [w], which of the m, ascending
    checked: CheckedRows | None = None
    failures: Mapping[int, Exception] = field(default_factory=dict)  # what grammars and custom code raised, by row
    postponed: frozenset[int] = frozenset()  # rows that there was no time to choose for


class Sampler:
    """Samples for rows 0 .. `max_rows` - 1 over `vocab_size` ids."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, draw: Draw | None = None) -> None:
        """`draw`: None is what is best on the device."""
        self.vocab_size = vocab_size
        self.device = device
        self._features = np.zeros(max_rows, dtype=np.int32)  # of `Features`
        self._greedy = np.zeros(max_rows, dtype=np.bool_)  # whose token is the argmax, without logprobs
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int32)
        self._masks = LogitMasks(max_rows, vocab_size, device)
        self._bad_words = BadWords(max_rows, device)
        self._penalties = Penalties(max_rows, device)
        self._custom = CustomProcessors(max_rows)
        self._grammars: GrammarRows | None = None
        self._draw = draw or select_draw(vocab_size, device)
        self._draw_params = np.zeros(max_rows, dtype=DRAW_PARAMS)
        self._device_params: Tensor

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Takes over rows that changed hands. What it raises may be the fault of any of them; it can be called again with the others."""
        if not new_rows:
            return
        for new in new_rows:
            self._features[new.row] = new.params.features
            self._greedy[new.row] = not new.params.features & (Features.RANDOM | Features.LOGPROBS | Features.PROCESSED)
            self._num_logprobs[new.row] = -1 if new.params.logprobs is None else min(new.params.logprobs, self.vocab_size)
            self._draw_params[new.row] = _draw_params(new.params, self.vocab_size)
        # Of all rows, which is one small upload, and none on a CPU: there it is the same memory.
        self._device_params = to_device(self._draw_params.view(np.int32).reshape(len(self._draw_params), -1), self.device)
        self._masks.update(new_rows)
        self._bad_words.update(new_rows)
        self._penalties.update(new_rows)
        self._custom.update(new_rows)
        if self._grammars is None and any(new.params.grammar is not None for new in new_rows):
            from aengine.sampling.grammar import GrammarRows  # its library is optional

            self._grammars = GrammarRows(self.vocab_size)
        if self._grammars is not None:
            self._grammars.update(new_rows)

    def is_greedy(self, rows: NDArray[np.int32]) -> bool:
        """Whether all that `sample` gives for these rows is the argmax of the model's logits."""
        return int(np.count_nonzero(self._greedy[rows])) == len(rows)  # faster than all(), and called in every step

    def draw_params(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.void] | None:
        """[m] `DRAW_PARAMS` of tokens of these rows at `positions`, if all that `sample` does is to draw them from the model's logits;
        else None."""
        if np.count_nonzero(self._features[rows] & _MORE_THAN_A_DRAW):
            return None
        params = self._draw_params[rows]
        params["position"] = positions
        return params

    def sample(
        self, logits: Tensor, rows: NDArray[np.int32], positions: NDArray[np.int32], device_rows: Tensor, device_positions: Tensor
    ) -> SampledTokens:
        """[m, vocab_size] float32 logits of m distinct rows -> a token for each, without waiting for the device.

        `positions` [m] are those of the tokens to be drawn, and key their noise; `device_*` are the same on the device. Logits of
        rows with processors are changed in place; they must then be contiguous.
        """
        features = self._features[rows]
        count = self._num_logprobs[rows]
        wanted = np.flatnonzero(count >= 0)
        processed = np.flatnonzero(features & _PROCESSED)
        raw: Tensor | None = None
        if len(wanted):
            untouched = len(processed) == 0 and len(wanted) == len(rows)
            raw = logits if untouched else logits.index_select(0, self._put(wanted))
        failures, postponed = self._process(logits, rows, positions) if len(processed) else ({}, frozenset())
        if np.count_nonzero(features & _RANDOM):
            params = self._draw_params[rows]
            params["position"] = positions
            on_device = DrawParams(self._device_params.index_select(0, device_rows), device_positions)
            tokens = self._draw(logits, params, on_device)
        else:
            tokens = logits.argmax(-1)
        checked: CheckedRows | None = None
        if len(processed):
            at = self._put(processed)
            # Also where it is no number.
            checked = CheckedRows(processed, positions[processed], impossible=~(logits[at, tokens[at]] > -math.inf))
            if postponed:
                kept = np.flatnonzero(~np.isin(rows, list(postponed)))
                self._penalties.record(rows[kept], positions[kept], tokens[self._put(kept)])
            else:
                self._penalties.record(rows, positions, tokens)
        logprobs: DeviceLogprobs | None = None
        if raw is not None:
            chosen = tokens if len(wanted) == len(rows) else tokens.index_select(0, self._put(wanted))
            logprobs = token_logprobs(raw, chosen, int(count.max()))
        return SampledTokens(
            tokens=tokens,
            logprobs=logprobs,
            logprob_rows=None if logprobs is None else wanted,
            checked=checked,
            failures=failures,
            postponed=postponed,
        )

    def refusals(self, rows: NDArray[np.int32], checked: CheckedRows) -> Mapping[int, NothingToChooseError]:
        """Of the m `rows` those for which nothing could be chosen, with the reason. `checked` is on the host, which has not observed
        the tokens of that step yet."""
        impossible = checked.impossible.numpy()
        pairs = zip(rows[checked.at[impossible]].tolist(), checked.positions[impossible].tolist(), strict=True)
        return {row: self._refusal(row, position) for row, position in pairs}

    def _refusal(self, row: int, position: int) -> NothingToChooseError:
        left = np.ones(self.vocab_size, dtype=np.bool_)
        others: list[str] = []
        for parameter, allowed in self._limits(row, position):
            left &= allowed
            if not left.any():
                among = f" of those that {' and '.join(others)} leave" if others else ""
                return NothingToChooseError.of(parameter, f"no token can be chosen at position {position}: it leaves none{among}")
            others += [parameter] * (parameter not in others)
        culprit = "logits_processors" if self._custom.has(row) else "model"
        return NothingToChooseError.of(culprit, f"no token can be chosen at position {position}: no logit that is left is a number")

    def _limits(self, row: int, position: int) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """What limits the choice at `position`, in the pinned order: parameters, and the tokens [V] that each leaves."""
        if self._grammars and (allowed := self._grammars.allowed(row)) is not None:
            yield "structured_output", allowed
        yield from self._masks.limits(row, position)
        if len(completing := self._bad_words.completing(row)):
            yield "bad_words", ~tokens_in(completing, self.vocab_size)

    def observe(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> Mapping[int, Exception]:
        """The host has learnt the [m] tokens of `rows`. Must precede the next step of rows that need their last token.

        Returns the rows that cannot go on with their token, with the reason.
        """
        observed = (self._features[rows] & _LAST_TOKEN) != 0
        if not np.count_nonzero(observed):
            return {}
        rows, tokens = rows[observed], tokens[observed]
        self._bad_words.observe(rows, tokens)
        self._custom.observe(rows, tokens)
        return self._grammars.observe(rows, tokens) if self._grammars else {}

    def _process(
        self, logits: Tensor, rows: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> tuple[dict[int, Exception], frozenset[int]]:
        """Returns what was raised, by row, and the rows that there was no time for."""
        failures: dict[int, Exception] = {}
        postponed: frozenset[int] = frozenset()
        if self._grammars:
            errors, postponed = self._grammars.mask(logits, rows)
            failures.update(errors)
        # Masks and bias are added up in any order: minus infinity plus a bias is minus infinity.
        self._masks.apply(logits, rows, positions)
        self._bad_words.apply(logits, rows)
        self._penalties.apply(logits, rows, positions)
        failures.update(self._custom.apply(logits, rows, but=postponed))
        return failures, postponed

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self.device)


def _draw_params(params: RowParams, vocab_size: int) -> tuple[float, float, float, int, int, int, int]:
    """A record of `DRAW_PARAMS`, without the position."""
    temperature = params.temperature if params.features & Features.RANDOM else 0.0
    top_k = params.top_k if params.top_k < vocab_size else 0
    return temperature, params.top_p, params.min_p, top_k, params.seed, 0, 0
