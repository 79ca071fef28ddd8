"""`RoutedRequest`: one request of a router, from its submission to its end, at however many replicas.

Owns where the request is, and its tokens until they are read. A token is taken from one source alone, at once recorded as its progress, and
never asked for again. What comes from a replica that the request has left is not looked at.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import anyio

from aengine.api.errors import AEngineError, EngineStateError
from aengine.api.outputs import FinishReason, RequestInfo, RequestState, Timing, Token
from aengine.api.params import SamplingParams
from aengine.api.receipt import ReceiptFacts
from aengine.api.request import ForkPoint, NamedImage, OptionFields, RequestOptions
from aengine.api.stream import StreamSource, end_from_outside
from aengine.client.active_request import ActiveRequest
from aengine.client.client import AS_THEY_COME, FEW_MESSAGES
from aengine.router.fleet import Fleet
from aengine.router.replica import Attempt, Replica
from aengine.router.replica_load import ReplicaLoad
from aengine.router.work import OtherTextsError, RequestProgress, RoutedWork

Tokenize = Callable[[], Awaitable[tuple[tuple[Sequence[int], Sequence[NamedImage]], str]]]
"""Gives the ids of a prompt, and `ReplicaLoad.texts` of the replica that made them."""


class _Stay:
    """What comes of a request from one replica."""

    __slots__ = ("attempt", "generation", "load", "num_before", "source", "weights_behind")

    def __init__(self, attempt: Attempt, source: ActiveRequest, num_before: int) -> None:
        """`num_before`: tokens that the request had when it came there."""
        self.attempt = attempt
        self.source = source
        self.num_before = num_before
        self.load = attempt.replica.load
        self.generation = self.load.generation  # for which it was chosen
        self.weights_behind = self.load.weights_behind


class RoutedRequest(StreamSource):
    """Made and used in one event loop. It is `begin`-ed once."""

    def __init__(
        self,
        fleet: Fleet,
        request_id: str,
        params: SamplingParams,
        sent: SamplingParams,
        options: RequestOptions,
        open_fork: Callable[[ForkPoint, SamplingParams, OptionFields], RoutedRequest],
        *,
        few_messages: bool,
        on_gone: Callable[[RoutedRequest], object],
    ) -> None:
        """`params`: with the defaults of the model; `sent`: as they were given, with the seed. `on_gone` is called when it has ended and no
        replica has pages for it."""
        super().__init__(request_id, params, options, open_fork, loop := asyncio.get_running_loop())
        self._fleet = fleet
        self.progress = RequestProgress(sent, options, self.live_sequences)
        self._delivery = FEW_MESSAGES if few_messages else AS_THEY_COME
        self._on_gone = on_gone
        self._loop = loop
        self._work: RoutedWork | None = None  # once the ids are known
        self._stay: _Stay | None = None  # where its tokens come from
        self._hedge: _Stay | None = None  # where they may come from, too, as long as none has come
        self._hedge_timer: asyncio.TimerHandle | None = None
        self._kept: deque[Token] = deque()  # unread tokens of replicas that it has left; they come before those of `_stay`
        self._task: asyncio.Task[None] | None = None  # tokenizes, or looks for a replica
        self._tokenize: Tokenize | None = None  # where the prompt is a text
        self._texts: str | None = None  # of the replica that made the ids
        self._made_by: tuple[ReplicaLoad, int] | None = None  # the replica of the latest token, and the version of its weights there
        self._left: Replica | None = None  # which lives on, and has its KV; or where the request was last, if it has ended
        self._leaving: list[ActiveRequest] = []  # that were cancelled, and may hold pages yet
        self._finished = False
        self._cancelled = False  # whatever befalls it now, it has ended as it was told
        self._arrival_time = time.time()
        self._arrival = time.monotonic()  # these in seconds
        self._first_token: float | None = None
        self._ended = 0.0
        self._num_stays = 0
        if options.receipt:
            self.receipt_facts = self._receipt_facts

    # ---- used by the stream --------------------------------------------------------------------------------------------

    @property
    def timing(self) -> Timing:
        """At one replica what that tells; over several as it was seen here."""
        if self._num_stays == 1 and self._stay is not None:
            return self._stay.source.timing
        first = self._first_token
        return Timing(
            first_token=None if first is None else first - self._arrival,
            decode=None if first is None else (self._ended if self._finished else time.monotonic()) - first,
        )

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def unread(self) -> int:
        return len(self._kept) + (0 if self._stay is None else self._stay.source.unread)

    @property
    def gone(self) -> bool:
        return self._finished and not self._leaving

    def info(self) -> RequestInfo:
        if self._finished:
            state = RequestState.FINISHED
        elif self.progress.ids is None:
            state = RequestState.PREPARING
        else:
            state = RequestState.WAITING if self._first_token is None else RequestState.RUNNING
        num_tokens = self.progress.num_tokens + self.unread - len(self._kept)
        return RequestInfo(self.request_id, state, self.usage_with(num_tokens), self.timing, self._arrival_time)

    def _receipt_facts(self, version: int) -> ReceiptFacts:
        """Replicas that follow each other compute the same, so the latest speaks for all."""
        replica = self._left if self._stay is None else self._stay.attempt.replica
        options, parts, number = self.progress.own_options, dict[str, str](), 0
        if replica is not None:
            parts, number = dict(replica.info.fingerprint_parts), replica.adapters.get(options.adapter or "", 0)
        known = options.known_outputs or [()] * self.params.n
        return ReceiptFacts(self.progress.ids or (), known, parts, options.adapter or "", number, self.image_tokens)

    def pop(self) -> Token | None:
        if self._kept:
            return self._kept.popleft()
        return None if self._stay is None else self._take(self._stay)

    def cancel(self) -> None:
        if self._finished:
            return
        self._cancelled = True
        self._stop_hedging()
        if self._task is not None:
            self._task.cancel()
        if self._stay is None:
            self._close(FinishReason.CANCELLED)
        else:
            self._release(self._stay.source)
            self._stay.source.cancel()  # which ends it, by `_on_news`

    def drop(self) -> None:
        """Also when the loop is closed."""
        if not self._finished:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.cancel)

    def discard(self, indexes: Iterable[int]) -> None:
        self._kept.clear()
        if self._stay is not None:
            self._stay.source.discard(())
        if self.error is None:
            self._kept.extend(end_from_outside(index, FinishReason.CANCELLED) for index in indexes)

    async def wait_released(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._task is not None:
                await asyncio.wait({self._task})
            while self._leaving:
                source = self._leaving[-1]
                await source.wait_released()
                self._on_released(source)
            if self._stay is not None:
                await self._stay.source.wait_released()

    # ---- used by the router --------------------------------------------------------------------------------------------

    def begin(self, ids: Sequence[int] | None, tokenize: Tokenize | None) -> None:
        """Submit it, at once where a replica takes it and the ids of its prompt are known; else when `tokenize` has given them. Raises
        `InvalidRequestError`."""
        if ids is not None:
            self._set_prompt(ids)
            if self._board():
                return
        self._tokenize = tokenize
        self._task = asyncio.ensure_future(self._settle())

    async def end_request(self) -> bool:
        """Cancel it as `cancel(request_id)` does; returns when its pages are free: whether it was in flight."""
        if self._finished:
            await self.wait_released()
            return False
        self._cancelled = True  # so that it goes nowhere else
        stay, ended = self._stay, False
        if stay is not None and stay.source.acknowledged and self._hedge is None:
            with suppress(AEngineError):  # the text that is held back comes with the end that the server makes
                ended = await stay.attempt.replica.ask(lambda client: client.cancel(self.request_id))
        if not ended:
            self.cancel()
        await self.wait_released()
        return True

    # ---- tokens --------------------------------------------------------------------------------------------------------

    def _take(self, stay: _Stay) -> Token | None:
        """The next token of a stay, which from now on is what the request has."""
        token = stay.source.pop()
        if token is None:
            return None
        if token.token_id >= 0:
            self._made_by = stay.load, token.weights_version
            if stay.weights_behind:
                token = replace(token, weights_version=token.weights_version + stay.weights_behind)
        self.progress.add_token(token)
        return token

    def _on_news(self, stay: _Stay) -> None:
        """Called once for all that a replica sends in one message."""
        source, attempt = stay.source, stay.attempt
        if not attempt.answered:
            if source.acknowledged and not attempt.acknowledged:
                self._on_acknowledged(stay)
            if source.unread:
                if (version := self._other_version(stay)) is not None:
                    stay.load.saw_weights(version)
                    source.discard(())
                    self._on_stay_lost(stay, EngineStateError("the replica got other weights than those that the request goes on with"))
                    return
                self._on_first_token(stay)
        if source.finished:
            self._on_source_end(stay)
        elif stay is self._stay and source.unread and stay.load.stats.role == "prefill" and self._fleet.has_roles:
            self._on_stay_lost(stay, EngineStateError("the replica computes prompts alone, and this one is computed"))
        else:
            self.notify()

    def _other_version(self, stay: _Stay) -> int | None:
        """The version of the weights that the replica got before it began with what another had begun, where the router was not told in
        time; None: it has those that it was chosen for."""
        version = stay.source.first_version
        is_bound = self._made_by is not None or (stay is self._hedge and self._has_prompt_logprobs)
        return None if version is None or not is_bound or stay.load.generation_of(version) == stay.generation else version

    def _on_acknowledged(self, stay: _Stay) -> None:
        stay.attempt.acknowledge()
        if stay is self._stay:
            self._share_prompt(stay)
        self.ready.set()

    def _share_prompt(self, stay: _Stay) -> None:
        """Logprobs of the prompt are added to the list of the stay, unless all have come before."""
        if not self._has_prompt_logprobs:
            self.prompt_logprobs = stay.source.prompt_logprobs

    @property
    def _has_prompt_logprobs(self) -> bool:
        return len(self.prompt_logprobs) == self.prompt_tokens

    def _on_first_token(self, stay: _Stay) -> None:
        """At this stay. Of two the other one ends."""
        stay.attempt.answer()
        if self._first_token is None:
            self._first_token = time.monotonic()
        if stay is self._hedge:
            self._hedge, self._stay = self._stay, stay
            self._share_prompt(stay)
        self._stop_hedging()

    # ---- ends ----------------------------------------------------------------------------------------------------------

    def _on_source_end(self, stay: _Stay) -> None:
        error = stay.source.error
        if error is None:
            if stay is self._hedge:
                return  # it has brought nothing: it was cancelled
            self.cached_prompt_tokens = stay.source.cached_prompt_tokens
            self.reasoning_tokens, self.image_tokens = stay.source.reasoning_tokens, stay.source.image_tokens
            self.rewritten_tokens, self.drafts = stay.source.rewritten_tokens, stay.source.drafts
            self.loaded_prompt_tokens = stay.source.loaded_prompt_tokens
            self._finish()
        else:
            assert isinstance(error, AEngineError), "what a client raises"
            self._on_stay_lost(stay, error)

    def _on_lost(self, attempt: Attempt, error: AEngineError) -> None:
        """The replica is lost; nothing may have come of that from the source, which lives on while its replica hangs."""
        for stay in (self._stay, self._hedge):
            if stay is not None and stay.attempt is attempt:
                self._on_stay_lost(stay, error)

    def _on_stay_lost(self, stay: _Stay, error: AEngineError) -> None:
        """It ends with `error`, which may be that of the request."""
        stay.source.waiter = None
        if stay is self._hedge:
            self._hedge = None
        else:
            while (token := self._take(stay)) is not None:
                self._kept.append(token)
            self._stay = None
            if self._made_by is None and self._has_prompt_logprobs and self.prompt_tokens > 1:  # they belong to the output
                self._made_by = stay.load, stay.load.stats.weights_version
        if not stay.source.finished:  # its replica lives on, or hangs
            if stay.attempt.replica.connected:
                self._release(stay.source)
            stay.source.cancel()
        failure: AEngineError | None = None
        try:
            self._fleet.failed(stay.attempt, error)
        except AEngineError as raised:
            failure = raised
        stay.attempt.leave_replica(self.progress.num_tokens - stay.num_before)
        if self._finished or self._stay is not None:
            return  # the other of two goes on
        if self._hedge is not None and failure is None:
            self._stay, self._hedge = self._hedge, None
            self._share_prompt(self._stay)
            return
        if self._cancelled or not self.progress.open:  # all ends have come, and what is missing is what it took
            self._left = stay.attempt.replica
            self._close(FinishReason.CANCELLED)
        elif failure is not None:
            self._fail(failure)
        else:
            self._left = stay.attempt.replica if stay.attempt.replica.connected and stay.source.acknowledged else None
            self._task = asyncio.ensure_future(self._settle())
            if self._kept:
                self.notify()

    def _close(self, reason: FinishReason) -> None:
        """End the sequences that have no end."""
        self._kept.extend(end_from_outside(index, reason) for index in sorted(self.progress.open))
        self.progress.open.clear()
        self._finish()

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._finish()

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._ended = time.monotonic()
            self._stop_hedging()
            if self._stay is not None:
                source = self._stay.source
                source.waiter = None
                cached = source.cached_prompt_tokens if source.finished and source.error is None else None
                self._stay.attempt.leave_replica(self.progress.num_tokens + source.unread - self._stay.num_before, cached)
            self.ready.set()
            if not self._leaving:
                self._on_gone(self)
            self.notify()

    def _release(self, source: ActiveRequest) -> None:
        """Remember what is to be cancelled until its pages are free."""
        self._leaving.append(source)
        waiting = asyncio.ensure_future(source.wait_released())
        waiting.add_done_callback(lambda _: self._on_released(source))

    def _on_released(self, source: ActiveRequest) -> None:
        if source in self._leaving:
            self._leaving.remove(source)
            if self.gone:
                self._on_gone(self)

    # ---- replicas ------------------------------------------------------------------------------------------------------

    def _set_prompt(self, ids: Sequence[int], images: Sequence[NamedImage] | None = None) -> None:
        self.progress.set_prompt(ids, images)
        self.prompt_tokens = len(ids)

    async def _settle(self) -> None:
        """Find a replica for it."""
        try:
            with anyio.move_on_after(self.progress.seconds_left) as scope:
                attempt = None
                while attempt is None or attempt.ended:
                    if self.progress.ids is None:
                        assert self._tokenize is not None
                        prompt, self._texts = await self._tokenize()
                        self._set_prompt(*prompt)
                    try:
                        attempt = await self._fleet.find(self._refresh_work(), self._on_lost)
                    except OtherTextsError:  # it has no token yet
                        self.progress.ids = None
                    else:
                        await self._bring_kv(attempt)
                self._open_at(attempt)
            if scope.cancelled_caught:
                self._close(FinishReason.DEADLINE)
        except Exception as error:  # also what nobody expects: its reader must not wait for ever
            if not self._finished:
                self._fail(error)

    async def _bring_kv(self, attempt: Attempt) -> None:
        """From where it was to where it goes on."""
        source, self._left = self._left, None
        if source is None:
            return
        options = self.progress.own_options
        try:
            await self._fleet.bring_kv(source, attempt.replica, self.progress.named_tokens, options.cache_salt or "", options.adapter)
        except BaseException:  # it is cancelled, or its time is over
            attempt.leave_replica()
            raise

    def _board(self) -> bool:
        """Whether a replica has taken it at once."""
        attempt = self._fleet.board(self._refresh_work(), self._on_lost)
        if attempt is not None:
            self._open_at(attempt)
        return attempt is not None

    def _open_at(self, attempt: Attempt) -> None:
        """Raises `InvalidRequestError` for what cannot be sent."""
        self._stay = self._enter(attempt)
        seconds = self._fleet.config.hedge_seconds
        if self._hedge_timer is not None:
            self._hedge_timer.cancel()
        if seconds is not None and self._first_token is None:
            self._hedge_timer = self._loop.call_later(seconds, self._start_hedging)

    def _enter(self, attempt: Attempt) -> _Stay:
        progress = self.progress
        assert progress.ids is not None
        try:
            params = progress.params(has_prompt_logprobs=self._has_prompt_logprobs)
            source = attempt.replica.client.open(progress.ids, params, progress.options(self.request_id), self._delivery)
        except BaseException:
            attempt.leave_replica()
            raise
        stay = _Stay(attempt, source, progress.num_tokens)
        source.waiter = partial(self._on_news, stay)
        self._num_stays += 1
        return stay

    def _start_hedging(self) -> None:
        stay, work = self._stay, self._work
        if stay is None or work is None or stay.attempt.answered or self._finished:
            return
        name = stay.attempt.replica.name
        was_fit = name not in work.unfit
        work.unfit.add(name)
        prompt, work.prompt = work.prompt, replace(work.prompt, generation=stay.load.generation)  # logprobs of the prompt may have come
        attempt = self._fleet.board(work, self._on_lost)
        work.prompt = prompt
        if was_fit:
            work.unfit.discard(name)
        if attempt is not None:
            self._hedge = self._enter(attempt)

    def _stop_hedging(self) -> None:
        if self._hedge_timer is not None:
            self._hedge_timer.cancel()
            self._hedge_timer = None
        if self._hedge is not None:
            hedge, self._hedge = self._hedge, None
            hedge.source.waiter = None
            hedge.attempt.leave_replica()
            if not hedge.source.finished:
                self._release(hedge.source)
                hedge.source.cancel()

    def _refresh_work(self) -> RoutedWork:
        generation = texts = None
        if self._made_by is not None:
            load, version = self._made_by
            generation = load.generation_of(version)
        else:
            texts = self._texts
        prompt = self.progress.prompt(self._fleet.digest_salt, generation, texts)
        if self._work is None:
            self._work = RoutedWork(prompt)
        else:
            self._work.prompt = prompt
        return self._work
