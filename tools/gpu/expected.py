"""What steps are expected to take on one H200, in milliseconds, so that a surprise shows. Computed, not measured.

A step is its bytes over 4.3 TB/s, or its operations over 750 TFLOP/s (float8: 1,350), at the share that such kernels reach in published
figures: products 82 % (of experts 65 %), attention 72 %; 2.2 us for each small kernel and 0.8 us between two nodes of a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

DEVICE = "NVIDIA H200"
TOLERANCE = 1.25
"""A step that took more, or less, than this many times the expected milliseconds is a surprise."""

_QWEN3_8B = {"1x1@1024": 5.2, "32x1@1024": 6.7, "256x1@1024": 19.5, "1x1024@0": 21.0, "1x8192@0": 215.0}
EXPECTED: Mapping[str, Mapping[str, float]] = {
    "step-triton": _QWEN3_8B,
    "step-flashinfer": {**_QWEN3_8B, "1x8192@0": 196.0},  # with fa3
    "step-fp8": {"1x1@1024": 3.2, "32x1@1024": 4.7, "256x1@1024": 17.0, "1x1024@0": 13.5, "1x8192@0": 130.0},
    "step-0.6b": {"1x1@1024": 1.0, "32x1@1024": 2.2, "256x1@1024": 11.0},
    "step-hybrid": {"1x1@1024": 4.9, "32x1@1024": 5.9, "256x1@1024": 18.0, "1x1024@0": 27.0, "1x8192@0": 200.0},
    "step-moe": {"1x1@1024": 3.6, "32x1@1024": 21.0, "256x1@1024": 31.0, "1x8192@0": 135.0},
    "step-mla": {"1x1@1024": 2.2, "32x1@1024": 8.0, "256x1@1024": 13.0},
    "step-70b": {"1x1@1024": 10.7, "32x1@1024": 11.6, "256x1@1024": 22.0, "1x1024@0": 53.0, "1x8192@0": 430.0},
    "step-70b-fp8": {"1x1@1024": 6.0, "32x1@1024": 6.9, "256x1@1024": 15.3, "1x1024@0": 31.0, "1x8192@0": 250.0},
}


def surprises(part: str, measured: Mapping[str, float]) -> Iterator[str]:
    """A line for each case whose milliseconds are not as expected. `measured`: milliseconds by case."""
    for case, expected in EXPECTED.get(part, {}).items():
        if case in measured and not 1 / TOLERANCE <= measured[case] / expected <= TOLERANCE:
            yield f"{part}, {case}: {measured[case]:.2f} ms, where {expected:g} was expected"
