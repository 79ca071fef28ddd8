"""TLS with real handshakes: who is let in, who is named, and certificates that change while calls are under way."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from certificates import Files, make_certificates, replace
from cryptography import x509
from cryptography.x509.oid import NameOID
from fake_engine import FakeEngine, tokens
from grpc import aio
from grpc_harness import events_of, failure_of, stream_request
from hang_guard import HANG_SECONDS
from records_seen import Seen, watch

from aengine.api.errors import ConfigError
from aengine.server.app import Server
from aengine.v1.admin_service_pb2 import ContinueGenerationRequest
from aengine.v1.admin_service_pb2_grpc import AdminServiceStub
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub
from aengine.v1.model_service_pb2 import GetModelRequest
from aengine.v1.model_service_pb2_grpc import ModelServiceStub

pytestmark = pytest.mark.anyio


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return make_certificates(tmp_path)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@asynccontextmanager
async def secure_server(engine: Any, **config: Any) -> AsyncIterator[Server]:
    server = Server(engine, port=0, **config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def channel_to(server: Server, credentials: grpc.ChannelCredentials) -> aio.Channel:
    """A connection of its own: gRPC would share one among channels with equal arguments."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    return aio.secure_channel(server.address.replace("127.0.0.1", "localhost"), credentials, options)


