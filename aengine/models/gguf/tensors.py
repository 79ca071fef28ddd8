"""The tensors of a GGUF file under the names and in the layouts that the model's family has in other checkpoints.

Owns llama.cpp's names of tensors and what its converter changes: the order of the rows of q and k, 1 added to norms, experts in one tensor.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.kernels.quantized import QuantizedRows, Rows
from aengine.models.families import FAMILIES
from aengine.models.gguf.blocks import DTYPES, read_rows
from aengine.models.gguf.config import Architecture, architecture_of, config_of
from aengine.models.gguf.file import GgufTensor, open_gguf

_MODULES = {"token_embd": "embedding", "position_embd": "positions", "output_norm": "norm", "output": "head"}
_LAYER_MODULES: dict[str, tuple[str, int]] = {
    **{"attn_norm": ("attention_norm", 0), "post_attention_norm": ("post_attention_norm", 0)},
    **{"ffn_norm": ("mlp_norm", 0), "post_ffw_norm": ("post_mlp_norm", 0)},
    **{"attn_q": ("qkv", 0), "attn_k": ("qkv", 1), "attn_v": ("qkv", 2), "attn_qkv": ("qkv", 0)},
    **{"attn_q_norm": ("q_norm", 0), "attn_k_norm": ("k_norm", 0), "attn_output": ("output", 0)},
    **{"ffn_gate": ("gate_up", 0), "ffn_up": ("gate_up", 1), "ffn_down": ("down", 0)},
    **{"ffn_gate_inp": ("router", 0), "ffn_gate_inp_shexp": ("shared_gate", 0)},
    **{"ffn_gate_exps": ("experts.gate_up", 0), "ffn_up_exps": ("experts.gate_up", 1), "ffn_down_exps": ("experts.down", 0)},
    **{"ffn_gate_shexp": ("shared.gate_up", 0), "ffn_up_shexp": ("shared.gate_up", 1), "ffn_down_shexp": ("shared.down", 0)},
}
"""llama.cpp's names of modules -> ours, and which of the tensors that `Family.names` has for it."""
_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")  # read with the config
_NORM = re.compile(r".*norm\.weight")
StoredRows = tuple[str, tuple[int, ...], str, Callable[[], Rows]]
"""Name, shape, type, and how to get the rows."""


def read_tensors(path: pathlib.Path) -> Iterator[StoredRows]:
    """Raises ModelLoadError for files that are broken or whose model is not supported, and for tensors without a name in the family."""
    file = open_gguf(path)
    architecture, config = architecture_of(file), config_of(file)
    names = FAMILIES[config["model_type"]].names
    is_gated = any(".ffn_gate" in stored for stored in file.tensors)
    heads = {"attn_q": config.get("num_attention_heads"), "attn_k": config.get("num_key_value_heads", config.get("num_attention_heads"))}
    for stored, tensor in file.tensors.items():
        if _IGNORED.fullmatch(stored):
            continue
        name, layer, module = _name(stored, names, is_gated)
        if "{index}" in name:
            # All experts, or heads, are one tensor here.
            for index in range(tensor.shape[0]):
                row_count = tensor.shape[1] if len(tensor.shape) > 2 else 1
                part = GgufTensor(tensor.shape[1:], tensor.type, tensor.rows[index * row_count : (index + 1) * row_count].reshape(-1))
                yield layer + name.format(index=index), part.shape, _kind(part), partial(_get, part, None, 0.0)
            continue
        shape = (1, *tensor.shape) if module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1 else tensor.shape
        order = _order(architecture, tensor, heads[module]) if module in heads and architecture.pairs_neighbours else None
        whole = GgufTensor(shape, tensor.type, tensor.data)
        subtracted = 1.0 if architecture.unit_offset and _NORM.fullmatch(stored) else 0.0
        get = partial(_get, whole, order, subtracted)
        if architecture.transposed and layer and len(shape) == 2:
            yield layer + name, shape[::-1], _kind(whole), partial(_transposed, get)
        else:
            yield layer + name, shape, _kind(whole), get


def _name(stored: str, names: Mapping[str, str], is_gated: bool) -> tuple[str, str, str]:
    """The family's name without that of the layer, the latter with its dot, and llama.cpp's of the module."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
    ours, part = (None, 0)
    if match is not None:
        ours, part = (_MODULES.get(match[2]), 0) if match[1] is None else _LAYER_MODULES.get(match[2], (None, 0))
    if match is None or ours is None:
        raise ModelLoadError(f"the GGUF file has a tensor {stored}, which is not known")
    layer = "" if match[1] is None else names["layer"].format(layer=match[1]) + "."
    if ours == "gate_up" and not is_gated and len(names.get(ours, "gate up").split()) > 1:
        ours, part = "up", 0
    if ours not in names:
        raise ModelLoadError(f"the GGUF file has a tensor {stored}, which models of its architecture do not have")
    templates = names[ours].split()
    return f"{templates[min(part, len(templates) - 1)]}.{match[3]}", layer, match[2]


def _kind(tensor: GgufTensor) -> str:
    """As `StoredTensor` names dtypes, or the type of quantised rows."""
    return str(DTYPES[tensor.type]).removeprefix("torch.") if tensor.type in DTYPES else tensor.type


def _order(architecture: Architecture, tensor: GgufTensor, heads: int | None) -> Tensor | None:
    """The rows of q or k as the file has them, in the order in which a rope that pairs halves wants them."""
    count = tensor.shape[0]
    if not heads or count % (2 * heads):
        raise ModelLoadError(f"the rows of q and k of the GGUF file, {count}, are not those of {heads} heads of even size")
    return torch.arange(count).view(heads, -1, 2).transpose(1, 2).flatten()


def _get(tensor: GgufTensor, order: Tensor | None, subtracted: float) -> Rows:
    data = torch.from_numpy(tensor.data)
    if order is not None:
        data = data.view(len(order), -1)[order]
    rows = read_rows(tensor.type, data.view(-1, tensor.rows.shape[1]))
    if isinstance(rows, QuantizedRows):
        return rows
    return rows.view(tensor.shape) - subtracted if subtracted else rows.view(tensor.shape)


def _transposed(get: Callable[[], Rows]) -> Rows:
    """Quantised rows stay those of the matrix: `Part.rows` knows which rows of the parameter they are."""
    rows = get()
    return rows.t().contiguous() if isinstance(rows, Tensor) else rows
