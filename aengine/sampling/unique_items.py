"""Arrays whose items differ, while they are written: which tokens would end an item that is there already. Owns where an output is in its
JSON.

A grammar has no memory of texts, so it cannot say that items differ. The masks of the grammar are narrowed here. In such an array the last
character of an item is a token of its own, so there is one moment at which it is known whether an item repeats another one. What could only
become a repetition is ruled out before, as far as the text of the items tells.
"""

from __future__ import annotations

import enum
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass

BETWEEN, IN_STRING, ESCAPED, IN_WORD = range(4)
"""Where a text may be within JSON: a word is a number, true, false or null."""
_BLANK = frozenset(b" \t\r\n")
_WORD = frozenset(b"+-.0123456789Eabcdefghijklmnopqrstuvwxyz")
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")
_STRUCTURE = frozenset(b'"\\[]{},:')
_ZEROS = (b"0", b"-0")
_ENDS = (b'"', b"]", b"}", b",")

MAX_DEPTH = 100
"""Most tokens that are looked ahead, and"""
MAX_LOOKS = 200
"""most masks that are made to find out which tokens lead on. Beyond that any does, and may lead to where nothing follows."""

Mask = NDArray[np.bool_]


@dataclass(eq=False, slots=True)
class SchemaPlace:
    """What a schema says of the values at some place, so far as it concerns arrays whose items differ."""

    is_unique: bool = False
    """Items of an array here differ."""
    has_free_strings: bool = False
    """Strings here are of any characters and any length."""
    prefix: list[SchemaPlace | None] = field(default_factory=list)
    items: SchemaPlace | None = None
    named: dict[str, SchemaPlace | None] = field(default_factory=dict)
    others: SchemaPlace | None = None

    def item(self, index: int) -> SchemaPlace | None:
        return self.prefix[index] if index < len(self.prefix) else self.items

    def property(self, name: str) -> SchemaPlace | None:
        return self.named.get(name, self.others)


@dataclass(slots=True)
class _Shape:
    """What a token does to the JSON it is written into."""

    plain: bytes  # without the blanks that are not in strings
    lowest: int = 0  # the containers that it ends, beyond those it begins
    has_item: bool = False  # a value within it, where it begins
    opens: bool = False  # it begins an array and ends an item of that
    ends_string: bool = False  # in which it begins


class _Event(enum.Enum):
    """What a byte of JSON does, where that is not within a string or a word."""

    STRING_BEGINS = enum.auto()
    STRING_ENDS = enum.auto()
    WORD_ENDS = enum.auto()
    OTHER = enum.auto()  # a bracket, a colon or a comma


class _Scanner:
    """Reads JSON byte by byte. `inside`: where it is; `plain`: what it has read, without the blanks that are not in strings."""

    __slots__ = ("inside", "plain")

    def __init__(self, inside: int, plain: bytearray) -> None:
        self.inside = inside
        self.plain = plain

    def events(self, text: bytes) -> Iterator[tuple[_Event, int]]:
        """Yield each event of `text` with its byte, when `plain` ends with that; a word ends before the byte behind it."""
        plain = self.plain
        for byte in text:
            if self.inside == IN_STRING:
                plain.append(byte)
                if byte == _BACKSLASH:
                    self.inside = ESCAPED
                elif byte == _QUOTE:
                    self.inside = BETWEEN
                    yield _Event.STRING_ENDS, byte
                continue
            if self.inside == ESCAPED:
                plain.append(byte)
                self.inside = IN_STRING
                continue
            if byte in _WORD:
                plain.append(byte)
                self.inside = IN_WORD
                continue
            if self.inside == IN_WORD:
                self.inside = BETWEEN
                yield _Event.WORD_ENDS, byte
            if byte in _BLANK:
                continue
            plain.append(byte)
            if byte == _QUOTE:
                self.inside = IN_STRING
                yield _Event.STRING_BEGINS, byte
            else:
                yield _Event.OTHER, byte


def _shape(text: bytes, inside: int) -> _Shape:
    shape = _Shape(b"")
    scanner = _Scanner(inside, bytearray())
    opened: list[int] = []
    depth = 0
    begins = False

    def value_ends() -> None:
        shape.has_item = shape.has_item or depth == 0
        shape.opens = shape.opens or opened[-1:] == [ord("[")]

    for event, byte in scanner.events(text):
        if event is _Event.STRING_BEGINS:
            begins = True
        elif event is _Event.WORD_ENDS or (event is _Event.STRING_ENDS and begins):
            value_ends()
        elif event is _Event.STRING_ENDS:
            shape.ends_string = True
        elif byte in _OPENING:
            opened.append(byte)
            depth += 1
        elif byte in _CLOSING:
            depth -= 1
            shape.lowest = min(shape.lowest, depth)
            if opened:
                opened.pop()
                value_ends()
    shape.plain = bytes(scanner.plain)
    return shape


