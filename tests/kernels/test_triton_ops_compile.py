"""The layer ops and draws compile for a GPU, on machines that have none, and do not compile again in the midst of serving."""

from __future__ import annotations

import pytest
from ahead_of_time import ONE_RELEASE_IN_CI, AheadOfTime
from quantized_cases import Kind
from triton_mode import INTERPRETED

from aengine.kernels.triton.code_products import FEW_COLUMNS, few_stages, shared_depth

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the kernels run compiled where there is CUDA"),
    ONE_RELEASE_IN_CI,
    pytest.mark.slow,
]

_LAYER_OPS = """
import torch
from aengine.kernels.params import Rotation
from aengine.kernels.paged_cache import KvTarget, PagedCache
from aengine.kernels.params import Activation
from aengine.kernels.triton.layer_ops import TritonOps

def layer_ops(dtype, tokens, hidden, heads, kv_heads, head_dim, norms, positions):
    ops, weight = TritonOps(), torch.zeros(hidden, dtype=dtype)
    x = ops.rms_norm(torch.zeros(tokens, hidden, dtype=dtype), weight, 1e-6)
    ops.add_rms_norm(x, torch.zeros(tokens, hidden, dtype=dtype), weight, 1e-6)
    for activation in Activation:
        ops.gated(torch.zeros(tokens, 6 * hidden, dtype=dtype), activation)
    fused = torch.zeros(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    query, key, value = fused.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), dim=-1)
    query_norm, key_norm = (torch.zeros(head_dim, dtype=dtype) if there else None for there in norms)
    query, key, value = query.view(tokens, heads, head_dim), key.view(tokens, kv_heads, head_dim), value.view(tokens, kv_heads, head_dim)
    rotation = Rotation(torch.zeros(50, head_dim), query_norm, key_norm, 1e-6)
    ops.rotate(query, key, rotation, positions)
    cache = PagedCache(*(torch.zeros(2, 16, kv_heads, head_dim, dtype=dtype) for _ in range(2)))
    ops.rotate_and_write(query, key, value, rotation, positions, KvTarget(cache, positions))

def latent(dtype, heads, rotary_dim, size, cache_dtype, positions):
    tokens = len(positions)
    query, out = (torch.zeros(tokens, heads, rotary_dim + other, dtype=dtype) for other in (128, size))
    key = torch.zeros(tokens, 1, rotary_dim + size, dtype=dtype)
    rotation = Rotation(torch.zeros(50, rotary_dim), key_norm=torch.zeros(size, dtype=dtype), eps=1e-6)
    pages = torch.zeros(2, 16, 1, rotary_dim + size, dtype=cache_dtype)
    for target in (None, KvTarget(PagedCache(pages, pages[..., rotary_dim:], latent=True), positions)):
        TritonOps().rotate_latent(query[..., :rotary_dim], out[..., :rotary_dim], key, rotation, positions, target)
"""
_EXPERTS = """
import torch
from aengine.kernels.params import ExpertLinear, SharedOutput
from aengine.kernels.params import ExpertRouting
from aengine.kernels.triton.experts import Grouping, grouped_linear, weighted_sums
from aengine.kernels.triton.experts import route

def experts(dtype, tokens, hidden, inner, num_experts, top_k, biased):
    x = torch.zeros(tokens, hidden, dtype=dtype)
    grouping = Grouping.of(torch.zeros(tokens, top_k, dtype=torch.int64), num_experts)
    for rows, columns, depth, share in ((x, 2 * inner, hidden, top_k), (torch.zeros(tokens * top_k, inner, dtype=dtype), hidden, inner, 1)):
        weight = torch.zeros(num_experts, columns, depth, dtype=dtype)
        linear = ExpertLinear(weight, torch.zeros(num_experts, columns, dtype=dtype) if biased else None)
        outputs = grouped_linear(rows, linear, grouping, share)
    shared = SharedOutput(torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(tokens, 1, dtype=dtype)) if biased else None
    weighted_sums(outputs, torch.zeros(tokens, top_k), dtype, shared)
    route(torch.zeros(tokens, num_experts), torch.zeros(num_experts, dtype=dtype), None, ExpertRouting(top_k))
"""
_ROUTES = """
import torch
from aengine.kernels.params import ExpertRouting, RouterScoring
from aengine.kernels.triton.experts import route

def routes(num_experts, routing):
    for tokens in (1, 2, 16, 100):
        route(torch.zeros(tokens, num_experts), None, torch.zeros(num_experts), routing)
"""
_CODES = """
import torch
from quantized_cases import Kind
from aengine.kernels.params import ExpertLinear
from aengine.kernels.triton.code_products import code_linear
from aengine.kernels.triton.codes import Codes
from aengine.kernels.triton.experts import Grouping, grouped_linear
from aengine.kernels.params import Activation
from aengine.kernels.triton.layer_ops import TritonOps

CPU = torch.device("cpu")

def linear(dtype, rows, kind, x_dtype=None):
    codes = Codes.of([kind.rows(512, 1024)], 1, CPU)
    x, scales = torch.zeros(rows, 1024, dtype=x_dtype or dtype), None if x_dtype is None else torch.ones(rows, 1)
    code_linear(x, codes, torch.zeros(512, dtype=dtype), dtype, scales)

def experts(dtype, tokens, kind):
    codes = Codes.of([kind.rows(256, 512) for _ in range(4)], 4, CPU)
    grouping = Grouping.of(torch.zeros(tokens, 2, dtype=torch.int64), 4)
    grouped_linear(torch.zeros(tokens, 512, dtype=dtype), ExpertLinear(codes, None), grouping, 2)

def float8(tokens):
    ops, x = TritonOps(), torch.zeros(tokens, 1024, dtype=torch.bfloat16)
    ops.float8(x)
    for activation in Activation:
        ops.gated_float8(x, activation)
    ops.rms_norm_float8(x, None, x[0], 1e-6)
    ops.rms_norm_float8(x, x, x[0], 1e-6)
"""
_ADAPTERS = """
import torch
from aengine.kernels.triton.adapters import TritonAdapterOps
from aengine.layers.adapters import AdapterShape, AdapterTable

def adapters(dtype, hidden, heads, low_rank):
    shapes = {"qkv": AdapterShape(hidden, (0, heads * 128, heads * 160, heads * 192))}
    table = AdapterTable(shapes, 4, low_rank, 300, dtype, torch.device("cpu"), TritonAdapterOps())
    for tokens in (1, 2, 16, 33, 64, 300):
        table.begin(tokens)
        table.add_products("qkv", torch.zeros(tokens, heads * 192, dtype=dtype), torch.zeros(tokens, hidden, dtype=dtype))
"""
_DRAWS = """
import torch
from aengine.kernels.params import DrawParams
from aengine.sampling.draw import TritonDraw

def draws(rows, vocab_size, positions, dtype=torch.float32):
    draw, logits = TritonDraw(vocab_size, torch.device("cpu")), torch.zeros(rows, vocab_size, dtype=dtype)
    params = DrawParams(torch.ones(rows, 8, dtype=torch.int32), positions)
    for with_min_p in (False, True):
        draw.whole(logits, params, with_min_p)
        draw.nucleus(logits, params, with_min_p)
    draw.top_k(logits, params, 64)
"""
_STEPS = """
for rows in (1, 2, 3, 16, 33):
    for begin in range(5):
        positions = torch.zeros(100, dtype=torch.int32)[begin : begin + rows]
"""
_OPS_KERNELS = {"_rms_norm": 2, "_gated": 6, "_rotate": 2}
_DRAW_KERNELS = {
    "_block_parts": 2,
    "_token_of_block": 2,
    "_try_candidates": 2,
    "_finish": 1,
    "_find_likeliest": 1,
    "_draw_from_likeliest": 1,
}

