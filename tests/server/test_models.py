"""Several models in one server: which are loaded when, what each gives back, and that nobody waits for what another does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc import aio
from grpc_harness import Serving, failure_of, serving, text_spec
from oracle_engine import until

from aengine import AsyncEngine, SamplingParams
from aengine.api.config import EngineConfig
from aengine.router.router_config import RouterConfig
from aengine.server.config.options import ModelChoice
from aengine.server.config.settings import SettingsError, read_settings
from aengine.server.core.errors import ServiceError
from aengine.server.core.model_pool import ModelPool
from aengine.server.grpc.generation import events
from aengine.server.http import door
from aengine.v1.embedding_service_pb2 import EmbedRequest
from aengine.v1.embedding_service_pb2_grpc import EmbeddingServiceStub
from aengine.v1.generation_service_pb2 import (
    BatchGenerateRequest,
    CancelRequestsRequest,
    GenerateRequest,
    GetRequestRequest,
    StreamGenerateRequest,
)
from aengine.v1.model_service_pb2 import GetModelRequest, ListModelsRequest
from aengine.v1.model_service_pb2_grpc import ModelServiceStub
from aengine.v1.tokenizer_service_pb2 import TokenizeRequest
from aengine.v1.tokenizer_service_pb2_grpc import TokenizerServiceStub

pytestmark = pytest.mark.anyio

KV = 16 << 20


def choice(name: str, model: str = "demo", **fields: Any) -> ModelChoice:
    return ModelChoice(name, EngineConfig(model=model, kv_cache_memory=KV), **fields)


@asynccontextmanager
async def several(*choices: ModelChoice, **config: Any) -> AsyncIterator[tuple[Serving, ModelPool, httpx2.AsyncClient]]:
    async with AsyncEngine("demo", kv_cache_memory=KV) as engine, serving(engine, models=choices, http_port=0, **config) as serve:
        pool = serve.server.core.backend.models
        assert pool is not None
        async with httpx2.AsyncClient(base_url=f"http://{serve.server.http_address}", timeout=60) as client:
            yield serve, pool, client


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Once upon a time " * 8}], "max_tokens": 6, "seed": 1, **fields}


async def test_each_name_has_its_model_over_both_doors() -> None:
    async with several(choice("b"), choice("c"), model_aliases=("gpt-*=b",)) as (serve, pool, client):
        assert [model.level for model in pool] == [0, 3, 3]
        told = [(await client.post("/v1/chat/completions", json=body(name))).json() for name in ("demo", "b", "b", "gpt-5", "")]
        assert [one["model"] for one in told] == ["demo", "b", "b", "gpt-5", "demo"]
        assert len({one["choices"][0]["message"]["content"] for one in told}) == 1, "the same weights"
        assert told[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert [model.level for model in pool] == [0, 0, 3]
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(one["id"], one["root"], one["parent"], one["max_model_len"]) for one in listed] == [
            ("demo", "demo", None, 2048),
            ("b", "b", None, 2048),
            ("c", "c", None, None),
        ]
        assert (await client.get("/v1/models/c")).json()["id"] == "c"
        refused = await client.post("/v1/chat/completions", json=body("other"))
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            404,
            "model 'other' is not served here; there is 'demo', 'b', 'c'",
        )
        assert (await client.post("/v1/messages", json={**body("c"), "seed": None})).status_code in (200, 400)
        assert (await client.post("/tokenize", json={"model": "c", "prompt": "Once"})).json()["tokens"]
        assert (await client.post("/v1/embeddings", json={"model": "c", "input": "Once"})).json()["model"] == "c"
        assert (await client.post("/api/generate", json={"model": "c:latest", "prompt": "x", "stream": False})).json()["done"]
        assert [one["name"] for one in (await client.get("/api/ps")).json()["models"]] == ["demo", "b", "c"]
        spec = text_spec(model="c")
        spec.stopping.max_tokens = 4
        assert (await serve.generation.Generate(GenerateRequest(spec=spec))).model == "c"
        batch = serve.generation.BatchGenerate(BatchGenerateRequest(requests=[GenerateRequest(spec=spec)], batch_id="b"))
        assert [one.response.model async for one in batch] == ["c"]
        assert (await EmbeddingServiceStub(serve.channel).Embed(EmbedRequest(model="b", inputs=[spec.prompt]))).model == "b"
        assert (await TokenizerServiceStub(serve.channel).Tokenize(TokenizeRequest(model="c", text="Once"))).num_tokens
        assert [one.name for one in (await ModelServiceStub(serve.channel).ListModels(ListModelsRequest())).models] == ["demo", "b", "c"]
        assert (await ModelServiceStub(serve.channel).GetModel(GetModelRequest(model="b"))).model.max_model_len == 2048
        assert serve.server.in_flight == 0
        assert [model.users for model in pool] == [0, 0, 0]


async def test_a_request_is_found_whichever_model_has_it() -> None:
    async with several(choice("b")) as (serve, pool, _):
        spec = text_spec(model="b")
        spec.stopping.max_tokens, spec.stopping.ignore_eos = 2000, True
        call = serve.generation.Generate(GenerateRequest(spec=spec, request_id="mine"))
        running = asyncio.ensure_future(call)
        await until(lambda: pool.others["b"].backend is not None and list(pool.others["b"].backend.streams))
        assert (await serve.generation.GetRequest(GetRequestRequest(request_id="mine"))).request_id == "mine"
        assert pool.others["b"].users
        told = await serve.generation.CancelRequests(CancelRequestsRequest(request_ids=["mine", "other"]))
        assert (list(told.cancelled_request_ids), list(told.unknown_request_ids)) == (["mine"], ["other"])
        await running
        assert not pool.others["b"].users


async def test_many_that_ask_for_a_cold_model_load_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with several(choice("b")) as (_, _, client):
        loaded = list[str]()
        load = ModelPool._load

        async def counted(self: ModelPool, model: Any) -> None:
            loaded.append(model.name)
            await load(self, model)

        monkeypatch.setattr(ModelPool, "_load", counted)
        asked = [client.post("/v1/chat/completions", json=body("b")) for _ in range(8)]
        assert [one.status_code for one in await asyncio.gather(*asked)] == [200] * 8
        assert loaded == ["b"]


async def test_a_stream_whose_model_is_loaded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "PROGRESS_SECONDS", 0.001)
    async with several(choice("b"), choice("broken", "/none")) as (_, _, client):
        told = (await client.post("/v1/chat/completions", json=body("b", stream=True))).text.split("\n\n")
        assert told[0] == ": loading the model"
        assert told[-2] == "data: [DONE]"
        again = (await client.post("/v1/chat/completions", json=body("b", stream=True))).text
        assert again.startswith("data: {")
        failed = (await client.post("/v1/messages", json={**body("broken", stream=True), "seed": 1})).text
        assert '"message":"model \'broken\' cannot be loaded' in failed


async def test_a_stream_of_grpc_whose_model_is_loaded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PROGRESS_SECONDS", 0.001)
    async with several(choice("b"), choice("c")) as (serve, pool, _):
        spec = text_spec(model="b")
        spec.stopping.max_tokens = 3
        asked = StreamGenerateRequest(spec=spec)
        told = [response.event async for response in serve.generation.StreamGenerate(asked)]
        assert [event.event_number for event in told] == list(range(len(told)))
        kinds = [event.WhichOneof("event") for event in told]
        assert kinds[: kinds.index("started")] == ["loading"] * kinds.index("started")
        assert kinds[0] == "loading"
        again = [response.event async for response in serve.generation.StreamGenerate(asked)]
        assert again[0].HasField("started") or again[0].HasField("loading")
        asked.spec.model = "c"
        call = serve.generation.StreamGenerate(asked)
        assert (await anext(aiter(call))).event.HasField("loading")
        call.cancel()
        await until(lambda: not pool.others["c"].users)
        await until(lambda: not serve.server.in_flight)


async def test_a_client_that_leaves_while_its_model_loads_holds_nothing() -> None:
    async with several(choice("b")) as (_, pool, client):
        asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=body("b")))
        await until(lambda: pool.others["b"].changing is not None)
        asking.cancel()
        await until(lambda: not pool.others["b"].users)
        await until(lambda: pool.others["b"].is_ready)  # for the next one


async def test_what_nobody_uses_makes_room() -> None:
    """Two of them fit beside the first; what is held stays."""
    room = 3 * (KV + (12 << 20))
    async with several(*map(choice, "bcd"), models_memory=room) as (_, pool, client):
        for name in "bcdbcd":
            assert (await client.post("/v1/chat/completions", json=body(name))).status_code == 200
            assert sum(model.bytes_at(model.level) for model in pool) <= room
            assert pool.others[name].level == 0
        with ExitStack() as held:
            await pool.hold("demo", held)
            await pool.hold("b", held)
            await pool.hold("c", held)
            waiting = asyncio.ensure_future(client.post("/v1/chat/completions", json=body("d")))
            await until(lambda: pool.others["d"].changing is not None)
            await until(lambda: not pool._idle.is_set())
            assert not waiting.done()
        assert (await waiting).status_code == 200


async def test_one_that_never_fits_says_so() -> None:
    async with several(choice("b"), models_memory=KV) as (_, _, client):
        told = await client.post("/v1/chat/completions", json=body("b"))
        assert (told.status_code, told.json()["error"]["code"]) == (409, "insufficient_memory")
        assert "model 'b' needs 25 MiB, and all models together have 16 MiB" in told.json()["error"]["message"]


async def test_idle_ones_sleep_and_go() -> None:
    async with several(choice("b"), choice("kept", pin=True), choice("long", keep_alive=1e6), models_keep_alive=0.2) as (_, pool, client):
        await until(lambda: pool.others["kept"].level == 0)
        before = [(await client.post("/v1/chat/completions", json=body(name))).json()["choices"] for name in ("demo", "b", "long")]
        await until(lambda: pool.others["b"].level == 3)
        await until(lambda: pool.first.level == 2)
        assert [pool.others[name].level for name in ("kept", "long")] == [0, 0]
        assert before == [(await client.post("/v1/chat/completions", json=body(name))).json()["choices"] for name in ("demo", "b", "long")]


async def test_clients_of_ollama_say_how_long_a_model_stays() -> None:
    async with several(choice("b")) as (_, pool, client):
        kept = pool.others["b"]
        for value, seconds in ((-1, 1e9), ("5m", 300.0), ("1.5h", 5400.0), ("20ms", 0.02), (7, 7.0)):
            told = await client.post("/api/generate", json={"model": "b", "keep_alive": value})
            assert (told.json()["done_reason"], kept.keep_alive) == ("load", seconds)
        assert (await client.post("/api/generate", json={"model": "b", "keep_alive": "long"})).status_code == 400
        await client.post("/api/embed", json={"model": "b", "input": "x", "keep_alive": 0})
        await until(lambda: kept.level == 3)
        assert pool.first.level == 0


async def test_one_that_cannot_be_loaded_disturbs_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with several(choice("broken", str(tmp_path / "none")), choice("b")) as (serve, _, client):
        for _ in range(2):
            told = await client.post("/v1/chat/completions", json=body("broken"))
            assert (told.status_code, told.json()["error"]["message"]) == (
                503,
                "model 'broken' cannot be loaded; the server's log says why",
            )
        assert str(tmp_path) in caplog.text
        assert (await client.post("/v1/chat/completions", json=body("b"))).status_code == 200
        with pytest.raises(aio.AioRpcError) as caught:
            await serve.generation.Generate(GenerateRequest(spec=text_spec(model="broken")))
        assert failure_of(caught.value).code is grpc.StatusCode.UNAVAILABLE


async def test_replicas_elsewhere_are_one_of_several() -> None:
    """Each set of replicas has a model of its own."""
    async with AsyncEngine("demo", kv_cache_memory=KV, seed=3) as engine, serving(engine) as behind:
        router = RouterConfig(backends=(behind.server.address,))
        far = ModelChoice("far", EngineConfig(model="demo"), router)
        async with several(far, choice("b"), models_keep_alive=0.05) as (serve, pool, client):
            told = {name: (await client.post("/v1/chat/completions", json=body(name))).json() for name in ("demo", "far", "b")}
            assert [one["model"] for one in told.values()] == ["demo", "far", "b"]
            assert len({one["choices"][0]["message"]["content"] for one in told.values()}) == 1
            assert behind.server.core.backend.engine.stats().completion_tokens == 6
            await until(lambda: pool.others["b"].level == 3)
            assert pool.others["far"].level == 0, "it takes no memory here"
            spec = text_spec(model="far")
            spec.stopping.max_tokens = 2
            assert (await serve.generation.Generate(GenerateRequest(spec=spec))).model == "far"


async def test_one_whose_engine_is_gone_is_loaded_again() -> None:
    async with several(choice("b")) as (_, pool, client):
        for _ in range(2):
            assert (await client.post("/v1/chat/completions", json=body("b"))).status_code == 200
            engine = pool.others["b"].engine
            assert engine is not None
            await engine.aclose()


async def test_streams_and_stored_responses_of_another_model_outlive_the_process(tmp_path: Path) -> None:
    asked = {"model": "b", "input": "Once", "max_output_tokens": 300, "ignore_eos": True, "seed": 1, "background": True}
    async with several(choice("b"), journal=str(tmp_path)) as (_, _, client):
        name = (await client.post("/v1/responses", json=asked)).json()["id"]
    async with several(choice("b"), journal=str(tmp_path)) as (_, _, client):
        while (told := (await client.get(f"/v1/responses/{name}")).json())["status"] == "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (told["model"], told["usage"]["output_tokens"]) == ("b", 300)
        whole = await client.post("/v1/responses", json={**asked, "background": False})
        assert told["output"][0]["content"] == whole.json()["output"][0]["content"]


async def test_a_request_for_a_model_that_goes_to_sleep_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeping engine lets requests wait until somebody wakes it: none may get there unseen by the pool."""
    async with several(choice("b"), models_memory=2 * KV) as (_, pool, client):
        engine, falls_asleep, goes_on = pool.first.engine, asyncio.Event(), asyncio.Event()
        assert isinstance(engine, AsyncEngine)
        sleep = engine.sleep

        async def slow_sleep(*args: Any) -> Any:
            falls_asleep.set()
            await goes_on.wait()
            return await sleep(*args)

        monkeypatch.setattr(engine, "sleep", slow_sleep)
        asked = [asyncio.ensure_future(client.post("/v1/chat/completions", json=body("b")))]
        await falls_asleep.wait()
        asked.append(asyncio.ensure_future(client.post("/v1/chat/completions", json=body("demo"))))
        await until(lambda: pool.first.users)
        goes_on.set()
        assert [one.status_code for one in await asyncio.gather(*asked)] == [200, 200]


