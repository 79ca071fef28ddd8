"""Gives the named weights of a spec from a checkpoint: every parameter exactly once, and no other tensors; and the scales of an 8-bit KV
cache, one number for K and one for V of each layer, where the checkpoint has them.

`StoredPart`: the tensors of a checkpoint that a part of a parameter is read from; one, or those of a quantised module.

Owns the comparison of a checkpoint with a spec, the order of reading, the fusing of tensors, and what is told of the progress: a bar on a
terminal, now and then a line of the log elsewhere. Does not know how the weights are used.
"""

from __future__ import annotations

import logging
import math
import pathlib
import re
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.kernels.quantized import Rows
from aengine.models.families import FAMILIES
from aengine.models.gguf.gguf_file import BLOCKS, is_gguf
from aengine.models.loading.checkpoint import (
    DTYPES,
    Checkpoint,
    MappedPages,
    StoredTensor,
    WeightsDigest,
    are_finite,
    are_same,
    open_checkpoint,
    read_from_disk,
)
from aengine.models.loading.hub import LoadProgress, described_problems
from aengine.models.named_weights import NamedWeight, Part, kv_scale_of, named_weights
from aengine.models.quantization.quantization_config import Quantization, load_quantization
from aengine.models.quantization.scheme import EMBEDDING, LINEAR, Scheme, Stored
from aengine.models.sharding import WeightPart, cut, pieces, sharded_weights
from aengine.models.spec import ModelSpec
from aengine.models.text_part import text_names
from aengine.parallel.shard import WHOLE, Shard

_GGUF_SCALE = 32  # or 16


@dataclass(frozen=True, slots=True)
class StoredPart:
    part: Part
    scheme: Scheme | None  # None: the part is one tensor, as it is
    expected: Mapping[str, Stored]  # by name; those without dtypes are not read
    endings: Mapping[str, str]  # of the tensors that are read: name -> what it has behind the module's, as the scheme calls it

    @property
    def is_plain(self) -> bool:
        """Whether its rows are those of its tensor, as they are."""
        return self.scheme is None and self.part.transform is None

    def scale_columns(self, tensors: Mapping[str, StoredTensor]) -> int:
        """How many consecutive columns share a scale, of which parts of the rows are to be multiples; 1 if parts can be of any columns."""
        if self.scheme is not None:
            return self.scheme.scale_columns() or 1
        return _GGUF_SCALE if any(name in tensors and tensors[name].dtype in BLOCKS for name in self.endings) else 1

    def rows(self, tensors: Sequence[Rows]) -> Rows:
        """The rows of the parameter, of the tensors of `endings` in their order. Raises ModelLoadError for numbers that cannot be."""
        if self.scheme is None:
            return self.part.rows(tensors[0])
        named = {ending: tensor for ending, tensor in zip(self.endings.values(), tensors, strict=True) if isinstance(tensor, np.ndarray)}
        try:
            rows = self.scheme.rows(self.part.matrix_shape, named)
            if not are_finite(rows):
                raise ValueError("a product of its scales has numbers that are not finite")
            return self.part.rows(rows)
        except ValueError as error:
            raise ModelLoadError(f"the quantized weight of {_module(self.part)} is not what it should be: {error}") from error


def stored_parts(
    weights: Mapping[str, NamedWeight], quantization: Quantization | None, tensors: Mapping[str, StoredTensor]
) -> dict[str, tuple[StoredPart, ...]]:
    """Return what each parameter is read from, by its name, in a checkpoint that has `tensors`.

    A module is quantised if the config says so, unless the checkpoint has its weight in one of `DTYPES`: what a checkpoint leaves alone
    is not always listed.

    Raises ModelLoadError for a module whose shape the format of its weight cannot have.
    """
    sources = {part.source for weight in weights.values() for part in weight.parts}
    found = {}
    for name, weight in weights.items():
        kind = EMBEDDING if name in ("embedding.weight", "positions.weight") else LINEAR
        parts = []
        for part in weight.parts:
            is_matrix = len(part.shape) > 1 and not name.endswith(".bias")
            is_plain = part.source in tensors and tensors[part.source].dtype in DTYPES
            scheme = None
            if quantization is not None and name.endswith(".weight") and len(part.shape) > 1 and not is_plain:
                scheme = quantization.scheme(_module(part), kind)
            if scheme is None:
                expected = {part.source: Stored((part.shape,), (*DTYPES, *BLOCKS) if is_matrix else tuple(DTYPES))}
                parts.append(StoredPart(part, None, expected, {part.source: ""}))
            else:
                parts.append(_quantized(part, scheme, sources, tensors))
        found[name] = tuple(parts)
    return found


