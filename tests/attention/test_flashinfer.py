"""The FlashInfer backend on the CPU, over a stand-in that enforces FlashInfer's contract, against the float32 reference."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import json
import logging
import pathlib
import sys
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer_cases import CASES, CPU, NUM_ROWS, Buffers, Case, Pair, Rows, on, padded
from flashinfer_standin import DEVICE, STANDINS, ContractError, DecodeWrapper, Plan, Processors, StandIn, reserved

from aengine.attention import AttentionMetadata, BackendUnavailableError, Scoring
from aengine.attention.flashinfer.backend import FlashInferBackend
from aengine.attention.flashinfer.library import PlanBounds, check_version, host_tensors, load_flashinfer

SIGNATURES = json.loads((pathlib.Path(__file__).parent / "flashinfer_signatures.json").read_text())


def make(case: Case) -> tuple[Pair, StandIn]:
    library = StandIn()
    backend = FlashInferBackend(case.spec(CPU), library, library.event, library.processors)
    library.calls.clear()

    def placed(metadata: AttentionMetadata) -> None:
        library.on_device(*(getattr(metadata, name) for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")))

    return Pair(case, backend, CPU, placed), library


@pytest.mark.parametrize("version", SIGNATURES)
@pytest.mark.parametrize("name", STANDINS)
def test_the_stand_in_takes_what_the_real_one_takes(version: str, name: str) -> None:
    real = SIGNATURES[version][name]
    mine = {
        parameter.name: None if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        for parameter in inspect.signature(STANDINS[name]).parameters.values()
        if parameter.name not in ("self", "library")
    }
    assert {key: default for key, default in real.items() if default is None or key in mine} == mine


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ragged_steps(case: Case) -> None:
    pair, library = make(case)
    rows = Rows(case, 3)
    pair.allocate(rows.num_pages)
    pair.poison(rows.num_pages)
    for _ in range(7):
        pair.compare(rows.random_step())
    kinds = {call for call in library.calls if ".run" in call}
    assert ("decode.run" in kinds) == (case.decodes > 0)
    assert "prefill.run fa2" in kinds


def test_every_window_is_planned_once_per_step() -> None:
    case = Case("windows", windows=(None, 8, None, 8, 8))
    pair, library = make(case)
    rows = Rows(case, 1)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.full(NUM_ROWS, 17)))
    assert library.calls.count("prefill.plan fa2") == 2
    assert library.calls.count("prefill.run fa2") == 5
    library.calls.clear()
    pair.compare(rows.decodes(np.arange(3)))
    assert library.calls[:2] == ["decode.plan"] * 2
    assert library.calls[2:] == ["decode.run"] * 5


@pytest.mark.parametrize("scales", [None, ((0.05, 0.25), (0.05, 0.25))])
@pytest.mark.parametrize("places", [(), ((0, 0), (1, 0))], ids=["one group", "two groups"])
def test_graph_steps(scales: tuple[tuple[float, float], ...] | None, places: tuple[tuple[int, int], ...]) -> None:
    """Two graphs over the same buffers, replayed with changing rows, lengths and padding, between eager steps."""
    case = Case("graph", windows=(None, 20), kv_scales=scales, places=places)
    pair, library = make(case)
    rows = Rows(case, 5)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.arange(14, 14 + NUM_ROWS)))
    buffers = {size: Buffers(size, rows.num_pages + size, CPU, case.num_groups) for size in (4, 8)}
    steps = {}
    for size, buffer in buffers.items():
        library.on_device(*buffer.tensors.values())
        layout = padded(dataclasses.replace(rows.decodes(np.array([], dtype=np.int32))), size)
        steps[size] = pair.backend.graph_step(buffer.metadata(layout))
    assert len({id(wrapper.int_workspace) for wrapper in library.wrappers}) == len(library.wrappers)
    assert sorted(len(wrapper.int_workspace) >> 20 for wrapper in library.wrappers) == [0] * 4 + [8] * 4
    for count in (1, 4, 8, 3, 7, 2):
        layout = rows.decodes(rows.rng.permutation(NUM_ROWS)[:count])
        size = 4 if count <= 4 else 8
        whole = padded(layout, size)
        buffers[size].fill(whole)
        steps[size].prepare(whole)
        pair.compare_steps(layout, steps[size], size)
        pair.compare(rows.random_step())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "processors", "rows"),
    [
        (64, 8, 128, Processors(132), 1024),
        (32, 1, 128, Processors(132), 100),
        (8, 1, 256, Processors(64), 40),
        (40, 1, 128, Processors(40, major=7), 300),
        (5, 5, 64, Processors(10), 2000),
    ],
)
def test_workspaces_hold_every_plan(heads: int, kv_heads: int, head_dim: int, processors: Processors, rows: int) -> None:
    """Random steps of 1 to `rows` rows, with and without prompts and long contexts; the bounds are reached, so they are not too large."""
    bounds = PlanBounds(Case("bounds", num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim).spec(CPU), processors)
    rng = np.random.default_rng(1)
    most = in_graph = 0
    for count in (1, 1, 1, 2, *rng.integers(1, rows, 9).tolist(), rows):
        for window, chunk in itertools.product((-1, 100), (1, 9, 150, 3000)):
            queries = rng.integers(1, 1 + chunk, count)
            pages = -(-queries // 16) + rng.integers(0, int(1 + 4000 ** rng.random()), count)
            indptr = [torch.tensor([0, *np.cumsum(one).tolist()]) for one in (queries, pages)]
            plan = Plan(heads, kv_heads, head_dim, 16, window, 0.0, torch.bfloat16, torch.bfloat16, 1.0, count, int(queries.sum()))
            floats, _ = reserved(plan, *indptr, processors, graph=False)
            assert floats <= bounds.float_bytes()
            most = max(most, floats)
            if chunk == 1:
                in_graph, ints = reserved(plan, *indptr, processors, graph=True)
                assert in_graph <= bounds.graph_float_bytes(count)
                assert ints <= bounds.graph_int_bytes(count)
    assert in_graph > 0.99 * bounds.graph_float_bytes(rows)
    assert most > 0.4 * bounds.float_bytes()


def test_half_a_gibibyte_is_not_always_enough() -> None:
    """On an H100, with heads of 128."""

    def bounds(heads: int, kv_heads: int) -> PlanBounds:
        return PlanBounds(Case("bounds", num_heads=heads, num_kv_heads=kv_heads).spec(CPU), Processors(132))

    assert bounds(64, 8).graph_float_bytes(670) < 512 << 20 < bounds(64, 8).graph_float_bytes(690)
    assert bounds(32, 8).float_bytes() < 512 << 20 < bounds(32, 1).float_bytes()


def test_a_graph_of_many_rows_has_a_workspace_of_its_own() -> None:
    """The stand-in refuses a plan that overflows its workspace."""
    case = Case("many", num_heads=16, num_kv_heads=2, head_dim=64)
    pair, library = make(case)
    rows = Rows(case, 5)
    pair.allocate(rows.num_pages)
    steps = {}
    for size in (300, 100, 2):  # largest first
        buffers = Buffers(size, rows.num_pages + size, CPU)
        library.on_device(*buffers.tensors.values())
        layout = padded(rows.decodes(np.arange(1)), size)
        steps[size] = pair.backend.graph_step(buffers.metadata(layout))
        steps[size].prepare(layout)
    eager, *graphs = [wrapper.float_workspace for wrapper in library.wrappers[:1] + library.wrappers[2:]]
    assert len(graphs[0]) > len(eager)
    assert {id(one) for one in graphs} == {id(graphs[0])}


def test_a_graph_is_for_its_number_of_decode_rows() -> None:
    case = Case("graph")
    pair, _ = make(case)
    rows = Rows(case, 5)
    pair.allocate(rows.num_pages)
    buffers = Buffers(4, 100, CPU)
    step = pair.backend.graph_step(buffers.metadata(padded(rows.decodes(np.arange(1)), 4)))
    with pytest.raises(ValueError, match=r"4 decode rows was given 2 rows"):
        step.prepare(rows.decodes(np.arange(2)))
    with pytest.raises(TypeError, match="kv_indptr must be int32"):
        pair.backend.graph_step(dataclasses.replace(buffers.metadata(rows.decodes(np.arange(4))), kv_indptr=torch.zeros(5).long()))


@pytest.mark.parametrize("scales", [None, ((0.1, 0.2),)])
def test_copied_pages(scales: tuple[tuple[float, float], ...] | None) -> None:
    """Also where a source is another copy's destination."""
    case = Case("copies", kv_scales=scales, page_size=4)
    pair, _ = make(case)
    rows = Rows(case, 2)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.full(NUM_ROWS, 40)))
    pages = rows.table[0, :, :6].reshape(-1)
    pair.copy_pages(pages[:8].tolist(), pages[4:12].tolist())
    pair.compare(rows.decodes(np.arange(NUM_ROWS)))