async def test_sleeping_models_that_are_waited_for_give_their_weights_back() -> None:
    """Else each of three would wait for what the other two keep."""
    async with AsyncEngine("demo", kv_cache_memory=1 << 20) as engine:
        choices = [ModelChoice(name, EngineConfig(model="demo", kv_cache_memory=1 << 20)) for name in "bc"]
        pool = ModelPool(engine, choices)
        for model in (pool.others["b"], pool.first):
            with ExitStack() as held:
                await pool.hold(model.name, held)
            pool._measure(model)
            await pool._rest(model, 1)
        pool._memory = int(2.5 * pool.first.num_weight_bytes)
        assert pool.first.num_weight_bytes > 4 << 20

        async def use(name: str) -> None:
            with ExitStack() as held:
                assert (await pool.hold(name, held)).is_ready

        await asyncio.wait_for(asyncio.gather(*map(use, ("c", "demo", "b"))), 60)
        assert sum(model.bytes_at(model.level) for model in pool) <= pool._memory
        await pool.aclose()


@pytest.mark.slow
async def test_random_requests_stay_within_the_memory() -> None:
    room, rng = 6 * (KV + (12 << 20)), random.Random(5)
    names = [f"m{index}" for index in range(9)]
    async with several(*map(choice, names), models_memory=room, models_keep_alive=0.5) as (serve, pool, client):
        async with AsyncEngine("demo", kv_cache_memory=KV) as engine:
            right = {seed: (await engine.generate(body("")["messages"], SamplingParams(max_tokens=6, seed=seed))).text for seed in range(5)}
        most = 0

        async def ask() -> None:
            nonlocal most
            for _ in range(20):
                seed = rng.randrange(5)
                told = await client.post("/v1/chat/completions", json=body(rng.choice(["demo", *names]), seed=seed))
                assert told.status_code == 200, told.text
                assert told.json()["choices"][0]["message"]["content"] == right[seed]
                most = max(most, sum(model.bytes_at(model.level) for model in pool))

        await asyncio.gather(*[ask() for _ in range(20)])
        assert most <= room
        assert serve.server.in_flight == 0


