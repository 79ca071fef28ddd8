"""Where the arrays of a written schema are whose items differ, for `sampling/unique_items.py`: the compiler has no words for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from aengine.sampling.unique_items import Place
from aengine.structured.json_documents import SchemaError
from aengine.structured.json_lark import BY_NAME, REFERENCE


def take_places(root: Any, definitions: Mapping[str, Any]) -> Place | None:
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
        self._places: dict[frozenset[int], Place] = {}

    def place(self, schemas: Iterable[Any]) -> Place:
        alternatives: dict[int, dict[str, Any]] = {}
        self._collect(schemas, alternatives, set())
        place = self._places.get(frozenset(alternatives))
        if place is None:
            place = self._places[frozenset(alternatives)] = Place()
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

    def _fill(self, place: Place, alternatives: list[dict[str, Any]]) -> None:
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

    def keep_what_matters(self, root: Place) -> bool:
        """Leaves out the places without such an array below; returns whether the root is one with."""
        above: dict[int, list[Place]] = {}
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

                def keep(one: Place | None) -> Place | None:
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
