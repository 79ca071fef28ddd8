"""Attention in Triton to the tokens that an index chooses, against plain torch: prompts, decodes, graphs, and scores that are equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from slow_cases import slow_but
from triton_mode import DEVICES

from aengine.attention import AttentionMetadata, AttentionSpec, IndexQuery, IndexShape, Scoring, StepLayout, build_layout
from aengine.attention.base import attend_chosen_torch
from aengine.attention.triton import TritonBackend
from aengine.kernels.triton.chosen import choose

PAGE, HEADS, INDEX, ROPE, LATENT, NUM_PAGES = 4, 4, 16, 16, 32, 120


def backend_of(device: str, dtype: torch.dtype, top_k: int) -> TritonBackend:
    spec = AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=INDEX + ROPE + LATENT,
        value_dim=LATENT,
        scoring=(Scoring(0.2),) * 2,
        places=((0, 0), (0, 1)),
        page_size=PAGE,
        dtype=dtype,
        device=torch.device(device),
        latent=True,
        index=IndexShape(3, INDEX, top_k, 100),
    )
    backend = TritonBackend(spec)
    backend.allocate(NUM_PAGES)
    generator = torch.Generator().manual_seed(2)
    for tensor in backend.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return backend


def step_of(starts: list[int], lengths: list[int], num_decodes: int) -> StepLayout:
    count = len(starts)
    pages = np.random.default_rng(0).permutation(np.arange(1, NUM_PAGES))[: count * 25].astype(np.int32).reshape(1, count, 25)
    return build_layout(
        np.arange(count, dtype=np.int32), num_decodes, *(np.array(each, np.int32) for each in (starts, lengths)), pages, PAGE
    )


def index_of(backend: TritonBackend, tokens: int, *, equal: bool) -> IndexQuery:
    """`equal`: most scores are 0, some of them as -0.0."""
    generator = torch.Generator().manual_seed(3)
    query, weights = torch.randn(tokens, 3, INDEX, generator=generator), torch.randn(tokens, 3, generator=generator)
    if equal:
        query *= (torch.rand(tokens, 3, 1, generator=generator) < 0.2).float()
    return IndexQuery(query.to(backend.spec.device, backend.spec.dtype), weights.to(backend.spec.device))


def compare(backend: TritonBackend, layout: StepLayout, *, equal: bool = False, graph: bool = False) -> None:
    spec, count = backend.spec, layout.num_tokens
    metadata = AttentionMetadata.of(layout, spec.device)
    query = torch.randn(count, HEADS, spec.head_dim, generator=torch.Generator().manual_seed(4)).to(spec.device, spec.dtype)
    query[..., :INDEX] = 0.0
    index = index_of(backend, count, equal=equal)
    expected = backend.plan(metadata).attend(1, query)  # to all tokens
    attend_chosen_torch(backend, metadata, 1, query, index, expected)
    if graph:
        step = backend.graph_step(metadata)
        assert step is not None
        step.prepare(layout)
        made = step.attend(1, query, index=index)
    else:
        made = backend.plan(metadata).attend(1, query, index=index)
    tolerance = 1e-5 if spec.dtype is torch.float32 else 2e-2
    assert (made - expected).abs().max() <= tolerance * expected.abs().max()


CASES = [(torch.float32, 12), (torch.bfloat16, 7)]


@pytest.mark.usefixtures("bfloat16_arithmetic")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "top_k"), slow_but([CASES[0]], CASES))
def test_steps(dtype: torch.dtype, top_k: int, device: str) -> None:
    backend = backend_of(device, dtype, top_k)
    compare(backend, step_of([60, 3, 0, 30], [1, 1, 20, 5], 2))
    compare(backend, step_of([60, 40], [1, 9], 1), equal=True)
    compare(backend, step_of([2, 0], [1, 5], 1))  # all of them see all
    compare(backend, step_of([90, 3, top_k - 1, top_k], [1] * 4, 4), graph=True)


@pytest.mark.parametrize("device", DEVICES)
def test_slots(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of positions, and some tokens behind others where there is no room for the scores of all."""
    top_k = 6
    backend, layout = backend_of(device, torch.float32, top_k), step_of([40, 2], [3, 7], 0)
    metadata, index = AttentionMetadata.of(layout, backend.spec.device), index_of(backend, 10, equal=True)
    tokens = torch.tensor([layout.positions.tolist(), [0] * 3 + [int(layout.kv_indptr[1])] * 7], dtype=torch.int32, device=device)
    found = choose(index.query, index.weights, backend.caches[0], metadata.kv_indices[0], tokens, top_k, 43).cpu()
    monkeypatch.setattr("aengine.kernels.triton.chosen._MOST_SCORES", 3 * 43)
    again = choose(index.query, index.weights, backend.caches[0], metadata.kv_indices[0], tokens, top_k, 43).cpu()
    keys = backend.caches[0].keys.flatten(0, 2)[:, :INDEX].cpu()
    for token, position in enumerate(layout.positions.tolist()):
        first = int(layout.kv_indptr[0 if token < 3 else 1])
        slots = [int(layout.kv_indices[0, first + at // PAGE]) * PAGE + at % PAGE for at in range(position + 1)]
        scores = index.weights[token].cpu() @ torch.relu(index.query[token].cpu() @ keys[slots].t())
        chosen = sorted(sorted(range(position + 1), key=lambda at: (-float(scores[at]), at))[:top_k])
        assert found[token, : len(chosen)].tolist() == [slots[at] for at in chosen]
        assert again[token, : len(chosen)].tolist() == [slots[at] for at in chosen]
