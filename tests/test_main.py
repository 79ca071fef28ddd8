"""`aengine`: the list of programs, and what it says of the machine."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path

import pytest
from fresh_process import run_fresh

import aengine
from aengine.__main__ import PROGRAMS, main
from aengine.kernels.cpu.library import load_kernels

PROJECT = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")


def test_every_program_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = re.findall(r"^([\w-]+) = ", PROJECT.partition("[project.scripts]")[2].partition("\n[")[0], re.MULTILINE)
    assert {name for name, _ in PROGRAMS} == set(scripts) - {"aengine"}
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"aengine {aengine.__version__}\n")
    assert all(re.search(rf"^  {name} +\w", printed, re.MULTILINE) for name in scripts if name != "aengine")
    assert f'\nversion = "{aengine.__version__}"\n' in PROJECT


def test_a_program_without_its_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else importlib.machinery.ModuleSpec(name, None))
    main([])
    told = re.findall(r"^  ([\w-]+).*not installed: pip install 'aengine\[(\w+)\]'", capsys.readouterr().out, re.MULTILINE)
    assert told == [("aengine-chat", "chat")]


def test_the_list_loads_nothing_heavy() -> None:
    run_fresh("""
        import sys
        from aengine.__main__ import main
        main([])
        heavy = {"torch", "transformers", "numpy", "grpc", "uvicorn", "rich"} & set(sys.modules)
        assert not heavy, heavy
    """)


def test_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    level = load_kernels().level.value
    main(["info"])
    assert re.search(rf"^CPU kernels +level {level}, (prebuilt|compiled on this machine)$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setenv("AENGINE_CPU_LEVEL", "torch")
    for arguments, label in (([], "CPU kernels: "), (["info"], "CPU kernels   ")):
        main(arguments)
        assert f"{label}none, AENGINE_CPU_LEVEL is torch\n" in capsys.readouterr().out
