"""Build levels: which instructions the kernels may use on this CPU.

Owns the names, the compiler flags, and what a CPU must have for each. Compiles and loads nothing.

Compiles the sources to a shared library, once per machine, and finds the libraries that came with the package.

Owns where compiled kernels are kept and their names: a compiled one's is a hash of all inputs of the compiler, a prebuilt one's a hash of
the sources and one of its bytes. Loads nothing."""

from __future__ import annotations

import ctypes
import enum
import hashlib
import logging
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from aengine.api.errors import AEngineError, ConfigError

LEVEL_VARIABLE = "AENGINE_CPU_LEVEL"
_NO_KERNELS = "torch"


class KernelsUnavailableError(AEngineError):
    """The kernels cannot be used on this machine; the message says why in one line."""


class Level(enum.Enum):
    """Which instructions a build may use, from the fewest to the most."""

    FUSED = "fused"  # PORTABLE, with a product and a sum rounded once as on all others, by a function: slow, for equal bits
    PORTABLE = "portable"  # the compiler's default for the machine: SSE2 on x86-64
    NEON = "neon"
    NEON_DOT = "neondot"  # sums of four int8 products
    NEON_BF16 = "neonbf16"  # and of two of bfloat16
    AVX2 = "avx2"
    AVX512 = "avx512"
    AVX512_VNNI = "avx512vnni"
    AVX512_BF16 = "avx512bf16"
    AMX = "amx"


