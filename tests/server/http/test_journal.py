"""Responses that are stored: what a journal keeps and drops, and what a server that is killed goes on with."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import random
import re
import sqlite3
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from chat_engine import ChatEngine
from grpc import aio
from http_harness import serving_http
from server_process import server_process

from aengine import AsyncEngine, SamplingParams
from aengine.api.errors import ConfigError
from aengine.server.core.calls_in_flight import Caller
from aengine.server.core.journal import ENTRY_BYTES, Journal, StoredAnswer
from aengine.v1.generation_pb2 import GenerationEvent, GenerationSpec, StreamOptions
from aengine.v1.generation_service_pb2 import ResumeGenerateRequest, StreamGenerateRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.anyio

NOW = 2e9  # far ahead, so that nothing is too old


def answer(name: str, owner: str | None = "a", size: int = 1000, *, created: float = NOW, ended: bool = True) -> StoredAnswer:
    return StoredAnswer(name, owner, created, ended, b"{}", b"x" * size)


async def names_in(journal: Journal, *names: str) -> list[str]:
    return [name for name in names if await journal.get_answer(name, Caller()) is not None]


async def test_the_oldest_of_the_owner_who_has_most_is_dropped() -> None:
    journal = Journal(None, 4 * (ENTRY_BYTES + 1002), 1e12)
    await journal.open_file()
    for index, (name, owner) in enumerate([("a0", "a"), ("b0", "b"), ("a1", "a"), ("a2", "a")]):
        await journal.put_answer(answer(name, owner, created=NOW + index))
    await journal.put_answer(answer("b1", "b", created=NOW + 9))
    assert await names_in(journal, "a0", "a1", "a2", "b0", "b1") == ["a1", "a2", "b0", "b1"]
    await journal.put_answer(answer("none", None, 3000, created=NOW + 10))
    assert await names_in(journal, "a1", "a2", "b0", "b1", "none") == ["a2", "b1", "none"]
    with pytest.raises(OSError, match="those that have not ended take"):
        await journal.put_answer(answer("large", "b", 1 << 20, ended=False))
    assert await names_in(journal, "a2", "b1", "none", "large") == ["a2", "b1", "none"], "what failed has changed nothing"
    await journal.close_file()
    await journal.close_file()


async def test_others_see_nothing_and_what_is_old_is_gone() -> None:
    journal = Journal(None, 1 << 20, 60.0)
    await journal.open_file()
    await journal.put_answer(answer("new", "a"))
    await journal.put_answer(answer("old", "a", created=0.0))
    assert await names_in(journal, "new", "old") == ["new"]
    assert await journal.get_answer("new", Caller("a", sees_all=False)) is not None
    assert await journal.get_answer("new", Caller("b", sees_all=False)) is None
    await journal.close_file()


async def test_a_file_is_for_one_process_and_one_user_and_forgets(tmp_path: pathlib.Path) -> None:
    journal, other = (Journal(str(tmp_path / "j"), 1 << 20, 1e12) for _ in range(2))
    await journal.open_file()
    with pytest.raises(ConfigError, match=r"journal: .* another process uses it"):
        await other.open_file()
    await journal.put_answer(StoredAnswer("name", None, NOW, False, b"asked", b"a secret"))
    await journal.put_answer(answer("kept"))
    assert [stored.name for stored in await journal.unfinished("na")] == ["name"]
    files = [path for path in (tmp_path / "j").iterdir() if path.name != "lock"]
    assert any(b"a secret" in path.read_bytes() for path in files)
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    await journal.delete_answer("name")
    assert not any(b"a secret" in path.read_bytes() for path in files if path.exists())
    await journal.close_file()
    again = Journal(str(tmp_path / "j"), 1 << 20, 1e12)
    await again.open_file()
    assert await names_in(again, "name", "kept") == ["kept"]
    await again.close_file()
    (tmp_path / "j" / "journal.sqlite3").write_bytes(b"no database" * 99)
    with pytest.raises(ConfigError, match=r"journal: .* cannot be used: file is not a database"):
        await Journal(str(tmp_path / "j"), 1 << 20, 1e12).open_file()


async def test_a_response_that_cannot_be_stored_comes_all_the_same(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving_http(ChatEngine("Fine."), journal=str(tmp_path)) as serve:
        blocking = sqlite3.connect(tmp_path / "journal.sqlite3")
        blocking.execute("DROP TABLE answers")
        blocking.close()
        response = await serve.post("/v1/responses", {"input": "x"})
        assert (response.status_code, response.json()["store"]) == (200, False)
        assert "a response is not stored" in caplog.text
        refused = await serve.post("/v1/responses", {"input": "x", "background": True})
        assert refused.status_code == 503


async def test_one_that_has_no_room_at_its_end_is_not_made_again(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its events are left out first."""
    body = {"input": "x", "background": True, "stream": True}
    for size, kept in ((256 << 10, True), (64 << 10, False)):
        text = "x" * (60_000 if kept else 80_000)
        async with serving_http(ChatEngine(text), journal=str(tmp_path), journal_size=size) as serve:
            told = await serve.post("/v1/responses", body)
            name = json.loads(told.text.split("\n")[1].removeprefix("data: "))["response"]["id"]
            found = await serve.client.get(f"/v1/responses/{name}")
            assert found.status_code == (200 if kept else 404)
            assert "bytes more than the journal may have" in caplog.text
            if kept:
                assert found.json()["status"] == "completed"
                assert (await serve.client.get(f"/v1/responses/{name}?stream=true")).status_code == 400, "its events had no room"
            await serve.client.request("DELETE", f"/v1/responses/{name}")


