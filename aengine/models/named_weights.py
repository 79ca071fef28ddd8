"""The named weights of a `ModelSpec`: every parameter, its shape, and the checkpoint tensors it is made of.

Owns our names and the shapes; those of the checkpoint are the family's. The loader and both decoders read them from here.
"""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.kernels.quantized import Rows
from aengine.models.families import FAMILIES
from aengine.models.families.family import Family, Transform
from aengine.models.spec import (
    Attention,
    Experts,
    HeadKind,
    LatentAttention,
    Layer,
    Mlp,
    ModelSpec,
    Norm,
    QkNorm,
    Recurrence,
    RecurrenceKind,
    ShortConvolution,
    Streams,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor that becomes consecutive rows of a parameter whose dimensions but the last are merged."""

    source: str
    shape: tuple[int, ...]  # in the checkpoint
    num_rows: int  # of the parameter
    transform: Transform | None = None  # makes the rows; None: the tensor is the rows

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """[..., out_features, in_features] of the checkpoint's matrix or matrices, however they are stored."""
        if self.transform is None or not self.transform.transposed:
            return self.shape
        return *self.shape[:-2], self.shape[-1], self.shape[-2]

    def rows(self, stored: Rows) -> Rows:
        """The rows of the parameter, of the tensor or of what a quantised one holds; float32 if a transform needs the numbers of these."""
        if self.transform is None:
            return stored
        if isinstance(stored, np.ndarray):
            return np.ascontiguousarray(self.transform.apply(stored))
        if not self.transform.by_rows:
            return np.ascontiguousarray(self.transform.apply(stored.dequantized()))
        order = self.row_order()
        assert order is not None
        return stored[order]

    def row_order(self) -> NDArray[np.int64] | None:
        """[num_rows]: the row of the checkpoint's matrix that each row of the parameter is, if that is what `transform` does; None: the
        same one."""
        if self.transform is None:
            return None
        numbers = np.arange(math.prod(self.matrix_shape[:-1])).reshape(*self.matrix_shape[:-1], 1)
        if self.transform.transposed:
            numbers = numbers.swapaxes(-1, -2)
        return self.transform.apply(numbers).ravel()


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """One parameter: its rows are those of its parts, one part after another."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    fill: float | None  # the value of all elements in a random model; None: normal with the spec's initializer_range
    float32: bool = False  # kept in float32 whatever the dtype of the model is


def named_weights(spec: ModelSpec) -> dict[str, NamedWeight]:
    """Parameter name -> `NamedWeight`, in the order of execution. There is no `head.weight` if the head is tied to the embedding.

    A linear layer is [out_features, in_features]. Experts are [num_experts, out_features, in_features], their biases
    [num_experts, out_features]; `gate_up` has the rows of the gate, then those of up. A `LatentAttention` projects its queries with `q`, or
    with `q_down` and `q_up` if it has a q_lora_rank; they have the rotated part of each head first, as `kv_down` has the rotated key first.
    `key_up` is [heads, kv_lora_rank, nope_dim], `value_up` [heads, v_dim, kv_lora_rank]. The rows of `conv_in` are those of b, c and x of a
    `ShortConvolution`; `conv` is [channels, taps].
    `layer_embedding` [vocab_size, layers of width] and `layer_inputs` [layers of width, hidden_size] have what is one layer's together.
    `streams_in` and `streams_out` are [streams - 1, hidden_size, hidden_size]. A layer's qkv has the rows of keys and values that it has of
    its own.

    A draft head has no embedding and no head if these are its target's. `fuse` is [hidden_size, taps of target_size], `combine`
    [hidden_size, 2 * hidden_size], as are the columns of qkv of EAGLE3: those of the embedding come first.
    """
    found = _Parameters(spec)
    hidden, inputs = spec.hidden_size, spec.hidden_size
    draft_head, num_head_rows = spec.draft_head, 0 if spec.tied_head else spec.vocab_size
    if draft_head is None or draft_head.own_embedding:
        found.linear("embedding", (spec.vocab_size,), hidden)
    if draft_head is not None:
        num_head_rows = (draft_head.num_draft_ids or spec.vocab_size) if draft_head.own_head else 0
        found.norm("embedding_norm", draft_head.norm, hidden)
        found.norm("hidden_norm", draft_head.norm, hidden)
        if draft_head.kind is HeadKind.EAGLE3:
            inputs = 2 * hidden
            found.linear("fuse", (hidden,), len(draft_head.taps) * draft_head.target_size)
        else:
            found.linear("combine", (hidden,), 2 * hidden)
    if spec.learned_positions is not None:
        found.linear("positions", (spec.learned_positions.count + spec.learned_positions.offset,), hidden)
    found.norm("embedding_norm", spec.embedding_norm, hidden)
    if spec.layer_inputs is not None:
        width = spec.layer_inputs.width
        found.linear("layer_embedding", (spec.layer_inputs.vocab_size,), spec.num_layers * width)
        found.linear("layer_inputs", (spec.num_layers * width,), hidden)
        found.norm("layer_inputs_norm", spec.layer_inputs.norm, width)
    if spec.streams is not None:
        for name in ("streams_in", "streams_out"):
            found.add(f"{name}.weight", (spec.streams.count - 1, hidden, hidden), (hidden,) * (spec.streams.count - 1), None)
    for index, layer in enumerate(spec.layers):
        found.enter(index, layer)
        if spec.streams is not None:
            _streams(found, spec.streams, hidden)
        found.norm("attention_norm", layer.attention_norm, hidden)
        if isinstance(layer.attention, Attention):
            _attention(found, layer.attention, inputs, hidden)
        elif isinstance(layer.attention, ShortConvolution):
            _convolution(found, layer.attention, hidden)
        elif layer.attention is not None:
            _latent_attention(found, layer.attention, hidden)
        if layer.recurrence is not None:
            _recurrence(found, layer.recurrence, hidden)
        found.norm("post_attention_norm", layer.post_attention_norm, hidden)
        found.norm("mlp_norm", layer.mlp_norm, hidden)
        if isinstance(layer.mlp, Mlp):
            _mlp(found, "", layer.mlp, hidden)
        elif layer.mlp is not None:
            _experts(found, layer.mlp, hidden)
        found.norm("post_mlp_norm", layer.post_mlp_norm, hidden)
        if layer.input_gate is not None:
            assert spec.layer_inputs is not None
            found.linear("input_gate", (spec.layer_inputs.width,), hidden)
            found.linear("input_out", (hidden,), spec.layer_inputs.width)
            found.norm("input_norm", layer.input_gate.norm, hidden)
        if layer.scaled:
            found.add("scale", (1,), (1,), 1.0, float32=True)
    found.leave()
    found.norm("norm", spec.norm, hidden)
    if num_head_rows:
        found.linear("head", (num_head_rows,), hidden)
    if spec.head_bias:
        found.add("head.bias", (spec.vocab_size,), (spec.vocab_size,), 0.0)
    return found.weights


def _streams(found: _Parameters, streams: Streams, hidden: int) -> None:
    found.norm("streams_norm", streams.norm, hidden)
    found.linear("streams_router", (streams.count,), hidden)
    found.linear("streams_predict", (streams.count**2,), streams.count)
    found.linear("streams_correct", (streams.count,), streams.count)
    found.add("streams_scale", (hidden,), (hidden,), 1.0)
    found.linear("laurel_down", (streams.laurel_rank,), hidden)
    found.linear("laurel_up", (hidden,), streams.laurel_rank)
    found.norm("laurel_norm", streams.norm, hidden)


def _attention(found: _Parameters, attention: Attention, inputs: int, hidden: int) -> None:
    kv_heads, dim, attended = attention.num_kv_heads, attention.head_dim, attention.num_heads * attention.value_dim
    has_kv, q_size = not attention.kv_distance, attention.num_heads * dim
    sizes = (q_size, *(kv_heads * each for each in attention.kv_widths), *((q_size,) if attention.output_gate else ()))
    found.linear("qkv", sizes, inputs, bias=attention.qkv_bias)
    found.qk_norm("q_norm", attention.qk_norm, attention.num_heads, dim)
    if has_kv:
        found.qk_norm("k_norm", attention.qk_norm, kv_heads, dim)
    if attention.sinks:
        found.add("sinks", (attention.num_heads,), (attention.num_heads,), None)
    found.linear("output", (hidden,), attended, bias=attention.output_bias)


def _latent_attention(found: _Parameters, attention: LatentAttention, hidden: int) -> None:
    heads, rank = attention.num_heads, attention.kv_lora_rank
    q_size = heads * (attention.rope_dim + attention.nope_dim)
    if attention.q_lora_rank is None:
        found.linear("q", (q_size,), hidden)
    else:
        found.linear("q_down", (attention.q_lora_rank,), hidden, bias=attention.bias)
        found.norm("q_down_norm", attention.norm, attention.q_lora_rank)
        found.linear("q_up", (q_size,), attention.q_lora_rank)
    index = attention.index
    if index is not None and attention.q_lora_rank is not None:
        found.linear("index_q", (index.num_heads * index.head_dim,), attention.q_lora_rank)
        found.linear("index_k", (index.head_dim,), hidden)
        found.norm("index_k_norm", index.norm, index.head_dim)
        found.linear("index_weights", (index.num_heads,), hidden)
    found.linear("kv_down", (attention.rope_dim + rank,), hidden, bias=attention.bias)
    found.norm("kv_down_norm", attention.norm, rank)
    found.add("key_up.weight", (heads, rank, attention.nope_dim), (heads * rank,), None)
    found.add("value_up.weight", (heads, attention.v_dim, rank), (heads * attention.v_dim,), None)
    found.linear("output", (hidden,), heads * attention.v_dim, bias=attention.bias)


def _convolution(found: _Parameters, convolution: ShortConvolution, hidden: int) -> None:
    channels, bias = convolution.channels, convolution.bias
    found.linear("conv_in", (channels,) * 3, hidden, bias=bias)
    found.linear("conv", (channels,), convolution.taps, bias=bias)
    found.linear("conv_out", (hidden,), channels, bias=bias)


def _recurrence(found: _Parameters, recurrence: Recurrence, hidden: int) -> None:
    heads, channels, width, bias = recurrence.num_heads, recurrence.channels, recurrence.width, recurrence.bias
    keys, rank, kind = recurrence.num_key_heads * recurrence.key_dim, recurrence.gate_rank, recurrence.kind
    conv_rows: tuple[int, ...] = (channels,)
    if kind is RecurrenceKind.KIMI_DELTA:
        conv_rows = (keys, keys, width)
        found.linear("recur_in", conv_rows, hidden, bias=bias)
    else:
        found.linear("recur_in", (channels, width), hidden, bias=bias)
    steps = heads
    match kind:
        case RecurrenceKind.GATED_DELTA:
            found.linear("recur_gates", (heads, heads), hidden, bias=bias)
        case RecurrenceKind.MAMBA2:
            found.linear("recur_gates", (heads,), hidden, bias=bias)
        case RecurrenceKind.KIMI_DELTA:
            assert rank is not None
            steps = heads * recurrence.key_dim
            found.linear("recur_gates", (heads,), hidden, bias=bias)
            for name, size in (("decay", steps), ("z", width)):
                found.linear(f"{name}_down", (rank,), hidden)
                found.linear(f"{name}_up", (size,), rank)
        case RecurrenceKind.MAMBA1:
            assert rank is not None
            steps = width
            found.linear("recur_gates", (keys, keys), width)
            found.linear("decay_down", (rank,), width)
            for name, size in (("gate_q_norm", keys), ("gate_k_norm", keys), ("decay_norm", rank)):
                found.norm(name, recurrence.gate_norm, size)
            found.linear("decay_up", (width,), rank)
        case RecurrenceKind.LIGHTNING:
            steps = 0
    if recurrence.taps > 1:
        found.add("conv.weight", (channels, recurrence.taps), conv_rows, None, float32=True)
    if recurrence.conv_bias:
        found.add("conv.bias", (channels,), conv_rows, 0.0, float32=True)
    if steps:
        decays = (width, recurrence.key_dim) if kind is RecurrenceKind.MAMBA1 else (heads,)
        found.add("log_decay", decays, decays[:1], 0.0, float32=True)
        found.add("step_bias", (steps,), (steps,), 1.0, float32=True)
    if kind in (RecurrenceKind.MAMBA1, RecurrenceKind.MAMBA2):
        skips = width if kind is RecurrenceKind.MAMBA1 else heads
        found.add("skip", (skips,), (skips,), 1.0, float32=True)
    found.norm("recur_norm", recurrence.norm, recurrence.value_dim if recurrence.norm_groups is None else width)
    found.linear("recur_out", (hidden,), width, bias=bias)


def _mlp(found: _Parameters, prefix: str, mlp: Mlp, hidden: int) -> None:
    size = mlp.intermediate_size
    if mlp.gated:
        found.linear(f"{prefix}gate_up", (size, size), hidden, bias=mlp.up_bias)
    else:
        found.linear(f"{prefix}up", (size,), hidden, bias=mlp.up_bias)
    found.linear(f"{prefix}down", (hidden,), size, bias=mlp.down_bias)


def _experts(found: _Parameters, experts: Experts, hidden: int) -> None:
    count, size = experts.num_experts, experts.expert.intermediate_size
    for name in ("shared_norm", "shared_out_norm", "router_norm", "experts_norm", "experts_out_norm"):
        found.norm(name, experts.branch_norm, hidden)
    if experts.branch_norm is not None:
        found.add("expert_scale", (count,), (count,), 1.0, float32=True)
    found.linear("router", (count,), hidden, bias=experts.router_bias)
    if experts.correction:
        found.add("router_correction", (count,), (count,), 0.0, float32=True)
    first, each = ("gate_up", 2) if experts.expert.gated else ("up", 1)
    found.add(f"experts.{first}.weight", (count, each * size, hidden), (size,) * (each * count), None)
    if experts.expert.up_bias:
        found.add(f"experts.{first}.bias", (count, each * size), (size,) * (each * count), 0.0)
    found.add("experts.down.weight", (count, hidden, size), (hidden,) * count, None)
    if experts.expert.down_bias:
        found.add("experts.down.bias", (count, hidden), (hidden,) * count, 0.0)
    if experts.shared is not None:
        _mlp(found, "shared.", experts.shared, hidden)
    if experts.shared_gate:
        found.linear("shared_gate", (1,), hidden)


class _Parameters:
    """Collects the parameters of a model, with the parts that its family makes them of."""

    def __init__(self, spec: ModelSpec) -> None:
        self.weights: dict[str, NamedWeight] = {}
        self._spec = spec
        self._family: Family = FAMILIES[spec.family]
        self._names = self._family.names
        head = spec.draft_head
        if head is not None and head.kind is HeadKind.MTP:
            mtp_names = self._family.mtp_names
            self._names = {**self._names, **{ours: theirs.format(layer=head.target_layers) for ours, theirs in mtp_names.items()}}
        self.leave()

    def enter(self, index: int, layer: Layer) -> None:
        """What is added from here on belongs to a layer."""
        self._layer: Layer | None = layer
        self._layer_names = self._family.layer_names(layer)
        self._ours, self._theirs = f"layers.{index}.", self._names["layer"].format(layer=index) + "."

    def leave(self) -> None:
        self._layer, self._layer_names = None, {}
        self._ours = self._theirs = ""

    def norm(self, name: str, norm: Norm | None, size: int) -> None:
        if norm is not None and norm.weighted:
            self.add(f"{name}.weight", (size,), (size,), 0.0 if norm.unit_offset else 1.0)
            if norm.bias:
                self.add(f"{name}.bias", (size,), (size,), 0.0)

    def qk_norm(self, name: str, qk_norm: QkNorm | None, num_heads: int, head_dim: int) -> None:
        if qk_norm is not None and qk_norm.head_weights:
            self.add(f"{name}.weight", (num_heads * head_dim,), (head_dim,) * num_heads, 1.0)
        elif qk_norm is not None:
            self.norm(name, qk_norm.norm, num_heads * head_dim if qk_norm.whole else head_dim)

    def linear(self, name: str, rows: tuple[int, ...], columns: int, *, bias: bool = False) -> None:
        self.add(f"{name}.weight", (sum(rows), columns), rows, None)
        if bias:
            self.add(f"{name}.bias", (sum(rows),), rows, 0.0)

    def add(self, name: str, shape: tuple[int, ...], rows: tuple[int, ...], fill: float | None, *, float32: bool = False) -> None:
        """`rows`: the largest cut of the parameter's rows that a family's tensors have; fewer tensors have consecutive ones."""
        is_matrix = len(shape) > 1 and not name.endswith(".bias")
        sources = self._sources(name, len(rows))
        if len(sources) == 1:
            rows = (sum(rows),)
        parts = []
        for part, (source, count) in enumerate(zip(sources, rows, strict=True)):
            wanted = (count, shape[-1]) if is_matrix else (count,)
            transform = self._family.transform(self._spec, self._layer, name, part, wanted)
            if transform is None:
                parts.append(Part(self._theirs + source, wanted, count))
            else:
                parts.append(Part(self._theirs + source, transform.shape, count, transform))
        self.weights[self._ours + name] = NamedWeight(shape, tuple(parts), fill, float32)

    def _sources(self, name: str, count: int) -> list[str]:
        """The checkpoint's names of the tensors of a parameter with `count` cuts, without that of the layer."""
        names = self._layer_names if name.rpartition(".")[0] in self._layer_names else self._names
        if name in names:
            templates, ending = names[name].split(), ""
        else:
            stem, _, kind = name.rpartition(".")
            templates, ending = names[stem].split(), f".{kind}"
        if "{index}" not in templates[0]:
            return [template + ending for template in templates]
        return [template.format(index=index) + ending for index in range(count // len(templates)) for template in templates]


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


NEVER_QUANTIZED = frozenset(
    {
        *("positions", "layer_embedding", "router", "shared_gate", "key_up", "value_up", "conv", "recur_gates", "decay_down", "decay_up"),
        *("streams_in", "streams_out", "streams_router", "streams_predict", "streams_correct"),
    }
)
"""Matrices that are read row by row, decide which weights are read, or multiply heads or streams, which would be quantised together; and
those of convolutions and of decays, which are few."""


def num_parameters(spec: ModelSpec) -> int:
    return sum(math.prod(weight.shape) for weight in named_weights(spec).values())


def experts_of(spec: ModelSpec, name: str) -> Experts | None:
    """The experts whose weights a parameter holds, of which a token uses `top_k`; None: it is no parameter of experts."""
    if ".experts." not in name:
        return None
    mlp = spec.layers[int(name.split(".")[1])].mlp
    assert isinstance(mlp, Experts)
    return mlp


def num_active_parameters(spec: ModelSpec) -> int:
    """Count the parameters that one token uses: of a layer's experts, the `top_k`."""
    total = 0
    for name, weight in named_weights(spec).items():
        size = math.prod(weight.shape)
        if (experts := experts_of(spec, name)) is not None:
            size = size * experts.routing.top_k // experts.num_experts
        total += size
    return total
