"""Digests of weights: equal for equal values, however they are held, and other ones for any difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from aengine.kernels.arrays import BFLOAT16
from aengine.kernels.quantized import QuantizedRows, Rows
from aengine.models.loading.checkpoint import WeightsDigest

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((300, 70)).astype(BFLOAT16)
CODES = QuantizedRows(
    RANDOM.integers(-9, 9, (30, 64), np.int8), RANDOM.random((30, 2), np.float32), 32, 8, RANDOM.random((30, 2), np.float32)
)


def digest(*weights: tuple[str, Sequence[Rows]]) -> str:
    made = WeightsDigest()
    for name, parts in weights:
        made.add_weight(name, parts)
    return made.hexdigest()


def test_the_same_values_in_other_memory() -> None:
    wide = np.zeros((300, 71), BFLOAT16)
    wide[:, :70] = WEIGHT
    assert digest(("a", [wide[:, :70]])) == digest(("a", [WEIGHT]))
    assert digest(("a", [replace(CODES, codes=CODES.codes.copy())])) == digest(("a", [CODES]))


@pytest.mark.parametrize("index", [0, 11_111, 20_999])
def test_any_value_counts(index: int) -> None:
    changed = WEIGHT.flatten()
    changed[index] += 1
    assert digest(("a", [changed.reshape(300, 70)])) != digest(("a", [WEIGHT]))


def test_names_shapes_dtypes_and_order_count() -> None:
    empty, one = np.zeros(0, np.float32), np.array(1.0, np.float32)
    found = [
        digest(("a", [WEIGHT]), ("b", [one])),
        digest(("b", [WEIGHT]), ("a", [one])),
        digest(("a", [WEIGHT, one])),
        digest(("b", [one]), ("a", [WEIGHT])),
        digest(("a", [WEIGHT.reshape(70, 300)]), ("b", [one])),
        digest(("a", [WEIGHT.view(np.int16)]), ("b", [one])),
        digest(("a", [WEIGHT]), ("b", [empty])),
        digest(("a", [CODES])),
        digest(("a", [replace(CODES, offsets=None)])),
        digest(("a", [replace(CODES, scales=CODES.scales * 2)])),
    ]
    assert len(set(found)) == len(found)
