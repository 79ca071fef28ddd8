"""The attention kernels compile for a GPU, on machines that have none, and do not compile again in the midst of serving."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from ahead_of_time import ONE_RELEASE_IN_CI, AheadOfTime
from triton_mode import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the kernels run compiled where there is CUDA"),
    ONE_RELEASE_IN_CI,
    pytest.mark.slow,
]

_BACKEND = """
import numpy as np, torch
from aengine.attention import AttentionMetadata, AttentionSpec, Scoring, build_layout
from aengine.attention.triton import TritonBackend
from aengine.kernels.triton import attention as kernels
from aengine.attention import triton as triton_decodes
kernels.runs_on = lambda device: True
triton_decodes.is_hopper = lambda device: {hopper}
backend = TritonBackend(AttentionSpec(
    num_heads={heads}, num_kv_heads={kv_heads}, head_dim={head_dim}, value_dim={value_dim}, latent={value_dim} > 0,
    page_size={page_size}, dtype=torch.{dtype}, kv_dtype={kv_dtype},
    scoring=(Scoring(0.1, {window}, {soft_cap}, {sinks}, (0.5,) * {heads} * {slopes}),), device=torch.device("cpu"),
))
"""
_KERNELS = {"write_kernel": 1, "decode_kernel": 1, "combine_kernel": 1, "prefill_kernel": 1}
_PROCESSOR_BYTES = 228 << 10  # of shared memory on Hopper; each program takes 1 KB more than it has
_LEAST_BYTES = 99 << 10  # that a program may have on the smallest devices, compute capability 8.6 and 8.9


_STEPS = """
backend.allocate(1000)
table = np.arange(1, 901, dtype=np.int32).reshape(1, 100, 9)
for num_decodes, lengths in ((1, [1]), (16, [1] * 16), (3, [1, 1, 1, 40, 1]), (100, [1] * 100), (0, [130])):
    for shift in range(5):
        lengths = np.array(lengths, dtype=np.int32)
        layout = build_layout(np.arange(len(lengths), dtype=np.int32), num_decodes, 0 * lengths, lengths, table, 16)
        names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
        arrays = [np.zeros(shift, dtype=np.int32)] + [getattr(layout, name) for name in names]
        parts = torch.split(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), [array.size for array in arrays])
        device = [part.view(array.shape) for part, array in zip(parts, arrays)][1:]
        step = backend.plan(AttentionMetadata(layout, *device))
        query, key, value = torch.zeros(layout.num_tokens, 8, 64, dtype=torch.bfloat16).split([4, 2, 2], dim=1)
        step.write(0, key, value)
        step.attend(0, query)
"""

_LONG_PROMPT = """
backend.allocate(520)
lengths, table = np.array([8192], dtype=np.int32), np.arange(1, 513, dtype=np.int32).reshape(1, 1, 512)
layout = build_layout(np.zeros(1, dtype=np.int32), 0, 0 * lengths, lengths, table, 16)
names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
step = backend.plan(AttentionMetadata(layout, *(torch.from_numpy(getattr(layout, name)) for name in names)))
step.attend(0, torch.empty(8192, 128, 576, dtype=torch.bfloat16))  # of which nothing is read
"""

_CONVOLUTION = """
import dataclasses
backend = TritonBackend(dataclasses.replace(backend.spec, places=((0, 0), (1, 0), (1, 1))))
backend.allocate(100)
for num_rows in (1, 3, 16):
    lengths, table = np.ones(num_rows, dtype=np.int32), np.arange(1, 97, dtype=np.int32).reshape(2, 16, 3)
    layout = build_layout(np.arange(num_rows, dtype=np.int32), num_rows, lengths * 20, lengths, table, 16)
    step = backend.plan(AttentionMetadata.of(layout, torch.device("cpu")))
    step.convolve(range(1, 3), *(torch.zeros(size, dtype=torch.bfloat16) for size in ((num_rows, 400), (400, 3))), None)
