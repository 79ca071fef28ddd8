"""Builds the sdist and the wheels of the commit that is checked out: python -m tools.wheels.build [DIRECTORY [MACHINE]...]

A wheel is of one machine and has its CPU kernels of all levels, compiled with zig's clang against the glibc of the wheel's tag. They are
loaded with ctypes and know nothing of Python, so that a wheel is for every version of it. The same commit gives the same bytes.

Beside each there is one of `aengine-llm-core`: the same files, which do not depend on `WITHOUT`.
"""

from __future__ import annotations

import gzip
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from aengine.kernels.cpu.compiler import levels_of
from tools.prebuild import prebuild

WITHOUT = ("torch", "transformers")
"""What the CPU path does without."""
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)
KERNELS = pathlib.Path("aengine/kernels/cpu")


def build_all(directory: pathlib.Path, machines: Sequence[str] = MACHINES) -> list[pathlib.Path]:
    """Writes an sdist and a wheel for each of the machines to the directory; returns their paths."""
    changed = _run("git", "status", "--porcelain").strip()
    if changed:
        print(f"These changes are not committed, and not in the wheels:\n{changed}", file=sys.stderr)
    epoch = _run("git", "log", "-1", "--format=%ct").strip()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        work = pathlib.Path(name)
        environ = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
        sources = _unpack(_run("git", "rev-parse", "HEAD").strip(), work / "sources")
        made = _build(sources, directory, environ, "--sdist")
        make_reproducible(made, int(epoch))
        return [made, *(each for machine in machines for each in _build_wheels(sources, work / machine, machine, directory, environ))]


def _unpack(commit: str, target: pathlib.Path) -> pathlib.Path:
    archive = subprocess.run(["git", "archive", commit], check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(target, filter="data")
    return target


def core_project(text: str) -> str:
    """The pyproject.toml of the distribution that does not depend on `WITHOUT`, which are its extra `torch`."""
    taken = [line for line in text.splitlines() if re.match(rf'    "({"|".join(WITHOUT)})\W', line)]
    if len(taken) != len(WITHOUT):
        raise RuntimeError(f"pyproject.toml does not name {WITHOUT} once each, on lines of their own")
    for line in taken:
        text = text.replace(f"{line}\n", "")
    extra = f"torch = [{' '.join(line.strip() for line in taken)}]"
    text = text.replace("\n[project.optional-dependencies]\n", f"\n[project.optional-dependencies]\n{extra}\n")
    return text.replace("aengine-llm[", "aengine-llm-core[").replace('\nname = "aengine-llm"', '\nname = "aengine-llm-core"')


def _build_wheels(
    sources: pathlib.Path, tree: pathlib.Path, machine: str, directory: pathlib.Path, environ: dict[str, str]
) -> Iterator[pathlib.Path]:
    shutil.copytree(sources, tree)
    exports = tree.with_suffix(".exports")
    exports.write_text("{ global: aengine_*; local: *; };\n")  # nothing of the C++ library, which is linked statically
    options = f"-target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]} -g0 -s -Wl,--version-script={exports}"
    caches = " ".join(f"ZIG_{name}_CACHE_DIR={tree.parent}/zig" for name in ("GLOBAL", "LOCAL"))
    compiler = {**environ, "CXX": f"env {caches} {sys.executable} {pathlib.Path(__file__).with_name('zig.py')} c++ {options}"}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # one level rarely keeps two cores busy
        list(pool.map(lambda level: prebuild(level, compiler, tree / KERNELS / "src", tree / KERNELS / "prebuilt"), levels_of(machine)))
    project = tree / "pyproject.toml"
    for text in (project.read_text(), core_project(project.read_text())):
        project.write_text(text)
        for left in ("build", "aengine_llm.egg-info"):
            shutil.rmtree(tree / left, ignore_errors=True)
        yield _checked(_build(tree, directory, environ, "--wheel", f"-C--build-option=--plat-name={_tag(machine)}"), machine)


def _tag(machine: str) -> str:
    return f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"


def _checked(made: pathlib.Path, machine: str) -> pathlib.Path:
    # By the versions of the symbols and the names of the libraries that the kernels need.
    told = _run(sys.executable, "-m", "auditwheel", "show", str(made))
    found = re.search(r'platform tag:\s+"manylinux_(\d+)_(\d+)_(\w+)"', told)
    if found is None or (int(found[1]), int(found[2])) > GLIBC or found[3] != machine:
        raise RuntimeError(f"the tag of {made.name} promises too much: {told}")
    return made


def _build(tree: pathlib.Path, directory: pathlib.Path, environ: dict[str, str], *options: str) -> pathlib.Path:
    with tempfile.TemporaryDirectory(dir=directory) as made:
        _run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", made, str(tree), environ=environ)
        (path,) = pathlib.Path(made).iterdir()
        return path.replace(directory / path.name)


def make_reproducible(sdist: pathlib.Path, epoch: int) -> None:
    """Gives the files of an archive the time of the commit, and no user."""
    with tarfile.open(sdist) as files:
        members = [(member, files.extractfile(member)) for member in sorted(files.getmembers(), key=lambda member: member.name)]
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out:
            for member, content in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname, member.pax_headers = epoch, 0, 0, "", "", {}
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                out.addfile(member, content)
    sdist.write_bytes(gzip.compress(buffer.getvalue(), mtime=epoch))


def _run(*command: str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    wanted = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    for made in build_all(wanted, sys.argv[2:] or MACHINES):
        print(f"{made}  {made.stat().st_size / 1e6:.1f} MB")
