"""`pytest -m gpu` collects every GPU test on a host that lacks the packages of a development environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from attention_backends import REQUIRE, why_missing
from hang_guard import HANG_SECONDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def collect(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-p", "gpu_host", "--collect-only", "-q", "-rs", *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        command, cwd=ROOT, env={**env, "PYTHONPATH": str(ROOT / "tests")}, capture_output=True, text=True, timeout=HANG_SECONDS
    )


def test_every_gpu_test_is_collected_where_packages_are_missing() -> None:
    marks = re.compile(r"pytest\.mark\.gpu|backend_(marks|param)\(")
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if marks.search(path.read_text())}
    done = collect("-m", "gpu", "tests/gpu", "tests/cache", *sorted(files))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    needs_grammars = "tests/sampling/test_grammar.py"  # nothing to run there without llguidance
    assert files - {needs_grammars, str(Path(__file__).relative_to(ROOT))} <= collected
    assert {f"tests/gpu/test_gpu_{name}.py" for name in ("engine", "families", "kv_content")} <= collected
    assert "needs hypothesis, which is not installed" in done.stdout


FAILING_BACKENDS = """
import torch
torch.cuda.is_available = lambda: True
from aengine.api.errors import ConfigError
from aengine.runner import runner as model_runner

def refuse(self, *given):
    raise ConfigError.of("attention_backend", "'flashinfer' is not possible here: nvcc failed")

model_runner.ModelRunner.__init__ = refuse
"""


def run_without_backends(tmp_path: Path, required: str) -> str:
    """The last line of what pytest prints, with a device that is pretended, no FlashInfer, and every runner refused."""
    (tmp_path / "failing_backends.py").write_text(FAILING_BACKENDS)
    files = ("tests/runner/test_graphs_gpu.py", "tests/attention/test_flashinfer_gpu.py")
    command = [sys.executable, "-m", "pytest", "-p", "failing_backends", "-m", "gpu", "-q", "--tb=no", "-p", "no:cacheprovider"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {REQUIRE: required}
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env={**env, "PYTHONPATH": path}, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 1, done.stdout[-2000:]
    return done.stdout.splitlines()[-1]


def test_a_backend_that_is_required_is_never_skipped(tmp_path: Path) -> None:
    last = run_without_backends(tmp_path, "flashinfer,triton")
    assert "passed" not in last
    assert "skipped" not in last


def test_a_backend_that_is_not_installed_is_skipped_and_one_that_fails_is_not(tmp_path: Path) -> None:
    last = run_without_backends(tmp_path, "")
    assert "passed" not in last
    assert re.match(r"\d+ failed, \d+ skipped", last)


def test_why_a_backend_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"triton"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    assert why_missing("triton", {}) is why_missing("torch_native", {}) is None
    assert why_missing("flashinfer", {REQUIRE: "triton"}) == f"flashinfer is not installed, and {REQUIRE} does not name flashinfer"
    assert why_missing("flashinfer", {REQUIRE: "triton,flashinfer"}) is None


def test_other_runs_do_not_skip_what_they_cannot_import() -> None:
    done = collect("tests/cache")
    assert done.returncode == 2
    assert "No module named 'hypothesis'" in done.stdout
