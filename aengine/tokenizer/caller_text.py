"""Which characters of a rendered chat the caller wrote, of those that control tokens are made of; whatever the template does with them.

The characters that control tokens are written with are replaced, in all that the caller gave, by stand-ins: lone surrogates, which no
Unicode text has, so nobody can forge them. A template cuts, joins and writes such text as any other; what it looks for in it, it finds
as if nothing were replaced (`CallerText`). What comes out says who wrote a character. Knows neither templates nor tokenizers, but how long
a template may compute, and the errors of one that takes longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, SupportsIndex

from aengine.api.outputs import RenderedChat

QUICK_SECONDS = 0.05
MAX_SECONDS = 5.0
"""Processor time of a rendering: of one that small ones may wait for, and of any."""
_FIRST, _MOST = 0xD800, 1024
"""Stand-ins; the surrogates beyond are free for others."""
_NEVER = frozenset("\"'\\_-.:+,")
"""What JSON escapes or numbers and names are written with: only replaced as the first character of a token."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where messages hold reasoning, by the names that clients give it."""


class TemplateLimitError(Exception):
    """Raised for a template that computes or writes beyond its limits."""


class TemplateTimeError(TemplateLimitError):
    """It was given too little time."""


class Alphabet:
    """The characters of control tokens, one to one with their stand-ins."""

    def __init__(self, tokens: Iterable[str], alike: Callable[[frozenset[str]], Iterable[str]] = lambda characters: ()) -> None:
        """`tokens`: the texts of control tokens, none only white space. `alike`: other characters that a tokenizer takes for some."""
        found = {character for token in tokens for character in token if _is_mark(character)}
        found |= {next(filter(_is_possible, token), "") for token in tokens} - {""}
        found |= {character for character in alike(frozenset(found)) if _is_possible(character)}
        characters = sorted(found)[:_MOST]
        self.hidden = {ord(character): _FIRST + place for place, character in enumerate(characters)}
        self.shown = {stand_in: point for point, stand_in in self.hidden.items()}
        self._any = re.compile("[" + re.escape("".join(characters)) + "]" if characters else "(?!)")

    def hide(self, text: str) -> str:
        """`text`, as it is where nothing is to be replaced."""
        return CallerText(text.translate(self.hidden), self.shown) if self._any.search(text) else text


def _is_possible(character: str) -> bool:
    return not (character.isspace() or character in '"\\')


def _is_mark(character: str) -> bool:
    return not (character.isalnum() or character.isspace() or character in _NEVER)


