"""Where the arrays of a written schema are whose items differ, for `sampling/unique_items.py`: the compiler has no words for them.

Writes a fitted schema in the compiler's notation. Owns its options for JSON.

Most is left to the compiler as JSON Schema. Where it would not be exact (it reads the bounds of integers as floats), there are regular
expressions and rules instead, and rules for the arrays and objects around them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from aengine.sampling.unique_items import SchemaPlace
from aengine.structured.json_documents import SchemaError


def take_places(root: Any, definitions: Mapping[str, Any]) -> SchemaPlace | None:
    """Takes `uniqueItems` out of a schema as `json_schema.py` writes it. Returns what it said; None if nothing. Where one of several
    alternatives has it, arrays of the others are of different items too. Raises `SchemaError`."""
    builder = _Builder(definitions)
    place = builder.place([root])
    for array in builder.arrays:
        array.pop("uniqueItems", None)
    return place if builder.keep_what_matters(place) else None


class _Builder:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self.arrays: list[dict[str, Any]] = []
        self._definitions = definitions
        self._places: dict[frozenset[int], SchemaPlace] = {}

    def place(self, schemas: Iterable[Any]) -> SchemaPlace:
        alternatives: dict[int, dict[str, Any]] = {}
        self._collect(schemas, alternatives, set())
        place = self._places.get(frozenset(alternatives))
        if place is None:
            place = self._places[frozenset(alternatives)] = SchemaPlace()
            self._fill(place, list(alternatives.values()))
        return place

    def _collect(self, schemas: Iterable[Any], found: dict[int, dict[str, Any]], seen: set[int]) -> None:
        for schema in schemas:
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            if "$ref" in schema:
                self._collect([self._definitions[schema["$ref"].removeprefix(REFERENCE)]], found, seen)
            elif "anyOf" in schema:
                self._collect(schema["anyOf"], found, seen)
            else:
                found[id(schema)] = schema

    def _fill(self, place: SchemaPlace, alternatives: list[dict[str, Any]]) -> None:
        arrays = [one for one in alternatives if one.get("type") == "array"]
        objects = [one for one in alternatives if one.get("type") == "object"]
        strings = [one for one in alternatives if one.get("type") == "string"]
        place.has_free_strings = all(one.keys() <= {"type", "minLength"} for one in strings)
        place.is_unique = any("uniqueItems" in one for one in arrays)
        if place.is_unique and any("uniqueItems" not in one and one.get("minItems", 0) > 1 for one in arrays):
            raise SchemaError("'uniqueItems' cannot be enforced beside another array with 'minItems'")
        self.arrays += arrays
        longest = max((len(one.get("prefixItems", ())) for one in arrays), default=0)
        for index in range(longest):
            place.prefix.append(
                self.place(one["prefixItems"][index] if index < len(one.get("prefixItems", ())) else one["items"] for one in arrays)
            )
        if arrays:
            place.items = self.place(one["items"] for one in arrays)
        if objects:
            place.others = self.place(value for one in objects for value in _others(one))
            for name in dict.fromkeys(name for one in objects for name in one["properties"]):
                named = [[one["properties"][name]] if name in one["properties"] else _others(one) for one in objects]
                place.named[name] = self.place(itertools.chain.from_iterable(named))

    def keep_what_matters(self, root: SchemaPlace) -> bool:
        """Leaves out the places without such an array below; returns whether the root is one with."""
        above: dict[int, list[SchemaPlace]] = {}
        for place in self._places.values():
            for one in (*place.prefix, place.items, *place.named.values(), place.others):
                if one is not None:
                    above.setdefault(id(one), []).append(place)
        todo = [place for place in self._places.values() if place.is_unique]
        kept = {id(place) for place in todo}
        while todo:
            for place in above.get(id(todo.pop()), ()):
                if id(place) not in kept:
                    kept.add(id(place))
                    todo.append(place)
        for place in self._places.values():
            if not place.is_unique:  # else its items matter for their strings

                def keep(one: SchemaPlace | None) -> SchemaPlace | None:
                    return one if one is not None and id(one) in kept else None

                place.prefix = [keep(one) for one in place.prefix]
                place.items = keep(place.items)
                place.named = {name: keep(one) for name, one in place.named.items()}
                place.others = keep(place.others)
        return id(root) in kept


def _others(schema: Mapping[str, Any]) -> list[Any]:
    """What is asked of properties that are not listed."""
    values = schema.get("patternProperties", {}).values()
    return [schema["additionalProperties"], *values, *(value for _, _, value in schema.get(BY_NAME, ()))]


REFERENCE = "#/$defs/"
EXACT = "exact"
"""The key of what is not a schema but {EXACT: a regular expression for numbers}."""
BY_NAME = "by name"
"""The key of what an object asks of properties that are not listed, where that is not left to the compiler: patterns that a name matches,
patterns that it does not match, and the schema of the value."""
MAX_PATTERNS = 3
"""Most patterns of such an object."""

_WHITE_SPACE = r"([ \t]{0,2}|\r?\n[ \t]{0,20})"  # a line break with indentation; a weak model would write white space for ever
_OPTIONS = {
    "whitespace_pattern": _WHITE_SPACE,
    "json_allowed_escapes": r"nrbtf\"",  # with \u a name could be written in ways that get round the schema of the property
    "lenient": False,
    "coerce_one_of": False,
}
_CHARACTER = r'([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'
_STRING = f'/"{_CHARACTER}*"/'
_SAFE = r"(?:[A-Za-z0-9_]|\\x\{(?:2[013-9a-f]|[34][0-9a-f]|5[0-9abd-f]|[67][0-9a-e])\})"  # written as itself in a name
_NAMES = re.compile(rf"(?:{_SAFE}|\[\^?(?:{_SAFE}|-)+\]|[*+?]|\{{[0-9]+(?:,[0-9]*)?\}})*")
"""Patterns that tell the same of a name in quotes, but for classes with `^`; without alternatives."""


def rules_of(root: Any, definitions: Mapping[str, Any]) -> str:
    """The rule `root`, of what the schema describes. Raises `SchemaError`."""
    writer = _Writer(definitions)
    if not writer.has_exact(root):
        return f"root: {writer.as_json(root)}"
    return f"root: %lark {{\n{writer.rules(root)}\n}}"


class _Writer:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._names: dict[str, str] = {}  # of rules, by what is behind them
        self._rules: list[str] = []
        self._exact = self._with_exact()  # definitions

    def as_json(self, schema: Any) -> str:
        reached: dict[str, Any] = {}
        todo = list(_references(schema))
        while todo:
            name = todo.pop()
            if name not in reached:
                reached[name] = self._definitions[name]
                todo += _references(reached[name])
        if "$ref" in schema:  # the compiler takes nothing beside it
            schema = {"anyOf": [schema]}
        return f"%json {json.dumps({**schema, '$defs': reached, 'x-guidance': _OPTIONS})}"

    def rules(self, root: Any) -> str:
        start = self._value(root)
        for name in sorted(self._exact):
            self._rules.append(f"d{name}: {self._value(self._definitions[name])}")
        return "\n".join([f"%ignore /{_WHITE_SPACE}/", '%llguidance {"ignore_once": true}', f"start: {start}", *self._rules])

    def has_exact(self, schema: Any) -> bool:
        """Whether some of it is not left to the compiler."""
        return any(_is_exact(one) for one in _parts(schema)) or not self._exact.isdisjoint(_references(schema))

    def _with_exact(self) -> set[str]:
        found = {name for name, schema in self._definitions.items() if any(map(_is_exact, _parts(schema)))}
        above: dict[str, list[str]] = {}
        for name, schema in self._definitions.items():
            for inner in _references(schema):
                above.setdefault(inner, []).append(name)
        todo = list(found)
        while todo:
            for name in above.get(todo.pop(), ()):
                if name not in found:
                    found.add(name)
                    todo.append(name)
        return found

    def _named(self, body: str, prefix: str = "r") -> str:
        """The name of the rule with this body. `prefix`: in capitals it makes the body one expression."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = f"{prefix}{len(self._names)}"
            self._rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any) -> str:
        if EXACT in schema:
            return f"/{schema[EXACT]}/"
        if "$ref" in schema and (name := schema["$ref"].removeprefix(REFERENCE)) in self._exact:
            return f"d{name}"
        if not self.has_exact(schema):
            return self._named(self.as_json(schema))
        if "anyOf" in schema:
            return "(" + " | ".join(self._value(one) for one in schema["anyOf"] if one is not False) + ")"
        return self._named(self._array(schema) if schema["type"] == "array" else self._object(schema))

    def _array(self, schema: Mapping[str, Any]) -> str:
        prefix = [self._value(one) for one in schema.get("prefixItems", ())]
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        tail = ""
        if schema["items"] is not False and (most is None or most > len(prefix)):
            item = self._value(schema["items"])
            fewer = max(0, least - len(prefix))
            if prefix:
                tail = f'("," {item}){_times(fewer, None if most is None else most - len(prefix))}'
            else:
                tail = f'{item} ("," {item}){_times(max(0, fewer - 1), None if most is None else most - 1)}'
                if not least:
                    tail = f"({tail})?"
        for index in reversed(range(len(prefix) if most is None else min(most, len(prefix)))):
            tail = f"{_COMMA if index else ''} {prefix[index]} {tail}"
            if index >= least:
                tail = f"({tail})?"
        return f'"[" {tail} "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        required = set(schema.get("required", ()))
        members = [
            (f'{_literal(name)} ":" {self._value(value)}', name in required)
            for name, value in schema["properties"].items()
            if value is not False
        ]
        least, most = (max(0, schema[key] - len(required)) if key in schema else None for key in ("minProperties", "maxProperties"))
        others = [
            f'{self._name(schema["properties"], like, unlike)} ":" {self._value(value)}'
            for like, unlike, value in schema.get(BY_NAME) or self._by_name(schema)
            if value is not False
        ]
        if others and most != 0:
            member = f"({' | '.join(others)})"
            several = f"{member} ({_COMMA} {member}){_times(max(0, (least or 0) - 1), None if most is None else most - 1)}"
            members.append((several, bool(least)))
        return f'"{{" {self._members(members)} "}}"'

    def _by_name(self, schema: Mapping[str, Any]) -> list[tuple[Any, Any, Any]]:
        patterns = schema.get("patternProperties", {})
        if len(patterns) == 1 and are_names(patterns):
            [(pattern, value)] = patterns.items()
            return [((), (pattern,), schema["additionalProperties"]), ((pattern,), (), value)]
        if patterns:
            raise SchemaError("'patternProperties' cannot be enforced beside integers beyond 2^53, but for plain patterns")
        return [((), (), schema["additionalProperties"])]

    def _name(self, listed: Iterable[str], like: Iterable[str], unlike: Iterable[str]) -> str:
        """A name that is not listed, by the patterns that it matches and does not match."""
        no = [*map(_literal, listed), *map(_quoted_name, unlike)]
        return self._named(" & ".join([_STRING, *map(_quoted_name, like), *([f"~({' | '.join(no)})"] if no else [])]), "N")

    def _members(self, members: list[tuple[str, bool]]) -> str:
        """In this order, each with whether it is required."""
        rest = self._named('""')  # what follows others
        first: list[str] = []  # the alternatives of what begins
        behind = [rest]
        for member, is_required in reversed(members):
            rest = self._named(f"{_COMMA} {member} {rest}" if is_required else f"({_COMMA} {member})? {rest}")
            behind.append(rest)
        behind.reverse()
        for (member, is_required), following in zip(members, itertools.islice(behind, 1, None), strict=True):
            first.append(f"{member} {following}")
            if is_required:
                break
        else:
            first.append('""')
        return f"({' | '.join(first)})"


