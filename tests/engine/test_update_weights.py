"""New weights while requests run: each token is of the weights that its version says, whatever becomes of what has begun."""

from __future__ import annotations

import pathlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import anyio
import pytest
import torch
import transformers
from hang_guard import HANG_SECONDS
from oracle_engine import Ahead, OracleEngine, StepGate, idle, until
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from speculating import also_with_drafts
from torch import Tensor

from aengine import AsyncEngine, EngineStateError, FinishReason, InvalidRequestError, ModelLoadError, SamplingParams, Token
from aengine.api.engine import EngineBase
from aengine.models.loading.hub import resolve_model
from aengine.runner.contract import Change

pytestmark = pytest.mark.anyio
OPTIONS = {"dtype": "float32", "device": "cpu", "max_num_seqs": 6, "kv_cache_memory": 24 << 20, "threads": 1}


class Models:
    """The demo model, and one with other weights, in turn: version v has those of `paths[v % 2]`."""

    def __init__(self, folder: pathlib.Path) -> None:
        demo = resolve_model("demo")
        self.paths = demo, folder
        for file in demo.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        torch.manual_seed(0)
        self.tensors = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in load_file(demo / "model.safetensors").items()}
        save_file(self.tensors, folder / "model.safetensors", {"format": "pt"})
        self._models = [transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in self.paths]

    @torch.no_grad()
    def likeliest(self, version: int, ids: list[int]) -> list[int]:
        """After each of the ids."""
        return self._models[version % 2](torch.tensor([ids])).logits[0].argmax(-1).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("other"))


@dataclass
class Output:
    prompt: list[int]
    tokens: list[Token]

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens if token.token_id >= 0]

    @property
    def versions(self) -> list[int]:
        return [token.weights_version for token in self.tokens if token.token_id >= 0]

    def check(self, models: Models, mode: str) -> None:
        versions = self.versions
        assert versions == sorted(versions)
        if mode in ("finish", "abort"):
            assert len(set(versions)) <= 1
        first = versions[0] if versions else 0
        if mode != "recompute":  # what follows a change that keeps KV is of both weights
            versions = [version for version in versions if version == first]
        ids = self.prompt + self.ids
        for version in set(versions):
            expected = models.likeliest(version, ids)
            for i, own in enumerate(versions):
                assert own != version or self.ids[i] == expected[len(self.prompt) + i - 1], (version, i)


async def generate(engine: EngineBase, rng: random.Random, outputs: list[Output], until: anyio.Event) -> None:
    prefix = [rng.randrange(500) for _ in range(40)]
    while not until.is_set():
        prompt = prefix[: rng.choice([20, 40])] + [rng.randrange(500) for _ in range(rng.randint(1, 30))]
        output = Output(prompt, [])
        outputs.append(output)
        params = SamplingParams(temperature=0.0, max_tokens=rng.choice([5, 20, 40]), ignore_eos=True)
        async for token in engine.stream(prompt, params):
            output.tokens.append(token)


