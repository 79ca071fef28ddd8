"""A replica that computes nothing: a scheduler's batches, pages and prefix cache, with steps that take as long as measured ones.

Time is an argument. What differs from the engine: pages of a whole output are taken when a request begins, so none is preempted, and the
step that is under way is not known to the statistics.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aengine.api.outputs import CachedPages, EngineStats, LoadReport

MOST_PASSED = 32  # waiting requests that lack pages, or wait for another's, and let later ones begin


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step: `step` + `prefill_token` for each prompt token + `decode_row` for each sequence that gets its next token."""

    step: float
    prefill_token: float
    decode_row: float

    @classmethod
    def of_results(cls, path: Path, model: str | None) -> StepCosts:
        """The best fit to what `aengine-bench step --json` measured of a model; None: the first. Raises ValueError if it is not there."""
        figures = json.loads(path.read_text())["figures"]
        found = [entry for entry in figures if model in (None, entry.get("model")) and entry.get("steps")]
        if not found:
            raise ValueError(
                f"{path} has no steps of {model or 'any model'}; it has {', '.join(str(entry.get('model')) for entry in figures)}"
            )
        steps: list[dict[str, Any]] = [one["figures"] for one in found[0]["steps"] if not one["figures"]["case"].get("beside")]
        decodes = [(one["case"]["rows"], one["milliseconds"]) for one in steps if one["case"]["length"] == 1]
        prefills = [(one["case"]["rows"] * one["case"]["length"], one["milliseconds"]) for one in steps if one["case"]["length"] > 1]
        if len({rows for rows, _ in decodes}) < 2 or not prefills:
            raise ValueError(f"{path} must have decode steps of two batch sizes, and a prefill step, of {model!r}")
        slope, start = statistics.linear_regression(*zip(*decodes, strict=True))
        per_token = [(milliseconds - start) / tokens for tokens, milliseconds in prefills]
        return cls(1e-3 * max(0.0, start), 1e-3 * statistics.mean(per_token), 1e-3 * slope)

    def seconds(self, prefill_tokens: int, decode_rows: int) -> float:
        return self.step + self.prefill_token * prefill_tokens + self.decode_row * decode_rows


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """What a simulated replica has."""

    costs: StepCosts
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    num_pages: int = 4096
    page_size: int = 16

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "num_pages", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not at least 1")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens: {self.max_num_batched_tokens} is not above max_num_seqs ({self.max_num_seqs})")


@dataclass(slots=True, eq=False)
class Work:
    """A request at a replica."""

    key: int
    prompt_tokens: int
    output_tokens: int
    digests: Sequence[int]  # of all pages that prompt and output fill
    cached_tokens: int = 0
    uncomputed: int = 0  # prompt tokens
    held: list[int] = field(default_factory=list)  # its pages that are published, by its digests or another's
    seen: int = 0  # first pages that were published, or found to be
    private: int = 0  # pages that are not published


