"""The Triton draws against the torch code that says what they are, in the interpreter or on a GPU."""

from __future__ import annotations

import math

import draw_limits
import numpy as np
import pytest
import torch
from slow_cases import slow_but
from tensor_sampler import tensor_sampler
from torch import Tensor
from triton_mode import DEVICES, triton

import aengine.kernels.triton.sampling as device_noise
from aengine.kernels.params import DrawParams
from aengine.kernels.triton.sampling import draw_from_nucleus, draw_in_blocks
from aengine.kernels.triton.top_k import draw_from_top_k
from aengine.sampling.draw import (
    MassDraw,
    TorchDraw,
    TritonDraw,
    kept_candidates,
    log_exponential,
    row_keys,
    token_hashes,
    top_candidates,
    uniform_bits,
)
from aengine.scheduler.plan import NewRow, RowParams

tl = triton.language
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of infinities
]
SIZES = [(1, 1), (1, 2), (3, 63), (2, 64), (3, 65), (1, 4096), (5, 4097), (2, 9001), (11, 300)]
SEEDS = [0, 1, -1, 2**62, -(2**63), 2**63 - 1, 0x123456789ABCDEF]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Rows:
    """Random logits and parameters of m rows, with the seeds' extremes among them."""

    def __init__(self, rows: int, vocab_size: int, device: str, spread: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(rows * vocab_size)
        self.logits = (numbers(rows, vocab_size, seed=rows + vocab_size) * spread).to(device)
        positions = torch.randint(0, 100_000, (rows,), generator=generator, dtype=torch.int32).to(device)
        self.params = DrawParams(torch.zeros(rows, 8, dtype=torch.int32, device=device), positions)
        self.temperature, self.top_p, self.min_p = self.params.temperature, self.params.top_p, self.params.min_p
        self.params.top_k.copy_(1 + torch.arange(rows) % 64)
        for column, least, width in ((self.temperature, 0.3, 1.0), (self.top_p, 0.0, 1.0), (self.min_p, 0.0, 0.3)):
            column.copy_(least + width * torch.rand(rows, generator=generator))
        self.seeds, self.positions = self.params.seed, positions
        self.seeds.copy_(torch.tensor((SEEDS * (rows // len(SEEDS) + 1))[:rows]))
        self.device = torch.device(device)

    def gumbel(self) -> Tensor:
        """The scores of a draw: [m, V] float32."""
        hashes = token_hashes(self.logits.shape[1], self.device)
        return self.logits / self.temperature[:, None] - log_exponential(row_keys(self.seeds, self.positions), hashes)

    def nucleus(self) -> Tensor:
        """What `kept_candidates` keeps of all tokens: [m, V] bool."""
        vocab_size = self.logits.shape[1]
        total = MassDraw(vocab_size, self.device).masses(self.logits, self.params, True).total()
        best, ids = top_candidates(self.logits, vocab_size)
        scores = best / self.temperature[:, None]
        none = torch.zeros(len(scores), dtype=torch.int32, device=self.device)
        kept = kept_candidates(scores, self.min_p, none, self.top_p, total)
        return torch.zeros_like(kept).scatter_(1, ids, kept)

    def drawn_from_top_k(self) -> Tensor:
        """[m]"""
        vocab_size = self.logits.shape[1]
        return TorchDraw(vocab_size, self.device).top_k(self.logits, self.params, min(64, vocab_size))

    def drawn_from_nucleus(self) -> Tensor:
        """[m]"""
        return self.gumbel().masked_fill_(~self.nucleus(), -math.inf).argmax(-1)


@triton.jit
def _noise(seeds, positions, bits, values, vocab_size, STREAM: tl.constexpr, IDS: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, IDS)
    first, second = device_noise.row_key(tl.load(seeds + row), tl.load(positions + row), STREAM)
    drawn = device_noise.uniform_bits(first, second, at)
    tl.store(bits + row * vocab_size + at, drawn, mask=at < vocab_size)
    tl.store(values + row * vocab_size + at, device_noise.log_exponential(drawn), mask=at < vocab_size)


@pytest.mark.parametrize("stream", [0, 1, 7])
def test_noise_has_the_same_bits(device: str, stream: int) -> None:
    seeds = torch.tensor(SEEDS * 3, device=device)
    positions = torch.tensor([0, 1, 70_000], dtype=torch.int32, device=device).repeat_interleave(len(SEEDS))
    bits = torch.empty(len(seeds), 3000, dtype=torch.int32, device=device)
    values = torch.empty(len(seeds), 3000, device=device)
    _noise[(len(seeds),)](seeds, positions, bits, values, 3000, STREAM=stream, IDS=4096)
    keys, hashes = row_keys(seeds, positions, stream), token_hashes(3000, torch.device(device))
    assert torch.equal(bits, uniform_bits(keys, hashes))
    torch.testing.assert_close(values, log_exponential(keys, hashes), rtol=2e-6, atol=2e-6)


@triton.jit
def _log_exponential(bits, values, IDS: tl.constexpr):
    at = tl.arange(0, IDS)
    tl.store(values + at, device_noise.log_exponential(tl.load(bits + at)))


def test_log_exponential_of_all_magnitudes(device: str) -> None:
    """Against float64, from the smallest E, which decide draws, to the largest, and around where the series ends."""
    edges = [2**31 - 1, 2**31 - 64, 2**31 - 65, 2**31 - 10_000, 2**27 - 1, 2**27, 2**27 + 1, 0]
    bits = torch.tensor([*edges, *(1 << at for at in range(31)), *(3 << at for at in range(25))], dtype=torch.int32, device=device)
    values = torch.empty(len(bits), device=device)
    _log_exponential[(1,)](bits, values, IDS=len(bits))
    u = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24).double()
    torch.testing.assert_close(values.double(), (-torch.log1p(-u)).log(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("with_min_p", [False, True])
@pytest.mark.parametrize(("rows", "vocab_size"), SIZES)
def test_draw_in_blocks(device: str, rows: int, vocab_size: int, with_min_p: bool) -> None:
    r = Rows(rows, vocab_size, device)
    reference = MassDraw(vocab_size, r.device)
    masses = reference.masses(r.logits, r.params, with_min_p)
    expected = reference.draw(r.logits, masses, r.params, with_min_p)
    assert torch.equal(draw_in_blocks(r.logits, r.params, with_min_p), expected)


@pytest.mark.parametrize("min_p", slow_but([True], [False, True]))
@pytest.mark.parametrize("spread", slow_but([1.0], [0.01, 1.0, 6.0]))
@pytest.mark.parametrize(("rows", "vocab_size"), [*SIZES, (3, 20_001)])
def test_draw_from_nucleus(device: str, rows: int, vocab_size: int, spread: float, min_p: bool) -> None:
    r = Rows(rows, vocab_size, device, spread)
    r.top_p.clamp_(max=0.999)
    if not min_p:
        r.min_p.zero_()
    assert torch.equal(draw_from_nucleus(r.logits, r.params), r.drawn_from_nucleus())


def test_the_end_of_a_nucleus(device: str) -> None:
    """A candidate is taken with a top_p that is hardly more than the mass before it, and the one that follows with hardly less."""
    r = Rows(8, 300, device, 1.0)
    r.min_p.zero_()
    candidates = r.gumbel().argmax(-1, keepdim=True)
    masses = (r.logits / r.temperature[:, None]).double().softmax(-1)
    before = masses.masked_fill(r.logits <= r.logits.gather(1, candidates), 0.0).sum(-1)
    assert (before > 0.01).sum() > 4
    r.top_p.copy_(before * 1.0001)
    assert draw_from_nucleus(r.logits, r.params).tolist() == candidates[:, 0].tolist()
    r.top_p.copy_(before * 0.9999)
    lower = draw_from_nucleus(r.logits, r.params)
    assert torch.equal(lower, r.drawn_from_nucleus())
    assert ((lower != candidates[:, 0]) == (before > 0)).all()


def test_as_many_candidates_as_it_takes(device: str) -> None:
    """More than are tried in parts of rows, over several parts."""
    r = Rows(6, 5000, device, 0.5)
    r.min_p.zero_()
    r.top_p.copy_(torch.tensor([0.001, 0.01, 0.03, 0.05, 0.1, 0.2]))
    scores, kept, tried = r.gumbel(), r.nucleus(), torch.zeros(6, dtype=torch.int64, device=device)
    for row in range(6):
        candidate = scores[row].argmax()
        while not kept[row, candidate]:
            tried[row] += 1
            candidate = scores[row].masked_fill(r.logits[row] <= r.logits[row, candidate], -math.inf).argmax()
    assert tried.max() > 4
    assert torch.equal(draw_from_nucleus(r.logits, r.params), r.drawn_from_nucleus())


@pytest.mark.parametrize("vocab_size", [500, 2500])
def test_nucleus_among_ties(device: str, vocab_size: int) -> None:
    """Of equal tokens those with the lower ids."""
    r = Rows(6, vocab_size, device)
    r.logits[:3] = r.logits[:3].round()
    r.logits[3:5] = -2.5
    r.logits[5] = 0.0
    r.logits[5, ::2] = -0.0
    r.min_p.zero_()
    r.top_p.copy_(torch.tensor([0.1, 0.5, 0.9, 0.25, 0.75, 0.6]))
    tokens = draw_from_nucleus(r.logits, r.params)
    assert torch.equal(tokens, r.drawn_from_nucleus())
    r.top_p[3:] = (tokens[3:] + 0.5) / vocab_size  # these are the last ones now
    assert draw_from_nucleus(r.logits, r.params)[3:].tolist() == tokens[3:].tolist()
    r.top_p[3:] = (tokens[3:] - 0.5) / vocab_size
    assert (draw_from_nucleus(r.logits, r.params)[3:] < tokens[3:]).all()


def test_nucleus_of_the_likeliest_alone(device: str) -> None:
    r = Rows(4, 700, device)
    r.logits[:, 600] = r.logits[:, 650] = 50.0
    r.min_p.zero_()
    r.top_p.copy_(torch.tensor([0.0, 1e-9, 1e-40, 0.4]))
    assert draw_from_nucleus(r.logits, r.params).tolist() == [600] * 4


def test_a_nucleus_of_nearly_everything(device: str) -> None:
    r = Rows(3, 5000, device)
    r.min_p.zero_()
    r.top_p.copy_(torch.tensor([1 - 2**-24, 0.9999, 0.99]))
    assert torch.equal(draw_from_nucleus(r.logits, r.params), r.drawn_from_nucleus())


@pytest.mark.parametrize("spread", slow_but([1.0], [0.01, 1.0, 6.0]))
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (2, 2), (6, 63), (6, 4097), (1, 20_001)])
def test_draw_from_top_k(device: str, rows: int, vocab_size: int, spread: float) -> None:
    """With ties among them, and with as many tokens as there are or hardly any to choose from."""
    r = Rows(rows, vocab_size, device, spread)
    r.params.top_k.copy_(torch.tensor([64, 2, 20, 3, 1, 63])[:rows])
    r.logits[1:2] = r.logits[1:2].round()
    r.logits[2:3, 7:] = -math.inf
    r.logits[3:4] = torch.tensor([0.0, -0.0], device=device)[torch.arange(vocab_size, device=device) % 2]
    padded = torch.nn.functional.pad(r.logits, (0, 3), value=100.0)[:, :vocab_size]
    assert torch.equal(draw_from_top_k(padded, r.params), r.drawn_from_top_k())


EQUAL = [3, 70, 900, 4094, 4095, 4096, 4097, 4150]  # in both parts of the row


def rows_of_equal_tokens(device: str) -> tuple[Rows, Tensor]:
    """Eight rows in which eight tokens are the likeliest and equal, with their ids; row i draws the i-th of them if it may."""
    ids, many = torch.tensor(EQUAL, device=device), Rows(80, 4200, device)
    many.logits.clamp_(max=-1.0)
    many.logits[:, ids] = torch.tensor([0.0, -0.0] * 4, device=device)
    many.temperature.fill_(1.0)
    many.seeds.copy_(torch.arange(80))
    drawn = many.gumbel()[:, ids].argmax(-1)
    rows = torch.stack([(drawn == at).nonzero()[0, 0] for at in range(8)])
    r = Rows(8, 4200, device)
    r.logits, r.params = many.logits[rows], many.params.select(rows)
    r.params.top_p.fill_(1.0)
    r.params.min_p.fill_(0.0)
    return r, ids


def test_top_k_of_equal_tokens(device: str) -> None:
    """Those with the lower ids."""
    r, ids = rows_of_equal_tokens(device)
    r.params.top_k.copy_(torch.arange(8))
    beyond = draw_from_top_k(r.logits[1:], r.params[1:])
    assert (beyond < ids[1:]).all()
    assert torch.equal(beyond, TorchDraw(4200, r.device).top_k(r.logits[1:], r.params[1:], 64))
    r.params.top_k.add_(1)
    assert torch.equal(draw_from_top_k(r.logits, r.params), ids)


def test_top_p_within_top_k(device: str) -> None:
    """A token is taken with a top_p that is hardly more than the mass before it, and the one that follows if it is not more."""
    r, ids = rows_of_equal_tokens(device)
    r.logits[:, EQUAL[-1] + 1 :] = -0.0  # which top_k leaves out
    r.params.top_k.fill_(8)
    before = torch.arange(8, device=device) / 8
    r.params.top_p.copy_(before)
    others = draw_from_top_k(r.logits, r.params)
    assert (others[1:] < ids[1:]).all()
    assert torch.equal(others, TorchDraw(4200, r.device).top_k(r.logits, r.params, 64))
    r.params.top_p.copy_(before.nextafter(torch.ones(8, device=device)))
    assert torch.equal(draw_from_top_k(r.logits, r.params), ids)


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.bfloat16, torch.float16]))
def test_logits_as_the_model_gives_them(device: str, dtype: torch.dtype) -> None:
    """Draws from them give the tokens of a float32 copy."""
    r = Rows(2, 4500, device)
    logits = r.logits.to(dtype)
    r.logits = logits.float()
    for draw in DRAWS:
        expected = draw(r)
        r.logits, copy = logits, r.logits
        assert torch.equal(draw(r), expected)
        r.logits = copy


@pytest.mark.parametrize("value", slow_but([math.nan], [math.nan, -math.inf, math.inf]))
def test_tokens_of_rows_without_any(device: str, value: float) -> None:
    """Whatever the logits are, ids are in the vocabulary, and the other rows are not touched by it."""
    r = Rows(3, 4500, device)
    healthy = [draw(r) for draw in DRAWS]
    r.logits[1] = value
    for draw, expected in zip(DRAWS, healthy, strict=True):
        tokens = draw(r)
        assert 0 <= tokens[1] < 4500
        assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()


DRAWS = [
    lambda r: draw_in_blocks(r.logits, r.params, False),
    lambda r: draw_in_blocks(r.logits, r.params, True),
    lambda r: draw_from_nucleus(r.logits, r.params),
    lambda r: draw_from_top_k(r.logits, r.params),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_nothing_to_draw(device: str, draw: object) -> None:
    empty = draw(Rows(0, 100, device))
    assert (empty.shape, empty.dtype) == ((0,), torch.int64)


def params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0) -> RowParams:
    return RowParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)


