"""JSON in pieces: what the json module reads, without holding up other threads for long.

Its decoder in C has the GIL for the whole of a text; that in Python, whose syntax this is, takes ten times as long. Here Python reads what
holds values, and C the long texts and lists of plain values within, a piece at a time.

JSON bodies: parsed within bounds, and their fields read one by one with all violations collected.

Knows no field by name."""

from __future__ import annotations

import codecs
import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from json import decoder, scanner
from typing import Any

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import MAX_INT32, Accepts, FieldChecks, Refusal, Rule, is_not, shown
from aengine.server.core.decoding import UNCOUNTED_BYTES
from aengine.server.core.errors import clip
from aengine.server.http.http_exchange import HttpExchange

PIECE = 32 * 1024
"""Characters. C reads so many in a millisecond or two."""
DECODED_AT_ONCE = 1 << 20  # bytes of UTF-8

_scan: Callable[..., tuple[str, int]] = decoder.scanstring  # type: ignore[attr-defined]
_PLAIN = re.compile(
    r'(?:[ \t\n\r]*(?:"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*"|-?[0-9][0-9.eE+-]*|true|false|null)[ \t\n\r]*,)+', re.DOTALL
)
"""Values of a list that hold no others, each with its comma."""
_HALF_ESCAPE = re.compile(r"u[0-9A-Fa-f]{0,3}|u[dD][89abAB][0-9A-Fa-f]{2}")
"""The end of an escape, behind its backslash, that goes on behind it; also where it is half a character."""
_LONGEST_HALF = 5


class PiecewiseDecoder(json.JSONDecoder):
    """Takes the hooks for objects, integers and constants. Refuses half of a surrogate pair with a UnicodeEncodeError."""

    def __init__(
        self,
        *,
        object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
        parse_constant: Callable[[str], Any] | None = None,
        parse_int: Callable[[str], Any] | None = None,
    ) -> None:
        def read_object(pairs: list[tuple[str, Any]]) -> Any:
            "".join([name for name, _ in pairs]).encode()
            return dict(pairs) if object_pairs_hook is None else object_pairs_hook(pairs)

        super().__init__(object_pairs_hook=read_object, parse_constant=parse_constant, parse_int=parse_int)
        self._plain = json.JSONDecoder(parse_constant=parse_constant, parse_int=parse_int)
        self.parse_string = read_string
        self.parse_array = self._read_list
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _read_list(self, text_and_place: tuple[str, int], scan_once: Callable[[str, int], tuple[Any, int]]) -> tuple[list[Any], int]:
        """A list, of which `[` was read."""
        text, at = text_and_place
        values: list[Any] = []
        while (run := _PLAIN.match(text, at, at + PIECE)) is not None:
            values += self._plain.decode(f"[{run[0][:-1]}]")
            if "\\u" in run[0]:
                "".join([value for value in values if type(value) is str]).encode()
            at = run.end()
        rest, end = decoder.JSONArray((text, at), scan_once)  # type: ignore[attr-defined]
        if values and not rest:
            raise json.JSONDecodeError("Illegal trailing comma before end of array", text, at - 1)
        return values + rest, end


def decode_text(raw: bytes) -> str:
    """The text of bytes of UTF-8, decoded a piece at a time. Raises UnicodeDecodeError."""
    if len(raw) <= DECODED_AT_ONCE:
        return raw.decode()
    step = codecs.getincrementaldecoder("utf-8")()
    try:
        parts = [step.decode(raw[start : start + DECODED_AT_ONCE]) for start in range(0, len(raw), DECODED_AT_ONCE)]
        return "".join([*parts, step.decode(b"", final=True)])
    except UnicodeDecodeError:
        return raw.decode()  # which knows at which byte


def read_string(text: str, begin: int, strict: bool = True) -> tuple[str, int]:
    """The string whose opening quote is before `begin`, and where it ends."""
    quote = text.find('"', begin, begin + PIECE)
    if quote >= 0 and text[quote - 1] != "\\":
        return _checked(*_scan(text, begin, strict))
    parts: list[str] = []
    at = begin
    while at + PIECE < len(text):
        piece = text[at : at + PIECE]
        piece = piece[: _whole_escapes(piece)]
        part, end = _checked(*_scan(f'{piece}"', 0, strict))
        parts.append(part)
        if end <= len(piece):
            return "".join(parts), at + end
        at += len(piece)
    part, end = _checked(*_scan(text, at, strict))
    return "".join([*parts, part]), end


def _whole_escapes(piece: str) -> int:
    """How much of a piece of a string has no escape that goes on behind it."""
    end = len(piece)
    while (cut := _last_escape(piece, end)) is not None:
        end = cut
    return end