_COMMA = '","'


def _is_exact(schema: Mapping[str, Any]) -> bool:
    return EXACT in schema or BY_NAME in schema


def are_names(patterns: Collection[str]) -> bool:
    """Whether patterns of properties, in the notation of the compiler, can be told apart by `BY_NAME`."""
    return len(patterns) <= MAX_PATTERNS and all(_NAMES.fullmatch(one.removeprefix("^").removesuffix("$")) for one in patterns)


def _quoted_name(pattern: str) -> str:
    """For a name in quotes, some part of which matches."""
    before, behind = "" if pattern.startswith("^") else f"{_CHARACTER}*", "" if pattern.endswith("$") else f"{_CHARACTER}*"
    body = re.sub(r"\[\^([^]]*)\]", lambda found: _CHARACTER.replace("[^", f"[^{found[1]}", 1), pattern.removeprefix("^").removesuffix("$"))
    return f'/"{before}({body}){behind}"/'


def _literal(name: str) -> str:
    """The quoted name, in the compiler's notation."""
    return json.dumps(json.dumps(name, ensure_ascii=False))


def _times(least: int, most: int | None) -> str:
    return ("*" if not least else f"{{{least},}}") if most is None else f"{{{least},{most}}}"


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schemas within a schema, and itself, without what it refers to."""
    todo = [schema]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            yield one
            todo += [one.get("items"), one.get("additionalProperties"), *one.get("anyOf", ()), *one.get("prefixItems", ())]
            todo += [*one.get("properties", {}).values(), *one.get("patternProperties", {}).values()]
            todo += [value for _, _, value in one.get(BY_NAME, ())]


def _references(schema: Any) -> Iterator[str]:
    for one in _parts(schema):
        if "$ref" in one:
            yield one["$ref"].removeprefix(REFERENCE)
