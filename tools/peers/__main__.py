"""Times other engines and this one on the same GGUF files, in turns, and prints a table: python -m tools.peers build/peers

The first call builds llama.cpp from the source distribution of llama-cpp-python (some minutes); `--source NAME=FOLDER` builds another tree
of it beside, as of ik_llama.cpp. Cells are milliseconds of decode steps by number of rows, and of a prefill; ratios say how many times as
long the best of the others takes. Perplexities are of the bundled model, which each engine reads from a file of the type.
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
from tools.peers.engines import Engine, Figures, LlamaPackage, LlamaSource, Ours, Workload
from tools.peers.files import SHAPES, TYPES, write_demo, write_random


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
    parser.add_argument("--llama-version", default="0.3.36", help="of llama-cpp-python (default: %(default)s)")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER", help="a source tree of llama.cpp or of a fork")
    parser.add_argument("--perplexity-tokens", type=int, default=400, help="of a text; 0: none (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="where the figures go")
    return parser.parse_args(arguments)


def _best(engines: Sequence[Engine], model: pathlib.Path, work: Workload, rounds: int) -> dict[str, Figures]:
    """By engine, the least of each figure in all rounds."""
    found: dict[str, Figures] = {engine.name: {} for engine in engines}
    for _ in range(rounds):
        for engine in engines:
            for name, value in engine.steps(model, work).items():
                found[engine.name][name] = min(value, found[engine.name].get(name, math.inf))
    return found


def _row(what: str, figures: dict[str, Figures], cases: Sequence[str]) -> str:
    ours, *others = figures.values()
    cells = [" / ".join(f"{each[case]:.{0 if each[case] >= 100 else 1}f}" for case in cases) for each in figures.values()]
    ratios = " / ".join(f"{min(other[case] for other in others) / ours[case]:.2f}" for case in cases)
    return f"| {what} | {' | '.join(cells)} | {ratios} |"


def _perplexities(engines: Sequence[Engine], folder: pathlib.Path, types: Sequence[str], count: int, threads: int) -> dict[str, Figures]:
    text = (package_files("aengine.bench") / "held_text.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(resolve_model(DEMO) / "tokenizer.json")).encode(text[: 20 * count]).ids[:count]
    found: dict[str, Figures] = {}
    for kind in types:
        path = folder / f"demo-{kind}.gguf"
        try:
            if not path.exists():
                write_demo(kind, path)
        except NotImplementedError:
            print(f"no perplexity of {kind}: the gguf package does not make it")
            path.unlink(missing_ok=True)
            continue
        found[kind] = {engine.name: engine.perplexity(path, ids, threads) for engine in engines}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows, types = tuple(map(int, options.rows.split(","))), options.types.split(",")
    work = Workload(rows, options.context, options.prefill, options.threads)
    engines: list[Engine] = [Ours(), LlamaPackage(folder, options.llama_version)]
    for name, _, source in (each.partition("=") for each in options.source):
        engines.append(LlamaSource(folder, name, pathlib.Path(source)))
    print(f"rows {options.rows} behind {work.context} tokens, prefill of {work.prefill}, {work.threads} threads, ms:")
    print(f"| shape, type | {' | '.join(engine.name for engine in engines)} | ratio to the best of the others |")
    print("|---|" + "---|" * (len(engines) + 1))
    steps: dict[str, dict[str, Figures]] = {}
    for shape in options.shapes.split(","):
        for kind in types:
            path = folder / f"{shape}-{kind}.gguf"
            if not path.exists():
                write_random(shape, kind, path)
            steps[f"{shape}, {kind}"] = found = _best(engines, path, work, options.rounds)
            print(_row(f"{shape}, {kind}", found, [*map(str, rows), "prefill"]), flush=True)
    perplexities: dict[str, Figures] = {}
    if options.perplexity_tokens:
        perplexities = _perplexities(engines, folder, types, options.perplexity_tokens, work.threads)
        for kind, each in perplexities.items():
            print(f"perplexity, {kind}: " + ", ".join(f"{name} {value:.4f}" for name, value in each.items()))
    if options.json is not None:
        options.json.write_text(json.dumps({"command": sys.argv, "steps": steps, "perplexities": perplexities}, indent=1))


if __name__ == "__main__":
    main()
