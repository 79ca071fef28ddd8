"""`Fleet`: the replicas there are, and how a request finds one of them: by routing, waiting where it must.

Knows nothing of tokens, nor of where addresses come from.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import anyio

from aengine.client import AsyncClient
from aengine.client.failures import FIRST_BACKOFF, LONGEST_BACKOFF
from aengine.errors import AEngineError, EngineStateError, NoReplicaError, QueueFullError, RequestEndedError
from aengine.outputs import ReplicaState
from aengine.router.config import RouterConfig
from aengine.router.load import RoutedPrompt
from aengine.router.replica import Attempt, Preparation, Replica
from aengine.router.routing import Routing, RoutingPolicy
from aengine.router.work import Verdict, Work, check_blame

RETRY_SECONDS = 0.25
"""After which a replica is tried again that did not take a request."""

T = TypeVar("T")


class Fleet:
    """Made in a running loop."""

    def __init__(self, config: RouterConfig, token: str | None, prepare: Preparation) -> None:
        self.config = config
        self.digest_salt = secrets.token_bytes(16)
        self.replicas: dict[str, Replica] = {}
        self._token = token
        self._prepare = prepare
        self._routing = Routing(RoutingPolicy(config.routing_policy))
        self._waiters: set[asyncio.Future[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    # ---- which there are -----------------------------------------------------------------------------------------------

    def set_addresses(self, addresses: frozenset[str]) -> None:
        """From now on these are the replicas. Those that are not among them get nothing new, and go when their requests have ended."""
        for name in sorted(addresses):
            known = self.replicas.get(name)
            if known is None or known.retired:
                self.replicas[name] = Replica(
                    name,
                    self.config.client_config(name, self._token),
                    hang_seconds=self.config.hang_seconds,
                    slow_start_seconds=self.config.slow_start_seconds,
                    digest_salt=self.digest_salt,
                    prepare=self._prepare,
                    on_change=self._on_change,
                )
        for name, replica in list(self.replicas.items()):
            if name not in addresses:
                del self.replicas[name]
                task = asyncio.ensure_future(_retire(replica))
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)
        self._on_change()

    def serving(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state is ReplicaState.SERVING]

    async def aclose(self) -> None:
        """Disconnect from all."""
        self._closed = True
        for task in self._retiring:
            task.cancel()
        replicas = list(self.replicas.values())
        await asyncio.gather(*(replica.aclose() for replica in replicas), *self._retiring, return_exceptions=True)
        self._on_change()

    async def wait_changed(self, seconds: float) -> None:
        """Until some replica may take what it did not take before, `seconds` at most."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        try:
            await asyncio.wait({future}, timeout=seconds)
        finally:
            self._waiters.discard(future)

    def _on_change(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for future in waiters:
            if not future.done():
                future.set_result(None)

    # ---- a replica for a request ---------------------------------------------------------------------------------------

    def board(self, work: Work, on_lost: Callable[[Attempt, AEngineError], object]) -> Attempt | None:
        """A stay at the best replica for it now; None: there is none. `on_lost`: as of `Attempt`."""
        replicas = self.replicas
        version = work.prompt.weights_version
        if version is not None and (serving := self.serving()) and all(replica.load.weights_version > version for replica in serving):
            # Nowhere are the weights that it began with. It goes on with the new ones, as in an engine that computes its KV again.
            work.prompt = replace(work.prompt, weights_version=None)
        excluded: set[str] = work.unfit
        if work.blame > 0:  # apart from others of which replicas die, perhaps, so that it shows which of them it is
            excluded = excluded.union(name for name, replica in replicas.items() if replica.num_suspects)
        load = self._routing.choose(work.prompt, [replica.load for replica in replicas.values()], time.monotonic(), excluded)
        return None if load is None else Attempt(work, replicas[load.name], on_lost)

    async def find(self, work: Work, on_lost: Callable[[Attempt, AEngineError], object]) -> Attempt:
        """`board`, waiting for a replica. Raises `NoReplicaError`, or why the last of them refused a request that none has accepted."""
        if work.moves > 1:
            await asyncio.sleep(min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(work.moves - 2, 10)) * random.uniform(0.5, 1.5))
        give_up = time.monotonic() + self.config.wait_seconds
        while (attempt := self.board(work, on_lost)) is None:
            if isinstance(work.refusal, QueueFullError) and not work.begun:
                raise work.refusal
            left = give_up - time.monotonic()
            if left <= 0 or self._closed:
                raise self.none_for(work) from work.refusal
            await self.wait_changed(min(left, RETRY_SECONDS) if work.unfit else left)
            work.unfit.clear()
        return attempt

    def none_for(self, work: Work) -> AEngineError:
        """That there is no replica for it."""
        if self._closed:
            return EngineStateError("the router is closed")
        states = ", ".join(f"{name} is {replica.state.value}" for name, replica in sorted(self.replicas.items())) or "there are none"
        why = f"; the last answer was: {work.refusal}" if work.refusal is not None else ""
        return NoReplicaError(f"no replica took the request within {self.config.wait_seconds:g} s: {states}{why}")

    async def carry(self, prompt: RoutedPrompt, call: Callable[[AsyncClient], Awaitable[T]], timeout: float | None = None) -> T:
        """A call that any replica answers, at another one where it fails on the way. Raises what it raises, and `RequestEndedError` after
        `timeout`."""
        work = Work(prompt)
        try:
            with anyio.fail_after(timeout):
                while True:
                    attempt = await self.find(work, lambda attempt, error: None)
                    attempt.acknowledged = True
                    try:
                        answer = await attempt.replica.ask(call)
                        attempt.answer()
                        return answer
                    except AEngineError as error:
                        self.failed(attempt, error)
                    finally:
                        attempt.leave()
        except TimeoutError:
            raise RequestEndedError("there was no answer: its timeout passed") from None

    async def ask(self, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """`carry`, of what has no prompt."""
        return await self.carry(RoutedPrompt(1, secrets.randbits(64), lambda naming: ()), call)

    async def ask_all(self, call: Callable[[AsyncClient], Awaitable[T]], *, some: bool = False) -> dict[str, T]:
        """Of all replicas that are connected; their answers by name. One that is lost meanwhile is left out, since it is prepared again.
        Raises what another one raises, when all have answered, and `NoReplicaError` if there is none. `some`: what one raises is raised
        only if no other has answered; else that one is lost."""
        replicas = [replica for replica in self.replicas.values() if replica.connected]
        answers = await asyncio.gather(*(replica.ask(call) for replica in replicas), return_exceptions=True)
        pairs = [(replica, answer) for replica, answer in zip(replicas, answers, strict=True) if replica.connected]
        found = {replica.name: answer for replica, answer in pairs if not isinstance(answer, BaseException)}
        for replica, answer in pairs:
            if isinstance(answer, BaseException):
                if not (some and found and isinstance(answer, AEngineError)):
                    raise answer
                replica.lose(answer)
        if not found:
            raise NoReplicaError("no replica serves")
        return found

    def failed(self, attempt: Attempt, error: AEngineError) -> None:
        """An attempt has ended with `error`, and its request goes to another replica. Raises what it is to fail with, where it may not."""
        work, replica = attempt.work, attempt.replica
        match work.judge(error, replica.name, acknowledged=attempt.acknowledged):
            case Verdict.FINAL:
                raise error
            case Verdict.REFUSED:
                work.unfit.add(replica.name)
                work.refusal = error
            case Verdict.LEFT:
                work.unfit.add(replica.name)
                work.refusal = error
                work.moves += 1
            case Verdict.LOST:
                replica.lose(error)
                work.moves += 1
        check_blame(work, error)
        if work.moves > self.config.max_moves:
            raise NoReplicaError(f"the request went on elsewhere {self.config.max_moves} times in vain: {error}") from error


async def _retire(replica: Replica) -> None:
    try:
        await replica.retire()
    finally:
        await asyncio.shield(asyncio.ensure_future(replica.aclose()))
