"""Which tools an output calls, as a grammar: JSON that every model can write, whatever its own format is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aengine.chat.formats.base import tools_of
from aengine.errors import InvalidRequestError
from aengine.params import StructuredOutput

CHOICES = ("auto", "none", "required")


def check_choice(choice: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises `InvalidRequestError` (tool_choice)."""
    names = tools_of(tools)
    if choice not in CHOICES and choice not in names:
        raise InvalidRequestError.of("tool_choice", f"{choice!r} is not one of {', '.join([*CHOICES, *names])}")
    if choice == "required" and not names:
        raise InvalidRequestError.of("tool_choice", "'required' needs tools")


def grammar_of(choice: str, tools: Sequence[Mapping[str, Any]] | None, *, parallel: bool) -> StructuredOutput | None:
    """For "required" a list of calls, `{"name": ..., "arguments": {...}}`, of one where not `parallel`; for the name of a tool
    its arguments alone; else None."""
    known = tools_of(tools)
    if choice in ("auto", "none"):
        return None
    if choice != "required":
        return StructuredOutput(json_schema={**known[choice], "type": "object"})
    places = {name: f"tool{index}" for index, name in enumerate(known)}
    definitions = {place: _moved({**known[name], "type": "object"}, f"#/$defs/{place}") for name, place in places.items()}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, place in places.items()
    ]
    most = {} if parallel else {"maxItems": 1}
    return StructuredOutput(json_schema={"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions})


def _moved(schema: Any, place: str) -> Any:
    """A schema in which references to places in itself are to those at `place` of another schema."""
    if isinstance(schema, Mapping):
        return {
            key: f"{place}{value[1:]}" if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(item, place) for item in schema] if isinstance(schema, list | tuple) else schema
