"""Low-rank adapters as the kernels read them. Their layout is in `src/abi.h`, the products in `src/adapters.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.cpu.library import CLowRank, CStepAdapters, address


class PackedAdapter:
    """The low-rank matrices of an adapter. Immutable; can be used by any workspace."""

    def __init__(self, memory: NDArray[np.uint8], matrices: Mapping[int, CLowRank], count: int) -> None:
        """`matrices` by number, of the `count` that the model has; they point into `memory`."""
        self._memory = memory
        self.c = (CLowRank * count)()
        for number, matrix in matrices.items():
            self.c[number] = matrix
        self.most = max((matrix.size for matrix in matrices.values()), default=0)
        """The largest `size` of a matrix."""

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes


class StepAdapters:
    """Which adapter each token of a step has, or each row of hidden states."""

    def __init__(self, adapters: Sequence[PackedAdapter], of_tokens: NDArray[np.int32]) -> None:
        """`of_tokens`: [T], indices of `adapters`; -1: none. Raises ValueError for other indices."""
        self.of_tokens = np.ascontiguousarray(of_tokens, dtype=np.int32)
        if len(of_tokens) and not -1 <= int(of_tokens.min()) <= int(of_tokens.max()) < len(adapters):
            raise ValueError(f"adapters {of_tokens.min()} to {of_tokens.max()} of tokens are not among -1 to {len(adapters) - 1}")
        self.adapters = tuple(adapters)
        addresses = (ctypes.c_void_p * len(adapters))(*(ctypes.addressof(adapter.c) for adapter in adapters))
        most = max((adapter.most for adapter in adapters), default=0)
        self.c = CStepAdapters(addresses, address(self.of_tokens), len(adapters), most)

    def check(self, num_rows: int, num_matrices: int) -> None:
        """Raises ValueError for another number of rows, or for adapters of another model."""
        if len(self.of_tokens) != num_rows:
            raise ValueError(f"there are adapters of {len(self.of_tokens)} rows for {num_rows}")
        if any(len(adapter.c) != num_matrices for adapter in self.adapters):
            raise ValueError(f"an adapter is not of a model with {num_matrices} matrices")
