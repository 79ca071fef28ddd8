"""OpenAI's client for Node against the HTTP door with the demo model: what it prints is what Python's door says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from foreign_clients import TOOLS, require_clients
from http_harness import serving_http
from oracle_engine import until
from records_seen import Seen, watch

from aengine import AsyncEngine, SamplingParams

pytestmark = pytest.mark.anyio


async def test_openais_client_for_node() -> None:
    require_clients("openai")
    chat, seen = [{"role": "user", "content": "How do you do?"}], Seen()
    async with AsyncEngine("demo", kv_cache_memory=64 << 20) as engine, serving_http(engine) as serve:
        watch(serve.server.core.observers, seen)
        expected = await engine.generate(chat, SamplingParams(seed=1, max_tokens=12))
        address = f"http://{serve.server.http_address}/v1"
        command = ["node", str(TOOLS / "openai_client.mjs"), address]
        program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
        output, trouble = await program.communicate()
        assert program.returncode == 0, trouble.decode()
        await until(lambda: serve.server.in_flight == 0)
        assert engine.stats().completion_tokens < 1500, "the stream that is left is cancelled"
    said: list[tuple[str, Any]] = [pair for line in output.decode().splitlines() for pair in json.loads(line).items()]
    found = dict(said)
    assert found["models"] == ["demo"]
    assert found["whole"]["content"] == found["streamed"]["content"] == expected.text
    assert (
        found["whole"]["usage"]["completion_tokens"] == found["streamed"]["usage"]["completion_tokens"] == found["whole"]["logprobs"] == 12
    )
    assert found["whole"]["request_id"]
    assert found["called"]["name"] == "weather"
    assert [found["called"]["arguments"]] == found["called"]["events"]
    assert found["parsed"]["city"] in ("Bath", "York")
    assert (found["response"]["status"], found["response"]["kinds"][-1]) == ("incomplete", "response.incomplete")
    assert found["response"]["output"]
    assert found["embedding"] == [8, 8]
    assert [(error["kind"], error["param"], error["code"]) for name, error in said if name == "error"] == [
        ("NotFoundError", None, "model_not_found"),
        ("BadRequestError", "temperature", "invalid_field"),
        ("BadRequestError", "messages[0].content", "invalid_field"),
    ]
    assert (found["endless"], found["aborted"]) == ("refused", True)
    assert seen.calls[-1].code == "499"
