"""Writes the tables of fields in docs/ from the code; with --check only compares and fails on a difference.

A table stands between `<!-- fields of NAME -->` and `<!-- end of fields -->`. Of a dataclass, what a field accepts is read from its
declared rule; the meaning, and a default that is more than a value, from the docstring below the field. Of a body that is sent over HTTP,
the fields are those of the tables by which it is read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from types import ModuleType

from aengine.api.config import EngineConfig
from aengine.api.fields import DeclaredField, Refusal, declared_fields
from aengine.api.params import Reasoning, SamplingParams, StructuredOutput
from aengine.api.request import RequestOptions
from aengine.client.client_config import ClientConfig
from aengine.router.router_config import RayConfig, RouterConfig
from aengine.server.config.options import GROUPS, ServerConfig
from aengine.server.config.settings import field_docs, options
from aengine.server.http import anthropic, chat_completions, completions, models, responses_input
from aengine.server.http.body_parameters import IGNORED, IGNORED_OF_OTHERS, OF_OTHERS

DOCS = Path(__file__).resolve().parent.parent / "docs"
FILES = ("chat.md", "configuration.md", "engine.md", "http.md", "sampling.md")
MARKERS = re.compile(r"(?<=<!-- fields of )(\w+)( -->\n\n)(.*?)(?=<!-- end of fields -->)", re.DOTALL)


class Other:
    """A value that no field accepts."""

    def __repr__(self) -> str:
        return "OTHER"


def accepted(cls: type, name: str) -> str:
    """What the field accepts, in the words of its rule, for example "integer in [1, 128]"."""
    try:
        next(field for field in declared_fields(cls) if field.name == name).rule(Other())
    except Refusal as refusal:
        return re.sub(r"^(OTHER is not |must consist of )(an? )?", "", str(refusal)).replace(str(2**64 - 1), "2^64-1")
    raise AssertionError(f"{cls.__name__}.{name} accepts anything")


def split_default(doc: str) -> tuple[str, str | None]:
    """The docstring of a field without its last sentences from "Default: " on, and these."""
    meaning, found, words = doc.partition("Default: ")
    return meaning.strip(), words.strip().removesuffix(".") if found else None


def cells(cls: type, field: DeclaredField, doc: str, ranges: bool) -> list[str]:
    meaning, words = split_default(doc)
    if words is None:
        words = "needed" if field.default is MISSING else f"`{field.default}`" if field.default != "" else "empty"
    accept = [accepted(cls, field.name) + (" or None" if field.optional else "")] if ranges else []
    return [f"`{field.name}`", words, *accept, meaning]


def table(cls: type, names: Iterable[str] = (), ranges: bool = True) -> str:
    """The table of a dataclass, or of its fields `names`."""
    docs = field_docs(cls)
    chosen = [field for field in declared_fields(cls) if not names or field.name in names]
    heads = ["field", "default", *(["accepted"] if ranges else []), "meaning"]
    return in_markdown(heads, (cells(cls, field, docs[field.name], ranges) for field in chosen))


def in_markdown(heads: list[str], rows: Iterable[list[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows) + "\n"


def server_tables() -> str:
    names = {title: [option.name for option in options() if option.group == title] for title in GROUPS.values()}
    return "".join(f"### {title.capitalize()}\n\n{table(ServerConfig, names[title])}" for title in names)


def body_table(module: ModuleType) -> str:
    """What becomes of the fields of a body that `module` reads."""
    return fates(module.TAKEN, getattr(module, "IGNORED", IGNORED), getattr(module, "REFUSED", {}))


def fates(taken: Mapping[str, str], ignored: Mapping[str, str], refused: Mapping[str, str] = {}) -> str:
    """What becomes of fields."""
    rows = [[f"`{name}`", words] for name, words in taken.items()]
    for words, names in (("ignored", ignored), ("refused", refused)):
        rows += [[f"`{name}`", f"{words}: {why}"] for name, why in names.items()]
    return in_markdown(["field", "what becomes of it"], rows)


BODIES = (chat_completions, completions, responses_input, anthropic)

TABLES: dict[str, Callable[[], str]] = {
    "EngineConfig": partial(table, EngineConfig),
    "ServerConfig": server_tables,
    "ClientConfig": partial(table, ClientConfig),
    "RouterConfig": partial(table, RouterConfig),
    "RayConfig": partial(table, RayConfig),
    "RequestOptions": partial(table, RequestOptions, ranges=False),
    "SamplingParams": partial(table, SamplingParams, ranges=False),
    "Reasoning": partial(table, Reasoning, ranges=False),
    "StructuredOutput": partial(table, StructuredOutput, ranges=False),
    "embeddings": partial(fates, models.EMBEDDINGS_TAKEN, IGNORED, {}),
    "others": partial(fates, OF_OTHERS, IGNORED_OF_OTHERS),
    **{module.__name__.rpartition(".")[2]: partial(body_table, module) for module in BODIES},
}


def filled(text: str) -> str:
    """`text` with its tables as they are in the code."""
    return MARKERS.sub(lambda match: match[1] + match[2] + TABLES[match[1]](), text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is not that of the code")
    check = parser.parse_args().check
    stale = 0
    for name in FILES:
        text = (DOCS / name).read_text(encoding="utf-8")
        if filled(text) != text:
            stale += 1
            if check:
                print(f"docs/{name} is out of date: run tools/field_tables.py", file=sys.stderr)
            else:
                (DOCS / name).write_text(filled(text), encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
