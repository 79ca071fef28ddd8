"""The widest step that a configuration allows, for measuring what a device needs besides weights and KV cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.attention import StepLayout, build_layout
from aengine.scheduler.plan import NewRow, RowParams

HEAVIEST_PARAMS = RowParams(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=0, logit_bias=((0, 1.0),), logprobs=20)


class MadeUpStep(NamedTuple):
    """A step on made-up tokens that reads and writes no KV but page 0: `new_rows` for the sampler, the rest for the forward pass."""

    new_rows: tuple[NewRow, ...]
    layout: StepLayout
    rows: NDArray[np.int32]
    samples: NDArray[np.bool_]
    token_ids: NDArray[np.int32]


def widest_step(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int) -> MadeUpStep:
    """All tokens of a step's budget over as many rows as may run, all sampled, one of them at the end of its context."""
    count = min(max_num_seqs, max_num_batched_tokens)
    rows = np.arange(count, dtype=np.int32)
    lengths = np.full(count, max_num_batched_tokens // count, dtype=np.int32)
    lengths[0] += max_num_batched_tokens % count
    lengths = np.minimum(lengths, max_model_len).astype(np.int32)
    starts = np.zeros(count, dtype=np.int32)
    starts[0] = max_model_len - lengths[0]
    page_table = np.zeros((count, -(-max_model_len // page_size)), dtype=np.int32)
    layout = build_layout(rows, 0, starts, lengths, page_table, page_size)
    layout.slot_mapping.fill(-1)
    return MadeUpStep(
        new_rows=tuple(NewRow(row, HEAVIEST_PARAMS) for row in range(count)),
        layout=layout,
        rows=rows,
        samples=np.ones(count, dtype=np.bool_),
        token_ids=np.zeros(int(lengths.sum()), dtype=np.int32),
    )
