"""Rotary, the writing of pages and paged attention of every level against plain float32, on ragged steps over poisoned pools."""

from __future__ import annotations

import dataclasses

import cpu_ops
import cpu_reference
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import PAGES, Case, as_integers, paged_case, write
from slow_cases import slow_but

from aengine.attention import build_layout
from aengine.kernels.arrays import INT8, as_tensor
from aengine.kernels.cpu.library import PAGE_ELEMENTS, CpuKernels, Workspace
from aengine.kernels.cpu.ops import place_bytes
from aengine.layers.rotary import RopeSpec, cos_sin_cache, unscaled

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [{"dtype": torch.float32}, {"dtype": torch.bfloat16}, *({"dtype": torch.float32, "bits": bits} for bits in PAGES)]
HEAD_DIMS = [2, 8, 16, 24, 32, 48, 64, 80, 100, 112, 128, 256, 512]
PAGE_SIZES = [1, 4, 16, 32, 48, 64]


def float32_bounds(case: Case, atol: float = 5e-6) -> dict[str, float]:
    """Of the results of float32 queries. Over int8 pages queries are rounded to 15 bits, and softmax weights to as many of the largest."""
    return {"rtol": 1e-5, "atol": 5e-4 if case.pool.c.element >= PAGE_ELEMENTS[INT8] else atol}


def check(case: Case, result: torch.Tensor, scale: float, window: int | None, soft_cap: float) -> None:
    arguments = {"scale": scale, "window": window, "soft_cap": soft_cap}
    expected = cpu_reference.attention(case.query, case.keys, case.values, case.lengths, **arguments)
    assert result.shape == case.query.shape
    if case.query.dtype is torch.float32:
        torch.testing.assert_close(result, expected, **float32_bounds(case))
        return
    # bf16: weights of up to 1 are rounded to 8 bits, and so is the result.
    torch.testing.assert_close(result.float(), expected, rtol=2.0**-7, atol=2.0**-8)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("part", slow_but([0], range(2)))
@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 700), st.just(1)),
            st.tuples(st.integers(0, 300), st.integers(1, 80)),
        ),
        max_size=6,
    ),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 40]),
    head_dim=st.sampled_from(HEAD_DIMS),
    page_size=st.sampled_from(PAGE_SIZES),
    window=st.sampled_from([None, None, 1, 5, 16, 100, 300]),
    soft_cap=st.sampled_from([0.0, 0.0, 2.0]),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from([0, 8, 4]),
    threads=st.sampled_from([1, 2, 4, 7]),
)
def test_attention(kernels: CpuKernels, part, rows, kv_heads, group, head_dim, page_size, window, soft_cap, dtype, bits, threads) -> None:
    workspace = Workspace(kernels, threads)
    shape = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": head_dim}
    case = paged_case(workspace, rows, **shape, page_size=page_size, dtype=dtype, bits=bits, seed=len(rows))
    scale = head_dim**-0.5
    result = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=scale, window=window, soft_cap=soft_cap)
    check(case, result, scale, window, soft_cap)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("threads", [1, 16])
