"""What no figure of a request shows: the engine's log while it starts, how late the event loop wakes, how soon cancelled pages are free.

Time from the start of a process to its first token: `aengine-bench startup`. Each run is a process of its own, as a user starts one.

Perplexity of models on a text: `aengine-bench quality`. Every figure comes from `prompt_logprobs`, so it is what users get.

The text that comes with the package is chapters 1 to 5 of Herman Melville's Moby-Dick (1851), which is in the public domain. The demo model
was not trained on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.params import SamplingParams
from aengine.engine.async_engine import AsyncEngine

if TYPE_CHECKING:
    from aengine.engine.async_engine import AsyncEngine


LAG_INTERVAL = 0.005


@contextmanager
def start_up_log() -> Iterator[list[str]]:
    """A list that fills, while inside, with the messages of the package at level INFO and above, from all threads: which attention backend
    and why, graphs, memory. A figure means little without them."""
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("aengine")
    level = logger.level
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@asynccontextmanager
async def loop_lag() -> AsyncIterator[list[float]]:
    """A list that fills, while inside, with how many milliseconds late the loop woke up each time."""
    lags: list[float] = []

    async def sample() -> None:
        while True:
            due = time.perf_counter() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            lags.append(1e3 * (time.perf_counter() - due))

    task = asyncio.ensure_future(sample())
    try:
        yield lags
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def cancel_to_free(engine: AsyncEngine, prompt: list[int], times: int = 20) -> list[float]:
    """Milliseconds from `aclose()` of a stream in the middle of its output until its pages are free."""
    waits: list[float] = []
    for _ in range(times):
        stream = engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
        async for token in stream:
            if token.index == 0 and stream.usage.completion_tokens >= 4:
                break
        start = time.perf_counter()
        await stream.aclose()
        waits.append(1e3 * (time.perf_counter() - start))
    return waits


_PROGRAM = """
import sys, time
began = time.time()
import json, logging
import anyio
from aengine import AsyncEngine, EngineConfig, SamplingParams
imported = time.time()
parts = {}

logging.getLogger("aengine").addFilter(lambda record: parts.update(getattr(record, "seconds", {})) or True)
logging.getLogger("aengine").setLevel(logging.INFO)

async def main(settings, prompt):
    async with AsyncEngine(EngineConfig(**settings)) as engine:
        ready = time.time()
        async for _ in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)):
            break
        first = time.time()
        with open("/proc/self/status") as status:
            sizes = dict(line.split(":", 1) for line in status)
    print(json.dumps({
        "began": began,
        "imported": imported,
        "parts": parts,
        "ready": ready,
        "first_token": first,
        "own_mib": int(sizes["RssAnon"].split()[0]) / 1024,
        "resident_mib": int(sizes["VmRSS"].split()[0]) / 1024,
        "torch": "torch" in sys.modules,
    }))

