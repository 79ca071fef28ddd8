"""JSON in pieces: what the json module reads, without holding up other threads for long.

Its decoder in C has the GIL for the whole of a text; that in Python, whose syntax this is, takes ten times as long. Here Python reads what
holds values, and C the long texts and lists of plain values within, a piece at a time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from json import decoder, scanner
from typing import Any

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
