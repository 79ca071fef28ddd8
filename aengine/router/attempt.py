"""One request on its way over replicas: what is known of it as a whole, and of its stay at one of them.

Owns the blame for replicas that died. Knows neither tokens nor connections.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aengine.errors import (
    AEngineError,
    ConnectionLostError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    PoisonRequestError,
    QueueFullError,
    RequestIdInUseError,
    ServerError,
)
from aengine.router.load import RoutedPrompt

if TYPE_CHECKING:
    from aengine.router.replica import Replica

MOST_BLAME = 1.5
"""A request with so much is given up: alone at two replicas when they died, or with few others at several."""
_OF_CONNECTIONS = frozenset({"UNAVAILABLE", "ABORTED", "CANCELLED", "UNKNOWN", "INTERNAL", "DATA_LOSS"})
"""Codes of calls that failed on their way, where no aengine has given a reason."""


class Verdict(enum.Enum):
    """What the failure of a request at one replica means."""

    LOST = enum.auto()  # the replica itself is lost
    LEFT = enum.auto()  # the replica does not go on with it
    REFUSED = enum.auto()  # the replica cannot take it now; others may
    FINAL = enum.auto()  # it is the request's own


@dataclass(slots=True, eq=False)
class Work:
    """A request, as far as finding it a replica goes."""

    prompt: RoutedPrompt
    begun: bool = False  # a replica has accepted it, so that it is valid
    moves: int = 0  # since it brought something
    blame: float = 0.0  # for replicas that died with it, since it brought something
    been_at: set[str] = field(default_factory=set)  # names of replicas that it has left
    unfit: set[str] = field(default_factory=set)  # names of those that are not to be tried now
    refusal: AEngineError | None = None  # why the last of them is not

    def judge(self, error: AEngineError, attempt: Attempt) -> Verdict:
        """What it means that `error` ended an attempt at it."""
        match error:
            case ConnectionLostError() | EngineDeadError():
                return Verdict.LOST
            case EngineStateError():
                return Verdict.LEFT
            case ServerError() if error.code == "UNAVAILABLE" or (not error.reason and error.code in _OF_CONNECTIONS):
                return Verdict.LEFT
            case QueueFullError():
                return Verdict.REFUSED
            case RequestIdInUseError():  # where it was before, what is left of it may not be gone yet
                return Verdict.REFUSED if attempt.replica.name in self.been_at else Verdict.FINAL
            case InvalidRequestError():  # as a replica with less room sees it
                return Verdict.REFUSED if self.begun and not attempt.acknowledged else Verdict.FINAL
            case _:
                return Verdict.FINAL


class Attempt:
    """A request's stay at one replica."""

    __slots__ = ("_placement", "acknowledged", "answered", "ended", "on_lost", "replica", "suspect", "work")

    def __init__(self, work: Work, replica: Replica, on_lost: Callable[[Attempt, AEngineError], object]) -> None:
        """`on_lost` is called when the replica is lost, and the stay has ended."""
        self.work = work
        self.replica = replica
        self.on_lost = on_lost
        self.acknowledged = False  # the replica has said that it has it
        self.answered = False  # the replica has brought something
        self.ended = False
        self.suspect = work.blame > 0
        self._placement = replica.load.place(work.prompt, time.monotonic())
        replica.aboard[self] = None
        replica.empty.clear()
        replica.num_suspects += self.suspect

    def acknowledge(self) -> None:
        self.acknowledged = self.work.begun = True

    def answer(self) -> None:
        """It has brought something, so it is not what replicas die of."""
        if not self.answered:
            self.answered = True
            self.work.moves, self.work.blame, self.work.refusal = 0, 0.0, None
            self.work.unfit.clear()
            self.replica.load.first_token(self._placement, time.monotonic())
            self._clear()

    def leave(self, output_tokens: int = 0, cached_tokens: int | None = None) -> None:
        """It has ended, or goes elsewhere. `cached_tokens`: of its prompt; None: not known. Repeated calls do nothing."""
        if not self.ended:
            self.ended = True
            self.work.been_at.add(self.replica.name)
            self.replica.load.end(self._placement, time.monotonic(), output_tokens, cached_tokens)
            self._clear()
            del self.replica.aboard[self]
            self.replica.on_left()

    def _clear(self) -> None:
        if self.suspect:
            self.suspect = False
            self.replica.num_suspects -= 1
            self.replica.on_left()


def share_blame(attempts: Iterable[Attempt]) -> None:
    """A replica has died with these aboard: those that it was computing and that had brought nothing may be what it died of."""
    suspects = [attempt for attempt in attempts if attempt.acknowledged and not attempt.answered]
    for attempt in suspects:
        attempt.work.blame += 1 / len(suspects)


def check_blame(work: Work, error: AEngineError) -> None:
    """Raises `PoisonRequestError` for a request that has too much."""
    if work.blame >= MOST_BLAME:
        text = f"the request was at {', '.join(sorted(work.been_at))} when they died, and had brought nothing there; it is not tried again"
        raise PoisonRequestError(text) from error