def _last_escape(piece: str, end: int) -> int | None:
    """Where the escape begins that goes on behind `end`; None if there is none."""
    for length in range(_LONGEST_HALF + 1):
        before = end - length
        if not length or _HALF_ESCAPE.fullmatch(piece, before, end):
            stem = piece[:before]
            if (len(stem) - len(stem.rstrip("\\"))) % 2:
                return before - 1
    return None


def _checked(part: str, end: int) -> tuple[str, int]:
    if not part.isascii():
        part.encode()
    return part, end


MAX_VALUES = 1 << 19
"""Most commas in a body. Each may be that of a value, and so many take some 100 ms of a thread."""
MAX_CONTAINERS = 1 << 14
"""Most opening brackets. What they open is looked at by Python."""
MAX_NAMES = 1 << 16
"""Most colons."""
MAX_STRINGS = 1 << 19
PIECE_BYTES = 1 << 20
"""So much is looked at without other threads having a turn: a few milliseconds."""
MAX_DIGITS = 400
"""Most of an integer. To read one takes time with their square."""
MAX_OBJECTS = 4096
"""Most of a list."""
MAX_UNKNOWN = 16
"""Most unknown fields that are named."""
MAX_NAME = 64
"""Characters of the longest name that may be a known one, misspelled."""

OBJECT = Accepts(lambda value: isinstance(value, dict), "an object")
LIST = Accepts(lambda value: isinstance(value, list), "a list")
STRING = Accepts(lambda value: isinstance(value, str), "a string")
IDS = Accepts(
    lambda value: isinstance(value, list) and all(type(one) is int and abs(one) <= MAX_INT32 for one in value), "a list of token ids"
)
TEXT_OR_LIST = Accepts(lambda value: isinstance(value, str | list), "a string or a list of objects")
TEXT_OR_OBJECT = Accepts(lambda value: isinstance(value, str | dict), "a string or an object")

_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")


async def read_body(exchange: HttpExchange, check: FieldChecks) -> Fields:
    """The fields of the body, a JSON object. Raises `InvalidRequestError` (body), and what `HttpExchange.read` raises."""
    raw = await exchange.read()
    return Fields(parse(raw) if len(raw) <= UNCOUNTED_BYTES else await exchange.decoding.run(parse, raw), "", check)


