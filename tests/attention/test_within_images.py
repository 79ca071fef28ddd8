"""What tokens see, all of their image (`Scoring.within_images`) or their chunk (`chunked`): every backend against a softmax in float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ragged import metadata_on
from slow_cases import slow_but
from torch import Tensor
from triton_mode import DEVICES

from aengine.attention import AttentionBackend, AttentionSpec, Scoring, build_layout
from aengine.attention.cpu import CpuBackend
from aengine.attention.torch_native import TorchNativeBackend
from aengine.attention.triton import TritonBackend
from aengine.kernels.triton import attention as kernels

SCORINGS = (Scoring(0.3, within_images=True), Scoring(0.4, 6, within_images=True), Scoring(0.5), Scoring(0.4, 6, chunked=True))
FINE = kernels.BlockSizes(keys=16, queries=16, split_keys=16)


def expected(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, seen: np.ndarray) -> Tensor:
    """[T, 4, 16] of one row whose tokens are all computed; query heads 0 and 1 read KV head 0."""
    out = torch.empty(query.shape)
    for token in range(len(query)):
        high = int(seen[token]) if scoring.within_images else token + 1
        window = scoring.window or len(query)
        low = token // window * window if scoring.chunked else max(0, token - window + 1)
        for head in range(4):
            weights = (key[low:high, head // 2] @ query[token, head] * scoring.scale).softmax(0)
            out[token, head] = weights @ value[low:high, head // 2]
    return out


def check(backend: AttentionBackend, device: torch.device, count: int, image: tuple[int, int]) -> None:
    """A row of `count` tokens whose image is at these, beside one that is text."""
    rng = torch.Generator().manual_seed(count)
    backend.allocate(64)
    table = np.arange(1, 61, dtype=np.int32).reshape(1, 2, 30)
    zeros = np.zeros(2, np.int32)
    layout = build_layout(np.arange(2, dtype=np.int32), 0, zeros, np.array([count, 5], np.int32), table, 4)
    seen = layout.positions + 1
    seen[image[0] : image[1]] = image[1]
    step = backend.plan(metadata_on(device, replace(layout, seen=seen.astype(np.int32))))
    for layer, scoring in enumerate(SCORINGS):
        query, key, value = torch.randn((count + 5, 8, 16), generator=rng).split((4, 2, 2), dim=1)
        step.write(layer, key.to(device), value.to(device))
        out = step.attend(layer, query.to(device)).cpu()
        for begin, end in ((0, count), (count, count + 5)):
            tokens = slice(begin, end)
            wanted = expected(query[tokens], key[tokens], value[tokens], scoring, seen[tokens])
            torch.testing.assert_close(out[tokens], wanted, atol=2e-6, rtol=0)


CASES = [(11, (3, 9)), (70, (20, 66)), (70, (0, 70)), (40, (39, 40))]
IMAGES = pytest.mark.parametrize(("count", "image"), CASES)


def spec_on(device: str) -> AttentionSpec:
    return AttentionSpec(4, 2, 16, SCORINGS, 4, torch.float32, torch.device(device))


@IMAGES
@pytest.mark.parametrize("kind", [TorchNativeBackend, CpuBackend])
def test_on_a_cpu(kind: type[AttentionBackend], count: int, image: tuple[int, int]) -> None:
    check(kind(spec_on("cpu")), torch.device("cpu"), count, image)


@pytest.mark.parametrize(("count", "image"), slow_but([CASES[0], CASES[-1]], CASES))
@pytest.mark.parametrize("device", DEVICES)
def test_in_triton(device: str, count: int, image: tuple[int, int]) -> None:
    check(TritonBackend(spec_on(device), FINE), torch.device(device), count, image)
