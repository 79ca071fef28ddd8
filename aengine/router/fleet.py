"""`FleetInfo`: what all replicas have alike: the adapters and weights that were loaded through the router.

A replica that comes, or comes back, is given these before it serves. Knows nothing of requests.

`Fleet`: the replicas there are, and how a request finds one of them: by routing, waiting where it must. Replicas that give the same
tokens, by fingerprint, are a generation; the newest comes first.

Knows nothing of tokens, nor of where addresses come from."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import anyio

from aengine.api.dataclass import dataclass
from aengine.api.errors import (
    AdapterNotFoundError,
    AEngineError,
    ConnectionLostError,
    EngineStateError,
    NoReplicaError,
    QueueFullError,
    RequestEndedError,
)
from aengine.api.outputs import AdapterInfo, EngineStats, ModelInfo, ReplicaInfo, ReplicaState
from aengine.api.params import SamplingParams
from aengine.client import AsyncClient
from aengine.client.link import FIRST_BACKOFF, LONGEST_BACKOFF
from aengine.router.replica import Attempt, Replica
from aengine.router.replica_load import START_RATE, ReplicaLoad, ReplicaRouting, RoutedPrompt, RoutingPolicy
from aengine.router.router_config import RouterConfig
from aengine.router.work import FailoverDecision, OtherTextsError, RoutedWork, check_blame

FEW_SECONDS = 0.002  # what is computed in so few is not worth a question
MOST_KV_SECONDS = 2.0  # that KV may take from one replica to another beyond what computing it takes
_log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """New weights of all replicas, as `AsyncEngine.update_weights` takes them."""

    source: str  # a directory
    partial: bool


class FleetInfo:
    """The adapters and weights that all replicas of a router have alike. To be made in a running loop."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterInfo] = {}  # all that there are, by name
        self._paths: dict[str, str] = {}  # of adapters that were loaded through the router, by name
        self._weights: dict[str, tuple[WeightsChange, ...]] = {}  # what replicas of a generation get when they come
        self._weights_version: int | None = None  # how often weights were replaced through the router; None: no replica has been there
        self._changing = asyncio.Lock()  # a replica is prepared, or all are changed

    async def prepare(self, fleet: Fleet, replica: Replica, client: AsyncClient, load: ReplicaLoad) -> None:
        """Make a replica what the others are. Raises what its server raises, unless no other one serves: then it serves as it is."""
        if replica.has_served and client.model_info.output_head:
            await client.generate([0], SamplingParams(max_tokens=1))  # whether it computes
        async with self._changing:  # behind this nothing is waited for until the replica is connected, and so gets the next change
            load.identify(await client.load())
            if self._weights_version is None:
                self._weights_version = load.stats.weights_version
            try:
                await self._give(client, load)
            except ConnectionLostError:
                raise
            except AEngineError as error:
                if fleet.serving():
                    raise
                _log.error("replica %s serves without what the router has loaded, as there is no other: %s", replica.name, error)
            there = {adapter.name: adapter for adapter in await client.adapters()}
            for name, adapter in there.items():
                self.adapters.setdefault(name, adapter)
            replica.adapters.clear()
            replica.adapters.update({name: adapter.key for name, adapter in there.items()})
            load.weights_behind = self._weights_version - load.stats.weights_version

    async def _give(self, client: AsyncClient, load: ReplicaLoad) -> None:
        for change in self._weights.get(load.generation, ()):
            load.identify((await _update(client, change, "keep"))[1])
        there = {adapter.name for adapter in await client.adapters()}
        for name, path in self._paths.items():
            if name not in there:
                await client.load_adapter(name, path)

    async def update_weights(self, fleet: Fleet, change: WeightsChange, running: str) -> int:
        """Replace the weights at all connected replicas by those of a directory, which replicas that come later with the old ones get, too;
        returns how often that was done. `running`: as of `AsyncEngine.update_weights`. Raises what `Fleet.ask_all` raises
        with `some`."""
        async with self._changing:
            befores = {replica.name: replica.load.generation for replica in fleet.replicas.values() if replica.connected}
            answers = await fleet.ask_all(lambda client: _update(client, change, running), some=True)
            self._weights_version = (self._weights_version or 0) + 1
            afters = set()
            for name, (version, stats) in answers.items():
                if (replica := fleet.replicas.get(name)) is None:
                    continue
                replica.load.weights_behind = self._weights_version - version
                replica.load.identify(stats)
                afters.add(replica.load.generation)
                fleet.replaced(befores[name], replica.load.generation)
            before = {generation: self._weights.get(generation, ()) for generation in {*self._weights, *befores.values()} - afters}
            self._weights = {generation: (*(changes if change.partial else ()), change) for generation, changes in before.items()}
            return self._weights_version

    async def load_adapter(self, fleet: Fleet, name: str, path: str) -> AdapterInfo:
        """Load an adapter from the directory `path` at all connected replicas, and at those that come later. If one of them fails, its
        error is raised, and a new adapter is unloaded from the others."""
        async with self._changing:
            try:
                infos = await fleet.ask_all(lambda client: client.load_adapter(name, path))
            except AEngineError:
                if name not in self.adapters:
                    with suppress(AEngineError):
                        await fleet.ask_all(lambda client: _unload(client, name))
                raise
            self._paths[name] = path
            for replica_name, info in infos.items():
                if (replica := fleet.replicas.get(replica_name)) is not None:
                    replica.adapters[name] = info.key
                self.adapters[name] = info
            return self.adapters[name]

    async def unload_adapter(self, fleet: Fleet, name: str) -> None:
        """Unload an adapter at all connected replicas; those that come later do not get it. Raises what one of them raises."""
        async with self._changing:
            self._paths.pop(name, None)
            await fleet.ask_all(lambda client: client.unload_adapter(name))
            self.adapters.pop(name, None)


