"""Recorded steps against steps run as usual, on a CPU: a tape of operations stands in for CUDA graphs.

The tape calls the recorded operations again on the same tensors, so a number of Python's that was recorded, or a buffer that moved,
shows as wrong tokens here as it would on a GPU.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import pathlib
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from driver import GREEDY, Driver, sampled
from eager_capture import EagerCapture, PlannedStep
from reference import TINY, save_random, save_tiny
from replays import count_replays, graphs_of
from slow_cases import slow_but
from test_greedy import make_runner
from torch.multiprocessing.reductions import StorageWeakRef
from workloads import VOCAB, compare_with_eager, random_steps

from aengine.api.config import EngineConfig
from aengine.attention import AttentionStep, StepLayout, build_layout
from aengine.attention.torch_native import TorchNativeBackend
from aengine.kernels.arrays import torch_dtype
from aengine.runner.contract import Step
from aengine.runner.runner import ModelRunner
from aengine.runner.torch import model as device_model
from aengine.runner.torch.buckets import GraphSizes
from aengine.runner.torch.capture import Pieces, Replay
from aengine.runner.torch.graphs import StagingBuffer
from aengine.scheduler.plan import StepPlan

SIZES = (1, 2, 5, 8, 20)
CPU = torch.device("cpu")
NO_IDS = torch.zeros(0, dtype=torch.int32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny("qwen3", path)
    return path


def graph_runner(model_dir: pathlib.Path, capture: type[EagerCapture] = EagerCapture, **options: Any) -> ModelRunner:
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 24, "kv_cache_memory": 64 << 20, "graph_sizes": SIZES, **options}
    config = EngineConfig(model=str(model_dir), attention_backend="torch_native", graph_tokens=120, **settings)
    return ModelRunner(config, model_dir, capture)


def eager_runner(model_dir: pathlib.Path, **options: Any) -> ModelRunner:
    return make_runner(model_dir, attention_backend="torch_native", **options)


class FromBuffers(PlannedStep):
    """A graph step that knows what a kernel would: the buffers, as they are when it is run."""

    def plan(self) -> AttentionStep:
        prepared, buffers = self._layout, self._buffers
        kv_indptr, last, slots = (tensor.numpy().copy() for tensor in (buffers.kv_indptr, buffers.last_page_len, buffers.slot_mapping))
        layout = replace(
            prepared,
            qo_indptr=buffers.qo_indptr.numpy(),
            kv_indptr=kv_indptr,
            kv_indices=buffers.kv_indices.numpy()[:, : kv_indptr[-1]].copy(),
            last_page_len=last,
            seq_lens=(np.diff(kv_indptr) - 1) * prepared.page_size + last,
            slot_mapping=slots,
        )
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "seq_lens", "slot_mapping"):
            np.testing.assert_array_equal(getattr(layout, name), getattr(prepared, name))
        return self._backend.plan(replace(buffers, host=layout))


@pytest.fixture
def from_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EagerCapture, "graph_step", FromBuffers)


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("from_buffers")
@pytest.mark.parametrize(
    ("family", "page_size"),
    slow_but(
        [("qwen2-tied-windowed", 16), ("deepseek-v3-dense", 16)],
        itertools.product(["qwen3", "qwen2-tied-windowed", "llama-tied-biases", "deepseek-v3-dense"], [1, 16]),
    ),
)
def test_greedy_tokens_of_random_steps(family: str, page_size: int, tmp_path: pathlib.Path) -> None:
    """Lengths change, rows are padded, and every graph is used."""
    save_tiny(family, tmp_path)
    recorded = graph_runner(tmp_path, page_size=page_size)
    counts = count_replays(recorded)
    for seed in range(3):
        expected = random_steps(eager_runner(tmp_path, page_size=page_size), seed)
        assert random_steps(recorded, seed) == expected
        assert sum(map(len, expected)) > 100
    assert set(counts) == {*(("decode", size) for size in SIZES), *(("pieces", size) for size in (16, 32, 64, 96, 120))}
    assert min(counts.values()) > 0, counts


def test_logits_of_random_steps(tiny: pathlib.Path) -> None:
    runner = graph_runner(tiny)
    compared = compare_with_eager(runner)
    random_steps(runner, 7, params=(GREEDY, sampled(1), sampled(2)))
    assert compared.by_graph > 10
    assert compared.in_pieces > 10
    assert 0.0 < compared.worst < 1e-4


@pytest.mark.slow
def test_sampled_tokens_of_random_steps(tiny: pathlib.Path) -> None:
    """All that a request can ask of its logits, beside greedy neighbours."""
    params = [
        sampled(1),
        sampled(2, 0.7, top_p=0.9),
        GREEDY,
        sampled(3, top_k=5, min_p=0.05),
        replace(GREEDY, logit_bias=((7, 3.0), (9, -math.inf)), frequency_penalty=1.0),
        sampled(5, repetition_penalty=1.3, presence_penalty=0.5),
    ]
    for seed in range(2):
        one, two = (random_steps(runner, seed, params=params) for runner in (graph_runner(tiny), eager_runner(tiny)))
        assert one == two


def test_logprobs_and_prompt_logprobs(tiny: pathlib.Path) -> None:
    params = replace(GREEDY, logprobs=3, prompt_logprobs=2)
    seen = []
    for runner in (graph_runner(tiny), eager_runner(tiny)):
        driver = Driver(runner, chunk=13)
        sequences = [driver.add(list(range(40)), params), driver.add(list(range(60, 70)), params)]
        results = [driver.run_step(sequences) for _ in range(8)]
        logprobs = [values for r in results if r.logprobs for values in (r.logprobs.token_logprobs, r.logprobs.top_logprobs)]
        of_prompts = [p.logprobs.token_logprobs for r in results for p in r.prompt_logprobs]
        assert len(of_prompts) > 3
        seen.append(([s.output for s in sequences], logprobs, of_prompts))
    assert seen[0][0] == seen[1][0]
    for one, two in zip(seen[0][1] + seen[0][2], seen[1][1] + seen[1][2], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


def test_pooled_states(tiny: pathlib.Path) -> None:
    """Also of chunks that are so short that a graph of decodes would hold them."""
    prompts = {"last": [1, 27, 40], "mean": [1, 2, 40]}
    seen = []
    for runner in (graph_runner(tiny), eager_runner(tiny)):
        driver = Driver(runner, chunk=13)
        sequences = [driver.add(list(range(5)), GREEDY)]
        for pooling, lengths in prompts.items():
            sequences += [driver.add(list(range(7, 7 + length)), replace(GREEDY, pooling=pooling)) for length in lengths]
        results = [driver.run_step(sequences) for _ in range(8)]
        seen.append([(one.row, one.start, one.states) for result in results for one in result.pooled])
    assert [one[:2] for one in seen[0]] == [one[:2] for one in seen[1]]
    assert len(seen[0]) == 3 + 1 + 1 + 4
    for (*_, one), (*_, two) in zip(*seen, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("from_buffers")
def test_what_buffers_hold_beyond_a_step_does_not_matter(tiny: pathlib.Path) -> None:
    runner = graph_runner(tiny)
    decodes, pieces = graphs_of(runner).decodes, graphs_of(runner).pieces
    rng = np.random.default_rng(0)

    def poison() -> None:
        with torch.inference_mode():
            for floats in (decodes._logits, pieces._attended, pieces._hidden):
                floats.fill_(math.nan)
            decodes._inputs.random_(-(2**31), 2**31 - 1)
            decodes._tokens.random_(-(2**31), 2**31 - 1)
            pieces._input_ids.copy_(torch.from_numpy(rng.integers(0, VOCAB, 120)))
            pieces._positions.copy_(torch.from_numpy(rng.integers(0, 256, 120)))
            runner._executor._last_tokens[-1] = int(rng.integers(0, VOCAB))
            for slot in decodes._staging:
                slot._memory.random_(-(2**31), 2**31 - 1)

    assert random_steps(runner, 5, before=poison) == random_steps(eager_runner(tiny), 5)


def test_replays_use_the_same_memory(tiny: pathlib.Path) -> None:
    runner = graph_runner(tiny)
    decodes, pieces = graphs_of(runner).decodes, graphs_of(runner).pieces

    def places() -> list[int]:
        owners = [vars(decodes), vars(pieces)]
        return [value.data_ptr() for owner in owners for value in owner.values() if isinstance(value, torch.Tensor)]

    before = places()
    assert len(before) == 13
    random_steps(runner, 1, 20)
    assert places() == before
    driver = Driver(runner)
    sequences = [driver.add([at, at + 1]) for at in range(3)]
    driver.run_step(sequences)
    entries = [(s, 1) for s in sequences]
    ends = set()
    for _ in range(3):
        plan = driver._plan(entries, 3)
        with torch.inference_mode():
            step = decodes_step(runner, plan)
            done = graphs_of(runner).decodes.run(step, NO_IDS)
        for s in sequences:
            s.computed += 1
        assert done is not None
        ends.add((done.greedy.tokens.data_ptr(), done.rows.data_ptr(), done.next_positions.data_ptr()))
        assert done.next_positions.tolist() == step.layout.seq_lens.tolist()
        assert done.rows.tolist() == plan.rows.tolist()
    assert len(ends) == 1


def decodes_step(runner: ModelRunner, plan: StepPlan) -> Step:
    runner._page_table[plan.page_groups, plan.page_rows, plan.page_cols] = plan.page_ids
    layout = build_layout(plan.rows, plan.num_decodes, plan.starts, plan.lengths, runner._page_table, runner.page_size)
    return Step.of(plan, layout)


def test_padding_touches_no_row(tiny: pathlib.Path) -> None:
    """Neither the last tokens of rows that are not in a step, nor any page."""
    runner = graph_runner(tiny, graph_sizes=(20,))
    driver = Driver(runner)
    one, other = driver.add([1, 2, 3]), driver.add([4, 5, 6, 7])
    driver.run_step([one, other])
    last = runner._executor._last_tokens.clone()
    backend = runner._executor._model.backend
    caches = [pages for cache in backend.caches for pages in (cache.keys, cache.values)]
    before = [cache.clone() for cache in caches]
    driver.run_step([one])
    changed = (runner._executor._last_tokens != last).nonzero()[:, 0].tolist()
    assert set(changed) <= {one.row, len(last) - 1}
    for cache, old in zip(caches, before, strict=True):
        slots = (cache != old).any(-1).any(1)  # [pages, page_size], of [pages, heads, page_size, width]
        assert slots.sum() == 1, "one token was written"
        assert not cache[0].any(), "nothing is on page 0"


@pytest.mark.slow
def test_logits_are_those_of_the_graph(tiny: pathlib.Path) -> None:
    """In the dtype of the weights, without a copy."""
    for dtype in ("float32", "bfloat16"):
        runner = graph_runner(tiny, dtype=dtype)
        driver = Driver(runner)
        driver.generate([[1, 2, 3], [4, 5]], 3)
        graph_logits = graphs_of(runner).decodes._logits
        assert graph_logits.dtype == torch_dtype(runner.dtype)
        sequences = [driver.add([at, at + 1]) for at in range(2)]
        driver.run_step(sequences)
        with torch.inference_mode():
            plan = driver._plan([(s, 1) for s in sequences], 2)
            done = graphs_of(runner).decodes.run(decodes_step(runner, plan), NO_IDS)
            both = done.logits(torch.tensor([0, 1], dtype=torch.int32))
            assert (both.shape, both.data_ptr()) == ((2, VOCAB), graph_logits.data_ptr())
            torch.testing.assert_close(done.logits(torch.tensor([1], dtype=torch.int32))[0], graph_logits[1])
            assert done.greedy.tokens.tolist() == graph_logits[:2].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_draws_read_logits_in_the_dtype_of_the_model(family: str, tmp_path: pathlib.Path) -> None:
    """Unless they are capped, or change for some rows; a float32 copy would give the same tokens."""
    save_random(family, {**TINY, "head_dim": 32}, tmp_path, 1, dtype=torch.float32)
    runner = graph_runner(tmp_path, dtype="bfloat16")
    executor: Any = runner._executor
    sampler, draw, dtypes = executor._sampler, executor._sampler._draw, []

    def checked(logits: torch.Tensor, host_params: np.ndarray, params: Any, chosen: torch.Tensor) -> torch.Tensor:
        dtypes.append(logits.dtype)
        tokens = draw(logits, host_params, params, chosen)
        assert torch.equal(chosen, logits.float().gather(1, tokens[:, None])[:, 0])
        assert torch.equal(tokens, draw(logits.float(), host_params, params))
        return tokens

    sampler._draw = checked
    as_they_are = [
        sampled(1),
        sampled(2, 0.7, top_p=0.9),
        GREEDY,
        sampled(3, top_k=5),
        sampled(4, min_p=0.1),
        replace(sampled(5), logprobs=3),
    ]
    random_steps(runner, 0, params=as_they_are)
    assert set(dtypes) == {torch.float32 if family == "Gemma2" else torch.bfloat16}
    dtypes.clear()
    random_steps(runner, 0, params=[sampled(1, repetition_penalty=1.3)])
    assert set(dtypes) == {torch.float32}


def test_results_are_read_late(tiny: pathlib.Path) -> None:
    """Steps that were launched before the results of earlier ones were asked for overwrite none of them."""
    expected = Driver(eager_runner(tiny)).generate([list(range(20))], 8)[0]
    runner = graph_runner(tiny)
    driver = Driver(runner)
    sequence = driver.add(list(range(20)))
    driver.run_step([sequence])
    flights = []
    for _ in range(5):
        flights.append(runner.launch(driver._plan([(sequence, 1)], 1)))
        sequence.computed += 1
    flights[-1].result()  # it comes after the others
    late = [flight.result().tokens.item() for flight in flights]
    assert sequence.output + late == expected[:6]
    assert [flight.result().tokens.item() for flight in flights] == late, "asked twice"
    assert len(runner._executor._free_buffers) == 5, "all were on their way before the first one was read"
    sequence.output += late
    driver.run_step([sequence])
    driver.run_step([sequence])
    assert sequence.output == expected
    assert len(runner._executor._free_buffers) == 5, "used again, once read"


def test_a_backend_that_is_not_for_graphs(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aengine")
    monkeypatch.setattr(EagerCapture, "graph_step", staticmethod(lambda backend, buffers: None))
    runner = graph_runner(tiny)
    assert runner._executor._model.graphs is None
    assert [message for message in caplog.messages if "graphs" in message] == [
        "no graphs: the attention backend torch_native does not support them"
    ]
    assert random_steps(runner, 2, 20) == random_steps(eager_runner(tiny), 2, 20)


@pytest.mark.slow
def test_uneven_decodes_have_graphs_of_their_own(
    tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The backend says which steps these are, by lengths without padding."""
    caplog.set_level(logging.INFO, logger="aengine")
    seen: list[bool] = []

    def is_uneven(backend: TorchNativeBackend, layout: StepLayout) -> bool:
        seen.append(int(layout.seq_lens.max()) >= 2 * int(layout.seq_lens.min()))
        return seen[-1]

    monkeypatch.setattr(TorchNativeBackend, "is_uneven", is_uneven)
    monkeypatch.setattr(TorchNativeBackend, "uneven_graph_step", lambda *given: FromBuffers(*given))
    runner = graph_runner(tiny, max_num_seqs=70, graph_sizes=(1, 8, 70))
    assert sum(", or 64..70 (2) of uneven lengths, and of steps for" in message for message in caplog.messages) == 1
    counts = count_replays(runner)
    assert random_steps(runner, 3, 36, most=70) == random_steps(eager_runner(tiny, max_num_seqs=70), 3, 36, most=70)
    replayed = {kind: sum(count for (of, _), count in counts.items() if of == kind) for kind in ("decode", "uneven")}
    assert replayed["uneven"] == sum(seen) > 3
    assert replayed["decode"] == len(seen) - sum(seen) > 3
    assert counts["uneven", 64] > 0


