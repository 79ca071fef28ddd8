"""An engine whose model is divided over several ranks: requests get what they get from one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from every_draft import use_every_draft
from slow_cases import slow_but
from speculation_cases import CONTEXT, Case, Outcome, assert_same, outcomes, random_cases

from aengine import AsyncEngine
from aengine.parallel.join import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
# A crowd that is preempted, and parked where its readers are slow.
CROWD = {"page_size": 4, "max_num_seqs": 24, "max_num_batched_tokens": 128, "max_unread_tokens": 6}
PAGE_BYTES = {"float32": 20480, "bfloat16": 10240, "int8": 5440}
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}
QUICK = [(2, 1, "float32", 30)]
SLOW = [(2, 1, "float32", 200), (4, 1, "int8", 20), (2, 2, "bfloat16", 20), (1, 3, "float32", 20)]
_expected: dict[tuple[str, int], list[Outcome]] = {}


def engine_of(numbers: str, **options: Any) -> AsyncEngine:
    return AsyncEngine("demo", **{"max_model_len": CONTEXT, **NUMBERS[numbers], **options})


async def expected_of(cases: list[Case], numbers: str) -> list[Outcome]:
    """What one process gives."""
    key = numbers, len(cases)
    if key not in _expected:
        async with engine_of(numbers) as engine:
            _expected[key] = await outcomes(engine, cases, 32)
    return _expected[key]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages", "numbers", "count"), slow_but(QUICK, [*QUICK, *SLOW]))
async def test_requests_get_the_same(size: int, stages: int, numbers: str, count: int) -> None:
    cases = random_cases(12, count, processed=True)
    expected = await expected_of(cases, numbers)
    most_layers = -(-5 // stages)
    options = {"kv_cache_memory": 80 * PAGE_BYTES[numbers] * most_layers // 5 // size, **CROWD}
    async with engine_of(numbers, tensor_parallel_size=size, pipeline_parallel_size=stages, **options) as engine:
        found = await outcomes(engine, cases, 32)
        stats, info = engine.stats(), engine.model_info
    assert_same(cases, found, expected)
    assert info.kv_bytes_per_token == PAGE_BYTES[numbers] // 4 * max(1, size // 2)  # there are 2 KV heads, which ranks share
    if count >= 200:
        assert stats.preemptions


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages", "count"), slow_but([(2, 1, 30)], [(2, 1, 30), (2, 2, 20)]))
async def test_drafts_change_nothing(size: int, stages: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model, which is the model itself, is on the first rank alone."""
    cases = random_cases(12, count, processed=True)
    expected = await expected_of(cases, "float32")
    use_every_draft(monkeypatch)
    options = {"speculative": "auto", "speculative_model": "demo", "max_drafts": 6}
    async with engine_of("float32", tensor_parallel_size=size, pipeline_parallel_size=stages, **options, **CROWD) as engine:
        found = await outcomes(engine, cases, 32)
        stats = engine.stats()
    assert_same(cases, found, expected)
    assert stats.draft_tokens > stats.accepted_draft_tokens > count


def _worker(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@pytest.mark.slow
async def test_a_stage_of_another_host(tmp_path: Path) -> None:
    """Each stage has two ranks. Those of the first one share memory, while those of the second one have to find each other."""
    cases = random_cases(12, 8, processed=True)
    expected = await expected_of(cases, "float32")
    secret = tmp_path / "secret"
    secret.write_text("of these ranks alone")
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "aengine.runner.follower", f"--driver={address}", f"--secret-file={secret}", "--local-ranks=2"]
    workers = [_worker([*command, f"--rank={2 + index}", f"--local-rank={index}"]) for index in (0, 1)]
    options = {"rank_address": address, "rank_secret_file": str(secret), "local_ranks": 2, "step_timeout": 60.0}
    try:
        async with engine_of("float32", tensor_parallel_size=2, pipeline_parallel_size=2, **options) as engine:
            found = await outcomes(engine, cases, 32)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert_same(cases, found, expected)
