"""Rewrites JSON Schemas for the grammar compiler. Owns the rule that a keyword is enforced or refused, never ignored.

The compiler refuses most of what it cannot enforce by itself. Here a schema is copied with the places in which it would allow too
much, or take too long, rewritten to an equal or stricter form, or refused. The output always validates; it may be narrower than the
schema: properties come in the order of the schema, numbers in plain decimals, and characters that JSON can only write as `\\uXXXX`
(control characters without a short escape) not at all.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn

from aengine.structured.regex_dialect import RegexError, anywhere

MAX_NESTING = 64
MAX_SUBSCHEMAS = 2048
"""Most schemas within a schema. The time to compile grows faster than their number; for so many it is about a tenth of a second."""
MAX_PATTERNS = 32
"""Most patterns in one `patternProperties`; the compiler compares each with each."""
MAX_VALUES = 16384
"""Most values in all enums together."""
MAX_BRANCHES = 256
"""Most schemas in one `oneOf`; each is compared with each."""
MAX_UNIQUE = 5
"""Most different values of an item for which all arrays without repetition are listed."""
MAX_DIGITS = 15
"""Most digits of an integer that the compiler's arithmetic keeps exact."""
MAX_MULTIPLES = 10_000
"""Most units of the last digit in the values of `multipleOf`, both in their sum and in their least common multiple: the compiler counts the
units of each value one by one, and up to the least common multiple for values that apply together."""

_SCHEMA = ("additionalItems", "additionalProperties", "items")  # keywords whose value is a schema,
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of schemas, or
_MAPPINGS = ("$defs", "definitions", "properties", "patternProperties")  # schemas by name
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
_ANNOTATIONS = ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "x-guidance")
_UNKNOWN_TO_COMPILER = ("disallow", "divisibleBy", "extends")  # of drafts before the fourth

_DATE = (
    r"([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""The compiler's own would allow 29 February in any year, and leap seconds at any time."""

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\ud800-\udfff]")


class SchemaError(Exception):
    """The JSON is not a schema, or a keyword cannot be enforced. The message says where."""


def fit_schema(text: str) -> dict[str, Any]:
    """The schema that the compiler is given for the JSON text of a schema. Raises `SchemaError`."""
    try:
        schema = json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"is not JSON: {error}") from error
    fitter = _Fitter(schema)
    fitted = fitter.schema(schema, "#")
    fitter.check_references()
    if fitted is False:
        raise SchemaError("# is false: nothing satisfies it")
    return {} if fitted is True else fitted


