"""`DrivenStep`: a step that other ranks compute, too. If it fails because of one of them, the error says which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aengine.kernels.cpu.library import ExchangeError
from aengine.parallel.driver import DriverRanks
from aengine.runner.base import InFlightStep
from aengine.scheduler.plan import StepResult


class DrivenStep:
    """Satisfies `InFlightStep`."""

    def __init__(self, step: InFlightStep, ranks: DriverRanks) -> None:
        self._step = step
        self._ranks = ranks

    @property
    def overlaps(self) -> bool:
        return self._step.overlaps

    def wait(self) -> None:
        with self._naming_ranks():
            self._step.wait()

    def result(self) -> StepResult:
        with self._naming_ranks():
            return self._step.result()

    def withdraw(self) -> bool:
        """Others have the plan already."""
        return False

    @contextmanager
    def _naming_ranks(self) -> Iterator[None]:
        try:
            yield
        except ExchangeError as error:
            self._ranks.check()
            if not error.lagging:
                raise
            raise self._ranks.hung(error.lagging[0]) from error
        except BaseException:
            self._ranks.close(at_once=True)  # they wait for what this rank did not come to
            raise
