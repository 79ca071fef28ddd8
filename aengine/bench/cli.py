"""`aengine-bench`: measure an engine, or a server, from the command line.

Owns the arguments and what is printed; the measuring is done elsewhere in this package. Figures are for reading and comparing: nothing
here judges them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import itertools
import json
import logging
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, astuple
from pathlib import Path
from statistics import median

from aengine.api.config import EngineConfig
from aengine.api.errors import AEngineError
from aengine.api.outputs import ModelInfo
from aengine.api.runtime import switch_often
from aengine.bench.load_options import (
    WORKLOADS,
    add_engine_options,
    add_workload_options,
    engine_config,
    given_engine_flags,
    workload_items,
)
from aengine.bench.load_run import NANO_TEMPERATURE, Item, LengthRange, Lengths, RequestOutcome, Target, random_lengths, run_load
from aengine.bench.probes import cancel_to_free, loop_lag, start_up_log
from aengine.bench.report import plot, show_distribution, show_summary, summarise, table, write_json
from aengine.bench.steps import add_step_command
from aengine.router.replica_load import RoutingPolicy

DEFAULT_VOCAB = 32_000  # for servers that do not report theirs


def main(arguments: Sequence[str] | None = None, name: str = "aengine-bench") -> int:
    """Returns the exit code: 1 when nothing could be measured or requests failed. `name`: what the program is called."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser(name).parse_args(given)
    switch_often()  # as aengine-grpc does
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        _check_plot(options)
        return int(options.run(options, [*name.split(), *given]))
    except (AEngineError, OSError, ValueError, RuntimeError) as error:
        if options.verbose:
            traceback.print_exc()
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _check_plot(options: argparse.Namespace) -> None:
    """Before the run, not after it."""
    if getattr(options, "plot", None) is not None and importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib")


def build_parser(name: str = "aengine-bench") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description="Measure an engine or a server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="load on a server: grpc://host:port (aengine) or http://host:port (OpenAI's API); or on replicas of its own"
    )
    serve.add_argument("url", nargs="?", help="grpc://127.0.0.1:50051, or http://127.0.0.1:8000 of any server with /v1/completions")
    text = "in place of a URL: engines in so many processes of this host, behind a router in this one"
    serve.add_argument("--replicas", type=int, metavar="N", help=text)
    serve.add_argument(
        "--routing-policy",
        choices=[policy.value for policy in RoutingPolicy],
        help="with --replicas: how these are chosen (default: prefix)",
    )
    serve.add_argument("--api-model", metavar="NAME", help="model name to ask an OpenAI server for (default: the first it lists)")
    serve.add_argument("--token", help="bearer token")
    serve.add_argument("--vocab-size", type=int, metavar="N", help="ids of prompts are below it (default: the server's, else 32000)")
    serve.set_defaults(run=_serve)
    offline = commands.add_parser("offline", help="throughput in process: all requests at once")
    offline.set_defaults(run=_offline)
    latency = commands.add_parser("latency", help="latency in process: one request after another; also time from cancel to free pages")
    latency.set_defaults(run=_offline, max_concurrency=1, num_requests=20, input_len=LengthRange(128, 128), output_len=LengthRange(64, 64))
    add_workload_options(serve, *WORKLOADS)
    add_workload_options(offline, *WORKLOADS, "nano")
    add_workload_options(latency, *WORKLOADS, serial=True)
    for command in (serve, offline, latency):
        add_engine_options(command)

    trace = commands.add_parser("trace", help="when the parts of steps begin and end, under a load, drawn by ui.perfetto.dev")
    trace.add_argument("--steps", type=int, default=200, metavar="N", help="that are timed (default: 200)")
    trace.add_argument("--output", type=Path, default=Path("trace.json"), metavar="FILE", help="(default: trace.json)")
    trace.set_defaults(run=_trace)
    add_workload_options(trace, *WORKLOADS)
    add_engine_options(trace)

    step = add_step_command(commands)
    startup = commands.add_parser("startup", help="from the start of a process to its first token")
    startup.add_argument("--runs", type=int, default=3, help="(default: 3)")
    startup.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="(default: 128)")
    startup.add_argument("--prompt", metavar="TEXT", help="a text in place of so many token ids")
    startup.add_argument("--beside", metavar="COMMAND", help="another program, started in turns, of which the first output is timed")
    startup.set_defaults(run=_startup)
    add_engine_options(startup)

    quality = commands.add_parser("quality", help="perplexity on a text, of several --model, --quantization and --kv-cache-dtype (lists)")
    quality.add_argument("--text", type=Path, metavar="FILE", help="(default: 65 kB of a novel that the demo model was not trained on)")
    quality.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a prompt (default: 512)")
    quality.add_argument("--stride", type=int, default=256, metavar="N", help="from one prompt to the next (default: 256)")
    quality.add_argument("--num-tokens", type=int, metavar="N", help="of the text, from its beginning (default: all)")
    quality.set_defaults(run=_quality, quantization="none,int8,int4,fp8")
    add_engine_options(quality)

    for command in (serve, offline, latency, trace, step, startup, quality, *_laboratory(commands)):
        command.add_argument("--json", type=Path, metavar="FILE", help="write the figures, with date, hardware and versions")
        command.add_argument("--verbose", action="store_true", help="show log lines as they come, and where an error was raised")
    return parser


