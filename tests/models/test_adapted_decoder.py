"""The torch decoder with adapters against the same decoder whose weights are merged with them, whole and on several ranks."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from row_tensors import with_tensors
from slow_cases import slow_but
from tensor_ranks import CPU, all_logits, backend_of, decoder_of, layouts, whole_weights, with_collectives
from test_tensor_parallel import CASES, spec_of
from tiny_adapters import write_adapter
from torch import Tensor
from triton_mode import DEVICES  # before triton is imported

from aengine.attention import StepLayout
from aengine.kernels.arrays import FLOAT32
from aengine.kernels.triton.adapters import TritonAdapterOps
from aengine.layers.adapters import AdapterOps, AdapterShape, AdapterTable, TorchAdapterOps
from aengine.layers.collectives import Collectives
from aengine.models.adapters import Adapter, adapter_bytes, adapter_shapes, load_adapter, packed_adapter
from aengine.models.sharding import sharded_spec
from aengine.models.spec import ModelSpec
from aengine.models.torch.blocks import Weights
from aengine.parallel.shard import WHOLE, Shard

NUM_SLOTS, LOW_RANK = 3, 16
CHUNKS = [[(0, 11), (1, 5), (2, 9)], [(0, 1), (2, 1), (1, 4)], [(0, 1), (1, 1), (2, 1)]]
SLOT_OF_ROW = np.array([2, NUM_SLOTS, 0], dtype=np.int32)  # the second row has no adapter


def adapters_of(name: str, path: pathlib.Path, spec: ModelSpec, shard: Shard) -> list[Adapter]:
    """Written where they are not yet; of different modules and ranks."""
    folders = [path / str(rank) for rank in (5, 16)]
    if not folders[0].exists():
        CASES[name].make().save_pretrained(path / "model")
        untied = not spec.tied_head
        write_adapter(folders[0], path / "model", rank=5, size=0.5, embedding=True, head=untied)
        write_adapter(folders[1], path / "model", rank=16, seed=1, size=0.5, head=True)
    return [load_adapter(folder, spec, FLOAT32, shard) for folder in folders]


def table_of(spec: ModelSpec, shard: Shard, adapters: list[Adapter], ops: AdapterOps) -> AdapterTable:
    table = AdapterTable(adapter_shapes(spec, shard), NUM_SLOTS, LOW_RANK, 64, torch.float32, CPU, ops)
    for slot, adapter in zip((0, 2), adapters, strict=True):
        table.put_adapter(slot, packed_adapter(table, adapter))
    return table


def merged(weights: dict[str, Tensor], adapter: Adapter, spec: ModelSpec) -> dict[str, Tensor]:
    """In the table of a tied head, so that both can differ."""
    found = {name: weight.clone() for name, weight in weights.items()}
    found.setdefault("head.weight", found["embedding.weight"].clone())
    for stem, parts in with_tensors(adapter).parts.items():
        for part in parts:
            rows = found[f"{stem}.weight"]
            if stem == "embedding":
                rows += (part.b @ part.a).t()
            else:
                rows[part.rows.start : part.rows.stop] += part.b @ part.a
    return found


def expected_logits(spec: ModelSpec, weights: dict[str, Tensor], adapters: list[Adapter], steps: list[StepLayout]) -> list[list[Tensor]]:
    """Of all tokens of each step, with the weights of each slot."""
    by_slot = {NUM_SLOTS: weights, **{slot: merged(weights, one, spec) for slot, one in zip((0, 2), adapters, strict=True)}}
    return [all_logits(decoder_of(spec, by_slot[slot], None), spec, steps) for slot in sorted(by_slot)]


def adapted_logits(
    spec: ModelSpec, weights: dict[str, Tensor], table: AdapterTable, collectives: Collectives | None, steps: list[StepLayout]
) -> list[Tensor]:
    decoder = decoder_of(spec, weights, collectives, table)
    own = spec if collectives is None else sharded_spec(spec, collectives.shard)
    backend, out = backend_of(own), []
    for number, (layout, chunk) in enumerate(zip(steps, CHUNKS, strict=True)):
        table.write_slots(np.concatenate([np.full(count, SLOT_OF_ROW[row], dtype=np.int32) for row, count in chunk]))
        out += all_logits(decoder, own, [layout], backend, number)
    return out


def assert_equal(found: list[Tensor], expected: list[list[Tensor]]) -> None:
    order = sorted({0, 2, NUM_SLOTS})
    for step, chunk in enumerate(CHUNKS):
        slots = np.concatenate([np.full(count, SLOT_OF_ROW[row]) for row, count in chunk])
        wanted = torch.stack([expected[order.index(slot)][step][token] for token, slot in enumerate(slots)])
        assert ((found[step] - wanted).abs().amax() / wanted.abs().amax()).item() < 1e-5
        assert (wanted - expected[-1][step]).abs().amax() > 0.1, "adapters change something"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ops", [TorchAdapterOps(), pytest.param(TritonAdapterOps(), marks=DEVICES[0].marks)], ids=["torch", "triton"])
@pytest.mark.parametrize("name", slow_but(["llama-odd", "qwen2-moe", "deepseek-v3"], CASES))
def test_logits_are_those_of_merged_weights(name: str, ops: AdapterOps, tmp_path: pathlib.Path) -> None:
    spec, steps = spec_of(CASES[name]), layouts(CHUNKS)
    weights, adapters = whole_weights(spec), adapters_of(name, tmp_path, spec, WHOLE)
    with torch.inference_mode():
        table = table_of(spec, WHOLE, adapters, ops)
        found = adapted_logits(spec, weights, table, None, steps)
        assert_equal(found, expected_logits(spec, weights, adapters, steps))
    memory = sum(each.nbytes for matrices in table._matrices.values() for each in (matrices.a, matrices.b))
    assert adapter_bytes(spec, WHOLE, NUM_SLOTS, LOW_RANK, 4) == memory


@pytest.mark.parametrize(
    ("name", "exact"), slow_but([("llama-odd", False), ("gpt2", True)], [(name, exact) for name in CASES for exact in (True, False)])
)
def test_logits_of_ranks(name: str, exact: bool, tmp_path: pathlib.Path) -> None:
    spec, steps = spec_of(CASES[name]), layouts(CHUNKS)
    weights, adapters = whole_weights(spec), adapters_of(name, tmp_path, spec, WHOLE)

    def work(collectives: Collectives) -> list[Tensor]:
        shard = collectives.shard
        table = table_of(spec, shard, adapters_of(name, tmp_path, spec, shard), TorchAdapterOps())
        return adapted_logits(spec, weights, table, collectives, steps)

    found = with_collectives(2, work, exact=exact)
    with torch.inference_mode():
        expected = expected_logits(spec, weights, adapters, steps)
    for each in found:
        assert_equal(each, expected)


def test_adapters_get_activations_that_are_not_rounded() -> None:
    class Float8:
        takes_float8 = True
        nbytes = 0

    weights = Weights({"up.weight": Float8()})
    assert weights.takes_float8("up")
    table = AdapterTable({"up": AdapterShape(8, (0, 8))}, 1, 8, 8, torch.float32, CPU, TorchAdapterOps())
    assert not replace(weights, adapters=table).takes_float8("up")
