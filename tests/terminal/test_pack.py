"""`aengine-pack`: the file is there before the first start, whole, and a start maps it."""

from __future__ import annotations

import os
import pathlib

import pytest

from aengine.terminal.pack import main

pytestmark = pytest.mark.skipif(os.environ.get("AENGINE_CPU_LEVEL") == "torch", reason="AENGINE_CPU_LEVEL turns the CPU kernels off")


def test_packs_once_and_checks(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--weights-cache", str(tmp_path / "cache"), "--quantization", "int8"]
    assert main(arguments) == 0
    (path,) = (tmp_path / "cache").glob("*.weights")
    (tables,) = (tmp_path / "cache").glob("*.tokens")
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tables}: ")
    assert first.endswith(" MiB, the tables of the tokenizer")
    assert last.endswith(" MiB, packed, and its checksum is right")
    assert main(arguments) == 0
    assert capsys.readouterr().out.endswith(" MiB, was there, and its checksum is right\n")
    content = bytearray(path.read_bytes())
    content[1 << 20] ^= 1
    path.write_bytes(content)
    assert main(arguments) == 1
    assert "was damaged and is removed: its content has the checksum" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--weights-cache", "off"), "weights_cache: 'off' keeps no weights"),
        (("--weights-cache-size", "100"), "has no room, or cannot be written to"),
        (("--tensor-parallel-size", "2"), "tensor_parallel_size: ranks pack their parts at their first start"),
    ],
)
def test_refusals(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str) -> None:
    assert main(["demo", "--weights-cache", str(tmp_path), *flags]) == 1
    assert message in capsys.readouterr().err
