"""The tensors of a GGUF file under the names and in the layouts that the model's family has in other checkpoints.

Owns llama.cpp's names of tensors and what its converter changes: the order of the rows of q and k, 1 added to norms, experts in one tensor,
and which tensors it cuts or merges."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import Array
from aengine.kernels.quantized import QuantizedRows, Rows
from aengine.models.families import FAMILIES
from aengine.models.gguf.architectures import Architecture
from aengine.models.gguf.blocks import DTYPES, read_rows
from aengine.models.gguf.gguf_config import architecture_of, config_of
from aengine.models.gguf.gguf_file import GgufFile, GgufTensor, open_gguf

_MODULES: dict[str, tuple[str | None, int]] = {
    **{"token_embd": ("embedding", 0), "position_embd": ("positions", 0), "output_norm": ("norm", 0), "output": ("head", 0)},
}
_LAYER_MODULES: dict[str, tuple[str | None, int]] = {
    **{"attn_norm": ("attention_norm", 0), "post_attention_norm": ("post_attention_norm", 0)},
    **{"ffn_norm": ("mlp_norm", 0), "post_ffw_norm": ("post_mlp_norm", 0)},
    **{"attn_q": ("qkv", 0), "attn_k": ("qkv", 1), "attn_v": ("qkv", 2), "attn_qkv": ("qkv", 0)},
    **{"attn_q_norm": ("q_norm", 0), "attn_k_norm": ("k_norm", 0), "attn_sinks": ("sinks", 0), "attn_output": ("output", 0)},
    **{"attn_q_a": ("q_down", 0), "attn_q_a_norm": ("q_down_norm", 0), "attn_q_b": ("q_up", 0)},
    **{"attn_kv_a_mqa": ("kv_down", 0), "attn_kv_a_norm": ("kv_down_norm", 0), "attn_kv_b": ("key_up", 0)},
    **{"ffn_gate": ("gate_up", 0), "ffn_up": ("gate_up", 1), "ffn_down": ("down", 0)},
    **{"ffn_gate_inp": ("router", 0), "exp_probs_b": ("router_correction", 0), "ffn_gate_inp_shexp": ("shared_gate", 0)},
    **{"ffn_gate_exps": ("experts.gate_up", 0), "ffn_up_exps": ("experts.gate_up", 1), "ffn_down_exps": ("experts.down", 0)},
    **{"ffn_gate_shexp": ("shared.gate_up", 0), "ffn_up_shexp": ("shared.gate_up", 1), "ffn_down_shexp": ("shared.down", 0)},
}
"""llama.cpp's names of modules -> ours, and which of the tensors that `Family.names` has for it."""
_WITHOUT_ENDING = ("sinks", "router_correction", "log_decay", "step_bias", "skip", "scale", "expert_scale", "router_norm.weight")
_ONE_CHANNEL = ("shortconv.conv", "ssm_conv1d")  # convolutions of one input channel for each output channel, which files leave out
_COLUMNS = ("ssm_a", "ssm_d")  # vectors that some files have as matrices of one column
_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")  # read with the config
_NORM = re.compile(r".*(?<!ssm_)norm\.weight")
_STORED = re.compile(r"(?:blk\.(\d{1,4})\.)?(?:([\w.]+)\.(weight|bias)|(ssm_[ad]|ffn_(?:gate_inp|down_exps)\.scale))")
StoredRows = tuple[str, tuple[int, ...], str, Callable[[], Rows], Callable[[range], Rows] | None]
"""Name, shape, type, and how to get the rows; and some of the rows, unless these are to be made of all of them."""
Joint = tuple[tuple[int, ...], str, Callable[[], Rows]]


