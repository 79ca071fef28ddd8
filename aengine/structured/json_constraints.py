"""What a JSON Schema asks of the values of one type, and what two schemas ask of them together.

A `Conjunction` stands for all values that satisfy each of its terms; `json_terms.py` says what a term is. A constraint here speaks of
values of one type alone, and is a conjunction of keywords: there is no alternative within it. The values of keywords are read in the form
that each must have; formats of strings are enforced at least as strictly as their standards have them. Every function may raise
`SchemaError`, naming `at`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

from aengine.api.dataclass import dataclass
from aengine.structured.json_documents import SchemaError, name_of
from aengine.structured.regex_dialect import RegexError, anywhere

Number = int | Decimal
Term = tuple[int, bool]
"""The number of a schema, and whether it is to be satisfied (True) or not."""
Conjunction = frozenset[Term]
ANY: Conjunction = frozenset()
NOTHING: Conjunction = frozenset({(0, False)})
"""Schema 0 is true."""


def negated(conjunction: Conjunction) -> Conjunction:
    """Return the negation of a conjunction of at most one term."""
    if not conjunction:
        return NOTHING
    [(number, satisfied)] = conjunction
    return frozenset({(number, not satisfied)}) if number else ANY


@dataclass(frozen=True, slots=True)
class Listed:
    """null or a boolean: one of these."""

    values: tuple[object, ...]

    def and_(self, other: Listed) -> Listed | None:
        values = tuple(value for value in self.values if value in other.values)
        return Listed(values) if values else None


@dataclass(frozen=True, slots=True)
class Numbers:
    """Between bounds, which are themselves left out if `above` or `below` is True. `values`: one of these; None for all."""

    low: Number | None = None
    high: Number | None = None
    above: bool = False
    below: bool = False
    integer: bool = False
    multiples: tuple[Number, ...] = ()
    values: tuple[Number, ...] | None = None
    excluded: frozenset[Number] = frozenset()

    def and_(self, other: Numbers) -> Numbers | None:
        low = max((one for one in ((self.low, self.above), (other.low, other.above)) if one[0] is not None), default=(None, False))
        high = min(
            ((one, not below) for one, below in ((self.high, self.below), (other.high, other.below)) if one is not None),
            default=(None, True),
        )
        both = Numbers(
            low=low[0],
            high=high[0],
            above=low[1],
            below=not high[1],
            integer=self.integer or other.integer,
            multiples=tuple(dict.fromkeys((*self.multiples, *other.multiples))),
            excluded=self.excluded | other.excluded,
        )
        values = self.values if other.values is None else other.values
        if values is not None:
            ours = set(values if self.values is None else self.values)
            kept = tuple(one for one in values if both.holds(one) and one in ours)
            return replace(both, values=kept) if kept else None
        return None if both.is_empty() else both

    def holds(self, value: Number) -> bool:
        return not (
            (self.low is not None and (value < self.low or (self.above and value == self.low)))
            or (self.high is not None and (value > self.high or (self.below and value == self.high)))
            or (self.integer and value != int(value))
            or value in self.excluded
            or any(Fraction(value) % Fraction(one) for one in self.multiples)
            or (self.values is not None and value not in self.values)
        )

    def is_empty(self) -> bool:
        if self.values is not None:
            return not self.values
        if self.low is None or self.high is None:
            return False
        low, high = self.low, self.high
        if self.integer:
            return math.ceil(low) + (self.above and low == int(low)) > math.floor(high) - (self.below and high == int(high))
        return low > high or (low == high and (self.above or self.below))


@dataclass(frozen=True, slots=True)
class Strings:
    """Lengths are in characters; `patterns` are in the notation of the compiler, and each matches some part."""

    shortest: int = 0
    longest: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()

    def and_(self, other: Strings) -> Strings | None:
        shortest = max(self.shortest, other.shortest)
        longest = _least(self.longest, other.longest)
        excluded = self.excluded | other.excluded
        values = self.values if other.values is None else other.values
        if values is not None:
            ours = set(values if self.values is None else self.values)
            values = tuple(
                one
                for one in values
                if len(one) >= shortest and (longest is None or len(one) <= longest) and one not in excluded and one in ours
            )
        if values == () or (longest is not None and shortest > longest):
            return None
        return Strings(
            shortest,
            longest,
            tuple(dict.fromkeys((*self.patterns, *other.patterns))),
            tuple(dict.fromkeys((*self.formats, *other.formats))),
            values,
            excluded,
        )


@dataclass(frozen=True, slots=True)
class Contained:
    """Between `least` and `most` items satisfy `item`."""

    item: Conjunction
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Arrays:
    """The first items are of `prefix`, the others of `items`. `evaluated`: how many of the first ones a keyword has looked at; None for
    all."""

    prefix: tuple[Conjunction, ...] = ()
    items: Conjunction = ANY
    fewest: int = 0
    most: int | None = None
    unique: bool = False
    contains: tuple[Contained, ...] = ()
    evaluated: int | None = 0

    def item(self, index: int) -> Conjunction:
        return self.prefix[index] if index < len(self.prefix) else self.items

    def and_(self, other: Arrays) -> Arrays | None:
        fewest = max(self.fewest, other.fewest)
        most = _least(self.most, other.most)
        prefix = tuple(self.item(index) | other.item(index) for index in range(max(len(self.prefix), len(other.prefix))))
        items = self.items | other.items
        if items >= NOTHING:  # then the length is bounded
            most = _least(most, len(prefix))
        for index, one in enumerate(prefix):
            if one >= NOTHING:
                most = _least(most, index)
        if most is not None and fewest > most:
            return None
        return Arrays(
            prefix,
            items,
            fewest,
            most,
            self.unique or other.unique,
            tuple(dict.fromkeys((*self.contains, *other.contains))),
            None if self.evaluated is None or other.evaluated is None else max(self.evaluated, other.evaluated),
        )


@dataclass(frozen=True, slots=True)
class Properties:
    """What one schema asks of properties by their names. `evaluates`: whether it counts for `unevaluatedProperties`."""

    named: Mapping[str, Conjunction] = field(default_factory=dict)
    patterns: Mapping[str, Conjunction] = field(default_factory=dict)
    others: Conjunction | None = None
    evaluates: bool = True


@dataclass(frozen=True, slots=True)
class Objects:
    """What several schemas ask of properties, and how many there are. `names`: what each name satisfies, as a string. `beside`: for each
    set of names there is a property of another name."""

    groups: tuple[Properties, ...] = ()
    required: tuple[str, ...] = ()
    fewest: int = 0
    most: int | None = None
    names: Conjunction = ANY
    beside: tuple[frozenset[str], ...] = ()

    def and_(self, other: Objects) -> Objects | None:
        fewest = max(self.fewest, other.fewest)
        most = _least(self.most, other.most)
        required = tuple(dict.fromkeys((*self.required, *other.required)))
        if most is not None and (fewest > most or len(required) > most):
            return None
        groups = self.groups + tuple(one for one in other.groups if not any(one is ours for ours in self.groups))
        beside = tuple(names for names in dict.fromkeys((*self.beside, *other.beside)) if names.issuperset(required))
        return Objects(groups, required, fewest, most, self.names | other.names, beside)


Constraint = Listed | Numbers | Strings | Arrays | Objects


def _least(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


_DATE = (
    r"([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"

# Letters of ASCII alone, and no hyphens in the third and fourth place: there they are reserved for names in other letters, as Punycode.
_LABEL = (
    "[A-Za-z0-9]([A-Za-z0-9-]?[A-Za-z0-9]"
    "|[A-Za-z0-9-][A-Za-z0-9-][A-Za-z0-9]"
    "|[A-Za-z0-9-]([A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{0,58}[A-Za-z0-9])?"
)
_HOSTNAME = Strings(longest=253, patterns=(rf"^{_LABEL}(\.{_LABEL})*$",))

_IN_PATH = r"([A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"  # but for the colon, which would end a scheme
_IN_QUERY = r"([A-Za-z0-9._~!$&'()*+,;=@:/?-]|%[0-9A-Fa-f]{2})"
_RELATIVE = rf"^/?({_IN_PATH}+/)*{_IN_PATH}*(\?{_IN_QUERY}*)?(#{_IN_QUERY}*)?$"

_POINTER = "(/([^~/]|~[01])*)*"

_VARIABLE = r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*(:[1-9][0-9]{0,3}|\*)?"
_TEMPLATE = rf"^([A-Za-z0-9._~:/?#\[\]@!$&()*+,;=-]|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*$"

# Regular expressions with groups that are not nested, of what Python and ECMAScript have in common.
_TIMES = r"([*+?]|\{[0-9]{1,2},?\})?"
_ATOMS = rf"""(([A-Za-z0-9 _,:;<>=!@#%&~'"/-]|\.|\\[dDwWsS.*+?^$|(){{}}\[\]\\/]|\[\^?([A-Za-z0-9 _.,:]|a-z|A-Z|0-9|\\[dws])+\]){_TIMES})+"""
_EXPRESSION = rf"^\^?({_ATOMS}|\((\?:)?{_ATOMS}(\|{_ATOMS})*\){_TIMES})+\$?$"

_FORMATS: Mapping[str, Sequence[Strings]] = {
    "date": (Strings(patterns=(f"^{_DATE}$",)),),  # the compiler's own have 29 February in any year, and leap seconds at any time
    "time": (Strings(patterns=(f"^{_TIME}$",)),),
    "date-time": (Strings(patterns=(f"^{_DATE}T{_TIME}$",)),),
    "hostname": (_HOSTNAME,),
    "idn-hostname": (_HOSTNAME,),
    "email": (Strings(formats=("email",)),),
    "idn-email": (Strings(formats=("email",)),),
    "uri": (Strings(formats=("uri",)),),
    "iri": (Strings(formats=("uri",)),),
    "uri-reference": (Strings(formats=("uri",)), Strings(patterns=(_RELATIVE,))),
    "iri-reference": (Strings(formats=("uri",)), Strings(patterns=(_RELATIVE,))),
    "uri-template": (Strings(patterns=(_TEMPLATE,)),),
    "json-pointer": (Strings(patterns=(f"^{_POINTER}$",)),),
    "relative-json-pointer": (Strings(patterns=(f"^(0|[1-9][0-9]{{0,8}})(#|{_POINTER})$",)),),
    "regex": (Strings(patterns=(_EXPRESSION,)),),
    **{name: (Strings(formats=(name,)),) for name in ("duration", "ipv4", "ipv6", "uuid")},
}


def format_constraints(name: object, at: str, *, strict: bool) -> Sequence[Strings]:
    """The alternatives of a format; none if nothing is known of it, so that it is an annotation. `strict`: that is refused."""
    if not isinstance(name, str):
        raise SchemaError(f"{at}: 'format' is {name_of(name)}, not a string")
    found = _FORMATS.get(name, ())
    if strict and not found:
        raise SchemaError(f"{at}: the format {name!r:.60} cannot be enforced")
    return found


KINDS = ("null", "boolean", "number", "string", "array", "object")


def read_bounds(schema: Mapping[str, Any], at: str) -> Iterable[Numbers]:
    """One constraint for each bound. Before draft 6 the exclusive ones were flags of the others."""
    for keyword, limit in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        inclusive, exclusive = schema.get(keyword), schema.get(limit)
        for value, left_out in ((inclusive, exclusive is True), (None if isinstance(exclusive, bool) else exclusive, True)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | Decimal):
                raise SchemaError(f"{at}: {keyword!r} is {name_of(value)}, not a number")
            yield Numbers(low=value, above=left_out) if keyword == "minimum" else Numbers(high=value, below=left_out)


def read_multiples(schema: Mapping[str, Any], at: str) -> tuple[int | Decimal, ...]:
    if "multipleOf" not in schema:
        return ()
    value = schema["multipleOf"]
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or value <= 0:
        raise SchemaError(f"{at}: 'multipleOf' is {value!r:.40}, not a number > 0")
    return (value,)


def read_count(schema: Mapping[str, Any], keyword: str, at: str) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SchemaError(f"{at}: {keyword!r} is {value!r:.40}, not an integer >= 0")
    return value


def read_types(schema: Mapping[str, Any], at: str) -> Sequence[str]:
    given = schema.get("type", KINDS)
    types = [given] if isinstance(given, str) else given
    for one in read_list(types, f"{at}/type"):
        if one not in (*KINDS, "integer"):
            raise SchemaError(f"{at}: Invalid type: {one!s:.40}")
    return cast("Sequence[str]", types)


def read_pattern(pattern: object, at: str) -> str:
    if not isinstance(pattern, str):
        raise SchemaError(f"{at}: a pattern is {name_of(pattern)}, not a string")
    try:
        return anywhere(pattern)
    except RegexError as error:
        raise SchemaError(f"{at}: pattern {pattern!r:.100}: {error}") from error


def read_list(value: Any, at: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise SchemaError(f"{at} is {name_of(value)}, not a list")
    return value


def read_strings(value: Any, at: str) -> Sequence[str]:
    for one in read_list(value, at):
        if not isinstance(one, str):
            raise SchemaError(f"{at} has {name_of(one)}, not a string")
    return cast("Sequence[str]", value)


def read_mapping(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise SchemaError(f"{at} is {name_of(value)}, not an object")
    return value
