"""The FlashInfer backend over the real package against the float32 reference: the CPU's cases, graphs, and what only a device shows."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from attention_backends import backend_marks
from flashinfer_cases import CASES, NUM_ROWS, Buffers, Case, Pair, Rows, on, padded
from flashinfer_standin import STANDINS
from torch import Tensor

from aengine.attention.flashinfer.backend import FlashInferBackend
from aengine.attention.flashinfer.library import load_flashinfer
from aengine.kernels.paged_cache import write_torch

pytestmark = backend_marks("flashinfer")
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def one_stream():
    """As the engine has it: a stream of its own, in inference mode."""
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def make(case: Case) -> Pair:
    return Pair(case, FlashInferBackend(case.spec(CUDA)), CUDA, lambda metadata: None)


@pytest.mark.parametrize("name", STANDINS)
def test_the_stand_in_takes_what_is_installed(name: str) -> None:
    found: object = load_flashinfer(CUDA)
    for part in name.split("."):
        found = getattr(found, part)
    real = inspect.signature(found).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in real.values()):
        pytest.skip("takes its arguments by any name and hands them on")
    assert set(inspect.signature(STANDINS[name]).parameters) - {"self", "library"} <= set(real)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ragged_steps(case: Case) -> None:
    pair = make(case)
    rows = Rows(case, 3)
    pair.allocate(rows.num_pages)
    pair.poison(rows.num_pages)
    for _ in range(7):
        pair.compare(rows.random_step())


def test_long_rows() -> None:
    """Rows that are split, beside those that end a token before, at and after the end of a page."""
    case = Case("long", num_heads=8)
    pair = make(case)
    rows = Rows(case, 3, max_len=3100)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.array([1, 14, 15, 16, 17, 999, 2047, 3000])))
    for _ in range(3):
        pair.compare(rows.decodes(np.arange(NUM_ROWS)))


@pytest.mark.parametrize(
    "case",
    [Case("long prompts", num_heads=32, num_kv_heads=8), Case("windows", num_heads=32, num_kv_heads=8, windows=(None, 300))],
    ids=lambda case: case.name,
)
def test_long_prompts(case: Case) -> None:
    """In two chunks, by the fa3 kernels where these are built."""
    pair = make(case)
    rows = Rows(case, 3, max_len=2000)
    pair.allocate(rows.num_pages)
    pair.poison(rows.num_pages)
    pair.compare(rows.prefills(np.arange(900, 900 + NUM_ROWS)))
    pair.compare(rows.prefills(np.arange(600, 600 + NUM_ROWS)))
    pair.compare(rows.decodes(np.arange(NUM_ROWS)))


def test_uneven_decodes() -> None:
    """By our kernel: with so many KV heads FlashInfer splits none of the rows."""
    heads = torch.cuda.get_device_properties(CUDA).multi_processor_count // 3  # then 6 rows have two thread blocks for each multiprocessor
    case = Case("uneven", num_heads=heads, num_kv_heads=heads, head_dim=64)
    pair = make(case)
    rows = Rows(case, 3, max_len=1300)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.array([1200, 15, 16, 17, 1, 20, 20, 20])))
    for count in (NUM_ROWS, NUM_ROWS - 1, NUM_ROWS):
        layout = rows.decodes(np.arange(count))
        assert pair.backend.is_uneven(layout)
        pair.compare(layout)


@pytest.mark.parametrize("scales", [None, ((0.05, 0.25), (0.1, 1.0))])
def test_copied_pages(scales: tuple[tuple[float, float], ...] | None) -> None:
    case = Case("copies", kv_scales=scales, windows=(None, None), page_size=4)
    pair = make(case)
    rows = Rows(case, 2)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.full(NUM_ROWS, 40)))
    pages = rows.table[:, :6].reshape(-1)
    pair.copy_pages(pages[:8].tolist(), pages[4:12].tolist())
    pair.compare(rows.decodes(np.arange(NUM_ROWS)))


@pytest.mark.parametrize("scales", [None, ((0.05, 0.25),)])
def test_plain_torch_writes_the_same(scales: tuple[tuple[float, float], ...] | None) -> None:
    """Where there is no triton."""
    case = Case("plain", kv_scales=scales)
    pair = make(case)
    pair.backend.kv_write = write_torch
    rows = Rows(case, 4)
    pair.allocate(rows.num_pages)
    for _ in range(4):
        pair.compare(rows.random_step())


class Recorded:
    """A graph of writing and attending in all layers, over inputs that stay where they are."""

    def __init__(self, case: Case, backend: FlashInferBackend, size: int, num_indices: int, rows: Rows, *, uneven: bool = False) -> None:
        self.case, self.size = case, size
        self.buffers = Buffers(size, num_indices, CUDA)
        start = padded(rows.decodes(np.array([], dtype=np.int32)), size)
        self.buffers.fill(start)
        self.step = (backend.uneven_graph_step if uneven else backend.graph_step)(self.buffers.metadata(start))
        assert self.step is not None
        heads = case.num_heads + 2 * case.num_kv_heads
        self.inputs = [torch.zeros(size, heads, case.head_dim, dtype=case.dtype, device=CUDA) for _ in case.windows]
        self.step.prepare(start)
        for _ in range(2):
            self.forward()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            self.outputs = self.forward()

    def forward(self) -> list[Tensor]:
        outputs = []
        for layer, fused in enumerate(self.inputs):
            query, key, value = fused.split([self.case.num_heads, self.case.num_kv_heads, self.case.num_kv_heads], dim=1)
            self.step.write(layer, key, value)
            outputs.append(self.step.attend(layer, query))
        return outputs


@pytest.mark.parametrize(
    "case",
    [Case("plain", windows=(None, None)), Case("windows", windows=(None, 20)), Case("float8", kv_scales=((0.05, 0.25),))],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("uneven", [False, True], ids=["", "uneven"])
def test_graphs(case: Case, uneven: bool) -> None:
    """Two graphs, replayed with changing rows, lengths and padding, between eager steps on the same pool."""
    pair = make(case)
    rows = Rows(case, 5, max_len=700)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.array([1, 15, 16, 17, 100, 300, 511, 600])))
    graphs = {size: Recorded(case, pair.backend, size, rows.num_pages + size, rows, uneven=uneven) for size in (8, 4)}
    for count in (1, 4, 8, 3, 7, 2, 8, 5):
        layout = rows.decodes(rows.rng.permutation(NUM_ROWS)[:count])
        graph = graphs[4 if count <= 4 else 8]
        whole = padded(layout, graph.size)
        graph.buffers.fill(whole)
        graph.step.prepare(whole)
        drawn = [pair.drawn(*fused.shape) for fused in graph.inputs]
        for fused, new in zip(graph.inputs, drawn, strict=True):
            fused.copy_(new)
        graph.graph.replay()
        expected_step = pair.reference.plan(on(torch.device("cpu"), layout))
        for layer, new in enumerate(drawn):
            query, key, value = new[:count].split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
            expected_step.write(layer, key, value)
            pair.assert_near(graph.outputs[layer][:count], expected_step.attend(layer, query))
        pair.compare(rows.random_step())


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
def test_plans_do_not_overtake_each_other(recorded: bool) -> None:
    """Steps are planned and launched while the device is still busy with something else, and read when all are through."""
    case = Case("race")
    pair = make(case)
    rows = Rows(case, 6, max_len=600)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.arange(60, 460, 50)))
    graph = Recorded(case, pair.backend, NUM_ROWS, rows.num_pages + NUM_ROWS, rows) if recorded else None
    layouts = [rows.decodes(rows.rng.permutation(NUM_ROWS)[: rows.rng.integers(1, NUM_ROWS + 1)]) for _ in range(12)]
    wholes = [padded(layout, NUM_ROWS) if recorded else layout for layout in layouts]
    metadata = [on(CUDA, whole) for whole in wholes]
    drawn = [pair.drawn(whole.num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim) for whole in wholes]
    inputs = [new.to(CUDA) for new in drawn]
    found = []
    torch.cuda.synchronize()
    for whole, arrays, fused in zip(wholes, metadata, inputs, strict=True):
        torch.cuda._sleep(20_000_000)
        if graph is not None:
            for name, tensor in graph.buffers.tensors.items():
                array = getattr(arrays, name)
                tensor[..., : array.shape[-1]].copy_(array)
            graph.inputs[0].copy_(fused)
            graph.step.prepare(whole)
            graph.graph.replay()
            found.append(graph.outputs[0].clone())
            continue
        step = pair.backend.plan(arrays)
        query, key, value = fused.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
        step.write(0, key, value)
        found.append(step.attend(0, query))
    for layout, new, result in zip(layouts, drawn, found, strict=True):
        query, key, value = new[: layout.num_tokens].split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
        expected = pair.reference.plan(on(torch.device("cpu"), layout))
        expected.write(0, key, value)
        pair.assert_near(result[: layout.num_tokens], expected.attend(0, query))


def test_a_step_waits_for_nothing() -> None:
    case = Case("waits", windows=(None, 20))
    pair = make(case)
    rows = Rows(case, 6)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.full(NUM_ROWS, 30)))
    pair.compare(rows.decodes(np.arange(NUM_ROWS)))
    layouts = [rows.decodes(np.arange(NUM_ROWS)), rows.random_step()]
    metadata = [on(CUDA, layout) for layout in layouts]
    fused = [torch.zeros(layout.num_tokens, 8, case.head_dim, dtype=case.dtype, device=CUDA) for layout in layouts]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for arrays, tokens in zip(metadata, fused, strict=True):
            step = pair.backend.plan(arrays)
            query, key, value = tokens.split([4, 2, 2], dim=1)
            for layer in range(len(case.windows)):
                step.write(layer, key, value)
                step.attend(layer, query)
        pair.backend.copy_pages(np.array([1, 2], dtype=np.int32), np.array([3, 4], dtype=np.int32))
    finally:
        torch.cuda.set_sync_debug_mode("default")
