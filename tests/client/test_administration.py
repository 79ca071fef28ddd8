"""What an administrator changes through the client: adapters, sleep and weights of a real engine behind a real server."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc_harness import serving
from safetensors.torch import load_file, save_file
from scripted_server import scripted

from aengine import AsyncEngine, InvalidRequestError, ModelLoadError, SamplingParams
from aengine.api.errors import AdapterError, AdapterNotFoundError
from aengine.client import AsyncClient
from aengine.models.loading.hub import resolve_adapter, resolve_model
from aengine.v1 import admin_service_pb2
from aengine.v1.admin_service_pb2_grpc import AdminServiceServicer

pytestmark = pytest.mark.anyio

PROMPT, GREEDY = "A lawyer is", SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)


@asynccontextmanager
async def administrator(folder: Path, **options: object) -> AsyncIterator[AsyncClient]:
    """Of a server that loads from `folder`."""
    tokens = folder / "admins"
    tokens.write_text("root let-me-in\n")
    async with (
        AsyncEngine("demo", kv_cache_memory=64 * 1024 * 1024, **options) as engine,
        serving(engine, admin_token_file=str(tokens), weights_roots=(str(folder),)) as serve,
        AsyncClient(serve.server.address, token="let-me-in") as client,
    ):
        yield client


async def test_adapters(tmp_path: Path) -> None:
    copy = shutil.copytree(resolve_adapter("demo-lora"), tmp_path / "copy")
    (tmp_path / "link").symlink_to(resolve_adapter("demo-lora"))
    (tmp_path / "empty").mkdir()
    async with administrator(tmp_path, adapters={"first": "demo-lora"}) as client:
        plain = await client.generate(PROMPT, GREEDY)
        with pytest.raises(AdapterNotFoundError, match="'dictionary'") as unknown:
            await client.generate(PROMPT, GREEDY, adapter="dictionary")
        assert [violation.field for violation in unknown.value.violations] == ["adapter"]
        for path in ("", "/", str(tmp_path / "link"), f"{copy}/../../elsewhere"):
            with pytest.raises(InvalidRequestError, match="weights_roots"):
                await client.load_adapter("dictionary", path)
        with pytest.raises(AdapterError, match=r"adapter_config\.json"):
            await client.load_adapter("dictionary", str(tmp_path / "empty"))
        info = await client.load_adapter("dictionary", str(copy))
        assert (info.name, info.rank, "q_proj" in info.target_modules) == ("dictionary", 8, True)
        assert [(adapter.name, adapter.key) for adapter in await client.adapters()] == [("first", info.key), ("dictionary", info.key)]
        assert info.key > 1, "which the files decide"
        adapted = await client.generate(PROMPT, GREEDY, adapter="dictionary")
        assert adapted.text.startswith(" a philosopher")
        assert adapted.text == (await client.generate(PROMPT, GREEDY, adapter="first")).text != plain.text
        await client.unload_adapter("dictionary")
        with pytest.raises(AdapterNotFoundError):
            await client.generate(PROMPT, GREEDY, adapter="dictionary")
        assert (await client.generate(PROMPT, GREEDY)).token_ids == plain.token_ids


async def test_new_weights(tmp_path: Path) -> None:
    copy = shutil.copytree(resolve_model("demo"), tmp_path / "copy")
    broken = shutil.copytree(copy, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no safetensors")
    async with administrator(tmp_path) as client:
        plain = await client.generate(PROMPT, GREEDY)
        with pytest.raises(ModelLoadError, match="safetensors"):
            await client.update_weights(str(broken))
        with pytest.raises(InvalidRequestError, match="running"):
            await client.update_weights(str(copy), running="sometimes")
        assert await client.update_weights(str(copy), running="recompute") == 1
        assert (await client.load()).weights_version == 1
        again = await client.generate(PROMPT, GREEDY)
        assert (again.token_ids, again.weights_versions) == (plain.token_ids, (1,) * 6)
        assert [token.weights_version async for token in client.stream(PROMPT, GREEDY)] == [1] * 6


async def test_some_weights(tmp_path: Path) -> None:
    stored = load_file(resolve_model("demo") / "model.safetensors")
    (tmp_path / "norm").mkdir()
    save_file({"model.norm.weight": -stored["model.norm.weight"]}, tmp_path / "norm" / "model.safetensors")
    async with administrator(tmp_path) as client:
        plain = await client.generate(PROMPT, GREEDY)
        with pytest.raises(ModelLoadError, match="it lacks"):
            await client.update_weights(str(tmp_path / "norm"))
        assert await client.update_weights(str(tmp_path / "norm"), partial=True) == 1
        assert (await client.generate(PROMPT, GREEDY)).token_ids != plain.token_ids
        save_file({"model.norm.weight": stored["model.norm.weight"]}, tmp_path / "norm" / "model.safetensors")
        assert await client.update_weights(str(tmp_path / "norm"), "recompute", partial=True) == 2
        assert (await client.generate(PROMPT, GREEDY)).token_ids == plain.token_ids


async def test_sleep(tmp_path: Path) -> None:
    async with administrator(tmp_path) as client:
        before = await client.generate(PROMPT, GREEDY)
        memory = await client.sleep(running="cancel")
        assert 0 < memory.after <= memory.before
        assert (await client.load()).sleep_level == 1
        assert (await client.wake()).after > 0
        assert (await client.generate(PROMPT, GREEDY)).token_ids == before.token_ids


async def test_what_takes_long_has_no_deadline() -> None:
    """But that of the caller, who may end it."""
    remaining: dict[str, float | None] = {}

    def noting(name: str) -> Any:
        async def method(servicer: object, request: object, context: Any) -> Any:
            remaining[name] = context.time_remaining()
            return getattr(admin_service_pb2, f"{name}Response")()

        return method

    long = ("PauseGeneration", "Profile", "FlushCache", "LoadAdapter", "UnloadAdapter", "Sleep", "Wake", "UpdateWeights")
    admin = type("Admin", (AdminServiceServicer,), {name: noting(name) for name in (*long, "ContinueGeneration")})()
    async with scripted(admin=admin) as script, AsyncClient(script.address) as client:
        for call in (
            *(client.pause, client.unpause, client.profile, client.flush_cache, client.sleep, client.wake),
            *(partial(client.load_adapter, "a", "b"), partial(client.unload_adapter, "a"), partial(client.update_weights, "a")),
        ):
            await call()
    assert {name for name, seconds in remaining.items() if seconds is None} == set(long)
