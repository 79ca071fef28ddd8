"""A model of the CPU kernels on several ranks, which are threads: exact mode gives the bits of one rank, fast mode nearly its numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import cpu_ops
import numpy as np
import pytest
import torch
from cpu_ops import NO_LAST_TOKENS
from numpy.typing import NDArray
from rank_threads import exchanges, on_ranks
from row_tensors import held_parts
from slow_cases import slow_but
from test_cpu_stack import pool_of, random_weights
from test_sharding import CASES, SIZES, spec_of
from torch import Tensor

from aengine.attention import StepLayout, build_layout
from aengine.kernels.arrays import as_array, as_tensor
from aengine.kernels.cpu.library import CpuKernels, ExchangeError, Workspace, load_kernels
from aengine.kernels.quantized import Rows
from aengine.models.sharding import sharded_weights
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.rank_steps import SharedMemoryExchange

POSITIONS, PAGE = 64, 16
CHUNKS = [[(0, 19)], [(0, 1), (1, 7), (2, 3)], [(0, 1), (1, 1), (2, 1)]]  # per step: a row, and how many of its tokens are computed


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return load_kernels()


@dataclass(frozen=True)
class Inputs:
    layout: StepLayout
    token_ids: NDArray[np.int32]
    indices: NDArray[np.int32]  # the last token of each row


def steps_of(spec: ModelSpec) -> list[Inputs]:
    pages = POSITIONS // PAGE
    table, computed = np.arange(1, 1 + 3 * pages, dtype=np.int32).reshape(1, 3, pages), np.zeros(3, np.int32)
    steps, rng = [], np.random.default_rng(5)
    for chunks in CHUNKS:
        rows, lengths = (np.array(numbers, np.int32) for numbers in zip(*chunks, strict=True))
        layout = build_layout(rows, int((lengths == 1).sum()), computed[rows], lengths, table, PAGE)
        computed[rows] += lengths
        ids = rng.integers(0, spec.vocab_size, layout.num_tokens).astype(np.int32)
        steps.append(Inputs(layout, ids, layout.qo_indptr[1:] - 1))
    return steps


class Rank:
    """A part of a model, with its own workspace and pages."""

    def __init__(
        self,
        kernels: CpuKernels,
        spec: ModelSpec,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        exchange: SharedMemoryExchange | None = None,
        quantization: str = "none",
    ) -> None:
        self.workspace = Workspace(kernels, 2 if shard.size == 2 and shard.index else 1, exchange)
        given = {part.source_name: weights[part.source_name].to(dtype) for part in sharded_weights(spec, shard).values()}
        parts: dict[str, Sequence[Rows]] = {
            name: held_parts(given[part.source_name], part) for name, part in sharded_weights(spec, shard).items()
        }
        self.stack = cpu_ops.packed_stack(
            self.workspace, spec, parts.items(), POSITIONS, dtype=dtype, shard=shard, quantization=quantization
        )
        self.pool = pool_of(self.stack.spec, dtype, PAGE)

    def hidden(self, step: Inputs, inputs: Tensor | None = None) -> Tensor:
        call = self.stack.prepare(
            *(self.workspace, self.pool, step.layout, step.token_ids, step.indices),
            last_tokens=NO_LAST_TOKENS,
            inputs=None if inputs is None else as_array(inputs),
        )
        call.run()
        assert call.hidden is not None
        return as_tensor(call.hidden)

    def run(self, steps: list[Inputs]) -> list[tuple[Tensor, Tensor | None]]:
        """Hidden states and logits of each step."""
        return [(one, self.logits(one)) for one in [self.hidden(step) for step in steps]]

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Of all ranks, on the first one."""
        every = self.stack.gather_logits(self.workspace, self.stack.logits(self.workspace, as_array(hidden)))
        return None if every is None else as_tensor(every)


def on_all(
    kernels: CpuKernels, spec: ModelSpec, weights: dict[str, Tensor], dtype: torch.dtype, size: int, exact: bool, quantization: str = "none"
) -> list[list[tuple[Tensor, Tensor | None]]]:
    shared = exchanges(kernels, size)
    ranks = [Rank(kernels, spec, weights, dtype, Shard(i, size, exact=exact), shared[i], quantization) for i in range(size)]
    return on_ranks(size, lambda index: ranks[index].run(steps_of(spec)))


KINDS = {  # of blocks, each with a number of ranks
    "llama": 3,  # biases
    "gemma2": 2,  # norms after blocks
    "cohere2": 4,  # parallel blocks; fewer KV heads than ranks
    "olmo2": 4,  # norms of all heads together
    "stablelm-parallel": 2,  # norms of each head with weights of its own
    "opt": 2,  # learned positions
    "gpt-oss": 4,  # experts with biases, and sinks
    "qwen2-moe": 3,  # a shared expert with a gate
    "deepseek-v3": 2,  # latent attention
    "bloom": 2,  # slopes of heads, and a norm of embeddings
}
EVERY = [(name, size, dtype) for name in CASES for size in SIZES for dtype in (torch.float32, torch.bfloat16)]
QUICK = [(name, size, torch.bfloat16 if number % 2 else torch.float32) for number, (name, size) in enumerate(KINDS.items())]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("name", "size", "dtype"), slow_but(QUICK, [*QUICK, *(case for case in EVERY[::5] if case not in QUICK)]))
def test_exact_mode_gives_the_bits_of_one_rank(kernels: CpuKernels, name: str, size: int, dtype: torch.dtype) -> None:
    spec = spec_of(name, size)
    weights = random_weights(spec)
    expected = Rank(kernels, spec, weights, dtype).run(steps_of(spec))
    for index, rank in enumerate(on_all(kernels, spec, weights, dtype, size, exact=True)):
        for (hidden, logits), (whole_hidden, whole_logits) in zip(rank, expected, strict=True):
            assert torch.equal(hidden, whole_hidden)
            assert whole_hidden.isfinite().all()
            assert whole_logits is not None
            assert logits is None if index else torch.equal(logits, whole_logits)


