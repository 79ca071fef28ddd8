"""`Replica`: one engine behind its own server, as long as its address is known: connected to, followed, lost and found again.

Owns the connection and whether the replica serves. Knows requests only as attempts, which end when it is lost; what a replica needs before
it serves is done by whoever made it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from aengine.api.errors import AEngineError, ConnectionLostError, EngineDeadError, EngineStateError, InvalidRequestError, ServerError
from aengine.api.outputs import EngineInfo, LoadReport, ModelInfo, ReplicaState
from aengine.client import AsyncClient, ClientConfig
from aengine.client.link import Backoff
from aengine.router.replica_load import ReplicaLoad
from aengine.router.work import RoutedWork, share_blame

TICKS = 8
"""Looks at whether a replica has said something, in the time after which it counts as lost. Few are missed where this process is late."""
STABLE_SECONDS = 5.0
"""A replica that is lost sooner after it was found is looked for less and less often."""

_log = logging.getLogger("aengine")

T = TypeVar("T")


Preparation = Callable[["Replica", AsyncClient, ReplicaLoad], Awaitable[None]]
"""Gives a replica what the others have, before it serves with this load. Raises `AEngineError` for one that cannot be used."""


class Attempt:
    """A request's stay at one replica."""

    __slots__ = ("_placement", "acknowledged", "answered", "ended", "on_lost", "replica", "suspect", "work")

    def __init__(self, work: RoutedWork, replica: Replica, on_lost: Callable[[Attempt, AEngineError], object]) -> None:
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

    def leave_replica(self, output_tokens: int = 0, cached_tokens: int | None = None) -> None:
        """It has ended, or goes elsewhere. `cached_tokens`: of its prompt; None: not known. Repeated calls do nothing."""
        if not self.ended:
            self.ended = True
            self.work.been_at.add(self.replica.name)
            self.replica.load.end_request(self._placement, time.monotonic(), output_tokens, cached_tokens)
            self._clear()
            del self.replica.aboard[self]
            self.replica.on_left()

    def _clear(self) -> None:
        if self.suspect:
            self.suspect = False
            self.replica.num_suspects -= 1
            self.replica.on_left()


