"""`aengine`: its commands, each of which is a program of its own, too, and what this machine has. It loads nothing heavy itself, but for
`info`."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from aengine.api import VERSION
from aengine.api.errors import ConfigError
from aengine.kernels.cpu.compiler import KernelsUnavailableError, find_compiler, find_prebuilt, select_level


class Program(NamedTuple):
    """A program of its own, which is a command of `aengine`, too."""

    command: str  # of `aengine`
    script: str
    module: str
    function: str  # takes arguments and what the program is called, returns the exit code
    about: str


PROGRAMS = (
    Program(
        *("serve", "aengine-serve", "aengine.server.cli", "serve_http"),
        "serve a model over HTTP: the APIs of OpenAI, Anthropic and Ollama, and a page to chat on",
    ),
    Program("chat", "aengine-chat", "aengine.terminal.cli", "main", "chat in the terminal, with a model in this process or of a server"),
    Program("batch", "aengine-batch", "aengine.terminal.batch", "main", "answer the requests of a file into another one"),
    Program("replay", "aengine-replay", "aengine.terminal.replay", "main", "derive the tokens of receipts again and compare them"),
    Program("pack", "aengine-pack", "aengine.terminal.pack", "main", "pack a model's weights into the file that later starts map"),
    Program("client", "aengine-client", "aengine.client.cli", "main", "send one prompt to a server and print its output"),
    Program("grpc", "aengine-grpc", "aengine.server.cli", "serve_grpc", "serve a model over gRPC"),
    Program("bench", "aengine-bench", "aengine.bench.cli", "main", "measure an engine or a server"),
    Program("worker", "aengine-worker", "aengine.runner.follower", "main", "run ranks of a model whose other ranks are on other hosts"),
)
_PACKAGES = {"torch": "torch", "transformers": "transformers", "tokenizers": "tokenizers", "grpcio": "grpc"}
_EXTRAS = {"gguf": "gguf", "uvloop": "uvloop", "ray": "ray", "cuda": "flashinfer"}  # and the module that each brings


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of the command."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    program = next((program for program in PROGRAMS if given[:1] == [program.command]), None)
    if program is not None:
        run = getattr(importlib.import_module(program.module), program.function)
        return int(run(given[1:], f"aengine {program.command}"))
    parser = argparse.ArgumentParser(
        prog="aengine",
        usage="aengine COMMAND ...",
        description="An async streaming LLM inference engine.",
        epilog=_commands(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"aengine {VERSION}")
    commands = [program.command for program in PROGRAMS]
    parser.add_argument("command", nargs="?", choices=[*commands, "info"], help=argparse.SUPPRESS)
    if parser.parse_args(given).command is None:
        print(f"aengine {VERSION}\n\n{_commands()}\n\nCPU kernels: {_expected_kernels()}")
    else:
        print("\n".join(f"{name:14}{text}" for name, text in _information()))
    return 0


def _commands() -> str:
    lines = [f"  aengine {program.command:9}{program.about}" for program in PROGRAMS]
    lines.append(f"  aengine {'info':9}versions, CPU kernels and devices of this machine; loads torch and the kernels")
    return "\n".join(
        [*lines, "", f"Each has --help, and is a program of its own, too: {', '.join(program.script for program in PROGRAMS)}."]
    )


def _expected_kernels() -> str:
    """What an engine on the CPU will use, as far as can be said without loading it."""
    try:
        level = select_level(os.environ)
        if find_prebuilt(level) is not None:
            return f"level {level.value}, prebuilt"
        return f"level {level.value}, compiled at their first use with {find_compiler(os.environ)[0]}"
    except (KernelsUnavailableError, ConfigError) as error:
        return f"none, {error}"


def _information() -> list[tuple[str, str]]:
    from importlib import metadata, util  # which take longer than all that the programs need of this module

    from aengine.kernels.cpu.library import load_kernels

    try:
        kernels = load_kernels()
        loaded = f"level {kernels.level.value}, {'prebuilt' if kernels.prebuilt else 'compiled on this machine'}"
    except (KernelsUnavailableError, ConfigError) as error:
        loaded = f"none, {error}"
    devices = list[Any]()
    if util.find_spec("torch"):
        import torch

        devices += [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        ("aengine", f"{VERSION} in {os.path.dirname(os.path.abspath(__file__))}"),
        ("Python", f"{platform.python_version()} at {sys.executable}"),
        *((name, metadata.version(name) if util.find_spec(module) else "not installed") for name, module in _PACKAGES.items()),
        ("extras", ", ".join(name for name, module in _EXTRAS.items() if util.find_spec(module)) or "none"),
        ("system", f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"),
        ("CPU", f"{cores} cores for this process"),
        ("CPU kernels", loaded),
        *((f"cuda:{number}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB") for number, device in enumerate(devices)),
    ]


if __name__ == "__main__":
    sys.exit(main())
