"""Clients and chats over HTTP: `aengine-chat` and `aengine-client` with aengine's own server, and with what other servers answer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from hang_guard import HANG_SECONDS
from http_harness import serving_http

from aengine import AsyncEngine, ConfigError, SamplingParams
from aengine.api.errors import AEngineError, ConnectionLostError, ServerError
from aengine.api.outputs import FinishReason, Usage
from aengine.chat import ChatMessage, ToolCall
from aengine.client import cli as client_cli
from aengine.client.openai import HttpConfig, HttpServer, OpenAIClient
from aengine.terminal import cli as chat_cli

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"
MODELS = b'HTTP/1.1 200 OK\r\ncontent-length: 38\r\n\r\n{"data": [{"id": "m"}, {"id": "n/o"}]}'


class Scripted:
    """A server that answers each request with the next bytes, and then closes the connection. `requests`: head and body of each."""

    def __init__(self, *answers: bytes) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.gone = anyio.Event()  # the client left an answer that waits
        self.url = ""
        self._answers = list(answers)

    async def serve(self, stream: SocketStream) -> None:
        async with stream:
            received = b""
            while b"\r\n\r\n" not in received:
                received += await stream.receive()
            head, _, body = received.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            while length and len(body) < int(length[1]):
                body += await stream.receive()
            self.requests.append((head.decode(), json.loads(body) if body else None))
            answer = self._answers.pop(0)
            for byte in (answer[:20], answer[20:].removesuffix(b"WAITS")):
                await stream.send(byte)
            if answer.endswith(b"WAITS"):
                try:
                    await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    self.gone.set()


@asynccontextmanager
async def scripted(*answers: bytes) -> AsyncIterator[Scripted]:
    server = Scripted(*answers)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    server.url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        with anyio.fail_after(HANG_SECONDS):
            yield server
        tasks.cancel_scope.cancel()


def events(*chunks: Any, end: bytes = b"data: [DONE]\n\n") -> bytes:
    return HEAD + b"".join(b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n" for chunk in chunks) + end


def delta(reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


@pytest.fixture(scope="module")
async def demo() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", kv_cache_memory="64MiB") as engine:
        yield engine


async def told(program: Callable[[list[str]], int], *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a program that runs in a thread, as it has an event loop of its own."""
    code = await anyio.to_thread.run_sync(program, list(arguments))
    return code, *capsys.readouterr()


