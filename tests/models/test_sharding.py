"""What a rank holds of a model: the parts of all ranks together are the whole, and what is computed of them is what the whole computes."""

from __future__ import annotations

import math
from dataclasses import replace

import dense_cases
import mixture_cases
import plain_cases
import pytest
import torch
import transformers
from family_cases import TINY, Case
from torch import Tensor

from aengine.models.model_config import read_spec
from aengine.models.named_weights import named_weights
from aengine.models.sharding import sharded_spec, sharded_weights, take_part
from aengine.models.spec import LatentAttention, ModelSpec
from aengine.parallel.shard import WHOLE, Shard

CASES = {case.name: case for case in (*dense_cases.CASES, *mixture_cases.CASES, *plain_cases.CASES)}
SIZES = (2, 3, 4)


def spec_of(case: Case, size: int) -> ModelSpec:
    """With heads that so many ranks can divide: 4 heads and mostly 2 KV heads, or 6 and 3."""
    config = getattr(transformers, f"{case.config}Config")(**(case.changes if case.whole else {**TINY, **case.changes}))
    spec = read_spec({**config.to_dict(), "architectures": None})
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
    for case in CASES.values():
        spec = spec_of(case, size)
        whole = numbered(spec)
        ranks = [held(spec, shard, whole) for shard in shards_of(size, exact)]
        for name, tensor in whole.items():
            kept = [rank[name].flatten() for rank in ranks if name in rank]
            assert all((one.diff() > 0).all() for one in kept)
            counts = torch.bincount(torch.cat(kept), minlength=tensor.numel())
            shares = size == 4 and name.rpartition(".")[0].endswith(("qkv", "k_norm"))
            allowed = {(1,), (2,), (size,), (1, 2)} if shares else {(1,), (size,)}
            assert tuple(counts.unique().tolist()) in allowed, (case.name, name)


def test_one_rank_has_everything() -> None:
    spec = spec_of(CASES["gpt-oss"], 1)
    assert sharded_spec(spec, WHOLE) is spec
    for name, part in sharded_weights(spec, WHOLE).items():
        assert (part.source_name, part.shape, part.rows, part.columns) == (name, named_weights(spec)[name].shape, None, None)
