"""Digests of weights: equal for equal values, however they are held, and other ones for any difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from aengine.kernels.quantized import QuantizedRows, Rows
from aengine.models.loading.checkpoint import WeightsDigest

WEIGHT = torch.randn(300, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
CODES = QuantizedRows(torch.randint(-9, 9, (30, 64), dtype=torch.int8), torch.rand(30, 2), 32, 8, torch.rand(30, 2))


def digest(*weights: tuple[str, Sequence[Rows]]) -> str:
    made = WeightsDigest()
    for name, parts in weights:
        made.add_weight(name, parts)
    return made.hexdigest()


def test_the_same_values_in_other_memory() -> None:
    wide = torch.zeros(300, 71, dtype=torch.bfloat16)
    wide[:, :70] = WEIGHT
    assert digest(("a", [wide[:, :70]])) == digest(("a", [WEIGHT]))
    assert digest(("a", [replace(CODES, codes=CODES.codes.clone())])) == digest(("a", [CODES]))


@pytest.mark.parametrize("index", [0, 11_111, 20_999])
def test_any_value_counts(index: int) -> None:
    changed = WEIGHT.clone().flatten()
    changed[index] += 1
    assert digest(("a", [changed.view(300, 70)])) != digest(("a", [WEIGHT]))


def test_names_shapes_dtypes_and_order_count() -> None:
    empty, one = torch.zeros(0), torch.tensor(1.0)
    found = [
        digest(("a", [WEIGHT]), ("b", [one])),
        digest(("b", [WEIGHT]), ("a", [one])),
        digest(("a", [WEIGHT, one])),
        digest(("b", [one]), ("a", [WEIGHT])),
        digest(("a", [WEIGHT.view(70, 300)]), ("b", [one])),
        digest(("a", [WEIGHT.view(torch.int16)]), ("b", [one])),
        digest(("a", [WEIGHT]), ("b", [empty])),
        digest(("a", [CODES])),
        digest(("a", [replace(CODES, offsets=None)])),
        digest(("a", [replace(CODES, scales=CODES.scales * 2)])),
    ]
    assert len(set(found)) == len(found)
