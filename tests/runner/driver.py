"""Drives a runner without a scheduler: hands out rows and pages, cuts prompts, and makes the plans. And records the logits of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from aengine.runner.contract import Runner
from aengine.runner.runner import ModelRunner
from aengine.scheduler.plan import NO_INTS, Features, NewRow, RowParams, StateRows, StepPlan, StepResult

GREEDY = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass
class Sequence_:
    prompt: list[int]
    row: int
    params: RowParams
    adapter: int = 0  # its key
    output: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[list[int]] = field(
        default_factory=list
    )  # that the row has had so far, by column: one in each layer group, 0 once it is given back
    known: bool = False  # whether the runner has seen the row
    decodes: bool = False  # whether the runner has sampled its last token

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """Generates for several prompts at once; pages are handed out in a scrambled order, as an old pool would."""

    def __init__(self, runner: Runner, *, chunk: int | None = None, budget: int = 1 << 30, seed: int = 0) -> None:
        self.runner = runner
        self.chunk = chunk
        self.budget = budget
        self.step = 0
        rng = np.random.default_rng(seed)
        self.free_pages = [int(page) for page in rng.permutation(np.arange(1, runner.num_pages))]
        self.free_rows = [int(row) for row in rng.permutation(runner.max_num_seqs)]

    def add(self, prompt: Sequence[int], params: RowParams = GREEDY, adapter: int = 0) -> Sequence_:
        return Sequence_(list(prompt), self.free_rows.pop(), params, adapter)

    def preempt(self, s: Sequence_) -> None:
        """Takes row and pages away: all of it is computed again, in another row."""
        self.free_rows.insert(0, s.row)
        s.row, s.computed, s.pages, s.known, s.decodes = self.free_rows.pop(), 0, [], False, False

    def run_step(self, sequences: Sequence[Sequence_]) -> StepResult:
        """One step for all of them: one token of each that decodes, a chunk of each that does not (while the budget lasts)."""
        decodes = [s for s in sequences if s.decodes]
        prefills = [s for s in sequences if not s.decodes]
        left = self.budget - len(decodes)
        entries: list[tuple[Sequence_, int]] = [(s, 1) for s in decodes]
        for s in prefills:
            length = min(len(s.tokens) - s.computed, self.chunk or len(s.tokens), left)
            if length > 0:
                entries.append((s, length))
                left -= length
        plan = self._plan(entries, len(decodes))
        result = self.runner.launch(plan).result()
        tokens = iter(result.tokens.tolist())
        for (s, length), samples in zip(entries, plan.num_sampled, strict=True):
            s.computed += length
            if samples:
                s.output.append(next(tokens))
                s.decodes = True
        assert next(tokens, None) is None
        return result

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        params: RowParams | Sequence[RowParams] = GREEDY,
        adapters: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """`count` tokens for each prompt, all prompts together, each with the adapter that has a key."""
        each = [params] * len(prompts) if isinstance(params, RowParams) else params
        given = zip(prompts, each, adapters or [0] * len(prompts), strict=True)
        sequences = [self.add(prompt, one, adapter) for prompt, one, adapter in given]
        while running := [s for s in sequences if len(s.output) < count]:
            self.run_step(running)
        for s in sequences:
            self.free_rows.append(s.row)
        return [s.output for s in sequences]

    def _plan(self, entries: list[tuple[Sequence_, int]], num_decodes: int) -> StepPlan:
        writes, new_rows, states = [], [], []  # groups, rows, columns and pages; rows and pages of states
        for s, length in entries:
            if not s.known:
                states.append((s.row, [self.free_pages.pop() for _ in range(self.runner.state_pages)]))
                tokens = s.tokens if s.params.features & Features.HISTORY else []
                new_rows.append(NewRow(s.row, s.params, len(s.prompt), _int32(tokens)))
                s.known = True
            for group, window in enumerate(self.runner.windows):
                for column in range(0 if window is None else max(0, s.computed - window + 1) // self.runner.page_size):
                    if s.pages[column][group]:  # no query will see it again
                        self.free_pages.append(s.pages[column][group])
                        s.pages[column][group] = 0
                        writes.append((group, s.row, column, 0))
            while len(s.pages) * self.runner.page_size < s.computed + length:
                pages = [self.free_pages.pop() for _ in self.runner.windows]
                writes += [(group, s.row, len(s.pages), page) for group, page in enumerate(pages)]
                s.pages.append(pages)
        prompt_ids = [s.tokens[s.computed : s.computed + length] for s, length in entries[num_decodes:]]
        page_groups, page_rows, page_cols, page_ids = np.array(writes, dtype=np.int32).reshape(-1, 4).T
        plan = StepPlan(
            step=self.step,
            rows=_int32(s.row for s, _ in entries),
            num_decodes=num_decodes,
            starts=_int32(s.computed for s, _ in entries),
            lengths=_int32(length for _, length in entries),
            num_sampled=_int32(s.computed + length >= len(s.tokens) for s, length in entries),
            token_ids=_int32(token for ids in prompt_ids for token in ids),
            new_rows=tuple(new_rows),
            page_groups=page_groups,
            page_rows=page_rows,
            page_cols=page_cols,
            page_ids=page_ids,
            states=begun_states(*zip(*states, strict=True)) if states and self.runner.state_pages else None,
            adapters=_int32(s.adapter for s, _ in entries) if any(s.adapter for s, _ in entries) else NO_INTS,
            scores_prompts=any(s.params.features & (Features.PROMPT_LOGPROBS | Features.POOLED) for s, _ in entries[num_decodes:]),
        )
        self.step += 1
        return plan


def begun_states(rows: Sequence[int], pages: Sequence[Sequence[int]]) -> StateRows:
    """Rows begin without tokens before, each with the given pages of its state."""
    written = np.array(pages, np.int32)
    return StateRows(_int32(rows), written, np.zeros_like(written), NO_INTS, NO_INTS, written[:0])


def sampled(seed: int, temperature: float = 1.0, **changes: float) -> RowParams:
    return replace(GREEDY, temperature=temperature, seed=seed, **changes)


def _int32(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def record_logits(runner: ModelRunner) -> list[torch.Tensor]:
    """A list that every later step's logits are appended to, [m, vocab_size]: those of tokens that are followed by a sampled one."""
    seen: list[torch.Tensor] = []
    sampler = runner._executor._sampler
    sample = sampler.sample

    def record(logits: np.ndarray | torch.Tensor, *args):
        seen.append(torch.tensor(logits) if isinstance(logits, np.ndarray) else logits.clone())
        return sample(logits, *args)

    sampler.is_greedy = lambda rows, positions: False
    sampler.draw_params = lambda rows, positions: None  # else the kernels sample, and nobody sees logits
    sampler.sample = record
    return seen
