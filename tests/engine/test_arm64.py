"""Answers of this machine derived again by the kernels for ARM, which QEMU runs: the same bits.

`python -m tools.arm64 FOLDER` makes what ARM64_PYTHON names, FOLDER/python.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import subprocess

import pytest

from aengine import AsyncEngine, EngineConfig, SamplingParams

PYTHON = os.environ.get("ARM64_PYTHON", "")
PROMPTS = ("It is a truth", "The cat sat on", "Hello, my name is", "In the beginning there was a")
NUMERICS = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--dtype", "bfloat16", "--quantization", "int8", "--kv-cache-dtype", "int8"),
    "int4": ("--dtype", "bfloat16", "--quantization", "int4"),
}


async def _receipts(options: tuple[str, ...]) -> list[str]:
    given = {name[2:].replace("-", "_"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    async with AsyncEngine(EngineConfig(model="demo", numerics="canonical", **given)) as engine:
        params = [SamplingParams(max_tokens=24, temperature=1.0, seed=seed, logprobs=2) for seed in range(3 * len(PROMPTS))]
        prompts = [PROMPTS[seed % len(PROMPTS)] for seed in range(len(params))]
        answers = await asyncio.gather(*(engine.generate(one, of, receipt=True) for one, of in zip(prompts, params, strict=True)))
    return [answer.receipt.to_json() for answer in answers if answer.receipt is not None]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON, reason="needs ARM64_PYTHON, a Python for ARM that tools/arm64.py makes")
@pytest.mark.parametrize("cpu", ["cortex-a72", "neoverse-n1", "max"])  # without dot products of int8, with these, with those of bfloat16
@pytest.mark.parametrize("numerics", NUMERICS)
def test_receipts_are_derived_on_arm(numerics: str, cpu: str, tmp_path: pathlib.Path) -> None:
    lines = asyncio.run(_receipts(NUMERICS[numerics]))
    (tmp_path / "receipts.jsonl").write_text("\n".join(lines))
    command = [PYTHON, "-m", "aengine", "replay", str(tmp_path / "receipts.jsonl"), "demo", "--numerics", "canonical"]
    environment = {**os.environ, "QEMU_CPU": cpu}
    environment.pop("AENGINE_CPU_LEVEL", None)
    done = subprocess.run([*command, *NUMERICS[numerics]], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(lines)} receipts: {len(lines)} same" in done.stderr
    assert "kernels is" not in done.stderr, "the fingerprint is the same, too"
