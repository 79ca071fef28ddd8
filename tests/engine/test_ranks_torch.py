"""An engine with the torch decoder on several ranks: requests get what they get from one rank."""

from __future__ import annotations

from typing import Any

import pytest
from speculation_cases import CONTEXT, assert_same, outcomes, random_cases, uncut

from aengine import AsyncEngine

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
CASES = [
    (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    (4, {"tensor_parallel_size": 2, "speculative": "ngram"}),
    (16, {"pipeline_parallel_size": 2, "speculative": "ngram"}),
    (16, {"pipeline_parallel_size": 3, "speculative": "draft", "speculative_model": "demo", "max_drafts": 3}),
    (16, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "speculative": "draft", "speculative_model": "demo"}),
    (16, {"tensor_parallel_size": 2, "tensor_parallel_mode": "fast"}),
    (16, {"tensor_parallel_size": 4}),
    (16, {"tensor_parallel_size": 4, "tensor_parallel_mode": "fast", "speculative": "ngram"}),
]


def engine_of(**options: Any) -> AsyncEngine:
    settings = {"dtype": "float32", "device": "cpu", "attention_backend": "torch_native", "max_model_len": CONTEXT, **options}
    return AsyncEngine("demo", max_num_seqs=8, max_num_batched_tokens=64, page_size=4, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "options"), CASES)
async def test_requests_get_the_same(count: int, options: dict[str, Any]) -> None:
    """Prompts that are scored, too, and tokens that are sampled by processors of the first rank alone."""
    cases = random_cases(21, count)
    async with engine_of() as engine:
        expected = await outcomes(engine, uncut(cases), 12)
    async with engine_of(**options) as engine:
        found = await outcomes(engine, cases, 12)
    assert_same(cases, found, expected)
