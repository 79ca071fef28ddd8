"""`make gpu` without a GPU: what it would run, that a part keeps to its limit and to what it wrote, and the screen at the end."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hang_guard import HANG_SECONDS
from packaging.requirements import Requirement

from aengine.attention.flashinfer.library import check_version
from aengine.bench.cli import build_parser
from aengine.bench.floor import Machine
from aengine.bench.report import write_json
from aengine.bench.step_cases import Case, KernelTime, KernelTimes
from aengine.bench.steps import LeftOut, MeasuredStep, ModelSteps, StepFigures
from tools.gpu import __main__ as command
from tools.gpu import modules, outcomes, prepare, running
from tools.gpu.expected import DEVICE, EXPECTED, surprises
from tools.gpu.facts import facts
from tools.gpu.flashinfer_folder import build_environment, prebuilt_folder, unpack
from tools.gpu.parts import CORE_TESTS, EVEN, GPU_TESTS, KEPT_FOR_SUMMARY, RAGGED, STAGE_SECONDS, STAGES, Part, all_parts
from tools.gpu.prepare import VERSIONS, write_archive
from tools.gpu.running import run
from tools.gpu.summary import PartResult, summary

pytestmark = pytest.mark.slow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FACTS = {"gpu": "Some GPU", "torch": "2.11.0"}
H100 = FACTS | {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.159.04", "torch": "2.11.0+cu130", "flashinfer": "0.6.18.post1"}


def parts(folder: Path = Path("/out")) -> list[Part]:
    return all_parts("python3", folder, "some-gpu", workers=8)


def test_figures_come_before_breadth_and_a_stage_ends_within_eight_minutes() -> None:
    found = parts()
    assert found[0].name == "step-triton", "which needs neither FlashInfer nor pytest"
    assert [stage for stage, _ in itertools.groupby(part.stage for part in found)] == list(STAGES)
    assert STAGE_SECONDS <= 480
    for stage in STAGES:
        members = [part for part in found if part.stage == stage]
        assert sum(part.limit for part in members) <= STAGE_SECONDS - KEPT_FOR_SUMMARY, stage
        assert len({part.figures for part in members}) == len(members) <= 7, "and a log: 8 files"
    assert {part.figures.parent for part in found} == {Path("/out")}


def test_benchmarks_are_what_the_command_takes() -> None:
    options = {}
    for part in parts():
        for words in part.commands:
            if not part.are_tests:
                assert words[:3] == ("python3", "-m", "aengine.bench.cli")
                options[part.name] = build_parser().parse_args([*words[3:], *part.alternative])
    assert {name for name, one in options.items() if "quantization" in one} == {"step-fp8", "step-70b-fp8"}
    for backend in ("flashinfer", "triton"):
        step = options[f"step-{backend}"]
        assert (step.shape, step.attention_backend, step.context) == (["qwen3-8b"], backend, 1024)
        assert (step.decode, step.prefill, step.kernels) == ((1, 32, 256), (1024, 8192), (1, 256))
        cases = {text: Case.parse(text) for text in step.case}
        assert cases[RAGGED].contexts.sum() == pytest.approx(cases[EVEN].contexts.sum(), rel=0.01)
        assert cases[RAGGED].num_rows == cases[EVEN].num_rows == 64
        assert any(case.top_p < 1 for case in cases.values())
        assert any(len(set(case.lengths)) > 1 for case in cases.values())
    assert all(one.eager is True and one.device == "cuda" for one in options.values())


def test_the_tests_are_all_that_need_a_gpu() -> None:
    for test in CORE_TESTS:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text()
    marks = re.compile(r"^[^#\"]*(pytest\.mark\.gpu|backend_(marks|param)\()", re.MULTILINE)
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if marks.search(path.read_text())}
    assert files
    assert {file for file in files if not file.startswith(GPU_TESTS)} == set()
    alone = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if "\n@pytest.mark.whole" in path.read_text()}
    assert alone
    assert all(file.startswith("tests/runner/") for file in alone)


def test_a_dry_run_tells_every_part_and_is_red(tmp_path: Path) -> None:
    """As a run without a device does. A device that is there is hidden."""
    env = {**_without_make(), "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    made = ["make", "--no-print-directory", "gpu", "DRY_RUN=1", f"PYTHON={sys.executable}", f"RESULTS={tmp_path / 'out'}"]
    done = subprocess.run(made, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 2  # of make
    assert "FAILED: torch finds no CUDA device" in done.stderr
    for part in parts():
        assert f"{part.name}: at most {part.limit:.0f} s, writes gpu-{part.name}.json" in done.stdout
    assert "step --shape qwen3-8b --seconds 0.6 --attention-backend flashinfer --decode 1,32,256" in done.stdout
    assert "all parts together at most 1410 s" in done.stdout
    assert not (tmp_path / "out").exists()


def _without_make() -> dict[str, str]:
    """The environment without what a `make` that runs these tests adds."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


