"""Records of calls and generations that have ended: plain data for the access log and the metrics.

Filled in by the code that runs the call; handed to the `Observers` at the end. Knows nothing of logs or metrics.

Generations and calls in flight: how many there are and may be, the ids that come with a call, its own and that of its trace, how calls
are ended from outside, and how one whose client stands still is found.

Knows nothing of a door's side of a call; a call that is ended here gets a cancellation with an error beside it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import re
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import field, replace
from functools import partial
from typing import TypeVar

from aengine.api.dataclass import dataclass
from aengine.api.outputs import FinishReason, Histogram, Timing, Token, Usage
from aengine.api.params import SamplingParams
from aengine.api.request import RequestOptions
from aengine.chat.text_source import random_id
from aengine.server.core.decoding import Decoding
from aengine.server.core.errors import ServiceError, draining

RecordT = TypeVar("RecordT")

MAX_LABEL = 128
"""Characters of the name of a tenant."""

logger = logging.getLogger(__name__)

ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, as far as that was checked."""

    name: str | None = None  # of the token or of the certificate; None for those that need neither
    sees_all: bool = True  # whether the requests of others are shown to it: to administrators, and where nobody is asked who they are

    @classmethod
    def of_owner(cls, owner: str | None) -> Caller:
        """Who asked for something that is stored with this name."""
        return cls(owner, sees_all=owner is None)

    def may_see(self, owner: str | None) -> bool:
        """Whether what the caller of this name asked for is shown to it."""
        return self.sees_all or owner == self.name

    @property
    def tenant(self) -> str:
        """Whose share its requests count for unless they say so: its own; that of all where nobody is asked who he is."""
        name = self.name or ""
        return name if len(name) <= MAX_LABEL else hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


class Progress:
    """The tokens of a generation of one sequence: those that are known from a process before, which come again, and those that came since
    they were last written."""

    def __init__(self, written: Sequence[tuple[int, str]] = ()) -> None:
        """`written`: ids and texts. The last is made again: it may be the one that ends the sequence."""
        self.known = tuple(Token(0, token_id, text) for token_id, text in written[:-1])
        self.unwritten: list[tuple[int, str]] = []
        self._num_to_skip = len(written)

    def note_tokens(self, tokens: Iterable[Token]) -> None:
        """`tokens` came; one without an id brings what was held back, and is none."""
        for token in tokens:
            if self._num_to_skip:
                self._num_to_skip -= 1
            elif token.token_id >= 0:
                self.unwritten.append((token.token_id, token.text))


@dataclass(slots=True)
class Decided:
    """What a call would leave to chance, decided, so that the same comes of it when it is made again."""

    seed: int
    request_id: str
    created: float  # on time.time
    one_by_one: bool = False  # each event has one token, so that they do not depend on what comes together
    num_generations: int = 0  # so far
    is_repeatable: bool = True  # False: the order of its events is left to chance
    progress: Progress | None = None  # of its generation, if it has but one
    shows_more: bool = False  # than ids and texts of tokens, so that it cannot go on behind those that are known

    @classmethod
    def by_chance(cls, *, one_by_one: bool = False) -> Decided:
        return cls(secrets.randbits(62), uuid.uuid4().hex, time.time(), one_by_one)

    def of_next(self, params: SamplingParams, options: RequestOptions) -> tuple[SamplingParams, RequestOptions]:
        """The parameters and options of the next generation of the call."""
        number, self.num_generations = self.num_generations, self.num_generations + 1
        self.is_repeatable &= number == 0 and params.n == 1
        self.shows_more |= params.logprobs is not None or params.prompt_logprobs is not None or options.known_outputs is not None
        if self.shows_more or number or params.n > 1:
            self.progress = None
        own_id = f"{self.request_id}-{number}" if number else self.request_id
        params = replace(params, seed=self.seed + number) if params.seed is None else params
        return params, replace(options, request_id=own_id) if options.request_id is None else options

    def call_ids(self, index: int) -> Callable[[], str]:
        """Gives the ids of the calls of tools in sequence `index`."""
        chance = random.Random(f"{self.seed} {index}")  # ids, no secrets
        return partial(random_id, chance)


