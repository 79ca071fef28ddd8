"""Adapters: low-rank matrices that are added to those of a model, for the rows of a batch that ask for them.

Owns how the tensors of PEFT become parts of our parameters, and the matrices that adapters may change, as a rank holds them on a device.
The names of modules are the family's; does not know how a product is computed.

`AdapterConfig`: the adapter_config.json of an adapter, as PEFT writes it. Knows neither tensors nor models.
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.api.errors import AdapterError, ModelLoadError
from aengine.kernels.arrays import Array, as_tensor, cast
from aengine.models.fallback import FallbackSpec
from aengine.models.families import FAMILIES
from aengine.models.loading.checkpoint import DTYPES, StoredTensor, read_safetensors
from aengine.models.loading.hub import described_problems
from aengine.models.model_files import read_json
from aengine.models.named_weights import NEVER_QUANTIZED, Part, named_weights
from aengine.models.quantization.scheme import Expression, share_work
from aengine.models.sharding import WeightPart, own, pieces, sharded_weights, vocab_bounds
from aengine.models.spec import ModelSpec
from aengine.models.text_part import text_module
from aengine.parallel.shard import WHOLE, Shard

if TYPE_CHECKING:
    from aengine.layers.adapters import AdapterShape, AdapterTable, PackedAdapter

CONFIG = "adapter_config.json"
_LARGEST_FILE = 1 << 20
_LARGEST_ALPHA = 1e9
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"})
_IGNORED = frozenset(
    {
        # Which modules have an adapter follows from the tensors.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
        # Of training and merging alone.
        *("lora_dropout", "fan_in_fan_out", "inference_mode", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type", "megatron_core", "qalora_group_size"),
    }
)
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Those that leave the weights of the model as they are."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    path: pathlib.Path
    _rank: Any
    _alpha: Any
    _rank_stabilized: bool
    _ranks: Mapping[Expression, Any]
    _alphas: Mapping[Expression, Any]

    def rank(self, module: str, max_rank: int) -> int:
        """Return the rank of a module, by its name in the model of transformers. Raises AdapterError if it is not in 1 .. max_rank."""
        rank = _of(module, self._ranks, self._rank)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
            raise AdapterError(f"r {_shown(rank)} of {module} in {self.path} is not an integer in 1 .. {max_rank}")
        return rank

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's matrices is multiplied by: alpha / r, or alpha / sqrt(r) (Kalajdzievski, "A Rank Stabilization
        Scaling Factor for Fine-Tuning with LoRA", 2023). Raises AdapterError for an alpha that is no number."""
        alpha = _of(module, self._alphas, self._alpha)
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= _LARGEST_ALPHA:
            raise AdapterError(
                f"lora_alpha {_shown(alpha)} of {module} in {self.path} is not a number in -{_LARGEST_ALPHA:g} .. {_LARGEST_ALPHA:g}"
            )
        return alpha / (math.sqrt(rank) if self._rank_stabilized else rank)


def read_adapter_config(folder: pathlib.Path) -> AdapterConfig:
    """Read the adapter_config.json of a directory. Raises AdapterError for a file that cannot be read, and for fields that change what a
    model computes in another way than by a sum of low-rank products, or that are unknown."""
    path = folder / CONFIG
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise AdapterError(f"{path} has more than {_LARGEST_FILE} bytes")
        config = read_json(path)
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror or error}") from error
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type {_shown(config.get('peft_type'))} in {path} is not supported; supported is LORA")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias {_shown(config['bias'])} in {path} is not supported; supported is none")
    how = config.get("init_lora_weights")
    if not any(how is one or (isinstance(how, str) and how == one) for one in _INITIALIZATIONS):
        raise AdapterError(
            f"init_lora_weights {_shown(how)} in {path} is not supported, since it changes the weights of the model; PEFT converts such"
            " adapters (path_initial_model_for_weight_conversion of save_pretrained)"
        )
    for field, value in config.items():
        if field not in _READ and field not in _IGNORED and value:
            what = "DoRA is not supported" if field == "use_dora" else "not supported"
            raise AdapterError(f"{field} {_shown(value)} in {path}: {what}; it must be absent, null or empty")
    rank_stabilized = config.get("use_rslora") or False
    if not isinstance(rank_stabilized, bool):
        raise AdapterError(f"use_rslora {_shown(rank_stabilized)} in {path} is not true or false")
    ranks, alphas = (_patterns(config, field, path) for field in ("rank_pattern", "alpha_pattern"))
    share_work([*ranks, *alphas])
    return AdapterConfig(path, config.get("r", 8), config.get("lora_alpha", 8), rank_stabilized, ranks, alphas)


