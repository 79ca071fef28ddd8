"""One client's stream goes on while another client sends what is expensive to read, or to refuse: measured at a server process.

A request stalls the others if the server works for 250 ms longer than else between two events of their streams. Others of its threads
work, too, so the least of some tries counts: a stall is in every one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_harness import failure_of, stream_request
from server_process import ServerProcess, server_process
from wire_bytes import field, unpacked, varint

from aengine.v1.sampling_pb2 import StoppingCriteria

pytestmark = pytest.mark.anyio

MAX_STALL = 0.25  # seconds of the server's processor time
TRIES = 8
MESSAGE_BYTES = 8 << 20
GENERATE = "/aengine.v1.GenerationService/StreamGenerate"
BATCH = "/aengine.v1.GenerationService/BatchGenerate"
TOKENIZE = "/aengine.v1.TokenizerService/Tokenize"
CHAT = "/aengine.v1.TokenizerService/RenderChat"


def spec(*fields: bytes) -> bytes:
    return field(1, b"".join(fields))


def prompt(content: bytes) -> bytes:
    return spec(field(2, content))


def of_size(unit: bytes, size: int = MESSAGE_BYTES) -> bytes:
    return unit * (size // len(unit))


def wanting(*, n: int = 1, **constraint: Any) -> bytes:
    """A request with structured output."""
    request = stream_request("Once", stopping=StoppingCriteria(max_tokens=60))
    request.spec.sampling.n = n
    wanted = request.spec.structured_output
    for name, value in constraint.items():
        match name:
            case "choices":
                wanted.choices.values.extend(value)
            case "grammar":
                wanted.grammar.source = value
            case _:
                setattr(wanted, name, value)
    return request.SerializeToString()


TEXT = field(2, field(1, b"a"))
EMPTY = b"\x0a\x00"  # as the first field of a message
HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {  # method, message, and the field that it is refused for
    "logit_bias": (
        GENERATE,
        lambda: spec(TEXT, field(3, b"".join(field(13, b"\x08" + varint(token) + b"\x15\0\0\x80?") for token in range(16000)))),
        "spec.sampling.logit_bias",
    ),
    "a million logit_bias": (GENERATE, lambda: spec(TEXT, field(3, of_size(field(13, b"\x08\xff\xff\x03\x15\0\0\x80?")))), "request"),
    "stop_token_ids": (GENERATE, lambda: spec(TEXT, field(4, field(4, b"\x07" * (4000 << 10)))), "spec.stopping.stop_token_ids"),
    "allowed_token_ids": (GENERATE, lambda: spec(TEXT, field(3, field(14, b"\x07" * (4000 << 10)))), "spec.sampling.allowed_token_ids"),
    "unpacked allowed_token_ids": (GENERATE, lambda: spec(TEXT, field(3, of_size(unpacked(14, 7)))), "request"),
    "token ids": (GENERATE, lambda: prompt(field(2, field(1, b"\x07" * (4000 << 10)))), "spec.prompt.token_ids"),
    "8 million token ids": (GENERATE, lambda: prompt(field(2, field(1, of_size(b"\x07")))), "request"),
    "spaces": (GENERATE, lambda: prompt(field(1, b" " * 10_500_000)), "spec.prompt.text"),
    "letters": (GENERATE, lambda: prompt(field(1, of_size("é".encode()))), "spec.prompt.text"),
    "one word": (GENERATE, lambda: prompt(field(1, b"a" * 130_000)), "spec.prompt.text"),
    "chat": (GENERATE, lambda: prompt(field(3, field(1, field(1, b"user") + field(2, of_size(b"a"))))), "spec.prompt.chat"),
    "chat messages": (GENERATE, lambda: prompt(field(3, of_size(EMPTY))), "request"),
    "tools": (GENERATE, lambda: prompt(field(3, field(1, field(1, b"user")) + of_size(field(2, b"[" * 1000)))), "spec.prompt.chat.tools"),
    "values of the template": (
        GENERATE,
        lambda: prompt(field(3, field(1, field(1, b"user")) + field(5, b'{"tools":[' + b"{}," * 60_000 + b"0]}"))),
        "spec.prompt.chat.template_kwargs",
    ),
    "fields of messages": (
        GENERATE,
        lambda: prompt(field(3, field(1, field(1, b"user") + field(4, b'{"a":[' + b'{"":[]},' * 120_000 + b"0]}")))),
        "spec.prompt.chat.messages",
    ),
    "choices": (GENERATE, lambda: spec(TEXT, field(5, field(4, of_size(field(1, b"a" * (1 << 20)))))), "spec.structured_output.choices"),
    "small choices": (GENERATE, lambda: spec(TEXT, field(5, field(4, of_size(EMPTY)))), "request"),
    "stop strings": (GENERATE, lambda: spec(TEXT, field(4, of_size(field(3, b"a" * 500)))), "spec.stopping.stop_strings"),
    "request id": (GENERATE, lambda: spec(TEXT) + field(2, of_size(b"a")), "request_id"),
    "tenant": (GENERATE, lambda: spec(TEXT, field(11, of_size("é".encode()))), "spec.tenant"),
    "batch": (BATCH, lambda: of_size(EMPTY), "request"),
    "tokenize": (TOKENIZE, lambda: field(2, of_size(b"a")), "text"),
    "render": (CHAT, lambda: field(2, field(1, field(1, b"user") + field(2, of_size(b"a")))), "chat"),
}
HOSTILE |= {
    f"structured output: {name}": (GENERATE, message, f"spec.structured_output.{kind}")
    for name, message, kind in (
        ("2 kB of repetitions", lambda: wanting(regex="(.*)*" * 400), "regex"),
        ("fewer", lambda: wanting(regex="(.*)*" * 60 + r"(\w{1,1000}){1,1000}"), "regex"),
        ("large alternatives", lambda: wanting(json_schema='{"enum": [' + '"abcdefghijklmnopqrstuvwxyz",' * 16384 + "0]}"), "json_schema"),
        ("deep", lambda: wanting(json_schema='{"items":' * 100_000), "json_schema"),
        ("multiples", lambda: wanting(json_schema='{"prefixItems": [' + '{"multipleOf": 9973},' * 300 + "{}]}"), "json_schema"),
        ("rules that lead nowhere", lambda: wanting(grammar="root ::= root root | root"), "grammar"),
    )
}
LONG: dict[str, tuple[str, Callable[[], bytes]]] = {  # what is done, and takes long
    "tokenize": (TOKENIZE, lambda: field(2, of_size(b"it is a truth ", 1 << 20))),
    "tokenize one word": (TOKENIZE, lambda: field(2, of_size(b" ", 2 << 20)) + b"\x20\x01"),  # count_only
    "detokenize": ("/aengine.v1.TokenizerService/Detokenize", lambda: field(2, of_size(b"\x07", 1 << 20))),
    "masks that are all costly": (GENERATE, lambda: wanting(n=128, regex="(.*a.{30}){1,50}")),
    "properties": (GENERATE, lambda: wanting(json_schema=json.dumps({"properties": {f"p{i}": {} for i in range(2000)}}))),
    "values": (GENERATE, lambda: wanting(json_schema=json.dumps({"enum": [f"{i:x}" * 10 for i in range(16_000)]}))),
    "choices": (GENERATE, lambda: wanting(choices=[f"{i}" * 20 for i in range(3000)])),
    "rules": (
        GENERATE,
        lambda: wanting(grammar="root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1} | "b"\n' for i in range(1200)) + 'r1200 ::= "c"'),
    ),
    "allowed_token_ids": (
        GENERATE,
        lambda: spec(TEXT, field(3, field(14, b"".join(varint(token % 4096) for token in range(1 << 18)))), field(4, b"\x08\x01")),
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as server:
        with grpc.insecure_channel(server.address) as channel:  # the vocabulary is read with the first grammar
            list(channel.unary_stream(GENERATE)(wanting(regex="a")))
        yield server


class Bystander:
    """Reads streams, one after the other, and knows the longest silence in seconds of the server's processor time."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.silence = 0.0
        self.began = asyncio.Event()

    async def read(self) -> None:
        request = stream_request("It is a truth universally acknowledged")
        request.spec.stopping.ignore_eos = True
        async with aio.insecure_channel(self._server.address) as channel:
            call = channel.unary_stream(GENERATE, request_serializer=type(request).SerializeToString)
            while True:
                last = None
                async for _ in call(request):
                    now = self._server.cpu_seconds()
                    self.silence = max(self.silence, now - (last or now))
                    last = now
                    self.began.set()