def _quantized(part: Part, scheme: Scheme, sources: Collection[str], tensors: Mapping[str, StoredTensor]) -> StoredPart:
    module = _module(part)
    try:
        described = scheme.tensors(part.matrix_shape)
    except ValueError as error:
        raise ModelLoadError(f"{module} cannot be stored as quantization_config says: {error}") from error
    expected, endings = {}, {}
    for ending, stored in described.items():
        name = module + ending
        if stored.other_name is not None and name not in tensors and module + stored.other_name in tensors:
            name = module + stored.other_name
        if stored.optional and (name not in tensors or (name in sources and name != part.source)):
            continue
        expected[name] = stored
        if stored.dtypes:
            endings[name] = ending
    return StoredPart(part, scheme, expected, endings)


def _module(part: Part) -> str:
    return part.source.removesuffix(".weight")


_log = logging.getLogger("aengine")
_AHEAD_BYTES = 128 << 20
_COMPARED_ROWS = 256
_RETURNED_BYTES = 32 << 20  # of mapped files that are given back together
_TOGETHER = (".router.weight", ".shared_gate.weight")
_MTP_KEYS = ("layer", "combine")
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")  # of the model's embedding and head, in its MTP layer


def open_weights(spec: ModelSpec, model_dir: pathlib.Path, load_format: str = "auto") -> Checkpoint:
    """The checkpoint of a model, `with_family_names`. Raises ModelLoadError."""
    return with_family_names(spec, open_checkpoint(model_dir, load_format))


def with_family_names(spec: ModelSpec, checkpoint: Checkpoint, whole: Checkpoint | None = None) -> Checkpoint:
    """With the names that the family has: its `other_names` replaced, and the first word of all names of the model where they lack it,
    because it was saved without its head (`h.0.` of GPT-2 is `transformer.h.0.`). A text part has no tensors of other parts. `whole`: the
    names of which the checkpoint has some; what they mean follows from all of them."""
    family = FAMILIES[spec.family]
    every = checkpoint if whole is None else Checkpoint({**whole.tensors, **checkpoint.tensors}, ())
    if spec.is_part:
        names = family.names["embedding"], family.names["head"], (spec.vocab_size, spec.hidden_size)
        every, checkpoint = text_tensors(every, *names), text_tensors(checkpoint, *names, every)
    first_word, dot, rest = family.names["embedding"].partition(".")
    is_bare = f"{rest}.weight" in every.tensors
    tensors: dict[str, StoredTensor] = {}
    duplicates = list(checkpoint.duplicates)
    for stored, tensor in checkpoint.tensors.items():
        name = family.own_name(stored)
        if is_bare and not name.startswith(f"{family.names['head']}."):
            name = first_word + dot + name
        for each, stored_tensor in _disjoined(family.joined, name, tensor):
            if each in tensors:
                duplicates.append(each)
            tensors[each] = stored_tensor
    return Checkpoint(tensors, tuple(duplicates))


