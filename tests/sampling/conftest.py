"""What all tests of the sampler have in common."""

from __future__ import annotations

import math

import pytest

from aengine.sampling import grammar


@pytest.fixture(autouse=True)
def time_for_all_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row is postponed, however slow the machine is; tests of that set the time themselves."""
    monkeypatch.setattr(grammar, "MASK_SECONDS", math.inf)