async def client(*arguments: str) -> tuple[int, str, str]:
    """The same of `aengine-client`, which handles signals, in a process."""
    done = await anyio.run_process([sys.executable, "-m", "aengine.client.cli", *arguments], check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def test_a_chat_with_our_own_server(
    demo: AsyncEngine, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("s3cret-token-of-alice\n")
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How do you do?"}]
    answer = await demo.generate(chat, SamplingParams(seed=3, max_tokens=30))
    async with serving_http(demo, limit=None, token_file=str(tokens), served_model_name=("a", "b")) as serve:
        url = f"http://{serve.server.http_address}"
        flags = ("--system", "Be kind.", "-p", "seed=3", "-p", "max_tokens=30", "--prompt", "How do you do?")
        for where in ((url,), ("--address", f"{url}/v1/", "--model", "b")):
            got = await told(chat_cli.main, *where, *flags, "--token-file", str(tokens), capsys=capsys)
            assert got == (0, answer.text + "\n", "")
        monkeypatch.setenv("AENGINE_TOKEN", "s3cret-token-of-alice")
        code, text, _ = await told(chat_cli.main, url, *flags, "--json", "--prompt", "And then?", capsys=capsys)
        first, second = map(json.loads, text.splitlines())
        assert (code, first["content"], first["completion_tokens"]) == (0, answer.text, len(answer.token_ids))
        assert second["prompt_tokens"] > first["prompt_tokens"]
        code, text, errors = await told(chat_cli.main, url, "--model", "c", "--prompt", "x", capsys=capsys)
        assert (code, text) == (1, "")
        assert errors == f"aengine-chat: model: 'c' is not served at {url}; there is ['a', 'b']\n"
        code, text, errors = await told(chat_cli.main, url, "--prompt", "x", "-p", "adapter=c", capsys=capsys)
        assert errors == "aengine-chat: HTTP 404: adapter: 'c' is not loaded; loaded adapters: none\n"
        continued = await demo.generate("Once", SamplingParams(seed=3, max_tokens=9))
        flags = ("Once", "--seed", "3", "--max-tokens", "9", "--address", url, "--model", "b")
        code, text, errors = await client(*flags)
        assert (code, text) == (0, continued.text + "\n")
        assert errors.startswith("[MAX_TOKENS, 9 tokens, first after ")
        assert await client("--info", "--address", url) == (0, "a: context of 2,048 tokens\n", "")
        monkeypatch.delenv("AENGINE_TOKEN")
        code, text, errors = await told(chat_cli.main, url, "--prompt", "x", capsys=capsys)
        assert (code, text, errors.startswith("aengine-chat: HTTP 401: ")) == (1, "", True)


async def test_what_other_servers_say_is_events() -> None:
    call = {"index": 3, "id": "c1", "function": {"name": "weather", "arguments": '{"city"'}}
    chunks = [
        delta(role="assistant", content=""),
        delta(reasoning="Where? "),
        delta(reasoning_content="There."),
        delta(content="I look"),
        delta(content="."),
        delta(tool_calls=[call]),
        delta(tool_calls=[{"index": 3, "function": {"arguments": ': "Bath"}'}}]),
        delta(tool_calls=[{"index": 5, "id": "c2", "function": {"name": "stop", "arguments": "{"}}]),
        delta("tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}},
    ]
    said = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c0", "function": {"arguments": {"x": 1}}}],
    }
    async with scripted(MODELS, events(*chunks)) as server:
        client = OpenAIClient(HttpConfig(address=server.url + "/api", token="t0ken"), "n/o")
        await client.start()
        stream = client.chat([said], {"max_tokens": 5, "template_kwargs": {"x": 1}, "stop": ("a",)}, [{"type": "function"}])
        async with aclosing(stream):
            sources = [event async for event in stream]
    assert len(sources) == 11
    calls = ToolCall("c1", "weather", '{"city": "Bath"}', complete=True), ToolCall("c2", "stop", "{", complete=False)
    assert stream.message == ChatMessage("I look.", "Where? There.", calls)
    assert (stream.finish_reason, stream.usage) == (FinishReason.EOS, Usage(7, 2, 5))
    (listing, _), (head, body) = server.requests
    assert listing.startswith("GET /api/v1/models HTTP/1.1\r\nhost: 127.0.0.1:")
    assert "authorization: Bearer t0ken" in listing
    assert head.startswith("POST /api/v1/chat/completions HTTP/1.1")
    assert body == {
        "model": "n/o",
        "max_tokens": 5,
        "chat_template_kwargs": {"x": 1},
        "stop": ["a"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "c0", "function": {"arguments": '{"x": 1}'}}]}],
        "tools": [{"type": "function"}],
    }


