"""The Triton layer ops against plain torch, in the interpreter or on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from triton_mode import DEVICES, INTERPRETED

from aengine.kernels.arrays import as_tensor
from aengine.kernels.paged_cache import KvTarget, PagedCache
from aengine.kernels.params import Activation, ExpertLinear, ExpertMlp, Rotation, SharedOutput
from aengine.kernels.triton import attention
from aengine.kernels.triton.experts import Grouping
from aengine.kernels.triton.layer_ops import TritonOps
from aengine.layers.ops import LayerOps, TorchOps
from aengine.layers.rotary import RopeSpec, cos_sin_cache, unscaled

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # the interpreter's
]


def numbers(device: str, dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device=device, dtype=dtype)


def assert_near(actual: Tensor, expected: Tensor, atol: float = 1e-6, equal: float = 0.98) -> None:
    """To few last places of a 16-bit dtype, where what is rounded may lie on the other side of a tie, and to 1e-5 of float32: the
    exponential of a GPU is no better. The share `equal` of 16-bit numbers must be the same, but not in bfloat16 under the interpreter,
    which cuts off where others round: there float16 shows that rounding is where it should be.
    """
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(actual, expected, rtol=max(1e-5, 4 * torch.finfo(actual.dtype).eps), atol=atol)
    cut_off = INTERPRETED and actual.dtype == torch.bfloat16
    if actual.dtype != torch.float32 and not cut_off and actual.numel():
        assert (actual == expected).float().mean() > equal


@pytest.mark.parametrize(("tokens", "size"), [(0, 64), (1, 1), (1, 1024), (3, 100), (5, 1536), (2, 5120)])
def test_rms_norm(device: str, dtype: torch.dtype, tokens: int, size: int) -> None:
    x = numbers(device, dtype, tokens, size, scale=3.0)
    weight = numbers(device, dtype, size, seed=1)
    before = x.clone()
    assert_near(TritonOps().rms_norm(x, weight, EPS), TorchOps().rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


def test_rms_norm_of_a_view(device: str, dtype: torch.dtype) -> None:
    x = numbers(device, dtype, 7, 300)[1:, 100:]
    weight = numbers(device, dtype, 200, seed=1)
    assert_near(TritonOps().rms_norm(x, weight, EPS), TorchOps().rms_norm(x, weight, EPS))


def test_rms_norm_of_zeros_uses_eps(device: str, dtype: torch.dtype) -> None:
    weight = numbers(device, dtype, 48)
    assert not TritonOps().rms_norm(torch.zeros(2, 48, dtype=dtype, device=device), weight, EPS).any()
    small = torch.full((2, 48), 1e-3, dtype=dtype, device=device)
    assert_near(TritonOps().rms_norm(small, weight, 1e-2), TorchOps().rms_norm(small, weight, 1e-2))


@pytest.mark.parametrize(("tokens", "size"), [(0, 64), (1, 1024), (4, 100), (3, 2560)])
def test_add_rms_norm(device: str, dtype: torch.dtype, tokens: int, size: int) -> None:
    x, residual = numbers(device, dtype, tokens, size), numbers(device, dtype, tokens, size, seed=1, scale=9.0)
    weight = numbers(device, dtype, size, seed=2)
    expected = TorchOps().add_rms_norm(x, residual, weight, EPS)
    normed, total = TritonOps().add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert_near(total, expected[1], equal=0.9999)
    assert_near(normed, expected[0])


@pytest.mark.parametrize("norms", ["both", "query", "none"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (0, 2, 1, 64, 64),
        (1, 1, 1, 128, 128),
        (3, 16, 8, 128, 128),
        (5, 9, 3, 64, 64),
        (2, 14, 2, 80, 80),
        (4, 3, 3, 6, 6),
        (3, 4, 2, 64, 48),
    ],
)
def test_rotate(
    device: str, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, norms: str
) -> None:
    """Of views of one fused product, as in the decoder; what is beside them stays."""
    cos_sin = as_tensor(cos_sin_cache(RopeSpec.of(unscaled(rotary_dim, 10000.0)), 1000)).to(torch.device(device))
    positions = torch.randint(0, 1000, (tokens,), generator=torch.Generator().manual_seed(3), dtype=torch.int32).to(device)
    fused = numbers(device, dtype, tokens, (heads + 2 * kv_heads) * head_dim, scale=2.0)
    weights = [numbers(device, dtype, head_dim, seed=seed) for seed in (4, 5)]
    rotation = Rotation(cos_sin, None if norms == "none" else weights[0], weights[1] if norms == "both" else None, EPS)

    def rotated(ops: LayerOps, fused: Tensor) -> list[Tensor]:
        q, k, v = fused.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), dim=-1)
        q, k = q.view(tokens, heads, head_dim), k.view(tokens, kv_heads, head_dim)
        return [*ops.rotate(q, k, rotation, positions), v]

    *expected, value = rotated(TorchOps(), fused.clone())
    *actual, untouched = rotated(TritonOps(), fused.clone())
    assert torch.equal(untouched, value)
    for one, other in zip(actual, expected, strict=True):
        # A normed value that is rounded the other way moves the sum of two products by a part of the larger one.
        assert_near(one, other, atol=16 * torch.finfo(dtype).eps, equal=0.95)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "value_dim", "float8", "norms"),
    [
        (16, 8, 128, 128, 128, False, True),
        (9, 3, 64, 64, 64, True, True),
        (10, 10, 48, 24, 40, True, True),
        (2, 1, 80, 48, 80, False, False),
    ],
)
def test_rotate_and_write(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, value_dim: int, float8: bool, norms: bool
) -> None:
    """The same numbers as rotating first and writing then; what the pages hold elsewhere stays."""
    tokens, shape = 4, (3, 2, kv_heads)  # pages of two tokens
    cos_sin = as_tensor(cos_sin_cache(RopeSpec.of(unscaled(rotary_dim, 10000.0)), 1000)).to(torch.device(device))
    positions = torch.tensor([0, 999, 7, 500], dtype=torch.int32, device=device)
    slots = torch.tensor([5, -1, 3, 2, 4], dtype=torch.int32, device=device)  # of more tokens than are written
    fused = numbers(device, dtype, tokens, (heads + kv_heads) * head_dim + kv_heads * value_dim, scale=2.0)
    rotation = Rotation(cos_sin, *(numbers(device, dtype, head_dim, seed=seed) if norms else None for seed in (4, 5)), EPS)
    cache_dtype = torch.float8_e4m3fn if float8 else dtype
    scales = (0.5, 0.001) if float8 else (1.0, 1.0)  # some values are beyond the range

    def query_and_cache(ops: LayerOps, at_once: bool) -> list[Tensor]:
        parts = fused.clone().split((heads * head_dim, kv_heads * head_dim, kv_heads * value_dim), dim=-1)
        query, key, value = (part.view(tokens, -1, width) for part, width in zip(parts, (head_dim, head_dim, value_dim), strict=True))
        cache = PagedCache(*(torch.full((*shape, width), 3.0, device=device).to(cache_dtype) for width in (head_dim, value_dim)), *scales)
        if at_once:
            query = ops.rotate_and_write(query, key, value, rotation, positions, KvTarget(cache, slots))
        else:
            query, key = ops.rotate(query, key, rotation, positions)
            attention.write(key, value, KvTarget(cache, slots))
        return [query, cache.keys.float(), cache.values.float()]

    expected = query_and_cache(TritonOps(), at_once=False)
    for one, other in zip(query_and_cache(TritonOps(), at_once=True), expected, strict=True):
        assert torch.equal(one, other)
    untouched = expected[1].view(-1, kv_heads, head_dim)[[0, 1, 4]]
    assert (untouched == 3.0).all()


@pytest.mark.parametrize(("heads", "rotary_dim", "latent", "float8"), [(1, 6, 10, True), (16, 64, 512, False), (20, 24, 100, True)])
def test_rotate_latent(device: str, dtype: torch.dtype, heads: int, rotary_dim: int, latent: int, float8: bool) -> None:
    """Queries from parts of a product to parts of others; keys in place, or to pages alone, with the same numbers."""
    tokens, width = 4, rotary_dim + latent
    cos_sin = as_tensor(cos_sin_cache(RopeSpec.of(unscaled(rotary_dim, 10000.0)), 1000)).to(torch.device(device))
    positions = torch.tensor([0, 999, 7, 500], dtype=torch.int32, device=device)
    slots = torch.tensor([5, -1, 3, 2], dtype=torch.int32, device=device)
    rotation = Rotation(cos_sin, key_norm=numbers(device, dtype, latent, seed=4), eps=EPS)
    query = numbers(device, dtype, tokens, heads, rotary_dim + 12, scale=2.0)
    source = numbers(device, dtype, tokens, 1, width, seed=1, scale=2.0)

    def target() -> KvTarget:
        pages = torch.full((3, 2, 1, width), 3.0, device=device).to(torch.float8_e4m3fn if float8 else dtype)
        scale = 0.01 if float8 else 1.0  # some values are beyond the range
        return KvTarget(PagedCache(pages, pages[..., rotary_dim:], scale, scale, latent=True), slots)

    def results(ops: LayerOps, target: KvTarget | None) -> tuple[Tensor, Tensor]:
        out, key = torch.full((tokens, heads, width), 3.0, dtype=dtype, device=device), source.clone()
        ops.rotate_latent(query[..., :rotary_dim], out[..., :rotary_dim], key, rotation, positions, target)
        assert (out[..., rotary_dim:] == 3.0).all()
        return out, key

    out, key = results(TritonOps(), None)
    for one, other in zip((out, key), results(TorchOps(), None), strict=True):
        assert_near(one, other, atol=16 * torch.finfo(dtype).eps, equal=0.95)
    separately, at_once, in_torch = target(), target(), target()
    attention.write(key, key[..., rotary_dim:], separately)
    rotated, untouched = results(TritonOps(), at_once)
    assert torch.equal(rotated, out)
    assert torch.equal(untouched, source)
    assert torch.equal(at_once.cache.keys.float(), separately.cache.keys.float())
    results(TorchOps(), in_torch)
    if not float8:
        pages, expected = (each.cache.keys.view(-1, width)[[5, 3, 2]] for each in (at_once, in_torch))
        assert_near(pages, expected, atol=16 * torch.finfo(dtype).eps, equal=0.95)


def test_float32_weights(device: str, dtype: torch.dtype) -> None:
    """Gemma's: the product alone is rounded."""
    x, residual = numbers(device, dtype, 3, 192), numbers(device, dtype, 3, 192, seed=1)
    weight = numbers(device, torch.float32, 192, seed=2)
    cos_sin = as_tensor(cos_sin_cache(RopeSpec.of(unscaled(64, 10000.0)), 10)).to(torch.device(device))
    positions = torch.arange(3, dtype=torch.int32, device=device)
    for name, *given in (
        ("rms_norm", x, weight, EPS),
        ("add_rms_norm", x, residual, weight, EPS),
        ("rotate", x.view(3, 3, 64), residual.view(3, 3, 64), Rotation(cos_sin, weight[:64], weight[64:128], EPS), positions),
    ):
        expected = getattr(TorchOps(), name)(*given)
        found = getattr(TritonOps(), name)(*(value.clone() if isinstance(value, Tensor) else value for value in given))
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other, atol=16 * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize(("tokens", "size"), [(0, 8), (1, 3072), (3, 1000), (4, 5)])
def test_gated(device: str, dtype: torch.dtype, tokens: int, size: int) -> None:
    gate_up = numbers(device, dtype, tokens, 2 * size, scale=4.0)
    assert_near(TritonOps().gated(gate_up, Activation.SILU), TorchOps().gated(gate_up, Activation.SILU))


