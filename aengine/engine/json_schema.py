"""JSON Schemas made fit for the grammar compiler. Owns the rule that a keyword is enforced or refused, never ignored.

The compiler passes over keywords that it cannot express, and over some combinations of those it can, so its grammar may allow
what the schema does not. Here a schema is copied with such places rewritten to an equal or stricter form, or refused. The output
always validates; it may be narrower than the schema: properties come in the order of the schema, and what an object or array
leaves open by naming properties or items is closed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aengine.engine.regex_dialect import RegexError, inside_json_string

MAX_NESTING = 64

_TYPES: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties",
        "unevaluatedProperties",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
}  # fmt: skip
_TYPE_OF = {keyword: kind for kind, keywords in _TYPES.items() for keyword in keywords}
_COMBINING = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_CONSTRAINTS = {"type", *_TYPE_OF, *_COMBINING}
_REFUSED = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains", "maxContains",
    "additionalItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_IPV4_PART = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"


class SchemaError(Exception):
    """The schema is no schema, or asks for what cannot be enforced. The message says where."""


def fit_schema(text: str) -> str:
    """The schema that the compiler is given for the JSON text of a schema. Raises `SchemaError`."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"is not JSON: {error}") from error
    _check_nesting(schema)
    fitter = _Fitter(schema)
    fitted = fitter.schema(schema, "#")
    fitter.check_references()
    return json.dumps(fitted)


