"""`Activation`: the functions between the products of an MLP, and these in plain torch, which is the reference.

`ExpertRouting`: how the scores of a router choose experts for a token, and the choice in plain torch, which is the reference.

`DrawParams`: the parameters of a draw, one record per row, in one layout on the host and on a device.

What kernels and those who call them both know: what kernels are given beside activations and logits."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from aengine.api.dataclass import dataclass

if TYPE_CHECKING:
    from torch import Tensor

    from aengine.kernels.triton.codes import Codes


class Activation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    CLIPPED_SWIGLU = "clipped_swiglu"
    """Of GPT-OSS, gated alone: g * sigmoid(1.702 * g) * (u + 1), where g = min(gate, 7) and u = clamp(up, -7, 7)."""


class RouterScoring(Enum):
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """A token goes to the `top_k` experts with the highest scores, whose outputs are summed with weights."""

    top_k: int
    scoring: RouterScoring = RouterScoring.SOFTMAX  # of the router's logits, over all experts
    normalize: bool = True  # the scores of a token's experts, which are their weights, are divided by their sum
    scaling: float = 1.0  # multiplies the weights
    num_groups: int = 1  # experts are chosen from `top_groups` of so many groups of equal size
    top_groups: int = 1
    group_top: int = 1  # a group's score is the sum of so many of its highest scores


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


TokenSlots: TypeAlias = object
"""The slots of T tokens, as the `AdapterOps` that made it wants them; others do not look into it."""


DRAW_PARAMS = np.dtype(
    [
        ("temperature", "<f4"),  # 0: greedy; any other is GREEDY_BELOW at least
        ("top_p", "<f4"),  # 1: off; 0, which is what float32 makes of the least: greedy
        ("min_p", "<f4"),  # 0: off
        ("top_k", "<i4"),  # 0: off
        ("seed", "<u8"),  # keys the noise, with the position
        ("position", "<i4"),  # of the token in its sequence
        ("unused", "<i4"),
    ]
)

HIGHEST_LOGIT = 1e30
"""Higher logits become this before a draw: it is still finite when divided by the lowest temperature."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The records of m rows on a device."""

    packed: Tensor  # [m, 8] int32, contiguous: `DRAW_PARAMS`, without the positions
    positions: Tensor  # [m] int32, of the tokens to be drawn

    @property
    def temperature(self) -> Tensor:
        return self._floats[:, 0]

    @property
    def top_p(self) -> Tensor:
        return self._floats[:, 1]

    @property
    def min_p(self) -> Tensor:
        return self._floats[:, 2]

    @property
    def top_k(self) -> Tensor:
        return self.packed[:, 3]

    @property
    def seed(self) -> Tensor:
        import torch

        return self.packed.view(torch.int64)[:, 2]

    @property
    def _floats(self) -> Tensor:
        import torch

        return self.packed.view(torch.float32)

    def __getitem__(self, rows: slice) -> DrawParams:
        return DrawParams(self.packed[rows], self.positions[rows])

    def select(self, rows: Tensor) -> DrawParams:
        """The records of the [n] int64 `rows`, which are indices into the m records."""
        return DrawParams(self.packed.index_select(0, rows), self.positions.index_select(0, rows))
