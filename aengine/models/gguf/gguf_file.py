"""`GgufFile`: the metadata and the tensors of a GGUF file, mapped, with every count, length and offset checked against the file.

A model may be cut into several files. Beside these it knows which tokens end a text, and nothing of what other metadata mean or of how a
block of a quantised type is made. Imports no torch.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.models.model_files import mapped, require_regular

TYPES: Mapping[int, tuple[str, int, int]] = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176)},
    **{14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50)},
    **{20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 28: ("F64", 1, 8)},
    **{29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17)},
}
"""Number of a type in the file -> its name, the values of a block, the bytes of a block."""
BLOCKS = {name: (values, size) for name, values, size in TYPES.values()}
"""Name of a type -> the values and the bytes of a block."""
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a kind of values in the metadata -> its struct code."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_MAX_NAME = 200
_MIN_STRING, _MIN_TENSOR = 8, 8 + 4 + 8 + 4 + 8  # bytes
_LENGTH = struct.Struct("<Q")
_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")
"""The name of one of several files: the number of the part, from 1, and how many there are."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    shape: tuple[int, ...]  # the slowest dimension first, as torch has it
    type: str  # a key of `BLOCKS`
    data: NDArray[np.uint8]  # [bytes], mapped

    @property
    def rows(self) -> NDArray[np.uint8]:
        """The bytes of each row: [rows, bytes of a row]."""
        return self.data.reshape(math.prod(self.shape[:-1]), -1)


class LazyStrings(Sequence[str]):
    """An array of strings, each of which is decoded when it is asked for: most readers of a file need no vocabulary."""

    def __init__(self, data: mmap.mmap, ends: array[int], start: int, what: str) -> None:
        """`start`: where the length of the first one stands; `ends`: where each one ends."""
        self._data, self._ends, self._start, self._what = data, ends, start, what

    def __len__(self) -> int:
        return len(self._ends)

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"

    def __iter__(self) -> Iterator[str]:
        data, start = self._data, self._start
        for number, end in enumerate(self._ends):
            try:
                yield data[start + _MIN_STRING : end].decode()
            except UnicodeDecodeError as error:
                raise self._not_text(number) from error
            start = end

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Raises ModelLoadError for a string that is not UTF-8."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = range(len(self._ends))[index]
        start = (self._ends[index - 1] if index else self._start) + _MIN_STRING
        try:
            return self._data[start : self._ends[index]].decode()
        except UnicodeDecodeError as error:
            raise self._not_text(index) from error

    def _not_text(self, index: int) -> ModelLoadError:
        return ModelLoadError(f"{self._what} has an entry {index} that is not UTF-8")


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: pathlib.Path
    metadata: Mapping[str, Any]  # arrays of numbers are NumPy arrays, those of strings `LazyStrings`
    tensors: Mapping[str, GgufTensor]

    def has(self, ending: str) -> bool:
        """Whether the name of a tensor ends so."""
        return any(name.endswith(ending) for name in self.tensors)

    def get(self, key: str, kind: type | tuple[type, ...], fallback: Any = None) -> Any:
        """A value of the metadata; `fallback` if it is absent. Raises ModelLoadError for one that is not of `kind`."""
        value = self.metadata.get(key, fallback)
        if value is not fallback and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise ModelLoadError(f"{key} in {self.path} is {_shown(value)}, which it cannot be")
        return value

    @property
    def architecture(self) -> str:
        """Raises ModelLoadError if there is none."""
        name = self.get("general.architecture", str)
        if name is None:
            raise ModelLoadError(f"{self.path} has no general.architecture")
        return str(name)


def is_gguf(path: pathlib.Path) -> bool:
    """Whether a model is one file of this format, by its name."""
    return path.suffix == ".gguf"


def open_gguf(path: pathlib.Path) -> GgufFile:
    """A file, or all parts of a model of which it is one. Raises ModelLoadError for a file that cannot be read, is of another format or
    version, is cut off, or lies about its contents, and for parts that are missing or do not belong together."""
    file = _read(path)
    return file if file.get("split.count", int, 1) <= 1 else _joined(file)


def _read(path: pathlib.Path) -> GgufFile:
    try:
        return _Reader(path).file()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error


def _joined(given: GgufFile) -> GgufFile:
    """The first part has the metadata of the model; all have `split.count`, and their number as `split.no`."""
    path, count = given.path, given.metadata["split.count"]
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise ModelLoadError(f"{path} is one of {count} files of a model, but is not called NAME-00001-of-{count:05}.gguf")
    paths = [path.with_name(f"{named[1]}{number:05}-of-{named[3]}.gguf") for number in range(1, count + 1)]
    missing = next((part for part in paths if not part.exists()), None)
    if missing is not None:
        raise ModelLoadError(f"{missing} is missing: {path} is one of {count} files of a model")
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(paths):
        file = _read(part)
        described = file.get("split.no", int), file.get("split.count", int)
        if described != (number, count):
            raise ModelLoadError(f"{part} has split.no {described[0]} and split.count {described[1]} instead of {number} and {count}")
        if repeated := tensors.keys() & file.tensors.keys():
            raise ModelLoadError(f"{part} has the tensor {min(repeated)}, which another file of the model has too")
        tensors.update(file.tensors)
        if not number:
            given = file
    total = given.get("split.tensors.count", int, len(tensors))
    if total != len(tensors):
        raise ModelLoadError(f"the {count} files of {path} have {len(tensors)} tensors, but split.tensors.count is {total}")
    return replace(given, tensors=tensors)


