"""What layers and their kernels both know of a layer's operations: the tensors and numbers that are the same in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from aengine.kernels.triton.codes import Codes


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of [T, heads, head_dim] queries and keys, and the norms before it.

    Halves of the first rotary_dim dimensions are paired ("neox"). A norm is that of each head alone, with its weight [head_dim].
    """

    cos_sin: Tensor  # [num_positions, rotary_dim] float32, cosines then sines
    query_norm: Tensor | None = None  # None: queries are not normalised
    key_norm: Tensor | None = None
    eps: float = 0.0  # of both norms


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """A linear layer of each expert."""

    weight: Tensor | Codes  # [num_experts, out_features, in_features]; codes where `LayerOps` are Triton's
    bias: Tensor | None  # [num_experts, out_features]
