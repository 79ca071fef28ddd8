"""Speculation for tests that are not about it: with the fixture `speculation` they run without drafts, and with them.

Drafts are right, wrong and half right, and all that there are for a step are used, whatever that costs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from every_draft import use_every_draft
from oracle_engine import OracleEngine
from random_drafts import RandomDrafts

from aengine import AsyncEngine
from aengine.api.outputs import DraftSource
from aengine.engine import step_thread
from aengine.engine.loading import LoadedModel
from aengine.scheduler.drafters import Draft, Drafter, ModelDrafter


class SometimesRandom(ModelDrafter):
    """Drafts of a model, but now and then random ones in their place."""

    _rng = np.random.default_rng(0)

    def propose(self, row: int, tokens: np.ndarray, most: int, *, by_model: bool = True) -> Draft:
        draft = super().propose(row, tokens, most, by_model=by_model)
        return draft if self._rng.random() < 0.7 else Draft(self._rng.integers(4096, size=most, dtype=np.int32), DraftSource.NGRAM)


def _drafter(config: Any, loaded: LoadedModel) -> Drafter | None:
    runner: Any = loaded.runner
    match config.speculative:
        case "ngram":
            return RandomDrafts(runner.truth_of, random.Random(0))
        case "draft":
            return SometimesRandom()
        case _:
            return None


also_with_drafts = pytest.mark.usefixtures("speculation")


@contextmanager
def drafts_everywhere() -> Iterator[None]:
    """Engines on the oracle speculate, unless they say otherwise, and so do those that `demo` makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OracleEngine, "defaults", {"speculative": "ngram"})
        patch.setattr(step_thread, "drafter_of", _drafter)
        use_every_draft(patch)
        yield


def demo(**options: Any) -> AsyncEngine:
    """An engine with the demo model, which is its own draft model where there are drafts."""
    drafts = {"speculative": "draft", "speculative_model": "demo"} if OracleEngine.defaults else {}
    return AsyncEngine("demo", **{"kv_cache_memory": 32 << 20, **drafts, **options})


@pytest.fixture(params=["plain", "drafts"])
def speculation(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether there are drafts in what a test does."""
    speculates: bool = request.param == "drafts"
    with drafts_everywhere() if speculates else nullcontext():
        yield speculates
