"""From the keywords of JSON Schema to alternatives of constraints. Owns what each keyword means, satisfied or not.

A schema, or what no value of a schema may be, is a term. For each type of value, a conjunction of terms is worked out into alternatives,
each a constraint of `json_constraints.py`. Properties and items stay conjunctions, so schemas may refer to themselves through them.

What is worked out is the same as the schema, or stricter where the compiler has no words for it: what is not an integer, or not a listed
object, may leave out some such values. What cannot be said at all is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, cast

from aengine.structured.json_constraints import (
    ANY,
    NOTHING,
    Arrays,
    Conjunction,
    Constraint,
    Numbers,
    Objects,
    Properties,
    Term,
    format_constraints,
    read_list,
    read_mapping,
    read_strings,
    read_types,
)
from aengine.structured.json_documents import Document, SchemaError, name_of, step_of
from aengine.structured.json_types import FREE, KEYWORDS, TypeKeywords, rest_of_array, rest_of_object, silent, without

MAX_NESTING = 64
MAX_SUBSCHEMAS = 2048
"""Most schemas within a schema. The time to compile grows faster than their number; for so many it is about a tenth of a second."""
MAX_VALUES = 16384
"""Most values in all enums together."""
MAX_ALTERNATIVES = 512
"""Most alternatives of one type that a schema may come to."""
MAX_BRANCHES = 128
"""Most schemas in one `oneOf` that are compared with each other."""
MAX_EXACT = 8
"""Most schemas in one `oneOf` that overlap and are told apart nevertheless."""

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_REFUSED = ("disallow", "divisibleBy", "extends", "$recursiveAnchor")
_NOT_NEGATED = {
    "number": ("multipleOf",),
    "string": ("pattern", "format"),
    "array": ("uniqueItems", "unevaluatedItems"),
    "object": ("patternProperties", "propertyNames", "unevaluatedProperties"),
}
_NEVER_NEGATED = tuple(itertools.chain.from_iterable(_NOT_NEGATED.values()))
_SAYING = {
    *itertools.chain.from_iterable(KEYWORDS.values()),
    *(*_REFERENCES, *_REFUSED, *_NEVER_NEGATED, "type", "const", "enum", "allOf", "anyOf", "oneOf", "not", "if"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
}
"""The keywords that say something of a value by themselves."""


class Terms:
    """All terms of one document. `at` is the JSON pointer of a schema, as a fragment. Every method may raise `SchemaError`."""

    def __init__(self, document: Document, *, strict_formats: bool, exact_one_of: bool, tells_apart: bool) -> None:
        """`tells_apart`: whether the schemas of a `oneOf` that overlap are told apart where that is possible; else any of them will do."""
        self._document = document
        self._strict_formats = strict_formats
        self._keywords = TypeKeywords(self.of, strict_formats=strict_formats)
        self._exact_one_of = exact_one_of
        self._tells_apart = tells_apart
        self._schemas: list[tuple[object, str]] = [(True, "#")]
        self._numbers: dict[int, int] = {}  # of the schemas, by the id of the object
        self._alternatives: dict[tuple[Conjunction, str], list[Constraint]] = {}
        self._known: dict[tuple[Term, str], list[Constraint]] = {}
        self._open: set[tuple[Term, str]] = set()  # what is being worked out
        self._num_values = 0

    def of(self, schema: object, at: str, satisfied: bool = True) -> Conjunction:
        if isinstance(schema, bool):
            return ANY if schema is satisfied else NOTHING
        if not isinstance(schema, dict):
            raise SchemaError(f"{at} is {name_of(schema)}, not a schema")
        if not schema.keys() & _SAYING:
            return ANY if satisfied else NOTHING
        number = self._numbers.get(id(schema))
        if number is None:
            number = self._numbers[id(schema)] = len(self._schemas)
            self._schemas.append((schema, at))
            if number > MAX_SUBSCHEMAS:
                raise SchemaError(f"it has more than {MAX_SUBSCHEMAS} schemas within schemas")
        return frozenset({(number, satisfied)})

    def alternatives(self, conjunction: Conjunction, kind: str) -> list[Constraint]:
        """All values of a type that satisfy a conjunction: those of any of these constraints."""
        found = self._alternatives.get((conjunction, kind))
        if found is None:
            found = [FREE[kind]]
            for term in sorted(conjunction):
                found = self._both(found, self._of_term(term, kind), self._schemas[term[0]][1])
            self._alternatives[conjunction, kind] = found
        return found

    def where(self, conjunction: Conjunction) -> str:
        """The place of a schema, for messages."""
        return self._schemas[max(conjunction, default=(0, True))[0]][1]

    def _of_term(self, term: Term, kind: str) -> list[Constraint]:
        if term in NOTHING:
            return []
        found = self._known.get((term, kind))
        if found is None:
            schema, at = self._schemas[term[0]]
            if (term, kind) in self._open:
                raise SchemaError(f"{at} refers to itself: nothing satisfies it")
            if len(self._open) >= MAX_NESTING:
                raise SchemaError(f"is nested deeper than {MAX_NESTING} schemas")
            self._open.add((term, kind))
            read = self._satisfied if term[1] else self._refused
            try:
                found = self._known[term, kind] = read(cast("dict[str, Any]", schema), at, kind)
            finally:
                self._open.discard((term, kind))
        return found

    def _inner(self, schema: object, at: str, kind: str, satisfied: bool = True) -> list[Constraint]:
        """Return the alternatives of a schema that speaks of the same value as the one around it."""
        return self.alternatives(self.of(schema, at, satisfied), kind)

    # ---- satisfied -----------------------------------------------------------------------------------------------------------

    def _satisfied(self, schema: dict[str, Any], at: str, kind: str) -> list[Constraint]:
        for keyword in _REFUSED:
            if keyword in schema:
                raise SchemaError(f"{at}: {keyword!r} cannot be enforced")
        if self._document.references_stand_alone and "$ref" in schema:
            return self._inner(*self._document.resolve(schema, "$ref", at), kind)
        types = read_types(schema, at)
        if kind not in types and not (kind == "number" and "integer" in types):
            return []
        found: list[Constraint] = [Numbers(integer=True) if kind == "number" and "number" not in types else FREE[kind]]
        own_is_applied = False
        for keyword in schema:
            if keyword in KEYWORDS.get(kind, ()):
                if not own_is_applied:
                    own_is_applied = True
                    found = self._both(found, self._keywords.satisfied(schema, at, kind), at)
            elif (options := self._applied(schema, keyword, f"{at}/{keyword}", kind)) is not None:
                found = self._both(found, options, at)
        if kind == "object" and "unevaluatedProperties" in schema:
            unevaluated = self.of(schema["unevaluatedProperties"], f"{at}/unevaluatedProperties")
            found = self._both(found, [Objects()], at)
            found = [rest_of_object(cast(Objects, one), unevaluated) for one in found]
        if kind == "array" and "unevaluatedItems" in schema:
            unevaluated = self.of(schema["unevaluatedItems"], f"{at}/unevaluatedItems")
            found = [one for one in (rest_of_array(cast(Arrays, one), unevaluated) for one in found) if one is not None]
        return found

    def _applied(self, schema: dict[str, Any], keyword: str, at: str, kind: str) -> list[Constraint] | None:
        """The alternatives of a keyword that may speak of any type; None if it says nothing of this one."""
        value = schema[keyword]
        match keyword:
            case "const" | "enum":
                return self._values([value] if keyword == "const" else read_list(value, at), kind, at)
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self._inner(*self._document.resolve(schema, keyword, at), kind)
            case "allOf":
                found = [FREE[kind]]
                for index, one in enumerate(read_list(value, at)):
                    found = self._both(found, self._inner(one, f"{at}/{index}", kind), at)
                return found
            case "anyOf":
                return _distinct(
                    one for index, branch in enumerate(read_list(value, at)) for one in self._inner(branch, f"{at}/{index}", kind)
                )
            case "oneOf":
                return self._exactly_one(read_list(value, at), at, kind)
            case "not":
                return self._inner(value, at, kind, False)
            case "if":
                yes = self._both(self._inner(value, at, kind), self._inner(schema.get("then", True), f"{at[:-2]}then", kind), at)
                if "else" not in schema and "then" not in schema:
                    return None
                no = self._both(self._inner(value, at, kind, False), self._inner(schema.get("else", True), f"{at[:-2]}else", kind), at)
                return _distinct([*yes, *no])
            case "dependentRequired" | "dependentSchemas" | "dependencies" if kind == "object":
                found = [FREE[kind]]
                for name, depends in read_mapping(value, at).items():
                    if isinstance(depends, list):
                        named = Properties({name: ANY}, evaluates=False)  # in its place before the others
                        met: list[Constraint] = [Objects((named,), required=tuple(read_strings(depends, at)))]
                    else:
                        met = self._both([Objects(required=(name,))], self._inner(depends, f"{at}/{step_of(name)}", kind), at)
                    found = self._both(found, [without(name), *met], at)
                return found
        return None

    def _exactly_one(self, branches: Sequence[object], at: str, kind: str) -> list[Constraint]:
        options = [self._inner(branch, f"{at}/{index}", kind) for index, branch in enumerate(branches)]
        live = [index for index, one in enumerate(options) if one]
        if not self._tells_apart:
            return _distinct(one for index in live for one in options[index])
        if len(live) <= MAX_BRANCHES and all(
            not self._both(options[one], options[other], at) for position, one in enumerate(live) for other in live[:position]
        ):
            return [one for index in live for one in options[index]]
        try:
            if len(live) > MAX_EXACT:
                raise SchemaError(f"more than {MAX_EXACT} schemas overlap")
            for index in live:
                self._check_negation(branches[index], f"{at}/{index}", set())
            exact = []
            for index in live:
                found = options[index]
                for other in live:
                    if other != index:
                        found = self._both(found, self._inner(branches[other], f"{at}/{other}", kind, False), at)
                exact += found
            return _distinct(exact)
        except SchemaError as error:
            if not self._exact_one_of:
                return _distinct(one for index in live for one in options[index])
            raise SchemaError(f"{at}: schemas that overlap cannot be told apart: {error}") from error

    def _values(self, values: Sequence[object], kind: str, at: str) -> list[Constraint]:
        mine = [value for value in values if name_of(value) == kind]
        self._num_values += len(mine)
        if self._num_values > MAX_VALUES:
            raise SchemaError(f"{at}: more than {MAX_VALUES} values in 'enum'")
        if not mine:
            return []
        return self._keywords.values(mine, kind, at)

    # ---- not satisfied -------------------------------------------------------------------------------------------------------

    def _refused(self, schema: dict[str, Any], at: str, kind: str) -> list[Constraint]:
        """A value is not of a schema if any one keyword says so."""
        if self._document.references_stand_alone and "$ref" in schema:
            return self._inner(*self._document.resolve(schema, "$ref", at), kind, False)
        types = read_types(schema, at)
        if kind not in types and not (kind == "number" and "integer" in types):
            return [FREE[kind]]
        found: list[Constraint] = []
        for keyword in schema:
            if keyword in (*_REFUSED, *_NOT_NEGATED.get(kind, ())) and not self._says_nothing(schema, keyword, at):
                raise SchemaError(f"{at}: what does not satisfy {keyword!r} cannot be enforced")
            if keyword in KEYWORDS.get(kind, ()):
                found += self._keywords.refused(schema, keyword, at)
            else:
                found += self._not_applied(schema, keyword, f"{at}/{keyword}", kind)
        return _distinct(silent(one) for one in found)

    def _check_negation(self, schema: Any, at: str, seen: set[int]) -> None:
        """Refuses what `_refused` would, in schemas within schemas too."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        for keyword, value in schema.items():
            if keyword in _REFUSED or (keyword in _NEVER_NEGATED and not self._says_nothing(schema, keyword, at)):
                raise SchemaError(f"{at}: what does not satisfy {keyword!r} cannot be enforced")
            if keyword in _REFERENCES:
                self._check_negation(*self._document.resolve(schema, keyword, at), seen)
            elif keyword not in ("const", "enum", "default", "examples"):
                inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
                for one in (value, *inner):
                    self._check_negation(one, at, seen)

    def _says_nothing(self, schema: dict[str, Any], keyword: str, at: str) -> bool:
        value = schema[keyword]
        if keyword == "format":
            return not format_constraints(value, at, strict=self._strict_formats)
        return value is True if keyword.startswith("unevaluated") or keyword == "propertyNames" else not value

    def _not_applied(self, schema: dict[str, Any], keyword: str, at: str, kind: str) -> list[Constraint]:
        value = schema[keyword]

        def inner(satisfied: Iterable[bool]) -> list[Constraint]:
            found = [FREE[kind]]
            for index, (one, wanted) in enumerate(zip(read_list(value, at), satisfied, strict=True)):
                found = self._both(found, self._inner(one, f"{at}/{index}", kind, wanted), at)
            return found

        match keyword:
            case "const" | "enum":
                return self._other_values([value] if keyword == "const" else read_list(value, at), kind, at)
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                return self._inner(*self._document.resolve(schema, keyword, at), kind, False)
            case "allOf":
                return [
                    one for index, branch in enumerate(read_list(value, at)) for one in self._inner(branch, f"{at}/{index}", kind, False)
                ]
            case "anyOf":
                return inner([False] * len(read_list(value, at)))
            case "oneOf":
                num = len(read_list(value, at))
                found = inner([False] * num)
                for one in range(num):
                    for other in range(one):
                        both = self._inner(value[one], f"{at}/{one}", kind), self._inner(value[other], f"{at}/{other}", kind)
                        found += self._both(*both, at)
                return found
            case "not":
                return self._inner(value, at, kind)
            case "if":
                found = []
                for branch, satisfied in (("then", True), ("else", False)):
                    if branch in schema:
                        fails = self._inner(schema[branch], f"{at[:-2]}{branch}", kind, False)
                        found += self._both(self._inner(value, at, kind, satisfied), fails, at)
                return found
            case "dependentRequired" | "dependentSchemas" | "dependencies" if kind == "object":
                found = []
                for name, depends in read_mapping(value, at).items():
                    needed = [Objects(required=(name,))]
                    if isinstance(depends, list):
                        fails = [without(one) for one in read_strings(depends, at)]
                    else:
                        fails = self._inner(depends, f"{at}/{step_of(name)}", kind, False)
                    found += self._both(cast("list[Constraint]", needed), fails, at)
                return found
        return []

    def _other_values(self, values: Sequence[object], kind: str, at: str) -> list[Constraint]:
        mine = [value for value in values if name_of(value) == kind]
        if not mine:
            return [FREE[kind]]
        if (scalars := self._keywords.other_scalars(mine, kind)) is not None:
            return scalars
        found = [FREE[kind]]
        for value in mine:
            found = self._both(found, self._keywords.other_values(value, at), at)
        return found

    # ---- conjunctions --------------------------------------------------------------------------------------------------------

    def _both(self, ours: Sequence[Constraint], theirs: Sequence[Constraint], at: str) -> list[Constraint]:
        found = []
        for one in ours:
            for other in theirs:
                both = one if other in FREE.values() else other if one in FREE.values() else one.and_(other)  # type: ignore[arg-type]
                if both is not None and not (isinstance(both, Objects) and self._lacks(both)):
                    found.append(both)
                    if len(found) > MAX_ALTERNATIVES:
                        raise SchemaError(f"{at} comes to more than {MAX_ALTERNATIVES} alternatives")
        return found

    def _lacks(self, constraint: Objects) -> bool:
        """Whether there is no value for a required property, as far as its type and listed values tell."""
        for name in constraint.required:
            asked = [group.named.get(name, group.others or ANY) for group in constraint.groups if name in group.named or not group.patterns]
            if not self._may_hold(frozenset().union(*asked)):
                return True
        return False

    def _may_hold(self, conjunction: Conjunction) -> bool:
        if conjunction >= NOTHING:
            return False
        try:
            if any(self.alternatives(conjunction, kind) for kind in ("null", "boolean", "string", "number")):
                return True
            return any(all(self._of_term(term, kind) for term in conjunction) for kind in ("array", "object"))
        except SchemaError:  # it refers to what is being worked out, or will be refused where it matters
            return True


def _distinct(constraints: Iterable[Constraint]) -> list[Constraint]:
    found: list[Constraint] = []
    seen: set[int] = set()
    for one in constraints:
        if id(one) in seen:
            continue
        seen.add(id(one))
        if (isinstance(one, Objects | Arrays) and len(found) > 64) or one not in found:
            found.append(one)
    return found
