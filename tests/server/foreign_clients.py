"""gRPC clients that share no code with this server: Node's own HTTP/2 stack, and buf's Go client, which knows only reflection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from hang_guard import HANG_SECONDS

TOOLS = Path(__file__).resolve().parents[2] / "tools"
BUF_CURL = (str(TOOLS / "node_modules" / ".bin" / "buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge")


class CallFailedError(Exception):
    """The client ended with an exit code of its own; the text is what it said."""


class Client(Protocol):
    """One way to call a server."""

    def command(self, address: str, method: str, requests: Sequence[Any], token: str) -> list[str]:
        """A program that sends `requests` and prints the responses as JSON. `method` is package.Service/Method."""


class Node:
    def command(self, address: str, method: str, requests: Sequence[Any], token: str) -> list[str]:
        body = requests if method.endswith(("/Session", "/ImportKv")) else requests[0]
        return ["node", str(TOOLS / "node_client.mjs"), "--token", token, address, method, json.dumps(body)]


class BufCurl:
    def command(self, address: str, method: str, requests: Sequence[Any], token: str) -> list[str]:
        body = "\n".join(map(json.dumps, requests))
        return [*BUF_CURL, "-H", f"authorization: Bearer {token}", "-d", body, f"http://{address}/{method}"]


CLIENTS: dict[str, Client] = {"node": Node(), "buf": BufCurl()}


@dataclass
class Caller:
    """A client that calls one server."""

    client: Client
    address: str
    token: str

    def call(self, method: str, *requests: Any) -> list[Any]:
        """The responses, when the call has ended with OK. Raises `CallFailedError`."""
        command = self.client.command(self.address, method, requests or ({},), self.token)
        result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
        if result.returncode:
            raise CallFailedError(result.stderr)
        return list(json_stream(result.stdout))

    @contextmanager
    def watch(self, method: str, request: Any) -> Iterator[Iterator[Any]]:
        """The responses as they come, of a call that does not end by itself. Leaving kills the client."""
        command = self.client.command(self.address, method, [request], self.token)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield arriving(process.stdout)
            finally:
                process.kill()


def arriving(lines: Iterator[str]) -> Iterator[Any]:
    """The JSON values of a text, each when its last line has come."""
    text = ""
    for line in lines:
        text += line
        with suppress(json.JSONDecodeError):  # until the value is whole
            yield json.loads(text)
            text = ""


def json_stream(text: str) -> Iterator[Any]:
    decoder, text = json.JSONDecoder(), text.lstrip()
    while text:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].lstrip()


def require_clients(package: str = "") -> None:
    """Without them, and a package of theirs, a test is skipped for a user and fails in CI."""
    missing = "node is not installed" if shutil.which("node") is None else ""
    if not (TOOLS / "node_modules" / package).is_dir():
        missing = missing or "tools/node_modules is absent or old; run `make node`"
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
