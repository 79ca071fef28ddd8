"""What a rank reads of a checkpoint in any format, and what it says that this takes."""

from __future__ import annotations

import functools
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from quantized_layouts import LAYOUTS
from quantized_models import MODELS, random_model, rewrite
from row_tensors import held_parts
from slow_cases import slow_but
from test_gguf_families import CASES as GGUF_CASES
from test_gguf_families import Case, converted
from torch import Tensor

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError
from aengine.kernels.arrays import FLOAT32, array_dtype, as_array, as_tensor, data_address
from aengine.kernels.cpu.library import Workspace, load_kernels
from aengine.kernels.cpu.ops import logits
from aengine.kernels.quantized import QuantizedRows
from aengine.models.config.model_config import load_spec
from aengine.models.cpu.packed_weights import PackedWeights
from aengine.models.cpu.weight_packing import WeightPacking
from aengine.models.gguf import tensors
from aengine.models.gguf.tensors import read_rows
from aengine.models.loading import weights as loading
from aengine.models.loading.weights import grouped, stored_weights
from aengine.models.quantization.quantization_config import load_quantization
from aengine.models.sharding import random_weights, sharded_weights, take_part
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.memory import quantized_bytes, weight_bytes
from aengine.runner.torch.loading import fused

CPU = torch.device("cpu")
QUICK = ("pack-quantized 8 bits, asymmetric", "float-quantized, blocks", "gptq 4 bits, act-order", "awq", "nf4, double")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Folders of tiny random models, by a name in `MODELS`."""
    return functools.cache(lambda name: random_model(name, tmp_path_factory.mktemp(name)))


def load(folder: pathlib.Path, shard: Shard) -> dict[str, Tensor]:
    spec = load_spec(folder)
    return fused(spec, stored_weights(spec, folder, "auto", load_quantization(folder), shard), torch.float32, CPU, shard=shard)


def check_parts(folder: pathlib.Path, size: int, exact: bool, num_stages: int = 1) -> None:
    """What each rank loads is its part of what one rank loads."""
    spec, whole = load_spec(folder), load(folder, WHOLE)
    for rank in range(size * num_stages):
        shard = grouped(Shard(rank % size, size, rank // size, num_stages, exact), spec, folder)
        found, wanted = load(folder, shard), sharded_weights(spec, shard)
        assert found.keys() == wanted.keys()
        for name, part in wanted.items():
            weight = whole[part.source_name]
            rows = weight.flatten() if name.endswith(".bias") or weight.dim() == 1 else weight.flatten(0, -2)
            assert torch.equal(found[name], torch.cat(held_parts(rows, part)).view(part.shape)), name


@pytest.mark.parametrize("name", slow_but(QUICK, LAYOUTS))
def test_quantised_layouts(tmp_path: pathlib.Path, models, name: str) -> None:
    """Codes are cut, not numbers; in fast mode on the borders of groups."""
    rewrite(models("gpt_neox"), tmp_path, LAYOUTS[name])
    check_parts(tmp_path, 4, exact=True)
    if "act" not in name:
        check_parts(tmp_path, 2, exact=False)
        return
    shard = grouped(Shard(0, 2, exact=False), load_spec(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=r"tensor_parallel_mode: 'fast' .* layers\.0\.output\.weight: .*act-order.*choose 'exact'"):
        load(tmp_path, shard)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["", "gptq 4 bits, asymmetric"])
def test_stages_and_families(tmp_path: pathlib.Path, models, model: str, name: str) -> None:
    """Tensors that are transposed, or whose rows change places, as they are and quantised."""
    folder = tmp_path if name else models(model)
    if name:
        rewrite(models(model), tmp_path, LAYOUTS[name])
    check_parts(folder, 2, exact=True, num_stages=load_spec(folder).num_layers)
    if model not in ("qwen3_moe", "deepseek_v3"):  # whose experts are one group wide
        check_parts(folder, 2, exact=False)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("name", "exact"), [("llama", False), ("mixtral", False), ("mixtral", True), ("deepseek2", True)])
def test_gguf(name: str, exact: bool, tmp_path: pathlib.Path) -> None:
    written = GGUF_CASES[name]
    Case(name, written.config, written.changes).make().save_pretrained(tmp_path / "model")
    path = tmp_path / "model.gguf"
    path.write_bytes(converted(tmp_path / "model", written, "Q8_0"))
    shard = grouped(Shard(1, 2, exact=exact), load_spec(path), path)
    assert shard.group == (1 if exact else 32)
    check_parts(path, 2, exact)
    matrices = [
        parts for name, parts in stored_weights(load_spec(path), path, shard=shard) if name.endswith(("output.weight", "qkv.weight"))
    ]
    assert all(isinstance(part, QuantizedRows) for parts in matrices for part in parts)


def test_only_rows_that_a_rank_holds_are_decoded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GGUF file, in whatever order the family wants the rows."""
    Case("llama", GGUF_CASES["llama"].config, GGUF_CASES["llama"].changes).make().save_pretrained(tmp_path / "model")
    path = tmp_path / "model.gguf"
    path.write_bytes(converted(tmp_path / "model", GGUF_CASES["llama"], "Q8_0"))
    spec, decoded = load_spec(path), list[int]()
    monkeypatch.setattr(tensors, "read_rows", lambda kind, data: decoded.append(data.nbytes) or read_rows(kind, data))

    def decoded_by(shard: Shard) -> int:
        decoded.clear()
        for _ in stored_weights(spec, path, shard=shard):
            pass
        return sum(decoded)

    whole, *parts = (decoded_by(shard) for shard in (Shard(stage=1, num_stages=3), Shard(0, 2, 1, 3), Shard(1, 2, 1, 3)))
    assert whole < sum(parts) < 1.1 * whole  # both have the norms


