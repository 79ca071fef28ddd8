"""Watchers of cached pages: what they are told is what requests find in the cache."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import anyio
import pytest
from hang_guard import HANG_SECONDS
from oracle_engine import Ahead, OracleEngine, StepGate, idle, until

from aengine import EngineStateError, SamplingParams
from aengine.api.outputs import CachedPages
from aengine.cache import PageChain, PrefixIndex, published_digest
from aengine.engine import operations

pytestmark = pytest.mark.anyio

SALT = b"of this test only"


class Watcher:
    """Takes what it is told when a test says so."""

    def __init__(self, engine: OracleEngine, salt: bytes = SALT, most: int = 10_000) -> None:
        self.salt = salt
        self.digests: set[int] = set()
        self.items: list[CachedPages] = []
        self._engine = engine
        self.pages = engine.watch_pages(salt, most)

    async def catch_up(self) -> None:
        """With all that the engine did so far: its step thread answers a command after what it reported before."""
        for _ in range(2):  # the first may only have asked for a snapshot
            item = await anext(self.pages)
            await self._engine.pause()
            await self._engine.unpause()
            while item is not None:
                self._take(item)
                item = await anext(self.pages)
        while (item := await anext(self.pages)) is not None:
            self._take(item)

    def _take(self, item: CachedPages) -> None:
        self.items.append(item)
        if item.snapshot:
            self.digests.clear()
        assert not set(item.added) & set(item.removed)
        self.digests.difference_update(item.removed)
        self.digests.update(item.added)

    def cached_tokens(self, prompt: list[int], salt: str = "", version: int = 0) -> int:
        """That a request with this prompt should find."""
        size = self._engine.config.page_size
        chain = PageChain(size, salt, 0, version)
        for start in range(0, len(prompt) - size, size):
            chain.append(b"".join(token.to_bytes(4, "little") for token in prompt[start : start + size]))
        present = [published_digest(name, self.salt) in self.digests for name in chain.digests]
        return size * (present.index(False) if False in present else len(present))


@pytest.fixture
async def watch() -> AsyncGenerator[Any, None]:
    async with AsyncExitStack() as stack:

        async def make(engine: OracleEngine, *args: Any) -> Watcher:
            watcher = Watcher(engine, *args)
            await stack.enter_async_context(aclosing(watcher.pages))
            return watcher

        yield make


class Work:
    """Random requests that share prefixes."""

    def __init__(self, engine: OracleEngine, rng: random.Random) -> None:
        self._engine = engine
        self._rng = rng
        self._prompts: list[list[int]] = [[]]
        self._seeds = iter(range(1, 1_000_000))

    def prompt(self) -> list[int]:
        rng = self._rng
        old = rng.choice(self._prompts)
        prompt = old[: rng.randint(0, len(old))] + [rng.randrange(50) for _ in range(rng.randint(1, 40))]
        self._prompts.append(prompt[:150])
        return prompt[:150]

    async def ask(self, prompt: list[int], salt: str | None = None) -> int:
        """Returns how much of it was found."""
        params = SamplingParams(seed=next(self._seeds), max_tokens=self._rng.randint(1, 12), ignore_eos=True)
        return (await self._engine.generate(prompt, params, cache_salt=salt)).usage.cached_prompt_tokens

    async def do(self, num_requests: int) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(num_requests):
                tasks.start_soon(self.ask, self.prompt(), self._rng.choice([None, "theirs"]))
        await until(lambda: idle(self._engine))

    async def check(self, watcher: Watcher, count: int = 8, version: int = 0) -> None:
        for _ in range(count):
            prompt, salt = self.prompt(), self._rng.choice([None, "theirs"])
            await watcher.catch_up()
            assert watcher.cached_tokens(prompt, salt or "", version) == await self.ask(prompt, salt)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("few", [False, True], ids=["roomy", "overflows"])
@pytest.mark.parametrize("ahead", Ahead)
async def test_digests_tell_what_requests_find(ahead: Ahead, few: bool, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to watchers that are late and were only told all anew, and in several items; of a cache that pages are evicted from."""
    if few:
        monkeypatch.setattr(operations, "MAX_CHANGES", 7)
        monkeypatch.setattr(operations, "MAX_PAGES_TOLD", 5)
        monkeypatch.setattr(operations, "DIGESTS_AT_ONCE", 2)
    async with OracleEngine(num_pages=150, ahead=ahead) as engine:
        work = Work(engine, random.Random(ahead.value))
        await work.do(10)
        watcher = await watch(engine)
        await work.check(watcher)
        assert [item.snapshot for item in watcher.items].count(True) == 1 or few
        others = [await watch(engine, b"another salt"), await watch(engine)]
        for _ in range(4):
            await work.do(15)
            await work.check(watcher)
        for other in others:
            await work.check(other)
        await others[1].catch_up()
        await watcher.catch_up()
        assert others[1].digests == watcher.digests
        await others[0].catch_up()
        assert len(others[0].digests) == len(watcher.digests) > 0
        assert not others[0].digests & watcher.digests
        if few:
            assert [item.snapshot for item in watcher.items].count(True) > 1
            assert max(len(item.added) + len(item.removed) for item in watcher.items) <= 5


