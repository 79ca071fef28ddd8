"""The commands of `aengine-bench` that only a checkout has: `route` and `speculation`.

Owns their arguments and what they print; the simulating and measuring is done elsewhere in this package.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing
from dataclasses import asdict, replace

from aengine.api.config import TAKE_MODEL, EngineConfig
from aengine.bench.load_options import add_engine_options, counts, engine_config, shares
from aengine.bench.report import table, write_json
from aengine.router.replica_load import RoutingPolicy
from tools.lab.routing_options import add_routing_options, session_options, simulation_options

SPECULATED = {
    "planted": "random prompts, and drafts that are right as often as --acceptance says",
    "random": "the same prompts, with the drafts of --speculative, as all others",
    "text": "pieces of a novel, to be continued",
    "edit": "random prompts, and n-grams of a document as drafts of which the output is an edited copy",
    "json": "JSON by a schema, several answers of each user one after another",
}


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> list[argparse.ArgumentParser]:
    """Without --json, which all commands have. Returns their parsers."""
    speculation = commands.add_parser("speculation", help="speculation against none, on the same requests, in turns")
    what = "; ".join(f"{name}: {about}" for name, about in SPECULATED.items())
    speculation.add_argument("--workload", metavar="NAME,NAME", default="text", help=f"a list (default: text). {what}")
    speculation.add_argument("--users", type=counts, default=(1, 8, 32), metavar="N,N", help="requests at once (default: 1,8,32)")
    rates = "shares of planted drafts that are right (default: 0.4,0.6,0.8)"
    speculation.add_argument("--acceptance", type=shares, default=(0.4, 0.6, 0.8), metavar="A,A", help=rates)
    speculation.add_argument("--output-len", type=int, default=300, metavar="N", help="tokens of an answer (default: 300)")
    speculation.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each engine that count (default: 3)")
    speculation.add_argument("--seconds", type=float, default=1.0, help="least time of a turn (default: 1)")
    speculation.add_argument("--temperature", type=float, default=0.8, metavar="T", help="(default: 0.8)")
    speculation.set_defaults(run=_speculation, speculative="auto")
    add_engine_options(speculation)

    route = commands.add_parser("route", help="policies of routing over simulated replicas, with a trace of conversations")
    route.add_argument("--replicas", type=counts, default=(3, 16), metavar="N,N", help="numbers of replicas (default: 3,16)")
    names = [policy.value for policy in RoutingPolicy]
    route.add_argument("--policy", default=",".join(names), metavar="NAME,NAME", help=f"a list (default: {','.join(names)})")
    route.set_defaults(run=_route)
    add_routing_options(route)
    return [speculation, route]


def _speculation(options: argparse.Namespace, command: list[str]) -> int:
    """Each mode in the list --speculative with none, of every workload, number of users and, of planted drafts, acceptance."""
    from tools.lab.speculation import HEADER, Case, Comparison, Load, compare

    given = vars(options)
    model = given.pop("speculative_model", None)
    modes = given.pop("speculative").split(",")
    names = options.workload.split(",")
    if unknown := set(names) - SPECULATED.keys():
        raise ValueError(f"--workload: {unknown.pop()!r} is not one of {', '.join(SPECULATED)}")
    planted = [Case("planted", users, acceptance) for users in options.users for acceptance in options.acceptance]
    cases = [case for name in names for case in (planted if name == "planted" else [Case(name, users) for users in options.users])]
    results: list[Comparison] = []

    async def run(config: EngineConfig) -> None:
        own = {mode: replace(config, speculative=mode, speculative_model=model if mode in TAKE_MODEL else None) for mode in modes}
        load = Load(options.output_len, options.rounds, options.seconds, options.temperature)
        async with aclosing(compare(config, own, cases, load)) as comparisons:
            async for result in comparisons:
                results.append(result)
                print(*result.cells, flush=True)
                if options.json:  # after each, so that what was measured is kept whatever comes next
                    write_json(options.json, command, {"model": name, "config": asdict(config), "results": results})

    with engine_config(options, options.shape) as (name, config):
        asyncio.run(run(config))
    print(f"\n{name} {config.quantization}\n{table(HEADER, [result.cells for result in results])}")
    return 0


def _route(options: argparse.Namespace, command: list[str]) -> int:
    """Each policy, with each number of replicas on a trace that is that many times as long."""
    from tools.lab.routing import HEADER, RoutingFigures, Simulation, cells, decisions_per_second
    from tools.lab.sessions import make_sessions

    policies = [RoutingPolicy(name) for name in options.policy.split(",")]
    results: list[RoutingFigures] = []
    speed = decisions_per_second()
    for count in options.replicas:
        simulation = simulation_options(options, count)
        sessions = make_sessions(session_options(options, count))
        for policy in policies:
            results.append(Simulation(policy, sessions, simulation).run())
            print(*cells(results[-1]), flush=True)
            if options.json:  # after each, so that what was simulated is kept whatever comes next
                write_json(options.json, command, {"costs": simulation.replica.costs, "results": results, "decisions_per_second": speed})
    print(f"\n{simulation.replica.costs}; {speed:.0f} decisions a second for 8 replicas and prompts of 1024 tokens, hashes included")
    print(table(HEADER, map(cells, results)))
    return 0
