"""`Passes`: how a step gets through the model: a graph of decodes where there is one, else what an executor makes of uploaded arrays.

Owns the upload of a step, and the last token of every row, from which decodes go on without the host. Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention import AttentionMetadata, StepLayout
from aengine.runner.base import Hold
from aengine.runner.executor import DevicePass, Executor, StepInput, StepPass, StepRun
from aengine.runner.upload import upload


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step as it was planned. Its n rows are those of a `StepPlan`: decodes, whose tokens are on the device, then chunks of prompts."""

    layout: StepLayout
    rows: NDArray[np.int32]  # [n]
    sampled: NDArray[np.int64]  # [m], which of the n are followed by a token to sample, ascending; all decodes are
    sampled_rows: NDArray[np.int32]  # [m]
    next_positions: NDArray[np.int32]  # [m], of the tokens to sample
    token_ids: NDArray[np.int32]  # of the prompts
    all_hidden: bool  # whether logits of other tokens are wanted, too
    greedy: bool  # whether nothing but the argmax of the logits is wanted of the sampled ones

    @classmethod
    def of(
        cls,
        layout: StepLayout,
        rows: NDArray[np.int32],
        samples: NDArray[np.bool_],
        token_ids: NDArray[np.int32],
        *,
        all_hidden: bool,
        greedy: Callable[[NDArray[np.int32]], bool],
    ) -> HostStep:
        """`samples` [n], as in a `StepPlan`. `greedy` tells it of sampled rows."""
        if layout.num_decodes == len(rows):
            return cls(layout, rows, np.arange(len(rows)), rows, layout.seq_lens, token_ids, all_hidden, greedy(rows))
        sampled = samples.nonzero()[0]
        sampled_rows = rows[sampled]
        return cls(layout, rows, sampled, sampled_rows, layout.seq_lens[sampled], token_ids, all_hidden, greedy(sampled_rows))


@dataclass(frozen=True, slots=True)
class PassRun:
    """Satisfies `StepRun` with all at once."""

    passes: Passes
    step: HostStep
    overlaps: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    has_begun: ClassVar[bool] = False

    def begin(self) -> None:
        pass

    def follow(self, hold: Hold) -> None:
        pass

    def run(self) -> StepPass:
        return self.passes.run(self.step)


class Passes:
    def __init__(self, executor: Executor, max_num_seqs: int, device: torch.device) -> None:
        self._executor = executor
        self._device = device
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        """[max_num_seqs + 1] int32, by row; the last one belongs to none, and takes what padding computes."""

    def prepare(self, step: HostStep) -> StepRun:
        return PassRun(self, step)

    def run(self, step: HostStep) -> StepPass:
        if step.layout.num_decodes == step.layout.num_rows:
            replayed = self._executor.decode(step.layout, step.rows)
            if replayed is not None:
                return replayed
        return self._run_uploaded(step)

    def keep(self, done: StepPass, tokens: Tensor) -> None:
        """`tokens` [m], as sampled, are the last ones of the step's rows from now on."""
        self.last_tokens.index_copy_(0, done.rows.long(), tokens.to(torch.int32))

    def _run_uploaded(self, step: HostStep) -> StepPass:
        layout = step.layout
        arrays = (
            layout.qo_indptr,
            layout.kv_indptr,
            layout.kv_indices,
            layout.last_page_len,
            layout.slot_mapping,
            layout.positions,
            step.token_ids,
            step.rows[: layout.num_decodes],
            layout.qo_indptr[step.sampled + 1] - 1,
            step.sampled_rows,
            step.next_positions,
        )
        *metadata, positions, prompt_ids, decode_rows, indices, rows, next_positions = upload(arrays, self._device)
        input_ids = torch.cat((self.last_tokens.index_select(0, decode_rows), prompt_ids)) if layout.num_decodes else prompt_ids
        hidden = self._executor.forward(
            StepInput(AttentionMetadata(layout, *metadata), input_ids, positions, indices, all_hidden=step.all_hidden)
        )
        return DevicePass(hidden, indices, rows, next_positions, keeps_argmax=False)
