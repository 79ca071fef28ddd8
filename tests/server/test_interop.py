"""Clients that share no code with this server: Node's own HTTP/2 stack, and buf's Go client, which knows only reflection."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import TIMEOUT, ServerProcess, server_process

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as running:
        yield running


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """tools/node_modules; without it the test is skipped for a user and fails in CI."""
    missing = "node is not installed" if shutil.which("node") is None else ""
    if not (TOOLS / "node_modules").is_dir():
        missing = missing or "tools/node_modules is absent; run `npm ci` in tools/"
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    return TOOLS / "node_modules"


def run(*command: str | Path) -> str:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def json_stream(text: str) -> list[Any]:
    decoder, values, position = json.JSONDecoder(), [], 0
    while text[position:].strip():
        position += len(text[position:]) - len(text[position:].lstrip())
        value, position = decoder.raw_decode(text, position)
        values.append(value)
    return values


def check_events(events: list[Any], num_tokens: int) -> None:
    kinds = [next(kind for kind in ("started", "delta", "sequenceFinished", "finished") if kind in event) for event in events]
    assert kinds == ["started", *["delta"] * num_tokens, "sequenceFinished", "finished"]
    assert [int(event.get("eventNumber", 0)) for event in events] == list(range(num_tokens + 3))
    assert events[-2]["sequenceFinished"]["finish"]["reason"] == "FINISH_REASON_MAX_TOKENS"
    assert events[-1]["finished"]["usage"]["completionTokens"] == num_tokens
    assert "".join(event["delta"].get("text", "") for event in events[1:-2])


@pytest.mark.usefixtures("node_modules")
def test_node_streams(server: ServerProcess) -> None:
    output = run("node", TOOLS / "node_client.mjs", server.address, "It is a truth universally", "4")
    check_events([json.loads(line) for line in output.splitlines()], 4)


def test_buf_curl_lists_services_and_streams(server: ServerProcess, node_modules: Path) -> None:
    curl = (node_modules / ".bin" / "buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge")
    methods = run(*curl, "--list-methods", f"http://{server.address}").split()
    assert {
        "aengine.v1.GenerationService/CancelRequests",
        "aengine.v1.GenerationService/Generate",
        "aengine.v1.GenerationService/StreamGenerate",
        "aengine.v1.ModelService/GetModel",
        "grpc.health.v1.Health/Watch",
    } <= set(methods)
    body = json.dumps({"spec": {"prompt": {"text": "It was"}, "stopping": {"maxTokens": 4, "ignoreEos": True}}})
    output = run(*curl, "-d", body, f"http://{server.address}/aengine.v1.GenerationService/StreamGenerate")
    check_events([response["event"] for response in json_stream(output)], 4)


def test_buf_curl_shows_the_violations(server: ServerProcess, node_modules: Path) -> None:
    curl = (node_modules / ".bin" / "buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge")
    url = f"http://{server.address}/aengine.v1.GenerationService/Generate"
    command = [*map(str, curl), "-d", '{"spec": {"sampling": {"topP": 7}}}', url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode != 0
    assert "spec.sampling.top_p" in result.stderr
    assert "invalid_argument" in result.stderr


def test_the_example_streams(server: ServerProcess) -> None:
    output = run(sys.executable, "examples/grpc_client.py", "It is a truth universally", "--address", server.address, "--max-tokens", "4")
    assert output.startswith("It is a truth universally")
    assert re.search(r"\[FINISH_REASON_(MAX_TOKENS|EOS), [1-4] tokens in \d+ ms\]", output)
