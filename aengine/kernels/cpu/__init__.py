"""CPU kernels in C++ behind a plain C interface: packed products, norms, rotary, paged attention, and whole decoders.

Owns everything between tensors and machine code: choosing a build level, compiling, layouts, calling. Importing this compiles and loads
nothing; `load_kernels` does.
"""

from __future__ import annotations

from aengine.kernels.cpu.levels import KernelsUnavailableError, Level, supported_levels
from aengine.kernels.cpu.library import CpuKernels, Workspace, load_kernels, load_level
from aengine.kernels.cpu.packing import PackedLinear
from aengine.kernels.cpu.pool import KvPool

__all__ = [
    "CpuKernels",
    "KernelsUnavailableError",
    "KvPool",
    "Level",
    "PackedLinear",
    "Workspace",
    "load_kernels",
    "load_level",
    "supported_levels",
]