async def read_generation(exchange: HttpExchange, check: FieldChecks) -> Fields:
    """`read_body` of a request that generates: the header `x-session-id` is its `session`, unless the body has one."""
    given = await read_body(exchange, check)
    for session in exchange.headers.get("x-session-id", ())[:1]:
        given.put_default("session", session)
    return given


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises `InvalidRequestError` (body) for what is no JSON object in UTF-8, names a field twice, or has too
    many values. Of a large body no more than a piece is read at a time without other threads having a turn."""
    if any(count > most for count, most, _ in _marks([raw])):
        for count, most, words in _marks(_outside_strings(raw)):
            if count > most:
                raise _refused(f"{count} {words} are more than {most}")
    try:
        is_large = len(raw) > UNCOUNTED_BYTES
        value = _DECODERS[is_large, _has_long_number(raw)].decode(decode_text(raw))
        if not is_large and b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()  # a half of a surrogate pair is no character
    except UnicodeDecodeError as error:
        raise _refused(f"it is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise _refused("it has half a surrogate pair, which is no character") from None
    except RecursionError:
        raise _refused("it is too deep") from None
    except ValueError as error:
        raise _refused(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _refused("it is not a JSON object")
    return value


class Fields:
    """The fields of an object in a body, each of which is taken once; what nobody takes is unknown. A null is as good as no field."""

    def __init__(self, values: Mapping[str, Any], path: str, check: FieldChecks) -> None:
        """`path`: of the object, "" for the body itself, "messages[2]."."""
        self.path = path
        self.check = check
        self._left = {name: value for name, value in values.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take_field(self, name: str, rule: Rule, default: Any = None) -> Any:
        """The value of a field as `rule` has it; `default` without one, and where it is refused."""
        if name not in self._left:
            return default
        try:
            return rule(self._left.pop(name))
        except Refusal as refusal:
            self.refuse(name, str(refusal))
            return default

    def peek(self, name: str) -> Any:
        """The value of a field as it was given, which is still to be taken; None without one."""
        return self._left.get(name)

    def not_taken(self) -> dict[str, Any]:
        """What is still to be taken, as it was given."""
        return dict(self._left)

    def put_default(self, name: str, value: Any) -> None:
        """Add a field, unless there is one of this name."""
        if name not in self:
            self._left[name] = value

    def need(self, name: str, rule: Rule, default: Any = None) -> Any:
        """`take_field`, of a field that must be there."""
        if name not in self._left:
            self.refuse(name, "must be set")
            return default
        return self.take_field(name, rule, default)

    def sub(self, name: str) -> Fields | None:
        """The fields of an object; None if there is none."""
        found = self.take_field(name, OBJECT)
        return None if found is None else self.within(name, found)

    def within(self, name: str, values: Mapping[str, Any]) -> Fields:
        """The fields `values` of an object `name` that was taken."""
        return Fields(values, f"{self.path}{name}.", self.check)

    def objects(self, name: str) -> Iterator[Fields]:
        """The fields of each object of a list."""
        return self._objects(name, self.take_field(name, LIST, ()))

    def text_or_objects(self, name: str) -> str | list[Fields]:
        """A text, or the fields of each object of a list. It must be there."""
        found = self.need(name, TEXT_OR_LIST, "")
        if isinstance(found, str):
            return found
        return list(self._objects(name, found))

    def _objects(self, name: str, values: Sequence[Any]) -> Iterator[Fields]:
        if len(values) > MAX_OBJECTS:
            self.refuse(name, f"{len(values)} entries are more than {MAX_OBJECTS}")
        for index, value in enumerate(islice(values, MAX_OBJECTS)):
            if isinstance(value, dict):
                yield Fields(value, f"{self.path}{name}[{index}].", self.check)
            else:
                self.refuse(f"{name}[{index}]", is_not(value, "an object"))

    def take_all(self, names: Iterable[str]) -> dict[str, Any]:
        """Take those of the fields `names` that are there; returns their values as they are, by name."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def drop(self, names: Iterable[str]) -> None:
        """Take fields that change nothing, without a look at their values."""
        self.take_all(names)

    def rest(self) -> dict[str, Any]:
        """Take all fields that are left; returns their values as they are, by name."""
        return self.take_all(list(self._left))

    def refuse(self, name: str, description: str) -> None:
        self.check.add_violation(self.path + name, description)

    def refuse_all(self, refused: Mapping[str, str]) -> None:
        """Take fields that are not possible, and add them to the violations with their reasons."""
        for name in self.take_all(refused):
            self.refuse(name, f"is not possible: {refused[name]}")

    def refuse_rest(self, known: Iterable[str], words: str = "Unrecognized request argument supplied: {}") -> None:
        """Add what nobody took to the violations, since it is not `known`. `words`: the API's, with the name at {}."""
        known = list(known)
        for name in islice(self._left, MAX_UNKNOWN):
            near = difflib.get_close_matches(name, known, 1) if len(name) <= MAX_NAME else ()
            name = clip(name)
            self.refuse(name, words.format(name) + (f"; did you mean {near[0]}?" if near else ""))


def _marks(pieces: Iterable[bytes]) -> list[tuple[int, int, str]]:
    """How many there are of what values and containers have, how many there may be, and their name."""
    commas = colons = brackets = 0
    for piece in pieces:
        commas += piece.count(b",")
        colons += piece.count(b":")
        brackets += piece.count(b"[") + piece.count(b"{")
    return [(commas, MAX_VALUES, "commas"), (colons, MAX_NAMES, "colons"), (brackets, MAX_CONTAINERS, "opening brackets")]


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """What of a JSON text is in no string, in pieces. Behind its first mistake that may be anything."""
    at = quotes = 0
    while at < len(raw):
        piece = raw[at : at + PIECE_BYTES]
        if at + len(piece) < len(raw) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # else it would end within an escape
        at += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        if quotes > 2 * MAX_STRINGS:
            raise _refused(f"it has more than {MAX_STRINGS} strings")


def _has_long_number(raw: bytes) -> bool:
    """Whether anywhere, in strings too, are `MAX_DIGITS` digits in a row."""
    zeros = b"0" * MAX_DIGITS
    return any(zeros in raw[at : at + PIECE_BYTES + MAX_DIGITS].translate(_AS_ZEROS) for at in range(0, len(raw), PIECE_BYTES))


def _short_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has {shown(name)} twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _refused(description: str) -> InvalidRequestError:
    return InvalidRequestError.of("body", description)


# Made once: one in pieces consists of functions that hold each other.
_DECODERS = {
    (is_large, has_long_number): make(
        object_pairs_hook=_distinct, parse_constant=_no_constant, parse_int=_short_integer if has_long_number else None
    )
    for is_large, make in ((False, json.JSONDecoder), (True, PiecewiseDecoder))
    for has_long_number in (False, True)
}
