"""The options of `aengine-bench`: every field of `EngineConfig` as a flag, and the configuration that the flags make; those that choose the
requests it sends, and these requests. Types of arguments raise ValueError for what is not one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aengine.api.config import EngineConfig
from aengine.bench.load_run import (
    NANO_REQUESTS,
    Item,
    LengthRange,
    Lengths,
    arriving,
    multi_turn,
    nano_vllm,
    random_lengths,
    shared_prefix,
    trace,
)
from aengine.bench.shapes import SHAPES, describe, shape_folder
from aengine.server.config.settings import Option, read_settings
from aengine.server.config.settings import options as options_of_server


def add_engine_options(command: argparse.ArgumentParser, *, several_shapes: bool = False) -> None:
    """Every field of `EngineConfig` as a flag, as `aengine-grpc` has them; `--shape` in place of `--model`."""
    group = command.add_argument_group("engine")
    either = group.add_mutually_exclusive_group()
    text = "a model of this shape with random weights, without any download: " + ", ".join(map(describe, SHAPES))
    if several_shapes:
        text += "; may be given several times"
    either.add_argument("--shape", choices=SHAPES, action="append" if several_shapes else "store", metavar="NAME", help=text)
    for option in _engine_options():
        option.add_to(either if option.name == "model" else group, option.help.replace("%", "%%"))


def _engine_options() -> list[Option]:
    return [option for option in options_of_server() if option.table == "engine"]


def given_engine_flags(options: argparse.Namespace) -> list[str]:
    """Returns the flags of `add_engine_options` that were given on the command line."""
    return (["--shape"] if options.shape else []) + [option.flag for option in _engine_options() if option.name in options]


@contextmanager
def engine_config(options: argparse.Namespace, shape: str | None) -> Iterator[tuple[str, EngineConfig]]:
    """The model's name, and the configuration, which may be used while inside."""
    given = {option.name: vars(options)[option.name] for option in _engine_options() if option.name in options}
    if shape is None:
        config = read_settings(given, {}).engine
        yield config.model, config
        return
    if given.setdefault("load_format", "dummy") != "dummy":
        raise ValueError(
            f"--load-format: {given['load_format']!r} is not possible with --shape, which has no weights to read; only dummy is"
        )
    with shape_folder(shape) as folder:
        yield shape, read_settings({**given, "model": str(folder)}, {}).engine


WORKLOADS = ("random", "prefix", "multi-turn", "trace")


def add_workload_options(command: argparse.ArgumentParser, *kinds: str, serial: bool = False) -> None:
    """`kinds`: of workloads. `serial`: one request after another."""
    group = command.add_argument_group("workload")
    what = "random lengths (equal ends: fixed), behind shared prefixes, conversations, or a trace file"
    count = "20" if serial else "100"
    if "nano" in kinds:
        what += f"; nano: that of nano-vllm's benchmark ({NANO_REQUESTS} requests, 100-1024 tokens in and out), set beside its floor"
        count += f"; {NANO_REQUESTS} with nano"
    group.add_argument("--workload", choices=kinds, default="random", help=what)
    group.add_argument("--num-requests", type=int, metavar="N", help=f"conversations with multi-turn (default: {count})")
    group.add_argument(
        "--input-len",
        type=LengthRange.parse,
        default=LengthRange(128, 128),
        metavar="N[-N]",
        help="prompt tokens, or a range (default: 128)",
    )
    group.add_argument(
        "--output-len", type=LengthRange.parse, default=LengthRange(64, 64), metavar="N[-N]", help="output tokens, or a range (default: 64)"
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


def workload_items(options: argparse.Namespace, vocab_size: int) -> list[Item]:
    """Raises ValueError if an option is missing."""
    num_requests = options.num_requests
    if num_requests is None:
        num_requests = NANO_REQUESTS if options.workload == "nano" else 100
    lengths = Lengths(num_requests, options.input_len, options.output_len, vocab_size, options.workload_seed)
    match options.workload:
        case "nano":
            items = nano_vllm(num_requests, vocab_size)
        case "prefix":
            items = shared_prefix(lengths, options.prefix_len, options.num_prefixes)
        case "multi-turn":
            items = multi_turn(lengths, options.turns)
        case "trace":
            if options.trace_file is None:
                raise ValueError("--workload trace needs --trace-file")
            return trace(options.trace_file, vocab_size, options.workload_seed)
        case _:
            items = random_lengths(lengths)
    return arriving(items, options.rate, options.burstiness, options.workload_seed)


def _limits(text: str) -> dict[str, float]:
    limits = {name: float(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    if not limits or limits.keys() - {"ttft", "tpot", "e2el"}:
        raise ValueError
    return limits


_limits.__name__ = "list of ttft=MS, tpot=MS, e2el=MS"


def counts(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(",") if part)
    if any(count < 1 for count in found):
        raise ValueError
    return found


def shares(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    if not all(0 <= share <= 1 for share in found):
        raise ValueError
    return found


counts.__name__ = "list of numbers"  # which argparse names
shares.__name__ = "list of numbers in [0, 1]"
