"""Compiles the CPU kernels into the package, for wheels and images: python -m tools.prebuild avx2 avx512bf16

Without names all levels of this kind of machine. With `cache` the one that an engine here takes, into the cache where its start looks for
it: that needs no package of Python, so that it runs while these are downloaded.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys
from collections.abc import Mapping

from aengine.api.errors import ConfigError
from aengine.kernels.cpu.compiler import (
    PREBUILT,
    SOURCES,
    KernelsUnavailableError,
    Level,
    build,
    compile_library,
    find_compiler,
    find_prebuilt,
    levels_of,
    prebuilt_name,
    select_level,
)


def prebuild(level: Level, environ: Mapping[str, str], sources: pathlib.Path = SOURCES, directory: pathlib.Path = PREBUILT) -> pathlib.Path:
    """Compiles a level, which this CPU need not support, into the directory; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    made = directory / f"{level.value}.so"
    compile_library(find_compiler(environ), level, sources, made)
    return made.rename(directory / prebuilt_name(level, sources, made.read_bytes()))


def fill_cache(environ: Mapping[str, str]) -> str:
    """Compiles what a start on this machine would compile, unless it is there; returns a sentence."""
    try:
        level = select_level(environ)
        prebuilt = find_prebuilt(level)
        if prebuilt is not None:
            return f"the CPU kernels of level {level.value} are prebuilt: {prebuilt}"
        with build(level, environ) as path:
            return f"CPU kernels of level {level.value}: {path}"
    except (KernelsUnavailableError, ConfigError) as error:
        return f"no CPU kernels are compiled: {error}"


if __name__ == "__main__":
    if sys.argv[1:] == ["cache"]:
        sys.exit(print(fill_cache(os.environ)))
    for level in map(Level, sys.argv[1:]) if sys.argv[1:] else levels_of(platform.machine()):
        print(prebuild(level, os.environ))
