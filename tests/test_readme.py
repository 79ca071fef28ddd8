"""What the README shows is run, and its figures are those of docs/performance.md. (Links and lines: test_docs.py.)

`make demo` and `make test` build an environment and run a command in it. That command is read from the Makefile and compared; the
demo's is run, in this process instead of a fresh environment, and the suite's is running right now.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]


def command(part: str) -> list[str]:
    """The command of the README that contains `part`, with this interpreter's environment in place of .venv."""
    found = [line for line in commands() if part in line]
    assert len(found) == 1, found
    return [word.replace(".venv/bin", str(BIN)) if word.startswith(".venv/bin/") else word for word in shlex.split(found[0])]


def made_by(target: str) -> list[str]:
    """The last command of a make target."""
    return all_made_by(target)[-1]


def all_made_by(target: str) -> list[list[str]]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST_ARGS"))}  # `make test` sets them
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_every_command_is_one_that_is_run_here() -> None:
    assert [line.split(" ")[0] + " " + line.split(" ")[1] for line in commands()] == [
        "make demo",
        "make test",
        ".venv/bin/aengine-grpc --port",
        ".venv/bin/python examples/grpc_client.py",
        ".venv/bin/aengine-serve --port",
        "curl http://127.0.0.1:8000/v1/completions",
    ]


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
    parts = [words for words in all_made_by("test") if "pytest" in words]
    assert [words[:5] for words in parts] == [[".venv/bin/python", "-m", "pytest", "-m", "not slow"]] * 3
    named = [word for words in parts for word in words if word.startswith("tests/")]
    assert sorted(named) == sorted(word.removeprefix("--ignore=") for words in parts for word in words if word.startswith("--ignore="))
    assert made_by("test-slow") == [".venv/bin/python", "-m", "pytest", "-m", "slow"]


def test_python_blocks_are_the_examples() -> None:
    """tests/examples runs them."""
    assert blocks("python") == [(ROOT / "examples" / "stream.py").read_text(encoding="utf-8")]


@contextmanager
def server(program: str, port: int) -> Iterator[str]:
    """A server of the README on a free port; yields its address."""
    words = command(program)
    assert words[1:] == ["--port", str(port)]
    if not Path(words[0]).exists():
        pytest.skip("aengine is not installed in this environment")
    process = subprocess.Popen([words[0], "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        log = ""
        for line in process.stderr:
            log += line
            if found := re.search(rf"INFO {program} listening on (\S+) \(model demo\)", line):
                yield found[1]
                break
        else:
            pytest.fail(log)
    finally:
        process.terminate()
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0, rest


def test_server_and_client() -> None:
    words = command("grpc_client.py")
    assert words[-1] == "127.0.0.1:50051"
    with server("aengine-grpc", 50051) as address:
        done = subprocess.run([*words[:-1], address], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It is a truth universally")
    assert re.search(r"\n\[[A-Z_]+, \d+ tokens in \d+ ms\]\n$", done.stdout)


def test_http_server_and_curl() -> None:
    words = command("curl")
    if shutil.which(words[0]) is None:
        pytest.skip("there is no curl")
    with server("aengine-serve", 8000) as address:
        words = [word.replace("http://127.0.0.1:8000", address) for word in words]
        done = subprocess.run([*words, "--silent", "--show-error"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["text"].strip(), done.stderr


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


@pytest.mark.parametrize("path", ["docs/sampling.md", "aengine/params.py", "protos/aengine/v1/sampling.proto"])
def test_where_equal_tokens_are_promised_the_exceptions_are_named(path: str) -> None:
    """Only our CPU kernels give equal bits in any company (tests/runner/test_greedy.py)."""
    words = " ".join(re.sub(r"^\s*//", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE).split())
    promises = re.findall("same tokens whatever runs beside it(.{60})", words)
    assert promises
    assert all("on CUDA and in plain torch" in promise.replace("On", "on") for promise in promises)
