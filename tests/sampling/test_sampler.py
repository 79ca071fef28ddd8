"""The sampler's promises: exact greedy, right distributions, and tokens that do not depend on the company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from slow_cases import slow_but
from tensor_sampler import tensor_sampler

from aengine.sampling.sampler import Sampler
from aengine.scheduler.plan import NewRow, RowParams

GREEDY = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
CPU = torch.device("cpu")


def params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0) -> RowParams:
    return RowParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


def sample(sampler: Sampler, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    device = sampler._arrays.device
    on_device = (torch.from_numpy(array).to(device) for array in (rows, positions))
    return sampler.sample(logits.to(device), rows, positions, *on_device).tokens


def draw(logits: torch.Tensor, rows: list[RowParams], positions: list[int], device: torch.device = CPU) -> list[int]:
    """One token for each row of logits; row indices are scrambled, as in an old engine."""
    count = len(rows)
    sampler = tensor_sampler(count + 5, logits.shape[1], device)
    indices = np.random.default_rng(count).permutation(count + 5)[:count].astype(np.int32)
    sampler.update([NewRow(int(index), one) for index, one in zip(indices, rows, strict=True)])
    return sample(sampler, logits, indices, np.array(positions, dtype=np.int32)).tolist()


def draw_many(logits: torch.Tensor, one: RowParams, count: int) -> np.ndarray:
    """Counts per token of `count` draws at successive positions from the same [V] logits."""
    sampler = tensor_sampler(1, len(logits), CPU)
    sampler.update([NewRow(0, one)])
    rows = np.zeros(count, dtype=np.int32)
    tokens = sample(sampler, logits.expand(count, -1), rows, np.arange(count, dtype=np.int32))
    return torch.bincount(tokens, minlength=len(logits)).numpy()


def chi_square_p(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Upper tail of the chi-square test. Tokens of probability zero must not occur."""
    possible = probabilities > 0
    assert observed[~possible].sum() == 0
    expected = probabilities[possible] * observed.sum()
    statistic = ((observed[possible] - expected) ** 2 / expected).sum()
    degrees = possible.sum() - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0).double(), torch.tensor(statistic / 2.0).double()))


def filtered(logits: torch.Tensor, one: RowParams) -> np.ndarray:
    """The distribution to draw from, in float64 and in the plainest way: temperature, min_p, top_k, top_p."""
    p = (logits.double() / one.temperature).softmax(-1).numpy()
    p = np.where(p < one.min_p * p.max() * (1 - 1e-6), 0.0, p)
    order = np.lexsort((np.arange(len(p)), -p))
    if one.top_k:
        p[order[one.top_k :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= one.top_p]] = 0.0
    return p / p.sum()


MIXED = [
    GREEDY,
    params(0.7, seed=3),
    params(1.0, top_k=5, seed=2**64 - 1),
    params(1.3, top_p=0.8, seed=4),
    params(1.0, min_p=0.2, seed=5),
    params(0.9, top_k=40, top_p=0.9, min_p=0.01, seed=6),
    params(1.0, top_p=0.9999, seed=7),
    params(2.0, top_k=10**9, seed=8),
]


@pytest.mark.parametrize("neighbours", [[], MIXED, [GREEDY] * 3])
def test_greedy_is_argmax_whatever_the_neighbours(neighbours: list[RowParams]) -> None:
    logits = torch.randn(1 + len(neighbours), 500, generator=torch.Generator().manual_seed(0))
    logits[0, 77] = logits[0, 200] = 9.0  # a tie goes to the lower id
    assert draw(logits, [GREEDY, *neighbours], [5] * len(logits))[0] == 77


def test_all_greedy_is_one_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda self, *args: calls.append(self.shape) or real(self, *args))
    draw(torch.randn(3, 20), [GREEDY] * 3, [0, 1, 2])
    assert calls == [(3, 20)]


def test_tiny_temperature_is_argmax() -> None:
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(1))
    assert draw(logits, [params(2e-5, seed=seed) for seed in range(50)], [0] * 50) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("one", [params(), params(0.6, seed=1), params(1.5, seed=2**63)])
def test_chi_square(one: RowParams) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.1])
    assert chi_square_p(draw_many(logits, one, 20_000), filtered(logits, one)) > 1e-6


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("one", MIXED[1:], ids=repr)
def test_chi_square_with_filters(one: RowParams) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(9)) * 2
    probabilities = filtered(logits, one)
    observed = draw_many(logits, one, 20_000)
    assert observed[probabilities == 0].sum() == 0, "a filtered token was drawn"
    common = probabilities * 20_000 > 10  # the test needs well-filled bins; the rest share one
    rest = probabilities[~common].sum()
    merged = (np.append(observed[common], observed[~common].sum()), np.append(probabilities[common], rest))
    assert chi_square_p(*merged) > 1e-6


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    """Chi-square over the joint table of two draws, for each way in which they can be neighbours."""
    count = 40_000
    sampler = tensor_sampler(count + 1, 4, CPU)
    sampler.update([NewRow(row, params(seed=row)) for row in range(count + 1)])
    rows = np.arange(count, dtype=np.int32)

    def tokens(seed_shift: int, position: np.ndarray) -> torch.Tensor:
        return sample(sampler, torch.zeros(count, 4), rows + seed_shift, position)

    fixed = np.full(count, 7, dtype=np.int32)
    base = tokens(0, fixed)
    for other in (tokens(1, fixed), tokens(0, fixed + 1), tokens(1, fixed - 1), tokens(0, rows)):
        table = torch.bincount(base * 4 + other, minlength=16).numpy()
        assert chi_square_p(table, np.full(16, 1 / 16)) > 1e-6