class _Fitter:
    """One walk over all subschemas. `at` is the JSON pointer of a subschema, as a fragment."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._nesting = 0
        self._num_values = 0
        self._num_multiples = 0
        self._multiple, self._unit = 1, 0  # of all values of `multipleOf`: the least common one, in units of 10^unit
        self._seen: set[str] = set()
        self._references: list[tuple[str, str]] = []  # pointer of the schema, what it refers to

    def schema(self, schema: object, at: str) -> Any:
        self._seen.add(at)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(f"{at} is {_name(schema)}, not a schema")
        if len(self._seen) > MAX_SUBSCHEMAS:
            raise SchemaError(f"it has more than {MAX_SUBSCHEMAS} schemas within schemas")
        if self._nesting == MAX_NESTING:
            raise SchemaError(f"is nested deeper than {MAX_NESTING} schemas")
        self._nesting += 1
        fitted = {keyword: value for keyword, value in schema.items() if keyword not in _ANNOTATIONS}
        for keyword in _UNKNOWN_TO_COMPILER:
            if keyword in fitted:
                raise SchemaError(f"{at}: {keyword!r} cannot be enforced")
        self._rewrite(fitted, at)
        self._descend(fitted, at)
        self._nesting -= 1
        return fitted

    def check_references(self) -> None:
        for at, target in self._references:
            if target not in self._seen:
                raise SchemaError(f"{at}: {target!r} is not a schema in here")

    def _rewrite(self, fitted: dict[str, Any], at: str) -> None:
        """Replaces keywords that the compiler would not enforce as the standard says by equal ones that it does, or refuses them."""
        if "$ref" in fitted:
            self._references.append((at, _reference(fitted["$ref"], at)))
        for keyword in ("enum", "const"):
            if keyword in fitted:
                self._check_values(fitted[keyword], keyword, at)
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if keyword in fitted:
                _check_number(fitted[keyword], keyword, at)
        if "multipleOf" in fitted:
            self._check_multiple(fitted["multipleOf"], at)
        if not any(keyword in fitted for keyword in _APPLICATORS):  # else these count as evaluated what the applicators evaluate
            for keyword, equal in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
                if keyword in fitted:
                    value = fitted.pop(keyword)
                    fitted.setdefault(equal, value)
        if fitted.get("uniqueItems"):
            self._list_arrays(fitted, at)
        if isinstance(branches := fitted.get("oneOf"), list):  # the compiler itself finds fewer of them disjoint
            if len(branches) > MAX_BRANCHES or not self._disjoint(branches):
                raise SchemaError(f"{at}: 'oneOf' whose schemas may overlap, or more than {MAX_BRANCHES}, cannot be enforced; 'anyOf' can")
            del fitted["oneOf"]
            fitted["allOf"] = [*fitted.get("allOf", []), {"anyOf": branches}]
        for name in [*_keys(fitted.get("properties")), *_keys(fitted.get("required"))]:
            _check_text(name, "properties", at)
        _name_properties(fitted)
        patterns = fitted.get("patternProperties")
        if isinstance(patterns, dict):
            if len(patterns) > MAX_PATTERNS:
                raise SchemaError(f"{at}: {len(patterns)} patterns in 'patternProperties' are more than {MAX_PATTERNS}")
            fitted["patternProperties"] = {_pattern(pattern, at): schema for pattern, schema in patterns.items()}
        _limit_properties(fitted, at)
        if "pattern" in fitted:
            fitted["pattern"] = _pattern(fitted["pattern"], at)
        pattern = _FORMATS.get(fitted["format"]) if isinstance(fitted.get("format"), str) else None
        if pattern is not None:
            del fitted["format"]
            both = fitted.get("allOf", [])
            fitted["allOf"] = [*both, {"pattern": pattern}] if isinstance(both, list) else both

    def _descend(self, fitted: dict[str, Any], at: str) -> None:
        for keyword in {**dict.fromkeys(_SCHEMA), **dict.fromkeys(_LISTS), **dict.fromkeys(_MAPPINGS)}:
            if keyword not in fitted:
                continue
            value, here = fitted[keyword], f"{at}/{keyword}"
            if keyword in _MAPPINGS:
                if not isinstance(value, dict):
                    raise SchemaError(f"{here} is {_name(value)}, not an object of schemas")
                steps = {name: name.replace("~", "~0").replace("/", "~1") for name in value}  # of the JSON pointer
                fitted[keyword] = {name: self.schema(one, f"{here}/{steps[name]}") for name, one in value.items()}
            elif keyword in _SCHEMA and not (keyword in _LISTS and isinstance(value, list)):
                fitted[keyword] = self.schema(value, here)
            else:
                if not isinstance(value, list):
                    raise SchemaError(f"{here} is {_name(value)}, not a list of schemas")
                fitted[keyword] = [self.schema(one, f"{here}/{index}") for index, one in enumerate(value)]

    def _check_values(self, value: object, keyword: str, at: str) -> None:
        values = value if keyword == "enum" else [value]
        if not isinstance(values, list):
            raise SchemaError(f"{at}: 'enum' is {_name(values)}, not a list")
        self._num_values += len(values)
        if self._num_values > MAX_VALUES:
            raise SchemaError(f"{at}: more than {MAX_VALUES} values in 'enum'")
        level: list[object] = values
        while level:
            for one in level:
                if isinstance(one, int | float):
                    _check_number(one, keyword, at)
                for text in [one] if isinstance(one, str) else one if isinstance(one, dict) else ():
                    _check_text(text, keyword, at)
            level = [child for one in level if isinstance(one, dict | list) for child in (one.values() if isinstance(one, dict) else one)]

    def _check_multiple(self, value: object, at: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise SchemaError(f"{at}: 'multipleOf' is {value!r:.40}, not a number > 0")
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        assert isinstance(exponent, int), "it is finite"
        units = int("".join(map(str, digits)))
        self._num_multiples += units * 10 ** max(0, exponent)
        if exponent < self._unit:
            self._multiple *= 10 ** (self._unit - exponent)
            self._unit = exponent
        self._multiple = math.lcm(self._multiple, units * 10 ** (exponent - self._unit))
        if max(self._num_multiples, self._multiple) > MAX_MULTIPLES:
            raise SchemaError(f"{at}: 'multipleOf' {value!r}, with those before it, comes to more than {MAX_MULTIPLES} units")

    def _list_arrays(self, fitted: dict[str, Any], at: str) -> None:
        """Replaces `uniqueItems` by an enum of all arrays of different items, where these are few."""
        del fitted["uniqueItems"]
        low, high = fitted.get("minItems", 0), fitted.get("maxItems", math.inf)
        if not isinstance(low, int) or not isinstance(high, int | float):
            return  # which the compiler refuses
        if high <= 1:
            return
        values = self._values(fitted.get("items"))
        if values is None or "prefixItems" in fitted:
            raise SchemaError(
                f"{at}: 'uniqueItems' can be enforced only where 'maxItems' is at most 1, or all items are of at most {MAX_UNIQUE} values"
            )
        arrays = [
            list(chosen) for length in range(low, int(min(high, len(values))) + 1) for chosen in itertools.permutations(values, length)
        ]
        if not arrays:
            raise SchemaError(f"{at}: there are not {low} different items")
        for keyword in ("items", "minItems", "maxItems"):
            fitted.pop(keyword, None)
        others = [kind for kind in _ALL_TYPES if kind != "array" and kind in _types(fitted)]
        fitted["allOf"] = [*fitted.get("allOf", []), {"anyOf": [{"enum": arrays}, *([{"type": others}] if others else [])]}]

    def _disjoint(self, branches: Sequence[object]) -> bool:
        resolved = [self._referred(branch) for branch in branches]
        return all(_apart(one, other) for index, one in enumerate(resolved) for other in resolved[:index])

    def _referred(self, schema: object) -> object:
        """Follows references: the schema that `schema` stands for if it is nothing but a reference."""
        for _ in range(MAX_NESTING):
            if not isinstance(schema, dict) or {keyword for keyword in schema if keyword not in _ANNOTATIONS} != {"$ref"}:
                return schema
            target: Any = self._root
            for step in str(schema["$ref"]).split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                target = target.get(step) if isinstance(target, dict) else None
            schema = target
        return None

    def _values(self, schema: object) -> list[object] | None:
        """All values that satisfy a schema, where they are listed and few."""
        schema = self._referred(schema)
        if not isinstance(schema, dict):
            return None
        constraints = {keyword for keyword in schema if keyword not in _ANNOTATIONS}
        values = _listed(schema) if constraints <= {"enum", "type"} or constraints <= {"const", "type"} else None
        return None if values is None or len(values) > MAX_UNIQUE else list(values.values())


def _apart(one: object, other: object) -> bool:
    """Whether no value can be of both schemas, as far as their types, their listed values, and those of common properties tell."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    ours, theirs = _listed(one), _listed(other)
    if ours is not None and theirs is not None:
        return not ours.keys() & theirs.keys()
    kinds, other_kinds = (["number" if kind == "integer" else kind for kind in _types(schema)] for schema in (one, other))
    if not set(kinds) & set(other_kinds):
        return True
    if kinds != ["object"] or other_kinds != ["object"]:
        return False
    if not all(isinstance(schema.get("required"), list) and isinstance(schema.get("properties"), dict) for schema in (one, other)):
        return False
    both = [name for name in one["required"] if isinstance(name, str) and name in other["required"]]
    return any(_apart(one["properties"].get(name), other["properties"].get(name)) for name in both)


