"""`Work`: a request on its way over replicas, what its failures mean, and the blame for replicas that died.

Knows neither tokens nor connections.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from aengine.api.errors import (
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

MOST_BLAME = 1.5
"""A request with so much is given up: alone at two replicas when they died, or with few others at several."""
_OF_CONNECTIONS = frozenset({"UNAVAILABLE", "ABORTED", "CANCELLED", "UNKNOWN", "INTERNAL", "DATA_LOSS"})
"""Codes of calls that failed on their way, where no aengine has given a reason."""


class OtherTextsError(Exception):
    """The replicas that serve make other ids of a text than those that its request has; it begins anew."""


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

    def judge(self, error: AEngineError, name: str, *, acknowledged: bool) -> Verdict:
        """What it means that `error` ended its stay at the replica of this name, which had `acknowledged` it."""
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
                return Verdict.REFUSED if name in self.been_at else Verdict.FINAL
            case InvalidRequestError():  # as a replica with less room sees it
                return Verdict.REFUSED if self.begun and not acknowledged else Verdict.FINAL
            case _:
                return Verdict.FINAL


def share_blame(suspects: Collection[Work]) -> None:
    """A replica has died that was computing these, which had brought nothing: they may be what it died of."""
    for work in suspects:
        work.blame += 1 / len(suspects)


def check_blame(work: Work, error: AEngineError) -> None:
    """Raises `PoisonRequestError` for a request that has too much."""
    if work.blame >= MOST_BLAME:
        text = f"the request was at {', '.join(sorted(work.been_at))} when they died, and had brought nothing there; it is not tried again"
        raise PoisonRequestError(text) from error
