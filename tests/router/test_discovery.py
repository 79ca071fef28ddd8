"""Addresses over time: names, files, and what a router makes of their changes."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
from fleets import fleet
from hang_guard import HANG_SECONDS, growing
from oracle_engine import idle, until

from aengine import ConfigError, Router, SamplingParams
from aengine.router.discovery import discover, merged, read_file

pytestmark = pytest.mark.anyio


async def test_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "backends"
    path.write_text("# ours\na:1  # the first\n\nb:2\na:1\n")
    async with aclosing(read_file(path, 0.001)) as found:
        with anyio.fail_after(HANG_SECONDS):
            assert await anext(found) == {"a:1", "b:2"}
            path.write_text("a:1\nb:2\n# the same\n")
            path.write_text("c:3\n")
            assert await anext(found) == {"c:3"}
            path.write_text("c:3\nno address\n")
            async with anyio.create_task_group() as group:

                async def mend() -> None:
                    await until(lambda: "line 2: 'no address'" in caplog.text)
                    path.unlink()
                    await until(lambda: "cannot read" in caplog.text)
                    path.write_text("d:4\n")

                group.start_soon(mend)
                assert await anext(found) == {"d:4"}


async def test_a_file_that_is_wrong_at_first(tmp_path: Path) -> None:
    for text in (None, "a:1\nb\n"):
        path = tmp_path / "backends"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            await anext(read_file(path))
        assert caught.value.field == "backends"


async def test_several_at_once(tmp_path: Path) -> None:
    first, second = anyio.create_memory_object_stream[frozenset[str]](9), anyio.create_memory_object_stream[frozenset[str]](9)

    async def source(receive: object) -> AsyncGenerator[frozenset[str], None]:
        async for one in receive:  # type: ignore[attr-defined]
            yield one

    first[0].send_nowait(frozenset({"a"}))
    second[0].send_nowait(frozenset({"b"}))
    async with aclosing(merged([source(first[1]), source(second[1])])) as found:
        assert await anext(found) == [{"a"}, {"b"}]
        second[0].send_nowait(frozenset())
        assert await anext(found) == [{"a"}, set()]
    async with aclosing(discover(("x:1", "y:2"))) as fixed:
        assert [one async for one in fixed] == [{"x:1", "y:2"}]
    for send, receive in (first, second):
        send.close()
        receive.close()


async def test_a_router_follows(tmp_path: Path) -> None:
    """An address that goes keeps its requests to their end, and gets no others; one that comes is used."""
    path = tmp_path / "backends"
    params = SamplingParams(seed=1, max_tokens=5, ignore_eos=True)
    async with fleet(2) as many:
        one, two = many.members
        path.write_text(one.name)
        async with Router(backends=(f"file:{path}",)) as router:
            stream = router.stream([1], SamplingParams(seed=2, ignore_eos=True))
            await stream.__anext__()
            path.write_text(two.name)
            with anyio.fail_after(HANG_SECONDS):
                await until(lambda: [replica.name for replica in router.replicas()] == [two.name] and router.healthy)
            assert one.busy or idle(one.engine)
            await router.generate([3], params)
            assert two.engine.stats().completion_tokens == 5
            assert len([token async for token in stream]) == 398
            assert two.engine.stats().completion_tokens == 5


async def test_nobody_serves() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        for timeout in growing(0.1):
            with pytest.raises(Exception, match=f"no replica served within {timeout:g} s; {address}") as caught:
                await Router(backends=(address,), connect_timeout=timeout).start()
            if f"{address}: no connection" in str(caught.value):
                break
