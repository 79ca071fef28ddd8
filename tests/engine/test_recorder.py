"""Recorded steps give the same again, whatever was cached before; steps that failed, hung or were computed wrongly are found again."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import anyio
import anyio.lowlevel
import planted_faults
import pytest
import torch
import transformers
from every_draft import use_every_draft
from hybrid_cases import CASES
from oracle_engine import until
from planted_faults import TRIGGER, plant
from slow_cases import slow_but

from aengine import AsyncEngine, EngineDeadError, EngineStateError, Reasoning, SamplingParams, StructuredOutput
from aengine.engine import recorder
from aengine.engine.recorder import Called, Planned, RecordedScheduler, Recording
from aengine.engine.step_replay import ReplayedStep, StepReplay, decisions_of, load_recorded
from aengine.engine.tier_traffic import TierTraffic
from aengine.terminal.replay import main

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Nothing here depends on the loop."""
    return "asyncio"


FORMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"n": 3},
    {"min_tokens": 5, "allowed_token_ids": tuple(range(5, 300))},
    {"logit_bias": {11: -5.0, 17: 3.0}, "banned_token_ids": (12, 13)},
    {"prompt_logprobs": 1},
)
OF_TEXTS: tuple[dict[str, Any], ...] = (
    {"stop": (",",), "bad_words": ("the", "LORD")},
    {"structured_output": StructuredOutput(regex=r"[a-z]{30,60}( [a-z]{3,9}){5,12}")},
    {"structured_output": StructuredOutput(json_schema='{"type": "object"}'), "temperature": 1.2},
    {"reasoning": Reasoning(opening="<think>", closing="</think>", opened=True, max_tokens=9)},
)
DEMO: dict[str, Any] = {"kv_cache_memory": 900_000, "max_model_len": 256, "max_num_seqs": 12, "max_num_batched_tokens": 64}


async def crowd(engine: AsyncEngine, count: int, seed: int, *, forms: tuple[dict[str, Any], ...] = FORMS, most: int = 60) -> None:
    """Requests of all forms at once; some share beginnings, some are cancelled, and some are forks."""
    rng, limit = random.Random(seed), anyio.CapacityLimiter(24)
    beginnings = [[rng.randrange(5, 190) for _ in range(40)] for _ in range(3)]

    async def run(index: int, rng: random.Random) -> None:
        prompt = [*rng.choice([*beginnings, []]), *(rng.randrange(5, 190) for _ in range(rng.randrange(1, 30)))]
        params = SamplingParams(max_tokens=rng.randrange(5, most), seed=index, **forms[index % len(forms)])
        adapter = "lora" if engine.adapters and rng.random() < 0.3 else None
        async with limit, engine.stream(prompt, params, adapter=adapter, priority=rng.choice((0, 0, 1))) as stream:
            leaves = rng.randrange(1, 200)
            async for token in stream:
                leaves -= 1
                if not leaves:
                    return
                if params.n == 1 and rng.random() < 0.02 and token.finish_reason is None:
                    async for _ in stream.fork(params=SamplingParams(max_tokens=99, seed=1, clamp_max_tokens=True, ignore_eos=True)):
                        pass

    async with anyio.create_task_group() as group:
        for index in range(count):
            group.start_soon(run, index, random.Random(rng.random()))


def replayed(recording: Recording) -> list[ReplayedStep]:
    """All steps of a recording; its decisions are checked on the way."""
    loaded = load_recorded(recording)
    try:
        replay = StepReplay(recording, loaded)
        if replay.is_whole:
            assert [(number, field) for number, field in decisions_of(recording, loaded) if field] == []
        else:
            with pytest.raises(ValueError, match="the scheduler had a state that is not recorded"):
                next(decisions_of(recording, loaded))
        return list(replay.steps())
    finally:
        loaded.runner.close()


async def check(path: pathlib.Path, engine: AsyncEngine, count: int) -> Recording:
    """The steps of an engine are recorded, and give the same again."""
    steps = await engine.save_recording(str(path))
    recording = Recording.read_file(path)
    assert steps == len(list(recording.plans)) >= count
    found = await anyio.to_thread.run_sync(replayed, recording)
    assert [(one.number, one.difference, one.error) for one in found if one.difference or one.error] == []
    assert len(found) == steps
    return recording


