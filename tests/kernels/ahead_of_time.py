"""Compiles Triton kernels for Hopper or another GPU on machines without one, through the very launches that a step makes.

In a process of its own, one for all codes of a test module: a driver that names a compute capability stands in for CUDA, and a launch
compiles and does nothing else. So argument types, alignments and constants choose variants as they would on a GPU, down to machine code by
the ptxas that comes with Triton. `make test-triton` does so with another release than the installed one, in the folder AENGINE_TEST_TRITON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

OTHER_TRITON = "AENGINE_TEST_TRITON"
ONE_RELEASE_IN_CI = pytest.mark.skipif(
    "CI" in os.environ and OTHER_TRITON not in os.environ, reason="`make test-triton` runs it, with the oldest release that is supported"
)
_STACK_BYTES = 48  # a few values, which a compiler may put there outside of loops
_SCRIPT = """
import json, os, re, subprocess, sys, tempfile, traceback
import triton
from tools.ptx.executor import MOST_GRID
from tools.ptx.triton_launches import redirect

def compile(kernel, grid, arguments, options):
    assert all(0 < size <= limit for size, limit in zip(grid, MOST_GRID)), f"CUDA launches no grid {grid}"
    binary = kernel.run(*arguments, grid=grid, warmup=True, **options)
    if binary.hash not in variants:
        of_thread = {"registers": usage("REG", binary), "stack_bytes": usage("STACK", binary)}
        variants[binary.hash] = {"kernel": kernel.fn.__name__, "shared_bytes": binary.metadata.shared, **of_thread}

def usage(what, binary):
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(what + r":(\\d+)", shown)[1])

redirect(int(sys.argv[1]), compile)
results = {}
for name, code in json.load(sys.stdin).items():
    variants = {}
    try:
        exec(code, {})
        results[name] = list(variants.values())
    except Exception:
        results[name] = traceback.format_exc()
print(json.dumps([triton.__file__, results]))
"""


@dataclass(frozen=True)
class Variant:
    kernel: str
    shared_bytes: int
    registers: int  # of a thread
    stack_bytes: int  # of a thread: what it has no registers for


def compiling_environment(*first: str | None) -> dict[str, str]:
    """Of a process that compiles Triton kernels, where this one may interpret them. `first`: folders to import from before all others."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    here = os.path.dirname(__file__)
    paths = [*first, here, os.path.join(here, "..", ".."), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _most_stack_bytes(variant: Variant) -> int:
    """Programs of 64 latent pairs, which alone have so much shared memory, spill, and are the fastest of those measured on an H200; those
    of a recurrence in blocks spill where each key has a decay."""
    allowed = {("prefill_kernel", variant.shared_bytes > 200 << 10): 400, ("_recur", variant.shared_bytes > 8 << 10): 400}
    return allowed.get((variant.kernel, True), _STACK_BYTES)


class AheadOfTime:
    """What running each of `codes`, which launch kernels on CPU tensors, compiles for a compute capability, times ten. All are run when the
    first is asked for, but in CI, where few are asked for."""

    def __init__(self, codes: Mapping[str, str], capability: int = 90) -> None:
        self.codes = codes
        self.capability = capability
        self._results: dict[str, list[dict[str, object]] | str] = {}

    def variants(self, name: str) -> list[Variant]:
        if name not in self._results:
            self._run([name] if "CI" in os.environ else list(self.codes))
        found = self._results[name]
        assert isinstance(found, list), found
        variants = [Variant(**variant) for variant in found]
        assert not [variant for variant in variants if variant.stack_bytes > _most_stack_bytes(variant)], variants
        return variants

    def kernels(self, name: str) -> Counter[str]:
        """How many variants of each kernel."""
        return Counter(variant.kernel for variant in self.variants(name))

    def _run(self, names: Sequence[str]) -> None:
        other = os.environ.get(OTHER_TRITON)
        environment = compiling_environment(other)
        command = [sys.executable, "-c", _SCRIPT, str(self.capability)]
        codes = json.dumps({name: self.codes[name] for name in names})
        done = subprocess.run(command, env=environment, input=codes, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        module, results = json.loads(done.stdout.splitlines()[-1])
        assert not other or os.path.realpath(module).startswith(os.path.realpath(other)), module
        self._results |= results
