"""Experts of the torch decoder that are divided over replicas, each with tokens of its own, against the whole model."""

from __future__ import annotations

import datetime
import math
from dataclasses import replace

import mixture_cases
import pytest
import torch
from row_tensors import held_parts
from slow_cases import slow_but
from tensor_ranks import POSITIONS, all_logits, backend_of, decoder_of, layouts, on_ranks, whole_weights
from test_tensor_parallel import spec_of
from torch import Tensor
from torch.distributed import HashStore

from aengine.api.errors import ConfigError
from aengine.attention import StepLayout
from aengine.layers.collectives import Collectives, ExpertExchange, gloo_group
from aengine.models.sharding import check_replicas, sharded_weights
from aengine.models.spec import Experts, ModelSpec
from aengine.models.torch.decoder import Decoder
from aengine.parallel.shard import WHOLE, Shard

CASES = {case.name: case for case in mixture_cases.CASES}
QUICK = [("deepseek-v3", 2), ("gpt-oss", 3)]  # a dense layer and shared experts; biases, and experts that 4 does not divide
# By replica, its steps; None: it has none, while others have.
STEPS = [
    [[(0, 17)], None, [(0, 1), (1, 9), (2, 3)], [(0, 1), (1, 1), (2, 1)]],
    [None, [(0, 5), (1, 2)], [(0, 1)], None],
    [[(0, 3)], [(0, 1)], None, None],
    [[(0, 30)], None, [(0, 1)], [(0, 4), (1, 6)]],
]


def held_weights(spec: ModelSpec, weights: dict[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    held = sharded_weights(spec, shard)
    parts = {name: held_parts(weights[part.source_name], part) for name, part in held.items()}
    return {name: torch.cat([part.contiguous() for part in rows]).view(held[name].shape) for name, rows in parts.items()}


def own_steps(index: int) -> list[StepLayout]:
    return layouts([step for step in STEPS[index] if step is not None])


def logits_of_replicas(spec: ModelSpec, weights: dict[str, Tensor], size: int) -> list[list[Tensor]]:
    store = HashStore()

    def work(index: int) -> list[Tensor]:
        with torch.inference_mode():
            shard = replace(WHOLE, replica=index, num_replicas=size)
            group = gloo_group(store, index, size, datetime.timedelta(seconds=30), "127.0.0.1")
            exchange = ExpertExchange(Collectives(Shard(index, size), group), shard)
            decoder = Decoder(spec, held_weights(spec, weights, shard), POSITIONS, shard=shard, exchange=exchange)
            backend, found, steps = backend_of(spec), list[Tensor](), iter(own_steps(index))
            for step in STEPS[index]:
                layout = None if step is None else next(steps)
                counts = exchange.begin_step(0 if layout is None else layout.num_tokens)
                assert len(counts) == size
                if layout is None:
                    decoder.compute_for_others()
                else:
                    found += all_logits(decoder, spec, [layout], backend, first=len(found))
            return found

    return on_ranks(size, work)


@pytest.mark.parametrize(("name", "size"), slow_but(QUICK, [*QUICK, *((name, 2 + i % 3) for i, name in enumerate(CASES))]))
def test_logits_are_those_of_the_whole_model(name: str, size: int) -> None:
    spec = spec_of(CASES[name])
    weights = whole_weights(spec)
    found = logits_of_replicas(spec, weights, size)
    for index, ours in enumerate(found):
        with torch.inference_mode():
            expected = all_logits(decoder_of(spec, weights, None), spec, own_steps(index))
        assert len(ours) == len(expected)
        for one, other in zip(ours, expected, strict=True):
            assert torch.equal(one.argmax(-1), other.argmax(-1))
            assert ((one - other).abs().amax() / other.abs().amax()).item() < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_each_replica_has_its_experts(name: str) -> None:
    spec = spec_of(CASES[name])
    whole = sharded_weights(spec, WHOLE)
    weights = {name: torch.arange(math.prod(part.shape)) for name, part in whole.items()}
    weights = {name: each if name.endswith("bias") else each.view(-1, whole[name].shape[-1]) for name, each in weights.items()}
    for size in (2, 3):
        shards = [replace(WHOLE, replica=index, num_replicas=size, exact=size == 2) for index in range(size)]
        held = [held_weights(spec, weights, shard) for shard in shards]
        for name, part in whole.items():
            expected = weights[name].view(part.shape)
            if ".experts." in name:
                assert torch.equal(torch.cat([each[name] for each in held]), expected)
                counts = [len(each[name]) for each in held]
                assert max(counts) - min(counts) <= 1
            else:
                assert all(torch.equal(each[name], expected) for each in held)


def test_models_that_have_too_few_experts_are_refused() -> None:
    spec = spec_of(CASES["mixtral"])
    assert isinstance(spec.layers[0].mlp, Experts)
    check_replicas(spec, 6)
    with pytest.raises(ConfigError, match="expert_parallel_size: 7 is more than the model's 6 experts"):
        check_replicas(spec, 7)
    dense = replace(spec, layers=tuple(replace(layer, mlp=spec.layers[0].mlp.expert) for layer in spec.layers))
    check_replicas(dense, 1)
    with pytest.raises(ConfigError, match="expert_parallel_size: MixtralForCausalLM has no experts; choose 1"):
        check_replicas(dense, 2)
