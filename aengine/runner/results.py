"""How the tensors of a step become a `StepResult`, and the host memory that they are copied to; and what is read of whole prompts: the
logprob of each prompt token but the first, given those before it, and pooling, one vector of the hidden states of a prompt, of which a
step gives a part for each chunk.

Owns the prompts of rows with prompt logprobs, and which rows ask for pooling, and how. The logits at a position predict the next token;
those at a prompt's last position are for the sampler. Logits are computed for a block of positions at a time. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.attention import StepLayout
from aengine.kernels.arrays import Numbers
from aengine.runner.contract import Step
from aengine.sampling.arrays import Arrays, on_host
from aengine.sampling.sampler import DeviceLogprobs, LogSums, SampledTokens, Sampler, join, token_logprobs
from aengine.scheduler.plan import NewRow, PooledStates, PromptLogprobs, RowParams, StepResult, TokenLogprobs, TokenStates


@dataclass(frozen=True, slots=True)
class DevicePooled:
    """The pooled hidden states of k chunks of a step, of which `on_host` makes `PooledStates`."""

    rows: tuple[tuple[int, int], ...]  # [k]: the row, and the position that its chunk begins at
    states: Numbers | None  # [k, hidden_size] float64; None: there are none
    tokens: tuple[TokenStates, ...]  # of rows with pooling tokens

    def copied(self, copy: Callable[[Numbers], Numbers]) -> DevicePooled:
        return self if self.states is None else replace(self, states=copy(self.states))

    def on_host(self) -> tuple[PooledStates | TokenStates, ...]:
        """The tensor must be in host memory."""
        states = () if self.states is None else on_host(self.states)
        return *(PooledStates(row, start, one) for (row, start), one in zip(self.rows, states, strict=True)), *self.tokens


Classify = Callable[[Numbers], Numbers]
Capture = Callable[[int, int, slice, RowParams, float], TokenStates]
"""The states of a row from a position on, which are those of some tokens of the step, as the row asks for them. Hidden states are divided
by the factor."""


class Pooler:
    def __init__(self, arrays: Arrays, factor: float = 1.0, classify: Classify | None = None, label_pooling: str = "") -> None:
        """`factor`: that the hidden states are given with. `classify`: the scores of the labels [k, labels] of states that are pooled by
        `label_pooling`."""
        self._arrays = arrays
        self._classify, self._label_pooling = classify, label_pooling
        self._factor = factor
        self._wanted: dict[int, tuple[RowParams, int]] = {}  # row -> how it is pooled, the length of its prompt

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Notes the pooling that the sequences of new rows ask for, in place of what these rows had before."""
        for new in new_rows:
            self._wanted.pop(new.row, None)
            if new.params.pooling is not None:
                self._wanted[new.row] = new.params, new.prompt_len

    def captures(self, rows: NDArray[np.int32]) -> tuple[tuple[int, ...], bool] | None:
        """Before which layers residuals are asked for by rows with pooling tokens, in order, and whether the experts are; None: there
        are no such rows."""
        wanted = [self._wanted[row][0] for row in rows.tolist() if row in self._wanted and self._wanted[row][0].pooling == "tokens"]
        if not wanted:
            return None
        return tuple(sorted({layer for params in wanted for layer in params.pooled_layers})), any(one.pooled_experts for one in wanted)

    def pool(self, rows: NDArray[np.int32], layout: StepLayout, hidden: Numbers, capture: Capture | None = None) -> DevicePooled | None:
        """The pooled states of the step's chunks of prompts, from `hidden` [T, hidden_size]: with pooling mean the sum over a chunk, with
        last that of the prompt's last token, with cls that of its first one; with label the scores of the labels, before the hidden state
        that they are made of; with tokens what `capture` gives of each token. None if no row asks for any."""
        tokens: list[TokenStates] = []
        found: list[tuple[int, int]] = []
        indices, counts, classified = [], [], []
        for i in range(layout.num_decodes, len(rows)):
            if int(rows[i]) not in self._wanted:
                continue
            params, prompt_len = self._wanted[int(rows[i])]
            pooling = params.pooling
            first, end = int(layout.qo_indptr[i]), int(layout.qo_indptr[i + 1])
            start = int(layout.seq_lens[i]) - (end - first)
            if pooling == "tokens":
                skipped = max(0, params.pooled_from - start)
                if capture is not None and first + skipped < end:
                    tokens.append(capture(int(rows[i]), start + skipped, slice(first + skipped, end), params, self._factor))
                continue
            is_label, pooling = pooling == "label", self._label_pooling if pooling == "label" else pooling
            if pooling == "last" and layout.seq_lens[i] == prompt_len:
                first = end - 1
            elif pooling == "cls" and start == 0:
                end = first + 1
            elif pooling != "mean":
                continue
            if is_label:
                classified.append(len(found))
            found.append((int(rows[i]), start))
            indices.append(np.arange(first, end, dtype=np.int32))
            counts.append(end - first)
        if not found:
            return DevicePooled((), None, tuple(tokens)) if tokens else None
        arrays = self._arrays
        states, ends = arrays.doubles(hidden[arrays.put_array(np.concatenate(indices))]), np.cumsum(counts).tolist()
        # Sums of doubles, in which those of float32 are exact but for what no float32 shows: where a chunk ends does not show either.
        sums = [states[end - count : end].sum(0)[None] for end, count in zip(ends, counts, strict=True)]
        pooled = arrays.joined(sums) / self._factor
        if classified and self._classify is not None:
            scale = np.array([counts[i] if self._label_pooling == "mean" else 1 for i in classified], np.float64)
            at = arrays.put_array(np.array(classified))
            scores = self._classify(pooled[at] / arrays.put_array(scale)[:, None])
            wider = arrays.zeros((len(found), max(scores.shape[1], pooled.shape[1])), np.float64)
            wider[:, : pooled.shape[1]] = pooled
            wider[at, : scores.shape[1]] = arrays.doubles(scores)
            pooled = wider
        return DevicePooled(tuple(found), pooled, tuple(tokens))


