"""The tensors of a checkpoint, whatever the format of its files: name -> shape, dtype, and how to get it.

Files are memory-mapped, so a tensor that is not used is not read. Knows nothing of the model that the tensors are of.

`WeightsDigest`: what tells the weights of one model from those of another, made while they are read. Every byte counts.

Knows nothing of files: weights from anywhere have the digest of their values.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
import os
import pathlib
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError, one_line
from aengine.api.runtime import imports_of
from aengine.kernels.arrays import BFLOAT16, FLOAT8, FLOAT32, Array, as_array, data_address
from aengine.kernels.quantized import QuantizedRows, Rows, numbers_of
from aengine.models.gguf.gguf_file import BLOCKS
from aengine.models.gguf.tensors import read_tensors
from aengine.models.loading.hub import find_checkpoint, shortened
from aengine.models.model_files import format_of_tensors, mapped, require_regular

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
"""Dtypes of weights that are not quantised, by the names that `StoredTensor` has for them, with their bytes."""
_ITEMSIZES = {**DTYPES, "int8": 1, "uint8": 1, "int32": 4, "uint32": 4, "int64": 8, "float8_e4m3fn": 1, "float8_e8m0fnu": 1}
_SAFETENSORS_DTYPES = {
    **{"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"},
    **{
        "I8": "int8",
        "U8": "uint8",
        "I32": "int32",
        "U32": "uint32",
        "I64": "int64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
    },
}
_libc = ctypes.CDLL(None)
_STRIDE = 4 << 20
_LENGTH = 8  # bytes of the length of a safetensors header


@dataclass(frozen=True, slots=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str  # as NumPy calls it, a key of `BLOCKS`, or the file's own name of one that no format of weights has
    get: Callable[[], Rows]  # contiguous; mapped from the file where the format allows it; rows of `BLOCKS` may be quantised
    part: Callable[[range], Rows] | None = None  # some of the rows of a matrix, where that takes less than to `get` all of them
    file: pathlib.Path | None = None  # that it is read from

    def read_numbers(self) -> Array:
        """Read the whole tensor; what is quantised becomes float32."""
        return numbers_of(self.get())

    @property
    def nbytes(self) -> int:
        """Raises KeyError for a dtype that no format of weights has."""
        if self.dtype in BLOCKS:
            values, size = BLOCKS[self.dtype]
            return math.prod(self.shape) // values * size
        return math.prod(self.shape) * _ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    tensors: Mapping[str, StoredTensor]
    duplicates: tuple[str, ...]  # the names that more than one file has


def open_checkpoint(model_dir: pathlib.Path, load_format: str = "auto") -> Checkpoint:
    """Reads the headers of all files. Raises ModelLoadError for files that are missing or broken, and for an index that does not match."""
    files = find_checkpoint(model_dir, load_format)
    tensors: dict[str, StoredTensor] = {}
    duplicates: list[str] = []
    for name in files.names:
        read = _READERS.get(pathlib.Path(name).suffix, _read_torch)
        for tensor_name, tensor in read(model_dir / name):
            if tensor_name in tensors:
                duplicates.append(tensor_name)
            tensors[tensor_name] = tensor
    absent = [name for name in files.weight_map or () if name not in tensors]
    if absent:
        raise ModelLoadError(f"{model_dir / str(files.index)} lists {shortened(absent)}, which none of its files has")
    if not tensors:
        raise ModelLoadError(f"{model_dir / files.names[0]} holds no tensors")
    tensors = dict(_with_single_experts(tensors))
    other_format = format_of_tensors(tensors)
    if other_format:
        raise ModelLoadError(f"the weights in {model_dir} are in {other_format}")
    return Checkpoint(tensors, tuple(duplicates))


_STACKED = ".switch_mlp."
"""In the names of MLX, for all experts of a layer together."""
_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _with_single_experts(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors, those of all experts together one by one under the names that the model has in other checkpoints."""
    for name, tensor in tensors.items():
        if _STACKED not in name or not tensor.shape:
            yield name, tensor
            continue
        block, _, rest = name.partition(_STACKED)
        module, _, ending = rest.partition(".")
        if block.endswith("block_sparse_moe"):
            module = _OF_MIXTRAL.get(module, module)
        for index in range(tensor.shape[0]):
            get = partial(_get_expert, tensor, index)
            yield f"{block}.experts.{index}.{module}.{ending}", StoredTensor(tensor.shape[1:], tensor.dtype, get, file=tensor.file)