def _shown(value: Any) -> str:
    return f"an array of {len(value)} values" if isinstance(value, LazyStrings | np.ndarray) else f"{str(value)[:40]!r}"


class _Reader:
    """Reads a file from its start to the end of the list of its tensors."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        require_regular(path)
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
            self._bytes = mapped(file)
        self._at = 4

    def file(self) -> GgufFile:
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"{self._path} is of version {version} of GGUF (or big-endian); supported are {_VERSIONS[0]} and {_VERSIONS[1]}"
            )
        num_tensors = self._count("the count of tensors", _MIN_TENSOR)
        num_keys = self._count("the count of metadata", _MIN_STRING + 4)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name("a key of the metadata")
            if key in metadata:
                raise self._error(f"has {key} twice")
            metadata[key] = self._value(self._number("I", key), key)
        listed = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise self._error(f"has general.alignment {alignment!r}, which is not a positive multiple of 8")
        start = -(-self._at // alignment) * alignment
        data = np.frombuffer(self._bytes, dtype=np.uint8)
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in listed:
            values, size = BLOCKS[kind]
            nbytes = math.prod(shape) // values * size
            if name in tensors:
                raise self._error(f"has the tensor {name} twice")
            if offset % alignment:
                raise self._error(f"has {name} at offset {offset}, which is not a multiple of its alignment {alignment}")
            if start + offset + nbytes > len(data):
                raise self._error(f"is cut off: {name} ends at byte {start + offset + nbytes}, and the file at {len(data)}")
            tensors[name] = GgufTensor(shape, kind, data[start + offset : start + offset + nbytes])
        return GgufFile(self._path, metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape, type and offset."""
        name = self._name("the name of a tensor")
        dimensions = self._number("I", name)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"has {name} with {dimensions} dimensions; a tensor has 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._number("Q", name) for _ in range(dimensions))[::-1]
        number, offset = self._number("I", name), self._number("Q", name)
        if number not in TYPES:
            raise self._error(f"has {name} in type {number}, which is not supported; supported are {', '.join(BLOCKS)}")
        kind, values, _ = TYPES[number]
        if 0 in shape or shape[-1] % values:
            raise self._error(f"has {name} of shape {list(shape)} in {kind}, whose blocks of {values} values do not fill its rows")
        return name, shape, kind, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            number = self._number(_NUMBERS[kind], key)
            return float(str(np.float32(number))) if _NUMBERS[kind] == "f" else number  # 1e-6, not the nearest float32
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise self._error(f"has {key} of kind {kind}, which is not one of GGUF's")
        kind = self._number("I", key)
        if kind == _STRING:
            return self._strings(key)
        if kind not in _NUMBERS:
            raise self._error(f"has {key} with values of kind {kind}; supported are arrays of numbers and of strings")
        dtype = np.dtype("<" + _NUMBERS[kind])
        count = self._count(f"the length of {key}", dtype.itemsize)
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype=dtype)

    def _strings(self, key: str) -> LazyStrings:
        count = self._count(f"the length of {key}", _MIN_STRING)
        start = at = self._at
        ends, read_length = array("Q"), _LENGTH.unpack_from
        try:
            for _ in range(count):
                at += _MIN_STRING + read_length(self._bytes, at)[0]
                ends.append(at)
        except (struct.error, OverflowError):
            at = len(self._bytes) + 1
        if at > len(self._bytes):
            raise self._error(f"is cut off or lies: entry {max(len(ends) - 1, 0)} of {key} does not end in it")
        self._at = at
        return LazyStrings(self._bytes, ends, start, f"{key} in {self._path}")

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code), what))[0]

    def _name(self, what: str) -> str:
        name = self._string(what)
        if len(name) > _MAX_NAME or not name.isprintable():
            raise self._error(f"has {what} that is longer than {_MAX_NAME} characters or not printable: {name[:40]!r}")
        return name

    def _string(self, what: str) -> str:
        text = self._take(self._count(f"the length of {what}", 1), what)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"has {what} that is not UTF-8") from error

    def _count(self, what: str, size: int) -> int:
        """A count of things that have at least `size` bytes each."""
        count = int(self._number("Q", what))
        if count * size > len(self._bytes) - self._at:
            raise self._error(f"is cut off or lies: {what} is {count}, and {len(self._bytes) - self._at} bytes are left")
        return count

    def _take(self, size: int, what: str) -> bytes:
        if size > len(self._bytes) - self._at:
            raise self._error(f"is cut off in {what}")
        self._at += size
        return self._bytes[self._at - size : self._at]

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} {what}")


_ENDS = ("eos", "eot", "eom")
_END_TEXTS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<EOT>",
        "<|END_OF_TURN_TOKEN|>",
    ]
)
"""Control tokens that end a turn in the chats of some model, which a file need not name otherwise."""
_CONTROL = 3


def end_tokens(file: GgufFile) -> list[int]:
    """The ids of the tokens that end a text or a turn, ascending."""
    named = [file.get(f"tokenizer.ggml.{name}_token_id", int) for name in _ENDS]
    ids = {token_id for token_id in named if token_id is not None}
    tokens, kinds = file.get("tokenizer.ggml.tokens", LazyStrings, ()), file.get("tokenizer.ggml.token_type", np.ndarray, np.zeros(0))
    ids.update(int(number) for number in np.flatnonzero(kinds[: len(tokens)] == _CONTROL) if tokens[number] in _END_TEXTS)
    return sorted(ids)
