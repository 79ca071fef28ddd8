"""`Passes` of an executor that takes steps as they are on the host. Between two steps of a small model the caches hold nothing of this, so
what counts here is how few operations there are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from aengine.runner.executor import HostExecutor, StepPass
from aengine.runner.passes import HostStep


class HostPasses:
    def __init__(self, executor: HostExecutor, max_num_seqs: int) -> None:
        self._executor = executor
        self._last = np.zeros(max_num_seqs, dtype=np.int32)
        self.last_tokens = torch.from_numpy(self._last)
        """[max_num_seqs] int32, by row."""

    def prepare(self, step: HostStep) -> Callable[[], StepPass]:
        """As `Passes.prepare`: nothing is left but the model."""
        layout = step.layout
        if layout.num_decodes == layout.num_rows:
            token_ids, wanted = self._last[step.rows], layout.qo_indptr[:-1]
        else:
            token_ids = np.concatenate((self._last[step.rows[: layout.num_decodes]], step.token_ids))
            wanted = layout.qo_indptr[1:][step.sampled] - 1
        run = self._executor.prepare(layout, token_ids, wanted, all_hidden=step.all_hidden, greedy=step.only_argmax)
        indices, rows, next_positions = map(torch.from_numpy, (wanted, step.sampled_rows, step.next_positions))
        return lambda: StepPass(run(), indices, rows, next_positions, keeps_argmax=False)

    def keep(self, done: StepPass, tokens: Tensor) -> None:
        """As `Passes.keep`."""
        self._last[done.rows.numpy()] = tokens.numpy()