class TokenShapes:
    """The shapes of all tokens of a vocabulary, by where a token begins. Takes up to a second for 150,000 tokens."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        num = len(texts)
        self.texts = texts
        self.lowest = np.zeros((3, num), np.int8)
        self.has_item = np.zeros(num, np.bool_)
        self.opens = np.zeros((3, num), np.bool_)
        self.ends_string = np.zeros((3, num), np.bool_)
        self.is_blank = np.zeros(num, np.bool_)
        self.begins_with_word = np.zeros(num, np.bool_)
        self.is_mixed = np.zeros(num, np.bool_)  # begins with a word and has something else
        self._by_plain: tuple[dict[bytes, list[int]], ...] = ({}, {}, {})
        self._by_text: dict[bytes, list[int]] = {}  # those that mean the same wherever they begin within a string
        self.longest = max(map(len, texts), default=0)
        for token, text in enumerate(texts):
            if not text:
                continue
            self.begins_with_word[token] = text[0] in _WORD
            self.is_mixed[token] = text[0] in _WORD and not _WORD.issuperset(text)
            has_structure = not _STRUCTURE.isdisjoint(text)
            if has_structure:
                for inside in (BETWEEN, IN_STRING, ESCAPED):
                    shape = _shape(text, inside)
                    self.lowest[inside, token] = shape.lowest
                    self.opens[inside, token] = shape.opens
                    self.ends_string[inside, token] = shape.ends_string
                    self._by_plain[inside].setdefault(shape.plain, []).append(token)
                    if inside == BETWEEN:
                        self.has_item[token] = shape.has_item
                continue
            self._by_text.setdefault(text, []).append(token)
            plain = text.translate(None, bytes(_BLANK))
            self.is_blank[token] = not plain
            self.has_item[token] = text.strip() != plain or bool(plain and text[-1] in _BLANK)
            if _WORD.issuperset(plain):
                self._by_plain[BETWEEN].setdefault(plain, []).append(token)

    def are_enough(self) -> bool:
        """Whether each character that ends an item or follows one is a token."""
        return all(self.with_plain(IN_STRING if end == b'"' else BETWEEN, end) for end in _ENDS)

    def with_plain(self, inside: int, plain: bytes) -> list[int]:
        found = self._by_plain[inside % IN_WORD].get(plain, [])
        return found + self._by_text.get(plain, []) if inside in (IN_STRING, ESCAPED) else found


@dataclass(slots=True)
class _Items:
    """The items of one array that have ended. After a step back only the first ones count: each call says how many, and `add` drops the
    others."""

    texts: list[tuple[bytes, ...]] = field(default_factory=list)  # each in the ways it could be written
    values: list[object] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)  # by value
    open_ends: set[bytes] = field(default_factory=set)  # begun items that can become one that is not here,
    dead_ends: dict[bytes, int] = field(default_factory=dict)  # and those that cannot, with the number of items that rule it out
    is_uniform: bool = True  # whether the same is asked of each

    def add(self, count: int, text: bytes) -> None:
        spellings = _ZEROS if text in _ZEROS else (text,)
        wholes = [b"," + one for one in spellings]
        self.open_ends = {one for one in self.open_ends if self.is_uniform and not any(whole.startswith(one) for whole in wholes)}
        if self.texts[count:] == [spellings]:
            return
        for value in self.values[count:]:
            del self.numbers[value]
        if self.texts[count:]:
            self.dead_ends = {begun: num for begun, num in self.dead_ends.items() if num <= count}
        del self.texts[count:], self.values[count:]
        value = _value(text)
        if value not in self.numbers:
            self.numbers[value] = count
            self.values.append(value)
            self.texts.append(spellings)
        if not self.is_uniform:
            self.dead_ends.clear()

    def has(self, count: int, text: bytes) -> bool:
        try:
            return self.numbers.get(_value(text), count) < count
        except ValueError:  # not a value yet
            return False
        except RecursionError:  # too deep to be told from others
            return True


@dataclass(frozen=True, slots=True)
class _Level:
    """A container that is open."""

    parent: _Level | None
    place: SchemaPlace | None
    is_array: bool
    inside: bool  # of an array whose items differ, or such an array
    items: _Items | None  # of such an array
    count: int = 0  # of the items that have ended
    begin: int = 0  # in the plain text, of what follows the last item that has ended
    value_place: SchemaPlace | None = None  # of the value that is next
    expects_name: bool = False


@dataclass(frozen=True, slots=True)
class _Where:
    """Behind a token."""

    level: _Level | None
    inside: int
    length: int  # of the plain text
    string: int = 0  # where a string or word begins in the plain text


@dataclass(frozen=True, eq=False, slots=True)
class UniqueArrays:
    """The arrays of a grammar whose items differ, made ready for one model's vocabulary. `root`: the place of a whole output."""

    root: SchemaPlace
    shapes: TokenShapes

    def start(self) -> UniqueItems:
        return UniqueItems(self.root, self.shapes)


