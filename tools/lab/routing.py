"""A simulation of routing: the router's own records and policies over replicas that compute nothing, on a simulated clock.

Owns the order of events and the figures. Reports of replicas come late, as in reality: each tells what was so some time before.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aengine.router.replica_load import PagePrefix, ReplicaLoad, ReplicaRouting, RequestPlacement, RoutedPrompt, RoutingPolicy
from tools.lab.sessions import SALT, Session
from tools.lab.simulated_replica import ReplicaOptions, SimulatedReplica, StepCosts, Work


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The replicas, and how late they are heard of."""

    num_replicas: int
    replica: ReplicaOptions
    report_seconds: float = 0.1  # between two reports of a replica
    report_delay: float = 0.05  # seconds from what a report tells to its coming
    slow_share: float = 0.0  # of the replicas, whose steps take `slow_factor` times as long
    slow_factor: float = 2.0
    restart: float | None = None  # when the first replica is lost and comes back with nothing, seconds; its requests start again elsewhere
    slow_start_seconds: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.report_seconds <= 0 or self.report_delay < 0 or not 0 <= self.slow_share <= 1:
            raise ValueError(
                f"num_replicas {self.num_replicas} must be at least 1, report_seconds {self.report_seconds} above 0, "
                f"report_delay {self.report_delay} at least 0, slow_share {self.slow_share} in [0, 1]"
            )


@dataclass(frozen=True, slots=True)
class RoutingFigures:
    """What a policy made of a trace."""

    policy: str
    num_replicas: int
    requests: int
    hit_rate: float  # prompt tokens found in prefix caches, of all prompt tokens
    ttft_p50: float  # seconds from a request's arrival
    ttft_p90: float
    ttft_p99: float
    token_imbalance: float  # computed tokens of the replica with the most, over the mean
    busy_imbalance: float  # the same of seconds in steps
    request_imbalance: float  # the same of requests
    utilisation: float  # mean share of time that replicas were busy
    requests_per_second: float  # from the first arrival to the last end
    decisions_per_second: float  # of CPU time on this machine, pages hashed before


HEADER = ("policy", "replicas", "hits %", "TTFT p50 s", "p90 s", "p99 s", "tokens max/mean", "busy", "requests", "busy %", "decisions/s")


def cells(figures: RoutingFigures) -> Sequence[object]:
    return (
        figures.policy,
        figures.num_replicas,
        f"{100 * figures.hit_rate:.1f}",
        figures.ttft_p50,
        figures.ttft_p90,
        figures.ttft_p99,
        f"{figures.token_imbalance:.2f}",
        f"{figures.busy_imbalance:.2f}",
        f"{figures.request_imbalance:.2f}",
        f"{100 * figures.utilisation:.0f}",
        f"{figures.decisions_per_second:.0f}",
    )


class _Event(enum.Enum):
    ARRIVES = enum.auto()  # a turn of a session
    STEP_ENDS = enum.auto()
    REPORT_LEAVES = enum.auto()
    REPORT_COMES = enum.auto()
    RESTARTS = enum.auto()


@dataclass(slots=True, eq=False)
class _Request:
    session: Session
    turn: int
    arrived: float
    place: int = -1  # index of the replica
    placement: RequestPlacement | None = None


