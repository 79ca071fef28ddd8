"""KV that goes from one engine to another, in process and over gRPC: the same tokens, whatever becomes of it on the way."""

from __future__ import annotations

import pathlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from cutting_proxy import CuttingProxy, cutting_proxy
from grpc_harness import serving
from slow_cases import slow_but
from test_kv_tiers import GREEDY, engine_of, windowed

from aengine import AdapterNotFoundError, AEngineError, AsyncEngine, EngineStateError, InvalidRequestError, Router, ServerError
from aengine.api.outputs import KVPage
from aengine.client import AsyncClient
from aengine.engine.tier_traffic import TierTraffic

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
HOST: dict[str, Any] = {"host_kv_memory": 64 << 20}
LONG = [5 + place * 7 % 300 for place in range(400)]
__all__ = ["windowed"]


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the model computes."""
    monkeypatch.setattr(TierTraffic, "_is_worth", lambda *given: True)
    monkeypatch.setattr("aengine.router.fleet.FEW_SECONDS", 0.0)


async def pages_of(engine: AsyncEngine | AsyncClient, ids: list[int], **options: Any) -> list[KVPage]:
    found = await engine.find_kv(ids)
    async with aclosing(engine.export_kv(ids, identity=found.identity, **options)) as pages:
        return [page async for page in pages]


async def cut_behind(pages: AsyncGenerator[KVPage, None], count: int, proxy: CuttingProxy) -> AsyncGenerator[KVPage, None]:
    async for page in pages:
        yield page
        if page.index == count:
            proxy.cut()


async def each(pages: list[KVPage]) -> AsyncGenerator[KVPage, None]:
    for page in pages:
        yield page


@pytest.mark.parametrize("kind", slow_but(["kernels", "windows"], ["kernels", "windows", "int8", "torch-windows", "drafts"]))
async def test_what_one_has_computed_another_one_finds(kind: str, windowed: str, anyio_backend: str) -> None:
    async with engine_of(kind, windowed, **HOST) as first, engine_of(kind, windowed, **HOST) as second:
        expected = await first.generate(LONG, GREEDY)
        known = [*LONG, *expected.token_ids]
        found = await first.find_kv(known)
        assert found.num_tokens == (len(known) - 1) // 4 * 4
        assert await second.find_kv(known) == replace(found, num_tokens=0)
        pages = await pages_of(first, known)
        assert [page.index for page in pages] == list(range(found.num_tokens // 4))
        assert await second.import_kv(known, each(pages[:30]), identity=found.identity) == 120
        assert (await second.find_kv(known)).num_tokens == 120
        rest = await pages_of(first, known, skip_tokens=120)
        assert [page.index for page in rest] == list(range(30, found.num_tokens // 4))
        assert await second.import_kv(known, each(rest), identity=found.identity) == found.num_tokens - 120
        output = await second.generate(LONG, GREEDY)
        assert output.token_ids == expected.token_ids
        assert output.usage.loaded_prompt_tokens == output.usage.cached_prompt_tokens == (len(LONG) - 1) // 4 * 4
        assert (await second.find_kv(known, cache_salt="other")).num_tokens == 0


async def test_what_an_adapter_computed(windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    """Whatever it is called there."""
    options = {"adapters": {"a": "demo-lora"}, **HOST}
    async with (
        engine_of("kernels", windowed, **options) as first,
        engine_of("kernels", windowed, **options) as second,
        administered(first, tmp_path) as source,
        administered(second, tmp_path) as target,
    ):
        expected = await first.generate(LONG, GREEDY, adapter="a")
        found = await target.find_kv(LONG, adapter="a")
        assert found.num_tokens == (await source.find_kv(LONG)).num_tokens == 0
        async with aclosing(source.export_kv(LONG, identity=found.identity, adapter="a")) as pages:
            assert await target.import_kv(LONG, pages, identity=found.identity, adapter="a") == 400
        output = await target.generate(LONG, GREEDY, adapter="a")
        assert output.token_ids == expected.token_ids
        assert output.usage.loaded_prompt_tokens == 396
        assert (await target.generate(LONG, GREEDY)).usage.loaded_prompt_tokens == 0
        with pytest.raises(AdapterNotFoundError, match="'b' is not loaded"):
            await target.find_kv(LONG, adapter="b")


async def test_damage_is_seen(windowed: str, anyio_backend: str) -> None:
    """Nothing from there on is kept."""
    rng = random.Random(1)
    async with engine_of("kernels", windowed, **HOST) as first, engine_of("kernels", windowed, **HOST) as second:
        expected = await first.generate(LONG, GREEDY)
        identity = (await first.find_kv(LONG)).identity
        pages = await pages_of(first, LONG)
        damages: list[Callable[[KVPage], KVPage]] = [
            lambda page: replace(page, content=page.content[:-1]),
            lambda page: replace(page, content=bytes([page.content[0] ^ 4]) + page.content[1:]),
            lambda page: replace(page, digest=bytes(32)),
            lambda page: replace(page, index=page.index + 1),
            lambda page: replace(page, index=10_000),
            lambda page: replace(page, is_state=True),
        ]
        for damage in damages:
            place = rng.randrange(10, 50)
            salted = [*pages[:place], damage(pages[place]), *pages[place + 1 :]]
            assert await second.import_kv(LONG, each(salted), identity=identity) == 4 * place
            assert (await second.generate(LONG, GREEDY)).token_ids == expected.token_ids
        with pytest.raises(EngineStateError, match="the engine computes other KV: its identity is"):
            await second.import_kv(LONG, each(pages), identity="other")
        with pytest.raises(InvalidRequestError, match="token_ids: they are not integers of 32 bits"):
            await second.find_kv([1 << 40])
    async with engine_of("kernels", windowed) as without:
        assert (await without.find_kv(LONG)).identity == ""
        with pytest.raises(EngineStateError, match="the engine keeps no KV beside its pool"):
            await without.import_kv(LONG, each(pages), identity=identity)


@asynccontextmanager
async def administered(engine: AsyncEngine, folder: pathlib.Path) -> AsyncIterator[AsyncClient]:
    tokens = folder / "admins"
    tokens.write_text("me let-me-in\n")
    async with serving(engine, admin_token_file=str(tokens)) as serve, AsyncClient(serve.server.address, token="let-me-in") as client:
        yield client


async def test_over_grpc(windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    async with (
        engine_of("kernels", windowed, **HOST) as first,
        engine_of("kernels", windowed, **HOST) as second,
        administered(first, tmp_path) as source,
        administered(second, tmp_path) as target,
    ):
        expected = await first.generate(LONG, GREEDY)
        found = await source.find_kv(LONG)
        assert found.num_tokens == 400
        pages = await pages_of(source, LONG)
        assert pages == await pages_of(first, LONG)
        broken = [*pages[:50], replace(pages[50], digest=b"no"), *pages[51:]]
        assert await target.import_kv(LONG, each(broken), identity=found.identity) == 200
        async with aclosing(source.export_kv(LONG, identity=found.identity, skip_tokens=200)) as rest:
            assert await target.import_kv(LONG, rest, identity=found.identity) == 200
        assert (await target.generate(LONG, GREEDY)).usage.loaded_prompt_tokens == 396
        for call in (target.find_kv([]), target.import_kv([], each(pages), identity=found.identity)):
            with pytest.raises(InvalidRequestError, match=r"prefix\.token_ids: must not be empty"):
                await call
        with pytest.raises(EngineStateError, match="computes other KV"):
            await anext(source.export_kv(LONG, identity="x"))
        assert (await second.generate(LONG, GREEDY)).token_ids == expected.token_ids
        async with AsyncClient(source.config.address) as anybody:
            with pytest.raises(ServerError, match="UNAUTHENTICATED"):
                await anybody.find_kv(LONG)


@pytest.mark.parametrize("count", slow_but([20], [20, 200]))
async def test_transfers_that_are_cut(
    count: int, windowed: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    """At any byte: what has come is used, the rest is computed."""
    monkeypatch.setattr("aengine.wire.response._PIECE_BYTES", 1000)  # so that a page has several messages
    rng = random.Random(count)
    async with (
        engine_of("kernels", windowed, **HOST) as first,
        engine_of("kernels", windowed, **HOST) as second,
        administered(first, tmp_path) as source,
        administered(second, tmp_path) as target,
    ):
        expected = (await first.generate(LONG, GREEDY)).token_ids
        identity = (await source.find_kv(LONG)).identity
        size = sum(len(page.content) for page in await pages_of(first, LONG))
        for number in range(count):
            salt = str(number)
            await first.generate(LONG, GREEDY, cache_salt=salt)
            reads = bool(number % 2)
            budgets = [4000 + rng.randrange(size)] if reads else []
            async with (
                cutting_proxy((source if reads else target).config.address, budgets) as proxy,
                AsyncClient(proxy.address, token="let-me-in") as through,
            ):
                export = (through if reads else source).export_kv(LONG, identity=identity, cache_salt=salt)
                async with aclosing(export) as exported:
                    pages = exported if reads else cut_behind(exported, rng.randrange(100), proxy)
                    with suppress(AEngineError):
                        await (target if reads else through).import_kv(LONG, pages, identity=identity, cache_salt=salt)
            output = await target.generate(LONG, GREEDY, cache_salt=salt)
            assert output.token_ids == expected
            assert output.usage.loaded_prompt_tokens <= 396


async def test_a_router_has_none(windowed: str, anyio_backend: str) -> None:
    async with Router("demo", replicas=1, threads=1) as router:
        with pytest.raises(InvalidRequestError, match="KV is kept by the replicas behind this server"):
            await router.find_kv(LONG)
