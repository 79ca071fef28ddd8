"""Public layouts of quantised weights, as their documentation has them: each quantises a float matrix, and says what its numbers are.

Written without the code under test, in the plainest way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]  # what is behind a module's name -> tensor


@dataclass(frozen=True)
class Layout:
    config: dict[str, Any]  # quantization_config
    write: Callable[[Tensor], tuple[Tensors, Tensor]]
    """[out_features, in_features] -> the tensors in its place, and the float32 matrix that they stand for."""


def packed(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """[n, m] numbers from 0 -> int32 words; number order[i] of each word is i places above the lowest."""
    if 32 % bits:  # some are in two words
        by_bit = codes[..., None].int() >> torch.arange(bits) & 1
        by_word = by_bit.reshape(len(codes), -1, 32).long() << torch.arange(32)
        words = by_word.sum(-1)
        return (words - ((words >> 31) << 32)).to(torch.int32)
    per_word = 32 // bits
    words = torch.zeros(len(codes), codes.shape[1] // per_word, dtype=torch.int64)
    for place, number in enumerate(order or range(per_word)):
        words |= codes[:, number::per_word].long() << (bits * place)
    return (words - ((words >> 31) << 32)).to(torch.int32)


@dataclass
class Grouped:
    """Integers from 0 with a scale and a zero point for each group of columns."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    matrix: Tensor
    g_idx: Tensor