@pytest.mark.parametrize(
    ("name", "size"), slow_but(list(KINDS.items())[::3], sorted({*KINDS.items(), *((name, 2) for name in list(CASES)[::4])}))
)
def test_fast_mode_is_near_and_equal_to_itself(kernels: CpuKernels, name: str, size: int) -> None:
    spec = spec_of(name, size)
    weights = random_weights(spec)
    expected = Rank(kernels, spec, weights, torch.float32).run(steps_of(spec))
    first, again = (on_all(kernels, spec, weights, torch.float32, size, exact=False) for _ in range(2))
    for number, (hidden, logits) in enumerate(first[0]):
        assert logits is not None
        torch.testing.assert_close(hidden, expected[number][0], rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(logits, expected[number][1], rtol=2e-4, atol=2e-4)
        assert not torch.equal(hidden, expected[number][0])
        for rank in (*first, *again):
            assert torch.equal(rank[number][0], hidden)
        other = again[0][number][1]
        assert other is not None
        assert torch.equal(other, logits)


@pytest.mark.parametrize(
    ("name", "quantization", "dtype"),
    slow_but(
        [("qwen2", "int8", torch.bfloat16), ("glm4-moe", "int4", torch.float32)],
        itertools.product(["qwen2", "glm4-moe"], ["int8", "int4"], [torch.float32, torch.bfloat16]),
    ),
)
def test_quantised_weights_give_the_bits_of_one_rank(kernels: CpuKernels, name: str, quantization: str, dtype: torch.dtype) -> None:
    spec = spec_of(name, 2)
    weights = random_weights(spec)
    expected = Rank(kernels, spec, weights, dtype, quantization=quantization).run(steps_of(spec))
    ranks = on_all(kernels, spec, weights, dtype, 2, True, quantization)
    for mine, (whole_hidden, whole_logits) in zip(ranks[0], expected, strict=True):
        assert torch.equal(mine[0], whole_hidden)
        assert mine[1] is not None
        assert whole_logits is not None
        assert torch.equal(mine[1], whole_logits)


def test_a_step_ends_when_a_rank_does_not_come(kernels: CpuKernels) -> None:
    spec = spec_of("llama", 2)
    weights, shared = random_weights(spec), exchanges(kernels, 2, timeout=0.1)
    rank = Rank(kernels, spec, weights, torch.float32, Shard(1, 2), shared[1])
    for _ in range(2):  # nothing runs afterwards either
        with pytest.raises(ExchangeError) as caught:
            rank.run(steps_of(spec))
        assert caught.value.lagging == (0,)
    whole = Rank(kernels, spec, weights, torch.float32)
    alone = Rank(kernels, spec, weights, torch.float32, Shard(0, 2))
    with pytest.raises(ValueError, match="exchange is between 1 ranks, and the model is on 2"):
        alone.run(steps_of(spec))
    assert whole.run(steps_of(spec))


@pytest.mark.parametrize(("name", "size", "num_stages"), [("qwen3-moe", 2, 2), ("opt", 1, 3)])
def test_stages_hand_on_hidden_states(kernels: CpuKernels, name: str, size: int, num_stages: int) -> None:
    spec = spec_of(name, 2)
    weights = random_weights(spec)
    expected = Rank(kernels, spec, weights, torch.bfloat16).run(steps_of(spec))
    shared = [exchanges(kernels, size) for _ in range(num_stages)]
    stages = [
        [Rank(kernels, spec, weights, torch.bfloat16, Shard(i, size, stage, num_stages), shared[stage][i]) for i in range(size)]
        for stage in range(num_stages)
    ]

    def run(index: int) -> list[tuple[Tensor, Tensor | None]]:
        done = []
        for step in steps_of(spec):
            hidden: Tensor | None = None
            for ranks in stages:
                hidden = ranks[index].hidden(step, None if hidden is None else hidden.contiguous())
            assert hidden is not None
            done.append((hidden, stages[0][index].logits(hidden)))
        return done

    for (hidden, logits), (whole_hidden, whole_logits) in zip(on_ranks(size, run)[0], expected, strict=True):
        assert torch.equal(hidden, whole_hidden)
        assert logits is not None
        assert whole_logits is not None
        assert torch.equal(logits, whole_logits)
    with pytest.raises(ValueError, match="inputs of shape None are not"):
        stages[1][0].hidden(steps_of(spec)[0])