def test_a_plan_waits_for_the_copy_of_the_one_before() -> None:
    """The stand-in refuses a plan before that; here that the event is the wrapper's own, and recorded behind the plan."""
    order: list[str] = []

    class Event:
        def __init__(self) -> None:
            order.append("new")
            self.name = str(order.count("new"))

        def record(self) -> None:
            order.append(f"record {self.name}")

        def synchronize(self) -> None:
            order.append(f"wait {self.name}")

    class Library(StandIn):
        def BatchDecodeWithPagedKVCacheWrapper(self, **arguments):
            return Loud(self, **arguments)

    class Loud(DecodeWrapper):
        def plan(self, **arguments) -> None:
            order.append("plan")
            self.library.in_flight.clear()
            super().plan(**arguments)

    case = Case("events", windows=(None, 9))
    backend = FlashInferBackend(case.spec(CPU), Library(), Event, DEVICE)
    rows = Rows(case, 1)
    backend.allocate(rows.num_pages)
    order.clear()
    for _ in range(2):
        backend.plan(on(CPU, rows.decodes(np.arange(2))))
    one_step = ["wait 1", "plan", "record 1", "wait 2", "plan", "record 2"]
    assert order == one_step * 2


def test_the_stand_in_sees_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("race")
    pair, _ = make(case)
    rows = Rows(case, 1)
    pair.allocate(rows.num_pages)
    pair.compare(rows.decodes(np.arange(2)))
    monkeypatch.setattr("flashinfer_standin.StandInEvent.synchronize", lambda self: None)
    with pytest.raises(ContractError, match="planned again"):
        pair.compare(rows.decodes(np.arange(2)))


