"""The kernels' build levels beside torch kept to the same instructions: `python -m tools.bench.levels`.

Times one matrix product after another over several matrices, more than caches hold, at each level that this CPU has. Torch and its
libraries choose their instructions when they are loaded, so each level is a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from aengine.bench.floor import best_seconds
from aengine.bench.report import table, write_json
from aengine.kernels.arrays import array_dtype, as_array
from aengine.kernels.cpu import ops
from aengine.kernels.cpu.compiler import LEVEL_VARIABLE, Level, supported_levels
from aengine.kernels.cpu.library import Workspace, load_kernels
from aengine.kernels.cpu.packing import pack_linear

ROOT = Path(__file__).parents[2]
OUT_FEATURES, IN_FEATURES, MATRICES = 3072, 1024, 8
ROWS = (1, 8, 256)
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Limits:
    """What torch's own code, oneDNN and MKL may use. MKL heeds only its reproducibility setting on every maker's CPU."""

    torch: str
    onednn: str
    mkl: str


_LIMITS = {
    Level.PORTABLE: _Limits("default", "SSE41", "COMPATIBLE"),
    Level.AVX2: _Limits("avx2", "AVX2", "AVX2"),
    Level.AVX512: _Limits("avx512", "AVX512_CORE", "AVX512"),
    Level.AVX512_VNNI: _Limits("avx512", "AVX512_CORE_VNNI", "AVX512"),
    Level.AVX512_BF16: _Limits("avx512", "AVX512_CORE_BF16", "AVX512"),
    Level.AMX: _Limits("avx512", "AVX512_CORE_AMX", "AVX512"),
}


@dataclass(frozen=True, slots=True)
class LevelCost:
    """Milliseconds of a product: the best of some runs over all matrices, by their number."""

    level: str
    dtype: str
    rows: int
    kernels: float
    torch: float

    @property
    def ratio(self) -> float:
        """Above 1 where the kernels are faster."""
        return self.torch / self.kernels

    @property
    def gigaflops(self) -> float:
        return 2e-6 * self.rows * OUT_FEATURES * IN_FEATURES / self.kernels


def level_costs(threads: int, runs: int) -> Sequence[LevelCost]:
    """At the level of this process."""
    torch.set_num_threads(threads)
    kernels = load_kernels()
    workspace = Workspace(kernels, threads)
    costs: list[LevelCost] = []
    for dtype in DTYPES:
        plain = [torch.randn(OUT_FEATURES, IN_FEATURES).to(dtype) for _ in range(MATRICES)]
        packed = [pack_linear(kernels, [as_array(matrix)], dtype=array_dtype(dtype), threads=threads) for matrix in plain]
        for rows in ROWS:
            x = torch.randn(rows, IN_FEATURES).to(dtype)
            ours = _milliseconds([functools.partial(ops.logits, workspace, as_array(x), matrix) for matrix in packed], runs)
            theirs = _milliseconds([functools.partial(torch.nn.functional.linear, x, matrix) for matrix in plain], runs)
            costs.append(LevelCost(kernels.level.value, str(dtype).removeprefix("torch."), rows, ours, theirs))
    return costs


def costs_at(level: Level, threads: int, runs: int) -> Sequence[LevelCost]:
    """Of a process whose torch is kept to what the level may use. Raises RuntimeError with what it said when it fails."""
    limits = _LIMITS[level]
    environ = os.environ | {
        LEVEL_VARIABLE: level.value,
        "ATEN_CPU_CAPABILITY": limits.torch,
        "ONEDNN_MAX_CPU_ISA": limits.onednn,
        "MKL_CBWR": limits.mkl,
    }
    command = [sys.executable, "-m", "tools.bench.levels", "--here", "--threads", str(threads), "--runs", str(runs)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [LevelCost(**cost) for cost in json.loads(done.stdout)]


def _milliseconds(products: Sequence[Callable[[], object]], runs: int) -> float:
    """Per product. One more run: the first finds caches cold and threads asleep."""
    return 1e3 * best_seconds(lambda: [product() for product in products], torch.device("cpu"), runs + 1) / len(products)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.levels", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--here", action="store_true", help="print this process's level alone, as JSON")
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps([asdict(cost) for cost in level_costs(options.threads, options.runs)]))
        return
    levels = reversed([level for level in supported_levels() if level in _LIMITS])
    costs = [cost for level in levels for cost in costs_at(level, options.threads, options.runs)]
    rows = [(one.level, one.dtype, one.rows, one.kernels, one.gigaflops, one.torch, one.ratio) for one in costs]
    print(table(("level", "dtype", "rows", "ms", "GFLOP/s", "torch ms", "torch/ours"), rows))
    if options.json is not None:
        write_json(options.json, ["python", "-m", "tools.bench.levels", *(sys.argv[1:] if arguments is None else arguments)], costs)


if __name__ == "__main__":
    main()