async def _update(client: AsyncClient, change: WeightsChange, running: str) -> tuple[int, EngineStats]:
    """The version of the new weights, and what the replica then says."""
    version = await client.update_weights(change.source, running, change.partial)
    return version, await client.load()


async def _unload(client: AsyncClient, name: str) -> None:
    with suppress(AdapterNotFoundError):
        await client.unload_adapter(name)


_WEIGHTS = "weights"


def by_generation(replicas: Iterable[Replica]) -> list[list[Replica]]:
    """The newest first: that whose oldest replica began to serve its weights last. So neither a replica that was restarted nor one more of
    an older generation changes the order, and routers agree on it without talking."""
    groups: dict[str, list[Replica]] = {}
    for replica in replicas:
        groups.setdefault(replica.load.generation, []).append(replica)
    if len(groups) < 2:
        return list(groups.values())
    return sorted(groups.values(), key=lambda group: (min(one.load.stats.weights_time for one in group), group[0].name), reverse=True)


def difference(one: Replica, newest: Replica) -> str:
    """In what a replica differs from one of another generation, for people."""
    names = sorted(one.info.fingerprint_parts.keys() | newest.info.fingerprint_parts.keys())
    found = [
        f"{name} ({ours} instead of {theirs})"
        for name in names
        if (ours := one.info.fingerprint_parts.get(name)) != (theirs := newest.info.fingerprint_parts.get(name))
    ]
    if one.model is not None and newest.model is not None and one.model.name != newest.model.name:
        found.insert(0, f"name ({one.model.name} instead of {newest.model.name})")
    return ", ".join(found) or _WEIGHTS


RETRY_SECONDS = 0.25
"""After which a replica is tried again that did not take a request."""


T = TypeVar("T")


Preparation = Callable[["Fleet", Replica, AsyncClient, ReplicaLoad], Awaitable[None]]
"""Gives a replica of a fleet what the others have, as of `Replica`."""


