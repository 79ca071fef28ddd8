"""`RequestProgress`: what a request of a router has got so far, which is what it goes on behind when its replica is lost.

Owns the ids of the prompt and of every token that has come, read or not. Knows nothing of replicas or connections.

`RoutedWork`: a request on its way over replicas, what its failures mean, and the blame for replicas that died.

Knows neither tokens nor connections."""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from aengine.api.engine import output_of_fork
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
from aengine.api.outputs import Token
from aengine.api.params import SamplingParams
from aengine.api.request import ForkPoint, NamedImage, RequestOptions, page_names
from aengine.router.replica_load import PagePrefix, RoutedPrompt


class RequestProgress:
    """What one request has got, from its submission on."""

    def __init__(self, sent: SamplingParams, options: RequestOptions, live_sequences: Iterable[int]) -> None:
        """`sent`: the parameters as they were given, with the seed."""
        self.ids: Sequence[int] | None = None  # of the prompt, once they are known
        self._names: Sequence[int] = ()  # the same, with the names of images in place of their tokens
        self.open = set(live_sequences)  # sequences whose end has not come
        self._outputs: list[list[int]] = [list(ids or ()) for ids in options.known_outputs or [()] * sent.n]  # of the sequences
        self.sent = sent
        self.own_options = options
        self._deadline = None if options.timeout is None else time.monotonic() + options.timeout

    def set_prompt(self, ids: Sequence[int], images: Sequence[NamedImage] | None) -> None:
        """`images`: whose tokens are among the ids; None: those of the options."""
        self.ids = ids
        if images is not None:
            self.own_options = replace(self.own_options, images=images)
        self._names = page_names(ids, self.own_options.images)

    def output(self, point: ForkPoint) -> list[int]:
        """The output that a fork begins with. Raises `InvalidRequestError` (index, at)."""
        return output_of_fork(point, self._outputs)[0]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._outputs))

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        images = [image.image if isinstance(image, NamedImage) else image for image in self.own_options.images]
        return 36 * (len(self.ids or ()) + self.num_tokens) + sum(len(image) for image in images if isinstance(image, bytes))

    @property
    def seconds_left(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    def add_token(self, token: Token) -> None:
        if token.token_id >= 0:
            self._outputs[token.index].append(token.token_id)
        if token.finish_reason is not None:
            self.open.discard(token.index)

    # ---- what a replica gets -------------------------------------------------------------------------------------------

    def prompt(self, digest_salt: bytes, generation: str | None, texts: str | None) -> RoutedPrompt:
        """The prompt with the longest output behind it, as a replica will compute it. `generation`, `texts`: as of `RoutedPrompt`."""
        assert self.ids is not None
        options = self.own_options
        tokens = self.named_tokens
        pages = PagePrefix(tokens, options.cache_salt or "", digest_salt)
        return RoutedPrompt(len(tokens), pages.beginning, pages.digests, options.adapter, generation, texts, any(self._outputs))

    @property
    def named_tokens(self) -> Sequence[int]:
        """The tokens that name the pages of the prompt and of the longest output behind it."""
        longest = max(self._outputs, key=len)
        return [*self._names, *longest] if longest else self._names

    def params(self, *, has_prompt_logprobs: bool) -> SamplingParams:
        """The parameters for a replica, without prompt logprobs if the request has them already."""
        drops_them = self.sent.prompt_logprobs is not None and has_prompt_logprobs
        return replace(self.sent, prompt_logprobs=None) if drops_them else self.sent

    def options(self, request_id: str) -> RequestOptions:
        """The options for a replica, which gets the prompt as ids: with the output that the request has, and the time that is left."""
        known = [tuple(ids) if index in self.open else None for index, ids in enumerate(self._outputs)]
        left = self.seconds_left
        return self.own_options.for_ids(
            request_id=request_id,
            timeout=None if left is None else max(0.001, left),
            known_outputs=known if any(known) or None in known else None,
            receipt=False,  # the router's own is of all replicas
        )


MOST_BLAME = 1.5
"""A request with so much is given up: alone at two replicas when they died, or with few others at several."""
_OF_CONNECTIONS = frozenset({"UNAVAILABLE", "ABORTED", "CANCELLED", "UNKNOWN", "INTERNAL", "DATA_LOSS"})
"""Codes of calls that failed on their way, where no aengine has given a reason."""


class OtherTextsError(Exception):
    """The replicas that serve make other ids of a text than those that its request has; it begins anew."""


class FailoverDecision(enum.Enum):
    """What the failure of a request at one replica means."""

    LOST = enum.auto()  # the replica itself is lost
    LEFT = enum.auto()  # the replica does not go on with it
    REFUSED = enum.auto()  # the replica cannot take it now; others may
    FINAL = enum.auto()  # it is the request's own


@dataclass(slots=True, eq=False)
class RoutedWork:
    """A request, as far as finding it a replica goes."""

    prompt: RoutedPrompt
    begun: bool = False  # a replica has accepted it, so that it is valid
    moves: int = 0  # since it brought something
    blame: float = 0.0  # for replicas that died with it, since it brought something
    been_at: set[str] = field(default_factory=set)  # names of replicas that it has left
    unfit: set[str] = field(default_factory=set)  # names of those that are not to be tried now
    refusal: AEngineError | None = None  # why the last of them is not

    def judge(self, error: AEngineError, name: str, *, acknowledged: bool) -> FailoverDecision:
        """What it means that `error` ended its stay at the replica of this name, which had `acknowledged` it."""
        match error:
            case ConnectionLostError() | EngineDeadError():
                return FailoverDecision.LOST
            case EngineStateError():
                return FailoverDecision.LEFT
            case ServerError() if error.code == "UNAVAILABLE" or (not error.reason and error.code in _OF_CONNECTIONS):
                return FailoverDecision.LEFT
            case QueueFullError():
                return FailoverDecision.REFUSED
            case RequestIdInUseError():  # where it was before, what is left of it may not be gone yet
                return FailoverDecision.REFUSED if name in self.been_at else FailoverDecision.FINAL
            case InvalidRequestError():  # as a replica with less room sees it
                return FailoverDecision.REFUSED if self.begun and not acknowledged else FailoverDecision.FINAL
            case _:
                return FailoverDecision.FINAL


def share_blame(suspects: Collection[RoutedWork]) -> None:
    """A replica has died that was computing these, which had brought nothing: they may be what it died of."""
    for work in suspects:
        work.blame += 1 / len(suspects)


def check_blame(work: RoutedWork, error: AEngineError) -> None:
    """Raises `PoisonRequestError` for a request that has too much."""
    if work.blame >= MOST_BLAME:
        text = f"the request was at {', '.join(sorted(work.been_at))} when they died, and had brought nothing there; it is not tried again"
        raise PoisonRequestError(text) from error
