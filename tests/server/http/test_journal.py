"""Responses that are stored: what a journal keeps and drops, and what a server that is killed goes on with."""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
import re
import sqlite3
import sys
from typing import Any

import httpx2
import pytest
from chat_engine import ChatEngine
from http_harness import serving_http
from server_process import server_process

from aengine.api.errors import ConfigError
from aengine.server.core.calls_in_flight import Caller
from aengine.server.core.journal import ENTRY_BYTES, Journal, StoredAnswer

pytestmark = pytest.mark.anyio

NOW = 2e9  # far ahead, so that nothing is too old
PROGRAM = (sys.executable, "-c", "import sys; from aengine.server.cli import serve_http; sys.exit(serve_http())")
LISTENING = re.compile(r"aengine-serve listening on http://(127\.0\.0\.1:\d+) \(model demo\)")


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


class Reader:
    """Reads the events of responses, over one server after the other."""

    def __init__(self) -> None:
        self.seen: dict[str, list[dict[str, Any]]] = {}
        self.enough = asyncio.Event()
        self.left = 0  # events until there are enough

    async def begin(self, address: str, request_id: str) -> None:
        """Begin a response, and leave it."""
        body = {"input": "Once", "max_output_tokens": 300, "ignore_eos": True, "seed": 7, "request_id": request_id}
        async with (
            httpx2.AsyncClient(base_url=f"http://{address}", timeout=60) as client,
            client.stream("POST", "/v1/responses", json={**body, "background": True, "stream": True}) as response,
        ):
            assert response.status_code == 200
            await anext(response.aiter_raw())
        self.seen[f"resp_{request_id}"] = []

    async def read(self, address: str, name: str) -> None:
        """Read what comes behind the events that were seen."""
        seen, left = self.seen[name], b""
        async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
            path = f"/v1/responses/{name}?stream=true&starting_after={len(seen) - 1}"
            async with client.stream("GET", path) as response:
                assert response.status_code == 200, await response.aread()
                async for data in response.aiter_raw():
                    *events, left = (left + data).split(b"\n\n")
                    seen += [json.loads(event.split(b"data: ")[1]) for event in events]
                    self.left -= len(events)
                    if self.left <= 0:
                        self.enough.set()


@pytest.mark.slow
async def test_kills(tmp_path: pathlib.Path) -> None:
    """A server is killed at random moments, again and again: its clients miss nothing, and read what they would have read."""
    rng, reader = random.Random(3), Reader()
    for turn in range(4):
        reader.enough.clear()
        reader.left = rng.randint(0, 700)
        with server_process("--journal", str(tmp_path), program=PROGRAM, listening=LISTENING) as server:
            for index in range(3 if turn < 3 else 0):
                await reader.begin(server.address, f"r{turn}-{index}")
            reading = [asyncio.create_task(reader.read(server.address, name)) for name in reader.seen]
            if turn < 3:
                ended = asyncio.gather(*reading, return_exceptions=True)
                waiting = asyncio.create_task(reader.enough.wait())
                await asyncio.wait((ended, waiting), return_when=asyncio.FIRST_COMPLETED)
                server.process.kill()
                waiting.cancel()
                await ended
            else:
                await asyncio.gather(*reading)
    assert len(reader.seen) == 9
    texts = set()
    for name, events in reader.seen.items():
        assert [event["sequence_number"] for event in events] == list(range(len(events))), name
        assert events[-1]["type"] == "response.incomplete", name
        assert events[-1]["response"]["usage"]["output_tokens"] == 300
        texts.add("".join(event["delta"] for event in events if event["type"] == "response.output_text.delta"))
    assert len(texts) == 1
