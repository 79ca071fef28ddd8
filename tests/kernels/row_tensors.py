"""Rows of weights as tensors, which tests compute with, and as arrays, which files become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.arrays import FLOAT32, as_array, as_tensor
from aengine.kernels.quantized import QuantizedRows, Rows
from aengine.models.adapters import Adapter
from aengine.models.sharding import WeightPart, random_weights, take_part
from aengine.models.spec import ModelSpec


def arrays(rows: Tensor | QuantizedRows) -> Any:
    """A tensor as an array, or quantised rows of tensors as those of arrays."""
    return _with(rows, lambda value: as_array(value) if isinstance(value, Tensor) else value)


def tensors(rows: Rows) -> Any:
    """An array as a tensor, or quantised rows of arrays as those of tensors."""
    return _with(rows, lambda value: as_tensor(value) if isinstance(value, np.ndarray) else value)


def dequantized(rows: QuantizedRows) -> Tensor:
    return as_tensor(arrays(rows).dequantized())


def named_arrays(weights: Iterable[tuple[str, Sequence[Tensor | QuantizedRows]]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    return ((name, tuple(map(arrays, parts))) for name, parts in weights)


def _with(rows: Any, changed: Callable[[Any], Any]) -> Any:
    if not isinstance(rows, QuantizedRows):
        return changed(rows)
    return replace(rows, **{field.name: changed(getattr(rows, field.name)) for field in fields(rows)})


def initial_tensors(spec: ModelSpec, seed: int = 3) -> dict[str, Tensor]:
    """Random float32 weights, each as the matrix of its rows."""
    return {name: torch.cat([*map(as_tensor, parts)]) for name, parts in random_weights(spec, FLOAT32, seed)}


def held_parts(tensor: Tensor, part: WeightPart) -> tuple[Tensor, ...]:
    """What `take_part` gives of a whole parameter."""
    return tuple(map(tensors, take_part((as_array(tensor),), part)))


def with_tensors(adapter: Adapter) -> Adapter:
    """The adapter with matrices of torch."""
    parts = {name: tuple(replace(part, a=tensors(part.a), b=tensors(part.b)) for part in each) for name, each in adapter.parts.items()}
    return replace(adapter, parts=parts)