def test_nothing_is_installed_where_python_has_torch_or_there_is_no_device() -> None:
    for python in (sys.executable, "/usr/bin/env python3"):
        made = ["make", "--dry-run", "--always-make", "gpu", f"PYTHON={python}", "RESULTS=there"]
        done = subprocess.run(made, cwd=ROOT, env=_without_make(), capture_output=True, text=True, check=True)
        if python == sys.executable or not Path("/dev/nvidia0").exists():
            assert done.stdout.splitlines() == [f"{python} -m tools.gpu there"]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of figures, for parts that a test makes up."""
    monkeypatch.setattr(command, "SCRATCH", tmp_path)
    monkeypatch.setattr(running, "GRACE", 0.5)
    return tmp_path / "out"


def run_parts(folder: Path, monkeypatch: pytest.MonkeyPatch, *made_up: Part) -> int:
    monkeypatch.setattr(command, "all_parts", lambda *given: list(made_up))
    monkeypatch.setattr(command, "_facts", lambda environment: FACTS)
    monkeypatch.setattr(command, "ROOT", folder.parent)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["tools.gpu", str(folder)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return command.main()


def shell(text: str) -> tuple[str, ...]:
    return ("sh", "-c", text)


def test_a_part_that_fails_leaves_the_others_and_makes_the_run_red(
    driver: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Part("first", "figures", 20, (shell("echo said; exit 3"),), driver / "first.json")
    second = Part("second", "figures", 20, (shell(f"echo '{{\"figures\": []}}' > {driver}/second.json"),), driver / "second.json")
    assert run_parts(driver, monkeypatch, first, second) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "said" in lines
    assert [line.split()[0] for line in lines if "FAILED, exit code 3" in line] == ["first"]
    assert [line.split()[0] for line in lines if line.endswith("s  ok")] == ["second"]
    assert lines[-1] == "FAILED: first"
    assert "said\n" in (driver / "some-gpu-log.txt").read_text()
    assert run_parts(driver, monkeypatch, second) == 0


def test_a_part_is_stopped_with_all_its_processes_and_keeps_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not heed the interrupt, and what it has started. Its time is over when it has said what it says."""
    printed: list[str] = []
    said = threading.Event()
    wait = subprocess.Popen.wait

    def time_is_over(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        if timeout != 100:
            return wait(process, timeout)
        said.wait()
        raise subprocess.TimeoutExpired(process.args, timeout)

    def write(line: str) -> None:
        printed.append(line)
        said.set()

    monkeypatch.setattr(running, "GRACE", 0.5)
    monkeypatch.setattr(subprocess.Popen, "wait", time_is_over)
    stubborn = f"trap '' INT ABRT; sleep 1000 & echo $! > {tmp_path}/child; echo kept; wait"
    done = run(shell(stubborn), 100.5, os.environ, write)
    assert done.timed_out
    assert done.code == -signal.SIGKILL
    assert printed == ["kept\n"]
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    while child.exists() and child.read_text().split()[2] != "Z":  # killed, and soon gone
        time.sleep(0.01)


def test_a_part_without_figures_runs_again(driver: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A recording that spoils the device ends the process, here while it writes; without graphs the same steps may run. The run is red all
    the same."""
    figures = driver / "step.json"
    killed = f'test "$1" = --eager || {{ printf "{{" > {figures}; exit 7; }}'
    script = f'{killed}; echo \'{{"figures": [{{"steps": [], "error": "of the shape"}}]}}\' > {figures}'
    part = Part("step", "figures", 30, (("sh", "-c", script, "sh"),), figures, ("--eager",))
    assert run_parts(driver, monkeypatch, part) == 1
    out = capsys.readouterr().out
    assert "FAILED, exit code 7, again with --eager: exit code 0" in out
    assert "step: of the shape" in out
    assert command._has_figures(figures) is False


TESTS = """
import pytest

def test_right():
    pass

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass

def test_wrong():
    assert 1 == 2
"""


def test_outcomes_of_tests_are_written_as_they_come(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    pytest_command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.gpu.outcomes", f"--rootdir={tmp_path}")
    part = Part("core", "figures", 60, ((*pytest_command, "--continue-on-collection-errors", str(tmp_path)),), driver / "core.json")
    assert run_parts(driver, monkeypatch, part) == 1
    found = {one["test"].rpartition("::")[2]: (one["outcome"], one["reason"]) for one in json.loads((driver / "core.json").read_text())}
    assert found["test_right"] == ("passed", "")
    assert found["test_skipped"] == ("skipped", "Skipped: not today")
    assert found["test_wrong"] == ("failed", "assert 1 == 2")
    assert found["test_broken.py"][0] == "failed"
    assert "no_such_module" in found["test_broken.py"][1]
    out = capsys.readouterr().out
    assert "1 passed" in out
    assert "  failed: test_some.py::test_wrong: assert 1 == 2" in out


def test_tests_that_are_all_skipped_are_red(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text("import pytest\n\n@pytest.mark.skip\ndef test_skipped():\n    pass\n")
    pytest_command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.gpu.outcomes", f"--rootdir={tmp_path}")
    part = Part("core", "figures", 60, ((*pytest_command, str(tmp_path)),), driver / "core.json")
    assert run_parts(driver, monkeypatch, part) == 1
    assert "FAILED, no test ran, 1 skipped" in capsys.readouterr().out


def test_modules_that_are_missing_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that cannot be built does not keep the others from it, and what is there is not built again."""
    built: list[str] = []

    def spec(name: str) -> SimpleNamespace:
        def build_and_load() -> None:
            if name == "norm":
                raise RuntimeError("nvcc failed")
            built.append(name)
            (tmp_path / "cache").mkdir(exist_ok=True)
            (tmp_path / "cache" / f"{name}.so").write_text(f"compiled {name}")

        return SimpleNamespace(name=name, build_and_load=build_and_load, jit_library_path=tmp_path / "cache" / f"{name}.so")

    monkeypatch.setattr(modules, "module_specs", lambda: {name: lambda name=name: spec(name) for name in ("rope", "norm", "silu")})
    folder = tmp_path / "aot"
    assert modules.build(folder, ["rope"]) == 0
    assert modules.build(folder, []) == 1
    assert built == ["rope", "silu"]
    assert {path.name: path.read_text() for path in folder.rglob("*") if path.is_file()} == {
        "rope.so": "compiled rope",
        "silu.so": "compiled silu",
    }
    assert "norm: RuntimeError: nvcc failed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no module attend; there are rope, norm, silu"):
        modules.build(folder, ["attend"])


def test_a_test_that_did_not_end_and_one_that_failed_twice(tmp_path: Path) -> None:
    path = tmp_path / "seen.jsonl"
    seen = [("a", "started"), ("b", "started"), ("a", "failed"), ("c", "started"), ("a", "failed"), ("c", "passed"), ("c", "failed")]
    path.write_text(
        "".join(json.dumps({"test": test, "outcome": found, "reason": str(at)}) + "\n" for at, (test, found) in enumerate(seen))
    )
    assert {one["test"]: (one["outcome"], one["reason"]) for one in outcomes.read(path)} == {
        "a": ("failed", "2"),  # the second time for the end of its worker
        "b": ("unfinished", "1"),
        "c": ("failed", "6"),  # torn down
    }
    assert outcomes.read(tmp_path / "none") == []


def test_a_worker_ends_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    worker = outcomes.FreshWorker()

    def test_ends(outcome: str) -> None:
        worker.pytest_runtest_logreport(SimpleNamespace(outcome=outcome))
        worker.pytest_runtest_logfinish()

    test_ends("failed")
    assert codes == []

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    test_ends("passed")  # asks the device only after a failure
    assert codes == []
    test_ends("failed")
    assert codes == [1]


def test_facts_without_a_device_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert facts() == {"torch": torch.__version__}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setitem(sys.modules, "aengine.bench.report", None)
    found = facts()
    assert found["gpu"] == "Some GPU"
    assert found["problem"].startswith("ModuleNotFoundError")  # our own package cannot be imported; the run goes on, and is red


def test_a_device_that_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "PROBE_SECONDS", 0.0)
    assert command._facts(os.environ) == {}
    assert "tools.gpu.facts" in capsys.readouterr().err


