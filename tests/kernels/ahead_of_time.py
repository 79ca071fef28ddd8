"""Compiles Triton kernels for Hopper on machines without a GPU, through the very launches that a step makes.

In a process of its own: a driver that says "compute capability 9.0" stands in for CUDA, and a launch compiles and does nothing else. So
argument types, alignments and constants choose variants as they would on a GPU, down to machine code by the ptxas that comes with Triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass

_PRELUDE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

variants = {}

def launch(kernel, grid):
    def compile(*args, **options):
        binary = kernel.run(*args, grid=grid, warmup=True, **options)
        variants[binary.hash] = {"kernel": kernel.fn.__name__, "shared_bytes": binary.metadata.shared}
    return compile

driver.set_active(Hopper())
JITFunction.__getitem__ = launch
"""


@dataclass(frozen=True)
class Variant:
    kernel: str
    shared_bytes: int


def compiled(code: str) -> list[Variant]:
    """Every variant that running `code`, which launches kernels on CPU tensors, compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = f"{_PRELUDE}\n{textwrap.dedent(code)}\nprint(json.dumps(list(variants.values())))"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Variant(**variant) for variant in json.loads(done.stdout.splitlines()[-1])]
