"""Arguments of `aengine-bench route`: what the replicas are like and what they are asked for."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.lab.routing import SimulationOptions
from tools.lab.sessions import SessionOptions
from tools.lab.simulated_replica import ReplicaOptions, StepCosts

# Of Qwen3-0.6B in bfloat16 on two cores of an EPYC: docs/results/amd-epyc-2cores-step.json.
STEP_COSTS = StepCosts(step=0.0327, prefill_token=0.00246, decode_row=0.00262)


def add_routing_options(parser: argparse.ArgumentParser) -> None:
    replicas = parser.add_argument_group("replicas")
    replicas.add_argument(
        "--step-costs", type=_costs, metavar="MS,MS,MS", help="milliseconds of a step, of a prompt token, of a decode row"
    )
    replicas.add_argument("--steps", type=Path, metavar="FILE", help="take them from what `aengine-bench step --json FILE` measured")
    replicas.add_argument("--steps-of", metavar="NAME", help="the model of --steps (default: its first)")
    replicas.add_argument("--pages", type=int, default=1024, metavar="N", help="KV pages of a replica (default: 1024)")
    replicas.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens (default: 16)")
    replicas.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="sequences that run at once (default: 64)")
    replicas.add_argument("--max-num-batched-tokens", type=int, default=1024, metavar="N", help="of a step (default: 1024)")
    replicas.add_argument("--slow-share", type=float, default=0.0, metavar="P", help="of replicas whose steps take longer (default: 0)")
    replicas.add_argument("--slow-factor", type=float, default=2.0, metavar="X", help="by how much (default: 2)")
    replicas.add_argument("--restart", type=float, metavar="S", help="the first replica is lost after S seconds and comes back empty")
    replicas.add_argument(
        "--report-seconds", type=float, default=0.1, metavar="S", help="between reports of a replica's load (default: 0.1)"
    )
    replicas.add_argument("--report-delay", type=float, default=0.05, metavar="S", help="age of a report that comes (default: 0.05)")
    trace = parser.add_argument_group("trace", "Lengths are means, in tokens.")
    trace.add_argument("--sessions", type=int, default=100, metavar="N", help="conversations for each replica (default: 100)")
    trace.add_argument("--rate", type=float, default=0.05, metavar="R", help="sessions a second for each replica (default: 0.05)")
    trace.add_argument("--burst", type=int, default=1, metavar="N", help="sessions that begin at once (default: 1)")
    trace.add_argument("--turns", type=float, default=5.0, metavar="N", help="mean number of turns (default: 5)")
    trace.add_argument("--system-prompts", type=int, default=50, metavar="N", help="different ones (default: 50)")
    trace.add_argument(
        "--zipf", type=float, default=1.1, metavar="A", help="the k-th is chosen as often as k to the power of -A (default: 1.1)"
    )
    trace.add_argument("--system-len", type=int, default=512, metavar="N", help="of system prompts (default: 512)")
    trace.add_argument("--user-len", type=int, default=100, metavar="N", help="of what a user says in a turn (default: 100)")
    trace.add_argument("--output-len", type=int, default=150, metavar="N", help="of an answer (default: 150)")
    trace.add_argument("--huge-share", type=float, default=0.0, metavar="P", help="of sessions that begin with a document (default: 0)")
    trace.add_argument("--huge-len", type=int, default=8000, metavar="N", help="of each document, exactly (default: 8000)")
    trace.add_argument("--think-seconds", type=float, default=10.0, metavar="S", help="mean, before each next turn (default: 10)")
    trace.add_argument("--seed", type=int, default=0, help="(default: 0)")


def session_options(options: argparse.Namespace, num_replicas: int) -> SessionOptions:
    """Raises ValueError for what makes no sense."""
    return SessionOptions(
        num_sessions=options.sessions * num_replicas,
        rate=options.rate * num_replicas,
        burst=options.burst,
        mean_turns=options.turns,
        num_system_prompts=options.system_prompts,
        zipf=options.zipf,
        system_len=options.system_len,
        user_len=options.user_len,
        output_len=options.output_len,
        huge_share=options.huge_share,
        huge_len=options.huge_len,
        think_seconds=options.think_seconds,
        page_size=options.page_size,
        seed=options.seed,
    )


def simulation_options(options: argparse.Namespace, num_replicas: int) -> SimulationOptions:
    """Raises ValueError for what makes no sense, OSError for a file that cannot be read."""
    if options.steps is not None and options.step_costs is not None:
        raise ValueError("--steps and --step-costs cannot go together")
    costs = STEP_COSTS if options.step_costs is None else options.step_costs
    if options.steps is not None:
        costs = StepCosts.of_results(options.steps, options.steps_of)
    return SimulationOptions(
        num_replicas=num_replicas,
        replica=ReplicaOptions(
            costs=costs,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            num_pages=options.pages,
            page_size=options.page_size,
        ),
        report_seconds=options.report_seconds,
        report_delay=options.report_delay,
        slow_share=options.slow_share,
        slow_factor=options.slow_factor,
        restart=options.restart,
        seed=options.seed,
    )


def _costs(text: str) -> StepCosts:
    costs = [float(part) / 1e3 for part in text.split(",")]
    if len(costs) != 3 or min(costs) < 0 or max(costs) == 0:
        raise ValueError
    return StepCosts(*costs)


_costs.__name__ = "list of three times in milliseconds"
