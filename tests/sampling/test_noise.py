"""The noise: pinned bits, and uniform enough."""

from __future__ import annotations

import pytest
import torch

from aengine.sampling.draw import log_exponential, row_keys, token_hashes, uniform_bits

CPU = torch.device("cpu")


def keys(seeds: list[int], positions: list[int], device: torch.device = CPU) -> torch.Tensor:
    return row_keys(torch.tensor(seeds, device=device), torch.tensor(positions, dtype=torch.int32, device=device))


def splitmix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def lowbias(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_bits_are_those_of_the_definition() -> None:
    """In Python's unbounded integers, so no wrap-around or sign of torch's can hide."""
    golden = 0x9E3779B97F4A7C15
    for seed in (0, 1, 2**63, 2**64 - 1):
        for position in (0, 1, 70000):
            key = splitmix((splitmix((seed + golden) % 2**64) + position * golden) % 2**64)
            signed = seed - (seed >> 63 << 64)
            bits = uniform_bits(keys([signed], [position]), token_hashes(40, CPU))[0]
            for token in range(40):
                x = lowbias(token * 0x9E3779B9 % 2**32) ^ key % 2**32
                x = x * 0x7FEB352D % 2**32
                x = ((x ^ x >> 15) + (key >> 32)) % 2**32
                assert bits[token].item() == lowbias(x) & 0x7FFFFFFF


def test_streams_are_keys_of_their_own() -> None:
    seeds, positions = torch.arange(50).repeat_interleave(40), torch.arange(40, dtype=torch.int32).repeat(50)
    everything = torch.cat([row_keys(seeds, positions, stream) for stream in range(4)])
    assert torch.equal(everything[:2000], row_keys(seeds, positions))
    assert len(everything.view(torch.int64).unique()) == 4 * 2000


def test_exponential_is_finite_and_has_its_moments() -> None:
    many = log_exponential(keys(list(range(400)), list(range(400))), token_hashes(5000, CPU)).double()
    assert many.isfinite().all()
    # E[log E] = -gamma, Var = pi^2 / 6; two million samples
    assert abs(many.mean() + 0.5772157) < 0.005
    assert abs(many.var() - 1.6449341) < 0.015


def test_extreme_bits_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, 1, 2**31 - 1, 2**31 - 64]], dtype=torch.int32)
    monkeypatch.setattr("aengine.sampling.draw.uniform_bits", lambda *_: extremes)
    noise = log_exponential(keys([0], [0]), extremes)
    assert noise.isfinite().all()
    assert noise[0].argsort().tolist()[:2] == [0, 1]


def test_no_two_tokens_share_a_hash() -> None:
    hashes = token_hashes(200_000, CPU)
    assert len(hashes.unique()) == len(hashes)


@pytest.mark.parametrize("stride", [1, 2, 256])
def test_bits_of_neighbouring_tokens_do_not_correlate(stride: int) -> None:
    bits = uniform_bits(keys(list(range(2000)), [0] * 2000), token_hashes(1024, CPU)).double() / 2**31 - 0.5
    first, second = bits[:, :-stride].flatten(), bits[:, stride:].flatten()
    correlation = (first * second).mean() / bits.var()
    assert abs(correlation) < 5 / len(first) ** 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_on_cuda_equal_those_on_a_cpu() -> None:
    seeds, positions = [0, 1, -1, 2**62], [0, 1, 2, 100_000]
    cuda = torch.device("cuda")
    here = uniform_bits(keys(seeds, positions), token_hashes(151_936, CPU))
    there = uniform_bits(keys(seeds, positions, cuda), token_hashes(151_936, cuda))
    assert torch.equal(here, there.cpu())