def test_models_are_read_from_flags_and_files(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / "many" / name).mkdir(parents=True)
        (tmp_path / "many" / name / "config.json").write_text("{}")
    (tmp_path / "many" / "z.gguf").write_bytes(b"")
    file = tmp_path / "aengine.toml"
    file.write_text('[models.tuned]\nmodel = "demo"\npin = true\nkeep_alive = 60\ndtype = "float32"\n[models.x]\nmax_model_len = 128\n')
    given = {"models": f"b=demo,{tmp_path / 'many'}", "quantization": "int8", "models_memory": "1GiB"}
    found = {one.name: one for one in read_settings(given, {}, str(file)).models}
    assert {name: one.engine.model for name, one in found.items()} == {
        "b": "demo",
        "x": str(tmp_path / "many" / "x"),
        "y": str(tmp_path / "many" / "y"),
        "z": str(tmp_path / "many" / "z.gguf"),
        "tuned": "demo",
    }
    assert (found["tuned"].pin, found["tuned"].keep_alive, found["tuned"].engine.dtype) == (True, 60.0, "float32")
    assert {one.engine.quantization for one in found.values()} == {"int8"}
    assert {one.engine.kv_cache_memory for one in found.values()} == {1 << 27}
    assert (found["x"].engine.max_model_len, found["y"].engine.max_model_len) == (128, None)
    file.write_text('[models.far]\nbackends = ["a:1", "b:2"]\npin = true\n[models.two]\nmodel = "demo"\nreplicas = 2\n')
    found = {one.name: one for one in read_settings({}, {}, str(file)).models}
    assert [one.router and (one.router.backends, one.router.replicas) for one in found.values()] == [(("a:1", "b:2"), None), ((), 2)]
    for text, wrong in (
        ("[models.a]\npin = true\n", "models.a: has no model"),
        ('[models.a]\nmodel = "demo"\npin = 1\n', "models.a.pin: 1 is not possible"),
        ('[models.a]\nmodel = "demo"\nkep_alive = 1\n', "models.a.kep_alive: there is no such key; the nearest is keep_alive"),
        ("[models]\na = 1\n", "models.a: is no table"),
        ('[models.a]\nmodel = "demo"\ndtype = "none"\n', "models.a: "),
    ):
        file.write_text(text)
        with pytest.raises(SettingsError, match=wrong):
            read_settings({}, {}, str(file))


async def test_the_pool_without_a_server() -> None:
    """A model that cannot be loaded frees whoever waited for it."""
    async with AsyncEngine("demo", kv_cache_memory=KV) as engine:
        pool = ModelPool(engine, [choice("b", "/none")])
        with ExitStack() as held, pytest.raises(ServiceError):
            await pool.hold("b", held)
        assert pool.others["b"].users == 0
        await pool.aclose()