MIXED = [
    params(0.0),
    params(0.7, seed=3),
    params(1.0, top_k=5, seed=2**64 - 1),
    params(1.3, top_p=0.5, seed=4),
    params(1.0, min_p=0.2, seed=5),
    params(0.9, top_k=40, top_p=0.9, min_p=0.01, seed=6),
    params(0.8, top_p=0.6, min_p=0.05, seed=2**63),
    params(2.0, top_k=64, top_p=0.95, seed=7),
    params(2.0, top_k=65, top_p=0.95, seed=8),
    params(3.0, top_k=900, seed=9),
]


def drawn(kind: type[TorchDraw] | type[TritonDraw], rows: list[RowParams], logits: Tensor, positions: list[int], device: str) -> list[int]:
    where = torch.device(device)
    sampler = tensor_sampler(len(rows), logits.shape[1], where, kind(logits.shape[1], where))
    sampler.update([NewRow(at, one) for at, one in enumerate(rows)])
    arrays = np.arange(len(rows), dtype=np.int32), np.array(positions, dtype=np.int32)
    return sampler.sample(logits.to(where), *arrays, *(torch.from_numpy(array).to(where) for array in arrays)).tokens.tolist()


def test_draws_in_mixed_company(device: str) -> None:
    """The tokens of the CPU, for every kind of row, alone or beside others."""
    rows = MIXED * 3
    logits, positions = numbers(len(rows), 1000, seed=1) * 4, list(range(len(rows)))
    together = drawn(TritonDraw, rows, logits, positions, device)
    assert together == drawn(TorchDraw, rows, logits, positions, "cpu")
    for at in range(len(MIXED)):
        assert drawn(TritonDraw, rows[at : at + 1], logits[at : at + 1], positions[at : at + 1], device) == [together[at]]


