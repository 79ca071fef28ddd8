"""`aengine-chat` without a terminal: questions from stdin and flags, answers on stdout."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from subprocess import PIPE

import anyio
import pytest
from fresh_process import run_fresh
from grpc_harness import serving
from hang_guard import HANG_SECONDS
from scripted_server import fails, held_after, says, scripted, whole_answer

from aengine import AsyncEngine, SamplingParams
from aengine.terminal.cli import main

pytestmark = pytest.mark.anyio


async def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    command = [sys.executable, "-m", "aengine.terminal.cli", *arguments]
    with anyio.fail_after(HANG_SECONDS):
        done = await anyio.run_process(command, input=stdin, stderr=PIPE, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", kv_cache_memory=64 << 20) as engine:
        yield engine


@pytest.mark.slow
async def test_stdin_is_the_question_and_stdout_the_answer(engine: AsyncEngine) -> None:
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "How do you do?"}]
    answer = await engine.generate(chat, SamplingParams(seed=3, max_tokens=40))
    async with serving(engine, limit=None) as serve:
        flags = ("--address", serve.server.address, "--system", "Be kind.", "-p", "seed=3", "-p", "max_tokens=40")
        assert await run(*flags, stdin=b"How do you do?\n") == (0, answer.text + "\n", "")
        code, text, errors = await run(*flags, "--json", "--prompt", "How do you do?", "--prompt", "And then?")
    assert (code, errors) == (0, "")
    first, second = map(json.loads, text.splitlines())
    assert (first["content"], first["completion_tokens"]) == (answer.text, len(answer.token_ids))
    assert first["finish_reason"] == answer.finish_reason.value  # type: ignore[union-attr]
    chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
    assert second["content"] == (await engine.generate(chat, SamplingParams(seed=3, max_tokens=40))).text


def test_in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße".encode())))
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    arguments = ["--kv-cache-memory", str(64 << 20), "-p", "seed=1", "-p", "max_tokens=5"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip()


async def test_a_model_without_a_chat_template_goes_on_with_the_text() -> None:
    async with scripted(says(whole_answer([10, 11])), says(whole_answer([12]))) as script:
        assert await run("--address", script.address, "--prompt", "Once", "--prompt", "Then") == (0, "ab\nc\n", "")
    assert [call.spec.prompt.text for call in script.calls] == ["Once", "Once\nab\nThen"]


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
async def test_interrupted() -> None:
    async with scripted(held_after([10])) as script:
        command = [sys.executable, "-m", "aengine.terminal.cli", "--address", script.address, "--prompt", "Once"]
        async with await anyio.open_process(command) as process:
            assert process.stdout is not None
            with anyio.fail_after(HANG_SECONDS):
                assert await process.stdout.receive() == b"a"
                process.send_signal(signal.SIGINT)
                assert [data async for data in process.stdout] == [b"\n"]
                assert await process.wait() == 130
        await script.left.wait()


async def test_what_came_before_an_error_is_shown() -> None:
    async with scripted(says(whole_answer([10, 11])[:2], then=fails(reason="OTHER"))) as script:
        code, text, errors = await run("--address", script.address, "--prompt", "Once")
    assert (code, text) == (1, "a\n")
    assert re.fullmatch("aengine-chat: .*as told.*\n", errors)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-p", "top_p=7"], r"top_p: 7\.0 is not in \(0, 1\]"),
        (["-p", "topp=7"], "topp: there is no such parameter; the nearest is top_p"),
        (["--tools", "/no/such/file"], "tools: cannot read /no/such/file: No such file or directory"),
        (["--max-num-seqs", "0"], "--max-num-seqs: 0 is not an integer .*"),
        (["--address", "nowhere"], "address: 'nowhere' is not host:port .*"),
        (["--address", "here:1", "--model", "demo"], "model: is for an engine in this process, and not for the server of --address"),
        (["--model", "/no/such/folder"], ".*/no/such/folder.*"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompt", "x", *arguments]) == 1
    text, error = capsys.readouterr()
    assert text == ""
    assert re.fullmatch(f"aengine-chat: {sentence}\n", error)


def test_stdin_without_a_question(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for data, sentence in ((b" \n", "there is no question: stdin is empty"), (b"\xff", "stdin is not UTF-8: .*")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert main([]) == 1
        assert re.fullmatch(f"aengine-chat: prompt: {sentence}\n", capsys.readouterr().err)


def test_help_and_typos_answer_at_once() -> None:
    run_fresh("""
        import sys
        from aengine.terminal.cli import main
        for arguments in (["--help"], ["--modle", "x"]):
            try:
                main(arguments)
            except SystemExit as end:
                assert end.code in (0, 2)
        heavy = {"torch", "transformers", "grpc", "rich", "prompt_toolkit"} & set(sys.modules)
        assert not heavy, heavy
    """)


@pytest.mark.slow
async def test_nobody_reads_on() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    async with scripted(says(whole_answer([10, 11]))) as script:
        command = [sys.executable, "-m", "aengine.terminal.cli", "--address", script.address, "--prompt", "x"]
        with anyio.fail_after(HANG_SECONDS):
            done = await anyio.run_process(command, stdout=writer, stderr=PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
