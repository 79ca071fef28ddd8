"""Steps whose tokens have adapters, against the torch decoder with weights that the adapters' products were added to."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import cpu_ops
import numpy as np
import pytest
import torch
from cpu_ops import NO_LAST_TOKENS
from row_tensors import with_tensors
from slow_cases import slow_but
from test_cpu_blocks import MODELS, spec_of, weights_of
from test_cpu_blocks import family as family
from test_cpu_stack import CHUNKS, POSITIONS, everything, layouts, pool_of, random_weights, stack_of, tiny_spec, token_ids, torch_logits
from torch import Tensor

from aengine.api.errors import AdapterError
from aengine.attention import StepLayout, build_layout
from aengine.kernels.arrays import as_array, as_tensor
from aengine.kernels.cpu.library import CpuKernels, Workspace
from aengine.kernels.cpu.ops import PackedCpuAdapter, StepAdapters
from aengine.models.adapters import Adapter, LowRankPart
from aengine.models.cpu.stack import DecoderStack
from aengine.models.spec import ModelSpec

RANKS = (1, 7, 16, 64)
NEVER = re.compile(r"positions|router|shared_gate$|\.experts|key_up|value_up")
OF_SEQUENCES = np.array([2, -1, 0, 3], np.int32)  # the adapter of each sequence of `layouts`


def random_adapter(spec: ModelSpec, weights: dict[str, Tensor], rank: int) -> Adapter:
    """Of every matrix that can have one. Fused ones have a part for each that they are made of, but keys have none."""
    torch.manual_seed(rank)
    parts = {}
    for name, weight in {**weights, "head.weight": weights.get("head.weight", weights["embedding.weight"])}.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight" or weight.dim() != 2 or NEVER.search(stem):
            continue
        rows, columns = weight.shape if stem != "embedding" else weight.shape[::-1]
        ranges = [range(rows)]
        if stem.endswith("qkv"):
            attention = spec.layers[int(stem.split(".")[1])].attention
            keys = rows - attention.num_kv_heads * attention.head_dim
            ranges = [range(attention.num_heads * attention.head_dim), range(keys, rows)]
        elif stem.endswith("gate_up"):
            ranges = [range(*pair) for pair in pairwise([0, rows // 2, rows])]
        parts[stem] = tuple(
            LowRankPart(each, as_array(torch.randn(rank, columns) / columns**0.5), as_array(0.1 * torch.randn(len(each), rank)))
            for each in ranges
        )
    return Adapter(parts)


def merged(weights: dict[str, Tensor], adapter: Adapter) -> dict[str, Tensor]:
    changed = {name: weight.clone() for name, weight in weights.items()}
    changed.setdefault("head.weight", changed["embedding.weight"].clone())
    for stem, parts in with_tensors(adapter).parts.items():
        for part in parts:
            weight = changed[f"{stem}.weight"]
            (weight.T if stem == "embedding" else weight)[part.rows.start : part.rows.stop] += part.b @ part.a
    return changed


def step_adapters(packed: list[PackedCpuAdapter], of_rows: np.ndarray, layout: StepLayout) -> StepAdapters:
    return StepAdapters(packed, np.repeat(of_rows, np.diff(layout.qo_indptr)))


def run_steps(
    workspace: Workspace, stack: DecoderStack, packed: list[PackedCpuAdapter], of_sequences: np.ndarray
) -> list[tuple[Tensor, Tensor]]:
    """Of all tokens of each step the hidden states and the logits; next tokens are checked against those."""
    results = []
    pool = pool_of(stack.spec, stack.dtype, 16)
    for number, (layout, chunks) in enumerate(zip(layouts(16), CHUNKS, strict=True)):
        adapters = step_adapters(packed, of_sequences[[sequence for sequence, _ in chunks]], layout)
        hidden, sampled = None, None
        for greedy in (True, False):
            step = stack.prepare(
                *(workspace, pool, layout, token_ids(layout, number), everything(layout)[::-1]),
                greedy=greedy,
                last_tokens=NO_LAST_TOKENS,
                adapters=adapters,
            )
            step.run()
            hidden, sampled = (None if greedy else as_tensor(step.hidden)), step.sampled if greedy else sampled
        of_hidden = StepAdapters(packed, adapters.of_tokens[::-1])
        logits = cpu_ops.stack_logits(stack, workspace, hidden, of_hidden)
        assert sampled.tolist() == logits.argmax(-1).tolist()
        results.append((hidden.flip(0), logits.flip(0)))
    return results


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", slow_but(["qwen3-tied-biased-odd", "gemma", "deepseek"], ["qwen3-tied-biased-odd", *MODELS]))
def test_rows_with_adapters_get_the_logits_of_merged_weights(kernels: CpuKernels, name: str) -> None:
    spec = spec_of(name) if name in MODELS else tiny_spec(name)
    weights, steps, workspace = weights_of(spec), layouts(16), Workspace(kernels, 2)
    adapters = [random_adapter(spec, weights, rank) for rank in RANKS]
    stack = stack_of(workspace, spec, weights, torch.float32)
    found = run_steps(workspace, stack, [stack.pack_adapter(adapter) for adapter in adapters], OF_SEQUENCES)
    untied = dataclasses.replace(spec, tied_head=False)
    expected = {i: torch_logits(untied, merged(weights, adapters[i]), torch.float32, steps) for i in OF_SEQUENCES if i >= 0}
    expected[-1] = torch_logits(untied, merged(weights, Adapter({})), torch.float32, steps)
    for number, (layout, chunks) in enumerate(zip(steps, CHUNKS, strict=True)):
        for (sequence, _), pair in zip(chunks, pairwise(layout.qo_indptr), strict=True):
            own = expected[OF_SEQUENCES[sequence]][number]
            torch.testing.assert_close(found[number][1][slice(*pair)], own[slice(*pair)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_bits_depend_on_nothing_but_a_tokens_own_sequence(some_kernels: CpuKernels, quantization: str) -> None:
    """Not on other rows and their adapters, the order of adapters, chunks or threads."""
    spec = tiny_spec("qwen3")
    weights, workspace = random_weights(spec), Workspace(some_kernels, 1)
    stack = stack_of(workspace, spec, weights, torch.bfloat16, quantization=quantization)
    packed = [stack.pack_adapter(random_adapter(spec, weights, rank)) for rank in RANKS]
    expected = run_steps(workspace, stack, packed, OF_SEQUENCES)
    others = np.array([1, 3, 2, 0], np.int32)  # in another order; sequence 1 has one now
    found = run_steps(Workspace(some_kernels, 5), stack, [packed[i] for i in (3, 2, 0, 1)], others)
    for mine, other, layout, chunks in zip(expected, found, layouts(16), CHUNKS, strict=True):
        for (sequence, _), pair in zip(chunks, pairwise(layout.qo_indptr), strict=True):
            same = [torch.equal(mine[i][slice(*pair)], other[i][slice(*pair)]) for i in range(2)]
            assert same == [sequence != 1] * 2
    hidden, logits = expected[3]  # 132 tokens; 2640 are so many that low-rank products are computed between the others
    adapters = step_adapters(packed, OF_SEQUENCES[[0, 1, 2, 3]], layouts(16)[3]).of_tokens
    many = cpu_ops.stack_logits(stack, workspace, hidden.repeat(20, 1), StepAdapters(packed, np.tile(adapters, 20)))
    assert torch.equal(many, logits.repeat(20, 1))

    ids, kept = [], []  # of sequence 3, which comes last in its steps
    for number, layout in enumerate(layouts(16)):
        if CHUNKS[number][-1][0] == 3:
            count = CHUNKS[number][-1][1]
            ids.append(token_ids(layout, number)[-count:])
            kept.append(expected[number][0][-count:])
    pool, table = pool_of(spec, torch.bfloat16, 16), np.arange(1, 1 + POSITIONS // 16, dtype=np.int32)[None, None]
    row, first, alone = np.zeros(1, np.int32), 0, []
    for count in (5, 1, 60, 66):
        layout = build_layout(row, int(count == 1), row + first, row + count, table, 16)
        given = (workspace, pool, layout, np.concatenate(ids)[first : first + count], everything(layout))
        step = stack.prepare(*given, last_tokens=NO_LAST_TOKENS, adapters=StepAdapters(packed, np.full(count, 3, np.int32)))
        step.run()
        alone.append(as_tensor(step.hidden))
        first += count
    assert torch.equal(torch.cat(alone), torch.cat(kept))


def test_an_adapter_of_another_shape_is_refused(some_kernels: CpuKernels) -> None:
    spec = tiny_spec("qwen3")
    stack = stack_of(Workspace(some_kernels, 1), spec, random_weights(spec), torch.float32)
    with pytest.raises(AdapterError, match=r"adapters cannot be added to layers\.0\.experts"):
        stack.pack_adapter(Adapter({"layers.0.experts.down": ()}))
    part = LowRankPart(range(64), np.zeros((4, 64), np.float32), np.zeros((64, 4), np.float32))
    with pytest.raises(
        AdapterError, match=r"layers\.0\.down of shape \[64, 96\] does not fit an adapter of shapes \[4, 64\] and \[64, 4\]"
    ):
        stack.pack_adapter(Adapter({"layers.0.down": (part,)}))
    with pytest.raises(ValueError, match="adapters -1 to 1 of tokens are not among -1 to 0"):
        StepAdapters([stack.pack_adapter(Adapter({}))], np.array([-1, 1], np.int32))
