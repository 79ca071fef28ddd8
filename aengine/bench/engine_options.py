"""Every field of `EngineConfig` as a flag of `aengine-bench`, and the configuration that the flags make."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from aengine.bench.shapes import SHAPES, describe, shape_folder
from aengine.config import EngineConfig
from aengine.server.config.settings import Option, read_settings
from aengine.server.config.settings import options as options_of_server


def add_engine_options(command: argparse.ArgumentParser, *, several_shapes: bool = False) -> None:
    """Every field of `EngineConfig` as a flag, as `aengine-grpc` has them; `--shape` in place of `--model`."""
    group = command.add_argument_group("engine")
    either = group.add_mutually_exclusive_group()
    text = "a model of this shape with random weights, without any download: " + ", ".join(map(describe, SHAPES))
    if several_shapes:
        text += "; may be given several times"
    either.add_argument("--shape", choices=SHAPES, action="append" if several_shapes else "store", metavar="NAME", help=text)
    for option in _engine_options():
        option.add_to(either if option.name == "model" else group, option.help.replace("%", "%%"))


def _engine_options() -> list[Option]:
    return [option for option in options_of_server() if option.table == "engine"]


def given_engine_flags(options: argparse.Namespace) -> list[str]:
    """Those that were given of what `add_engine_options` adds."""
    return (["--shape"] if options.shape else []) + [option.flag for option in _engine_options() if option.name in options]


@contextmanager
def engine_config(options: argparse.Namespace, shape: str | None) -> Iterator[tuple[str, EngineConfig]]:
    """The model's name, and the configuration, which may be used while inside."""
    given = {option.name: vars(options)[option.name] for option in _engine_options() if option.name in options}
    if shape is None:
        config = read_settings(given, {}).engine
        yield config.model, config
        return
    if given.setdefault("load_format", "dummy") != "dummy":
        raise ValueError(
            f"--load-format: {given['load_format']!r} is not possible with --shape, which has no weights to read; only dummy is"
        )
    with shape_folder(shape) as folder:
        yield shape, read_settings({**given, "model": str(folder)}, {}).engine
