"""Compiles the sources to a shared library, once per machine.

Owns where compiled kernels are kept and their names, which are hashes of all inputs of the compiler. A library that came with the package
is used before one is compiled. Loads nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aengine.kernels.cpu.levels import KernelsUnavailableError, Level, level_flags

SOURCES = pathlib.Path(__file__).parent / "src"
PREBUILT = pathlib.Path(__file__).parent / "prebuilt"
_log = logging.getLogger("aengine")
_UNITS = (("attention.cpp", "draw.cpp"), ("gemm.cpp", "kernels.cpp"))
"""Files that are compiled as one translation unit. The units are compiled in parallel and take equally long; more of them would spend most
time on headers."""
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-ffp-contract=fast",  # the same rounding at every use of a function
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
_TIMEOUT = 300.0  # seconds, for one compiler call


@dataclass(frozen=True, slots=True)
class Built:
    """A shared library on disk. A temporary one is in a directory of its own, which whoever loads it removes."""

    path: pathlib.Path
    temporary: bool = False


def build(level: Level, environ: Mapping[str, str], sources: pathlib.Path = SOURCES, prebuilt: pathlib.Path = PREBUILT) -> Built:
    """The library of a level: the package's, the one of an earlier call, or a new one, which takes seconds to compile.

    Raises KernelsUnavailableError when there is no compiler or it fails.
    """
    shipped = prebuilt / prebuilt_name(level, sources)
    if shipped.is_file():
        return Built(shipped)
    compiler = _find_compiler(environ)
    flags = (*_FLAGS, *level_flags(level))
    directory = _cache_directory(environ)
    name = f"cpu-{level.value}-{_digest(_sources_digest(sources), *compiler, *flags, _version(compiler))}.so"
    if (directory / name).is_file():
        return Built(directory / name)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile(compiler, flags, level, sources, directory / name)
        return Built(directory / name)
    except OSError:  # the cache cannot be written: compile for this process alone
        own = pathlib.Path(tempfile.mkdtemp(prefix="aengine-"))
    try:
        _compile(compiler, flags, level, sources, own / name)
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    return Built(own / name, temporary=True)


def prebuilt_name(level: Level, sources: pathlib.Path = SOURCES) -> str:
    """The file name of a library that ships with the package; it changes with the sources."""
    return f"cpu-{level.value}-{_sources_digest(sources)}.so"


def prebuild(level: Level, environ: Mapping[str, str], sources: pathlib.Path = SOURCES, directory: pathlib.Path = PREBUILT) -> pathlib.Path:
    """Compiles a level, which this CPU need not support, into the package. For making wheels."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / prebuilt_name(level, sources)
    _compile(_find_compiler(environ), (*_FLAGS, *level_flags(level)), level, sources, target)
    return target


def _compile(compiler: tuple[str, ...], flags: tuple[str, ...], level: Level, sources: pathlib.Path, target: pathlib.Path) -> None:
    """Writes the library to `target` in one move. Raises OSError where that cannot be written, KernelsUnavailableError for a compiler that
    fails. Logs as warnings, so that a long start is explained where no logging is configured."""
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=target.parent) as directory:
        _log.warning("compiling the CPU kernels for level %s with %s: takes some seconds, once on this machine", level.value, compiler[0])
        begin = time.perf_counter()
        objects = [f"{directory}/{number}.o" for number in range(len(_UNITS))]
        commands = []
        for (*before, last), made in zip(_UNITS, objects, strict=True):
            included = [word for name in before for word in ("-include", str(sources / name))]
            commands.append([*compiler, *flags, f'-DAENGINE_LEVEL="{level.value}"', "-c", *included, str(sources / last), "-o", made])
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_run, commands))
        _run([*compiler, *flags, "-shared", *objects, "-o", f"{directory}/linked.so"])
        os.replace(f"{directory}/linked.so", target)  # another process may replace it by an equal file
    _log.warning("compiled the CPU kernels in %.1f s", time.perf_counter() - begin)


def _run(command: Sequence[str]) -> None:
    """Raises KernelsUnavailableError, with a message of one line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailableError(f"{command[0]} did not finish within {_TIMEOUT:g} seconds") from None
    except OSError as error:
        raise KernelsUnavailableError(f"cannot run {command[0]}: {error.strerror or error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {done.returncode}")
        raise KernelsUnavailableError(f"{command[0]} cannot compile the kernels: {first}")


def _find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The words of the compiler's command: CXX, which may hold options, or the first compiler that is installed."""
    given = environ.get("CXX")
    if given:
        words = shlex.split(given)
        if not words or shutil.which(words[0], path=environ.get("PATH")) is None:
            raise KernelsUnavailableError(f"the C++ compiler that CXX names, {given!r}, does not exist")
        return tuple(words)
    for name in _COMPILERS:
        found = shutil.which(name, path=environ.get("PATH"))
        if found is not None:
            return (found,)
    raise KernelsUnavailableError(f"there is no C++ compiler: none of {', '.join(_COMPILERS)} is installed and CXX is not set")


def _version(compiler: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"cannot run {compiler[0]}: {error}") from error
    return done.stdout


def _cache_directory(environ: Mapping[str, str]) -> pathlib.Path:
    base = environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path(environ.get("HOME") or pathlib.Path.home()) / ".cache") / "aengine"


def _sources_digest(sources: pathlib.Path) -> str:
    return _digest(
        *(part for path in sorted(sources.iterdir()) if path.is_file() for part in (path.name, path.read_text(encoding="utf-8")))
    )


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


if __name__ == "__main__":  # python -m aengine.kernels.cpu.compiler avx2 avx512bf16: fills `prebuilt/`
    for argument in sys.argv[1:]:
        print(prebuild(Level(argument), os.environ))
