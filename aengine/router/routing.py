"""Which replica computes a request.

Owns the policies. Everything that a decision rests on is in the `ReplicaLoad` of each replica; a decision looks at each once.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Sequence

from aengine.router.load import START_RATE, ReplicaLoad, RoutedPrompt

MOST_LOAD = 1.15  # of the mean of all replicas, which no replica goes beyond by much
EQUAL = 1.05  # scores within this factor of the lowest are taken to be equal
CLEARLY = 1.5  # times as fast as usual, or as slow, is another machine; less comes from what was computed there


class RoutingPolicy(enum.Enum):
    PREFIX = "prefix"  # where the first token is expected soonest, by cached prefixes and by load
    ROUND_ROBIN = "round_robin"  # in turns
    LEAST_LOADED = "least_loaded"  # where the fewest requests are
    HASH = "hash"  # consistent hashing of the beginning of the prompt, with bounded load


class Routing:
    """Chooses the replica for each request, by a `RoutingPolicy`."""

    def __init__(self, policy: RoutingPolicy = RoutingPolicy.PREFIX, seed: int | None = None) -> None:
        """`seed`: of the choices among equals; None: another one each time."""
        self._policy = policy
        self._random = random.Random(seed)
        self._turn = -1

    def choose(
        self, prompt: RoutedPrompt, replicas: Sequence[ReplicaLoad], now: float, excluded: Collection[str] = ()
    ) -> ReplicaLoad | None:
        """The replica for a request; None: no replica can take it. `excluded`: names of replicas that it is not to go to.

        Nothing is counted until `ReplicaLoad.place`.
        """
        able = [replica for replica in replicas if replica.can_take(prompt) and replica.name not in excluded]
        able = [replica for replica in able if not replica.paused] or able
        if len(able) < 2:
            return able[0] if able else None
        match self._policy:
            case RoutingPolicy.PREFIX:
                return self._soonest(prompt, able, now)
            case RoutingPolicy.ROUND_ROBIN:
                self._turn += 1
                return able[self._turn % len(able)]
            case RoutingPolicy.LEAST_LOADED:
                least = min(replica.outstanding for replica in able)
                return self._random.choice([replica for replica in able if replica.outstanding == least])
            case RoutingPolicy.HASH:
                most = MOST_LOAD * (1 + sum(replica.outstanding for replica in able)) / len(able)
                return _hashed(prompt, [replica for replica in able if replica.outstanding < most])

    def _soonest(self, prompt: RoutedPrompt, able: Sequence[ReplicaLoad], now: float) -> ReplicaLoad:
        """Where the first token is expected soonest and the least is computed, among replicas that have not got more than their share."""
        # A rate depends on what was computed when it was measured, so it serves for all; which replicas are slower, requests tell.
        usual_rate = _mean([replica.rate for replica in able if replica.rate]) or START_RATE
        usual_speed = _mean([replica.speed for replica in able if replica.speed])
        scores, loads = [], []
        some_cached = False
        for replica in able:
            uncached, backlog, wait, load = replica.outlook(prompt, now)
            some_cached = some_cached or uncached < prompt.num_tokens
            speed = replica.weight(now)
            if replica.speed and not usual_speed / CLEARLY < replica.speed < usual_speed * CLEARLY:
                speed *= replica.speed / usual_speed
            # What is computed keeps others waiting for as long, so that it counts twice, and what others compute once.
            scores.append(((backlog + 2 * uncached) / usual_rate + wait) / speed)
            loads.append(load / speed)
        mean = _mean(loads)
        # What its own turns have cost must not drive a conversation away from where it is cached. Who has nothing to do may do anything.
        most = MOST_LOAD * mean + prompt.num_tokens
        allowed = [i for i, load in enumerate(loads) if load <= most or not able[i].outstanding]
        lowest = min(scores[i] for i in allowed)
        equals = [i for i in allowed if scores[i] <= EQUAL * lowest]
        if len(equals) == 1:
            return able[equals[0]]
        if some_cached:
            return able[min(self._random.sample(equals, 2), key=loads.__getitem__)]
        light = [able[i] for i in equals if loads[i] <= mean]
        return _hashed(prompt, light or [able[min(equals, key=loads.__getitem__)]])


def _hashed(prompt: RoutedPrompt, replicas: Sequence[ReplicaLoad]) -> ReplicaLoad:
    """By rendezvous hashing of the beginning of the prompt: all routers choose the same, and when a replica goes only its prompts move."""
    return max(replicas, key=lambda replica: _mixed(prompt.beginning ^ replica.name_hash))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _mixed(number: int) -> int:
    """64 bits, each of which depends on all bits of the number (the finalizer of SplitMix64)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    number = (number ^ number >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return number ^ number >> 31
