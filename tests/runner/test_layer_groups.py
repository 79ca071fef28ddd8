"""Models with sliding windows in some layers: how much memory their pages need, and that long requests do without most of it."""

from __future__ import annotations

import json
import pathlib
from collections import deque
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from driver import GREEDY
from slow_cases import slow_but

from aengine.api.config import EngineConfig
from aengine.api.errors import InsufficientMemoryError
from aengine.runner.runner import ModelRunner
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig

WINDOW, LENGTH = 1024, 32_768
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 6, "head_dim": 16},
    **{"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": LENGTH},
    **{"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
}
LAYER_PAGE = 2 * 16 * 16 * 4  # K and V, head_dim, page_size, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("windows")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def make_runner(path: pathlib.Path, **settings: object) -> ModelRunner:
    values = {"device": "cpu", "load_format": "dummy", "dtype": "float32", "max_num_batched_tokens": 512, "max_num_seqs": 1, **settings}
    return ModelRunner(EngineConfig(model=str(path), **values), path)  # type: ignore[arg-type]


def run(
    runner: ModelRunner, requests: list[Request], num_pages: int | None = None, **settings: object
) -> tuple[list[list[int]], Scheduler]:
    """The tokens of each request, submitted one step after another, one step ahead of the results; and the scheduler in the end."""
    limits = {name: getattr(runner, name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "page_size", "windows")}
    scheduler = Scheduler(SchedulerConfig(num_pages=num_pages or runner.num_pages, **limits, **settings))  # type: ignore[arg-type]
    tokens: dict[int, list[int]] = {request.key: [] for request in requests}
    waiting = deque(requests)
    while True:
        if waiting:
            scheduler.submit(waiting.popleft())
        plan = scheduler.schedule()
        if plan is None and not waiting:
            return [tokens[request.key] for request in requests], scheduler
        if plan is not None:
            scheduler.commit(plan, runner.launch(plan).result())
        updates = scheduler.take_updates()
        for key, token in zip(updates.keys, updates.token_ids, strict=True):
            tokens[key].append(token)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype"),
    slow_but([("auto", "auto"), ("auto", "int8"), ("torch_native", "auto")], product(("auto", "torch_native"), ("auto", "int8"))),
)
def test_prefixes_forks_and_preemptions_change_no_token(backend: str, kv_cache_dtype: str, tmp_path: pathlib.Path) -> None:
    """On a model that tells tokens of its windows apart: the same as each request alone, without a prefix cache."""
    config = {**CONFIG, "sliding_window": 21, "max_position_embeddings": 256, "initializer_range": 0.5, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 64, 120).astype(np.int32)
    requests = []
    for key, length in enumerate((120, 90, 40, 118)):
        params = replace(GREEDY, temperature=1.0, seed=key)
        requests.append(Request(key=key, prompt=np.append(shared[:length], np.int32(key)), params=params, max_tokens=40))
    forked = replace(requests[3], num_forks=2)
    forks = [replace(forked, key=key, params=replace(forked.params, seed=key), num_forks=0, fork_of=3) for key in (4, 5)]
    settings = {
        "attention_backend": backend,
        "kv_cache_dtype": kv_cache_dtype,
        "page_size": 4,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 6,
    }
    runner = make_runner(tmp_path, **settings)
    assert len(runner.windows) == 6
    alone = [
        run(make_runner(tmp_path, **settings), [replace(one, num_forks=0, fork_of=None)], enable_prefix_cache=False)[0][0]
        for one in [*requests, *forks]
    ]
    assert len({tuple(tokens) for tokens in alone}) == 6
    together, scheduler = run(runner, [*requests[:3], forked, *forks])
    assert together == alone
    assert scheduler.stats().cached_prompt_tokens > 100
    again, scheduler = run(make_runner(tmp_path, **settings), [*requests[:3], forked, *forks], num_pages=runner.num_pages // 4)
    assert again == alone
    assert scheduler.stats().preemptions > 0


@pytest.mark.slow
def test_a_long_request_holds_a_quarter_of_its_pages(model: pathlib.Path) -> None:
    """Through scheduler and model: 32k tokens, five of six layers with a window of 1k."""
    runner = make_runner(model)
    limits = {name: getattr(runner, name) for name in ("max_num_batched_tokens", "max_model_len", "num_pages", "page_size", "windows")}
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1, **limits))
    prompt = np.arange(LENGTH - 8, dtype=np.int32) % 64
    scheduler.submit(Request(key=0, prompt=prompt, params=GREEDY, max_tokens=8))
    most, tokens = 0, 0
    while (plan := scheduler.schedule()) is not None:
        most = max(most, scheduler.stats().pages_used)
        scheduler.commit(plan, runner.launch(plan).result())
        tokens += len(scheduler.take_updates().token_ids)
    assert tokens == 8
    assert most <= 6 * (LENGTH // 16) / 4
    assert scheduler.stats().pages_used == 0
    runner.close()


def test_sizes(model: pathlib.Path) -> None:
    """A page holds one layer. One sequence needs all pages of one layer, and those of two steps and a window of five."""
    runner = make_runner(model)
    windowed = (WINDOW + 2 * 512 - 2) // 16 + 2
    assert runner.windows == (None, *[WINDOW] * 5)
    assert runner.num_pages == 1 + LENGTH // 16 + 5 * windowed
    assert runner.kv_bytes_per_token == 6 * LAYER_PAGE // 16
    assert make_runner(model, max_num_seqs=3).num_pages == 1 + 3 * (LENGTH // 16 + 5 * windowed)


def test_a_context_within_the_windows_has_one_group(model: pathlib.Path) -> None:
    runner = make_runner(model, max_model_len=WINDOW)
    assert (runner.windows, runner.num_pages) == ((None,), 1 + WINDOW // 16)
    assert runner.kv_bytes_per_token == 6 * LAYER_PAGE // 16


def test_what_never_fits(model: pathlib.Path) -> None:
    windowed = (WINDOW + 2 * 512 - 2) // 16 + 2
    runner = make_runner(model, kv_cache_memory=(1 + 500 + 5 * windowed) * LAYER_PAGE)
    assert runner.max_model_len == 500 * 16
    needed = 1 + 501 + 5 * windowed
    with pytest.raises(InsufficientMemoryError, match=rf"one sequence of 8001 tokens needs .* \({needed - 1} \+ 1 pages"):
        make_runner(model, kv_cache_memory=(needed - 1) * LAYER_PAGE, max_model_len=500 * 16 + 1)