async def ask(server: Server, credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
    async with channel_to(server, credentials) as channel:
        call = ModelServiceStub(channel).GetModel(GetModelRequest(), timeout=HANG_SECONDS)
        return await call.code()


async def served_name(server: Server, files: Files) -> str:
    """The common name of the certificate that a new handshake sees."""
    context = ssl.create_default_context(cadata=files.authority.cert_pem.bytes().decode())
    context.set_alpn_protocols(["h2"])
    port = int(server.address.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    certificate = writer.get_extra_info("peercert")
    writer.close()
    (name,) = (value for parts in certificate["subject"] for key, value in parts if key == "commonName")
    return str(name)


async def test_only_clients_that_trust_the_authority_get_through(engine: FakeEngine, files: Files) -> None:
    async with secure_server(engine, **files.options) as server:
        assert await ask(server, files.client()) is grpc.StatusCode.OK
        stranger = grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())
        assert await ask(server, stranger) is grpc.StatusCode.UNAVAILABLE
        async with aio.insecure_channel(server.address) as channel:
            call = ModelServiceStub(channel).GetModel(GetModelRequest(), timeout=HANG_SECONDS)
            assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_all_addresses_are_allowed_with_tls(engine: FakeEngine, files: Files) -> None:
    async with secure_server(engine, host="0.0.0.0", **files.options) as server, channel_to_port(server, files) as channel:
        await ModelServiceStub(channel).GetModel(GetModelRequest(), timeout=HANG_SECONDS)


def channel_to_port(server: Server, files: Files) -> aio.Channel:
    return aio.secure_channel(f"localhost:{server.address.rpartition(':')[2]}", files.client())


async def test_clients_need_a_certificate_of_the_authority(engine: FakeEngine, files: Files) -> None:
    async with secure_server(engine, tls_client_ca=str(files.client_ca), **files.options) as server:
        assert await ask(server, files.client()) is grpc.StatusCode.UNAVAILABLE
        assert await ask(server, files.client("mallory", authority=trustme.CA())) is grpc.StatusCode.UNAVAILABLE
        assert await ask(server, files.client("alice")) is grpc.StatusCode.OK


async def test_the_name_in_the_certificate_is_the_caller_and_may_be_an_administrators(engine: FakeEngine, files: Files) -> None:
    seen = Seen()
    config = {"tls_client_ca": str(files.client_ca), "admin_client_names": ("operator",), **files.options}
    async with secure_server(engine, **config) as server:
        watch(server.core.observers, seen)
        for name in ("operator", "alice"):
            async with channel_to(server, files.client(name)) as channel:
                call = AdminServiceStub(channel).ContinueGeneration(ContinueGenerationRequest(), timeout=HANG_SECONDS)
                if name == "operator":
                    await call
                else:
                    with pytest.raises(aio.AioRpcError) as caught:
                        await call
                    assert failure_of(caught.value).reason == "ADMIN_ONLY"
                await ModelServiceStub(channel).GetModel(GetModelRequest(), timeout=HANG_SECONDS)
    assert [(call.caller.name, call.reason) for call in seen.calls] == [
        ("operator", ""),
        ("operator", ""),
        (None, "ADMIN_ONLY"),
        ("alice", ""),
    ]


CN, UNIT = NameOID.COMMON_NAME, NameOID.ORGANIZATIONAL_UNIT_NAME
NAMES: dict[str, tuple[tuple[tuple[x509.ObjectIdentifier, str], ...], str | None]] = {
    # subject, and the reason of the refusal; None for an administrator
    "plain": (((CN, "root-admin"),), None),
    "beside others": (((UNIT, "CN=x,y"), (CN, "root-admin"), (UNIT, "z")), None),
    "in another attribute": (((UNIT, "x,CN=root-admin"), (CN, "alice")), "ADMIN_ONLY"),
    "escaped in another attribute": (((UNIT, "x\\"), (CN, "alice"), (UNIT, ",CN=root-admin")), "ADMIN_ONLY"),
    "NUL": (((CN, "root-admin\0x"),), "BAD_CREDENTIALS"),
    "NUL at the end": (((CN, "root-admin\0"),), "BAD_CREDENTIALS"),
    "NUL at the start": (((CN, "\0root-admin"),), "BAD_CREDENTIALS"),
    "line break": (((CN, "root-admin\nx"),), "BAD_CREDENTIALS"),
    "control character": (((CN, "root-admin\x7f"),), "BAD_CREDENTIALS"),
    "invisible": (((CN, "root-admin\u200b"),), "BAD_CREDENTIALS"),
    "too long": (((CN, "root-admin" * 30),), "BAD_CREDENTIALS"),
    "several": (((CN, "root-admin"), (CN, "alice")), "ADMIN_ONLY"),
    "several, last": (((CN, "alice"), (CN, "root-admin")), "ADMIN_ONLY"),
    "twice": (((CN, "root-admin"), (CN, "root-admin")), "ADMIN_ONLY"),
    "none": (((UNIT, "root-admin"),), "ADMIN_ONLY"),
    "another case": (((CN, "Root-Admin"),), "ADMIN_ONLY"),
    "space around": (((CN, " root-admin "),), "ADMIN_ONLY"),
    "escaped text": (((CN, "root-admin\\00"),), "ADMIN_ONLY"),
    "separators": (((CN, "root-admin,CN=alice+x=y"),), "ADMIN_ONLY"),
    "odd but shown": (((CN, 'Zo\u00eb, \\ #1 + "<a>";'),), None),
}


@pytest.mark.quick_cases(8)
@pytest.mark.filterwarnings("ignore:Attribute's length")
@pytest.mark.parametrize("case", NAMES)
async def test_only_the_whole_common_name_counts(engine: FakeEngine, files: Files, case: str) -> None:
    subject, refusal = NAMES[case]
    seen = Seen()
    names = ("root-admin", 'Zo\u00eb, \\ #1 + "<a>";')
    config = {"tls_client_ca": str(files.client_ca), "admin_client_names": names, **files.options}
    async with secure_server(engine, **config) as server, channel_to(server, files.client_of(*subject)) as channel:
        watch(server.core.observers, seen)
        reason = None
        try:
            await AdminServiceStub(channel).ContinueGeneration(ContinueGenerationRequest(), timeout=HANG_SECONDS)
        except aio.AioRpcError as error:
            reason = failure_of(error).reason
        code = await ModelServiceStub(channel).GetModel(GetModelRequest(), timeout=HANG_SECONDS).code()
    assert reason == refusal
    assert code is (grpc.StatusCode.UNAUTHENTICATED if refusal == "BAD_CREDENTIALS" else grpc.StatusCode.OK)
    given = [text for kind, text in subject if kind is CN]
    told = seen.calls[-1].caller.name
    if refusal == "BAD_CREDENTIALS":
        assert told is None
    elif len(given) == 1:
        assert told == given[0]
    else:
        assert told is not None
        assert told.startswith("certificate ")


async def test_tokens_are_asked_for_beside_certificates(engine: FakeEngine, files: Files, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("bob token-of-bob\n")
    config = {"tls_client_ca": str(files.client_ca), "token_file": str(path), "admin_client_names": ("operator",), **files.options}
    async with secure_server(engine, **config) as server:
        assert await ask(server, files.client("alice")) is grpc.StatusCode.UNAUTHENTICATED
        assert await ask(server, files.client("operator")) is grpc.StatusCode.OK


async def test_a_new_certificate_is_served_from_the_next_handshake_on(engine: FakeEngine, files: Files) -> None:
    """Streams go on over the connections that they have; a certificate that cannot be used changes nothing."""
    async with secure_server(engine, **files.options) as server, channel_to(server, files.client()) as channel:
        stub = GenerationServiceStub(channel)
        calls = [stub.StreamGenerate(stream_request(request_id=f"r{number}"), timeout=HANG_SECONDS) for number in range(8)]
        streams = [await engine.submitted.get() for _ in calls]
        for number, name in enumerate(("localhost", "second", "third")):
            if number:
                files.write(name=name)
            for stream in streams:
                stream.push(tokens("a", reason=None))
            assert await served_name(server, files) == name
            assert await ask(server, files.client()) is grpc.StatusCode.OK
        for stream in streams:
            stream.push(tokens("end"))
        for call in calls:
            assert (await events_of(call))[-1].HasField("finished")
            assert await call.code() is grpc.StatusCode.OK


async def test_a_certificate_that_cannot_be_used_is_not(engine: FakeEngine, files: Files, caplog: pytest.LogCaptureFixture) -> None:
    async with secure_server(engine, **files.options) as server:
        good_key = files.key.read_bytes()
        replace(files.key, trustme.CA().issue_cert("localhost").private_key_pem.bytes())
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                assert await served_name(server, files) == "localhost"
        (record,) = caplog.records
        assert "the certificate in use stays" in record.message
        assert str(files.key) in record.message
        assert "PRIVATE" not in caplog.text
        os.remove(files.cert)
        assert await served_name(server, files) == "localhost"
        replace(files.key, good_key)
        files.write(name="again")
        assert await served_name(server, files) == "again"


async def test_a_new_authority_lets_others_in(engine: FakeEngine, files: Files) -> None:
    newcomers = trustme.CA()
    async with secure_server(engine, tls_client_ca=str(files.client_ca), **files.options) as server:
        assert await ask(server, files.client("alice", authority=newcomers)) is grpc.StatusCode.UNAVAILABLE
        replace(files.client_ca, newcomers.cert_pem.bytes())
        assert await ask(server, files.client("alice", authority=newcomers)) is grpc.StatusCode.OK
        assert await ask(server, files.client("alice")) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["cert", "key", "client_ca"])
async def test_a_server_does_not_start_with_files_that_cannot_be_used(engine: FakeEngine, files: Files, name: str) -> None:
    path: Path = getattr(files, name)
    replace(path, b"nonsense")
    with pytest.raises(ConfigError) as caught:
        await Server(engine, port=0, tls_client_ca=str(files.client_ca), **files.options).start()  # type: ignore[arg-type]
    assert str(path) in str(caught.value)


async def test_an_encrypted_key_is_refused_rather_than_asked_for(engine: FakeEngine, files: Files) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    with pytest.raises(ConfigError, match="the key is encrypted"):
        await Server(engine, port=0, **files.options).start()  # type: ignore[arg-type]
