"""Steps with every kind of row there is, to be run before the first request: so that no request waits for what a step compiles or loads at
its first use (Triton's kernels, modules of torch and of libraries).

Owns the kinds. Grammars are not among them: they need a vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from aengine.attention import build_layout
from aengine.runner.profile import MadeUpStep
from aengine.scheduler.plan import NewRow, RowParams

GREEDY = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
_PROMPT_LEN = 2


def rehearsed_params(vocab_size: int) -> tuple[RowParams, ...]:
    """One of each kind that the sampler treats in a way of its own, over `vocab_size` >= 2 ids."""

    def drawn(**changes: Any) -> RowParams:
        return replace(GREEDY, temperature=1.0, **changes)

    last = vocab_size - 1
    return (
        GREEDY,
        drawn(),
        drawn(min_p=0.1),
        drawn(top_p=0.9),
        drawn(top_p=0.9, min_p=0.1),
        *(drawn(top_k=k, top_p=0.9, min_p=0.1) for k in (1, 100, 2000) if k < vocab_size),
        drawn(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
        drawn(logit_bias=((0, 1.0),), allowed_token_ids=(0, last), banned_token_ids=(last,), min_tokens=2, stop_ids=(last,)),
        drawn(bad_words=((last,), (0, last))),
        drawn(logprobs=20, prompt_logprobs=1),
        drawn(processors=(lambda logits, tokens: None,)),
    )


def rehearsal(max_num_seqs: int, vocab_size: int, page_size: int) -> Iterator[MadeUpStep]:
    """For as many rows at a time as there may be: a step that computes their prompts, one that decodes some beside prompts, one that
    decodes all."""
    kinds = rehearsed_params(vocab_size)
    tokens, pages = np.zeros(_PROMPT_LEN, dtype=np.int32), -(-(_PROMPT_LEN + 1) // page_size)
    for begin in range(0, len(kinds), max_num_seqs):
        some = kinds[begin : begin + max_num_seqs]
        rows = np.arange(len(some), dtype=np.int32)
        new_rows = tuple(NewRow(row, params, _PROMPT_LEN, tokens) for row, params in enumerate(some))
        for num_decodes in (0, len(some) // 2, len(some)):
            decodes = rows < num_decodes
            lengths = np.where(decodes, 1, _PROMPT_LEN).astype(np.int32)
            starts = np.where(decodes, _PROMPT_LEN, 0).astype(np.int32)
            layout = build_layout(rows, num_decodes, starts, lengths, np.zeros((len(some), pages), np.int32), page_size)
            layout.slot_mapping.fill(-1)
            token_ids = np.zeros(int(lengths[num_decodes:].sum()), dtype=np.int32)
            yield MadeUpStep(new_rows, layout, rows, np.ones(len(some), dtype=np.bool_), token_ids)