def _check_nesting(schema: object) -> None:
    level: list[object] = [schema]
    for _ in range(2 * MAX_NESTING):  # a schema in a schema is two containers deeper
        level = [child for one in level if isinstance(one, dict | list) for child in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return
    raise SchemaError(f"is nested deeper than {MAX_NESTING} schemas")


class _Fitter:
    """One walk over all subschemas. `at` is the JSON pointer of a subschema, as a fragment."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._seen: set[str] = set()
        self._references: list[tuple[str, str]] = []  # pointer of the schema, what it refers to

    def schema(self, schema: object, at: str) -> Any:
        self._seen.add(at)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(f"{at} is {_name(schema)}, not a schema")
        for keyword in _REFUSED:
            if keyword in schema:
                raise SchemaError(f"{at}: {keyword!r} cannot be enforced")
        if schema.get("uniqueItems"):
            raise SchemaError(f"{at}: 'uniqueItems' cannot be enforced")
        fitted: dict[str, Any] = {key: value for key, value in schema.items() if key in _CONSTRAINTS}
        for keyword in ("$defs", "definitions"):
            if keyword in schema:
                fitted[keyword] = self._mapping(schema[keyword], f"{at}/{keyword}")
        given = [keyword for keyword in _COMBINING if keyword in fitted]
        if given:
            self._combining(fitted, given[0], at)
        else:
            self._typed(fitted, at)
        return fitted

    def check_references(self) -> None:
        for at, target in self._references:
            if target not in self._seen:
                raise SchemaError(f"{at}: {target!r} is not a schema in here")

    def _mapping(self, schemas: object, at: str) -> dict[str, Any]:
        if not isinstance(schemas, dict):
            raise SchemaError(f"{at} is {_name(schemas)}, not an object of schemas")
        return {key: self.schema(value, f"{at}/{key}") for key, value in schemas.items()}

    def _list(self, schemas: object, at: str) -> list[Any]:
        if not isinstance(schemas, list) or not schemas:
            raise SchemaError(f"{at} is not a list of schemas")
        return [self.schema(one, f"{at}/{index}") for index, one in enumerate(schemas)]

    def _combining(self, fitted: dict[str, Any], keyword: str, at: str) -> None:
        beside = [other for other in fitted if other in _CONSTRAINTS and other != keyword]
        if keyword in ("enum", "const"):
            values = fitted[keyword] if keyword == "enum" else [fitted[keyword]]
            if not isinstance(values, list):
                raise SchemaError(f"{at}: 'enum' is {_name(values)}, not a list")
            if beside == ["type"]:
                wanted = _types(fitted.pop("type"), at)
                values = [value for value in values if _is_of(value, wanted)]
                beside = []
                fitted.pop(keyword)
                fitted["enum"] = values
            if not values:
                raise SchemaError(f"{at}: no value of {keyword!r} is possible")
        if beside:
            raise SchemaError(f"{at}: {beside[0]!r} beside {keyword!r} cannot be enforced")
        if keyword == "$ref":
            reference = fitted["$ref"]
            if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")) or set(reference) & set("~%"):
                raise SchemaError(f"{at}: {reference!r} is not a reference into this schema, like '#/$defs/name'")
            self._references.append((at, reference))
        elif keyword in ("anyOf", "oneOf", "allOf"):
            branches = fitted.pop(keyword)
            allowed = "anyOf" if keyword == "oneOf" else keyword  # the compiler sees for itself less often that they are the same
            fitted[allowed] = self._list(branches, f"{at}/{allowed}")
            if keyword == "allOf" and len(branches) > 1:
                raise SchemaError(f"{at}: 'allOf' of more than one schema cannot be enforced")
            if keyword == "oneOf" and not self._disjoint(branches):
                raise SchemaError(f"{at}: 'oneOf' whose schemas may overlap cannot be enforced; 'anyOf' can")

    def _typed(self, fitted: dict[str, Any], at: str) -> None:
        kinds = {_TYPE_OF[keyword] for keyword in fitted if keyword in _TYPE_OF}
        if "type" not in fitted:
            if not kinds:
                return
            if len(kinds) > 1:
                raise SchemaError(f"{at} has keywords for {', '.join(sorted(kinds))}; say which 'type' it is")
            fitted["type"] = kinds.pop()
        types = _types(fitted["type"], at)
        if "multipleOf" in fitted and "number" in types:
            raise SchemaError(f"{at}: 'multipleOf' can be enforced for integers only")
        if "string" in types:
            self._string(fitted, at)
        if "object" in types:
            self._object(fitted, at)
        if "array" in types:
            if "items" in fitted:
                fitted["items"] = self.schema(fitted["items"], f"{at}/items")
            if "prefixItems" in fitted:
                fitted["prefixItems"] = self._list(fitted["prefixItems"], f"{at}/prefixItems")
            if fitted.pop("unevaluatedItems", True) is not False and "unevaluatedItems" in fitted:
                raise SchemaError(f"{at}: 'unevaluatedItems' can only be false")

    def _string(self, fitted: dict[str, Any], at: str) -> None:
        shape = [keyword for keyword in ("pattern", "format") if keyword in fitted]
        lengths = [keyword for keyword in ("minLength", "maxLength") if keyword in fitted]
        if shape and lengths:
            raise SchemaError(f"{at}: {lengths[0]!r} beside {shape[0]!r} cannot be enforced; put the length into the pattern")
        if len(shape) > 1:
            raise SchemaError(f"{at}: 'format' beside 'pattern' cannot be enforced")
        if "pattern" in fitted:
            fitted["pattern"] = _pattern(fitted["pattern"], at)
        elif fitted.get("format") == "ipv4":
            del fitted["format"]
            fitted["pattern"] = rf"^{_IPV4_PART}(\.{_IPV4_PART}){{3}}$"
        elif lengths:
            # The compiler's own form of this lets control characters through, which a JSON string must not hold as they are.
            low, high = fitted.pop("minLength", 0), fitted.pop("maxLength", None)
            for bound in (low, 0 if high is None else high):
                if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
                    raise SchemaError(f"{at}: a length is {bound!r}, not an integer >= 0")
            if high is not None and low > high:
                raise SchemaError(f"{at}: minLength {low} is more than maxLength {high}")
            fitted["pattern"] = inside_json_string(rf"[\s\S]{{{low},{'' if high is None else high}}}")

    def _object(self, fitted: dict[str, Any], at: str) -> None:
        patterned = [keyword for keyword in ("patternProperties", "propertyNames") if keyword in fitted]
        others = [keyword for keyword in ("properties", "required", *patterned[1:]) if fitted.get(keyword)]
        if patterned and others:
            raise SchemaError(f"{at}: {patterned[0]!r} beside {others[0]!r} cannot be enforced")
        if "properties" in fitted:
            fitted["properties"] = self._mapping(fitted["properties"], f"{at}/properties")
        if "patternProperties" in fitted:
            if fitted.get("additionalProperties", False) is not False:
                raise SchemaError(f"{at}: 'additionalProperties' beside 'patternProperties' can only be false")
            schemas = self._mapping(fitted["patternProperties"], f"{at}/patternProperties")
            if len(schemas) != 1:
                raise SchemaError(f"{at}: 'patternProperties' with more or less than one pattern cannot be enforced")
            fitted["patternProperties"] = {_pattern(pattern, at): schema for pattern, schema in schemas.items()}
        if "propertyNames" in fitted:
            fitted["propertyNames"] = self.schema(
                {"type": "string", **fitted["propertyNames"]} if isinstance(fitted["propertyNames"], dict) else fitted["propertyNames"],
                f"{at}/propertyNames",
            )
        for keyword in ("additionalProperties", "unevaluatedProperties"):
            if keyword in fitted:
                fitted[keyword] = self.schema(fitted[keyword], f"{at}/{keyword}")
        required = fitted.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{at}: 'required' is not a list of strings")
        for name in required:
            properties = fitted.setdefault("properties", {})
            if name not in properties:
                rest = fitted.get("additionalProperties", fitted.get("unevaluatedProperties", True))
                if rest is False:
                    raise SchemaError(f"{at}: {name!r} is required, and not allowed")
                properties[name] = rest

    def _disjoint(self, branches: Sequence[object]) -> bool:
        resolved = [self._resolve(branch) for branch in branches]
        return all(_apart(one, other) for index, one in enumerate(resolved) for other in resolved[:index])

    def _resolve(self, schema: object) -> object:
        for _ in range(MAX_NESTING):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            target: Any = self._root
            for step in str(schema["$ref"]).split("/")[1:]:
                if not isinstance(target, dict) or step not in target:
                    return True
                target = target[step]
            schema = target
        return True


def _apart(one: object, other: object) -> bool:
    """Whether no value can be of both schemas, as far as their types, their listed values, and those of common properties tell."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    ours, theirs = _listed(one), _listed(other)
    if ours is not None and theirs is not None:
        return not ours & theirs
    kinds = [_possible_types(schema) for schema in (one, other)]
    if None not in kinds and not set(kinds[0] or ()) & set(kinds[1] or ()):
        return True
    if kinds != [("object",), ("object",)]:
        return False
    names = set(one.get("required", ())) & set(other.get("required", ()))
    return any(_apart(one.get("properties", {}).get(name), other.get("properties", {}).get(name)) for name in names)


def _listed(schema: Mapping[str, Any]) -> set[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def _possible_types(schema: Mapping[str, Any]) -> tuple[str, ...] | None:
    """None if anything is; an integer is a number here."""
    if "type" not in schema:
        return None
    return tuple("number" if kind == "integer" else kind for kind in _types(schema["type"], "oneOf"))


def _pattern(pattern: object, at: str) -> str:
    if not isinstance(pattern, str):
        raise SchemaError(f"{at}: a pattern is {_name(pattern)}, not a string")
    try:
        return inside_json_string(pattern)
    except RegexError as error:
        raise SchemaError(f"{at}: pattern {pattern!r:.100}: {error}") from error


def _types(value: object, at: str) -> tuple[str, ...]:
    types = [value] if isinstance(value, str) else value
    if not isinstance(types, list) or not types or not all(isinstance(one, str) for one in types):
        raise SchemaError(f"{at}: 'type' is {value!r:.60}, not a type or a list of types")
    return tuple(types)


def _is_of(value: object, types: Sequence[str]) -> bool:
    kinds = [_name(value)]
    if kinds == ["number"] and isinstance(value, int | float) and float(value).is_integer():
        kinds.append("integer")
    return any(kind in types for kind in kinds)


def _name(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
