"""What a rank holds of a model: the parts of all ranks together are the whole, and what is computed of them is what the whole computes."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import dense_cases
import mixture_cases
import plain_cases
import pytest
import torch
import transformers
from family_cases import TINY
from row_tensors import held_parts
from slow_cases import slow_but
from torch import Tensor

from aengine.api.errors import ConfigError
from aengine.kernels.arrays import as_tensor
from aengine.layers.collectives import ONE_RANK
from aengine.layers.ops import TorchOps
from aengine.layers.rotary import cos_sin_cache
from aengine.models.config.model_config import read_spec
from aengine.models.fallback import FallbackSpec
from aengine.models.named_weights import named_weights
from aengine.models.sharding import (
    check_replicas,
    check_shards,
    hidden_bounds,
    sharded_spec,
    sharded_weights,
    vocab_bounds,
    width_bounds,
)
from aengine.models.spec import Attention, Experts, LatentAttention, Mlp, ModelSpec
from aengine.models.torch.blocks import AttentionBlock, LatentAttentionBlock, Weights
from aengine.models.torch.mlps import ExpertsBlock, MlpBlock
from aengine.parallel.shard import WHOLE, Shard

CASES = {case.name: case for case in (*dense_cases.CASES, *mixture_cases.CASES, *plain_cases.CASES)}
SIZES = (2, 3, 4)


@functools.cache
def whole_spec(name: str) -> ModelSpec:
    case = CASES[name]
    config = getattr(transformers, f"{case.config}Config")(**(case.changes if case.whole else {**TINY, **case.changes}))
    return read_spec({**config.to_dict(), "architectures": None})


def spec_of(name: str, size: int) -> ModelSpec:
    """With heads that so many ranks can divide: 4 heads and mostly 2 KV heads, or 6 and 3."""
    spec = whole_spec(name)
    if size != 3:
        return spec
    layers = []
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, LatentAttention):
            attention = replace(attention, num_heads=6)
        else:
            attention = replace(attention, num_heads=6, num_kv_heads=3, slopes=(2 * attention.slopes)[:6])
        layers.append(replace(layer, attention=attention))
    return replace(spec, layers=tuple(layers))


def shards_of(size: int, exact: bool) -> list[Shard]:
    return [Shard(index, size, exact=exact) for index in range(size)]


def numbered(spec: ModelSpec) -> dict[str, Tensor]:
    """Each parameter as its matrix of rows, every element with a number of its own."""
    found = {}
    for name, weight in named_weights(spec).items():
        tensor = torch.arange(math.prod(weight.shape))
        found[name] = tensor if name.endswith(".bias") or len(weight.shape) == 1 else tensor.view(-1, weight.shape[-1])
    return found


def held(spec: ModelSpec, shard: Shard, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a rank has of the whole, in its shapes."""
    found = {}
    for name, part in sharded_weights(spec, shard).items():
        found[name] = torch.cat(held_parts(whole[part.source_name], part)).view(part.shape)
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("size", slow_but((3, 4), SIZES))
def test_parts_of_all_ranks_are_the_whole(size: int, exact: bool) -> None:
    """Each element is held once, or by all ranks; a KV head that ranks share by these. In the order of the whole."""
    for name in CASES:
        spec = spec_of(name, size)
        whole = numbered(spec)
        ranks = [held(spec, shard, whole) for shard in shards_of(size, exact)]
        for weight, tensor in whole.items():
            kept = [rank[weight].flatten() for rank in ranks if weight in rank]
            assert all((one.diff() > 0).all() for one in kept)
            counts = torch.bincount(torch.cat(kept), minlength=tensor.numel())
            num_kv_heads = min(layer.attention.num_kv_heads for layer in spec.layers)
            shares = num_kv_heads < size and weight.rpartition(".")[0].endswith(("qkv", "k_norm"))
            of_head = size // num_kv_heads if shares else size  # ranks that hold a KV head
            allowed = {(1,), (of_head,), (size,), (1, of_head)} if shares else {(1,), (size,)}
            assert tuple(counts.unique().tolist()) in allowed, (name, weight)


