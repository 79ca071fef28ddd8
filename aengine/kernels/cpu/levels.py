"""Build levels: which instructions the kernels may use on this CPU.

Owns the names, the compiler flags, and what a CPU must have for each. Compiles and loads nothing.
"""

from __future__ import annotations

import ctypes
import enum
import pathlib
import platform
import re
from collections.abc import Mapping

from aengine.api.errors import AEngineError, ConfigError

LEVEL_VARIABLE = "AENGINE_CPU_LEVEL"
_NO_KERNELS = "torch"


class KernelsUnavailableError(AEngineError):
    """The kernels cannot be used on this machine; the message says why in one line."""


class Level(enum.Enum):
    """Which instructions a build may use, from the fewest to the most."""

    PORTABLE = "portable"  # the compiler's default for the machine: SSE2 on x86-64
    NEON = "neon"
    AVX2 = "avx2"
    AVX512 = "avx512"
    AVX512_VNNI = "avx512vnni"
    AVX512_BF16 = "avx512bf16"
    AMX = "amx"  # has been run on a model of its instructions only, so it is not used unless it is named


_AVX512 = ("fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl")
_REQUIREMENTS: Mapping[Level, tuple[str | None, tuple[str, ...]]] = {
    # The machine, as platform.machine() names it, or None for any; and the features, as /proc/cpuinfo names them.
    Level.PORTABLE: (None, ()),
    Level.NEON: ("aarch64", ()),
    Level.AVX2: ("x86_64", ("fma", "avx2")),
    Level.AVX512: ("x86_64", _AVX512),
    Level.AVX512_VNNI: ("x86_64", (*_AVX512, "avx512_vnni")),
    Level.AVX512_BF16: ("x86_64", (*_AVX512, "avx512_vnni", "avx512_bf16")),
    Level.AMX: ("x86_64", (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")),
}


def level_flags(level: Level) -> tuple[str, ...]:
    """The compiler flags of a level. Linux's avx512_vnni is -mavx512vnni for compilers, and amx_tile -mamx-tile."""
    return tuple(f"-m{feature.replace('amx_', 'amx-').replace('_', '')}" for feature in _REQUIREMENTS[level][1])


def levels_of(machine: str) -> tuple[Level, ...]:
    """The levels of a machine, as platform.machine() names it, the best last."""
    return tuple(level for level, (needed, _) in _REQUIREMENTS.items() if needed in (None, machine))


def supported_levels() -> tuple[Level, ...]:
    """The levels that this CPU can run, the best first."""
    present = _cpu_features()
    fitting = [level for level in levels_of(platform.machine()) if present.issuperset(_REQUIREMENTS[level][1])]
    return tuple(level for level in reversed(fitting) if level is not Level.AMX or _may_use_tiles())


def select_level(environ: Mapping[str, str]) -> Level:
    """The best level, or the one that AENGINE_CPU_LEVEL names.

    Raises KernelsUnavailableError when it names torch, ConfigError when it names no level or one that this CPU lacks.
    """
    supported = supported_levels()
    name = environ.get(LEVEL_VARIABLE)
    if not name:
        return next(level for level in supported if level is not Level.AMX)
    if name == _NO_KERNELS:
        raise KernelsUnavailableError(f"{LEVEL_VARIABLE} is {_NO_KERNELS}")
    names = [level.value for level in Level]
    if name not in names:
        raise ConfigError.of(LEVEL_VARIABLE, f"{name!r} is not one of {', '.join([*names, _NO_KERNELS])}")
    level = Level(name)
    if level not in supported:
        able = ", ".join(one.value for one in supported)
        raise ConfigError.of(LEVEL_VARIABLE, f"{name!r} is not possible on this CPU; possible are {able}, {_NO_KERNELS}")
    return level


def _cpu_features() -> frozenset[str]:
    """The flags in /proc/cpuinfo; empty where there is no such file, so that only the portable level is supported."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(flags[1].split() if flags else ())


def _may_use_tiles() -> bool:
    """Asks Linux to let all threads of this process use the tiles of AMX: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    return int(ctypes.CDLL(None).syscall(158, 0x1023, 18)) == 0
