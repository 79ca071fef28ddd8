"""Where Triton kernels run in tests: compiled on CUDA where there is a device, else in Triton's interpreter on CPU tensors.

Import it before anything that imports triton: the interpreter is chosen when triton is loaded. Where triton is not installed the import
skips the module, and fails where there is a CUDA device. The interpreter knows bfloat16 as bit patterns alone: kernels convert to float32
right after a load, and tests of those that do not ask for the fixture `bfloat16_arithmetic`.
"""

from __future__ import annotations

import importlib
import os

import numpy as np
import pytest
import torch

INTERPRETED = not torch.cuda.is_available()

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton", reason="needs triton") if INTERPRETED else importlib.import_module("triton")

_WHY_NOT = None if INTERPRETED else "kernels are compiled where there is CUDA"
if INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    # Its loops make a number of an array with one element: "only 0-dimensional arrays can be converted to Python scalars".
    _WHY_NOT = f"the interpreter of triton {triton.__version__} does not work with numpy {np.__version__}"

needs_interpreter = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
INTERPRETER = pytest.param("cpu", id="interpreter", marks=needs_interpreter)
DEVICES = [
    INTERPRETER,
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")]),
]
