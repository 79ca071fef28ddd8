"""Which GPUs of a host its replicas see."""

from __future__ import annotations

from pathlib import Path

import pytest

from aengine.api.config import EngineConfig
from aengine.router import processes


@pytest.mark.parametrize(
    ("given", "files", "device", "count", "seen"),
    [
        (None, 4, "auto", 2, ["0,1", "2,3"]),
        (None, 4, "cuda", 3, ["0", "1", "2"]),
        (None, 2, "auto", 3, ["0", "1", "0"]),
        ("5,6,7,4", 8, "cuda", 2, ["5,6", "7,4"]),
        ("GPU-a,GPU-b", 8, "auto", 2, ["GPU-a", "GPU-b"]),
        ("", 8, "auto", 2, [None, None]),
        (None, 0, "auto", 2, [None, None]),
        (None, 8, "cpu", 2, [None, None]),
        (None, 8, "cuda:1", 2, [None, None]),
    ],
)
def test_gpus_are_divided(
    monkeypatch: pytest.MonkeyPatch, given: str | None, files: int, device: str, count: int, seen: list[str | None]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    names = [Path(f"/dev/nvidia{index}") for index in range(files)]
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(names if (str(path), pattern) == ("/dev", "nvidia[0-9]*") else ()))
    engine = EngineConfig(model="demo", device=device)
    assert [processes._devices(engine, index, count).get("CUDA_VISIBLE_DEVICES") for index in range(count)] == seen
