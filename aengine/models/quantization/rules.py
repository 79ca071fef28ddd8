"""`Rule`: which modules a scheme is for, and helpers to read the values that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aengine.api.errors import ModelLoadError
from aengine.models.config.reader import ConfigReader
from aengine.models.quantization.expressions import Expression
from aengine.models.quantization.scheme import Scheme

LINEAR, EMBEDDING = "Linear", "Embedding"
"""Kinds of modules, by the names of torch's classes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The first rule that applies to a module decides."""

    target: str | Expression  # the module's name, its kind, or a regular expression of its whole name
    scheme: Scheme | None  # None: it is not quantised

    def applies(self, module: str, kind: str) -> bool:
        if isinstance(self.target, str):
            return self.target in (module, kind)
        return self.target.matches(module)


def one_of(reader: ConfigReader, key: str, *supported: Any, fallback: Any = None) -> Any:
    """The value of a key, `fallback` if it is absent. Raises ModelLoadError for one that is not supported."""
    value = reader.get(key, fallback)
    if value not in supported:
        names = ", ".join(map(str, supported))
        raise ModelLoadError(f"{key} {value!r} in quantization_config is not supported; supported are {names}")
    return value


def names_of(reader: ConfigReader, key: str) -> list[str]:
    """Return the list of names under a key; empty if it is absent. Raises ModelLoadError."""
    names = reader.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"{key} {names!r} in quantization_config is not a list of names")
    return names


def block_sizes(reader: ConfigReader, key: str) -> tuple[int | None, int | None]:
    """Rows and columns that share a scale; None, None if the key is absent: all of them do."""
    block = reader.get(key)
    if block is None:
        return None, None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ModelLoadError(f"{key} {block!r} in quantization_config is not a list of two positive integers")
    return block[0], block[1]
