"""Sources -> a shared library, once per machine.

Owns where compiled kernels are kept and what they are named after: a hash of everything that shapes them. A library that came with the
package is preferred to compiling. Loads nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from aengine.kernels.cpu.levels import KernelsUnavailableError, Level, level_flags

SOURCES = pathlib.Path(__file__).parent / "src"
PREBUILT = pathlib.Path(__file__).parent / "prebuilt"
_ENTRY = "kernels.cpp"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-ffp-contract=fast",  # the same rounding at every use of a function
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility-inlines-hidden",
    "-Wno-psabi",
)
_TIMEOUT = 300.0  # seconds, of a compilation


@dataclass(frozen=True, slots=True)
class Built:
    """A shared library on disk. A temporary one lies in a directory of its own, which the one who loads it removes."""

    path: pathlib.Path
    temporary: bool = False


def build(level: Level, environ: Mapping[str, str], sources: pathlib.Path = SOURCES, prebuilt: pathlib.Path = PREBUILT) -> Built:
    """The library of a level: the package's, the one of an earlier call, or a new one.

    Takes seconds when it compiles. Raises KernelsUnavailableError when there is no compiler or it fails.
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
        handle, partial = tempfile.mkstemp(suffix=".so", dir=directory)
        os.close(handle)
    except OSError:
        # Nowhere to keep it: compile for this process alone.
        own = pathlib.Path(tempfile.mkdtemp(prefix="aengine-"))
        try:
            _compile(compiler, flags, level, sources, own / name)
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise
        return Built(own / name, temporary=True)
    try:
        _compile(compiler, flags, level, sources, pathlib.Path(partial))
        os.replace(partial, directory / name)  # whoever comes second replaces the same bytes
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    return Built(directory / name)


def prebuilt_name(level: Level, sources: pathlib.Path = SOURCES) -> str:
    """What a library that ships with the package is called: one of other sources has another name."""
    return f"cpu-{level.value}-{_sources_digest(sources)}.so"


def prebuild(level: Level, environ: Mapping[str, str], sources: pathlib.Path = SOURCES, directory: pathlib.Path = PREBUILT) -> pathlib.Path:
    """Compiles a level, which need not be one of this CPU's, into the package. For those who make wheels."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / prebuilt_name(level, sources)
    _compile(_find_compiler(environ), (*_FLAGS, *level_flags(level)), level, sources, target)
    return target


def _compile(compiler: tuple[str, ...], flags: tuple[str, ...], level: Level, sources: pathlib.Path, target: pathlib.Path) -> None:
    command = [*compiler, *flags, f'-DAENGINE_LEVEL="{level.value}"', str(sources / _ENTRY), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailableError(f"{compiler[0]} did not finish within {_TIMEOUT:g} seconds") from None
    except OSError as error:
        raise KernelsUnavailableError(f"cannot run {compiler[0]}: {error.strerror or error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {done.returncode}")
        raise KernelsUnavailableError(f"{compiler[0]} cannot compile the kernels: {first}")


def _find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The compiler as words of a command: CXX, which may hold options, or the first that is installed."""
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
