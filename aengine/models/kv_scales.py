"""The scales of an 8-bit KV cache that a checkpoint has: one number for K and one for V of each layer.

A cache holds value / scale. The names of the tensors are in `named_weights.py`. Does not know who uses the scales.
"""

from __future__ import annotations

import math
import pathlib

from aengine.errors import ModelLoadError
from aengine.models.checkpoint import DTYPES
from aengine.models.named_weights import kv_scale_of
from aengine.models.spec import ModelSpec
from aengine.models.weights import open_weights


def stored_kv_scales(spec: ModelSpec, model_dir: pathlib.Path, load_format: str = "auto") -> tuple[tuple[float, float], ...] | None:
    """The scales of K and V by layer, 1.0 for those that the checkpoint lacks; None if it has none at all.

    Raises ModelLoadError naming a tensor that is not one positive number, or that repeats another.
    """
    found: dict[tuple[int, str], tuple[str, float]] = {}
    for name, tensor in open_weights(spec, model_dir, load_format).tensors.items():
        named = kv_scale_of(name, spec)
        if named is None or named[1] == "q":
            continue
        if named in found:
            raise ModelLoadError(f"the checkpoint has two scales of the same: {found[named][0]} and {name}")
        if math.prod(tensor.shape) != 1:
            raise ModelLoadError(f"KV scale {name} has shape {list(tensor.shape)}; supported is one number for all heads of a layer")
        if tensor.dtype not in DTYPES:
            raise ModelLoadError(f"KV scale {name} is stored as {tensor.dtype}; supported are {', '.join(DTYPES)}")
        scale = float(tensor.tensor().item())
        if not math.isfinite(scale) or scale <= 0:
            raise ModelLoadError(f"KV scale {name} is {scale}, not a positive number")
        found[named] = (name, scale)
    if not found:
        return None

    def scale_of(layer: int, which: str) -> float:
        _, scale = found.get((layer, which)) or found.get((layer, "kv")) or ("", 1.0)
        return scale

    return tuple((scale_of(layer, "k"), scale_of(layer, "v")) for layer in range(spec.num_layers))