def test_slot_minus_one_is_skipped() -> None:
    case = Case("skipped", page_size=4)
    pair, _ = make(case)
    rows = Rows(case, 4)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.full(NUM_ROWS, 9)))
    layout = rows.prefills(np.full(NUM_ROWS, 6))
    layout.slot_mapping[:, ::3] = -1
    pair.compare(layout)


def test_index_arrays_that_are_not_int32_are_refused() -> None:
    case = Case("wide")
    pair, _ = make(case)
    rows = Rows(case, 1)
    pair.allocate(rows.num_pages)
    layout = rows.decodes(np.arange(2))
    metadata = on(CPU, layout)
    for name in ("kv_indices", "slot_mapping"):
        with pytest.raises(TypeError, match=f"{name} must be int32, not torch.int64"):
            pair.backend.plan(dataclasses.replace(metadata, **{name: getattr(metadata, name).long()}))
    for name in ("kv_indptr", "last_page_len", "seq_lens"):
        wide = dataclasses.replace(layout, **{name: getattr(layout, name).astype(np.int64)})
        with pytest.raises(TypeError, match=f"{name} must be int32, not int64"):
            pair.backend.plan(dataclasses.replace(metadata, host=wide))


def test_host_tensors_are_copies() -> None:
    array = np.arange(3, dtype=np.int32)
    (tensor,) = host_tensors({"array": array}, CPU)
    array[:] = 9
    assert tensor.tolist() == [0, 1, 2]


def test_bytes_per_page() -> None:
    case = Case("bytes", windows=(None,) * 3, num_kv_heads=2, head_dim=64, page_size=8)
    assert make(case)[0].backend.bytes_per_page() == 3 * 2 * 8 * 2 * 64 * 2
    small = dataclasses.replace(case, kv_scales=((1.0, 1.0),) * 3)
    assert make(small)[0].backend.bytes_per_page() == 3 * 2 * 8 * 2 * 64


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "float16 and bfloat16, not torch.float32"),
        ({"head_dim": 80}, "head_dim 64, 128, 256, not 80"),
        ({"kv_dtype": torch.float8_e5m2}, "KV cache of torch.bfloat16 or float8_e4m3fn here, not torch.float8_e5m2"),
        ({"kv_dtype": torch.int8}, "KV cache of torch.bfloat16 or float8_e4m3fn here, not torch.int8"),
    ],
    ids=["float32", "head_dim", "kv_dtype", "int8"],
)
def test_models_without_kernels_are_refused(change: dict[str, object], reason: str) -> None:
    spec = dataclasses.replace(Case("refused").spec(CPU), **change)
    with pytest.raises(BackendUnavailableError, match=reason):
        FlashInferBackend(spec, StandIn())