def test_limits_of_parameters(device: str) -> None:
    where = torch.device(device)
    assert draw_limits.wrong(TritonDraw(draw_limits.VOCAB, where), where, seeds=(2, 6)) == {}


def upper_tail(observed: Tensor, probabilities: Tensor) -> float:
    """Of the chi-square test."""
    expected = probabilities.double() * observed.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("one", [params(0.8), params(1.2, min_p=0.1), params(1.0, top_p=0.7)])
def test_distribution(device: str, one: RowParams) -> None:
    if device == "cpu":
        pytest.skip("the interpreter takes rows one by one, which leaves too few for a distribution")
    count = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.1])
    p = (logits.double() / one.temperature).softmax(-1)
    p[p < one.min_p * p.max()] = 0.0
    p /= p.sum()
    order = p.argsort(descending=True)
    p[order[p[order].cumsum(0) - p[order] >= one.top_p]] = 0.0
    p /= p.sum()
    where = torch.device(device)
    sampler = tensor_sampler(count, 8, where, TritonDraw(8, where))
    sampler.update([NewRow(at, one) for at in range(count)])
    rows = np.arange(count, dtype=np.int32)
    on_device = torch.from_numpy(rows).to(where)
    tokens = sampler.sample(logits.to(where).expand(count, -1), rows, rows, on_device, on_device).tokens.cpu()
    observed = torch.bincount(tokens, minlength=8)
    assert observed[p == 0].sum() == 0
    assert upper_tail(observed[p > 0], p[p > 0]) > 1e-6


def test_every_kernel_runs_once_beforehand(device: str) -> None:
    TritonDraw(300, torch.device(device)).run_once([torch.float32, torch.bfloat16])
