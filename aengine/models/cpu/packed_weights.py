"""`PackedWeights`: the weights of a model as the CPU kernels read them; and these as a file, which any number of processes map and share.

Owns the arrays and structs, by name, and the form of the file: a block that names it and says where its table is; then the arrays, in the
order of the layers; then the table, in JSON, with the place of each array and all that a matrix is beside its arrays. Structs are not in
the file, so that it depends on no compiler. A file is complete under its name: it is written under another one, and never changed.

Knows nothing of checkpoints, of how a matrix is packed, or of where files are kept.
"""

from __future__ import annotations

import json
import os
import pathlib
import zlib
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.arrays import Array
from aengine.kernels.cpu.ops import PackedLinear, PackedLinears
from aengine.kernels.warm_memory import map_file
from aengine.models.model_files import whole_file
from aengine.models.sharding import sharded_spec
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import WHOLE, Shard


class PackedWeights:
    """Each kind under the names of `named_weights`; those of matrices and tables without `.weight`."""

    def __init__(self, spec: ModelSpec, dtype: np.dtype[Any], shard: Shard = WHOLE) -> None:
        """`spec`: of the whole model; the weights are those of `sharded_weights(spec, shard)`."""
        self.spec = sharded_spec(spec, shard)
        self.whole_spec = spec
        self.shard = shard
        self.dtype = dtype
        self.linears: dict[str, PackedLinear] = {}  # with their biases; `head` is there if it is tied, too
        self.grouped: dict[str, PackedLinears] = {}  # of experts and of heads
        self.tables: dict[str, Array] = {}  # not packed
        self.vectors: dict[str, NDArray[np.float32]] = {}  # among them the biases of norms
        self._shared: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Without the tables, which may be mapped from files."""
        linears = sum(weight.nbytes for weight in self.linears.values()) + sum(weights.nbytes for weights in self.grouped.values())
        return linears + sum(vector.nbytes for vector in self.vectors.values())

    def take_from(self, others: PackedWeights) -> None:
        """Have the same weights as others. Biases can be set without changing theirs; matrices, tables and vectors can be replaced."""
        self.linears = {name: linear.copy() for name, linear in others.linears.items()}
        self.grouped = {name: PackedLinears([each.copy() for each in one.linears], one.orders) for name, one in others.grouped.items()}
        self.tables, self.vectors = dict(others.tables), dict(others.vectors)

    def share(self, target: PackedWeights) -> None:
        """Take from the target of a draft head its embedding and its output head, each unless the draft head has its own."""
        if "embedding" in self._shared or "embedding" not in self.tables:
            self.tables["embedding"] = target.tables["embedding"]
            self._shared.add("embedding")
        if "head" in self._shared or "head" not in self.linears:
            self.linears["head"] = target.linears["head"]
            self._shared.add("head")

    def unshare(self) -> None:
        """Give up what `share` took, until `share` is called again."""
        if "embedding" in self._shared:
            del self.tables["embedding"]
        if "head" in self._shared:
            del self.linears["head"]


_MAGIC = b"AEWEIGHT"
_FIRST_BLOCK = 4096  # bytes
_ALIGNMENT = 4096  # of arrays that are as large; of others a line of a cache
_LINE = 64
_PIECE = 8 << 20
"""Bytes that are written at a time, at multiples of themselves: then the system keeps a file in huge pages, which it can map."""


class PackedFileError(Exception):
    """A file is not one of packed weights, or not a whole one."""


class PackedFile:
    """Packed weights that are to be a file. They may be shared with a draft head, or replaced, after this was made."""

    def __init__(self, weights: PackedWeights, facts: Mapping[str, str]) -> None:
        """`facts` are told by `open_packed`."""
        self._places = _Places()
        self._table = {"facts": dict(facts), **_table(weights, self._places)}

    @property
    def nbytes(self) -> int:
        """About the bytes of the file."""
        return self._places.end

    def write(self, path: pathlib.Path, check: Callable[[], object] = lambda: None) -> None:
        """Writes the file to `path`, where nothing or another whole file is. `check` is called between pieces, and may raise to end it.
        Raises OSError, and what `check` raises; then there is nothing new at `path`."""
        with whole_file(path) as writing:
            descriptor = os.open(writing, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                end = self._places.end
                os.posix_fallocate(descriptor, 0, end)  # a full disk is found out here, and not by those that map the file
                checksum = _write_arrays(descriptor, self._places, check)
                text = json.dumps({**self._table, "checksum": checksum}).encode()
                _write_at(descriptor, text, end)
                first = _MAGIC + np.array([end, len(text)], "<u8").tobytes() + blake2b(text, digest_size=16).digest()
                _write_at(descriptor, first, 0)
            finally:
                os.close(descriptor)


def open_packed(path: pathlib.Path, spec: ModelSpec, dtype: np.dtype[Any], shard: Shard) -> tuple[PackedWeights, dict[str, str]]:
    """The weights that were written for this spec, dtype and shard, mapped: nothing is read before it is used. And the facts that were
    written with them. Raises OSError, or PackedFileError."""
    content = map_file(path)
    if len(content) < _FIRST_BLOCK or content[: len(_MAGIC)].tobytes() != _MAGIC:
        raise PackedFileError("it does not begin as a file of packed weights")
    begin = len(_MAGIC)
    at, size = content[begin : begin + 16].view("<u8").tolist()
    text = content[at : at + size].tobytes()
    if at + size != len(content) or blake2b(text, digest_size=16).digest() != content[begin + 16 : begin + 32].tobytes():
        raise PackedFileError("its table is not whole")
    table = json.loads(text)
    weights = PackedWeights(spec, dtype, shard)
    read = _Reader(content[:at])
    weights.linears = {name: read.linear(dtype, said) for name, said in table["linears"].items()}
    for name, said in table["grouped"].items():
        linears = [read.linear(dtype, one) for one in said["linears"]]
        weights.grouped[name] = PackedLinears(linears, None if said["orders"] is None else read.array(said["orders"]))
    weights.tables = {name: read.array(said) for name, said in table["tables"].items()}
    weights.vectors = {name: read.array(said) for name, said in table["vectors"].items()}
    return weights, table["facts"]


def verify_packed(path: pathlib.Path) -> None:
    """Reads the whole file. Raises PackedFileError if it is not what was written, and OSError."""
    content = map_file(path)
    at, size = content[len(_MAGIC) : len(_MAGIC) + 16].view("<u8").tolist()
    checksum = json.loads(content[at : at + size].tobytes())["checksum"]
    found = 0
    for begin in range(_FIRST_BLOCK, at, _PIECE):
        found = zlib.crc32(content[begin : min(begin + _PIECE, at)].data, found)
    if found != checksum:
        raise PackedFileError(f"its content has the checksum {found:08x}, not {checksum:08x}")


class _Places:
    """Where arrays go, in the order in which they are asked for; an array that is there already has its place."""

    def __init__(self) -> None:
        self.arrays: list[tuple[int, Array]] = []
        self.end = _FIRST_BLOCK
        self._known: dict[tuple[int, int], int] = {}

    def place(self, array: Array) -> list[Any]:
        """What the table says of an array: its place, dtype and shape."""
        given = np.ascontiguousarray(array)
        key = (given.__array_interface__["data"][0], given.nbytes)
        if key not in self._known:
            alignment = _ALIGNMENT if given.nbytes >= _ALIGNMENT else _LINE
            first = -(-self.end // alignment) * alignment
            self._known[key], self.end = first, first + given.nbytes
            self.arrays.append((first, given))
        return [self._known[key], given.dtype.name, list(given.shape)]


def _table(weights: PackedWeights, places: _Places) -> dict[str, Any]:
    """All that is in the file beside the arrays. The order of places is that in which a step reads them."""
    vectors = {name: places.place(vector) for name, vector in weights.vectors.items()}
    matrices: dict[str, PackedLinear | PackedLinears] = {**weights.linears, **weights.grouped}
    numbers = {name: number for number, name in enumerate([*weights.linears, *weights.grouped])}
    said = {name: _said_of(matrices[name], places) for name in sorted(matrices, key=lambda name: (_layer_of(name), numbers[name]))}
    tables = {name: places.place(table) for name, table in weights.tables.items()}
    places.end = -(-places.end // _ALIGNMENT) * _ALIGNMENT
    return {
        "linears": {name: said[name] for name in weights.linears},
        "grouped": {name: said[name] for name in weights.grouped},
        "tables": tables,
        "vectors": vectors,
    }


def _layer_of(name: str) -> int:
    """The number of a matrix's layer; those that are read behind all layers have the last one."""
    kind, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if kind == "layers" and number.isdigit() else 1 << 30


