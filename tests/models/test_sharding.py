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
from torch import Tensor

from aengine.layers.ops import TorchOps
from aengine.layers.rotary import cos_sin_cache
from aengine.models.blocks import Weights
from aengine.models.decoder import _attention_block, _mlp_block
from aengine.models.model_config import read_spec
from aengine.models.named_weights import named_weights
from aengine.models.sharding import sharded_spec, sharded_weights, take_part
from aengine.models.spec import Attention, LatentAttention, ModelSpec
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
        heads = {"num_heads": 6} if isinstance(layer.attention, LatentAttention) else {"num_heads": 6, "num_kv_heads": 3}
        layers.append(replace(layer, attention=replace(layer.attention, **heads)))
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
        found[name] = torch.cat([rows for rows in take_part((whole[part.source_name],), part) if isinstance(rows, Tensor)]).view(part.shape)
    return found


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("size", SIZES)
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
            shares = size == 4 and weight.rpartition(".")[0].endswith(("qkv", "k_norm"))
            allowed = {(1,), (2,), (size,), (1, 2)} if shares else {(1,), (size,)}
            assert tuple(counts.unique().tolist()) in allowed, (name, weight)


class Scores:
    """Causal attention over the tokens of one step."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._key, self._value = key, value

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        repeats = query.shape[1] // self._key.shape[1]
        key, value = (each.repeat_interleave(repeats, 1) for each in (self._key, self._value))
        scores = torch.einsum("thd,shd->hts", query, key)
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), dim=-1)
        return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., : len(query)], value)


def run(spec: ModelSpec, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """What the two blocks of the first layer make of [T, hidden_size]."""
    of_layer = Weights(weights, "layers.0.")
    tables = {rope: cos_sin_cache(rope, len(x), torch.device("cpu")) for rope in spec.ropes}
    attention = _attention_block(spec.layers[0], 0, of_layer, tables, TorchOps())
    return attention(x, torch.arange(len(x)), Scores()), _mlp_block(spec.layers[0], of_layer, TorchOps())(x)


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


@pytest.mark.parametrize("size", SIZES)
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
