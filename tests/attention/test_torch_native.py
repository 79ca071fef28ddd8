"""What the reference backend does beyond plain attention: caches of 8 bits, and capped scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from ragged import Crowd, metadata_on

from aengine.attention import AttentionSpec, Scoring
from aengine.attention.torch_native import TorchNativeBackend

FLOAT8 = torch.float8_e4m3fn
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]),
]


def make_spec(
    device: str,
    *,
    soft_cap: float = 0.0,
    kv_dtype: torch.dtype | None = None,
    scales: tuple[tuple[float, float], ...] | None = None,
    value_dim: int = 0,
    latent: bool = False,
    slopes: tuple[float, ...] = (),
) -> AttentionSpec:
    capped = {"soft_cap": soft_cap, "slopes": slopes}
    return AttentionSpec(
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        scoring=(Scoring(0.8, None, **capped), Scoring(0.8, 7, **capped), Scoring(0.3, 9, soft_cap / 2, sinks=True, chunked=True)),
        page_size=4,
        dtype=torch.float32,
        device=torch.device(device),
        kv_dtype=kv_dtype,
        kv_scales=scales,
        value_dim=value_dim,
        latent=latent,
    )


LATENT = {"value_dim": 6, "latent": True}


def poison(crowd: Crowd) -> None:
    """Fills every page but page 0 with NaN, through the contract: as if one row had owned them all."""
    spec = crowd.spec
    pages = np.arange(1, crowd.num_pages)
    layout = crowd.layout([], {0: 1})
    for page in pages:
        for offset in range(spec.page_size):
            layout.slot_mapping[:, 0] = page * spec.page_size + offset
            step = crowd.backend.plan(metadata_on(spec.device, layout))
            bad = torch.full((1, spec.num_kv_heads, spec.head_dim), torch.nan, dtype=spec.dtype, device=spec.device)
            for layer in range(len(spec.scoring)):
                step.write(layer, bad, bad[..., : spec.value_dim])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [None, FLOAT8, torch.int8])
@pytest.mark.parametrize("widths", [{"slopes": (4.0, 1.0, 0.5, 0.2, 0.1, 0.01)}, {"soft_cap": 1.5}, {"value_dim": 6}, LATENT, {}], ids=str)
def test_ragged_steps(device: str, kv_dtype: torch.dtype | None, widths: dict[str, Any]) -> None:
    scales = ((0.5, 0.03), (2.0, 1.0), (1.0, 1.0)) if kv_dtype is FLOAT8 else None
    spec = make_spec(device, kv_dtype=kv_dtype, scales=scales, **widths)
    crowd = Crowd(spec, TorchNativeBackend(spec), seed=1)
    poison(crowd)
    for _ in range(8):
        crowd.run(*crowd.random_step(longest=12))


@pytest.mark.parametrize("device", DEVICES)
def test_float8_without_scales_saturates(device: str) -> None:
    spec = make_spec(device, kv_dtype=FLOAT8)
    crowd = Crowd(spec, TorchNativeBackend(spec), seed=2)
    layout = crowd.layout([], {0: 1})
    step = crowd.backend.plan(metadata_on(spec.device, layout))
    value = torch.full((1, 2, 10), 1000.0, device=device)
    value[0, 0, 0], value[0, 1, 1] = -1e9, 17.0  # between 16 and 18: to even
    step.write(0, value, value)
    expected = torch.full((1, 2, 10), 448.0)
    expected[0, 0, 0], expected[0, 1, 1] = -448.0, 16.0
    out = step.attend(0, torch.zeros(1, 6, 10, device=device))
    assert torch.equal(out.cpu(), expected.repeat_interleave(3, dim=1))


GROUPS = {"scoring": (Scoring(0.8), *[Scoring(0.5, 7)] * 3), "places": ((0, 0), (1, 0), (1, 1), (2, 0))}
"""Four layers, two in a page, the last place of which is of no layer in two groups."""


@pytest.mark.parametrize("device", DEVICES)
def test_groups_of_layers(device: str) -> None:
    """Each has pages of its own, and gives back those behind its window."""
    spec = dataclasses.replace(make_spec(device), **GROUPS, num_groups=0)
    assert (spec.num_groups, spec.layers_per_page) == (3, 2)
    crowd = Crowd(spec, TorchNativeBackend(spec), seed=4)
    assert crowd.backend.bytes_per_page() == 2 * 2 * 2 * 4 * 10 * 4
    for _ in range(10):
        crowd.run(*crowd.random_step(longest=12))
    assert not crowd.table[1, crowd.computed > 40, 0].any()
    assert crowd.table[0].all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [None, FLOAT8, torch.int8])
def test_copied_pages(device: str, kv_dtype: torch.dtype | None) -> None:
    """Row 1 takes over the pages of row 0, which it then extends alone."""
    spec = make_spec(device, kv_dtype=kv_dtype)
    crowd = Crowd(spec, TorchNativeBackend(spec), seed=3, num_rows=2)
    crowd.run([], {0: 6, 1: 1})
    crowd.backend.copy_pages(crowd.table[0, 0, :2], crowd.table[0, 1, :2])
    crowd.computed[1], crowd.stored[1] = crowd.computed[0], list(crowd.stored[0])
    crowd.run([0, 1], {})
    crowd.run([1], {0: 3})


def test_bytes_per_page() -> None:
    assert TorchNativeBackend(make_spec("cpu")).bytes_per_page() == 2 * 3 * 2 * 4 * 10 * 4
    assert TorchNativeBackend(make_spec("cpu", kv_dtype=FLOAT8)).bytes_per_page() == 2 * 3 * 2 * 4 * 10
    assert TorchNativeBackend(make_spec("cpu", kv_dtype=torch.int8)).bytes_per_page() == 2 * 3 * 2 * 4 * (10 + 4)
    latent = make_spec("cpu", kv_dtype=torch.int8, value_dim=6, latent=True)  # a value has a scale of its own
    assert TorchNativeBackend(latent).bytes_per_page() == 3 * 2 * 4 * (10 + 4 + 6 + 4)