anyio.run(main, *json.loads(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds after the start of the process, but for three parts of it, and its memory with the first token."""

    interpreter: float  # until Python runs the program
    imported: float
    modules: float  # of the engine: how long it imported what runs models
    weights: float  # how long these, the configuration and the KV cache took
    tokenizer: float  # how long it took, beside both
    ready: float  # the model is loaded
    first_token: float
    exited: float
    own_mib: float  # memory that no other process shares, but for files
    resident_mib: float
    torch: bool  # whether it was imported


@dataclass(frozen=True, slots=True)
class OtherStart:
    """Seconds after the start of a process of another program, and the most memory that it had."""

    first_output: float
    exited: float
    resident_mib: float


def measure_other_start(command: Sequence[str]) -> OtherStart:
    """Runs a program until its end. Raises RuntimeError for one that writes nothing or fails, and OSError."""
    start = time.time()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        wrote = bool(process.stdout.read(1))
        first_output = time.time() - start
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        exited = time.time() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if not wrote or process.returncode:
        raise RuntimeError(f"{command[0]} ended with exit code {process.returncode}" if wrote else f"{command[0]} wrote nothing")
    return OtherStart(first_output, exited, used.ru_maxrss / 1024)


def measure_startup(
    settings: dict[str, object], prompt: str | Sequence[int], runs: int, after_each: Callable[[], object] = lambda: None
) -> Sequence[StartUp]:
    """`settings`: fields of `EngineConfig`. `prompt`: a text, or token ids. The first run may find cold file caches. `after_each` is called
    after each run. Raises RuntimeError with the last line that a failed run wrote."""
    results: list[StartUp] = []
    for _ in range(runs):
        start = time.time()
        done = subprocess.run([sys.executable, "-c", _PROGRAM, json.dumps([settings, prompt])], capture_output=True, text=True)
        exited = time.time() - start
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}")
        moments = json.loads(done.stdout.splitlines()[-1])
        results.append(
            StartUp(
                interpreter=moments["began"] - start,
                imported=moments["imported"] - start,
                modules=moments["parts"]["modules"],
                weights=moments["parts"]["weights and memory"],
                tokenizer=moments["parts"]["tokenizer"],
                ready=moments["ready"] - start,
                first_token=moments["first_token"] - start,
                exited=exited,
                own_mib=moments["own_mib"],
                resident_mib=moments["resident_mib"],
                torch=moments["torch"],
            )
        )
        after_each()
    return results


HELD_TEXT = Path(__file__).with_name("held_text.txt")
HEADER = ("model", "quantization", "KV cache", "tokens", "perplexity", "rise %", "+- %", "same top 1 %")


@dataclass(frozen=True, slots=True)
class Windows:
    """Prompts of `size` tokens, the next one `stride` further on. In each the tokens are scored that the one before did not have, so that
    a token sees at least size - stride tokens before it, but for those of the first prompt."""

    size: int
    stride: int

    def __post_init__(self) -> None:
        if not 1 <= self.stride < self.size:
            raise ValueError(f"--stride: {self.stride} is not in [1, {self.size - 1}], below --window")


@dataclass(frozen=True, slots=True)
class Scores:
    """The logprobs of all tokens of a text but the first, which nothing predicts, and the most likely tokens in their places."""

    token_ids: tuple[int, ...]  # of the whole text
    logprobs: NDArray[np.float64]  # [tokens - 1], natural
    top_ids: NDArray[np.int64]  # [tokens - 1], the most likely token in the place of each
    start_up: Sequence[str]  # what the engine logged


@dataclass(frozen=True, slots=True)
class Quality:
    """One configuration. The last three figures are against the first configuration; None where the tokens are not the same ones."""

    model: str
    quantization: str
    kv_cache_dtype: str
    tokens: int
    perplexity: float
    rise: float | None  # of the perplexity, as a fraction
    rise_error: float | None  # standard error of that, from the differences of the tokens' logprobs
    same_top: float | None  # share of places with the same most likely token
    start_up: Sequence[str]

    @classmethod
    def of(cls, config: EngineConfig, name: str, scores: Scores, first: Scores) -> Quality:
        rise = rise_error = same_top = None
        if scores.token_ids == first.token_ids:
            lost = first.logprobs - scores.logprobs
            rise = math.expm1(lost.mean())
            rise_error = float((1 + rise) * lost.std() / math.sqrt(len(lost)))
            same_top = float((scores.top_ids == first.top_ids).mean())
        perplexity = math.exp(-scores.logprobs.mean())
        which = (name, config.quantization, config.kv_cache_dtype, len(scores.logprobs))
        return cls(*which, perplexity, rise, rise_error, same_top, scores.start_up)

    @property
    def cells(self) -> Sequence[object]:
        """The cells of one row of the table with `HEADER`."""
        shares = ("-" if share is None else f"{100 * share:.2f}" for share in (self.rise, self.rise_error, self.same_top))
        return (self.model, self.quantization, self.kv_cache_dtype, self.tokens, f"{self.perplexity:.3f}", *shares)


async def score_text(config: EngineConfig, text: str, windows: Windows, num_tokens: int | None) -> Scores:
    """The scores of a text, or of its first tokens. Raises what the engine raises, and ValueError for a text of fewer than two tokens."""
    engine = AsyncEngine(config)
    with start_up_log() as log:
        await engine.start()
    try:
        ids = tuple(engine.tokenizer.encode(text))[:num_tokens]
        if len(ids) < 2:
            raise ValueError(f"a text of {len(ids)} tokens has none to predict")
        starts = range(0, max(1, len(ids) - windows.size + windows.stride), windows.stride)
        scored = await asyncio.gather(*(_score(engine, ids[start : start + windows.size]) for start in starts))
    finally:
        await engine.aclose()
    fresh = [pairs if start == 0 else pairs[windows.size - windows.stride - 1 :] for start, pairs in zip(starts, scored, strict=True)]
    logprobs, top_ids = np.concatenate(fresh).T
    return Scores(ids, logprobs, top_ids.astype(np.int64), log)


async def _score(engine: AsyncEngine, prompt: Sequence[int]) -> NDArray[np.float64]:
    """[tokens - 1, 2]: the logprob of each token but the first, and the id of the most likely one there."""
    async with engine.stream(list(prompt), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)) as stream:
        async for _ in stream:
            pass
        entries = stream.completion().prompt_logprobs or ()
    return np.array([(entry.logprob, next(iter(entry.top_logprobs))) for entry in entries if entry is not None])