MODELS = [
    "torch.bfloat16, 3, 1024, 16, 8, 128, (True, True)",
    "torch.bfloat16, 3, 5120, 40, 8, 128, (True, False)",
    "torch.float16, 1, 100, 9, 3, 80, (False, False)",
    "torch.float32, 2, 2048, 14, 2, 64, (False, False)",
]
LATENT = ["torch.bfloat16, 128, 64, 512, torch.bfloat16", "torch.bfloat16, 16, 64, 512, torch.float8_e4m3fn"]
MIXTURES = [  # models, and how many variants they need
    ("torch.bfloat16, tokens, 2048, 1024, 8, 4, False", 2),
    ("torch.bfloat16, tokens, 720, 720, 8, 4, True", 2),
    ("torch.float32, tokens, 64, 96, 8, 2, False", 2),
]
GROUPED = [  # routers of DeepSeek-V2 and V3
    "160, ExpertRouting(6, normalize=False, scaling=16.0, num_groups=8, top_groups=3)",
    "256, ExpertRouting(8, RouterScoring.SIGMOID, scaling=2.5, num_groups=8, top_groups=4, group_top=2)",
]
ADAPTERS = ["torch.bfloat16, 4096, 32, 64", "torch.float32, 720, 9, 256"]
QUANTIZED = [  # calls, and how many variants of the product they need
    ('for rows in (1, 2, 16): linear(torch.bfloat16, rows, Kind("int4", 32, "zero", scale_dtype=torch.bfloat16))', 1),
    ('for rows in (65, 100, 5000): linear(torch.bfloat16, rows, Kind("float8", 128), torch.float8_e4m3fn)', 1),
    ('for tokens in (1, 2, 16): experts(torch.bfloat16, tokens, Kind("e2m1", 32))', 1),
]
FEW_FLOAT8 = f"linear(torch.bfloat16, 1, {Kind('float8', None)!r}, torch.float8_e4m3fn)"
MORE_QUANTIZED = [
    *(f"linear(torch.bfloat16, rows, {kind!r})" for kind in (Kind("int4", 128, "any", ordered=True), Kind("uint8", 32, "any"))),
    *(f"linear(torch.bfloat16, rows, {kind!r})" for kind in (Kind("int8", 16), Kind("float8", 128), Kind("float8", None))),
    *(f"linear(torch.float32, rows, {kind!r})" for kind in (Kind("int4", 32), Kind("int8", None), Kind("float8", 64))),
    *(f"linear({dtype}, rows, {Kind('e2m1', 32)!r})" for dtype in ("torch.bfloat16", "torch.float16", "torch.float32")),
    f"linear(torch.float16, rows, {Kind('table', 64)!r})",
    *(f"experts(torch.bfloat16, rows, {kind!r})" for kind in (Kind("int4", 128, "any", ordered=True), Kind("float8", 128))),
    f"experts(torch.float32, rows, {Kind('int8', None)!r})",
]
VOCABULARIES = ["1000", "32_000", "151_936, dtype=torch.bfloat16", "262_144, dtype=torch.bfloat16"]  # and the logits, if not float32
AHEAD = AheadOfTime(
    {
        **{model: f"{_LAYER_OPS}\nlayer_ops({model}, torch.zeros(3, dtype=torch.int32))" for model in MODELS},
        **{
            vocabulary: f"{_DRAWS}\ndraws(3, positions=torch.zeros(3, dtype=torch.int32), vocab_size={vocabulary})"
            for vocabulary in VOCABULARIES
        },
        **{model: f"{_EXPERTS}\nfor tokens in (1, 2, 16, 33, 64, 200):\n    experts({model})" for model, _ in MIXTURES},
        **{router: f"{_ROUTES}\nroutes({router})" for router in GROUPED},
        **{calls: f"{_CODES}\n{calls}" for calls in (*(calls for calls, _ in QUANTIZED), FEW_FLOAT8)},
        **{model: f"{_ADAPTERS}\nadapters({model})" for model in ADAPTERS},
        "float8": f"{_CODES}\nfor tokens in (1, 2, 16, 33): float8(tokens)",
        "steps": f"{_LAYER_OPS}\n{_STEPS}        layer_ops(torch.bfloat16, rows, 1024, 16, 8, 128, (True, True), positions)",
        **{model: f"{_LAYER_OPS}\n{_STEPS}        latent({model}, positions)" for model in LATENT},
        "draws of steps": f"{_DRAWS}\n{_STEPS}        draws(rows, 1000, positions)",
    }
)


