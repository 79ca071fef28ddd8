"""DeepSeek. In V3 and R1 a call is `function`, its name and a fenced JSON object; in V3.1 its name and the object. From V3.2 on parameters
are in tags: `<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter></｜DSML｜invoke>`."""

from __future__ import annotations

from aengine.chat.formats.base import CallFormat, Tools, read_nothing
from aengine.chat.json_calls import MAX_NAME, Tags, read_named, read_parameters
from aengine.chat.source import Reading, Source

_DSML = Tags(
    '<｜DSML｜parameter name="',
    '"',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    {'string="true">': "string", 'string="false">': "json", ">": None},
)


def _tool_call(source: Source, tools: Tools) -> Reading[bool]:
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
        "<｜tool▁call▁begin｜>": _tool_call,
        '<｜DSML｜invoke name="': _invoke,
        **{f"<｜tool▁calls▁{end}｜>": read_nothing for end in ("begin", "end")},
        **{f"<{slash}｜DSML｜{name}>": read_nothing for name in ("function_calls", "tool_calls") for slash in ("", "/")},
    },
    special_tokens=True,
)
