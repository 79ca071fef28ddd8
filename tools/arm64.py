"""Makes a Python of 64-bit ARM that QEMU runs, with what the tests need: python -m tools.arm64 FOLDER

Needs Debian's apt-get (as root, to add the architecture), `qemu-aarch64-static` and `aarch64-linux-gnu-g++`. FOLDER/python is then a
program like any Python: FOLDER/python -m pytest runs tests. The kernels of all its levels are compiled into the package
(`tools/prebuild.py`), since compilers that a program starts in QEMU may hang; call this again when their sources have changed.
QEMU_CPU names another CPU than QEMU's most able one, as `cortex-a72` (no int8 dot products) or `neoverse-n1` (these, and no
bfloat16).
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

from packaging.requirements import Requirement

from aengine.kernels.cpu.compiler import find_prebuilt, levels_of
from tools.prebuild import prebuild

ROOT = pathlib.Path(__file__).parent.parent
PYTHON = "3.11"
TORCH = "torch==2.10.0"  # later releases for ARM in the registry need CUDA's libraries
PROGRAMS = ("qemu-aarch64-static", "aarch64-linux-gnu-g++")
_DEBIAN = (
    *(
        "libc6",
        "libgcc-s1",
        "libstdc++6",
        "zlib1g",
        "libexpat1",
        "libbz2-1.0",
        "liblzma5",
        "libffi8",
        "libssl3",
        "libsqlite3-0",
        "libuuid1",
    ),
    *("libcrypt1", "libncursesw6", "libtinfo6", "libreadline8", "libdb5.3", "libtirpc3", "libnsl2", "libgssapi-krb5-2"),
    *(f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", f"python{PYTHON}"),
)
_PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in (17, 27, 28, 31, 34)), "any")
# Of the constraints: what is imported by streams, servers' replay and the tests of kernels and runner.
_PACKAGES = (
    *("numpy", "ml-dtypes", "tokenizers", "safetensors", "transformers", "anyio", "trio", "llguidance", "jinja2", "tqdm", "pillow", "gguf"),
    *("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status", "protobuf", "prometheus-client"),
    *("starlette", "python-multipart", "uvicorn", "httptools", "rich", "prompt-toolkit", "pytest", "pytest-timeout", "hypothesis"),
)
_THEIRS = (  # what those need
    *("markupsafe", "iniconfig", "pluggy", "packaging", "pygments", "sniffio", "idna", "typing-extensions", "huggingface-hub", "filelock"),
    *("pyyaml", "regex", "fsspec", "sympy", "networkx", "mpmath", "sortedcontainers", "attrs", "outcome", "h11", "click", "wcwidth"),
    *("markdown-it-py", "mdurl", "googleapis-common-protos", "httpx", "httpcore", "certifi", "requests", "urllib3", "charset-normalizer"),
    *("hf-xet", "typer", "shellingham", "annotated-doc"),
)


def _pinned(names: tuple[str, ...]) -> list[str]:
    """The names with the versions of the constraints file, for this Python."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"python_version": PYTHON, "platform_machine": "aarch64"}):
                pinned[requirement.name.lower().replace("_", "-")] = f"{requirement.name}{requirement.specifier}"
    return [pinned.get(name, name) for name in names]


def _add_debian(folder: pathlib.Path) -> None:
    packages = folder.with_name("debs")
    packages.mkdir(parents=True, exist_ok=True)
    subprocess.run(["dpkg", "--add-architecture", "arm64"], check=True)
    try:
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        subprocess.run(["apt-get", "-qq", "download", *(f"{name}:arm64" for name in _DEBIAN)], cwd=packages, check=True)
    finally:
        subprocess.run(["dpkg", "--remove-architecture", "arm64"], check=True)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)
    shutil.rmtree(packages)


def _add_packages(folder: pathlib.Path) -> None:
    wheels = folder.with_name("wheels")
    options = [option for name in _PLATFORMS for option in ("--platform", name)]
    options += [option for name in (f"cp{PYTHON.replace('.', '')}", "abi3", "none") for option in ("--abi", name)]
    for name in [TORCH, *_pinned(_PACKAGES), *_pinned(_THEIRS)]:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
        subprocess.run([*command, "--implementation", "cp", *options, "--dest", wheels, name], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    shutil.rmtree(wheels)


def make(folder: pathlib.Path) -> pathlib.Path:
    """Compiles the kernels and fills the folder, unless that is done; returns the program. Raises FileNotFoundError without QEMU or the
    compiler."""
    for needed in PROGRAMS:
        if shutil.which(needed) is None:
            raise FileNotFoundError(f"{needed} is missing: apt-get install qemu-user-static g++-aarch64-linux-gnu")
    for level in levels_of("aarch64"):
        if level not in levels_of("x86_64") and find_prebuilt(level) is None:
            prebuild(level, {**os.environ, "CXX": PROGRAMS[1]})
    for part, fill in (("root", _add_debian), ("site", _add_packages)):
        if not (folder / part).exists():
            fill(folder / f"{part}-begun")
            (folder / f"{part}-begun").rename(folder / part)
    program = folder / "python"
    emulate = f'exec {PROGRAMS[0]} -cpu "${{QEMU_CPU:-max}}" -L "$here/root" "$here/root/usr/bin/python{PYTHON}" "$@"'
    settings = f'export PYTHONPATH="{ROOT}:$here/site" XDG_CACHE_HOME="$here/cache" CXX={PROGRAMS[1]}'
    program.write_text(f'#!/bin/sh\nhere=$(cd "$(dirname "$0")" && pwd)\n{settings}\n{emulate}\n')
    program.chmod(0o755)
    return program


if __name__ == "__main__":
    print(make(pathlib.Path(sys.argv[1]).resolve()))
