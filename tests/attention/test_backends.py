"""The reference backend against a per-sequence float32 softmax, on random ragged batches over scattered pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from slow_cases import slow_but

from aengine.attention import AttentionBackend, AttentionMetadata, AttentionSpec, Scoring, build_layout, select_backend
from aengine.attention import torch_native as torch_native_module

CPU = torch.device("cpu")
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


@dataclass
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = [Shape(4, 4, 8), Shape(8, 2, 16), Shape(6, 1, 10), Shape(14, 2, 64)]


def make(shape: Shape, page_size: int, windows: tuple[int | None, ...], dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    spec = AttentionSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scoring=tuple(Scoring(0.3, window) for window in windows),
        page_size=page_size,
        dtype=dtype,
        device=device,
    )
    return select_backend("torch_native", spec)


def on(device: torch.device, layout) -> AttentionMetadata:
    names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
    return AttentionMetadata(layout, *(torch.from_numpy(getattr(layout, name)).to(device) for name in names))


def plain(query, key, value, scale: float, window: int | None) -> torch.Tensor:
    """[q, Hq, D] last queries of a sequence over its [s, Hkv, D] keys: float32 softmax, one head and query at a time."""
    group = query.shape[1] // key.shape[1]
    length, seq_len = len(query), len(key)
    out = torch.empty(query.shape, dtype=torch.float32)
    for i in range(length):
        at = seq_len - length + i
        low = 0 if window is None else max(0, at - window + 1)
        for head in range(query.shape[1]):
            k, v = key[low : at + 1, head // group].float(), value[low : at + 1, head // group].float()
            out[i, head] = (k @ query[i, head].float() * scale).softmax(0) @ v
    return out


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize(
    ("page_size", "dtype"), slow_but([(4, "float32")], [(1, "float32"), (4, "float32"), (16, "bfloat16"), (64, "float16")])
)
@pytest.mark.parametrize("small_blocks", [False, True])
def test_ragged_steps(device: str, shape: Shape, page_size: int, dtype: str, small_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers, the last two windowed; several steps on the same pool, which starts full of NaN where nobody wrote."""
    if small_blocks:
        monkeypatch.setattr(torch_native_module, "_GATHER_ELEMENTS", 1000)
        monkeypatch.setattr(torch_native_module, "_SCORE_ELEMENTS", 1000)
    target, kind = torch.device(device), getattr(torch, dtype)
    windows = (None, 3, 20)
    backend = make(shape, page_size, windows, kind, target)
    rng = np.random.default_rng(page_size)
    torch.manual_seed(page_size)
    max_len, num_rows = 70, 9
    pages_per_row = -(-max_len // page_size)
    num_pages = 1 + num_rows * pages_per_row
    backend.allocate(num_pages)
    table = (1 + rng.permutation(num_rows * pages_per_row)).reshape(1, num_rows, pages_per_row).astype(np.int32)
    poison(backend, shape, page_size, num_pages, len(windows), kind, target)

    stored = [[torch.empty(2, 0, shape.num_kv_heads, shape.head_dim) for _ in windows] for _ in range(num_rows)]
    computed = np.zeros(num_rows, dtype=np.int32)
    for _ in range(5):
        rows = rng.permutation(num_rows)[: rng.integers(1, num_rows + 1)].astype(np.int32)
        rows = rows[computed[rows] < max_len - 20]
        if not len(rows):
            continue
        decoding = rows[(computed[rows] > 0) & (rng.random(len(rows)) < 0.6)]
        rows = np.concatenate([decoding, np.setdiff1d(rows, decoding)]).astype(np.int32)
        lengths = np.where(np.arange(len(rows)) < len(decoding), 1, rng.integers(1, 20, len(rows))).astype(np.int32)
        layout = build_layout(rows, len(decoding), computed[rows], lengths, table, page_size)
        step = backend.plan(on(target, layout))
        for layer, window in enumerate(windows):
            fused = torch.randn(layout.num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim).to(kind)
            q, k, v = fused.to(target).split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
            step.write(layer, k, v)
            given = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format) if layer % 2 else None
            out = step.attend(layer, q, None, given)
            assert given is None or out.data_ptr() == given.data_ptr()
            assert out.dtype == kind
            assert out.shape == q.shape
            for i, row in enumerate(rows):
                mine = slice(layout.qo_indptr[i], layout.qo_indptr[i + 1])
                new = torch.stack((k[mine].cpu(), v[mine].cpu())).float()
                stored[row][layer] = torch.cat((stored[row][layer], new), dim=1)
                expected = plain(q[mine].cpu(), *stored[row][layer], 0.3, window)
                tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
                torch.testing.assert_close(out[mine].cpu().float(), expected, rtol=tolerance, atol=tolerance)
        computed[rows] += lengths


def poison(backend, shape: Shape, page_size: int, num_pages: int, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
    """Fills every page but page 0 with NaN, through the contract: one row that owns all of them."""
    table = np.arange(1, num_pages, dtype=np.int32)[None, None, :]
    length = (num_pages - 1) * page_size
    layout = build_layout(np.zeros(1, dtype=np.int32), 0, np.zeros(1, dtype=np.int32), np.array([length], dtype=np.int32), table, page_size)
    step = backend.plan(on(device, layout))
    bad = torch.full((length, shape.num_kv_heads, shape.head_dim), torch.nan, dtype=dtype, device=device)
    for layer in range(num_layers):
        step.write(layer, bad, bad)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_slot_minus_one_is_skipped(device: str) -> None:
    target = torch.device(device)
    shape = Shape(2, 1, 4)
    backend = make(shape, 4, (None,), torch.float32, target)
    backend.allocate(3)
    table = np.array([[[1, 2]]], dtype=np.int32)
    one = np.ones(1, dtype=np.int32)
    layout = build_layout(one * 0, 0, one * 0, one * 5, table, 4)
    key, value = torch.randn(5, 1, 4, device=target), torch.randn(5, 1, 4, device=target)
    backend.plan(on(target, layout)).write(0, key, value)
    layout.slot_mapping[:, [0, 3]] = -1
    step = backend.plan(on(target, layout))
    changed = torch.randn(5, 1, 4, device=target)
    step.write(0, key, changed)
    expected = changed.clone()
    expected[[0, 3]] = value[[0, 3]]
    query = torch.randn(5, 2, 4, device=target)
    torch.testing.assert_close(step.attend(0, query).cpu(), plain(query.cpu(), key.cpu(), expected.cpu(), 0.3, None), rtol=1e-5, atol=1e-5)


def test_bytes_per_page_and_a_pool_that_costs_nothing() -> None:
    backend = make(Shape(8, 2, 16), 16, (None,) * 5, torch.bfloat16, CPU)
    assert backend.bytes_per_page() == 5 * 2 * 2 * 16 * 16 * 2
    before = resident_bytes()
    backend.allocate((1 << 30) // backend.bytes_per_page())
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        pytest.skip("needs /proc")
