"""Levels, and what is compiled when: on sources that take no time to compile, except where a library is loaded."""

from __future__ import annotations

import ctypes
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from hang_guard import HANG_SECONDS

from aengine.api.errors import ConfigError
from aengine.kernels.cpu import compiler
from aengine.kernels.cpu.compiler import (
    SOURCES,
    KernelsUnavailableError,
    Level,
    build,
    find_prebuilt,
    prebuilt_name,
    select_level,
    supported_levels,
)
from aengine.kernels.cpu.library import _SIGNATURES, CpuKernels, layout_header, load_level
from tools.prebuild import fill_cache, prebuild

FILES = {
    "adapters.cpp": "static int adapters() { return 0; }\n",
    "attention.cpp": "static int twenty() { return 20; }\n",
    "experts.cpp": "static int experts() { return 1; }\n",
    "draw.cpp": "int draw() { return twenty() + experts() + adapters(); }\n",
    "codes.cpp": "int codes() { return 10; }\n",
    "gemm.cpp": "static int gemm() { return 11; }\n",
    "exchange.cpp": "static int exchange() { return 0; }\n",
    "bpe.cpp": "static int bpe() { return 0; }\n",
    "kernels.cpp": "int draw();\nint codes();\n"
    'extern "C" __attribute__((visibility("default"))) int answer() { return draw() + codes() + gemm() + exchange() + bpe(); }\n',
    "other.h": "\n",
}


@pytest.fixture
def sources(tmp_path: pathlib.Path) -> pathlib.Path:
    directory = tmp_path / "src"
    directory.mkdir()
    for name, text in FILES.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def environ(tmp_path: pathlib.Path) -> dict[str, str]:
    """A compiler that notes each library that it makes, and a cache of the test's own."""
    script = tmp_path / "cxx"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo compiled >> {tmp_path}/log ;; esac\nexec c++ "$@"\n')
    script.chmod(0o755)
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": str(script)}


def built(*arguments: Any) -> pathlib.Path:
    with build(*arguments) as path:
        return path


