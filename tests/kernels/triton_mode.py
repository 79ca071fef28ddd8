"""Where Triton kernels run in tests: compiled on CUDA where there is a device, else in Triton's interpreter on CPU tensors.

Import it before anything that imports triton: the interpreter is chosen when triton is loaded. The import skips the module where
triton is not installed. The interpreter knows bfloat16 as bit patterns alone: kernels convert to float32 right after a load.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()

if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

triton = pytest.importorskip("triton", reason="needs triton")

DEVICES = [
    pytest.param("cpu", id="interpreter", marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled where there is CUDA")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")]),
]