@pytest.mark.parametrize(("recorded", "speculative"), slow_but([(60_000, "off"), (64, "ngram")], product([60_000, 64], ["off", "ngram"])))
async def test_steps_of_the_demo(recorded: int, speculative: str, tmp_path: pathlib.Path) -> None:
    options = {**DEMO, "recorded_steps": recorded, "speculative": speculative, "adapters": {"lora": "demo-lora"}}
    async with AsyncEngine("demo", **options) as engine:
        await crowd(engine, 40, 1, forms=FORMS + OF_TEXTS)
        assert engine.stats().preemptions > 0
        recording = await check(tmp_path / "a", engine, min(recorded, 100))
        assert recording.is_whole == (recorded > 64)
        async with anyio.create_task_group() as group:
            group.start_soon(crowd, engine, 10, 2)
            await anyio.lowlevel.checkpoint()
            await check(tmp_path / "b", engine, min(recorded, 100))
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a model by its name."""
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            torch.manual_seed(1)
            if name == "windows":
                sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
                limits = {"vocab_size": 400, "num_hidden_layers": 6, "sliding_window": 9, "max_position_embeddings": 512}
                model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma3TextConfig(**sizes, **limits)).float()
            else:
                model = next(case for case in CASES if case.name == name).make()
            made[name] = str(tmp_path_factory.mktemp(name))
            model.save_pretrained(made[name])
        return made[name]

    return make


MODELS: dict[str, dict[str, Any]] = {
    "windows": {"page_size": 4, "kv_cache_memory": 1 << 20},
    "qwen3.5": {"page_size": 4, "kv_cache_memory": 2 << 20, "dtype": "bfloat16"},
    "lfm2": {"page_size": 4, "kv_cache_memory": 1 << 20, "dtype": "bfloat16"},
    "gemma4": {"page_size": 4, "kv_cache_memory": 1 << 20, "dtype": "bfloat16"},
}


@pytest.mark.parametrize(("name", "recorded"), slow_but([("windows", 40), ("qwen3.5", 40)], product(MODELS, [60_000, 40])))
async def test_windows_and_states(name: str, recorded: int, models: Callable[[str], str], tmp_path: pathlib.Path) -> None:
    """Steps go on from KV behind which the windows have moved on, and from recurrent states."""
    options = {"max_model_len": 128, "max_num_seqs": 6, "recorded_steps": recorded, "speculative": "ngram"}
    async with AsyncEngine(models(name), **MODELS[name], **options) as engine:
        forms = tuple({**form, "ignore_eos": True} for form in FORMS if "allowed_token_ids" not in form)
        await crowd(engine, 24, 3, forms=forms, most=40)
        await check(tmp_path / "x", engine, 40)


@pytest.mark.slow
async def test_a_draft_model_is_not_needed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a later recording lacks of the draft model's KV changes nothing: its steps accept what was accepted."""
    use_every_draft(monkeypatch)
    options = {"speculative": "draft", "speculative_model": "demo", "max_drafts": 3, "kv_cache_memory": 4 << 20, "max_model_len": 256}
    for recorded in (60_000, 24):
        async with AsyncEngine("demo", **options, recorded_steps=recorded) as engine:
            await crowd(engine, 16, 4)
            assert engine.stats().accepted_draft_tokens > 0
            await check(tmp_path / "x", engine, 24)


@pytest.mark.slow
async def test_several_ranks(tmp_path: pathlib.Path) -> None:
    async with AsyncEngine("demo", **DEMO, recorded_steps=40, tensor_parallel_size=2) as engine:
        await crowd(engine, 10, 12)
        await check(tmp_path / "x", engine, 40)


