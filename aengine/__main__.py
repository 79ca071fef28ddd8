"""`aengine`: which programs there are, and what this machine has. Without `info` it loads nothing heavy."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence

from aengine import __version__
from aengine.errors import ConfigError
from aengine.kernels.cpu.compiler import find_compiler, find_prebuilt
from aengine.kernels.cpu.levels import KernelsUnavailableError, select_level

PROGRAMS = (
    ("aengine-serve", "serve a model over HTTP: the APIs of OpenAI and Anthropic, and a page to chat on"),
    ("aengine-grpc", "serve a model over gRPC"),
    ("aengine-chat", "chat in the terminal, with a model in this process or of a server"),
    ("aengine-client", "send one prompt to a server and print its output"),
    ("aengine-bench", "measure an engine or a server"),
    ("aengine-worker", "run ranks of a model whose other ranks are on other hosts"),
)
_EXTRAS = {  # and the modules that each brings
    "http": ("starlette", "uvicorn", "httptools"),
    "chat": ("rich", "prompt_toolkit"),
    "structured": ("llguidance",),
    "gguf": ("gguf",),
    "uvloop": ("uvloop",),
    "cuda": ("flashinfer",),
}
_NEEDS = {"aengine-serve": "http", "aengine-chat": "chat"}  # programs and the extras without which they do not start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="aengine", description="An async streaming LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"aengine {__version__}")
    parser.add_argument("topic", nargs="?", choices=["info"], help="info: what this machine has; loads torch and the kernels")
    if parser.parse_args(arguments).topic is None:
        print(_overview())
    else:
        print("\n".join(f"{name:14}{text}" for name, text in _information()))
    return 0


def _overview() -> str:
    lines = [f"  {name:16}{text}{_missing(_NEEDS.get(name))}" for name, text in PROGRAMS]
    lines.append(f"  {'aengine info':16}versions, CPU kernels and devices of this machine")
    return "\n".join([f"aengine {__version__}", "", *lines, "", f"CPU kernels: {_expected_kernels()}", "Each program has --help."])


def _missing(extra: str | None) -> str:
    return "" if extra is None or _is_installed(extra) else f" (not installed: pip install 'aengine[{extra}]')"


def _is_installed(extra: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in _EXTRAS[extra])


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
    import torch

    from aengine.kernels.cpu.library import load_kernels

    try:
        kernels = load_kernels()
        loaded = f"level {kernels.level.value}, {'prebuilt' if kernels.prebuilt else 'compiled on this machine'}"
    except (KernelsUnavailableError, ConfigError) as error:
        loaded = f"none, {error}"
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        ("aengine", f"{__version__} in {os.path.dirname(os.path.abspath(__file__))}"),
        ("Python", f"{platform.python_version()} at {sys.executable}"),
        *((name, importlib.metadata.version(name)) for name in ("torch", "transformers", "tokenizers", "grpcio")),
        ("extras", ", ".join(name for name in _EXTRAS if _is_installed(name)) or "none"),
        ("system", f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}"),
        ("CPU", f"{cores} cores for this process, {torch.get_num_threads()} threads of torch"),
        ("CPU kernels", loaded),
        *((f"cuda:{number}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB") for number, device in enumerate(devices)),
    ]


if __name__ == "__main__":
    sys.exit(main())
