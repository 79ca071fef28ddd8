"""Sums of one row are the same bits whatever the others are: products, sums, codes and attention as batch-invariant numerics have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from quantized_cases import Kind
from ragged import metadata_on
from torch import Tensor
from triton_mode import DEVICES

from aengine.attention import AttentionSpec, Scoring, build_layout
from aengine.attention.triton import TritonBackend
from aengine.kernels.paged_cache import KvTarget
from aengine.kernels.triton import attention as kernels
from aengine.kernels.triton import code_products
from aengine.kernels.triton.code_products import code_linear, product, row_sums, running_row_sums
from aengine.kernels.triton.codes import Codes

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("device", DEVICES)]


def random(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def steep(*shape: int, device: str, seed: int = 0) -> Tensor:
    """Small integers times powers of two, one for each 32 columns: what one instruction multiplies adds up exactly, wherever a row is in
    it, and the sum of all is rounded otherwise in another order."""
    choose = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-8, 9, shape, generator=choose).float()
    powers = torch.randint(-20, 21, (-(-shape[-1] // 32),), generator=choose).float().exp2()
    return (numbers * powers.repeat_interleave(32)[: shape[-1]]).to(device)


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    assert torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("with_bias", [False, True])
def test_products(with_bias: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows programs share the depth, with many they do not."""
    monkeypatch.setattr(code_products, "SHARED_BLOCKS", 8)
    x, matrix = steep(270, 1100, device=device), steep(128, 1100, device=device, seed=1).t()
    bias = random(128, device=device, seed=2) if with_bias else None

    def products(rows: Tensor) -> Tensor:
        return product(rows[None], matrix[None], bias, rows.new_empty(1, len(rows), 128))[0]

    found = products(x)
    torch.testing.assert_close(found, (x.double() @ matrix.double() + (0 if bias is None else bias)).float(), rtol=1e-3, atol=1e7)
    for few in (slice(0, 1), slice(3, 8), slice(267, 270)):
        assert_same_bits(products(x[few]), found[few])


def test_products_of_batches(device: str) -> None:
    x, matrices = steep(3, 5, 600, device=device), steep(3, 70, 600, device=device, seed=1).transpose(1, 2)
    found = product(x, matrices, None, x.new_empty(3, 5, 70))
    torch.testing.assert_close(found, x @ matrices, rtol=1e-3, atol=1e7)
    assert_same_bits(product(x[1:2, 2:3], matrices[1:2], None, x.new_empty(1, 1, 70)), found[1:2, 2:3])


def test_sums(device: str) -> None:
    x = random(40, 2500, device=device)
    torch.testing.assert_close(row_sums(x, torch.float64), x.double().sum(-1))
    torch.testing.assert_close(running_row_sums(x, torch.float64), x.double().cumsum(-1))
    assert_same_bits(row_sums(x[7:8], torch.float32), row_sums(x, torch.float32)[7:8])


@pytest.mark.parametrize("kind", [Kind("int4", 32), Kind("int8", None), Kind("uint8", 32, "any")], ids=str)
def test_codes(kind: Kind, device: str) -> None:
    rows = kind.rows(70, 1024)
    codes = Codes.of([rows], 1, torch.device(device))
    assert codes is not None
    x = steep(100, 1024, device=device)
    found = code_linear(x, codes, None, torch.float32, invariant=True)
    torch.testing.assert_close(found, code_linear(x, codes, None, torch.float32), rtol=1e-3, atol=1e3)
    assert_same_bits(code_linear(x[9:10], codes, None, torch.float32, invariant=True), found[9:10])


LENGTHS = (90, 37, 64)
BLOCKS = kernels.BlockSizes(keys=16, queries=16, split_keys=16)


class Rows:
    """Keys, values and queries of three rows, and a pool that their tokens are written to in steps."""

    def __init__(self, backend: TritonBackend) -> None:
        self.backend, spec = backend, backend.spec
        backend.allocate(1 + 3 * 24)
        self.table = (1 + np.random.default_rng(0).permutation(3 * 24)).reshape(1, 3, 24).astype(np.int32)
        self.computed = np.zeros(3, np.int32)
        shapes = {"query": spec.num_heads, "key": spec.num_kv_heads, "value": spec.num_kv_heads}
        self.numbers = {
            (name, row): random(length, heads, spec.head_dim, device=str(spec.device), seed=row + 10 * heads + len(name))
            for row, length in enumerate(LENGTHS)
            for name, heads in shapes.items()
        }
        # What one instruction multiplies adds up exactly, wherever a row is in it: integers, and one value in each block of keys.
        for (name, _), numbers in self.numbers.items():
            has_value = torch.arange(len(numbers), device=numbers.device) % 16 == 5
            numbers.copy_(numbers * has_value[:, None, None] if name == "value" else (2 * numbers).round())

    def step(self, tokens: dict[int, int], layer: int) -> dict[int, Tensor]:
        """Computes so many tokens of each row, those with one token as decodes; returns what attention makes of each row's last one."""
        spec = self.backend.spec
        rows = sorted(tokens, key=lambda row: tokens[row] > 1)
        lengths = np.array([tokens[row] for row in rows], np.int32)
        layout = build_layout(np.array(rows, np.int32), int((lengths == 1).sum()), self.computed[rows], lengths, self.table, spec.page_size)
        query, key, value = (
            torch.cat([self.numbers[name, row][self.computed[row] : self.computed[row] + tokens[row]] for row in rows])
            for name in ("query", "key", "value")
        )
        metadata = metadata_on(spec.device, layout)
        kernels.write(key, value, KvTarget(self.backend.caches[layer], metadata.slot_mapping[0]))
        out = self.backend.plan(metadata).attend(layer, query)
        self.computed[rows] += lengths
        return {row: out[end - 1] for row, end in zip(rows, np.cumsum(lengths), strict=True)}


@pytest.mark.parametrize("layer", [0, 1], ids=["all keys", "window"])
def test_attention(layer: int, device: str) -> None:
    """The last token of a row as the end of a prompt, of a chunk, and as a decode beside others."""
    scoring = (Scoring(0.3, None), Scoring(0.3, 23))
    spec = AttentionSpec(4, 2, 16, scoring, 4, torch.float32, torch.device(device), batch_invariant=True)
    backend = TritonBackend(spec, BLOCKS)
    expected = Rows(backend).step({0: LENGTHS[0]}, layer)[0]
    in_chunks = Rows(backend)
    in_chunks.step({0: 41, 1: 3}, layer)
    in_chunks.step({0: 29, 1: 1, 2: 50}, layer)
    assert_same_bits(in_chunks.step({0: 20, 2: 1}, layer)[0], expected)
    decoded = Rows(backend)
    decoded.step({0: 80, 2: 63}, layer)
    decoded.step({0: 9, 1: 36}, layer)
    assert_same_bits(decoded.step({0: 1, 1: 1, 2: 1}, layer)[0], expected)
    plain = Rows(TritonBackend(replace(spec, batch_invariant=False), BLOCKS)).step({0: LENGTHS[0]}, layer)[0]
    torch.testing.assert_close(plain, expected)
