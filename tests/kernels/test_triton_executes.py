"""What Triton compiles for a GPU computes the right numbers, executed instruction by instruction on a machine without one."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from ahead_of_time import compiling_environment
from slow_cases import NOT_IN_CI
from triton_mode import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels run on the device where there is CUDA")

_HERE = pathlib.Path(__file__).parent
# Names of cases, and the largest error: what rounding to 16 bits makes of the largest number, or a few last places of float32.
QUICK = {"norms": 4e-3, "activations": 4e-3, "rotation": 4e-3, "pages": 0.0, "experts": 4e-3, "attention": 4e-3, "int4": 4e-3, "draws": 0.0}
SLOW = {
    "int4, ordered": 4e-3,
    "fp4": 1e-3,
    "int8, float32": 1e-6,
    "adapters": 1e-2,  # what an adapter adds is rounded, and the sum
    "norms, float32": 1e-6,
    "activations, float16": 1e-3,
    "rotation, float32": 1e-6,
    "many experts, float32": 1e-3,  # the tensor cores take float32 as tf32
    "attention, float32": 1e-5,
    "attention, long": 2e-3,
    "attention, window, cap and sinks": 6e-3,
    "attention, chunked": 6e-3,
    "attention, large pool": 4e-3,
    "attention, latent": 6e-3,
}
FLOAT8 = {"float8 codes": 4e-3, "float8 both": 4e-3, "pages in float8": 0.0, "attention, float8": 6e-3}
# Of the instructions of a kernel, which share is executed: decode has code for many splits, and few rows are left to finish.
LEAST = {"decode_kernel": 0.25, "_finish": 0.02}
BUGS = {  # and what is seen of each: the message of a fault, with a line of our source or of Triton's library, or None for wrong numbers
    "a store without its mask": "_rms_norm: store to address .* out of bounds: .*layer_ops.py:",
    "a load without its mask": "_gated: load of address .* out of bounds: .*layer_ops.py:",
    "a barrier left out": "_rms_norm: race: shared bytes that another warp wrote since the last barrier: .*standard.py:",
    "no barriers": "_kernel: race: shared bytes that another warp wrote since the last barrier: .*attention_kernels.py:",
    "copies not waited for": "_kernel: load of shared bytes that were never written, or whose copy is under way: .*attention_kernels.py:",
    "copies waited for too late": "_grouped_linear: load of shared bytes that were never written, .*experts.py:",
    "transposed matrices": None,
    "another lane in a shuffle": "_rms_norm: race: several threads store different numbers to one shared place: .*standard.py:",
}
SOURCE_BUGS = {
    "a wrong stride of pages": None,
    "addresses in 32 bits": "prefill_kernel: load of address .* out of bounds: .*attention_kernels.py:",
    "a window one too wide": None,
    "a token that sees the next one": None,
    "pages behind the end": "prefill_kernel: load of address .*attention_kernels.py:",
}
HOPPER_BUGS = {
    "products not waited for": "prefill_kernel: .*attention_kernels.py:",
    "no fence before products": "prefill_kernel: wgmma of shared bytes that no fence.proxy.async has passed .*attention_kernels.py:",
    "copies not waited for": BUGS["copies not waited for"],
}


@cache
def results(capability: int, names: Sequence[str]) -> dict[str, Any]:
    """Of all cases, in one process: the driver that stands in for CUDA is the process's."""
    command = [sys.executable, str(_HERE / "executed_kernels.py"), str(capability), *names]
    done = subprocess.run(command, env=compiling_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check(found: dict[str, Any], case: str, limit: float) -> None:
    assert isinstance(found[case], float), found[case]
    assert found[case] <= limit
    for kernel, share in found[f"{case}: reached"].items():
        assert share > LEAST.get(kernel, 0.8), kernel


def check_bug(found: float | str, fault: str | None) -> None:
    if fault is None:
        assert isinstance(found, float), found
        assert found > 0.02
    else:
        assert isinstance(found, str), found
        assert re.search(fault, found), found


@pytest.mark.parametrize("case", QUICK)
def test_numbers(case: str) -> None:
    check(results(80, (*QUICK, *BUGS)), case, QUICK[case])


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str) -> None:
    check_bug(results(80, (*QUICK, *BUGS))[bug], BUGS[bug])


@NOT_IN_CI
@pytest.mark.slow
@pytest.mark.parametrize("bug", SOURCE_BUGS)
def test_bugs_planted_in_the_source_are_seen(bug: str) -> None:
    check_bug(results(80, (*SLOW, *SOURCE_BUGS))[bug], SOURCE_BUGS[bug])


@NOT_IN_CI
@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_more_numbers(case: str) -> None:
    check(results(80, (*SLOW, *SOURCE_BUGS)), case, SLOW[case])


@NOT_IN_CI
@pytest.mark.slow
@pytest.mark.parametrize("case", [*QUICK, *FLOAT8])
def test_numbers_of_devices_with_float8(case: str) -> None:
    check(results(89, (*QUICK, *FLOAT8)), case, {**QUICK, **FLOAT8}[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW, *QUICK, *FLOAT8])
@NOT_IN_CI
def test_numbers_on_hopper(case: str) -> None:
    """Where products of prefill are those of four warps together."""
    check(results(90, (*QUICK, *SLOW, *FLOAT8, *HOPPER_BUGS)), case, {**QUICK, **SLOW, **FLOAT8}[case])


@pytest.mark.slow
@pytest.mark.parametrize("bug", HOPPER_BUGS)
def test_planted_bugs_are_seen_on_hopper(bug: str) -> None:
    check_bug(results(90, (*QUICK, *SLOW, *FLOAT8, *HOPPER_BUGS))[bug], HOPPER_BUGS[bug])


@pytest.mark.slow
def test_nearly_all_lines_of_the_kernels_are_executed() -> None:
    found = results(90, (*QUICK, *SLOW, *FLOAT8, *HOPPER_BUGS))
    assert found["lines"] > 400
    assert len(found["not reached"]) < 0.02 * found["lines"], found["not reached"]
