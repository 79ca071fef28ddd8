"""The FlashInfer package: how it is imported, which versions are supported, and which of its functions are used.

Owns the lazy import, the logs and errors of building its modules, and the host arrays that its calls need. Knows nothing of steps or
models. Importing FlashInfer queries the GPU, so `load_flashinfer` is called in the thread that owns the device, and never without one. Its
functions and classes are always called with keyword arguments: their order differs between versions.

How large the workspaces of FlashInfer's planner must be: it raises an error during a step if one is too small.

Owns the bounds on what a plan of its fa2 kernels reserves (`PrefillPlan` in scheduler.cuh, which tensor-core decoding uses too). They are
those of 0.6.13; up to 0.7.2 later versions reserve less. Knows nothing of wrappers, steps or memory.

FlashInfer's fa3 kernels for prompts: whether they can be had, and which steps they are for.

They use what compute capability 9.0 has for large products, but neither split a row's keys nor put the heads of a group into one tile.
Their modules take many minutes to build, so they are used where they are built already. Knows nothing of wrappers or plans.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.attention.base import BackendUnavailableError, first_line
from aengine.attention.metadata import AttentionSpec
from aengine.kernels.arrays import staged

_log = logging.getLogger("aengine")
SUPPORTED = ((0, 6, 13), (0, 8, 0))  # at least the first, below the second
HEAD_DIMS = (64, 128, 256)  # for which there are attention and rope kernels
DTYPES = (torch.bfloat16, torch.float16)  # supported for activations


def load_flashinfer(device: torch.device) -> ModuleType:
    """The installed package.

    Raises BackendUnavailableError if it is not installed, cannot be imported, or has a version that is not in `SUPPORTED`.
    """
    if device.type != "cuda":
        raise BackendUnavailableError(f"FlashInfer needs a CUDA device, not {device.type}")
    # If its CuTe-DSL package is installed, FlashInfer would use other norm kernels than those that were tested.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        library = importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"FlashInfer is not installed (no module {error.name}): pip install flashinfer-python") from error
    except Exception as error:
        raise BackendUnavailableError(f"FlashInfer cannot be imported: {first_line(error)}") from error
    check_version(str(library.__version__))
    return library


def check_version(version: str) -> None:
    """Raises BackendUnavailableError for a version that is not in `SUPPORTED`."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    low, high = SUPPORTED
    if numbers is None or not low <= tuple(int(number) for number in numbers.groups()) < high:
        first, end = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise BackendUnavailableError(f"FlashInfer {version} is not supported: >={first},<{end} is")


def require_kernels(dtype: torch.dtype, head_dim: int) -> None:
    """Raises BackendUnavailableError if there are no kernels for activations of `dtype` or heads of `head_dim`."""
    if dtype not in DTYPES:
        raise BackendUnavailableError(f"FlashInfer computes in float16 and bfloat16, not {dtype}")
    if head_dim not in HEAD_DIMS:
        raise BackendUnavailableError(f"FlashInfer has kernels for head_dim {', '.join(map(str, HEAD_DIMS))}, not {head_dim}")


@contextmanager
def building(library: ModuleType, what: str, device: torch.device) -> Iterator[None]:
    """Encloses the first calls of all functions for `what`, which build and load FlashInfer's modules and fill the caches that must not be
    filled while a graph is captured. Logs how long they took.

    Raises BackendUnavailableError in place of any error but torch.OutOfMemoryError.
    """
    _log.info("building FlashInfer modules for %s: takes minutes at the first start, a moment once they are cached", what)
    begin = time.monotonic()
    try:
        yield
        if device.type == "cuda":
            # Raises the error of a kernel that cannot run. Not of the whole device, where another engine may be capturing a graph.
            torch.cuda.current_stream(device).synchronize()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _log.debug("FlashInfer failed", exc_info=True)
        raise BackendUnavailableError(f"FlashInfer {library.__version__} cannot run here: {first_line(error)}") from error
    _log.info("FlashInfer modules for %s ready after %.1f s", what, time.monotonic() - begin)