def test_a_long_row_is_split_among_threads(kernels: CpuKernels, kind: dict, window: int | None, threads: int) -> None:
    """One KV head and one row: less work than threads, so partitions are computed apart and merged."""
    workspace = Workspace(kernels, threads)
    case = paged_case(workspace, [(2100, 1)], heads=4, kv_heads=1, head_dim=64, page_size=16, **kind)
    result = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=0.3, window=window)
    check(case, result, 0.3, window, 0.0)
    few = cpu_ops.attention(Workspace(kernels, 1), case.query, case.pool, 1, case.layout, scale=0.3, window=window)
    assert torch.equal(result, few)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_token_does_not_depend_on_the_batch(kernels: CpuKernels, page_size: int, window: int | None, kind: dict) -> None:
    """The same bits alone, in a crowd, in one chunk or in several, and with any number of threads; with slopes where there is no window."""
    workspace = Workspace(kernels, 2)
    scoring = {"scale": 0.2, "window": window, "slopes": torch.rand(6) if window is None else None}
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 80}
    case = paged_case(workspace, [(900, 1), (33, 1), (600, 47), (0, 150)], **shape, page_size=page_size, **kind)
    layout = case.layout
    together = cpu_ops.attention(workspace, case.query, case.pool, 1, layout, **scoring)
    for row in range(layout.num_rows):
        first, end = layout.qo_indptr[row : row + 2].tolist()
        pages = layout.kv_indices[:, layout.kv_indptr[row] : layout.kv_indptr[row + 1]]
        start = int(layout.seq_lens[row]) - (end - first)
        for begin, stop in [(first, end), (end - 1, end), (first, (first + end + 1) // 2)]:
            one = np.ones(1, dtype=np.int32)
            alone = build_layout(one * 0, 0, one * (start + begin - first), one * (stop - begin), pages[:, None], page_size)
            for threads in (1, 5):
                query = case.query[begin:stop]
                result = cpu_ops.attention(Workspace(kernels, threads), query, case.pool, 1, alone, **scoring)
                assert torch.equal(result, together[begin:stop])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_broken_row_breaks_alone(kernels: CpuKernels, kind: dict) -> None:
    workspace = Workspace(kernels, 2)
    case = paged_case(workspace, [(20, 1), (30, 1), (5, 9)], heads=4, kv_heads=2, head_dim=32, page_size=16, **kind)
    case.query[1] = torch.nan
    result = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=0.2, window=None)
    assert result[1].isnan().all()
    assert result[[0, *range(2, len(result))]].isfinite().all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize(("key_dim", "value_dim", "kv_heads", "group"), [(576, 512, 1, 40), (20, 6, 2, 3), (24, 40, 1, 4), (48, 32, 2, 16)])
def test_keys_and_values_of_different_widths(kernels: CpuKernels, key_dim, value_dim, kv_heads, group, page_size, kind) -> None:
    """The first is that of latent attention. One row is split among the threads, others are not."""
    for rows, threads in (([(0, 20), (300, 1), (100, 7)], 2), ([(700, 1)], 7)):
        workspace = Workspace(kernels, threads)
        shape = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": key_dim, "value_dim": value_dim}
        case = paged_case(workspace, rows, **shape, page_size=page_size, **kind)
        result = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=key_dim**-0.5, window=150, value_dim=value_dim)
        assert result.shape == (*case.query.shape[:2], value_dim)
        arguments = {"scale": key_dim**-0.5, "window": 150, "soft_cap": 0.0}
        expected = cpu_reference.attention(case.query, case.keys, case.values, case.lengths, **arguments)
        tolerance = float32_bounds(case, 1e-5) if kind["dtype"] is torch.float32 else {"rtol": 2.0**-7, "atol": 2.0**-7}
        torch.testing.assert_close(result.float(), expected, **tolerance)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("threads", [2, 7])
def test_sinks(kernels: CpuKernels, kind: dict, window: int | None, threads: int) -> None:
    """Small ones, one that is nearly all of the softmax, and one beyond what e^x can be."""
    workspace = Workspace(kernels, threads)
    rows = [(600, 1)] if threads > 2 else [(0, 30), (70, 1)]
    case = paged_case(workspace, rows, heads=4, kv_heads=2, head_dim=32, page_size=16, **kind)
    sinks = torch.tensor([-3.0, 2.0, 20.0, 300.0])
    result = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=0.4, window=window, sinks=sinks)
    arguments = {"scale": 0.4, "window": window, "soft_cap": 0.0, "sinks": sinks}
    expected = cpu_reference.attention(case.query, case.keys, case.values, case.lengths, **arguments)
    tolerance = float32_bounds(case) if kind["dtype"] is torch.float32 else {"rtol": 2.0**-7, "atol": 2.0**-8}
    torch.testing.assert_close(result.float(), expected, **tolerance)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("rows", "threads"), [([(600, 1)], 7), ([(0, 30), (70, 1), (400, 40)], 2)])