def packed(folder: pathlib.Path, shard: Shard, dtype: torch.dtype, quantization: str) -> tuple[PackedWeights, Workspace]:
    spec, workspace = load_spec(folder), Workspace(load_kernels(), 1)
    packing = WeightPacking(workspace, spec, array_dtype(dtype), shard=shard, quantization=quantization)
    return packing.pack(stored_weights(spec, folder, "auto", load_quantization(folder), shard)), workspace


PACKED = [("", "none"), ("", "int8"), ("", "int4"), *((name, "none") for name in LAYOUTS)]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("name", "quantization"), slow_but([*PACKED[:3], *((name, "none") for name in QUICK)], PACKED))
@pytest.mark.skipif(os.environ.get("AENGINE_CPU_LEVEL") == "torch", reason="AENGINE_CPU_LEVEL turns the CPU kernels off")
def test_products_of_packed_parts(tmp_path: pathlib.Path, models, name: str, quantization: str) -> None:
    """Exact mode: the products of all ranks side by side are those of one rank, bit for bit, in any format. Fast mode: their sums are."""
    folder = tmp_path if name else models("cohere2")
    if name:
        rewrite(models("cohere2"), tmp_path, LAYOUTS[name])
    spec, dtype = load_spec(folder), torch.bfloat16 if quantization == "none" else torch.float32
    whole, workspace = packed(folder, WHOLE, dtype, quantization)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).to(dtype)

    def products(weights: PackedWeights, stem: str, first: int = 0) -> Tensor:
        part = as_array(x[:, first : first + weights.linears[stem].in_features])
        return as_tensor(logits(workspace, part, weights.linears[stem]))

    ranks = [packed(folder, Shard(index, 2), dtype, quantization)[0] for index in range(2)]
    for stem in ("layers.0.output", "layers.0.down", "head"):
        assert torch.equal(torch.cat([products(rank, stem) for rank in ranks], dim=1), products(whole, stem)), stem
    if "act" in name or quantization == "int4":  # the groups of which begin where a part begins
        return
    ranks = [packed(folder, grouped(Shard(index, 2, exact=False), spec, folder), dtype, quantization)[0] for index in range(2)]
    for stem in ("layers.0.output", "layers.0.down"):
        expected = products(whole, stem)
        found = products(ranks[0], stem) + products(ranks[1], stem, ranks[0].linears[stem].in_features)
        assert (found - expected).norm() < 0.02 * expected.norm(), stem


