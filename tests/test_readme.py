"""What the README shows is run, and its figures are those of docs/performance.md. (Links and lines: test_docs.py.)

`make demo` and `make test` build an environment and run a command in it. That command is read from the Makefile and compared; the
demo's is run, in this process instead of a fresh environment, and the suite's is running right now.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.readme import run_all, shown_commands

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def made_by(target: str) -> list[str]:
    """The last command of a make target."""
    return all_made_by(target)[-1]


def all_made_by(target: str) -> list[list[str]]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST_ARGS"))}  # `make test` sets them
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_make_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert made_by("demo") == [".venv/bin/python", "examples/demo.py"]
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    prompt = runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")["PROMPT"]  # tests/examples runs a process of it
    told = capsys.readouterr().out
    shown = README.partition("$ make demo\n")[2].partition("$ make test")[0]
    for text in (shown, told):  # what follows may differ where a device rounds otherwise
        assert text.startswith(prompt)
    shape, shape_shown = (re.sub(r"[\d.]+", "0", text.splitlines()[-1]) for text in (told, shown))
    assert shape == shape_shown


def test_make_demo_grpc() -> None:
    """tests/examples runs it."""
    assert "`make demo-grpc`" in README
    assert made_by("demo-grpc") == [".venv/bin/python", "examples/demo_grpc.py"]


def test_make_test() -> None:
    workers = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--max-worker-restart", "0"]
    assert made_by("test") == [".venv/bin/python", "-m", "pytest", *workers, "-m", "not slow"]
    assert made_by("test-slow") == [".venv/bin/python", "-m", "pytest", *workers, "-m", "slow"]


def test_python_blocks_are_the_examples() -> None:
    """tests/examples runs them."""
    assert blocks("python") == [(ROOT / "examples" / "stream.py").read_text(encoding="utf-8")]


@pytest.mark.slow
def test_programs_and_servers() -> None:
    """All but the targets of make, with the programs of this environment; CI runs all in the one that `make demo` leaves."""
    if not (BIN / "aengine-serve").exists():
        pytest.skip("aengine is not installed in this environment")
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    run_all([shown for shown in shown_commands(README) if not shown.command.startswith("make ")], BIN)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("$ false\n", "false exits with 1"),
        ("$ echo 1 token\n[7 tokens]\n", "ends with '0 token', and not as README shows"),
        ("$ .venv/bin/aengine-serve --port 8000 --max-num-seqs 0\n", "does not listen"),
    ],
)
def test_what_does_not_do_as_it_shows_is_found(block: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(reason)):
        run_all(shown_commands(f"```console\n{block}```\n"), BIN)


def rows(text: str, start: str) -> dict[str, list[str]]:
    """Label -> cells, of the first table after `start`."""
    table = re.search(r"(?:^\|.*\n)+", text.partition(start)[2], re.MULTILINE)
    assert table is not None
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines())
    return {label: values for label, *values in cells if not label.startswith("---")}


def test_the_figures_are_those_of_performance_md() -> None:
    """Each row is a part of the row there, in the same order."""
    shown = rows(README, "## What it is fast at")
    measured = rows((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), "## Against vLLM")
    for label, values in shown.items():
        left = iter(measured[label])
        assert all(value in left for value in values), label


def test_the_picture_is_that_of_the_results() -> None:
    subprocess.run([sys.executable, "tools/step_picture.py", "--check"], cwd=ROOT, check=True)
    assert "](docs/step-times.svg)" in README


@pytest.mark.parametrize("path", ["docs/sampling.md", "aengine/api/params.py", "protos/aengine/v1/sampling.proto"])
def test_where_equal_tokens_are_promised_the_exceptions_are_named(path: str) -> None:
    """Only our CPU kernels give equal bits in any company (tests/runner/test_greedy.py)."""
    words = " ".join(re.sub(r"^\s*//", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE).split())
    promises = re.findall("same tokens whatever runs beside it(.{60})", words)
    assert promises
    assert all("on CUDA and in plain torch" in promise.replace("On", "on") for promise in promises)