def read_tensors(path: pathlib.Path) -> Iterator[StoredRows]:
    """Raises ModelLoadError for files that are broken or whose model is not supported, and for tensors without a name in the family."""
    file = open_gguf(path)
    architecture, (config, _) = architecture_of(file), config_of(file)
    names = FAMILIES[config["model_type"]].names
    is_gated = any(".ffn_gate." in stored for stored in file.tensors)
    tensors = _of_layers(file, config)
    _cut_qkv(tensors, config, names)
    _cut_ba(tensors, config)
    _cut_gate_up(tensors)
    joined = {stored: joint for stored in list(tensors) if (joint := _joint(stored, tensors, names)) is not None}
    for stored, (shape, kind, get) in joined.items():
        place = _place(stored.replace("attn_k_b", "attn_kv_b"), architecture, names, is_gated)
        yield place.layer + place.name, shape, kind, get, None
    for stored, tensor in tensors.items():
        place = _place(stored, architecture, names, is_gated)
        if "{index}" in place.name:
            # All experts, or heads, are one tensor here.
            for index in range(tensor.shape[0]):
                count = tensor.shape[1] if len(tensor.shape) > 2 else 1
                part = _slice(tensor, index * count, count, tensor.shape[1:])
                get = partial(_get, part, None, 0.0)
                yield place.layer + place.name.format(index=index), part.shape, _kind(part), get, get
            continue
        shape = (1, *tensor.shape) if place.module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1 else tensor.shape
        if place.module in _ONE_CHANNEL and len(shape) == 2:
            shape = (shape[0], 1, *shape[1:])
        if place.module == "ssm_norm" or (place.module in _COLUMNS and shape[-1] == 1):
            shape = (math.prod(shape),)
        whole = replace(tensor, shape=shape)
        subtracted = 1.0 if architecture.unit_offset and _NORM.fullmatch(stored) else 0.0
        get = partial(_get, whole, _order(architecture, place.module, whole, config), subtracted)
        if place.module == "ssm_a":
            get = partial(_log_decay, get)
        elif place.module == "ssm_out" and architecture.tiled_heads:
            get = partial(_with_columns, get, _grouped(config, config["linear_value_head_dim"], shape[-1]))
        if architecture.transposed == len(shape) and place.layer:
            yield place.layer + place.name, (*shape[:-2], shape[-1], shape[-2]), _kind(whole), partial(_transposed, get), None
        else:
            yield place.layer + place.name, shape, _kind(whole), get, get


@dataclass(frozen=True, slots=True)
class _Place:
    module: str  # llama.cpp's
    layer: str  # the family's name of the layer, with its dot; empty outside of the layers
    name: str  # the family's name of the tensor, behind that


def _place(stored: str, architecture: Architecture, names: Mapping[str, str], is_gated: bool) -> _Place:
    match = _STORED.fullmatch(stored)
    ours: str | None = None
    part = 0
    if match is not None:
        common = _MODULES if match[1] is None else _LAYER_MODULES
        ours, part = {**common, **architecture.modules}.get(match[2] or match[4], (None, 0))
    if match is None or ours is None:
        raise ModelLoadError(f"the GGUF file has a tensor {stored}, which is not known")
    if ours == "gate_up" and not is_gated and len(names.get(ours, "gate up").split()) > 1:
        ours, part = "up", 0
    layer = "" if match[1] is None else names["layer"].format(layer=match[1]) + "."
    if f"{ours}.{match[3]}" in names:
        return _Place(match[2], layer, names[f"{ours}.{match[3]}"])
    if ours not in names:
        raise ModelLoadError(f"the GGUF file has a tensor {stored}, which models of its architecture do not have")
    templates = names[ours].split()
    template = templates[min(part, len(templates) - 1)]
    return _Place(match[2] or match[4], layer, template if ours in _WITHOUT_ENDING else f"{template}.{match[3]}")


def _of_layers(file: GgufFile, config: Mapping[str, Any]) -> dict[str, GgufTensor]:
    """The tensors but those of layers that predict further tokens, which stand behind the others."""
    predicting = file.get(f"{file.architecture}.nextn_predict_layers", int, 0) > 0
    found = {}
    for stored, tensor in file.tensors.items():
        layer = re.match(r"blk\.(\d{1,9})\.", stored)
        is_further = predicting and layer is not None and int(layer[1]) >= config["num_hidden_layers"]
        if not is_further and not _IGNORED.fullmatch(stored):
            found[stored] = tensor
    return found


