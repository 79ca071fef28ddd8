"""Conversations, their commands and their parameters, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aengine import AEngineError, InvalidRequestError, SamplingParams, StructuredOutput
from aengine.api.outputs import ModelInfo
from aengine.terminal.answers import Chat
from aengine.terminal.conversation import ChatParameters, Conversation
from aengine.terminal.interactive import COMMANDS, run_command
from aengine.terminal.partners import EnginePartner

MODEL = ModelInfo("demo", "Qwen3ForCausalLM", 2048, 4096, (1,), "bfloat16", 4, True, SamplingParams(temperature=0.8))
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bath"}}}


def new_chat() -> Chat:
    return Chat(EnginePartner(cast(Any, SimpleNamespace(model_info=MODEL))), Conversation("Be brief."), ChatParameters())


def said(chat: Chat, *pairs: str) -> None:
    for question, answer in zip(pairs[::2], pairs[1::2], strict=True):
        chat.conversation.ask(question)
        chat.conversation.answer({"role": "assistant", "content": answer})


def contents(chat: Chat) -> list[str]:
    return [message["content"] for message in chat.conversation.messages]


def shown(chat: Chat, line: str) -> str:
    outcome = run_command(chat, line)
    assert outcome is not None
    return outcome.text


def test_exchanges_are_taken_back_and_asked_again() -> None:
    chat = new_chat()
    said(chat, "a", "A", "b", "B")
    assert contents(chat) == ["Be brief.", "a", "A", "b", "B"]
    outcome = run_command(chat, "/retry")
    assert outcome is not None
    assert (outcome.text, outcome.asks, contents(chat)) == ("Again: b", True, ["Be brief.", "a", "A", "b"])
    assert shown(chat, "/retry") == "Again: b"  # it got no answer
    assert shown(chat, "/undo") == "Taken back: a"
    assert contents(chat) == ["Be brief."]
    said(chat, "c", "C")
    assert shown(chat, "/clear") == "A new conversation. The system message stays."
    for line in ("/undo", "/retry"):
        with pytest.raises(AEngineError, match="nothing was asked yet"):
            run_command(chat, line)


def test_results_of_tools_belong_to_their_exchange() -> None:
    chat = new_chat()
    chat.conversation.ask("Rain?")
    chat.conversation.add_calls({"role": "assistant", "content": "", "tool_calls": [CALL]}, ["Yes."])
    assert chat.conversation.messages[-1] == {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "Yes."}
    chat.conversation.answer({"role": "assistant", "content": "It rains."})
    copy = Conversation.from_json(chat.conversation.to_json())
    assert (copy.exchanges, copy.system) == (chat.conversation.exchanges, "Be brief.")
    assert chat.conversation.retry() == "Rain?"
    assert contents(chat) == ["Be brief.", "Rain?"]


def test_system_message() -> None:
    chat = new_chat()
    assert shown(chat, "/system") == "The system message is: Be brief."
    shown(chat, "/system Be\n kind. ")
    assert contents(chat) == ["Be\n kind."]
    assert shown(chat, "/system none") == "There is no system message."
    assert chat.conversation.messages == []


def test_files(tmp_path: Path) -> None:
    chat, path = new_chat(), tmp_path / "a chat.json"
    said(chat, "Grüße", "漢字")
    assert shown(chat, f"/save {path}") == f"Saved 3 messages in {path}."
    assert shown(chat, f"/save {path}") == f"Saved 3 messages in {path}."
    other = new_chat()
    assert shown(other, f"/load {path}") == f"Loaded 3 messages from {path}."
    assert contents(other) == ["Be brief.", "Grüße", "漢字"]
    notes = tmp_path / "notes"
    notes.write_text("[1]")
    for line, message in (
        (f"/save {notes}", "holds no conversation and is not replaced: prompt: message 0 is a int"),
        (f"/load {notes}", "holds no conversation: prompt: message 0"),
        (f"/load {tmp_path}/none", "cannot read .*: No such file"),
        (f"/save {tmp_path}/none/x", "cannot write .*: No such file"),
        ("/save", "the name of a file is missing"),
    ):
        with pytest.raises(AEngineError, match=message):
            run_command(chat, line)
    assert notes.read_text() == "[1]"
    assert contents(chat) == ["Be brief.", "Grüße", "漢字"]
    asked = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert Conversation.from_json(json.dumps(asked)).retry() == "ab"
    with pytest.raises(AEngineError, match="the first message has role 'assistant'"):
        Conversation.from_json('[{"role": "assistant", "content": "x"}]')


def test_parameters() -> None:
    chat = new_chat()
    line = """/params top_p=0.5 stop="a b" 'logit_bias={"5": -1}' structured_output='{"regex": "a+"}' timeout=3 max_reasoning_tokens=0"""
    text = shown(chat, line)
    structured = StructuredOutput(regex="a+")
    assert chat.parameters.params == SamplingParams(top_p=0.5, stop=("a b",), logit_bias={5: -1}, structured_output=structured)
    assert (chat.parameters.options.timeout, chat.parameters.chat.max_reasoning_tokens) == (3, 0)
    assert text.startswith('top_p = 0.5\nstop = a b\nlogit_bias = {"5": -1}\nstructured_output = {"regex": "a+"}\ntimeout = 3\n')
    assert text.endswith("temperature = 0.8 (the model's)")
    assert shown(chat, "/params").startswith(f"{text}\nNot set: top_k, ")
    shown(chat, "/params top_p=none stop=none logit_bias=none structured_output=none max_tokens=none")
    assert chat.parameters.params == SamplingParams()
    assert shown(chat, "/params min_p").startswith("min_p is not set\nIn [0, 1]: drop tokens")


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        ("temperature=hot", r"temperature: 'hot' is not a number in \[0, 100\]"),
        ("top_p=0", r"top_p: 0.0 is not in \(0, 1\]"),
        ("seed=1 top_k=-7", r"top_k: -7 is not in \[0, "),
        ("topp=1", "topp: there is no such parameter; the nearest is top_p"),
        ("top_p=1 seed", "seed: has no value: write name=value"),
        ("max_reasoning_tokens=-1", "max_reasoning_tokens: -1 is not an integer >= 0"),
        ("""structured_output='{"rgex": "a"}'""", "structured_output: got an unexpected keyword argument 'rgex'"),
        ("timeout=0", "timeout: 0 is not a number of seconds > 0"),
        ("stop='a", "No closing quotation"),
    ],
)
def test_parameters_that_are_refused_change_nothing(assignments: str, message: str) -> None:
    chat = new_chat()
    with pytest.raises(AEngineError, match=message):
        run_command(chat, f"/params {assignments}")
    assert chat.parameters.params == SamplingParams()


def test_what_is_a_command() -> None:
    chat = new_chat()
    assert all(f"/{name}" in shown(chat, "/help") for name in COMMANDS)
    assert "Qwen3ForCausalLM" in shown(chat, "/model")
    assert run_command(chat, "/quit").quits  # type: ignore[union-attr]
    for line in ("hello", " /help", "/etc/passwd is what?", "a\n/help"):
        assert run_command(chat, line) is None
    for line, message in (("/hlep", "no command /hlep; the nearest is /help"), ("/undo 2", "/undo takes nothing behind it")):
        with pytest.raises(AEngineError, match=message):
            run_command(chat, line)
    with pytest.raises(InvalidRequestError, match="no_such"):
        ChatParameters(["no_such=1"])
