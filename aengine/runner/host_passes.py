"""`Passes` of a CPU without graphs: a step's arrays are used where they are. Between two steps of a small model the caches hold nothing of
this, so what counts here is how few operations there are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aengine.attention import AttentionMetadata
from aengine.runner.executor import Executor, StepInput, StepPass
from aengine.runner.passes import HostStep


class HostPasses:
    def __init__(self, executor: Executor, max_num_seqs: int) -> None:
        self._executor = executor
        self._last = np.zeros(max_num_seqs, dtype=np.int32)
        self.last_tokens = torch.from_numpy(self._last)
        """[max_num_seqs] int32, by row."""

    def run(self, step: HostStep) -> StepPass:
        layout = step.layout
        token_ids = step.token_ids
        if layout.num_decodes:
            token_ids = np.concatenate((self._last[step.rows[: layout.num_decodes]], token_ids))
        arrays = (layout.qo_indptr, layout.kv_indptr, layout.kv_indices, layout.last_page_len, layout.slot_mapping)
        indices = torch.from_numpy(layout.qo_indptr[1:][step.sampled] - 1)
        hidden = self._executor.forward(
            StepInput(
                metadata=AttentionMetadata(layout, *map(torch.from_numpy, arrays)),
                input_ids=torch.from_numpy(token_ids),
                positions=torch.from_numpy(layout.positions),
                logits_indices=indices,
                all_hidden=step.all_hidden,
            )
        )
        rows, next_positions = torch.from_numpy(step.rows[step.sampled]), torch.from_numpy(layout.seq_lens[step.sampled])
        return StepPass(hidden, indices, rows, next_positions, keeps_argmax=False)

    def keep(self, done: StepPass, tokens: Tensor) -> None:
        """As `Passes.keep`."""
        self._last[done.rows.numpy()] = tokens.numpy()