@pytest.mark.parametrize("activation", Activation)
def test_activations(device: str, dtype: torch.dtype, activation: Activation) -> None:
    """Gates and ups on both sides of the limits of GPT-OSS. Far below zero torch's GELU is a difference of nearly equal numbers, and the
    last place of an exponent is several of the result."""
    gate_up = numbers(device, dtype, 3, 2 * 700, scale=5.0)
    assert ((gate_up < -7.0) | (gate_up > 7.0)).any()
    found, expected = TritonOps().gated(gate_up, activation), TorchOps().gated(gate_up, activation)
    tail = gate_up[:, :700] < -2.5
    assert_near(found[~tail], expected[~tail])
    differences = activation in (Activation.GELU, Activation.GELU_TANH)
    assert_near(found, expected, atol=max(1e-5, torch.finfo(dtype).eps / 8), equal=0.0 if differences else 0.98)


@pytest.mark.parametrize("activation", Activation)
def test_activations_of_large_gates(device: str, dtype: torch.dtype, activation: Activation) -> None:
    """And of what is no number, which stays so."""
    gates = [-200.0, 200.0, -88.0, 0.0, 1e4, float("nan"), 1.0]
    gate_up = torch.tensor([[*gates, *[1.0] * 6, float("nan")]], dtype=dtype, device=device)
    found, expected = TritonOps().gated(gate_up, activation), TorchOps().gated(gate_up, activation)
    assert found[:, 5:].isnan().all()
    assert_near(found[:, :5], expected[:, :5])


