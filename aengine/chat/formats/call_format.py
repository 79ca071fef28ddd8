"""What a format of calls is, and of reasoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aengine.chat.text_source import Reading, Source

Tools = Mapping[str, Mapping[str, Any]]
"""Names of the tools that may be called, with the JSON schemas of their parameters."""
CallReader = Callable[[Source, Tools], Reading[bool]]
"""Reads what follows a marker and makes events of it. Whether it was what the marker announces; if not, what is held is content."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls of tools."""

    markers: Mapping[str, CallReader] = field(default_factory=dict)
    """What announces a call, wherever it stands. None is a part of another one."""
    start: CallReader | None = None
    """Reads the output from its start, where no marker announces a call."""
    whole: Callable[[Source, Tools], Reading[None]] | None = None
    """Reads the whole output, reasoning included, in place of all of these."""
    answer: str = ""
    """What a prompt goes on with, where the output is an answer alone."""
    special_tokens: bool = False
    """Whether markers are special tokens of the model, which are not to be left out of the text."""


class ReasoningFormat(NamedTuple):
    """The markers that a model writes around its reasoning."""

    opening: str
    closing: str
    special_tokens: bool = False  # as in `CallFormat`
    space: tuple[str, str] = ("", "")  # what models write before the closing, and behind it
    answer: str = ""
    """What comes between the closing and an answer. If there is something, a model begins every output with reasoning."""


def read_nothing(source: Source, tools: Tools) -> Reading[bool]:
    """A marker without meaning of its own."""
    return True
    yield


def tools_of(tools: object) -> dict[str, Mapping[str, Any]]:
    """The tools of a request, as chat templates take them: `{"function": {"name": ..., "parameters": ...}}`, or what is in it."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools if isinstance(tools, list | tuple) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            found[name] = parameters if isinstance(parameters, Mapping) else {}
    return found
