from __future__ import annotations

import asyncio

import pytest

from aengine.api.config import EngineConfig
from tools.bench.overhead import measure_overhead


def test_a_step_beside_its_kernels() -> None:
    found = asyncio.run(measure_overhead(EngineConfig(model="demo", device="cpu"), 2, 60))
    assert found.batch == 2
    assert found.kernels > 0
    assert found.step > 0
    assert found.overhead == pytest.approx(found.step - found.kernels)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="no two decode steps of 2 rows follow one another"):
        asyncio.run(measure_overhead(EngineConfig(model="demo", device="cpu"), 2, 5))
