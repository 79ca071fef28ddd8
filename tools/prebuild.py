"""Compiles the CPU kernels into the package, for wheels and images: python -m tools.prebuild avx2 avx512bf16

Without names all levels of this kind of machine.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys
from collections.abc import Mapping

from aengine.kernels.cpu.compiler import PREBUILT, SOURCES, Level, compile_library, find_compiler, levels_of, prebuilt_name


def prebuild(level: Level, environ: Mapping[str, str], sources: pathlib.Path = SOURCES, directory: pathlib.Path = PREBUILT) -> pathlib.Path:
    """Compiles a level, which this CPU need not support, into the directory; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    made = directory / f"{level.value}.so"
    compile_library(find_compiler(environ), level, sources, made)
    return made.rename(directory / prebuilt_name(level, sources, made.read_bytes()))


if __name__ == "__main__":
    for level in map(Level, sys.argv[1:]) if sys.argv[1:] else levels_of(platform.machine()):
        print(prebuild(level, os.environ))
