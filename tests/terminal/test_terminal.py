"""`aengine-chat` in a real terminal: keys, Ctrl-C in the middle of an answer, commands, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from hang_guard import HANG_SECONDS
from screen import Program
from scripted_server import Answer, ScriptedServer, fails, held_after, says, scripted, whole_answer

from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.v1.model_service_pb2 import Model

pytestmark = pytest.mark.anyio

CTRL_C, CTRL_D, ALT_ENTER, CTRL_J, UP = "\x03", "\x04", "\x1b\r", "\n", "\x1b[A"


@contextmanager
def program(*arguments: str, state: Path) -> Iterator[Program]:
    started = Program(*arguments, state=state)
    try:
        yield started
    finally:
        started.close()


def prompts(script: ScriptedServer) -> list[str]:
    return [call.spec.prompt.text for call in script.calls if isinstance(call, StreamGenerateRequest)]


async def converse(terminal: Program, *steps: tuple[str, str]) -> None:
    """Type, and wait for what comes."""
    for keys, pattern in steps:
        terminal.type(keys)
        await anyio.to_thread.run_sync(terminal.wait_for, pattern)


@pytest.mark.slow
def test_a_chat_in_this_process(tmp_path: Path) -> None:
    with program("--kv-cache-memory", str(64 << 20), "-p", "seed=3", state=tmp_path) as terminal:
        terminal.wait_for(r"demo in this process: context of 2,048 tokens\. /help lists the commands\.")
        terminal.wait_for(">")
        terminal.type("How do you do?\r")
        terminal.wait_for(r"\n\d+ tokens, \d+/s, first after \d+ ms, prompt \d+\n")
        terminal.type("/params temperature=0 ignore_eos=true\r")
        terminal.wait_for("the model's")
        terminal.type("Tell me all.\r")  # more than it can in a second
        terminal.wait_for("I am ")
        terminal.resize(20, 60)
        terminal.type(CTRL_C)
        terminal.wait_for(r",\s+stopped\n")
        terminal.type("/params ignore_eos=none\r")
        terminal.wait_for("the model's")
        terminal.type(f"One line{ALT_ENTER}two{CTRL_J}three\r")
        terminal.wait_for(r"One line\n.*two\n.*three\n")
        terminal.wait_for(r"\n\d+ tokens, .*\n")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    history = tmp_path / "aengine" / "chat_history"
    assert "+One line\n+two\n+three\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


async def test_interrupts(tmp_path: Path) -> None:
    answers = held_after([10]), says(whole_answer([11])), says(whole_answer([12]))
    async with scripted(*answers) as script:
        with program("--address", script.address, state=tmp_path) as terminal:
            await converse(terminal, ("", "This model has no chat template"), ("", ">"), ("first\r", "\na\n"))
            await converse(terminal, (CTRL_C, r"1 token, .*stopped"))
            with anyio.fail_after(HANG_SECONDS):
                await script.left.wait()  # the server noticed
            await converse(terminal, ("second\r", r"\nb\n1 token, .*ended by max_tokens\n"))
            await converse(terminal, ("typo" + CTRL_C + CTRL_C, r"Ctrl-C again, or Ctrl-D, leaves\."))
            await converse(terminal, (UP + "!\r", r"\nc\n1 token"), (CTRL_C, "leaves"), (CTRL_C, ""))
            assert await anyio.to_thread.run_sync(terminal.end) == 0
    assert prompts(script) == ["first", "first\na\nsecond", "first\na\nsecond\nb\nsecond!"]


async def test_errors_and_commands(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    answers = says(whole_answer([10])[:1], then=fails(reason="OTHER")), held_after([11]), says(whole_answer([12]))
    async with scripted(*answers) as script:
        with program("--address", script.address, state=tmp_path) as terminal:
            await converse(terminal, ("", ">"), ("first\r", r"\n.*as told.*\n"))
            await converse(
                terminal, ("/hlep\r", "there is no command /hlep; the nearest is /help"), ("/ret\t\r", r"Again: first\n(…\n)?b\n")
            )
            terminal.type("/mo\t\r")  # while the answer comes
            await converse(terminal, (CTRL_C, "stopped"), ("", "scripted: new"))
            await converse(terminal, ("/params top_p=7\r", r"top_p: 7\.0 is not in \(0, 1\]"), (f"/save {saved}\r", "Saved 2 messages"))
            await converse(terminal, ("/clear\r", "A new conversation"), (f"/load {saved}\r", "Loaded 2 messages"))
            await converse(terminal, ("next\r", r"\nc\n1 token"), ("/quit\r", ""))
            assert await anyio.to_thread.run_sync(terminal.end) == 0
    assert prompts(script) == ["first", "first", "first\nb\nnext"]


def texts(*pieces: str) -> Answer:
    """An answer of these deltas."""
    events = whole_answer([*range(len(pieces))])
    for event, piece in zip(events[1:], pieces, strict=False):
        event.delta.text = piece
    if len(pieces) > 2:
        events[-1].finished.usage.reasoning_tokens = 2
        events[-1].finished.usage.drafts.add(drafter="ngram", steps=2, drafted=8, accepted=3)
    return says(events)


@pytest.mark.slow
async def test_reasoning_and_results_of_tools(tmp_path: Path) -> None:
    tools, saved = tmp_path / "tools.json", tmp_path / "saved.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]))
    call = '<tool_call>{"name": "weather", "arguments": {"a": [1]}}</tool_call>'
    answers = texts("<think>\nHm", "m.</think>\n\n", call[:20], call[20:]), texts("It *rains*."), texts(call)
    async with scripted(*answers) as script:
        script.model.MergeFrom(Model(has_chat_template=True, call_format="hermes", reasoning_format="think"))
        with program("--address", script.address, "--tools", str(tools), state=tmp_path) as terminal:
            await converse(
                terminal,
                ("", ">"),
                ("Rain?\r", r'Hmm\.\n\n→ weather \{"a": \[1\]\}\n4 tokens \(2 of reasoning\), .*3 of 8\s+drafts\s+accepted'),
                ("", "weather returns:"),
            )
            await converse(terminal, ("a lot\r", r"It rains\.\n1 token"), ("", ">"), ("More?\r", "weather returns:"), (CTRL_D, ">"))
            await converse(terminal, (f"/save {saved}\r", "Saved 5 messages"), (CTRL_D, ""))
            assert await anyio.to_thread.run_sync(terminal.end) == 0
    asked, called, result, answer, unanswered = json.loads(saved.read_text())
    assert (asked["content"], result["content"], answer["content"]) == ("Rain?", "a lot", "It *rains*.")
    assert (called["reasoning_content"], called["tool_calls"][0]["function"]) == ("Hmm.", {"name": "weather", "arguments": {"a": [1]}})
    assert unanswered == {"role": "user", "content": "More?"}
