"""`Replicas`: the other engines that share the experts of a model, as one of them sees them. `join_replicas` brings them together.

That of rank 0 has a connection to each of the others. Here they compare what must be the same, wake each other, and notice that one is
gone, without which none can go on. What they compute together goes other ways.

`LockStep`: when engines that share experts compute a step together.

They compute in turns. All take each turn once, with a step of their own or with none, by telling each other how many tokens they have in
it. What is told is the same for all, so all know the same: a turn with tokens is followed by the next one, which all take at once; behind a
turn without tokens nobody computes until one of them wants the next.

Knows nothing of sockets, threads or models.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TypeVar

from aengine.api import VERSION
from aengine.api.config import EngineConfig
from aengine.api.errors import AEngineError, ConfigError, ModelLoadError, RankDiedError
from aengine.parallel.channel import Channel, ChannelClosedError, ChannelTimeoutError
from aengine.parallel.driver import CHECK_SECONDS, VERDICT_SECONDS, beside
from aengine.parallel.join import JOIN_SECONDS, JoinError, accept_ranks, join_driver, listen, read_secret
from aengine.parallel.launch import END_SECONDS, Follower, Watcher
from aengine.parallel.messages import Facts, Failed, Message, Refused, Sizes, StepWanted, Welcome
from aengine.parallel.ring import LOOPBACK
from aengine.parallel.shard import Shard


class LockStep:
    """All methods but `others_want` belong to one thread."""

    def __init__(self, exchange: Callable[[int], Sequence[int]], tell_others: Callable[[int], object]) -> None:
        """`exchange` waits until all have called it with the number of their tokens, and returns those of all. `tell_others` has
        `others_want` called with a turn by all others, soon."""
        self._exchange = exchange
        self._tell_others = tell_others
        self._turn = 0
        self._goes_on = False  # there were tokens in the turn before
        self._wanted = -1  # the latest turn that another one wants

    @property
    def is_awaited(self) -> bool:
        """Whether others take the next turn, or will, whatever this one has to do."""
        return self._goes_on or self._wanted >= self._turn

    def others_want(self, turn: int) -> None:
        """May be called from any thread; then `is_awaited`, unless that turn is over."""
        self._wanted = max(self._wanted, turn)

    def take_turn(self, num_tokens: int) -> tuple[int, ...]:
        """Takes the next turn, with a step of so many tokens, or with none only if it `is_awaited`. Returns the tokens of all."""
        if not self.is_awaited:
            self._tell_others(self._turn)
        counts = tuple(self._exchange(num_tokens))
        self._turn += 1
        self._goes_on = any(counts)
        return counts


_log = logging.getLogger("aengine")
LOG_SECONDS = 30.0
"""Between two lines about who is waited for."""
MessageT = TypeVar("MessageT", Facts, Sizes)


def join_replicas(config: EngineConfig, report_failure: Callable[[BaseException], object], check: Callable[[], object]) -> Replicas:
    """Waits until all are there. `report_failure` is called once, by another thread, when one of them is gone. `check` is called while
    others are waited for, and may raise to end that. Raises ModelLoadError, and ConfigError for what cannot be read or listened on."""
    address, secret_file, rank = config.rank_address, config.rank_secret_file, config.expert_parallel_rank
    if address is None or secret_file is None:
        size = config.expert_parallel_size
        raise ConfigError.of("rank_address", f"is missing: {size} engines share experts, and join rank 0 there with a secret")
    secret = read_secret(secret_file)
    with ExitStack() as stack:  # of what is released if not all join
        others, store = [], None
        if rank:
            try:
                channel = join_driver(address, secret, rank, VERSION, check=check)
            except JoinError as error:
                raise ModelLoadError(f"rank {rank} does not reach rank 0: {error}") from None
            stack.callback(channel.close)
            where = channel.peer_host, _welcome(channel, rank, check).store_port
            others.append(Follower(0, channel, None, channel.peer_host))
        else:
            store = stack.enter_context(listen(beside(address)))
            host, port = store.getsockname()[:2]
            where = LOOPBACK.get(host, host), port
            with listen(address) as door:
                for other, channel, hello in accept_ranks(door, secret, set(range(1, config.expert_parallel_size)), VERSION, check):
                    stack.callback(channel.close)
                    others.append(Follower(other, channel, None, hello.host))
            for follower in others:
                follower.channel.send(Welcome("", "", 1, "", port), config.step_timeout)
        stack.pop_all()
    return Replicas(config, others, report_failure, check, where, store)


def _welcome(channel: Channel, rank: int, check: Callable[[], object]) -> Welcome:
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        check()
        try:
            welcome = channel.receive(CHECK_SECONDS)
        except ChannelTimeoutError:
            if time.monotonic() > deadline:
                raise ModelLoadError(f"not all engines that share experts have joined within {JOIN_SECONDS:g} s") from None
            continue
        except ChannelClosedError as error:
            raise ModelLoadError(f"rank 0: {error}") from None
        if isinstance(welcome, Welcome):
            return welcome
        raise ModelLoadError(f"rank 0 refuses rank {rank}: {welcome.reason if isinstance(welcome, Refused) else welcome}")


class Replicas:
    """All methods but `check`, `hung` and `close` belong to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        others: Sequence[Follower],
        report_failure: Callable[[BaseException], object],
        check: Callable[[], object],
        store: tuple[str, int],
        listening: socket.socket | None,
    ) -> None:
        """`others`: those that this one has a connection to. `listening`: of rank 0, the socket behind `store`."""
        self.shard = Shard(config.expert_parallel_rank, config.expert_parallel_size)  # this one among all
        self.store = store  # where rank 0 listens for what they set up between them
        self.store_fd = None if listening is None else listening.fileno()  # closed by `close`
        self.on_wanted: Callable[[], object] = lambda: None
        """Called by another thread when another replica waits for this one in a step. Must not wait."""
        self._listening = listening
        self._others = others
        self._report_failure = report_failure
        self._check = check
        self._timeout = config.step_timeout
        self._failure: AEngineError | None = None
        self._failed = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        self._lock_step: LockStep | None = None
        self._compute: Callable[[], object] = lambda: None
        self._watcher = Watcher(others, self._fail, self._receive)

    def check(self, wait: float = 0.0) -> None:
        """Raises what happened to another one. `wait` is for those who know already that something did: seconds until it is found out
        what."""
        self._failed.wait(wait)
        if self._failure is not None:
            raise self._failure

    def hung(self, rank: int) -> AEngineError:
        """The error for one that this one waits for in vain."""
        return self._failure or self._watcher.hung(rank, f"rank {self.shard.rank}")

    def same(self, facts: Mapping[str, str]) -> None:
        """Compares what must be the same, by name, when all have come here. Raises ModelLoadError with rank, name and both values."""
        own = Facts(json.dumps(dict(facts)))
        if self.shard.rank:
            self._send(own)
            self._next(self._others[0], Facts)
            return
        for follower in self._others:
            theirs = json.loads(self._next(follower, Facts).values)
            for name, value in facts.items():
                if theirs.get(name) != value:
                    error = f"{follower.name} cannot be used: its {name} is {theirs.get(name)}, that of rank 0 is {value}"
                    self._tell(Failed(ModelLoadError.__name__, "", error))
                    raise ModelLoadError(error)
        self._send(own)

    def agree(self, max_model_len: int) -> int:
        """The least of all. Waits until all have loaded."""
        if self.shard.rank:
            self._send(Sizes(0, max_model_len, 0, ""))
            return self._next(self._others[0], Sizes).max_model_len
        least = min(max_model_len, *(self._next(follower, Sizes).max_model_len for follower in self._others))
        self._send(Sizes(0, least, 0, ""))
        return least

    def connect(self, exchange: Callable[[int], Sequence[int]], compute: Callable[[], object]) -> None:
        """`exchange`: as of `LockStep`. `compute` does in a step of others what is this one's part."""
        self._lock_step = LockStep(exchange, lambda turn: self._send(StepWanted(turn)))
        self._compute = compute

    def begin_step(self, num_tokens: int) -> None:
        """Waits until all others take part in a step in which this one has so many tokens."""
        assert self._lock_step is not None
        self._lock_step.take_turn(num_tokens)

    def join_step(self) -> bool:
        """Takes part in a step of others, if they wait for this one or will. False: they do not."""
        assert self._lock_step is not None
        if not self._lock_step.is_awaited:
            return False
        if any(self._lock_step.take_turn(0)):
            self._compute()
        return True

    def close(self, *, at_once: bool = False) -> None:
        """The others cannot go on. May be called from any thread, and again; `at_once` changes nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._watcher.expect_ends()
            for follower in self._others:
                follower.channel.close()
            self._watcher.close()
            if self._listening is not None:
                self._listening.close()

    def _receive(self, sender: Follower, message: Message) -> None:
        """Called by the watcher."""
        if not isinstance(message, StepWanted):
            sender.inbox.put(message)
            return
        assert self._lock_step is not None, "all have loaded"
        self._lock_step.others_want(message.turn)
        self.on_wanted()
        self._tell(message, besides=sender)

    def _fail(self, error: AEngineError) -> None:
        """Called by the watcher."""
        self._tell(Failed(type(error).__name__, "", str(error)))  # before this one ends, and its connections with it
        self._failure = error
        self._failed.set()
        for follower in self._others:
            follower.inbox.put(None)
        self._report_failure(error)

    def _tell(self, message: Message, besides: Follower | None = None) -> None:
        """Sends a message from rank 0 to all other engines but `besides`; connections that fail are passed over. Other ranks send
        nothing."""
        if self.shard.rank == 0:
            for follower in self._others:
                if follower is not besides:
                    with suppress(ChannelClosedError, ChannelTimeoutError):
                        follower.channel.send(message, END_SECONDS)

    def _send(self, message: Message) -> None:
        for follower in self._others:
            try:
                follower.channel.send(message, self._timeout)
            except ChannelTimeoutError:
                raise self.hung(follower.rank) from None
            except ChannelClosedError as error:
                self.check(wait=VERDICT_SECONDS)
                raise RankDiedError(follower.with_lines(error.how), follower.rank) from None

    def _next(self, follower: Follower, kind: type[MessageT]) -> MessageT:
        """The next message of one that loads."""
        logged = time.monotonic()
        while True:
            self._check()
            self.check()
            if time.monotonic() - logged > LOG_SECONDS:
                logged = time.monotonic()
                _log.info("waiting for %s, which loads", follower.name)
            try:
                message = follower.inbox.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(message, kind):
                return message
            self.check()
            raise RankDiedError(f"{follower.name} sent {message} instead of {kind.__name__}", follower.rank)