class Fleet:
    """The replicas of a router, and the choice of one for each request. To be made in a running loop."""

    def __init__(self, config: RouterConfig, token: str | None, prepare: Preparation) -> None:
        self.config = config
        self.digest_salt = secrets.token_bytes(16)
        self.replicas: dict[str, Replica] = {}
        self._token = token
        self._prepare = partial(prepare, self)
        self.newest: Replica | None = None  # one of the newest generation that serves, or of that which served last
        self._generations: tuple[str, ...] = ()  # that serve, the newest first
        self._replaced: dict[str, str] = {}  # generations whose weights were replaced at all replicas, by those that came of them
        self._routing = ReplicaRouting(RoutingPolicy(config.routing_policy))
        self._waiters: set[asyncio.Future[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        self._kv_seconds = 0.0  # that a byte of KV takes from one replica to another; 0.0: none has gone
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

    @property
    def model(self) -> ModelInfo | None:
        """What the newest generation of replicas serves; None: no replica has served."""
        return None if self.newest is None else self.newest.model

    def infos(self) -> tuple[ReplicaInfo, ...]:
        return tuple(self._info(replica) for replica in self.replicas.values())

    def _info(self, replica: Replica) -> ReplicaInfo:
        state, reason, newest = replica.state, "", self.newest
        if state is ReplicaState.SERVING:
            if newest is not None and newest.load.generation != replica.load.generation:
                state = ReplicaState.SUPERSEDED
                reason = f"{newest.name} serves a newer generation; the difference: {difference(replica, newest)}"
        elif replica.error is not None:
            reason = str(replica.error)
        return ReplicaInfo(replica.name, state, replica.report, replica.load.generation, reason)

    def replaced(self, before: str, after: str) -> None:
        """All replicas of a generation have become of another: streams that have no replica of the one go on with the other."""
        if before != after:
            self._replaced[before] = after
            self._replaced.pop(after, None)
            self._on_change()

    def drain(self, replica: Replica) -> int:
        """Send nothing more to a replica, and have its requests go on elsewhere, but for those that no other one can go on with. Returns
        how many go."""
        others = any(other is not replica and other.load.generation == replica.load.generation for other in self.serving())
        return replica.expel(lambda attempt: others or not (attempt.answered or attempt.work.prompt.generation))

    async def aclose(self) -> None:
        """Disconnect from all replicas, also from those that are about to go."""
        self._closed = True
        for task in self._retiring:
            task.cancel()
        replicas = list(self.replicas.values())
        await asyncio.gather(*(replica.aclose() for replica in replicas), *self._retiring, return_exceptions=True)
        self._on_change()

    async def wait_changed(self, seconds: float) -> None:
        """Wait until some replica may take what it did not take before, `seconds` at most."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(future)
        try:
            await asyncio.wait({future}, timeout=seconds)
        finally:
            self._waiters.discard(future)

    def _on_change(self) -> None:
        self._find_newest()
        waiters, self._waiters = self._waiters, set()
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def _find_newest(self) -> None:
        generations = by_generation(self.serving())
        if not generations:
            return
        self.newest = newest = generations[0][0]
        found = tuple(replicas[0].load.generation for replicas in generations)
        if found == self._generations:
            return
        self._generations = found
        for replicas in generations[1:]:
            names = ", ".join(sorted(replica.name for replica in replicas))
            text = "replica %s serves a newer generation than %s, which get new requests only where it has no room; the difference: %s"
            _log.warning(text, newest.name, names, difference(replicas[0], newest))

    # ---- a replica for a request ---------------------------------------------------------------------------------------

    def board(self, work: RoutedWork, on_lost: Callable[[Attempt, AEngineError], object]) -> Attempt | None:
        """A stay at the best replica for it now; None: there is none. `on_lost`: as of `Attempt`."""
        work.prompt = self._with_new_weights(work.prompt)
        excluded: set[str] = work.unfit
        if work.blame > 0:  # apart from others of which replicas die, perhaps, so that it shows which of them it is
            excluded = excluded.union(name for name, replica in self.replicas.items() if replica.num_suspects)
        for loads in self._preferred(work.prompt):
            load = self._routing.choose(work.prompt, loads, time.monotonic(), excluded)
            if load is not None:
                return Attempt(work, self.replicas[load.name], on_lost)
        return None

    def _preferred(self, prompt: RoutedPrompt) -> Iterator[list[ReplicaLoad]]:
        """Replicas for a request, the best first: of the newest generation that has room for it, so that few new replicas do not get what
        many old ones did; else all. Those whose role it is come before all others."""
        generations = [[replica.load for replica in replicas] for replicas in by_generation(self.serving())]
        if len(generations) > 1:
            for loads in generations:
                yield [load for load in loads if load.has_room(prompt) and load.suits(prompt, self.config.prefill_tokens)]
        if self.has_roles:
            yield [load for loads in generations for load in loads if load.suits(prompt, self.config.prefill_tokens)]
        yield [load for loads in generations for load in loads]

    @property
    def has_roles(self) -> bool:
        """Whether there are replicas that compute prompts, and others that go on behind these."""
        roles = {replica.load.stats.role for replica in self.serving()}
        return "prefill" in roles and len(roles) > 1

    def _with_new_weights(self, prompt: RoutedPrompt) -> RoutedPrompt:
        """A request whose weights were replaced everywhere goes on with the new ones, as in an engine that computes its KV again."""
        generation, serving = prompt.generation, {replica.load.generation for replica in self.serving()}
        for _ in range(len(self._replaced)):
            if generation is None or generation in serving or generation not in self._replaced:
                break
            generation = self._replaced[generation]
        return prompt if generation == prompt.generation else replace(prompt, generation=generation)

    def _check_hope(self, work: RoutedWork) -> None:
        """Raises `NoReplicaError` where waiting would be in vain, and `OtherTextsError` where the ids of its prompt must be made anew."""
        prompt, serving = work.prompt, self.serving()
        if prompt.generation is None and serving and all(replica.load.texts != (prompt.texts or replica.load.texts) for replica in serving):
            raise OtherTextsError
        if self.replicas and not any(_may_serve(replica, prompt.generation) for replica in self.replicas.values()):
            raise self.none_for(work, at_once=True)

    async def find(self, work: RoutedWork, on_lost: Callable[[Attempt, AEngineError], object]) -> Attempt:
        """`board`, waiting for a replica. Raises `NoReplicaError`, at once where no replica may ever take it, `OtherTextsError`, or why the
        last of them refused a request that none has accepted."""
        if work.moves > 1:
            await asyncio.sleep(min(LONGEST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(work.moves - 2, 10)) * random.uniform(0.5, 1.5))
        give_up = time.monotonic() + self.config.wait_seconds
        while (attempt := self.board(work, on_lost)) is None:
            if isinstance(work.refusal, QueueFullError) and not work.begun:
                raise work.refusal
            self._check_hope(work)
            left = give_up - time.monotonic()
            if left <= 0 or self._closed:
                raise self.none_for(work) from work.refusal
            await self.wait_changed(min(left, RETRY_SECONDS) if work.unfit else left)
            work.unfit.clear()
        return attempt

    def none_for(self, work: RoutedWork, *, at_once: bool = False) -> AEngineError:
        """The error that says why there is no replica for a request."""
        if self._closed:
            return EngineStateError("the router is closed")
        infos = sorted(self.infos(), key=lambda info: info.name)
        states = ", ".join(f"{one.name} is {one.state.value}" + (f" ({one.reason})" if one.reason else "") for one in infos)
        why = f"; the last answer was: {work.refusal}" if work.refusal is not None else ""
        if not at_once:
            return NoReplicaError(f"no replica took the request within {self.config.wait_seconds:g} s: {states or 'there are none'}{why}")
        can = "serve the request" if work.prompt.generation is None else "go on with the request, whose tokens came from another generation"
        return NoReplicaError(f"no replica can {can}: {states}{why}")

    async def bring_kv(self, source: Replica, target: Replica, token_ids: Sequence[int], cache_salt: str, adapter: str | None) -> None:
        """Have one replica take from another what it keeps of the KV of these tokens, where that is sooner done than computed. Whatever
        fails is computed there."""
        seconds = len(token_ids) / (target.load.rate or START_RATE)  # to compute them
        if source is target or not source.connected or target.model is None or seconds < FEW_SECONDS:
            return
        token_bytes = target.model.kv_bytes_per_token
        if len(token_ids) * token_bytes * self._kv_seconds > seconds:
            return
        of_prefix: dict[str, Any] = {"token_ids": token_ids, "cache_salt": cache_salt, "adapter": adapter}
        try:
            with anyio.move_on_after(MOST_KV_SECONDS + seconds):
                there = await target.ask(lambda client: client.find_kv(**of_prefix))
                if not there.identity:
                    return
                export = partial(source.client.export_kv, identity=there.identity, **of_prefix)
                began = time.monotonic()
                async with aclosing(export(skip_tokens=there.num_tokens)) as pages:
                    give = partial(AsyncClient.import_kv, pages=pages, identity=there.identity, **of_prefix)
                    count = await target.ask(give)
                if count:
                    each = (time.monotonic() - began) / (count * token_bytes)
                    self._kv_seconds = each if not self._kv_seconds else 0.7 * self._kv_seconds + 0.3 * each
                    _log.info("KV of %d tokens went from replica %s to %s", count, source.name, target.name)
        except AEngineError as error:
            _log.info("KV does not go from replica %s to %s: %s", source.name, target.name, error)

    async def carry(self, prompt: RoutedPrompt, call: Callable[[AsyncClient], Awaitable[T]], timeout: float | None = None) -> tuple[T, str]:
        """A call that any replica answers, at another one where it fails on the way; with `ReplicaLoad.texts` of that one. Raises what it
        raises, `OtherTextsError`, and `RequestEndedError` after `timeout`."""
        work = RoutedWork(prompt)
        try:
            with anyio.fail_after(timeout):
                while True:
                    attempt = await self.find(work, lambda attempt, error: None)
                    attempt.acknowledged = True
                    try:
                        answer = await attempt.replica.ask(call)
                        attempt.answer()
                        return answer, attempt.replica.load.texts
                    except AEngineError as error:
                        self.failed(attempt, error)
                    finally:
                        attempt.leave_replica()
        except TimeoutError:
            raise RequestEndedError("there was no answer: its timeout passed") from None

    async def ask_any(self, call: Callable[[AsyncClient], Awaitable[T]]) -> tuple[T, str]:
        """Make a call that has no prompt, as `carry` does."""
        return await self.carry(RoutedPrompt(1, secrets.randbits(64), lambda naming: ()), call)

    async def ask(self, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Make a call at any replica, as `ask_any` does, and return the answer alone."""
        return (await self.ask_any(call))[0]

    async def ask_all(self, call: Callable[[AsyncClient], Awaitable[T]], *, some: bool = False) -> dict[str, T]:
        """Make a call at all replicas that are connected; returns their answers by name. One that is lost meanwhile is left out, since it
        is prepared again. Raises what another one raises, when all have answered, and `NoReplicaError` if there is none. `some`: what one
        raises is raised only if no other has answered; else that one is lost."""
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
            case FailoverDecision.FINAL:
                raise error
            case FailoverDecision.REFUSED:
                work.unfit.add(replica.name)
                work.refusal = error
            case FailoverDecision.LEFT:
                work.unfit.add(replica.name)
                work.refusal = error
                work.moves += 1
            case FailoverDecision.LOST:
                replica.lose(error)
                work.moves += 1
        check_blame(work, error)
        if work.moves > self.config.max_moves:
            raise NoReplicaError(f"the request went on elsewhere {self.config.max_moves} times in vain: {error}") from error


def _may_serve(replica: Replica, generation: str | None) -> bool:
    """Whether it serves a generation (None: any), or may come to do so by itself: one that comes back has the weights that it had."""
    if replica.state is ReplicaState.REFUSED:
        return False
    known = replica.load.generation
    return generation is None or known == generation or (not known and replica.state is not ReplicaState.SERVING)


async def _retire(replica: Replica) -> None:
    try:
        await replica.retire()
    finally:
        await asyncio.shield(asyncio.ensure_future(replica.aclose()))
