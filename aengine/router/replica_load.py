"""Which replica computes a request.

Owns the policies. Everything that a decision rests on is in the `ReplicaLoad` of each replica; a decision looks at each once.

What is known of one replica's load and cache, and what a request would meet there.

Reports are old when they come. So the router counts by itself what it has sent since, and what of that is answered. Which prefixes a
replica holds is known by the digests that it publishes of its cached pages; a digest is a number under the router's own salt. Owns the
estimates and the digests; knows no other replica, no clock (`now` is in seconds on any clock that all calls share), no connection and no
content."""

from __future__ import annotations

import enum
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.outputs import CachedPages, EngineStats, LoadReport
from aengine.cache import PageChain, published_digest

MOST_LOAD = 1.15  # of the mean of all replicas, which no replica goes beyond by much
EQUAL = 1.05  # scores within this factor of the lowest are taken to be equal
CLEARLY = 1.5  # times as fast as usual, or as slow, is another machine; less comes from what was computed there


class RoutingPolicy(enum.Enum):
    PREFIX = "prefix"  # where the first token is expected soonest, by cached prefixes and by load
    ROUND_ROBIN = "round_robin"  # in turns
    LEAST_LOADED = "least_loaded"  # where the fewest requests are
    HASH = "hash"  # consistent hashing of the beginning of the prompt, with bounded load


class ReplicaRouting:
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


MAX_PAGES = 512  # of a prompt that are looked for; what comes behind them decides nothing
BEGINNING_TOKENS = 256
MAX_DIGESTS = 1 << 18  # kept of one replica


class PageNaming(NamedTuple):
    """What, beside its tokens, decides the name of a page at a replica."""

    page_size: int  # tokens
    adapter: int = 0  # its key there; 0: none
    weights_version: int = 0


class PagePrefix:
    """The digests of the pages that the prompt of one request fills."""

    def __init__(self, token_ids: Sequence[int] | NDArray[np.int32], cache_salt: str, digest_salt: bytes) -> None:
        """`cache_salt`: of the request; "": none. `digest_salt`: the router's, 8 to 64 bytes, that replicas publish their digests under."""
        self._token_ids = np.asarray(token_ids, np.int32)
        self._cache_salt = cache_salt
        self._digest_salt = digest_salt
        self._digests: dict[PageNaming, Sequence[int]] = {}

    @property
    def beginning(self) -> int:
        """A number of 64 bits that the first tokens decide: what hashing goes by."""
        return published_digest(self._token_ids[:BEGINNING_TOKENS].tobytes() + self._cache_salt.encode(), self._digest_salt)

    def digests(self, naming: PageNaming) -> Sequence[int]:
        """The digests of the prompt's first pages, at most MAX_PAGES, as replicas of this naming publish them; computed once. The last
        token is in none of these pages: it is computed everywhere."""
        digests = self._digests.get(naming)
        if digests is None:
            chain = PageChain(naming.page_size, self._cache_salt, naming.adapter, naming.weights_version)
            chain.extend(self._token_ids[: min(len(self._token_ids) - 1, MAX_PAGES * naming.page_size)])
            digests = self._digests[naming] = [published_digest(name, self._digest_salt) for name in chain.digests]
        return digests


class CachedPrefixes:
    """The digests of one replica: those it reported, and those that are expected because a request was sent there.

    A page is reported after all pages before it and taken back before them, so that a prompt's pages are there up to some page and not
    behind it.
    """

    def __init__(self, most: int = MAX_DIGESTS) -> None:
        """`most`: reported digests that are kept; what is reported beyond them is not known."""
        self._most = most
        self._reported: set[int] = set()
        self._expected: dict[int, int] = {}  # digest -> by how many requests

    def __len__(self) -> int:
        return len(self._reported)

    def apply(self, pages: CachedPages) -> None:
        """Apply a report of the replica: which pages were added and removed, or with `snapshot` all that it has."""
        if pages.snapshot:
            self._reported.clear()
        self._reported.difference_update(pages.removed)
        room = self._most - len(self._reported)
        self._reported.update(pages.added if len(pages.added) <= room else pages.added[: max(0, room)])

    def expect(self, digests: Iterable[int]) -> None:
        """A request was sent that will have these pages computed. Followed by one `forget` of the same digests."""
        expected = self._expected
        for digest in digests:
            expected[digest] = expected.get(digest, 0) + 1

    def forget(self, digests: Iterable[int]) -> None:
        """The pages are reported by now, or will not come."""
        expected = self._expected
        for digest in digests:
            if expected[digest] == 1:
                del expected[digest]
            else:
                expected[digest] -= 1

    def longest(self, digests: Sequence[int]) -> int:
        """How many of a prompt's first pages are there, in O(log pages)."""
        reported, expected = self._reported, self._expected
        if not digests or (digests[0] not in reported and digests[0] not in expected):
            return 0
        there, missing = 1, len(digests) + 1  # numbers of pages
        while missing - there > 1:
            middle = (there + missing) // 2
            digest = digests[middle - 1]
            if digest in reported or digest in expected:
                there = middle
            else:
                missing = middle
        return there