def grouped(
    weight: Tensor, bits: int, size: int, *, symmetric: bool, shuffled: bool = False, dtype: torch.dtype = torch.float16, seed: int = 0
) -> Grouped:
    rows, columns = weight.shape
    g_idx = torch.arange(columns) // size
    if shuffled:
        g_idx = g_idx[torch.randperm(columns, generator=torch.Generator().manual_seed(columns + 1000 * seed))]
    groups, top = -(-columns // size), (1 << bits) - 1
    scales, zeros = torch.zeros(rows, groups, dtype=dtype), torch.zeros(rows, groups, dtype=torch.int64)
    for group in range(groups):
        part = weight[:, g_idx == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        span = 2 * torch.maximum(-low, high) if symmetric else high - low
        scales[:, group] = (span / top).clamp(min=1e-4)
        exact = scales[:, group].float()
        zeros[:, group] = (top + 1) // 2 if symmetric else (-low / exact).round().clamp(0, top)
    scale, zero = scales[:, g_idx].float(), zeros[:, g_idx]
    codes = (weight / scale + zero).round().clamp(0, top).long()
    matrix = (codes - zero) * scale
    return Grouped(codes, scales, zeros, matrix, g_idx)


def gptq(bits: int, size: int, *, symmetric: bool = True, act_order: bool = False, version: int = 1, **config: Any) -> Layout:
    def write(weight: Tensor, seed: int = 0) -> tuple[Tensors, Tensor]:
        found = grouped(weight, bits, weight.shape[1] if size == -1 else size, symmetric=symmetric, shuffled=act_order, seed=seed)
        zeros = (found.zeros - 1) % (1 << bits) if version == 1 else found.zeros
        tensors = {
            ".qweight": packed(found.codes, bits).t(),
            ".qzeros": packed(zeros.t(), bits),
            ".scales": found.scales.t(),
            ".g_idx": found.g_idx.int(),
        }
        return tensors, found.matrix

    described = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, "sym": symmetric}
    return Layout({**described, **({"checkpoint_format": "gptq_v2"} if version == 2 else {}), **config}, write)


def mlx(bits: int, size: int, **of_modules: Any) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        found = grouped(weight, bits, size, symmetric=False)
        words, biases = packed(found.codes, bits).view(torch.uint32), -found.scales.float() * found.zeros
        matrix = found.codes * found.scales.float().repeat_interleave(size, 1) + biases.repeat_interleave(size, 1)
        return {".weight": words, ".scales": found.scales.float(), ".biases": biases}, matrix

    return Layout({"group_size": size, "bits": bits, **of_modules}, write)


def awq(size: int) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        found = grouped(weight, 4, size, symmetric=False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {
            ".qweight": packed(found.codes.t(), 4, order),
            ".qzeros": packed(found.zeros.t(), 4, order),
            ".scales": found.scales.t(),
        }
        return tensors, found.matrix

    return Layout({"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}, write)


def compressed(form: str, ignore: tuple[str, ...] = ("lm_head", "re:.*mlp.gate$"), **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": list(ignore)}


def pack_quantized(bits: int, size: int | None, *, symmetric: bool = True, act_order: bool = False) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        found = grouped(weight, bits, size or weight.shape[1], symmetric=symmetric, shuffled=act_order, dtype=torch.bfloat16)
        tensors = {
            ".weight_packed": packed(found.codes, bits),
            ".weight_scale": found.scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = packed(found.zeros.t(), bits).t()
        if act_order:
            tensors[".weight_g_idx"] = found.g_idx.int()
        return tensors, found.matrix

    strategy = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    order = {"actorder": "group"} if act_order else {}
    return Layout(compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **strategy, **order), write)


def int_quantized_4(size: int, *, symmetric: bool = True) -> Layout:
    """W4A8: numbers from -8 to 7, each in a byte."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        found = grouped(weight, 4, size, symmetric=symmetric, dtype=torch.bfloat16)
        tensors = {".weight": (found.codes - 8).to(torch.int8), ".weight_scale": found.scales}
        if not symmetric:
            tensors[".weight_zero_point"] = (found.zeros - 8).to(torch.int8)
        return tensors, found.matrix

    return Layout(compressed("int-quantized", num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=size), write)


def awq_gemv(size: int) -> Layout:
    """Zeros in 1, 2 or 4 times as many words as their groups need, in whole multiples of those, and as many scales."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        found = grouped(weight, 4, size, symmetric=False)
        multiple = {64: 2, 32: 4}.get(size, 1)
        width = math.ceil(math.ceil(weight.shape[1] // size / 8) / multiple) * multiple
        zeros, scales = (torch.zeros(len(weight), 8 * width, dtype=each.dtype) for each in (found.zeros, found.scales))
        for whole, part in ((zeros, found.zeros), (scales, found.scales)):
            whole[:, : part.shape[1]] = part
        return {".qweight": packed(found.codes, 4), ".qzeros": packed(zeros, 4), ".scales": scales}, found.matrix

    return Layout({"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemv"}, write)


def auto_round(packing: str, layout: Layout, **config: Any) -> Layout:
    """The tensors of GPTQ or AWQ, with other words around them."""
    described = {"bits": layout.config["bits"], "group_size": layout.config["group_size"], "data_type": "int", "sym": False}
    extra = {"lm_head": {"bits": 16, "data_type": "float"}, r".*mlp\.gate$": {"bits": 16}}
    return Layout({"quant_method": "auto-round", "packing_format": packing, **described, "extra_config": extra, **config}, layout.write)


def int_quantized(strategy: str, *, symmetric: bool = True) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        found = grouped(weight if strategy == "channel" else weight.reshape(1, -1), 8, weight.numel(), symmetric=symmetric)
        codes, zeros = (found.codes - 128).reshape(weight.shape).to(torch.int8), (found.zeros - 128).to(torch.int8)
        shape = (-1, 1) if strategy == "channel" else (1,)
        tensors = {".weight": codes, ".weight_scale": found.scales.view(shape), ".input_scale": torch.ones(1)}
        if not symmetric:
            tensors[".weight_zero_point"] = zeros.view(shape)
        return tensors, found.matrix.reshape(weight.shape)

    return Layout(compressed("int-quantized", num_bits=8, type="int", symmetric=symmetric, strategy=strategy), write)


def float8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, the scales of blocks, and the matrix."""
    (rows, columns), (high, wide) = weight.shape, block
    codes, matrix = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
    scales = torch.zeros(-(-rows // high), -(-columns // wide))
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            part = weight[top : top + high, left : left + wide]
            scale = scales[top // high, left // wide] = part.abs().max() / 448
            codes[top : top + high, left : left + wide] = (part / scale).to(torch.float8_e4m3fn)
            matrix[top : top + high, left : left + wide] = codes[top : top + high, left : left + wide].float() * scale
    return codes, scales, matrix


def float_quantized(strategy: str, block: tuple[int, int] | None = None) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        sizes = block or ((1, weight.shape[1]) if strategy == "channel" else tuple(weight.shape))
        codes, scales, matrix = float8(weight, sizes)
        return {".weight": codes, ".weight_scale": scales.view(-1) if strategy == "tensor" else scales}, matrix

    structure = {} if block is None else {"block_structure": list(block)}
    return Layout(compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy=strategy, **structure), write)


def fp8(block: tuple[int, int] | None, scale: str = ".weight_scale_inv") -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scales, matrix = float8(weight, block or tuple(weight.shape))
        if block is None:
            return {".weight": codes, scale: scales.view(()), ".input_scale": torch.tensor(0.5)}, matrix
        return {".weight": codes, scale: scales}, matrix

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return Layout({**config, **({} if block is None else {"weight_block_size": list(block)})}, write)


NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]


def nf4(*, double: bool) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        flat, table = weight.flatten(), torch.tensor(NF4)
        blocks = [flat[start : start + 64] for start in range(0, len(flat), 64)]
        absmax = torch.stack([block.abs().max() for block in blocks])
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        tensors: Tensors = {".weight.quant_map": table, ".weight.absmax": absmax}
        if double:
            offset = absmax.mean()
            nested_map = torch.linspace(-1, 1, 256)
            nested = torch.stack([(part - offset).abs().max() for part in absmax.split(256)])
            codes = [int((nested_map - (each - offset) / nested[number // 256]).abs().argmin()) for number, each in enumerate(absmax)]
            absmax = torch.stack([nested_map[code] * nested[number // 256] + offset for number, code in enumerate(codes)])
            tensors |= {".weight.absmax": torch.tensor(codes, dtype=torch.uint8), ".weight.nested_absmax": nested}
            tensors[".weight.nested_quant_map"] = nested_map
            state |= {"nested_blocksize": 256, "nested_offset": offset.item(), "nested_dtype": "float32"}
        found = [(table[:, None] - block / most).abs().argmin(0) for block, most in zip(blocks, absmax, strict=True)]
        codes = torch.cat(found)
        tensors[".weight"] = ((codes[::2] << 4) + codes[1::2]).to(torch.uint8)[:, None]
        tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors, torch.cat([table[code] * most for code, most in zip(found, absmax, strict=True)]).view(weight.shape)

    four = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    return Layout({"quant_method": "bitsandbytes", **four}, write)


def bitsandbytes_int8() -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
        tensors = {".weight": codes, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
        return tensors, codes.float() * largest[:, None] / 127

    return Layout({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, write)


MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def mxfp4() -> Layout:
    """Of all experts together, [experts, out_features, in_features]."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        blocks = weight.unflatten(-1, (-1, 32))
        exponents = (blocks.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
        scaled = blocks / torch.exp2(exponents)[..., None]
        codes = (torch.tensor(MXFP4) - scaled[..., None]).abs().argmin(-1)
        matrix = torch.tensor(MXFP4)[codes] * torch.exp2(exponents)[..., None]
        packed_codes = (codes[..., ::2] + (codes[..., 1::2] << 4)).to(torch.uint8)
        return {"_blocks": packed_codes, "_scales": (exponents + 127).to(torch.uint8)}, matrix.flatten(-2)

    return Layout({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, write)


def mxfp4_packed() -> Layout:
    """Of modules, as compressed-tensors has them."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, matrix = mxfp4().write(weight)
        return {".weight_packed": tensors["_blocks"].flatten(1), ".weight_scale": tensors["_scales"]}, matrix

    four = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return Layout(compressed("mxfp4-pack-quantized", **four), write)


def nvfp4(config: dict[str, Any], codes: str, whole: str, *, divides: bool) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        groups = weight.unflatten(-1, (-1, 16))
        of_all = weight.abs().amax() / (6 * 448)
        scales = (groups.abs().amax(-1) / 6 / of_all).to(torch.float8_e4m3fn)
        exact = scales.float()[..., None] * of_all
        numbers = (torch.tensor(MXFP4) - (groups / exact)[..., None]).abs().argmin(-1)
        matrix = (torch.tensor(MXFP4)[numbers] * exact).flatten(-2)
        numbers = numbers.flatten(-2)
        stored = {codes: (numbers[..., ::2] + (numbers[..., 1::2] << 4)).to(torch.uint8), ".weight_scale": scales}
        return {**stored, whole: (1 / of_all if divides else of_all).reshape(1), ".input_scale": torch.ones(1)}, matrix

    return Layout(config, write)


def modelopt_fp8() -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, matrix = fp8(None, ".weight_scale").write(weight)
        return {**tensors, ".input_scale": torch.ones(())}, matrix

    return Layout({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*mlp.gate"]}, write)


def in_parts(codes: Tensor, bits: int, *, first_is_high: bool) -> Tensor:
    """[n, size] codes in bytes, or 3 bits of them in int32: of the first part of the rows, then of the next one, and so on."""
    parts = 10 if bits == 3 else 8 // bits
    count = -(-len(codes) // parts)
    padded = torch.cat([codes, codes.new_zeros(count * parts - len(codes), codes.shape[1])]).reshape(parts, count, -1).long()
    places = [bits * (parts - 1 - part if first_is_high else part) for part in range(parts)]
    return sum(one << place for one, place in zip(padded, places, strict=True)).to(torch.int32 if bits == 3 else torch.uint8)


def hqq(bits: int, size: int) -> Layout:
    """Zero points are no integers. Its tensors repeat the settings, of which one is here."""

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        found = grouped(weight, bits, size, symmetric=False)
        scales, zeros = found.scales.float(), found.zeros + 0.3
        matrix = (found.codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)
        codes = in_parts(found.codes.reshape(-1, size), bits, first_is_high=True)
        return {".W_q": codes, ".scale": scales.reshape(-1, 1), ".zero": zeros.reshape(-1, 1), ".axis": torch.tensor(1)}, matrix

    params = {"weight_quant_params": {"nbits": bits, "group_size": size, "axis": 1}, "scale_quant_params": None, "zero_quant_params": None}
    return Layout({"quant_method": "hqq", "quant_config": params, "skip_modules": ["lm_head", "mlp.gate"]}, write)


def torchao(kind: str, write: Callable[[Tensor], tuple[Tensors, Tensor]], **data: Any) -> Layout:
    def renamed(weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, matrix = write(weight)
        names = {".weight": "._weight_qdata", ".weight_scale": "._weight_scale", ".weight_zero_point": "._weight_zero_point"}
        return {names[name]: tensor for name, tensor in tensors.items() if name in names}, matrix

    described = {"_type": kind, "_version": 2, "_data": data}
    left = ["lm_head", "mlp.gate"]
    return Layout({"quant_method": "torchao", "quant_type": {"default": described}, "modules_to_not_convert": left}, renamed)


def torchao_intx(bits: int, size: int) -> Layout:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        found, half = grouped(weight, bits, size, symmetric=False), 1 << (bits - 1)
        codes, zeros = ((each - half).to(torch.int8) for each in (found.codes, found.zeros))
        return {".weight": codes, ".weight_scale": found.scales, ".weight_zero_point": zeros}, found.matrix

    granularity = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": size}}
    of_weights = {"_type": "torch.dtype", "_data": f"int{bits}"}
    packing = {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"}
    return torchao("IntxWeightOnlyConfig", write, granularity=granularity, weight_dtype=of_weights, intx_packing_format=packing)


def quanto(kind: str, *modules: str) -> Layout:
    """Of these modules."""
    bits = int(kind.removeprefix("qint")) if "qint" in kind else 8

    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        columns = weight.shape[1]
        if kind == "qfloat8":
            codes, scales, matrix = float8(weight, (1, columns))
            return {".weight._data": codes, ".weight._scale": scales, ".input_scale": torch.ones(())}, matrix
        if kind == "qint8":
            found = grouped(weight, 8, columns, symmetric=True)
            return {".weight._data": (found.codes - 128).to(torch.int8), ".weight._scale": found.scales}, found.matrix
        size = next((size for size in (128, 96, 64, 32) if columns > 128 and columns % size == 0), columns)
        found = grouped(weight, bits, size, symmetric=False)
        scales = found.scales.float()
        shifts = scales * found.zeros
        matrix = found.codes * scales.repeat_interleave(size, 1) - shifts.repeat_interleave(size, 1)
        codes = in_parts(found.codes.reshape(-1, size), bits, first_is_high=False)
        return {".weight._data._data": codes, ".weight._scale": scales.view(-1, 1), ".weight._shift": shifts.view(-1, 1)}, matrix

    return Layout({"quant_method": "quanto", "modules": {name: {"weights": kind, "activations": "none"} for name in modules}}, write)


_TENSOR_GROUP = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*mlp.gate"]}
FEW_BITS: dict[str, Layout] = {
    "gptq 2 bits": gptq(2, 32, symmetric=False),
    "gptq 2 bits, act-order": gptq(2, 16, act_order=True),
    "gptq 3 bits": gptq(3, 32, version=2),
    "gptq 3 bits, asymmetric": gptq(3, 32, symmetric=False),
    "nvfp4-pack-quantized": nvfp4(
        compressed("nvfp4-pack-quantized", **_TENSOR_GROUP), ".weight_packed", ".weight_global_scale", divides=True
    ),
    "modelopt nvfp4": nvfp4(_NVFP4, ".weight", ".weight_scale_2", divides=False),
    "modelopt fp8": modelopt_fp8(),
    "mlx 2 bits": mlx(2, 32),
    "mlx 3 bits": mlx(3, 32),
    "mlx 4 bits": mlx(4, 32, mode="affine"),
    "mlx 5, 6 bits": mlx(5, 32),
    "mlx 6, 6 bits": mlx(6, 32),
    "mlx 8 bits": mlx(8, 32),
    "hqq 2 bits": hqq(2, 32),
    "hqq 3 bits": hqq(3, 32),
    "hqq 4 bits": hqq(4, 32),
    "hqq 8 bits": hqq(8, 32),
    "torchao, int8": torchao("Int8WeightOnlyConfig", int_quantized("channel").write, granularity={"_type": "PerRow", "_data": {"dim": -1}}),
    "torchao, float8": torchao(
        "Float8DynamicActivationFloat8WeightConfig",
        float_quantized("channel").write,
        granularity=[{"_type": "PerTensor"}, {"_type": "PerRow"}],
    ),
    "torchao 4 bits": torchao_intx(4, 32),
    "torchao 3 bits": torchao_intx(3, 32),
    "auto-round 3 bits": auto_round("auto_round:auto_gptq", gptq(3, 32, symmetric=False)),
}
"""Their words hold 16 or 32 rows, or their groups 16 columns."""
LAYOUTS: dict[str, Layout] = {
    "pack-quantized 4 bits, groups of 32": pack_quantized(4, 32),
    "pack-quantized 4 bits, asymmetric": pack_quantized(4, 32, symmetric=False),
    "pack-quantized 4 bits, channels": pack_quantized(4, None),
    "pack-quantized 4 bits, actorder": pack_quantized(4, 32, act_order=True),
    "pack-quantized 8 bits, asymmetric": pack_quantized(8, 32, symmetric=False),
    "pack-quantized 8 bits, channels": pack_quantized(8, None),
    "int-quantized, channels": int_quantized("channel"),
    "int-quantized, channels, asymmetric": int_quantized("channel", symmetric=False),
    "int-quantized, tensor": int_quantized("tensor"),
    "int-quantized 4 bits": int_quantized_4(32),
    "int-quantized 4 bits, asymmetric": int_quantized_4(32, symmetric=False),
    "mxfp4-pack-quantized": mxfp4_packed(),
    "float-quantized, tensor": float_quantized("tensor"),
    "float-quantized, channels": float_quantized("channel"),
    "float-quantized, blocks": float_quantized("block", (24, 32)),
    "gptq 4 bits": gptq(4, 32),
    "gptq 4 bits, asymmetric": gptq(4, 32, symmetric=False),
    "gptq 4 bits, act-order": gptq(4, 32, symmetric=False, act_order=True),
    "gptq 8 bits, act-order": gptq(8, 32, act_order=True),
    "gptq 8 bits, whole rows": gptq(8, -1, symmetric=False),
    "gptq version 2": gptq(4, 32, symmetric=False, version=2),
    "awq": awq(32),
    "awq gemv": awq_gemv(32),
    "auto-round as gptq": auto_round("auto_round:auto_gptq", gptq(4, 32, symmetric=False)),
    "auto-round": auto_round("auto_round", gptq(4, 32, symmetric=False, version=2)),
    "auto-round as awq": auto_round("auto_round:auto_awq", awq(32)),
    "fp8, blocks": fp8((24, 32)),
    "fp8, tensor": fp8(None),
    "fp8, tensor, other name": fp8(None, ".weight_scale"),
    "nf4": nf4(double=False),
    "nf4, double": nf4(double=True),
    "bitsandbytes int8": bitsandbytes_int8(),
}
