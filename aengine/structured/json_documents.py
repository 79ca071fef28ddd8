"""A JSON Schema as text, and what its references refer to: by JSON pointer, `$id` and `$anchor`, within the text alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

MAX_DIGITS = 1000
"""Most digits of a number."""
MAX_EXPONENT = 1000
"""Greatest power of ten of a number, up or down."""

_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")  # keywords that name schemas,
_SCHEMAS = (  # and that have schemas
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "contentSchema"),
)


class SchemaError(Exception):
    """The JSON is not a schema, or a keyword cannot be enforced. The message says where."""


def parse(text: str) -> Any:
    """The value of a JSON text; numbers are exact: int where they have no fraction, else Decimal. Raises `SchemaError`."""
    try:
        return json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_refuse_number)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"is not JSON: {error}") from error


class Document:
    """The schemas of one text. Resolves references to the schema itself, with the JSON pointer of where it is."""

    def __init__(self, root: object) -> None:
        self.root = root
        self._base: dict[int, str] = {}  # the URI that references in a schema are relative to, by the id of the object
        self._named: dict[str, tuple[object, str]] = {"": (root, "#")}  # schemas with `$id` or `$anchor` by URI, and where they are
        self._dynamic: dict[str, int] = {}  # how many schemas have this `$dynamicAnchor`
        uri = _text(root, "$schema")
        self.references_stand_alone = re.search(r"draft-0[3-7]", uri) is not None
        """Whether the keywords beside a `$ref` mean nothing, as they did before draft 2019-09."""
        for schema, at, base, is_schema in self._walk(root):
            self._base[id(schema)] = base
            if is_schema:
                self._index(schema, at, base)

    def resolve(self, schema: dict[str, Any], keyword: str, at: str) -> tuple[object, str]:
        reference = schema[keyword]
        if not isinstance(reference, str):
            raise SchemaError(f"{at}: {keyword!r} is {name_of(reference)}, not a string")
        base = self._base.get(id(schema), "")
        uri, fragment = (base, reference[1:]) if reference.startswith("#") else urldefrag(urljoin(base, reference))
        if keyword == "$dynamicRef" and fragment and not fragment.startswith("/") and self._dynamic.get(fragment, 0) > 1:
            raise SchemaError(f"{at}: {keyword!r} {reference!r:.100}, of which the target depends on the way to it, cannot be enforced")
        found = self._named.get(uri)
        if found is not None and fragment.startswith("/"):
            found = self._point(*found, fragment)
        elif found is not None and fragment:
            found = self._named.get(f"{uri}#{fragment}")
        if found is None:
            raise SchemaError(f"{at}: {keyword!r} {reference!r:.100} is not a schema in here; nothing is fetched")
        return found

    def _point(self, value: Any, at: str, pointer: str) -> tuple[object, str] | None:
        for step in pointer.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                return None
            at += f"/{step}"
        return value, at

    def _walk(self, root: object) -> Iterator[tuple[dict[str, Any], str, str, bool]]:
        """All objects that may be schemas, and whether they are, or lie in a keyword that is not known."""
        todo: list[tuple[object, str, str, bool]] = [(root, "#", "", True)]
        while todo:
            value, at, base, known = todo.pop()
            if isinstance(value, list):
                todo += [(one, f"{at}/{index}", base, known) for index, one in enumerate(value)]
            elif isinstance(value, dict):
                own = _text(value, "$id") or _text(value, "id")
                if own and not own.startswith("#"):
                    base = urljoin(base, urldefrag(own).url)
                yield value, at, base, known
                for key, one in value.items():
                    if key in _NAMED and isinstance(one, dict):
                        todo += [(inner, f"{at}/{key}/{step_of(name)}", base, known) for name, inner in one.items()]
                    elif key not in ("enum", "const", "default", "examples"):
                        todo.append((one, f"{at}/{step_of(key)}", base, known and key in _SCHEMAS))

    def _index(self, schema: dict[str, Any], at: str, base: str) -> None:
        own = _text(schema, "$id") or _text(schema, "id")
        if own and not own.startswith("#"):
            self._named.setdefault(base, (schema, at))
        for anchor in (_text(schema, "$anchor"), _text(schema, "$dynamicAnchor"), own[1:] if own.startswith("#") else ""):
            if anchor:
                self._named.setdefault(f"{base}#{anchor}", (schema, at))
        if dynamic := _text(schema, "$dynamicAnchor"):
            self._dynamic[dynamic] = self._dynamic.get(dynamic, 0) + 1


def step_of(name: str) -> str:
    """Escape a name as one step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def name_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float() | Decimal():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
    return "object"


def _text(schema: object, keyword: str) -> str:
    value = schema.get(keyword) if isinstance(schema, dict) else None
    return value if isinstance(value, str) else ""


def _number(digits: str) -> int | Decimal:
    value = Decimal(digits) if len(digits) <= MAX_DIGITS else _refuse_number(digits)
    if value and abs(value.adjusted()) > MAX_EXPONENT:
        _refuse_number(digits)
    return int(value) if value == value.to_integral_value() else value


def _refuse_number(digits: str) -> NoReturn:
    raise SchemaError(f"{digits:.20}{'...' * (len(digits) > 20)} is not a number that can be enforced")