def _disjoined(joined: Mapping[str, str], name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors that one for all experts of a layer stands for, or itself."""
    ending = next((ending for ending in joined if name.endswith(ending)), None)
    if ending is None or len(tensor.shape) != 3:
        yield name, tensor
        return
    ends = joined[ending].split()
    experts, rows, columns = tensor.shape[0], tensor.shape[1] // len(ends), tensor.shape[2]

    def get(expert: int, first: int) -> Rows:
        numbers: Rows = tensor.read_numbers()[expert][first : first + rows]
        return numbers

    for expert in range(experts):
        for number, end in enumerate(ends):
            part = replace(tensor, shape=(rows, columns), get=partial(get, expert, number * rows), part=None)
            yield name.removesuffix(ending) + end.format(index=expert), part


def text_tensors(
    checkpoint: Checkpoint, embedding: str, head: str, embedding_shape: tuple[int, ...], every: Checkpoint | None = None
) -> Checkpoint:
    """The tensors of its text part alone, by the names that a model of text alone has for them: see `text_names`, which is given `every`
    tensor. Raises ModelLoadError."""
    shapes = {name: tensor.shape for name, tensor in (every or checkpoint).tensors.items()}
    ours = text_names(shapes, embedding, head, embedding_shape)
    tensors = {ours[name]: tensor for name, tensor in checkpoint.tensors.items() if name in ours}
    return Checkpoint(tensors, tuple(ours[name] for name in checkpoint.duplicates if name in ours))


def has_own_head(spec: ModelSpec, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint, `with_family_names`, has an output head that is not its embedding."""
    names = FAMILIES[spec.family].names
    head, embedding = (checkpoint.tensors.get(f"{names[key]}.weight") for key in ("head", "embedding"))
    if head is None or embedding is None or head.shape != embedding.shape:
        return any(name.startswith(f"{names['head']}.") for name in checkpoint.tensors)
    rows = slice(_COMPARED_ROWS)  # `_check` compares them all
    return not are_same(head.read_numbers()[rows], embedding.read_numbers()[rows])


def unlike_modules(spec: ModelSpec, checkpoint: Checkpoint) -> list[str]:
    """The modules of a model, without its head, of which a checkpoint `with_family_names` has no tensor, quantised or not, or one that is
    not quantised and has another shape."""
    stored, modules = checkpoint.tensors, {name.rpartition(".")[0] for name in checkpoint.tensors}
    parts = [part for name, weight in named_weights(spec).items() if name != "head.weight" for part in weight.parts]
    absent = {part.source.rpartition(".")[0] for part in parts} - modules
    shaped = (part for part in parts if part.source in stored and stored[part.source].dtype in DTYPES)
    return sorted(absent | {part.source for part in shaped if stored[part.source].shape != part.shape})


def stored_weights(
    spec: ModelSpec,
    model_dir: pathlib.Path,
    load_format: str = "auto",
    quantization: Quantization | None = None,
    shard: Shard = WHOLE,
    report: Callable[[int, int], object] | None = None,
    digest: WeightsDigest | None = None,
) -> Iterator[tuple[str, tuple[Rows, ...]]]:
    """The `checkpoint_weights` of a model's directory or file."""
    described = f"the metadata of {model_dir.name}" if is_gguf(model_dir) else "its config.json"
    return checkpoint_weights(spec, open_weights(spec, model_dir, load_format), described, quantization, shard, report, digest)


def checkpoint_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    described: str,
    quantization: Quantization | None = None,
    shard: Shard = WHOLE,
    report: Callable[[int, int], object] | None = None,
    digest: WeightsDigest | None = None,
    partial: bool = False,
) -> Iterator[tuple[str, tuple[Rows, ...]]]:
    """Each of `sharded_weights(spec, shard)`, or `partial` those of which the checkpoint has something, with its parts: arrays of the
    checkpoint's dtype, mapped from its files where possible, or rows that are quantised as `quantization` says. A parameter is its
    parts one after another, viewed in its shape.

    The system reads the next tensors from the disk while the caller works; of tensors that are mapped and become rows as they are, only
    what the rank holds. How many bytes of how many are loaded is shown, or given to `report`. Raises ModelLoadError, before the first
    weight, naming all tensors that are missing, unexpected, stored twice, of another shape, or of a dtype that is not supported; and
    then, one by one, those of quantised modules whose numbers cannot be. Raises ConfigError for a shard that cuts quantised columns
    where they cannot be cut. `described`: where the spec is from, for the messages. What is read is added to the `digest`, while the
    caller works.
    """
    parts = stored_parts(named_weights(spec), quantization, checkpoint.tensors)
    if partial:
        parts = {name: each for name, each in parts.items() if _has_some(parts, name, checkpoint)}
        if not parts:
            raise ModelLoadError(f"the checkpoint has none of the weights that {described} has")
    _check(spec, parts, checkpoint, described, shard)
    held = {name: part for name, part in sharded_weights(spec, shard).items() if part.source_name in parts}
    readings = {name: _readings(part, parts[part.source_name], checkpoint) for name, part in held.items()}
    with ExitStack() as stack:
        progress = stack.enter_context(LoadProgress(sum(reading.nbytes for each in readings.values() for reading in each), report))
        pool = None if digest is None else stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="aengine-digest"))
        pages, unreturned = MappedPages(), 0
        for name, read in _read_ahead(readings):
            for reading, tensors in zip(readings[name], read, strict=True):
                reading.check(tensors)
                pages.note_rows(tensors[0], reading.tensors[0].file)
            made = tuple(rows for reading, tensors in zip(readings[name], read, strict=True) for rows in reading.rows(tensors))
            with nullcontext() if digest is None or pool is None else digest.adding(name, chain.from_iterable(read), pool):
                yield name, made
            nbytes = sum(reading.nbytes for reading in readings[name])
            progress.add_bytes(nbytes)
            unreturned += nbytes
            if unreturned > _RETURNED_BYTES:
                pages.give_back()
                unreturned = 0
        pages.give_back()


