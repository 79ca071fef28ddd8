"""`Expression`: a regular expression of a quantization_config or an adapter_config.json, compared in bounded time.

Python's `re` tries one way to match after the other, so a short expression can take longer than anybody waits. Expressions with more than
four repeats, or repeats within repeats, are therefore followed in all ways at once, which is slower: as sets of places that are reached.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aengine.api.errors import ModelLoadError

if sys.version_info >= (3, 11):
    from re import _parser as sre_parse  # type: ignore[attr-defined]
else:
    import sre_parse

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_CLASSES = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}
_MOST_CHARACTERS = 1000
_MOST_REPEATS, _MOST_CHOICES, _LONGEST_NAME = 4, 10, 128
"""Of an expression that `re` compares, and the characters of names that it is compared with."""
_MOST_STEPS = 4_000_000
"""Most steps that all comparisons of one expression take, or those of all expressions that share their work: some five seconds."""


@dataclass(slots=True)
class _Work:
    left: int  # steps


def share_work(expressions: Iterable[Expression]) -> None:
    """Have all of these expressions together take no longer than one of them may."""
    work = _Work(_MOST_STEPS)
    for expression in expressions:
        expression._work = work


class Expression:
    def __init__(self, pattern: str, where: str = "quantization_config") -> None:
        """`where`: what errors say has it. Raises ModelLoadError for what is no regular expression, or one that cannot be compared in
        bounded time."""
        self._pattern, self._where = pattern, where
        self._work = _Work(_MOST_STEPS)
        if len(pattern) > _MOST_CHARACTERS:
            raise self._refused(f"has more than {_MOST_CHARACTERS} characters")
        try:
            self._compiled = re.compile(pattern)
            self._tree: Any = sre_parse.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._refused(f"is not a regular expression: {error}") from error
        self._is_quick = _is_quick(self._tree)
        if not self._is_quick and self._compiled.flags & ~re.UNICODE:
            raise self._refused("has flags and too many repeats, which is not supported")

    def matches(self, name: str) -> bool:
        """Whether it is an expression of the whole name. Raises ModelLoadError where that takes too long."""
        if self._is_quick and len(name) <= _LONGEST_NAME:
            return self._compiled.fullmatch(name) is not None
        return len(name) in self._ends(self._tree, name, {0})

    def _ends(self, items: Iterable[tuple[Any, Any]], name: str, places: set[int]) -> set[int]:
        """Where what begins at one of the `places` can end."""
        for operation, value in items:
            self._work.left -= len(places) + 1
            if self._work.left < 0:
                raise self._refused("takes too long to compare")
            if not places:
                break
            places = self._step(str(operation), operation, value, name, places)
        return places

    def _step(self, kind: str, operation: Any, value: Any, name: str, places: set[int]) -> set[int]:
        if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return {place + 1 for place in places if place < len(name) and _is_in(kind, value, name[place])}
        if kind == "BRANCH":
            return {end for branch in value[1] for end in self._ends(branch, name, places)}
        if kind == "SUBPATTERN":
            return self._ends(value[-1], name, places)
        if kind in _REPEATS:
            least, most, inner = value
            return self._repeated(least, most, inner, name, places)
        if kind in ("ASSERT", "ASSERT_NOT"):
            direction, inner = value
            width = 0 if direction > 0 else inner.getwidth()[0]
            found = {place for place in places if place >= width and self._ends(inner, name, {place - width})}
            return found if kind == "ASSERT" else places - found
        if kind == "AT" and str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return places & {0}
        if kind == "AT" and str(value) in ("AT_END", "AT_END_STRING"):
            return places & {len(name)}
        raise self._refused(f"has too many repeats beside {kind.lower()}, which is not supported")

    def _repeated(self, least: int, most: int, inner: Any, name: str, places: set[int]) -> set[int]:
        for _ in range(least):
            before, places = places, self._ends(inner, name, places)
            if not places or places == before:
                break
        found, count = set(places), least
        while places and count < most:
            places = self._ends(inner, name, places) - found
            found |= places
            count += 1
        return found

    def _refused(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where} has {self._pattern[:200]!r}, which {why}")


def _is_quick(items: Iterable[tuple[Any, Any]]) -> bool:
    """Whether `re` has few ways to try: few repeats, with nothing in them that leaves a choice, and few choices beside them."""
    repeats, choices = _ways(items)
    return repeats <= _MOST_REPEATS and choices <= _MOST_CHOICES


def _ways(items: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """How many repeats there are, and how many choices between two; more than are possible if repeats are not simple."""
    repeats = choices = 0
    for operation, value in items:
        kind, inner = str(operation), [_ways(part) for part in _parts(value)]
        if kind in ("GROUPREF", "GROUPREF_EXISTS"):
            repeats += _MOST_REPEATS + 1
        if kind == "BRANCH":
            choices += len(value[1]) - 1
        if kind.endswith("REPEAT"):
            least, most = value[:2]
            if most > 1 and any(map(any, inner)):
                repeats += _MOST_REPEATS + 1
            repeats += most > max(least, 1)
            choices += most > least
        repeats += sum(of_part for of_part, _ in inner)
        choices += sum(of_part for _, of_part in inner)
    return repeats, choices


def _parts(value: Any) -> list[Any]:
    """The expressions within one."""
    if isinstance(value, sre_parse.SubPattern):
        return [value]
    return [part for one in value for part in _parts(one)] if isinstance(value, list | tuple) else []


def _is_in(kind: str, value: Any, character: str) -> bool:
    if kind == "ANY":
        return character != "\n"
    if kind in ("LITERAL", "NOT_LITERAL"):
        return bool(ord(character) == value) == (kind == "LITERAL")
    negated = str(value[0][0]) == "NEGATE"
    found = any(_is_of(str(one), what, character) for one, what in value[negated:])
    return found != negated


def _is_of(kind: str, what: Any, character: str) -> bool:
    if kind == "CATEGORY":
        return re.match(_CLASSES[str(what).removeprefix("CATEGORY_")], character) is not None
    first, last = what if kind == "RANGE" else (what, what)
    return bool(first <= ord(character) <= last)
