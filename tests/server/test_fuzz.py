"""Nonsense from the network, by seed: whatever a peer sends, the server answers the others and keeps nothing of it.

Half of it is spoiled conversations: the bytes of a client that does all right, then cut, flipped, repeated or left out at random places.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h2.exceptions
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_harness import Serving, events_of, serving
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from oracle_engine import Ahead, OracleEngine, until
from oracle_requests import check_whole, nothing_left, oracle_request
from raw_h2 import FRAME_HEADER, GENERATION, framed, raw_connection
from slow_cases import slow_but

from aengine import SamplingParams
from aengine.server.telemetry.metrics import is_fit
from aengine.v1 import engine_service_pb2, generation_service_pb2, model_service_pb2, tokenizer_service_pb2

pytestmark = pytest.mark.anyio

AT_ONCE = 8
ANSWER_SECONDS = 0.05  # how long an attacker listens
MODULES = (engine_service_pb2, generation_service_pb2, model_service_pb2, tokenizer_service_pb2)
METHODS: list[MethodDescriptor] = [
    method for module in MODULES for service in module.DESCRIPTOR.services_by_name.values() for method in service.methods
]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Engine(OracleEngine):
    """Takes any request, and computes a short one of its own instead: the oracle must know what comes."""

    seeds = itertools.count(10_000)

    def stream(self, prompt: Any, params: SamplingParams | None = None, *options: Any, **fields: Any) -> Any:
        max_tokens = 20 if params is None else min(20, params.max_tokens or 20)
        return super().stream([1, 2, 3], SamplingParams(seed=next(self.seeds), max_tokens=max_tokens, ignore_eos=True), *options, **fields)


# ---- what is sent ------------------------------------------------------------------------------------------------------------


def any_bytes(rng: random.Random, most: int) -> bytes:
    return rng.randbytes(rng.randint(0, most))


def spoiled(rng: random.Random, data: bytes) -> bytes:
    """`data` with up to three accidents."""
    spoiled = bytearray(data)
    for _ in range(rng.randint(0, 3)):
        start = rng.randint(0, len(spoiled))
        end = min(len(spoiled), start + rng.choice([1, 1, 4, 40]))
        match rng.randrange(5):
            case 0 if start < end:
                spoiled[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
            case 1:
                del spoiled[start:end]
            case 2:
                spoiled[start:start] = spoiled[start:end]
            case 3:
                spoiled[start:start] = any_bytes(rng, 20)
            case _:
                del spoiled[rng.choice([start, len(spoiled)]) :]
    return bytes(spoiled)


def any_body(rng: random.Random) -> bytes:
    message = oracle_request(rng.randrange(100), max_tokens=rng.randint(1, 20)).SerializeToString()
    match rng.randrange(6):
        case 0:
            return framed(message)
        case 1:
            return framed(any_bytes(rng, 200), compressed=rng.random() < 0.3)
        case 2:
            return framed(spoiled(rng, message))
        case 3:
            return struct.pack(">BI", rng.choice([0, 1, 2, 255]), rng.choice([0, 1, len(message) + 1, 2**24 + 1, 2**32 - 1])) + message
        case 4:
            return any_bytes(rng, 100)
        case _:
            return framed(message) * rng.randint(0, 3)


def any_headers(rng: random.Random) -> list[tuple[str, str]]:
    odd = [
        ("grpc-timeout", rng.choice(["1n", "5m", "0S", "-1S", "99999999999H", "x", ""])),
        ("grpc-encoding", rng.choice(["gzip", "identity", "deflate", "none", ""])),
        ("content-type", rng.choice(["application/grpc+proto", "application/json", "", "application/grpc; x"])),
        ("x-thing-bin", rng.choice(["AAAA", "***", "A"])),
        ("x-request-id", "y" * rng.choice([0, 1, 128, 129, 5000])),
        ("traceparent", rng.choice(["", "00-" + "0" * 32 + "-" + "0" * 16 + "-00", "zz"])),
        ("authorization", rng.choice(["Bearer", "Bearer x", "Basic \x7f"])),
        ("x-long", "y" * rng.choice([10, 10_000, 30_000])),
        ("te", rng.choice(["trailers", "gzip", ""])),
        (rng.choice([":method", ":scheme", ":status", "x y", "X"]), rng.choice(["GET", "", "http"])),
    ]
    return rng.sample(odd, rng.choice([0, 0, 1, 2, 4]))


def conversation(rng: random.Random) -> bytes:
    """What a client says that makes a few calls, without waiting for the answers."""
    client = H2Connection(H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False))
    client.initiate_connection()
    for _ in range(rng.choice([1, 1, 2, 5])):
        stream_id = client.get_next_available_stream_id()
        method = rng.choice(METHODS)
        path = f"/{method.containing_service.full_name}/{method.name}" if rng.random() < 0.4 else GENERATION + "StreamGenerate"
        path = rng.choice(["/", "/\xff", "/a/b\0", ""]) if rng.random() < 0.05 else path
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        headers |= {"content-type": "application/grpc", **dict(any_headers(rng))}
        client.send_headers(stream_id, list(headers.items()))
        with suppress(h2.exceptions.ProtocolError):
            client.send_data(stream_id, any_body(rng), end_stream=rng.random() < 0.8)
            match rng.randrange(5):
                case 0:
                    client.reset_stream(stream_id, rng.randrange(14))
                case 1:
                    client.increment_flow_control_window(rng.randint(1, 2**31 - 1 - 65535), rng.choice([None, stream_id]))
                case 2:
                    client.ping(rng.randbytes(8))
                case _:
                    pass
    return client.data_to_send()


def any_frames(rng: random.Random) -> bytes:
    """Frames of any type with any content, on a connection that began well."""
    client = H2Connection(H2Configuration())
    client.initiate_connection()
    sent = client.data_to_send()
    for _ in range(rng.randint(1, 20)):
        content = any_bytes(rng, rng.choice([0, 4, 8, 100]))
        stream_id = rng.choice([0, 1, 1, 2, 3, 2**31 - 1])
        size = len(content) if rng.random() < 0.9 else rng.randrange(2**24)
        sent += struct.pack(">I", size)[1:] + struct.pack(">BBI", rng.randrange(12), rng.randrange(256), stream_id) + content
    assert len(sent) > FRAME_HEADER
    return sent


KINDS: list[Callable[[random.Random], bytes]] = [
    conversation,
    lambda rng: spoiled(rng, conversation(rng)),
    any_frames,
    lambda rng: any_bytes(rng, 500),
    lambda rng: PREFACE[: rng.randrange(len(PREFACE))] + any_bytes(rng, 50),
    lambda rng: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * rng.randint(1, 3),
]


# ---- the tests ---------------------------------------------------------------------------------------------------------------


async def attack(rng: random.Random, serve: Serving) -> None:
    host, _, port = serve.server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(OSError, asyncio.TimeoutError):  # the server may have ended it
        writer.write(rng.choices(KINDS, [3, 6, 2, 1, 1, 1])[0](rng))
        if rng.random() < 0.2:
            writer.write_eof()
        if rng.random() < 0.8:
            await asyncio.wait_for(reader.read(), ANSWER_SECONDS)  # to the end, if the server ends it
    writer.transport.abort()


async def check_unharmed(engine: Engine, serve: Serving, num_tasks: int) -> None:
    status = (await health_pb2_grpc.HealthStub(serve.channel).Check(health_pb2.HealthCheckRequest())).status
    assert status == health_pb2.HealthCheckResponse.SERVING
    events = await events_of(serve.generation.StreamGenerate(oracle_request(1, max_tokens=10)))
    check_whole(engine, next(engine.seeds) - 1, events)
    await until(lambda: nothing_left(engine) and serve.server.in_flight == 0 and not engine._core.steps._mailbox._commands)
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks)


def complaints(caplog: pytest.LogCaptureFixture) -> set[tuple[str, str]]:
    """What the log calls an error: nothing that a peer sends is a fault of the server."""
    records = [record for record in caplog.records if record.levelno >= logging.ERROR and is_fit(record)]
    return {(record.name, record.getMessage()) for record in records}


@pytest.mark.parametrize(("seed", "attacks"), slow_but([(0, 100)], [(0, 100), *((seed, 250) for seed in range(1, 5))]))
async def test_nonsense_harms_nobody(seed: int, attacks: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    async with Engine(ahead=list(Ahead)[seed % 3]) as engine, serving(engine) as serve:
        await check_unharmed(engine, serve, 1000)
        num_tasks = len(asyncio.all_tasks())
        rngs = [random.Random(rng.random()) for _ in range(attacks)]

        async def attacker(number: int) -> None:
            for mine in rngs[number::AT_ONCE]:
                await attack(mine, serve)

        over = asyncio.Event()
        bystander = asyncio.ensure_future(_ask_until(over, serve))
        await asyncio.gather(*map(attacker, range(AT_ONCE)))
        over.set()
        await bystander
        await check_unharmed(engine, serve, num_tasks)
    assert not complaints(caplog)


async def _ask_until(over: asyncio.Event, serve: Serving) -> None:
    # Never cancelled: gRPC's client may keep a task of a call that is cancelled before its first event, until garbage is collected.
    while not over.is_set():
        events = await events_of(serve.generation.StreamGenerate(oracle_request(1, max_tokens=5)))
        assert events[-1].finished.usage.completion_tokens == 5


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("after_the_first_event", [False, True])
async def test_a_storm_of_resets_leaves_nothing(after_the_first_event: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with Engine(max_queued_requests=None) as engine, serving(engine) as serve:
        await check_unharmed(engine, serve, 1000)
        num_tasks = len(asyncio.all_tasks())
        for _ in range(2):
            async with raw_connection(serve.server.address) as connection:
                for _ in range(100):
                    if connection.closed.is_set():
                        break  # the server has had enough of this client
                    call = await connection.call(GENERATION + "StreamGenerate", framed(oracle_request(1)))
                    if after_the_first_event and await call.event() is None:
                        break
                    if not call.ended:
                        await call.reset()
        await check_unharmed(engine, serve, num_tasks)
    assert not complaints(caplog)
