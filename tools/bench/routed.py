"""Policies of routing on real replicas: `python -m tools.bench.routed`.

Conversations behind a few system prompts go through `Router("demo", replicas=N)`, whose replicas have small caches. Prints, for each
policy, how much of the prompts was found in prefix caches, the time to first token, and how evenly the replicas were used.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aengine.api.outputs import EngineStats, ReplicaState
from aengine.bench.load_run import FIRST_ID, EngineTarget, Item, LengthRange, Lengths, RequestOutcome, multi_turn, run_load
from aengine.bench.report import table, write_json
from aengine.router.replica_load import RoutingPolicy
from aengine.router.router import Router

HEADER = ("policy", "requests", "hits %", "TTFT p50 ms", "p90 ms", "tokens max/mean", "prompt tokens max/mean", "seconds")
PATIENCE = 60.0
"""Seconds for all replicas to start, and for their last reports."""
POLL = 0.05


@dataclass(frozen=True, slots=True)
class Routed:
    """What a policy made of the conversations."""

    policy: str
    requests: int
    hit_rate: float  # prompt tokens found in prefix caches, of all prompt tokens
    ttft_p50: float  # milliseconds
    ttft_p90: float
    token_imbalance: float  # computed tokens of the replica with the most, over the mean
    prompt_imbalance: float  # the same of the prompt tokens that it was sent
    seconds: float  # from the first request to the last token

    @property
    def cells(self) -> Sequence[object]:
        ratios = [f"{value:.2f}" for value in (self.token_imbalance, self.prompt_imbalance)]
        return self.policy, self.requests, f"{100 * self.hit_rate:.1f}", self.ttft_p50, self.ttft_p90, *ratios, f"{self.seconds:.1f}"


def main() -> int:
    options = build_parser().parse_args()
    results = []
    for policy in options.policy.split(","):
        results.append(asyncio.run(measure(RoutingPolicy(policy), options)))
        print(*results[-1].cells, flush=True)
        if options.json:
            write_json(options.json, ["python", "-m", "tools.bench.routed", *sys.argv[1:]], results)
    print(f"\n{table(HEADER, [result.cells for result in results])}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--kv-cache-memory", type=int, default=7 << 20, metavar="BYTES", help="of each (default: 7 MiB)")
    parser.add_argument("--policy", default="prefix,round_robin", metavar="NAME,NAME", help="(default: prefix,round_robin)")
    parser.add_argument("--conversations", type=int, default=60, metavar="N", help="(default: 60)")
    parser.add_argument("--users", type=int, default=8, metavar="N", help="who have one conversation after another (default: 8)")
    parser.add_argument("--turns", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--system-prompts", type=int, default=16, metavar="N", help="the k-th is 1 / k as popular (default: 16)")
    parser.add_argument("--system-len", type=int, default=100, metavar="N", help="tokens (default: 100)")
    parser.add_argument(
        "--input-len", type=LengthRange.parse, default=LengthRange(60, 140), metavar="N[-N]", help="of a turn (default: 60-140)"
    )
    parser.add_argument(
        "--output-len", type=LengthRange.parse, default=LengthRange(16, 48), metavar="N[-N]", help="of an answer (default: 16-48)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, with date, hardware and versions")
    return parser


def conversations(options: argparse.Namespace, vocab_size: int) -> Iterator[Sequence[Item]]:
    rng = random.Random(0)
    ids = range(FIRST_ID, vocab_size)
    system_prompts = [tuple(rng.choices(ids, k=options.system_len)) for _ in range(options.system_prompts)]
    popularity = [1 / (k + 1) for k in range(options.system_prompts)]
    for number in range(options.conversations):
        first, *others = multi_turn(Lengths(1, options.input_len, options.output_len, vocab_size, seed=number), options.turns)
        yield [replace(first, prompt=rng.choices(system_prompts, popularity)[0] + first.prompt), *others]


async def measure(policy: RoutingPolicy, options: argparse.Namespace) -> Routed:
    router = Router("demo", replicas=options.replicas, kv_cache_memory=options.kv_cache_memory, routing_policy=policy.value)
    async with router:
        await _until(lambda: [one.state for one in router.replicas()] == [ReplicaState.SERVING] * options.replicas, "all replicas serve")
        target, waiting = EngineTarget(router), conversations(options, router.model_info.vocab_size)

        async def talk() -> list[RequestOutcome]:
            return [outcome for conversation in waiting for outcome in await run_load(target, conversation)]

        began = time.perf_counter()
        outcomes = [outcome for found in await asyncio.gather(*(talk() for _ in range(options.users))) for outcome in found]
        seconds = time.perf_counter() - began
        if failed := [outcome.error for outcome in outcomes if not outcome.completed]:
            raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
        stats = await _last_stats(router, outcomes)
    computed = np.array([one.prompt_tokens - one.cached_prompt_tokens + one.completion_tokens for one in stats])
    prompts = np.array([one.prompt_tokens for one in stats])
    p50, p90 = np.percentile([outcome.ttft for outcome in outcomes], (50, 90)).tolist()
    return Routed(
        policy=policy.value,
        requests=len(outcomes),
        hit_rate=sum(one.cached_prompt_tokens for one in stats) / int(prompts.sum()),
        ttft_p50=p50,
        ttft_p90=p90,
        token_imbalance=float(computed.max() / computed.mean()),
        prompt_imbalance=float(prompts.max() / prompts.mean()),
        seconds=seconds,
    )


async def _last_stats(router: Router, outcomes: Sequence[RequestOutcome]) -> list[EngineStats]:
    """Of each replica, when their reports count all tokens."""
    expected = sum(outcome.output_tokens for outcome in outcomes)

    def stats() -> list[EngineStats]:
        return [replica.report.stats for replica in router.replicas()]

    await _until(lambda: sum(one.completion_tokens for one in stats()) >= expected, "the replicas have reported all tokens")
    return stats()


async def _until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(round(PATIENCE / POLL)):
        if condition():
            return
        await asyncio.sleep(POLL)
    raise TimeoutError(f"{what}: not within {PATIENCE} s")


if __name__ == "__main__":
    sys.exit(main())
