"""`aengine`: the list of programs, and what it says of the machine."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from fresh_process import run_fresh

import aengine
from aengine.__main__ import PROGRAMS, Program, main
from aengine.kernels.cpu.library import load_kernels

PROJECT = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8")


def test_every_program_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = dict(re.findall(r'^([\w-]+) = "(.*)"', PROJECT.partition("[project.scripts]")[2].partition("\n[")[0], re.MULTILINE))
    assert scripts.pop("aengine") == "aengine.__main__:main"
    assert {program.script: f"{program.module}:{program.function}" for program in PROGRAMS} == scripts
    assert all(program.script == f"aengine-{program.command}" for program in PROGRAMS)
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"aengine {aengine.__version__}\n")
    for text in (listed, printed):
        assert all(re.search(rf"^  aengine {program.command} +\w", text, re.MULTILINE) for program in PROGRAMS)
        assert re.search("^  aengine info +", text, re.MULTILINE)
    assert f'\nversion = "{aengine.__version__}"\n' in PROJECT


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.command)
def test_commands_are_the_programs(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """Under either name, which each tells as its own."""
    run = getattr(importlib.import_module(program.module), program.function)
    for call, name in ((main, f"aengine {program.command}"), (lambda given: run(given[1:]), program.script)):
        with pytest.raises(SystemExit) as caught:
            call([program.command, "--help"])
        assert caught.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: {name} ")
        with pytest.raises(SystemExit) as caught:
            call([program.command, "--no-such-flag", "--driver", "a:1", "--rank", "1", "--secret-file", "x"])
        assert caught.value.code == 2
        assert f"{name}: error: " in capsys.readouterr().err


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["srve"])
    assert caught.value.code == 2
    assert "invalid choice: 'srve'" in capsys.readouterr().err


def test_the_list_loads_nothing_heavy() -> None:
    run_fresh("""
        import sys
        from aengine.__main__ import main
        main([])
        heavy = {"torch", "transformers", "numpy", "grpc", "uvicorn", "rich"} & set(sys.modules)
        assert not heavy, heavy
        for command in ("serve", "chat"):
            try:
                main([command, "--help"])
            except SystemExit:
                pass
            heavy = {"torch", "transformers", "grpc", "uvicorn", "rich"} & set(sys.modules)
            assert not heavy, (command, heavy)
    """)


def test_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    level = load_kernels().level.value
    main(["info"])
    assert re.search(rf"^CPU kernels +level {level}, (prebuilt|compiled on this machine)$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setenv("AENGINE_CPU_LEVEL", "torch")
    for arguments, label in (([], "CPU kernels: "), (["info"], "CPU kernels   ")):
        main(arguments)
        assert f"{label}none, AENGINE_CPU_LEVEL is torch\n" in capsys.readouterr().out
