"""`Passes` of an executor that takes steps as they are on the host. Between two steps of a small model the caches hold nothing of this, so
what counts here is how few operations there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.cpu.step import LastTokens
from aengine.runner.executor import HostExecutor, HostHidden, HostRun, StepPass
from aengine.runner.landing import as_int32
from aengine.runner.passes import HostStep

GetDrawParams = Callable[[NDArray[np.int32], NDArray[np.int32]], "NDArray[np.void] | None"]


@dataclass(frozen=True, slots=True)
class HostPass:
    """Satisfies `StepPass` with tensors that are made when they are asked for: a step that chooses needs none."""

    hidden: HostHidden
    step: HostStep
    wanted: NDArray[np.int32]
    keeps_argmax: ClassVar[bool] = False

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

    @property
    def chosen(self) -> NDArray[np.int64] | None:
        return self.hidden.chosen

    def argmax(self) -> Tensor:
        return self.hidden.argmax(self.indices)


class HostPassRun:
    """Satisfies `StepRun`."""

    def __init__(self, run: HostRun, step: HostStep, wanted: NDArray[np.int32], *, chooses: bool) -> None:
        self._run = run
        self._step = step
        self._wanted = wanted
        self.overlaps = run.overlaps
        self.chooses = chooses
        self.begin = run.begin
        self.follow = run.follow

    @property
    def has_begun(self) -> bool:
        return self._run.has_begun

    def run(self) -> HostPass:
        return HostPass(self._run.run(), self._step, self._wanted)


class HostPasses:
    def __init__(self, executor: HostExecutor, max_num_seqs: int, draw_params: GetDrawParams) -> None:
        """`draw_params`: how [m] rows draw their tokens at [m] positions; None where something else is wanted of their logits."""
        self._executor = executor
        self._draw_params = draw_params
        self.last = np.zeros(max_num_seqs, dtype=np.int32)
        self.last_tokens = torch.from_numpy(self.last)
        """[max_num_seqs] int32, by row."""

    def prepare(self, step: HostStep) -> HostPassRun:
        """As `Passes.prepare`: nothing is left but the model, and the tokens of the steps before."""
        layout = step.layout
        if layout.num_decodes == layout.num_rows:
            token_ids, wanted = np.empty(layout.num_rows, np.int32), layout.qo_indptr[:-1]
        else:
            token_ids = np.concatenate((np.zeros(layout.num_decodes, np.int32), step.token_ids))
            wanted = layout.qo_indptr[1:][step.sampled] - 1
        greedy, draw_params = step.greedy and not step.all_hidden, None
        if not greedy and not step.all_hidden:
            draw_params = self._draw_params(step.sampled_rows, step.next_positions)
        chooses = greedy or draw_params is not None
        feed = LastTokens(self.last, step.rows[: layout.num_decodes], step.sampled_rows if chooses else step.rows[:0])
        run = self._executor.prepare(
            layout, token_ids, wanted, all_hidden=step.all_hidden, greedy=greedy, draw_params=draw_params, feed=feed
        )
        return HostPassRun(run, step, wanted, chooses=chooses)

    def keep(self, done: StepPass, tokens: Tensor) -> None:
        """As `Passes.keep`."""
        self.last[done.rows.numpy()] = as_int32(tokens)