class ControlTokens:
    """The control tokens of a model with a chat template, and where a caller may not write them."""

    def __init__(
        self,
        tokens: Iterable[str],
        of_assistant: Iterable[str] = (),
        normalize: Callable[[str], str] | None = None,
        normalized: Iterable[str] = (),
    ) -> None:
        """`of_assistant`: those that the text and the reasoning of an assistant's message may hold. `normalized`: those that the tokenizer
        looks for in what `normalize` makes of a text."""
        self.tokens = frozenset(tokens)
        self._of_assistant = self.tokens.intersection(of_assistant)
        self._pattern = _any_of(self.tokens)
        sought = frozenset(normalized) if normalize is not None else frozenset()
        self._normalized = _any_of(sought) if sought else None
        self._normalize = normalize
        self.alphabet = Alphabet(self.tokens, self._alike)

    def _alike(self, characters: frozenset[str]) -> Iterator[str]:
        """Other characters that become one of `characters`."""
        if self._normalized is None or self._normalize is None:
            return
        sought = characters.difference(self._normalize("a"))
        for point in range(0x80, 0x10000):
            if not 0xD800 <= point < 0xE000 and not sought.isdisjoint(self._normalize(chr(point))):
                yield chr(point)

    def guarded(self, value: Any) -> Any:
        """JSON data with stand-ins in all of its strings, names of fields included."""
        if isinstance(value, str):
            return self.alphabet.hide(value)
        if isinstance(value, list):
            return [self.guarded(item) for item in value]
        if isinstance(value, dict):
            return {self.guarded(key): self.guarded(item) for key, item in value.items()}
        return value

    def guarded_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message of a chat, with stand-ins."""
        plain = message["role"] == "assistant" and bool(self._of_assistant)
        own = {"content", *REASONING_KEYS} if plain else set()
        return {self.guarded(key): self._own(value) if key in own else self.guarded(value) for key, value in message.items()}

    def _own(self, value: Any) -> Any:
        """What an assistant wrote: a text, or parts."""
        if isinstance(value, list):
            return [
                {**self.guarded(part), "text": self._own(part["text"])} if isinstance(part, dict) and "text" in part else part
                for part in value
            ]
        if not isinstance(value, str):
            return value
        hidden, end = [], 0
        for match in self._pattern.finditer(value):
            if match[0] in self._of_assistant:
                hidden += [value[end : match.start()].translate(self.alphabet.hidden), match[0]]
                end = match.end()
        hidden.append(value[end:].translate(self.alphabet.hidden))
        return CallerText("".join(hidden), self.alphabet.shown)

    def revealed(self, text: str) -> RenderedChat:
        """What was rendered, without stand-ins. Its literals are in control tokens, or where the tokenizer could find some."""
        shown = text.translate(self.alphabet.shown)
        literals: list[tuple[int, int]] = []
        if shown != text:
            literals = self._literals(text, shown)
        return RenderedChat(shown, tuple(literals))

    def _literals(self, text: str, shown: str) -> list[tuple[int, int]]:
        if self._normalized is not None and self._normalize is not None:
            masked = text.translate(dict.fromkeys(self.alphabet.shown, "\ufffd"))
            if len(self._normalized.findall(self._normalize(shown))) != len(self._normalized.findall(self._normalize(masked))):
                return [(place, place + 1) for place, character in enumerate(text) if ord(character) in self.alphabet.shown]
        literals: list[tuple[int, int]] = []
        start, done = 0, 0
        while (match := self._pattern.search(shown, start)) is not None:  # those that overlap, too
            start = match.start() + 1
            for place in range(max(done, match.start()), match.end()):
                if text[place] != shown[place]:
                    literals.append((place, place + 1))
            done = max(done, match.end())
        return literals


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest that begins at a place."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=lambda token: (-len(token), token)))) or "(?!)")


def _plain(value: Any) -> Any:
    """What a stand-in stands for, in what is looked for."""
    if isinstance(value, CallerText):
        return value.plain
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


class CallerText(str):
    """A string with stand-ins. It compares, and is searched, as the plain one; what is cut from it or joined with it has stand-ins."""

    __slots__ = ("_known", "shown")

    shown: Mapping[int, int]
    _known: str | None

    def __new__(cls, text: str, shown: Mapping[int, int] | None = None) -> CallerText:
        made = super().__new__(cls, text)
        made.shown, made._known = shown or {}, None
        return made

    @property
    def plain(self) -> str:
        """The string with the characters that its stand-ins stand for."""
        if self._known is None:
            self._known = str.translate(self, self.shown)
        return self._known

    def _of(self, text: str) -> CallerText:
        return CallerText(text, self.shown)

    def _cut(self, start: int, end: int) -> CallerText:
        return self._of(str.__getitem__(self, slice(start, end)))

    def _pieces(self, pieces: Sequence[str], gap: int) -> list[str]:
        """The pieces of the plain text that lie `gap` apart."""
        starts = accumulate((len(piece) + gap for piece in pieces[:-1]), initial=0)
        return [self._cut(start, start + len(piece)) for start, piece in zip(starts, pieces, strict=True)]

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        quote = repr(self.plain)[0]

        def body(piece: str) -> str:
            escaped = repr('"' + piece)[2:-1]  # in single quotes
            return escaped if quote == "'" else escaped.replace("\\'", "'")

        return quote + re.sub(r"[^\ud800-\udfff]+", lambda match: body(match[0]), str.__str__(self)) + quote

    def __hash__(self) -> int:
        return hash(self.plain)

    def __eq__(self, other: object) -> bool:
        return bool(self.plain == _plain(other))

    def __ne__(self, other: object) -> bool:
        return bool(self.plain != _plain(other))

    def __lt__(self, other: str) -> bool:
        return self.plain < str(_plain(other))

    def __le__(self, other: str) -> bool:
        return self.plain <= str(_plain(other))

    def __gt__(self, other: str) -> bool:
        return self.plain > str(_plain(other))

    def __ge__(self, other: str) -> bool:
        return self.plain >= str(_plain(other))

    def __contains__(self, part: object) -> bool:
        return str(_plain(part)) in self.plain

    def __iter__(self) -> Iterator[str]:
        return map(self._of, str.__iter__(self))

    def __getitem__(self, index: SupportsIndex | slice) -> CallerText:
        return self._of(str.__getitem__(self, index))

    def __add__(self, other: str) -> CallerText:
        return self._of(str.__add__(self, other))

    def __radd__(self, other: str) -> CallerText:
        return self._of(str.__add__(other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> CallerText:
        return self._of(str.__mul__(self, count))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> CallerText:
        return self._of(str.__mod__(self, values))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep is None:
            return [self._of(piece) for piece in str.split(self, None, maxsplit)]
        return self._pieces(self.plain.split(_plain(sep), maxsplit), len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep is None:
            return [self._of(piece) for piece in str.rsplit(self, None, maxsplit)]
        return self._pieces(self.plain.rsplit(_plain(sep), maxsplit), len(sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return [self._of(line) for line in str.splitlines(self, keepends)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, found, behind = self._pieces(self.plain.partition(_plain(sep)), 0)
        return before, found, behind

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        before, found, behind = self._pieces(self.plain.rpartition(_plain(sep)), 0)
        return before, found, behind

    def strip(self, chars: str | None = None) -> CallerText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> CallerText:
        return self._cut(len(self) - len(self.plain.lstrip(_plain(chars))), len(self))

    def rstrip(self, chars: str | None = None) -> CallerText:
        return self._cut(0, len(self.plain.rstrip(_plain(chars))))

    def removeprefix(self, prefix: str) -> CallerText:
        return self._cut(len(prefix), len(self)) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> CallerText:
        return self._cut(0, len(self) - len(suffix)) if suffix and self.endswith(suffix) else self

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> CallerText:
        if not old:
            return self._of(str.replace(self, old, new, count))
        return self._of(new.join(self.split(old, count)))

    def join(self, pieces: Iterable[str]) -> CallerText:
        return self._of(str.join(self, pieces))

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return self.plain.encode(encoding, errors)


def _asked(name: str) -> Any:
    """A method that only says something of the plain text."""

    def method(self: CallerText, *arguments: Any) -> Any:
        return getattr(self.plain, name)(*map(_plain, arguments))

    method.__name__ = name
    return method


def _changed(name: str) -> Any:
    """A method that goes by letters and lengths alone."""
    of_str: Any = getattr(str, name)

    def method(self: CallerText, *arguments: Any) -> CallerText:
        return self._of(of_str(self, *arguments))

    method.__name__ = name
    return method


for _name in ("startswith", "endswith", "find", "rfind", "index", "rindex", "count", *(name for name in dir(str) if name.startswith("is"))):
    setattr(CallerText, _name, _asked(_name))
for _name in ("lower", "upper", "title", "capitalize", "swapcase", "casefold", "zfill", "center", "ljust", "rjust", "expandtabs"):
    setattr(CallerText, _name, _changed(_name))
