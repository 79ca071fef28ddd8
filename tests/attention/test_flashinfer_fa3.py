"""FlashInfer's fa3 kernels for long prompts: when they are there, when they are taken, and that they get what they need (CPU, stand-in)."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flashinfer_cases import CASES, CPU, NUM_ROWS, Case, Pair, Rows
from flashinfer_standin import PrefillWrapper, Processors, StandIn, reserved_fa3

from aengine.attention.flashinfer.backend import FlashInferBackend
from aengine.attention.flashinfer.library import missing_fa3, suits_fa3

H100 = Processors(132)


def make(case: Case, library: StandIn) -> Pair:
    backend = FlashInferBackend(case.spec(CPU), library, library.event, library.processors)
    library.calls.clear()
    return Pair(case, backend, CPU, lambda metadata: None)


@pytest.mark.parametrize("case", [case for case in CASES if case.kv_scales is None], ids=lambda case: case.name)
def test_long_prompts_are_computed_by_fa3(case: Case) -> None:
    library = StandIn(fa3_modules=True)
    pair = make(case, library)
    rows = Rows(case, 3, max_len=200)
    pair.allocate(rows.num_pages)
    pair.poison(rows.num_pages)
    library.calls.clear()
    pair.compare(rows.prefills(np.arange(120, 120 + NUM_ROWS)))
    kinds = len(dict.fromkeys(pair.backend.kinds))
    assert library.calls == ["prefill.plan fa3"] * kinds + ["prefill.run fa3"] * len(case.windows)
    library.calls.clear()
    pair.compare(rows.random_step())
    assert not any("fa3" in call for call in library.calls)


def test_every_kernel_has_run_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aengine")
    library = StandIn(fa3_modules=True)
    backend = FlashInferBackend(Case("start", windows=(5, None, 5)).spec(CPU), library, library.event, library.processors)
    assert {"prefill.run fa2", "prefill.run fa3"} <= set(library.calls)
    assert backend.caches == []
    assert caplog.records[-1].message == "prompts: FlashInfer's fa3 kernels where they are long, fa2 else"


def test_kernels_that_do_not_run_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Wrapper(PrefillWrapper):
        def run(self, **arguments):
            if self.backend == "fa3":
                raise RuntimeError("no kernel image")
            return super().run(**arguments)

    class Library(StandIn):
        def BatchPrefillWithPagedKVCacheWrapper(self, **arguments):
            return Wrapper(self, **arguments)

    caplog.set_level(logging.INFO, logger="aengine")
    case, library = Case("broken"), Library(fa3_modules=True)
    pair = make(case, library)
    assert caplog.records[-1].message == (
        "prompts: FlashInfer's fa2 kernels (not fa3: FlashInfer 0.6.18.post1 cannot run here: RuntimeError: no kernel image)"
    )
    rows = Rows(case, 3, max_len=200)
    pair.allocate(rows.num_pages)
    pair.compare(rows.prefills(np.arange(120, 120 + NUM_ROWS)))
    assert library.calls == ["prefill.plan fa2", "prefill.run fa2"]


@pytest.mark.parametrize(
    ("case", "device", "reason"),
    [
        (Case("there"), H100, None),
        (Case("ada"), Processors(132, major=8), "they need compute capability 9.x"),
        (Case("blackwell"), Processors(132, major=10), "they need compute capability 9.x"),
        (Case("float8", kv_scales=((1.0, 1.0),)), H100, "they read no KV cache of torch.float8_e4m3fn"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_where_there_are_kernels(case: Case, device: Processors, reason: str | None) -> None:
    assert missing_fa3(StandIn(fa3_modules=True), case.spec(CPU), device) == reason


def test_every_module_must_be_built() -> None:
    """One for layers with a window and one for the others."""
    built = {False: True, True: False}

    def generate(*, use_sliding_window: bool, **others: object) -> SimpleNamespace:
        return SimpleNamespace(name=f"window_{use_sliding_window}", is_compiled=built[use_sliding_window])

    library = SimpleNamespace(jit=SimpleNamespace(gen_batch_prefill_module=generate))
    assert missing_fa3(library, Case("plain").spec(CPU), H100) is None
    assert missing_fa3(library, Case("windows", windows=(None, 4)).spec(CPU), H100) == "there is no built module window_True"


def test_modules_that_cannot_be_looked_for_are_a_reason() -> None:
    def generate(**arguments: object) -> None:
        raise PermissionError("read-only")

    library = SimpleNamespace(jit=SimpleNamespace(gen_batch_prefill_module=generate))
    assert missing_fa3(library, Case("plain").spec(CPU), H100) == "PermissionError: read-only"


@pytest.mark.parametrize(
    ("queries", "taken"),
    [
        ([8192], True),
        ([1024], True),
        ([512], False),  # 4 tiles of 32 heads: fewer than multiprocessors
        ([128] * 5, True),
        ([64] * 64, True),
        ([20] * 64, False),  # tiles are mostly empty
        ([20] * 8 + [4096], True),
        ([131072], True),
        ([2] * 20000 + [4096] * 500, False),  # of 32 heads the plan would have no room
    ],
)
def test_which_steps_are_for_fa3(queries: list[int], taken: bool) -> None:
    assert suits_fa3(np.array(queries, dtype=np.int32), Case("8b", num_heads=32, num_kv_heads=8).spec(CPU), H100) == taken


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_plan_that_is_taken_has_room(head_dim: int) -> None:
    rng = np.random.default_rng(2)
    case = Case("many heads", num_heads=128, num_kv_heads=8, head_dim=head_dim)
    library = StandIn(processors=H100, fa3_modules=True)
    backend = FlashInferBackend(case.spec(CPU), library, library.event, library.processors)
    most = 0
    for _ in range(300):
        queries = rng.integers(1, 1 + int(20_000 ** rng.random()), rng.integers(1, 600)).astype(np.int32)
        if suits_fa3(queries, case.spec(CPU), H100):
            plan = dataclasses.replace(library.wrappers[-1].planned, num_rows=len(queries), num_queries=int(queries.sum()))
            indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(queries))))
            most = max(most, reserved_fa3(plan, indptr, H100))
    assert 4 << 20 < most <= 8 << 20
    assert backend.caches == []