class UniqueItems:
    """Where one output is in its JSON."""

    def __init__(self, root: SchemaPlace, shapes: TokenShapes) -> None:
        self._root = root
        self._shapes = shapes
        self._plain = bytearray()  # the output, without blanks
        self._behind = [_Where(None, BETWEEN, 0)]  # each token, and at the start
        self._num_looks = 0  # for this mask

    def accept(self, token: int) -> None:
        self._behind.append(self._step(self._behind[-1], self._shapes.texts[token]))

    def go_back(self, num_tokens: int) -> None:
        """Goes back by the last `num_tokens` tokens of the output."""
        if num_tokens:
            del self._behind[-num_tokens:]
        del self._plain[self._behind[-1].length :]

    def banned(self) -> Mask:
        """[vocab_size], the tokens that end an item that is there already, or do not tell whether they do. Those that could only lead to
        such a token are not among them."""
        where = self._behind[-1]
        inside = where.inside % IN_WORD
        shapes = self._shapes
        banned: Mask = shapes.opens[inside].copy()
        for level, depth in _arrays(where):
            if depth:
                ends = shapes.lowest[inside] <= -depth
                if depth == 1 and where.level is not None and where.inside in (BETWEEN, IN_WORD):
                    end = b"]" if where.level.is_array else b"}"
                    ends[shapes.with_plain(BETWEEN, end)] = self._repeats(level, end)
                banned |= ends
            elif where.inside == IN_STRING or where.inside == ESCAPED:
                ends = shapes.ends_string[inside].copy()
                if where.inside == IN_STRING:
                    ends[shapes.with_plain(IN_STRING, b'"')] = self._repeats(level, b'"')
                banned |= ends
            elif where.inside == IN_WORD:
                banned |= np.where(shapes.begins_with_word, shapes.is_mixed, True if self._repeats(level, b"") else shapes.has_item)
            else:
                banned |= shapes.has_item
        return banned

    def limit(self, allowed: Mask, allowed_behind: Callable[[Sequence[int]], Mask]) -> None:
        """Takes out of `allowed` [vocab_size], the tokens that the grammar allows, those that would lead to a repeated item or to nothing.
        `allowed_behind`: what the grammar allows behind some more tokens."""
        where = self._behind[-1]
        if where.level is None or not where.level.inside:
            allowed &= ~self._shapes.opens[where.inside % IN_WORD]
            return
        allowed &= ~self.banned()
        self._num_looks = 0
        for token, level, begun in self._retracing(where):
            if allowed[token] and not self._leads_on([token], level, begun, allowed_behind):
                allowed[token] = False

    def _leads_on(self, tokens: list[int], level: _Level, begun: bytes, allowed_behind: Callable[[Sequence[int]], Mask]) -> bool:
        """Whether some item that is not there begins like one that is, behind `tokens`. `begun`: what is then written of it."""
        items = level.items
        assert items is not None
        if begun in items.open_ends:
            return True
        if items.dead_ends.get(begun, level.count + 1) <= level.count:
            return False
        if len(tokens) > MAX_DEPTH or self._num_looks >= MAX_LOOKS:
            return True
        self._num_looks += 1
        self.accept(tokens[-1])
        try:
            allowed = allowed_behind(tokens) & ~self.banned()
            retracing = self._retracing(self._behind[-1])
            others = allowed if self._behind[-1].inside in (IN_STRING, ESCAPED) else allowed & ~self._shapes.is_blank
            others = others.copy()
            others[[token for token, _, _ in retracing]] = False
            if bool(others.any()) or any(
                allowed[token] and self._leads_on([*tokens, token], inner, behind, allowed_behind) for token, inner, behind in retracing
            ):
                items.open_ends.add(begun)
                return True
            items.dead_ends[begun] = level.count
            return False
        finally:
            self.go_back(1)

    def _repeats(self, level: _Level, end: bytes) -> bool:
        """Whether the item that is being written is there already, if it ends so."""
        return level.items is not None and level.items.has(level.count, bytes(self._plain[level.begin :]).lstrip(b",") + end)

    def _retracing(self, where: _Where) -> list[tuple[int, _Level, bytes]]:
        """The tokens that begin as an item that is there, or go on so; with the array, and what is then written of its next item."""
        found: dict[int, tuple[int, _Level, bytes]] = {}
        levels = list(_arrays(where))
        if where.inside == IN_WORD and levels and not levels[0][1] and (ended := self._with_word(levels[0][0])) is not None:
            levels.append((ended, 0))  # what follows the word, if it ends here
        for level, depth in reversed(levels):
            assert level.items is not None
            place = level.value_place
            if not depth and where.inside in (IN_STRING, ESCAPED) and place is not None and place.has_free_strings:
                continue
            begun = bytes(self._plain[level.begin :])
            seen: set[bytes] = set()
            for text in itertools.chain.from_iterable(level.items.texts[: level.count]):
                whole = b"," + text
                if not whole.startswith(begun):
                    continue
                for end in range(min(len(whole), len(begun) + self._shapes.longest), len(begun), -1):
                    behind = whole[:end]
                    if behind in seen:
                        continue
                    seen.add(behind)
                    for token in self._shapes.with_plain(where.inside, whole[len(begun) : end]):
                        found.setdefault(token, (token, level, behind))
        return list(found.values())

    def _with_word(self, level: _Level) -> _Level | None:
        """The array with the word that is being written as its item; None if it is not whole."""
        try:
            return self._ended(level)
        except ValueError:
            return None

    def _step(self, where: _Where, text: bytes) -> _Where:
        scanner = _Scanner(where.inside, self._plain)
        level, string = where.level, where.string
        for event, byte in scanner.events(text):
            if event is _Event.STRING_BEGINS:
                string = len(self._plain) - 1
            elif event is _Event.STRING_ENDS and level is not None and level.expects_name:
                place = None if level.place is None else level.place.property(json.loads(self._plain[string:]))
                level = replace(level, value_place=place)
            elif event is not _Event.OTHER:
                level = self._ended(level)
            elif byte in _OPENING:
                level = self._opened(level, byte == ord("["))
            elif byte in _CLOSING:
                level = self._ended(None if level is None else level.parent)
            elif level is not None and byte == _COLON:
                level = replace(level, expects_name=False)
            elif level is not None and byte == _COMMA:
                level = replace(level, expects_name=not level.is_array)
        return _Where(level, scanner.inside, len(self._plain), string)

    def _opened(self, parent: _Level | None, is_array: bool) -> _Level:
        place = self._root if parent is None else parent.value_place
        is_unique = is_array and place is not None and place.is_unique
        return _Level(
            parent,
            place,
            is_array,
            is_unique or (parent is not None and parent.inside),
            _Items(is_uniform=not place.prefix) if is_unique and place is not None else None,
            begin=len(self._plain),
            value_place=place.item(0) if is_array and place is not None else None,
            expects_name=not is_array,
        )

    def _ended(self, level: _Level | None) -> _Level | None:
        """A value within a container."""
        if level is None or not level.is_array or level.place is None:
            return level
        count = level.count + 1
        if level.items is not None:
            level.items.add(level.count, bytes(self._plain[level.begin :]).lstrip(b","))
        return replace(level, count=count, begin=len(self._plain), value_place=level.place.item(count))


def _arrays(where: _Where) -> Iterator[tuple[_Level, int]]:
    """The open arrays whose items differ, the innermost first, with the number of containers that are open within their item."""
    level, depth = where.level, 0
    while level is not None and level.inside:
        if level.items is not None:
            yield level, depth
        level, depth = level.parent, depth + 1


def _value(text: bytes) -> object:
    """A value that equals another one where JSON Schema says so. Raises `ValueError`."""
    return _hashable(json.loads(text, parse_int=Decimal, parse_float=Decimal))


def _hashable(value: Any) -> object:
    if isinstance(value, dict):
        return frozenset((name, _hashable(one)) for name, one in value.items())
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    return (type(value), value) if isinstance(value, bool) else value
