"""Tiers of KV for the oracle: what each page held, which comes back late, in part, or not at all."""

from __future__ import annotations

import math
import random

import numpy as np
from kv_oracle import OracleRunner

from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.tier_loads import PageLoad


class SimulatedTiers:
    """Stands in for `PageTiers`, and does what the step thread does with it."""

    def __init__(self, scheduler: Scheduler, runner: OracleRunner, rng: random.Random) -> None:
        self.scheduler, self.runner, self._rng = scheduler, runner, rng
        self._content: dict[bytes, tuple[bytes, np.ndarray, np.ndarray]] = {}  # tokens, what pages and states held
        self.loading: list[PageLoad] = []
        self.num_loaded = 0
        self._most_pages = rng.choice([0, 3, math.inf])  # at a time, while few wait
        self.use()

    def use(self) -> None:
        """With other weights everything is another content."""
        self._content.clear()
        self.scheduler.use_tiers(self, lambda loaded, computed: self._rng.random() < 0.9)  # type: ignore[arg-type]

    def find(self, names: list[bytes]) -> int:
        return next((count for count, name in enumerate(names) if name not in self._content), len(names))

    def keeps(self, name: bytes) -> bool:
        return name in self._content

    def save(self) -> None:
        loads = self.scheduler.loads
        for save in [] if loads is None else loads.take_saves(self._most_pages):
            self._content[save.name] = save.tokens, self._slots(save.pages).copy(), self.runner.states[save.pages].copy()
        if self._content and self._rng.random() < 0.1:  # others took its place
            del self._content[self._rng.choice(list(self._content))]

    def begin_loads(self) -> None:
        loads = self.scheduler.loads
        self.loading += [] if loads is None else loads.take_loads()

    def end_loads(self, *, every: bool) -> bool:
        """Ends some of the loads, as far as their content is there. False: there was none."""
        done = [load for load in self.loading if every or self._rng.random() < 0.4]
        for load in done:
            self.loading.remove(load)
            if self.scheduler.loads is None or not self.scheduler.loads.is_loading(load):
                continue
            columns = 0
            for name, tokens, pages in zip(load.names, load.tokens, load.pages, strict=True):
                found = self._content.get(name)
                if found is None or found[0] != tokens or self._rng.random() < 0.02:
                    break
                needed = pages > 0
                self.runner.slots.reshape(-1, self.runner.page_size)[pages[needed]] = found[1][needed]
                self.runner.states[pages[needed]] = found[2][needed]
                self.runner.draft_slots.reshape(-1, self.runner.page_size)[pages[needed]] = -1
                columns += 1
            self.num_loaded += columns
            self.scheduler.end_load(load, columns)
        return bool(done)

    def _slots(self, pages: np.ndarray) -> np.ndarray:
        """[groups, page_size]"""
        return self.runner.slots.reshape(-1, self.runner.page_size)[pages]
