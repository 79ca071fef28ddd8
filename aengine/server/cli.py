"""`aengine-grpc`: one engine behind one gRPC port, from flags to exit code.

Owns the process: flags, log, signals, the order of starting and stopping. Every field of `EngineConfig` is a flag; its
docstring is the help. Heavy modules are imported after the flags are read, so that --help and a typo answer at once.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import gc
import inspect
import ipaddress
import logging
import os
import signal
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from aengine.config import EngineConfig
from aengine.errors import AEngineError, ConfigError, EngineDeadError

LOG_LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger("aengine.server")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code: 0 after a drain, 1 when it could not start or had to give up."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC core reports a failed bind in its own words, beside ours
    try:
        given = vars(options)
        config = EngineConfig(**{field.name: given[field.name] for field in fields(EngineConfig) if field.name in given})
        code = asyncio.run(_Process(config, options).run())
    except AEngineError as error:
        print(f"aengine-grpc: {_flagged(error)}", file=sys.stderr)
        return 1
    logger.info("stopped")
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aengine-grpc", description="Serve one model over gRPC, in plain text.")
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no authentication (default: %(default)s)")
    server.add_argument("--port", type=_port, default=50051, help="0 lets the system pick one (default: %(default)s)")
    server.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        help="how long requests under way may go on after SIGTERM or SIGINT (default: %(default)s)",
    )
    server.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="(default: %(default)s)")
    engine = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineConfig)
    help_of = _field_docs(EngineConfig)
    for field in fields(EngineConfig):
        flag, text = "--" + field.name.replace("_", "-"), help_of[field.name].replace("%", "%%")
        if field.name == "model":
            engine.add_argument(flag, default="demo", help=f"{text} (default: %(default)s)")
            continue
        if field.default not in (None, MISSING):
            text += f" (default: {field.default})"
        # A flag that is not given is left out, so that the config's own default holds.
        if hints[field.name] is bool:
            engine.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            kind, metavar = _value_type(hints[field.name])
            engine.add_argument(flag, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text)
    return parser


class _Process:
    """One run of the server. The first signal drains, the second stops at once."""

    def __init__(self, config: EngineConfig, options: argparse.Namespace) -> None:
        self._config = config
        self._options = options
        self._drain = asyncio.Event()
        self._halt = asyncio.Event()

    async def run(self) -> int:
        from aengine.engine.async_engine import AsyncEngine
        from aengine.server.app import Server

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        engine = AsyncEngine(self._config)
        server = Server(engine, host=self._options.host, port=self._options.port)
        await server.start()
        try:
            if not await _before(engine.start(), self._drain):
                return 0
            gc.collect()
            gc.freeze()  # what is loaded stays: a collection that looks through it would hold up every stream for tens of milliseconds
            await server.set_serving()
            self._warn_if_exposed()
            logger.info("aengine-grpc listening on %s (model %s)", server.address, engine.model_info.name)
            try:
                await _before(engine.wait_stopped(), self._drain)
            except EngineDeadError:
                await server.set_serving(False)
                raise
            logger.info("draining %d requests, up to %g s", server.in_flight, self._options.drain_seconds)
            await _before(server.drain(self._options.drain_seconds), self._halt)
            if server.in_flight:
                logger.warning("ending %d requests that are still under way", server.in_flight)
            return 0 if engine.healthy else 1
        finally:
            await server.stop()
            await engine.aclose()

    def _on_signal(self, number: int) -> None:
        logger.info("%s", signal.Signals(number).name)
        if self._drain.is_set():
            self._halt.set()
        self._drain.set()

    def _warn_if_exposed(self) -> None:
        try:
            loopback = ipaddress.ip_address(self._options.host).is_loopback
        except ValueError:
            loopback = self._options.host == "localhost"
        if not loopback:
            logger.warning("%s can be reached from elsewhere, in plain text and without authentication", self._options.host)


async def _before(work: Coroutine[Any, Any, object], signalled: asyncio.Event) -> bool:
    """Run `work`, or cancel it when the signal comes first; returns whether it was done. Raises what `work` raises."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(signalled.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        done = task.done()
    finally:
        task.cancel()
        waiter.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)
    if done:
        task.result()
    return done


def _field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a class, which Python itself does not keep."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and isinstance(following, ast.Expr):
            docs[statement.target.id] = str(ast.literal_eval(following.value))
    return docs


def _value_type(hint: Any) -> tuple[Callable[[str], Any], str]:
    """How the value of a flag is read, and how the help shows it."""
    if typing.get_origin(hint) is Mapping:
        return _weights, "NAME=NUMBER,..."
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if not kinds:
        return hint, hint.__name__.upper()

    def optional(text: str) -> Any:
        return None if text.lower() == "none" else kinds[0](text)

    optional.__name__ = kinds[0].__name__  # argparse names the type in its message
    return optional, kinds[0].__name__.upper()


def _weights(text: str) -> dict[str, float]:
    pairs = (pair.rpartition("=") for pair in text.split(",") if pair)
    return {name: float(number) for name, _, number in pairs}


_weights.__name__ = "list of NAME=NUMBER"


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError
    return port


_port.__name__ = "port"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds


_seconds.__name__ = "number of seconds"


def _flagged(error: AEngineError) -> str:
    """The message in the words of the command line."""
    if not isinstance(error, ConfigError):
        return str(error)
    return "; ".join(f"--{violation.field.replace('_', '-')}: {violation.description}" for violation in error.violations)


if __name__ == "__main__":
    sys.exit(main())