@pytest.mark.parametrize(("biased", "shared"), [(False, "nothing"), (True, "nothing"), (True, "output"), (False, "gated output")])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(0, 4, 2), (1, 8, 3), (7, 5, 5), (130, 3, 2)])
def test_experts(device: str, dtype: torch.dtype, tokens: int, num_experts: int, top_k: int, biased: bool, shared: str) -> None:
    """Some experts have no token, others more than a block. Sums of narrow activations are rounded once."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products of bfloat16")
    hidden, inner = 40, 72
    x = numbers(device, dtype, tokens, hidden)

    def linear(rows: int, columns: int, seed: int) -> ExpertLinear:
        weight = numbers(device, dtype, num_experts, rows, columns, seed=seed, scale=columns**-0.5)
        return ExpertLinear(weight, numbers(device, dtype, num_experts, rows, seed=seed + 1) if biased else None)

    up, down = linear(2 * inner, hidden, 1), linear(hidden, inner, 3)
    scores = numbers(device, torch.float32, tokens, num_experts, seed=5) + torch.arange(num_experts, device=device)  # the last are liked
    weights, chosen = scores.softmax(-1).topk(top_k)
    ops = TorchOps()
    mlp = ExpertMlp(up, down, partial(ops.gated, activation=Activation.SILU))
    output, gate = numbers(device, dtype, tokens, hidden, seed=6), numbers(device, dtype, tokens, 1, seed=7, scale=3.0)
    beside = {"nothing": None, "output": SharedOutput(output), "gated output": SharedOutput(output, gate)}[shared]
    expected = ops.experts(x, chosen, weights, mlp, torch.float32, beside)
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for of_sums in {torch.float32, dtype}:
        actual = TritonOps().experts(x, chosen, weights, mlp, of_sums, beside)
        assert (actual.dtype, actual.shape) == (of_sums, (tokens, hidden))
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 8, 3), (90, 5, 2), (70, 40, 8), (200, 2, 1), (1200, 20, 4)])
def test_choices_are_sorted_and_cut(device: str, dtype: torch.dtype, tokens: int, num_experts: int, top_k: int) -> None:
    """Blocks of one expert each, with all its choices in their order; experts without a choice have no block."""
    liked = numbers(device, torch.float32, tokens, num_experts) + 4.0 * numbers(device, torch.float32, num_experts, seed=1)
    chosen = liked.topk(top_k).indices
    grouping = Grouping.of(chosen, num_experts)
    flat = chosen.flatten().tolist()
    assert grouping.order.tolist() == sorted(range(len(flat)), key=lambda choice: (flat[choice], choice))
    found: dict[int, list[int]] = {}
    for expert, first, end in zip(*(each.tolist() for each in (grouping.experts, grouping.firsts, grouping.ends)), strict=True):
        if expert >= 0:
            found.setdefault(expert, []).extend(grouping.order[first : min(end, first + grouping.block)].tolist())
    assert found == {expert: [choice for choice, one in enumerate(flat) if one == expert] for expert in sorted(set(flat))}
