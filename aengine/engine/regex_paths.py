"""What a regular expression can read: which characters one after the other, and which always by themselves.

Owns the reading of a pattern, in the dialect of tokenizer files (Oniguruma), into the positions of its characters and which may follow
which (V. M. Glushkov, "The abstract theory of automata", 1961). Whether a position takes a character is asked of the engine itself.
Knows nothing of tokenizers beyond that engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import tokenizers
from tokenizers import pre_tokenizers

_SET = frozenset[int]
_NONE: _SET = frozenset()
_BRACED = re.compile(r"\\[pP]\{[^{}]+\}|\\x\{[0-9A-Fa-f]+\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_CLASSES = "sSdDwWhHrntfv"  # after a backslash, one character each


class UnsupportedPatternError(Exception):
    """The pattern has something whose reach is not known here: anchors, lookbehind, references, flags and the like."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Of a pattern, as sets of positions."""

    first: _SET  # that it may read first
    last: _SET  # that it may read last
    alone: _SET  # that are enough for it, whatever stands around
    may_be_empty: bool
    is_optional: bool  # it may be empty whatever stands around, and gives back what it took


_EMPTY = _Part(_NONE, _NONE, _NONE, True, True)


class RegexPaths:
    """Of one pattern that matches from left to right and never looks back."""

    def __init__(self, pattern: str) -> None:
        """Raises `UnsupportedPatternError`."""
        parser = _Parser(pattern)
        root = parser.parse()
        if root.may_be_empty:
            raise UnsupportedPatternError("it matches nothing at all")
        self._alone = sum(1 << position for position in root.alone)
        self._followers = [
            sum(1 << after for before, after in parser.follow if before == position) for position in range(len(parser.atoms))
        ]
        self._takers = [
            pre_tokenizers.Split(tokenizers.Regex(f"(?i:{atom})" if folds else atom), "removed") for atom, folds in parser.atoms
        ]
        self._folds = any(folds for _, folds in parser.atoms)
        self._positions = lru_cache(maxsize=1 << 16)(self._find_positions)

    def reads(self, left: str, right: str) -> bool:
        """Whether some attempt to match, lookahead included, may read these two characters one after the other.

        If not, what is matched up to `left` does not depend on what follows it, and no match spans the two.
        """
        if self._folds and (len(left.casefold()) > 1 or len(right.casefold()) > 1):
            return True  # one character may be taken by several positions
        followers, wanted = self._positions(left), self._positions(right)
        return any(self._followers[position] & wanted for position in range(len(self._followers)) if followers >> position & 1)

    def takes(self, character: str) -> bool:
        """Whether a match may hold the character."""
        return bool(self._positions(character))

    def always_takes(self, character: str) -> bool:
        """Whether the character is in a match wherever it stands."""
        return bool(self._positions(character) & self._alone)

    def _find_positions(self, character: str) -> int:
        """Those that read `character`, as bits."""
        return sum(1 << position for position, taker in enumerate(self._takers) if not taker.pre_tokenize_str(character))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.atoms: list[tuple[str, bool]] = []  # by position: what reads one character, and whether in either case
        self.follow: set[tuple[int, int]] = set()
        self._pattern = pattern
        self._at = 0

    def parse(self) -> _Part:
        root = self._alternatives(folds=False)
        if self._at < len(self._pattern):
            raise UnsupportedPatternError(f"a {self._pattern[self._at]!r} is not expected at {self._at}")
        return root

    def _alternatives(self, folds: bool) -> _Part:
        branches = [self._sequence(folds)]
        while self._skip("|"):
            branches.append(self._sequence(folds))
        return _Part(
            first=_NONE.union(*(branch.first for branch in branches)),
            last=_NONE.union(*(branch.last for branch in branches)),
            alone=_NONE.union(*(branch.alone for branch in branches)),
            may_be_empty=any(branch.may_be_empty for branch in branches),
            is_optional=any(branch.is_optional for branch in branches),
        )

    def _sequence(self, folds: bool) -> _Part:
        part = _EMPTY
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            part = self._then(part, self._quantified(self._item(folds)))
        return part

    def _then(self, one: _Part, other: _Part) -> _Part:
        self.follow.update((before, after) for before in one.last for after in other.first)
        return _Part(
            first=one.first | (other.first if one.may_be_empty else _NONE),
            last=other.last | (one.last if other.may_be_empty else _NONE),
            alone=(one.alone if other.is_optional else _NONE) | (other.alone if one.is_optional else _NONE),
            may_be_empty=one.may_be_empty and other.may_be_empty,
            is_optional=one.is_optional and other.is_optional,
        )

    def _item(self, folds: bool) -> _Part:
        for opening in ("(?!", "(?="):
            if self._skip(opening):
                inside = self._group(folds)  # it reads, and then the match goes on from where it began
                return _Part(inside.first, _NONE, _NONE, may_be_empty=True, is_optional=False)
        for opening in ("(?:", "(?i:"):
            if self._skip(opening):
                return self._group(folds or opening == "(?i:")
        if self._pattern.startswith("(?", self._at):
            raise UnsupportedPatternError(f"{self._pattern[self._at : self._at + 4]} is not read here")
        if self._skip("("):
            return self._group(folds)
        self.atoms.append((self._atom(), folds))
        position = frozenset((len(self.atoms) - 1,))
        return _Part(position, position, position, may_be_empty=False, is_optional=False)

    def _group(self, folds: bool) -> _Part:
        inside = self._alternatives(folds)
        if not self._skip(")"):
            raise UnsupportedPatternError("a group is not closed")
        return inside

    def _quantified(self, part: _Part) -> _Part:
        while self._at < len(self._pattern) and self._pattern[self._at] in "?*+{":
            least, most, is_plain = self._quantifier()
            if most != 1:
                self.follow.update((before, after) for before in part.last for after in part.first)
            part = _Part(
                first=part.first,
                last=part.last,
                alone=part.alone if least <= 1 else _NONE,
                may_be_empty=part.may_be_empty or least == 0,
                is_optional=(part.is_optional or least == 0) and is_plain,
            )
        return part

    def _quantifier(self) -> tuple[int, int | None, bool]:
        """Least and most repetitions, and whether it is one that gives back what it took. A second quantifier is read by itself."""
        for sign, least, most in (("?", 0, 1), ("*", 0, None), ("+", 1, None)):
            if self._skip(sign):
                if self._skip("?"):
                    return least, most, True
                return least, most, not self._skip("+")
        match = _COUNT.match(self._pattern, self._at)
        if match is None or not (match[1] or match[3]):
            raise UnsupportedPatternError("a brace that is not a number of repetitions")
        self._at = match.end()
        least = int(match[1] or 0)
        return least, int(match[3]) if match[3] else None if match[2] else least, True

    def _atom(self) -> str:
        start, character = self._at, self._pattern[self._at]
        if character == "\\":
            braced = _BRACED.match(self._pattern, start)
            escaped = self._pattern[start + 1 : start + 2]
            if braced is None and (not escaped or (escaped.isalnum() and escaped not in _CLASSES)):
                raise UnsupportedPatternError(f"\\{escaped} is not read here")
            self._at = braced.end() if braced else start + 2
        elif character == "[":
            self._at = self._class_end(start)
        elif character in "^$?*+{":
            raise UnsupportedPatternError(f"a {character!r} is not read here")
        else:
            self._at += 1
        return self._pattern[start : self._at]

    def _class_end(self, start: int) -> int:
        depth, at = 0, start
        while at < len(self._pattern):
            character = self._pattern[at]
            if character == "[":
                depth += 1
                if self._pattern.startswith(("]", "^]"), at + 1):
                    raise UnsupportedPatternError("a class that begins with a bracket")
            elif character == "]":
                depth -= 1
                if not depth:
                    return at + 1
            at += 2 if character == "\\" else 1
        raise UnsupportedPatternError("a class is not closed")

    def _skip(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found
