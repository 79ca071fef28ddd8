"""JSON (RFC 8259) as it comes: every function reads as much as can begin a JSON text, and says whether it is whole.

Characters below U+0020 in a string, which models write and JSON does not allow, are read as their escapes.

Calls of tools as models write them: as JSON objects, `{"name": ..., "arguments": {...}}`, one or a list of them; as Python, `f(a=1)`,
one, several or a list of them; with arguments in tags, one parameter after the other, up to the end of the call."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from aengine.chat.text_source import Reading, Source

MAX_DEPTH = 64
"""Most lists and objects within each other."""
MAX_DIGITS = 512

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NUMBER_START = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*)?(?:(?<=\d)[eE][+-]?\d*)?)?", re.ASCII)
_HEX = frozenset("0123456789abcdefABCDEF")


def loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, also where `json` is lenient."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("too deep") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def read_value(source: Source, depth: int = 0) -> Reading[bool]:
    first = yield from source.character()
    if first == '"':
        return (yield from read_string(source))
    if first == "{":
        return (yield from read_object(source, depth))
    if first == "[":
        return (yield from _read_list(source, depth))
    for word in ("true", "false", "null"):
        if first == word[0]:
            return (yield from source.accept(word))
    return (yield from _read_number(source))


def read_object(source: Source, depth: int = 0) -> Reading[bool]:
    if depth >= MAX_DEPTH or not (yield from source.accept("{")):
        return False
    yield from source.space()
    if (yield from source.accept("}")):
        return True
    while (yield from read_key(source)):
        if not (yield from read_value(source, depth + 1)):
            return False
        yield from source.space()
        if (yield from source.accept("}")):
            return True
        if not (yield from source.accept(",")):
            return False
        yield from source.space()
    return False


def read_key(source: Source) -> Reading[bool]:
    """With the colon and the white space around it."""
    if not (yield from read_string(source)):
        return False
    yield from source.space()
    if not (yield from source.accept(":")):
        return False
    yield from source.space()
    return True


def read_string(source: Source) -> Reading[bool]:
    if not (yield from source.accept('"')):
        return False
    while character := (yield from source.character()):
        if character == '"':
            source.take_text(1)
            return True
        if character == "\\":
            if not (yield from _read_escape(source)):
                return False
        elif character < " ":
            source.take_text(1, json.dumps(character)[1:-1])
        else:
            source.match(_PLAIN)
    return False


def _read_escape(source: Source) -> Reading[bool]:
    source.take_text(1)
    kind = yield from source.character()
    if not kind or kind not in '"\\/bfnrtu':
        return False
    source.take_text(1)
    for _ in range(4 if kind == "u" else 0):
        digit = yield from source.character()
        if digit not in _HEX:
            return False
        source.take_text(1)
    return True


def _read_list(source: Source, depth: int) -> Reading[bool]:
    if depth >= MAX_DEPTH or not (yield from source.accept("[")):
        return False
    yield from source.space()
    if (yield from source.accept("]")):
        return True
    while (yield from read_value(source, depth + 1)):
        yield from source.space()
        if (yield from source.accept("]")):
            return True
        if not (yield from source.accept(",")):
            return False
        yield from source.space()
    return False


def _read_number(source: Source) -> Reading[bool]:
    number = ""
    while character := (yield from source.character()):
        if len(number) >= MAX_DIGITS or not _NUMBER_START.fullmatch(number + character):
            break
        number += source.take_text(1)
    return bool(_NUMBER.fullmatch(number))


ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "id", "type", *ARGUMENTS}


def read_call(source: Source, *, bare: Container[str] | None = None) -> Reading[bool]:
    """An object with a name and arguments: an object, or a string that holds one. Whether it was a call; if not, it is held.

    `bare`: nothing but the object says that it is a call. So it must have arguments, and a name among these.
    """
    name: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    started = complete = closed = False
    is_open = yield from source.accept("{")
    while is_open and not closed:
        yield from source.space()
        source.json()
        if not (yield from read_key(source)):
            break
        key = loads(source.json().rstrip().removesuffix(":"))
        if bare is not None and key not in _KEYS:
            break
        if key in ARGUMENTS and arguments is None:
            if name is not None and (yield from source.character()) == "{":
                source.start_call(name, call_id)
                started, arguments = True, ""
                complete = yield from read_object(source)
                source.end_arguments()
                if not complete:
                    break
            else:
                whole = yield from read_value(source)
                arguments = _arguments_of(source.json()) if whole else None
                if arguments is None:
                    break
        else:
            if not (yield from read_value(source)):
                break
            value = loads(source.json())
            if key == "name" and name is None:
                if not isinstance(value, str) or not value or (bare is not None and value not in bare):
                    break
                name = value
            elif key == "id" and isinstance(value, str):
                call_id = value
        yield from source.space()
        closed = yield from source.accept("}")
        is_open = closed or (yield from source.accept(","))
    if started:
        source.end_call(complete=complete, closed=closed)
    elif closed and name is not None and (arguments is not None or bare is None):
        source.start_call(name, call_id, stream=False)
        source.add_arguments(arguments or "{}")
        source.end_call(complete=True)
    return started or (closed and name is not None and (arguments is not None or bare is None))


def read_calls(source: Source, *, bare: Container[str] | None = None, separators: str = ",") -> Reading[bool]:
    """A list of calls, or several of them with one of `separators` or nothing between them. Whether there was one; if not, all is held."""
    in_list = yield from source.accept("[")
    yield from source.space()
    found = False
    while (yield from read_call(source, bare=bare)):
        found = True
        yield from source.space()
        following = yield from source.character()
        if in_list and following == "]":
            source.take_text(1)
            source.emit_markup()
            return True
        if following and following in separators:
            source.take_text(1)
            yield from source.space()
        elif in_list or following != "{":
            break
    if found:
        source.settle()
    return found


def read_named(source: Source, name: str, call_id: str | None = None) -> Reading[bool]:
    """The arguments of a call of which the rest is known. Whether it was one; if not, all is held."""
    yield from source.space()
    if (yield from source.character()) != "{":
        return False
    source.start_call(name, call_id)
    source.end_call(complete=(yield from read_object(source)))
    return True


def _arguments_of(text: str) -> str | None:
    """The arguments that are a JSON value: an object, a string that holds one, or nothing. None if it is something else."""
    value = loads(text)
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        text = value
        try:
            value = loads(text)
        except ValueError:
            return None
    return text if isinstance(value, dict) else None


MAX_CODE = 1 << 16
_NAME = re.compile(r"[\w.-]+")


def start_calls(source: Source, code: str, names: Container[str] | None = None) -> bool:
    """The calls that a piece of Python consists of, of what is held. False, and none, if it has anything else, or calls of tools that are
    not among `names`."""
    calls = _calls_of(code)
    if not calls or (names is not None and any(name not in names for name, _ in calls)):
        return False
    for name, arguments in calls:
        source.start_call(name, stream=False)
        source.add_arguments(arguments)
        source.end_call(complete=True)
    return True


def _calls_of(code: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls that a piece of Python consists of; none if it has anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings, which are the model's
            body = ast.parse(code.strip()).body
        found = []
        for statement in body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            for call in value.elts if isinstance(value, ast.List) else [value]:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and len(call.args) == 1:
                    call = call.args[0]
                if not isinstance(call, ast.Call) or call.args or not _NAME.fullmatch(name := ast.unparse(call.func)):
                    return []
                arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                if None in arguments or not isinstance(loads(text), dict):
                    return []
                found.append((name, text))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []
    return found


MAX_NAME = 256
MAX_VALUE = 1 << 20


class Tags(NamedTuple):
    """What stands around a name and a value, and behind the last parameter."""

    before_name: str
    behind_name: str
    behind_value: str
    end: str
    before_value: Mapping[str, str | None] = {}
    """What comes between white space behind a name and its value, with the type of the value if that says it. If it is empty, a value
    begins at once, and line breaks around it are none of it."""


def read_parameters(source: Source, tags: Tags, schema: object) -> Reading[bool]:
    """Each becomes a delta when it is whole. Whether that is all of the call. Values are text if the tags or the tool's `schema` say that
    they are strings, else JSON if they can be."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    names: set[str] = set()
    while (yield from source.accept(tags.before_name)):
        name = yield from source.until((tags.behind_name, "<", "\n"), MAX_NAME)
        if name is None or name in names or not (yield from source.accept(tags.behind_name)):
            break
        described = properties.get(name) if isinstance(properties, Mapping) else None
        kind = described.get("type") if isinstance(described, Mapping) else None
        if tags.before_value:
            yield from source.space()
            for text, said in tags.before_value.items():
                if (yield from source.accept(text)):
                    kind = said or kind
                    break
            else:
                break
        value = yield from source.until((tags.behind_value, tags.before_name, tags.end), MAX_VALUE)
        if value is None:
            break
        yield from source.accept(tags.behind_value)
        yield from source.space()
        if not tags.before_value:
            value = value.removeprefix("\n").removesuffix("\n")
        source.add_arguments(f"{', ' if names else '{'}{json.dumps(name)}: {_json_of(value, kind)}")
        names.add(name)
    else:
        if (yield from source.accept(tags.end)):
            source.add_arguments("}" if names else "{}")
            return True
    return False


def _json_of(value: str, kind: object) -> str:
    if kind != "string":
        try:
            loads(value)
        except ValueError:
            pass
        else:
            return value.strip()
    return json.dumps(value, ensure_ascii=False)
