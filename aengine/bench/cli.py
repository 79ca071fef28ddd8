"""`aengine-bench`: measure an engine, or a server, from the command line.

Owns the arguments and what is printed; the measuring is done elsewhere in this package. Figures are for reading and comparing: nothing
here judges them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aengine.bench.load import Outcome, Target, run_load
from aengine.bench.metrics import Summary, summarise
from aengine.bench.report import plot, show_distribution, show_summary, table, write_json
from aengine.bench.workload import Item, Range, Shape, arriving, multi_turn, random_lengths, shared_prefix, trace
from aengine.config import EngineConfig
from aengine.errors import AEngineError
from aengine.server.settings import Option, is_flag, metavar, read_settings
from aengine.server.settings import options as options_of_server

DEFAULT_VOCAB = 32_000  # for servers that do not tell theirs


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 when nothing could be measured or requests failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(given)
    try:
        _check_plot(options)
        return int(options.run(options, ["aengine-bench", *given]))
    except (AEngineError, OSError, ValueError, RuntimeError) as error:
        print(f"aengine-bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _check_plot(options: argparse.Namespace) -> None:
    """Before the run, not after it."""
    if getattr(options, "plot", None) is not None and importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install 'aengine[bench]'")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aengine-bench", description="Measure an engine or a server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="load on a server: grpc://host:port (aengine) or http://host:port (OpenAI's API)")
    serve.add_argument("url", help="grpc://127.0.0.1:50051, or http://127.0.0.1:8000 of any server with /v1/completions")
    serve.add_argument("--api-model", metavar="NAME", help="model name to ask an OpenAI server for (default: the first it lists)")
    serve.add_argument("--token", help="bearer token")
    serve.add_argument("--vocab-size", type=int, metavar="N", help="ids of prompts are below it (default: the server's, else 32000)")
    serve.set_defaults(run=_serve)
    offline = commands.add_parser("offline", help="throughput in process: all requests at once")
    offline.set_defaults(run=_offline)
    latency = commands.add_parser("latency", help="latency in process: one request after another; also time from cancel to free pages")
    latency.set_defaults(run=_offline, max_concurrency=1, num_requests=20, input_len=Range(128, 128), output_len=Range(64, 64))
    for command in (serve, offline, latency):
        _add_workload(command, serial=command is latency)
    for command in (offline, latency):
        _add_engine(command)

    step = commands.add_parser("step", help="bare decode and prefill steps against the floor measured on the spot")
    step.add_argument("--decode", type=_counts, default=(1, 8, 32), metavar="B,B", help="batch sizes of decode steps (default: 1,8,32)")
    step.add_argument("--context", type=int, default=1024, metavar="N", help="known tokens of each row of a decode step (default: 1024)")
    step.add_argument("--prefill", type=_counts, default=(1024,), metavar="N,N", help="prompt lengths of prefill steps (default: 1024)")
    step.add_argument("--seconds", type=float, default=2.0, help="how long each step is repeated (default: 2)")
    step.set_defaults(run=_step)
    _add_engine(step)

    startup = commands.add_parser("startup", help="from the start of a process to its first token")
    startup.add_argument("--runs", type=int, default=3, help="(default: 3)")
    startup.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="(default: 128)")
    startup.set_defaults(run=_startup)
    _add_engine(startup)
    for command in (serve, offline, latency, step, startup):
        command.add_argument("--json", type=Path, metavar="FILE", help="write the figures, with date, hardware and versions")
    return parser


def _add_workload(command: argparse.ArgumentParser, *, serial: bool) -> None:
    group = command.add_argument_group("workload")
    kinds = ("random", "prefix", "multi-turn", "trace")
    group.add_argument(
        "--workload",
        choices=kinds,
        default="random",
        help="random lengths (equal ends: fixed), behind shared prefixes, conversations, or a trace file",
    )
    group.add_argument(
        "--num-requests", type=int, default=20 if serial else 100, metavar="N", help="conversations with multi-turn (default: %(default)s)"
    )
    group.add_argument(
        "--input-len", type=Range.parse, default=Range(128, 128), metavar="N[-N]", help="prompt tokens, or a range (default: 128)"
    )
    group.add_argument(
        "--output-len", type=Range.parse, default=Range(64, 64), metavar="N[-N]", help="output tokens, or a range (default: 64)"
    )
    group.add_argument("--prefix-len", type=int, default=384, metavar="N", help="tokens of a shared prefix (default: 384)")
    group.add_argument("--num-prefixes", type=int, default=1, metavar="N", help="how many different prefixes there are (default: 1)")
    group.add_argument("--turns", type=int, default=4, metavar="N", help="turns of a conversation (default: 4)")
    group.add_argument("--trace-file", type=Path, metavar="FILE", help="JSON Lines of timestamp, input_length, output_length")
    group.add_argument("--rate", type=float, default=float("inf"), metavar="R", help="requests per second (default: all at once)")
    group.add_argument("--burstiness", type=float, default=1.0, metavar="X", help="1 is Poisson, less is burstier (default: 1)")
    if not serial:
        group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests at once (default: no limit)")
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before the measured ones (default: 2)")
    group.add_argument("--workload-seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals (default: 0)")
    group.add_argument("--goodput", type=_limits, metavar="ttft=MS,tpot=MS,e2el=MS", help="count requests that keep all of these limits")
    group.add_argument("--plot", type=Path, metavar="FILE", help="TTFT, ITL and throughput over time, as .png or .html (needs matplotlib)")


def _add_engine(command: argparse.ArgumentParser) -> None:
    """Every field of `EngineConfig` as a flag, as `aengine-grpc` has them."""
    group = command.add_argument_group("engine")
    for option in _engine_options():
        text = option.help.replace("%", "%%")
        if is_flag(option):
            group.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            group.add_argument(option.flag, dest=option.name, metavar=metavar(option), default=argparse.SUPPRESS, help=text)


def _engine_options() -> list[Option]:
    return [option for option in options_of_server() if option.table == "engine"]


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    given = vars(options)
    return read_settings({option.name: given[option.name] for option in _engine_options() if option.name in given}, {}).engine


def _items(options: argparse.Namespace, vocab_size: int) -> list[Item]:
    shape = Shape(options.num_requests, options.input_len, options.output_len, vocab_size, options.workload_seed)
    match options.workload:
        case "prefix":
            items = shared_prefix(shape, options.prefix_len, options.num_prefixes)
        case "multi-turn":
            items = multi_turn(shape, options.turns)
        case "trace":
            if options.trace_file is None:
                raise ValueError("--workload trace needs --trace-file")
            return trace(options.trace_file, vocab_size, options.workload_seed)
        case _:
            items = random_lengths(shape)
    return arriving(items, options.rate, options.burstiness, options.workload_seed)


def _serve(options: argparse.Namespace, command: list[str]) -> int:
    async def run() -> tuple[str, list[Outcome], list[float]]:
        from aengine.bench.targets import open_url

        async with open_url(options.url, options.api_model, options.token) as (target, vocab_size):
            items = _items(options, options.vocab_size or vocab_size or DEFAULT_VOCAB)
            return target.name, *await _measure(target, items, options)

    name, outcomes, lags = asyncio.run(run())
    return _report(f"{name} at {options.url}", outcomes, {"client event loop lag, ms": lags}, options, command)


def _offline(options: argparse.Namespace, command: list[str]) -> int:
    async def run() -> tuple[list[Outcome], dict[str, list[float]]]:
        from aengine.bench.probes import cancel_to_free
        from aengine.bench.targets import EngineTarget
        from aengine.engine.async_engine import AsyncEngine

        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(AsyncEngine(_engine_config(options)))
            items = _items(options, engine.model_info.vocab_size)
            outcomes, lags = await _measure(EngineTarget(engine), items, options)
            freed = await cancel_to_free(engine, list(items[0].prompt))
            return outcomes, {"event loop lag, ms": lags, "cancel to free, ms": freed}

    outcomes, probes = asyncio.run(run())
    return _report("aengine (in process)", outcomes, probes, options, command)


async def _measure(target: Target, items: Sequence[Item], options: argparse.Namespace) -> tuple[list[Outcome], list[float]]:
    from tqdm import tqdm  # type: ignore[import-untyped]

    from aengine.bench.probes import loop_lag

    if options.warmup:
        shape = Shape(options.warmup, Range(8, 8), Range(4, 4), max(max(item.prompt) for item in items) + 1, seed=-1)
        failed = [outcome for outcome in await run_load(target, random_lengths(shape)) if outcome.error]
        if failed:
            raise RuntimeError(f"the warm-up failed: {failed[0].error}")
    with tqdm(total=len(items), unit="request", disable=not sys.stderr.isatty(), leave=False) as bar:
        async with loop_lag() as lags:
            outcomes = await run_load(target, items, max_concurrency=options.max_concurrency, on_done=lambda outcome: bar.update())
    return outcomes, lags


def _report(name: str, outcomes: Sequence[Outcome], probes: dict[str, list[float]], options: argparse.Namespace, command: list[str]) -> int:
    summary: Summary = summarise(outcomes, options.goodput)
    print(show_summary(name, summary))
    for label, values in probes.items():
        print(show_distribution(label, values))
    if options.json:
        write_json(options.json, command, {"summary": summary, "probes": {label: sorted(values) for label, values in probes.items()}})
    if options.plot:
        plot(options.plot, outcomes, name)
    return 1 if summary.failed else 0


def _step(options: argparse.Namespace, command: list[str]) -> int:
    from aengine.bench.steps import Case, measure_steps
    from aengine.models.hub import resolve_model
    from aengine.runner.model_runner import ModelRunner

    config = _engine_config(options)
    runner = ModelRunner(config, resolve_model(config.model, config.revision, weights=config.load_format != "dummy"))
    cases = [Case(rows, 1, options.context) for rows in options.decode] + [Case(1, length, 0) for length in options.prefill]
    header = ("step", "ms", "best ms", "tok/s", "MB moved", "GFLOP", "floor ms", "of floor", "GB/s", "TFLOP/s")
    results: list[dict[str, Any]] = []
    rows: list[Sequence[object]] = []
    for figures, machine in measure_steps(runner, cases, options.seconds):
        moved, speed = figures.weight_bytes + figures.kv_bytes, (machine.bytes_per_second / 1e9, machine.flops_per_second / 1e12)
        times = (figures.milliseconds, figures.best_milliseconds, figures.tokens_per_second)
        floor = (moved / 1e6, figures.flops / 1e9, figures.floor_milliseconds, figures.fraction)
        rows.append((figures.case.name, *times, *floor, *speed))
        results.append({"figures": asdict(figures), "machine": asdict(machine)})
    print(table(header, rows))
    runner.close()
    if options.json:
        write_json(options.json, command, results)
    return 0 if results else 1


def _startup(options: argparse.Namespace, command: list[str]) -> int:
    from aengine.bench.startup import measure_startup

    settings = {name: value for name, value in asdict(_engine_config(options)).items() if value is not None}
    results = measure_startup(settings, options.prompt_tokens, options.runs)
    print(
        table(("run", "ready s", "first token s", "exited s"), [(i + 1, r.ready, r.first_token, r.exited) for i, r in enumerate(results)])
    )
    if options.json:
        write_json(options.json, command, results)
    return 0


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(",") if part)
    if any(count < 1 for count in counts):
        raise ValueError
    return counts


_counts.__name__ = "list of numbers"


def _limits(text: str) -> dict[str, float]:
    limits = {name: float(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    if not limits or limits.keys() - {"ttft", "tpot", "e2el"}:
        raise ValueError
    return limits


_limits.__name__ = "list of ttft=MS, tpot=MS, e2el=MS"


if __name__ == "__main__":
    sys.exit(main())