def compilations(tmp_path: pathlib.Path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_second_build_does_not_compile(tmp_path: pathlib.Path, sources: pathlib.Path, environ: dict[str, str]) -> None:
    first = built(Level.PORTABLE, environ, sources)
    assert first.parent == tmp_path / "cache" / "aengine"
    assert built(Level.PORTABLE, environ, sources) == first
    assert compilations(tmp_path) == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # no partial file is left


def test_a_build_that_takes_time_is_told(
    sources: pathlib.Path, environ: dict[str, str], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As warnings, which show where no logging was configured. One that is there already is not worth a word."""
    built(Level.PORTABLE, environ, sources)
    begin, end = caplog.records
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert begin.message == f"compiling the CPU kernels for level portable with {tmp_path}/cxx: takes some seconds, once on this machine"
    assert re.fullmatch(r"compiled the CPU kernels in \d+\.\d s", end.message)
    built(Level.PORTABLE, environ, sources)
    assert len(caplog.records) == 2


def test_files_are_compiled_side_by_side(tmp_path: pathlib.Path, sources: pathlib.Path, environ: dict[str, str]) -> None:
    """Each compilation begins only when the other has: both open the same pipe."""
    os.mkfifo(tmp_path / "pipe")
    pipe = f"timeout 60 sh -c 'exec 3{{}}{tmp_path}/pipe' || exit 1"
    cases = f"*kernels.cpp*) {pipe.format('>')} ;; *draw.cpp*) {pipe.format('<')} ;;"
    script = tmp_path / "meeting"
    script.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\nexec c++ "$@"\n')
    script.chmod(0o755)
    assert built(Level.PORTABLE, {**environ, "CXX": str(script)}, sources).is_file()


def test_whatever_shapes_the_result_compiles_anew(tmp_path: pathlib.Path, sources: pathlib.Path, environ: dict[str, str]) -> None:
    paths = {built(Level.PORTABLE, environ, sources)}
    (sources / "other.h").write_text("// changed\n")
    paths.add(built(Level.PORTABLE, environ, sources))
    paths.add(built(Level.PORTABLE, {**environ, "CXX": f"{environ['CXX']} -g"}, sources))
    if Level.AVX2 in supported_levels():
        paths.add(built(Level.AVX2, environ, sources))
        assert compilations(tmp_path) == len(paths) == 4
    else:
        assert compilations(tmp_path) == len(paths) == 3


def test_a_prebuilt_library_is_of_the_sources_and_whole(
    tmp_path: pathlib.Path, sources: pathlib.Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    shipped = tmp_path / "prebuilt"
    assert find_prebuilt(Level.PORTABLE, sources, shipped) is None
    made = prebuild(Level.PORTABLE, environ, sources, shipped)
    assert find_prebuilt(Level.PORTABLE, sources, shipped) == made == next(shipped.iterdir())
    assert find_prebuilt(Level.AVX2, sources, shipped) is None
    caplog.clear()
    whole = made.read_bytes()
    made.write_bytes(whole[:-100])
    assert find_prebuilt(Level.PORTABLE, sources, shipped) is None
    assert [record.message for record in caplog.records] == [f"the prebuilt CPU kernels {made} are damaged"]
    made.write_bytes(whole)
    (sources / "other.h").write_text("// changed\n")
    assert find_prebuilt(Level.PORTABLE, sources, shipped) is None
    assert len(caplog.records) == 1


def test_without_a_compiler_there_is_a_reason(tmp_path: pathlib.Path, sources: pathlib.Path, environ: dict[str, str]) -> None:
    without = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(KernelsUnavailableError, match="there is no C\\+\\+ compiler: none of c\\+\\+, g\\+\\+, clang\\+\\+"):
        built(Level.PORTABLE, without, sources)
    with pytest.raises(KernelsUnavailableError, match="'nothing-like-it', does not exist"):
        built(Level.PORTABLE, {**without, "CXX": "nothing-like-it"}, sources)


def test_a_failing_compiler_gives_one_line(tmp_path: pathlib.Path, sources: pathlib.Path, environ: dict[str, str]) -> None:
    (sources / "kernels.cpp").write_text("#error told so\nint x = ;\n")
    with pytest.raises(KernelsUnavailableError, match="told so") as caught:
        built(Level.PORTABLE, environ, sources)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "aengine").iterdir()) == []


def test_an_unwritable_cache_costs_a_compilation_each_time(tmp_path: pathlib.Path, sources: pathlib.Path, environ: dict[str, str]) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    for _ in range(2):
        with build(Level.PORTABLE, environ, sources) as path:
            assert path.is_file()
        assert not path.parent.exists()
    assert compilations(tmp_path) == 2


@pytest.mark.slow
def test_two_processes_at_once(tmp_path: pathlib.Path, sources: pathlib.Path, environ: dict[str, str]) -> None:
    """Both get a whole library, whoever is first. What takes time is told on stderr, though no logging was configured."""
    code = textwrap.dedent(f"""
        import ctypes, os, pathlib
        from aengine.kernels.cpu.compiler import build
        from aengine.kernels.cpu.compiler import Level
        with build(Level.PORTABLE, os.environ, pathlib.Path({str(sources)!r})) as path:
            assert ctypes.CDLL(str(path)).answer() == 42
        print(path)
    """)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **environ}, **pipes) for _ in range(2)]
    written = [process.communicate(timeout=HANG_SECONDS) for process in started]
    assert [process.returncode for process in started] == [0, 0], written
    assert len({paths for paths, _ in written}) == 1
    told = "".join(log for _, log in written)
    assert told.count("compiling the CPU kernels") == told.count("compiled the CPU kernels") == compilations(tmp_path) >= 1
    assert len(list((tmp_path / "cache" / "aengine").iterdir())) == 1


def test_the_level_of_the_environment() -> None:
    best, *_, least, _ = supported_levels()
    assert select_level({}) is best
    assert select_level({"AENGINE_CPU_LEVEL": least.value}) is least is Level.PORTABLE
    with pytest.raises(KernelsUnavailableError, match="AENGINE_CPU_LEVEL is torch"):
        select_level({"AENGINE_CPU_LEVEL": "torch"})
    with pytest.raises(ConfigError, match="'sse9' is not one of fused, portable, neon, neondot, neonbf16, avx2"):
        select_level({"AENGINE_CPU_LEVEL": "sse9"})
    impossible = next(level for level in Level if level not in supported_levels())
    with pytest.raises(ConfigError, match=f"'{impossible.value}' is not possible on this CPU; possible are {supported_levels()[0].value}"):
        select_level({"AENGINE_CPU_LEVEL": impossible.value})


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_amx_takes_the_permission_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiler, "_cpu_features", lambda: frozenset(feature for _, needed in compiler._REQUIREMENTS.values() for feature in needed)
    )
    assert select_level({}) is (Level.AMX if compiler._may_use_tiles() else Level.AVX512_BF16)
    assert (Level.AMX in supported_levels()) == compiler._may_use_tiles()


def test_a_prebuilt_library_that_does_not_work_is_not_used(
    tmp_path: pathlib.Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels are compiled instead. Without a compiler that is the error."""
    source, made, shipped = tmp_path / "old.cpp", tmp_path / "old.so", tmp_path / "prebuilt"
    shipped.mkdir()
    source.write_text('extern "C" const char* aengine_level() { return "portable"; }\n')
    subprocess.run(["c++", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    shutil.copy(made, shipped / prebuilt_name(Level.PORTABLE, SOURCES, made.read_bytes()))
    kernels = load_level(Level.PORTABLE, prebuilt=shipped)
    assert not kernels.prebuilt
    assert "the prebuilt CPU kernels cannot be used: the compiled kernels are of another version" in caplog.text
    with pytest.raises(KernelsUnavailableError, match="there is no C"):
        load_level(Level.PORTABLE, {"PATH": str(tmp_path)}, shipped)


def test_a_prebuilt_library_is_loaded_without_a_compiler(tmp_path: pathlib.Path) -> None:
    with build(Level.PORTABLE, os.environ) as path:
        shutil.copy(path, tmp_path / prebuilt_name(Level.PORTABLE, SOURCES, path.read_bytes()))
    assert load_level(Level.PORTABLE, {"PATH": str(tmp_path)}, tmp_path).prebuilt


def test_torch_and_the_kernels_share_one_openmp(kernels) -> None:
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}
    assert len(runtimes) == 1, runtimes


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries that nothing runs are not optimised."""
    monkeypatch.setattr(compiler, "_FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in compiler._FLAGS))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_amx_compiles(tmp_path: pathlib.Path, quickly: None) -> None:
    assert prebuild(Level.AMX, os.environ, directory=tmp_path).is_file()


CROSS_COMPILER = "aarch64-linux-gnu-g++"


@pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"needs {CROSS_COMPILER}")
@pytest.mark.parametrize(
    "level", [Level.NEON, pytest.param(Level.NEON_DOT, marks=pytest.mark.slow), pytest.param(Level.NEON_BF16, marks=pytest.mark.slow)]
)
def test_neon_compiles(level: Level, tmp_path: pathlib.Path, quickly: None) -> None:
    made = prebuild(level, {**os.environ, "CXX": CROSS_COMPILER}, directory=tmp_path)
    assert made.read_bytes()[18:20] == (183).to_bytes(2, "little"), "e_machine of the ELF header is EM_AARCH64"


@pytest.mark.parametrize("swapped", [False, True])
def test_fields_that_changed_places_are_noticed(swapped: bool, tmp_path: pathlib.Path) -> None:
    """Two of one type, so that no size changes."""
    headers = tmp_path / "src"
    shutil.copytree(SOURCES, headers)
    if swapped:
        abi = (headers / "abi.h").read_text()
        fields = "  i64 rows;\n  i64 stride;\n};"
        assert fields in abi
        (headers / "abi.h").write_text(abi.replace(fields, "  i64 stride;\n  i64 rows;\n};"))
    bodies = {"aengine_level": 'return "portable";', "aengine_layout_names": "return aengine::LAYOUT_NAMES;"}
    bodies["aengine_layout_places"] = "return aengine::LAYOUT_PLACES;"
    functions = [f"const void* {name}() {{ {bodies.get(name, 'return nullptr;')} }}" for name in _SIGNATURES]
    (tmp_path / "stubs.cpp").write_text("\n".join(['#include "src/layout.h"', 'extern "C" {', *functions, "}"]))
    subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", f"{tmp_path}/stubs.cpp", "-o", f"{tmp_path}/stubs.so"], check=True)
    library = ctypes.CDLL(str(tmp_path / "stubs.so"))
    if swapped:
        with pytest.raises(KernelsUnavailableError, match=r"other places of Part\.rows, Part\.stride\)"):
            CpuKernels(library, Level.PORTABLE)
    else:
        CpuKernels(library, Level.PORTABLE)


def test_the_header_of_the_layout_is_up_to_date() -> None:
    assert (SOURCES / "layout.h").read_text() == layout_header(), "run tools/generate.py"


def test_the_cache_is_filled_before_anything_is_installed(tmp_path: pathlib.Path) -> None:
    """By the interpreter alone, without packages; a start finds it, and a second call does nothing."""
    script = tmp_path / "cxx"
    script.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && touch "$2"; shift; done\n')
    script.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path), "AENGINE_CPU_LEVEL": "portable", "CXX": str(script)}
    code = "import os, sys; sys.path.insert(0, '.'); from tools.prebuild import fill_cache; print(fill_cache(os.environ))"
    command = [sys.executable, "-I", "-S", "-c", code]
    first, again = (subprocess.run(command, env=environ, check=True, capture_output=True, text=True) for _ in range(2))
    assert "compiled the CPU kernels in" in first.stderr
    assert again.stderr == ""
    assert first.stdout == again.stdout
    with build(Level.PORTABLE, environ) as path:
        assert first.stdout == f"CPU kernels of level portable: {path}\n"


def test_without_a_compiler_nothing_is_compiled(tmp_path: pathlib.Path) -> None:
    assert fill_cache({"CXX": str(tmp_path / "none"), "AENGINE_CPU_LEVEL": "portable", "XDG_CACHE_HOME": str(tmp_path)}).startswith(
        "no CPU kernels are compiled: "
    )
