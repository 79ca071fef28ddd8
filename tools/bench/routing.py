"""What a router costs beside its replicas: `python -m tools.bench.routing`.

Replicas, router and client are processes of their own; the replicas' engines are real ones on runners that cost nothing. Prints the CPU
time per token (in the kernel too) of a replica that clients call themselves, and of router and replicas where they call the router; and
how late the event loop of the router is.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aengine.bench.report import table, write_json
from tools.bench.paced_server import Figures, Pace, PacedServer, paced_server, router_server
from tools.bench.serving import LOADS, PACE, SECONDS, STREAMS, WARM_UP, measure, until_under_way

REPLICAS = 3
DOORS = ("streams", "HTTP streams", "session")


@dataclass(frozen=True, slots=True)
class RoutedCost:
    """Microseconds of CPU time per token, the least of several runs; and what the router adds to what a replica takes by itself."""

    load: str
    pace: float | None  # steps per second; None: as many as the event loops keep up with
    direct: float  # of a replica that is called itself
    router: float
    replicas: float  # behind the router
    tokens_per_second: float
    lag_p99: float  # of the router's event loop, in milliseconds

    @property
    def beyond(self) -> float:
        return self.router + self.replicas - self.direct


@contextmanager
def routed(count: int, num_streams: int, *, uvloop: bool) -> Iterator[tuple[PacedServer, list[PacedServer]]]:
    """A router, and so many replicas behind it."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(paced_server(num_streams, uvloop=uvloop)) for _ in range(count)]
        yield stack.enter_context(router_server([replica.address for replica in replicas], uvloop=uvloop)), replicas


def _cpu(before: Figures, after: Figures) -> float:
    return after.cpu_seconds - before.cpu_seconds


async def direct_cost(door: str, pace: float | None, options: argparse.Namespace) -> float:
    with paced_server(options.streams, uvloop=options.uvloop) as server:
        before, after = await measure(server, LOADS[door](options.streams), options.streams, pace, options.seconds)
        return 1e6 * _cpu(before, after) / (after.tokens - before.tokens)


async def routed_cost(door: str, pace: float | None, options: argparse.Namespace) -> RoutedCost:
    with routed(options.replicas, options.streams, uvloop=options.uvloop) as (router, replicas):
        for replica in replicas:
            await replica.tell(Pace(pace))
        async with LOADS[door](options.streams)(router):
            await until_under_way(replicas, lambda number: number == options.streams)
            await asyncio.sleep(WARM_UP)
            begin = [await process.measure() for process in (router, *replicas)]
            await asyncio.sleep(options.seconds)
            end = [await process.measure() for process in (router, *replicas)]
        tokens = sum(after.tokens - before.tokens for before, after in zip(begin[1:], end[1:], strict=True))
        used = [1e6 * _cpu(before, after) / tokens for before, after in zip(begin, end, strict=True)]
        seconds = end[0].seconds - begin[0].seconds
        return RoutedCost(door, pace, 0.0, used[0], sum(used[1:]), tokens / seconds, float(np.percentile(end[0].lags, 99)))


async def measure_all(options: argparse.Namespace) -> list[RoutedCost]:
    found: list[RoutedCost] = []
    for pace in (None, options.pace):
        for door in options.doors:
            direct = min([await direct_cost(door, pace, options) for _ in range(options.repeats)])
            runs = [await routed_cost(door, pace, options) for _ in range(options.repeats)]
            best = min(runs, key=lambda cost: cost.router + cost.replicas)
            found.append(RoutedCost(door, pace, direct, best.router, best.replicas, best.tokens_per_second, best.lag_p99))
    return found


def report(costs: Sequence[RoutedCost]) -> str:
    header = ("load", "steps/s", "tokens/s", "direct", "router", "replicas", "beyond", "lag p99, ms")
    rows = [
        (cost.load, cost.pace or "free", cost.tokens_per_second, cost.direct, cost.router, cost.replicas, cost.beyond, cost.lag_p99)
        for cost in costs
    ]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.routing", description=__doc__)
    parser.add_argument("--replicas", type=int, default=REPLICAS, help="behind the router (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=STREAMS, help="at a time (default: %(default)s)")
    parser.add_argument("--pace", type=float, default=PACE, help="steps per second, in the paced runs (default: %(default)s)")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS), help="which to measure (default: all)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that one measurement takes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the least counts (default: %(default)s)")
    parser.add_argument("--uvloop", action="store_true", help="as the event loop of the servers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    costs = asyncio.run(measure_all(options))
    print(f"{options.streams} requests over {options.replicas} replicas: microseconds of CPU time per token")
    print(report(costs))
    if options.json is not None:
        write_json(options.json, ["python", "-m", "tools.bench.routing", *sys.argv[1:]], {"costs": costs})


if __name__ == "__main__":
    main()
