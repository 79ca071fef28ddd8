"""`<tool_call>` with JSON (Hermes, Qwen 2.5 and 3, and many others), and with parameters in tags (Qwen3-Coder, GLM 4.5 and up).

`<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`;
`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, where the outer tags are often missing;
`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`. White space lies between all of these.
"""

from __future__ import annotations

from aengine.chat.formats.base import CallFormat, Tools
from aengine.chat.json_calls import MAX_NAME, Tags, read_calls, read_parameters
from aengine.chat.json_text import read_object
from aengine.chat.source import Reading, Source

_CODER = Tags("<parameter=", ">", "</parameter>", "</function>")
_GLM = Tags("<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", {"<arg_value>": None})


def _tool_call(source: Source, tools: Tools) -> Reading[bool]:
    yield from source.space()
    first = yield from source.character()
    if first == "<":
        found = (yield from source.accept("<function=")) and (yield from _function(source, tools))
    elif first in ("{", "["):
        found = yield from read_calls(source)
    else:
        return (yield from _glm(source, tools))
    if found:
        yield from source.space()
        yield from source.accept("</tool_call>")
        source.emit_markup()
    return found


def _function(source: Source, tools: Tools) -> Reading[bool]:
    name = yield from source.until((">", "<", "\n"), MAX_NAME)
    if not name or not (yield from source.accept(">")):
        return False
    yield from source.space()
    if (yield from source.character()) == "{":
        source.start_call(name.strip())
        complete = yield from read_object(source)
        source.end_arguments()
        yield from source.space()
        closed = complete and (yield from source.accept("</function>"))
    else:
        source.start_call(name.strip(), stream=False)
        closed = complete = yield from read_parameters(source, _CODER, tools.get(name.strip()))
    source.end_call(complete=complete, closed=closed)
    return True


def _glm(source: Source, tools: Tools) -> Reading[bool]:
    name = yield from source.until(("<", "\n"), MAX_NAME)
    if name is None or name.strip() not in tools:
        return False
    yield from source.space()
    source.start_call(name.strip(), stream=False)
    complete = yield from read_parameters(source, _GLM, tools[name.strip()])
    source.end_call(complete=complete, closed=complete)
    return True


HERMES = CallFormat({"<tool_call>": _tool_call, "<function=": _function})
