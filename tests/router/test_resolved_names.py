"""Addresses of a name, as it comes and goes."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import aclosing
from typing import Any

import pytest

from aengine.router.discovery import resolve

pytestmark = pytest.mark.anyio


async def test_a_name_that_nobody_knows_yet_has_no_addresses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[list[str] | None] = [None, None, ["10.0.0.1"], None, ["10.0.0.1"], ["10.0.0.1", "fd00::2"]]

    async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        assert (host, port) == ("replicas", 50051)
        answer = answers.pop(0)
        if answer is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    with caplog.at_level(logging.WARNING, "aengine"):
        async with aclosing(resolve("replicas", 50051, 0.001)) as found:
            sets = [await anext(found) for _ in range(3)]
    assert sets == [frozenset(), {"10.0.0.1:50051"}, {"10.0.0.1:50051", "[fd00::2]:50051"}]
    assert not answers
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2  # each time that it was lost, and no oftener
    assert "the name replicas cannot be resolved" in warnings[0]