def _laboratory(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> list[argparse.ArgumentParser]:
    """Adds the commands of tools/lab, which only a checkout has; returns their parsers."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "tools" / "lab" / "commands.py").is_file():
        return []
    if str(checkout) not in sys.path:  # as with the program that an installation makes
        sys.path.append(str(checkout))
    parsers: list[argparse.ArgumentParser] = importlib.import_module("tools.lab.commands").add_commands(commands)
    return parsers


def _serve(options: argparse.Namespace, command: list[str]) -> int:
    if options.replicas is not None and options.url is None:
        return _serve_own(options, command)
    if options.url is None or options.replicas is not None:
        raise ValueError("serve takes either a URL or --replicas")
    if of_own := [*(["--routing-policy"] if options.routing_policy else []), *given_engine_flags(options)]:
        raise ValueError(f"{of_own[0]} is for --replicas, not for a server that runs")
    from aengine.bench.load_run import open_url

    async def run() -> tuple[str, list[RequestOutcome], list[float]]:
        async with open_url(options.url, options.api_model, options.token) as (target, vocab_size):
            items = workload_items(options, options.vocab_size or vocab_size or DEFAULT_VOCAB)
            return target.name, *await _measure(target, items, options)

    name, outcomes, lags = asyncio.run(run())
    return _report(f"{name} at {options.url}", outcomes, {"client event loop lag, ms": lags}, options, command)


def _serve_own(options: argparse.Namespace, command: list[str]) -> int:
    from aengine.bench.load_run import EngineTarget, Share, counted, shares, show
    from aengine.router.router import Router

    policy = options.routing_policy or RoutingPolicy.PREFIX.value

    async def run(config: EngineConfig) -> tuple[list[RequestOutcome], list[float], list[Share]]:
        async with Router(config, replicas=options.replicas, routing_policy=policy) as router:
            items = workload_items(options, options.vocab_size or router.model_info.vocab_size)
            before = await counted(router)
            outcomes, lags = await _measure(EngineTarget(router), items, options)
            return outcomes, lags, shares(before, await counted(router))

    with engine_config(options, options.shape) as (name, config):
        outcomes, lags, found = asyncio.run(run(config))
    about: dict[str, object] = {"model": name, "replicas": found, "routing_policy": policy}
    title = f"aengine, {options.replicas} replicas ({policy}), {name}"
    return _report(title, outcomes, {"event loop lag, ms": lags}, options, command, show(found), about)


def _offline(options: argparse.Namespace, command: list[str]) -> int:
    from aengine.bench.floor import generation_floor
    from aengine.bench.load_run import EngineTarget
    from aengine.engine.async_engine import AsyncEngine

    nano = options.workload == "nano"

    async def run(config: EngineConfig) -> tuple[Sequence[Item], list[RequestOutcome], dict[str, list[float]], ModelInfo, list[str]]:
        engine = AsyncEngine(config)
        with start_up_log() as log:
            await engine.start()
        async with aclosing(engine):
            items = workload_items(options, engine.model_info.vocab_size)
            outcomes, lags = await _measure(EngineTarget(engine, NANO_TEMPERATURE if nano else 0.0), items, options)
            freed = await cancel_to_free(engine, list(items[0].prompt))
            return items, outcomes, {"event loop lag, ms": lags, "cancel to free, ms": freed}, engine.model_info, log

    with engine_config(options, options.shape) as (name, config):
        items, outcomes, probes, info, log = asyncio.run(run(config))
        about: dict[str, object] = {"model": name, "config": {**asdict(config), "model": name}, "start_up": log}
        if nano:
            floor = about["floor"] = generation_floor(config, info, items, summarise(outcomes).duration)
            log = [*log, floor.show()]
    return _report(f"aengine (in process), {name}", outcomes, probes, options, command, log, about)


async def _measure(target: Target, items: Sequence[Item], options: argparse.Namespace) -> tuple[list[RequestOutcome], list[float]]:
    """The outcomes, and by how many milliseconds the event loop was late."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    if options.warmup:
        short = Lengths(options.warmup, LengthRange(8, 8), LengthRange(4, 4), max(max(item.prompt) for item in items) + 1, seed=-1)
        failed = [outcome for outcome in await run_load(target, random_lengths(short)) if outcome.error]
        if failed:
            raise RuntimeError(f"the warm-up failed: {failed[0].error}")
    with tqdm(total=len(items), unit="request", disable=not sys.stderr.isatty(), leave=False) as bar:
        async with loop_lag() as lags:
            outcomes = await run_load(target, items, max_concurrency=options.max_concurrency, on_done=lambda outcome: bar.update())
    return outcomes, lags


def _report(
    name: str,
    outcomes: Sequence[RequestOutcome],
    probes: Mapping[str, list[float]],
    options: argparse.Namespace,
    command: list[str],
    log: Sequence[str] = (),
    about: Mapping[str, object] | None = None,
) -> int:
    """`log` is printed below the summary, `about` comes before it in the JSON. Returns the exit code."""
    summary = summarise(outcomes, options.goodput)
    print(show_summary(name, summary))
    for line in log:
        print(f"  {line}")
    for label, values in probes.items():
        print(show_distribution(label, values))
    if options.json:
        figures = {**(about or {}), "summary": summary, "probes": {label: sorted(values) for label, values in probes.items()}}
        write_json(options.json, command, figures)
    if options.plot:
        plot(options.plot, outcomes, name)
    return 1 if summary.failed else 0


def _trace(options: argparse.Namespace, command: list[str]) -> int:
    """The load is repeated until the steps are timed; what of a step is spent where is printed, too."""
    from aengine.bench.load_run import EngineTarget
    from aengine.engine.async_engine import AsyncEngine

    async def run(config: EngineConfig) -> bytes:
        async with AsyncEngine(config) as engine:
            items = workload_items(options, engine.model_info.vocab_size)

            async def load_again_and_again() -> None:
                while True:
                    await _measure(EngineTarget(engine), items, options)

            load = asyncio.ensure_future(load_again_and_again())
            try:
                return await engine.profile(options.steps, seconds=600.0)
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)

    with engine_config(options, options.shape) as (name, config):
        trace = asyncio.run(run(config))
    options.output.write_bytes(trace)
    events = [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"]
    names = list(dict.fromkeys(event["name"] for event in events))
    took = {name: [event["dur"] for event in events if event["name"] == name] for name in names}
    rows = [(name, len(each), median(each), sum(each) / 1000) for name, each in took.items()]
    print(f"{name}, {options.steps} steps, in {options.output}")
    print(table(("part", "calls", "median us", "all ms"), rows))
    if options.json:
        write_json(options.json, command, {"model": name, "parts": took})
    return 0


def _startup(options: argparse.Namespace, command: list[str]) -> int:
    from aengine.bench.probes import OtherStart, measure_other_start, measure_startup

    with engine_config(options, options.shape) as (_, config):
        settings = {name: value for name, value in asdict(config).items() if value is not None}
        prompt = options.prompt or [10 + i % 50 for i in range(options.prompt_tokens)]
        others: list[OtherStart] = []
        command_beside = shlex.split(options.beside or "")
        results = measure_startup(
            settings, prompt, options.runs, lambda: others.append(measure_other_start(command_beside)) if command_beside else None
        )
    parts = ("modules take s", "weights s", "tokenizer s")
    header = ("run", "interpreter s", "imports s", *parts, "ready s", "first token s", "exited s", "own MiB", "resident MiB", "torch")
    print(table(header, [(i + 1, *astuple(one)) for i, one in enumerate(results)]))
    if others:
        print(f"\n{options.beside}")
        print(table(("run", "first output s", "exited s", "resident MiB"), [(i + 1, *astuple(one)) for i, one in enumerate(others)]))
    if options.json:
        write_json(options.json, command, [*results, *others])
    return 0


def _quality(options: argparse.Namespace, command: list[str]) -> int:
    """Every combination of the lists; the first one is what the others are compared with."""
    from aengine.bench.probes import HEADER, HELD_TEXT, Quality, Scores, Windows, score_text

    text = (options.text or HELD_TEXT).read_text(encoding="utf-8")
    windows = Windows(options.window, options.stride)
    lists = {name: vars(options)[name].split(",") for name in ("model", "quantization", "kv_cache_dtype") if name in options}
    first: Scores | None = None
    results: list[Quality] = []
    failed = False
    for values in itertools.product(*lists.values()):
        case = argparse.Namespace(**{**vars(options), **dict(zip(lists, values, strict=True))})
        try:
            with engine_config(case, options.shape) as (name, config):
                scores = asyncio.run(score_text(config, text, windows, options.num_tokens))
        except (AEngineError, ValueError, RuntimeError) as error:
            if first is None:
                raise
            failed = True  # the other cases are measured all the same
            print(f"{' '.join(values)}: {type(error).__name__}: {error}", flush=True)
            continue
        first = first or scores
        results.append(Quality.of(config, name, scores, first))
    print(f"{options.text or HELD_TEXT.name} in prompts of {windows.size} tokens, {windows.stride} apart")
    for result in results:
        print(f"{result.model} {result.quantization} {result.kv_cache_dtype}:", *result.start_up, sep="\n  ")
    print(table(HEADER, [result.cells for result in results]))
    if options.json:
        write_json(options.json, command, {"window": windows.size, "stride": windows.stride, "results": results})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