def model_steps(**milliseconds: float) -> ModelSteps:
    cases = {"decode": Case(1, 1, 1024), "ragged": Case.parse(RAGGED), "even": Case.parse(EVEN)}
    steps = [
        MeasuredStep(StepFigures(cases[name], time, time, 1.0, 1, 1, 1, 1.0, None, 0.0, 0.5), Machine(3e12, 8e14))
        for name, time in milliseconds.items()
    ]
    times = KernelTimes("decode 1 x 1024", 900.0, 1000.0, [KernelTime("attend", 36.0, 720.0, 20.0), KernelTime("argmax", 1.0, 180.0, None)])
    left_out = [LeftOut("prefill 1 x 8192 @ 0", "max_model_len is 8000")]
    start_up = ["attention backend: triton (asked for)", "weights of 15 GiB", "no graphs, so that steps take longer: refused"]
    return ModelSteps("qwen3-8b", "cuda", "bfloat16", {}, start_up, steps, [times], left_out, [LeftOut("mixed", "RuntimeError: spoiled")])


def test_the_summary_is_one_screen_from_what_was_written(tmp_path: Path) -> None:
    made = [replace(part, figures=tmp_path / part.figures.name) for part in parts()]
    named = {part.name: part for part in made}
    write_json(named["step-triton"].figures, [], [model_steps(decode=8.5, ragged=9.0, even=7.5)])
    write_json(named["step-flashinfer"].figures, [], [model_steps(decode=6.25)])
    floor: dict[str, Any] = {"summary": {"output_tokens_per_second": 9876.5}, "floor": {"fraction": 0.61}}
    write_json(named["offline-qwen3-8b"].figures, [], floor)
    tests = [
        {"test": f"tests/a/test_a.py::test_{at}", "outcome": "failed" if at < 20 else "passed", "reason": "r" * 300} for at in range(50)
    ]
    named["tests"].figures.write_text(json.dumps(tests))
    named["step-fp8"].figures.write_text("{")  # killed while it wrote
    results = [PartResult(part, 12.0, part.name != "tests", ["stopped after 12 s"] if part.name == "tests" else []) for part in made]
    screen = summary(FACTS, results, 555.0, ["FlashInfer in .fi: broken"]).splitlines()
    assert len(screen) <= 60
    assert max(map(len, screen)) <= 120
    assert screen[1].startswith("gpu Some GPU, driver None, torch 2.11.0")
    assert screen[2] == "FlashInfer in .fi: broken"
    assert " ".join(summary(H100, [], 555.0, []).splitlines()[1:3]).endswith("flashinfer 0.6.18.post1, python None; 555 s")
    assert "tests                 12 of 320 s  FAILED, stopped after 12 s, 20 failed, 30 passed" in screen
    rows = {line.split()[0]: line.split()[1:] for line in screen}
    assert rows["1x1@1024"] == ["8.50", "(0.50)", "6.25", "(0.50)"]
    assert rows[RAGGED] == ["9.00", "(0.50)", "-"]
    surprise = f"step-triton, 1x1@1024: 8.50 ms, where {EXPECTED['step-triton']['1x1@1024']:g} was expected"
    assert surprise not in screen, "of another GPU"
    assert surprise in summary(FACTS | {"gpu": DEVICE}, results, 555.0, []).splitlines()
    assert not list(surprises("step-triton", EXPECTED["step-triton"]))
    for line in (
        f"triton: {RAGGED} takes 1.20 of {EVEN}",
        "step-triton: not measured: prefill 1 x 8192 @ 0: max_model_len is 8000",
        "step-triton: not measured: mixed: RuntimeError: spoiled",
        "step-triton: no graphs, so that steps take longer: refused",
        "step-triton, decode 1 x 1024: kernels 900 us of 1000; us a layer, us a step, calls:",
        "     20.0      720    36  attend",
        "offline-qwen3-8b: 9876 output tok/s, 0.61 of the floor",
        "  ... and 8 more",
        "FAILED: tests",
    ):
        assert line in screen, (line, screen)