MORE = AheadOfTime({calls: f"{_CODES}\nfor rows in (1, 2, 16, 17, 33, 64, 65, 100, 5000): {calls}" for calls in MORE_QUANTIZED})


@pytest.mark.parametrize("model", MODELS)
def test_layer_ops(model: str) -> None:
    assert AHEAD.kernels(model) == _OPS_KERNELS


@pytest.mark.parametrize("model", LATENT)
def test_latent_keys(model: str) -> None:
    """In place and to pages, whatever the number of tokens and wherever positions begin."""
    assert AHEAD.kernels(model) == {"_rotate_latent": 2}


@pytest.mark.parametrize(("model", "variants"), MIXTURES)
def test_experts(model: str, variants: int) -> None:
    """Small and large blocks, whatever the number of tokens."""
    found = AHEAD.kernels(model)
    assert found.pop("_group_choices") in (variants, variants + 1), "choices of one part, and of several"
    assert found == {"_count_choices": 1, "_grouped_linear": variants, "_add_choices": 1, "_route": 1}
    assert max(variant.shared_bytes for variant in AHEAD.variants(model)) <= 99 << 10


@pytest.mark.parametrize("router", GROUPED)
def test_groups_of_experts(router: str) -> None:
    assert AHEAD.kernels(router) == {"_route": 1}


