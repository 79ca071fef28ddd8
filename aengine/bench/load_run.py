"""What a load test sends, and when: workloads and arrival times. Everything follows from a seed; knows nothing of targets.

The load itself: sends the items of a workload to a target and notes when chunks come back.

Owns times and order (arrivals, turns, the limit of concurrent requests); knows nothing of engines or protocols.

What can be measured: the engine in this process, an aengine server, any server with OpenAI's completions API. Each turns a prompt into
chunks. Libraries are imported where they are used, so that a peer's environment needs nothing of ours but this package.
What becomes of a load at a router's replicas: how it was shared among them, and how much of its prompts they had cached.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Protocol

from aengine.api.dataclass import dataclass
from aengine.api.engine import EngineBase
from aengine.api.outputs import DraftUsage, EngineStats
from aengine.api.params import SamplingParams
from aengine.router.router import Router


@dataclass(frozen=True, slots=True)
class Item:
    """One request. Prompts are token ids, so that every server gets the same work."""

    prompt: tuple[int, ...]
    output_tokens: int  # generated exactly: the end of a sequence is ignored
    arrival: float = 0.0  # seconds after the start at which it is sent, at the earliest
    after: int | None = None  # index of the turn before, whose whole prompt and output come before `prompt`


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Lengths in tokens, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """Reads one length, such as `128`, or a range, such as `64-512`. Raises ValueError for any other text."""
        low, _, high = text.partition("-")
        parsed = cls(int(low), int(high or low))
        if not 1 <= parsed.low <= parsed.high:
            raise ValueError(f"{text!r} is not a length or a range of lengths such as 64-512")
        return parsed

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many random requests there are, and how long. The ids of their prompts are below `vocab_size`, and FIRST_ID or higher."""

    num_requests: int
    input_len: LengthRange
    output_len: LengthRange
    vocab_size: int
    seed: int = 0


FIRST_ID = 10  # special tokens tend to have the lowest ids
NANO_REQUESTS = 256
NANO_TEMPERATURE = 0.6  # of its requests; nothing else restricts what is sampled


def random_lengths(lengths: Lengths) -> list[Item]:
    """Independent requests; with equal ends of the ranges all of them are of one size."""
    rng = random.Random(lengths.seed)
    return [
        Item(_ids(rng, lengths.input_len.draw(rng), lengths.vocab_size), lengths.output_len.draw(rng)) for _ in range(lengths.num_requests)
    ]


def shared_prefix(lengths: Lengths, prefix_len: int, num_prefixes: int = 1) -> list[Item]:
    """Independent requests as `random_lengths` makes them, each behind one of `num_prefixes` common beginnings of `prefix_len` tokens, in
    turn."""
    prefixes = [_ids(random.Random(f"{lengths.seed}/{index}"), prefix_len, lengths.vocab_size) for index in range(num_prefixes)]
    return [
        replace(item, prompt=prefix + item.prompt) for item, prefix in zip(random_lengths(lengths), itertools.cycle(prefixes), strict=False)
    ]


def multi_turn(lengths: Lengths, num_turns: int) -> list[Item]:
    """Conversations of `num_turns` turns each; every turn repeats all before it and adds `input_len` tokens."""
    items: list[Item] = []
    rng = random.Random(lengths.seed)
    for _ in range(lengths.num_requests):
        for turn in range(num_turns):
            prompt, output = _ids(rng, lengths.input_len.draw(rng), lengths.vocab_size), lengths.output_len.draw(rng)
            items.append(Item(prompt, output, after=len(items) - 1 if turn else None))
    return items


def trace(path: Path, vocab_size: int, seed: int = 0) -> list[Item]:
    """A JSON Lines file of objects with `timestamp` (seconds), `input_length` and `output_length` (tokens).

    Raises ValueError naming a line that is not such an object.
    """
    rng = random.Random(seed)
    items: list[Item] = []
    start: float | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            time, length, output = float(entry["timestamp"]), int(entry["input_length"]), int(entry["output_length"])
            if length < 1 or output < 1:
                raise ValueError("lengths must be at least 1")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}; it needs timestamp, input_length, output_length") from error
        start = time if start is None else start
        items.append(Item(_ids(rng, length, vocab_size), output, arrival=max(0.0, time - start)))
    return sorted(items, key=lambda item: item.arrival)