def test_slopes(kernels: CpuKernels, kind: dict, rows: list[tuple[int, int]], threads: int) -> None:
    """From one that leaves the nearest key alone to none, with a soft cap and a window or without."""
    case = paged_case(Workspace(kernels, 1), rows, heads=6, kv_heads=2, head_dim=32, page_size=16, **kind)
    slopes = torch.tensor([20.0, 0.5, 0.0, 2.0**-8, 1.0, 0.01])
    tolerance = float32_bounds(case) if kind["dtype"] is torch.float32 else {"rtol": 2.0**-7, "atol": 2.0**-8}
    for window, soft_cap in ((None, 0.0), (40, 2.0)):
        arguments = {"scale": 0.4, "window": window, "soft_cap": soft_cap, "slopes": slopes}
        result = cpu_ops.attention(Workspace(kernels, threads), case.query, case.pool, 1, case.layout, **arguments)
        expected = cpu_reference.attention(case.query, case.keys, case.values, case.lengths, **arguments)
        torch.testing.assert_close(result.float(), expected, **tolerance)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("page_size", [8, 16])
def test_what_a_window_has_left_behind_is_not_read(kernels: CpuKernels, kind: dict, page_size: int) -> None:
    """Pages before the window may have another owner by now."""
    workspace = Workspace(kernels, 2)
    case = paged_case(workspace, [(499, 1), (300, 1)], heads=2, kv_heads=1, head_dim=32, page_size=page_size, **kind)
    expected = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=0.3, window=12)
    pages = case.layout.kv_indices.copy()
    poisoned = set(range(1, case.pool.num_pages)) - set(pages[0].tolist())
    pages[:, : 488 // page_size] = poisoned.pop()  # the last query sees positions from 488 on
    changed = dataclasses.replace(case.layout, kv_indices=pages)
    assert torch.equal(cpu_ops.attention(workspace, case.query, case.pool, 1, changed, scale=0.3, window=12), expected)


@pytest.mark.quick_cases(1)
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 40),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 5]),
    head_dim=st.sampled_from(HEAD_DIMS),
    page_size=st.sampled_from(PAGE_SIZES),
    norm=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from([0, 8, 4]),
    threads=st.sampled_from([1, 2, 7]),
)
def test_rotate_and_write(kernels: CpuKernels, count, kv_heads, group, head_dim, page_size, norm, dtype, bits, threads) -> None:
    """Queries are rotated in place; a query that sees one token only reads back the value, and scores read back the key."""
    kv_dtype = PAGES[bits] if bits else dtype
    torch.manual_seed(count)
    workspace = Workspace(kernels, threads)
    heads = kv_heads * group
    table = as_tensor(cos_sin_cache(RopeSpec.of(unscaled(head_dim, 10000.0)), 200))
    pool = cpu_ops.pool_of_heads(
        layers_per_page=2, num_pages=42, page_size=page_size, num_kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim, dtype=kv_dtype
    )
    layout = one_token_rows(np.random.default_rng(count), count, page_size)
    qkv = torch.randn(count, heads + 2 * kv_heads, head_dim).to(dtype)
    weights = [(torch.rand(head_dim) + 0.5).to(dtype) if norm else None for _ in range(2)]
    result = qkv.clone()
    cpu_ops.rotate_and_write(workspace, result.flatten(1), table, pool, 1, layout, *weights, eps=1e-6)
    cos_sin = table[torch.from_numpy(layout.positions).long()]
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 2.0**-8, "atol": 1e-5}
    torch.testing.assert_close(result[:, :heads].float(), cpu_reference.rotate(q, cos_sin, weights[0], 1e-6), **tolerance)
    torch.testing.assert_close(result[:, heads:-kv_heads].float(), cpu_reference.rotate(k, cos_sin, weights[1], 1e-6), **tolerance)
    assert torch.equal(result[:, -kv_heads:], v)
    read = cpu_ops.attention(workspace, q.contiguous(), pool, 1, layout, scale=1.0, window=1)
    if bits:  # a different integer would be an error of 1/254 at least
        torch.testing.assert_close(read, as_integers(v, bits).to(dtype).repeat_interleave(group, dim=1), rtol=2.0**-7, atol=1e-6)
    else:
        assert torch.equal(read, v.repeat_interleave(group, dim=1))


