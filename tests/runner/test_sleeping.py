"""Runners that sleep and wake between steps compute the same tokens, and give their memory back."""

from __future__ import annotations

import gc
import json
import pathlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, Sequence_, sampled
from reference import save_tiny
from replays import count_replays, graphs_of
from slow_cases import slow_but
from test_graphs import graph_runner
from test_greedy import make_runner

from aengine.api.errors import InsufficientMemoryError
from aengine.runner.contract import NewWeights
from aengine.runner.memory import resident_memory
from aengine.runner.runner import ModelRunner
from aengine.runner.torch.asleep import Offloaded
from aengine.scheduler.plan import StepResult

PROMPTS = [[3 + i] * (1 + 7 * i) for i in range(8)]
PARAMS = [sampled(i, (0.0, 0.9)[i % 2], top_p=0.9 if i % 2 else 1.0) for i in range(8)]


class Sleeper(Driver):
    """Has the runner sleep every few steps."""

    def __init__(self, runner: ModelRunner, levels: Sequence[int], **options: Any) -> None:
        super().__init__(runner, **options)
        self.levels = levels

    def run_step(self, sequences: Sequence[Sequence_]) -> StepResult:
        assert isinstance(self.runner, ModelRunner)
        if self.step % 8 == 4:
            pages = sorted({page for s in sequences for column in s.pages for page in column} - {0})
            for level in self.levels:
                self.runner.sleep(level, np.array(pages, np.int32))
            self.runner.wake(self.runner.prepare(NewWeights(None)) if self.levels[-1] == 2 else None)
        return super().run_step(sequences)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny("qwen3", path)
    return path


KERNELS, TORCH = {"attention_backend": "cpu"}, {"attention_backend": "torch_native"}
INT8 = {"quantization": "int8", "kv_cache_dtype": "int8", "dtype": "bfloat16"}
DRAFT = {"speculative": "draft", "speculative_model": "demo"}
CASES = [(options, levels) for options in (KERNELS, TORCH, {**KERNELS, **INT8}) for levels in ([1], [2], [1, 2])]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("options", "levels"), slow_but([(KERNELS, [1, 2]), (TORCH, [1]), (TORCH, [2])], CASES))
def test_tokens_are_the_same(options: dict[str, Any], levels: list[int], tiny: pathlib.Path) -> None:
    runner = make_runner(tiny, **options)
    expected = Driver(runner, chunk=16).generate(PROMPTS, 20, PARAMS)
    runner.close()
    runner = make_runner(tiny, **options)
    assert Sleeper(runner, levels, chunk=16).generate(PROMPTS, 20, PARAMS) == expected
    runner.sleep(levels[-1], np.zeros(0, np.int32))
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("level", slow_but([1], [1, 2]))
def test_graphs_are_recorded_again(level: int, tiny: pathlib.Path) -> None:
    expected = Driver(make_runner(tiny, **TORCH)).generate(PROMPTS, 20, PARAMS)
    runner = graph_runner(tiny)
    before = graphs_of(runner)
    assert Sleeper(runner, [level]).generate(PROMPTS, 20, PARAMS) == expected
    assert graphs_of(runner) is not before
    replays = count_replays(runner)
    assert Driver(runner).generate(PROMPTS, 20, PARAMS) == expected
    assert sum(replays.values()) > 10
    runner.close()


@pytest.mark.parametrize("ends", [lambda runner: runner.sleep(1, np.zeros(0, np.int32)), ModelRunner.close], ids=["sleep", "close"])
def test_graphs_go_though_nothing_is_collected(ends: Callable[[ModelRunner], None], tiny: pathlib.Path) -> None:
    """A server freezes all objects when it serves, so that the collector never looks at them again. If graphs with operations of NCCL
    stayed, the end of its communicator would wait for them for ever."""
    runner = graph_runner(tiny)
    Driver(runner, chunk=16).generate(PROMPTS, 4, PARAMS)
    graphs = graphs_of(runner)
    assert graphs.pieces is not None
    every = [graphs.decodes, graphs.pieces, *graphs.pieces._pieces.values(), *(graph.pieces for graph in graphs.decodes._graphs.values())]
    alive = [weakref.ref(one) for one in every]
    assert len(alive) > 6
    del graphs, every
    gc.freeze()
    try:
        ends(runner)
        assert [type(one()).__name__ for one in alive if one() is not None] == []
    finally:
        gc.unfreeze()