def host_tensors(arrays: Mapping[str, NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Copies of the arrays as slices of one tensor that `staged` makes.

    Raises TypeError for an array that is not int32: FlashInfer would read its bytes as int32 without an error.
    """
    for name, array in arrays.items():
        if array.dtype != np.int32:
            raise TypeError(f"{name} must be int32, not {array.dtype}")
    return list(torch.split(staged(list(arrays.values()), device), [len(array) for array in arrays.values()]))


def require_int32(**tensors: Tensor) -> None:
    """Raises TypeError for a tensor that is not int32."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {tensor.dtype}")


_WIDEST, _WIDE, _NARROW = 128, 64, 16  # sizes of a tile: pairs of query and head of one KV head that a thread block computes
_SLACK = 1 << 10  # bytes for the alignment of a plan's arrays


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """Upper bounds for all plans of the attention of `spec` on a device. All sizes are bytes."""

    spec: AttentionSpec
    device: Any  # as `torch.cuda.get_device_properties` describes it

    def float_bytes(self) -> int:
        """The bytes of partial results for any rows of a step without a graph, whose rows are split only while all parts run at once."""
        return self._float_bytes(self._most_parts, self._tile(1 << 30))

    def graph_float_bytes(self, rows: int) -> int:
        """The bytes of partial results for a graph of `rows` decode rows, which may always be split."""
        return self._float_bytes(self._graph_tiles(rows), self._tile(self._group))

    def graph_int_bytes(self, rows: int) -> int:
        """The bytes of the plan's indices for a graph of `rows` decode rows: three int32 and a byte for each tile, two int32 for each
        row."""
        return self._graph_tiles(rows) * (3 * 4 + 1) + (rows + 1) * 2 * 4 + _SLACK

    @property
    def _group(self) -> int:
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def _most_parts(self) -> int:
        return 2 * int(self.device.multi_processor_count) // self.spec.num_kv_heads

    def _graph_tiles(self, rows: int) -> int:
        return max(self._most_parts, -(-rows * self._group // self._tile(self._group)) + rows - 1)

    def _tile(self, queries: int) -> int:
        if queries > _WIDE and self.spec.head_dim < 256:
            return _WIDEST
        return _WIDE if queries > _NARROW or self.device.major < 8 else _NARROW

    def _float_bytes(self, tiles: int, tile: int) -> int:
        """The bytes of float32 partial results of `tiles` tiles of `tile` queries: for each query in each head its output and its
        log-sum-exp."""
        return self.spec.num_heads * tiles * tile * (self.spec.head_dim + 1) * 4 + _SLACK


_CAPABILITY = 9  # major: the instructions exist on 9.x alone
_MOST_TILES = 4096  # of one head, above which all heads have one schedule
_INT_WORKSPACE = 8 << 20  # bytes that a wrapper has for its plan
_FA3_SLACK = 1 << 13


def missing_fa3(library: ModuleType, spec: AttentionSpec, device: Any) -> str | None:
    """Why there are no kernels for `spec` on a device of these properties, in one line; None if there are."""
    if device.major != _CAPABILITY:
        return f"they need compute capability {_CAPABILITY}.x"
    if spec.cache_dtype != spec.dtype:
        return f"they read no KV cache of {spec.cache_dtype}"
    try:
        for window, soft_cap in dict.fromkeys((scoring.window is not None, scoring.soft_cap > 0) for scoring in spec.scoring):
            module = library.jit.gen_batch_prefill_module(
                backend="fa3",
                dtype_q=spec.dtype,
                dtype_kv=spec.dtype,
                dtype_o=spec.dtype,
                dtype_idx=torch.int32,
                head_dim_qk=spec.head_dim,
                head_dim_vo=spec.head_dim,
                pos_encoding_mode=0,
                use_sliding_window=window,
                use_logits_soft_cap=soft_cap,
                use_fp16_qk_reduction=False,
            )
            if not module.is_compiled:
                return f"there is no built module {module.name}"
    except Exception as error:  # of a folder that cannot be written to, say
        return first_line(error)
    return None


def suits_fa3(queries: NDArray[np.int32], spec: AttentionSpec, device: Any) -> bool:
    """Whether rows of these numbers of queries are enough work without splits, in tiles that are at least half full."""
    tile = 192 if spec.head_dim == 64 else 128
    tokens, tiles = int(queries.sum()), int((-(-queries // tile)).sum())
    enough = tiles * spec.num_heads >= device.multi_processor_count
    return enough and 2 * tokens >= tile * tiles and _plan_bytes(tokens, len(queries), tile, spec.num_heads) <= _INT_WORKSPACE


def _plan_bytes(tokens: int, rows: int, tile: int, num_heads: int) -> int:
    """The most that `PrefillSM90Plan` (scheduler.cuh) reserves: seven int32 for each tile of each head, and some for multiprocessors."""
    tiles = -(-tokens // tile) + rows - 1
    return 7 * 4 * tiles * (1 if tiles > _MOST_TILES else num_heads) + _FA3_SLACK
