"""What layers and their kernels both know of a layer's operations: what they are given beside activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from aengine.kernels.triton.codes import Codes
    from aengine.kernels.triton.experts import Grouping


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


@dataclass(frozen=True, slots=True)
class AdapterMatrices:
    """What the adapters of all slots change of one parameter, whose rows are in parts."""

    a: Tensor  # [slots, low_rank, parts, in_features]
    b: Tensor  # [slots, low_rank, out_features]
    ranks: Tensor  # [slots] int32, how many ranks of the slot count: what is behind them may be anything finite
    bounds: tuple[int, ...]  # [parts + 1], ascending from 0: the rows of each part
    device_bounds: Tensor  # the same, int32


TokenSlots: TypeAlias = "Tensor | Grouping"
"""The slots of T tokens, as the `AdapterOps` want them."""
