"""What `make wheels` left in dist/, where it was run; and that its archives do not depend on when they were made."""

from __future__ import annotations

import io
import os
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from aengine import __version__
from aengine.kernels.cpu.compiler import levels_of, prebuilt_name
from tools.wheels.build import KERNELS, MACHINES, WITHOUT, core_project, make_reproducible

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()


def bare_environment(path: Path, *requirements: str) -> str:
    """The python of a new environment with nothing but these."""
    subprocess.run([sys.executable, "-m", "venv", *([] if requirements else ["--without-pip"]), str(path)], check=True)
    if requirements:
        subprocess.run([path / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements], check=True)
    return str(path / "bin" / "python")


def test_what_builds_needs_nothing_that_is_not_listed(tmp_path: Path) -> None:
    """The tools of wheels and images run before anything is installed."""
    python = bare_environment(tmp_path / "bare")
    subprocess.run([python, "-c", "import tools.wheels.build, tools.wheels.check, tools.prebuild"], cwd=ROOT, check=True, env={})


@pytest.mark.slow
@pytest.mark.skipif("CI" in os.environ, reason="compiles every level of the kernels, which takes minutes; run by `make test-slow`")
def test_wheels_are_built_in_a_bare_environment(tmp_path: Path) -> None:
    """The sdist and the wheel of this machine, from what is committed."""
    machine = platform.machine()
    if machine not in MACHINES:
        pytest.skip(f"there are no wheels for {machine}")
    python = bare_environment(tmp_path / "bare", "-r", str(ROOT / "tools/wheels/requirements.txt"))
    subprocess.run([python, "-m", "tools.wheels.build", str(tmp_path / "dist"), machine], cwd=ROOT, check=True)
    names = sorted(path.name for path in (tmp_path / "dist").iterdir())
    tag = f"{__version__}-py3-none-manylinux_2_28_{machine}.whl"
    assert names == [f"aengine_llm-{tag}", f"aengine_llm-{__version__}.tar.gz", f"aengine_llm_core-{tag}"]


def test_the_core_depends_on_all_but_torch() -> None:
    of_all, of_core = (tomllib.loads(text)["project"] for text in (PROJECT, core_project(PROJECT)))
    left = [one for one in of_all["dependencies"] if one not in of_core["dependencies"]]
    assert sorted(re.split(r"\W", one)[0] for one in left) == sorted(WITHOUT)
    assert of_core["optional-dependencies"]["torch"] == left
    assert of_core["name"] == "aengine-llm-core"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_has_the_kernels_of_its_machine(machine: str, tmp_path: Path) -> None:
    paths = list((ROOT / "dist").glob(f"aengine_llm-*_{machine}.whl"))
    if not paths:
        pytest.skip("needs `make wheels`")
    (path,) = paths
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path, [name for name in wheel.namelist() if name.startswith(str(KERNELS)) or ".dist-info/" in name])
    (metadata,) = tmp_path.glob("*.dist-info")
    assert f"\nTag: py3-none-manylinux_2_28_{machine}\n" in (metadata / "WHEEL").read_text()
    assert "\naengine = aengine.__main__:main\n" in (metadata / "entry_points.txt").read_text()
    shipped, sources = tmp_path / KERNELS / "prebuilt", tmp_path / KERNELS / "src"
    level_of = {level.value: level for level in levels_of(machine)}
    assert sorted(name.name.split("-")[1] for name in shipped.iterdir()) == sorted(level_of)
    for library in shipped.iterdir():
        assert library.name == prebuilt_name(level_of[library.name.split("-")[1]], sources, library.read_bytes())


def test_an_archive_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    made = []
    for name, seconds in (("one", 1_000_000_000), ("two", 1_100_000_000)):
        path = tmp_path / f"{name}.tar.gz"
        with tarfile.open(path, "w:gz") as files:
            for member in ("b", "a") if name == "one" else ("a", "b"):
                entry = tarfile.TarInfo(member)
                entry.size, entry.mtime, entry.uid, entry.uname, entry.mode = (
                    3,
                    seconds,
                    os.getpid(),
                    name,
                    0o664 if name == "one" else 0o600,
                )
                files.addfile(entry, io.BytesIO(b"abc"))
        make_reproducible(path, 1_700_000_000)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(tmp_path / "one.tar.gz") as files:
        assert [(member.name, member.mtime) for member in files] == [("a", 1_700_000_000), ("b", 1_700_000_000)]
