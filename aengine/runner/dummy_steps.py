"""Dummy steps, which read and write no KV but page 0: the widest one, to measure what a device needs besides weights and KV cache, and
warm-up steps with every kind of row, so that no request waits for what a step compiles or loads at its first use (Triton's kernels,
modules of torch and of libraries).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from aengine.attention import build_layout
from aengine.runner.contract import IntArray, Step
from aengine.scheduler.plan import Features, NewRow, RowParams

GREEDY = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_HEAVIEST = RowParams(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=0, logit_bias=((0, 1.0),), logprobs=20)
_PROMPT_LEN = 2


class DummyStep(NamedTuple):
    new_rows: tuple[NewRow, ...]  # to be assigned before
    step: Step


def widest_step(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int, num_groups: int) -> DummyStep:
    """All tokens of a step's budget over as many rows as may run, all sampled, one of them at the end of its context."""
    count = min(max_num_seqs, max_num_batched_tokens)
    lengths = np.full(count, max_num_batched_tokens // count, dtype=np.int32)
    lengths[0] += max_num_batched_tokens % count
    lengths = np.minimum(lengths, max_model_len).astype(np.int32)
    starts = np.zeros(count, dtype=np.int32)
    starts[0] = max_model_len - lengths[0]
    return _dummy_step([NewRow(row, _HEAVIEST) for row in range(count)], 0, starts, lengths, page_size, num_groups)


def warm_up_params(vocab_size: int) -> tuple[RowParams, ...]:
    """One of each kind that the sampler treats in a way of its own, over `vocab_size` >= 2 ids; without grammars, which need a
    vocabulary."""

    def random(**changes: Any) -> RowParams:
        return replace(GREEDY, temperature=1.0, **changes)

    last = vocab_size - 1
    return (
        GREEDY,
        random(),
        random(min_p=0.1),
        random(top_p=0.9),
        random(top_p=0.9, min_p=0.1),
        *(random(top_k=k, top_p=0.9, min_p=0.1) for k in (1, 100, 2000) if k < vocab_size),
        random(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
        random(logit_bias=((0, 1.0),), allowed_token_ids=(0, last), banned_token_ids=(last,), min_tokens=2, stop_ids=(last,)),
        random(bad_words=((last,), (0, last))),
        random(logprobs=20, prompt_logprobs=1),
        random(pooling="mean"),
        random(pooling="last"),
        random(processors=(lambda logits, tokens: None,)),
    )


def warm_up_steps(max_num_seqs: int, vocab_size: int, page_size: int, num_groups: int, most_drafts: int = 0) -> Iterator[DummyStep]:
    """For as many rows at a time as there may be: a step that computes their prompts, one that decodes some beside prompts, and one that
    decodes all; with speculation also one that verifies a draft of each."""
    params = warm_up_params(vocab_size)
    tokens = np.zeros(_PROMPT_LEN, dtype=np.int32)
    for begin in range(0, len(params), max_num_seqs):
        new_rows = [NewRow(row, one, _PROMPT_LEN, tokens) for row, one in enumerate(params[begin : begin + max_num_seqs])]
        for num_decodes in (0, len(new_rows) // 2, len(new_rows)):
            decodes = np.arange(len(new_rows)) < num_decodes
            starts = np.where(decodes, _PROMPT_LEN, 0).astype(np.int32)
            lengths = np.where(decodes, 1, _PROMPT_LEN).astype(np.int32)
            yield _dummy_step(new_rows, num_decodes, starts, lengths, page_size, num_groups)
        if most_drafts:
            assigned, step = _dummy_step(new_rows, 0, np.zeros_like(lengths), np.full_like(lengths, 2), page_size, num_groups)
            rows, positions = np.repeat(step.rows, 2), step.layout.positions
            drafts = np.where(positions == 0, 0, -1).astype(np.int32)
            indices = np.arange(len(rows), dtype=np.int32)
            yield DummyStep(assigned, replace(step, logits_indices=indices, sampled_rows=rows, next_positions=positions + 1, drafts=drafts))


def _dummy_step(
    new_rows: Sequence[NewRow], num_decodes: int, starts: IntArray, lengths: IntArray, page_size: int, num_groups: int
) -> DummyStep:
    count = len(new_rows)
    rows = np.arange(count, dtype=np.int32)
    page_table = np.zeros((num_groups, count, -(-int((starts + lengths).max()) // page_size)), dtype=np.int32)
    layout = build_layout(rows, num_decodes, starts, lengths, page_table, page_size)
    layout.slot_mapping.fill(-1)
    token_ids = np.zeros(int(lengths[num_decodes:].sum()), dtype=np.int32)
    ends = layout.qo_indptr[1:] - 1
    scores_prompts = any(bool(new_row.params.features & Features.OF_PROMPTS) for new_row in new_rows[num_decodes:])
    step = Step(0, layout, rows, token_ids, ends, rows, layout.seq_lens, scores_prompts=scores_prompts)
    return DummyStep(tuple(new_rows), step)
