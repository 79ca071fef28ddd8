"""What a run consists of: the parts in their order, with their commands and time limits. Runs nothing.

Figures come before breadth, so that a run that is cut off has brought the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TOTAL = 570.0
"""Seconds of a whole run, beginning and summary included."""
KEPT_FOR_SUMMARY = 10.0

# Rows of different lengths, and as many of the mean length; draws; decodes beside a chunk of a prompt.
RAGGED, EVEN = "63x1@512+1x1@32768", "64x1@1016"
CASES = (RAGGED, EVEN, "256x1@1024,top_p=0.9", "32x1@1024,top_p=0.9", "63x1@1024+1x1024@0")

CORE_TESTS = (
    "tests/attention/test_triton_attention.py",
    "tests/attention/test_flashinfer_gpu.py::test_long_rows",
    "tests/gpu/test_gpu_families.py",
    "tests/runner/test_graphs_gpu.py::test_replays_against_plain_steps",
    "tests/runner/test_graphs_gpu.py::test_a_decode_step_waits_for_nothing",
    "tests/runner/test_graphs_gpu.py::test_pieces_up_to_the_chunk_size",
    "tests/runner/test_graphs_gpu.py::test_graphs_of_uneven_steps",
    "tests/runner/test_cuda_capture_gpu.py",
)
GPU_TESTS = tuple(f"tests/{room}" for room in ("gpu", "runner", "attention", "kernels", "sampling", "models", "engine"))
"""Where tests marked `gpu` are, those first that show most: there may be no time for the last."""


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that run one after another within `limit` seconds. `figures`: the file that they write; of tests, the outcomes."""

    name: str
    limit: float
    commands: tuple[tuple[str, ...], ...]
    figures: Path
    alternative: tuple[str, ...] = ()  # added to the command, which is run again in what is left of the limit, when it brought no figures
    beside: tuple[tuple[str, ...], ...] = ()  # commands that run at the same time, one after another, and whose outcome does not count

    @property
    def are_tests(self) -> bool:
        return any("pytest" in command for command in self.commands)


def all_parts(python: str, folder: Path, gpu: str, workers: int) -> list[Part]:
    """`workers`: processes of the tests that can share the device; 0: the tests run in one, one after another."""

    def figures(name: str) -> Path:
        return folder / f"{gpu}-{name}.json"

    def bench(name: str, limit: float, *arguments: str, alternative: tuple[str, ...] = ("--eager",)) -> Part:
        command = (python, "-m", "aengine.bench.cli", *arguments, "--device", "cuda", "--verbose", "--json", str(figures(name)))
        return Part(name, limit, (command,), figures(name), alternative)

    def step(name: str, limit: float, *arguments: str) -> Part:
        return bench(name, limit, "step", "--shape", "qwen3-8b", "--seconds", "0.6", *arguments)

    def tests(name: str, limit: float, *commands: tuple[str, ...], beside: tuple[tuple[str, ...], ...] = ()) -> Part:
        always = (python, "-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "-p", "tools.gpu.outcomes")
        return Part(name, limit, tuple((*always, *command) for command in commands), figures(name), beside=beside)

    # Triton compiles what the benchmarks need while tests, which are not timed, use the device: its cache is in the file system.
    once = (
        "--decode",
        "1,32",
        "--prefill",
        "1024",
        "--seconds",
        "0.01",
        "--kv-cache-memory",
        str(8 << 30),
        "--device",
        "cuda",
        "--verbose",
    )
    compiling = tuple(
        (python, "-m", "aengine.bench.cli", "step", "--shape", "qwen3-8b", *once, *more)
        for more in (("--attention-backend", "triton"), ("--attention-backend", "flashinfer"), ("--quantization", "fp8", "--eager"))
    )
    several = ("-n", str(workers), "--maxschedchunk", "1") if workers else ()  # in order, whichever worker is free
    cases = [part for case in CASES for part in ("--case", case)]
    usual = ("--decode", "1,32,256", "--prefill", "1024,8192", *cases, "--kernels", "1,256")
    shared = ("-m", "gpu and not whole_device", *several)
    core = [f"--deselect={test}" for test in CORE_TESTS if "::" in test] + [f"--ignore={test}" for test in CORE_TESTS if "::" not in test]
    return [
        tests("core", 110, (*shared, *CORE_TESTS), beside=compiling),
        step("step-flashinfer", 95, "--attention-backend", "flashinfer", *usual),
        step("step-triton", 85, "--attention-backend", "triton", *usual),
        step("step-fp8", 45, "--quantization", "fp8", "--decode", "1,32,256", "--prefill", "1024", "--kernels", "1"),
        bench("offline-qwen3-8b", 62, "offline", "--shape", "qwen3-8b", "--workload", "nano"),
        bench("offline-qwen3-0.6b", 40, "offline", "--shape", "qwen3-0.6b", "--workload", "nano"),
        tests(
            "tests", 300, ("-m", "gpu and whole_device", "tests/runner"), (*shared, *core, "--continue-on-collection-errors", *GPU_TESTS)
        ),
    ]
