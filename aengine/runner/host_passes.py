"""`Passes` of an executor that takes steps as they are on the host. Between two steps of a small model the caches hold nothing of this, so
what counts here is how few operations there are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.runner.executor import HostExecutor, HostHidden, HostRun, StepPass
from aengine.runner.landing import as_int32
from aengine.runner.passes import HostStep


@dataclass(frozen=True, slots=True)
class HostPass:
    """Satisfies `StepPass` with tensors that are made when they are asked for: a greedy step needs few."""

    hidden: HostHidden
    step: HostStep
    wanted: NDArray[np.int32]
    keeps_argmax: bool

    @property
    def indices(self) -> Tensor:
        return torch.from_numpy(self.wanted)

    @property
    def rows(self) -> Tensor:
        return torch.from_numpy(self.step.sampled_rows)

    @property
    def next_positions(self) -> Tensor:
        return torch.from_numpy(self.step.next_positions)

    def logits(self) -> Tensor:
        return self.hidden.logits(self.indices)

    def argmax(self) -> Tensor | NDArray[np.int64]:
        largest = self.hidden.largest
        return self.hidden.argmax(self.indices) if largest is None else largest


class HostPassRun:
    """Satisfies `StepRun`."""

    def __init__(self, passes: HostPasses, run: HostRun, step: HostStep, token_ids: NDArray[np.int32], wanted: NDArray[np.int32]) -> None:
        self._passes = passes
        self._run = run
        self._step = step
        self._token_ids = token_ids
        self._wanted = wanted
        self._filled = False
        self.overlaps = run.overlaps

    def begin(self) -> None:
        if self.overlaps:
            self._fill()
            self._run.begin()

    def run(self) -> HostPass:
        if not self._filled:
            self._fill()
        hidden = self._run.run()
        if hidden.largest is not None:
            self._passes.last[self._step.sampled_rows] = hidden.largest
        return HostPass(hidden, self._step, self._wanted, keeps_argmax=hidden.largest is not None)

    def _fill(self) -> None:
        """The tokens that steps before this one brought."""
        decode_rows = self._step.rows[: self._step.layout.num_decodes]
        self._token_ids[: len(decode_rows)] = self._passes.last[decode_rows]
        self._filled = True


class HostPasses:
    def __init__(self, executor: HostExecutor, max_num_seqs: int) -> None:
        self._executor = executor
        self.last = np.zeros(max_num_seqs, dtype=np.int32)
        self.last_tokens = torch.from_numpy(self.last)
        """[max_num_seqs] int32, by row."""

    def prepare(self, step: HostStep) -> HostPassRun:
        """As `Passes.prepare`: nothing is left but the model, and the tokens of the steps before."""
        layout = step.layout
        if layout.num_decodes == layout.num_rows:
            token_ids, wanted = np.empty(layout.num_rows, np.int32), layout.qo_indptr[:-1]
        else:
            token_ids = np.concatenate((self.last[: layout.num_decodes], step.token_ids))
            wanted = layout.qo_indptr[1:][step.sampled] - 1
        run = self._executor.prepare(layout, token_ids, wanted, all_hidden=step.all_hidden, greedy=step.is_greedy)
        return HostPassRun(self, run, step, token_ids, wanted)

    def keep(self, done: StepPass, tokens: Tensor | NDArray[np.int64]) -> None:
        """As `Passes.keep`."""
        self.last[done.rows.numpy()] = as_int32(tokens)