def _has_some(parts: Mapping[str, tuple[StoredPart, ...]], name: str, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has a tensor of a parameter, or of one that executors keep with it."""
    together = [name, *(name.replace(one, other) for one, other in (_TOGETHER, _TOGETHER[::-1]) if one in name)]
    return any(source in checkpoint.tensors for each in together for part in parts.get(each, ()) for source in part.expected)


def grouped(shard: Shard, spec: ModelSpec, model_dir: pathlib.Path, load_format: str = "auto") -> Shard:
    """The shard with the `group` of a checkpoint, so that the widths of MLPs are split between groups of quantised columns. Raises
    ModelLoadError."""
    quantization = None if shard.exact or load_format == "dummy" else load_quantization(model_dir)
    if quantization is None:
        return shard
    tensors = open_weights(spec, model_dir, load_format).tensors
    stored = stored_parts(named_weights(spec), quantization, tensors)
    split = (part for name, parts in stored.items() if name.endswith("down.weight") for part in parts)
    return replace(shard, group=math.lcm(*{part.scale_columns(tensors) for part in split}))


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is read of a checkpoint for one part of a parameter."""

    stored: StoredPart
    tensors: tuple[StoredTensor, ...]
    wanted: WeightPart
    pieces: tuple[range, ...]  # rows of the part

    def get(self) -> tuple[Rows, ...]:
        """To be read from the disk: the tensors, or what is held of one that is the rows as it is."""
        if not self.stored.is_plain:
            return tuple(tensor.get() for tensor in self.tensors)
        part = self.tensors[0].part
        if part is None or sum(map(len, self.pieces)) == self.stored.part.num_rows:
            return self._cut(self.tensors[0].get())
        return tuple(cut(part(piece), range(len(piece)), self.wanted) for piece in self.pieces)

    def check(self, read: tuple[Rows, ...]) -> None:
        """Raises ModelLoadError for numbers that are not finite."""
        names = list(self.stored.endings)
        for number, rows in enumerate(read):
            at = 0 if self.stored.is_plain else number
            if not are_finite(rows):
                raise ModelLoadError(f"{_where(names[at], self.tensors[at])} has numbers that are not finite")

    def rows(self, read: tuple[Rows, ...]) -> tuple[Rows, ...]:
        return read if self.stored.is_plain else self._cut(self.stored.rows(read))

    def _cut(self, rows: Rows) -> tuple[Rows, ...]:
        return tuple(cut(rows, piece, self.wanted) for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint that are read."""
        size = sum(tensor.nbytes for tensor in self.tensors)
        if not self.stored.is_plain:
            return size
        shape, columns = self.stored.part.shape, self.wanted.columns
        held = sum(map(len, self.pieces)) * (math.prod(shape[1:]) if columns is None else len(columns))
        return size * held // math.prod(shape)


def _where(name: str, tensor: StoredTensor) -> str:
    return name if tensor.file is None else f"{name} in {tensor.file}"


def _readings(wanted: WeightPart, parts: Sequence[StoredPart], checkpoint: Checkpoint) -> tuple[_Reading, ...]:
    held: dict[int, list[range]] = {}
    for number, rows in pieces([part.part.num_rows for part in parts], wanted):
        held.setdefault(number, []).append(rows)
    return tuple(
        _Reading(parts[number], tuple(checkpoint.tensors[source] for source in parts[number].endings), wanted, tuple(rows))
        for number, rows in held.items()
    )


def _read_ahead(readings: Mapping[str, tuple[_Reading, ...]]) -> Iterator[tuple[str, list[tuple[Rows, ...]]]]:
    """What each of `readings` gets, while another thread has the next `_AHEAD_BYTES` read from the disk. Without it loading from a disk
    takes 1.5 to 2 times as long, and as long if the files are in memory."""
    upcoming = iter(readings.items())
    ahead: deque[tuple[str, list[tuple[Rows, ...]]]] = deque()
    ahead_bytes = 0
    pool = ThreadPoolExecutor(1, thread_name_prefix="aengine-read")

    def fill() -> None:
        nonlocal ahead_bytes
        while ahead_bytes <= _AHEAD_BYTES and (entry := next(upcoming, None)) is not None:
            read = [reading.get() for reading in entry[1]]
            ahead.append((entry[0], read))
            ahead_bytes += _nbytes(read)
            pool.map(read_from_disk, chain.from_iterable(read))

    try:
        fill()
        while ahead:
            name, read = ahead.popleft()
            ahead_bytes -= _nbytes(read)
            fill()
            yield name, read
    finally:
        pool.shutdown(cancel_futures=True)


def _nbytes(read: Iterable[Iterable[Rows]]) -> int:
    return sum(rows.nbytes for each in read for rows in each)


def _is_ignored(name: str, spec: ModelSpec, stored: Container[str]) -> bool:
    """Whether a model has no use for a tensor of the checkpoint: an MTP layer is for heads alone, which have no use for anything else."""
    family = FAMILIES[spec.family]
    if re.fullmatch(family.ignored, name) or kv_scale_of(name, spec) is not None:  # these are read in weights.py
        return True
    if not family.mtp_names:
        return False
    head = spec.draft_head
    layer, combine = (family.mtp_names[key].format(layer=spec.num_layers if head is None else head.target_layers) for key in _MTP_KEYS)
    if head is None:
        return name.startswith(f"{layer}.") and f"{combine}.weight" in stored
    return not name.startswith(f"{layer}.") or name.removeprefix(layer) in _COPIES


def _check(spec: ModelSpec, parts: Mapping[str, tuple[StoredPart, ...]], checkpoint: Checkpoint, described: str, shard: Shard) -> None:
    """`described`: where the spec is from. Numbers are compared for the first rank alone."""
    stored = checkpoint.tensors
    family = FAMILIES[spec.family]
    head, embedding = (f"{family.names[name]}.weight" for name in ("head", "embedding"))
    expected = {name: tensor for each in parts.values() for part in each for name, tensor in part.expected.items()}
    present = {name for name in stored if name in expected or not _is_ignored(name, spec, stored)}
    stores_tied_head = spec.tied_head and head in present and embedding in expected
    if stores_tied_head:
        present.remove(head)
    used = sorted(expected.keys() & present)
    others = [name for name in used if expected[name].dtypes and stored[name].dtype not in expected[name].dtypes]
    plain = {part.part.source for each in parts.values() for part in each if part.scheme is None}
    problems = {
        "it lacks": sorted(expected.keys() - present),
        "it has unexpected": sorted(present - expected.keys()),
        "it has more than one": sorted(set(checkpoint.duplicates)),
        "it has other shapes than the config implies:": [
            f"{name} {list(stored[name].shape)} instead of {list(expected[name].shapes[0])}"
            for name in used
            if expected[name].shapes and stored[name].shape not in expected[name].shapes
        ],
        f"it has dtypes other than {', '.join(DTYPES)}:": [f"{name} {stored[name].dtype}" for name in others if name in plain],
        "it has other dtypes than its quantization_config implies:": [
            f"{name} {stored[name].dtype} instead of {' or '.join(expected[name].dtypes)}" for name in others if name not in plain
        ],
    }
    found = described_problems(problems)
    if found:
        raise ModelLoadError(f"the checkpoint does not match {described}: {found}")
    # A tied head may be stored too, but only with the values of the embedding.
    if stores_tied_head and shard.rank == 0 and not are_same(stored[head].read_numbers(), stored[embedding].read_numbers()):
        raise ModelLoadError(f"config.json ties the output head to the embedding, but the checkpoint's {head} differs from it")


def stored_kv_scales(spec: ModelSpec, model_dir: pathlib.Path, load_format: str = "auto") -> tuple[tuple[float, float], ...] | None:
    """The scales of K and V by layer, 1.0 for those that the checkpoint lacks; None if it has none at all.

    Raises ModelLoadError naming a tensor that is not one positive number, or that repeats another.
    """
    found: dict[tuple[int, str], tuple[str, float]] = {}
    for name, tensor in open_weights(spec, model_dir, load_format).tensors.items():
        named = kv_scale_of(name, spec)
        if named is None or named[1] == "q":
            continue
        if named in found:
            raise ModelLoadError(f"the checkpoint has two scales of the same: {found[named][0]} and {name}")
        if math.prod(tensor.shape) != 1:
            raise ModelLoadError(f"KV scale {name} has shape {list(tensor.shape)}; supported is one number for all heads of a layer")
        if tensor.dtype not in DTYPES:
            raise ModelLoadError(f"KV scale {name} is stored as {tensor.dtype}; supported are {', '.join(DTYPES)}")
        scale = float(tensor.read_numbers().item())
        if not math.isfinite(scale) or scale <= 0:
            raise ModelLoadError(f"KV scale {name} is {scale}, not a positive number")
        found[named] = (name, scale)
    if not found:
        return None

    def scale_of(layer: int, which: str) -> float:
        _, scale = found.get((layer, which)) or found.get((layer, "kv")) or ("", 1.0)
        return scale

    return tuple((scale_of(layer, "k"), scale_of(layer, "v")) for layer in range(spec.num_layers))
