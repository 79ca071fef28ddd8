"""What sampling costs per step: `python -m tools.bench.sampling`.

Times the sampler alone on random logits that are as peaked as a language model's, by batch size, vocabulary and parameters, and compares
it with the least time that a decode step of a 0.6B model could take on this machine: reading its weights once and multiplying by them.
That is a floor, not a real step: real steps take longer, and the sampler's true share is smaller.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from aengine.api.runtime import num_cores
from aengine.bench.floor import MachineProbe, StepWork, step_work
from aengine.bench.report import table
from aengine.bench.shapes import shape_folder
from aengine.kernels.arrays import Numbers
from aengine.kernels.cpu import ops
from aengine.kernels.cpu.library import Workspace, load_kernels
from aengine.models.config.model_config import load_spec
from aengine.sampling.arrays import HostArrays
from aengine.sampling.grammar import CompiledGrammar
from aengine.sampling.sampler import Sampler
from aengine.scheduler.plan import Features, NewRow, RowParams

VOCAB = 151_936
SPREAD = 5.0  # standard deviation of the logits: some ten tokens share most of the mass of the large vocabulary
HISTORY = 512  # tokens that a penalised row has seen
BASE = RowParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
CASES: dict[str, RowParams] = {
    "greedy": replace(BASE, temperature=0.0),
    "temperature": replace(BASE, temperature=0.8),
    "top_k+top_p": replace(BASE, temperature=0.8, top_k=50, top_p=0.9),
    "top_p": replace(BASE, temperature=0.8, top_p=0.9),
    "penalties": replace(BASE, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.5),
    "logprobs 20": replace(BASE, temperature=0.0, logprobs=20),
    "grammar": replace(BASE, temperature=0.0),  # see `any_text`
}
END = 0  # end-of-sequence id of the vocabulary; never sampled


@dataclass(frozen=True, slots=True)
class SamplingCost:
    case: str
    batch: int
    vocab_size: int
    milliseconds: float  # median
    share: float  # of the floor of a decode step


class Floor:
    """The floor of a decode step of the 0.6B shape in bfloat16 without known tokens, measured as `aengine-bench step` does it."""

    def __init__(self) -> None:
        with shape_folder("qwen3-0.6b") as folder:
            self._spec = load_spec(folder)
        self.machine = MachineProbe(torch.device("cpu"), torch.bfloat16).measure()

    def work(self, batch: int) -> StepWork:
        return step_work(self._spec, [1] * batch, [0] * batch, batch, torch.bfloat16.itemsize)

    def milliseconds(self, batch: int) -> float:
        return 1e3 * self.work(batch).seconds(self.machine)


@functools.cache
def kernel_sampler(batch: int, vocab_size: int) -> Sampler:
    """As the executor of the CPU kernels samples what these do not. Raises KernelsUnavailableError where there are none."""
    workspace = Workspace(load_kernels(), num_cores())

    def draw(logits: Numbers, params: NDArray[np.void], _: object, chosen: Numbers) -> Numbers:
        tokens = ops.draw(workspace, logits, params)
        chosen[:] = logits[np.arange(len(tokens)), tokens]
        return tokens

    return Sampler(batch, vocab_size, HostArrays(), draw, functools.partial(ops.log_sums, workspace))


def sampling_cost(case: str, params: RowParams, batch: int, vocab_size: int, floor: Floor, repeats: int) -> SamplingCost:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((batch, vocab_size), np.float32) * SPREAD
    logits[:, END] = -100.0
    if case == "grammar":
        params = replace(params, grammar=any_text(vocab_size))
    sampler = kernel_sampler(batch, vocab_size)
    sampler.update(
        [
            NewRow(
                row,
                replace(params, seed=row),
                prompt_len=HISTORY if params.grammar else HISTORY // 2,
                tokens=rng.integers(0, vocab_size, HISTORY).astype(np.int32)
                if params.features & Features.HISTORY
                else np.zeros(0, np.int32),
            )
            for row in range(batch)
        ]
    )
    rows = np.arange(batch, dtype=np.int32)
    at = HISTORY

    def step() -> None:
        nonlocal at
        positions = np.full(batch, at, dtype=np.int32)
        at += 1
        sampled = sampler.sample(logits, rows, positions, rows, positions)
        sampler.observe(sampled)

    milliseconds = _median(step, repeats) * 1e3
    return SamplingCost(case, batch, vocab_size, milliseconds, milliseconds / floor.milliseconds(batch))


def any_text(vocab_size: int) -> CompiledGrammar:
    """Text of any length without quotes or backslashes, over random ASCII strings."""
    import llguidance

    letters = np.random.default_rng(0).integers(32, 127, (vocab_size, 6))

    class Tokens:
        def __init__(self) -> None:
            self.tokens = [b"", *(line[: 1 + i % 6].tobytes() for i, line in enumerate(letters[1:].astype(np.uint8)))]
            self.special_token_ids = (END,)
            self.eos_token_id = END
            self.bos_token_id = None

        def __call__(self, text: str) -> list[int]:
            raise NotImplementedError

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()), n_vocab=vocab_size)
    grammar = llguidance.LLMatcher.grammar_from_regex(r'[^"\\]*')
    return CompiledGrammar(llguidance.LLMatcher(tokens, grammar, log_level=0), frozenset({END}), None)


def _median(run: Callable[[], object], repeats: int) -> float:
    """Seconds; two runs before those that count."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def run(batches: Sequence[int], vocab_sizes: Sequence[int], cases: Sequence[str], repeats: int) -> tuple[Floor, list[SamplingCost]]:
    floor = Floor()
    costs = [
        sampling_cost(case, CASES[case], batch, vocab_size, floor, repeats)
        for vocab_size in vocab_sizes
        for batch in batches
        for case in cases
    ]
    return floor, costs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.sampling", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="rows per step")
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, VOCAB], help="vocabulary sizes")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=7, help="timed steps per line")
    parser.add_argument("--threads", type=int, help="of torch (default: as torch decides)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    cases = list(options.cases)
    if "grammar" in cases and importlib.util.find_spec("llguidance") is None:
        cases.remove("grammar")
        print("without grammar: llguidance is not installed (extra `structured`)", file=sys.stderr)
    floor, costs = run(options.batch, options.vocab, cases, options.repeats)
    figures = {"weight_bytes": floor.work(1).weight_bytes, **asdict(floor.machine)}
    if options.json:
        print(json.dumps({"floor": figures, "threads": torch.get_num_threads(), "costs": [asdict(cost) for cost in costs]}))
        return
    print(
        f"{torch.get_num_threads()} threads; floor of a 0.6B decode step, not a real step: {figures['weight_bytes'] / 1e9:.2f} GB of"
        f" weights at {floor.machine.bytes_per_second / 1e9:.1f} GB/s, {floor.machine.flops_per_second / 1e9:.0f} GFLOP/s: "
        + ", ".join(f"{floor.milliseconds(batch):.1f} ms at batch {batch}" for batch in options.batch)
    )
    rows = [(cost.vocab_size, cost.batch, cost.case, cost.milliseconds, f"{cost.share:.1%}") for cost in costs]
    print(table(("vocab", "batch", "case", "ms", "of floor"), rows))


if __name__ == "__main__":
    main()
