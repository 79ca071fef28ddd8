"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]` up to tokenizer version 7, `[TOOL_CALLS]f[ARGS]{...}` from version 11 on,
where `[CALL_ID]...` may come before `[ARGS]`."""

from __future__ import annotations

import re

from aengine.chat.formats.base import CallFormat, Tools
from aengine.chat.json_calls import MAX_NAME, read_calls, read_named
from aengine.chat.source import Reading, Source

_NAME = re.compile(r"[\w.:/-]+")


def _tool_calls(source: Source, tools: Tools) -> Reading[bool]:
    yield from source.space()
    if (yield from source.character()) in ("[", "{"):
        return (yield from read_calls(source))
    header = yield from source.until(("{",), MAX_NAME)
    name, _, call_id = (header or "").strip().removesuffix("[ARGS]").partition("[CALL_ID]")
    if not _NAME.fullmatch(name.strip()):
        return False
    return (yield from read_named(source, name.strip(), call_id.strip() or None))


MISTRAL = CallFormat({"[TOOL_CALLS]": _tool_calls}, special_tokens=True)