def _patterns(config: Mapping[str, Any], field: str, path: pathlib.Path) -> dict[Expression, Any]:
    """By what the end of a module's name must match, in their order."""
    given = config.get(field) or {}
    if not isinstance(given, dict):
        raise AdapterError(f"{field} {_shown(given)} in {path} is not an object")
    found = {}
    for pattern, value in given.items():
        try:
            found[Expression(rf"(?:.*\.)?(?:{pattern})", f"{field} in {path}")] = value
        except ModelLoadError as error:
            raise AdapterError(str(error)) from error
    return found


def _of(module: str, patterns: Mapping[Expression, Any], default: Any) -> Any:
    try:
        return next((value for pattern, value in patterns.items() if pattern.matches(module)), default)
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


MAX_RANK = 256
_FILE = "adapter_model.safetensors"
_MATRICES = frozenset({"qkv", "output", "gate_up", "up", "down", "q", "q_down", "q_up", "kv_down", "shared.gate_up", "shared.down"})
"""Of layers, those that can have an adapter."""
_NAME = re.compile(r"base_model\.model\.(.+)\.(lora_[AB]\.weight|lora_embedding_[AB]|base_layer\.(?:weight|bias))")
_COPY, _COPY_OF_BIAS = "base_layer.weight", "base_layer.bias"  # the model's own embedding or head, which PEFT may store beside its adapter


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """`rows` of a parameter get `b @ (a @ x)` more; of an embedding, the row of a token gets `b @ a[:, token]` more."""

    rows: range
    a: Array  # [r, in_features]; of an embedding [r, vocab_size]
    b: Array  # [len(rows), r], times the scale of the adapter; of an embedding [hidden_size, r], and `rows` are those of `b`


@dataclass(frozen=True, slots=True)
class Adapter:
    """The parts of each parameter that it changes, by name without `.weight`: rows ascend, and no two parts have the same row."""

    parts: Mapping[str, tuple[LowRankPart, ...]]
    low_rank: int = 0  # the largest r of its modules; those that a rank does not hold count, too
    modules: tuple[str, ...] = ()  # the kinds of modules that it changes, sorted, by the last words of their names

    @property
    def nbytes(self) -> int:
        return sum(part.a.nbytes + part.b.nbytes for parts in self.parts.values() for part in parts)


@dataclass(frozen=True, slots=True)
class _Target:
    """A module of the model: a part of a parameter."""

    name: str  # of the parameter
    number: int  # of the part
    part: Part

    @property
    def may_change(self) -> bool:
        stem = self.name.removesuffix(".weight")
        return stem in ("embedding", "head") or (stem.startswith("layers.") and stem.split(".", 2)[2] in _MATRICES)


