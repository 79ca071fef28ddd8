from __future__ import annotations

import pytest

from aengine.kernels.cpu.compiler import Level, supported_levels
from tools.bench import levels

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("level", [level for level in supported_levels() if level is Level.AVX2])
def test_a_level_is_measured_in_a_process_of_its_own(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENGINE_CPU_LEVEL", "torch")  # of this process, not of the one that measures
    costs = levels.costs_at(level, threads=1, runs=1)
    assert [(cost.dtype, cost.rows) for cost in costs] == [(dtype, rows) for dtype in ("bfloat16", "float32") for rows in levels.ROWS]
    assert {cost.level for cost in costs} == {level.value}
    assert all(cost.ratio > 0 and cost.gigaflops > 0 for cost in costs)


def test_every_level_of_x86_has_limits_for_torch() -> None:
    assert set(levels._LIMITS) == set(Level) - {Level.NEON, Level.NEON_DOT, Level.NEON_BF16, Level.FUSED}


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="threads"):
        levels.costs_at(Level.PORTABLE, threads=-1, runs=1)
