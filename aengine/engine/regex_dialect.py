"""Regular expressions as users write them, made into those of the grammar compiler. Owns the differences between the two.

The compiler ignores `^` and `$` wherever they stand, lets `.` match a line break, takes unknown escapes for their letter, lets
classes match surrogates (which are not UTF-8), and puts a JSON string's pattern into the grammar as it is, without a thought for
what JSON must escape. So classes are worked out here, as sets of characters. Everything else is the compiler's to refuse.

Where dialects (Python, ECMAScript) differ in what a class matches, it is made to match what it does in both: `\\d`, `\\w` and `\\s`
are those of ASCII, and no character beyond ASCII is in `\\D`, `\\W` or `\\S`.
"""

from __future__ import annotations

import itertools
import re

_ITEM = re.compile(
    r"""
      \[ \^? \]? (?: \\. | [^\]\\] )* \]      # a class
    | \\ (?: x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | u\{[0-9a-fA-F]+\} | [pP]\{[^}]*\} | c[A-Za-z] | . )
    | \(\?<[=!] | \(\?P?<\w+> | \(\?[:=!]     # an opening parenthesis with its kind
    | \{ [0-9,]* \}                           # a count
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
_MEMBER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|.)|.", re.DOTALL)
_CODED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\})")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_LEFT_TO_COMPILER = frozenset("bBpPkxuc123456789")  # escapes that it knows, if only to refuse them
_SPECIAL = frozenset(r"\^$.|?*+()[]{}/-")

Ranges = list[tuple[int, int]]  # of code points, both ends included
_ALL: Ranges = [(0, 0xD7FF), (0xE000, 0x10FFFF)]  # without surrogates
_BEYOND_ASCII: Ranges = [(0x80, 0x10FFFF)]
_CLASSES: dict[str, Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x09, 0x0D), (0x20, 0x20)],
}
_PERHAPS_SPACE: Ranges = [(0x1C, 0x1F)]  # in Python only
_LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]  # that `.` does not match in one dialect or the other
_SHORT = {'"': '"', "\\": "\\", "\n": "n", "\r": "r", "\t": "t", "\f": "f", "\b": "b"}  # JSON's escapes of one letter
_UNESCAPED: Ranges = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), *((0x80, 0xD7FF), (0xE000, 0x10FFFF))]  # in a JSON string


class RegexError(Exception):
    """The expression cannot be matched as it is meant."""


def whole_text(regex: str) -> str:
    """For a text that matches as a whole. Raises `RegexError`."""
    return "".join(item if (ranges := _ranges(item)) is None else _class(ranges) for item in _items(regex))


def inside_json_string(regex: str) -> str:
    """For a JSON string whose value matches as a whole: matches what is written between the quotes. Raises `RegexError`.

    Characters are written as they are where JSON allows that, and else with the escape of one letter; control characters that have
    none are matched only where the expression names one by itself.
    """
    return "".join(item if (ranges := _ranges(item)) is None else _written(ranges, item) for item in _items(regex))


def _items(regex: str) -> list[str]:
    """The expression in pieces that mean something each, without the anchors at its ends and those of its alternatives."""
    items = [found.group() for found in _ITEM.finditer(regex)]
    kept = []
    depth = 0
    for index, item in enumerate(items):
        if item.startswith("(") or item == ")":
            depth += -1 if item == ")" else 1
        if item == "^" and depth == 0 and (index == 0 or items[index - 1] == "|"):
            continue
        if item == "$" and depth == 0 and (index == len(items) - 1 or items[index + 1] == "|"):
            continue
        if item in ("^", "$"):
            raise RegexError(f"an anchor {item!r} that is not at the start or end of the expression is not supported")
        if item == r"\0" and "".join(items[index + 1 : index + 2]).isdigit():
            raise RegexError("octal escapes are not supported")
        kept.append(item)
    return kept


def _ranges(item: str) -> Ranges | None:
    """The characters of which an item matches one; None for items that match something else, or nothing by themselves."""
    if item == ".":
        return _without(_ALL, _LINE_ENDS)
    if item.startswith("[") and len(item) > 1:
        return _class_ranges(item)
    if item.startswith("\\"):
        letter = item[1:]
        if letter.lower() in _CLASSES:
            return _narrow(letter)
        if letter[:1] in _LEFT_TO_COMPILER and not _CODED.fullmatch(item):
            return None
        return [(_character(item),) * 2]
    return None if len(item) > 1 or item in _SPECIAL else [(_character(item),) * 2]


def _class_ranges(item: str) -> Ranges:
    negated = item.startswith("[^")
    inside = item[1 + negated : -1]
    if inside.startswith("]") or not inside:
        raise RegexError(rf"a class {item} that begins with ']' is not supported; write \]")
    members = _MEMBER.findall(inside)
    ranges: Ranges = []
    classes = set()
    while members:
        member = members.pop(0)
        if member[:1] == "\\" and member[1:].lower() in _CLASSES:
            classes.add(member[1:])
            ranges += _wide(member[1:]) if negated else _narrow(member[1:])
            continue
        low = high = _class_character(member)
        if len(members) > 1 and members[0] == "-":
            if members[1][1:].lower() in _CLASSES and members[1][:1] == "\\":
                raise RegexError(f"the range {member}-{members[1]} is not supported")
            high = _class_character(members[1])
            if low > high:
                raise RegexError(f"the range {member}-{members[1]} is out of order")
            del members[:2]
        ranges.append((low, high))
    if any(letter.swapcase() in classes for letter in classes):  # [\s\S] is how to write any character
        ranges = _ALL
    found = _without(_ALL, ranges) if negated else _without(_ALL, _without(_ALL, ranges))
    if not found:
        raise RegexError(f"the class {item} has no characters")
    return found


def _narrow(letter: str) -> Ranges:
    """What the class of an escape matches in every dialect."""
    if letter.islower():
        return _CLASSES[letter]
    others = [*_CLASSES[letter.lower()], *_BEYOND_ASCII]
    return _without(_ALL, [*others, *_PERHAPS_SPACE] if letter == "S" else others)


def _wide(letter: str) -> Ranges:
    """What it matches in some dialect."""
    return _without(_ALL, _narrow(letter.swapcase()))


def _class_character(member: str) -> int:
    return 0x08 if member == r"\b" else _character(member)


def _character(item: str) -> int:
    """The code point of a character or an escape that stands for one."""
    coded = _CODED.fullmatch(item)
    code = int(next(filter(None, coded.groups())), 16) if coded else None
    if code is None:
        letter = item[1:] or item
        if item != letter and letter.isascii() and letter.isalnum() and letter not in _CONTROLS:
            raise RegexError(f"the escape {item} is not supported")
        code = ord(_CONTROLS.get(letter, letter) if item != letter else letter)
    if not any(low <= code <= high for low, high in _ALL):
        raise RegexError(f"{item} is not a character")
    return code


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    """In order, and without overlaps as far as `ranges` has none."""
    for low, high in others:
        pieces = (((first, min(last, low - 1)), (max(first, high + 1), last)) for first, last in ranges)
        ranges = [(first, last) for first, last in itertools.chain.from_iterable(pieces) if first <= last]
    return ranges


def _written(ranges: Ranges, item: str) -> str:
    """One of these characters, as JSON writes it in a string."""
    plain = _without(_ALL, [*_without(_ALL, ranges), *_without(_ALL, _UNESCAPED)])
    shorts = "".join(_quoted(short) for character, short in _SHORT.items() if any(low <= ord(character) <= high for low, high in ranges))
    ways = [_class(plain)] if plain else []
    if shorts:
        ways.append(rf"\\[{shorts}]")
    if not ways and len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        ways.append(rf"\\u{ranges[0][0]:04x}")
    if not ways:
        raise RegexError(f"{item} has only characters that JSON escapes")
    return ways[0] if not shorts and plain else f"({'|'.join(ways)})"


def _class(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _quoted(chr(ranges[0][0]))
    ends = ([_quoted(chr(code)) for code in (low, high)] for low, high in ranges)
    return f"[{''.join(low if low == high else f'{low}-{high}' for low, high in ends)}]"


def _quoted(character: str) -> str:
    if character < " " or character == "\x7f":
        return f"\\x{ord(character):02x}"
    return f"\\{character}" if character in _SPECIAL else character
