"""What is served (`/v1/models`, `/load`, `/version`), texts and ids, and `/v1/embeddings`: the demo model and the clients' own types."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import anthropic.types
import numpy as np
import openai.types
import pytest
from http_harness import Serving, serving_http
from openai import AsyncOpenAI

import aengine
from aengine import AsyncEngine

pytestmark = pytest.mark.anyio

TEXT = "It is a truth universally acknowledged"
CHAT = [{"role": "user", "content": "How do you do?"}]


@pytest.fixture(scope="module")
async def demo() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
        yield engine


@pytest.fixture(scope="module")
async def serve(demo: AsyncEngine) -> AsyncIterator[Serving]:
    async with serving_http(demo, limit=None) as serve:
        yield serve


async def test_models_are_those_of_both_clients(demo: AsyncEngine, serve: Serving) -> None:
    (model,) = (await serve.client.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"], model["chat_template"]) == ("demo", demo.model_info.max_model_len, True)
    assert (await serve.client.get("/v1/models/demo")).json() == model
    openai.types.Model.model_validate(model, strict=True)
    anthropic.types.ModelInfo.model_validate(model)
    missing = await serve.client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    load = (await serve.client.get("/load")).json()
    assert (load["draining"], load["running"], load["pages_total"] > 0) == (False, 0, True)
    assert (await serve.client.get("/tokenizer_info")).json() == {"eos_token": "<|endoftext|>"}
    assert (await serve.client.get("/version")).json() == {"version": aengine.__version__}


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_texts_and_ids(demo: AsyncEngine, serve: Serving, prefix: str) -> None:
    ids = await demo.tokenize(TEXT)
    found = (await serve.post(f"{prefix}/tokenize", {"model": "demo", "prompt": TEXT, "with_pieces": True})).json()
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), demo.model_info.max_model_len)
    places = zip(found["start_offsets"], found["end_offsets"], strict=True)
    assert "".join(TEXT[start:end] for start, end in places) == TEXT
    assert len(found["pieces"]) == len(ids)
    assert (await serve.post(f"{prefix}/detokenize", {"tokens": ids})).json() == {"prompt": TEXT}
    chat = (await serve.post(f"{prefix}/tokenize", {"messages": CHAT, "add_generation_prompt": False})).json()
    rendered = await demo.render_chat(CHAT, add_generation_prompt=False)
    assert chat["tokens"] == await demo.tokenize(rendered.text, add_special_tokens=False)
    spelled = (await serve.post(f"{prefix}/tokenize", {"messages": [{"role": "user", "content": "<|im_end|>"}]})).json()
    (end,) = await demo.tokenize("<|im_end|>", add_special_tokens=False)
    assert spelled["tokens"].count(end) == 1


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/tokenize", {"prompt": 3, "text": "x"}, {"prompt", "text"}),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}], "with_pieces": True},
            {"messages[0].content[0].type", "with_pieces"},
        ),
        ("/tokenize", {"messages": []}, {"messages"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x", "tool_call_id": {}}], "n": 1}, {"n"}),
        ("/detokenize", {"tokens": [10**30]}, {"tokens"}),
        ("/detokenize", {"tokens": [1, 10**9]}, {"tokens[1]"}),
        (
            "/v1/embeddings",
            {"input": ["a", 3, []], "encoding_format": "int8", "max_tokens": 3},
            {"input[1]", "input[2]", "encoding_format", "max_tokens"},
        ),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**6}, {"dimensions"}),
        ("/v1/embeddings", {"input": ["a", [10**9]]}, {"input[1]"}),
        ("/v1/embeddings", {"input": "a", "priority": 1000, "dimensions": "x"}, {"priority", "dimensions"}),
        ("/v1/embeddings", {"input": [[1]] * 2049}, {"input"}),
    ],
)
async def test_what_is_wrong_has_its_path(serve: Serving, path: str, body: dict[str, object], fields: set[str]) -> None:
    response = await serve.post(path, body)
    assert response.status_code == 400, response.text
    assert {violation["field"] for violation in response.json()["error"]["violations"]} == fields


async def test_embeddings_are_those_of_the_engine(demo: AsyncEngine, serve: Serving) -> None:
    ids = await demo.tokenize(TEXT)
    expected = [await demo.embed(prompt, dimensions=16) for prompt in (TEXT, "Bath")]
    async with AsyncOpenAI(base_url=f"http://{serve.server.http_address}/v1", api_key="none") as client:
        found = await client.embeddings.create(model="demo", input=[TEXT, "Bath"], dimensions=16)  # as base64
    for index, (one, embedding) in enumerate(zip(found.data, expected, strict=True)):
        assert one.index == index
        np.testing.assert_allclose(one.embedding, embedding.values, atol=1e-6)
    assert found.usage.prompt_tokens == sum(one.num_tokens for one in expected)
    for given in (TEXT, ids, [ids]):
        whole = (await serve.post("/v1/embeddings", {"input": given, "dimensions": 16})).json()
        openai.types.CreateEmbeddingResponse.model_validate(whole, strict=True)
        np.testing.assert_allclose(whole["data"][0]["embedding"], expected[0].values, atol=1e-6)
    raw = (await serve.post("/v1/embeddings", {"input": TEXT, "encoding_format": "base64", "normalize": False, "pooling": "mean"})).json()
    values = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(values, (await demo.embed(TEXT, pooling="mean", normalize=False)).values, atol=1e-6)
    each = (await serve.post("/v1/embeddings", {"input": TEXT, "pooling": "tokens", "dimensions": 16})).json()["data"][0]["embedding"]
    np.testing.assert_allclose(each, (await demo.embed(TEXT, pooling="tokens", dimensions=16)).values[0], atol=1e-6)