def test_flashinfer_is_unpacked_from_its_folder(tmp_path: Path) -> None:
    folder, site = tmp_path / ".fi", tmp_path / "site"
    (folder / "whl").mkdir(parents=True)
    (folder / "aot" / "rope").mkdir(parents=True)
    (folder / "aot" / "rope" / "rope.so").write_text("compiled")
    with zipfile.ZipFile(folder / "whl" / "flashinfer_python-0.6.18-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flashinfer/__init__.py", "here = True")
    (site / "old").mkdir(parents=True)
    assert unpack(folder, site) == ["rope"]
    assert not (site / "old").exists()
    assert (prebuilt_folder(site) / "rope" / "rope.so").read_text() == "compiled"
    code = "import sys; sys.path.insert(0, sys.argv[1]); import flashinfer; sys.exit(not flashinfer.here)"
    assert subprocess.run([sys.executable, "-c", code, str(site)]).returncode == 0
    with zipfile.ZipFile(folder / "whl" / "apache_tvm_ffi-0.1-cp38-cp38-manylinux_2_28_x86_64.whl", "w") as wheel:
        wheel.writestr("tvm_ffi/__init__.py", "")
    with pytest.raises(ValueError, match="is not for Python 3"):
        unpack(folder, site)


def test_modules_are_linked_lazily(tmp_path: Path) -> None:
    """Those of attention refer to instances that are not there."""
    assert build_environment(tmp_path)["FLASHINFER_EXTRA_LDFLAGS"].split()[-1] == "-Wl,-z,lazy"