"""

_STATES = """
import dataclasses
from aengine.attention import StepStates
from aengine.kernels.paged_cache import StateLayout, StateShape
from aengine.kernels.recurrence import RecurrentRule
heads, key_heads, keys, values, gates, channels, taps, per_head, of_numbers, delta = {sizes}
width = heads * values
states = StateLayout.of([StateShape(heads, keys, values, channels + gates, taps)] * 3, 12, 16 * 2 * 128 * 2, 2, {pending})
places = tuple((0, index) for index in range(6))
backend = TritonBackend(dataclasses.replace(backend.spec, states=states, places=places, scoring=backend.spec.scoring * 6))
backend.allocate(10)
float32 = lambda *shape: torch.zeros(shape)
rule = RecurrentRule(
    heads, key_heads, keys, values, float32(channels, taps), None, float32(width, keys) if of_numbers else float32(heads),
    float32(heads * per_head) if per_head else None, None if delta else float32(width if of_numbers else heads), delta,
)
for lengths in ([1], [1] * 16, [1, 700], [3, 17]):
    count, lengths = len(lengths), np.array(lengths, dtype=np.int32)
    layout = build_layout(np.arange(count, dtype=np.int32), 0, lengths * 0, lengths, np.zeros((1, count, 50), dtype=np.int32), 16)
    pages, none = np.zeros((count, states.num_pages), dtype=np.int32), np.zeros(count, dtype=np.int32)
    held = StepStates(pages, pages, none + {pending}, none, none, none + 1, pages)
    step = backend.plan(AttentionMetadata.of(dataclasses.replace(layout, states=held), torch.device("cpu")))
    mixed, gated = (torch.zeros(layout.num_tokens, size, dtype=torch.bfloat16) for size in (channels + width, gates))
    for layer in range(3):
        step.recur(layer, rule, mixed[:, :channels], gated)
"""
_CHOSEN = """
import dataclasses
from aengine.attention import IndexQuery, IndexShape
backend = TritonBackend(dataclasses.replace(backend.spec, head_dim=704, index=IndexShape(64, 128, 2048, 4800)))
backend.allocate(520)
for starts, lengths in ([4000], [1]), ([4000] * 16, [1] * 16), ([100, 3000], [1, 700]):
    count, starts, lengths = len(starts), np.array(starts, dtype=np.int32), np.array(lengths, dtype=np.int32)
    layout = build_layout(np.arange(count, dtype=np.int32), 0, starts, lengths, np.zeros((1, count, 300), dtype=np.int32), 16)
    step, tokens = backend.plan(AttentionMetadata.of(layout, torch.device("cpu"))), layout.num_tokens
    query, weights = torch.zeros(tokens, 128, 704, dtype=torch.bfloat16), torch.zeros(tokens, 64)
    step.attend(0, query, index=IndexQuery(query[:, :64, :128], weights))
