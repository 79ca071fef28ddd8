"""Adapters of the torch executor: in recorded steps, in fewer slots than there are adapters, and what they take."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import pytest
from driver import Driver
from eager_capture import EagerCapture
from reference import save_tiny
from replays import count_replays
from test_greedy import make_runner
from tiny_adapters import write_adapter
from workloads import random_steps

from aengine.api.config import EngineConfig
from aengine.api.errors import AdapterError, InsufficientMemoryError
from aengine.runner.contract import LoadAdapter, UnloadAdapter
from aengine.runner.runner import ModelRunner
from aengine.runner.torch import loading

PROMPTS = [[1, 2, 3], [50, 60, 70, 80]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("qwen3", path / "model")
    for key, rank in ((1, 16), (2, 3), (3, 8)):
        write_adapter(path / str(key), path / "model", rank=rank, seed=key, size=0.5, embedding=key == 2, head=key != 1)
    return path


def add_adapters(runner: ModelRunner, tiny: pathlib.Path, keys: Sequence[int]) -> ModelRunner:
    for key in keys:
        runner.apply(runner.prepare(LoadAdapter(key, str(key), str(tiny / str(key)))))
    return runner


def torch_runner(tiny: pathlib.Path, max_adapters: int | None, **options: object) -> ModelRunner:
    return make_runner(tiny / "model", attention_backend="torch_native", max_adapters=max_adapters, max_adapter_rank=16, **options)


@pytest.mark.slow
def test_recorded_steps(tiny: pathlib.Path) -> None:
    """Decodes and prompts of rows with different adapters and none."""
    keys = (1, 0, 2, 3)
    eager = add_adapters(torch_runner(tiny, 3), tiny, (1, 2, 3))
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 24, "kv_cache_memory": 64 << 20, "max_adapters": 3}
    config = EngineConfig(
        model=str(tiny), attention_backend="torch_native", graph_sizes=(2, 8, 20), graph_tokens=120, max_adapter_rank=16, **settings
    )
    recorded = add_adapters(ModelRunner(config, tiny / "model", EagerCapture), tiny, (1, 2, 3))
    counts = count_replays(recorded)
    expected = random_steps(eager, 3, adapters=keys)
    assert random_steps(recorded, 3, adapters=keys) == expected
    assert min(counts.values()) > 0, counts
    plain = random_steps(torch_runner(tiny, 0), 3)
    assert random_steps(recorded, 3) == plain, "rows without adapters, after steps with them"
    assert expected != plain


def test_fewer_slots_than_adapters(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter that was used longest ago makes room, unless the step needs it; that of one that is unloaded is free."""
    whole = add_adapters(torch_runner(tiny, 3), tiny, (1, 2, 3))
    expected = {key: Driver(whole).generate(PROMPTS, 6, adapters=[key, key]) for key in range(4)}
    assert len({str(output) for output in expected.values()}) == 4
    runner = add_adapters(torch_runner(tiny, 2), tiny, (1, 2, 3))
    adapters = runner._executor._adapters
    slots, put, copied = adapters._slots, adapters.table.put_adapter, list[int]()
    monkeypatch.setattr(adapters.table, "put_adapter", lambda slot, packed: (copied.append(slot), put(slot, packed)))
    for keys, left, num_copied in (
        ((1, 2), {1, 2}, 2),
        ((3, 1), {3, 1}, 1),
        ((2, 0), {3, 2}, 1),
        ((0, 0), {3, 2}, 0),
        ((3, 3), {3, 2}, 0),
        ((1, 2), {1, 2}, 1),
        ((2, 2), {1, 2}, 0),
        ((1, 1), {1, 2}, 0),
        ((3, 2), {2, 3}, 1),
        ((1, 3), {1, 3}, 1),
        ((3, 3), {1, 3}, 0),
        ((1, 1), {1, 3}, 0),
        ((2, 3), {2, 3}, 1),
    ):
        copied.clear()
        outputs = Driver(runner).generate(PROMPTS, 6, adapters=list(keys))
        assert outputs == [expected[key][at] for at, key in enumerate(keys)]
        assert (slots.keys(), len(copied)) == (left, num_copied), keys
    runner.apply(runner.prepare(UnloadAdapter(3)))
    assert slots.keys() == {2}
    assert Driver(runner).generate(PROMPTS, 6, adapters=[1, 2]) == [expected[1][0], expected[2][1]]
    assert slots.keys() == {1, 2}


def test_memory_is_counted_before_weights_are_read(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_host_memory", lambda: 60 << 20)
    torch_runner(tiny, 24)
    with pytest.raises(InsufficientMemoryError, match="of weights"):
        make_runner(tiny / "model", attention_backend="torch_native", max_adapters=24, max_adapter_rank=256)


def test_without_adapters_there_is_no_table(tiny: pathlib.Path) -> None:
    for max_adapters in (None, 0):
        runner = torch_runner(tiny, max_adapters)
        assert runner._executor._adapters is None
        with pytest.raises(AdapterError, match="max_adapters is 0"):
            add_adapters(runner, tiny, (1,))
    assert torch_runner(tiny, None, adapters={"one": str(tiny / "1")})._executor._adapters.table.num_slots == 1