def one_token_rows(rng: np.random.Generator, count: int, page_size: int):
    """Rows at various positions, of which each has a page of its own for its last token; the pages before are page 0."""
    starts = rng.integers(0, 2 * page_size, count).astype(np.int32)
    table = np.zeros((1, count, 2), dtype=np.int32)
    table[0, np.arange(count), starts // page_size] = 1 + rng.permutation(count)
    return build_layout(np.arange(count, dtype=np.int32), count, starts, np.ones(count, dtype=np.int32), table, page_size)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("page_size", [4, 16])
def test_keys_are_stored_at_their_slots(kernels: CpuKernels, kind: dict, page_size: int) -> None:
    """Slot -1 writes nothing; a rewritten token is read anew."""
    workspace = Workspace(kernels, 2)
    case = paged_case(workspace, [(0, 21)], heads=2, kv_heads=1, head_dim=32, page_size=page_size, **kind)
    slots = case.layout.slot_mapping.copy()
    slots[:, [0, 3, 20]] = -1
    changed = dataclasses.replace(case.layout, slot_mapping=slots)
    keys, values = torch.randn(2, 21, 1, 32).to(kind["dtype"])
    write(workspace, case.pool, changed, 2, keys, values)
    bits = kind.get("bits", 0)
    if bits:
        keys, values = as_integers(keys, bits), as_integers(values, bits)
    reserved = page_size * 32 * (bits or 8 * kind["dtype"].itemsize) // 8
    assert not any(memory[:reserved].any() for memory in case.pool._memory)  # page 0, where a slot of -1 might end up
    for stored, new in ((case.keys[0], keys), (case.values[0], values)):
        new[[0, 3, 20]] = stored[[0, 3, 20]]
    case.keys[0], case.values[0] = keys, values
    result = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=0.3, window=None)
    check(case, result, 0.3, None, 0.0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("page_size", [4, 32])
def test_copied_pages(kernels: CpuKernels, kind: dict, page_size: int) -> None:
    """A rotation of all pages of a row: each is both a source and a destination."""
    workspace = Workspace(kernels, 2)
    case = paged_case(workspace, [(100, 5)], heads=2, kv_heads=2, head_dim=16, page_size=page_size, **kind)
    before = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=0.3, window=None)
    pages = case.layout.kv_indices[0]
    case.pool.copy_pages(workspace, pages, np.roll(pages, 1))
    moved = dataclasses.replace(case.layout, kv_indices=np.roll(pages, 1)[None])
    assert torch.equal(cpu_ops.attention(workspace, case.query, case.pool, 1, moved, scale=0.3, window=None), before)
    with pytest.raises(ValueError, match="not in the pool"):
        case.pool.copy_pages(workspace, pages[:1], pages[:1] + case.pool.num_pages)


def test_a_pool_costs_nothing_until_it_is_written() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    pool = cpu_ops.pool_of_heads(
        layers_per_page=4, num_pages=4096, page_size=16, num_kv_heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16
    )
    assert sum(len(memory) for memory in pool._memory) == 4 * 2 * 4096 * 16 * 8 * 128 * 2
    assert resident() - before < 16 << 20


