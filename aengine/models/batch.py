"""`ForwardBatch`: what a model is called with. Frozen, on the device, without reference to requests or rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aengine.attention import AttentionStep


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of a mixed batch, the tokens of one row beside each other."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    logits_indices: Tensor  # [m] int32, the tokens whose logits are wanted
    attention: AttentionStep