REPORT_LAG = 0.1  # seconds that a report may be behind: statistics are up to 50 ms old when they are sent
WORK_SECONDS = 100.0  # how long ended work counts as load: after so long 1/e of it is left
RATE_HALF_LIFE = 60.0  # seconds in which the best measured prefill rate loses half of its weight
START_RATE = 10_000.0  # tokens a second where no replica has measured its own
MEAN_OF = 32  # requests of a moving average
FIRST_WEIGHT = 0.1  # of a replica that has just started or come back


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What routing must know of a request."""

    num_tokens: int  # of the prompt, and of output that it has already
    beginning: int  # `PagePrefix.beginning` of these tokens, and `PagePrefix.digests`
    digests: Callable[[PageNaming], Sequence[int]]
    adapter: str | None = None
    generation: str | None = None  # that its tokens came from; None: any will do
    texts: str | None = None  # as of `ReplicaLoad`, where its ids were made of a text; None: any will do
    has_output: bool = False  # it goes on behind some


@dataclass(slots=True, eq=False)
class RequestPlacement:
    """One request at one replica. `ReplicaLoad` alone changes it."""

    sent: float
    num_tokens: int  # of the prompt
    uncached: int  # tokens to compute, as it was expected
    work: float  # tokens that it costs, its output included, as it was expected
    digests: Sequence[int]  # of the pages that it is to compute
    began: float | None = None  # when its first token came
    ended: bool = False


class Outlook(NamedTuple):
    """What a request would meet at a replica."""

    uncached: int  # tokens of it that are in no cached page
    backlog: int  # tokens that are to be computed before them
    wait: float  # seconds beside computing: of the step under way, and for a row and pages
    load: float  # as `ReplicaLoad.load`


class ReplicaLoad:
    """The router reports here what it hears of a replica and what it sends there; the figures are for `ReplicaRouting`."""

    def __init__(
        self,
        name: str,
        *,
        page_size: int,
        max_num_seqs: int = 0,
        adapters: Mapping[str, int] | None = None,
        now: float = 0.0,
        slow_start_seconds: float = 0.0,
        described: str = "",
        texts: str = "",
    ) -> None:
        """`name`: what hashing goes by, so best what stays the same over restarts. `max_num_seqs`: sequences that can run at once; 0: not
        known. `adapters`: the keys of adapters at this replica by their names; the mapping may change. `now`: when it began to serve;
        for `slow_start_seconds` from then on it gets less than its share. `described`: stands for its fingerprint, beside the version of
        the weights, where it tells none. `texts`: replicas with the same word make the same ids of a text.
        """
        self.name = name
        self.name_hash = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        self.serving = True  # for the router to say: only replicas that serve are chosen
        self.stats = EngineStats()  # the latest
        self.outstanding = 0  # requests sent there that have not ended
        self.prefixes = CachedPrefixes()
        self._page_size = page_size
        self._max_num_seqs = max_num_seqs
        self._adapters = {} if adapters is None else adapters
        self._started = now
        self._slow_start_seconds = slow_start_seconds
        self.texts = texts
        self.weights_behind = 0  # how many versions of weights the router counts more than this replica, which has started later
        self.generation = ""  # replicas with the same word give the same tokens; empty: it has not been told
        self._described = described
        self._generations: dict[int, str] = {}  # by version of its weights
        self.draining = False
        self.paused = False  # requests wait there until somebody resumes or wakes it
        self.rate = 0.0  # prompt tokens that it computes in a second when it has nothing else to do; 0.0: not known
        self.speed = 0.0  # tokens a second that a request gets there after its first; 0.0: too few have ended
        self._reported = -float("inf")  # when the latest report came
        self._names = PageNaming(page_size)  # of pages without adapters
        self._num_rows = 0  # reported to be taken or waited for
        self._room = math.inf  # tokens that fit into pages that were reported not to be in use
        self._backlog = 0  # tokens to be computed: reported, and of placements that are not
        self._unreported: dict[RequestPlacement, None] = {}  # in the order of time: not begun, and sent after what the latest report counts
        self._computed: deque[tuple[float, Sequence[int]]] = deque()  # when, and the digests of pages not known to be reported
        self._num_computed = 0  # digests in it
        self._outstanding_work = 0.0
        self._recent_work = 0.0  # at `_recent_at`
        self._recent_at = now
        self._num_ended = 0
        self._mean_output = 0.0  # tokens of requests that ended here
        self._mean_seconds = 0.0  # that they took from their first token on

    # ---- what the router says ----------------------------------------------------------------------------------------

    def report(self, report: LoadReport, now: float) -> None:
        """The replica has told its load. With `report.pages` it must get every report: they tell changes."""
        stats = report.stats
        self.identify(stats)
        self.draining = report.draining
        self.paused = stats.paused or stats.sleep_level > 0
        self._names = PageNaming(self._page_size, 0, stats.weights_version)
        self._num_rows = stats.running + stats.parked + stats.waiting
        self._room = (stats.pages_total - stats.pages_used) * self._page_size if stats.pages_total else math.inf
        # A step with few prompt tokens is slow for each of them: only the best measurements tell what a long prompt will take.
        fading = 0.5 ** ((now - self._reported) / RATE_HALF_LIFE)
        self.rate = max(stats.prefill_tokens_per_second, self.rate * fading)
        self._reported = now
        self._backlog = stats.uncomputed_tokens + sum(placement.uncached for placement in self._unreported)
        counted = now - max(REPORT_LAG, 2 * stats.mean_step_seconds)
        for placement in list(itertools.takewhile(lambda placement: placement.sent <= counted, self._unreported)):
            self._remove_unreported(placement)
        if report.pages is not None:
            self.prefixes.apply(report.pages)
            while self._computed and self._computed[0][0] <= counted:
                self._forget_computed()

    def identify(self, stats: EngineStats) -> None:
        """Take over which weights it says it has."""
        self.stats = stats
        self.generation = stats.fingerprint or f"{self._described}, weights {stats.weights_version}"
        self._generations[stats.weights_version] = self.generation

    def saw_weights(self, version: int) -> None:
        """A token came of weights that it has not told of: until it does, nothing can go on there that began elsewhere."""
        if version not in self._generations:
            self.generation = self.generation_of(version)

    def generation_of(self, version: int) -> str:
        """That a token of these weights came from. Of weights that the replica has not told of: what no other has."""
        return self._generations.get(version, f"weights {version} of {self.name}")

    def place(self, prompt: RoutedPrompt, now: float) -> RequestPlacement:
        """The request is sent to this replica. Followed by one call of `end_request`, whatever becomes of it."""
        digests = self._digests(prompt)
        cached = self.prefixes.longest(digests)
        digests, uncached = digests[cached:], prompt.num_tokens - cached * self._page_size
        work = uncached + self._mean_output
        placement = RequestPlacement(now, prompt.num_tokens, uncached, work, digests)
        self.prefixes.expect(digests)
        self._unreported[placement] = None
        self._backlog += uncached
        self.outstanding += 1
        self._outstanding_work += work
        return placement

    def first_token(self, placement: RequestPlacement, now: float) -> None:
        """The request's first token came from this replica. Further calls, and calls after `end_request`, do nothing."""
        if placement.began is None and not placement.ended:
            placement.began = now
            self._remove_unreported(placement)
            self._computed.append((now, placement.digests))
            self._num_computed += len(placement.digests)
            # Who gets no reports of pages knows only these.
            limit = min(MAX_DIGESTS, self.stats.pages_total or MAX_DIGESTS)
            while self._num_computed > limit:
                self._forget_computed()

    def end_request(self, placement: RequestPlacement, now: float, output_tokens: int = 0, cached_tokens: int | None = None) -> None:
        """It has ended, been cancelled or moved away. `output_tokens`: computed there. `cached_tokens`: of the prompt, found in the cache;
        None: not known. More than one call is the same as one."""
        if placement.ended:
            return
        placement.ended = True
        self.outstanding -= 1
        self._outstanding_work -= placement.work
        if placement.began is None:
            self._remove_unreported(placement)
            self.prefixes.forget(placement.digests)
            return
        uncached = placement.uncached if cached_tokens is None else placement.num_tokens - cached_tokens
        self._recent_work = self.load(now) - self._outstanding_work + uncached + output_tokens
        self._recent_at = now
        self._num_ended += 1
        part = 1 / min(self._num_ended, MEAN_OF)
        self._mean_output += (output_tokens - self._mean_output) * part
        self._mean_seconds += (now - placement.began - self._mean_seconds) * part
        if self._num_ended >= MEAN_OF and self._mean_seconds > 0:
            self.speed = self._mean_output / self._mean_seconds

    # ---- what it says to routing -------------------------------------------------------------------------------------

    def suits(self, prompt: RoutedPrompt, least: int) -> bool:
        """Whether it is the role of the replica to compute the prompt: "prefill" is for those without output of which `least` tokens are
        not cached there, "decode" for all others."""
        if not self.stats.role:
            return True
        uncached = prompt.num_tokens - self._page_size * self.prefixes.longest(self._digests(prompt))
        is_long = not prompt.has_output and uncached >= least
        return is_long == (self.stats.role == "prefill")

    def can_take(self, prompt: RoutedPrompt) -> bool:
        """Whether it serves what the request can begin or go on with."""
        fits = prompt.generation in (None, self.generation) and prompt.texts in (None, self.texts)
        return fits and self.serving and not self.draining

    def has_room(self, prompt: RoutedPrompt) -> bool:
        """Whether it has a row and pages left for the request, were it sent now."""
        has_row = self._max_num_seqs <= 0 or self._num_rows + len(self._unreported) < self._max_num_seqs
        return has_row and self._backlog + prompt.num_tokens <= self._room

    def weight(self, now: float) -> float:
        """The part of its share that it gets, FIRST_WEIGHT to 1."""
        age = now - self._started
        return 1.0 if age >= self._slow_start_seconds else FIRST_WEIGHT + (1 - FIRST_WEIGHT) * age / self._slow_start_seconds

    def load(self, now: float) -> float:
        """Tokens that it has been and will be occupied with for this router, less the older they are."""
        return self._outstanding_work + self._recent_work * math.exp((self._recent_at - now) / WORK_SECONDS)

    def outlook(self, prompt: RoutedPrompt, now: float) -> Outlook:
        """What the request would meet at this replica, were it sent at `now`."""
        uncached = prompt.num_tokens - self._page_size * self.prefixes.longest(self._digests(prompt))
        wait = 1.5 * self.stats.mean_step_seconds
        excess = 0.0  # of what there is in all
        num_rows = self._num_rows + len(self._unreported) + 1
        if num_rows > self._max_num_seqs > 0:
            excess = num_rows / self._max_num_seqs - 1
        lacking = self._backlog + prompt.num_tokens - self._room
        if lacking > 0:
            excess = max(excess, lacking / (self.stats.pages_total * self._page_size))
        # In the mean time of a request, all that is there ends.
        return Outlook(uncached, self._backlog, wait + excess * self._mean_seconds, self.load(now))

    # ---- bookkeeping -------------------------------------------------------------------------------------------------

    def _digests(self, prompt: RoutedPrompt) -> Sequence[int]:
        """The digests of the prompt's pages by their names at this replica; none if it does not have the adapter."""
        if prompt.adapter is None:
            return prompt.digests(self._names)
        adapter = self._adapters.get(prompt.adapter)
        return () if adapter is None else prompt.digests(self._names._replace(adapter=adapter))

    def _remove_unreported(self, placement: RequestPlacement) -> None:
        if placement in self._unreported:
            del self._unreported[placement]
            self._backlog -= placement.uncached

    def _forget_computed(self) -> None:
        _, digests = self._computed.popleft()
        self._num_computed -= len(digests)
        self.prefixes.forget(digests)