@asynccontextmanager
async def bystander(server: ServerProcess) -> AsyncIterator[Bystander]:
    reader = Bystander(server)
    task = asyncio.create_task(reader.read())
    try:
        await reader.began.wait()
        yield reader
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def stall_of(server: ServerProcess, method: str, raw: bytes) -> tuple[float, aio.AioRpcError | None]:
    """How much longer the longest silence is while the call runs, in the best of some tries; and how the call ended."""
    stalls, quiet = [], 0.0
    async with aio.insecure_channel(server.address) as channel, bystander(server) as other:
        for _ in range(TRIES):
            other.silence, error = 0.0, None
            try:
                async for _ in channel.stream_stream(method)(iter((raw,))):
                    pass
            except aio.AioRpcError as caught:
                error = caught
            await asyncio.sleep(0.02)  # the end of the silence, if the answer was quicker
            stalls.append(other.silence - quiet)
            if stalls[-1] <= MAX_STALL:
                break
            other.silence = 0.0
            await asyncio.sleep(0.1)
            quiet = other.silence
    return min(stalls), error


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_refused_stalls_nobody(server: ServerProcess, name: str) -> None:
    method, message, refused = HOSTILE[name]
    stall, error = await stall_of(server, method, message())
    assert error is not None
    failure = failure_of(error)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.fields == [refused]
    assert stall <= MAX_STALL


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
async def test_what_takes_long_stalls_nobody(server: ServerProcess, name: str) -> None:
    method, message = LONG[name]
    stall, error = await stall_of(server, method, message())
    assert error is None or failure_of(error).fields == ["spec.structured_output"], "but it may take too much in the end"
    assert stall <= MAX_STALL
