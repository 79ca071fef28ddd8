"""Draws of the CPU kernels against those of torch, and against NumPy where torch takes another way."""

from __future__ import annotations

import itertools
import math

import cpu_ops
import numpy as np
import pytest
import torch
from cpu_ops import NO_LAST_TOKENS
from draw_limits import VOCAB, denormals, wrong
from slow_cases import slow_but
from tensor_sampler import tensor_sampler
from test_cpu_stack import everything, layouts, pool_of, random_weights, run_step, stack_of, tiny_spec, token_ids
from torch import Tensor

from aengine.kernels.cpu.library import CpuKernels, Workspace
from aengine.kernels.params import DRAW_PARAMS
from aengine.sampling.draw import Draw, TorchDraw, log_exponential, row_keys, token_hashes, with_chosen
from aengine.scheduler.plan import NewRow, RowParams

CPU = torch.device("cpu")
FILTERS = [
    {"top_k": k, "top_p": p, "min_p": m} for k, p, m in itertools.product((0, 1, 5, 40), (1.0, 0.05, 0.6, 0.95), (0.0, 0.02, 0.3))
]  # fmt: skip


def rows_of(temperatures: tuple[float, ...] = (0.0, 0.4, 1.0, 1.7)) -> list[RowParams]:
    """Every filter at every temperature, with seeds that use all of their bits."""
    pairs = itertools.product(temperatures, FILTERS)
    return [
        RowParams(temperature=one, seed=(number * 0x9E3779B97F4A7C15) % (1 << 64), **filters) for number, (one, filters) in enumerate(pairs)
    ]


def drawn(draw: Draw, rows: list[RowParams], logits: Tensor, positions: list[int]) -> list[int]:
    sampler = tensor_sampler(len(rows), logits.shape[1], CPU, draw)
    sampler.update([NewRow(row, params, 3) for row, params in enumerate(rows)])
    arrays = np.arange(len(rows), dtype=np.int32), np.array(positions, dtype=np.int32)
    return sampler.sample(logits, *arrays, *map(torch.from_numpy, arrays)).tokens.tolist()


def kernel_draw(some_kernels: CpuKernels, threads: int) -> Draw:
    workspace = Workspace(some_kernels, threads)
    return lambda logits, host_params, _, chosen=None: with_chosen(
        cpu_ops.draw(workspace, logits.contiguous(), host_params), logits, chosen
    )


def drawn_here(some_kernels: CpuKernels, rows: list[RowParams], logits: Tensor, positions: list[int], threads: int = 2) -> list[int]:
    return drawn(kernel_draw(some_kernels, threads), rows, logits, positions)


def drawn_by_torch(rows: list[RowParams], logits: Tensor, positions: list[int]) -> list[int]:
    return drawn(TorchDraw(logits.shape[1], CPU), rows, logits, positions)


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 777, 4099])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_tokens_are_those_of_torch(some_kernels: CpuKernels, vocab_size: int, spread: float) -> None:
    """Up to rounding, which decides none of these. Where a nucleus may be wide torch looks at 1,024 candidates first."""
    rows = [row for row in rows_of() if vocab_size < 1024 or row.top_k or row.top_p in (1.0, 0.05)]
    generator = torch.Generator().manual_seed(vocab_size)
    logits = spread * torch.randn(len(rows), vocab_size, generator=generator)
    positions = torch.randint(1 << 20, (len(rows),), generator=generator).tolist()
    assert drawn_here(some_kernels, rows, logits, positions) == drawn_by_torch(rows, logits, positions)


def test_a_row_depends_on_itself_alone(some_kernels: CpuKernels) -> None:
    rows = rows_of((0.0, 0.9))
    logits = torch.randn(len(rows), 9000, generator=torch.Generator().manual_seed(1))
    positions = list(range(len(rows)))
    together = drawn_here(some_kernels, rows, logits, positions, threads=1)
    assert drawn_here(some_kernels, rows, logits, positions, threads=5) == together
    for at in range(0, len(rows), 7):
        assert drawn_here(some_kernels, rows[at : at + 1], logits[at : at + 1], positions[at : at + 1], threads=3) == [together[at]]