class SimulatedCache:
    """Pages by their digests: held, or cached with the least recently released first."""

    def __init__(self, num_pages: int) -> None:
        self._free = num_pages
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._computed: set[int] = set()  # pages of prompts that are under way
        self.num_pages = num_pages
        self.added: dict[int, None] = {}  # since they were taken
        self.removed: dict[int, None] = {}

    @property
    def num_used(self) -> int:
        return self.num_pages - self._free - len(self._idle)

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    def begin(self, work: Work, page_size: int) -> bool:
        """Take pages for all of it; False: there are too few, or another one computes pages of it now."""
        pages = work.prompt_tokens // page_size
        hits = list(itertools.takewhile(self._refs.__contains__, work.digests[: (work.prompt_tokens - 1) // page_size]))
        if len(hits) < pages and work.digests[len(hits)] in self._computed:
            return False
        needed = -(-(work.prompt_tokens + work.output_tokens) // page_size) - len(hits)
        if needed > self._free + len(self._idle) - sum(self._refs[digest] == 0 for digest in hits):
            return False
        for digest in hits:
            if self._refs[digest] == 0:
                del self._idle[digest]
            self._refs[digest] += 1
        while self._free < needed:
            digest, _ = self._idle.popitem(last=False)
            del self._refs[digest]
            self._note(digest, self.removed, self.added)
            self._free += 1
        self._free -= needed
        self._computed.update(work.digests[len(hits) : pages])
        work.held, work.seen, work.private = hits, len(hits), needed
        work.cached_tokens = len(hits) * page_size
        work.uncomputed = work.prompt_tokens - work.cached_tokens
        return True

    def publish(self, work: Work, num_pages: int) -> None:
        """Its first pages are computed. Those whose content is there already stay private."""
        for digest in work.digests[work.seen : num_pages]:
            self._computed.discard(digest)
            if digest not in self._refs:
                self._refs[digest] = 1
                self._note(digest, self.added, self.removed)
                work.held.append(digest)
                work.private -= 1
        work.seen = num_pages

    def end(self, work: Work) -> None:
        for digest in reversed(work.held):
            self._refs[digest] -= 1
            if self._refs[digest] == 0:
                self._idle[digest] = None
        self._free += work.private

    @staticmethod
    def _note(digest: int, where: dict[int, None], other: dict[int, None]) -> None:
        if digest in other:
            del other[digest]
        else:
            where[digest] = None


class SimulatedReplica:
    """Requests go in by `submit`; `advance` ends the step that is under way and begins the next one."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._options = options
        self._costs = options.costs
        self._cache = SimulatedCache(options.num_pages)
        self._waiting: deque[Work] = deque()
        self._prefilling: list[Work] = []
        self._decoding: list[tuple[int, int, Work]] = []  # a heap by the step at whose end it ends
        self._chunks: list[tuple[Work, int]] = []  # of the step under way
        self._num_steps = 0  # decode steps that ended
        self._began = 0.0  # the step under way
        self._planned = 0  # equal steps in a row that are under way; 0: idle
        self._step_seconds = 0.0  # of each of them
        self._mean_step = 0.0
        self._prefilled = (0.0, 0.0)  # tokens and seconds of steps with prompt tokens, less the older they are
        self.busy_seconds = 0.0
        self.computed_tokens = 0  # of prompts and outputs

    def submit(self, work: Work, now: float) -> float | None:
        """Returns when to call `advance`, as `next_time` does."""
        self._waiting.append(work)
        if not self._planned:
            self._begin_step(now)
        elif self._planned > 1:  # many steps were planned at once, since nothing was to change in between
            self._planned = max(1, min(self._planned, math.ceil((now - self._began) / self._step_seconds)))
        return self.next_time

    @property
    def next_time(self) -> float | None:
        """When to call `advance`; None: it is idle."""
        return self._began + self._planned * self._step_seconds if self._planned else None

    def advance(self) -> tuple[list[Work], list[Work]]:
        """At `next_time`: the requests that got their first token, and those that ended."""
        now = self._began + self._planned * self._step_seconds
        cache = self._cache
        self._count(self._planned, len(self._decoding))
        self._num_steps += self._planned
        ended = []
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            _, _, work = heapq.heappop(self._decoding)
            cache.publish(work, len(work.digests))
            cache.end(work)
            ended.append(work)
        first = []
        for work, length in self._chunks:
            work.uncomputed -= length
            if work.uncomputed == 0:
                self._prefilling.remove(work)
                cache.publish(work, work.prompt_tokens // self._options.page_size)
                first.append(work)
                if work.output_tokens > 1:
                    heapq.heappush(self._decoding, (self._num_steps + work.output_tokens - 1, work.key, work))
                else:
                    cache.end(work)
                    ended.append(work)
        self._planned = 0
        self._begin_step(now)
        return first, ended

    def report(self) -> LoadReport:
        """The changes of pages are those since the last call."""
        cache = self._cache
        pages = CachedPages(snapshot=False, added=tuple(cache.added), removed=tuple(cache.removed))
        cache.added, cache.removed = {}, {}
        tokens, seconds = self._prefilled
        stats = EngineStats(
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._waiting),
            pages_used=cache.num_used,
            pages_total=cache.num_pages,
            cached_tokens=cache.num_cached * self._options.page_size,
            uncomputed_tokens=sum(work.uncomputed for work in self._prefilling) + sum(work.prompt_tokens for work in self._waiting),
            mean_step_seconds=self._mean_step,
            prefill_tokens_per_second=tokens / seconds if seconds else 0.0,
        )
        return LoadReport(stats, pages=pages)

    def works(self) -> list[Work]:
        """The requests that have not ended."""
        return [*self._waiting, *self._prefilling, *(work for _, _, work in self._decoding)]

    def _begin_step(self, now: float) -> None:
        options = self._options
        budget = options.max_num_batched_tokens - len(self._decoding)
        chunks = self._chunks = []
        for work in self._prefilling:
            length = min(work.uncomputed, budget)
            if length:
                chunks.append((work, length))
                budget -= length
        passed = []
        while self._waiting and budget > 0 and len(self._prefilling) + len(self._decoding) < options.max_num_seqs:
            work = self._waiting.popleft()
            if not self._cache.begin(work, options.page_size):
                passed.append(work)
                if len(passed) == MOST_PASSED:
                    break
                continue
            self._prefilling.append(work)
            length = min(work.uncomputed, budget)
            chunks.append((work, length))
            budget -= length
        self._waiting.extendleft(reversed(passed))
        if not chunks and not self._decoding:
            return
        prefill = sum(length for _, length in chunks)
        self._began = now
        self._step_seconds = self._costs.seconds(prefill, len(self._decoding))
        self._planned = 1 if chunks else self._decoding[0][0] - self._num_steps

    def _count(self, steps: int, decode_rows: int) -> None:
        seconds = steps * self._step_seconds
        prefill = sum(length for _, length in self._chunks)
        self.busy_seconds += seconds
        self.computed_tokens += steps * decode_rows + prefill
        left = 0.99**steps
        self._mean_step = left * self._mean_step + (1 - left) * self._step_seconds if self._mean_step else self._step_seconds
        if prefill:
            tokens, spent = self._prefilled
            self._prefilled = 0.97 * tokens + prefill, 0.97 * spent + self._step_seconds