def _listed(schema: Mapping[str, Any]) -> dict[str, object] | None:
    """The values of `const`, `enum` or the type boolean by their JSON text, so each once; None where values are not listed."""
    values = [schema["const"]] if "const" in schema else schema.get("enum", [True, False] if schema.get("type") == "boolean" else None)
    if not isinstance(values, list):
        return None
    return {json.dumps(value, sort_keys=True): value for value in values if _is_of(value, _types(schema))}


def _name_properties(fitted: dict[str, Any]) -> None:
    """Replaces `propertyNames` by a pattern of the only properties, where that is equal."""
    names = fitted.get("propertyNames")
    if names is True:
        del fitted["propertyNames"]
    if not isinstance(names, dict) or "properties" in fitted or "patternProperties" in fitted:
        return
    constraints = {keyword for keyword in names if keyword not in (*_ANNOTATIONS, "type")}
    if names.get("type", "string") != "string":
        return
    pattern: object = None
    if constraints == {"pattern"}:
        pattern = names["pattern"]
    elif constraints == {"enum"} and isinstance(names["enum"], list) and all(isinstance(one, str) for one in names["enum"]):
        pattern = f"^({'|'.join(map(re.escape, names['enum']))})$"
    elif constraints == {"const"} and isinstance(names["const"], str):
        pattern = f"^{re.escape(names['const'])}$"
    elif constraints and constraints <= {"minLength", "maxLength"} and all(isinstance(names[one], int) for one in constraints):
        pattern = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    elif not constraints:
        pattern = ""
    if isinstance(pattern, str):
        del fitted["propertyNames"]
        fitted["patternProperties"] = {pattern: fitted.get("additionalProperties", True)}
        fitted["additionalProperties"] = False