def test_without_a_device_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    with pytest.raises(BackendUnavailableError, match="needs a CUDA device, not cpu"):
        FlashInferBackend(Case("cpu").spec(CPU))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, r"not installed \(no module flashinfer\): pip install flashinfer-python"),
        ("import nothing_of_this_name", r"not installed \(no module nothing_of_this_name\)"),
        ("raise RuntimeError('no cubins\\nat all')", "cannot be imported: RuntimeError: no cubins$"),
        ("__version__ = '0.6.12'", "FlashInfer 0.6.12 is not supported: >=0.6.13,<0.8.0 is"),
        ("__version__ = '0.7.2.post1'", None),
    ],
    ids=["missing", "half", "broken", "old", "good"],
)
def test_the_package(source: str | None, reason: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHINFER_USE_CUDA_NORM", raising=False)
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "")  # so that it is put back
    monkeypatch.delenv("FLASHINFER_USE_CUDA_NORM")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if source is not None:
        (tmp_path / "flashinfer.py").write_text(f"import os\nassert os.environ['FLASHINFER_USE_CUDA_NORM'] == '1'\n{source}\n")
    try:
        if reason is None:
            assert load_flashinfer(torch.device("cuda")).__version__ == "0.7.2.post1"
        else:
            with pytest.raises(BackendUnavailableError, match=reason):
                load_flashinfer(torch.device("cuda"))
    finally:
        sys.modules.pop("flashinfer", None)


@pytest.mark.parametrize(
    ("version", "fits"), [("0.6.13", True), ("0.6.18.post1", True), ("0.8.0rc1", False), ("1.0.0", False), ("dev", False)]
)
def test_versions(version: str, fits: bool) -> None:
    if fits:
        check_version(version)
    else:
        with pytest.raises(BackendUnavailableError, match=f"FlashInfer {version} is not supported"):
            check_version(version)


@pytest.mark.parametrize(("given", "said"), [({"sinks": True}, "sinks"), ({"slopes": (0.5, 0.25)}, "slopes")])
def test_sinks_and_slopes_are_for_other_backends(given: dict[str, Any], said: str) -> None:
    spec = dataclasses.replace(Case("sinks").spec(CPU), scoring=(Scoring(0.1, **given),))
    with pytest.raises(BackendUnavailableError, match=f"has no {said}"):
        FlashInferBackend(spec, StandIn(), StandIn().event, DEVICE)


def test_scores_by_layer() -> None:
    """A scale and a soft cap for each layer."""
    pair, _ = make(Case("scores", windows=(None, 8, None), scores=((0.2, 0.0), (0.1, 0.7), (0.05, 2.0))))
    rows = Rows(pair.case, 1)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.full(NUM_ROWS, 17)))
    pair.compare(rows.decodes(np.arange(3)))


def test_modules_that_cannot_be_built_are_a_reason_of_one_line() -> None:
    class Library(StandIn):
        def BatchPrefillWithPagedKVCacheWrapper(self, **arguments):
            raise RuntimeError("Ninja build failed. Ninja output:\n[1/2] nvcc\nnorm.cu:1: fatal error: cublasLt.h: No such file\nmore\n")

    with pytest.raises(BackendUnavailableError) as caught:
        FlashInferBackend(Case("unbuilt").spec(CPU), Library(), StandIn().event, DEVICE)
    assert str(caught.value) == (
        "FlashInfer 0.6.18.post1 cannot run here: RuntimeError: Ninja build failed. Ninja output: "
        "norm.cu:1: fatal error: cublasLt.h: No such file"
    )


def test_building_is_logged_and_everything_runs_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aengine")
    library = StandIn()
    backend = FlashInferBackend(Case("start", windows=(5, None, 5)).spec(CPU), library, library.event, library.processors)
    first, second, prompts = (record.message for record in caplog.records)
    assert first.startswith("building FlashInfer modules for attention: takes minutes at the first start")
    assert second.startswith("FlashInfer modules for attention ready after ")
    assert prompts == "prompts: FlashInfer's fa2 kernels (not fa3: there is no built module swa_True_cap_False_sm90)"
    assert sorted(library.calls) == ["decode.plan"] * 2 + ["decode.run"] * 2 + ["prefill.plan fa2"] * 2 + ["prefill.run fa2"] * 2
    assert len(library.wrappers) == 4  # each has memory of its own
    assert backend.caches == []
