"""`tools/gpu.sh`, with a python that pretends: which commands it runs, what it keeps, and that a failure is told at the end."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from aengine.attention.flashinfer_library import check_version
from aengine.bench.cli import build_parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case $* in
    *is_available*) exit {cuda} ;;
    *get_device_name*) echo some-gpu ;;
    *) echo "$PYTHONPATH|$*"; case $* in *{failing}*) exit 3 ;; esac ;;
esac
"""


def run_script(path: Path, *parts: str, cuda: bool = True, failing: str = "nothing") -> subprocess.CompletedProcess[str]:
    python = path / "python"
    python.write_text(PYTHON.format(cuda=0 if cuda else 1, failing=failing))
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "PYTHONPATH": "/given"}
    return subprocess.run([ROOT / "tools/gpu.sh", path / "out", *parts], env=env, capture_output=True, text=True, timeout=60)


def commands(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    return [shlex.split(line.partition("|")[2]) for line in done.stdout.splitlines() if line.startswith(f"{ROOT}:/given|")]


def test_all_parts(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stderr
    tests, *benchmarks = commands(done)
    assert tests[:4] == ["-m", "pytest", "-m", "gpu"]
    assert tests[-1] == "tests"
    parsed = [build_parser().parse_args(words[2:]) for words in benchmarks]  # each is one that aengine-bench takes
    assert [words[:2] for words in benchmarks] == [["-m", "aengine.bench.cli"]] * 3
    assert parsed[0].shape == ["qwen3-0.6b", "qwen3-8b", "llama-3.1-8b"]
    assert [(options.shape, options.workload, options.device) for options in parsed[1:]] == [
        ("qwen3-0.6b", "nano", "cuda"),
        ("qwen3-8b", "nano", "cuda"),
    ]
    assert {options.json.parent for options in parsed} == {tmp_path / "out"}
    kept = {path.name for path in (tmp_path / "out").iterdir()}
    assert kept == {f"some-gpu-{name}.txt" for name in ("tests", "step", "offline-qwen3-0.6b", "offline-qwen3-8b")}
    assert "pytest" in (tmp_path / "out" / "some-gpu-tests.txt").read_text()


def test_a_failure_does_not_keep_the_rest_from_running(tmp_path: Path) -> None:
    done = run_script(tmp_path, failing="durations")
    assert done.returncode == 1
    assert len(commands(done)) == 4
    assert done.stderr.splitlines()[-1] == "failed: tests"


def test_some_parts(tmp_path: Path) -> None:
    assert [words[3:5] for words in commands(run_script(tmp_path, "step"))] == [["--device", "cuda"]]
    done = run_script(tmp_path, "steps")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no part steps; there are tests, step and offline" in done.stderr


def test_without_a_device(tmp_path: Path) -> None:
    done = run_script(tmp_path, cuda=False)
    assert done.returncode == 1
    assert "torch finds no CUDA device" in done.stderr
    assert commands(done) == []


def test_make_gpu(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST_ARGS"))}
    command = ["make", "--dry-run", "--always-make", "gpu", "RESULTS=there"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    *installing, last = done.stdout.splitlines()
    assert last == "PYTHON=.venv/bin/python tools/gpu.sh there"
    assert [line for line in installing if "-c constraints.txt" in line and "-e '.[dev,cuda]'" in line]


def test_every_dependency_has_a_version_that_was_tested() -> None:
    """Of each extra, too: an install with the constraints takes the same packages everywhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {Requirement(one).name for group in (project["dependencies"], *extras.values()) for one in group} - {"aengine"}
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pinned = {one.name: one.specifier for one in map(Requirement, lines)}
    assert wanted - pinned.keys() == set()
    (flashinfer,) = (Requirement(one) for one in extras["cuda"])
    (version,) = pinned["flashinfer-python"]
    assert flashinfer.specifier.contains(version.version)
    check_version(version.version)
    assert {Requirement(one).name for one in extras["dev"]} & {"flashinfer-python"} == set(), "a CPU does without it"