def nano_vllm(num_requests: int, vocab_size: int) -> list[Item]:
    """The workload of nano-vllm's benchmark (bench.py there), to the token: 256 requests, 100..1024 tokens in and out, seed 0.

    The first `num_requests` of them. Its ids are below 10,001; those that a smaller vocabulary lacks are taken modulo its size.
    """
    if not 1 <= num_requests <= NANO_REQUESTS:
        raise ValueError(f"the nano workload has 1 to {NANO_REQUESTS} requests, not {num_requests}")
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(NANO_REQUESTS)]
    outputs = [rng.randint(100, 1024) for _ in range(NANO_REQUESTS)]
    items = [Item(tuple(token % vocab_size for token in prompt), output) for prompt, output in zip(prompts, outputs, strict=True)]
    return items[:num_requests]


def arriving(items: Sequence[Item], rate: float, burstiness: float = 1.0, seed: int = 0) -> list[Item]:
    """The items with arrival times of `rate` requests a second; infinite is all at once.

    Gaps are Gamma distributed with shape `burstiness`: 1 is a Poisson process, less is burstier. Later turns have no time of their own.
    """
    rng = random.Random(f"{seed}/arrivals")
    now = 0.0
    timed: list[Item] = []
    for item in items:
        if item.after is None:
            timed.append(replace(item, arrival=now))
            now += 0.0 if rate == math.inf else rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        else:
            timed.append(item)
    return timed


def _ids(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(min(FIRST_ID, vocab_size - 1), vocab_size), k=length))


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The tokens that came at one moment."""

    num_tokens: int
    token_ids: tuple[int, ...] = ()  # empty where the target does not report them
    drafts: tuple[DraftUsage, ...] = ()  # of the whole request, in a last chunk without tokens


class Target(Protocol):
    """The engine or server that is measured."""

    name: str

    def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[TokenChunk, None]:
        """Generation of exactly so many tokens. Closing the generator cancels the request."""


@dataclass(slots=True)
class RequestOutcome:
    """What became of one item. Moments in seconds on time.perf_counter, durations in milliseconds; durations need a chunk."""

    prompt_tokens: int
    sent: float
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    drafts: tuple[DraftUsage, ...] = ()
    error: str | None = None

    @property
    def completed(self) -> bool:
        return self.error is None and bool(self.chunk_times)

    @property
    def output_tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def ttft(self) -> float:
        return 1e3 * (self.chunk_times[0] - self.sent)

    @property
    def e2el(self) -> float:
        return 1e3 * (self.chunk_times[-1] - self.sent)

    @property
    def tpot(self) -> float:
        """0 where there is one token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Between chunks: the moment at which a gap ended, and its duration."""
        return [(after, 1e3 * (after - before)) for before, after in itertools.pairwise(self.chunk_times)]


async def run_load(
    target: Target,
    items: Sequence[Item],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[RequestOutcome], None] = lambda outcome: None,
) -> list[RequestOutcome]:
    """Send every item at its time; returns the outcomes in the order of the items. An item that fails says so in its outcome."""
    gate = asyncio.Semaphore(max_concurrency or max(1, len(items)))
    start = time.perf_counter()
    tasks: list[asyncio.Task[tuple[tuple[int, ...], RequestOutcome]]] = []

    async def run(item: Item) -> tuple[tuple[int, ...], RequestOutcome]:
        """The whole prompt, and the outcome."""
        prompt = item.prompt
        if item.after is not None:
            prompt_before, before = await tasks[item.after]
            prompt = (*prompt_before, *before.token_ids, *prompt)
        await asyncio.sleep(max(0.0, start + item.arrival - time.perf_counter()))
        async with gate:
            outcome = await _send(target, prompt, item.output_tokens)
        on_done(outcome)
        return prompt, outcome

    tasks += [asyncio.create_task(run(item)) for item in items]
    return [outcome for _, outcome in await asyncio.gather(*tasks)]


async def _send(target: Target, prompt: Sequence[int], output_tokens: int) -> RequestOutcome:
    clock = time.perf_counter
    outcome = RequestOutcome(len(prompt), clock())
    try:
        async with aclosing(target.send(prompt, output_tokens)) as chunks:
            async for chunk in chunks:
                outcome.drafts = chunk.drafts
                if chunk.num_tokens:
                    outcome.chunk_times.append(clock())
                    outcome.chunk_tokens.append(chunk.num_tokens)
                    outcome.token_ids.extend(chunk.token_ids)
    except Exception as error:  # the run goes on, and the report counts it
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


class EngineTarget:
    """`AsyncEngine` in this process, or `AsyncClient`, through `stream()`."""

    def __init__(self, engine: EngineBase, temperature: float = 0.0, name: str = "aengine (in process)") -> None:
        self.name = name
        self._engine = engine
        # Nothing else restricts what is sampled, whatever the model's own defaults are.
        self._params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True, detokenize=True)

    async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[TokenChunk, None]:
        async with self._engine.stream(list(prompt), replace(self._params, max_tokens=output_tokens)) as stream:
            async for token in stream:
                yield TokenChunk(1, (token.token_id,))
            if stream.usage.drafts:
                yield TokenChunk(0, drafts=stream.usage.drafts)


class OpenAITarget:
    """A server with OpenAI's `/v1/completions`, streaming; `client` is an `httpx2.AsyncClient` on its base URL."""

    name = "OpenAI API"

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        self._model = model

    async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[TokenChunk, None]:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,  # vLLM, SGLang and llama.cpp know it
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        known = 0
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                    continue
                event = json.loads(line[5:])
                if not event.get("choices"):
                    continue
                total = (event.get("usage") or {}).get("completion_tokens", known + 1)  # else one per event is the best guess
                if total > known:
                    yield TokenChunk(total - known)
                    known = total


