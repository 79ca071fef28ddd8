"""`PackedLinear`: a matrix in the layout of the kernels, which is in `src/abi.h` and `src/packing.h`; `PackedLinears`: a list of them.

Owns their memory, as arrays by the names of the fields that point to them, so that a matrix can be written to a file and read from one.
Knows nothing of what they were packed from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.arrays import Array, data_address
from aengine.kernels.cpu.library import PANEL, CPackedLinear

POINTERS = ("words", "bias", "scales", "offsets", "table", "order")
"""Fields of `CPackedLinear` that are addresses of arrays."""
NUMBERS = tuple(name for name, *_ in CPackedLinear._fields_ if name not in POINTERS)
"""The other fields."""


class PackedLinear:
    """A matrix [out_features, in_features], with or without a bias, as the kernels read it. Can be used with any workspace.

    An `interleaved` one is a gate and an up projection of the same width, for `silu(gate) * up`.
    """

    def __init__(self, dtype: np.dtype[Any], arrays: Mapping[str, Array], **numbers: int) -> None:
        """`dtype` is that of the activations. `arrays` by `POINTERS`, of which all but the words may be missing; `numbers` by `NUMBERS`."""
        self.dtype = dtype
        self.arrays = dict(arrays)
        pointers: dict[str, Any] = {name: data_address(array) for name, array in arrays.items()}
        self.c = CPackedLinear(**pointers, **numbers)
        self.out_features: int = self.c.out_features
        self.in_features: int = self.c.in_features
        self.interleaved = bool(self.c.interleaved)

    @property
    def padded_features(self) -> int:
        """The rows that the words have, with those that are padding."""
        return num_panels(self.out_features, self.interleaved) * PANEL

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for name, array in self.arrays.items() if name not in ("table", "order"))

    @property
    def numbers(self) -> dict[str, int]:
        """The fields of the struct that are no addresses."""
        return {name: int(getattr(self.c, name)) for name in NUMBERS}

    def set_bias(self, rows: NDArray[np.float32]) -> None:
        """Sets the bias [out_features]."""
        if rows.shape != (self.out_features,):
            raise ValueError(f"a bias of shape {rows.shape} does not match {self.out_features} rows")
        bias = self.arrays["bias"] = self._in_packed_order(np.asarray(rows, np.float32))
        self.c.bias = data_address(bias)

    def _in_packed_order(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """[out_features] -> [padded_features], with zeros as padding."""
        left = self.padded_features - len(rows)
        if not self.interleaved:
            return np.pad(rows, (0, left))
        halves = np.pad(rows.reshape(2, -1), ((0, 0), (0, left // 2)))
        return np.ascontiguousarray(halves.reshape(2, -1, 16).swapaxes(0, 1)).reshape(-1)


class PackedLinears:
    """Matrices of one shape, for a grouped product: one per expert or head."""

    def __init__(self, linears: Sequence[PackedLinear], orders: NDArray[np.int32] | None = None) -> None:
        """`orders`: of the columns of each matrix, [count, in_features], where these differ; None: the matrices have theirs."""
        self.linears, self.orders = list(linears), orders
        self.c = (CPackedLinear * len(linears))(*(linear.c for linear in linears))

    def set_biases(self, rows: NDArray[np.float32]) -> None:
        """Sets the biases of all matrices, one after another [count * out_features]."""
        for index, linear in enumerate(self.linears):
            linear.set_bias(rows[index * linear.out_features : (index + 1) * linear.out_features])
            self.c[index] = linear.c

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self.linears)


def num_panels(out_features: int, interleaved: bool) -> int:
    """Panels of a matrix of so many rows."""
    return -(-out_features // 2 // (PANEL // 2)) if interleaved else -(-out_features // PANEL)
