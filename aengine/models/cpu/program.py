"""The operations of a model for the CPU kernels: what `models/torch/decoder.py` computes, written down once as the structs of
`kernels/cpu/src/abi.h`.

Owns the order of the operations, the buffers between them, and which part of the weights each one reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int64
from dataclasses import replace
from functools import partial

import numpy as np

from aengine.cache import LayerGroups
from aengine.kernels.cpu import library
from aengine.kernels.cpu.library import (
    ELEMENTS,
    CAddImagesOp,
    CAttentionOp,
    CConvolveOp,
    CConvolvePart,
    CEmbedOp,
    CExpertsOp,
    CGateOp,
    CHeadKind,
    CKeptOp,
    CModel,
    CNorm,
    COp,
    stored_dim,
)
from aengine.kernels.cpu.ops import head_kind, norm_weight
from aengine.kernels.paged_cache import StateLayout
from aengine.layers.rotary import AngleTables, query_scales
from aengine.models.cpu.cpu_operations import ACTIVATIONS, SCORINGS, Captured, RecurrentOperations
from aengine.models.cpu.packed_weights import PackedWeights
from aengine.models.sharding import (
    Bounds,
    attended_bounds,
    hidden_bounds,
    key_bounds,
    own,
    query_bounds,
    recurrence_bounds,
    width_bounds,
)
from aengine.models.spec import (
    Attention,
    DraftHead,
    Experts,
    HeadKind,
    InputGate,
    LatentAttention,
    Layer,
    LayerInputs,
    Mlp,
    ModelSpec,
    Norm,
    ShortConvolution,
)

_Product = Callable[[str, int], None]  # writes to a buffer, with an epilogue


class CpuProgram(RecurrentOperations):
    """The operations of a model as a `CModel`, with all that it points to; on one of several ranks, those of its part.

    Buffers have names while it is written: the `residual`, what a block reads (`normed`), `qkv`, what was `attended`, the `gated` inner
    activations of an MLP, the output of a block before its norm (`branch`), and the `hidden` states for the head. Latent attention has the
    `heads` of its queries, its `latent` keys and values, and the `query` heads that are as wide as these.

    Several ranks all have the whole residual. In exact mode each computes a `slice` of the columns of the residual or branch, from all
    columns of what was attended and gated; they are gathered. Otherwise each makes partial results from its own columns, which are summed.
    """

    def __init__(
        self,
        weights: PackedWeights,
        num_positions: int,
        groups: LayerGroups,
        states: StateLayout | None = None,
        read: DraftHead | None = None,
        reader: PackedWeights | None = None,
        captured: Captured | None = None,
        like: CpuProgram | None = None,
    ) -> None:
        """`groups` are those of the KV pages, and `states` where recurrent layers have theirs. `read`: the draft head whose target it is,
        and `reader` its weights, where it runs. `captured`: what steps bring beside. `like`: of the same model, whose tables it has."""
        super().__init__(weights, states, captured)
        spec, shard = weights.spec, weights.shard
        self._whole_layers = [weights.whole_spec.layers[index] for index in shard.layers(weights.whole_spec.num_layers)]
        if spec.learned_positions is not None:
            num_positions = min(num_positions, spec.learned_positions.count)
        self._places = [[groups.places[place] for place in places] for places in spec.places]  # by layer, in groups of pages
        self._parts = [groups.parts[places.start] if places else 0 for places in spec.places]  # by layer
        self._read, self._reader = read, reader
        self.angles: AngleTables = like.angles if like else AngleTables(spec.ropes, num_positions)
        self._query_scales = {scale: query_scales(scale, num_positions) for scale in spec.query_scales}
        self._kinds = list(dict.fromkeys(each.heads for each in spec.attentions))
        self._c_kinds = (CHeadKind * len(self._kinds))(*map(head_kind, self._kinds))
        self._write(spec)
        self._c_ops = (COp * len(self._ops))(*(COp(kind, ctypes.addressof(item)) for kind, item in self._ops))
        self._c_strides = (c_int64 * len(self._strides))(*self._strides)
        self.c = CModel(
            ops=self._c_ops,
            head=ctypes.pointer(weights.linears["head"].c) if "head" in weights.linears else None,
            strides=self._c_strides,
            head_kinds=self._c_kinds,
            num_ops=len(self._ops),
            num_buffers=len(self._strides),
            num_head_kinds=len(self._kinds),
            vocab=spec.vocab_size,
            num_positions=num_positions,
            logit_soft_cap=spec.logit_soft_cap,
            hidden=self._buffers["hidden"],
            element=ELEMENTS[weights.dtype],
        )

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
        read, is_last_stage = self._read, self._shard.is_last_stage
        taps = () if read is None or self._reader is None else read.taps
        if spec.draft_head is None:
            self._embed(spec, "residual")
            self._norm("embedding_norm", None if self._shard.stage else spec.embedding_norm, "residual", "residual")
            if spec.layer_inputs is not None:
                self._layer_inputs(spec, spec.layer_inputs)
        else:
            self._head_inputs(spec, spec.draft_head)
        num_additions = 0 if spec.images is None else spec.images.num_additions
        is_read = read is not None and not (read.kind is HeadKind.EAGLE3 and spec.num_layers not in read.taps)
        gathers = is_last_stage and num_additions < spec.num_layers and not is_read
        for index, layer in enumerate(spec.layers):
            self._tap(index, taps)
            self._layer(f"layers.{index}.", index, layer, gathers=gathers and index + 1 == spec.num_layers)
            if index < num_additions:
                self._add(library.ADD_IMAGES, CAddImagesOp(index, spec.hidden_size, self._buffers["residual"]))
        self._tap(spec.num_layers, taps)
        if spec.draft_head is not None and spec.draft_head.kind is HeadKind.EAGLE3:
            self._kept(library.WRITE_KEPT, "residual")
        if self._norm("norm", spec.norm, "residual", "hidden", factor=spec.logit_scale) != "hidden":
            self._buffers["hidden"] = self._buffers["residual"]
        keeping = spec.draft_head if self._reader is None else read
        if keeping is not None and keeping.kind is HeadKind.MTP:
            self._kept(library.WRITE_KEPT, "hidden")
        if is_last_stage and not gathers:
            self._gather("hidden")

    def _layer_inputs(self, spec: ModelSpec, inputs: LayerInputs) -> None:
        """The inputs of all layers, to `layer_inputs`. Both terms have their factor 2 ** -0.5, and that of what is normed is in epsilon."""
        width, columns = inputs.width, spec.num_layers * inputs.width
        table, scale = self._weights.tables["layer_embedding"], (width / 2) ** 0.5
        pad = None if spec.images is None else spec.images.layer_input_id
        self._add(
            library.EMBED,
            CEmbedOp(self._keep(table), None, columns, self._buffer("layer_inputs", columns), scale, -1 if pad is None else pad),
        )
        self._linear("layer_inputs", "residual", "layer_projected")
        norm = replace(inputs.norm, eps=inputs.norm.eps * spec.hidden_size)
        for layer in range(spec.num_layers):
            where = "layer_projected", "layer_inputs"
            self._norm("layer_inputs_norm", norm, *where, first=layer * width, width=width, adds=True, multiplier=2**-0.5)

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
            self._linear("combine", "inputs", "residual")
        elif head.normed_residual:
            self._copy("inputs", size, "residual", 0, size)

    def _tap(self, index: int, taps: tuple[int, ...]) -> None:
        """Keeps what the head reads of the residual before a layer; and what it makes of all taps, when there are all of them."""
        self._capture(index)
        size = self._spec.hidden_size
        for place in (place for place, tap in enumerate(taps) if tap == index):
            self._buffer("taps", len(taps) * size)
            self._copy("residual", 0, "taps", place * size, size)
        if taps and index == max(taps):
            assert self._reader is not None
            self._linear("fuse", "taps", "fused", weights=self._reader)
            self._kept(library.WRITE_KEPT, "fused")

    def _kept(self, kind: int, rows: str, first: int = 0) -> None:
        width = self.kept_width
        self._add(kind, CKeptOp(first, width, self._buffer(rows, first + width)))

    def _embed(self, spec: ModelSpec, name: str, width: int = 0) -> None:
        """To the first columns of a buffer that is `width` wide, or wide enough; what follows them becomes zero."""
        tables, learned = self._weights.tables, spec.learned_positions
        if self._shard.stage:
            self._add(library.EMBED, CEmbedOp(None, None, spec.hidden_size, self._buffer(name, spec.hidden_size), 1.0, -1))
            return
        positions = None if learned is None else self._keep(tables["positions"][learned.offset :])
        scale = float(np.array(spec.embedding_scale).astype(self._weights.dtype))
        out = self._buffer(name, max(width, spec.hidden_size))
        self._add(library.EMBED, CEmbedOp(self._keep(tables["embedding"]), positions, spec.hidden_size, out, scale, -1))

    def _layer(self, name: str, index: int, layer: Layer, *, gathers: bool) -> None:
        """`gathers`: what is computed behind its attention is asked for at the logits indices alone."""
        head = self._spec.draft_head
        if head is not None and head.kind is HeadKind.EAGLE3:
            source = "inputs"
        else:
            source = self._norm_first(f"{name}attention_norm", layer, layer.attention_norm, 0)
        if layer.parallel and layer.mlp_norm is not None:
            mlp_source = self._norm(f"{name}mlp_norm", layer.mlp_norm, "residual", "mlp_normed")
        else:
            mlp_source = source
        attention, recurrence, whole = layer.attention, layer.recurrence, self._whole_layers[index]
        mixed = []
        if attention is not None:
            self._attend(name, index, attention, source)
            mixed.append("attended")
        if recurrence is not None:
            assert whole.recurrence is not None
            self._recur(name, recurrence, whole.recurrence, source)
            mixed.append("recurred")
        if gathers:
            inputs = ("layer_inputs",) if layer.input_gate is not None else ()
            for buffer in dict.fromkeys(("residual", *mixed, *((mlp_source,) if layer.parallel else ()), *inputs)):
                self._gather(buffer)
        multiplier, outputs = layer.residual_multiplier, []
        if attention is not None:
            assert whole.attention is not None
            attended = "attended"
            if isinstance(attention, LatentAttention):
                attended = self._heads(f"{name}value_up", attention.num_heads, 0, "attended", "values")
            attended = self._all_columns(attended, attended_bounds(whole.attention, self._shard))
            last = "conv_out" if isinstance(attention, ShortConvolution) else "output"
            outputs.append(self._product(f"{name}{last}", attended, multiplier))
        if whole.recurrence is not None:
            recurred = self._all_columns("recurred", recurrence_bounds(whole.recurrence, self._shard))
            outputs.append(self._product(f"{name}recur_out", recurred, multiplier))
        if layer.parallel and layer.mlp is not None:
            down = self._mlp(name, layer.mlp, whole.mlp, mlp_source, multiplier)
            self._add_branch([*outputs, *down], "", None, multiplier)
            return
        if outputs:
            self._add_branch(outputs, f"{name}post_attention_norm", layer.post_attention_norm, multiplier)
        scale = self._weights.vectors[f"{name}scale"].item() if layer.scaled else 1.0
        if layer.mlp is not None:
            mlp_source = self._norm_first(f"{name}mlp_norm", layer, layer.mlp_norm, 1)
            down = self._mlp(name, layer.mlp, whole.mlp, mlp_source, multiplier)
            mlp_scale = 1.0 if layer.input_gate is not None else scale
            self._add_branch(down, f"{name}post_mlp_norm", layer.post_mlp_norm, multiplier, mlp_scale)
        if layer.input_gate is not None:
            self._input_gate(name, index, layer.input_gate, scale)

    def _input_gate(self, name: str, index: int, gate: InputGate, scale: float) -> None:
        """Adds what a layer makes of its own input to the residual, which is multiplied by `scale`."""
        assert self._spec.layer_inputs is not None
        width = self._spec.layer_inputs.width
        self._copy("layer_inputs", index * width, "layer_input", 0, width)
        self._linear(f"{name}input_gate", "residual", "layer_input", library.MULTIPLY, activation=ACTIVATIONS[gate.activation])
        self._linear(f"{name}input_out", "layer_input", "branch")
        self._norm(f"{name}input_norm", gate.norm, "branch", "residual", adds=True, scale=scale)

    def _norm_first(self, name: str, layer: Layer, norm: Norm | None, block: int) -> str:
        """Where the normed input of a block is."""
        source = self._norm(name, norm, "residual", "normed")
        if layer.normed_residuals is not None:
            self._norm(name, norm, "residual", "residual", factor=layer.normed_residuals[block])
        return source

    def _attend(self, name: str, index: int, attention: Attention | LatentAttention | ShortConvolution, source: str) -> None:
        """From `source` to `attended`."""
        if isinstance(attention, Attention):
            self._attention(name, index, attention, source)
        elif isinstance(attention, ShortConvolution):
            self._convolution(name, index, attention, source)
        else:
            self._latent_attention(name, index, attention, source)

    def _attention(self, name: str, index: int, attention: Attention, source: str) -> None:
        """From `source` to `attended`."""
        heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self._linear(f"{name}qkv", source, "qkv")
        norms, stride, has_kv, value_dim = [CNorm(), CNorm()], 0, not attention.kv_distance, attention.value_dim
        qk_norm, query, key, key_first = attention.qk_norm, "qkv", "qkv", heads * dim
        if qk_norm is not None and qk_norm.whole and self._shard.size > 1:
            query, key, key_first = self._norm_all_heads(name, index, qk_norm.norm, heads * dim)
        elif qk_norm is not None and qk_norm.whole:
            for which, first, width in (("q_norm", 0, heads * dim), ("k_norm", heads * dim, kv_heads * dim)):
                self._norm(f"{name}{which}", qk_norm.norm, "qkv", "qkv", first=first, width=width)
        elif qk_norm is not None:
            norms = [self._head_norm(f"{name}{which}", qk_norm, dim) for which in ("q_norm", "k_norm" if has_kv else "q_norm")]
            stride = stored_dim(dim) if qk_norm.head_weights else 0
        rope = attention.rope
        if attention.value_eps is None:
            norms.append(CNorm())
        else:
            ones = self._keep(norm_weight(np.ones((1, value_dim), np.float32)))
            norms.append(CNorm(ones, None, value_dim, attention.value_eps, library.RMS_NORM))
        value_first = (heads + (not attention.keys_as_values) * kv_heads) * dim
        op = CAttentionOp(
            None if rope is None else self._keep(self.angles.tables[rope]),
            self._vector(f"{name}sinks") if attention.sinks else None,
            None if attention.query_scale is None else self._keep(self._query_scales[attention.query_scale]),
            self._keep(np.array(attention.slopes, np.float32)) if attention.slopes else None,
            *(*norms, stride, *self._places[index][0], self._parts[index], heads, kv_heads, dim, value_dim),
            *(0 if rope is None else 2 * len(rope.frequencies), attention.window or 0, attention.chunked, attention.within_images),
            *(key_first, value_first, attention.scale, attention.soft_cap, self._kinds.index(attention.heads)),
            *(self._buffers[query], self._buffers[key] if has_kv else -1, self._buffers["qkv"]),
            self._buffer("attended", heads * value_dim),
        )
        self._add(library.ROTATE, op)
        self._add(library.ATTEND, op)
        if attention.output_gate:
            gate = 1, heads * dim, heads * dim + kv_heads * sum(attention.kv_widths), self._buffers["qkv"]
            self._add(library.GATE, CGateOp(CNorm(), *gate, self._buffers["attended"], True))

    def _convolution(self, name: str, index: int, convolution: ShortConvolution, source: str) -> None:
        """From `source` to `attended`."""
        self._linear(f"{name}conv_in", source, "convolved")
        channels, attention = convolution.channels, self._spec.widest_attention
        parts, first = [], 0
        for place in self._places[index]:
            for of_values, dim in ((0, attention.key_dim), (1, attention.value_dim)):
                width = min(attention.num_kv_heads * stored_dim(dim), channels - first)
                if width:
                    parts.append(CConvolvePart(*place, of_values, first, width))
                    first += width
        bias = self._weights.vectors.get(f"{name}conv.bias")
        op = CConvolveOp(
            self._keep(np.ascontiguousarray(self._weights.vectors[f"{name}conv.weight"].T)),
            None if bias is None else self._keep(bias),
            self._keep_structures((CConvolvePart * len(parts))(*parts)),
            *(len(parts), channels, convolution.taps, self._buffers["convolved"], self._buffer("attended", channels)),
        )
        self._add(library.CONVOLVE, op)

    def _norm_all_heads(self, name: str, index: int, norm: Norm, width: int) -> tuple[str, str, int]:
        """Normalises the queries of all ranks together, and the keys. Returns the buffers of this rank's, which has `width` columns of
        queries, and where its keys begin."""
        shard, attention = self._shard, self._whole_layers[index].attention
        assert isinstance(attention, Attention)
        queries, keys = query_bounds(attention, shard, attention.head_dim), key_bounds(attention, shard)
        self._gather_ranks("qkv", queries, "all_heads")
        self._gather_ranks("qkv", keys, "all_heads", first=width, out_first=queries[-1])
        self._norm(f"{name}q_norm", norm, "all_heads", "all_heads", width=queries[-1])
        self._norm(f"{name}k_norm", norm, "all_heads", "all_heads", first=queries[-1], width=keys[-1])
        self._copy("all_heads", queries[shard.index], "query", 0, width)
        return "query", "all_heads", queries[-1] + shard.index * attention.num_kv_heads // shard.size * attention.head_dim

    def _latent_attention(self, name: str, index: int, attention: LatentAttention, source: str) -> None:
        """From `source` to `attended`, in the space of the latents. Keys and values are the same row of `latent`."""
        heads, rope_dim, rank, key_dim = attention.num_heads, attention.rope_dim, attention.kv_lora_rank, attention.key_dim
        q_rank = attention.q_lora_rank
        if q_rank is not None:
            self._linear(f"{name}q_down", source, "q_latent")
        self._linear(f"{name}kv_down", source, "latent")
        self._norm(f"{name}kv_down_norm", attention.norm, "latent", "latent", first=rope_dim, width=rank)
        q, q_source = "q", source
        if q_rank is not None:
            q, q_source = "q_up", self._norm(f"{name}q_down_norm", attention.norm, "q_latent", "q_latent", width=q_rank)
        self._linear(f"{name}{q}", q_source, "heads")
        self._heads(f"{name}key_up", heads, rope_dim, "heads", "query")
        latent = self._buffers["latent"]
        op = CAttentionOp(
            self._keep(self.angles.tables[attention.rope]),
            self._vector(f"{name}sinks") if attention.sinks else None,
            *(None, None, CNorm(), CNorm(), CNorm(), 0, *self._places[index][0], 0, heads, 1, key_dim, rank, rope_dim),
            *(attention.window or 0, False, 0, 0, rope_dim, attention.scale, attention.soft_cap, 0),
            *(self._buffers["query"], latent, latent, self._buffer("attended", heads * rank)),
        )
        self._add(library.ROTATE, op)
        self._add(library.ATTEND, op)

    def _mlp(self, name: str, mlp: Mlp | Experts, whole: Mlp | Experts | None, source: str, multiplier: float) -> list[_Product]:
        """The last product, from what is computed now; none if it is in `branch`. `whole`: of all ranks."""
        if isinstance(mlp, Experts):
            assert isinstance(whole, Experts)
            if mlp.branch_norm is not None:
                self._normed_branches(name, mlp, whole, mlp.branch_norm)
                return []
            return [partial(self._experts, name, mlp, whole, source, source, multiplier)]
        assert isinstance(whole, Mlp)
        epilogue = library.GATED if mlp.gated else library.ACTIVATE
        self._linear(f"{name}gate_up" if mlp.gated else f"{name}up", source, "gated", epilogue, activation=ACTIVATIONS[mlp.activation])
        return [self._product(f"{name}down", self._all_columns("gated", width_bounds(whole, self._shard)), multiplier)]

    def _normed_branches(self, name: str, experts: Experts, whole: Experts, norm: Norm) -> None:
        """Experts and shared MLP as `Experts.branch_norm` says, whose sum is in `branch`."""
        assert experts.shared is not None
        assert whole.shared is not None
        for which in ("shared", "router", "experts"):
            self._norm(f"{name}{which}_norm", norm, "residual", f"{which}_normed")
        shared = self._mlp(f"{name}shared.", experts.shared, whole.shared, "shared_normed", 1.0)
        self._join(shared, "branch", library.STORE, 1.0)
        routed = partial(self._experts, name, replace(experts, shared=None), whole, "experts_normed", "router_normed", 1.0)
        self._join([routed], "routed", library.STORE, 1.0)
        self._norm(f"{name}shared_out_norm", norm, "branch", "branch")
        self._norm(f"{name}experts_out_norm", norm, "routed", "branch", adds=True)

    def _experts(
        self, name: str, experts: Experts, whole: Experts, source: str, router_source: str, multiplier: float, out: str, epilogue: int
    ) -> None:
        weights, shard = self._weights, self._shard
        correction = self._vector(f"{name}router_correction") if experts.correction else None
        scale = None if experts.branch_norm is None else self._vector(f"{name}expert_scale")
        first = "gate_up" if experts.expert.gated else "up"
        matrices = [weights.grouped[f"{name}experts.{which}"] for which in (first, "down")]
        addresses = [ctypes.addressof(each.c) for each in matrices]
        shared = [library.NO_MATRIX] * 2
        if experts.shared is not None:
            names = [f"{name}shared.{which}" for which in (first, "down")]
            addresses += [ctypes.addressof(weights.linears[each].c) for each in names]
            shared = [self._number(each) for each in names]
        firsts: list[int | None] = [None, None]
        if shard.size > 1 and shard.exact:
            mlps = (whole.expert, whole.shared)
            firsts = [None if mlp is None else self._keep_bounds(width_bounds(mlp, shard)) for mlp in mlps]
        routing = experts.routing
        op = CExpertsOp(
            *(ctypes.addressof(weights.linears[f"{name}router"].c), correction, scale, *addresses, *([None] * (4 - len(addresses)))),
            *(experts.num_experts, routing.top_k, routing.num_groups, routing.top_groups, routing.group_top, routing.scaling),
            *(SCORINGS[routing.scoring], routing.normalize, experts.shared_gate, experts.scaled_inputs, *shared),
            *(self._buffers[router_source], self._buffers[source], self._buffer(out, matrices[1].linears[0].out_features)),
            *(epilogue, ACTIVATIONS[experts.expert.activation], *self._chosen, multiplier),
            *(None if each.orders is None else self._keep(each.orders) for each in matrices),
            *firsts,
        )
        self._add(library.EXPERTS, op)

    def _product(self, name: str, source: str, multiplier: float) -> _Product:
        return partial(self._linear, name, source, multiplier=multiplier)

    def _all_columns(self, name: str, bounds: Bounds) -> str:
        """The buffer that has what a last product reads: in exact mode the columns of all ranks."""
        if self._shard.size == 1 or not self._shard.exact:
            return name
        self._gather_ranks(name, bounds, f"all_{name}")
        return f"all_{name}"

    def _add_branch(self, products: Sequence[_Product], norm_name: str, norm: Norm | None, multiplier: float, scale: float = 1.0) -> None:
        """Adds the last products of a block, or of parallel ones, to the residual; normed if there is a norm, then all times `scale`."""
        if norm is None:
            assert scale == 1.0, "layers that are scaled have norms at their end"
            self._join(products, "residual", library.ADD, multiplier)
        else:
            self._join(products, "branch", library.STORE, multiplier)
            self._norm(norm_name, norm, "branch", "residual", adds=True, multiplier=multiplier, scale=scale)

    def _join(self, products: Sequence[_Product], out: str, epilogue: int, multiplier: float) -> None:
        """The last products, of all ranks, to a buffer that is as wide as the residual. Without any, what is there is complete."""
        shard, bounds = self._shard, hidden_bounds(self._spec, self._shard)
        if not products:
            return
        if shard.size > 1 and shard.exact:
            if epilogue == library.ADD:
                columns = own(bounds, shard)
                self._copy(out, columns.start, "slice", 0, len(columns))
            for product in products:
                product("slice", epilogue)
            self._gather_ranks("slice", bounds, out)
        else:
            for product in products:
                product(out, epilogue if shard.size == 1 else library.PARTIAL)
                if shard.size > 1:
                    self._sum_ranks(out, epilogue, multiplier)
