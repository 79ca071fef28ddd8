"""`/v1/rerank`, `/v1/score` and `/classify`: with models that classify, and with embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from encoder_models import save_encoder
from http_harness import Serving, serving_http

from aengine import AsyncEngine
from aengine.api.errors import InvalidRequestError
from aengine.client import AsyncClient

pytestmark = pytest.mark.anyio

DOCUMENTS = ["w1 w2", "w3 w9 w9 w40", "w7", "w5 w6"]


@asynccontextmanager
async def served(name: str, folder: Path, **config: Any) -> AsyncIterator[tuple[AsyncEngine, Serving]]:
    save_encoder(name, folder / name)
    async with (
        AsyncEngine(str(folder / name), dtype="float32", kv_cache_memory=8 << 20) as engine,
        serving_http(engine, **config) as serve,
    ):
        yield engine, serve


@pytest.mark.parametrize("name", ["bert-one", "bert"])
async def test_documents_come_in_the_order_of_their_scores(name: str, tmp_path: Path) -> None:
    async with served(name, tmp_path) as (engine, serve):
        scores = await engine.rerank("w5 w6", DOCUMENTS)
        order = sorted(range(4), key=lambda index: -scores[index])
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            told = (await serve.post(path, {"query": "w5 w6", "documents": DOCUMENTS})).json()
            assert [one["index"] for one in told["results"]] == order
            assert [one["relevance_score"] for one in told["results"]] == pytest.approx([scores[index] for index in order])
            assert [one["document"]["text"] for one in told["results"]] == [DOCUMENTS[index] for index in order]
        body = {"query": "w5 w6", "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "return_documents": False}
        told = (await serve.post("/v1/rerank", body)).json()
        assert [set(one) for one in told["results"]] == [{"index", "relevance_score"}] * 2
        assert told["model"] == name
        assert told["usage"]["total_tokens"] > 0
        told = (await serve.post("/v1/score", {"text_1": "w5 w6", "text_2": DOCUMENTS})).json()
        assert [one["score"] for one in told["data"]] == pytest.approx(scores)
        told = (await serve.post("/score", {"text_1": ["w5 w6", "w1"], "text_2": ["w7", "w1"]})).json()
        assert [one["index"] for one in told["data"]] == [0, 1]
        assert serve.server.in_flight == 0


async def test_labels_of_texts(tmp_path: Path) -> None:
    async with served("bert-labels", tmp_path) as (engine, serve):
        told = (await serve.post("/classify", {"input": ["w1 w2", "w9"]})).json()["data"]
        for text, one in zip(("w1 w2", "w9"), told, strict=True):
            said = await engine.classify(text)
            assert (one["label"], one["num_classes"]) == (said.label, 3)
            assert one["probs"] == pytest.approx(said.probabilities)
        assert len((await serve.post("/v1/classify", {"input": [5, 6]})).json()["data"]) == 1
        refused = await serve.post("/v1/rerank", {"query": "w1", "documents": ["w2"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


async def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    async with served("bert-one", tmp_path) as (_, serve):
        for path, body, param in (
            ("/v1/rerank", {"documents": ["w1"]}, "query"),
            ("/v1/rerank", {"query": "w1", "documents": []}, "documents"),
            ("/v1/rerank", {"query": "w1", "documents": [1]}, "documents[0]"),
            ("/v1/rerank", {"query": "w1", "documents": ["w1"], "top_n": 0}, "top_n"),
            ("/v1/rerank", {"query": "w1", "documents": ["w1"], "other": 0}, "other"),
            ("/v1/rerank", {"query": "w1", "documents": ["w1"] * 2049}, "documents"),
            ("/v1/rerank", {"query": "w1", "documents": ["w2", "w1 " * 300]}, "documents[1]"),
            ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
            ("/classify", {"input": [1.5]}, "input[0]"),
            ("/classify", {"input": "w1 " * 300}, "input[0]"),
        ):
            told = await serve.post(path, body)
            assert (told.status_code, told.json()["error"]["param"]) == (400, param), (path, str(body)[:80])
    async with served("bert", tmp_path) as (_, serve):
        told = await serve.post("/classify", {"input": "w1"})
        assert (told.status_code, told.json()["error"]["param"]) == (400, "model")


async def test_the_same_over_grpc(tmp_path: Path) -> None:
    async with served("bert-one", tmp_path, port=0) as (engine, serve), AsyncClient(serve.server.address) as client:
        assert (client.model_info.labels, client.model_info.encoder) == (("LABEL_0",), True)
        assert await client.rerank("w5 w6", DOCUMENTS) == pytest.approx(await engine.rerank("w5 w6", DOCUMENTS))
        assert (await client.classify("w5")).scores == pytest.approx((await engine.classify("w5")).scores)
        cls = await client.embed("w5 w6", pooling="cls")
        assert cls.values == pytest.approx((await engine.embed("w5 w6")).values)
        with pytest.raises(InvalidRequestError):
            await client.generate("w5")
