"""Where the configuration of the programs comes from: flags, then the environment, then a TOML file, then the defaults.

Owns names, types and precedence; the ranges are those of the configurations. Every error names the source of the value: the flag, the
variable, or the file and its key.

What the command lines of servers and chats share: a help that shows what most people use, and with --help-all everything; the model as
an argument or a flag; and the nearest flag to one that does not exist."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from aengine.api import VERSION
from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import AEngineError, ConfigError
from aengine.api.fields import SIZE_WORDS, Size, declared_fields, read_size
from aengine.router.router_config import RayConfig, RouterConfig
from aengine.server.config.options import GROUPS, ModelChoice, ServerConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "AENGINE_"
CONFIG_VARIABLE = "AENGINE_CONFIG"
LIBRARY_VARIABLES = frozenset({"AENGINE_CPU_LEVEL", "AENGINE_PACKED_WEIGHTS", "AENGINE_TOKEN"})
"""Variables with the same prefix that other parts of the package read."""
DEFAULT_MODEL = "demo"
MODELS_TABLE = "models"
OWN_OPTIONS = ("model", "revision", "adapters", "speculative", "speculative_model")
"""Options of an engine that its model alone has."""
KV_SHARE = 8
"""The KV cache of a model takes this part of the memory of all models where nothing is said."""
TABLES: Mapping[str, type] = {"server": ServerConfig, "engine": EngineConfig, "router": RouterConfig, "ray": RayConfig}


class ServerProgram(NamedTuple):
    """A command that serves: how its flags and defaults differ from the names and defaults of fields. Variables and keys do not."""

    name: str
    description: str
    flags: Mapping[str, str] = {}  # by field
    defaults: Mapping[str, Any] = {}  # of `ServerConfig`


GRPC = ServerProgram("aengine-grpc", "Serve a model, or several, over gRPC.")
HTTP = ServerProgram(
    "aengine-serve",
    "Serve a model, or several, over HTTP, with the APIs of OpenAI and Anthropic, and a page to chat on.",
    {"http_port": "--port", "port": "--grpc-port"},
    {"http_port": 8000, "port": None},
)


class SettingsError(AEngineError):
    """A value, or the name of one, that cannot be used. The message is one line and names the source."""


class Kind(NamedTuple):
    """How the values of one type are written."""

    words: str  # what they are
    metavar: str  # how the help shows them
    parse: Callable[[str], Any]  # of a flag or a variable; raises ValueError
    toml: tuple[type, ...]  # what they are in TOML
    convert: Callable[[Any], Any]  # from TOML


def _flag(text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _weights(text: str) -> dict[str, float]:
    pairs = (pair.rpartition("=") for pair in _parts(text))
    return {name.strip(): float(number) for name, _, number in pairs}


def _paths(text: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in _parts(text))
    return {name.strip(): path.strip() for name, _, path in pairs}


KINDS: Mapping[Any, Kind] = {
    bool: Kind("true or false", "", _flag, (bool,), bool),
    int: Kind("an integer", "INTEGER", int, (int,), int),
    float: Kind("a number", "NUMBER", float, (int, float), float),
    str: Kind("a string", "TEXT", str, (str,), str),
    tuple[str, ...]: Kind("a list of names", "NAME,...", lambda text: tuple(_parts(text)), (list,), tuple),
    tuple[int, ...]: Kind("a list of integers", "INTEGER,...", lambda text: tuple(map(int, _parts(text))), (list,), tuple),
    Mapping[str, str]: Kind("a list of NAME=PATH", "NAME=PATH,...", _paths, (dict,), dict),
    Mapping[str, float]: Kind("a list of NAME=NUMBER", "NAME=NUMBER,...", _weights, (dict,), dict),
}
"""The kinds by the types of fields, without None."""
SIZES = Kind(SIZE_WORDS, "BYTES", read_size, (int, str), lambda value: read_size(value) if isinstance(value, str) else value)
"""That of integers which are numbers of bytes."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one of the configurations."""

    name: str
    table: str  # "server", "engine" or "router"
    group: str  # what it is about
    kind: Kind
    optional: bool  # whether it can be None
    default: Any
    help: str
    flag: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def add_to(self, parser: Any, text: str, *, several: bool = False) -> None:
        """Add the flag, with `text` as its help. Its value stays text, with `several` a list of those that were given; a flag that is not
        given is no attribute of the namespace."""
        if several:
            parser.add_argument(self.flag, dest=self.name, metavar=self.kind.metavar, action="append", default=argparse.SUPPRESS, help=text)
        elif self.kind.toml == (bool,):
            parser.add_argument(self.flag, dest=self.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(self.flag, dest=self.name, metavar=self.kind.metavar, default=argparse.SUPPRESS, help=text)

    def read(self, value: Any, origin: str, *, toml: bool = False) -> Any:
        """The value of the field, from a text, from TOML, which has no null ("none" stands for None), or from argparse, where a flag is
        a bool. Raises `SettingsError`."""
        if self.optional and isinstance(value, str) and value.lower() == "none":
            return None
        kind = self.kind
        try:
            if not toml:
                return value if isinstance(value, bool) else kind.parse(value)
            if isinstance(value, kind.toml) and (bool in kind.toml or not isinstance(value, bool)):
                return kind.convert(value)
        except ValueError:
            pass
        raise SettingsError(f"{origin}: {value!r} is not {kind.words}")


@dataclass(frozen=True, slots=True)
class Settings:
    """The configurations; `router` is None where none is asked for. `origins` says where each value that is not a
    default came from, by field."""

    server: ServerConfig
    engine: EngineConfig
    router: RouterConfig | None
    ray: RayConfig
    origins: Mapping[str, str]
    models: tuple[ModelChoice, ...] = ()


def options(program: ServerProgram = GRPC) -> list[Option]:
    """All options of a program, by group. Their names are those of the TOML keys; names are unique across the tables."""
    found: list[Option] = []
    for table, cls in TABLES.items():
        docs, group = field_docs(cls), table
        for name, type_, optional, rule, default, _ in declared_fields(cls):
            default = DEFAULT_MODEL if name == "model" else program.defaults.get(name, default)
            flag = program.flags.get(name, "--" + name.replace("_", "-"))
            group = GROUPS.get(name, group)
            kind = SIZES if isinstance(rule, Size) else KINDS[type_]
            found.append(Option(name, table, group, kind, optional, default, docs[name], flag))
    return found


def read_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], file: str | None = None, program: ServerProgram = GRPC
) -> Settings:
    """The configurations. `flags`: those that were given, by field, as text or as bool. `file`: of `--config`; without it that of
    AENGINE_CONFIG, if any. Raises `SettingsError`. Blocks."""
    by_name = {option.name: option for option in options(program)}
    values: dict[str, dict[str, Any]] = {"server": dict(program.defaults), "engine": {"model": DEFAULT_MODEL}, "router": {}, "ray": {}}
    origins: dict[str, str] = {}

    def take(option: Option, value: Any, origin: str, *, toml: bool = False) -> None:
        values[option.table][option.name] = option.read(value, origin, toml=toml)
        origins[option.name] = origin

    path, of_models = file or environ.get(CONFIG_VARIABLE), dict[str, Any]()
    if path:
        for table, entries in _tables(path).items():
            if table == MODELS_TABLE:
                of_models = entries
                continue
            names = [name for name, option in by_name.items() if option.table == table]
            for key, value in entries.items():
                origin = f"{path}: {table}.{key}"
                if key not in names:
                    raise SettingsError(f"{origin}: there is no such key{nearest(key, names)}")
                take(by_name[key], value, origin, toml=True)
    variables = {option.variable: option for option in by_name.values()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or variable in LIBRARY_VARIABLES:
            continue
        if variable not in variables:
            raise SettingsError(f"{variable}: there is no such variable{nearest(variable, variables)}")
        take(variables[variable], environ[variable], variable)
    for name, given in flags.items():
        take(by_name[name], given, by_name[name].flag)

    try:
        server = ServerConfig(**values["server"])
        if server.models_memory is not None and (server.models or of_models):
            values["engine"].setdefault("kv_cache_memory", max(server.models_memory // KV_SHARE, 1))
        engine = EngineConfig(**values["engine"])
        router = RouterConfig(**values["router"]) if values["router"] else None
        ray = RayConfig(**values["ray"])
    except ConfigError as error:
        raise SettingsError(explain(error, origins)) from error
    has_engines = router is not None and (router.replicas or router.backends or router.ray)
    for table, needed, why in (
        ("router", has_engines, "is for a router, which needs replicas, backends or ray"),
        ("ray", router is not None and router.ray, "needs ray as well"),
        ("engine", router is None or not router.backends, "is nothing for a server without a model, which sends requests to backends"),
    ):
        given = [name for name, option in by_name.items() if option.table == table and name in origins]
        if given and not needed:
            raise SettingsError(f"{origins[given[0]]}: {why}")
    models = _read_models(server, of_models, values["engine"], by_name, path or "")
    return Settings(server, engine, router, ray, origins, models)


def _read_models(
    server: ServerConfig, tables: Mapping[str, Any], engine: Mapping[str, Any], options: Mapping[str, Option], path: str
) -> tuple[ModelChoice, ...]:
    """The further models: those of the option, and those of the tables. `engine`: options that were given of the first."""
    paths = dict(pair for name, place in server.models.items() for pair in _models_at(name, place))
    shared = {name: value for name, value in engine.items() if name not in OWN_OPTIONS}
    choices = []
    for name in dict.fromkeys((*paths, *tables)):
        own, more, routed = dict(shared), dict[str, Any](), dict[str, Any]()
        if name in paths:
            own["model"] = paths[name]
        entries = tables.get(name, {})
        origin = f"{path}: {MODELS_TABLE}.{name}"
        if not isinstance(entries, dict):
            raise SettingsError(f"{origin}: is no table")
        for key, value in entries.items():
            if key == "pin" and isinstance(value, bool):
                more[key] = value
            elif key == "keep_alive" and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                more[key] = float(value)
            elif key in options and options[key].table in ("engine", "router"):
                (own if options[key].table == "engine" else routed)[key] = options[key].read(value, f"{origin}.{key}", toml=True)
            else:
                known = ("pin", "keep_alive", *(name for name, option in options.items() if option.table in ("engine", "router")))
                wrong = f"{value!r} is not possible" if key in known else f"there is no such key{nearest(key, known)}"
                raise SettingsError(f"{origin}.{key}: {wrong}")
        if "model" not in own and not routed.get("backends"):
            raise SettingsError(f"{origin}: has no model")
        try:
            router = RouterConfig(**routed) if routed else None
            choices.append(ModelChoice(name, EngineConfig(**{"model": DEFAULT_MODEL, **own}), router, **more))
        except ConfigError as error:
            raise SettingsError(f"{origin}: {explain(error, {})}") from error
    return tuple(choices)


def _models_at(name: str, place: str) -> list[tuple[str, str]]:
    """The names and paths of what NAME=PATH means, or a path alone, which may be a directory of models."""
    if place:
        return [(name, place)]
    folder = Path(name).expanduser()
    if not folder.is_dir() or (folder / "config.json").exists():
        return [(Path(name).name.removesuffix(".gguf"), name)]
    found = [path for path in sorted(folder.iterdir()) if path.suffix == ".gguf" or (path / "config.json").exists()]
    if not found:
        raise SettingsError(f"models: {name} has no model in it")
    return [(path.name.removesuffix(".gguf"), str(path)) for path in found]


def explain(error: ConfigError, origins: Mapping[str, str]) -> str:
    """The error in the words of whoever gave the values, in one line."""
    parts = []
    for violation in error.violations:
        origin = origins.get(violation.field, "--" + violation.field.replace("_", "-"))
        parts.append(f"{origin}: {violation.description}")
    return "; ".join(parts).replace("\n", " ")


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about a name that does not exist."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0)
    return f"; the nearest is {close[0]}" if close else ""


@cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The docstring below each field of a class, which Python itself does not keep."""
    bases = (base for base in reversed(cls.__mro__) if base is not object)
    body = [statement for base in bases for statement in ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body]  # type: ignore[attr-defined]
    docs: dict[str, str] = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and isinstance(following, ast.Expr):
            docs[statement.target.id] = " ".join(str(ast.literal_eval(following.value)).split())
    return docs


def _tables(path: str) -> dict[str, dict[str, Any]]:
    try:
        with Path(path).open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}".replace("\n", " ")) from error
    for table, entries in tables.items():
        if table not in (*TABLES, MODELS_TABLE) or not isinstance(entries, dict):
            raise SettingsError(
                f"{path}: {table}: there are only the tables {', '.join(f'[{name}]' for name in (*TABLES, f'{MODELS_TABLE}.NAME'))}"
            )
    return tables


_MODEL = "model_argument"


class ShowAll(argparse.Action):
    """Prints the whole help, and exits."""

    def __init__(self, *, build: Callable[[], argparse.ArgumentParser], **fields: Any) -> None:
        super().__init__(nargs=0, **fields)
        self._build = build

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        self._build().print_help()
        parser.exit()


def add_general(parser: argparse.ArgumentParser, build_whole: Callable[[], argparse.ArgumentParser]) -> None:
    """`--help-all` and `--version`. `build_whole`: makes the parser whose help shows all."""
    parser.add_argument("--help-all", action=ShowAll, build=build_whole, help="show all options, by group, and exit")
    parser.add_argument("--version", action="version", version=f"aengine {VERSION}")


def add_model(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """The model as the first argument."""
    parser.add_argument(_MODEL, nargs="?", metavar=metavar, help=text)


def add_options(
    parser: argparse.ArgumentParser, options: Iterable[Option], common: Sequence[str], *, whole: bool, help_of: Callable[[Option], str]
) -> None:
    """The flags of `options`, those of the names in `common` first and in this order. Without `whole` the help shows no others."""
    by_name = {option.name: option for option in options}
    groups = dict.fromkeys(common, "common options")
    for name in (*common, *(name for name in by_name if name not in common)):
        title = groups.get(name, by_name[name].group)
        group = next((group for group in parser._action_groups if group.title == title), None) or parser.add_argument_group(title)
        by_name[name].add_to(group, help_of(by_name[name]) if whole or name in common else argparse.SUPPRESS, several=name == "model")


def help_with_source(option: Option) -> str:
    """What an option is, its default, and the variable that it can be given as."""
    default = str(option.default).lower() if isinstance(option.default, bool) else option.default
    shown = "" if default in (None, (), {}) else f"default: {default}; "
    return f"{option.help} ({shown}{option.variable})".replace("%", "%%")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, is_server: Callable[[str], bool] = lambda argument: False
) -> argparse.Namespace:
    """The namespace, with `model` wherever the model was given; `server` is the argument in its place that `is_server`, else None. Exits
    with a usage error for what is unknown, or given twice."""
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"unrecognized argument {unknown[0]}{nearest(unknown[0], flags) if unknown[0].startswith('-') else ''}")
    model = vars(given).pop(_MODEL)
    given.server = model if model is not None and is_server(model) else None
    models = [*([model] if model is not None and given.server is None else []), *vars(given).pop("model", [])]
    if models:
        given.model, *others = models
        if others and not any(action.dest == "models" for action in parser._actions):
            parser.error(f"the model is given twice: as {given.model} and as {others[0]}")
        if others:
            given.models = ",".join([*others, *([given.models] if "models" in given else [])])
    return given