@pytest.mark.parametrize("bits", PAGES)
def test_the_bytes_of_pages_of_integers(bits: int) -> None:
    """A byte, or a half, of each number, padded to 16, and two float32 scales."""
    dtype = PAGES[bits]
    shape = {"page_size": 4, "num_kv_heads": 2, "key_dim": 40, "value_dim": 16, "dtype": dtype}
    pool = cpu_ops.pool_of_heads(layers_per_page=3, num_pages=5, **shape)
    assert sum(place_bytes(4, pool.parts, dtype)) == 4 * 2 * ((48 + 16) * bits // 8 + 8)
    assert sum(len(memory) for memory in pool._memory) == 3 * 5 * sum(place_bytes(4, pool.parts, dtype))


def test_attention_is_as_near_as_torch_in_bf16(kernels: CpuKernels) -> None:
    """The error against float32 is no larger than that of torch's own bf16 attention."""
    workspace = Workspace(kernels, 2)
    case = paged_case(workspace, [(0, 300)], heads=4, kv_heads=4, head_dim=64, page_size=16, dtype=torch.bfloat16)
    result = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=0.125, window=None)
    expected = cpu_reference.attention(case.query, case.keys, case.values, case.lengths, scale=0.125, window=None, soft_cap=0.0)
    q, k, v = (one.transpose(0, 1)[None] for one in (case.query, case.keys[0], case.values[0]))
    torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)[0].transpose(0, 1)
    assert (result.float() - expected).norm() <= 1.1 * (torchs.float() - expected).norm()


@pytest.mark.parametrize(("bits", "least", "most"), [(8, 0.001, 0.012), (4, 0.02, 0.2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_pages_of_integers(kernels: CpuKernels, dtype: torch.dtype, bits: int, least: float, most: float) -> None:
    """About 1 % of the results over normal keys and values in 8 bits: half of a step of 1/127 of the largest of 128 numbers."""
    workspace = Workspace(kernels, 2)
    case, exact = (
        paged_case(workspace, [(0, 300)], heads=4, kv_heads=2, head_dim=128, page_size=16, dtype=dtype, bits=each) for each in (bits, 0)
    )
    result = cpu_ops.attention(workspace, case.query, case.pool, 1, case.layout, scale=128**-0.5, window=None)
    expected = cpu_reference.attention(exact.query, exact.keys, exact.values, exact.lengths, scale=128**-0.5, window=None, soft_cap=0.0)
    assert least < (result.float() - expected).norm() / expected.norm() < most


def test_what_is_refused(kernels: CpuKernels) -> None:
    workspace = Workspace(kernels, 1)
    case = paged_case(workspace, [(10, 3)], heads=2, kv_heads=1, head_dim=32, page_size=16, dtype=torch.float32)

    def attend(**changes) -> None:
        layout = dataclasses.replace(case.layout, **{name: np.array(value, dtype=np.int32) for name, value in changes.items()})
        cpu_ops.attention(workspace, case.query, case.pool, 1, layout, scale=1.0, window=None)

    for page in (-1, case.pool.num_pages):
        with pytest.raises(ValueError, match="a page of the step"):
            attend(kv_indices=[[page]])
    for changes in ({"last_page_len": [17]}, {"last_page_len": [0]}, {"last_page_len": [2]}, {"kv_indptr": [0, 0]}, {"qo_indptr": [0, 2]}):
        with pytest.raises(ValueError, match="a row of the step"):
            attend(**changes)
    with pytest.raises(ValueError, match="do not fit the pool"):
        cpu_ops.attention(workspace, case.query.bfloat16(), case.pool, 1, case.layout, scale=1.0, window=None)
    for name, value, text in (("slot_mapping", 10**6, "a slot"), ("slot_mapping", -2, "a slot"), ("positions", -1, "a position")):
        wrong = dataclasses.replace(case.layout, **{name: np.full_like(getattr(case.layout, name), value)})
        with pytest.raises(ValueError, match=text):
            cpu_ops.rotate_and_write(workspace, torch.zeros(3, 4 * 32), torch.zeros(20, 32), case.pool, 1, wrong)
