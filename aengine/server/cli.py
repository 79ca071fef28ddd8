"""`aengine-grpc` and `aengine-serve`: one engine, or several, behind a port of gRPC, of HTTP or both, from flags to exit code.

Owns the command line: its help, `--check`, and how errors are shown. Every field of `ServerConfig` and `EngineConfig` is a flag; its
docstring is the help. Heavy modules are imported after the flags are read, so that --help and a typo answer at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from aengine.api.errors import AEngineError, ConfigError
from aengine.parallel.launch import die_with, take_cores
from aengine.server.config.settings import (
    CONFIG_VARIABLE,
    GRPC,
    HTTP,
    ServerProgram,
    Settings,
    add_general,
    add_model,
    add_options,
    explain,
    help_with_source,
    options,
    parse,
    read_settings,
)

logger = logging.getLogger("aengine.server")

COMMON = (
    "served_model_name",
    "token_file",
    "dtype",
    "quantization",
    "max_model_len",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "tensor_parallel_size",
)
"""Options that the help begins with, behind the address."""


def main(arguments: Sequence[str] | None = None, program: ServerProgram = GRPC) -> int:
    """Serve until a signal; returns the exit code: 0 after a drain, 1 when it could not start or had to give up."""
    parser = build_parser(program)
    given = parse(parser, arguments)
    known = {option.name for option in options(program)}
    origins: Mapping[str, str] = {}
    try:
        settings = read_settings({name: value for name, value in vars(given).items() if name in known}, os.environ, given.config, program)
        origins = settings.origins
        if given.check:
            return check(settings)
        return serve(settings)
    except AEngineError as error:
        print(f"{program.name}: {explain(error, origins) if isinstance(error, ConfigError) else error}", file=sys.stderr)
    return 1


def serve_http(arguments: Sequence[str] | None = None, name: str = HTTP.name) -> int:
    """`main` of `aengine-serve`, which is called `name`."""
    return main(arguments, HTTP._replace(name=name))


def serve_grpc(arguments: Sequence[str] | None = None, name: str = GRPC.name) -> int:
    """`main` of `aengine-grpc`, which is called `name`."""
    return main(arguments, GRPC._replace(name=name))


def serve(settings: Settings) -> int:
    """Run the process. Raises what starting raises, and `EngineDeadError`."""
    # Before gRPC is imported: its core reports a failed bind in its own words, beside ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from aengine.server.process import run_process
    from aengine.server.telemetry.metrics import configure_logging

    configure_logging(settings.server)
    code = run_process(settings)
    logger.info("stopped")
    return code


def check(settings: Settings) -> int:
    """Look at all that can be looked at without loading the model, and print the configuration in effect, as TOML. Raises what is
    wrong."""
    from aengine.models.loading.hub import is_local, resolve_model
    from aengine.server.core.auth import Authenticator, CertificateFiles
    from aengine.server.process import uses_uvloop

    uses_uvloop(settings.server)
    Authenticator(settings.server).load()
    if settings.server.tls:
        CertificateFiles(settings.server).load()
    router = settings.router
    configurations: dict[str, Any] = {"server": settings.server}
    if router is None or not router.backends:
        configurations["engine"] = engine = settings.engine
        if is_local(engine.model):
            resolve_model(engine.model, engine.revision, engine.load_format)
    if router is not None:
        configurations |= {"router": router, **({"ray": settings.ray} if router.ray else {})}
    table = ""
    for option in options():
        if option.table not in configurations:
            continue
        if option.table != table:
            table = option.table
            print(f"[{table}]")
        value = getattr(configurations[table], option.name)
        print(f"{option.name} = {_toml(value)}  # {settings.origins.get(option.name, 'default')}")
    return 0


def build_parser(program: ServerProgram = GRPC, *, whole: bool = False) -> argparse.ArgumentParser:
    """Values stay text here: they are read where those of the environment are. `whole`: the help shows all options."""
    parser = argparse.ArgumentParser(
        prog=program.name,
        usage="%(prog)s [MODEL] [--config FILE] [--check] [options]",
        allow_abbrev=False,
        description=program.description,
        epilog="Every option can also be given as the environment variable named with it, or in the file of --config: a TOML file with "
        "the tables [server], [engine], [router] and [ray] and the names of the options with underscores. Flags win over the environment, "
        "which wins over the file.",
    )
    by_name = {option.name: option for option in options(program)}
    add_model(parser, "MODEL", help_with_source(by_name["model"]))
    add_general(parser, partial(build_parser, program, whole=True))
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with options ({CONFIG_VARIABLE})")
    parser.add_argument("--check", action="store_true", help="check everything but the model itself, print the configuration, and exit")
    port = "port" if program.defaults.get("port", True) is not None else "http_port"
    add_options(parser, by_name.values(), ("host", port, *COMMON), whole=whole, help_of=help_with_source)
    return parser


def _toml(value: object) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _serve_as_child(arguments: Sequence[str]) -> int:
    """`aengine-grpc` as the child of a router: with a share of the cores, and no longer than its parent. Before its flags there are the
    parent's process id, the replica's index and their number."""
    parent, index, count, *flags = arguments
    die_with(int(parent))
    take_cores(int(index), int(count), None)
    return main(flags)


if __name__ == "__main__":
    sys.exit(_serve_as_child(sys.argv[2:]) if sys.argv[1:2] == ["replica"] else main())
