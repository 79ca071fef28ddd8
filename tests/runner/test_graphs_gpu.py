"""CUDA graphs against steps run as usual, one step ahead against none, and no hidden wait in a step."""

from __future__ import annotations

import functools
import json
import logging
import pathlib
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from attention_backends import backend_param
from driver import GREEDY, Driver, sampled
from every_draft import use_every_draft
from replays import count_replays, graphs_of
from test_drafts import Drafts, OfAModel, random_requests, run
from workloads import compare_with_eager, random_steps

from aengine.api.config import EngineConfig
from aengine.runner.contract import InFlightStep
from aengine.runner.runner import ModelRunner
from aengine.runner.torch.buckets import GraphBytes
from aengine.runner.torch.executor import GraphRecording, TorchExecutor
from aengine.runner.torch.graphs import DecodeGraphs
from aengine.scheduler.drafters import ModelDrafter
from aengine.scheduler.plan import RowParams, StepPlan
from aengine.scheduler.sequence import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BACKENDS = [backend_param("flashinfer"), backend_param("triton")]
SIZES = (1, 2, 5, 8, 20)
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 199,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("dummy")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


@contextmanager
def cuda_runner(model_dir: pathlib.Path, backend: str, **options: Any) -> Iterator[ModelRunner]:
    settings = {"max_num_seqs": 24, "kv_cache_memory": 64 << 20, "graph_sizes": SIZES, "graph_tokens": 120, "max_num_batched_tokens": 512}
    settings |= options
    config = EngineConfig(model=str(model_dir), device="cuda", dtype="bfloat16", load_format="dummy", attention_backend=backend, **settings)
    runner = ModelRunner(config, model_dir)
    try:
        yield runner
    finally:
        runner.close()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_replays_against_plain_steps(model_dir: pathlib.Path, backend: str, page_size: int) -> None:
    """Lengths change from step to step and rows are padded; within what the products of other shapes round otherwise in bfloat16."""
    with cuda_runner(model_dir, backend, page_size=page_size) as runner:
        compared = compare_with_eager(runner)
        for seed in range(4):
            random_steps(runner, seed, params=(GREEDY, sampled(1), sampled(2, 0.8, top_p=0.9)))
        assert compared.by_graph > 50
        assert compared.in_pieces > 20
        assert compared.worst < 0.2


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_replays_follow_the_step_alone(model_dir: pathlib.Path, backend: str) -> None:
    """The same steps give the same tokens again, in buffers that others have used in between."""
    with cuda_runner(model_dir, backend) as runner:
        first = random_steps(runner, 1, params=(GREEDY, sampled(1)))
        random_steps(runner, 2)
        assert random_steps(runner, 1, params=(GREEDY, sampled(1))) == first