_AVX512 = ("fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl")
_REQUIREMENTS: Mapping[Level, tuple[str | None, tuple[str, ...]]] = {
    # The machine, as platform.machine() names it, or None for any; and the features, as /proc/cpuinfo names them.
    Level.FUSED: (None, ()),
    Level.PORTABLE: (None, ()),
    Level.NEON: ("aarch64", ()),
    Level.NEON_DOT: ("aarch64", ("asimddp",)),
    Level.NEON_BF16: ("aarch64", ("asimddp", "bf16")),
    Level.AVX2: ("x86_64", ("fma", "avx2", "f16c")),
    Level.AVX512: ("x86_64", _AVX512),
    Level.AVX512_VNNI: ("x86_64", (*_AVX512, "avx512_vnni")),
    Level.AVX512_BF16: ("x86_64", (*_AVX512, "avx512_vnni", "avx512_bf16")),
    Level.AMX: ("x86_64", (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")),
}


_EXTENSIONS = {"asimddp": "dotprod"}  # what compilers for ARM name otherwise than Linux


def level_flags(level: Level) -> tuple[str, ...]:
    """The compiler flags of a level. Linux's avx512_vnni is -mavx512vnni for compilers, and amx_tile -mamx-tile."""
    machine, features = _REQUIREMENTS[level]
    if machine == "aarch64" and features:
        return ("-march=armv8.2-a+" + "+".join(_EXTENSIONS.get(feature, feature) for feature in features),)
    fused = ("-DAENGINE_FUSED", "-O1") if level is Level.FUSED else ()  # calls take its time, so it is compiled in half of that of -O3
    return (*fused, *(f"-m{feature.replace('amx_', 'amx-').replace('_', '')}" for feature in features))


CANONICAL = {
    Level.PORTABLE: Level.FUSED,
    Level.NEON_BF16: Level.NEON_DOT,
    Level.AVX512_BF16: Level.AVX512_VNNI,
    Level.AMX: Level.AVX512_VNNI,
}
"""The level in place of one whose products are rounded otherwise than by most: the others give equal bits on every machine."""


def levels_of(machine: str) -> tuple[Level, ...]:
    """The levels of a machine, as platform.machine() names it, the best last."""
    return tuple(level for level, (needed, _) in _REQUIREMENTS.items() if needed in (None, machine))


def supported_levels() -> tuple[Level, ...]:
    """The levels that this CPU can run, the best first."""
    present = _cpu_features()
    fitting = [level for level in levels_of(platform.machine()) if present.issuperset(_REQUIREMENTS[level][1])]
    return tuple(level for level in reversed(fitting) if level is not Level.AMX or _may_use_tiles())


def select_level(environ: Mapping[str, str], *, canonical: bool = False) -> Level:
    """The best level, or the one that AENGINE_CPU_LEVEL names; or, if `canonical`, the one in its place that gives the bits of most.

    Raises KernelsUnavailableError when it names torch, ConfigError when it names no level or one that this CPU lacks.
    """
    supported = supported_levels()
    name = environ.get(LEVEL_VARIABLE)
    if not name:
        return CANONICAL.get(supported[0], supported[0]) if canonical else supported[0]
    if name == _NO_KERNELS:
        raise KernelsUnavailableError(f"{LEVEL_VARIABLE} is {_NO_KERNELS}")
    names = [level.value for level in Level]
    if name not in names:
        raise ConfigError.of(LEVEL_VARIABLE, f"{name!r} is not one of {', '.join([*names, _NO_KERNELS])}")
    level = Level(name)
    if level not in supported:
        able = ", ".join(one.value for one in supported)
        raise ConfigError.of(LEVEL_VARIABLE, f"{name!r} is not possible on this CPU; possible are {able}, {_NO_KERNELS}")
    return CANONICAL.get(level, level) if canonical else level


# Which bit of AT_HWCAP (16) or AT_HWCAP2 (26) says so; QEMU shows the host's /proc/cpuinfo.
_ARM_FEATURES = {"asimddp": (16, 20), "bf16": (26, 14)}


def _cpu_features() -> frozenset[str]:
    """The features of this CPU as /proc/cpuinfo names them, of ARM those that a level asks for; empty where Linux does not tell."""
    if platform.machine() == "aarch64":
        return frozenset(name for name, (kind, bit) in _ARM_FEATURES.items() if ctypes.CDLL(None).getauxval(kind) >> bit & 1)
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(flags[1].split() if flags else ())


def _may_use_tiles() -> bool:
    """Asks Linux to let all threads of this process use the tiles of AMX: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    return int(ctypes.CDLL(None).syscall(158, 0x1023, 18)) == 0


SOURCES = pathlib.Path(__file__).parent / "src"
PREBUILT = pathlib.Path(__file__).parent / "prebuilt"
_log = logging.getLogger("aengine")
_UNITS = (
    ("adapters.cpp", "attention.cpp", "experts.cpp", "draw.cpp"),
    ("codes.cpp",),
    ("gemm.cpp", "exchange.cpp", "bpe.cpp", "kernels.cpp"),
)
"""Files that are compiled as one translation unit. The units are compiled in parallel, and codes take the longest; more units would spend
most time on headers."""
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",  # the same rounding at every use of a function, and by every compiler
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
_TIMEOUT = 900.0  # seconds, for one compiler call


def find_prebuilt(level: Level, sources: pathlib.Path = SOURCES, directory: pathlib.Path = PREBUILT) -> pathlib.Path | None:
    """The library of a level that came with the package; None where there is none of these sources. Logs a warning for a damaged one."""
    for path in directory.glob(f"cpu-{level.value}-{sources_digest(sources)}-*.so"):
        if path.name == prebuilt_name(level, sources, path.read_bytes()):
            return path
        _log.warning("the prebuilt CPU kernels %s are damaged", path)
    return None


def prebuilt_name(level: Level, sources: pathlib.Path, library: bytes) -> str:
    return f"cpu-{level.value}-{sources_digest(sources)}-{_digest(library)}.so"


def find_compiled(level: Level, environ: Mapping[str, str]) -> pathlib.Path | None:
    """The library of a level that an earlier start compiled. Raises KernelsUnavailableError where there is no compiler."""
    path = _compiled_path(level, environ, find_compiler(environ), SOURCES)
    return path if path.is_file() else None


def _compiled_path(level: Level, environ: Mapping[str, str], compiler: tuple[str, ...], sources: pathlib.Path) -> pathlib.Path:
    """Where `build` keeps a library."""
    return (
        cache_directory(environ) / f"cpu-{level.value}-{_digest(sources_digest(sources), *compiler, *_flags(level), _version(compiler))}.so"
    )


@contextmanager
def build(level: Level, environ: Mapping[str, str], sources: pathlib.Path = SOURCES) -> Iterator[pathlib.Path]:
    """The compiled library of a level: the one of an earlier call, or a new one, which takes seconds. Where the cache cannot be written,
    it is compiled for this process alone and removed at the end.

    Raises KernelsUnavailableError when there is no compiler or it fails.
    """
    compiler = find_compiler(environ)
    path = _compiled_path(level, environ, compiler, sources)
    with ExitStack() as temporary:
        if not path.is_file():
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                compile_library(compiler, level, sources, path)
            except OSError:
                path = pathlib.Path(temporary.enter_context(tempfile.TemporaryDirectory(prefix="aengine-"))) / path.name
                compile_library(compiler, level, sources, path)
        yield path


def compile_library(compiler: Sequence[str], level: Level, sources: pathlib.Path, target: pathlib.Path) -> None:
    """Writes the library of a level, which this CPU need not support, to `target` in one move. Logs as warnings, so that a long
    start is explained where no logging is configured. Raises OSError where `target` cannot be written, KernelsUnavailableError for a
    compiler that fails."""
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=target.parent) as directory:
        _log.warning("compiling the CPU kernels for level %s with %s: takes some seconds, once on this machine", level.value, compiler[0])
        begin = time.perf_counter()
        objects = [f"{directory}/{number}.o" for number in range(len(_UNITS))]
        commands = []
        for (*before, last), made in zip(_UNITS, objects, strict=True):
            included = [word for name in before for word in ("-include", str(sources / name))]
            commands.append(
                [*compiler, *_flags(level), f'-DAENGINE_LEVEL="{level.value}"', "-c", *included, str(sources / last), "-o", made]
            )
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(_run, commands))
        _run([*compiler, *_flags(level), "-shared", *objects, "-o", f"{directory}/linked.so"])
        os.replace(f"{directory}/linked.so", target)  # another process may replace it by an equal file
    _log.warning("compiled the CPU kernels in %.1f s", time.perf_counter() - begin)


def _flags(level: Level) -> tuple[str, ...]:
    return (*_FLAGS, *level_flags(level))


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


def find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
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


def cache_directory(environ: Mapping[str, str]) -> pathlib.Path:
    """Returns the directory of this user in which the package keeps what takes long to make."""
    base = environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path(environ.get("HOME") or pathlib.Path.home()) / ".cache") / "aengine"


def sources_digest(sources: pathlib.Path = SOURCES) -> str:
    """Returns a digest of the names and texts of all sources of the kernels, as hexadecimal digits."""
    return _digest(
        *(part for path in sorted(sources.iterdir()) if path.is_file() for part in (path.name, path.read_text(encoding="utf-8")))
    )


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