def filled(runner: ModelRunner, num_tokens: int) -> None:
    """Computes prompts in pages that no sequence holds afterwards."""
    driver = Driver(runner, chunk=256)
    driver.generate([[7] * num_tokens] * runner.max_num_seqs, 1)


LARGE = {
    "architectures": ["Qwen3ForCausalLM"],
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 128},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 4096},
}


@pytest.mark.parametrize("backend", slow_but(["cpu"], ["cpu", "torch_native"]))
def test_memory_is_really_given_back(backend: str, tmp_path: pathlib.Path) -> None:
    """Of the pages that were written all but those that are kept."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    options = {"load_format": "dummy", "max_num_seqs": 2, "kv_cache_memory": 300 << 20, "max_num_batched_tokens": 512}
    runner = make_runner(tmp_path, attention_backend=backend, **options)
    before = resident_memory()
    filled(runner, 900)
    touched = 2 * 900 * runner.kv_bytes_per_token
    full = resident_memory()
    assert full - before > 0.5 * touched  # what other tests left may have gone meanwhile
    kept = np.arange(5, 15, dtype=np.int32)
    for _ in range(2):
        runner.sleep(1, kept)
        assert full - resident_memory() > 0.9 * touched
        runner.wake(None)
    runner.close()


@pytest.mark.parametrize("backend", slow_but(["cpu"], ["cpu", "torch_native"]))
def test_weights_are_really_given_back(backend: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LARGE, "intermediate_size": 65536, "num_hidden_layers": 2}))
    runner = make_runner(tmp_path, attention_backend=backend, load_format="dummy", max_num_seqs=1, kv_cache_memory=32 << 20)
    expected = Driver(runner).generate([[1, 2, 3]], 5)
    weights = 3 * 2 * 65536 * 64 * 4
    before = resident_memory()
    runner.sleep(2, np.zeros(0, np.int32))
    assert before - resident_memory() > 0.9 * weights
    runner.wake(runner.prepare(NewWeights(None)))
    driver = Driver(runner)
    driver.step = 5
    assert driver.generate([[1, 2, 3]], 5) == expected
    runner.close()


def test_tensors_that_leave_their_device() -> None:
    """Views stay what they are; what is not copied is zeros, and what is of a mapped file stays where it is."""
    whole = torch.arange(100.0).view(10, 10)
    half, other = whole[:5].t(), torch.ones(1000)
    offloaded = Offloaded([whole, half, whole[2]])
    expected = whole.clone()
    for _ in range(2):
        offloaded.free()
        assert whole.untyped_storage().nbytes() == 0
        offloaded.restore()
        offloaded.restore()
        assert torch.equal(whole, expected)
        assert torch.equal(half, expected[:5].t())
    mapped = torch.from_numpy(np.ones(9, np.float32))
    uncopied = Offloaded([other, mapped, whole], copied=False, besides=[half])
    uncopied.free()
    assert (other.untyped_storage().nbytes(), mapped.sum(), whole[9, 9]) == (0, 9, 99)
    uncopied.restore()
    assert not other.any()
    assert len(other) == 1000


def test_too_little_memory_to_wake(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps on, and wakes when there is enough."""
    expected = Driver(make_runner(tiny, **TORCH)).generate(PROMPTS, 12, PARAMS)
    runner = make_runner(tiny, **TORCH)
    driver = Driver(runner)
    sequences = [driver.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for _ in range(6):
        driver.run_step(sequences)
    pages = np.array(sorted({page for s in sequences for column in s.pages for page in column} - {0}), np.int32)
    allocate = type(runner._executor._model.backend).allocate

    def fail(backend: Any, num_pages: int) -> None:
        allocate(backend, num_pages)
        raise torch.OutOfMemoryError("out of memory")

    runner.sleep(1, pages)
    with monkeypatch.context() as patch:
        patch.setattr(type(runner._executor._model.backend), "allocate", fail)
        for _ in range(2):
            with pytest.raises(InsufficientMemoryError, match="to wake"):
                runner.wake(None)
    runner.wake(None)
    for _ in range(6):
        driver.run_step(sequences)
    assert [s.output for s in sequences] == expected