def test_every_dependency_has_a_version_that_was_tested() -> None:
    """Of each extra, too: an install with the constraints takes the same packages everywhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {Requirement(one).name for group in (project["dependencies"], *extras.values()) for one in group} - {project["name"]}
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pinned = {one.name: one.specifier for one in map(Requirement, lines)}
    assert wanted - pinned.keys() == set()
    (flashinfer,) = (Requirement(one) for one in extras["cuda"])
    (version,) = pinned["flashinfer-python"]
    assert flashinfer.specifier.contains(version.version)
    check_version(version.version)
    assert f"flashinfer-python=={version.version}" in VERSIONS, "what a GPU machine gets is what was measured there"
    assert {Requirement(one).name for one in extras["dev"]} & {"flashinfer-python"} == set(), "a CPU does without it"


def test_the_archive_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What git has, as it stands, and FlashInfer's folder."""
    root, folder, archive = tmp_path / "checkout", tmp_path / "elsewhere", tmp_path / "all.tar.gz"
    (root / "aengine").mkdir(parents=True)
    (folder / "whl").mkdir(parents=True)
    for path, text in (("aengine/one.py", "1"), ("gone.py", "2"), ("not-git's", "3")):
        (root / path).write_text(text)
    for git in (["init", "-q"], ["add", "aengine/one.py", "gone.py"]):
        subprocess.run(["git", *git], cwd=root, check=True)
    (root / "gone.py").unlink()
    (root / "aengine/one.py").write_text("changed")
    (folder / "whl" / "a.whl").write_text("wheel")
    assert write_archive(archive, folder, root) == archive.stat().st_size
    with tarfile.open(archive) as tar:
        assert {name for name in tar.getnames() if "." in name.lstrip(".")} == {"aengine/one.py", ".fi/whl/a.whl"}
        one = tar.extractfile("aengine/one.py")
        assert one is not None
        assert one.read() == b"changed"
    monkeypatch.setattr(prepare, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="of at most 0: build fewer modules"):
        write_archive(archive, folder, root)
    assert not archive.exists()
