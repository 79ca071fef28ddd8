"""`aengine-client` as a process of its own, in front of a server that says what the test wants."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hang_guard import HANG_SECONDS
from oracle_engine import until
from scripted_server import Answer, ScriptedServer, says, scripted, whole_answer

from aengine.api.outputs import DraftUsage
from aengine.client import AsyncClient
from aengine.client.cli import main
from aengine.v1.generation_pb2 import GenerationEvent
from aengine.v1.generation_service_pb2 import StreamGenerateRequest

pytestmark = pytest.mark.anyio

TEXTS = ["Grüße ", "漢字", " 👩‍👩‍👧"]
FACTS = r"\[MAX_TOKENS, 3 tokens, first after \d+ ms, \d+ tok/s after it\]\n"


def spoken() -> list[GenerationEvent]:
    events = whole_answer([10, 11, 12])
    for event, text in zip(events[1:4], TEXTS, strict=True):
        event.delta.text = text
    return events


def held_at(number: int, go_on: asyncio.Event) -> Answer:
    """The answer, which waits before this event."""

    async def answer(request: Any, context: Any) -> AsyncIterator[GenerationEvent]:
        for event in spoken():
            if event.event_number == number:
                await go_on.wait()
            yield event

    return answer


@asynccontextmanager
async def program(*arguments: str, stdin: bytes = b"") -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aengine.client.cli", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    try:
        with anyio.fail_after(HANG_SECONDS):
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run(*arguments: str, stdin: bytes = b"") -> tuple[int | None, str, str]:
    """Exit code, stdout, stderr."""
    async with program(*arguments, stdin=stdin) as process:
        return await ended(process)


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


def request_of(script: ScriptedServer) -> StreamGenerateRequest:
    request = script.calls[0]
    assert isinstance(request, StreamGenerateRequest)
    return request


async def test_text_is_written_as_it_comes() -> None:
    go_on = asyncio.Event()
    async with scripted(held_at(2, go_on)) as script, program("Sag Grüße", "--address", script.address, "--stats") as process:
        assert process.stdout is not None
        first = TEXTS[0].encode()
        assert await process.stdout.readexactly(len(first)) == first
        go_on.set()
        code, text, facts = await ended(process)
    assert (code, text) == (0, TEXTS[1] + TEXTS[2] + "\n")
    assert re.fullmatch(FACTS + r"\[server: 2 running, 3 waiting, 4 parked, 5 of 6 pages in use\]\n", facts)
    assert request_of(script).spec.prompt.text == "Sag Grüße"


@pytest.mark.slow
async def test_drafts_are_told() -> None:
    events = spoken()
    events[-1].finished.usage.drafts.add(drafter="ngram", steps=2, drafted=8, accepted=3)
    events[-1].finished.usage.drafts.add(drafter="grammar", steps=1, drafted=2, accepted=2)
    async with scripted(says(events), says(events)) as script:
        _, _, facts = await run("x", "--address", script.address)
        assert facts.endswith(", 5 of 10 drafts right]\n")
        async with AsyncClient(script.address) as client, client.stream("x") as stream:
            assert stream.usage.drafts == ()
            [token async for token in stream]
            load = await client.load()
    assert stream.usage.drafts == (DraftUsage("ngram", 2, 8, 3), DraftUsage("grammar", 1, 2, 2))
    assert (load.drafts, load.tokens_per_step) == ((DraftUsage("draft", 4, 7, 6),), 10 / 4)


@pytest.mark.slow
async def test_info() -> None:
    async with scripted() as script:
        code, text, errors = await run("--info", "--address", script.address)
        assert (code, errors, script.calls) == (0, "", [])
        assert text == (
            "scripted: new (NewForCausalLM), 3,000,000,000 parameters (1,000 active) in bfloat16, 5 layers (window 128), 1 layer with KV, "
            "context of 100 tokens, 2,048 bytes of KV per token and 1,024 of the states of recurrent layers per "
            "sequence, EOS ids 7; native, executor cpu\n"
        )
        for arguments in ((), ("--info", "prompt")):
            code, text, errors = await run(*arguments, "--address", script.address)
            assert (code, text) == (2, "")
            assert errors.endswith("aengine-client: error: give a prompt, or --info\n")


async def test_flags_become_the_request(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    flags = (
        "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 3 --seed 4 --stop a --stop b --timeout 9 --adapter a1 --resume --chat --quiet"
    )
    async with scripted(says(spoken())) as script:
        where = ("--address", script.address, "--token-file", str(token))
        done = await run("-", "--system", "Be brief.", *flags.split(), *where, stdin="Grüße 👋".encode())
    assert done == (0, "".join(TEXTS) + "\n", "")
    spec = request_of(script).spec
    sampling, stopping = spec.sampling, spec.stopping
    assert [(message.role, message.content) for message in spec.prompt.chat.messages] == [("system", "Be brief."), ("user", "Grüße 👋")]
    assert (stopping.max_tokens, list(stopping.stop_strings), stopping.time_limit.ToSeconds()) == (7, ["a", "b"], 9)
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 3, 4)
    assert sampling.top_p == pytest.approx(0.9)
    assert (spec.stream.resumable, spec.adapter) == (True, "a1")
    assert script.metadata[-1]["authorization"] == "Bearer secret"


@pytest.mark.slow
async def test_tools_and_template_kwargs(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "später"}, {"b": 1}]')
    async with scripted(says(spoken())) as script:
        flags = ("--chat", "--tools", str(tools), "--template-kwargs", '{"enable_thinking": false}')
        assert (await run("x", *flags, "--address", script.address))[0] == 0
    chat = request_of(script).spec.prompt.chat
    assert (list(chat.tools), chat.template_kwargs) == (['{"name":"später"}', '{"b":1}'], '{"enable_thinking":false}')


@pytest.mark.usefixtures("interruptible")
async def test_ctrl_c_cancels_the_request() -> None:
    async with scripted(held_at(2, asyncio.Event())) as script, program("x", "--address", script.address) as process:
        assert process.stdout is not None
        await process.stdout.readexactly(len(TEXTS[0].encode()))
        process.send_signal(signal.SIGINT)
        assert await ended(process) == (130, "", "")
        await script.left.wait()
        assert list(script.calls[-1].request_ids) == [request_of(script).request_id]


@pytest.mark.usefixtures("interruptible")
async def test_ctrl_c_while_connecting() -> None:
    async with scripted(serving=False) as script, program("x", "--address", script.address) as process:
        await until(lambda: script.health._server_watchers.get(""))  # somebody asked for the health  # type: ignore[attr-defined]
        process.send_signal(signal.SIGINT)
        assert await ended(process) == (130, "", "")


async def test_a_reader_that_has_enough() -> None:
    go_on = asyncio.Event()
    async with scripted(held_at(2, go_on)) as script, program("x", "--address", script.address) as process:
        assert process.stdout is not None
        await process.stdout.readexactly(1)
        process.stdout._transport.close()  # type: ignore[attr-defined]
        go_on.set()
        assert process.stderr is not None
        assert await process.stderr.read() == b""
        assert await process.wait() == 1


async def test_nobody_listens() -> None:
    code, text, error = await run("x", "--address", "127.0.0.1:1", "--connect-timeout", "0.2")
    assert (code, text) == (1, "")
    assert re.fullmatch(r"aengine-client: no connection to 127\.0\.0\.1:1: .*Connection refused\n", error)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", "--address", "nowhere"], "address: 'nowhere' is not host:port .*"),
        (["x", "--top-p", "7"], r"top_p: 7\.0 is not in \(0, 1\]"),
        (["x", "--token-file", "/no/such/file"], "token_file: cannot read /no/such/file: No such file or directory"),
        (["x", "--tls-ca", "/no/such/file"], "tls: cannot read /no/such/file: No such file or directory"),
        (["x", "--tls-key", "k", "--tls-ca", "c"], "client_cert: None is not a path: certificate and key belong together"),
        (["x", "--system", "y"], "system: is possible with --chat"),
        (["x", "--chat", "--tools", "/no/such/file"], "tools: cannot read /no/such/file: No such file or directory"),
        (["x", "--chat", "--template-kwargs", "{a"], r"template_kwargs: '\{a' is not JSON: .*"),
        (["x", "--chat", "--template-kwargs", "[1]"], r"template_kwargs: \[1\] is not a dict of names and values"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    text, error = capsys.readouterr()
    assert text == ""
    assert re.fullmatch(f"aengine-client: {sentence}\n", error)


@pytest.mark.slow
async def test_stdin_that_is_not_text() -> None:
    code, text, error = await run("-", stdin=b"ab\xff")
    assert (code, text) == (1, "")
    assert error == "aengine-client: prompt: stdin is not UTF-8: invalid start byte at byte 2\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    help_text = capsys.readouterr().out
    assert "Ctrl-C cancels the request" in help_text
    assert "127.0.0.1:50051" in help_text
