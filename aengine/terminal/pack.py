"""`aengine-pack`: the weights of a model in a file as the kernels of a CPU read them, and the tables of its tokenizer in another one,
before the first start that needs them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial

from aengine.api.errors import ConfigError
from aengine.client.client_config import exit_code
from aengine.server.config.settings import add_general, add_model, add_options, parse, read_settings
from aengine.terminal.cli import ENGINE_OPTIONS, engine_flags

_COMMON = ("dtype", "quantization", "weights_cache", "weights_cache_size")


def main(arguments: Sequence[str] | None = None, name: str = "aengine-pack") -> int:
    """Returns the exit code: 0 where the file is there and whole, 1 for an error, 2 for wrong flags. `name`: what the program is called."""
    parser = build_parser(name)
    return exit_code(name, partial(_run, parse(parser, arguments)))


def build_parser(name: str = "aengine-pack", *, whole: bool = False) -> argparse.ArgumentParser:
    """`whole`: the help shows all options."""
    parser = argparse.ArgumentParser(
        prog=name,
        usage="%(prog)s [MODEL] [options]",
        allow_abbrev=False,
        description="Pack the weights of a model for the kernels of this CPU, so that starts with the same options map them.",
    )
    add_model(parser, "MODEL", "a Hugging Face id, a directory, or demo (the default)")
    add_general(parser, partial(build_parser, name, whole=True))
    add_options(parser, ENGINE_OPTIONS, _COMMON, whole=whole, help_of=lambda option: option.help.replace("%", "%%"))
    return parser


def _run(given: argparse.Namespace) -> int:
    config = read_settings(engine_flags(given), os.environ).engine
    if config.num_ranks > 1:
        raise ConfigError.of("tensor_parallel_size", "ranks pack their parts at their first start")
    from aengine.engine.loading import kept_tables
    from aengine.models.loading.hub import resolve_model
    from aengine.runner.cpu.packed_loading import pack_to_file
    from aengine.tokenizer.tokenizer import Tokenizer

    model_dir = resolve_model(config.model, config.revision, config.load_format)
    path, is_new = pack_to_file(config, model_dir)
    tables = kept_tables(config, model_dir)
    if tables is not None:
        Tokenizer.find(model_dir, kept=tables)
        if tables.path.is_file():  # else it is a tokenizer of another kind
            print(f"{tables.path}: {tables.path.stat().st_size / 2**20:.1f} MiB, the tables of the tokenizer")
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, {'packed' if is_new else 'was there'}, and its checksum is right")
    return 0