def _limit_properties(fitted: dict[str, Any], at: str) -> None:
    """Replaces `minProperties` and `maxProperties` by required named properties: others may be written twice, and count once."""
    least, most = fitted.get("minProperties", 0), fitted.get("maxProperties", math.inf)
    names, required = fitted.get("properties", {}), fitted.get("required", [])
    if not all(isinstance(one, int | float) for one in (least, most)) or not isinstance(names, dict) or not isinstance(required, list):
        return  # which the compiler refuses
    if most >= len(names) and fitted.get("additionalProperties") is False and not fitted.get("patternProperties"):
        fitted.pop("maxProperties", None)
    if least <= 1 and not names:
        return
    fitted.pop("minProperties", None)
    optional = [name for name in names if name not in required]
    missing = least - len(set(map(str, required)))
    if missing <= 0:
        return
    if missing > len(optional) or math.comb(len(optional), missing) > MAX_BRANCHES:
        raise SchemaError(
            f"{at}: 'minProperties' {least} can be enforced only among few listed 'properties', or where as many are required"
        )
    choices = [{"required": list(chosen)} for chosen in itertools.combinations(optional, missing)]
    fitted["allOf"] = [*fitted.get("allOf", []), {"anyOf": choices}]


def _reference(value: object, at: str) -> str:
    if not isinstance(value, str) or not (value == "#" or value.startswith("#/")) or "%" in value:
        raise SchemaError(f"{at}: {value!r:.100} is not a reference into this schema, like '#/$defs/name'")
    return value


def _pattern(pattern: object, at: str) -> str:
    if not isinstance(pattern, str):
        raise SchemaError(f"{at}: a pattern is {_name(pattern)}, not a string")
    try:
        return anywhere(pattern)
    except RegexError as error:
        raise SchemaError(f"{at}: pattern {pattern!r:.100}: {error}") from error


def _check_number(value: object, keyword: str, at: str) -> None:
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
        raise SchemaError(f"{at}: {keyword!r} has an integer of more than {MAX_DIGITS} digits")


def _check_text(text: object, keyword: str, at: str) -> None:
    if isinstance(text, str) and _UNWRITABLE.search(text):
        raise SchemaError(f"{at}: {keyword!r} has {text!r:.60}, of which a character can be written as \\uXXXX only, which is left out")


def _keys(value: object) -> list[object]:
    return list(value) if isinstance(value, list | dict) else []


def _integer(digits: str) -> int:
    if len(digits) > 400:  # more than any float has
        _no_number(digits)
    return int(digits)


def _float(digits: str) -> float | int:
    value = float(digits)
    if not math.isfinite(value):
        _no_number(digits)
    return int(value) if value.is_integer() and abs(value) < 10**MAX_DIGITS else value


def _no_number(digits: str) -> NoReturn:
    raise SchemaError(f"{digits:.20}{'...' * (len(digits) > 20)} is not a number that can be enforced")


_ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    given = schema.get("type", list(_ALL_TYPES))
    return (given,) if isinstance(given, str) else tuple(one for one in given if isinstance(one, str)) if isinstance(given, list) else ()


def _is_of(value: object, types: Sequence[str]) -> bool:
    kind = _name(value)
    return kind in types or (kind == "number" and "integer" in types and float(value).is_integer())  # type: ignore[arg-type]


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
