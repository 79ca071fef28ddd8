"""Attention of torch models by our CPU kernels, against the float32 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ragged import Crowd

from aengine.attention import AttentionSpec, BackendUnavailableError, Scoring
from aengine.attention.cpu import CpuBackend

CPU = torch.device("cpu")


def make_spec(dtype: torch.dtype = torch.float32, *, head_dim: int = 20, page_size: int = 16, **options: Any) -> AttentionSpec:
    """Of three layers, the second of which is in a group of its own."""
    scoring = (Scoring(0.3, slopes=(4.0, 1.0, 0.5, 0.2, 0.1, 0.01)), Scoring(0.5, 7, 1.5), Scoring(0.2, 9, sinks=True, chunked=True))
    return AttentionSpec(6, 2, head_dim, scoring, page_size, dtype, CPU, places=((0, 0), (1, 0), (0, 1)), **options)


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("value_dim", [0, 12])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.int8)])
def test_ragged_steps(dtype: torch.dtype, kv_dtype: torch.dtype | None, value_dim: int, page_size: int) -> None:
    spec = make_spec(dtype, kv_dtype=kv_dtype, value_dim=value_dim, page_size=page_size)
    crowd = Crowd(spec, CpuBackend(spec), seed=1, tolerance=5e-4 if kv_dtype else None)
    for _ in range(8):
        crowd.run(*crowd.random_step(longest=12))
    crowd.run([row for row in range(crowd.num_rows) if 0 < crowd.computed[row] < crowd.max_len], {})


def test_copied_pages() -> None:
    spec = make_spec(page_size=4)
    crowd = Crowd(spec, CpuBackend(spec), seed=3, num_rows=2)
    crowd.run([], {0: 6, 1: 1})
    crowd.backend.copy_pages(crowd.table[:, 0, :2].flatten(), crowd.table[:, 1, :2].flatten())
    crowd.computed[1], crowd.stored[1] = crowd.computed[0], list(crowd.stored[0])
    crowd.run([0, 1], {})


def test_bytes_per_page() -> None:
    """Heads are stored in multiples of 16 numbers."""
    assert CpuBackend(make_spec(head_dim=20, value_dim=12)).bytes_per_page() == 2 * 16 * 2 * (32 + 16) * 4
    assert CpuBackend(make_spec(head_dim=20, value_dim=12, kv_dtype=torch.int8)).bytes_per_page() == 2 * 16 * 2 * (32 + 16 + 8)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {}),
        (torch.float32, {"head_dim": 15}),
        (torch.float32, {"head_dim": 1024}),
        (torch.float32, {"kv_dtype": torch.float8_e4m3fn}),
    ],
)
def test_models_for_other_backends(dtype: torch.dtype, options: dict[str, Any]) -> None:
    with pytest.raises(BackendUnavailableError):
        CpuBackend(make_spec(dtype, **options))