async def test_an_answer_that_is_no_stream() -> None:
    body = json.dumps({"choices": [{"message": {"content": "Yes."}, "finish_reason": "length"}]}).encode()
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with scripted(MODELS, answer) as server:
        client = OpenAIClient(HttpConfig(address=server.url))
        await client.start()
        stream = client.chat([{"role": "user", "content": "Well?"}], {})
        assert [event async for event in stream]
    assert (stream.message.content, stream.finish_reason) == ("Yes.", FinishReason.MAX_TOKENS)
    assert server.requests[1][1]["model"] == "m"


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (b"HTTP/1.1 503 No\r\ncontent-length: 5\r\n\r\nsorry", ServerError, "HTTP 503: sorry"),
        (b'HTTP/1.1 400 No\r\n\r\n{"error": {"message": "too long", "code": "x"}}', ServerError, "HTTP 400: too long"),
        (b'HTTP/1.1 404 No\r\n\r\n{"detail": "Not Found"}', ServerError, "HTTP 404: Not Found"),
        (b"HTTP/1.1 302 Found\r\nlocation: /x\r\n\r\n", ServerError, "HTTP 302"),
        (b"SSH-2.0-OpenSSH_9.9 and something more\r\n", ServerError, "does not speak HTTP"),
        (b"", ConnectionLostError, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{", ConnectionLostError, "closed the connection"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", ServerError, "no JSON: b'hello'"),
        (events({"error": {"message": "out of memory"}}), ServerError, "out of memory"),
        (events(delta(content="x"), end=b""), ConnectionLostError, "broke off"),
        (events([1]), ServerError, "no chunk of OpenAI's API"),
        (events(delta(tool_calls=[{"index": 0}])), ServerError, "no chunk of OpenAI's API"),
    ],
)
async def test_what_goes_wrong_is_told(answer: bytes, kind: type[AEngineError], message: str) -> None:
    async with scripted(MODELS, answer) as server:
        client = OpenAIClient(HttpConfig(address=server.url))
        await client.start()
        with pytest.raises(kind, match=re.escape(message)):
            async for _ in client.complete("x", {}):
                pass


async def test_leaving_an_answer_ends_the_request() -> None:
    async with scripted(events(delta(content="x"), end=b"WAITS")) as server:
        read: Callable[[], Awaitable[Any]]
        async with aclosing(HttpServer(HttpConfig(address=server.url)).events("/chat/completions", {})) as chunks:
            read = chunks.__anext__
            assert (await read())["choices"]
            with anyio.move_on_after(0) as scope:
                await read()
            assert scope.cancelled_caught
        await server.gone.wait()


async def test_nobody_there() -> None:
    async with scripted() as server:
        url = server.url
    with pytest.raises(ConnectionLostError, match=f"^{url} cannot be reached: Connection refused$"):
        await OpenAIClient(HttpConfig(address=url)).start()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"address": "http://"}, "address"),
        ({"address": "http://a b"}, "address"),
        ({"address": "http://user:word@a"}, "address"),
        ({"address": "http://a:x"}, "address"),
        ({"address": "ftp://a"}, "address"),
        ({"address": "http://a", "tls_ca": "x"}, "tls_ca"),
        ({"address": "https://a", "client_cert": "x"}, "client_key"),
        ({"address": "http://a", "token": "a b"}, "token"),
        ({"address": "http://a", "connect_timeout": 0}, "connect_timeout"),
    ],
)
def test_refused_configurations(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpConfig(**fields)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("program", "arguments", "sentence"),
    [
        (chat_cli.main, ["http://a", "--seed", "3"], "seed: is for an engine in this process, and not for the server of --address"),
        (chat_cli.main, ["http://a", "--tls"], "tls: is for gRPC: https:// is TLS, and its certificate has the name of the host"),
        (chat_cli.main, ["https://a", "--tls-ca", "/no/file"], "tls_ca: cannot use /no/file: No such file or directory"),
        (client_cli.main, ["x", "--address", "http://a", "--stats"], "stats: is possible over gRPC alone"),
        (client_cli.main, ["x", "--address", "http://a", "--resume"], "resume: is possible over gRPC alone"),
        (client_cli.main, ["x", "--model", "a"], "model: is for servers over HTTP: over gRPC there is one model, and --adapter"),
    ],
)
def test_flags_that_do_not_fit(program: Any, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--prompt", "x"] if program is chat_cli.main else []
    assert program([*more, *arguments]) == 1
    assert capsys.readouterr().err.partition(": ")[2] == sentence + "\n"


def test_a_server_that_is_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        chat_cli.main(["http://a", "--address", "b:1"])
    assert caught.value.code == 2
    assert "the server is given twice: as http://a and with --address b:1" in capsys.readouterr().err
