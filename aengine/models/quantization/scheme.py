"""`Rule`: which modules a scheme is for, and helpers to read the values that say so.

`Scheme`: how a module's quantised weight is stored; the base of all formats, and what they have in common.

`Expression`: a regular expression of a quantization_config or an adapter_config.json, compared in bounded time.

Python's `re` tries one way to match after the other, so a short expression can take longer than anybody waits. Expressions with more than
four repeats, or repeats within repeats, are therefore followed in all ways at once, which is slower: as sets of places that are reached.
"""

from __future__ import annotations

import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import Array
from aengine.kernels.quantized import QuantizedRows
from aengine.models.config.reader import ConfigReader

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
    def rows(self, shape: Shape, tensors: Mapping[str, Array]) -> QuantizedRows:
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


def kept_bits(bits: int) -> int:
    """How many bits kernels keep of a code that has so many: as few as they can."""
    return {3: 4, 5: 6}.get(bits, bits)


def unpacked(words: Array, bits: int) -> Array:
    """[n, words] of 32 bits, or bytes, of codes of 2 to 8 bits, the lowest bits first -> [n, codes] uint8. Codes of 3, 5 and 6 bits cross
    words."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    if 8 % bits:
        by_code = np.unpackbits(packed, axis=-1, bitorder="little").reshape(len(packed), -1, bits)
        found: Array = np.bitwise_or.reduce(by_code << np.arange(bits, dtype=np.uint8), axis=-1)
        return found
    codes = np.empty((*packed.shape, 8 // bits), np.uint8)
    for number in range(8 // bits):
        np.right_shift(packed, bits * number, out=codes[..., number])
    np.bitwise_and(codes, (1 << bits) - 1, out=codes)
    return codes.reshape(len(packed), -1)


def integer_rows(
    codes: Array, zeros: Array | None, scales: Array, bits: int, group_size: int | None, order: Array | None = None
) -> QuantizedRows:
    """value = (code - zero) * scale, of [rows, columns] uint8 codes and [rows, groups] zeros and scales; groups are of columns in `order`.

    Zeros that are None are all the middle, 2 ** (bits - 1); 8-bit codes of those become signed numbers.
    """
    if order is not None:
        codes = codes[:, order]
    scales, middle, offsets = np.ascontiguousarray(scales, np.float32), 1 << (bits - 1), None
    if bits == 8 and (zeros is None or bool((zeros == middle).all())):
        codes = (codes ^ middle).view(np.int8)
    else:
        offsets = -scales * (middle if zeros is None else zeros.astype(np.float32))
    return QuantizedRows(np.ascontiguousarray(codes), scales, group_size or codes.shape[1], kept_bits(bits), offsets, order=order)


def column_order(groups: Array, group_size: int | None, name: str) -> Array | None:
    """The columns sorted by their group, [columns] int64, of each column's group; None if they are sorted already.

    Raises ValueError for groups that do not have `group_size` columns each.
    """
    columns = len(groups)
    expected = np.arange(columns) // (group_size or columns)
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], expected):
        raise ValueError(
            f"{name} does not have {group_size or columns} columns in each of {math.ceil(columns / (group_size or columns))} groups"
        )
    return order


if sys.version_info >= (3, 11):
    from re import _parser as sre_parse  # type: ignore[attr-defined]
else:
    import sre_parse

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_CLASSES = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}
_MOST_CHARACTERS = 1000
_MOST_REPEATS, _MOST_CHOICES, _LONGEST_NAME = 4, 10, 128
"""Of an expression that `re` compares, and the characters of names that it is compared with."""
_MOST_STEPS = 4_000_000
"""Most steps that all comparisons of one expression take, or those of all expressions that share their work: some five seconds."""


@dataclass(slots=True)
class _Work:
    left: int  # steps


def share_work(expressions: Iterable[Expression]) -> None:
    """Have all of these expressions together take no longer than one of them may."""
    work = _Work(_MOST_STEPS)
    for expression in expressions:
        expression._work = work


class Expression:
    def __init__(self, pattern: str, where: str = "quantization_config") -> None:
        """`where`: what errors say has it. Raises ModelLoadError for what is no regular expression, or one that cannot be compared in
        bounded time."""
        self._pattern, self._where = pattern, where
        self._work = _Work(_MOST_STEPS)
        if len(pattern) > _MOST_CHARACTERS:
            raise self._refused(f"has more than {_MOST_CHARACTERS} characters")
        try:
            self._compiled = re.compile(pattern)
            self._tree: Any = sre_parse.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._refused(f"is not a regular expression: {error}") from error
        self._is_quick = _is_quick(self._tree)
        if not self._is_quick and self._compiled.flags & ~re.UNICODE:
            raise self._refused("has flags and too many repeats, which is not supported")

    def matches(self, name: str) -> bool:
        """Whether it is an expression of the whole name. Raises ModelLoadError where that takes too long."""
        if self._is_quick and len(name) <= _LONGEST_NAME:
            return self._compiled.fullmatch(name) is not None
        return len(name) in self._ends(self._tree, name, {0})

    def _ends(self, items: Iterable[tuple[Any, Any]], name: str, places: set[int]) -> set[int]:
        """Where what begins at one of the `places` can end."""
        for operation, value in items:
            self._work.left -= len(places) + 1
            if self._work.left < 0:
                raise self._refused("takes too long to compare")
            if not places:
                break
            places = self._step(str(operation), operation, value, name, places)
        return places

    def _step(self, kind: str, operation: Any, value: Any, name: str, places: set[int]) -> set[int]:
        if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            return {place + 1 for place in places if place < len(name) and _is_in(kind, value, name[place])}
        if kind == "BRANCH":
            return {end for branch in value[1] for end in self._ends(branch, name, places)}
        if kind == "SUBPATTERN":
            return self._ends(value[-1], name, places)
        if kind in _REPEATS:
            least, most, inner = value
            return self._repeated(least, most, inner, name, places)
        if kind in ("ASSERT", "ASSERT_NOT"):
            direction, inner = value
            width = 0 if direction > 0 else inner.getwidth()[0]
            found = {place for place in places if place >= width and self._ends(inner, name, {place - width})}
            return found if kind == "ASSERT" else places - found
        if kind == "AT" and str(value) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return places & {0}
        if kind == "AT" and str(value) in ("AT_END", "AT_END_STRING"):
            return places & {len(name)}
        raise self._refused(f"has too many repeats beside {kind.lower()}, which is not supported")

    def _repeated(self, least: int, most: int, inner: Any, name: str, places: set[int]) -> set[int]:
        for _ in range(least):
            before, places = places, self._ends(inner, name, places)
            if not places or places == before:
                break
        found, count = set(places), least
        while places and count < most:
            places = self._ends(inner, name, places) - found
            found |= places
            count += 1
        return found

    def _refused(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where} has {self._pattern[:200]!r}, which {why}")


def _is_quick(items: Iterable[tuple[Any, Any]]) -> bool:
    """Whether `re` has few ways to try: few repeats, with nothing in them that leaves a choice, and few choices beside them."""
    repeats, choices = _ways(items)
    return repeats <= _MOST_REPEATS and choices <= _MOST_CHOICES


def _ways(items: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    """How many repeats there are, and how many choices between two; more than are possible if repeats are not simple."""
    repeats = choices = 0
    for operation, value in items:
        kind, inner = str(operation), [_ways(part) for part in _parts(value)]
        if kind in ("GROUPREF", "GROUPREF_EXISTS"):
            repeats += _MOST_REPEATS + 1
        if kind == "BRANCH":
            choices += len(value[1]) - 1
        if kind.endswith("REPEAT"):
            least, most = value[:2]
            if most > 1 and any(map(any, inner)):
                repeats += _MOST_REPEATS + 1
            repeats += most > max(least, 1)
            choices += most > least
        repeats += sum(of_part for of_part, _ in inner)
        choices += sum(of_part for _, of_part in inner)
    return repeats, choices


def _parts(value: Any) -> list[Any]:
    """The expressions within one."""
    if isinstance(value, sre_parse.SubPattern):
        return [value]
    return [part for one in value for part in _parts(one)] if isinstance(value, list | tuple) else []


def _is_in(kind: str, value: Any, character: str) -> bool:
    if kind == "ANY":
        return character != "\n"
    if kind in ("LITERAL", "NOT_LITERAL"):
        return bool(ord(character) == value) == (kind == "LITERAL")
    negated = str(value[0][0]) == "NEGATE"
    found = any(_is_of(str(one), what, character) for one, what in value[negated:])
    return found != negated


def _is_of(kind: str, what: Any, character: str) -> bool:
    if kind == "CATEGORY":
        return re.match(_CLASSES[str(what).removeprefix("CATEGORY_")], character) is not None
    first, last = what if kind == "RANGE" else (what, what)
    return bool(first <= ord(character) <= last)