@asynccontextmanager
async def open_url(url: str, model: str | None, token: str | None = None) -> AsyncIterator[tuple[Target, int | None]]:
    """The server at `grpc://host:port` (aengine) or `http(s)://host:port` (OpenAI's API), and its vocabulary size where it reports it."""
    if url.startswith("grpc://"):
        from aengine.client import AsyncClient

        async with AsyncClient(url.removeprefix("grpc://"), token=token) as client:
            yield EngineTarget(client, name="aengine (gRPC)"), client.model_info.vocab_size
        return
    import httpx2 as httpx

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, headers=headers, limits=limits) as http:
        if model is None:
            try:
                model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            except (httpx.HTTPError, KeyError, IndexError) as error:
                raise RuntimeError(f"{url} lists no model at /v1/models: {error!r}") from error
        yield OpenAITarget(http, model), None


REPORT_SECONDS = 1.1
"""Servers tell their load at least once a second."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica did, in tokens."""

    name: str
    prompt: int
    cached: int  # of the prompt tokens
    completion: int


async def counted(router: Router) -> Mapping[str, EngineStats]:
    """What the replicas have done by now, by name."""
    await asyncio.sleep(REPORT_SECONDS)
    return {replica.name: replica.report.stats for replica in router.replicas() if replica.report is not None}


def shares(before: Mapping[str, EngineStats], after: Mapping[str, EngineStats]) -> list[Share]:
    """What was done between. A replica that was restarted meanwhile counts from its restart."""
    found = []
    for name, now in after.items():
        then = before.get(name)
        if then is None or now.steps < then.steps:
            then = EngineStats()
        prompt, cached = now.prompt_tokens - then.prompt_tokens, now.cached_prompt_tokens - then.cached_prompt_tokens
        found.append(Share(name, prompt, cached, now.completion_tokens - then.completion_tokens))
    return found


def show(found: list[Share]) -> list[str]:
    """Describes the shares in lines for people: one for each replica, and one about prefix hits and balance."""
    prompt, cached = sum(one.prompt for one in found), sum(one.cached for one in found)
    computed = [one.prompt - one.cached + one.completion for one in found]
    mean = sum(computed) / len(computed)
    lines = [f"{one.name}: {one.prompt} prompt tokens, {one.cached} of them cached, {one.completion} generated" for one in found]
    if prompt and mean:
        lines.append(f"prefix hits: {cached / prompt:.1%} of prompt tokens; the busiest computed {max(computed) / mean:.2f} of the mean")
    return lines
