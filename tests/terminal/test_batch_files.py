"""`aengine-batch`: every request of a file is answered once, however often the program is interrupted and whichever server dies."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from http_harness import serving_http

from aengine import AsyncEngine
from aengine.api.errors import ConnectionLostError
from aengine.client.openai import HttpConfig, HttpServer
from aengine.terminal.batch import BatchLine, answer_all, main

COUNT = 60


def line_of(number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": [5 + number, 7], "max_tokens": 30 + number, "seed": number, "ignore_eos": True, **fields}
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, lines: Sequence[Any]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """By id, what was answered."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines)
    assert all(line["error"] is None and line["id"] for line in lines)
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["body"]["choices"][0]["text"])


def test_all_kinds_and_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, found = tmp_path / "in", tmp_path / "out"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "b", "url": "/v1/responses", "body": {"input": "hi", "max_output_tokens": 3}},
        {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": "hi"}},
        {"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "hi", "temperature": -1}},
    ]
    write(given, lines)
    assert main([str(given), str(found), "--kv-cache-memory", "32MiB"]) == 1
    assert capsys.readouterr().err.endswith("4 requests: 3 answered, 1 refused\n")
    answers = read(found)
    assert [answers[name]["status_code"] for name in "abcd"] == [200, 200, 200, 400]
    assert answers["a"]["body"]["object"] == "chat.completion"
    assert answers["d"]["body"]["error"]["param"] == "temperature"
    assert all(answer["request_id"] for answer in answers.values())
    before = found.read_bytes()
    assert main([str(given), str(found)]) == 0
    assert found.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2: no JSON"),
        ("[]", "line 2: not an object"),
        ({"url": "/v1/completions", "body": {}}, "line 2: custom_id is not"),
        ({"custom_id": "x", "url": "/v1/other", "body": {}}, "line 2: url '/v1/other' is not one of"),
        ({"custom_id": "x", "url": "/v1/completions"}, "line 2: body is not an object"),
        ({"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}, "line 2: method is not POST"),
        ({"custom_id": "x", "url": "/v1/completions", "body": {"stream": True}}, "line 2: body.stream is true"),
        (line_of(0), "line 2: custom_id 'request-0' is that of an earlier line"),
    ],
)
def test_files_that_are_none(line: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(f"{json.dumps(line_of(0))}\n{line if isinstance(line, str) else json.dumps(line)}\n")
    assert main([str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_answers_of_others_are_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", [line_of(0)])
    for content in ('{"custom_id": "other"}\n', "some text\n"):
        (tmp_path / "out").write_text(content)
        assert main([str(tmp_path / "in"), str(tmp_path / "out")]) == 1
        assert "line 1" in capsys.readouterr().err
        assert (tmp_path / "out").read_text() == content


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """After Ctrl-C, and after a line that was not written to its end."""
    given, found, whole = tmp_path / "in", tmp_path / "out", tmp_path / "whole"
    write(given, [line_of(number) for number in range(COUNT)])
    assert main([str(given), str(whole), "--quiet", "--kv-cache-memory", "32MiB"]) == 0
    command = [sys.executable, "-m", "aengine.terminal.batch", str(given), str(found), "--at-once", "2", "--kv-cache-memory", "32MiB"]
    for least in (3, 20):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as child:
            while not found.exists() or found.read_bytes().count(b"\n") < least:
                assert child.poll() is None
            child.send_signal(signal.SIGINT)
        assert child.returncode == 130
        assert least <= len(read(found)) < COUNT
        with open(found, "ab") as file:
            file.write(b'{"id": "batch_req_1", "custom_id": "reque')
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    answers, expected = read(found), read(whole)
    assert {name: text_of(answer) for name, answer in answers.items()} == {name: text_of(answer) for name, answer in expected.items()}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_servers_that_die(anyio_backend: str) -> None:
    """What one of them had is answered by the other; where none is left, that is said."""
    lines = [BatchLine(str(number), "/v1/completions", line_of(number)["body"]) for number in range(COUNT)]
    async with AsyncEngine("demo", kv_cache_memory="32MiB") as engine, serving_http(engine) as first, serving_http(engine) as second:
        servers = [HttpServer(HttpConfig(address=f"http://{serve.server.http_address}")) for serve in (first, second)]
        file, seen = io.BytesIO(), list[int]()
        assert await answer_all(lines[:20], servers, file, 8, seen.append) == {200: 20}
        await first.server.stop()
        assert await answer_all(lines[20:], servers, file, 8, seen.append) == {200: COUNT - 20}
        found = [json.loads(line)["custom_id"] for line in file.getvalue().splitlines()]
        assert sorted(found, key=int) == [line.custom_id for line in lines]
        await second.server.stop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("aengine.terminal.batch.MOST_TRIES", 2)
            with pytest.raises(ConnectionLostError, match="cannot be reached"):
                await answer_all(lines, servers, file, 8, seen.append)
