"""How many bytes the weights of a model will take, known before any is read."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping

from aengine.api.config import EngineConfig
from aengine.models.gguf.gguf_file import BLOCKS
from aengine.models.loading.stored_parts import stored_parts
from aengine.models.loading.weights import open_weights
from aengine.models.named_weights import NEVER_QUANTIZED, named_weights
from aengine.models.quantization.quantization_config import load_quantization
from aengine.models.sharding import own, sharded_weights, vocab_bounds
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import WHOLE, Shard

BITS = {"int8": 8, "fp8": 8, "int4": 4.5}
"""How many bits a weight takes by `EngineConfig.quantization`, with its share of the scales."""


def weight_bytes(
    config: EngineConfig, spec: ModelSpec, itemsize: int, quantized: Mapping[str, int], shard: Shard = WHOLE
) -> dict[str, int]:
    """Return the bytes of each of `sharded_weights(spec, shard)`, as the CPU kernels read it: what the checkpoint has `quantized` keeps
    its size, a matrix that can be quantised has that of `config.quantization`, all others have `itemsize` bytes per value. A tied
    embedding counts as the head."""
    found = {}
    whole = named_weights(spec)
    for name, part in sharded_weights(spec, shard).items():
        stem = name.removesuffix(".weight").rpartition(".")[2]
        size, source = math.prod(part.shape), part.source_name
        if spec.tied_head and stem == "embedding":
            size = len(own(vocab_bounds(spec, shard), shard)) * spec.hidden_size
        quantizable = len(part.shape) > 1 and stem not in NEVER_QUANTIZED and (spec.tied_head or stem != "embedding")
        if quantizable and source in quantized:
            found[name] = quantized[source] * size // math.prod(whole[source].shape)
        elif quantizable and config.quantization != "none":
            is_head = stem in ("embedding", "head")
            found[name] = int(size * (8 if is_head else BITS[config.quantization]) / 8)
        else:
            found[name] = size * itemsize
    return found


def quantized_bytes(config: EngineConfig, spec: ModelSpec, model_dir: pathlib.Path) -> dict[str, int]:
    """Return the stored bytes of each weight of which the checkpoint has all parts quantised. Raises ModelLoadError."""
    quantization = None if config.load_format == "dummy" else load_quantization(model_dir)
    if quantization is None:
        return {}
    tensors = open_weights(spec, model_dir, config.load_format).tensors
    found = {}
    for name, parts in stored_parts(named_weights(spec), quantization, tensors).items():
        stored = [tensors[source] for part in parts for source in part.endings if source in tensors]  # what is missing is refused later
        if all(part.scheme is not None for part in parts) or (stored and all(tensor.dtype in BLOCKS for tensor in stored)):
            found[name] = sum(tensor.nbytes for tensor in stored)
    return found
