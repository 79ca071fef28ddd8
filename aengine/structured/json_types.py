"""What the keywords of one type of value ask, satisfied or not: those of numbers, strings, arrays and objects, and listed values.

Each is worked out by itself, into constraints; schemas within it become conjunctions of terms, whatever these mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from aengine.structured.json_constraints import (
    ANY,
    NOTHING,
    Arrays,
    Conjunction,
    Constraint,
    Contained,
    Listed,
    Numbers,
    Objects,
    Properties,
    Strings,
    format_constraints,
    negated,
    read_bounds,
    read_count,
    read_list,
    read_mapping,
    read_multiples,
    read_pattern,
    read_strings,
)
from aengine.structured.json_documents import SchemaError, step_of

FREE: dict[str, Constraint] = {
    "null": Listed((None,)),
    "boolean": Listed((False, True)),
    "number": Numbers(),
    "string": Strings(),
    "array": Arrays(),
    "object": Objects(),
}
KEYWORDS = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "additionalItems", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": (
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "propertyNames",
    ),
}


class TypeKeywords:
    """Every method may raise `SchemaError`. `at` is the place of a schema."""

    def __init__(self, term_of: Callable[[object, str, bool], Conjunction], *, strict_formats: bool) -> None:
        """`term_of`: the conjunction of a schema at a place, satisfied or not."""
        self._term_of = term_of
        self._strict_formats = strict_formats

    def _of(self, schema: object, at: str, satisfied: bool = True) -> Conjunction:
        return self._term_of(schema, at, satisfied)

    def satisfied(self, schema: dict[str, Any], at: str, kind: str) -> list[Constraint]:
        """The alternatives of all keywords of a type."""
        match kind:
            case "number":
                found: Numbers | None = Numbers(multiples=read_multiples(schema, at))
                for bound in read_bounds(schema, at):
                    found = found and found.and_(bound)
                return [] if found is None else [found]
            case "string":
                return self._string(schema, at)
            case "array":
                return [one for one in [self._array(schema, at)] if one is not None]
        return self._object(schema, at)

    def _string(self, schema: dict[str, Any], at: str) -> list[Constraint]:
        patterns = (read_pattern(schema["pattern"], at),) if "pattern" in schema else ()
        found = Strings(read_count(schema, "minLength", at) or 0, read_count(schema, "maxLength", at), patterns)
        options = format_constraints(schema["format"], at, strict=self._strict_formats) if "format" in schema else ()
        return [both for one in options if (both := found.and_(one)) is not None] if options else [found]

    def _array(self, schema: dict[str, Any], at: str) -> Arrays | None:
        prefix, items, evaluated = schema.get("prefixItems", []), schema.get("items", True), None if "items" in schema else 0
        place = "prefixItems"
        if isinstance(items, list):  # as before draft 2020-12
            prefix, items, place = items, schema.get("additionalItems", True), "items"
            evaluated = None if "additionalItems" in schema else 0
        firsts = [self._of(one, f"{at}/{place}/{index}") for index, one in enumerate(read_list(prefix, f"{at}/{place}"))]
        contains: tuple[Contained, ...] = ()
        if "contains" in schema:
            least = read_count(schema, "minContains", at)
            item = self._of(schema["contains"], f"{at}/contains")
            contains = (Contained(item, 1 if least is None else least, read_count(schema, "maxContains", at)),)
        return Arrays(
            tuple(firsts),
            self._of(items, f"{at}/items"),
            read_count(schema, "minItems", at) or 0,
            read_count(schema, "maxItems", at),
            schema.get("uniqueItems") is True,
            contains,
            None if evaluated is None else len(firsts),
        ).and_(Arrays())

    def _object(self, schema: dict[str, Any], at: str) -> list[Constraint]:
        named = {
            name: self._of(one, f"{at}/properties/{step_of(name)}")
            for name, one in read_mapping(schema.get("properties", {}), f"{at}/properties").items()
        }
        patterns = {
            read_pattern(pattern, at): self._of(one, f"{at}/patternProperties/{step_of(pattern)}")
            for pattern, one in read_mapping(schema.get("patternProperties", {}), f"{at}/patternProperties").items()
        }
        others = self._of(schema["additionalProperties"], f"{at}/additionalProperties") if "additionalProperties" in schema else None
        names = self._of(schema["propertyNames"], f"{at}/propertyNames") if "propertyNames" in schema else ANY
        group = Properties(named, patterns, others)
        required = tuple(dict.fromkeys(read_strings(schema.get("required", []), f"{at}/required")))
        fewest, most = read_count(schema, "minProperties", at) or 0, read_count(schema, "maxProperties", at)
        return [Objects((group,), required, fewest, most, names)]

    def refused(self, schema: dict[str, Any], keyword: str, at: str) -> list[Constraint]:
        """The alternatives of values that one keyword does not let through."""
        value = schema[keyword]
        place = f"{at}/{keyword}"
        match keyword:
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return [
                    Numbers(high=one.low, below=not one.above) if one.low is not None else Numbers(low=one.high, above=not one.below)
                    for one in read_bounds({keyword: value} if not isinstance(value, bool) else schema, at)
                ]
            case "minLength" if least := read_count(schema, keyword, at):
                return [Strings(longest=least - 1)]
            case "maxLength":
                return [Strings(shortest=(read_count(schema, keyword, at) or 0) + 1)]
            case "minItems" if least := read_count(schema, keyword, at):
                return [Arrays(most=least - 1)]
            case "maxItems":
                return [Arrays(fewest=(read_count(schema, keyword, at) or 0) + 1)]
            case "minProperties" if least := read_count(schema, keyword, at):
                return [Objects(most=least - 1)]
            case "maxProperties":
                return [Objects(fewest=(read_count(schema, keyword, at) or 0) + 1)]
            case "prefixItems" | "items" | "additionalItems" | "contains":
                return self._not_items(schema, keyword, at)
            case "properties":
                return [
                    with_property(name, self._of(one, f"{place}/{step_of(name)}", False))
                    for name, one in read_mapping(value, place).items()
                    if one is not True
                ]
            case "required":
                return [without(name) for name in read_strings(value, place)]
            case "additionalProperties" if value is not True:
                if value is not False or "patternProperties" in schema:
                    raise SchemaError(f"{at}: what does not satisfy {keyword!r} cannot be enforced")
                return [Objects(beside=(frozenset(read_mapping(schema.get("properties", {}), f"{at}/properties")),))]
        return []

    def _not_items(self, schema: dict[str, Any], keyword: str, at: str) -> list[Constraint]:
        own = self._array({key: value for key, value in schema.items() if key in KEYWORDS["array"] or key.endswith("Contains")}, at)
        if own is None:
            return [Arrays()]
        if keyword == "contains":
            contained = own.contains[0]
            if contained.most is not None or contained.least > 1:
                raise SchemaError(f"{at}: what does not satisfy 'contains' with a number cannot be enforced")
            return [Arrays(items=negated(contained.item))] if contained.least else []
        if keyword == "prefixItems" or (keyword == "items" and isinstance(schema["items"], list)):
            return [Arrays((ANY,) * index + (negated(one),), fewest=index + 1) for index, one in enumerate(own.prefix)]
        if own.items == ANY:
            return []
        skipped = len(own.prefix)
        if own.items >= NOTHING:
            return [Arrays(fewest=skipped + 1)]
        return [Arrays((ANY,) * index + (negated(own.items),), fewest=index + 1) for index in range(skipped, skipped + 4)]

    def values(self, mine: Sequence[object], kind: str, at: str) -> list[Constraint]:
        """One of these values of a type."""
        match kind:
            case "number":
                return [Numbers(values=tuple(dict.fromkeys(cast("list[int]", mine))))]
            case "string":
                return [Strings(values=tuple(dict.fromkeys(cast("list[str]", mine))))]
            case "array":
                lists = cast("list[list[object]]", mine)
                return [Arrays(tuple(self._of({"const": one}, at) for one in value), fewest=len(value), most=len(value)) for value in lists]
            case "object":
                objects = cast("list[dict[str, object]]", mine)
                return [
                    Objects(
                        (Properties({name: self._of({"const": one}, at) for name, one in value.items()}, {}, NOTHING, False),),
                        tuple(value),
                    )
                    for value in objects
                ]
        return [Listed(tuple(dict.fromkeys(mine)))]

    def other_scalars(self, mine: Sequence[object], kind: str) -> list[Constraint] | None:
        """None of these values; None if they are arrays or objects."""
        match kind:
            case "number":
                return [Numbers(excluded=frozenset(cast("list[int]", mine)))]
            case "string":
                return [Strings(excluded=frozenset(cast("list[str]", mine)))]
            case "null" | "boolean":
                left = tuple(one for one in cast(Listed, FREE[kind]).values if one not in mine)
                return [Listed(left)] if left else []
        return None

    def other_values(self, value: object, at: str) -> list[Constraint]:
        """Return alternatives for all arrays, or all objects, other than `value`."""
        options: list[Constraint] = []
        if isinstance(value, list):
            options.append(Arrays(fewest=len(value) + 1))
            if value:
                options.append(Arrays(most=len(value) - 1))
            for index, one in enumerate(value):
                options.append(Arrays((ANY,) * index + (self._of({"const": one}, at, False),), fewest=index + 1))
        else:
            assert isinstance(value, dict)
            options.append(Objects(beside=(frozenset(value),)))
            for name, one in value.items():
                options += [without(name), with_property(name, self._of({"const": one}, at, False))]
        return options


def rest_of_object(constraint: Objects, unevaluated: Conjunction) -> Objects:
    """With what is asked of the properties that no keyword has looked at."""
    groups = [group for group in constraint.groups if group.evaluates]
    if any(group.others is not None for group in groups):
        return constraint
    named = {name: ANY for group in groups for name in group.named}
    patterns = {pattern: ANY for group in groups for pattern in group.patterns}
    return replace(constraint, groups=(*constraint.groups, Properties(named, patterns, unevaluated)))


def rest_of_array(constraint: Arrays, unevaluated: Conjunction) -> Arrays | None:
    """With what is asked of the items that no keyword has looked at; None if there is no such array."""
    if constraint.evaluated is None:
        return constraint
    return constraint.and_(Arrays((ANY,) * constraint.evaluated, unevaluated, evaluated=None))


def silent(constraint: Constraint) -> Constraint:
    """The constraint, which then counts nothing as evaluated."""
    match constraint:
        case Arrays():
            return replace(constraint, evaluated=0)
        case Objects() if any(group.evaluates for group in constraint.groups):
            return replace(constraint, groups=tuple(replace(group, evaluates=False) for group in constraint.groups))
    return constraint


def without(name: str) -> Objects:
    """Objects that do not have a property."""
    return Objects((Properties({name: NOTHING}, evaluates=False),))


def with_property(name: str, value: Conjunction) -> Objects:
    """Objects that have a property, with such a value."""
    return Objects((Properties({name: value}, evaluates=False),), (name,))