@pytest.mark.parametrize("forget", ["flush", "weights", "sleep"])
async def test_what_is_forgotten_is_told(forget: str, watch: Any) -> None:
    async with OracleEngine() as engine:
        work = Work(engine, random.Random(1))
        watcher = await watch(engine)
        await work.do(10)
        await work.check(watcher)
        before = set(watcher.digests)
        version = 0
        match forget:
            case "flush":
                await engine.flush_cache()
            case "weights":
                version = await engine.update_weights({})
            case "sleep":
                await engine.sleep()
                await engine.wake()
        await watcher.catch_up()
        assert before
        assert not watcher.digests
        assert [item.snapshot for item in watcher.items].count(True) == 1
        await work.check(watcher, version=version)
        assert watcher.digests


async def test_pages_that_are_held_are_told(watch: Any) -> None:
    async with OracleEngine() as engine:
        watcher, gate = await watch(engine), StepGate(engine, at=2)
        prompt = list(range(30))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, prompt, SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
            await anyio.to_thread.run_sync(gate.held.wait, HANG_SECONDS)
            assert (await anext(watcher.pages)) is None
            gate.open()
        await watcher.catch_up()
        assert watcher.cached_tokens(prompt) == 28


async def test_a_snapshot_has_a_limit(watch: Any) -> None:
    """And keeps the beginnings of prompts."""
    async with OracleEngine() as engine:
        work, prompt = Work(engine, random.Random(3)), list(range(40))
        await work.ask(prompt)
        watcher = await watch(engine, SALT, 3)
        await watcher.catch_up()
        assert watcher.cached_tokens(prompt) == 12
        assert len(watcher.digests) == 3
        await work.ask([9, *prompt])  # changes have none
        await watcher.catch_up()
        assert watcher.cached_tokens([9, *prompt]) == 40


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    names: list[bytes] = []
    log = PrefixIndex._log

    def spy(index: PrefixIndex, name: bytes, is_there: bool) -> None:
        names.append(name)
        log(index, name, is_there)

    monkeypatch.setattr(PrefixIndex, "_log", spy)
    return names


async def test_nothing_is_logged_unless_somebody_watches(logged: list[bytes]) -> None:
    async with OracleEngine() as engine:
        work = Work(engine, random.Random(4))
        await work.do(5)
        await engine.flush_cache()
        first, second = Watcher(engine), Watcher(engine)
        await work.do(5)
        assert not logged  # nor before the first item is asked for
        await first.catch_up()
        await second.catch_up()
        await first.pages.aclose()
        await work.do(5)
        assert logged
        await second.pages.aclose()
        await engine.flush_cache()
        logged.clear()
        await work.do(5)
        assert not logged


async def test_an_engine_that_is_closed_ends_no_watch_and_takes_no_new_one(watch: Any) -> None:
    async with OracleEngine() as engine:
        watcher = await watch(engine)
        await watcher.catch_up()
    assert await anext(watcher.pages) is None
    with pytest.raises(EngineStateError):
        engine.watch_pages(SALT, 1)
