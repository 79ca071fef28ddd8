"""`ForwardBatch`: the argument of a model's forward pass, on the device. Knows nothing of requests or rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aengine.attention import AttentionStep


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of a mixed batch; the tokens of a row are consecutive."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    logits_indices: Tensor  # [m] int32, the tokens whose logits are computed
    attention: AttentionStep
