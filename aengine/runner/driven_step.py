"""`DrivenStep`: a step that other ranks or replicas compute, too. If it fails because of one of them, the error says which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aengine.kernels.cpu.library import ExchangeError
from aengine.layers.collectives import CollectiveError
from aengine.parallel.driver import VERDICT_SECONDS, DriverRanks
from aengine.parallel.replicas import Replicas
from aengine.parallel.ring import StageError
from aengine.runner.base import InFlightStep
from aengine.scheduler.plan import StepResult


@contextmanager
def naming_ranks(ranks: DriverRanks | Replicas) -> Iterator[None]:
    """Around what takes other ranks, or replicas."""
    try:
        yield
    except ExchangeError as error:
        ranks.check()
        if not error.lagging:
            raise
        raise ranks.hung(error.lagging[0]) from error
    except CollectiveError as error:
        ranks.check(0.0 if error.timed_out else VERDICT_SECONDS)
        if not error.timed_out or ranks.shard.size > 2:
            raise
        raise ranks.hung(1 - ranks.shard.index) from error
    except StageError as error:
        ranks.check(0.0 if error.hung else VERDICT_SECONDS)
        if not error.hung:
            raise
        raise ranks.hung(error.rank) from error
    except BaseException:
        ranks.close(at_once=True)  # they wait for what this rank did not come to
        raise


class DrivenStep:
    """Satisfies `InFlightStep`."""

    def __init__(self, step: InFlightStep, ranks: DriverRanks | Replicas) -> None:
        self._step = step
        self._ranks = ranks

    @property
    def overlaps(self) -> bool:
        return self._step.overlaps

    def wait(self) -> None:
        with naming_ranks(self._ranks):
            self._step.wait()

    def result(self) -> StepResult:
        with naming_ranks(self._ranks):
            return self._step.result()

    def withdraw(self) -> bool:
        """Others have the plan already."""
        return False