def test_without_a_recorder_nothing_is_recorded(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is so on every CPU."""
    monkeypatch.setattr(device_model, "record_graphs", lambda *given: pytest.fail("recorded"))
    assert eager_runner(tiny)._executor._model.graphs is None


def test_what_is_recorded_is_told(tiny: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aengine")
    graph_runner(tiny)
    (message,) = [message for message in caplog.messages if "graphs" in message]
    assert message.startswith("recorded graphs of decode steps for 1..20 (5) sequences and of steps for 16..120 (5) tokens in ")


def test_largest_first_and_no_pieces_for_zero_tokens(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    record = Pieces.record

    def recorded(self: Pieces, work: Any) -> None:
        seen.append(len(seen))
        record(self, work)

    monkeypatch.setattr(Pieces, "record", recorded)
    runner = graph_runner(tiny)
    assert list(graphs_of(runner).decodes._graphs) == sorted(SIZES, reverse=True)
    assert list(graphs_of(runner).pieces._pieces) == [120, 96, 64, 32, 16]
    assert len(seen) == 10
    config = EngineConfig(
        model=str(tiny), device="cpu", attention_backend="torch_native", kv_cache_memory=64 << 20, max_num_seqs=4, graph_tokens=0
    )
    runner = ModelRunner(config, tiny, EagerCapture)
    assert list(graphs_of(runner).decodes._graphs) == [4, 2, 1]
    assert graphs_of(runner).pieces is None
    assert random_steps(runner, 3, 20, most=4)


def test_memory_of_all_graphs_is_foreseen_from_two_of_each_kind(tiny: pathlib.Path) -> None:
    runner = graph_runner(tiny, graph_sizes=None)
    sizes = GraphSizes.of(None, 120, 24, 512)
    with torch.inference_mode():
        recording = runner._executor._recording
        taken = recording.record(sizes, runner.max_model_len)
        foreseen = recording.foresee(runner.max_model_len)
    assert taken is not None
    assert (len(taken.rows), len(taken.tokens)) == (len(sizes.rows), len(sizes.tokens))
    assert taken.total() <= foreseen <= 2 * taken.total()
    assert runner._executor._model.graphs is None, "what was measured is dropped"


class FailingCapture(EagerCapture):
    """The `fail_at`-th recording cannot begin."""

    fail_at = 0
    begun = 0

    def begin(self) -> None:
        FailingCapture.begun += 1
        if FailingCapture.begun == FailingCapture.fail_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        super().begin()


@pytest.mark.parametrize(("fail_at", "which"), [(1, "20 sequences"), (2, "8 sequences")], ids=str)
def test_without_graphs_where_one_cannot_be_recorded(
    tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fail_at: int, which: str
) -> None:
    """In one line that says which, and the tokens are those of steps without graphs."""
    monkeypatch.setattr(FailingCapture, "begun", 0)
    monkeypatch.setattr(FailingCapture, "fail_at", fail_at)
    runner = graph_runner(tiny, FailingCapture)
    assert runner._executor._model.graphs is None
    (record,) = [record for record in caplog.records if "graph" in record.message]
    expected = (
        f"no graphs, so that steps take longer: recording a graph for {which} failed: operation not permitted when stream is capturing"
    )
    assert (record.levelname, record.message) == ("WARNING", expected)
    assert random_steps(runner, 2, 20) == random_steps(eager_runner(tiny), 2, 20)
    assert runner._executor._recording.foresee(runner.max_model_len) == 0, "tried once"
    assert len(caplog.records) == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("fail_at", "which"), [(6, "120 tokens"), (8, "120 tokens"), (12, "96 tokens")], ids=str)
def test_without_pieces_where_one_cannot_be_recorded(
    tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fail_at: int, which: str
) -> None:
    """Those of decodes stay, and what could not be recorded is gone, without the garbage collector, and not tried again."""
    monkeypatch.setattr(FailingCapture, "begun", 0)
    monkeypatch.setattr(FailingCapture, "fail_at", fail_at)
    every: list[weakref.ref[Pieces]] = []
    make = Pieces.__init__
    monkeypatch.setattr(Pieces, "__init__", lambda self, capture: (every.append(weakref.ref(self)), make(self, capture))[1])
    gc.disable()
    try:
        runner = graph_runner(tiny, FailingCapture)
        assert sum(pieces() is not None for pieces in every) == len(SIZES)
    finally:
        gc.enable()
    assert graphs_of(runner).pieces is None
    assert len(graphs_of(runner).decodes._graphs) == len(SIZES)
    (record,) = [record for record in caplog.records if "graph" in record.message]
    expected = f"recording a graph for {which} failed: operation not permitted when stream is capturing"
    assert (record.levelname, record.message) == ("WARNING", f"no graphs for tokens, so that such steps take longer: {expected}")
    assert random_steps(runner, 2, 20) == random_steps(eager_runner(tiny), 2, 20)
    with torch.inference_mode():
        assert runner._executor._recording.foresee(runner.max_model_len) > 0
    assert len(caplog.records) == 1


class NothingRecorded(EagerCapture):
    """Keeps no results of operations, as a graph does not."""

    def begin(self) -> None:
        pass

    def end_capture(self) -> Replay:
        return lambda: None


def test_graphs_that_are_dropped_are_gone(tiny: pathlib.Path) -> None:
    """Without the garbage collector: their memory is needed at once, and other ranks wait until they are gone."""
    runner = graph_runner(tiny)
    graphs = graphs_of(runner)
    every = [weakref.ref(each) for each in (graphs.decodes, graphs.pieces, *graphs.pieces._pieces.values())]
    del graphs
    gc.collect()
    gc.disable()
    try:
        runner._executor._recording.drop()
        assert all(each() is None for each in every)
    finally:
        gc.enable()


class TestPieces:
    def test_parts_and_interruptions_in_order(self) -> None:
        a, b = torch.zeros(1), torch.zeros(1)
        limit = [10.0]
        pieces = Pieces(EagerCapture(CPU))

        def work() -> None:
            a.add_(1.0)
            pieces.interrupt(lambda: b.copy_(a * limit[0]))
            b.add_(limit[0])  # a number of Python's: recorded as it is

        pieces.record(work)
        a.zero_()
        limit[0] = 100.0
        pieces.replay()
        assert (a.item(), b.item()) == (1.0, 110.0)
        pieces.replay()
        assert (a.item(), b.item()) == (2.0, 210.0)

    def test_intermediate_results_stay_where_they_are(self) -> None:
        x, out = torch.ones(3), torch.zeros(3)
        seen = []
        pieces = Pieces(EagerCapture(CPU))

        def work() -> None:
            first, second = (x * 2.0).chunk(2)  # views of what each replay computes anew
            pieces.interrupt(lambda made: seen.append(made.clone()), first)
            out[:2].copy_(first)
            out[2:].copy_(second)

        pieces.record(work)
        x.copy_(torch.tensor([1.0, 2.0, 3.0]))
        pieces.replay()
        assert seen[-1].tolist() == [2.0, 4.0]
        assert out.tolist() == [2.0, 4.0, 6.0]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_memory_that_the_work_gives_up_is_not_kept(self, dtype: torch.dtype) -> None:
        made: list[StorageWeakRef] = []
        seen = []
        pieces = Pieces(NothingRecorded(CPU))

        def work() -> None:
            whole = torch.arange(24, dtype=dtype).view(4, 6)
            made.append(StorageWeakRef(whole.untyped_storage()))
            part = whole[1:, 2:].t()
            pieces.interrupt(lambda *given: seen.append([(*map(describe, given),), given[0].tolist()]), part, whole)
            seen.append((describe(part), describe(whole)))
            assert not made[-1].expired()

        def describe(tensor: torch.Tensor) -> tuple[object, ...]:
            return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

        pieces.record(work)
        assert all(each.expired() for each in made)
        assert [given for given, _ in seen[::2]] == seen[1::2]
        assert all(values == torch.arange(24, dtype=dtype).view(4, 6)[1:, 2:].t().tolist() for _, values in seen[::2])
        pieces.replay()
        assert seen[-1][0] == seen[-2], "where it was, whoever has the memory now"

    @pytest.mark.parametrize("within", ["piece", "interruption"])
    def test_an_error_ends_the_recording(self, within: str) -> None:
        capture = EagerCapture(CPU)
        pieces = Pieces(capture)
        calls = []

        def fail() -> None:
            raise ValueError("on purpose")

        def work() -> None:
            calls.append(1)
            if len(calls) == 2:
                fail() if within == "piece" else pieces.interrupt(fail)

        with pytest.raises(ValueError, match="on purpose"):
            pieces.record(work)
        assert capture._tape is None
        assert (torch.ones(1) + 1).item() == 2.0
        assert capture.memory() == 0, "nothing was recorded"


def test_slots_of_uploads_grow() -> None:
    slot = StagingBuffer(CPU)
    out = torch.zeros(100, dtype=torch.int32)
    for length in (5, 40, 7):
        array = slot.prepare(length)
        assert len(array) >= length
        array[:length] = np.arange(length)
        slot.send(0, out[:length])
        slot.mark_read()
        assert out[:length].tolist() == list(range(length))


def test_slots_of_uploads_take_turns(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = graph_runner(tiny)
    sequence = Driver(runner)
    used: list[StagingBuffer] = []
    prepare = StagingBuffer.prepare
    monkeypatch.setattr(StagingBuffer, "prepare", lambda self, length: (used.append(self), prepare(self, length))[1])
    sequence.generate([[1, 2, 3]], 7)
    assert len(used) == 6
    assert used[:3] == used[3:]
    assert len(set(used)) == 3
