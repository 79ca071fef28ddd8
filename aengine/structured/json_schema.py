"""Rewrites JSON Schemas for the grammar compiler. Owns the rule that a keyword is enforced or refused, never ignored.

What a schema means is worked out by `json_terms.py`. Here it is written as a schema of few keywords, of which the compiler enforces each:
a value is one of some alternatives, each of one type, and values within it are such schemas themselves, by reference.

The output always validates; it may be narrower than the schema: properties come in the order of the schema, numbers in plain decimals
within the bounds below, and characters that JSON can only write as `\\uXXXX` (control characters without a short escape) not at all.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from aengine.api.dataclass import dataclass
from aengine.sampling.unique_items import SchemaPlace
from aengine.structured.json_constraints import (
    ANY,
    KINDS,
    NOTHING,
    Arrays,
    Conjunction,
    Contained,
    Listed,
    Numbers,
    Objects,
    Properties,
    Strings,
    negated,
)
from aengine.structured.json_documents import Document, SchemaError, parse
from aengine.structured.json_lark import BY_NAME, REFERENCE, are_names, rules_of, take_places
from aengine.structured.json_numbers import MAX_MULTIPLES, MAX_NUMBER, common_multiple, number_schemas, units_of
from aengine.structured.json_terms import MAX_ALTERNATIVES, MAX_NESTING, Terms
from aengine.structured.regex_dialect import quoted

MAX_PATTERNS = 32
"""Most patterns of properties in one object; the compiler compares each with each."""
MAX_CHOICES = 256
"""Most choices of properties that `minProperties` leaves."""
MAX_EXCLUDED = 100
"""Most characters of a string that another one must not be."""
MAX_BEFORE = 3
"""Most items before those that `contains` asks for, where the number of items is not bounded."""

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class FittedSchema:
    rules: str
    """The rule `root`, in the notation of the compiler."""
    unique: SchemaPlace | None
    """The arrays whose items differ, if there are any."""


def fit_schema(text: str, *, strict_formats: bool = False, exact_one_of: bool = False) -> FittedSchema:
    """Rewrites the JSON text of a schema. Raises `SchemaError`.

    `strict_formats`: refuse formats that are not enforced. `exact_one_of`: refuse a `oneOf` whose schemas cannot be told apart; otherwise
    that is read as `anyOf`, and so is every `oneOf` if nothing satisfies exactly one of its schemas.
    """
    document = Document(parse(text))
    for tells_apart in (True,) if exact_one_of else (True, False):
        writer = _Writer(Terms(document, strict_formats=strict_formats, exact_one_of=exact_one_of, tells_apart=tells_apart))
        schema = writer.root(document.root)
        if schema is not False:
            unique = take_places(schema, writer.definitions)
            return FittedSchema(rules_of(schema, writer.definitions), unique)
    raise SchemaError("nothing satisfies it")


class _Writer:
    """Writes conjunctions as schemas for the compiler; those of arrays and objects once each, as definitions."""

    def __init__(self, terms: Terms) -> None:
        self.definitions: dict[str, Any] = {"number": {"type": "number", "minimum": -MAX_NUMBER, "maximum": MAX_NUMBER}}
        self._terms = terms
        self._names: dict[Conjunction, str] = {}
        self._written: dict[Conjunction, Any] = {}
        self._referred: set[str] = set()
        self._later: list[Conjunction] = []
        self._depth = 0
        self._num_multiples = 0

    def root(self, schema: object) -> Any:
        written = self.value(self._terms.of(schema, "#"))
        while self._later:
            conjunction = self._later.pop()
            self._write(conjunction, self._names[conjunction])
        return written

    def value(self, conjunction: Conjunction) -> Any:
        """A schema for a place of a value: False, or an object without references to others than definitions."""
        if conjunction >= NOTHING:
            return False
        written = self._written.get(conjunction)
        if written is not None:
            return written
        is_new = conjunction not in self._names  # else it is being written
        name = self._names.setdefault(conjunction, str(len(self._names)))
        if is_new and self._depth < MAX_NESTING:
            return self._write(conjunction, name)
        if is_new:
            self._later.append(conjunction)
        self._referred.add(name)
        return {"$ref": REFERENCE + name}

    def _write(self, conjunction: Conjunction, name: str) -> Any:
        self._depth += 1
        scalars: list[Any] = []
        others: list[Any] = []
        for kind in KINDS:
            for constraint in self._terms.alternatives(conjunction, kind):
                match constraint:
                    case Listed():
                        values = constraint.values
                        scalars.append({"enum": list(values)} if len(values) == 1 else {"type": "boolean"})
                    case Numbers():
                        scalars += self._numbers(constraint, conjunction)
                    case Strings():
                        scalars.append(self._string(constraint, conjunction))
                    case Arrays():
                        others += self._arrays(constraint, conjunction)
                    case Objects():
                        others += self._objects(constraint, conjunction)
        self._depth -= 1
        options = scalars + others
        schema: Any = False if not options else options[0] if len(options) == 1 else {"anyOf": options}
        if others or name in self._referred:
            self.definitions[name] = schema
            schema = schema and {"$ref": REFERENCE + name}
        self._written[conjunction] = schema
        return schema

    # ---- numbers and strings -------------------------------------------------------------------------------------------------

    def _numbers(self, constraint: Numbers, conjunction: Conjunction) -> Iterator[dict[str, Any]]:
        if constraint == Numbers():
            yield {"$ref": f"{REFERENCE}number"}
            return
        where = self._terms.where(conjunction)
        multiple = None if constraint.values is not None else common_multiple(constraint.multiples)
        if multiple is not None:
            self._num_multiples += units_of(multiple)
            if self._num_multiples > MAX_MULTIPLES:
                raise SchemaError(f"{where}: 'multipleOf' {multiple}, with those before it, comes to more than {MAX_MULTIPLES} units")
        try:
            yield from number_schemas(constraint, multiple)
        except SchemaError as error:
            raise SchemaError(f"{where}: {error}") from error

    def _string(self, constraint: Strings, conjunction: Conjunction) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        if constraint.values is not None:
            for value in constraint.values:
                self._check_text(value, conjunction)
            schema["enum"] = list(constraint.values)
        if constraint.shortest:
            schema["minLength"] = constraint.shortest
        if constraint.longest is not None:
            schema["maxLength"] = constraint.longest
        parts = [{"pattern": pattern} for pattern in constraint.patterns] + [{"format": name} for name in constraint.formats]
        excluded = [one for one in constraint.excluded if constraint.values is None]
        if excluded:
            if max(map(len, excluded)) > MAX_EXCLUDED:
                where = self._terms.where(conjunction)
                raise SchemaError(f"{where}: a string of more than {MAX_EXCLUDED} characters cannot be ruled out")
            parts.append({"pattern": f"^(?:{_others(excluded)})$"})
        if parts:
            schema["allOf"] = parts
        return schema

    def _check_text(self, text: str, conjunction: Conjunction) -> None:
        if _UNWRITABLE.search(text):
            where = self._terms.where(conjunction)
            raise SchemaError(f"{where}: {text!r:.60} has a character that can be written as \\uXXXX only, which is left out")

    # ---- arrays --------------------------------------------------------------------------------------------------------------

    def _arrays(self, constraint: Arrays, conjunction: Conjunction) -> Iterator[dict[str, Any]]:
        options = [constraint]
        for contained in constraint.contains:
            options = [both for one in options for other in self._placed(contained, one) if (both := one.and_(other)) is not None]
            if len(options) > MAX_ALTERNATIVES:
                raise SchemaError(f"{self._terms.where(conjunction)}: 'contains' comes to more than {MAX_ALTERNATIVES} alternatives")
        for option in options:
            is_unique = option.unique and (option.most is None or option.most > 1)
            one = self._of_different(option, conjunction) if is_unique else option
            if one is None:
                continue
            prefix = [self.value(one.item(index)) for index in range(len(one.prefix))]
            items = self.value(one.items)
            most = one.most
            if items is False:
                most = len(prefix) if most is None else min(most, len(prefix))
            if False in prefix:
                most = prefix.index(False) if most is None else min(most, prefix.index(False))
                prefix, items = prefix[:most], False
            if most is not None and one.fewest > most:
                continue
            schema = {"type": "array", "items": items}
            if prefix:
                schema["prefixItems"] = prefix
            if one.fewest:
                schema["minItems"] = one.fewest
            if most is not None:
                schema["maxItems"] = most
            if is_unique:
                schema["uniqueItems"] = True
            yield schema

    def _of_different(self, constraint: Arrays, conjunction: Conjunction) -> Arrays | None:
        """An array of different items has no more than there are values; None if it must have more."""
        if not constraint.prefix:
            values = self._all_values(constraint.items)
            return constraint if values is None else constraint.and_(Arrays(most=len(values)))
        behind = range(1, min(len(constraint.prefix) + 1, constraint.fewest))
        if any(self._all_values(constraint.item(index)) is not None for index in behind):
            raise SchemaError(f"{self._terms.where(conjunction)}: 'uniqueItems' cannot be enforced of few values beside 'prefixItems'")
        return constraint

    def _placed(self, contained: Contained, around: Arrays) -> Iterator[Arrays]:
        """Where the items are that `contains` asks for: one after the other, behind others of which only so many are tried."""
        item, least, most = contained.item, contained.least, contained.most
        if most is None:
            longest = around.most
            before = MAX_BEFORE if longest is None else min(longest - least, MAX_BEFORE * 2)
            for num in range(before + 1) if least else ():
                yield Arrays((ANY,) * num + (item,) * least, fewest=num + least)
            if not least:
                yield Arrays()
            return
        other = negated(item)
        for count in range(least, min(most, least + MAX_BEFORE) + 1):
            for num in range(MAX_BEFORE + 1 if count else 1):
                yield Arrays((other,) * num + (item,) * count, other, fewest=num + count)

    def _all_values(self, conjunction: Conjunction) -> set[object] | None:
        """All values that satisfy a conjunction, where they are listed."""
        values: set[object] = set()
        for kind in KINDS:
            for constraint in self._terms.alternatives(conjunction, kind) if not conjunction >= NOTHING else ():
                if isinstance(constraint, Arrays | Objects) or constraint.values is None:
                    return None
                values |= {(kind, value) for value in constraint.values}
        return values

    # ---- objects -------------------------------------------------------------------------------------------------------------

    def _objects(self, constraint: Objects, conjunction: Conjunction) -> Iterator[dict[str, Any]]:
        where = self._terms.where(conjunction)
        groups = constraint.groups
        names = dict.fromkeys([*(name for group in groups for name in group.named), *constraint.required])
        names |= dict.fromkeys(sorted(itertools.chain.from_iterable(constraint.beside)))
        asked: dict[str, Conjunction] = {}
        for name in names:
            self._check_text(name, conjunction)
            asked[name] = frozenset().union(*(_asked_of(group, name, where) for group in groups))
        patterns: dict[str, Conjunction] = {}
        for pattern in dict.fromkeys(pattern for group in groups for pattern in group.patterns):
            patterns[pattern] = frozenset().union(*(group.patterns.get(pattern, group.others or ANY) for group in groups))
        others: Conjunction = frozenset().union(*(group.others or ANY for group in groups))
        if found := [pattern for pattern in patterns if _matches_all(pattern, where)]:
            others = frozenset().union(*(patterns.pop(pattern) for pattern in found))
            patterns = {pattern: value | others for pattern, value in patterns.items()}
        if constraint.names:
            asked, patterns, others = self._only_names(constraint, asked, patterns, others, where)
        properties = {name: self.value(value) for name, value in asked.items()}
        if any(properties[name] is False for name in constraint.required):
            return
        if constraint.beside:  # a listed property that is required, if there is one that will do; else one that is not listed
            able = [name for name, value in properties.items() if value is not False and name not in constraint.beside[0]]
            for one in [Objects(required=(name,)) for name in able] or [_one_more(constraint, properties)]:
                if (narrowed := replace(constraint, beside=constraint.beside[not able :]).and_(one)) is not None:
                    yield from self._objects(narrowed, conjunction)
            return
        schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": self.value(others)}
        if patterns:
            if len(patterns) > MAX_PATTERNS:
                raise SchemaError(f"{where}: {len(patterns)} patterns of properties are more than {MAX_PATTERNS}")
            if (len(patterns) > 1 or any(_matches(one, name, where) for one in patterns for name in asked)) and are_names(patterns):
                # The compiler takes no patterns that may match the same name, and combines again what is asked of a listed one.
                schema[BY_NAME] = [((), tuple(patterns), schema["additionalProperties"])]
                for num in range(len(patterns)):
                    for like in itertools.combinations(patterns, num + 1):
                        value = self.value(frozenset().union(*(patterns[one] for one in like)))
                        schema[BY_NAME].append((like, tuple(one for one in patterns if one not in like), value))
            schema["patternProperties"] = _joined({pattern: self.value(value) for pattern, value in patterns.items()})
        if constraint.required:
            schema["required"] = list(constraint.required)
        yield from self._counted(schema, constraint, where)

    def _only_names(
        self, constraint: Objects, asked: Mapping[str, Conjunction], patterns: Mapping[str, Conjunction], others: Conjunction, where: str
    ) -> tuple[dict[str, Conjunction], dict[str, Conjunction], Conjunction]:
        """What `propertyNames` leaves of properties."""
        allowed = cast("list[Strings]", self._terms.alternatives(constraint.names, "string"))
        left = {name: value if any(_holds(one, name, where) for one in allowed) else NOTHING for name, value in asked.items()}
        if not any(one != Strings() for one in allowed) and allowed:
            return left, dict(patterns), others
        for one in allowed:
            left |= {name: others for name in one.values or () if name not in left and _holds(one, name, where)}
        open_ended = [one for one in allowed if one.values is None]
        if not open_ended or others >= NOTHING:
            if patterns:
                raise SchemaError(f"{where}: 'propertyNames' beside 'patternProperties' cannot be enforced")
            return left, {}, NOTHING
        expressions = [_name_pattern(one) for one in open_ended]
        if patterns or None in expressions:
            raise SchemaError(
                f"{where}: 'propertyNames' can be enforced only with one 'pattern', 'enum', or lengths, and no other patterns"
            )
        return left, {"|".join(f"(?:{one})" for one in expressions) if len(expressions) > 1 else str(expressions[0]): others}, NOTHING

    def _counted(self, schema: dict[str, Any], constraint: Objects, where: str) -> Iterator[dict[str, Any]]:
        """Replaces `minProperties` and `maxProperties` by named properties that are required or left out: others may be written twice, and
        count once."""
        fewest, most = constraint.fewest, constraint.most
        required = set(constraint.required)
        optional = [name for name, value in schema["properties"].items() if name not in required and value is not False]
        is_open = schema["additionalProperties"] is not False or "patternProperties" in schema
        missing = max(0, fewest - len(required))
        room = None if most is None else most - len(required)
        if room is not None and not is_open and room >= len(optional):
            room = None
        if room is None and not missing:
            yield schema
            return
        if missing and not optional and not is_open:
            return
        if not optional and missing <= 1:
            yield {**schema, "minProperties": fewest, **({} if most is None else {"maxProperties": most})}
            return
        if room is not None and not optional and not missing:
            yield {**schema, "maxProperties": most}
            return
        num_choices = math.comb(len(optional), missing if room is None else room)
        if missing > len(optional) or num_choices > MAX_CHOICES:
            raise SchemaError(
                f"{where}: 'minProperties' or 'maxProperties' can be enforced only among few listed properties,"
                " or where as many are required"
            )
        if room is None:
            for chosen in itertools.combinations(optional, missing):
                yield {**schema, "required": [*constraint.required, *chosen]}
            return
        for kept in itertools.combinations(optional, min(room, len(optional))):
            closed = {name: value if name in required or name in kept else False for name, value in schema["properties"].items()}
            for chosen in itertools.combinations(kept, missing):
                one = {**schema, "properties": closed, "required": [*constraint.required, *chosen], "additionalProperties": False}
                one.pop("patternProperties", None)
                one.pop(BY_NAME, None)
                yield one


def _one_more(constraint: Objects, listed: Iterable[str]) -> Objects:
    """The required properties, no others that are listed, and one that is not listed."""
    absent = {name: NOTHING for name in listed if name not in constraint.required}
    return Objects((Properties(absent, evaluates=False),), fewest=len(constraint.required) + 1)


def _asked_of(group: Any, name: str, where: str) -> Conjunction:
    """What a group asks of a property."""
    asked = [value for pattern, value in group.patterns.items() if _matches(pattern, name, where)]
    if name in group.named:
        asked.append(group.named[name])
    elif not asked and group.others is not None:
        return cast(Conjunction, group.others)
    return frozenset().union(*asked)


def _matches(pattern: str, name: str, where: str) -> bool:
    """Whether an expression in the notation of the compiler matches some part of a name."""
    try:
        in_python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: f"\\U{int(code[1], 16):08x}", pattern)
        return re.search(re.sub(r"\$(?=$|\)|\|)", r"\\Z", in_python), name) is not None
    except (re.error, RecursionError) as error:
        raise SchemaError(f"{where}: whether the pattern {pattern!r:.60} matches {name!r:.40} is not known") from error


def _matches_all(pattern: str, where: str) -> bool:
    """Whether an expression is known to match all names: it matches nothing, wherever that is."""
    anchored = re.sub(r"\[\^|\\.", "", pattern.removeprefix("^"))
    return not {"^", "$"} & set(anchored) and _matches(pattern, "", where)


def _holds(constraint: Strings, name: str, where: str) -> bool:
    if constraint.formats:
        raise SchemaError(f"{where}: 'propertyNames' with this 'format' cannot be enforced")
    return constraint.and_(Strings(values=(name,))) is not None and all(_matches(one, name, where) for one in constraint.patterns)


def _name_pattern(constraint: Strings) -> str | None:
    """One expression for all strings of a constraint, if there is one."""
    if constraint.formats or constraint.excluded:
        return None
    if not constraint.patterns:
        return rf"^(?s:.{{{constraint.shortest},{'' if constraint.longest is None else constraint.longest}}})$"
    is_plain = len(constraint.patterns) == 1 and constraint.shortest == 0 and constraint.longest is None
    return constraint.patterns[0] if is_plain else None


def _joined(patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Patterns with the same schema become one: the compiler takes no two that may match the same name."""
    by_schema: dict[str, list[str]] = {}
    schemas = {}
    for pattern, schema in patterns.items():
        key = json.dumps(schema, sort_keys=True)
        schemas[key] = schema
        by_schema.setdefault(key, []).append(pattern)
    return {"|".join(f"(?:{one})" for one in some) if len(some) > 1 else some[0]: schemas[key] for key, some in by_schema.items()}


def _others(words: Sequence[str]) -> str:
    """An expression for all strings but these."""
    if not words:
        return "(?s:.*)"
    heads: dict[str, list[str]] = {}
    for word in words:
        if word:
            heads.setdefault(word[0], []).append(word[1:])
    options = [f"{quoted(head)}(?:{_others(rests)})" for head, rests in heads.items()]
    options.append(f"[^{''.join(map(quoted, heads))}](?s:.*)" if heads else "(?s:.+)")
    return f"(?:{'|'.join(options)}){'' if '' in words else '?'}"
