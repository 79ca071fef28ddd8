"""Time from the start of a process to its first token: `aengine-bench startup`. Each run is a process of its own, as a user starts one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

_PROGRAM = """
import json, sys, time
import anyio
from aengine import AsyncEngine, EngineConfig, SamplingParams

async def main(settings, prompt):
    imported = time.time()
    async with AsyncEngine(EngineConfig(**settings)) as engine:
        ready = time.time()
        async for _ in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)):
            break
        first = time.time()
    print(json.dumps({"ready": ready, "first_token": first, "closed": time.time()}))

anyio.run(main, *json.loads(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds after the start of the process."""

    ready: float
    first_token: float
    exited: float


def measure_startup(settings: dict[str, object], prompt_tokens: int, runs: int) -> Sequence[StartUp]:
    """`settings`: fields of `EngineConfig`. The first run may find cold file caches. Raises RuntimeError with the last line that a
    failed run wrote."""
    results: list[StartUp] = []
    prompt = [10 + i % 50 for i in range(prompt_tokens)]
    for _ in range(runs):
        start = time.time()
        done = subprocess.run([sys.executable, "-c", _PROGRAM, json.dumps([settings, prompt])], capture_output=True, text=True)
        exited = time.time() - start
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}")
        moments = json.loads(done.stdout.splitlines()[-1])
        results.append(StartUp(moments["ready"] - start, moments["first_token"] - start, exited))
    return results
