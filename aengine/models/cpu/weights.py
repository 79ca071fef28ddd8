"""`PackedWeights`: the weights of a model as the CPU kernels read them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from aengine.kernels.cpu.library import Workspace
from aengine.kernels.cpu.packed_codes import quantize_matrix
from aengine.kernels.cpu.packing import PackedLinear, PackedLinears, are_packable, as_packable
from aengine.kernels.quantized import QuantizedRows, Rows
from aengine.kernels.warm_memory import Allocate
from aengine.models.loading.hub import shortened
from aengine.models.named_weights import NEVER_QUANTIZED
from aengine.models.sharding import WeightPart, own, sharded_spec, sharded_weights, take_part, vocab_bounds
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import WHOLE, Shard

_log = logging.getLogger("aengine")
_TABLES = ("embedding", "positions")  # rows are read by number


class PackedWeights:
    """Each kind under the names of `named_weights`; those of matrices and tables without `.weight`."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, shard: Shard = WHOLE) -> None:
        """`spec`: of the whole model; the weights are those of `sharded_weights(spec, shard)`."""
        self.spec = sharded_spec(spec, shard)
        self.whole_spec = spec
        self.shard = shard
        self._expected = sharded_weights(spec, shard)
        self._head = WeightPart("head.weight", (), (own(vocab_bounds(spec, shard), shard),))
        self.dtype = dtype
        self.linears: dict[str, PackedLinear] = {}  # with their biases; `head` is there if it is tied, too
        self.grouped: dict[str, PackedLinears] = {}  # of experts and of heads
        self.tables: dict[str, Tensor] = {}  # not packed
        self.vectors: dict[str, Tensor] = {}  # float32, among them the biases of norms
        self._shared: set[str] = set()
        self._routers: dict[str, list[Tensor]] = {}
        self._dequantized: list[str] = []

    @property
    def nbytes(self) -> int:
        """Without the tables, which may be mapped from files."""
        linears = sum(weight.nbytes for weight in self.linears.values()) + sum(weights.nbytes for weights in self.grouped.values())
        return linears + sum(vector.nbytes for vector in self.vectors.values())

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

    def take(self, workspace: Workspace, weights: Iterable[tuple[str, Sequence[Rows]]], quantization: str, allocate: Allocate) -> None:
        """Packs each of `weights` as it comes, in the order of `sharded_weights`.

        Raises ValueError for weights that are missing, unknown or of another shape.
        """
        missing = dict(self._expected)
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
            tensors = [part for part in parts if isinstance(part, Tensor)]  # all of a bias or vector: those are never quantised
            if kind == "bias" and stem in self.linears:
                self.linears[stem].set_bias(tensors)
            elif kind == "bias" and stem in self.grouped:
                self.grouped[stem].set_biases(tensors)
            elif flat:
                self.vectors[name] = torch.cat(tensors).float()
            else:
                count = expected.shape[0] if len(expected.shape) == 3 else None
                self._take_matrix(workspace, stem, parts, count, quantization, allocate)
        if missing:
            raise ValueError(f"{next(iter(missing))} is missing")
        while self._routers:
            self._pack_router(workspace, *self._routers.popitem())
        if self._dequantized:
            _log.warning(
                "no kernel has a format for these quantised matrices, which are as wide as activations: %s", shortened(self._dequantized)
            )

    def _take_matrix(
        self, workspace: Workspace, stem: str, rows: Sequence[Rows], count: int | None, quantization: str, allocate: Allocate
    ) -> None:
        """`count`: of how many matrices the rows are; None: of one."""
        if stem in _TABLES:
            table = _dequantized(rows, self.dtype)
            self.tables[stem] = (table[0] if len(table) == 1 else torch.cat(table)).to(self.dtype).contiguous()
            if stem != "embedding" or not self.spec.tied_head:
                return
            stem, rows = "head", take_part(rows, self._head)
        layer, _, name = stem.rpartition(".")
        if name in ("router", "shared_gate"):
            self._routers.setdefault(f"{layer}.router", []).extend(_dequantized(rows, torch.float32))
            return
        quantizable = name not in NEVER_QUANTIZED
        in_int8 = quantization == "int8" or (quantization == "int4" and stem == "head")
        if quantizable and not in_int8 and quantization != "none":
            rows = [quantize_matrix(workspace, part, quantization) if isinstance(part, Tensor) else part for part in rows]
        # What the kernels have no format for, such as parts with groups of several sizes, is as wide as the activations.
        has_codes = quantizable and are_packable(rows, count)
        if quantizable and not has_codes and any(isinstance(part, QuantizedRows) for part in rows):
            self._dequantized.append(stem)
        parts: Sequence[Rows] = rows if has_codes else _dequantized(rows, self.dtype)
        kernels, dtype, threads = workspace.kernels, self.dtype, workspace.threads
        options: dict[str, Any] = {"interleaved": name == "gate_up", "int8": quantizable and in_int8 and not has_codes}
        if has_codes:
            options["float32"] = dtype is torch.float32  # then activations are not quantised either
        if count is None:
            packable = as_packable(parts, dtype)
            self.linears[stem] = PackedLinear(kernels, packable, dtype=dtype, threads=threads, allocate=allocate, **options)
        else:
            self.grouped[stem] = PackedLinears(kernels, parts, count, dtype=dtype, threads=threads, allocate=allocate, **options)

    def _pack_router(self, workspace: Workspace, stem: str, parts: Sequence[Tensor]) -> None:
        """The gate of the shared experts is the last row of the router. Never quantised, and wide if the checkpoint has it so."""
        wide = any(part.dtype is not self.dtype for part in parts)
        packable = [part.float() for part in parts] if wide else parts
        router = PackedLinear(workspace.kernels, packable, dtype=self.dtype, threads=workspace.threads, float32=wide)
        bias = self.vectors.pop(f"{stem}.bias", None)
        if bias is not None:
            router.set_bias([bias, bias.new_zeros(router.out_features - len(bias))])
        self.linears[stem] = router


def _dequantized(rows: Sequence[Rows], dtype: torch.dtype) -> list[Tensor]:
    """Return parts that are quantised as tensors of `dtype`, the others as they are."""
    return [part if isinstance(part, Tensor) else part.dequantized(dtype) for part in rows]
