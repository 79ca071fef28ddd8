"""Which tools an output calls, as a grammar: JSON that every model can write, whatever its own format is.

The grammar leaves a model no list without an end but those that a schema itself has: there are at most `MAX_CALLS` calls, and an object has
the properties that its schema lists, and no others, unless the schema says that it may. Numbers have an end, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aengine.api.errors import InvalidRequestError
from aengine.api.params import StructuredOutput
from aengine.chat.formats.base import tools_of

MAX_CALLS = 8
"""Most calls that are required together."""
MAX_NUMBER = 10**15 - 1
"""Largest of a number for which a schema has no limit of its own; a weak model would write digits for ever."""
MAX_DEPTH = 64
"""The most schemas within one another; what lies deeper is refused where the grammar is compiled."""
CHOICES = ("auto", "none", "required")


def check_choice(choice: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises `InvalidRequestError` (tool_choice) for what is neither a tool nor one of `CHOICES`, and for "required" without tools."""
    names = tools_of(tools)
    if choice not in CHOICES and choice not in names:
        raise InvalidRequestError.of("tool_choice", f"{choice!r} is not one of {', '.join([*CHOICES, *names])}")
    if choice == "required" and not names:
        raise InvalidRequestError.of("tool_choice", "'required' needs tools")


def grammar_of(choice: str, tools: Sequence[Mapping[str, Any]] | None, *, parallel: bool) -> StructuredOutput | None:
    """For "required" a list of up to `MAX_CALLS` calls, `{"name": ..., "arguments": {...}}`, of one where not `parallel`; for the name of a
    tool its arguments alone; else None."""
    known = tools_of(tools)
    if choice in ("auto", "none"):
        return None
    if choice != "required":
        return StructuredOutput(json_schema=_arguments(known[choice]))
    places = {name: f"tool{index}" for index, name in enumerate(known)}
    definitions = {place: _moved(_arguments(known[name]), f"#/$defs/{place}") for name, place in places.items()}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, place in places.items()
    ]
    most = MAX_CALLS if parallel else 1
    return StructuredOutput(json_schema={"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}, "$defs": definitions})


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, closed."""
    named = schema if any(keyword in schema for keyword in _TOGETHER) else {"properties": {}, **schema}
    whole = {**named, "type": "object"}
    joined: set[str] = set()
    _find_joined(whole, False, joined, 0)
    found: dict[str, Any] = _closed(whole, False, joined, 0)
    return found


_VALUES = ("enum", "const")  # which have properties of their own
_TOGETHER = (*_VALUES, "$ref", "allOf", "anyOf", "oneOf")  # what they say holds beside the other keywords
_BRANCHES = ("allOf", "anyOf", "oneOf")
_OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas of a schema that speak of values within its own, each with the keyword."""
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", *_DEFINITIONS) and isinstance(value, Mapping):
            yield from ((keyword, one) for one in value.values())
        elif keyword in ("items", "prefixItems", "additionalItems", "additionalProperties", *_BRANCHES):
            yield from ((keyword, one) for one in (value if isinstance(value, list | tuple) else (value,)))


def _joins(schema: Mapping[str, Any]) -> bool:
    """Whether several of the schemas that hold together here may list properties, so that none may be closed."""
    listing = [keyword for keyword in ("properties", *_VALUES, "$ref", "anyOf", "oneOf") if keyword in schema and _lists(schema, keyword)]
    every = schema.get("allOf")
    return len(listing) + (sum(_lists({"allOf": [one]}, "allOf") for one in every) if isinstance(every, list | tuple) else 0) > 1


def _lists(schema: Mapping[str, Any], keyword: str) -> bool:
    if keyword in ("properties", *_VALUES, "$ref"):
        return True
    branches = schema[keyword]
    return isinstance(branches, list | tuple) and any(
        isinstance(one, Mapping) and any(name in one and _lists(one, name) for name in ("properties", *_TOGETHER)) for one in branches
    )


def _find_joined(schema: Any, joined: bool, found: set[str], depth: int) -> None:
    """Adds to `found` what is referred to where it holds together with others."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    joins = joined or _joins(schema)
    if joins and isinstance(schema.get("$ref"), str):
        found.add(schema["$ref"])
    for keyword, part in _parts(schema):
        _find_joined(part, joins and keyword in _BRANCHES, found, depth + 1)


def _closed(schema: Any, joined: bool, open_ones: set[str], depth: int) -> Any:
    """A copy in which an object has no other properties than those that are listed, unless it says so. `joined`: it holds together with
    another one that may list some."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return schema
    joins = joined or _joins(schema)
    closed: dict[str, Any] = {}
    for keyword, value in schema.items():
        within = joins and keyword in _BRANCHES
        if keyword in ("properties", "patternProperties", *_DEFINITIONS) and isinstance(value, Mapping):
            closed[keyword] = {
                name: _closed(one, keyword in _DEFINITIONS and f"#/{keyword}/{name}" in open_ones, open_ones, depth + 1)
                for name, one in value.items()
            }
        elif keyword in ("items", "prefixItems", "additionalItems", "additionalProperties", *_BRANCHES):
            many = isinstance(value, list | tuple)
            closed[keyword] = (
                [_closed(one, within, open_ones, depth + 1) for one in value] if many else _closed(value, within, open_ones, depth + 1)
            )
        else:
            closed[keyword] = value
    if "properties" in schema and not joins and not _is_open(schema):
        closed["additionalProperties"] = False
    if schema.get("type") in ("integer", "number") and not any(keyword in schema for keyword in _VALUES):
        for limit, exclusive, most in (("minimum", "exclusiveMinimum", -MAX_NUMBER), ("maximum", "exclusiveMaximum", MAX_NUMBER)):
            if limit not in schema and exclusive not in schema:
                closed[limit] = most
    return closed


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether an object says that it has properties which it does not list."""
    listed, required = schema["properties"], schema.get("required")
    if any(keyword in schema for keyword in _OPENING):
        return True
    if not isinstance(listed, Mapping) or not isinstance(required, list | tuple):
        return False
    return any(isinstance(name, str) and name not in listed for name in required)


def _moved(schema: Any, place: str) -> Any:
    """A schema in which references to places in itself are to those at `place` of another schema."""
    if isinstance(schema, Mapping):
        return {
            key: f"{place}{value[1:]}" if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list | tuple) else schema
