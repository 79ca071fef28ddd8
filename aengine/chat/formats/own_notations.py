"""Harmony, the format of GPT-OSS: an output is several messages, each with a header that names its channel and perhaps a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`.
The header of the first message may begin in the prompt, behind `<|start|>assistant`. Analysis is reasoning, what has a recipient is a call,
everything else is content. Source: OpenAI's page on the harmony response format.

Gemma: Python in a fence (Gemma 3, as its documentation has it asked for), and a notation of its own (FunctionGemma, Gemma 4).

```` ```tool_code\\nf(a=1)\\n``` ````; `<start_function_call>call:f{a:<escape>text<escape>,b:1}<end_function_call>`;
`<|tool_call>call:f{a:<|"|>text<|"|>,b:1}<tool_call|>`."""

from __future__ import annotations

import functools
import json
import re

from aengine.chat.json_calls import MAX_CODE, MAX_DEPTH, MAX_NAME, loads, read_named, start_calls
from aengine.chat.text_source import CallFormat, ContentDelta, Delta, Reading, ReasoningDelta, Source, Tools

MAX_HEADER = 512
_BODY = "<|message|>"
_HEADERS = ("<|start|>", "<|channel|>", _BODY)
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def _read(source: Source, tools: Tools) -> Reading[None]:
    kind: Delta = ContentDelta
    yield from source.space()
    if (yield from source.accept("to=")):
        kind = yield from _header(source, "to=")
    source.settle()
    while marker := (yield from source.text_until(_HEADERS + _ENDS, kind)):
        if marker in _ENDS:
            source.emit_markup(kind)
            kind = ContentDelta
        else:
            kind = yield from _header(source, marker)


def _header(source: Source, begin: str) -> Reading[Delta]:
    """Reads the rest of a header, and where it announces a call, the call. Returns what the text is that follows."""
    header = "" if begin == _BODY else (yield from source.until((_BODY, *_ENDS), MAX_HEADER))
    if header is None or (begin != _BODY and not (yield from source.accept(_BODY))):
        source.give_up()
        return ContentDelta
    recipient, channel = _RECIPIENT.search(begin + header), _CHANNEL.search(begin + header)
    kind: Delta = ReasoningDelta if channel is not None and channel[1] == "analysis" else ContentDelta
    if recipient is not None and (yield from read_named(source, recipient[1])):
        return ContentDelta
    source.emit_markup(kind)
    return kind


HARMONY = CallFormat(whole=_read, answer="<|channel|>final<|message|>", special_tokens=True)


_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
_NAME = re.compile(r"[\w.-]+")


def _tool_code(source: Source, tools: Tools) -> Reading[bool]:
    yield from source.space()
    code = yield from source.until(("```",), MAX_CODE)
    if code is None or not start_calls(source, code):
        return False
    yield from source.accept("```")
    return True


def _notation(quote: str, closing: str, source: Source, tools: Tools) -> Reading[bool]:
    yield from source.space()
    if not (yield from source.accept("call:")):
        return False
    name = yield from source.until(("{", "<", "\n"), MAX_NAME)
    if name is None or not _NAME.fullmatch(name.strip()) or (yield from source.character()) != "{":
        return False
    source.start_call(name.strip())
    complete = yield from _value(source, quote, 0)
    source.end_arguments()
    yield from source.space()
    closed = complete and (yield from source.accept(closing))
    source.end_call(complete=complete, closed=closed)
    return True


def _value(source: Source, quote: str, depth: int) -> Reading[bool]:
    """A value of the notation, as JSON text."""
    first = yield from source.character()
    if first and first in "{[":
        return depth < MAX_DEPTH and (yield from _list(source, quote, depth, is_object=first == "{"))
    if first == "<":
        return (yield from _string(source, quote))
    word = yield from source.until((",", "}", "]", "<"), MAX_NAME)
    if word is None:
        return False
    text = _CONSTANTS.get(word.strip(), word.strip())
    try:
        loads(text)
    except ValueError:
        text = json.dumps(text, ensure_ascii=False)
    source.replace_json(text)
    return bool(word.strip())


def _list(source: Source, quote: str, depth: int, *, is_object: bool) -> Reading[bool]:
    closing = "}" if is_object else "]"
    source.take_text(1)
    yield from source.space()
    if (yield from source.accept(closing)):
        return True
    while True:
        if is_object and not (yield from _key(source, quote)):
            return False
        if not (yield from _value(source, quote, depth + 1)):
            return False
        yield from source.space()
        if (yield from source.accept(closing)):
            return True
        if not (yield from source.accept(",")):
            return False
        yield from source.space()


def _key(source: Source, quote: str) -> Reading[bool]:
    if (yield from source.character()) == "<":
        if not (yield from _string(source, quote)):
            return False
    else:
        key = yield from source.until((":", ",", "}", "<"), MAX_NAME)
        if not key:
            return False
        source.replace_json(json.dumps(key.strip(), ensure_ascii=False))
    yield from source.space()
    if not (yield from source.accept(":")):
        return False
    yield from source.space()
    return True


def _string(source: Source, quote: str) -> Reading[bool]:
    if not (yield from source.accept(quote, '"')):
        return False
    while character := (yield from source.character()):
        if character == quote[0] and (yield from source.accept(quote, '"')):
            return True
        source.take_text(1, json.dumps(character, ensure_ascii=False)[1:-1])
    return False


GEMMA3 = CallFormat({"```tool_code": _tool_code})
FUNCTION_GEMMA = CallFormat({"<start_function_call>": functools.partial(_notation, "<escape>", "<end_function_call>")}, special_tokens=True)
GEMMA4 = CallFormat({"<|tool_call>": functools.partial(_notation, '<|"|>', "<tool_call|>")}, special_tokens=True)
