"""Who may call what: tokens, administrators, and files of tokens that change."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from certificates import replace
from fake_engine import FakeEngine, tokens
from grpc import aio
from grpc_harness import Failure, Serving, events_of, failure_of, serving, stream_request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine, StepGate
from raw_h2 import GENERATION, raw_connection

from aengine.api.errors import ConfigError
from aengine.server.app import Server
from aengine.server.core import auth
from aengine.server.core.auth import TokenFile
from aengine.v1.admin_service_pb2 import ContinueGenerationRequest
from aengine.v1.admin_service_pb2_grpc import AdminServiceStub
from aengine.v1.model_service_pb2 import GetModelRequest

pytestmark = pytest.mark.anyio

DENIED = (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_ONLY")
MISSING = (grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIALS")
BAD = (grpc.StatusCode.UNAUTHENTICATED, "BAD_CREDENTIALS")


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def fate(call: Awaitable[object]) -> tuple[grpc.StatusCode, str] | None:
    """Code and reason of a call that fails, None of one that does not."""
    try:
        await call
    except aio.AioRpcError as error:
        failure: Failure = failure_of(error)
        return failure.code, failure.reason
    return None


async def model(serve: Serving, metadata: tuple[tuple[str, str], ...] = ()) -> tuple[grpc.StatusCode, str] | None:
    return await fate(serve.model.GetModel(GetModelRequest(), metadata=metadata))


async def admin(serve: Serving, metadata: tuple[tuple[str, str], ...] = ()) -> tuple[grpc.StatusCode, str] | None:
    return await fate(AdminServiceStub(serve.channel).ContinueGeneration(ContinueGenerationRequest(), metadata=metadata))


async def eventually(happened: Callable[[], Awaitable[bool]]) -> None:
    """The files are looked at once in a while."""
    end = time.monotonic() + HANG_SECONDS
    while not await happened():
        assert time.monotonic() < end


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# who calls\nalice  token-of-alice\n\ntoken-of-nobody  # no name\n")
    return path


@pytest.fixture
def admin_file(tmp_path: Path) -> Path:
    path = tmp_path / "admins"
    path.write_text("root token-of-root\n")
    return path


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tokens("a"))


async def test_every_call_needs_a_token_but_health(engine: FakeEngine, token_file: Path) -> None:
    async with serving(engine, token_file=str(token_file)) as serve:
        assert await model(serve) == MISSING
        for wrong in ("token-of-alic", "token-of-alice2", "TOKEN-OF-ALICE", "", "alice"):
            assert await model(serve, bearer(wrong)) == BAD
        assert await model(serve, (("authorization", "Basic token-of-alice"),)) == BAD
        assert await model(serve, bearer("token-of-alice") + bearer("token-of-alice")) == BAD
        for good in ("Bearer token-of-alice", "bearer token-of-nobody"):
            assert await model(serve, (("authorization", good),)) is None
            assert len(await events_of(serve.generation.StreamGenerate(stream_request(), metadata=(("authorization", good),)))) == 4
        assert await fate(events_of(serve.generation.StreamGenerate(stream_request()))) == MISSING
        health = await health_pb2_grpc.HealthStub(serve.channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_needs_a_token(engine: FakeEngine, token_file: Path) -> None:
    async with serving(engine, token_file=str(token_file)) as serve:
        stub = reflection_pb2_grpc.ServerReflectionStub(serve.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        assert await fate(stub.ServerReflectionInfo(iter([request])).read()) == MISSING
        call = stub.ServerReflectionInfo(iter([request]), metadata=bearer("token-of-alice"))
        assert (await call.read()).HasField("list_services_response")


async def test_a_stranger_is_refused_before_the_message_is_read(engine: FakeEngine, token_file: Path) -> None:
    async with serving(engine, token_file=str(token_file)) as serve, raw_connection(serve.server.address) as connection:
        call = await connection.call(GENERATION + "Generate", end=False)  # headers alone
        await call.wait_end()
        assert call.status == grpc.StatusCode.UNAUTHENTICATED.value[0]


async def test_without_administrators_nobody_is_one(engine: FakeEngine, token_file: Path) -> None:
    async with serving(engine) as serve:
        assert await admin(serve) == DENIED
    async with serving(engine, token_file=str(token_file)) as serve:
        assert await admin(serve, bearer("token-of-alice")) == DENIED


async def test_an_administrators_token_is_good_for_everything(engine: FakeEngine, token_file: Path, admin_file: Path) -> None:
    async with serving(engine, token_file=str(token_file), admin_token_file=str(admin_file)) as serve:
        assert await admin(serve) == MISSING
        assert await admin(serve, bearer("guess")) == BAD
        assert await admin(serve, bearer("token-of-alice")) == DENIED
        assert await admin(serve, bearer("token-of-root")) is None
        assert await model(serve, bearer("token-of-root")) is None


async def test_administrators_can_be_all_who_need_a_token(engine: FakeEngine, admin_file: Path) -> None:
    async with serving(engine, admin_token_file=str(admin_file)) as serve:
        assert await model(serve) is None
        assert await model(serve, bearer("from-a-client-that-always-sends-one")) is None
        assert await admin(serve) == MISSING
        assert await admin(serve, bearer("from-a-client-that-always-sends-one")) == BAD
        assert await admin(serve, bearer("token-of-root")) is None


async def test_tokens_change_with_their_file(
    engine: FakeEngine, token_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "RELOAD_SECONDS", 0.05)
    async with serving(engine, token_file=str(token_file)) as serve:

        async def new_one_is_good() -> bool:
            return await model(serve, bearer("brand-new")) is None

        assert await model(serve, bearer("brand-new")) == BAD
        replace(token_file, b"bob brand-new\n")
        await eventually(new_one_is_good)
        assert await model(serve, bearer("token-of-alice")) == BAD
        with caplog.at_level(logging.ERROR):
            replace(token_file, b"much too many words\n")
            await eventually(lambda: logged(caplog, serve, "line 1 is not"))
            os.remove(token_file)
            await eventually(lambda: logged(caplog, serve, "No such file"))
        assert await new_one_is_good()
        assert "words" not in caplog.text
        replace(token_file, b"# nobody\n")
        await eventually(lambda: locked_out(serve, "brand-new"))
        assert await model(serve) == MISSING, "it is not open either"


async def locked_out(serve: Serving, token: str) -> bool:
    return await model(serve, bearer(token)) == BAD


async def logged(caplog: pytest.LogCaptureFixture, serve: Serving, text: str) -> bool:
    await model(serve)
    return text in caplog.text


async def test_a_server_does_not_start_without_its_tokens(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        await Server(engine, port=0, token_file=str(tmp_path / "none")).start()  # type: ignore[arg-type]
    assert caught.value.field == "token_file"


@pytest.mark.parametrize("content", [b"", b"# none\n", b"a b c\n", b"a \xff\xfe\n", "a t\u00f6ken\n".encode()])
def test_a_file_that_is_none_is_refused_without_quoting_it(content: bytes, token_file: Path) -> None:
    file = TokenFile("token_file", str(token_file))
    file.load()
    token_file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        file.load()
    assert "ken" not in str(caught.value).replace("token", "")
    assert file.find("token-of-alice") == "alice"


def test_a_file_is_read_again_only_when_it_has_changed(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = TokenFile("token_file", str(token_file))
    file.load()
    for _ in range(3):
        file.refresh()
    assert not caplog.records
    status = token_file.stat()
    replace(token_file, b"alice  token-of-ALICE\n".ljust(status.st_size))
    os.utime(token_file, ns=(status.st_atime_ns, status.st_mtime_ns))  # neither time nor size tell
    for _ in range(3):
        file.refresh()
    assert [record.message for record in caplog.records] == [f"token_file: read 1 tokens from {token_file}"]
    assert (file.find("token-of-ALICE"), file.find("token-of-alice")) == ("alice", None)
    assert file.find("token-of-nobody") is None


def test_a_token_without_a_name_is_told_by_its_line(token_file: Path) -> None:
    file = TokenFile("token_file", str(token_file))
    file.load()
    assert file.find("token-of-nobody") == "line-4"


async def test_requests_count_for_their_caller(token_file: Path) -> None:
    """For whose share, unless they say so, and for whose limits."""
    engine = FakeEngine()
    async with serving(engine, token_file=str(token_file), max_sequences_per_caller=3) as serve:

        def begin(sequences: int, **fields: Any) -> Any:
            request = stream_request(**fields)
            request.spec.sampling.n = sequences
            return serve.generation.StreamGenerate(request, metadata=bearer("token-of-alice"))

        calls = [begin(2), begin(1, tenant="mine")]
        tenants = {(await engine.submitted.get()).call["tenant"] for _ in calls}
        assert tenants == {"alice", "mine"}
        assert await fate(events_of(begin(1))) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        for call in calls:
            call.cancel()


async def test_only_its_caller_forks_a_request(token_file: Path) -> None:
    """While it runs, and when it has ended, also where another caller has used its id since."""
    async with OracleEngine() as engine, serving(engine, token_file=str(token_file)) as serve:

        def begin(caller: str, fork: bool, request_id: str | None) -> Any:
            request = stream_request(request_id=request_id)
            if fork:
                request.spec.prompt.fork.request_id, request.spec.prompt.fork.at = "x", 2
            else:
                request.spec.prompt.token_ids.ids.extend([1] * 6)
            request.spec.sampling.seed, request.spec.stopping.max_tokens = 3 + (caller != "alice"), 9
            return serve.generation.StreamGenerate(request, metadata=bearer(f"token-of-{caller}"))

        call = begin("alice", False, "x")
        for _ in range(4):  # its beginning, and some tokens
            await call.read()
        for has_ended in (False, True):
            if has_ended:
                while await call.read() is not grpc.aio.EOF:
                    pass
            events = await events_of(begin("alice", True, None))
            assert (events[0].started.num_known_tokens, events[-1].finished.usage.completion_tokens) == (2, 9)
            assert await fate(events_of(begin("nobody", True, None))) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        await events_of(begin("nobody", False, "x"))
        assert await fate(events_of(begin("alice", True, None))) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert len(await events_of(begin("nobody", True, None))) > 2


async def test_prompts_that_wait_count_for_their_caller(token_file: Path) -> None:
    """Over all doors, until a request has a token; one alone may be longer."""
    async with (
        OracleEngine() as engine,
        serving(engine, token_file=str(token_file), http_port=0, max_waiting_tokens_per_caller=100) as serve,
        httpx2.AsyncClient(base_url=f"http://{serve.server.http_address}", timeout=None) as http,
    ):
        gate, seeds = StepGate(engine), itertools.count()  # by which the oracle tells requests apart

        def begin(length: int, caller: str = "alice") -> Any:
            request = stream_request()
            request.spec.prompt.token_ids.ids.extend([1] * length)
            request.spec.sampling.seed, request.spec.stopping.max_tokens = next(seeds), 3
            return serve.generation.StreamGenerate(request, metadata=bearer(f"token-of-{caller}"))

        async def begun(call: Any) -> Any:
            assert (await call.read()).event.HasField("started")
            return call

        first, other = await begun(begin(60)), await begun(begin(60, "nobody"))
        with pytest.raises(aio.AioRpcError) as caught:
            await events_of(begin(41))
        failure = failure_of(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        why = "prompt: 60 tokens of the caller wait already, and 41 more are beyond 100 (max_waiting_tokens_per_caller)"
        assert failure.message == why
        body = {"prompt": [1] * 41, "max_tokens": 3, "seed": next(seeds)}
        refused = await http.post("/v1/completions", json=body, headers={"authorization": "Bearer token-of-alice"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (429, why)
        second = await begun(begin(40))
        gate.open()
        for call in (first, other, second):
            while await call.read() is not aio.EOF:
                pass
        assert await fate(events_of(begin(101))) is None
        taken = await http.post("/v1/completions", json=body, headers={"authorization": "Bearer token-of-alice"})
        assert taken.status_code == 200
