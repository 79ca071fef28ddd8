"""Harmony, the format of GPT-OSS: an output is several messages, each with a header that names its channel and perhaps a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`.
The header of the first message may begin in the prompt, behind `<|start|>assistant`. Analysis is reasoning, what has a recipient is a call,
everything else is content. Source: OpenAI's page on the harmony response format.
"""

from __future__ import annotations

import re

from aengine.chat.events import ContentDelta, ReasoningDelta
from aengine.chat.formats.base import CallFormat, Tools
from aengine.chat.json_calls import read_named
from aengine.chat.source import Delta, Reading, Source

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