class Simulation:
    """One trace under one policy."""

    def __init__(self, policy: RoutingPolicy, sessions: Sequence[Session], options: SimulationOptions) -> None:
        self._policy = policy
        self._sessions = sessions
        self._options = options
        self._routing = ReplicaRouting(policy, options.seed)
        self._replicas = [SimulatedReplica(self._replica_options(i)) for i in range(options.num_replicas)]
        self._loads = [self._new_load(i, 0.0, 0.0) for i in range(options.num_replicas)]
        self._plans = [0] * options.num_replicas  # the number of each replica's latest plan; an event of an older one says nothing
        self._will_report = [False] * options.num_replicas
        self._events: list[tuple[float, int, _Event, Any]] = []
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._lost = np.zeros((2, options.num_replicas))  # computed tokens and busy seconds of replicas that were lost
        self._num_requests = np.zeros(options.num_replicas)
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._ttfts: list[float] = []
        self._decision_seconds = 0.0
        self._now = 0.0

    def run(self) -> RoutingFigures:
        for session in self._sessions:
            self._at(session.start, _Event.ARRIVES, _Request(session, 0, session.start))
        if self._options.restart is not None:
            self._at(self._options.restart, _Event.RESTARTS, 0)
        while self._events:
            self._now, _, event, what = heapq.heappop(self._events)
            match event:
                case _Event.ARRIVES:
                    self._send(what)
                case _Event.STEP_ENDS:
                    self._end_step(*what)
                case _Event.REPORT_LEAVES:
                    self._will_report[what] = False
                    self._at(
                        self._now + self._options.report_delay,
                        _Event.REPORT_COMES,
                        (what, self._loads[what], self._replicas[what].report()),
                    )
                case _Event.REPORT_COMES:
                    index, load, report = what
                    if load is self._loads[index]:
                        load.report(report, self._now)
                case _Event.RESTARTS:
                    self._restart(what)
        return self._figures()

    def _replica_options(self, index: int) -> ReplicaOptions:
        options = self._options
        if index >= round(options.slow_share * options.num_replicas):
            return options.replica
        costs, factor = options.replica.costs, options.slow_factor
        return replace(options.replica, costs=StepCosts(factor * costs.step, factor * costs.prefill_token, factor * costs.decode_row))

    def _new_load(self, index: int, now: float, slow_start_seconds: float) -> ReplicaLoad:
        replica = self._options.replica
        return ReplicaLoad(
            f"replica-{index}",
            page_size=replica.page_size,
            max_num_seqs=replica.max_num_seqs,
            now=now,
            slow_start_seconds=slow_start_seconds,
        )

    def _at(self, when: float, event: _Event, what: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), event, what))

    def _send(self, request: _Request) -> None:
        turn = request.session.turns[request.turn]
        began = time.process_time()
        load = self._routing.choose(turn.prompt, self._loads, self._now)
        assert load is not None
        request.placement = load.place(turn.prompt, self._now)
        self._decision_seconds += time.process_time() - began
        index = request.place = self._loads.index(load)
        self._num_requests[index] += 1
        key = next(self._numbers)
        self._requests[key] = request
        work = Work(key, turn.prompt.num_tokens, turn.output_tokens, turn.digests)
        self._plan(index, self._replicas[index].submit(work, self._now))
        self._changed(index)

    def _end_step(self, index: int, plan: int) -> None:
        if plan != self._plans[index]:
            return
        replica, load = self._replicas[index], self._loads[index]
        first, ended = replica.advance()
        for work in first:
            request = self._requests[work.key]
            assert request.placement is not None
            load.first_token(request.placement, self._now)
            self._ttfts.append(self._now - request.arrived)
            self._prompt_tokens += work.prompt_tokens
            self._cached_tokens += work.cached_tokens
        for work in ended:
            request = self._requests.pop(work.key)
            assert request.placement is not None
            load.end_request(request.placement, self._now, work.output_tokens, work.cached_tokens)
            if request.turn + 1 < len(request.session.turns):
                when = self._now + request.session.turns[request.turn + 1].think_seconds
                self._at(when, _Event.ARRIVES, _Request(request.session, request.turn + 1, when))
        self._plan(index, replica.next_time)
        self._changed(index)

    def _plan(self, index: int, next_time: float | None) -> None:
        self._plans[index] += 1
        if next_time is not None:
            self._at(next_time, _Event.STEP_ENDS, (index, self._plans[index]))

    def _changed(self, index: int) -> None:
        if not self._will_report[index]:
            self._will_report[index] = True
            # At times that are its own, so that not all reports come at once.
            period = self._options.report_seconds
            phase = index / self._options.num_replicas
            self._at((self._now // period + 1 + phase) * period, _Event.REPORT_LEAVES, index)

    def _restart(self, index: int) -> None:
        replica = self._replicas[index]
        self._lost[:, index] += replica.computed_tokens, replica.busy_seconds
        self._replicas[index] = SimulatedReplica(self._replica_options(index))
        self._loads[index] = self._new_load(index, self._now, self._options.slow_start_seconds)
        self._plan(index, None)
        for work in replica.works():
            self._at(self._now, _Event.ARRIVES, self._requests.pop(work.key))

    def _figures(self) -> RoutingFigures:
        totals = self._lost + np.transpose([(replica.computed_tokens, replica.busy_seconds) for replica in self._replicas])
        token_imbalance, busy_imbalance = (totals.max(axis=1) / totals.mean(axis=1)).tolist()
        p50, p90, p99 = np.percentile(self._ttfts, (50, 90, 99)).tolist()
        seconds = self._now - self._sessions[0].start
        return RoutingFigures(
            policy=self._policy.value,
            num_replicas=len(self._replicas),
            requests=len(self._ttfts),
            hit_rate=self._cached_tokens / self._prompt_tokens,
            ttft_p50=p50,
            ttft_p90=p90,
            ttft_p99=p99,
            token_imbalance=token_imbalance,
            busy_imbalance=busy_imbalance,
            request_imbalance=float(self._num_requests.max() / self._num_requests.mean()),
            utilisation=float(totals[1].mean()) / seconds,
            requests_per_second=len(self._ttfts) / seconds,
            decisions_per_second=float(self._num_requests.sum()) / self._decision_seconds,
        )


def decisions_per_second(num_replicas: int = 8, prompt_tokens: int = 1024, num_decisions: int = 2000) -> float:
    """Of the default policy in this process, with all that a router does for one: pages hashed, replica chosen, placement counted.

    Half of the prompts continue one before.
    """
    rng = np.random.default_rng(0)
    replicas = [ReplicaLoad(f"replica-{i}", page_size=16, max_num_seqs=256) for i in range(num_replicas)]
    routing = ReplicaRouting(RoutingPolicy.PREFIX, seed=0)
    prompts = [rng.integers(1 << 17, size=prompt_tokens, dtype=np.int32) for _ in range(num_decisions)]
    for number in range(1, num_decisions, 2):
        prompts[number][: prompt_tokens // 2] = prompts[number // 2][: prompt_tokens // 2]
    under_way: deque[tuple[ReplicaLoad, RequestPlacement]] = deque()
    began = time.process_time()
    for number, token_ids in enumerate(prompts):
        now = 1e-3 * number
        pages = PagePrefix(token_ids, "", SALT)
        prompt = RoutedPrompt(prompt_tokens, pages.beginning, pages.digests)
        replica = routing.choose(prompt, replicas, now)
        assert replica is not None
        under_way.append((replica, replica.place(prompt, now)))
        if len(under_way) > 32 * num_replicas:
            replica, placement = under_way.popleft()
            replica.first_token(placement, now)
            replica.end_request(placement, now, 100)
    return num_decisions / (time.process_time() - began)