def expected_of_nucleus(logits: Tensor, params: RowParams, position: int) -> int:
    """By a sort, in float64."""
    scores = logits.double() / params.temperature
    masses = (scores - scores.max()).exp()
    masses[scores - scores.max() < (math.log(params.min_p) if params.min_p else -math.inf)] = 0
    order = torch.from_numpy(np.lexsort((np.arange(len(logits)), -logits.numpy())))
    sums = masses[order].cumsum(0)
    kept = torch.zeros(len(logits), dtype=torch.bool)
    kept[order[sums - masses[order] < params.top_p * sums[-1]]] = True
    seed = torch.tensor([params.seed - (params.seed >> 63 << 64)])
    noise = log_exponential(row_keys(seed, torch.tensor([position])), token_hashes(len(logits), CPU))[0]
    return int(torch.where(kept & (masses > 0), scores - noise.double(), -math.inf).argmax())


@pytest.mark.parametrize(("top_p", "min_p"), slow_but([(0.2, 0.0), (0.999, 0.01)], itertools.product([0.2, 0.9, 0.999], [0.0, 0.01])))
def test_a_wide_nucleus(some_kernels: CpuKernels, top_p: float, min_p: float) -> None:
    rows = [RowParams(temperature=1.2, top_k=0, top_p=top_p, min_p=min_p, seed=seed) for seed in range(60)]
    logits = torch.randn(len(rows), 20_000, generator=torch.Generator().manual_seed(2))
    positions = [7 * seed for seed in range(60)]
    found = drawn_here(some_kernels, rows, logits, positions)
    assert found == [expected_of_nucleus(*one) for one in zip(logits, rows, positions, strict=True)]
    assert len(set(found)) > 50