MODES = ["keep", "recompute", "finish", "abort"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("anyio_backend", slow_but(["asyncio"], ["asyncio", "trio"]))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", slow_but([2], [2, 20]))
async def test_under_load(models: Models, mode: str, count: int) -> None:
    rng, outputs, done = random.Random(0), list[Output](), anyio.Event()
    async with AsyncEngine("demo", **OPTIONS) as engine, anyio.create_task_group() as tasks:
        for _ in range(8):  # more than there are rows
            tasks.start_soon(generate, engine, random.Random(rng.random()), outputs, done)
        number, mixes = 0, mode in ("keep", "recompute")
        while number < count or (mixes and not any(len(set(output.versions)) > 1 for output in outputs)):
            number += 1
            assert await engine.update_weights(models.paths[number % 2], mode) == number == engine.stats().weights_version
            began = len(outputs)
            await until(lambda began=began: len(outputs) > began + 2)  # type: ignore[misc]
        done.set()
    assert {version for output in outputs for version in output.versions} == set(range(number + 1))
    mixed = [output for output in outputs if len(set(output.versions)) > 1]
    assert bool(mixed) == mixes
    for output in rng.sample(mixed, min(len(mixed), 40)) + rng.sample(outputs, min(len(outputs), 40)):
        output.check(models, mode)
        reason = output.tokens[-1].finish_reason
        assert reason is FinishReason.MAX_TOKENS or (mode == "abort" and reason is FinishReason.CANCELLED)


@pytest.mark.quick_cases(1)
@also_with_drafts
@pytest.mark.parametrize("anyio_backend", slow_but(["asyncio"], ["asyncio", "trio"]))
@pytest.mark.parametrize("ahead", list(Ahead))
async def test_kv_is_of_the_right_weights(ahead: Ahead) -> None:
    """The oracle knows which weights computed each key and value. Several sequences of a request share some."""
    async with OracleEngine(ahead=ahead, num_pages=120, max_num_seqs=8) as engine:
        outputs: dict[int, tuple[int, ...]] = {}

        async def run(seed: int) -> None:
            prompt = [1, 2, 3, 4] * (seed % 5) + [seed % 40]
            completion = await engine.generate(prompt, SamplingParams(seed=seed, max_tokens=20 + seed, n=1 + seed % 3, ignore_eos=True))
            if completion.finish_reason is not FinishReason.CANCELLED:
                outputs[seed] = completion.token_ids

        async with anyio.create_task_group() as group:
            for seed in range(1, 25):
                group.start_soon(run, seed)
            for number, mode in enumerate(["keep", "recompute", "keep", "finish", "abort", "keep"], 1):
                steps = engine.stats().steps + 3
                await until(lambda steps=steps: engine.stats().steps > steps or not engine.stats().running)  # type: ignore[misc]
                if mode == "abort":
                    cancelled = engine.stream([1], SamplingParams(seed=99, max_tokens=300, ignore_eos=True))
                    await anext(cancelled)
                assert await engine.update_weights("new", mode) == number
        assert [token async for token in cancelled][-1].finish_reason is FinishReason.CANCELLED
        assert outputs == {seed: tuple(engine.solo(seed)[0]) for seed in outputs}
        assert idle(engine)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_while_paused() -> None:
    """What need not finish first changes at once; what must waits until the engine computes again."""
    async with OracleEngine() as engine:
        gate = StepGate(engine, at=3)
        stream = engine.stream([1], SamplingParams(seed=1, max_tokens=20, ignore_eos=True))
        await until(gate.held.is_set)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.pause)
            await anyio.wait_all_tasks_blocked()
            gate.open()
        assert await engine.update_weights("new") == 1
        prepared: list[Change] = []
        engine.runner.before_prepare = prepared.append
        async with anyio.create_task_group() as group:
            group.start_soon(engine.update_weights, "newer", "finish")
            await until(lambda: prepared)
            await engine.unpause()
            tokens = [token async for token in stream]
        assert [token.token_id for token in tokens] == engine.solo(1)[0]
        assert [token.weights_version for token in tokens] == [0] * 4 + [1] * 16
        assert engine.stats().weights_version == 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_closed_meanwhile() -> None:
    """An update that waits for requests to finish, and one that waits for its turn, end with the engine."""
    engine = OracleEngine()
    await engine.start()
    gate = StepGate(engine, at=3)
    stream = engine.stream([1], SamplingParams(seed=1, max_tokens=300, ignore_eos=True))
    await until(gate.held.is_set)

    async def update() -> None:
        with pytest.raises(EngineStateError, match="the engine is closed"):
            await engine.update_weights("new", "finish")

    async with anyio.create_task_group() as group:
        group.start_soon(update)
        group.start_soon(update)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(engine.aclose)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    assert {token.weights_version async for token in stream} == {0}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_nothing_more_is_read_once_the_engine_is_closed(models: Models) -> None:
    begun, may_go_on, asked = threading.Event(), threading.Event(), list[str]()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in models.tensors.items():
            asked.append(name)
            begun.set()
            assert may_go_on.wait(HANG_SECONDS)
            yield name, tensor

    async def update() -> None:
        with pytest.raises(EngineStateError, match="closed"):
            await engine.update_weights(tensors())

    engine = AsyncEngine("demo", **OPTIONS)
    await engine.start()
    async with anyio.create_task_group() as group:
        group.start_soon(update)
        await until(begun.is_set)
        await engine.aclose()
    may_go_on.set()
    await until(lambda: not any(thread.name.startswith("aengine-changes") for thread in threading.enumerate()))
    assert len(asked) == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_goes_wrong_changes_nothing(models: Models) -> None:
    params, prompt = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), list(range(30))

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(models.tensors.items())[:5]
        raise ConnectionError("the trainer is gone")

    async with AsyncEngine("demo", **OPTIONS) as engine:
        before = await engine.generate(prompt, params)
        stream = engine.stream(prompt, params)
        with pytest.raises(ConnectionError, match="the trainer is gone"):
            await engine.update_weights(broken())
        with pytest.raises(ModelLoadError, match="it lacks"):
            await engine.update_weights(list(models.tensors.items())[:5])
        with pytest.raises(InvalidRequestError, match=r"running: 'stop' is not one of keep, recompute, finish, abort"):
            await engine.update_weights(models.tensors, "stop")
        await engine.sleep()
        with pytest.raises(EngineStateError, match="sleeps"):
            await engine.update_weights(models.tensors)
        await engine.wake()
        assert tuple([token.token_id async for token in stream]) == before.token_ids
        assert (await engine.generate(prompt, params)).token_ids == before.token_ids
        assert engine.stats().weights_version == 0
        assert await engine.update_weights(models.tensors) == 1
        after = await engine.generate(prompt, params)
    assert after.token_ids != before.token_ids
    assert after.weights_versions == (1,) * 20
    assert list(after.token_ids) == models.likeliest(1, prompt + list(after.token_ids))[len(prompt) - 1 : -1]


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_with_drafts_and_several_sequences(models: Models) -> None:
    """Drafts are checked with the weights in use, and forks of a request that goes on compute its prompt themselves."""
    rng, outputs = random.Random(0), list[Output]()
    params = SamplingParams(top_k=1, max_tokens=40, n=2, ignore_eos=True)
    async with AsyncEngine("demo", **OPTIONS, speculative="ngram") as engine:
        for number in range(1, 3):
            streams = []
            for _ in range(2):
                prompt = [rng.randrange(500) for _ in range(10)] * 4
                streams.append(([Output(prompt, []) for _ in range(2)], engine.stream(prompt, params)))
            assert await engine.update_weights(models.paths[number % 2], "recompute") == number
            for sequences, stream in streams:
                async for token in stream:
                    sequences[token.index].tokens.append(token)
                outputs += sequences
    for output in outputs:
        assert len(output.ids) == 40
        output.check(models, "recompute")


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("source", ["directory", "tensors"])
async def test_two_ranks(models: Models, source: str) -> None:
    rng, outputs, done = random.Random(0), list[Output](), anyio.Event()
    async with AsyncEngine("demo", **OPTIONS, tensor_parallel_size=2) as engine, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(generate, engine, random.Random(rng.random()), outputs, done)
        with pytest.raises(ModelLoadError, match="it lacks"):
            await engine.update_weights(list(models.tensors.items())[:5], "recompute")
        given = models.paths[1] if source == "directory" else models.tensors.items()
        assert await engine.update_weights(given, "recompute") == 1
        assert await engine.update_weights(models.paths[0], "recompute") == 2
        done.set()
    for output in outputs:
        output.check(models, "recompute")
