"""JSON bodies: parsed within bounds, and their fields read one by one with all violations collected.

Knows no field by name.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import MAX_INT32, Accepts, FieldChecks, Refusal, Rule, is_not, shown
from aengine.server.core.decoding import UNCOUNTED_BYTES
from aengine.server.core.errors import clip
from aengine.server.http.exchange import Exchange
from aengine.server.http.json_pieces import PiecewiseDecoder, decode_text

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

_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")


async def read_body(exchange: Exchange, check: FieldChecks) -> Fields:
    """The fields of the body, a JSON object. Raises `InvalidRequestError` (body), and what `Exchange.read` raises."""
    raw = await exchange.read()
    return Fields(parse(raw) if len(raw) <= UNCOUNTED_BYTES else await exchange.decoding.run(parse, raw), "", check)


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

    def take(self, name: str, rule: Rule, default: Any = None) -> Any:
        """The value of a field as `rule` has it; `default` without one, and where it is refused."""
        if name not in self._left:
            return default
        try:
            return rule(self._left.pop(name))
        except Refusal as refusal:
            self.refuse(name, str(refusal))
            return default

    def need(self, name: str, rule: Rule, default: Any = None) -> Any:
        """`take`, of a field that must be there."""
        if name not in self._left:
            self.refuse(name, "must be set")
            return default
        return self.take(name, rule, default)

    def sub(self, name: str) -> Fields | None:
        """The fields of an object; None if there is none."""
        found = self.take(name, OBJECT)
        return None if found is None else Fields(found, f"{self.path}{name}.", self.check)

    def objects(self, name: str) -> Iterator[Fields]:
        """The fields of each object of a list."""
        return self._objects(name, self.take(name, LIST, ()))

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
        self.check.add(self.path + name, description)

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
