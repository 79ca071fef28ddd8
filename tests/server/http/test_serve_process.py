"""`aengine-serve` as a process."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys

import pytest
from http_harness import request_bytes
from server_process import server_process

pytestmark = pytest.mark.anyio

PROGRAM = (sys.executable, "-c", "import sys; from aengine.server.cli import serve_http; sys.exit(serve_http())")
LISTENING = re.compile(r"aengine-serve listening on http://(127\.0\.0\.1:\d+) \(model demo\)")


@pytest.mark.slow
async def test_sigterm_drains() -> None:
    with server_process(program=PROGRAM, listening=LISTENING) as server:
        host, port = server.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 600, "ignore_eos": True, "stream": True}
        writer.write(request_bytes("/v1/chat/completions", body))
        await reader.readuntil(b"}\n\n")
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.wait_for, "draining 1 requests")
        other, late = await asyncio.open_connection(host, int(port))
        late.write(request_bytes("/v1/chat/completions", body))
        assert (await other.readline()).startswith(b"HTTP/1.1 503 ")
        rest = await reader.readuntil(b"[DONE]\n\n")
        last = json.loads(rest.split(b"data: ")[-2].split(b"\n")[0])
        assert last["choices"][0]["finish_reason"] == "length"
        assert await asyncio.to_thread(server.end) == 0
        assert "aengine-grpc" not in "".join(server.log)
        writer.close()
        late.close()