def _cut_qkv(tensors: dict[str, GgufTensor], config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Rows of q, then k, then v in one tensor, where the family has three."""
    if len(names.get("qkv", "").split()) < 3 or "linear_num_key_heads" in config:  # what is called so has those of a recurrence
        return
    head_dim = config["head_dim"]
    sizes = [config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value", "key_value")]
    for stored in [stored for stored in tensors if ".attn_qkv." in stored]:
        whole = tensors.pop(stored)
        if whole.shape[0] != sum(sizes) or (len(whole.shape) == 1 and whole.type not in DTYPES):
            raise ModelLoadError(f"the GGUF file has {stored} of shape {list(whole.shape)} in {whole.type} instead of {sum(sizes)} rows")
        for name, end, count in zip("qkv", accumulate(sizes), sizes, strict=True):
            tensors[stored.replace("qkv", name)] = _slice(whole, end - count, count, (count, *whole.shape[1:]))


def _cut_ba(tensors: dict[str, GgufTensor], config: Mapping[str, Any]) -> None:
    """Rows of b and of a in one tensor, those of the heads that read a key head together."""
    for stored in [stored for stored in tensors if ".ssm_ba." in stored]:
        whole = tensors.pop(stored)
        if whole.shape[0] != 2 * config["linear_num_value_heads"]:
            raise ModelLoadError(f"the GGUF file has {stored} of shape {list(whole.shape)}, not of two rows for each head")
        rows = whole.rows.reshape(config["linear_num_key_heads"], 2, -1, whole.rows.shape[-1])
        for number, name in enumerate(("ssm_beta", "ssm_alpha")):
            shape = (whole.shape[0] // 2, *whole.shape[1:])
            tensors[stored.replace("ssm_ba", name)] = GgufTensor(shape, whole.type, rows[:, number].reshape(-1))


def _cut_gate_up(tensors: dict[str, GgufTensor]) -> None:
    """Rows of gate and of up of each expert in one tensor."""
    for stored in [stored for stored in tensors if ".ffn_gate_up_exps." in stored]:
        whole = tensors.pop(stored)
        if len(whole.shape) != 3 or whole.shape[1] % 2:
            raise ModelLoadError(f"the GGUF file has {stored} of shape {list(whole.shape)}, not of rows of gate and up of each expert")
        rows = whole.rows.reshape(whole.shape[0], 2, whole.shape[1] // 2, -1)
        for number, name in enumerate(("gate", "up")):
            shape = (whole.shape[0], whole.shape[1] // 2, whole.shape[2])
            tensors[stored.replace("gate_up", name)] = GgufTensor(shape, whole.type, rows[:, number].reshape(-1))


def _slice(tensor: GgufTensor, start: int, count: int, shape: tuple[int, ...]) -> GgufTensor:
    """Some rows, or some values of one row."""
    rows = tensor.rows if len(tensor.shape) > 1 else tensor.data.reshape(tensor.shape[0], -1)
    return GgufTensor(shape, tensor.type, rows[start : start + count].reshape(-1))


def _joint(stored: str, tensors: dict[str, GgufTensor], names: Mapping[str, str]) -> Joint | None:
    """Join `stored` with another tensor where the family has the two as one, and take both out of `tensors`. Returns shape, type, and
    how to get the rows; None if there is nothing to join."""
    match = _STORED.fullmatch(stored)
    module, ending = ("", "") if match is None else match.group(2, 3)
    is_key = module == "attn_k_b"
    if module in _GATES and len(names.get(_GATES[module], "gate up").split()) == 1 and "{" not in names[_GATES[module]]:
        return _behind(stored, stored.replace("ffn_gate", "ffn_up"), tensors)
    if not is_key and (module != "ffn_gate_exps" or f"experts.gate_up.{ending}" not in names):
        return None
    other = stored.replace(module, "attn_v_b" if is_key else "ffn_up_exps")
    first, second = tensors.pop(stored), tensors.pop(other, None)
    if is_key and stored.replace(module, "attn_kv_b") in tensors:  # some files have them in both forms
        return None
    if second is None:
        raise ModelLoadError(f"the GGUF file has {stored} without {other}")
    is_same = first.type == second.type and (not is_key or first.type in DTYPES)
    kind = _kind(first) if is_same else "float32"
    match first.shape:
        case (heads, rank, nope) if is_key and len(second.shape) == 3 and second.shape[::2] == (heads, rank):
            return (heads * (nope + second.shape[1]), rank), kind, partial(_key_and_value_up, first, second)
        case (count, rows, columns) if not is_key and second.shape == first.shape:
            return (count, columns, 2 * rows), kind, partial(_alternating, first, second)
        case (count, rows) if not is_key and second.shape == first.shape:
            return (count, 2 * rows), kind, partial(_alternating, first, second)
    raise ModelLoadError(
        f"the GGUF file has {stored} of shape {list(first.shape)}, to which {other} of {list(second.shape)} does not belong"
    )


_GATES = {"ffn_gate": "gate_up", "ffn_gate_shexp": "shared.gate_up", "ffn_gate_exps": "experts.gate_up"}


def _behind(stored: str, other: str, tensors: dict[str, GgufTensor]) -> Joint | None:
    """The rows of up follow those of the gate, for each expert."""
    if other not in tensors or tensors[stored].shape != tensors[other].shape:
        return None
    gate, up = tensors.pop(stored), tensors.pop(other)
    *experts, rows, columns = gate.shape
    kind = _kind(gate) if gate.type == up.type else "float32"
    return (*experts, 2 * rows, columns), kind, partial(_concatenated, gate, up, math.prod(experts))


def _concatenated(gate: GgufTensor, up: GgufTensor, count: int) -> Rows:
    one, other = (_get(tensor, None, 0.0) for tensor in (gate, up))

    def both(first: Array, second: Array) -> Array:
        joined = np.concatenate([each.reshape(count, -1, *each.shape[1:]) for each in (first, second)], 1)
        return joined.reshape(-1, *first.shape[1:])

    if isinstance(one, QuantizedRows) and isinstance(other, QuantizedRows) and gate.type == up.type:
        return one.of_rows(both, other)
    return np.concatenate((_get_numbers(gate), _get_numbers(up)), -2)


def _key_and_value_up(key: GgufTensor, value: GgufTensor) -> Array:
    """[heads, rank, nope] and [heads, values, rank] -> [heads * (nope + values), rank]."""
    joined = np.concatenate((_get_numbers(key).swapaxes(1, 2), _get_numbers(value)), 1)
    return joined.reshape(-1, joined.shape[-1])


def _alternating(gate: GgufTensor, up: GgufTensor) -> Rows:
    """Put the rows (or numbers) of gate and of up in turn, for each expert; a matrix that is not quantised is transposed."""
    one, other = (_get(tensor, None, 0.0) for tensor in (gate, up))
    if isinstance(one, QuantizedRows) and isinstance(other, QuantizedRows) and gate.type == up.type:
        return one.of_rows(_by_turns, other)
    numbers = np.stack((_get_numbers(gate), _get_numbers(up)), 2)
    whole = numbers.reshape(len(numbers), -1, *numbers.shape[3:])
    return np.ascontiguousarray(whole.swapaxes(1, 2)) if len(gate.shape) == 3 else whole


def _by_turns(one: Array, other: Array) -> Array:
    return np.stack((one, other), 1).reshape(-1, *one.shape[1:])


def _get_numbers(tensor: GgufTensor) -> Array:
    rows = _get(tensor, None, 0.0)
    return rows.dequantized().reshape(tensor.shape) if isinstance(rows, QuantizedRows) else rows


def _kind(tensor: GgufTensor) -> str:
    """Return the dtype of a tensor by the name that `StoredTensor` has for it, or the type of quantised rows."""
    return DTYPES.get(tensor.type, tensor.type)


def _order(architecture: Architecture, module: str, tensor: GgufTensor, config: Mapping[str, Any]) -> Array | None:
    """The rows of q, k and v in the order that the family wants them in: for a rope that pairs halves, or by head. None: as they are."""
    heads, count = int(config.get("num_attention_heads", 0)), tensor.shape[0]
    if architecture.tiled_heads and module in _TILED:
        dim = config["linear_value_head_dim"] if module in ("attn_qkv", "attn_gate", "ssm_conv1d") else 1
        return _grouped(config, dim, count)
    if architecture.by_head and module == "attn_qkv":
        shape, axes = (3, heads, -1), (0, 1)
    elif architecture.pairs_neighbours and module in ("attn_q", "attn_k"):
        heads = heads if module == "attn_q" else config["num_key_value_heads"]
        shape, axes = (heads, -1, 2), (1, 2)
    else:
        return None
    if not heads or count % (heads * (3 if architecture.by_head else 2)):
        raise ModelLoadError(f"the rows of q and k of the GGUF file, {count}, are not those of {heads} heads of even size")
    return np.arange(count).reshape(shape).swapaxes(*axes).ravel()


_TILED = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")


def _grouped(config: Mapping[str, Any], dim: int, count: int) -> Array:
    """Where each of `count` numbers is in a file with tiled heads, the last of which are `dim` of each head."""
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    first = count - heads * dim
    if first < 0 or heads % key_heads:
        raise ModelLoadError(f"the GGUF file has {count} rows of {heads} heads of {dim}, which read {key_heads} key heads")
    tiled = np.arange(first, count).reshape(heads // key_heads, key_heads, dim)
    return np.concatenate((np.arange(first), tiled.swapaxes(0, 1).ravel()))


def _with_columns(get: Callable[..., Rows], order: Array, of: range | None = None) -> Rows:
    rows = get(of=of)
    if not isinstance(rows, QuantizedRows):
        return rows[..., order]
    groups = rows.scales.shape[-1]
    by_group = order.reshape(groups, -1)
    of_groups = by_group[:, 0] // by_group.shape[1]
    if not np.array_equal(by_group, of_groups[:, None] * by_group.shape[1] + np.arange(by_group.shape[1])):
        return rows.dequantized()[..., order]  # heads are no whole groups
    offsets = None if rows.offsets is None else rows.offsets[..., of_groups]
    parts = {"codes": rows.codes[..., order], "scales": rows.scales[..., of_groups], "offsets": offsets}
    return replace(rows, **parts, factors=None, offset_factors=None)  # a factor is of groups that may be apart now


def _log_decay(get: Callable[..., Rows], of: range | None = None) -> Rows:
    numbers = get(of=of)
    if isinstance(numbers, QuantizedRows) or not bool((numbers < 0).all()):
        raise ModelLoadError("the GGUF file has ssm_a with numbers that are not negative")
    return np.log(-numbers)


def _get(tensor: GgufTensor, order: Array | None, subtracted: float, of: range | None = None) -> Rows:
    """`of`: some rows of a matrix, or numbers of a vector; None: all."""
    data, shape = tensor.data, tensor.shape
    if order is not None:
        data = data.reshape(len(order), -1)[order if of is None else order[of.start : of.stop]]
    elif of is not None:
        data = data.reshape(shape[0], -1)[of.start : of.stop]
    shape = shape if of is None else (len(of), *shape[1:])
    rows = read_rows(tensor.type, data.reshape(math.prod(shape[:-1]), -1))
    if isinstance(rows, QuantizedRows):
        return rows
    numbers = rows.reshape(shape)
    return numbers - numbers.dtype.type(subtracted) if subtracted else numbers


def _transposed(get: Callable[[], Rows]) -> Rows:
    """Quantised rows stay those of the matrix: `Part.rows` knows which rows of the parameter they are."""
    rows = get()
    return rows if isinstance(rows, QuantizedRows) else np.ascontiguousarray(rows.swapaxes(-1, -2))