def test_tokens_are_independent_of_row_batch_and_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(len(MIXED), 1000, generator=generator) * 3
    positions = list(range(10, 10 + len(MIXED)))
    together = draw(logits, MIXED, positions)
    assert [draw(logits[i : i + 1], [MIXED[i]], [positions[i]])[0] for i in range(len(MIXED))] == together
    backwards = draw(logits.flip(0), MIXED[::-1], positions[::-1])
    assert backwards[::-1] == together
    crowd = draw(torch.cat((logits, logits, logits)), MIXED * 3, positions * 3)
    assert crowd == together * 3
    mixed_company = draw(torch.cat((logits, torch.randn(30, 1000))), MIXED + [params(top_k=999, seed=1)] * 30, positions + [0] * 30)
    assert mixed_company[: len(MIXED)] == together


def test_large_vocabularies_do_not_mix_rows() -> None:
    """Large enough that a crowd is worked on in several parts."""
    logits = torch.randn(len(MIXED), 50_001, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 6, len(MIXED))[:, None]
    together = draw(torch.cat((logits, logits)), MIXED * 2, [7] * 2 * len(MIXED))
    assert together == [draw(logits[i : i + 1], [one], [7])[0] for i, one in enumerate(MIXED)] * 2


def test_what_nobody_asked_for_is_not_made() -> None:
    sampler = tensor_sampler(8, 50, CPU)
    sampler.update([NewRow(row, one) for row, one in enumerate(MIXED)])
    rows, at = np.arange(8, dtype=np.int32), np.zeros(8, dtype=np.int32)
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    sampled = sampler.sample(logits, rows, at, torch.from_numpy(rows), torch.from_numpy(at))
    assert torch.equal(logits, before)
    assert (sampled.logprobs, sampled.logprob_rows) == (None,) * 2
    assert sampled.impossible is not None
    assert sampled.impossible.tolist() == [False] * 8
    assert sampled.step is None


def test_seed_and_position_matter() -> None:
    logits = torch.zeros(200, 1000)
    assert len(set(draw(logits, [params(seed=seed) for seed in range(200)], [0] * 200))) > 150
    assert len(set(draw(logits, [params(seed=1)] * 200, list(range(200))))) > 150
    assert len(set(draw(logits, [params(seed=seed << 32) for seed in range(200)], [0] * 200))) > 150  # the upper half counts


@pytest.mark.parametrize("one", MIXED, ids=repr)
def test_masked_tokens_are_never_drawn(one: RowParams) -> None:
    logits = torch.full((300, 50), -math.inf)
    logits[:, 13] = -40.0
    logits[:, 31] = -40.5
    assert set(draw(logits, [one] * 300, list(range(300)))) <= {13, 31}
    logits[:, 31] = -math.inf
    assert set(draw(logits, [one] * 300, list(range(300)))) == {13}


def test_ties_keep_the_lower_ids() -> None:
    logits = torch.zeros(1, 100)
    tokens = [draw(logits, [params(top_k=3, seed=seed)], [0])[0] for seed in range(60)]
    assert set(tokens) == {0, 1, 2}
    tokens = [draw(logits, [params(top_p=0.045, seed=seed)], [0])[0] for seed in range(100)]
    assert set(tokens) == {0, 1, 2, 3, 4}
    nucleus = draw(torch.zeros(300, 3000), [params(top_p=0.5)] * 300, list(range(300)))  # wider than any look at candidates
    assert 1400 < max(nucleus) < 1500
    logits[0, 50:52] = 5.0
    assert {draw(logits, [params(top_k=1, seed=seed)], [0])[0] for seed in range(20)} == {50}
    assert {draw(logits, [params(top_p=1e-9, seed=seed)], [0])[0] for seed in range(20)} == {50}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("top_p", slow_but([0.3, 0.9], [0.3, 0.9, 0.999]))
def test_wide_nucleus(top_p: float) -> None:
    """A nucleus that is wider than the first look at the candidates is still exact."""
    logits = torch.linspace(0.0, 1.0, 3000)
    one = params(top_p=top_p)
    observed = draw_many(logits, one, 2000)
    probabilities = filtered(logits, one)
    assert observed[probabilities == 0].sum() == 0
    bins = 20
    assert chi_square_p(observed.reshape(bins, -1).sum(1), probabilities.reshape(bins, -1).sum(1)) > 1e-6


def test_a_row_of_a_new_sequence() -> None:
    sampler = tensor_sampler(4, 10, CPU)
    logits = torch.zeros(1, 10)
    logits[0, 4] = 1.0
    rows, at = np.array([2], dtype=np.int32), np.zeros(1, dtype=np.int32)
    seen = []
    for one in (params(100.0, seed=1), GREEDY, params(100.0, top_k=1, seed=1), params(100.0, seed=1)):
        sampler.update([NewRow(2, one)])
        seen.append(sample(sampler, logits, rows, at).item())
    assert seen[1:3] == [4, 4]
    assert seen[0] == seen[3] != 4