@pytest.mark.parametrize("model", ADAPTERS)
def test_adapters(model: str) -> None:
    """Small and large blocks, whatever the number of tokens."""
    assert AHEAD.kernels(model) == {"_count_choices": 1, "_group_choices": 2, "_shrink": 2, "_expand": 2}
    assert max(variant.shared_bytes for variant in AHEAD.variants(model)) <= 99 << 10


@pytest.mark.parametrize(("calls", "variants"), QUANTIZED)
def test_products_with_codes(calls: str, variants: int) -> None:
    kernels = AHEAD.kernels(calls)
    assert kernels["_linear_codes"] + kernels["_grouped_linear"] == variants
    assert max(variant.shared_bytes for variant in AHEAD.variants(calls)) <= 99 << 10


@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151_936, 4096)])
def test_few_rows_keep_memory_busy(columns: int, depth: int) -> None:
    """Of the matrices of Qwen3-8B on an H100: enough of a matrix is on its way to its multiprocessors, which is the bytes that memory gives
    in the time that it needs to answer."""
    processors, registers, shared = 132, 1 << 16, 227 << 10
    needed = 3.35e12 * 600e-9
    splits, _ = shared_depth(1, columns, depth)
    programs = -(-columns // FEW_COLUMNS) * splits
    for calls, bits in ((QUANTIZED[0][0], 4), (FEW_FLOAT8, 8)):
        (variant,) = (one for one in AHEAD.variants(calls) if one.kernel == "_linear_codes")
        at_once = min(programs, processors * min(registers // (variant.registers * 128), shared // (variant.shared_bytes + 1024)))
        ahead = few_stages(bits, 128, 16, itemsize=2 if bits == 4 else 1) - 1
        assert at_once * ahead * FEW_COLUMNS * 128 * bits / 8 > 1.3 * needed


@pytest.mark.slow
@pytest.mark.parametrize("calls", MORE_QUANTIZED)
def test_more_products_with_codes(calls: str) -> None:
    """One variant for up to 16, 32 and 64 rows, and one for more; of experts one for few choices and one for many."""
    kernels = MORE.kernels(calls)
    assert (kernels["_linear_codes"], kernels["_grouped_linear"]) in ((4, 0), (0, 2))
    assert max(variant.shared_bytes for variant in MORE.variants(calls)) <= 99 << 10


def test_float8_activations() -> None:
    assert AHEAD.kernels("float8") == {"_rms_norm": 2, "_gated": 6, "_quantize": 1}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draws(vocabulary: str) -> None:
    assert AHEAD.kernels(vocabulary) == _DRAW_KERNELS


def test_steps_need_no_further_variants() -> None:
    """The number of rows changes from step to step, and positions are slices of one upload, which begin anywhere."""
    assert AHEAD.kernels("steps") == _OPS_KERNELS
    assert AHEAD.kernels("draws of steps") == _DRAW_KERNELS