class Scores:
    """Causal attention over the tokens of one step."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._key, self._value = key, value

    def target(self, layer: int) -> None:
        pass

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None, index: object = None) -> Tensor:
        repeats = query.shape[1] // self._key.shape[1]
        key, value = (each.repeat_interleave(repeats, 1) for each in (self._key, self._value))
        scores = torch.einsum("thd,shd->hts", query, key)
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), dim=-1)
        return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., : len(query)], value)


def run(spec: ModelSpec, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """What the two blocks of the first layer make of [T, hidden_size]."""
    of_layer = Weights(dict(weights), "layers.0.")  # they get what is made of them
    tables = {rope: as_tensor(cos_sin_cache(rope, len(x))) for rope in spec.ropes}
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    table = None if attention.rope is None else tables[attention.rope]
    kind = LatentAttentionBlock if isinstance(attention, LatentAttention) else AttentionBlock
    attended = kind(attention, 0, of_layer, table, TorchOps(), ONE_RANK)(x, torch.arange(len(x)), Scores())
    return attended, (ExpertsBlock if isinstance(mlp, Experts) else MlpBlock)(mlp, of_layer, TorchOps(), ONE_RANK)(x)


def layers_of(size: int) -> list[ModelSpec]:
    """Models of one layer: each kind of layer that the families have, without norms of all heads together, which no rank has."""
    found = {}
    for name in CASES:
        spec = spec_of(name, size)
        for layer in spec.layers:
            attention = replace(layer.attention, window=None, scale=0.2)
            if isinstance(attention, Attention) and attention.qk_norm is not None and attention.qk_norm.whole:
                attention = replace(attention, qk_norm=None)
            found[spec.family, attention, layer.mlp] = replace(spec, layers=(replace(layer, attention=attention),))
    return list(found.values())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", slow_but((3, 4), SIZES))
def test_what_is_computed_of_the_parts(size: int) -> None:
    """Fast: the sum of what the blocks of all ranks make is what the whole block makes. Exact: the last matrices of the blocks are
    divided by rows, and all others as in fast mode."""
    generator = torch.Generator().manual_seed(size)
    for spec in layers_of(size):
        whole = {name: torch.randn(weight.shape, generator=generator) / 4 for name, weight in named_weights(spec).items()}
        rows = {name: weight if weight.dim() == 1 or name.endswith(".bias") else weight.flatten(0, -2) for name, weight in whole.items()}
        rows = {name: weight.flatten() if name.endswith(".bias") else weight for name, weight in rows.items()}
        x = torch.randn(5, spec.hidden_size, generator=generator)
        summed = [held(spec, shard, rows) for shard in shards_of(size, exact=False)]
        outs = [run(sharded_spec(spec, shard), weights, x) for shard, weights in zip(shards_of(size, exact=False), summed, strict=True)]
        attended, expected = run(spec, whole, x)
        torch.testing.assert_close(sum(out[0] for out in outs), attended, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sum(out[1] for out in outs), expected, rtol=1e-4, atol=1e-4)
        gathered = [held(spec, shard, rows) for shard in shards_of(size, exact=True)]
        for name, weight in whole.items():
            if "output." in name or "down." in name.removeprefix("layers.0.").replace("q_down", "").replace("kv_down", ""):
                assert torch.equal(torch.cat([rank[name] for rank in gathered], dim=1 if ".experts." in name else 0), weight), name
            elif name.startswith("layers."):
                assert all(torch.equal(rank[name], other[name]) for rank, other in zip(gathered, summed, strict=True)), name


def test_one_rank_has_everything() -> None:
    spec = spec_of("gpt-oss", 1)
    assert sharded_spec(spec, WHOLE) is spec
    for name, part in sharded_weights(spec, WHOLE).items():
        assert (part.source_name, part.shape, part.rows, part.columns) == (name, named_weights(spec)[name].shape, None, None)


@pytest.mark.parametrize("name", ["gemma3", "deepseek-v3", "gpt2", "olmo2", "bloom"])
def test_stages(name: str) -> None:
    """Each holds its layers, numbered from 0; the first the embedding, positions and head, the last the norm before the head."""
    spec = spec_of(name, 2)
    for num_stages in (2, spec.num_layers):
        found: list[str] = []
        for stage in range(num_stages):
            shard = Shard(0, 2, stage, num_stages)
            part, weights = sharded_spec(spec, shard), sharded_weights(spec, shard)
            outside = {weight for weight in weights if not weight.startswith("layers.")}
            first = {
                "embedding.weight",
                *(("positions.weight",) if spec.learned_positions else ()),
                *(("embedding_norm.weight", "embedding_norm.bias") if spec.embedding_norm else ()),
                *(() if spec.tied_head else ("head.weight",)),
            }
            last = {weight for weight in named_weights(spec) if weight.startswith("norm.")}
            assert outside == (first if stage == 0 else set()) | (last if stage + 1 == num_stages else set())
            assert {weight for weight in named_weights(part) if weight.startswith(("layers.", "norm."))} == weights.keys() - first
            assert [weight for weight in named_weights(part) if weight in weights] == list(weights)
            assert part.windows == tuple(spec.windows[index] for index in shard.layers(spec.num_layers))
            found += [weight.source_name for weight in weights.values()]
        assert sorted(found) == sorted(named_weights(spec))


def test_units() -> None:
    """Rows that the kernels pack together stay together where parts are of nearly the same size; else parts are as even as they can be."""
    spec = replace(spec_of("llama", 2), vocab_size=151936, hidden_size=896)
    assert vocab_bounds(spec, Shard(0, 2)) == (0, 75968, 151936)
    assert hidden_bounds(spec, Shard(0, 4)) == (0, 224, 448, 672, 896)
    assert hidden_bounds(replace(spec, hidden_size=2560), Shard(0, 3)) == (0, 896, 1728, 2560)
    assert hidden_bounds(replace(spec, hidden_size=100), Shard(0, 3)) == (0, 34, 67, 100)
    assert vocab_bounds(replace(spec, vocab_size=50257), Shard(0, 4)) == (0, 12608, 25216, 37760, 50257)
    mlp = Mlp(4864)
    assert width_bounds(mlp, Shard(0, 4, group=128)) == (0, 1216, 2432, 3648, 4864)
    assert width_bounds(mlp, Shard(0, 4, exact=False, group=128)) == (0, 1280, 2560, 3712, 4864)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "stages", "said"),
    [
        (4, 2, 3, 1, "tensor_parallel_size: 3 does not divide num_heads 4 of layer 0; possible are 1, 2, 4"),
        (
            12,
            4,
            6,
            1,
            "tensor_parallel_size: 6 neither divides num_kv_heads 4 of layer 0 nor is a multiple of it; possible are 1, 2, 4, 12",
        ),
        (128, 128, 128, 1, "tensor_parallel_size: 128 is more than intermediate_size 96; possible are 1, 2, 4, 8, 16, 32, 64"),
        (4, 2, 1, 4, "pipeline_parallel_size: 4 is more than the model's num_layers 3"),
    ],
)
def test_refusals(heads: int, kv_heads: int, size: int, stages: int, said: str) -> None:
    spec = spec_of("llama", 2)
    attention = replace(spec.layers[0].attention, num_heads=heads, num_kv_heads=kv_heads)
    layers = tuple(replace(layer, attention=attention) for layer in spec.layers)
    spec = replace(spec, layers=layers, hidden_size=256)
    with pytest.raises(ConfigError) as refused:
        sharded_spec(spec, Shard(0, size, 0, stages))
    assert str(refused.value) == said


def test_models_of_transformers_are_refused() -> None:
    spec = FallbackSpec(None, "mamba2", "Mamba2ForCausalLM", 10, 8, 10, (), 1, 1, None, ())
    check_shards(spec, 1, 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size: Mamba2ForCausalLM runs in the code of transformers"):
        check_shards(spec, 2, 1)
    with pytest.raises(ConfigError, match="pipeline_parallel_size: Mamba2ForCausalLM runs in the code of transformers"):
        check_shards(spec, 1, 2)
    check_replicas(spec, 1)
    with pytest.raises(ConfigError, match="expert_parallel_size: Mamba2ForCausalLM runs in the code of transformers"):
        check_replicas(spec, 2)
