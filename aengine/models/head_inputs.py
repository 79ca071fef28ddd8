"""What a draft head of the torch decoder reads, and what its target keeps for it. The formulas are those of `DraftHead`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aengine.layers.ops import LayerOps
from aengine.models.blocks import Linear, Normalize, Weights
from aengine.models.spec import DraftHead, HeadKind


class HeadInputs:
    def __init__(self, head: DraftHead, weights: Weights, ops: LayerOps) -> None:
        self._norms = [Normalize(head.norm, weights, name, ops) for name in ("embedding_norm", "hidden_norm")]
        self._combine = weights.linear("combine") if head.kind is HeadKind.MTP else None
        self._normed_residual = head.normed_residual

    def __call__(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
        """[T, hidden_size] each, given up -> what q, k and v of the layer are projected from, and the residual it begins with. None: they
        are projected from the normed residual."""
        normed = self._norms[1](hidden)
        x = torch.cat((self._norms[0](embedded), normed), -1)
        if self._combine is not None:
            return None, self._combine(x)
        return x, normed if self._normed_residual else hidden


class Kept:
    """Hidden states that a draft head reads, by slot as keys and values are: those of its target, and those that it carries itself."""

    def __init__(self, head: DraftHead, fuse: Linear | None) -> None:
        """`fuse`: of EAGLE3."""
        self.states = torch.zeros(0)  # [slots, hidden_size of the head]
        self.taps = head.taps
        self._carries_residual = head.kind is HeadKind.EAGLE3
        self._fuse = fuse

    def read(self, slots: Tensor) -> Tensor:
        return self.states.index_select(0, slots.clamp(min=0))

    def of_target(self, slots: Tensor, tapped: Mapping[int, Tensor], hidden: Tensor) -> None:
        """[T] tokens of the target, with the residuals at its `taps` and the `hidden` states that its output head reads."""
        self._write(slots, hidden if self._fuse is None else self._fuse(torch.cat([tapped[tap] for tap in self.taps], -1)))

    def of_head(self, next_slots: Tensor, residual: Tensor, hidden: Tensor) -> None:
        """[T] tokens of the head, with their last residual and the `hidden` states that its output head reads."""
        self._write(next_slots, residual if self._carries_residual else hidden)

    def _write(self, slots: Tensor, states: Tensor) -> None:
        """Where a slot is -1, at slot 0, which is on the reserved page 0."""
        self.states.index_copy_(0, slots.clamp(min=0).long(), states)