def _get_expert(tensor: StoredTensor, index: int) -> Rows:
    rows = tensor.get()
    assert isinstance(rows, np.ndarray)
    found: Array = rows[index]
    return found


def checkpoint_dtype(model_dir: pathlib.Path, load_format: str = "auto") -> np.dtype[Any]:
    """The dtype of a checkpoint's first tensor of a supported one, for a config.json without a dtype. Raises ModelLoadError."""
    tensors = open_checkpoint(model_dir, load_format).tensors
    return next((np.dtype(tensor.dtype) for tensor in tensors.values() if tensor.dtype in DTYPES), FLOAT32)


_LOOKED_AT = 1 << 18  # numbers together
_FINITE = {
    **{np.dtype(np.float16): (0x7FFF, 0x7BFF), BFLOAT16: (0x7FFF, 0x7F7F), FLOAT32: (0x7FFF_FFFF, 0x7F7F_0000)},
    **{np.dtype(np.float64): ((1 << 63) - 1, 0x47EF_E000_0000_0000), FLOAT8: (0x7F, 0x7E), np.dtype("float8_e8m0fnu"): (0xFF, 0xFE)},
}
"""The bits of a number without its sign, and those of the largest one that is finite in bfloat16 too: in the order of their bits, NaN is
beyond it."""


