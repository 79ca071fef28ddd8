"""`Looks`: after which steps it is looked whether drafts would pay. Counts steps; knows nothing of drafts, and of seconds only what it is
told: that a look has to wait."""

from __future__ import annotations

_EACH, _LAST_PAUSE = 8, 64
"""So many steps after drafts were used it is looked after each step, later the more seldom the longer they do not pay."""
_MEASURED = 4  # steps before a look are measured
_FORCED = 16  # steps after forced text that paid, in which what is forced is looked at in any case


class Looks:
    def __init__(self) -> None:
        self._num_steps = 0  # since drafts were used
        self._next = 0  # after so many of them
        self._earliest = 0  # whatever happens, since the look before took long
        self._measured = 0  # from so many on they are measured
        self._pause = _EACH // 2
        self._num_forced = 0  # steps in which forced text is looked for

    def count_step(self, *, forced: bool) -> bool:
        """A step has returned, with text that is `forced` or not. Whether it is looked now."""
        self._num_steps += 1
        self._num_forced -= self._num_forced > 0
        return self._num_steps >= self._next or (forced and self._num_forced > 0)

    @property
    def near(self) -> bool:
        """Whether a step is to be measured because of the next look."""
        return self._num_steps >= self._measured

    @property
    def wants_forced(self) -> bool:
        """Whether the step that is planned should say what is forced: its result, or that of one in flight, is looked at."""
        return self._num_forced > 0 or self._num_steps + 1 >= self._next - 1

    def restart(self) -> None:
        """Drafts that were to pay are used."""
        self._num_steps = self._next = self._earliest = self._measured = 0
        self._pause = _EACH // 2

    def hasten(self) -> None:
        """There is something new."""
        self._pause = _EACH // 2
        self._plan(min(self._next, self._num_steps + _EACH))

    def postpone(self) -> None:
        """Nothing could be looked at, or nothing is known of steps without drafts: they are measured."""
        self._next, self._measured = self._num_steps + _EACH, self._num_steps

    def made(self, wait: int, *, forced: bool | None) -> None:
        """It was looked, so the next look comes after `wait` steps at the earliest. `forced`: there was forced text, which pays or not."""
        if forced is not None:
            self._num_forced = _FORCED if forced else 0
        if self._num_steps >= _EACH:
            self._pause = min(2 * self._pause, _LAST_PAUSE)
        self._earliest = self._num_steps + wait
        self._plan(self._num_steps + (self._pause if self._num_steps >= _EACH else 1))

    def _plan(self, num_steps: int) -> None:
        self._next = max(num_steps, self._earliest)
        self._measured = self._next - _MEASURED