@dataclass(slots=True, eq=False)
class CallRecord:
    """One call of a client: an RPC, or an HTTP request."""

    method: str  # "/aengine.v1.GenerationService/Generate", "POST /v1/chat/completions"
    peer: str  # "ipv4:127.0.0.1:40000"
    request_id: str  # of the call: the client's x-request-id, or a random one
    trace_id: str | None = None  # of the W3C traceparent, if one came
    caller: Caller = Caller()
    start: float = field(default_factory=time.monotonic)
    messages_sent: int = 0
    code: str = ""  # how it ended: "INVALID_ARGUMENT" with gRPC, "400" with HTTP
    reason: str = ""  # of the error; empty without one, and for calls that the client ended
    seconds: float = 0.0
    prompt_tokens: int = 0  # of the generations that ended while the call lasted
    completion_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    traceparent: str | None = None  # with the trace id
    is_polled: bool = False  # whether its method is one that is asked again and again, as /metrics is
    decided: Decided | None = None  # of one that may be made again

    @property
    def owner(self) -> str:
        """Whose limits it counts for: the name of the caller, or else its address."""
        return self.caller.name or self.peer.rpartition(":")[0]


@dataclass(slots=True)
class GenerationRecord:
    """One request to the engine. Several may belong to one call."""

    request_id: str
    start: float = field(default_factory=time.monotonic)
    model: str = ""
    params: SamplingParams | None = None
    usage: Usage = field(default_factory=Usage)
    finish_reason: FinishReason = FinishReason.CANCELLED  # of the sequence that ended last; ERROR and CANCELLED come after all others
    timing: Timing = field(default_factory=Timing)
    total_seconds: float = 0.0
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS))


@dataclass(frozen=True, slots=True)
class Observers:
    """Functions that are called in the event loop with each record, once. They must be quick."""

    on_call_end: list[Callable[[CallRecord], None]] = field(default_factory=list)
    on_generation_end: list[Callable[[GenerationRecord], None]] = field(default_factory=list)


def notify(observers: Iterable[Callable[[RecordT], None]], record: RecordT) -> None:
    """Call all. One that raises is a bug: it is logged, and the others are called all the same."""
    for observer in observers:
        try:
            observer(record)
        except Exception:
            logger.exception("an observer failed")


CURRENT_CALL: ContextVar[CallRecord | None] = ContextVar("CURRENT_CALL", default=None)
"""The call that a task works for. Tasks that a call starts inherit it."""


def current_time() -> int:
    """When the call was made that the task works for, in seconds on time.time."""
    call = CURRENT_CALL.get()
    return int(time.time() if call is None or call.decided is None else call.decided.created)


def current_caller() -> Caller:
    """Who made the call that the task works for."""
    call = CURRENT_CALL.get()
    return Caller() if call is None else call.caller


MAX_CHECK_SECONDS = 5.0
STALLED: Mapping[str, str] = {
    "READER_STALLED": "the client has not read for {:g} s",
    "SENDER_STALLED": "the client has not sent its message for {:g} s",
}
"""Messages of the errors that end a call whose client is too slow, by their reasons."""


class Admission:
    """Counts generations between their start and their end. To be used from one event loop."""

    def __init__(self, max_sequences_per_caller: int | None = None, max_waiting_tokens_per_caller: int | None = None) -> None:
        self.in_flight = 0
        self._most_sequences = max_sequences_per_caller
        self._most_tokens = max_waiting_tokens_per_caller
        self._sequences: Counter[str] = Counter()  # by caller
        self._tokens: Counter[str] = Counter()  # the same, of prompts of generations that have no token yet
        self.closed = False  # whether new generations are refused
        self.idle = asyncio.Event()  # set while there is no generation
        self.idle.set()

    @contextmanager
    def enter_generation(self, num_sequences: int = 1) -> Iterator[None]:
        """Held by a generation of so many sequences while it lives. Raises `ServiceError`: DRAINING once closed, and QUEUE_FULL for more
        than the caller may have."""
        if self.closed:
            raise draining()
        owner = _current_owner()
        if self._most_sequences is not None and self._sequences[owner] + num_sequences > self._most_sequences:
            raise ServiceError(
                "QUEUE_FULL",
                f"{self._sequences[owner]} sequences of the caller are under way, and {num_sequences} more are beyond "
                f"{self._most_sequences} (max_sequences_per_caller)",
            )
        self.in_flight += 1
        self.idle.clear()
        try:
            with _counted(self._sequences, owner, num_sequences):
                yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    @property
    def counts_tokens(self) -> bool:
        """Whether there is a limit for `wait`."""
        return self._most_tokens is not None

    def wait(self, num_tokens: int) -> AbstractContextManager[None]:
        """Held by a generation with a prompt of so many tokens until it has a token. Raises `ServiceError` (QUEUE_FULL) for more than the
        caller may have; one alone may have any number."""
        owner = _current_owner()
        had = self._tokens[owner]
        if self._most_tokens is not None and had and had + num_tokens > self._most_tokens:
            raise ServiceError(
                "QUEUE_FULL",
                f"prompt: {had} tokens of the caller wait already, and {num_tokens} more are beyond {self._most_tokens} "
                "(max_waiting_tokens_per_caller)",
            )
        return _counted(self._tokens, owner, num_tokens)


