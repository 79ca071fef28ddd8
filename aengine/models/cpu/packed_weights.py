"""`PackedWeights`: the weights of a model as the CPU kernels read them.

Owns the arrays and structs, by name. Knows nothing of checkpoints, or of how a matrix is packed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.arrays import Array
from aengine.kernels.cpu.packed_linear import PackedLinear, PackedLinears
from aengine.models.sharding import sharded_spec
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import WHOLE, Shard


class PackedWeights:
    """Each kind under the names of `named_weights`; those of matrices and tables without `.weight`."""

    def __init__(self, spec: ModelSpec, dtype: np.dtype[Any], shard: Shard = WHOLE) -> None:
        """`spec`: of the whole model; the weights are those of `sharded_weights(spec, shard)`."""
        self.spec = sharded_spec(spec, shard)
        self.whole_spec = spec
        self.shard = shard
        self.dtype = dtype
        self.linears: dict[str, PackedLinear] = {}  # with their biases; `head` is there if it is tied, too
        self.grouped: dict[str, PackedLinears] = {}  # of experts and of heads
        self.tables: dict[str, Array] = {}  # not packed
        self.vectors: dict[str, NDArray[np.float32]] = {}  # among them the biases of norms
        self._shared: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Without the tables, which may be mapped from files."""
        linears = sum(weight.nbytes for weight in self.linears.values()) + sum(weights.nbytes for weights in self.grouped.values())
        return linears + sum(vector.nbytes for vector in self.vectors.values())

    def share(self, target: PackedWeights) -> None:
        """Take from the target of a draft head its embedding and its output head, each unless the draft head has its own."""
        if "embedding" in self._shared or "embedding" not in self.tables:
            self.tables["embedding"] = target.tables["embedding"]
            self._shared.add("embedding")
        if "head" in self._shared or "head" not in self.linears:
            self.linears["head"] = target.linears["head"]
            self._shared.add("head")

    def unshare(self) -> None:
        """Give up what `share` took, until `share` is called again."""
        if "embedding" in self._shared:
            del self.tables["embedding"]
        if "head" in self._shared:
            del self.linears["head"]
