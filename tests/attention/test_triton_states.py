"""Recurrent states in Triton against the plain ones: rows that begin, go on, replay, check drafts and keep states, in one step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ragged import metadata_on
from slow_cases import slow_but
from torch import Tensor
from triton_mode import DEVICES

from aengine.attention import AttentionSpec, Scoring, StepLayout, StepStates, build_layout
from aengine.attention.base import recur_torch
from aengine.attention.triton import GraphStates, TritonBackend, TritonStates
from aengine.kernels.paged_cache import StateLayout, StateShape
from aengine.kernels.recurrence import RecurrentRule

PAGE, PENDING = 4, 4
KINDS = ["delta", "kimi", "mamba2", "mamba1", "lightning"]


def rule_of(kind: str, device: str, value_dim: int) -> RecurrentRule:
    generator = torch.Generator().manual_seed(1)
    heads, key_heads, keys = 2, 1, 16
    width = heads * value_dim

    def drawn(*shape: int, spread: float = 1.0) -> Tensor:
        return (spread * torch.randn(shape, generator=generator)).to(device)

    channels = width if kind == "mamba1" else 2 * key_heads * keys + width
    steps = {"kimi": heads * keys, "mamba1": width}.get(kind, heads)
    taps = 1 if kind == "lightning" else 4
    return RecurrentRule(
        *(heads, key_heads, keys, value_dim, drawn(channels, taps), drawn(channels) if kind == "mamba2" else None),
        drawn(width, keys) if kind == "mamba1" else drawn(heads),
        None if kind == "lightning" else drawn(steps),
        drawn(width if kind == "mamba1" else heads) if kind in ("mamba1", "mamba2") else None,
        delta=kind in ("delta", "kimi"),
    )


def num_gates(rule: RecurrentRule) -> int:
    steps = 0 if rule.step_bias is None else len(rule.step_bias)
    keys = 2 * rule.key_heads * rule.key_dim if len(rule.conv) == rule.width else 0
    return steps + keys + (rule.heads if rule.delta else 0)


def backend_of(rule: RecurrentRule, device: str, dtype: torch.dtype, head_dim: int) -> TritonBackend:
    shape = StateShape(rule.heads, rule.key_dim, rule.value_dim, len(rule.conv) + num_gates(rule), rule.taps)
    layout = StateLayout.of([shape, shape], 2, PAGE * 2 * head_dim * dtype.itemsize, dtype.itemsize, PENDING)
    spec = AttentionSpec(
        num_heads=2,
        num_kv_heads=2,
        head_dim=head_dim,
        scoring=(Scoring(1.0),),
        page_size=PAGE,
        dtype=dtype,
        device=torch.device(device),
        states=layout,
    )
    backend = TritonBackend(spec)
    backend.allocate(layout.num_pages * 14 + 1)
    generator = torch.Generator().manual_seed(2)
    for tensor in backend.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return backend


def rows_of(starts: list[int], lengths: list[int], states: StepStates, num_decodes: int) -> StepLayout:
    count = len(starts)
    table = np.zeros((1, count, 64), dtype=np.int32)
    layout = build_layout(
        np.arange(count, dtype=np.int32), num_decodes, *(np.array(each, np.int32) for each in (starts, lengths)), table, PAGE
    )
    return replace(layout, states=states)


def compare(
    backend: TritonBackend, rule: RecurrentRule, layout: StepLayout, device: str, dtype: torch.dtype, *, graph: bool = False
) -> None:
    generator = torch.Generator().manual_seed(3)
    mixed, gates = (
        torch.randn(layout.num_tokens, width, generator=generator).to(device, dtype) for width in (len(rule.conv), num_gates(rule))
    )
    metadata, before = metadata_on(device, layout), [tensor.clone() for tensor in backend.tensors]
    expected = recur_torch(backend, metadata, 1, rule, mixed, gates)
    plain = [tensor.clone() for tensor in backend.tensors]
    for tensor, old in zip(backend.tensors, before, strict=True):
        tensor.copy_(old)
    if graph:
        states: TritonStates = GraphStates(backend, metadata)
        assert isinstance(states, GraphStates)
        states.prepare(layout)
    else:
        states = TritonStates(backend, metadata.qo_indptr, layout)
    made = states.recur(1, rule, mixed, lambda convolved: gates)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2  # a number that was convolved may be rounded to another one
    assert layout.states is not None
    live = torch.from_numpy(np.repeat(layout.states.writes[:, 0] > 0, np.diff(layout.qo_indptr)))
    made, expected = made.cpu().float(), expected.cpu().float()
    assert made.isfinite().all()
    assert (made - expected)[live].abs().max() <= tolerance * expected.abs().max()
    memory = backend.states
    written = np.concatenate((layout.states.writes, layout.states.kept_pages))
    pages = torch.from_numpy(written[written[:, 0] > 0]).to(device)
    matrices, inputs = (each.cpu() for each in memory.load(1, pages))
    for tensor, values in zip(backend.tensors, plain, strict=True):
        tensor.copy_(values)
    wanted, known = (each.cpu() for each in memory.load(1, pages))
    assert (matrices - wanted).abs().max() <= tolerance * wanted.abs().max()
    latest = rule.taps - 1  # what is behind these is that of drafts
    torch.testing.assert_close(inputs[:, :latest], known[:, :latest], rtol=0, atol=0)
    for row in np.flatnonzero(layout.states.drafts).tolist():
        count = latest + int(layout.qo_indptr[row + 1] - layout.qo_indptr[row])
        torch.testing.assert_close(inputs[row, :count], known[row, :count], rtol=0, atol=0)


SIZES = [(torch.float32, 32, 32), (torch.bfloat16, 16, 48), (torch.float32, 8, 16)]
"""Blocks that share a piece, and that take several."""
CASES = [(kind, *SIZES[(number + more) % 3]) for number, kind in enumerate(KINDS) for more in range(2)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "dtype", "head_dim", "value_dim"), slow_but([CASES[3], CASES[9]], CASES))
def test_rows_of_a_step(kind: str, dtype: torch.dtype, head_dim: int, value_dim: int, device: str) -> None:
    rule = rule_of(kind, device, value_dim)
    backend = backend_of(rule, device, dtype, head_dim)
    assert backend.spec.states is not None
    pages = np.arange(1, 14 * backend.spec.states.num_pages + 1, dtype=np.int32).reshape(14, -1)
    zeros, ints = np.zeros(4, np.int32), np.int32
    reads, writes = pages[:4], pages[4:8].copy()
    writes[[0, 3]] = reads[[0, 3]]  # in place
    plain = StepStates(reads, writes, zeros, zeros, zeros[:0], zeros[:0], pages[:0])
    compare(backend, rule, rows_of([5, 9, 3, 0], [1, 1, 2, 5], plain, 2), device, dtype)
    others = replace(plain, replays=np.array([1, 0, 2, 4], ints), drafts=np.array([0, 0, 1, 1], ints))
    kept = replace(others, kept_rows=np.array([0, 1, 3], ints), kept_lengths=np.array([2, 3, 3], ints), kept_pages=pages[8:11])
    compare(backend, rule, rows_of([5, 0, 3, 20], [1, 4, 3, 2], kept, 0), device, dtype)
    if kind != "mamba1":  # the others compute prompts in blocks
        inside = replace(plain, kept_rows=np.array([0, 0, 2], ints), kept_lengths=np.array([20, 27, 32], ints), kept_pages=pages[8:11])
        compare(backend, rule, rows_of([5, 9, 0, 30], [45, 1, 33, 34], inside, 0), device, dtype)
    decodes = replace(kept, drafts=zeros, kept_rows=np.array([1], ints), kept_lengths=np.array([1], ints), kept_pages=pages[8:9])
    decodes.writes[3] = decodes.reads[3] = 0  # a row that pads the step
    compare(backend, rule, rows_of([5, 9, 2, 1], [1] * 4, decodes, 4), device, dtype, graph=True)