_BLOCK_ELEMENTS = 1 << 24  # logits at a time: 64 MiB in float32


@dataclass(frozen=True, slots=True)
class _Span:
    """`count` tokens of a row's prompt from position `start` on, with `width` alternatives each."""

    row: int
    start: int
    count: int
    width: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The logprobs of all spans of a step, one span after the other, and what is pooled of its chunks."""

    spans: tuple[_Span, ...]
    logprobs: DeviceLogprobs | None  # None: there are no spans
    pooled: DevicePooled | None

    def copied(self, copy: Callable[[Numbers], Numbers]) -> PromptScores:
        """With what `copy` makes of each tensor."""
        logprobs = None if self.logprobs is None else DeviceLogprobs(*map(copy, self.logprobs))
        return PromptScores(self.spans, logprobs, None if self.pooled is None else self.pooled.copied(copy))

    def logprobs_on_host(self) -> tuple[PromptLogprobs, ...]:
        """By span. The tensors must be in host memory."""
        if self.logprobs is None:
            return ()
        everything = self.logprobs.on_host()
        out = []
        begin = 0
        for span in self.spans:
            part = slice(begin, begin + span.count)
            logprobs = TokenLogprobs(
                everything.token_logprobs[part],
                everything.ranks[part],
                everything.top_ids[part, : span.width],
                everything.top_logprobs[part, : span.width],
            )
            out.append(PromptLogprobs(span.row, span.start, logprobs))
            begin += span.count
        return tuple(out)


class PromptScorer:
    def __init__(
        self,
        vocab_size: int,
        arrays: Arrays,
        sums: LogSums,
        hidden_factor: float = 1.0,
        classify: Classify | None = None,
        label_pooling: str = "",
    ) -> None:
        """`hidden_factor`: that hidden states are given with. `sums`: as of `token_logprobs`. The last two are as of `Pooler`."""
        self._sums = sums
        self._pooler = Pooler(arrays, hidden_factor, classify, label_pooling)
        self._vocab_size = vocab_size
        self._arrays = arrays
        self._prompts: dict[int, tuple[NDArray[np.int32], int, int]] = {}  # row -> its prompt, how many alternatives, from which token on

    def update(self, new_rows: Sequence[NewRow]) -> None:
        """Notes the prompt logprobs and the pooling that the sequences of new rows ask for, in place of what these rows had before."""
        self._pooler.update(new_rows)
        for new in new_rows:
            self._prompts.pop(new.row, None)
            if new.params.prompt_logprobs is not None:
                self._prompts[new.row] = new.tokens[: new.prompt_len], new.params.prompt_logprobs, new.params.prompt_logprobs_from

    def captures(self, step: Step) -> tuple[tuple[int, ...], bool] | None:
        """What `Pooler.captures` says of the rows of a step; None for one that scores no prompts."""
        return self._pooler.captures(step.rows) if step.scores_prompts else None

    def score(
        self,
        rows: NDArray[np.int32],
        layout: StepLayout,
        logits: Callable[[Numbers], Numbers],
        hidden: Numbers | None,
        capture: Capture | None = None,
    ) -> PromptScores | None:
        """The prompt logprobs and pooled states of the step's chunks of prompts; None if no row asks for any.

        `logits`: [m] int32 indices of the step's tokens -> [m, vocab_size]. `hidden`: [T, hidden_size] behind the last norm, of a step that
        scores prompts. `capture`: as of `Pooler.pool`.
        """
        pooled = None if hidden is None else self._pooler.pool(rows, layout, hidden, capture)
        spans, logprobs = self._score(rows, layout, logits) if self._prompts else ((), None)
        return PromptScores(spans, logprobs, pooled) if spans or pooled is not None else None

    def _score(
        self, rows: NDArray[np.int32], layout: StepLayout, logits: Callable[[Numbers], Numbers]
    ) -> tuple[tuple[_Span, ...], DeviceLogprobs | None]:
        spans, indices, targets = [], [], []
        for i in range(layout.num_decodes, len(rows)):
            prompt, width, begin = self._prompts.get(int(rows[i]), (None, 0, 0))
            if prompt is None:
                continue
            first, end = int(layout.qo_indptr[i]), int(layout.qo_indptr[i + 1])
            start = int(layout.seq_lens[i]) - (end - first) + 1  # position of the first predicted token
            if start < begin:  # nothing is told of these
                first, start = first + begin - start, begin
            count = min(end - first, len(prompt) - start)
            if layout.seq_lens[i] >= len(prompt):
                del self._prompts[int(rows[i])]  # this is its last chunk
            if count > 0:
                spans.append(_Span(int(rows[i]), start, count, width))
                indices.append(np.arange(first, first + count, dtype=np.int32))
                targets.append(prompt[start : start + count].astype(np.int64))
        if not spans:
            return (), None
        at = self._arrays.put_array(np.concatenate(indices))
        tokens = self._arrays.put_array(np.concatenate(targets))
        most = max(span.width for span in spans)
        block = max(1, _BLOCK_ELEMENTS // self._vocab_size)
        blocks = [slice(begin, begin + block) for begin in range(0, len(tokens), block)]
        parts = [token_logprobs(self._arrays, logits(at[one]), tokens[one], most, self._sums) for one in blocks]
        return tuple(spans), join(self._arrays, parts)


def step_result(step: Step, sampled: SampledTokens | None, scores: PromptScores | None, sampler: Sampler) -> StepResult:
    """The result, from tensors in host memory. Has the sampler observe the tokens, which some rows need on the host for their next one."""
    prompt_logprobs = () if scores is None else scores.logprobs_on_host()
    pooled = () if scores is None or scores.pooled is None else scores.pooled.on_host()
    if sampled is None:
        return StepResult(step.number, np.zeros(0, dtype=np.int32), prompt_logprobs=prompt_logprobs, pooled=pooled)
    tokens, accepted = on_host(sampled.tokens).astype(np.int32), None if sampled.accepted is None else on_host(sampled.accepted)
    failures = sampler.observe(sampled)
    if sampled.step is None:
        failures = sampler.refusals(step.sampled_rows, step.next_positions, on_host(sampled.impossible), accepted)
    return StepResult(
        step=step.number,
        tokens=tokens,
        logprobs=_logprobs_by_row(sampled),
        prompt_logprobs=prompt_logprobs,
        pooled=pooled,
        failures={**sampler.observe_later(step.sampled_rows, tokens, accepted), **failures},
        accepted=accepted,
        forced=sampler.forced(step.sampled_rows) if step.wants_forced else {},
    )


def _logprobs_by_row(sampled: SampledTokens) -> TokenLogprobs | None:
    """By sampled row; rows without logprobs get some of another row, which nobody reads."""
    if sampled.logprobs is None or sampled.logprob_rows is None:
        return None
    if len(sampled.logprob_rows) == len(sampled.tokens):
        return sampled.logprobs.on_host()
    indices = np.zeros(len(sampled.tokens), dtype=np.int64)
    indices[sampled.logprob_rows] = np.arange(len(sampled.logprob_rows))
    return sampled.logprobs.on_host().select(indices)
