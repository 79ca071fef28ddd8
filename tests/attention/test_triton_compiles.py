"""The attention kernels compile for a GPU, on machines that have none, and do not compile again in the midst of serving."""

from __future__ import annotations

from collections import Counter

import pytest
from ahead_of_time import compiled
from triton_mode import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels run compiled where there is CUDA")

_BACKEND = """
import numpy as np, torch
from aengine.attention import AttentionMetadata, AttentionSpec, build_layout
from aengine.attention.triton import TritonBackend
from aengine.kernels.triton import attention as kernels
kernels.runs_on = lambda device: True
backend = TritonBackend(AttentionSpec(
    num_heads={heads}, num_kv_heads=2, head_dim={head_dim}, scale=0.1, windows={windows}, page_size={page_size}, dtype=torch.{dtype},
    device=torch.device("cpu"), soft_cap={soft_cap}, kv_dtype={kv_dtype},
))
"""
_KERNELS = {"write_kernel": 1, "decode_kernel": 1, "combine_kernel": 1, "prefill_kernel": 1}
_SHARED_BYTES = 99 << 10  # of a block on the smallest devices, compute capability 8.6 and 8.9


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "float8", "page_size", "soft_cap"),
    [
        (10, 128, "bfloat16", False, 16, 0.0),
        (14, 64, "bfloat16", True, 1, 30.0),
        (2, 256, "float16", True, 7, 0.0),
        (2, 256, "float32", False, 256, 0.0),
    ],
)
def test_it_compiles(heads: int, head_dim: int, dtype: str, float8: bool, page_size: int, soft_cap: float) -> None:
    variants = compiled(
        _BACKEND.format(
            heads=heads,
            head_dim=head_dim,
            windows="(100,)",
            page_size=page_size,
            dtype=dtype,
            soft_cap=soft_cap,
            kv_dtype="torch.float8_e4m3fn" if float8 else None,
        )
    )
    assert Counter(variant.kernel for variant in variants) == _KERNELS
    assert max(variant.shared_bytes for variant in variants) <= _SHARED_BYTES


def test_steps_need_no_further_variants() -> None:
    """Index arrays are slices of one upload, so their alignment moves; the numbers of rows, tokens and shares move too."""
    code = _BACKEND.format(heads=4, head_dim=64, windows="(None,)", page_size=16, dtype="bfloat16", soft_cap=0.0, kv_dtype=None)
    steps = """
backend.allocate(1000)
table = np.arange(1, 901, dtype=np.int32).reshape(100, 9)
for num_decodes, lengths in ((1, [1]), (16, [1] * 16), (3, [1, 1, 1, 40, 1]), (100, [1] * 100), (0, [130])):
    for shift in range(5):
        lengths = np.array(lengths, dtype=np.int32)
        layout = build_layout(np.arange(len(lengths), dtype=np.int32), num_decodes, 0 * lengths, lengths, table, 16)
        names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
        arrays = [np.zeros(shift, dtype=np.int32)] + [getattr(layout, name) for name in names]
        device = torch.split(torch.from_numpy(np.concatenate(arrays)), [len(array) for array in arrays])[1:]
        step = backend.plan(AttentionMetadata(layout, *device))
        query, key, value = torch.zeros(layout.num_tokens, 8, 64, dtype=torch.bfloat16).split([4, 2, 2], dim=1)
        step.write(0, key, value)
        step.attend(0, query)
"""
    assert Counter(variant.kernel for variant in compiled(code + steps)) == _KERNELS
