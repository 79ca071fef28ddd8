"""An engine whose model is divided over several ranks: requests get what they get from one process."""

from __future__ import annotations

from typing import Any

import pytest
from slow_cases import slow_but
from speculation_cases import CONTEXT, Outcome, assert_same, outcomes, random_cases

from aengine import AsyncEngine

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
# A crowd that is preempted, and parked where its readers are slow.
CROWD = {"page_size": 4, "max_num_seqs": 24, "max_num_batched_tokens": 128, "max_unread_tokens": 6}
PAGE_BYTES = {"float32": 20480, "bfloat16": 10240, "int8": 5440}
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}
QUICK = [(2, 1, "float32", 30), (1, 2, "float32", 30)]
SLOW = [(size, stages, numbers, 200) for size, stages in ((2, 1), (4, 1), (1, 2), (1, 3), (2, 2)) for numbers in NUMBERS]
_expected: dict[tuple[str, int], list[Outcome]] = {}


def engine_of(numbers: str, **options: Any) -> AsyncEngine:
    return AsyncEngine("demo", **{"max_model_len": CONTEXT, **NUMBERS[numbers], **options})


@pytest.mark.parametrize(("size", "stages", "numbers", "count"), slow_but(QUICK, [*QUICK, *SLOW]))
async def test_requests_get_the_same(size: int, stages: int, numbers: str, count: int) -> None:
    cases = random_cases(12, count, processed=True)
    if (numbers, count) not in _expected:
        async with engine_of(numbers) as engine:
            _expected[numbers, count] = await outcomes(engine, cases, 32)
    most_layers = -(-5 // stages)
    options = {"kv_cache_memory": 80 * PAGE_BYTES[numbers] * most_layers // 5 // size, **CROWD}
    async with engine_of(numbers, tensor_parallel_size=size, pipeline_parallel_size=stages, **options) as engine:
        found = await outcomes(engine, cases, 32)
        stats = engine.stats()
    assert_same(cases, found, _expected[numbers, count])
    if count >= 200:
        assert stats.preemptions
