"""The benchmarks of steps that `make gpu` runs, from end to end on a CUDA device without numbers, with a model of fewer layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_cuda import FakeCuda
from slow_cases import NOT_IN_CI
from triton_mode import INTERPRETED

from aengine.bench.cli import main
from tools.gpu.parts import all_parts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not INTERPRETED, reason="there is a device")]


@NOT_IN_CI
@pytest.mark.parametrize("name", ["step-flashinfer", "step-triton", "step-fp8"])
def test_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = (part for part in all_parts("python3", tmp_path, "some-gpu", workers=0) if part.name == name)
    arguments = list(part.commands[0][3:])
    for option, value in (("--shape", "qwen3-60m"), ("--seconds", "0.001"), ("--kernels", None)):
        at = arguments.index(option)
        arguments[at : at + 2] = [] if value is None else [option, value]  # there are no kernels that a profiler would see
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "flashinfer", fake.library())
    with fake.active():
        assert main(arguments) == 0
    (measured,) = json.loads(part.figures.read_text())["figures"]
    assert (measured["device"], measured["left_out"], measured["failed"]) == ("cuda:0", [], [])
    assert len(measured["steps"]) == (5 if name == "step-fp8" else 10)
    assert fake.replays > 0
