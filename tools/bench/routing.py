"""What a router costs beside its replicas: `python -m tools.bench.routing`.

Replicas, router and client are processes of their own; the replicas' engines are real ones on runners that cost nothing. Prints the CPU
time per token (in the kernel too) of replicas that clients call themselves, and of router and replicas where they call the router; and how
late the event loop of the router is.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from aengine.bench.report import table, write_json
from tools.bench.paced_server import Pace, PacedServer, paced_server, router_server
from tools.bench.serving import LOADS, PACE, SECONDS, STREAMS, WARM_UP, until_under_way

REPLICAS = 3
DOORS = ("streams", "HTTP streams", "session")


@dataclass(frozen=True, slots=True)
class RoutedCost:
    """Microseconds of CPU time per token, the least of several runs; and what the router adds to what replicas take by themselves."""

    load: str
    pace: float | None  # steps per second; None: as many as the event loops keep up with
    direct: float  # of the replicas, where each has its share of the streams itself
    router: float
    replicas: float  # behind the router
    tokens_per_second: float
    lag_p99: float  # of the router's event loop, in milliseconds

    @property
    def beyond(self) -> float:
        return self.router + self.replicas - self.direct


@contextmanager
def servers(options: argparse.Namespace, *, routed: bool) -> Iterator[tuple[PacedServer | None, list[PacedServer]]]:
    """The replicas, and a router in front of them."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(paced_server(options.streams, uvloop=options.uvloop)) for _ in range(options.replicas)]
        addresses = [replica.address for replica in replicas]
        yield stack.enter_context(router_server(addresses, uvloop=options.uvloop)) if routed else None, replicas


async def cost(door: str, pace: float | None, options: argparse.Namespace, *, routed: bool) -> RoutedCost:
    """Of streams through a router, or of as many that call the replicas themselves."""
    with servers(options, routed=routed) as (router, replicas):
        for replica in replicas:
            await replica.tell(Pace(pace))
        async with AsyncExitStack() as loads:
            if router is not None:
                await loads.enter_async_context(LOADS[door](options.streams)(router))
            else:
                for index, replica in enumerate(replicas):
                    count = len(range(index, options.streams, len(replicas)))
                    await loads.enter_async_context(LOADS[door](count)(replica))
            await until_under_way(replicas, lambda number: number == options.streams)
            await asyncio.sleep(WARM_UP)
            measured = replicas if router is None else [router, *replicas]
            begin = [await process.measure() for process in measured]
            await asyncio.sleep(options.seconds)
            end = [await process.measure() for process in measured]
    num = len(replicas)
    tokens = sum(after.tokens - before.tokens for before, after in zip(begin[-num:], end[-num:], strict=True))
    used = [1e6 * (after.cpu_seconds - before.cpu_seconds) / tokens for before, after in zip(begin, end, strict=True)]
    seconds = end[0].seconds - begin[0].seconds
    lag = float(np.percentile(end[0].lags, 99))
    return RoutedCost(door, pace, 0.0, sum(used[:-num]), sum(used[-num:]), tokens / seconds, lag)


async def measure_all(options: argparse.Namespace) -> list[RoutedCost]:
    found: list[RoutedCost] = []
    for pace in (None, options.pace):
        for door in options.doors:
            # In turns, so that what else the machine does is shared.
            runs = [
                (await cost(door, pace, options, routed=False), await cost(door, pace, options, routed=True))
                for _ in range(options.repeats)
            ]
            direct = min(run.replicas for run, _ in runs)
            found.append(replace(min((run for _, run in runs), key=lambda run: run.router + run.replicas), direct=direct))
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