def test_of_equal_logits_the_lower_ids_are_kept(some_kernels: CpuKernels) -> None:
    for filters, bound in (
        ({"top_k": 30}, 30),
        ({"top_k": 0, "top_p": 0.25}, 250),
        ({"top_k": 100, "top_p": 0.5}, 50),
        ({"top_k": 0}, 1000),
    ):
        rows = [RowParams(**{"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "seed": seed, **filters}) for seed in range(300)]
        logits = torch.zeros(300, 1000)
        logits[:, ::2] = -0.0  # equal to 0
        found = drawn_here(some_kernels, rows, logits, list(range(300)))
        assert max(found) < bound
        assert len(set(found)) > min(bound, 300) / 2


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("vocab_size", [64, 1000])
def test_logits_that_are_no_numbers(some_kernels: CpuKernels, filters: dict[str, float], vocab_size: int) -> None:
    """Something is chosen, and of the others nothing changes. What is forbidden is not drawn."""
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rows = [RowParams(**{**base, **filters, "seed": seed}) for seed in range(6)]
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(3))
    usual = drawn_here(some_kernels, rows, logits, [5] * 6)
    logits[0, 17] = math.nan
    logits[1, 18] = math.inf
    logits[2] = -math.inf
    logits[3] = -math.inf
    logits[3, 40] = -3.0
    logits[4, torch.arange(vocab_size) != usual[4]] = -math.inf
    found = drawn_here(some_kernels, rows, logits, [5] * 6)
    assert found[0] == 17
    assert found[1] == 18
    assert 0 <= found[2] < vocab_size
    assert found[3:] == [40, usual[4], usual[5]]


def test_extremes(some_kernels: CpuKernels) -> None:
    """Filters that leave the likeliest alone, temperatures at both ends, and a top_p of nearly one."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(4)).repeat(5, 1)
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 9}
    changes = ({"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-4}, {"temperature": 9e-6})
    rows = [RowParams(**{**base, **change}) for change in changes]
    assert drawn_here(some_kernels, rows, logits, [1] * 5) == [int(logits[0].argmax())] * 5
    hot = [RowParams(**{**base, "temperature": 1e6, "seed": seed}) for seed in range(200)]
    assert len(set(drawn_here(some_kernels, hot, logits[:1].repeat(200, 1), [1] * 200))) > 180
    for top_p in (1 - 2**-24, 1 - 2**-23, 0.9999):
        nearly = [RowParams(**{**base, "top_p": top_p, "seed": seed}) for seed in range(40)]
        found = drawn_here(some_kernels, nearly, logits[:1].repeat(40, 1), [1] * 40)
        assert found == [expected_of_nucleus(logits[0], row, 1) for row in nearly]


@pytest.mark.parametrize("flushed", [False, True])
def test_limits_of_parameters(some_kernels: CpuKernels, flushed: bool) -> None:
    with denormals(flushed):
        assert wrong(kernel_draw(some_kernels, 1), CPU) == {}


@pytest.mark.parametrize("flushed", [False, True])
def test_limits_of_parameters_in_torch(flushed: bool) -> None:
    with denormals(flushed):
        assert wrong(TorchDraw(VOCAB, CPU), CPU) == {}


def test_what_does_not_fit_is_refused(some_kernels: CpuKernels) -> None:
    workspace, logits = Workspace(some_kernels, 1), torch.zeros(2, 70)
    for bad in (logits.double(), torch.zeros(70, 2).T):
        with pytest.raises(ValueError, match="not contiguous float32"):
            cpu_ops.draw(workspace, bad, np.zeros(2, DRAW_PARAMS))
    for draws in (np.zeros(3, DRAW_PARAMS), np.zeros(2, np.int64)):
        with pytest.raises(ValueError, match="are not 2 of"):
            cpu_ops.draw(workspace, logits, draws)
    assert cpu_ops.draw(workspace, logits[:0], np.zeros(0, DRAW_PARAMS)).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_that_draws(some_kernels: CpuKernels, dtype: torch.dtype, threads: int) -> None:
    """What it chooses is what is drawn from its logits; also where it begins by itself."""
    spec = tiny_spec("qwen3")
    workspace = Workspace(some_kernels, threads)
    stack, pool = stack_of(workspace, spec, random_weights(spec), dtype), pool_of(spec, dtype, 16)
    for number, layout in enumerate(layouts(16)):
        ids, wanted = token_ids(layout, number), everything(layout)
        draws = np.zeros(layout.num_tokens, DRAW_PARAMS)
        draws["temperature"] = np.where(wanted % 4 == 3, 0.0, 1.0)
        draws["top_p"] = np.where(wanted % 3 == 1, 0.7, 1.0)
        draws["top_k"] = np.where(wanted % 5 == 2, 10, 0)
        draws["seed"], draws["position"] = 77 * wanted, layout.positions + 1
        hidden = run_step(stack, workspace, pool, layout, ids, wanted)
        expected = cpu_ops.draw(workspace, cpu_ops.stack_logits(stack, workspace, hidden), draws).tolist()
        step = stack.prepare(workspace, pool, layout, ids, wanted, draw_params=draws, last_tokens=NO_LAST_TOKENS)
        for begins in (False, True):
            if begins:
                step.begin()
            step.run()
            assert step.hidden is None
            assert step.sampled is not None
            assert step.sampled.tolist() == expected
        nobody = stack.prepare(workspace, pool, layout, ids, wanted[:0], draw_params=draws[:0], last_tokens=NO_LAST_TOKENS)
        nobody.run()
    with pytest.raises(ValueError, match="are not 4 of"):
        stack.prepare(workspace, pool, layout, ids, wanted, draw_params=draws[:1], last_tokens=NO_LAST_TOKENS)


@pytest.mark.parametrize("vocab_size", [1, 65, 4097, 151_936])
def test_log_sums(kernels: CpuKernels, vocab_size: int) -> None:
    """Against torch, and with the same bits for any number of rows and threads; and how many logits are greater than one of each row."""
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 5
    logits[0, -1] = math.inf
    logits[1, 0] = math.nan
    logits[2] = -math.inf
    logits[3, : vocab_size // 2] = -math.inf
    own = logits[:, vocab_size // 2 :][:, :1]
    found, greater = cpu_ops.log_sums(Workspace(kernels, 2), logits, own)
    torch.testing.assert_close(found, logits.double().logsumexp(-1, keepdim=True).float(), rtol=0, atol=4e-6, equal_nan=True)
    one_thread = Workspace(kernels, 1)
    alone = [cpu_ops.log_sums(one_thread, logits[row : row + 1].clone(), own[row : row + 1]) for row in range(6)]
    assert found.view(torch.int32).equal(torch.cat([sums for sums, _ in alone]).view(torch.int32))
    assert greater.equal(torch.cat([count for _, count in alone]))
    assert greater.equal((logits > own).sum(-1))
