"""`WeightPacking` makes `PackedWeights` of the weights of a checkpoint.

Packs an `Adapter` for the CPU kernels: the low-rank matrices of all parameters, in one piece of memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aengine.api.errors import AdapterError
from aengine.kernels.arrays import FLOAT32, Array
from aengine.kernels.cpu.library import BLOCK, EMBEDDING, PANEL, CLowRank, CLowRankBlock, Workspace
from aengine.kernels.cpu.ops import PackedCpuAdapter, PackedLinear
from aengine.kernels.cpu.packing import are_packable, as_packable, pack_linear, pack_linears, quantize_matrix
from aengine.kernels.quantized import QuantizedRows, Rows, in_one_format, numbers_of
from aengine.kernels.warm_memory import Allocate, lazy_bytes
from aengine.models.adapters import Adapter, LowRankPart
from aengine.models.cpu.packed_weights import PackedWeights
from aengine.models.loading.hub import shortened
from aengine.models.named_weights import NEVER_QUANTIZED
from aengine.models.sharding import WeightPart, own, sharded_weights, take_part, vocab_bounds
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import WHOLE, Shard

_log = logging.getLogger("aengine")
_TABLES = ("embedding", "positions", "layer_embedding")  # rows are read by number


class WeightPacking:
    """Packs the weights of one model, once."""

    def __init__(
        self,
        workspace: Workspace,
        spec: ModelSpec,
        dtype: np.dtype[Any],
        *,
        shard: Shard = WHOLE,
        quantization: str = "none",
        allocate: Allocate = lazy_bytes,
    ) -> None:
        """`spec`: of the whole model, of which `shard` is packed. `quantization` is that of `EngineConfig`. `allocate` makes the memory of
        packed matrices."""
        self._workspace, self._quantization, self._allocate = workspace, quantization, allocate
        self._packed = PackedWeights(spec, dtype, shard)
        self._routers: dict[str, list[Array]] = {}
        self._dequantized: list[str] = []

    def pack(self, weights: Iterable[tuple[str, Sequence[Rows]]], present: PackedWeights | None = None) -> PackedWeights:
        """Packs each of `weights` as it comes, in the order of `sharded_weights`. Those that are missing are the `present` ones, which are
        not changed.

        Raises ValueError for weights that are missing without `present` ones, unknown or of another shape.
        """
        packed = self._packed
        if present is not None:
            packed.take_from(present)
        missing = sharded_weights(packed.whole_spec, packed.shard)
        for name, parts in weights:
            expected = missing.pop(name, None)
            if expected is None:
                raise ValueError(f"{name} is not a weight of the model, or was given before")
            shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
            flat = len(expected.shape) == 1 or name.endswith(".bias")
            merged = (math.prod(expected.shape),) if flat else (math.prod(expected.shape[:-1]), expected.shape[-1])
            if shape != merged:
                raise ValueError(f"{name} has shape {shape}; the model's is {merged}")
            stem, _, kind = name.rpartition(".")
            arrays = [part for part in parts if isinstance(part, np.ndarray)]  # all of a bias or vector: those are never quantised
            if name.endswith(".router.bias"):
                packed.vectors[name] = _floats(arrays)  # its matrix comes later
            elif kind == "bias" and stem in packed.linears:
                packed.linears[stem].set_bias(_floats(arrays))
            elif kind == "bias" and stem in packed.grouped:
                packed.grouped[stem].set_biases(_floats(arrays))
            elif flat or kind == "log_decay":
                packed.vectors[name] = _floats(arrays)
            else:
                count = expected.shape[0] if len(expected.shape) == 3 else None
                self._take_matrix(stem, parts, count)
        if missing and present is None:
            raise ValueError(f"{next(iter(missing))} is missing")
        while self._routers:
            self._pack_router(*self._routers.popitem())
        for name in [name for name in packed.vectors if name.endswith(".router.bias")]:  # whose matrices stay
            _set_router_bias(packed.linears[name.removesuffix(".bias")], packed.vectors.pop(name))
        if self._dequantized:
            _log.warning(
                "no kernel has a format for these quantised matrices, which are as wide as activations: %s", shortened(self._dequantized)
            )
        return packed

    def _take_matrix(self, stem: str, rows: Sequence[Rows], count: int | None) -> None:
        """`count`: of how many matrices the rows are; None: of one."""
        packed, quantization, dtype = self._packed, self._quantization, self._packed.dtype
        if stem in _TABLES:
            table = [numbers_of(part, dtype) for part in rows]
            packed.tables[stem] = np.ascontiguousarray(table[0] if len(table) == 1 else np.concatenate(table), dtype)
            if stem != "embedding" or not packed.spec.tied_head:
                return
            head = WeightPart("head.weight", (), (own(vocab_bounds(packed.whole_spec, packed.shard), packed.shard),))
            stem, rows = "head", take_part(rows, head)
        layer, _, name = stem.rpartition(".")
        if name in ("router", "shared_gate"):
            self._routers.setdefault(f"{layer}.router", []).extend([numbers_of(part, FLOAT32) for part in rows])
            return
        if name == "conv":
            packed.vectors[f"{stem}.weight"] = _floats([numbers_of(part, FLOAT32) for part in rows])
            return
        quantizable = name not in NEVER_QUANTIZED
        in_int8 = quantization == "int8" or (quantization == "int4" and stem == "head")
        if quantizable and not in_int8 and quantization != "none":
            rows = [quantize_matrix(self._workspace, part, quantization) if isinstance(part, np.ndarray) else part for part in rows]
        quantized = [part for part in rows if isinstance(part, QuantizedRows)]
        if quantizable and len(quantized) == len(rows):
            rows = in_one_format(quantized)
        # What the kernels have no format for, such as parts with several orders of columns, is as wide as the activations.
        has_codes = quantizable and are_packable(rows, count)
        if quantizable and not has_codes and quantized:
            self._dequantized.append(stem)
        parts: Sequence[Rows] = rows if has_codes else [numbers_of(part, dtype) for part in rows]
        kernels, threads = self._workspace.kernels, self._workspace.threads
        options: dict[str, Any] = {"interleaved": name == "gate_up", "int8": quantizable and in_int8 and not has_codes}
        if has_codes:
            options["float32"] = dtype == FLOAT32  # then activations are not quantised either
        if count is None:
            packable = as_packable(parts, packed.dtype)
            made = pack_linear(kernels, packable, dtype=packed.dtype, threads=threads, allocate=self._allocate, **options)
            packed.linears[stem] = made.with_bias_of(packed.linears.get(stem))
        else:
            options |= {"dtype": packed.dtype, "threads": threads, "allocate": self._allocate}
            packed.grouped[stem] = pack_linears(kernels, parts, count, **options).with_biases_of(packed.grouped.get(stem))

    def _pack_router(self, stem: str, parts: Sequence[Array]) -> None:
        """The gate of the shared experts is the last row of the router. Never quantised, and wide if the checkpoint has it so."""
        packed, workspace = self._packed, self._workspace
        wide = any(part.dtype != packed.dtype for part in parts)
        packable = [part.astype(np.float32) for part in parts] if wide else parts
        router = pack_linear(workspace.kernels, packable, dtype=packed.dtype, threads=workspace.threads, float32=wide)
        packed.linears[stem] = router.with_bias_of(packed.linears.get(stem))


def _set_router_bias(router: PackedLinear, bias: NDArray[np.float32]) -> None:
    router.set_bias(np.pad(bias, (0, router.out_features - len(bias))))


def _floats(arrays: Sequence[Array]) -> NDArray[np.float32]:
    """Arrays one after another, in float32."""
    return np.concatenate(arrays, dtype=np.float32)


_A_ROWS = 4  # that are multiplied together
_COLUMNS = 16  # of a block of B
_ALIGNMENT = 64  # bytes


def pack_adapter(weights: PackedWeights, numbers: Mapping[str, int], adapter: Adapter) -> PackedCpuAdapter:
    """`numbers` of the matrices that adapters add to, by name. Takes its own memory alone, so it can run beside steps.

    Raises AdapterError for an adapter of another parameter or shape.
    """
    packings = []
    for name, parts in adapter.parts.items():
        number = numbers.get(name)
        if number is None or (number != EMBEDDING and name not in weights.linears):
            raise AdapterError(f"adapters cannot be added to {name}")
        if number == EMBEDDING:
            shape, interleaved = (weights.spec.hidden_size, weights.spec.vocab_size), False
        else:
            linear = weights.linears[name]
            shape, interleaved = (linear.out_features, linear.in_features), linear.interleaved
        packings.append(_Packing(name, number, parts, shape, _rows_of_columns(shape[0], interleaved), weights.dtype))
    memory = lazy_bytes(sum(packing.nbytes for packing in packings))
    matrices, first = {}, 0
    for packing in packings:
        matrices[packing.number] = packing.write(memory[first : first + packing.nbytes])
        first += packing.nbytes
    return PackedCpuAdapter(memory, matrices, len(numbers))


@dataclass
class _Packing:
    name: str
    number: int
    parts: Sequence[LowRankPart]
    shape: tuple[int, int]  # of the parameter
    rows: NDArray[np.int64]  # [blocks, 16], of the packed columns; -1: padding
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        of_row = np.full(self.shape[0] + 1, -1)  # the part of each row; the last is that of padding
        for number, part in enumerate(self.parts):
            rank, rows = len(part.a), part.rows
            if part.a.shape[1] != self.shape[1] or part.b.shape != (len(rows), rank) or rows.stop > self.shape[0]:
                found = f"{list(part.a.shape)} and {list(part.b.shape)}, which are added to rows {rows.start} to {rows.stop - 1}"
                raise AdapterError(f"{self.name} of shape {list(self.shape)} does not fit an adapter of shapes {found}")
            of_row[rows.start : rows.stop] = number
        ranks = [len(part.a) for part in self.parts]
        self.firsts = np.cumsum([0, *ranks])  # of the rows of A of each part, and the end
        parts = of_row[self.rows]
        self.last = parts.max(1)  # of the parts of each block; -1: it has none
        self.first = np.where(parts < 0, len(ranks), parts).min(1)
        counts = np.where(self.last < 0, 0, self.firsts[self.last + 1] - self.firsts[np.minimum(self.first, self.last)])
        self.blocks = np.zeros(len(self.rows), np.dtype(CLowRankBlock))
        self.blocks["row"] = np.cumsum(counts) - counts
        self.blocks["first"] = np.where(self.last < 0, 0, self.firsts[np.maximum(self.first * (self.last >= 0), 0)])
        self.blocks["count"] = counts
        self.size = -(-int(self.firsts[-1]) // _A_ROWS) * _A_ROWS
        width = self.shape[1]
        self.a_shape = (width, self.size) if self.number == EMBEDDING else (self.size, -(-width // BLOCK) * BLOCK)
        self.b_shape = (int(counts.sum()), _COLUMNS)

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        """Bytes of A, B and the blocks."""
        item = self.dtype.itemsize
        sizes = (math.prod(self.a_shape) * item, math.prod(self.b_shape) * item, self.blocks.nbytes)
        return [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]

    def write(self, memory: NDArray[np.uint8]) -> CLowRank:
        """Write the matrices and blocks to `memory`, which holds zeros, and return the struct that points into it."""
        begin = np.cumsum([0, *self._sizes])
        a, b = (
            memory[at : at + math.prod(shape) * self.dtype.itemsize].view(self.dtype).reshape(shape)
            for at, shape in zip(begin, (self.a_shape, self.b_shape), strict=False)
        )
        memory[begin[2] : begin[2] + self.blocks.nbytes] = self.blocks.view(np.uint8)
        wide = a.T if self.number == EMBEDDING else a
        for number, (part, first) in enumerate(zip(self.parts, self.firsts, strict=False)):
            rank = len(part.a)
            wide[first : first + rank, : self.shape[1]] = part.a
            self._write_b(b, number, part, rank)
        return CLowRank(*(memory[at:].ctypes.data for at in begin[:3]), self.size)

    def _write_b(self, b: Array, number: int, part: LowRankPart, rank: int) -> None:
        blocks = np.flatnonzero((self.first <= number) & (number <= self.last))
        rows = self.rows[blocks] - part.rows.start
        columns = np.concatenate((part.b.astype(self.dtype), np.zeros((1, rank), self.dtype)))
        of_blocks = columns[np.where((rows >= 0) & (rows < len(part.rows)), rows, len(part.rows))]
        firsts = self.blocks["row"][blocks].astype(np.int64) + self.firsts[number] - self.blocks["first"][blocks]
        b[firsts[:, None] + np.arange(rank)] = of_blocks.swapaxes(1, 2)


def _rows_of_columns(out_features: int, interleaved: bool) -> NDArray[np.int64]:
    """Return the row of the parameter in each packed column, as `row_of_column` of `src/packing.h`: [blocks, 16]; -1: padding."""
    width = out_features // 2 if interleaved else out_features
    per_panel = PANEL // 2 if interleaved else PANEL
    places = np.arange(-(-width // per_panel) * per_panel)
    rows = np.where(places < width, places, -1).reshape(-1, _COLUMNS)
    if not interleaved:
        return rows
    return np.stack((rows, np.where(rows < 0, -1, rows + width)), axis=1).reshape(-1, _COLUMNS)
