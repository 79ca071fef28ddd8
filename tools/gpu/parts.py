"""What a run consists of: three stages of parts in their order, with their commands and time limits. Runs nothing.

A stage ends within eight minutes, for machines that are lent for ten. Figures come before breadth, so that a run that is cut off has
brought the figures; the first part needs nothing but PyTorch and Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STAGES = ("figures", "shapes", "tests")
STAGE_SECONDS = 470.0
"""Of a whole stage, beginning and summary included."""
KEPT_FOR_SUMMARY = 10.0

# Rows of different lengths, and as many of the mean length; draws; decodes beside a chunk of a prompt.
RAGGED, EVEN = "63x1@512+1x1@32768", "64x1@1016"
CASES = (RAGGED, EVEN, "256x1@1024,top_p=0.9", "32x1@1024,top_p=0.9", "63x1@1024+1x1024@0")

CORE_TESTS = (
    "tests/attention/test_triton_attention.py",
    "tests/attention/test_triton_states.py",
    "tests/kernels/test_triton_chosen.py",
    "tests/attention/test_within_images.py",
    "tests/gpu/test_gpu_tiers.py",
    "tests/attention/test_flashinfer_gpu.py::test_long_rows",
    "tests/gpu/test_gpu_families.py",
    "tests/runner/test_graphs_gpu.py::test_replays_against_plain_steps",
    "tests/runner/test_graphs_gpu.py::test_a_decode_step_waits_for_nothing",
    "tests/runner/test_graphs_gpu.py::test_pieces_up_to_the_chunk_size",
    "tests/runner/test_graphs_gpu.py::test_graphs_of_uneven_steps",
    "tests/runner/test_cuda_capture_gpu.py",
)
GPU_TESTS = tuple(f"tests/{room}" for room in ("gpu", "runner", "attention", "kernels", "sampling", "models", "engine", "images"))
"""Where tests marked `gpu` are, those first that show most: there may be no time for the last."""


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that run one after another within `limit` seconds. `figures`: the file that they write; of tests, the outcomes."""

    name: str
    stage: str
    limit: float
    commands: tuple[tuple[str, ...], ...]
    figures: Path
    alternative: tuple[str, ...] = ()  # added to the command, which is run again in what is left of the limit, when it brought no figures

    @property
    def are_tests(self) -> bool:
        return any("pytest" in command for command in self.commands)


def all_parts(python: str, folder: Path, gpu: str, workers: int) -> list[Part]:
    """`workers`: processes of the tests that can share the device; 0: the tests run in one, one after another."""

    def figures(name: str) -> Path:
        return folder / f"{gpu}-{name}.json"

    def bench(name: str, stage: str, limit: float, *arguments: str) -> Part:
        command = (python, "-m", "aengine.bench.cli", *arguments, "--device", "cuda", "--verbose", "--json", str(figures(name)))
        return Part(name, stage, limit, (command,), figures(name), ("--eager",))

    def step(name: str, stage: str, limit: float, shape: str, *arguments: str) -> Part:
        return bench(name, stage, limit, "step", "--shape", shape, "--seconds", "0.6", *arguments)

    def offline(shape: str, limit: float) -> Part:
        return bench(f"offline-{shape}", "figures", limit, "offline", "--shape", shape, "--workload", "nano")

    def tests(name: str, limit: float, *commands: tuple[str, ...]) -> Part:
        always = (python, "-m", "pytest", "-q", "-rsfE", "-p", "no:cacheprovider", "-p", "tools.gpu.outcomes")
        return Part(name, "tests", limit, tuple((*always, *command) for command in commands), figures(name))

    several = ("-n", str(workers), "--maxschedchunk", "1") if workers else ()  # in order, whichever worker is free
    cases = [part for case in CASES for part in ("--case", case)]
    decodes = ("--decode", "1,32,256")
    usual = (*decodes, "--prefill", "1024,8192", "--kernels", "1,256")
    shared = ("-m", "gpu and not whole_device", *several)
    core = [f"--deselect={test}" for test in CORE_TESTS if "::" in test] + [f"--ignore={test}" for test in CORE_TESTS if "::" not in test]
    return [
        step("step-triton", "figures", 110, "qwen3-8b", "--attention-backend", "triton", *usual, *cases),
        step("step-flashinfer", "figures", 110, "qwen3-8b", "--attention-backend", "flashinfer", *usual, *cases),
        step("step-fp8", "figures", 60, "qwen3-8b", "--quantization", "fp8", *usual),
        offline("qwen3-8b", 70),
        offline("qwen3-0.6b", 50),
        step("step-0.6b", "shapes", 50, "qwen3-0.6b", *usual),
        step("step-hybrid", "shapes", 80, "qwen3.5-9b", *usual),
        step("step-moe", "shapes", 85, "qwen3-30b-a3b", *usual),
        step("step-mla", "shapes", 85, "deepseek-v3-4l", *usual),
        step("step-70b", "shapes", 80, "llama-3.1-70b-20l", *usual),
        step("step-70b-fp8", "shapes", 80, "llama-3.1-70b-20l", "--quantization", "fp8", *usual),
        tests("core", 130, (*shared, *CORE_TESTS)),
        tests(
            "tests", 320, ("-m", "gpu and whole_device", "tests/runner"), (*shared, *core, "--continue-on-collection-errors", *GPU_TESTS)
        ),
    ]
