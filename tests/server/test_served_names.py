"""The names by which clients know a model, and that no path of the host is among what they are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from chat_engine import ChatEngine
from grpc import aio
from grpc_harness import failure_of
from http_harness import serving_http

from aengine import AsyncEngine, EngineDeadError
from aengine.api.outputs import AdapterInfo
from aengine.models.loading import hub
from aengine.server.core.errors import describe
from aengine.v1.engine_service_pb2 import GetServerInfoRequest
from aengine.v1.engine_service_pb2_grpc import EngineServiceStub
from aengine.v1.model_service_pb2 import GetModelRequest, ListModelsRequest
from aengine.v1.model_service_pb2_grpc import ModelServiceStub

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "x"}]
NAMES = ("first", "second/name", "first")


async def test_any_of_the_names_is_taken_and_told() -> None:
    engine = ChatEngine("abc")
    engine.adapters = (AdapterInfo("first", 1, (), 1), AdapterInfo("tuned", 1, (), 2))
    async with serving_http(engine, served_model_name=NAMES, port=0) as serve:
        data = (await serve.client.get("/v1/models")).json()["data"]
        listed = [(model["id"], model["root"], model["parent"]) for model in data]
        assert listed == [("first", "first", None), ("second/name", "first", None), ("tuned", "first", "first")]
        assert (await serve.client.get("/v1/models/second/name")).json()["id"] == "second/name"
        for asked, told in (({}, "first"), ({"model": "second/name"}, "second/name"), ({"model": "tuned"}, "tuned")):
            for path, prompt in (
                ("/v1/completions", {"prompt": "Once"}),
                ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
            ):
                response = await serve.post(path, {**prompt, **asked, "max_tokens": 3})
                assert response.json()["model"] == told, response.text
        refused = await serve.post("/v1/completions", {"model": "fake", "prompt": "Once"})
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == "model 'fake' is not served here; there is 'first', 'second/name'"
        assert 'name="first"' in (await serve.client.get("/metrics")).text
        async with aio.insecure_channel(serve.server.address) as channel:
            assert (await EngineServiceStub(channel).GetServerInfo(GetServerInfoRequest())).model == "first"
            models: Any = ModelServiceStub(channel)
            assert [model.name for model in (await models.ListModels(ListModelsRequest())).models] == ["first", "second/name"]
            assert (await models.GetModel(GetModelRequest(model="second/name"))).model.name == "second/name"
            with pytest.raises(aio.AioRpcError) as caught:
                await models.GetModel(GetModelRequest(model="fake"))
        failure = failure_of(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_aliases() -> None:
    """Of the model, which is told as it was asked for, and of adapters, which are told; they are not listed."""
    engine = ChatEngine("abc")
    engine.adapters = (AdapterInfo("tuned", 1, (), 1),)
    aliases = ("gpt-*=tuned", "claude-*", "other=missing", "*-x=*-x", "loop-*=back-1", "back-*=loop-1", "tun*")
    async with serving_http(engine, model_aliases=aliases, port=0) as serve:
        for name, adapter in (("claude-sonnet-4-5", None), ("gpt-5", "tuned"), ("claude-", None), ("fake", None), ("tuned", "tuned")):
            response = await serve.post("/v1/chat/completions", {"model": name, "messages": CHAT, "max_tokens": 3})
            assert (response.status_code, response.json()["model"]) == (200, adapter or name)
            assert (await engine.submitted.get()).call["adapter"] == adapter
        for name in ("Claude-1", "other", "a-x", "loop-2", "claude"):
            refused = await serve.post("/v1/messages", {"model": name, "messages": CHAT, "max_tokens": 3})
            assert refused.status_code == 404, name
        assert [model["id"] for model in (await serve.client.get("/v1/models")).json()["data"]] == ["fake", "tuned"]
        assert (await serve.client.get("/v1/models/claude-opus")).json()["id"] == "claude-opus"
        async with aio.insecure_channel(serve.server.address) as channel:
            models: Any = ModelServiceStub(channel)
            assert (await models.GetModel(GetModelRequest(model="claude-x"))).model.name == "claude-x"


async def test_no_path_is_told(tmp_path: Path) -> None:
    """The model is a directory and so is the adapter; what clients can read by either door has neither."""
    folder = tmp_path / "secret-place" / "my-model"
    folder.parent.mkdir()
    folder.symlink_to(hub.resolve_model("demo"))
    adapter = folder.parent / "my-adapter"
    adapter.symlink_to(hub.resolve_adapter("demo-lora"))
    async with AsyncEngine(str(folder), kv_cache_memory="32MiB", adapters={"a": str(adapter)}) as engine:
        assert engine.model_info.name == "my-model"
        told = [engine.model_info.describe()]
        async with serving_http(engine, port=0) as serve:
            for path in ("/", "/v1/models", "/v1/models/a", "/v1/models/x", "/health", "/load", "/version", "/metrics", "/tokenizer_info"):
                told.append((await serve.client.get(path)).text)
            chat = {"messages": CHAT, "max_tokens": 1}
            for body in ({}, {"model": "my-model"}, {"model": "a"}, {"model": "x"}, {"adapter": "x"}, {"template_kwargs": {"x": "{{"}}):
                told.append((await serve.post("/v1/chat/completions", {**chat, **body})).text)
            async with aio.insecure_channel(serve.server.address) as channel:
                info: Any = EngineServiceStub(channel).GetServerInfo(GetServerInfoRequest())
                model: Any = ModelServiceStub(channel).GetModel(GetModelRequest())
                told += [str(await info), str(await model)]
    assert '"model":"my-model"' in "".join(told)
    assert "secret-place" not in "".join(told)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("demo", "demo"),
        ("owner/name", "owner/name"),
        ("owner/name@v1.0", "owner/name"),
        ("/models/llama/", "llama"),
        ("./x/y.Q4_K_M.gguf", "y.Q4_K_M.gguf"),
        ("/", "model"),
    ],
)
def test_default_names(given: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.model_name(given) == name
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert hub.model_name("owner/name") == "name"


def test_what_killed_an_engine_is_told_to_the_log_alone() -> None:
    error = EngineDeadError("the step thread died: OSError: cannot read /secret/place")
    assert "secret" not in json.dumps([str(describe(error)), describe(error).message])
