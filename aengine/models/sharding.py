"""Which part of a model's weights a rank holds, and where the parts of all ranks meet.

Owns the cuts: by heads, by the width of MLPs and experts, by hidden_size, by the vocabulary, and by layers. They follow from the spec and
the shard alone, so that all ranks agree. Knows nothing of files or of how a rank computes with its part.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError
from aengine.kernels.arrays import cast
from aengine.kernels.quantized import Rows
from aengine.models.fallback import FallbackSpec
from aengine.models.named_weights import named_weights
from aengine.models.spec import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    Mlp,
    ModelSpec,
    Recurrence,
    RecurrenceKind,
    ShortConvolution,
)
from aengine.parallel.shard import WHOLE, Shard

_UNITS = (64, 32, 16)  # rows of which the kernels pack 64 together, 32 of a gate with 32 of up
_LEAST_UNITS = 8  # of a rank whose part may be a unit smaller than those of others

_CHANNELS = 16  # of a convolution, that the kernels take together

Bounds = tuple[int, ...]
"""[size + 1]: where the columns of each rank begin in what all ranks have together, and the end."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """What a rank holds of a parameter, seen as the matrix [rows, columns] that the parts of its `NamedWeight` make."""

    source_name: str  # of the parameter of the whole model
    shape: tuple[int, ...]  # of what the rank holds
    rows: tuple[range, ...] | None = None  # ascending; None: all
    columns: range | None = None  # None: all


def check_shards(spec: ModelSpec | FallbackSpec, tensor_parallel_size: int, num_stages: int) -> None:
    """Raises ConfigError for a model that cannot be divided over so many ranks."""
    if tensor_parallel_size == num_stages == 1:
        return
    if isinstance(spec, FallbackSpec):
        field = "tensor_parallel_size" if tensor_parallel_size > 1 else "pipeline_parallel_size"
        raise ConfigError.of(field, f"{spec.architecture} runs in the code of transformers, which is not divided over ranks; choose 1")
    if num_stages > spec.num_layers:
        raise ConfigError.of("pipeline_parallel_size", f"{num_stages} is more than the model's num_layers {spec.num_layers}")
    stages = [Shard(stage=stage, num_stages=num_stages).layers(spec.num_layers) for stage in range(num_stages)]
    if spec.attends and not all(replace(spec, layers=tuple(spec.layers[index] for index in stage)).attends for stage in stages):
        raise ConfigError.of("pipeline_parallel_size", f"{num_stages} leaves some ranks no layer of attention; choose fewer")
    for stage in stages:
        for index in stage:
            attention = spec.layers[index].attention
            if isinstance(attention, Attention) and index - attention.kv_distance < stage.start:
                parted = f"{num_stages} parts layer {index} from layer {index - attention.kv_distance}, whose keys and values it reads"
                raise ConfigError.of("pipeline_parallel_size", f"{parted}; choose fewer, or 1")
    if num_stages > 1 and spec.layer_inputs is not None:
        raise ConfigError.of("pipeline_parallel_size", f"{num_stages} is not possible where each layer has an input of its own; choose 1")
    reason = _refusal(spec, tensor_parallel_size)
    if reason is not None:
        sizes = [size for size in range(1, 65) if _refusal(spec, size) is None]
        raise ConfigError.of("tensor_parallel_size", f"{reason}; possible are {', '.join(map(str, sizes))}")


def check_replicas(spec: ModelSpec | FallbackSpec, size: int) -> None:
    """Raises ConfigError for a model whose experts cannot be divided over so many replicas."""
    if size == 1:
        return
    if isinstance(spec, FallbackSpec):
        reason = f"{spec.architecture} runs in the code of transformers, whose experts are not divided; choose 1"
        raise ConfigError.of("expert_parallel_size", reason)
    fewest = min((layer.mlp.num_experts for layer in spec.layers if isinstance(layer.mlp, Experts)), default=0)
    if fewest < size:
        what = f"{size} is more than the model's {fewest} experts" if fewest else f"{spec.architecture} has no experts; choose 1"
        raise ConfigError.of("expert_parallel_size", what)


def _refusal(spec: ModelSpec, size: int) -> str | None:
    """Why a model cannot be divided over `size` ranks; None: it can."""
    if spec.streams is not None and size > 1:
        return f"{size} is not possible with several residual streams"
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.attention, ShortConvolution):
            if layer.attention.channels % (_CHANNELS * size):
                return f"{size} does not divide the channels {layer.attention.channels} of layer {index} into multiples of {_CHANNELS}"
            continue
        if layer.recurrence is not None and (reason := _recurrence_refusal(layer.recurrence, size)) is not None:
            return f"{reason} of layer {index}"
        if layer.attention is None:
            continue
        heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
        if heads % size:
            return f"{size} does not divide num_heads {heads} of layer {index}"
        if kv_heads % size and spec.convolutions:  # whose inputs would find other room in pages
            return f"{size} does not divide num_kv_heads {kv_heads} of layer {index}, beside convolutions"
        if kv_heads % size and size % kv_heads:
            return f"{size} neither divides num_kv_heads {kv_heads} of layer {index} nor is a multiple of it"
    smallest = min(_sizes(spec), key=lambda item: item[1])
    return f"{size} is more than {smallest[0]} {smallest[1]}" if smallest[1] < size else None


def _recurrence_refusal(recurrence: Recurrence, size: int) -> str | None:
    key_heads, groups = recurrence.num_key_heads, recurrence.norm_groups or size
    if recurrence.num_heads % size:
        return f"{size} does not divide num_heads {recurrence.num_heads} of the recurrence"
    if key_heads % size and size % key_heads:
        return f"{size} neither divides num_key_heads {key_heads} of the recurrence nor is a multiple of it"
    return f"{size} does not divide norm_groups {groups} of the recurrence" if groups > 1 and groups % size else None


def _sizes(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    yield from (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size))
    for layer in spec.layers:
        yield from (("intermediate_size", mlp.intermediate_size) for mlp in _mlps(layer.mlp))


def _mlps(mlp: Mlp | Experts | None) -> Iterator[Mlp]:
    if isinstance(mlp, Mlp):
        yield mlp
    elif mlp is not None:
        yield mlp.expert
        if mlp.shared is not None:
            yield mlp.shared


def hidden_bounds(spec: ModelSpec, shard: Shard) -> Bounds:
    """Return the bounds of the residual's columns: those that each rank computes in exact mode."""
    return shard.bounds(spec.hidden_size, _unit(spec.hidden_size, shard.size))