class Replica:
    """One engine behind its own server. `state` and `load` are for whoever chooses a replica."""

    def __init__(
        self,
        name: str,
        config: ClientConfig,
        *,
        hang_seconds: float,
        slow_start_seconds: float,
        digest_salt: bytes,
        prepare: Preparation,
        on_change: Callable[[], object],
    ) -> None:
        """`on_change` is called when it may take requests that it did not take before, or takes no more."""
        self.name = name
        self.state = ReplicaState.CONNECTING
        self.load = ReplicaLoad(name, page_size=1)
        self.load.serving = False
        self.report = LoadReport(self.load.stats)  # the latest
        self.model: ModelInfo | None = None  # as its server said, as the next one
        self.info = EngineInfo()
        self.adapters: dict[str, int] = {}  # the keys of those that it has, by their names
        self.aboard: dict[Attempt, None] = {}  # in the order of their coming
        self.num_suspects = 0  # of those, that others have died of, perhaps, and that brought nothing here yet
        self.error: AEngineError | None = None  # why it does not serve
        self.tried = asyncio.Event()  # it has served, or could not at first
        self.empty = asyncio.Event()  # nothing is aboard
        self.empty.set()
        self.retired = False  # its address is no longer known
        self.has_served = False
        self._config = config
        self._hang_seconds = hang_seconds
        self._slow_start_seconds = slow_start_seconds
        self._digest_salt = digest_salt
        self._prepare = prepare
        self._on_change = on_change
        self._client: AsyncClient | None = None
        self._closing: set[asyncio.Task[None]] = set()  # clients of connections that were lost
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._silent = 0  # ticks
        self._task = asyncio.ensure_future(self._run())

    @property
    def connected(self) -> bool:
        return self._client is not None and not self._lost.done()

    # ---- for requests --------------------------------------------------------------------------------------------------

    @property
    def client(self) -> AsyncClient:
        """The client that is connected to the replica, which serves or drains."""
        assert self._client is not None
        return self._client

    async def ask(self, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """A call that ends at once with an error when the replica is lost. Raises what the call raises."""
        if self._client is None:
            raise self.error or ConnectionLostError(f"replica {self.name} is not connected")
        lost = self._lost
        task = asyncio.ensure_future(call(self._client))
        try:
            either: set[asyncio.Future[Any]] = {task, lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if task.done() and not task.cancelled() and not (lost.done() and task.exception() is not None):
            return task.result()
        raise self.error or ConnectionLostError(f"replica {self.name} is lost")

    def lose(self, error: AEngineError) -> None:
        """It is dead, hangs or cannot be reached. All attempts aboard end. Does nothing where that is known."""
        if self._lost.done() or self._client is None:
            return
        was, self.error = self.state, error
        self._set_state(ReplicaState.LOST)
        level = logging.INFO if isinstance(error, EngineStateError) else logging.WARNING  # the one that somebody wanted
        _log.log(level, "replica %s is lost, with %d requests: %s", self.name, len(self.aboard), error)
        self._lost.set_result(None)
        if was is ReplicaState.SERVING and isinstance(error, ConnectionLostError | EngineDeadError):
            share_blame([attempt.work for attempt in self.aboard if attempt.acknowledged and not attempt.answered])
        self._end_all(error)

    def drain(self) -> None:
        """Send it nothing new, until it has been lost and found again."""
        if self.state is ReplicaState.SERVING:
            self._set_state(ReplicaState.DRAINING)

    def expel(self, others: Callable[[Attempt], object]) -> int:
        """`drain`, and end the attempts aboard that can go on elsewhere; returns how many those were."""
        self.drain()
        return self._end_all(EngineStateError(f"replica {self.name} is drained"), others)

    def on_left(self) -> None:
        """For attempts: what kept others away may be gone."""
        if not self.aboard:
            self.empty.set()
        self._on_change()

    def _end_all(self, error: AEngineError, which: Callable[[Attempt], object] = lambda attempt: True) -> int:
        attempts = list(filter(which, self.aboard))
        for attempt in attempts:
            attempt.leave_replica()
            attempt.on_lost(attempt, error)
        return len(attempts)

    # ---- life ----------------------------------------------------------------------------------------------------------

    async def retire(self) -> None:
        """Its address is no longer known: let it go when its requests have ended or it is lost."""
        self.retired = True
        self.drain()
        if self._client is not None:
            await self.empty.wait()

    async def aclose(self) -> None:
        """Disconnect from the replica, and end the attempts that are there."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._closing:
            await asyncio.wait(self._closing)

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                client = await self._connect()
                since = time.monotonic()
                await self._serve(client)
                if time.monotonic() - since > STABLE_SECONDS:
                    backoff.reset()
            except AEngineError as error:
                if self.error is None or str(error) != str(self.error):
                    _log.warning("replica %s cannot be used: %s", self.name, error)
                self.error = error
                if self.state is not ReplicaState.LOST or not _is_out_of_reach(error):
                    self._set_state(ReplicaState.CONNECTING if _is_out_of_reach(error) else ReplicaState.REFUSED)
            finally:
                self.tried.set()
            if self.retired:
                return
            await backoff.wait(None)

    async def _connect(self) -> AsyncClient:
        """Raises `AEngineError`."""
        client = AsyncClient(self._config)
        try:
            await client.start()
            info, model = await client.engine_info(), client.model_info
            load = ReplicaLoad(
                self.name,
                page_size=info.page_size,
                max_num_seqs=info.max_num_seqs,
                adapters=self.adapters,
                now=time.monotonic(),
                slow_start_seconds=self._slow_start_seconds if self.has_served else 0.0,
                described=described(model, info),
                texts=info.fingerprint_parts.get("texts", f"{model.name}, {model.vocab_size}"),
            )
            load.serving = False
            await self._prepare(self, client, load)
            self.load, self.model, self.info = load, model, info
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(client.aclose()))
            raise
        return client

    async def _serve(self, client: AsyncClient) -> None:
        """Follow a replica that is connected, until it is lost."""
        self._client, self._lost, self._silent = client, asyncio.get_running_loop().create_future(), 0
        self.error = None
        reading = asyncio.ensure_future(self._follow(client))
        ticking = asyncio.ensure_future(self._tick())
        try:
            await asyncio.wait({self._lost})
        finally:
            self.lose(EngineStateError("the router is closed"))  # if it is not lost
            self._client = None
            for task in (reading, ticking):
                task.cancel()
            # What was cancelled there is waited for, which a dead server takes a while to grant; nobody else waits for that.
            closing = asyncio.ensure_future(_close(client, reading, ticking))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _follow(self, client: AsyncClient) -> None:
        """Reads what it tells of its load; serves from the first report on."""
        try:
            try:
                await self._read_reports(client, self._digest_salt)
            except (ServerError, InvalidRequestError) as error:  # not an administrator, or it is a router itself
                if isinstance(error, ServerError) and error.code != "PERMISSION_DENIED":
                    raise
                _log.warning("replica %s does not tell what it has in its cache: %s", self.name, error)
                await self._read_reports(client, None)
            self.lose(ConnectionLostError(f"replica {self.name} tells its load no more"))
        except AEngineError as error:
            self.lose(error)

    async def _read_reports(self, client: AsyncClient, digest_salt: bytes | None) -> None:
        async with aclosing(client.watch_load(digest_salt=digest_salt)) as reports:
            async for report in reports:
                self._silent = 0
                self._take(report)
                if self.info.fingerprint != report.stats.fingerprint:
                    self.info = await client.engine_info()

    def _take(self, report: LoadReport) -> None:
        before, self.report = self.load.generation, report
        self.load.report(report, time.monotonic())
        if report.draining and self.state is ReplicaState.SERVING:
            self._set_state(ReplicaState.DRAINING)
        elif self.state in (ReplicaState.CONNECTING, ReplicaState.LOST, ReplicaState.REFUSED):
            self._set_state(ReplicaState.DRAINING if report.draining or self.retired else ReplicaState.SERVING)
            self.has_served = True
            self.tried.set()
            _log.info("replica %s serves", self.name)
        elif self.load.generation != before:
            self._on_change()

    async def _tick(self) -> None:
        """Counts looks in vain rather than seconds: where this process was held up, what has come meanwhile is read first."""
        while True:
            await asyncio.sleep(self._hang_seconds / TICKS)
            self._silent += 1
            if self._silent > TICKS:
                self.lose(ConnectionLostError(f"replica {self.name} has said nothing for {self._hang_seconds:g} s"))

    def _set_state(self, state: ReplicaState) -> None:
        self.state = state
        self.load.serving = state is ReplicaState.SERVING
        self._on_change()


def described(model: ModelInfo, info: EngineInfo) -> str:
    """What stands for the fingerprint of a server that tells none."""
    facts = model.name, model.dtype, model.quantization, model.vocab_size, model.max_model_len, info.page_size
    return ", ".join(str(fact) for fact in facts if fact != "")


def _is_out_of_reach(error: AEngineError) -> bool:
    """Whether a server cannot be reached or is not ready, as opposed to one that answers and cannot be used."""
    if isinstance(error, ServerError):
        return error.code in ("UNAVAILABLE", "CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED")
    return isinstance(error, ConnectionLostError | EngineStateError | EngineDeadError)


async def _close(client: AsyncClient, *tasks: asyncio.Task[None]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()