def _current_owner() -> str:
    call = CURRENT_CALL.get()
    return "" if call is None else call.owner


@contextmanager
def _counted(counter: Counter[str], owner: str, number: int) -> Iterator[None]:
    counter[owner] += number
    try:
        yield
    finally:
        counter[owner] -= number
        if not counter[owner]:
            del counter[owner]


@dataclass(slots=True, eq=False)
class Call(CallRecord):
    """One call, made in the task that runs it."""

    is_apart: bool = False  # it does not count among the others, nor is it ended with them
    task: asyncio.Task[None] | None = field(default_factory=asyncio.current_task)
    error: Exception | None = None  # why it was ended from outside
    mute: bool = False  # its headers are on their way, and no error can be sent until they are
    release: Callable[[], None] | None = None  # gives back what its message takes of `Decoding`
    waits: str | None = None  # for the client: a key of `STALLED`
    seen: tuple[str, int] | None = None  # what it waited for when it was last looked at
    waits_since: float = 0.0

    async def take_room(self, decoding: Decoding, num_bytes: int) -> None:
        """Take room for its message, until it is `answered`. Raises what `Decoding.take_room` raises."""
        self.release = await decoding.take_room(num_bytes, self.owner)

    def answered(self) -> None:
        """Its message is no longer needed. To be called when it has an answer, or has ended."""
        release, self.release = self.release, None
        if release is not None:
            release()

    def end_with(self, error: Exception) -> None:
        """Have it fail with `error`: at once, or where it is mute when it no longer is, unless it has come to its end then."""
        if self.error is None and self.task is not None:
            self.error = error
            if not self.mute:
                self.task.cancel()

    def give_up(self, error: Exception) -> None:
        """Have it fail with `error` at once, whether or not the client can be informed."""
        if (self.error is None or self.mute) and self.task is not None:
            self.error = error
            self.task.cancel()


class CallsInFlight:
    """To be used from one event loop. A call that waits for its client longer than `stall_seconds` is ended, within a quarter more."""

    def __init__(self, max_calls: int, stall_seconds: float) -> None:
        """`max_calls`: of either kind, so that neither can take the place of the other."""
        self.stall_seconds = stall_seconds
        self._max_calls = max_calls
        self._calls: set[Call] = set()
        self._apart: set[Call] = set()

    def __len__(self) -> int:
        return len(self._calls)

    def add_call(self, call: Call) -> None:
        """Count a call that begins. Raises `ServiceError` (TOO_MANY_CALLS) where the limit is reached."""
        calls = self._apart if call.is_apart else self._calls
        if len(calls) >= self._max_calls:
            raise ServiceError("TOO_MANY_CALLS", f"{self._max_calls} calls are under way, which is the limit")
        calls.add(call)

    def discard(self, call: Call) -> None:
        (self._apart if call.is_apart else self._calls).discard(call)

    async def end_all(self, error: Exception, seconds: float) -> None:
        """Have all calls fail with `error`; returns when their clients are informed, or after `seconds`."""
        tasks = [call.task for call in self._calls if call.task is not None]
        for call in tuple(self._calls):
            call.end_with(error)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def watch(self) -> None:
        """Look for calls whose client stands still, for ever: at all of them now and then, rather than with a timer for each message."""
        while True:
            await asyncio.sleep(min(self.stall_seconds / 8, MAX_CHECK_SECONDS))
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """End the calls that have waited too long. `now`: on time.monotonic."""
        for call in (*self._calls, *self._apart):
            if call.waits is None:
                call.seen = None
                continue
            seen = (call.waits, call.messages_sent)
            if call.seen != seen:
                call.seen, call.waits_since = seen, now
            elif now - call.waits_since >= self.stall_seconds:
                call.give_up(ServiceError(call.waits, STALLED[call.waits].format(self.stall_seconds)))


REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACEPARENT = re.compile(r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-[0-9a-f]{2}(?P<rest>-.*)?")


def request_id_of(given: Sequence[str]) -> str:
    """The client's, of the values of `REQUEST_ID_KEY`, if it is usable; else a random one."""
    return given[0] if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) else uuid.uuid4().hex


def trace_id_of(given: Sequence[str]) -> str | None:
    """The trace id of the `traceparent` of W3C Trace Context, level 1, of the values of that header. None without one, and for one that is
    not valid."""
    match = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if match is None or match["version"] == "ff" or not int(match["trace"], 16) or not int(match["parent"], 16):
        return None
    if match["version"] == "00" and match["rest"] is not None:  # later versions may have more fields, this one has not
        return None
    return match["trace"]