async def test_what_is_begun_while_the_server_looks_for_others_runs_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished, may_look = Journal.unfinished, asyncio.Event()

    async def late(self: Journal, start: str) -> list[StoredAnswer]:
        await may_look.wait()
        return await unfinished(self, start)

    monkeypatch.setattr(Journal, "unfinished", late)
    body = {"input": "Once", "background": True, "max_output_tokens": 1500, "ignore_eos": True}
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine, serving_http(engine, journal=str(tmp_path)) as serve:
        name = (await serve.post("/v1/responses", body)).json()["id"]
        assert serve.server._http is not None
        stored = serve.server._http._stored
        begun = stored._running[name]
        may_look.set()
        assert stored._resuming is not None
        await stored._resuming
        assert stored._running == {name: begun}
        assert [one.name for one in await unfinished(serve.server.core.journal, "resp_")] == [name], "it has not failed"
        assert (await serve.client.post(f"/v1/responses/{name}/cancel")).json()["status"] == "cancelled"


class Kills:
    """Clients of one server after the other: stored responses, resumable streams of both doors, and a batch. What each has read so far is
    all that it knows when a server is killed."""

    def __init__(self, rng: random.Random, tokens: int) -> None:
        self.rng, self.tokens = rng, tokens
        self.seen: dict[str, list[bytes]] = {}  # events by stream
        self.grpc_tokens: dict[str, bytes] = {}  # with which those of gRPC are resumed
        self.ended: set[str] = set()
        self.asked: dict[str, dict[str, Any]] = {}  # by stream, but for gRPC's
        self.batch = ""
        self.enough = asyncio.Event()
        self.left = 0  # events until there are enough

    def note(self, name: str, event: bytes) -> None:
        self.seen[name].append(event)
        self.left -= 1
        if self.left <= 0:
            self.enough.set()

    async def begin(self, http: str, grpc_address: str, streams: int, responses: int, lines: int) -> None:
        """Begin so many, and read the first event of each, so that it can be gone on with."""
        async with httpx2.AsyncClient(base_url=http, timeout=120) as client, aio.insecure_channel(grpc_address) as channel:
            for number in range(responses):
                body = {"input": "Once", "max_output_tokens": self.tokens, "ignore_eos": True, "seed": number}
                async with client.stream("POST", "/v1/responses", json={**body, "background": True, "stream": True}) as told:
                    first = await anext(told.aiter_raw())
                response = json.loads(first.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
                self.asked[name := f"/v1/responses/{response}?stream=true&starting_after="] = body
                self.seen[name] = []
            for number in range(streams):
                chat = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": self.tokens, "ignore_eos": True, "seed": number}
                head = {"x-stream-retain": "600"}
                async with client.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}, headers=head) as told:
                    self.asked[name := f"/v1/streams/{told.headers['x-stream-id']}?from="] = chat
                    self.seen[name] = []
            for number in range(streams):
                spec = GenerationSpec(stream=StreamOptions(resumable=True))
                spec.stream.retain.FromSeconds(600)
                spec.prompt.text, spec.stopping.max_tokens, spec.stopping.ignore_eos = "Once", self.tokens, True
                name = f"grpc-{number}"
                call = GenerationServiceStub(channel).StreamGenerate(StreamGenerateRequest(spec=spec, request_id=name))
                first = await anext(aiter(call))
                self.grpc_tokens[name], self.seen[name] = first.event.started.resume_token, []
                call.cancel()
            if lines:
                one = {"method": "POST", "url": "/v1/completions"}
                body = {"prompt": "Once", "max_tokens": 12, "temperature": 1.0}
                written = [json.dumps({**one, "custom_id": f"r{number}", "body": {**body, "seed": number}}) for number in range(lines)]
                told = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": "\n".join(written).encode()})
                asked = {"input_file_id": told.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
                self.batch = (await client.post("/v1/batches", json=asked)).json()["id"]

    async def read(self, http: str, grpc_address: str, name: str) -> None:
        """Read what comes behind the events that were seen, to the end."""
        seen, left = self.seen[name], b""
        if name in self.grpc_tokens:
            async with aio.insecure_channel(grpc_address) as channel:
                asked = ResumeGenerateRequest(request_id=name, resume_token=self.grpc_tokens[name], next_event_number=len(seen))
                async for response in GenerationServiceStub(channel).ResumeGenerate(asked):
                    self.note(name, response.event.SerializeToString())
                self.ended.add(name)
                return
        number = len(seen) - ("responses" in name)
        async with (
            httpx2.AsyncClient(base_url=http, timeout=120) as client,
            client.stream("GET", f"{name}{number}") as told,
        ):
            assert told.status_code == 200, await told.aread()
            async for data in told.aiter_raw():
                *events, left = (left + data).split(b"\n\n")
                for event in events:
                    if not event.startswith(b":"):
                        self.note(name, event)
        self.ended.add(name)

    async def cut(self, http: str, grpc_address: str, name: str) -> None:
        """Read, and lose the connection at times."""
        while name not in self.ended:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.read(http, grpc_address, name), self.rng.uniform(0.5, 4.0))

    async def check(self, http: str, engine: AsyncEngine) -> None:
        """Nothing is lost and nothing doubled: events are numbered through, and the text is that of one that was never cut."""
        async with httpx2.AsyncClient(base_url=http, timeout=120) as client:
            for name, events in self.seen.items():
                if name in self.grpc_tokens:
                    told = [GenerationEvent.FromString(event) for event in events]
                    assert [event.event_number for event in told] == list(range(len(told))), name
                    assert [event.delta.token_offset for event in told[1:-2]] == list(range(self.tokens)), name
                    params = SamplingParams(max_tokens=self.tokens, ignore_eos=True, seed=told[0].started.seed)
                    assert "".join(event.delta.text for event in told) == (await engine.generate("Once", params)).text
                    assert told[-1].HasField("finished")
                elif "responses" in name:
                    data = [json.loads(event.split(b"data: ")[1]) for event in events]
                    assert [one["sequence_number"] for one in data] == list(range(len(data))), name
                    text = "".join(one["delta"] for one in data if one["type"] == "response.output_text.delta")
                    whole = (await client.post("/v1/responses", json=self.asked[name])).json()
                    assert text == whole["output"][0]["content"][0]["text"] == data[-1]["response"]["output"][0]["content"][0]["text"]
                    assert data[-1]["response"]["usage"]["output_tokens"] == self.tokens
                else:
                    assert [int(event.split(b"\n")[0].removeprefix(b"id: ")) for event in events] == list(range(len(events))), name
                    chunks = [json.loads(event.split(b"data: ")[1]) for event in events[:-1]]
                    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
                    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
                    whole = (await client.post("/v1/chat/completions", json=self.asked[name])).json()
                    assert text == whole["choices"][0]["message"]["content"]
                    assert (events[-1].split(b"\n")[1], chunks[-1]["choices"][0]["finish_reason"]) == (b"data: [DONE]", "length")


