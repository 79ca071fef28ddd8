"""JSON (RFC 8259) as it comes: every function reads as much as can begin a JSON text, and says whether it is whole.

Characters below U+0020 in a string, which models write and JSON does not allow, are read as their escapes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from aengine.chat.source import Reading, Source

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
            source.take(1)
            return True
        if character == "\\":
            if not (yield from _read_escape(source)):
                return False
        elif character < " ":
            source.take(1, json.dumps(character)[1:-1])
        else:
            source.match(_PLAIN)
    return False


def _read_escape(source: Source) -> Reading[bool]:
    source.take(1)
    kind = yield from source.character()
    if not kind or kind not in '"\\/bfnrtu':
        return False
    source.take(1)
    for _ in range(4 if kind == "u" else 0):
        digit = yield from source.character()
        if digit not in _HEX:
            return False
        source.take(1)
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
        number += source.take(1)
    return bool(_NUMBER.fullmatch(number))
