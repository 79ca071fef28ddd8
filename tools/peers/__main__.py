"""Times other engines and this one on the same GGUF files, in turns, and prints a table: python -m tools.peers build/peers

The first call installs the engines; of llama.cpp it builds the source distribution of llama-cpp-python (some minutes). `--source
NAME=FOLDER` builds another tree of it beside, as of ik_llama.cpp. Cells are milliseconds of decode steps by number of rows, and of a
prefill; ratios say how many times as long the best of the others takes. An engine that does not read a type computes with as many bits in
a form of its own, or is left out. Perplexities are of the bundled model in that form.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from importlib.resources import files as package_files

from tokenizers import Tokenizer

from aengine.models.loading.hub import DEMO, resolve_model
from tools.peers.engines import Engine, Figures, Installed, LlamaSource, Ours, Workload, packages
from tools.peers.files import SHAPES, TYPES, Models


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.peers", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="where engines and files are kept")
    parser.add_argument("--shapes", default="60m,0.6b", help=f"of {', '.join(SHAPES)} (default: %(default)s)")
    parser.add_argument("--types", default="BF16,Q8_0,Q4_K,TQ2_0", help=f"of {', '.join(TYPES)} (default: %(default)s)")
    parser.add_argument("--rows", default="1,8,32", help="of decode steps (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="tokens of each row before a decode step (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of a prefill (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each engine (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of all engines, in turns; the best of each counts (default: %(default)s)")
    parser.add_argument("--engines", default="llama.cpp", help=f"of {', '.join(packages(''))} (default: %(default)s)")
    parser.add_argument("--llama-version", default="0.3.36", help="of llama-cpp-python (default: %(default)s)")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER", help="a source tree of llama.cpp or of a fork")
    parser.add_argument("--perplexity-tokens", type=int, default=400, help="of a text; 0: none (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="where the figures go")
    return parser.parse_args(arguments)


def _best(engines: Sequence[Engine], models: Models, name: str, kind: str, work: Workload, rounds: int) -> dict[str, Figures]:
    """By engine, the least of each figure in all rounds; nothing of an engine that does not run the model, which is said once."""
    found: dict[str, Figures] = {engine.name: {} for engine in engines}
    failed: set[str] = set()
    for _ in range(rounds):
        for engine in engines:
            if engine.name in failed:
                continue
            try:
                told = engine.steps(models, name, kind, work) or {}
            except RuntimeError as error:
                if isinstance(engine, Ours):
                    raise
                failed.add(engine.name)
                print(f"{engine.name} does not run {name}, {kind}: {str(error)[-300:]}", file=sys.stderr)
                continue
            for case, value in told.items():
                found[engine.name][case] = min(value, found[engine.name].get(case, math.inf))
    return found


def _row(what: str, figures: dict[str, Figures], cases: Sequence[str]) -> str:
    ours, *others = figures.values()
    cells = [" / ".join(_figure(each.get(case)) for case in cases) if each else "" for each in figures.values()]
    best = {case: min((other[case] for other in others if case in other), default=math.nan) for case in cases}
    return f"| {what} | {' | '.join(cells)} | {' / '.join(f'{best[case] / ours[case]:.2f}' for case in cases)} |"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.{0 if value >= 100 else 1}f}"


def _perplexities(engines: Sequence[Engine], models: Models, types: Sequence[str], count: int, threads: int) -> dict[str, Figures]:
    text = (package_files("aengine.bench") / "held_text.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(resolve_model(DEMO) / "tokenizer.json")).encode(text[: 20 * count]).ids[:count]
    found: dict[str, Figures] = {}
    for kind in types:
        try:
            models.file(DEMO, kind)
        except NotImplementedError:
            print(f"no perplexity of {kind}: the gguf package does not make it")
            continue
        told: dict[str, float | None] = {}
        for engine in engines:
            try:
                told[engine.name] = engine.perplexity(models, kind, ids, threads)
            except RuntimeError as error:
                print(f"{engine.name} has no perplexity of {kind}: {str(error)[-300:]}", file=sys.stderr)
        found[kind] = {name: value for name, value in told.items() if value is not None}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    models, rows, types = Models(folder), tuple(map(int, options.rows.split(","))), options.types.split(",")
    work = Workload(rows, options.context, options.prefill, options.threads)
    known = packages(options.llama_version)
    engines: list[Engine] = [Ours(), *(Installed(folder, known[name]) for name in options.engines.split(",") if name)]
    for name, _, source in (each.partition("=") for each in options.source):
        engines.append(LlamaSource(folder, name, pathlib.Path(source)))
    print(f"rows {options.rows} behind {work.context} tokens, prefill of {work.prefill}, {work.threads} threads, ms:")
    print(f"| shape, type | {' | '.join(engine.name for engine in engines)} | ratio to the best of the others |")
    print("|---|" + "---|" * (len(engines) + 1))
    steps: dict[str, dict[str, Figures]] = {}
    for shape in options.shapes.split(","):
        for kind in types:
            steps[f"{shape}, {kind}"] = found = _best(engines, models, shape, kind, work, options.rounds)
            print(_row(f"{shape}, {kind}", found, [*map(str, rows), "prefill"]), flush=True)
    perplexities: dict[str, Figures] = {}
    if options.perplexity_tokens:
        perplexities = _perplexities(engines, models, types, options.perplexity_tokens, work.threads)
        for kind, each in perplexities.items():
            print(f"perplexity, {kind}: " + ", ".join(f"{name} {value:.4f}" for name, value in each.items()))
    if options.json is not None:
        options.json.write_text(json.dumps({"command": sys.argv, "steps": steps, "perplexities": perplexities}, indent=1))


if __name__ == "__main__":
    main()
