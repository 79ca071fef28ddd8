"""Calls that are written as JSON objects: `{"name": ..., "arguments": {...}}`, one or a list of them."""

from __future__ import annotations

from collections.abc import Container

from aengine.chat.json_text import loads, read_key, read_object, read_value
from aengine.chat.source import Reading, Source

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
            source.take(1)
            source.emit_markup()
            return True
        if following and following in separators:
            source.take(1)
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
