"""`<tool_call>` with JSON (Hermes, Qwen 2.5 and 3, and many others), and with parameters in tags (Qwen3-Coder, GLM 4.5 and up).

`<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`;
`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, where the outer tags are often missing;
`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`. White space lies between all of these.

Llama 3.1 and up: `{"name": "f", "parameters": {...}}` as the whole output, or behind `<|python_tag|>`; several with `;` between them.
Llama 3.2 and 4 also write `[f(a=1), g(b="x")]`, as the whole output or between `<|python_start|>` and `<|python_end|>`.

Code behind `<|python_tag|>`, for the built-in tools, is content. Source: Meta's pages on the prompt formats of Llama 3.1, 3.2 and 4.

Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]` up to tokenizer version 7, `[TOOL_CALLS]f[ARGS]{...}` from version 11 on,
where `[CALL_ID]...` may come before `[ARGS]`.

Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>`, one or several of them between
`<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`. What stands before the arguments is the id of the call too.

DeepSeek. In V3 and R1 a call is `function`, its name and a fenced JSON object; in V3.1 its name and the object. From V3.2 on parameters
are in tags: `<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter></｜DSML｜invoke>`."""

from __future__ import annotations

import re

from aengine.chat.json_calls import MAX_CODE, MAX_NAME, Tags, read_calls, read_named, read_object, read_parameters, start_calls
from aengine.chat.text_source import CallFormat, Reading, Source, Tools, read_nothing

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


_ARGUMENTS = "<|tool_call_argument_begin|>"


def _kimi_call(source: Source, tools: Tools) -> Reading[bool]:
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
    {"<|tool_calls_section_begin|>": read_nothing, "<|tool_call_begin|>": _kimi_call, "<|tool_calls_section_end|>": read_nothing},
    special_tokens=True,
)


_DSML = Tags(
    '<｜DSML｜parameter name="',
    '"',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    {'string="true">': "string", 'string="false">': "json", ">": None},
)


def _deepseek_call(source: Source, tools: Tools) -> Reading[bool]:
    name = yield from source.until(("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), MAX_NAME)
    if name is None or not (yield from source.accept("<｜tool▁sep｜>")):
        return False
    yield from source.space()
    if (yield from source.character()) != "{":
        name = yield from source.until(("\n", "<｜"), MAX_NAME)
        yield from source.space()
        yield from source.accept("```json")
    if not name or not (yield from read_named(source, name.strip())):
        return False
    yield from source.space()
    yield from source.accept("```")
    yield from source.space()
    yield from source.accept("<｜tool▁call▁end｜>")
    source.emit_markup()
    return True


def _invoke(source: Source, tools: Tools) -> Reading[bool]:
    name = yield from source.until(('"', "<", "\n"), MAX_NAME)
    if not name or not (yield from source.accept('">')):
        return False
    yield from source.space()
    source.start_call(name, stream=False)
    complete = yield from read_parameters(source, _DSML, tools.get(name))
    source.end_call(complete=complete, closed=complete)
    return True


DEEPSEEK = CallFormat(
    {
        "<｜tool▁call▁begin｜>": _deepseek_call,
        '<｜DSML｜invoke name="': _invoke,
        **{f"<｜tool▁calls▁{end}｜>": read_nothing for end in ("begin", "end")},
        **{f"<{slash}｜DSML｜{name}>": read_nothing for name in ("function_calls", "tool_calls") for slash in ("", "/")},
    },
    special_tokens=True,
)