def _said_of(matrix: PackedLinear | PackedLinears, places: _Places) -> dict[str, Any]:
    if isinstance(matrix, PackedLinears):
        orders = None if matrix.orders is None else places.place(matrix.orders)
        return {"linears": [_said_of(one, places) for one in matrix.linears], "orders": orders}
    return {"numbers": matrix.numbers, "arrays": {name: places.place(array) for name, array in matrix.arrays.items()}}


class _Reader:
    """Makes arrays and matrices of what the table says of them. Raises PackedFileError for a place that is not in the file."""

    def __init__(self, content: NDArray[np.uint8]) -> None:
        self._content = content

    def array(self, said: list[Any]) -> Array:
        first, name, shape = said
        dtype = np.dtype(name)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if not _FIRST_BLOCK <= first <= first + size <= len(self._content):
            raise PackedFileError(f"an array of {size} bytes at {first} is not in its {len(self._content)} bytes")
        found: Array = self._content[first : first + size].view(dtype).reshape(shape)
        return found

    def linear(self, dtype: np.dtype[Any], said: dict[str, Any]) -> PackedLinear:
        return PackedLinear(dtype, {name: self.array(one) for name, one in said["arrays"].items()}, **said["numbers"])


def _write_arrays(descriptor: int, places: _Places, check: Callable[[], object]) -> int:
    """Writes all arrays. Returns the checksum of what is between the first block and the table."""
    piece = np.zeros(_PIECE, np.uint8)
    begin, checksum = 0, 0  # of the piece, in the file

    def write(end: int) -> None:
        nonlocal begin, checksum
        check()
        _write_at(descriptor, piece[: end - begin].data, begin)
        checksum = zlib.crc32(piece[max(_FIRST_BLOCK - begin, 0) : end - begin].data, checksum)
        begin = end
        piece.fill(0)

    for first, array in places.arrays:
        data = array.reshape(-1).view(np.uint8)
        while len(data):
            while first >= begin + _PIECE:
                write(begin + _PIECE)
            count = min(len(data), begin + _PIECE - first)
            piece[first - begin : first - begin + count] = data[:count]
            first, data = first + count, data[count:]
    while begin < places.end:
        write(min(begin + _PIECE, places.end))
    return checksum


def _write_at(descriptor: int, data: bytes | memoryview, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written
