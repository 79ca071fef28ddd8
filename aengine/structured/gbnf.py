"""Translates grammars in GBNF, llama.cpp's notation of EBNF, for the grammar compiler. Owns the syntax of GBNF.

The compiler splits an output into terminals, each matched as long as possible, and parses these. So what needs no recursion becomes one
terminal, which is exact. Around recursion literals and classes are terminals of their own: `[a-z]*` then takes an `end` that follows it,
so the output may be narrower than the grammar, and always matches it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from aengine.structured.regex_dialect import RegexError, character_class, unescaped

MAX_NESTING = 64
"""Most parentheses within one another, and most repetitions of one another."""
MAX_INLINE = 512
"""Most characters of a terminal that is written into other rules."""

_TOKEN = re.compile(
    r"""
      (?P<space> [ \t\r\n]+ | \#[^\n]* )
    | (?P<name> [A-Za-z_][A-Za-z0-9_-]* )
    | (?P<defined> ::= )
    | (?P<literal> "(?: \\. | [^"\\] )*" )
    | (?P<klass> \[ \^? (?: \\. | [^\]\\] )* \] )
    | (?P<count> [*+?] | \{ [ ]* [0-9]{1,6} [ ]* (?: , [ ]* (?: [0-9]{1,6} )? [ ]* )? \} )
    | (?P<sign> [|()] )
    | (?P<any> \. )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[nrt"\\\[\]^-])')
_EMPTY = '""'  # in a rule


class GbnfError(Exception):
    """The text is not a grammar. The message says where."""


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


class _Name(str):
    """The name of a rule, as a piece of another."""


class _Terminal(str):
    """A regular expression that can be repeated as it is, as a piece of a rule."""


def rules_of(source: str) -> str:
    """The rules of the compiler's notation, of which `root` is the first. Raises `GbnfError`."""
    rules = _Reader(source).rules()
    if "root" not in rules:
        raise GbnfError("there is no rule 'root', with which it begins")
    regexes = _regexes(rules)
    names = {name: f"{'T' if name in regexes else 'r'}{number}" for number, name in enumerate(rules)}
    lines = [f"root: {names['root']}"]
    for name, pieces in rules.items():
        regex = regexes.get(name)
        lines.append(f"{names[name]}: {_joined(' ', pieces, names.__getitem__, '/{}/'.format) if regex is None else f'/{regex}/'}")
    return "\n".join(lines)


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens: list[_Token] = []
        position = 0
        while position < len(source):
            found = _TOKEN.match(source, position)
            if found is None:
                raise self._error(position, f"{source[position : position + 20]!r} is not understood")
            if found.lastgroup != "space":
                self._tokens.append(_Token(found.lastgroup or "", found.group(), position))
            position = found.end()

    def rules(self) -> dict[str, list[str]]:
        """By name, each as the pieces of its alternatives: names, terminals and signs, which mean the same in both notations."""
        starts = [index - 1 for index, token in enumerate(self._tokens) if token.kind == "defined"]
        if not starts or starts[0] != 0:
            raise self._error(0, "a rule's name and '::=' are expected")
        rules: dict[str, list[str]] = {}
        for start, end in zip(starts, [*starts[1:], len(self._tokens)], strict=True):
            name = self._tokens[start]
            if name.kind != "name":
                raise self._error(name.position, "a rule's name is expected before '::='")
            if name.text in rules:
                raise self._error(name.position, f"a second rule {name.text!r}")
            rules[name.text] = self._pieces(self._tokens[start + 2 : end])
        return rules

    def _pieces(self, tokens: Iterable[_Token]) -> list[str]:
        pieces: list[str] = []
        opened: list[int] = []  # where the open groups begin
        last: int | None = None  # where the last part begins, which can be repeated; None at the start of an alternative
        num_repeats = position = 0
        for kind, text, position in tokens:
            if kind == "count":
                num_repeats += 1
                if last is None or num_repeats > MAX_NESTING:
                    what = "nothing" if last is None else f"what {MAX_NESTING} others repeat"
                    raise self._error(position, f"{text!r} repeats {what}")
                pieces.insert(last, "(")
                pieces.append(")" + text.replace(" ", ""))
                continue
            num_repeats = 0
            if text in ("|", ")") and last is None:
                pieces.append(_EMPTY)
            if text == ")":
                if not opened:
                    raise self._error(position, "a parenthesis is closed that was not opened")
                last = opened.pop()
            elif kind == "sign":
                last = None
                if text == "(":
                    opened.append(len(pieces))
                    if len(opened) > MAX_NESTING:
                        raise self._error(position, f"more than {MAX_NESTING} parentheses within one another")
            else:
                last = len(pieces)
            pieces.append(text if kind == "sign" else _Name(text) if kind == "name" else self._terminal(kind, text, position))
        if opened:
            raise self._error(position, "a parenthesis is not closed")
        return pieces if last is not None else [*pieces, _EMPTY]

    def _terminal(self, kind: str, text: str, position: int) -> _Terminal:
        if kind == "any":
            return _Terminal(r"(?s:.)")
        if wrong := re.search(r"\\.{0,2}", _ESCAPE.sub("", text), re.DOTALL):
            raise self._error(position, f"the escape {wrong.group()!r} is not understood")
        text = re.sub(r"(\\\\)|\\U([0-9a-fA-F]{8})", lambda escape: escape[1] or rf"\u{{{escape[2]}}}", text)
        try:
            return _Terminal(f"({unescaped(text[1:-1])})" if kind == "literal" else character_class(text))
        except RegexError as error:
            raise self._error(position, str(error)) from error

    def _error(self, position: int, what: str) -> GbnfError:
        return GbnfError(f"line {self._source.count(chr(10), 0, position) + 1}: {what}")


def _regexes(rules: dict[str, list[str]]) -> dict[str, str]:
    """The rules that are written as terminals: those that refer to no rules, or to short terminals."""
    regexes: dict[str, str] = {}
    referring: dict[str, list[str]] = {name: [] for name in rules}
    missing: dict[str, int] = {}  # names that a rule refers to and that are not known to be short terminals
    for name, pieces in rules.items():
        names = {piece for piece in pieces if isinstance(piece, _Name)}
        for one in names:
            if one not in rules:
                raise GbnfError(f"there is no rule {one!r}")
            referring[one].append(name)
        missing[name] = len(names)
    settled = [name for name, number in missing.items() if not number]
    for name in settled:  # grows as it is read; what refers to itself in the end never comes
        regexes[name] = f"({_joined('', rules[name], regexes.__getitem__, str).replace(_EMPTY, '()')})"
        if len(regexes[name]) <= MAX_INLINE:
            for user in referring[name]:
                missing[user] -= 1
                if not missing[user]:
                    settled.append(user)
    return regexes


def _joined(separator: str, pieces: Iterable[str], name: Callable[[str], str], terminal: Callable[[str], str]) -> str:
    return separator.join(
        name(piece) if isinstance(piece, _Name) else terminal(piece) if isinstance(piece, _Terminal) else piece for piece in pieces
    )