def vocab_bounds(spec: ModelSpec, shard: Shard) -> Bounds:
    """Return the bounds of logits, and so of the rows of the output head."""
    return shard.bounds(spec.vocab_size, _unit(spec.vocab_size, shard.size))


def width_bounds(mlp: Mlp, shard: Shard) -> Bounds:
    """Return the bounds of what the `down` of an MLP, of shared experts or of each expert is given. Raises ConfigError if there are too
    few quantised groups for all ranks to have one."""
    size = mlp.intermediate_size
    bounds = shard.bounds(size, _unit(size, shard.size, 1 if shard.exact else shard.group))
    if bounds[-1] == bounds[-2]:
        raise ConfigError.of(
            "tensor_parallel_size",
            f"{shard.size} is more than the groups of {shard.group} quantised columns in intermediate_size {size};"
            " choose fewer ranks, or tensor_parallel_mode 'exact'",
        )
    return bounds


def query_bounds(attention: Attention | LatentAttention, shard: Shard, head_width: int) -> Bounds:
    """Return the bounds of what has `head_width` columns for each query head: queries, or what the `output` of attention is given."""
    return tuple(bound * head_width for bound in shard.bounds(attention.num_heads))


def key_bounds(attention: Attention, shard: Shard) -> Bounds:
    """Return the bounds of keys, each once: where ranks hold the same KV head, the first of them has its columns."""
    return tuple(-(-index * attention.num_kv_heads // shard.size) * attention.head_dim for index in range(shard.size + 1))


def recurrence_bounds(recurrence: Recurrence, shard: Shard) -> Bounds:
    """Return the bounds of what `recur_out` is given."""
    return tuple(bound * recurrence.value_dim for bound in shard.bounds(recurrence.num_heads))


def is_normed_whole(recurrence: Recurrence, shard: Shard) -> bool:
    """Whether the outputs of the heads of all ranks are normed together; `recurrence` is that of all ranks."""
    return recurrence.norm_groups is not None and recurrence.norm_groups % shard.size > 0


def attended_bounds(attention: Attention | LatentAttention | ShortConvolution, shard: Shard) -> Bounds:
    """Return the bounds of what the `output` of attention, or of what stands in its place, is given."""
    if isinstance(attention, ShortConvolution):
        return shard.bounds(attention.channels)
    return query_bounds(attention, shard, attention.v_dim if isinstance(attention, LatentAttention) else attention.value_dim)


def _unit(total: int, size: int, group: int = 1) -> int:
    """Return the unit, in rows, of the parts of `total` rows: as large as it can be with parts of nearly the same size, and a multiple
    of `group`."""
    units = [math.lcm(unit, group) for unit in _UNITS]
    even = (unit for unit in units if total % (unit * size) == 0)
    return next(even, next((unit for unit in units if total >= _LEAST_UNITS * unit * size), group))


def own(bounds: Bounds, shard: Shard) -> range:
    """Return the columns of a rank within bounds."""
    return range(*bounds[shard.index : shard.index + 2])


def _shared_heads(num_heads: int, shard: Shard) -> range:
    """Fewer KV heads, or key heads, than ranks are held by several ranks each."""
    first = shard.index * num_heads // shard.size
    return range(first, first + max(num_heads // shard.size, 1))


def sharded_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The model as a rank computes it: the heads, KV heads, and widths of MLPs and experts that it holds, and the layers of its stage;
    hidden_size and vocab_size are the model's. There is no norm before the end of the last stage. Draft heads stay whole.

    Raises ConfigError as `check_shards`.
    """
    if spec.draft_head is not None or shard.num_ranks == 1:
        return spec
    check_shards(spec, shard.size, shard.num_stages)
    layers = tuple(_sharded_layer(spec.layers[index], shard) for index in shard.layers(spec.num_layers))
    return replace(spec, layers=layers, norm=spec.norm if shard.is_last_stage else None)


def _sharded_layer(layer: Layer, shard: Shard) -> Layer:
    attention, recurrence = layer.attention, layer.recurrence
    if isinstance(attention, ShortConvolution):
        attention = replace(attention, channels=attention.channels // shard.size)
    elif isinstance(attention, LatentAttention):
        attention = replace(attention, num_heads=attention.num_heads // shard.size)
    elif attention is not None:
        heads = attention.num_heads // shard.size
        slopes = attention.slopes[shard.index * heads : (shard.index + 1) * heads]
        attention = replace(attention, num_heads=heads, num_kv_heads=len(_shared_heads(attention.num_kv_heads, shard)), slopes=slopes)
    if recurrence is not None:
        groups, heads = recurrence.norm_groups, recurrence.num_heads // shard.size
        recurrence = replace(
            recurrence,
            slopes=recurrence.slopes[shard.index * heads : (shard.index + 1) * heads],
            num_heads=heads,
            num_key_heads=len(_shared_heads(recurrence.num_key_heads, shard)),
            norm_groups=groups if groups is None else max(groups // shard.size, 1),
        )
    mlp = layer.mlp
    if isinstance(mlp, Mlp):
        mlp = _sharded_mlp(mlp, shard)
    elif mlp is not None:
        shared = None if mlp.shared is None else _sharded_mlp(mlp.shared, shard)
        mlp = replace(mlp, expert=_sharded_mlp(mlp.expert, shard), shared=shared)
    return replace(layer, attention=attention, recurrence=recurrence, mlp=mlp)


def _sharded_mlp(mlp: Mlp, shard: Shard) -> Mlp:
    return replace(mlp, intermediate_size=len(own(width_bounds(mlp, shard), shard)))


@dataclass(frozen=True, slots=True)
class _Cut:
    rows: tuple[range, ...] | None = None
    columns: range | None = None
    experts: int = 0  # how many of a layer the rank holds, of a matrix of experts
    bias: bool = True  # whether the rank holds the bias that belongs to the matrix


def sharded_weights(spec: ModelSpec, shard: Shard) -> dict[str, WeightPart]:
    """What a rank holds of the model `spec`, in the order of `named_weights`; layers have the numbers that they have in its
    `sharded_spec`.

    The first stage has embedding, positions and output head, the last one the norm before it. Norms of all heads together are whole.
    Where products are summed over the ranks, the first rank has the biases.
    """
    if spec.draft_head is not None:
        shard = WHOLE
    vocabulary = (own(vocab_bounds(spec, shard), shard),)
    of_model = {}  # a draft head may have logits of some tokens alone
    if shard.size > 1:
        of_model = {"embedding": _Cut(vocabulary if shard.splits_embedding else None), "head": _Cut(vocabulary)}
    held = shard.layers(spec.num_layers)
    of_layers = {index: _layer_cuts(spec.layers[index], spec, shard) for index in held}
    found = {}
    for source_name, weight in named_weights(spec).items():
        name, stem, kind = source_name, *_split(source_name)
        cuts = of_model
        if name.startswith("layers."):
            _, number, name = name.split(".", 2)
            if int(number) not in held:
                continue
            cuts, stem = of_layers[int(number)], _split(name)[0]
            name = f"layers.{int(number) - held.start}.{name}"
        elif not (shard.is_last_stage if stem == "norm" else shard.stage == 0):
            continue
        cut = cuts.get(stem, _Cut())
        if kind != "bias" or cut.bias:
            found[name] = _part(source_name, weight.shape, kind == "bias", cut)
    return found


def _split(name: str) -> tuple[str, str]:
    """Return `experts.down` and `weight` for `experts.down.weight`; `sinks` and nothing for `sinks`, which has neither ending."""
    stem, _, kind = name.rpartition(".")
    return (stem, kind) if kind in ("weight", "bias") else (name, "")


def _part(source_name: str, shape: tuple[int, ...], is_bias: bool, cut: _Cut) -> WeightPart:
    is_flat = is_bias or len(shape) == 1
    num_rows = math.prod(shape if is_flat else shape[:-1])
    rows, columns = cut.rows, None if is_flat else cut.columns
    if rows is not None and sum(map(len, rows)) == num_rows:
        rows = None
    if columns is not None and len(columns) == shape[-1]:
        columns = None
    outer, last = (shape, ()) if is_flat else (shape[:-1], shape[-1:])
    if rows is not None:
        count = sum(map(len, rows))
        if len(outer) == 1:
            outer = (count,)
        elif cut.experts:
            outer = (cut.experts, count // cut.experts)
        else:
            outer = (count // outer[1], outer[1])
    return WeightPart(source_name, (*outer, *(last if columns is None else (len(columns),))), rows, columns)


def _layer_cuts(layer: Layer, spec: ModelSpec, shard: Shard) -> dict[str, _Cut]:
    """By the names of matrices and vectors; what is not named is whole."""
    hidden = own(hidden_bounds(spec, shard), shard)

    def last(columns: range, experts: range = range(1)) -> _Cut:
        """Return the cut of matrices whose inputs are divided."""
        if shard.exact or shard.size == 1:
            return _Cut(tuple(_moved(hidden, index * spec.hidden_size) for index in experts))
        return _Cut(columns=columns, bias=shard.index == 0)

    def mlp(prefix: str, mlp: Mlp, experts: range = range(1)) -> dict[str, _Cut]:
        width, size = own(width_bounds(mlp, shard), shard), mlp.intermediate_size
        first, each = ("gate_up", 2) if mlp.gated else ("up", 1)
        blocks = range(each * experts.start, each * experts.stop)
        return {f"{prefix}{first}": _Cut(tuple(_moved(width, block * size) for block in blocks)), f"{prefix}down": last(width, experts)}

    cuts = {} if layer.attention is None else _attention_cuts(layer.attention, shard, last)
    if layer.recurrence is not None:
        cuts |= _recurrence_cuts(layer.recurrence, shard, last)
    if layer.mlp is None:
        return cuts
    if isinstance(layer.mlp, Mlp):
        return cuts | mlp("", layer.mlp)
    held = shard.experts(layer.mlp.num_experts)
    cuts |= {name: replace(cut, experts=len(held)) for name, cut in mlp("experts.", layer.mlp.expert, held).items()}
    return cuts | ({} if layer.mlp.shared is None else mlp("shared.", layer.mlp.shared))


def _recurrence_cuts(recurrence: Recurrence, shard: Shard, last: Callable[[range], _Cut]) -> dict[str, _Cut]:
    values, heads = own(recurrence_bounds(recurrence, shard), shard), own(shard.bounds(recurrence.num_heads), shard)
    keys = _times(_shared_heads(recurrence.num_key_heads, shard), recurrence.key_dim)
    k_size = recurrence.num_key_heads * recurrence.key_dim
    convolved: tuple[range, ...] = (keys, _moved(keys, k_size), _moved(values, 2 * k_size))
    if recurrence.kind is RecurrenceKind.MAMBA1:
        convolved = (values,)
    z = _moved(values, recurrence.channels)
    cuts = {"conv": _Cut(convolved), "recur_in": _Cut((*convolved, z)), "recur_gates": _Cut((heads,)), "recur_out": last(values)}
    cuts |= {name: _Cut((heads,)) for name in ("log_decay", "step_bias", "skip")}
    match recurrence.kind:
        case RecurrenceKind.GATED_DELTA:
            cuts["recur_gates"] = _Cut((heads, _moved(heads, recurrence.num_heads)))
        case RecurrenceKind.KIMI_DELTA:
            steps = _Cut((_times(heads, recurrence.key_dim),))
            cuts |= {"recur_in": _Cut(convolved), "decay_up": steps, "step_bias": steps, "z_up": _Cut((values,))}
        case RecurrenceKind.MAMBA1:
            cuts |= {name: _Cut((values,)) for name in ("decay_up", "log_decay", "step_bias", "skip")}
            cuts["recur_gates"] = _Cut()  # every rank has all of what is convolved
        case RecurrenceKind.MAMBA2 | RecurrenceKind.LIGHTNING:
            pass
    if recurrence.norm_groups is not None and not is_normed_whole(recurrence, shard):
        cuts["recur_norm"] = _Cut((values,))
    return cuts


def _attention_cuts(
    attention: Attention | LatentAttention | ShortConvolution, shard: Shard, last: Callable[[range], _Cut]
) -> dict[str, _Cut]:
    """`last` gives the cut of matrices whose inputs are divided."""
    attended = own(attended_bounds(attention, shard), shard)
    if isinstance(attention, ShortConvolution):
        inputs = tuple(_moved(attended, number * attention.channels) for number in range(3))
        return {"conv_in": _Cut(inputs), "conv": _Cut((attended,)), "conv_out": last(attended)}
    cuts = {"output": last(attended)}
    heads = own(shard.bounds(attention.num_heads), shard)
    if isinstance(attention, LatentAttention):
        queries = _Cut((_times(heads, attention.rope_dim + attention.nope_dim),))
        cuts |= {"q": queries, "q_up": queries}
        cuts |= {"key_up": _Cut((_times(heads, attention.kv_lora_rank),)), "value_up": _Cut((_times(heads, attention.v_dim),))}
    else:
        dim, kv_heads = attention.head_dim, _shared_heads(attention.num_kv_heads, shard)
        q, kv = _times(heads, dim), _times(kv_heads, dim)
        rows, end = [q], attention.num_heads * dim
        for one in attention.kv_widths:
            rows.append(_moved(_times(kv_heads, one), end))
            end += attention.num_kv_heads * one
        if attention.output_gate:
            rows.append(_moved(q, end))
        cuts["qkv"] = _Cut(tuple(rows))
        cuts["sinks"] = _Cut((heads,))
        if attention.qk_norm is not None and attention.qk_norm.head_weights:
            cuts |= {"q_norm": _Cut((q,)), "k_norm": _Cut((kv,))}
    return cuts


def _times(one: range, factor: int) -> range:
    return range(one.start * factor, one.stop * factor)


def _moved(one: range, by: int) -> range:
    return range(one.start + by, one.stop + by)


def pieces(lengths: Sequence[int], part: WeightPart) -> Iterator[tuple[int, range]]:
    """Yield what a rank holds of a parameter whose parts have `lengths` rows: the number of a part and a range of its rows, in the order
    in which the rank has them."""
    ends = list(accumulate(lengths))
    for rows in part.rows or (range(sum(lengths)),):
        row = rows.start
        while row < rows.stop:
            number = bisect_right(ends, row)
            first, stop = ends[number] - lengths[number], min(rows.stop, ends[number])
            yield number, range(row - first, stop - first)
            row = stop


def take_part(parts: Sequence[Rows], part: WeightPart) -> tuple[Rows, ...]:
    """What a rank holds of the parts of a whole parameter: views where possible.

    Raises ConfigError for columns of quantised rows that cannot be taken as such.
    """
    return tuple(cut(parts[number], rows, part) for number, rows in pieces(list(map(len, parts)), part))


def cut(given: Rows, rows: range, part: WeightPart) -> Rows:
    """The columns of a part in some rows. Raises ConfigError as `take_part`."""
    taken = given if len(rows) == len(given) else given[rows.start : rows.stop]
    if part.columns is None:
        return taken
    first, stop = part.columns.start, part.columns.stop
    if isinstance(taken, np.ndarray):
        return taken[:, first:stop]
    try:
        return taken.columns(first, stop)
    except ValueError as error:
        raise ConfigError.of("tensor_parallel_mode", f"'fast' divides the columns of {part.source_name}: {error}; choose 'exact'") from None


_DRAWN = 1_000_003  # values of a weight; a prime, so that rows differ


def random_weights(spec: ModelSpec, dtype: np.dtype[Any], seed: int, shard: Shard = WHOLE) -> Iterator[tuple[str, tuple[Rows, ...]]]:
    """Random values for each of `sharded_weights(spec, shard)`, as `stored_weights` has them; equal for equal seeds. A shard has what it
    would have of the whole model. Weights of more than `_DRAWN` values repeat them: models of such weights measure speed alone."""
    held = {part.source_name: (name, part) for name, part in sharded_weights(spec, shard).items()}
    for number, (name, weight) in enumerate(named_weights(spec).items()):
        if name not in held:
            continue
        if weight.fill is None:
            generator, size = np.random.default_rng((seed, number)), math.prod(weight.shape)
            drawn = generator.standard_normal(min(size, _DRAWN), np.float32) * np.float32(spec.initializer_range)
            values = np.resize(cast(drawn, dtype), weight.shape)
        else:
            values = np.full(weight.shape, weight.fill, dtype)
        ours, part = held[name]
        rows = values.reshape(-1) if name.endswith(".bias") or values.ndim == 1 else values.reshape(-1, values.shape[-1])
        taken = take_part((rows,), part)
        # Views would keep the memory of the whole.
        yield ours, (rows,) if taken[0] is rows else tuple(each.copy() for each in taken if isinstance(each, np.ndarray))