"""
RECURRENCES = {  # heads, key heads, their width, that of values, gates, channels, taps, gates of a head's steps, these of numbers, delta
    "Qwen3.5": (16, 16, 128, 128, 32, 6144, 4, 1, False, True),
    "Kimi Linear": (32, 32, 128, 128, 32 + 4096, 12_288, 4, 128, False, True),
    "Granite 4": (128, 1, 128, 64, 128, 8448, 4, 1, False, False),
    "Jamba": (128, 1, 16, 64, 32 + 8192, 8192, 4, 64, True, False),
    "MiniMax": (64, 64, 128, 128, 0, 24_576, 1, 0, False, False),
}


@dataclass(frozen=True)
class Case:
    heads: int
    head_dim: int
    dtype: str
    float8: bool
    page_size: int
    soft_cap: float
    window: int | None = 300
    sinks: bool = False
    kv_heads: int = 2
    value_dim: int = 0
    slopes: bool = False

    def backend(self, hopper: bool = True) -> str:
        return _BACKEND.format(**vars(self), kv_dtype="torch.float8_e4m3fn" if self.float8 else None, hopper=hopper)


CASES = [
    Case(10, 128, "bfloat16", False, 16, 0.0),
    Case(14, 64, "bfloat16", True, 1, 30.0),
    Case(2, 256, "float16", True, 7, 0.0, sinks=True),
    Case(2, 256, "float32", False, 256, 0.0),
    Case(32, 128, "bfloat16", False, 16, 0.0, None, kv_heads=32, slopes=True),
    Case(16, 512, "bfloat16", False, 16, 0.0, None),
    Case(16, 576, "bfloat16", False, 16, 0.0, None, kv_heads=1, value_dim=512),
    Case(128, 576, "bfloat16", False, 16, 0.0, None, kv_heads=1, value_dim=512),
]
BUSY = [  # and how many bytes a block of keys and values has
    (Case(32, 128, "bfloat16", False, 16, 0.0, None, kv_heads=8), 64 * 512),
    (Case(32, 128, "bfloat16", True, 16, 0.0, None, kv_heads=8), 64 * 256),
    (Case(32, 64, "bfloat16", False, 16, 0.0, None, kv_heads=8), 64 * 256),
    (CASES[-2], 32 * 1152),
]
AHEAD = AheadOfTime(
    {
        **{str(case): case.backend() for case in (*CASES, *(case for case, _ in BUSY))},
        "steps": Case(4, 64, "bfloat16", False, 16, 0.0, window=None).backend() + _STEPS,
        "long prompt": CASES[-1].backend() + _LONG_PROMPT,
        **{
            name: Case(4, 128, "bfloat16", False, 16, 0.0, window=None).backend() + _STATES.format(sizes=sizes, pending=5)
            for name, sizes in RECURRENCES.items()
        },
        "chosen tokens": CASES[-1].backend() + _CHOSEN,
        "convolution": Case(4, 64, "bfloat16", False, 16, 0.0, window=None).backend() + _CONVOLUTION,
    }
)
SMALL = AheadOfTime({str(case): case.backend(hopper=False) for case in CASES[:-1]}, capability=89)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_compiles(case: Case) -> None:
    assert AHEAD.kernels(str(case)) == _KERNELS
    assert max(variant.shared_bytes for variant in AHEAD.variants(str(case))) < _PROCESSOR_BYTES


@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_it_compiles_for_small_devices(case: Case) -> None:
    assert SMALL.kernels(str(case)) == _KERNELS
    assert max(variant.shared_bytes for variant in SMALL.variants(str(case))) <= _LEAST_BYTES


@pytest.mark.parametrize(("case", "block_bytes"), BUSY, ids=str)
def test_decodes_keep_memory_busy(case: Case, block_bytes: int) -> None:
    """On each multiprocessor of an H100 or H200 there is room for two blocks ahead of each program, 40 KB at least: what memory of 4.8 TB/s
    gives in the microsecond that it may need to answer."""
    (variant,) = (one for one in AHEAD.variants(str(case)) if one.kernel == "decode_kernel")
    assert variant.shared_bytes >= 2 * block_bytes
    at_once = min((1 << 16) // (variant.registers * 128), _PROCESSOR_BYTES // (variant.shared_bytes + 1024))
    assert at_once * 2 * block_bytes >= 40 << 10


def test_steps_need_no_further_variants() -> None:
    """Index arrays are slices of one upload, so their alignment moves; the numbers of rows, tokens and shares move too."""
    assert AHEAD.kernels("steps") == _KERNELS


def test_a_long_latent_prompt_can_be_launched() -> None:
    """It has 65,536 tiles, more than the second dimension of a grid can have."""
    assert AHEAD.kernels("long prompt") == _KERNELS


def test_convolutions_compile_once_for_each_place() -> None:
    assert AHEAD.kernels("convolution") == {**_KERNELS, "convolve_kernel": 2}


def test_chosen_tokens_compile_once() -> None:
    """Of DeepSeek-V3.2, whatever the rows of a step are; decodes of other keys and of pages of one token are two more."""
    compiled = AHEAD.kernels("chosen tokens")
    assert (compiled["score_kernel"], compiled["choose_kernel"]) == (1, 1)
    assert compiled["decode_kernel"] == 3


@pytest.mark.parametrize("name", RECURRENCES)
def test_recurrences_compile_once(name: str) -> None:
    """For all layers, and whatever the rows of a step are, but for prompts, which most recurrences compute in blocks, and decodes alone,
    whose convolutions have one token."""
    compiled = {"_convolve": 2, "_replay": 1, "_recur": 1, "_keep": 1}
    if name != "Jamba":
        compiled |= {"_recur": 2, "relate_blocks": 1}
    assert {kernel: count for kernel, count in AHEAD.kernels(name).items() if kernel not in _KERNELS} == compiled
    registers = [variant.registers for variant in AHEAD.variants(name) if variant.kernel in compiled and variant.shared_bytes < 8 << 10]
    assert max(registers) <= 128, "what a thread has of a matrix, and of tokens one by one, leaves room for a second program"