def generate_ahead(runner: ModelRunner, depth: int, params: RowParams, count: int = 60) -> list[list[int]]:
    """Tokens of 20 sequences, with `depth` steps launched before the result of one is read."""
    driver = Driver(runner)
    sequences = [driver.add([(at * 7 + i) % 199 for i in range(1 + 5 * at)], params) for at in range(20)]
    driver.run_step(sequences)
    flights: deque[InFlightStep] = deque()
    columns = []
    for _ in range(count):
        flights.append(runner.launch(driver._plan([(s, 1) for s in sequences], len(sequences))))
        for s in sequences:
            s.computed += 1
        if len(flights) > depth:
            columns.append(flights.popleft().result().tokens)
    columns += [flight.result().tokens for flight in flights]
    return np.stack(columns).T.tolist()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_ahead_gives_the_tokens_of_none(model_dir: pathlib.Path, backend: str, eager: bool) -> None:
    with cuda_runner(model_dir, backend, eager=eager) as runner:
        for params in (GREEDY, sampled(3, 0.9, top_p=0.9)):
            expected = generate_ahead(runner, 0, params)
            assert len({token for tokens in expected for token in tokens}) > 20, "the tokens are degenerate"
            for _ in range(5):  # races move
                assert generate_ahead(runner, 1, params) == expected
            assert generate_ahead(runner, 4, params) == expected


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("params", [GREEDY, sampled(1, 0.8, top_p=0.9), sampled(1, 0.8, top_k=20)], ids=["greedy", "top_p", "top_k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decode_step_waits_for_nothing(model_dir: pathlib.Path, backend: str, params: RowParams, eager: bool) -> None:
    with cuda_runner(model_dir, backend, eager=eager) as runner:
        driver = Driver(runner)
        sequences = [driver.add(list(range(1 + 9 * at)), params) for at in range(6)]
        for _ in range(4):
            driver.run_step(sequences)
        plans = []
        for _ in range(3):
            plans.append(driver._plan([(s, 1) for s in sequences], len(sequences)))
            for s in sequences:
                s.computed += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            flights = [runner.launch(plan) for plan in plans]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(len(flight.result().tokens) == 6 for flight in flights)


def drafting_alone(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> OfAModel:
    """Nine requests, greedy ones and drawn ones, of a model that is its own draft model. Steps whose rows are known are launched under
    torch's check for waits."""
    use_every_draft(monkeypatch)
    launch = runner.launch

    def launch_without_waiting(plan: StepPlan) -> InFlightStep:
        torch.cuda.set_sync_debug_mode("default" if plan.new_rows else "error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.launch = launch_without_waiting
    params = [sampled(key, 0.8, top_p=0.9) if key % 2 else GREEDY for key in range(9)]
    requests = [Request(key, np.arange(1 + 9 * key, dtype=np.int32), params[key], 40, max_drafts=key) for key in range(9)]
    drafter = OfAModel()
    drafter.propose = functools.partial(ModelDrafter.propose, drafter)
    outputs, _ = run(runner, requests, 0, drafter, 200)
    assert {len(tokens) for tokens in outputs.values()} == {40}
    return drafter


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_are_made_and_accepted_without_waiting(
    model_dir: pathlib.Path, backend: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all are accepted: the model's steps round otherwise in bfloat16 than its own as a draft model."""
    options = {"speculative": "draft", "speculative_model": str(model_dir), "max_drafts": 8, "graph_sizes": None}
    with cuda_runner(model_dir, backend, eager=eager, **options) as runner:
        drafter = drafting_alone(runner, monkeypatch)
        assert drafter.num_accepted > 0.8 * drafter.num_proposed > 100, (drafter.num_accepted, drafter.num_proposed)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_of_a_head_are_made_without_waiting(
    tmp_path: pathlib.Path, backend: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True}
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **changes}))
    with cuda_runner(tmp_path, backend, eager=eager, speculative="mtp", max_drafts=8, graph_sizes=None) as runner:
        assert drafting_alone(runner, monkeypatch).num_proposed > 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_replays_that_verify_drafts(model_dir: pathlib.Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same steps without graphs, whose attention sees the drafts of a row as a chunk."""
    use_every_draft(monkeypatch)
    with cuda_runner(model_dir, backend, speculative="ngram", max_drafts=8, graph_sizes=None) as runner:
        requests = random_requests(random.Random(0), 199)
        expected, steps = run(runner, requests, 0, None, 400)
        compared = compare_with_eager(runner)
        run(runner, requests, steps, Drafts(expected, requests, random.Random(0)), 400)
        assert compared.by_graph > 10
        assert compared.worst < 0.2


@pytest.mark.parametrize("backend", BACKENDS)
def test_pieces_up_to_the_chunk_size(model_dir: pathlib.Path, backend: str) -> None:
    with cuda_runner(model_dir, backend, graph_tokens=2048, max_num_batched_tokens=2048, max_num_seqs=64, graph_sizes=(8, 64)) as runner:
        counts = count_replays(runner)
        compared = compare_with_eager(runner)
        for num_rows, chunk in ((60, 34), (40, 30), (19, 34), (30, 11)):
            driver = Driver(runner, chunk=chunk)
            sequences = [driver.add([(at * 7 + i) % 199 for i in range(34 + at % 7)]) for at in range(num_rows)]
            for _ in range(3):
                driver.run_step(sequences)
        replayed = {size for (kind, size), count in counts.items() if kind == "pieces" and count}
        assert replayed > {2048, 1280, 768, 384}, replayed
        assert compared.in_pieces > 6
        assert compared.worst < 0.2


@pytest.mark.parametrize("backend", [backend_param("flashinfer")])
def test_graphs_of_uneven_steps(model_dir: pathlib.Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All decodes by the other kernels, as if they were uneven, against the usual ones in steps without graphs."""
    with cuda_runner(model_dir, backend, max_num_seqs=70, graph_sizes=(8, 70)) as runner:
        model = runner._executor._model
        monkeypatch.setattr(type(model.backend), "is_uneven", lambda self, layout: model.graphs is not None)
        counts = count_replays(runner)
        compared = compare_with_eager(runner)
        for seed in range(3):
            random_steps(runner, seed, 36, most=70, params=(GREEDY, sampled(1)))
        replayed = {kind: sum(count for (of, _), count in counts.items() if of == kind) for kind in ("decode", "uneven")}
        assert (replayed["decode"], replayed["uneven"]) == (0, compared.by_graph)
        assert compared.by_graph > 30
        assert compared.worst < 0.2


@pytest.mark.whole_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_graphs_where_the_device_refuses_one(
    model_dir: pathlib.Path, backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a capture that torch's allocator knows of; the memory for KV is found out and served all the same."""
    options = {"kv_cache_memory": None, "gpu_memory_utilization": 0.3}
    forward = DecodeGraphs._forward

    def waiting(self: DecodeGraphs, *given: Any) -> None:
        forward(self, *given)
        self._tokens[0].item()  # not possible while a graph is captured

    with monkeypatch.context() as changed:
        changed.setattr(DecodeGraphs, "_forward", waiting)
        with cuda_runner(model_dir, backend, **options) as runner:
            assert runner._executor._model.graphs is None
            one = random_steps(runner, 3, 20)
    assert [message.partition(":")[0] for message in caplog.messages if "graphs" in message] == ["no graphs, so that steps take longer"]
    with cuda_runner(model_dir, backend, eager=True) as runner:
        assert random_steps(runner, 3, 20) == one
    with cuda_runner(model_dir, backend) as runner:  # what fails once does not spoil those of others
        assert graphs_of(runner).decodes._graphs.keys() == set(SIZES)


@pytest.mark.whole_device
@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_are_counted_before_the_pool_is_sized(
    model_dir: pathlib.Path, backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="aengine")
    foreseen: list[int] = []
    taken: list[GraphBytes] = []
    foresee, record = GraphRecording.foresee, GraphRecording.record

    def measured(self: GraphRecording, *given: Any) -> int:
        foreseen.append(foresee(self, *given))
        taken.clear()  # those of the trial
        return foreseen[-1]

    def recorded(self: GraphRecording, *given: Any) -> GraphBytes | None:
        taken.append(record(self, *given))
        return taken[-1]

    monkeypatch.setattr(GraphRecording, "foresee", measured)
    monkeypatch.setattr(GraphRecording, "record", recorded)
    options = {"kv_cache_memory": None, "gpu_memory_utilization": 0.3, "graph_sizes": None, "max_num_seqs": 64}
    with cuda_runner(model_dir, backend, **options) as runner:
        (one,), (actual,) = foreseen, taken
        slack = 64 << 20  # blocks of the allocator
        assert 0 < actual.total() <= one + slack, (actual, one)
        free, total = torch.cuda.mem_get_info(runner.device)
        assert total - free <= 0.3 * total + slack
        assert any(message.startswith("graphs are expected to take") for message in caplog.messages)
        assert any(message.startswith("recorded graphs of decode steps for 1..64 (11) sequences") for message in caplog.messages)
        assert len(Driver(runner).generate([[1, 2, 3]], 4)[0]) == 4


def test_eager_records_nothing(model_dir: pathlib.Path) -> None:
    with cuda_runner(model_dir, "triton", eager=True) as runner:
        assert isinstance(runner._executor, TorchExecutor)
        assert runner._executor._model.graphs is None


def test_torch_native_is_not_for_graphs(model_dir: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aengine")
    with cuda_runner(model_dir, "torch_native") as runner:
        assert "no graphs: the attention backend torch_native does not support them" in caplog.messages
        assert len(Driver(runner).generate([[1, 2, 3]], 4)[0]) == 4