@pytest.mark.slow
async def test_kills(tmp_path: pathlib.Path) -> None:
    """A server is killed at random moments, and connections are cut, again and again: clients miss nothing, read nothing twice, and read
    what they would have read."""
    turns, streams, responses, lines, tokens = (int(one) for one in os.environ.get("KILLS", "8,3,3,40,300").split(","))
    rng = random.Random(3)
    clients = Kills(rng, tokens)
    last: dict[str, Any] = {}
    for turn in range(turns + 1):
        clients.enough.clear()
        clients.left = rng.randint(0, 2 * streams * tokens // turns)
        with server_process("--http-port", "0", "--journal", str(tmp_path), "--drain-seconds", "1", "--no-access-log") as server:
            server.wait_for("aengine-serve listening")
            http = re.search(r"http://\S+", server.log[-1])
            assert http is not None
            if not turn:
                await clients.begin(http[0], server.address, streams, responses, lines)
            reading = [asyncio.create_task(clients.cut(http[0], server.address, name)) for name in clients.seen]
            if turn < turns:
                ended = asyncio.gather(*reading, return_exceptions=True)
                waiting = asyncio.create_task(clients.enough.wait())
                await asyncio.wait((ended, waiting), return_when=asyncio.FIRST_COMPLETED, timeout=rng.uniform(0.0, 3.0))
                server.process.kill()
                waiting.cancel()
                for task in reading:
                    task.cancel()
                await ended
            else:
                await asyncio.gather(*reading)
                async with httpx2.AsyncClient(base_url=http[0], timeout=120) as client:
                    while (last := (await client.get(f"/v1/batches/{clients.batch}")).json())["status"] == "in_progress":  # noqa: ASYNC110
                        await asyncio.sleep(0.2)  # what is waited for is another process
                    content = (await client.get(f"/v1/files/{last['output_file_id']}/content")).text
                async with AsyncEngine("demo", kv_cache_memory=64 << 20) as engine:
                    await clients.check(http[0], engine)
    print(f"{turns} kills, {len(clients.seen)} streams, {sum(map(len, clients.seen.values()))} events, {lines} lines: nothing differs")
    assert (last["status"], last["request_counts"]) == ("completed", {"total": lines, "completed": lines, "failed": 0})
    told = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in map(json.loads, content.splitlines())}
    async with AsyncEngine("demo", kv_cache_memory=64 << 20) as engine:
        for number in range(lines):
            params = SamplingParams(max_tokens=12, temperature=1.0, seed=number)
            assert told[f"r{number}"] == (await engine.generate("Once", params)).text