@dataclass(frozen=True, slots=True)
class _Pair:
    """What an adapter has for a module."""

    target: _Target
    rank: int
    scale: float
    a: StoredTensor
    b: StoredTensor

    def matrices(self, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """In memory of their own: [r, in_features] and [rows of the parameter, r] times the scale."""
        a, b = (stored.read_numbers().astype(np.float32) for stored in (self.a, self.b))
        order = self.target.part.row_order()
        return cast(a, dtype), cast((b if order is None else b[order]) * np.float32(self.scale), dtype)


def adapter_number(folder: pathlib.Path) -> int:
    """A number of 63 bits that the files of an adapter decide, never 0: what the names of pages have of it, in every process."""
    digest = blake2b(digest_size=8)
    for name in (CONFIG, _FILE):
        with open(folder / name, "rb") as file:
            digest.update(name.encode())
            while part := file.read(1 << 20):
                digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1 or 1


def load_adapter(
    path: str | pathlib.Path, spec: ModelSpec | FallbackSpec, dtype: np.dtype[Any], shard: Shard = WHOLE, max_rank: int = MAX_RANK
) -> Adapter:
    """What a rank holds of the adapter in a directory that PEFT wrote, with contiguous matrices of `dtype`.

    Of a model with a tied head, an adapter of the embedding changes the embedding alone, and one of the head the head alone, as in PEFT
    before it merges them. Shapes must be the model's; which model it was made for is not compared.

    Raises AdapterError for what cannot be read, is no adapter of this model, computes anything else than low-rank products, has a rank
    beyond `max_rank`, or has numbers that are not finite.
    """
    folder = pathlib.Path(path)
    if isinstance(spec, FallbackSpec):
        raise AdapterError(f"{spec.architecture} runs in the code of transformers, where adapters are not supported: {folder}")
    if not folder.is_dir():
        raise AdapterError(f"there is no directory {folder} with an adapter")
    config = read_adapter_config(folder)
    parts = {name: weight.parts for name, weight in named_weights(spec).items() if name.endswith(".weight")}
    held = {part.source_name: (name, part) for name, part in sharded_weights(spec, shard).items()}
    if spec.tied_head:
        parts["head.weight"] = (
            Part(f"{FAMILIES[spec.family].names['head']}.weight", (spec.vocab_size, spec.hidden_size), spec.vocab_size),
        )
        if shard.stage == 0:
            held["head.weight"] = "head.weight", WeightPart("head.weight", (), (own(vocab_bounds(spec, shard), shard),))
    pairs = _pairs(folder, config, spec, parts, max_rank)
    found = {}
    for source_name, (name, wanted) in held.items():
        given = {pair.target.number: pair for pair in pairs.values() if pair.target.name == source_name}
        if given:
            make = _embedding_part if source_name == "embedding.weight" else _low_rank_parts
            found[name.removesuffix(".weight")] = made = make(given, parts[source_name], wanted, dtype)
            if not all(bool(np.isfinite(matrix).all()) for part in made for matrix in (part.a, part.b)):
                raise AdapterError(f"{folder / _FILE} has numbers for {source_name} that are not finite in {dtype}")
    modules = sorted({module.rpartition(".")[2] for module in pairs})
    return Adapter(found, max(pair.rank for pair in pairs.values()), tuple(modules))


def _low_rank_parts(pairs: Mapping[int, _Pair], parts: Sequence[Part], wanted: WeightPart, dtype: np.dtype[Any]) -> tuple[LowRankPart, ...]:
    """Return what a rank holds of the pairs of a parameter, one entry for each part of the parameter that has a pair."""
    found, row = [], 0
    for number, group in groupby(pieces([part.num_rows for part in parts], wanted), itemgetter(0)):
        held = [rows for _, rows in group]
        count = sum(map(len, held))
        if number in pairs:
            a, b = pairs[number].matrices(dtype)
            if wanted.columns is not None:
                a = a[:, wanted.columns.start : wanted.columns.stop].copy()
            found.append(LowRankPart(range(row, row + count), a, np.concatenate([b[rows.start : rows.stop] for rows in held])))
        row += count
    return tuple(found)


def _embedding_part(pairs: Mapping[int, _Pair], parts: Sequence[Part], wanted: WeightPart, dtype: np.dtype[Any]) -> tuple[LowRankPart, ...]:
    """Its `a` has a column for each token whose row a rank holds."""
    a, b = pairs[0].matrices(dtype)
    if wanted.rows is not None:
        a = np.concatenate([a[:, rows.start : rows.stop] for rows in wanted.rows], 1)
    return (LowRankPart(range(len(b)), a, b),)


def _pairs(
    folder: pathlib.Path, config: AdapterConfig, spec: ModelSpec, parts: Mapping[str, Sequence[Part]], max_rank: int
) -> dict[str, _Pair]:
    """By the names of modules in the model of transformers. Raises AdapterError for all that is wrong with names, shapes and dtypes."""
    targets = {
        part.source.removesuffix(".weight"): _Target(name, number, part)
        for name, each in parts.items()
        for number, part in enumerate(each)
        if len(part.shape) > 1
    }
    given: dict[str, dict[str, StoredTensor]] = {}
    unknown, lacking, refused, shapes, dtypes = list[str](), list[str](), list[str](), list[str](), list[str]()
    for name, tensor in _read(folder):
        match = _NAME.fullmatch(name)
        if match is None:
            unknown.append(name)
        else:
            given.setdefault(match[1], {})[match[2]] = tensor
    pairs: dict[str, _Pair] = {}
    for module, tensors in given.items():
        target = targets.get(_source(module, spec, targets))
        if target is None or any(pair.target is target for pair in pairs.values()):
            unknown.append(module)
            continue
        if not target.may_change:
            refused.append(module)
            continue
        kinds = ("lora_embedding_A", "lora_embedding_B") if target.name == "embedding.weight" else ("lora_A.weight", "lora_B.weight")
        out_features, in_features = target.part.matrix_shape
        if target.name == "embedding.weight":
            out_features, in_features = in_features, out_features
        rank = config.rank(module, max_rank)
        expected: dict[str, tuple[int, ...]] = {kinds[0]: (rank, in_features), kinds[1]: (out_features, rank)}
        lacking += [f"{module}.{kind}" for kind in kinds if kind not in tensors]
        if target.name in ("embedding.weight", "head.weight"):
            expected[_COPY] = target.part.matrix_shape
        if target.name == "head.weight" and spec.head_bias:
            expected[_COPY_OF_BIAS] = target.part.matrix_shape[:1]
        for kind, tensor in tensors.items():
            if kind not in expected:
                unknown.append(f"{module}.{kind}")
            elif tensor.shape != expected[kind]:
                shapes.append(f"{module}.{kind} {list(tensor.shape)} instead of {list(expected[kind])}")
            elif tensor.dtype not in DTYPES:
                dtypes.append(f"{module}.{kind} {tensor.dtype}")
        if all(kind in tensors for kind in kinds):
            pairs[module] = _Pair(target, rank, config.scale(module, rank), *(tensors[kind] for kind in kinds))
    problems = {
        "it has unexpected": unknown,
        "it lacks": lacking,
        "it changes what an adapter cannot (experts, routers, positions, or the matrices of the heads of latents):": refused,
        "it has other shapes than the model and adapter_config.json imply:": shapes,
        f"it has dtypes other than {', '.join(DTYPES)}:": dtypes,
    }
    found = described_problems(problems)
    if found or not pairs:
        raise AdapterError(f"{folder / _FILE} does not fit the model: {found or 'it has no tensors'}")
    return pairs


def _source(module: str, spec: ModelSpec, targets: Mapping[str, _Target]) -> str:
    """The name that a module has in `targets`, given as transformers calls it; it lacks the first word if the model had no head."""
    family = FAMILIES[spec.family]
    if spec.is_part:
        module = text_module(module)
    name = family.own_name(f"{module}.").removesuffix(".")
    return name if name in targets else f"{family.names['embedding'].partition('.')[0]}.{name}"


def _read(folder: pathlib.Path) -> list[tuple[str, StoredTensor]]:
    if not (folder / _FILE).is_file():
        other = folder / "adapter_model.bin"
        hint = f"; {other.name} is not read: save it with safe_serialization=True" if other.is_file() else ""
        raise AdapterError(f"there is no {_FILE} in {folder}{hint}")
    try:
        return list(read_safetensors(folder / _FILE))
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error


def adapter_shapes(spec: ModelSpec, shard: Shard) -> dict[str, AdapterShape]:
    """By the name of a parameter without `.weight`. The rows of a parameter are in parts, as in the checkpoint. An embedding is seen as the
    matrix that multiplies with a one-hot row of its vocabulary; a head has a shape of its own even if it is tied to it."""
    from aengine.layers.adapters import AdapterShape  # imports torch

    named, shapes = named_weights(spec), {}
    for name, part in sharded_weights(spec, shard).items():
        stem = name.removesuffix(".weight")
        if stem == name or len(part.shape) != 2 or stem.rpartition(".")[2] in NEVER_QUANTIZED:
            continue
        if stem == "embedding":
            shapes[stem] = AdapterShape(part.shape[0], (0, part.shape[1]))
            continue
        counts: dict[int, int] = {}
        for number, rows in pieces([each.num_rows for each in named[part.source_name].parts], part):
            counts[number] = counts.get(number, 0) + len(rows)
        shapes[stem] = AdapterShape(part.shape[1], (0, *accumulate(counts.values())))
    if spec.tied_head and shard.stage == 0:
        shapes["head"] = AdapterShape(spec.hidden_size, (0, len(own(vocab_bounds(spec, shard), shard))))
    return shapes


def adapter_bytes(spec: ModelSpec, shard: Shard, num_slots: int, low_rank: int, itemsize: int) -> int:
    """Return the bytes of a device's table of adapters: `num_slots` of rank `low_rank`, with `itemsize` bytes per value."""
    return num_slots * low_rank * itemsize * sum(shape.size for shape in adapter_shapes(spec, shard).values())


def packed_adapter(table: AdapterTable, adapter: Adapter) -> PackedAdapter:
    """An adapter of the table's shard, as `AdapterTable.put_adapter` takes it. May be called from any thread."""
    tensors = {name: {part.rows: (as_tensor(part.a), as_tensor(part.b)) for part in parts} for name, parts in adapter.parts.items()}
    return table.pack(tensors)
