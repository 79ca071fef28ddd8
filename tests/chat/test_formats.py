"""Parsers of outputs: every format, cut anywhere; and whatever a model writes, nothing raises and nothing is lost."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator

import pytest
from outputs import HERMES_BATH, OUTPUTS, TOOLS, Output

from aengine.chat import ArgumentsDelta, CallEnded, CallStarted, ChatFormat, ChatMessage, ChatParser, Event
from aengine.chat.formats import CALLS, REASONING

IDS = [output.name for output in OUTPUTS]
TRIALS = 40
PIECES = sorted(
    {piece for output in OUTPUTS for piece in output.text.replace("<", "\0<").replace('"', '\0"').replace("{", "\0{").split("\0")}
)


def counted_ids() -> Iterator[str]:
    return (f"call{number:05}" for number in itertools.count())


def parse(pieces: Iterable[str], format: ChatFormat, opened: bool = False, structured: bool = False, cut: bool = False) -> list[Event]:
    parser = ChatParser(format, TOOLS, opened=opened, structured=structured, make_id=counted_ids().__next__)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish(cut=cut)


def check(text: str, events: list[Event]) -> ChatMessage:
    """What holds for every text; returns the message."""
    assert "".join(event.source for event in events) == text
    message = ChatMessage.of(events)
    begun, ended = ([event.index for event in events if isinstance(event, kind)] for kind in (CallStarted, CallEnded))
    assert begun == ended == list(range(len(message.tool_calls)))
    for call in message.tool_calls:
        assert call.name
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
        else:
            assert can_begin_json(call.arguments), call.arguments
    return message


def can_begin_json(text: str) -> bool:
    """By trial: whether a text of closing characters, or of a missing value before them, makes an object of it."""
    if not text:
        return True
    stack, in_string, escape = [], False, False
    for character in text:
        if in_string:
            in_string = escape or character != '"'
            escape = character == "\\" and not escape
        elif character == '"':
            in_string = True
        elif character in "{[":
            stack.append("}" if character == "{" else "]")
        elif character in "}]":
            stack.pop()
    closing = "".join(reversed(stack))
    middles = ["", "0", '"', '":0', ":0", '"":0', "0000", "000", "00"]
    middles += [f"{'0' * digits}{rest}" for digits in range(5) for rest in ('"', '":0')] + [f"n{rest}" for rest in ('"', '":0')]
    for middle in middles:
        try:
            return isinstance(json.loads(text + middle + closing), dict)
        except ValueError:
            pass
    return False


@pytest.mark.parametrize("output", OUTPUTS, ids=IDS)
def test_what_is_in_an_output(output: Output) -> None:
    message = check(output.text, parse([output.text], output.format, output.opened))
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == output.calls
    assert all(call.complete for call in message.tool_calls)
    assert (message.content, message.reasoning) == (output.content, output.reasoning)


@pytest.mark.parametrize("output", OUTPUTS, ids=IDS)
def test_cuts_change_nothing(output: Output) -> None:
    text = output.text
    whole = ChatMessage.of(parse([text], output.format, output.opened))
    for pieces in (list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        assert check(text, parse(pieces, output.format, output.opened)) == whole, pieces


@pytest.mark.parametrize("output", OUTPUTS, ids=IDS)
def test_every_beginning_of_an_output_is_parsed(output: Output) -> None:
    for end in range(len(output.text)):
        text = output.text[:end]
        message = check(text, parse([text], output.format, output.opened))
        assert message == ChatMessage.of(parse(text, output.format, output.opened))


@pytest.mark.parametrize("output", OUTPUTS, ids=IDS)
def test_a_call_that_the_limit_cuts_is_no_content(output: Output) -> None:
    """But for what may still become something else: half a marker, or the first characters of a text that no marker announces."""
    most = max([8, *[len(marker) // 2 for marker in CALLS[output.format.calls].markers]])
    for end in range(len(output.text)):
        text = output.text[:end]
        message = check(text, parse([text], output.format, output.opened, cut=True))
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(message.content, output.content, strict=False))
        assert len(message.content[sum(1 for _ in same) :].strip()) <= most, text


@pytest.mark.parametrize("calls", CALLS)
def test_whatever_a_model_writes(calls: str) -> None:
    chance = random.Random(calls)
    true = [output for output in OUTPUTS if output.format.calls == calls] or OUTPUTS
    for _ in range(TRIALS):
        if chance.random() < 0.5:
            text = "".join(chance.choices(PIECES, k=chance.randrange(12)))
        else:
            text = chance.choice(true).text
            for _ in range(chance.randrange(1, 5)):
                place = chance.randrange(len(text) + 1)
                text = (
                    text[:place]
                    + chance.choice(["", chance.choice(PIECES), chr(chance.randrange(0x250))])
                    + text[place + chance.randrange(3) :]
                )
        format = ChatFormat(calls, chance.choice(list(REASONING)))
        begun = {name: chance.random() < 0.2 for name in ("opened", "structured", "cut")}
        whole = check(text, parse([text], format, **begun))
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(5))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert check(text, parse(pieces, format, **begun)) == whole, (text, pieces)
        assert check(text, parse(text, format, **begun)) == whole, text


def test_reasoning_before_structured_output_comes_only_at_the_start() -> None:
    text = '\n<think>Hm.</think>\n\n{"a": "<think>b</think>"}'
    assert ChatMessage.of(parse([text], ChatFormat("", "think"), structured=True)) == ChatMessage('{"a": "<think>b</think>"}', "Hm.")
    text = '\n{"a": "<think>b</think>"}'
    assert ChatMessage.of(parse([text], ChatFormat("", "think"), structured=True)) == ChatMessage(text)


@pytest.mark.parametrize(
    "output",
    [output for output in OUTPUTS if output.name in ("hermes", "llama", "mistral_args", "harmony", "gemma4")],
    ids=lambda output: output.name,
)
def test_arguments_come_as_they_are_written(output: Output) -> None:
    events = parse(output.text, output.format)
    assert sum(isinstance(event, ArgumentsDelta) for event in events) > 10


CUT = HERMES_BATH[: HERMES_BATH.index("Bath")]


def test_a_call_that_is_cut_off_is_not_complete() -> None:
    message = check(CUT, parse([CUT], ChatFormat("hermes")))
    assert not message.tool_calls[0].complete
    assert message.as_dict()["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "'}


def test_a_call_that_goes_wrong_is_content_from_there_on() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": Bath}}</tool_call>'
    message = check(text, parse([text], ChatFormat("hermes")))
    assert (message.tool_calls[0].arguments, message.content) == ('{"city": ', "Bath}}</tool_call>")
    text = '<tool_call>{"name": 3}</tool_call>'
    assert check(text, parse([text], ChatFormat("hermes"))) == ChatMessage(text)


@pytest.mark.parametrize(
    ("template", "format", "special"),
    [
        ("{% if tools %}<tool_call>{% endif %}{{ '<think>' }}", ChatFormat("hermes", "think"), False),
        ("{{ '<|start_header_id|>' }}", ChatFormat("llama"), True),
        ("{{ '[INST]' }}{{ '[THINK]' }}", ChatFormat("mistral", "mistral"), True),
        ("<|channel|>analysis<|message|> <think>", ChatFormat("harmony", "harmony"), True),
        ("<｜Assistant｜><think>", ChatFormat("deepseek", "think"), True),
        ("<think> <｜DSML｜invoke", ChatFormat("deepseek", "think"), True),
        ("<|tool_calls_section_begin|><|tool_call_begin|> </think>", ChatFormat("kimi", "think"), True),
        ("<tool_call>{function-name}<arg_key> <think>", ChatFormat("hermes", "think"), False),
        ("<|header_start|>", ChatFormat("llama"), True),
        ("<start_of_turn>", ChatFormat("gemma3"), False),
        ("<start_of_turn> <start_function_call>", ChatFormat("function_gemma"), True),
        ("<|tool_call>call: <|channel>thought", ChatFormat("gemma4", "gemma4"), True),
        ("{% for tool in tools %}", ChatFormat("json"), False),
        ("{{ messages }}", ChatFormat(), False),
    ],
)
def test_the_format_that_a_template_speaks_of(template: str, format: ChatFormat, special: bool) -> None:
    assert (ChatFormat.of_template(template), format.special_tokens) == (format, special)


def test_a_prompt_that_ends_within_reasoning() -> None:
    format = ChatFormat("hermes", "think")
    assert format.opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not format.opens_reasoning("<think>\n\n</think>\n\n")
    assert not ChatFormat("hermes").opens_reasoning("<think>")


def test_without_tools_calls_are_content() -> None:
    parser = ChatParser(ChatFormat("hermes", "think"))
    message = ChatMessage.of([*parser.feed(f"<think>Hm.</think>{HERMES_BATH}"), *parser.finish()])
    assert message == ChatMessage(HERMES_BATH, "Hm.")


def test_arguments_alone() -> None:
    parser = ChatParser(ChatFormat("hermes"), TOOLS, only="weather", make_id=counted_ids().__next__)
    (call,) = ChatMessage.of([*parser.feed('{"city": "Bath"}'), *parser.finish()]).tool_calls
    assert (call.id, call.name, call.arguments, call.complete) == ("call00000", "weather", '{"city": "Bath"}', True)


def test_nesting_has_an_end() -> None:
    text = '<tool_call>{"name": "run", "arguments": {"more": ' + "[" * 5000
    assert check(text, parse([text], ChatFormat("hermes"))).content.startswith("[[")


def test_no_marker_is_a_part_of_another() -> None:
    """Else which of them is found could depend on how the text is cut."""
    for name, calls in CALLS.items():
        for reasoning in REASONING.values():
            markers = [*calls.markers, *((reasoning.opening,) if reasoning is not None else ())]
            assert not [(one, other) for one in markers for other in markers if one != other and one in other], name


def test_only_white_space_of_json_is_white_space_in_arguments() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city"\x1f: "Bath"}}</tool_call>'
    assert not check(text, parse([text], ChatFormat("hermes"))).tool_calls[0].complete
