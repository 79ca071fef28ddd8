"""Where the configuration of `aengine-grpc` comes from: flags, then the environment, then a TOML file, then the defaults.

Owns names, types and precedence; the ranges are those of `ServerConfig` and `EngineConfig`. Every error names the source of the value:
the flag, the variable, or the file and its key.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from aengine.config import EngineConfig
from aengine.errors import AEngineError, ConfigError
from aengine.server.config.options import GROUPS, ServerConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "AENGINE_"
CONFIG_VARIABLE = "AENGINE_CONFIG"
LIBRARY_VARIABLES = frozenset({"AENGINE_CPU_LEVEL"})
"""Variables with the same prefix that other parts of the package read."""
DEFAULT_MODEL = "demo"

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


class SettingsError(AEngineError):
    """A value, or the name of one, that cannot be used. The message is one line and names the source."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one of the configurations."""

    name: str
    table: str  # "server" or "engine"
    group: str  # what it is about
    hint: Any  # its type
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()


@dataclass(frozen=True, slots=True)
class Settings:
    """What is to be served, and how. `origins` tells where each value that is not a default came from, by field."""

    server: ServerConfig
    engine: EngineConfig
    origins: Mapping[str, str]


def options() -> list[Option]:
    """All there are, by group. Their names are those of the TOML keys; names are unique across the tables."""
    group_of = {name: title for title, names in GROUPS for name in names}
    found: list[Option] = []
    for table, cls in (("server", ServerConfig), ("engine", EngineConfig)):
        hints, docs = typing.get_type_hints(cls), _field_docs(cls)
        for field in fields(cls):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if field.name == "model":
                default = DEFAULT_MODEL
            found.append(Option(field.name, table, group_of.get(field.name, table), hints[field.name], default, docs[field.name]))
    titles = [title for title, _ in GROUPS]
    return sorted(found, key=lambda option: titles.index(option.group) if option.group in titles else len(titles))


def read_settings(flags: Mapping[str, object], environ: Mapping[str, str], file: str | None = None) -> Settings:
    """The configurations. `flags`: those that were given, by field, as text or as bool. `file`: of `--config`; without it that of
    AENGINE_CONFIG, if any. Raises `SettingsError`. Blocks."""
    by_name = {option.name: option for option in options()}
    values: dict[str, Any] = {"model": DEFAULT_MODEL}
    origins: dict[str, str] = {}

    def take(option: Option, value: Any, origin: str) -> None:
        values[option.name], origins[option.name] = value, origin

    path = file or environ.get(CONFIG_VARIABLE)
    if path:
        _read_file(path, by_name, take)
    variables = {option.variable: option for option in by_name.values()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or variable in LIBRARY_VARIABLES:
            continue
        if variable not in variables:
            raise SettingsError(f"{variable}: there is no such variable{nearest(variable, variables)}")
        option = variables[variable]
        take(option, _from_text(option, environ[variable], variable), variable)
    for name, given in flags.items():
        option = by_name[name]
        take(option, _from_text(option, given, option.flag) if isinstance(given, str) else given, option.flag)

    def given_to(table: str) -> dict[str, Any]:
        return {name: value for name, value in values.items() if by_name[name].table == table}

    try:
        return Settings(ServerConfig(**given_to("server")), EngineConfig(**given_to("engine")), origins)
    except ConfigError as error:
        raise SettingsError(explain(error, origins)) from error


def explain(error: ConfigError, origins: Mapping[str, str]) -> str:
    """The error in the words of whoever gave the values, in one line."""
    parts = []
    for violation in error.violations:
        origin = origins.get(violation.field, "--" + violation.field.replace("_", "-"))
        parts.append(f"{origin}: {violation.description}")
    return "; ".join(parts).replace("\n", " ")


def _read_file(path: str, by_name: Mapping[str, Option], take: typing.Callable[[Option, Any, str], None]) -> None:
    try:
        with Path(path).open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}".replace("\n", " ")) from error
    for table, entries in tables.items():
        if table not in ("server", "engine") or not isinstance(entries, dict):
            raise SettingsError(f"{path}: {table}: there are only the tables [server] and [engine]")
        names = [name for name, option in by_name.items() if option.table == table]
        for key, value in entries.items():
            origin = f"{path}: {table}.{key}"
            if key not in names:
                raise SettingsError(f"{origin}: there is no such key{nearest(key, names)}")
            take(by_name[key], _from_toml(by_name[key], value, origin), origin)


def _from_text(option: Option, text: str, origin: str) -> Any:
    kind, optional = _kind(option.hint)
    if optional and text.lower() == "none":
        return None
    try:
        if kind is bool:
            return _flag(text)
        if kind is tuple:
            element = _element(option.hint)
            return tuple(element(part.strip()) for part in text.split(",") if part.strip())
        if kind is dict:
            pairs = (pair.rpartition("=") for pair in text.split(",") if pair.strip())
            return {name.strip(): float(number) for name, _, number in pairs}
        return kind(text)
    except ValueError:
        raise SettingsError(f"{origin}: {text!r} is not {_words(option)}") from None


def _from_toml(option: Option, value: Any, origin: str) -> Any:
    """TOML has types; there is no null in it, so the string "none" stands for None."""
    kind, optional = _kind(option.hint)
    if optional and isinstance(value, str) and value.lower() == "none":
        return None
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise SettingsError(f"{origin}: {value!r} is not {_words(option)}")
    return value


def _kind(hint: Any) -> tuple[type, bool]:
    """The type of a field, and whether it can be None."""
    inner = _without_none(hint)
    origin = typing.get_origin(inner)
    if origin is not None and issubclass(origin, Mapping):
        return dict, inner is not hint
    return origin or inner, inner is not hint


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    (inner,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return inner


def _element(hint: Any) -> Callable[[str], Any]:
    """The type of a tuple's elements."""
    element: Callable[[str], Any] = typing.get_args(_without_none(hint))[0]
    return element


_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a list of NAME=NUMBER",
}


def _words(option: Option) -> str:
    kind = _kind(option.hint)[0]
    if kind is tuple:
        return "a list of integers" if _element(option.hint) is int else "a list of names"
    return _WORDS[kind]


def metavar(option: Option) -> str:
    """How the help shows the value."""
    kind = _kind(option.hint)[0]
    if kind is tuple:
        return "INTEGER,..." if _element(option.hint) is int else "NAME,..."
    return {int: "INTEGER", float: "NUMBER", str: "TEXT", dict: "NAME=NUMBER,..."}[kind]


def is_flag(option: Option) -> bool:
    return _kind(option.hint)[0] is bool


def _flag(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about a name that does not exist."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0)
    return f"; the nearest is {close[0]}" if close else ""


def _field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a class, which Python itself does not keep."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and isinstance(following, ast.Expr):
            docs[statement.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return docs
