"""`/v1/files` and `/v1/batches` with OpenAI's client: what is answered, what is refused, and what becomes of a batch that is cut short."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from chat_engine import ChatEngine
from http_harness import Serving, serving_http

from aengine import AsyncEngine, SamplingParams

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 8, "ignore_eos": True}


def lines_of(bodies: Iterable[dict[str, Any]], url: str = "/v1/chat/completions") -> bytes:
    lines = [{"custom_id": f"r{index}", "method": "POST", "url": url, "body": body} for index, body in enumerate(bodies)]
    return b"\n".join(json.dumps(line).encode() for line in lines) + b"\n"


@asynccontextmanager
async def client_of(serve: Serving, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{serve.server.http_address}/v1", api_key=key, max_retries=0) as client:
        yield client


def demo() -> AsyncEngine:
    return AsyncEngine("demo", kv_cache_memory=32 << 20, max_num_seqs=2)


async def batch_of(client: openai.AsyncOpenAI, content: bytes, url: Any = "/v1/chat/completions") -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"of": "a test"})


async def ended(client: openai.AsyncOpenAI, batch: Any, serve: Serving) -> Any:
    files = serve.server._http._files  # type: ignore[union-attr]
    if (running := files.batches.running.get(batch.id)) is not None:
        await asyncio.wait((running.task,))
    return await client.batches.retrieve(batch.id)


async def answers(client: openai.AsyncOpenAI, file: str | None) -> dict[str, Any]:
    assert file is not None
    content = (await client.files.content(file)).content
    return {line["custom_id"]: line for line in map(json.loads, content.splitlines())}


async def test_a_batch_of_the_demo() -> None:
    bodies = [{**CHAT, "seed": 1}, {**CHAT, "seed": 2, "temperature": 1.0}, {**CHAT}, {"messages": "none"}, {**CHAT, "temperature": -1}]
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine, serving_http(engine) as serve, client_of(serve) as client:
        batch = await batch_of(client, lines_of(bodies))
        assert (batch.status, batch.request_counts.total, batch.metadata) == ("in_progress", 5, {"of": "a test"})
        batch = await ended(client, batch, serve)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 3, 2)
        served, refused = await answers(client, batch.output_file_id), await answers(client, batch.error_file_id)
        assert (set(served), set(refused)) == ({"r0", "r1", "r2"}, {"r3", "r4"})
        assert "messages" in refused["r3"]["response"]["body"]["error"]["message"]
        assert refused["r4"]["response"]["status_code"] == 400
        for index in range(2):
            alone = (await serve.post("/v1/chat/completions", bodies[index])).json()["choices"]
            assert served[f"r{index}"]["response"]["body"]["choices"] == alone
        prompts = [{"prompt": "Once", "max_tokens": 4, "temperature": 0}]
        batch = await ended(client, await batch_of(client, lines_of(prompts, "/v1/completions"), "/v1/completions"), serve)
        text = (await answers(client, batch.output_file_id))["r0"]["response"]["body"]["choices"][0]["text"]
        assert text == (await engine.generate("Once", SamplingParams(max_tokens=4, temperature=0))).text
        batch = await ended(client, await batch_of(client, lines_of([{"input": "Once"}], "/v1/embeddings"), "/v1/embeddings"), serve)
        assert (await answers(client, batch.output_file_id))["r0"]["response"]["body"]["data"][0]["embedding"]
        assert (await client.batches.list(limit=1)).data[0].id == batch.id


async def test_files_are_listed_read_and_deleted() -> None:
    async with serving_http(ChatEngine("Fine.")) as serve, client_of(serve) as client:
        files = [await client.files.create(file=(f"{name}.txt", name.encode() * 9), purpose="user_data") for name in "abc"]
        assert [one.id async for one in client.files.list(limit=2)] == [file.id for file in reversed(files)]
        assert [one async for one in client.files.list(purpose="batch")] == []
        assert ((await client.files.retrieve(files[0].id)).filename, files[0].bytes) == ("a.txt", 9)
        assert (await client.files.content(files[1].id)).content == b"b" * 9
        assert (await client.files.delete(files[1].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(files[1].id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(files[0].id)
        for path in (f"/v1/files/{files[0].id}/other", "/v1/files/../x", "/v1/batches/none", f"/v1/batches/{files[0].id}"):
            assert (await serve.client.get(path)).status_code == 404, path
        assert (await serve.client.get("/v1/files?limit=0")).status_code == 400


async def test_what_is_no_upload_is_refused() -> None:
    async with serving_http(ChatEngine("Fine.")) as serve:
        post = serve.client.post
        assert (await post("/v1/files", json={"purpose": "batch"})).status_code == 415
        assert (await post("/v1/files", files={"file": b"x"})).json()["error"]["param"] == "purpose"
        assert (await post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"})).json()["error"]["param"] == "file"
        head = {"content-type": "multipart/form-data; boundary=b"}
        for body in (b"--b\r\nno header\r\n\r\nx", b"", b"--b"):
            told = await post("/v1/files", content=body, headers=head)
            assert told.status_code == 400, body
        assert (await post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data"})).status_code == 400


@pytest.mark.parametrize(
    ("content", "wrong", "line"),
    [
        (b"", "0 requests are not 1 to 50000", None),
        (lines_of([CHAT]) + b"{", "no JSON", 2),
        (lines_of([CHAT]) * 2, "custom_id 'r0' is that of an earlier line", 2),
        (lines_of([CHAT], "/v1/embeddings"), "is not one of /v1/chat/completions", 1),
        (lines_of([{**CHAT, "stream": True}]), "body.stream is true", 1),
        (b"[]\n", "not an object", 1),
        (b"\xff\n", "no JSON", 1),
    ],
)
async def test_a_file_of_no_requests_fails_the_batch(content: bytes, wrong: str, line: int | None) -> None:
    async with serving_http(ChatEngine("Fine.")) as serve, client_of(serve) as client:
        batch = await batch_of(client, content)
        assert (batch.status, batch.request_counts.total) == ("failed", 0)
        (error,) = batch.errors.data
        assert wrong in error.message
        assert error.line == line
        assert (await client.batches.retrieve(batch.id)).status == "failed"


async def test_what_is_no_batch_is_refused() -> None:
    async with serving_http(ChatEngine("Fine.")) as serve:
        body = {"input_file_id": "file-none", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        assert (await serve.post("/v1/batches", body)).status_code == 404
        for change in ({"endpoint": "/v1/models"}, {"completion_window": "1h"}, {"metadata": {"a": 1}}, {"nothing": 1}):
            told = await serve.post("/v1/batches", {**body, **change})
            assert (told.status_code, told.json()["error"]["param"]) == (400, next(iter(change)))


async def test_one_that_is_cancelled_says_what_has_no_answer() -> None:
    bodies = [{**CHAT, "max_tokens": 2}, *[{**CHAT, "max_tokens": 100_000} for _ in range(3)]]
    async with demo() as engine, serving_http(engine) as serve, client_of(serve) as client:
        batch = await batch_of(client, lines_of([{**body, "max_tokens": min(body["max_tokens"], 400)} for body in bodies]))
        running = serve.server._http._files.batches.running[batch.id]  # type: ignore[union-attr]
        await running.changed.wait()
        told = await client.batches.cancel(batch.id)
        assert told.status == "cancelled"
        assert told.cancelled_at
        assert told.request_counts.completed >= 1
        assert engine.stats().running == 0
        lost = await answers(client, told.error_file_id)
        assert {line["error"]["code"] for line in lost.values()} == {"batch_cancelled"}
        assert len(lost) + told.request_counts.completed == 4
        assert (await client.batches.cancel(batch.id)).status == "cancelled", "it stays as it is"


async def test_others_see_neither_files_nor_batches(tmp_path: pathlib.Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ann first-token\nbob second-token\n")
    async with (
        serving_http(ChatEngine("Fine."), token_file=str(tokens)) as serve,
        client_of(serve, "first-token") as ann,
        client_of(serve, "second-token") as bob,
    ):
        batch = await batch_of(ann, lines_of([CHAT]))
        batch = await ended(ann, batch, serve)
        assert [one async for one in bob.files.list()] == [one async for one in bob.batches.list()] == []
        for asked in (bob.files.content(batch.output_file_id), bob.batches.retrieve(batch.id), bob.batches.cancel(batch.id)):
            with pytest.raises(openai.NotFoundError):
                await asked
        with pytest.raises(openai.NotFoundError):
            await bob.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h")
        assert len(await answers(ann, batch.output_file_id)) == 1


async def test_a_journal_without_room_refuses(tmp_path: pathlib.Path) -> None:
    async with serving_http(ChatEngine("Fine."), journal=str(tmp_path), journal_size=1 << 16) as serve, client_of(serve) as client:
        with pytest.raises(openai.InternalServerError, match="bytes more than the journal may have"):
            await client.files.create(file=("big", b"x" * (1 << 17)), purpose="batch")
        file = await client.files.create(file=("in.jsonl", lines_of([{**CHAT, "user": "x" * 57_500}])), purpose="batch")
        with pytest.raises(openai.InternalServerError, match="the batch cannot be stored"):
            await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert await serve.server.core.journal.unfinished("batch_") == []


async def test_it_goes_on_in_the_next_process(tmp_path: pathlib.Path) -> None:
    """A server that ends leaves a batch as it is; the next one has what was answered, and answers the rest with the same tokens."""
    bodies = [{**CHAT, "temperature": 1.0, "max_tokens": 30} for _ in range(6)]
    told: list[dict[str, Any]] = []
    for is_cut in (False, True):
        folder = str(tmp_path / str(is_cut))
        async with demo() as engine:
            async with serving_http(engine, journal=folder) as serve, client_of(serve) as client:
                batch = await batch_of(client, lines_of([{**body, "seed": index} for index, body in enumerate(bodies)]))
                running = serve.server._http._files.batches.running[batch.id]  # type: ignore[union-attr]
                if is_cut:
                    await running.changed.wait()
                else:
                    batch = await ended(client, batch, serve)
            async with serving_http(engine, journal=folder) as serve, client_of(serve) as client:
                if is_cut:
                    assert serve.server._http is not None
                    await serve.server._http._files.batches._resuming  # type: ignore[misc]
                    running = serve.server._http._files.batches.running[batch.id]
                    assert 0 < len(running.answered) < 6, "what had an answer is not asked again"
                batch = await ended(client, batch, serve)
                assert (batch.status, batch.request_counts.completed) == ("completed", 6)
                told.append(
                    {name: line["response"]["body"]["choices"] for name, line in (await answers(client, batch.output_file_id)).items()}
                )
                journal = serve.server.core.journal
                assert await journal.list_parts(batch.id) == [], "its parts are gone"
                assert not journal._followed
                assert await journal._run(journal._written, f"{batch.id}/00000000") == []
    assert told[0] == told[1]
