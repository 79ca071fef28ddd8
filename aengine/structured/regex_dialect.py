"""Translates regular expressions as users write them for the grammar compiler. Owns the differences between the dialects.

Where dialects (Python, ECMAScript) differ in what an expression matches, it is made to match what it does in both: `\\d`, `\\w` and
`\\s` are those of ASCII, while `\\D`, `\\W` and `\\S` leave out what any of them takes for a digit, a letter or a space. What exists in
one of them alone, and what a state machine cannot do (looking around, referring back), is refused.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""
      \[ \^? (?: \\. | [^\]\\] )* \]            # a class
    | \\ (?: x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | u\{[0-9a-fA-F]{1,8}\} | [pP]\{[^}]*\} | [pP][A-Z] | . )
    | \(\? (?: : | P?<[A-Za-z_]\w*> | <?. )?     # an opening parenthesis with its kind
    | (?: [*+?] | \{ [0-9]+ (?: ,[0-9]* )? \} ) [+?]?
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
_CODED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\})")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_IN_EVERY_DIALECT = {"d": "0-9", "w": "0-9A-Z_a-z", "s": r"\t-\r "}
_IN_SOME_DIALECT = {
    "d": r"\p{Nd}",
    "w": r"_\p{L}\p{N}",
    "s": r"\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{180e}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}",
}
_NO_LINE_BREAK = r"[^\n\r\x{2028}\x{2029}]"
_REFUSED_ESCAPES = {
    **dict.fromkeys("123456789k", "backreferences are not supported"),
    **dict.fromkeys("bB", "word boundaries are not supported"),
    **dict.fromkeys("AZzG", r"is not supported; the expression matches the whole text anyway, and '^' and '$' stand for its ends"),
}


class RegexError(Exception):
    """The expression cannot be matched as it is meant."""


def whole_text(regex: str) -> str:
    """For a text that matches as a whole. Raises `RegexError`.

    Anchors may stand where they change nothing: at the ends of the expression and of its alternatives.
    """
    tokens = _translated(regex)
    kept = []
    depth = 0
    for index, token in enumerate(tokens):
        depth += token.startswith("(") - (token == ")")
        neighbour = {"^": tokens[index - 1] if index else "|", "$": tokens[index + 1] if index + 1 < len(tokens) else "|"}.get(token)
        if neighbour is None:
            kept.append(token)
        elif depth or neighbour != "|":
            raise RegexError(f"an anchor {token!r} that is not at the start or end of the expression is not supported")
    return "".join(kept)


def anywhere(regex: str) -> str:
    """For a text of which some part matches, as JSON Schema has it. Raises `RegexError`."""
    return "".join(_translated(regex))


def quoted(text: str) -> str:
    """Return an expression that matches just `text`."""
    return "".join(map(_quoted, text))


def unescaped(text: str) -> str:
    """Matches just the characters that `text` writes, some of them as escapes. Raises `RegexError`."""
    return "".join(_quoted(_character(item)) for item in _MEMBER.findall(text))


def _translated(regex: str) -> list[str]:
    tokens: list[str] = []
    for token in (match.group() for match in _TOKEN.finditer(regex)):
        if token == "[":
            raise RegexError("a class, opened by '[', is not closed")
        if token[0] == "[":
            tokens.append(character_class(token))
        elif token.startswith("\\"):
            tokens.append(_escape(token))
        elif token.startswith("(?"):
            if not (token == "(?:" or token.endswith(">")):
                raise RegexError(f"a group that begins with {token!r} is not supported")
            tokens.append("(?:")
        elif token[0] in "*+?" or (token[0] == "{" and len(token) > 1):
            if token[-1] == "+" and len(token) > 1:
                raise RegexError(f"the possessive repetition {token!r} is not supported")
            tokens.append(token)
        elif token == "{":
            raise RegexError(r"a '{' that belongs to no count is not supported; write \{, and {0,3} for {,3}")
        elif token == ".":
            tokens.append(_NO_LINE_BREAK)
        elif token in "()|^$":
            tokens.append(token)
        else:
            tokens.append(_quoted(token))
    return tokens


def character_class(token: str) -> str:
    negated = token[1] == "^"
    members = _MEMBER.findall(token[1 + negated : -1])
    if not members:
        raise RegexError(rf"a class {token} that is empty, or begins with ']', is not supported; write \]")
    parts: list[str] = []
    letters = set()
    while members:
        member = members.pop(0)
        if member[:1] == "\\" and member[1:].lower() in _IN_EVERY_DIALECT:
            letters.add(member[1:])
            parts.append(_member_class(member[1:], negated))
            continue
        if member[:2] in (r"\p", r"\P"):
            parts.append(member)
            continue
        low = high = _character(member)
        if len(members) > 1 and members[0] == "-":
            if members[1][:1] == "\\" and not members[1][1:].isdigit() and members[1][1:2].lower() in {*_IN_EVERY_DIALECT, "p"}:
                raise RegexError(f"the range {member}-{members[1]} is not supported")
            high = _character(members[1])
            if low > high:
                raise RegexError(f"the range {member}-{members[1]} is out of order")
            del members[:2]
        parts.append(_quoted(low) if low == high else f"{_quoted(low)}-{_quoted(high)}")
    if any(letter.swapcase() in letters for letter in letters):  # [\s\S] is how to write any character
        if negated:
            raise RegexError(f"the class {token} has no characters")
        return "(?s:.)"
    return f"[{'^' if negated else ''}{''.join(parts)}]"


_MEMBER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,8}\}|[pP]\{[^}]*\}|[pP][A-Z]|.)|.", re.DOTALL)


def _member_class(letter: str, negated: bool) -> str:
    """The class of an escape as a part of another one: narrow in the end, so wide in one that is negated."""
    if letter.islower():
        return (_IN_SOME_DIALECT if negated else _IN_EVERY_DIALECT)[letter]
    return f"[^{(_IN_EVERY_DIALECT if negated else _IN_SOME_DIALECT)[letter.lower()]}]"


def _escape(token: str) -> str:
    """An escape outside of classes."""
    letter = token[1]
    if letter.lower() in _IN_EVERY_DIALECT:
        return f"[{_IN_EVERY_DIALECT[letter]}]" if letter.islower() else f"[^{_IN_SOME_DIALECT[letter.lower()]}]"
    if letter in "pP" and len(token) > 2:
        return token
    if letter in _REFUSED_ESCAPES:
        raise RegexError(f"{token}: {_REFUSED_ESCAPES[letter]}")
    return _quoted(_character(token))


def _character(item: str) -> str:
    """The character that `item` stands for: it, or an escape of it."""
    coded = _CODED.fullmatch(item)
    if coded:
        code = int(next(filter(None, coded.groups())), 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise RegexError(f"{item} is not a character")
        return chr(code)
    if len(item) == 1:
        if item == "\\":
            raise RegexError("a backslash at the end escapes nothing")
        return item
    letter = item[1:]
    if letter in _CONTROLS:
        return _CONTROLS[letter]
    if letter == "b":
        return "\b"  # in a class; outside it is refused
    if letter.isalnum():
        raise RegexError(f"the escape {item} is not supported")
    return letter


def _quoted(character: str) -> str:
    if character.isascii() and (character.isalnum() or character in " _"):
        return character
    if character.isascii() or not character.isprintable():
        return f"\\x{{{ord(character):x}}}"
    return character
