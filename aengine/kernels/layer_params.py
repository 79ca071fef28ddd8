"""What layers and their kernels both know of a layer's operations: what they are given beside activations."""

from __future__ import annotations

from collections.abc import Callable
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
class ExpertMlp:
    """The MLP of each expert: down(activate(up(x)))."""

    up: ExpertLinear
    down: ExpertLinear
    activate: Callable[[Tensor], Tensor]  # maps rows to rows


@dataclass(frozen=True, slots=True)
class SharedOutput:
    """What each token gets beside the outputs of its experts."""

    output: Tensor  # [T, size]
    gate: Tensor | None = None  # [T, 1]: the output is multiplied by its sigmoid

    def added_to(self, sums: Tensor) -> Tensor:
        """[T, size] float32, whose memory may be used."""
        return sums.add_(self.output if self.gate is None else self.output.float() * self.gate.float().sigmoid())


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
