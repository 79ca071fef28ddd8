"""Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>`, one or several of them between
`<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`. What stands before the arguments is the id of the call too."""

from __future__ import annotations

from aengine.chat.formats.base import CallFormat, Tools, read_nothing
from aengine.chat.json_calls import MAX_NAME, read_named
from aengine.chat.source import Reading, Source

_ARGUMENTS = "<|tool_call_argument_begin|>"


def _tool_call(source: Source, tools: Tools) -> Reading[bool]:
    header = yield from source.until((_ARGUMENTS, "<|tool_call_end|>"), MAX_NAME)
    if header is None or not (yield from source.accept(_ARGUMENTS)):
        return False
    call_id = header.strip()
    name = call_id.removeprefix("functions.").rpartition(":")[0]
    if not name or not (yield from read_named(source, name, call_id)):
        return False
    yield from source.space()
    yield from source.accept("<|tool_call_end|>")
    return True


KIMI = CallFormat(
    {"<|tool_calls_section_begin|>": read_nothing, "<|tool_call_begin|>": _tool_call, "<|tool_calls_section_end|>": read_nothing},
    special_tokens=True,
)
