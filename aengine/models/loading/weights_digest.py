"""`WeightsDigest`: what tells the weights of one model from those of another, made while they are read. Every byte counts.

Knows nothing of files: weights from anywhere have the digest of their values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.quantized import QuantizedRows, Rows

_WORDS = 512
"""Words of 8 bytes in a block. Blocks are added up as fast as memory is read, and SHA-256, which takes 20 times as long, gets the sums."""


class WeightsDigest:
    """The digest of the weights that are added, in their order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add_weight(self, name: str, parts: Iterable[Rows]) -> None:
        """A named weight: shapes, dtypes and values of its parts, on the CPU."""
        for part in parts:
            for field, tensor in _tensors(part):
                self._hash.update(f"{name} {field} {tuple(tensor.shape)} {tensor.dtype};".encode())
                self._add_bytes(_bytes(tensor))

    @contextmanager
    def adding(self, name: str, parts: Iterable[Rows], executor: Executor) -> Iterator[None]:
        """Adds them while the body runs, which may read them."""
        added = executor.submit(self.add_weight, name, parts)
        try:
            yield
        finally:
            added.result()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16]

    def _add_bytes(self, data: NDArray[np.uint8]) -> None:
        end = len(data) // (8 * _WORDS) * 8 * _WORDS
        self._hash.update(data[:end].view(np.uint64).reshape(-1, _WORDS).sum(axis=1).data)
        self._hash.update(data[end:].data)


def _tensors(rows: Rows) -> Iterable[tuple[str, Tensor]]:
    if isinstance(rows, Tensor):
        return [("", rows)]
    found = [(field.name, getattr(rows, field.name)) for field in fields(QuantizedRows)]
    return [(name, value) for name, value in found if isinstance(value, Tensor)]


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return flat