def test_groups_that_are_too_few(tmp_path: pathlib.Path, models) -> None:
    rewrite(models("qwen3_moe"), tmp_path, LAYOUTS["gptq 4 bits"])
    spec = load_spec(tmp_path)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size: 2 is more than the groups of 32 quantised columns in intermediate_size 32; .* 'exact'"
    ):
        sharded_weights(spec, grouped(Shard(0, 2, exact=False), spec, tmp_path))


def test_random_weights_are_those_of_the_whole_model(models) -> None:
    spec = load_spec(models("deepseek_v3"))
    whole = {name: parts[0] for name, parts in random_weights(spec, FLOAT32, 3)}
    for shard in (Shard(1, 2), Shard(1, 2, 1, 2, exact=False)):
        held = dict(random_weights(spec, FLOAT32, 3, shard))
        for name, part in sharded_weights(spec, shard).items():
            assert np.array_equal(np.concatenate(held[name]), np.concatenate(take_part((whole[part.source_name],), part)))
        assert held.keys() == sharded_weights(spec, shard).keys()


def test_only_what_a_rank_holds_is_read(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mapped checkpoint nothing else is asked of the disk, and nothing is copied."""
    folder = models("qwen3_moe")
    spec = load_spec(folder)
    asked: list[Any] = []
    monkeypatch.setattr(loading, "read_from_disk", asked.append)
    for rank in range(4):
        asked.clear()
        shard = Shard(rank, 4)
        held = [part for _, parts in stored_weights(spec, folder, shard=shard) for part in parts]
        wanted = sum(math.prod(part.shape) for part in sharded_weights(spec, shard).values())
        assert sum(each.size for each in held) == wanted
        assert {(data_address(each), each.shape) for each in asked} <= {(data_address(each), each.shape) for each in held}
    assert wanted < 0.5 * sum(math.prod(part.shape) for part in sharded_weights(spec, WHOLE).values())


@pytest.mark.parametrize("name", ["", "gptq 4 bits"])
def test_bytes(tmp_path: pathlib.Path, models, name: str) -> None:
    """Ranks take together what one takes, but for what each of them holds."""
    folder = tmp_path if name else models("gpt_neox")
    if name:
        rewrite(models("gpt_neox"), tmp_path, LAYOUTS[name])
    spec, config = load_spec(folder), EngineConfig(model=str(folder), device="cpu")
    quantized = quantized_bytes(config, spec, folder)
    whole = weight_bytes(config, spec, 2, quantized)
    assert bool(name) == ("layers.0.qkv.weight" in quantized)
    for exact in (True, False):
        ranks = [weight_bytes(config, spec, 2, quantized, Shard(index, 4, exact=exact)) for index in range(4)]
        for weight, size in whole.items():
            taken = [rank.get(weight, 0) for rank in ranks]
            assert sum(taken) in (size, 4 * size), weight
        assert sum(rank["layers.0.down.weight"] for rank in ranks) == whole["layers.0.down.weight"]


def test_bytes_of_a_tied_head(tmp_path: pathlib.Path) -> None:
    """The embedding is mapped, or the decoder's own part; what counts is the head that is made of it."""
    spec = load_spec(random_model("cohere2", tmp_path))
    config = EngineConfig(model=str(tmp_path), device="cpu")
    whole = weight_bytes(config, spec, 2, {})["embedding.weight"]
    for splits in (True, False):
        ranks = [weight_bytes(config, spec, 2, {}, Shard(index, 3, splits_embedding=splits)) for index in range(3)]
        assert sum(rank["embedding.weight"] for rank in ranks) == whole
