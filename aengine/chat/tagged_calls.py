"""Arguments in tags: one parameter after the other, up to the end of the call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from aengine.chat.json_text import loads
from aengine.chat.source import Reading, Source

MAX_NAME = 256
MAX_VALUE = 1 << 20


class Tags(NamedTuple):
    """What stands around a name and a value, and behind the last parameter."""

    before_name: str
    behind_name: str
    behind_value: str
    end: str
    before_value: Mapping[str, str | None] = {}
    """What comes between white space behind a name and its value, with the type of the value if that says it. If it is empty, a value
    begins at once, and line breaks around it are none of it."""


def read_parameters(source: Source, tags: Tags, schema: object) -> Reading[bool]:
    """Each becomes a delta when it is whole. Whether that is all of the call. Values are text if the tags or the tool's `schema` say that
    they are strings, else JSON if they can be."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    names: set[str] = set()
    while (yield from source.accept(tags.before_name)):
        name = yield from source.until((tags.behind_name, "<", "\n"), MAX_NAME)
        if name is None or name in names or not (yield from source.accept(tags.behind_name)):
            break
        described = properties.get(name) if isinstance(properties, Mapping) else None
        kind = described.get("type") if isinstance(described, Mapping) else None
        if tags.before_value:
            yield from source.space()
            for text, said in tags.before_value.items():
                if (yield from source.accept(text)):
                    kind = said or kind
                    break
            else:
                break
        value = yield from source.until((tags.behind_value, tags.before_name, tags.end), MAX_VALUE)
        if value is None:
            break
        yield from source.accept(tags.behind_value)
        yield from source.space()
        if not tags.before_value:
            value = value.removeprefix("\n").removesuffix("\n")
        source.add_arguments(f"{', ' if names else '{'}{json.dumps(name)}: {_json_of(value, kind)}")
        names.add(name)
    else:
        if (yield from source.accept(tags.end)):
            source.add_arguments("}" if names else "{}")
            return True
    return False


def _json_of(value: str, kind: object) -> str:
    if kind != "string":
        try:
            loads(value)
        except ValueError:
            pass
        else:
            return value.strip()
    return json.dumps(value, ensure_ascii=False)
