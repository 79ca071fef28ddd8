"""`Rule`: which modules a scheme is for, and helpers to read the values that say so.

`Scheme`: how a module's quantised weight is stored; the base of all formats, and what they have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aengine.api.errors import ModelLoadError
from aengine.kernels.quantized import QuantizedRows
from aengine.models.config.reader import ConfigReader
from aengine.models.quantization.expressions import Expression

LINEAR, EMBEDDING = "Linear", "Embedding"
"""Kinds of modules, by the names of torch's classes."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The first rule that applies to a module decides."""

    target: str | Expression  # the module's name, its kind, or a regular expression of its whole name
    scheme: Scheme | None  # None: it is not quantised

    def applies(self, module: str, kind: str) -> bool:
        if isinstance(self.target, str):
            return self.target in (module, kind)
        return self.target.matches(module)


def one_of(reader: ConfigReader, key: str, *supported: Any, fallback: Any = None) -> Any:
    """The value of a key, `fallback` if it is absent. Raises ModelLoadError for one that is not supported."""
    value = reader.get(key, fallback)
    if value not in supported:
        names = ", ".join(map(str, supported))
        raise ModelLoadError(f"{key} {value!r} in quantization_config is not supported; supported are {names}")
    return value


def names_of(reader: ConfigReader, key: str) -> list[str]:
    """Return the list of names under a key; empty if it is absent. Raises ModelLoadError."""
    names = reader.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"{key} {names!r} in quantization_config is not a list of names")
    return names


def block_sizes(reader: ConfigReader, key: str) -> tuple[int | None, int | None]:
    """Rows and columns that share a scale; None, None if the key is absent: all of them do."""
    block = reader.get(key)
    if block is None:
        return None, None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ModelLoadError(f"{key} {block!r} in quantization_config is not a list of two positive integers")
    return block[0], block[1]


Shape = tuple[int, ...]
SCALES = ("float32", "float16", "bfloat16")  # dtypes


@dataclass(frozen=True, slots=True)
class Stored:
    """What a tensor of a checkpoint must be."""

    shapes: tuple[Shape, ...]  # any of these; none: any shape
    dtypes: tuple[str, ...]  # any of these, by the names of `StoredTensor`
    optional: bool = False
    other_name: str | None = None  # in some checkpoints


class Scheme(ABC):
    """One format with its settings. A module's weight is [..., out_features, in_features]; its tensors are named by what their names have
    behind the module's, such as `.qweight`."""

    @abstractmethod
    def scale_columns(self) -> int | None:
        """How many consecutive columns share a scale; None: all of them."""

    @abstractmethod
    def tensors(self, shape: Shape) -> dict[str, Stored]:
        """Return what the tensors of a module must be whose weight has this shape, by the ends of their names. Raises ValueError for a
        shape that the format cannot have, for example with columns that groups do not divide."""

    @abstractmethod
    def rows(self, shape: Shape, tensors: Mapping[str, Tensor]) -> QuantizedRows:
        """All rows, of tensors that are as `tensors` says. Raises ValueError naming the tensor whose numbers cannot be."""


def matrix(shape: Shape) -> tuple[int, int]:
    """Return out_features and in_features. Raises ValueError for the weight of several experts."""
    if len(shape) != 2:
        raise ValueError(f"a weight {list(shape)} of all experts together is not supported in this format")
    return shape[0], shape[1]


def num_groups(columns: int, group_size: int | None) -> int:
    """Return how many groups of `group_size` columns there are; None: one of all. Raises ValueError if they do not divide the columns."""
    if group_size is None:
        return 1
    if columns % group_size:
        raise ValueError(f"groups of {group_size} do not divide its {columns} columns")
    return columns // group_size


def num_words(count: int, bits: int, what: str) -> int:
    """Return how many 32-bit words `count` codes fill. Raises ValueError, which calls the codes `what`, if they do not fill the last."""
    if count * bits % 32:
        raise ValueError(f"{count} {what} of {bits} bits do not fill words of 32 bits")
    return count * bits // 32


def unpacked(words: Tensor, bits: int) -> Tensor:
    """[n, words] int32 or uint8 of codes of 4 or 8 bits, the lowest bits first -> [n, codes] uint8."""
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def integer_rows(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, bits: int, group_size: int | None, order: Tensor | None = None
) -> QuantizedRows:
    """value = (code - zero) * scale, of [rows, columns] uint8 codes and [rows, groups] zeros and scales; groups are of columns in `order`.

    Zeros that are None are all the middle, 2 ** (bits - 1); 8-bit codes of those become signed numbers.
    """
    if order is not None:
        codes = codes[:, order]
    scales, middle, offsets = scales.float().contiguous(), 1 << (bits - 1), None
    if bits == 8 and (zeros is None or bool((zeros == middle).all())):
        codes = (codes ^ middle).view(torch.int8)
    else:
        offsets = -scales * (middle if zeros is None else zeros.float())
    return QuantizedRows(codes.contiguous(), scales, group_size or codes.shape[1], bits, offsets, order=order)


def column_order(groups: Tensor, group_size: int | None, name: str) -> Tensor | None:
    """The columns sorted by their group, [columns] int64, of each column's group; None if they are sorted already.

    Raises ValueError for groups that do not have `group_size` columns each.
    """
    columns = len(groups)
    expected = torch.arange(columns) // (group_size or columns)
    groups = groups.long()
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise ValueError(
            f"{name} does not have {group_size or columns} columns in each of {math.ceil(columns / (group_size or columns))} groups"
        )
    return order
