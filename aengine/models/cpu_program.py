"""The operations of a model for the CPU kernels: what `decoder.py` computes, written down once as the structs of `kernels/cpu/src/abi.h`.

Owns the order of the operations, the buffers between them, and which part of the weights each one reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import Structure, c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.cpu import library
from aengine.kernels.cpu.library import (
    ELEMENTS,
    MAX_BUFFERS,
    PANEL,
    CAttentionOp,
    CEmbedOp,
    CGatherOp,
    CLinearOp,
    CModel,
    CNorm,
    CNormOp,
    COp,
)
from aengine.kernels.cpu.packing import PackedLinear
from aengine.kernels.cpu.pool import stored_dim
from aengine.layers.rotary import cos_sin_cache
from aengine.models.spec import Attention, Mlp, ModelSpec


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The weights of a model as the kernels read them, by the names of `named_weights` without the ending."""

    linears: Mapping[str, PackedLinear]
    norms: Mapping[str, Tensor]  # of `ops.norm_weight`
    embedding: Tensor  # [vocab_size, hidden_size]


class Program:
    """The operations of a model as a `CModel`, with all that it points to."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, num_positions: int, weights: PackedWeights) -> None:
        self._spec = spec
        self._weights = weights
        self._tables = {rope: cos_sin_cache(rope, num_positions, torch.device("cpu")) for rope in spec.ropes}
        self._ops: list[tuple[int, Structure]] = []
        self._buffers: dict[str, int] = {}
        self._strides: list[int] = []
        self._write(spec)
        attention = spec.layers[0].attention
        self._c_ops = (COp * len(self._ops))(*(COp(kind, ctypes.addressof(item)) for kind, item in self._ops))
        self._c_strides = (c_int64 * len(self._strides))(*self._strides)
        self.c = CModel(
            ops=self._c_ops,
            head=ctypes.pointer(weights.linears["head"].c),
            strides=self._c_strides,
            num_ops=len(self._ops),
            num_buffers=len(self._strides),
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            vocab=spec.vocab_size,
            num_positions=num_positions,
            hidden=self._buffers["hidden"],
            element=ELEMENTS[dtype],
        )
        widths = stored_dim(attention.key_dim), stored_dim(attention.value_dim)
        self.kv_shape = (spec.num_layers, attention.num_kv_heads, *widths, ELEMENTS[dtype])
        """Layers, KV heads, widths of a head's key and value, and element of a pool for the model."""

    @property
    def hidden_stride(self) -> int:
        """Elements from one row of the hidden states to the next."""
        return self._strides[self._buffers["hidden"]]

    def _write(self, spec: ModelSpec) -> None:
        attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, Mlp)
        assert spec.norm is not None
        hidden, heads = spec.hidden_size, attention.num_heads * attention.head_dim
        residual, normed = self._buffer("residual", hidden), self._buffer("normed", hidden)
        qkv = self._buffer("qkv", heads + 2 * attention.num_kv_heads * attention.head_dim)
        attended, gated = self._buffer("attended", heads), self._buffer("gated", mlp.intermediate_size)
        self._add(library.EMBED, CEmbedOp(embedding=self._weights.embedding.data_ptr(), width=hidden, out=residual))
        for layer in range(spec.num_layers):
            name = f"layers.{layer}"
            self._norm(f"{name}.attention_norm", residual, normed)
            self._linear(f"{name}.qkv", normed, qkv)
            operation = self._attention(layer, qkv, attended)
            self._add(library.ROTATE, operation)
            self._add(library.ATTEND, operation)
            if layer == spec.num_layers - 1:
                residual, attended = (self._gathered(one, width) for one, width in (("residual", hidden), ("attended", heads)))
            self._linear(f"{name}.output", attended, residual, library.ADD)
            self._norm(f"{name}.mlp_norm", residual, normed)
            self._linear(f"{name}.gate_up", normed, gated, library.GATED)
            self._linear(f"{name}.down", gated, residual, library.ADD)
        self._norm("norm", residual, self._buffer("hidden", hidden))

    def _buffer(self, name: str, width: int) -> int:
        """The number of a new buffer of activations whose rows have `width` elements."""
        assert len(self._strides) < MAX_BUFFERS
        self._strides.append(-(-width // PANEL) * PANEL)
        return self._buffers.setdefault(name, len(self._buffers))

    def _gathered(self, name: str, width: int) -> int:
        """A new buffer that has the rows of another at the logits indices."""
        out = self._buffer(f"gathered_{name}", width)
        self._add(library.GATHER, CGatherOp(self._buffers[name], out))
        return out

    def _norm(self, name: str, source: int, out: int) -> None:
        self._add(library.NORM, CNormOp(self._c_norm(name, self._spec.hidden_size), None, source, out))

    def _linear(self, name: str, source: int, out: int, epilogue: int = library.STORE) -> None:
        weight = self._weights.linears[name]
        self._add(library.LINEAR, CLinearOp(ctypes.pointer(weight.c), source, out, epilogue, library.SILU, 1.0))

    def _attention(self, layer: int, qkv: int, attended: int) -> CAttentionOp:
        attention = self._spec.layers[layer].attention
        assert isinstance(attention, Attention)
        heads, head_dim, name = attention.num_heads, attention.head_dim, f"layers.{layer}"
        return CAttentionOp(
            None if attention.rope is None else self._tables[attention.rope].data_ptr(),
            *(self._c_norm(f"{name}.{norm}", head_dim) for norm in ("q_norm", "k_norm")),
            *(layer, heads, attention.num_kv_heads, head_dim, head_dim, attention.window or 0),
            *(attention.scale, attention.soft_cap, qkv, attended),
        )

    def _c_norm(self, name: str, size: int) -> CNorm:
        weight = self._weights.norms.get(name)
        assert self._spec.norm is not None
        return CNorm(None if weight is None else weight.data_ptr(), None, size, self._spec.norm.eps, library.RMS_NORM)

    def _add(self, kind: int, item: Structure) -> None:
        self._ops.append((kind, item))