async def test_tiers_and_new_weights(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came from tiers is computed in its place; steps of old weights are forgotten."""
    monkeypatch.setattr(TierTraffic, "_is_worth", lambda *given: True)
    async with AsyncEngine("demo", **DEMO, host_kv_memory=32 << 20) as engine:
        for _ in range(2):
            await crowd(engine, 20, 5)
        assert engine.stats().loaded_tokens > 0
        found = await anyio.to_thread.run_sync(replayed, Recording.read_file(await saved(engine, tmp_path)))
        assert [one.difference for one in found if one.difference or one.error] == []
        await engine.update_weights("demo")
        assert list(Recording.read_file(await saved(engine, tmp_path)).plans) == []
        await crowd(engine, 5, 6)
        assert not Recording.read_file(await saved(engine, tmp_path)).is_whole


async def saved(engine: AsyncEngine, folder: pathlib.Path) -> pathlib.Path:
    await engine.save_recording(str(folder / "x"))
    return folder / "x"


# ---- faults ----------------------------------------------------------------------------------------------------------------


async def until_it_dies(engine: AsyncEngine) -> None:
    """A crowd of random requests, one of which has the token that sets the fault off."""

    async def set_off() -> None:
        await until(lambda: engine.stats().steps >= 50)
        with pytest.raises(EngineDeadError):
            await engine.generate([7] * 70 + [TRIGGER], SamplingParams(max_tokens=5))

    async def run() -> None:
        with suppress(Exception):  # each of the requests raises
            await crowd(engine, 30, 7)

    async with anyio.create_task_group() as group:
        group.start_soon(set_off)
        group.start_soon(run)
    assert not engine.healthy


def in_program(fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `aengine-replay` says in a process that has the fault."""
    environ = {**os.environ, planted_faults.VARIABLE: fault}
    return subprocess.run([sys.executable, planted_faults.__file__, *arguments], env=environ, capture_output=True, text=True, check=False)


def recording_in(folder: pathlib.Path) -> tuple[str, int]:
    """Of the engine that died: the file that it has written, and the number of its last step."""
    for thread in threading.enumerate():
        if thread.name == "aengine-recording":
            thread.join()
    (path,) = folder.iterdir()
    recording = Recording.read_file(path)
    last = [event.plan.step for event in recording.events if isinstance(event, Planned) and event.plan is not None][-1]
    return str(path), last


async def test_a_step_that_raised_raises_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant("raise", monkeypatch.setattr)
    engine = AsyncEngine("demo", **DEMO, recorded_steps=30, recording_dir=str(tmp_path / "made"))
    await engine.start()
    await until_it_dies(engine)
    path, last = recording_in(tmp_path / "made")
    assert await engine.save_recording(str(tmp_path / "again")) == 30
    with suppress(EngineDeadError):
        await engine.aclose()
    assert Recording.read_file(path).failure == "RuntimeError: a planted fault"
    for name in (path, str(tmp_path / "again")):
        assert await anyio.to_thread.run_sync(main, [name]) == 1
        out, err = capsys.readouterr()
        assert out == f"step {last} fails again: RuntimeError: a planted fault\n"
        assert f"30 steps, {last - 29} to {last}; then it failed: RuntimeError: a planted fault" in err
    monkeypatch.undo()
    assert await anyio.to_thread.run_sync(main, [path]) == 0
    assert "30 steps give the same" in capsys.readouterr().err


async def test_a_step_that_hung_hangs_again(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    plant("hang", monkeypatch.setattr)
    engine = AsyncEngine("demo", **DEMO, recorded_steps=30, recording_dir=str(tmp_path), step_timeout=2.0)
    await engine.start()
    await until_it_dies(engine)
    path, last = recording_in(tmp_path)
    with suppress(EngineDeadError):
        await engine.aclose()
    assert Recording.read_file(path).failure.startswith("StepHangError: a step hangs for 2.")
    planted_faults.released.set()
    await anyio.to_thread.run_sync(engine._core.steps._thread.join)  # type: ignore[union-attr]
    found = await anyio.to_thread.run_sync(in_program, "hang", path, "--hang-seconds", "2")
    assert (found.returncode, found.stdout) == (1, f"step {last} hangs: it takes more than 2 s\n")


async def test_a_step_that_is_computed_otherwise_is_found(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though no token of it is another one: the KV is."""
    async with AsyncEngine("demo", **DEMO, recorded_steps=5000) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(crowd, engine, 20, 8)
            await engine.generate([*range(30, 60), TRIGGER, *range(60, 90)], SamplingParams(max_tokens=5))
        await engine.save_recording(str(tmp_path / "x"))
    recording = Recording.read_file(tmp_path / "x")
    (first,) = [plan.step for plan, *_ in recording.plans if TRIGGER in plan.token_ids]
    other = tmp_path / "python"
    script = f'#!/bin/sh\nshift 2\n{planted_faults.VARIABLE}=wrong exec {sys.executable} {planted_faults.__file__} "$@"\n'
    other.write_text(script)
    other.chmod(0o755)
    assert await anyio.to_thread.run_sync(main, [str(tmp_path / "x"), "--bisect", str(other)]) == 1
    assert capsys.readouterr().out.startswith(f"step {first} is the first that differs: {first} ")


async def test_a_receipt_that_differs_leaves_a_recording(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncEngine("demo", **DEMO) as engine:
        receipt = (await engine.generate([5, 6, TRIGGER, 8], SamplingParams(max_tokens=20, seed=2, logprobs=0), receipt=True)).receipt
    assert receipt is not None
    (tmp_path / "r").write_text(receipt.to_json())
    found = await anyio.to_thread.run_sync(in_program, "wrong", str(tmp_path / "r"), "--save", str(tmp_path / "x"))
    assert found.returncode == 1
    assert "differs: output 0, token " in found.stdout
    assert f"steps are in {tmp_path / 'x'}" in found.stderr
    assert any(TRIGGER in plan.token_ids for plan, *_ in Recording.read_file(tmp_path / "x").plans)


# ---- the ring and its file ---------------------------------------------------------------------------------------------------


async def test_the_ring_is_bounded() -> None:
    async with AsyncEngine("demo", **DEMO, recorded_steps=16) as engine:
        await crowd(engine, 60, 9)
        driver = engine._core.steps._record.__self__  # type: ignore[union-attr, attr-defined]
        scheduler = driver._scheduler
        assert isinstance(scheduler, RecordedScheduler)
        assert sum(len(event) == 3 and event[0] is not None for event in scheduler._events) == 16
        assert len(scheduler._events) < 16 * 20
        assert len(scheduler._ended) <= 16 * DEMO["max_num_seqs"]


@pytest.mark.slow
async def test_floods_and_long_requests_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(recorder, "MOST_TOKENS", 600)
    for recorded in (1, 16):
        async with AsyncEngine("demo", **DEMO, recorded_steps=recorded) as engine:
            scheduler = engine._core.steps._record.__self__._scheduler  # type: ignore[union-attr, attr-defined]
            await engine.generate([5, 6], SamplingParams(max_tokens=9))
            await engine.pause()
            for _ in range(600):
                engine.stream([1, 2, 3]).cancel()
            await engine.unpause()
            assert len(scheduler._events) <= 64 * (recorded + 1)
            await crowd(engine, 30, 11)
            assert 0 < scheduler._num_tokens == sum(len(ended.tokens) for ended in scheduler._ended.values()) <= 600 + 256
            await check(tmp_path / "x", engine, 1)


def turn_round(logits: torch.Tensor, token_ids: list[int]) -> None:
    logits.mul_(-1.0)


async def test_what_cannot_be_recorded(tmp_path: pathlib.Path) -> None:
    engine = AsyncEngine("demo", **DEMO, recorded_steps=0)
    with pytest.raises(EngineStateError, match="not started"):
        await engine.save_recording("x")
    async with engine:
        with pytest.raises(EngineStateError, match="no steps are recorded: recorded_steps is 0"):
            await engine.save_recording("x")
    async with AsyncEngine("demo", **DEMO) as engine:
        with pytest.raises(OSError, match="No such file"):
            await engine.save_recording(str(tmp_path / "none" / "x"))
        # Custom code of the program is in no file; what it makes of tokens is not compared.
        await engine.generate([5, 6], SamplingParams(max_tokens=5, logits_processors=(turn_round,)))
        await engine.generate([5, 6], SamplingParams(max_tokens=5, temperature=0.0))
        await check(tmp_path / "x", engine, 10)


def test_what_is_no_recording(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    line = json.dumps({"aengine_recording": 2}).encode()
    for content in (b"\x1f\x8bx", gzip.compress(b"x"), gzip.compress(line), gzip.compress(b'{"$":"os.system"}'), gzip.compress(line)[:20]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is no recording"):
            Recording.read_file(path)
        assert main([str(path)]) == 1
        assert f"input: {path} is no recording" in capsys.readouterr().err


def test_only_known_types_are_read(tmp_path: pathlib.Path) -> None:
    """Whatever a file says, reading it makes plain data alone."""
    names = ("config", "parts", "scheduler", "failure", "is_whole", "kv_bytes", "row_keys", "page_table", "state_pages")
    head = {"aengine_recording": 1, "adapters": {}, **dict.fromkeys(names)}
    called = {"$": "Called", "method": "submit", "arguments": [{"$a": ["<i4", [1], "AQAAAA=="]}]}
    with gzip.open(tmp_path / "x", "wt") as file:
        file.write(f"{json.dumps(head)}\n{json.dumps(called)}\n")
    (event,) = Recording.read_file(tmp_path / "x").events
    assert isinstance(event, Called)
    with gzip.open(tmp_path / "x", "at") as file:
        file.write(json.dumps({"$a": ["O", [1], "AQAAAAAAAAA="]}) + "\n")
    with pytest.raises(ValueError, match="is no recording"):
        Recording.read_file(tmp_path / "x")
