"""The operations of a model for the CPU kernels: what `decoder.py` computes, written down once as the structs of `kernels/cpu/src/abi.h`.

Owns the order of the operations, the buffers between them, and which part of the weights each one reads.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int64

import torch
from torch import Tensor

from aengine.cache import LayerGroups
from aengine.kernels.cpu import library
from aengine.kernels.cpu.library import (
    ELEMENTS,
    MAX_BUFFERS,
    PANEL,
    CAttentionOp,
    CCopyOp,
    CEmbedOp,
    CExpertsOp,
    CGatherOp,
    CHeadsOp,
    CKeptOp,
    CLinearOp,
    CModel,
    CNorm,
    CNormOp,
    COp,
)
from aengine.kernels.cpu.ops import norm_weight
from aengine.kernels.cpu.pool import stored_dim
from aengine.layers.rotary import cos_sin_cache
from aengine.models.cpu_weights import PackedWeights
from aengine.models.spec import (
    Activation,
    Attention,
    DraftHead,
    Experts,
    HeadKind,
    LatentAttention,
    Layer,
    Mlp,
    ModelSpec,
    Norm,
    NormKind,
    QkNorm,
    RouterScoring,
)

_CPU = torch.device("cpu")
_ACTIVATIONS = {
    Activation.SILU: library.SILU,
    Activation.GELU: library.GELU,
    Activation.GELU_TANH: library.GELU_TANH,
    Activation.RELU: library.RELU,
    Activation.RELU_SQUARED: library.RELU_SQUARED,
    Activation.CLIPPED_SWIGLU: library.CLIPPED_SWIGLU,
}
_SCORINGS = {RouterScoring.SOFTMAX: library.SOFTMAX, RouterScoring.SIGMOID: library.SIGMOID}
_NORM_KINDS = {NormKind.RMS: library.RMS_NORM, NormKind.LAYER: library.LAYER_NORM}


class Program:
    """The operations of a model as a `CModel`, with all that it points to.

    Buffers have names while it is written: the `residual`, what a block reads (`normed`), `qkv`, what was `attended`, the `gated` inner
    activations of an MLP, the output of a block before its norm (`branch`), and the `hidden` states for the head. Latent attention has the
    `heads` of its queries, its `latent` keys and values, and the `query` heads that are as wide as these.
    """

    def __init__(self, weights: PackedWeights, num_positions: int, groups: LayerGroups, reader: PackedWeights | None = None) -> None:
        """`groups` are those of the KV pages. `reader`: of a draft head whose target the model is."""
        spec = self._spec = weights.spec
        if spec.learned_positions is not None:
            num_positions = min(num_positions, spec.learned_positions.count)
        self._places = groups.places
        self._reader = reader
        self._weights = weights
        self._tables = {rope: cos_sin_cache(rope, num_positions, _CPU) for rope in spec.ropes}
        self._tensors: list[Tensor] = []  # what the operations point to besides the weights
        self._norms: list[CNormOp] = []
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
            logit_soft_cap=spec.logit_soft_cap,
            hidden=self._buffers["hidden"],
            element=ELEMENTS[weights.dtype],
        )
        widths = stored_dim(attention.key_dim), stored_dim(attention.value_dim)
        self.kv_shape = (groups.layers_per_page, attention.num_kv_heads, *widths)
        """Layers per page, KV heads, and widths of a head's key and value of a pool for the model."""

    @property
    def kept_width(self) -> int:
        """The width of hidden states that it keeps by slot; 0: none."""
        spec = self._spec if self._reader is None else self._reader.spec
        return 0 if spec.draft_head is None else spec.hidden_size

    @property
    def hidden_stride(self) -> int:
        """Elements from one row of the hidden states to the next."""
        return self._strides[self._buffers["hidden"]]

    def _write(self, spec: ModelSpec) -> None:
        read = None if self._reader is None else self._reader.spec.draft_head
        taps = () if read is None else read.taps
        if spec.draft_head is None:
            self._embed(spec, "residual")
        else:
            self._head_inputs(spec, spec.draft_head)
        gathers = read is None or (read.kind is HeadKind.EAGLE3 and spec.num_layers not in taps)
        for index, layer in enumerate(spec.layers):
            self._tap(index, taps)
            self._layer(f"layers.{index}.", index, layer, gathers=gathers and index + 1 == spec.num_layers)
        self._tap(spec.num_layers, taps)
        if spec.draft_head is not None and spec.draft_head.kind is HeadKind.EAGLE3:
            self._kept(library.WRITE_KEPT, "residual")
        if self._norm("norm", spec.norm, "residual", "hidden", factor=spec.logit_scale) != "hidden":
            self._buffers["hidden"] = self._buffers["residual"]
        if HeadKind.MTP in {head.kind for head in (read, spec.draft_head) if head is not None}:
            self._kept(library.WRITE_KEPT, "hidden")
        if not gathers:
            self._gather("hidden")

    def _head_inputs(self, spec: ModelSpec, head: DraftHead) -> None:
        """What a draft head reads, and the residual that its layer begins with."""
        size = spec.hidden_size
        self._embed(spec, "inputs", 2 * size)
        self._norm("embedding_norm", head.norm, "inputs", "inputs")
        self._kept(library.READ_KEPT, "inputs", first=size)
        if head.kind is HeadKind.EAGLE3 and not head.normed_residual:
            self._kept(library.READ_KEPT, "residual")
        self._norm("hidden_norm", head.norm, "inputs", "inputs", first=size)
        if head.kind is HeadKind.MTP:
            self._linear("combine", "inputs", "residual", size)
        elif head.normed_residual:
            self._copy("inputs", size, "residual", 0, size)

    def _tap(self, index: int, taps: tuple[int, ...]) -> None:
        """Keeps what the head reads of the residual before a layer; and what it makes of all taps, when there are all of them."""
        size = self._spec.hidden_size
        for place in (place for place, tap in enumerate(taps) if tap == index):
            self._buffer("taps", len(taps) * size)
            self._copy("residual", 0, "taps", place * size, size)
        if taps and index == max(taps):
            assert self._reader is not None
            self._linear("fuse", "taps", "fused", self._reader.spec.hidden_size, weights=self._reader)
            self._kept(library.WRITE_KEPT, "fused")

    def _copy(self, source: str, first: int, out: str, out_first: int, width: int) -> None:
        self._add(library.COPY, CCopyOp(first, out_first, width, self._buffers[source], self._buffer(out, out_first + width)))

    def _kept(self, kind: int, rows: str, first: int = 0) -> None:
        width = self.kept_width
        self._add(kind, CKeptOp(first, width, self._buffer(rows, first + width)))

    def _embed(self, spec: ModelSpec, name: str, width: int = 0) -> None:
        """To the first columns of a buffer that is `width` wide, or wide enough; what follows them becomes zero."""
        tables, learned = self._weights.tables, spec.learned_positions
        positions = None if learned is None else self._keep(tables["positions"][learned.offset :])
        scale = torch.tensor(spec.embedding_scale, dtype=self._weights.dtype).item()
        out = self._buffer(name, max(width, spec.hidden_size))
        self._add(library.EMBED, CEmbedOp(tables["embedding"].data_ptr(), positions, spec.hidden_size, out, scale))

    def _layer(self, name: str, index: int, layer: Layer, *, gathers: bool) -> None:
        """`gathers`: what is computed behind its attention is asked for at the logits indices alone."""
        head = self._spec.draft_head
        if head is not None and head.kind is HeadKind.EAGLE3:
            source = "inputs"
        else:
            source = self._norm(f"{name}attention_norm", layer.attention_norm, "residual", "normed")
        if layer.parallel and layer.mlp_norm is not None:
            mlp_source = self._norm(f"{name}mlp_norm", layer.mlp_norm, "residual", "mlp_normed")
        else:
            mlp_source = source
        attention, mlp = layer.attention, layer.mlp
        if isinstance(attention, Attention):
            self._attention(name, index, attention, source)
        else:
            self._latent_attention(name, index, attention, source)
        if gathers:
            for buffer in dict.fromkeys(("residual", "attended", *((mlp_source,) if layer.parallel else ()))):
                self._gather(buffer)
        attended = "attended"
        if isinstance(attention, LatentAttention):
            attended = self._heads(f"{name}value_up", attention.num_heads, 0, "attended", "values")
        if layer.parallel and isinstance(mlp, Mlp):
            self._mlp(name, mlp, mlp_source)
        self._branch(f"{name}output", attended, f"{name}post_attention_norm", layer.post_attention_norm, layer.residual_multiplier)
        if not layer.parallel:
            mlp_source = self._norm(f"{name}mlp_norm", layer.mlp_norm, "residual", "normed")
        if isinstance(mlp, Experts):
            self._experts(name, mlp, mlp_source, layer)
            return
        if not layer.parallel:
            self._mlp(name, mlp, mlp_source)
        self._branch(f"{name}down", "gated", f"{name}post_mlp_norm", layer.post_mlp_norm, layer.residual_multiplier)

    def _attention(self, name: str, index: int, attention: Attention, source: str) -> None:
        """From `source` to `attended`."""
        heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self._linear(f"{name}qkv", source, "qkv", (heads + 2 * kv_heads) * dim)
        norms, stride = [CNorm(), CNorm()], 0
        qk_norm = attention.qk_norm
        if qk_norm is not None and qk_norm.whole:
            for which, first, width in (("q_norm", 0, heads * dim), ("k_norm", heads * dim, kv_heads * dim)):
                self._norm(f"{name}{which}", qk_norm.norm, "qkv", "qkv", first=first, width=width)
        elif qk_norm is not None:
            norms = [self._head_norm(f"{name}{which}", qk_norm, dim) for which in ("q_norm", "k_norm")]
            stride = stored_dim(dim) if qk_norm.head_weights else 0
        rope = attention.rope
        qkv = self._buffers["qkv"]
        op = CAttentionOp(
            None if rope is None else self._tables[rope].data_ptr(),
            self._weights.vectors[f"{name}sinks"].data_ptr() if attention.sinks else None,
            *(*norms, stride, *self._places[index], heads, kv_heads, dim, dim),
            *(0 if rope is None else 2 * len(rope.frequencies), attention.window or 0),
            *(heads * dim, (heads + kv_heads) * dim, attention.scale, attention.soft_cap),
            *(qkv, qkv, qkv, self._buffer("attended", heads * dim)),
        )
        self._add(library.ROTATE, op)
        self._add(library.ATTEND, op)

    def _latent_attention(self, name: str, index: int, attention: LatentAttention, source: str) -> None:
        """From `source` to `attended`, in the space of the latents. Keys and values are the same row of `latent`."""
        heads, rope_dim, rank, key_dim = attention.num_heads, attention.rope_dim, attention.kv_lora_rank, attention.key_dim
        q_rank = attention.q_lora_rank
        if q_rank is not None:
            self._linear(f"{name}q_down", source, "q_latent", q_rank)
        self._linear(f"{name}kv_down", source, "latent", key_dim)
        self._norm(f"{name}kv_down_norm", attention.norm, "latent", "latent", first=rope_dim, width=rank)
        q, q_source = "q", source
        if q_rank is not None:
            q, q_source = "q_up", self._norm(f"{name}q_down_norm", attention.norm, "q_latent", "q_latent", width=q_rank)
        self._linear(f"{name}{q}", q_source, "heads", heads * (rope_dim + attention.nope_dim))
        self._heads(f"{name}key_up", heads, rope_dim, "heads", "query")
        latent = self._buffers["latent"]
        op = CAttentionOp(
            self._tables[attention.rope].data_ptr(),
            self._weights.vectors[f"{name}sinks"].data_ptr() if attention.sinks else None,
            *(CNorm(), CNorm(), 0, *self._places[index], heads, 1, key_dim, rank, rope_dim, attention.window or 0),
            *(0, rope_dim, attention.scale, attention.soft_cap),
            *(self._buffers["query"], latent, latent, self._buffer("attended", heads * rank)),
        )
        self._add(library.ROTATE, op)
        self._add(library.ATTEND, op)

    def _heads(self, name: str, num_heads: int, copied: int, source: str, out: str) -> str:
        """Multiplies what follows the first `copied` elements of each head. Returns `out`."""
        weights = self._weights.grouped[name]
        first = weights.linears[0]
        widths = copied + first.in_features, copied + first.out_features
        into = self._buffer(out, num_heads * widths[1])
        op = CHeadsOp(ctypes.addressof(weights.c), num_heads, copied, copied, widths[0], copied, widths[1], self._buffers[source], into)
        self._add(library.HEADS, op)
        return out

    def _experts(self, name: str, experts: Experts, source: str, layer: Layer) -> None:
        """From `source` to the residual."""
        weights, norm = self._weights, layer.post_mlp_norm
        correction = weights.vectors[f"{name}router_correction"].data_ptr() if experts.correction else None
        matrices = [weights.grouped[f"{name}experts.{which}"] for which in ("gate_up", "down")]
        addresses = [ctypes.addressof(each.c) for each in matrices]
        if experts.shared is not None:
            addresses += [ctypes.addressof(weights.linears[f"{name}shared.{which}"].c) for which in ("gate_up", "down")]
        out = self._buffer("residual" if norm is None else "branch", self._spec.hidden_size)
        op = CExpertsOp(
            *(ctypes.addressof(weights.linears[f"{name}router"].c), correction, *addresses, *([None] * (4 - len(addresses)))),
            *(experts.num_experts, experts.top_k, experts.num_groups, experts.top_groups, experts.group_top, experts.scaling),
            *(_SCORINGS[experts.scoring], experts.normalize, experts.shared_gate, self._buffers[source], out),
            *(library.ADD if norm is None else library.STORE, _ACTIVATIONS[experts.expert.activation], layer.residual_multiplier),
            *(None if each.orders is None else each.orders.data_ptr() for each in matrices),
        )
        self._add(library.EXPERTS, op)
        if norm is not None:
            self._norm(f"{name}post_mlp_norm", norm, "branch", "residual", adds=True, multiplier=layer.residual_multiplier)

    def _mlp(self, name: str, mlp: Mlp, source: str) -> None:
        """From `source` to `gated`."""
        epilogue = library.GATED if mlp.gated else library.ACTIVATE
        weight = f"{name}gate_up" if mlp.gated else f"{name}up"
        self._linear(weight, source, "gated", mlp.intermediate_size, epilogue, activation=_ACTIVATIONS[mlp.activation])

    def _branch(self, name: str, source: str, norm_name: str, norm: Norm | None, multiplier: float) -> None:
        """Adds the last product of a block, normed if there is a norm, to the residual."""
        if norm is None:
            self._linear(name, source, "residual", self._spec.hidden_size, library.ADD, multiplier=multiplier)
        else:
            self._linear(name, source, "branch", self._spec.hidden_size)
            self._norm(norm_name, norm, "branch", "residual", adds=True, multiplier=multiplier)

    def _norm(
        self,
        name: str,
        norm: Norm | None,
        source: str,
        out: str,
        *,
        first: int = 0,
        width: int | None = None,
        factor: float = 1.0,
        adds: bool = False,
        multiplier: float = 1.0,
    ) -> str:
        """Writes `factor` times the norm of `width` columns (None: of hidden_size) to `out`. Returns where the normed rows are: in `source`
        if there is no norm."""
        if norm is None:
            return source
        size = self._spec.hidden_size if width is None else width
        c_norm = self._c_norm(name, norm, size, factor=factor)
        into = self._buffers[out] if out == source else self._buffer(out, size)
        self._add(library.NORM, CNormOp(c_norm, None, first, self._buffers[source], into, adds, multiplier))
        return out

    def _linear(
        self,
        name: str,
        source: str,
        out: str,
        width: int,
        epilogue: int = library.STORE,
        *,
        activation: int = library.SILU,
        multiplier: float = 1.0,
        weights: PackedWeights | None = None,
    ) -> None:
        """`weights`: None: the model's."""
        weight = ctypes.pointer((weights or self._weights).linears[name].c)
        self._add(library.LINEAR, CLinearOp(weight, self._buffers[source], self._buffer(out, width), epilogue, activation, multiplier))

    def _head_norm(self, name: str, qk_norm: QkNorm, dim: int) -> CNorm:
        return self._c_norm(name, qk_norm.norm, dim, rows=-1 if qk_norm.head_weights else 1)

    def _c_norm(self, name: str, norm: Norm, size: int, *, factor: float = 1.0, rows: int = 1) -> CNorm:
        """A norm of `size` elements, whose weights are multiplied by a factor; they are `rows` of that size (-1: as many as there are)."""
        weight, bias = self._weights.vectors[f"{name}.weight"], self._weights.vectors.get(f"{name}.bias")
        weights = [(weight + 1.0 if norm.unit_offset else weight) * factor, None if bias is None else bias * factor]
        pointers = [None if one is None else self._keep(norm_weight(one.view(rows, size))) for one in weights]
        return CNorm(*pointers, size, norm.eps, _NORM_KINDS[norm.kind])

    def _gather(self, name: str) -> None:
        """From here on `name` is a buffer that has the rows of the old one at the logits indices."""
        old = self._buffers.pop(name)
        new = self._buffer(name, self._strides[old])
        self._add(library.GATHER, CGatherOp(old, new))

    def _buffer(self, name: str, width: int) -> int:
        """The number of a buffer of activations whose rows have `width` elements at least."""
        if name not in self._buffers:
            assert len(self._strides) < MAX_BUFFERS
            self._buffers[name] = len(self._strides)
            self._strides.append(0)
        buffer = self._buffers[name]
        self._strides[buffer] = max(self._strides[buffer], -(-width // PANEL) * PANEL)
        return buffer

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor, which lives as long as the program."""
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _add(self, kind: int, item: Structure) -> None:
        """Norms that follow each other are one pass over the rows."""
        if isinstance(item, CNormOp) and self._ops and isinstance(self._ops[-1][1], CNormOp):
            self._norms[-1].next = ctypes.addressof(item)
        else:
            self._ops.append((kind, item))
        if isinstance(item, CNormOp):
            self._norms.append(item)
