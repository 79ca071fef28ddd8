"""Drafts whatever they cost, for tests that are not to depend on measured times."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from aengine.scheduler.draft_lengths import DraftLengths, StepKind
from aengine.scheduler.drafters import Draft
from aengine.scheduler.plan import IntArray


class EveryDraft(DraftLengths):
    """Uses every draft that is found, or with `rng` all of them in most steps and none in the others."""

    def __init__(self, num_rows: int, rng: random.Random | None = None) -> None:
        super().__init__(num_rows)
        self._rng = rng

    def is_measured(self, num_decodes: int, kind: StepKind) -> bool:
        return True

    def look_took(self, seconds: float, num_rows: int, kind: StepKind) -> int:
        return 0

    def may_start(self, num_decodes: int, kind: StepKind) -> bool:
        return self.may_draft(num_decodes, kind)

    def may_draft(self, num_decodes: int, kind: StepKind) -> bool:
        return self._rng is None or self._rng.random() < 0.9

    def choose(self, num_decodes: int, found: Mapping[int, Draft], kind: StepKind, *, tried: IntArray | None) -> dict[int, int]:
        return {row: len(draft.token_ids) for row, draft in found.items()}


def use_every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the schedulers that are made from now on."""
    monkeypatch.setattr("aengine.scheduler.drafts.DraftLengths", EveryDraft)
