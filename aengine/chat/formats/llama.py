"""Llama 3.1 and up: `{"name": "f", "parameters": {...}}` as the whole output, or behind `<|python_tag|>`; several with `;` between them.
Llama 3.2 and 4 also write `[f(a=1), g(b="x")]`, as the whole output or between `<|python_start|>` and `<|python_end|>`.

Code behind `<|python_tag|>`, for the built-in tools, is content. Source: Meta's pages on the prompt formats of Llama 3.1, 3.2 and 4.
"""

from __future__ import annotations

from aengine.chat.formats.base import CallFormat, Tools
from aengine.chat.json_calls import MAX_CODE, MAX_NAME, read_calls, start_calls
from aengine.chat.source import Reading, Source


def _python_tag(source: Source, tools: Tools) -> Reading[bool]:
    return (yield from read_calls(source, separators=";,"))


def _python_start(source: Source, tools: Tools) -> Reading[bool]:
    code = yield from source.until(("<|python_end|>",), MAX_CODE)
    if code is None or not start_calls(source, code):
        return False
    yield from source.accept("<|python_end|>")
    return True


def read_bare(source: Source, tools: Tools) -> Reading[bool]:
    yield from source.space()
    return (yield from read_calls(source, bare=tools, separators=";,"))


def _read_start(source: Source, tools: Tools) -> Reading[bool]:
    if (yield from read_bare(source, tools)):
        return True
    if source.held.strip() != "[":
        return False
    name = yield from source.until(("(", "]", " ", "\n"), MAX_NAME)
    if name not in tools or (yield from source.character()) != "(":
        return False
    code = yield from source.rest(MAX_CODE)
    return code is not None and start_calls(source, source.held, tools)


LLAMA = CallFormat({"<|python_tag|>": _python_tag, "<|python_start|>": _python_start}, _read_start, special_tokens=True)
JSON = CallFormat(start=read_bare)
