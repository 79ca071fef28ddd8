"""The named weights of a `ModelSpec`: every parameter, its shape, and the checkpoint tensors it is made of.

Owns our names and those of Hugging Face: the loader and both decoders read them from here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from aengine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor that becomes `rows` consecutive rows of a parameter."""

    source: str
    rows: int


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """One parameter: its rows are those of its parts, one part after another."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    fill: float | None  # the value of all elements in a random model; None: normal with the spec's initializer_range


def named_weights(spec: ModelSpec) -> dict[str, NamedWeight]:
    """Parameter name -> `NamedWeight`, in the order of execution. There is no `head.weight` if the head is tied to the embedding."""
    weights: dict[str, NamedWeight] = {}

    def vector(name: str, source: str, size: int) -> None:
        weights[f"{name}.weight"] = NamedWeight((size,), (Part(f"{source}.weight", size),), 1.0)

    def matrix(name: str, columns: int, *sources: tuple[str, int], bias: bool = False) -> None:
        rows = sum(size for _, size in sources)
        parts = tuple(Part(f"{source}.weight", size) for source, size in sources)
        weights[f"{name}.weight"] = NamedWeight((rows, columns), parts, None)
        if bias:
            biases = tuple(Part(f"{source}.bias", size) for source, size in sources)
            weights[f"{name}.bias"] = NamedWeight((rows,), biases, 0.0)

    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrix("embedding", hidden, ("model.embed_tokens", spec.vocab_size))
    for layer in range(spec.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        vector(f"{ours}.attention_norm", f"{theirs}.input_layernorm", hidden)
        projections = ((f"{attention}.q_proj", q_size), (f"{attention}.k_proj", kv_size), (f"{attention}.v_proj", kv_size))
        matrix(f"{ours}.qkv", hidden, *projections, bias=spec.qkv_bias)
        if spec.qk_norm:
            vector(f"{ours}.q_norm", f"{attention}.q_norm", spec.head_dim)
            vector(f"{ours}.k_norm", f"{attention}.k_norm", spec.head_dim)
        matrix(f"{ours}.output", q_size, (f"{attention}.o_proj", hidden), bias=spec.output_bias)
        vector(f"{ours}.mlp_norm", f"{theirs}.post_attention_layernorm", hidden)
        matrix(f"{ours}.gate_up", hidden, (f"{mlp}.gate_proj", intermediate), (f"{mlp}.up_proj", intermediate), bias=spec.mlp_bias)
        matrix(f"{ours}.down", intermediate, (f"{mlp}.down_proj", hidden), bias=spec.mlp_bias)
    vector("norm", "model.norm", hidden)
    if not spec.tied_head:
        matrix("head", hidden, ("lm_head", spec.vocab_size))
    return weights


# As named by compressed-tensors (self_attn.k_scale), vLLM's modules (self_attn.attn.k_scale) and ModelOpt (self_attn.k_proj.k_scale).
_KV_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:(?:attn\.)?(k|v|kv|q)_scale|k_proj\.(k)_scale|v_proj\.(v)_scale)")


def kv_scale_of(source: str, spec: ModelSpec) -> tuple[int, str] | None:
    """The layer of a checkpoint tensor that is a scale of an 8-bit KV cache, and what it scales; None for any other tensor.

    That is "k", "v", "kv" (both, in older checkpoints), or "q" (for attention computed in 8 bits, which is not supported).
    """
    match = _KV_SCALE.fullmatch(source)
    if match is None or int(match[1]) >= spec.num_layers:
        return None
    return int(match[1]), match[2] or match[3] or match[4]


def weight_bytes(spec: ModelSpec, itemsize: int, *, int8: bool) -> int:
    """Bytes of all weights with `itemsize` bytes per value; with `int8`, 1 byte per value of a matrix that is multiplied."""
    total = 0
    for name, weight in named_weights(spec).items():
        quantized = int8 and len(weight.shape) == 2 and (spec.tied_head or name != "embedding.weight")
        total += math.prod(weight.shape) * (1 if quantized else itemsize)
    return total


def num_parameters(spec: ModelSpec) -> int:
    return sum(math.prod(weight.shape) for weight in named_weights(spec).values())
