"""Which tensors of a quantised checkpoint belong to the linear modules of a model of transformers, which runs them dequantised.

Knows nothing of formats: those are the schemes of `models/quantization`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from aengine.api.errors import ModelLoadError
from aengine.models.families.base import Transform
from aengine.models.loading.checkpoint import StoredTensor
from aengine.models.loading.hub import described_problems
from aengine.models.loading.stored_parts import StoredPart, stored_parts
from aengine.models.named_weights import NamedWeight, Part
from aengine.models.quantization.config import Quantization
from aengine.models.quantization.scheme import Stored


def quantized_parts(model: Any, quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> tuple[StoredPart, ...]:
    """The weights of linear modules that the checkpoint has quantised. `model` may be without memory.

    Raises ModelLoadError naming tensors that are missing, or of another shape or dtype than the format has.
    """
    prefix = f"{model.base_model_prefix}."
    has_prefix = any(name.startswith(prefix) for name in tensors)
    stored = {parent for name in tensors for parent in accumulate(name.split("."), "{}.{}".format)}
    weights = {}
    for name, module in model.named_modules():
        own = name if has_prefix else name.removeprefix(prefix)
        if isinstance(module, nn.Linear | Conv1D) and own in stored:
            shape: tuple[int, ...] = tuple(module.weight.shape)
            transform = Transform(shape, Tensor.t, transposed=True) if isinstance(module, Conv1D) else None
            matrix = shape if transform is None else shape[::-1]
            weights[f"{own}.weight"] = NamedWeight(matrix, (Part(f"{own}.weight", shape, matrix[0], transform),), None)
            if module.bias is not None:
                weights[f"{own}.bias"] = NamedWeight(matrix[:1], (Part(f"{own}.bias", matrix[:1], matrix[0]),), None)
    found = tuple(part for parts in stored_parts(weights, quantization, tensors).values() for part in parts if part.scheme is not None)
    expected = {name: described for part in found for name, described in part.expected.items()}
    problems = {
        "it lacks": [name for name in expected if name not in tensors],
        "it has other shapes or dtypes than its quantization_config implies:": [
            f"{name} {list(tensors[name].shape)} {tensors[name].dtype}"
            for name, described in expected.items()
            if name in tensors and not _fits(tensors[name], described)
        ],
    }
    wrong = described_problems({title: sorted(names) for title, names in problems.items()})
    if wrong:
        raise ModelLoadError(f"the checkpoint does not match its config.json: {wrong}")
    return found


def _fits(tensor: StoredTensor, described: Stored) -> bool:
    return tensor.shape in (described.shapes or (tensor.shape,)) and tensor.dtype in (described.dtypes or (tensor.dtype,))
