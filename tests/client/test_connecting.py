"""Finding a server, proving who one is, and saying plainly what went wrong."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
import trio
from grpc import aio
from grpc._cython import cygrpc
from grpc_status import rpc_status
from hang_guard import HANG_SECONDS, growing
from oracle_engine import until
from scripted_server import says, scripted, set_serving, whole_answer

from aengine import ConfigError, ConnectionLostError, EngineStateError, ServerError
from aengine.api.errors import (
    AEngineError,
    ContextLengthError,
    EngineDeadError,
    FieldViolation,
    InvalidRequestError,
    KVCapacityError,
    QueueFullError,
    RequestIdInUseError,
)
from aengine.client import AsyncClient, ClientConfig
from aengine.client.link import CHANNEL_OPTIONS, read_error, read_failure
from aengine.server.core.errors import describe
from aengine.server.grpc.status import to_error, to_status
from aengine.v1.model_service_pb2 import GetModelRequest
from aengine.wire.names import PUSHBACK_KEY

NOBODY = "127.0.0.1:1"


def test_core_knows_every_channel_option() -> None:
    binary = Path(cygrpc.__file__).read_bytes()
    keys = [key for key, _ in CHANNEL_OPTIONS] + ["grpc.ssl_target_name_override", "grpc.default_authority"]
    assert [key for key in keys if key.encode() + b"\0" not in binary] == []


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"address": "localhost"}, ["address"]),
        ({"address": "localhost:65536"}, ["address"]),
        ({"address": ""}, ["address"]),
        ({"address": 50051}, ["address"]),
        ({"token": "two words"}, ["token"]),
        ({"token": "", "connect_timeout": 0, "max_retries": -1}, ["token", "connect_timeout", "max_retries"]),
        ({"tls": ""}, ["tls"]),
        ({"client_cert": "c.pem", "client_key": "k.pem"}, ["client_cert", "client_key"]),
        ({"tls": True, "client_cert": "c.pem"}, ["client_key"]),
        ({"server_name": "a.example"}, ["server_name"]),
        ({"auto_resume": 1}, ["auto_resume"]),
        ({"resume_timeout": 601}, ["resume_timeout"]),
        ({"multiplex": True, "auto_resume": True}, ["multiplex"]),
        ({"retries": 3}, ["retries"]),
    ],
)
def test_configs_that_are_refused(options: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        AsyncClient(**{"address_or_config": options.pop("address", NOBODY), **options})
    assert [violation.field for violation in caught.value.violations] == fields
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize("address", ["localhost:0", "[::1]:50051", "unix:/run/a.sock", "dns:///a.example:80", "10.0.0.1:443"])
def test_addresses(address: str) -> None:
    assert AsyncClient(ClientConfig(address=address), token="secret").config.address == address
    assert "secret" not in repr(ClientConfig(token="secret"))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError([FieldViolation("temperature", "too hot"), FieldViolation("prompt", "too cold"), FieldViolation("other", "x")]),
        RequestIdInUseError([FieldViolation("request_id", "'a' is in use")]),
        ContextLengthError([FieldViolation("max_tokens", "too many")], 10, 12),
        KVCapacityError([FieldViolation("prompt", "too many")], 10, 12),
        QueueFullError("full"),
        EngineStateError("not started"),
        EngineDeadError("No such file or directory: '/home/someone'"),
    ],
)
@pytest.mark.parametrize("answered", [False, True])
def test_the_errors_of_an_engine_arrive_as_they_are(error: AEngineError, answered: bool) -> None:
    from aengine.v1.generation_pb2 import GenerationSpec
    from aengine.wire.request import located

    sent: Exception = error
    if isinstance(error, InvalidRequestError):
        spec = GenerationSpec()
        spec.prompt.chat.SetInParent()
        sent = located(error, spec)
    failure = read_failure(rpc_error(sent, answered=answered), NOBODY)
    for received in (failure.error, read_error(to_error(sent, answered=answered), NOBODY)):
        assert type(received) is type(error)
        assert vars(received) == vars(error)
        if not isinstance(error, InvalidRequestError):
            told = "the engine is dead; the server's log says why" if isinstance(error, EngineDeadError) else str(error)
            assert str(received) == told
    assert failure.temporary == (isinstance(error, EngineStateError) or (isinstance(error, EngineDeadError) and not answered))
    assert (failure.pushback or 0) == (1.0 if isinstance(error, EngineStateError | QueueFullError) else 0)


def test_too_many_calls_are_what_a_full_queue_is() -> None:
    from aengine.server.core.errors import ServiceError

    failure = read_failure(rpc_error(ServiceError("TOO_MANY_CALLS", "8192 calls are under way")), NOBODY)
    assert (type(failure.error), str(failure.error), failure.pushback) == (QueueFullError, "8192 calls are under way", 1.0)


def test_a_bug_of_the_server_has_an_incident() -> None:
    failure = read_failure(rpc_error(KeyError("secret")), NOBODY)
    error = failure.error
    assert isinstance(error, ServerError)
    assert (error.code, error.reason) == ("INTERNAL", "BUG")
    in_session = read_error(to_error(KeyError("secret")), NOBODY)
    assert isinstance(in_session, ServerError)
    assert (in_session.code, in_session.reason) == ("INTERNAL", "BUG")
    assert in_session.incident_id is not None
    assert error.incident_id is not None
    assert error.incident_id in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize("details", [b"\xff\xff\xff", b""])
def test_details_of_others_are_not_trusted(details: bytes) -> None:
    metadata = aio.Metadata(("grpc-status-details-bin", details), (PUSHBACK_KEY, "250"))
    failure = read_failure(aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), metadata, "proxy"), NOBODY)
    assert type(failure.error) is ConnectionLostError
    assert (str(failure.error), failure.pushback, failure.temporary) == (f"no connection to {NOBODY}: proxy", 0.25, True)
    denied = read_failure(aio.AioRpcError(grpc.StatusCode.PERMISSION_DENIED, aio.Metadata(), metadata, "proxy"), NOBODY)
    assert type(denied.error) is ServerError
    assert (denied.error.code, denied.error.reason, denied.error.incident_id) == ("PERMISSION_DENIED", "", None)


def rpc_error(error: Exception, *, answered: bool = False) -> aio.AioRpcError:
    """What a client of a server sees where that fails with `error`."""
    status = rpc_status.to_status(to_status(describe(error, answered=answered)))
    return aio.AioRpcError(status.code, aio.Metadata(), aio.Metadata(*(status.trailing_metadata or ())), status.details)


@pytest.mark.anyio
class TestStarting:
    async def test_waits_for_a_server_that_serves(self) -> None:
        async with scripted(says(whole_answer([10])), serving=False) as script:
            client = AsyncClient(script.address)
            with pytest.raises(EngineStateError, match="not started"):
                client.stream("x")
            starting = asyncio.ensure_future(client.start())
            with anyio.fail_after(HANG_SECONDS):
                await until(lambda: has_tried(client))
                assert not starting.done()
                assert not client.healthy
                with pytest.raises(EngineStateError, match="not started"):
                    client.stream("x")
                await set_serving(script, True)
                await starting
                assert client.healthy
                assert client.model_info.name == "scripted"
                await set_serving(script, False)
                await until(lambda: not client.healthy)
                await set_serving(script, True)
                await until(lambda: client.healthy)
                assert [token.token_id async for token in client.stream("x")] == [10]
            await client.aclose()
            assert not client.healthy

    async def test_not_for_ever(self) -> None:
        async with scripted(serving=False) as script:
            for timeout in growing(0.1):
                with pytest.raises((EngineStateError, ConnectionLostError)) as caught:
                    await AsyncClient(script.address, connect_timeout=timeout).start()
                if isinstance(caught.value, EngineStateError):
                    break
            assert f"the server at {script.address} is not serving" in str(caught.value)

    async def test_nobody_there(self) -> None:
        for timeout in growing(0.1):
            client = AsyncClient(NOBODY, connect_timeout=timeout)
            with pytest.raises(ConnectionLostError, match=f"no connection to {NOBODY}") as caught:
                await client.start()
            if "Connection refused" in str(caught.value):
                break
        with pytest.raises(EngineStateError, match="closed"):
            client.stream("x")
        with pytest.raises(EngineStateError, match="started before"):
            await client.start()
        await client.aclose()

    async def test_a_server_that_comes_goes_and_comes_back(self, unused_address: str) -> None:
        client = AsyncClient(unused_address)
        starting = asyncio.ensure_future(client.start())
        with anyio.fail_after(HANG_SECONDS):
            await until(lambda: has_tried(client))
            async with scripted(address=unused_address):
                await starting
                assert client.healthy
            await until(lambda: not client.healthy)
            async with scripted(says(whole_answer([10])), address=unused_address):
                await until(lambda: client.healthy)
                assert (await client.generate("x")).token_ids == (10,)
        await client.aclose()

    async def test_cancelled(self) -> None:
        client = AsyncClient(NOBODY)
        with anyio.move_on_after(0.1):
            await client.start()
        await client.aclose()
        assert not client.healthy

    @pytest.mark.parametrize("serving", [False, True])
    async def test_closed_while_it_starts(self, serving: bool) -> None:
        """Before the server serves, and just when it says so: every `aclose()` returns when nothing is left of the connection."""
        async with scripted(serving=serving) as script:
            client = AsyncClient(script.address)
            starting = asyncio.ensure_future(client.start())
            with anyio.fail_after(HANG_SECONDS):
                await until(lambda: client._parts and client._parts.health.serving if serving else has_tried(client))
                await asyncio.gather(client.aclose(), client.aclose())
                assert client._parts.health._task.done()
                with pytest.raises(aio.UsageError, match="closed"):
                    await client._parts.link.ask(client._parts.link.model.GetModel, GetModelRequest())
                with pytest.raises(EngineStateError, match="the client was closed while it was starting"):
                    await starting
            assert not client.healthy
            with pytest.raises(EngineStateError, match="the client is closed"):
                client.stream("x")

    async def test_closed_by_two_tasks(self) -> None:
        async def linger(context: Any) -> None:
            await asyncio.Event().wait()

        async with scripted(says(whole_answer([10])[:2], then=linger)) as script:
            client = AsyncClient(script.address)
            await client.start()
            stream = client.stream("x")
            await stream.started()
            closing = asyncio.ensure_future(client.aclose())
            await asyncio.sleep(0)
            with anyio.fail_after(HANG_SECONDS):
                await client.aclose()
                assert client._parts.health._task.done()
                assert stream._source._feed._task.done()
                await closing

    async def test_the_token_goes_with_every_call(self) -> None:
        async with scripted(says(whole_answer([10]))) as script, AsyncClient(script.address, token="secret") as client:
            await client.generate("x")
            assert [metadata["authorization"] for metadata in script.metadata] == ["Bearer secret"] * 2

    async def test_no_asyncio(self) -> None:
        with pytest.raises(EngineStateError, match="needs the event loop of asyncio"):
            await anyio.to_thread.run_sync(trio.run, AsyncClient(NOBODY).start)

    async def test_another_loop(self) -> None:
        async with scripted() as script, AsyncClient(script.address) as client:

            async def submit() -> None:
                client.stream("x")

            with pytest.raises(EngineStateError, match="another event loop"):
                await anyio.to_thread.run_sync(asyncio.run, submit())


@pytest.mark.anyio
class TestTls:
    async def test_trust_both_ways(self, certificates: Path) -> None:
        ca, cert, key = (str(certificates / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        async with scripted(says(whole_answer([10])), credentials=mutual(certificates)) as script:
            with_cert = {"tls": ca, "client_cert": cert, "client_key": key}
            async with AsyncClient(script.address, **with_cert, server_name="engine.test") as client:
                assert (await client.generate("x")).token_ids == (10,)
            for options in ({"tls": ca, "server_name": "engine.test"}, with_cert, {**with_cert, "tls": True}, {}):
                with pytest.raises(ConnectionLostError, match=script.address):
                    await AsyncClient(script.address, **options, connect_timeout=0.1).start()

    async def test_files_that_cannot_be_read(self) -> None:
        with pytest.raises(ConfigError, match="tls: cannot read /no/such/file: No such file"):
            await AsyncClient(NOBODY, tls="/no/such/file").start()


@pytest.fixture
def unused_address() -> Iterator[str]:
    """Nobody listens there; it is held until the end, so that nobody else gets it, and a server may use it all the same."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{one.getsockname()[1]}"


def mutual(certificates: Path) -> grpc.ServerCredentials:
    ca, cert, key = ((certificates / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem"))
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def has_tried(client: AsyncClient) -> bool:
    """Whether it knows why nobody serves it yet."""
    return client._parts and client._parts.health._error is not None


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate of it for engine.test that serves and calls."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for command in (
        ("req", "-x509", *new_key, "-subj", "/CN=authority", "-keyout", "ca-key.pem", "-out", "ca.pem"),
        (
            *("req", "-x509", *new_key, "-subj", "/CN=engine", "-addext", "subjectAltName=DNS:engine.test"),
            *("-CA", "ca.pem", "-CAkey", "ca-key.pem", "-keyout", "key.pem", "-out", "cert.pem"),
        ),
    ):
        done = subprocess.run(["openssl", *command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder
