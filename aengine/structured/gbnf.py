"""Grammars in GBNF, llama.cpp's notation of EBNF, made into the notation of the grammar compiler. Owns the syntax of the former.

The compiler splits an output into terminals, each matched as long as possible, and parses these. So what needs no recursion becomes one
terminal, which is exact. Around recursion literals and classes are terminals of their own: `[a-z]*` then takes an `end` that follows it,
so the output may be narrower than the grammar, and always matches it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aengine.structured.regex_dialect import quoted

MAX_NESTING = 64
MAX_INLINE = 512
"""Characters of a terminal up to which it becomes a part of others."""

_TOKEN = re.compile(
    r"""
      (?P<space> [ \t\r\n]+ | \#[^\n]* )
    | (?P<name> [A-Za-z_][A-Za-z0-9_-]* )
    | (?P<defined> ::= )
    | (?P<literal> "(?: \\. | [^"\\] )*" )
    | (?P<klass> \[ \^? (?: \\. | [^\]\\] )* \] )
    | (?P<count> \{ [ ]* [0-9]{1,6} [ ]* (?: , [ ]* (?: [0-9]{1,6} )? [ ]* )? \} )
    | (?P<sign> [|()*+?.] )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt"\\\[\]^-]))')
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


class GbnfError(Exception):
    """The grammar is none. The message says where."""


class _Name(str):
    """The name of a rule in a `_Node`."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of a rule in both forms, as pieces to be joined once it is known what the names in them stand for."""

    regex: tuple[str, ...]  # of one that can be repeated as it is
    rule: tuple[str, ...]

    @classmethod
    def terminal(cls, regex: str) -> _Node:
        return cls((regex,), (f"/{regex}/",))

    @classmethod
    def sequence(cls, parts: Sequence[_Node]) -> _Node:
        rule = _separated(" ", [part.rule for part in parts])
        return cls(("(", *_separated("", [part.regex for part in parts]), ")"), rule or ('""',))

    @classmethod
    def choice(cls, parts: Sequence[_Node]) -> _Node:
        regex, rule = _separated("|", [part.regex for part in parts]), _separated(" | ", [part.rule for part in parts])
        return cls(("(", *regex, ")"), ("(", *rule, ")"))

    def repeated(self, count: str) -> _Node:
        """`count`: as in a regular expression."""
        return _Node(("(", *self.regex, ")", count), ("(", *self.rule, ")", count))


def rules_of(source: str) -> str:
    """The rules of the compiler's notation, of which `root` is the first. Raises `GbnfError`."""
    rules = _Parser(source).rules()
    if "root" not in rules:
        raise GbnfError("there is no rule 'root', with which it begins")
    return _Writer(rules).text()


class _Parser:
    def __init__(self, source: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []  # kind, text, where
        position = 0
        while position < len(source):
            found = _TOKEN.match(source, position)
            if found is None:
                raise GbnfError(f"line {source.count(chr(10), 0, position) + 1}: {source[position : position + 20]!r} is not understood")
            if found.lastgroup != "space":
                self._tokens.append((found.lastgroup or "", found.group(), position))
            position = found.end()
        self._source = source
        self._next = 0
        self._nesting = 0

    def rules(self) -> dict[str, _Node]:
        rules: dict[str, _Node] = {}
        while self._next < len(self._tokens):
            name = self._take("name")
            self._take("defined")
            if name in rules:
                raise self._error(f"a second rule {name!r}")
            rules[name] = self._choice()
        return rules

    def _choice(self) -> _Node:
        parts = [self._sequence()]
        while self._peek() == "|":
            self._next += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Node.choice(parts)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while (part := self._part()) is not None:
            num_repeats = 0
            while (count := self._peek()) and (count in "*+?" or count[0] == "{"):
                num_repeats += 1
                if num_repeats > MAX_NESTING:
                    raise self._error(f"more than {MAX_NESTING} repetitions of one another")
                self._next += 1
                part = part.repeated(count.replace(" ", ""))
            parts.append(part)
        return parts[0] if len(parts) == 1 else _Node.sequence(parts)

    def _part(self) -> _Node | None:
        if self._next == len(self._tokens):
            return None
        kind, text, _ = self._tokens[self._next]
        match kind:
            case "name":
                if self._next + 1 < len(self._tokens) and self._tokens[self._next + 1][0] == "defined":
                    return None  # the next rule
                part = _Node((_Name(text),), (_Name(text),))
            case "literal":
                part = _Node.terminal(f"({''.join(map(quoted, self._characters(text[1:-1])))})")
            case "klass":
                part = _Node.terminal(self._class(text))
            case "sign" if text == ".":
                part = _Node.terminal(r"(?s:.)")
            case "sign" if text == "(":
                return self._group()
            case _:
                return None
        self._next += 1
        return part

    def _group(self) -> _Node:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise self._error(f"more than {MAX_NESTING} parentheses within one another")
        self._next += 1
        inside = self._choice()
        if self._peek() != ")":
            raise self._error("a parenthesis is not closed")
        self._next += 1
        self._nesting -= 1
        return inside

    def _class(self, text: str) -> str:
        negated = text[1] == "^"
        characters = self._characters(text[1 + negated : -1], ranges=True)
        parts = []
        while characters:
            low = high = characters.pop(0)
            if len(characters) > 1 and characters[0] == "":
                high = characters[1]
                del characters[:2]
            low, high = low or "-", high or "-"
            if low > high:
                raise self._error(f"a range of {text} is out of order")
            parts.append(quoted(low) if low == high else f"{quoted(low)}-{quoted(high)}")
        if not parts:
            raise self._error(f"the class {text} has no characters")
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _characters(self, text: str, *, ranges: bool = False) -> list[str]:
        """The characters that `text` writes; with `ranges` a dash that is not escaped is an empty string."""
        characters = []
        position = 0
        while position < len(text):
            if text[position] != "\\":
                characters.append("" if ranges and text[position] == "-" else text[position])
                position += 1
                continue
            found = _ESCAPE.match(text, position)
            code = next(filter(None, found.groups()[:3]), None) if found else None
            if found is None or (code is not None and (int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) <= 0xDFFF)):
                raise self._error(f"the escape {text[position : position + 10]!r} is not understood")
            characters.append(chr(int(code, 16)) if code else _CONTROLS.get(found.group(4), found.group(4)))
            position = found.end()
        return characters

    def _peek(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def _take(self, kind: str) -> str:
        if self._next == len(self._tokens) or self._tokens[self._next][0] != kind:
            raise self._error({"name": "a rule's name is expected", "defined": "'::=' is expected"}[kind])
        self._next += 1
        return self._tokens[self._next - 1][1]

    def _error(self, what: str) -> GbnfError:
        at = self._tokens[self._next][2] if self._next < len(self._tokens) else len(self._source)
        return GbnfError(f"line {self._source.count(chr(10), 0, at) + 1}: {what}")


class _Writer:
    """Writes each rule as a terminal, where it refers to none or to short ones, and else as a rule."""

    def __init__(self, rules: dict[str, _Node]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._regexes: dict[str, str] = {}  # of the rules that are terminals
        referring: dict[str, list[str]] = {name: [] for name in rules}
        missing: dict[str, int] = {}  # names that a rule refers to and that are not known to be short terminals
        for name, node in rules.items():
            names = {piece for piece in node.regex if isinstance(piece, _Name)}
            for one in names:
                if one not in rules:
                    raise GbnfError(f"there is no rule {one!r}")
                referring[one].append(name)
            missing[name] = len(names)
        settled = [name for name, number in missing.items() if not number]
        for name in settled:  # grows as it is read; what refers to itself in the end never comes
            regex = self._regexes[name] = _joined(rules[name].regex, self._regexes.__getitem__)
            if len(regex) <= MAX_INLINE:
                for user in referring[name]:
                    missing[user] -= 1
                    if not missing[user]:
                        settled.append(user)

    def text(self) -> str:
        lines = [f"root: {self._reference('root')}"]
        for name, node in self._rules.items():
            regex = self._regexes.get(name)
            lines.append(f"{self._reference(name)}: {f'/{regex}/' if regex is not None else _joined(node.rule, self._reference)}")
        return "\n".join(lines)

    def _reference(self, name: str) -> str:
        return f"{'T' if name in self._regexes else 'r'}{self._numbers[name]}"


def _separated(sign: str, parts: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(piece for index, part in enumerate(parts) for piece in (*((sign,) if index else ()), *part))


def _joined(pieces: Iterable[str], of_name: Callable[[str], str]) -> str:
    return "".join(of_name(piece) if isinstance(piece, _Name) else piece for piece in pieces)
