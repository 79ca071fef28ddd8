"""Decodes of uneven lengths on the FlashInfer backend: the estimate, and that our Triton kernel computes them (interpreted on a CPU)."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from flashinfer_cases import CPU, NUM_ROWS, Buffers, Case, Pair, Rows, padded
from flashinfer_standin import Processors, StandIn, chunk_pages
from triton_mode import needs_interpreter  # before triton is imported

from aengine.attention import StepLayout, build_layout
from aengine.attention.flashinfer.backend import FlashInferBackend
from aengine.attention.flashinfer.wrappers import UnevenDecodes
from aengine.attention.triton import TritonDecodes

pytestmark = pytest.mark.slow

QWEN3_8B = Case("8b", num_heads=32, num_kv_heads=8).spec(CPU)


def decodes(lengths: list[int], shared: int = 0, page_size: int = 16) -> StepLayout:
    """Rows of these lengths, the first `shared` pages of which are the same."""
    ends = np.array(lengths, dtype=np.int32)
    table = 1 + np.arange(len(ends) * -(-max(lengths) // page_size), dtype=np.int32).reshape(len(ends), -1)
    table[:, :shared] = table[0, :shared]
    rows = np.arange(len(ends), dtype=np.int32)
    return build_layout(rows, len(ends), ends - 1, np.ones_like(ends), table[None], page_size)


@pytest.mark.parametrize(
    ("lengths", "shared", "uneven"),
    [
        ([512] * 63 + [32768], 0, True),
        ([1024] * 256, 0, False),
        ([1024], 0, False),
        ([32768], 0, False),
        ([100] * 40 + [600], 0, False),  # too little to gain
        ([512] * 29 + [32768], 0, True),  # FlashInfer splits, but not finely
        ([512] * 15 + [32768], 0, False),  # finely enough
        ([2048] * 24 + [8192], 0, False),
        (np.linspace(100, 40000, 64).astype(int).tolist(), 0, False),  # the longest row is no more than an even share
        ([2048] * 32, 64, True),
        ([2048] * 32, 16, False),
        ([33000] * 8, 2048, True),
    ],
)
def test_which_decodes_are_uneven(lengths: list[int], shared: int, uneven: bool) -> None:
    """On an H100."""
    assert UnevenDecodes(QWEN3_8B, 132).has(decodes(lengths, shared)) == uneven


def test_the_longest_part_is_the_planners() -> None:
    """To a page."""
    rng = np.random.default_rng(4)
    for count in (1, 2, 10, 30, 33, 34, 100):
        lengths = rng.lognormal(7, 1.5, count).astype(np.int32) + 1
        planned = 16 * min(chunk_pages([1] * count, (-(-lengths // 16)).tolist(), 16, 33), -(-int(lengths.max()) // 16))
        assert abs(UnevenDecodes(QWEN3_8B, 132).longest_part(lengths) - planned) <= 16


def test_more_splits_with_fewer_kv_heads() -> None:
    spec = Case("one of eight ranks", num_heads=4, num_kv_heads=1).spec(CPU)
    assert not UnevenDecodes(spec, 132).has(decodes([512] * 63 + [32768]))


def test_windows_make_lengths_even() -> None:
    layout = decodes([512] * 63 + [32768])
    for windows, uneven in (((100, 1024), False), ((100, None), True)):
        spec = Case("windows", num_heads=32, num_kv_heads=8, windows=windows).spec(CPU)
        assert UnevenDecodes(spec, 132).has(layout) == uneven


def test_prompts_of_the_step_do_not_count() -> None:
    layout = decodes([512] * 64 + [32768])
    assert not UnevenDecodes(QWEN3_8B, 132).has(dataclasses.replace(layout, num_decodes=64))


FEW = Processors(7)  # which decode rows of `UNEVEN` are too many for, so that FlashInfer does not split them
HALF = torch.float16  # Triton's interpreter computes no products of bfloat16
UNEVEN = np.array([300] + [20] * (NUM_ROWS - 1))


@pytest.fixture
def our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, and taken for small gains, so that rows may be short."""
    monkeypatch.setattr("aengine.attention.flashinfer.backend.triton_decodes", TritonDecodes)
    monkeypatch.setattr("aengine.attention.flashinfer.wrappers._LEAST_GAIN", 16)


def make(case: Case) -> tuple[Pair, StandIn, Rows]:
    library = StandIn(processors=FEW)
    pair = Pair(case, FlashInferBackend(case.spec(CPU), library, library.event, FEW), CPU, lambda metadata: None)
    rows = Rows(case, 3, max_len=330)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(UNEVEN))
    library.calls.clear()
    return pair, library, rows


@needs_interpreter
@pytest.mark.usefixtures("our_kernel")
def test_uneven_decodes_are_computed_by_our_kernel() -> None:
    """Beside prompts, too; in two groups of layers with different windows."""
    case = Case("eager", head_dim=64, dtype=HALF, windows=(None, 9), places=((0, 0), (1, 0)), kv_scales=((0.05, 0.25), (1.0, 1.0)))
    pair, library, rows = make(case)
    few = np.ones(NUM_ROWS, dtype=np.int32)
    few[-1] = 5
    pair.compare(rows.mixed(np.arange(NUM_ROWS), NUM_ROWS - 1, few))
    assert not any("decode" in call for call in library.calls)
    pair.compare(rows.decodes(np.arange(1, NUM_ROWS)))
    assert "decode.plan" in library.calls


@needs_interpreter
@pytest.mark.usefixtures("our_kernel")
def test_uneven_graphs() -> None:
    """Replayed with changing rows, lengths and padding, between graphs of FlashInfer's kernels over the same buffers."""
    case = Case("graphs", head_dim=64, dtype=HALF)
    pair, library, rows = make(case)
    buffers = Buffers(NUM_ROWS, rows.num_pages + NUM_ROWS, CPU)
    start = padded(rows.decodes(np.array([], dtype=np.int32)), NUM_ROWS)
    steps = {True: pair.backend.uneven_graph_step(buffers.metadata(start)), False: pair.backend.graph_step(buffers.metadata(start))}
    for count in (NUM_ROWS, 1, NUM_ROWS - 1):
        layout = rows.decodes(np.arange(count))
        whole = padded(layout, NUM_ROWS)
        buffers.fill(whole)
        library.calls.clear()
        uneven = count > 1
        assert pair.backend.is_uneven(layout) == uneven
        steps[uneven].prepare(whole)
        pair.compare_steps(layout, steps[uneven], NUM_ROWS)
        assert (library.calls == []) == uneven


def test_without_our_kernel_all_decodes_are_flashinfers() -> None:
    pair, library, rows = make(Case("alone", head_dim=64))
    layout = rows.decodes(np.arange(NUM_ROWS))
    assert not pair.backend.is_uneven(layout)
    assert pair.backend.uneven_graph_step(Buffers(NUM_ROWS, rows.num_pages, CPU).metadata(layout)) is None
    pair.compare(layout)
    assert library.calls == ["decode.plan", "decode.run"]


def test_a_kernel_that_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(self: TritonDecodes, *given: object) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr("aengine.attention.flashinfer.backend.triton_decodes", TritonDecodes)
    monkeypatch.setattr(TritonDecodes, "plan", broken)
    caplog.set_level(logging.WARNING, logger="aengine")
    pair, _, rows = make(Case("broken", head_dim=64))
    assert not pair.backend.is_uneven(rows.decodes(np.arange(NUM_ROWS)))
    (record,) = caplog.records
    assert record.message == "decodes of uneven lengths: slow, because our Triton kernel does not run here: RuntimeError: no compiler"