def are_finite(rows: Rows) -> bool:
    """Whether all numbers are finite, in bfloat16 too: of quantised rows, what many codes share. One pass, with little memory."""
    if isinstance(rows, QuantizedRows):
        return are_finite(rows.scales if rows.offsets is None else rows.scales + rows.offsets)
    if rows.dtype not in _FINITE:
        return True
    magnitude, largest = _FINITE[rows.dtype]
    bits = rows.view(np.dtype(f"u{rows.itemsize}")) if rows.ndim else rows.reshape(1).view(np.dtype(f"u{rows.itemsize}"))
    step = max(1, _LOOKED_AT // max(1, math.prod(bits.shape[1:])))
    return all(int((bits[first : first + step] & magnitude).max(initial=0)) <= largest for first in range(0, len(bits), step))


_ROWS = 256  # that are compared together


def are_same(one: Array, other: Array) -> bool:
    """Whether two matrices have the same numbers."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:  # NumPy compares bfloat16 slowly
        bits = np.dtype(f"u{one.itemsize}")
        one, other = one.view(bits), other.view(bits)
    return all(np.array_equal(one[row : row + _ROWS], other[row : row + _ROWS]) for row in range(0, len(one), _ROWS))


def read_from_disk(rows: Rows) -> None:
    """Has the system read a mapped tensor from its file, without waiting for the data. May wait for the disk to take the requests.
    Quantised rows have been read."""
    if isinstance(rows, QuantizedRows):
        return
    # Columns of rows are in nearly all pages of these.
    last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.strides, strict=True)) + rows.itemsize if rows.size else 0
    address = data_address(rows)
    first, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + last
    for start in range(first, end, _STRIDE):
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(min(_STRIDE, end - start)), mmap.MADV_WILLNEED)


class MappedPages:
    """Mapped files of a checkpoint whose tensors were read. Their pages are in the memory of the process until they are given back."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[int, int], None] = {}

    def note_rows(self, rows: Rows, file: pathlib.Path | None) -> None:
        """Note the mapped pages that `rows`, read from `file`, lie in. What is not mapped from there is left alone."""
        if file is None or isinstance(rows, QuantizedRows) or any(start <= data_address(rows) < end for start, end in self._ranges):
            return
        path = os.path.realpath(file)
        with suppress(OSError), open("/proc/self/maps") as maps:  # of Linux
            for line in maps:
                addresses, _, _, _, inode, *name = line.split(maxsplit=5)
                start, end = (int(address, 16) for address in addresses.split("-"))
                if start <= data_address(rows) < end and inode != "0" and name and name[0].rstrip("\n") == path:
                    self._ranges[start, end] = None

    def give_back(self) -> None:
        """A tensor that is still used is read from the file again, which the system usually still has in memory."""
        for start, end in self._ranges:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def read_safetensors(path: pathlib.Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a file, mapped. Raises ModelLoadError."""
    require_regular(path)
    try:
        file: Any = safe_open(path, framework="np")  # checks the whole header
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file, or corrupt or truncated: {one_line(error)}") from error
    with path.open("rb") as opened:
        data = np.frombuffer(mapped(opened), np.uint8)
    size = int.from_bytes(data[:_LENGTH].tobytes(), "little")
    header, data = json.loads(data[_LENGTH : _LENGTH + size].tobytes()), data[_LENGTH + size :]
    for name in file.keys():  # noqa: SIM118 - a safetensors handle is not iterable
        shape, kind, (first, end) = tuple(header[name]["shape"]), header[name]["dtype"], header[name]["data_offsets"]
        dtype = _SAFETENSORS_DTYPES.get(kind, kind)
        yield name, StoredTensor(shape, dtype, partial(_viewed, data[first:end], dtype, shape), file=path)


def _viewed(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Array:
    numbers = np.dtype(dtype)
    if data_address(data) % numbers.itemsize:
        data = data.copy()
    return data.view(numbers).reshape(shape)


def _read_torch(path: pathlib.Path) -> Iterator[tuple[str, StoredTensor]]:
    with imports_of(f"{path.name}, a file of PyTorch,"):
        import torch
        from torch import Tensor

    require_regular(path)
    try:
        with path.open("rb") as file:
            mapped = file.read(4) == b"PK\x03\x04"  # files of torch before 1.6 are no zip archives, and cannot be mapped
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise ModelLoadError(
            f"{path} is corrupt, or holds Python objects{what}, which are not loaded: they could run any code; only tensors are"
        ) from error
    except Exception as error:  # of many types
        raise ModelLoadError(f"{path} is not a file of PyTorch tensors, or corrupt or truncated: {one_line(error, 200)}") from error
    if not isinstance(tensors, dict):
        raise ModelLoadError(f"{path} holds a {type(tensors).__name__}, not a dictionary of tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelLoadError(f"{path} holds {name!r} of type {type(tensor).__name__}; only tensors are supported")
        if tensor.is_meta:
            raise ModelLoadError(f"{path} holds {name!r} without its numbers, on torch's device meta")
        dtype = str(tensor.dtype).removeprefix("torch.") if tensor.layout == torch.strided else str(tensor.layout)
        yield name, StoredTensor(tuple(tensor.shape), dtype, partial(_array_of, tensor), file=path)


def _array_of(tensor: Any) -> Array:
    return as_array(tensor.detach().contiguous())


def _read_gguf(path: pathlib.Path) -> Iterator[tuple[str, StoredTensor]]:
    for name, shape, kind, get, part in read_tensors(path):
        yield name, StoredTensor(shape, kind, get, part, path)


_READERS = {".safetensors": read_safetensors, ".gguf": _read_gguf}
"""By the suffix of files; those of the others are PyTorch's."""


_WORDS = 512
"""Words of 8 bytes in a block. Blocks are added up as fast as memory is read, and SHA-256, which takes 20 times as long, gets the sums."""


class WeightsDigest:
    """The digest of the weights that are added, in their order."""

    def __init__(self, before: str = "") -> None:
        """`before`: the digest of weights that these replace in part; empty: they are all."""
        self._hash = hashlib.sha256(before.encode())
        self.known: str | None = None
        """The digest, where it is known without the weights."""

    def add_weight(self, name: str, parts: Iterable[Rows]) -> None:
        """A named weight: shapes, dtypes and values of its parts."""
        for part in parts:
            for field, array in _arrays(part):
                self._hash.update(f"{name} {field} {array.shape} {array.dtype};".encode())
                self._add_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    @contextmanager
    def adding(self, name: str, parts: Iterable[Rows], executor: Executor) -> Iterator[None]:
        """Adds them while the body runs, which may read them."""
        added = executor.submit(self.add_weight, name, parts)
        try:
            yield
        finally:
            added.result()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:16] if self.known is None else self.known

    def _add_bytes(self, data: NDArray[np.uint8]) -> None:
        end = len(data) // (8 * _WORDS) * 8 * _WORDS
        self._hash.update(data[:end].view(np.uint64).reshape(-1, _WORDS).sum(axis=1).data)
        self._hash.update(data[end:].data)


def _arrays(rows: Rows) -> Iterable[tuple[str, Array]]:
    if isinstance(rows, np.ndarray):
        return [("", rows)]
    found = [(field.name, getattr(rows, field.name)) for field in fields(QuantizedRows)]
    return [(name, value) for name, value in found if isinstance(value, np.ndarray)]
