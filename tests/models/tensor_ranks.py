"""Ranks of the torch decoder in threads, with a gloo group between them, and what they compute."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from hang_guard import HANG_SECONDS
from row_tensors import held_parts, initial_tensors
from torch import Tensor
from torch.distributed import HashStore

from aengine.attention import AttentionMetadata, AttentionSpec, StepLayout, build_layout
from aengine.attention.torch_native import TorchNativeBackend
from aengine.layers.adapters import AdapterTable
from aengine.layers.collectives import Collectives, gloo_group
from aengine.models.sharding import sharded_spec, sharded_weights
from aengine.models.spec import ModelSpec
from aengine.models.torch.decoder import Decoder, ForwardBatch
from aengine.parallel.shard import WHOLE, Shard

CPU, POSITIONS, PAGE = torch.device("cpu"), 64, 4
ARRAYS = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
T = TypeVar("T")


def on_ranks(size: int, work: Callable[[int], T]) -> list[T]:
    """What each rank's thread returns. The first error is raised."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result(timeout=HANG_SECONDS) for future in [pool.submit(work, index) for index in range(size)]]


def with_collectives(size: int, work: Callable[[Collectives], T], *, exact: bool = True) -> list[T]:
    store = HashStore()

    def run(index: int) -> T:
        with torch.inference_mode():
            group = gloo_group(store, index, size, datetime.timedelta(seconds=30), "127.0.0.1")
            return work(Collectives(Shard(index, size, exact=exact, splits_embedding=True), group))

    return on_ranks(size, run)


def whole_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Float32, none of which is without effect; each as the matrix of its rows."""
    weights = initial_tensors(spec)
    generator = torch.Generator().manual_seed(4)
    for name, weight in weights.items():
        if "norm" in name:
            weight.uniform_(0.5, 1.5, generator=generator)
        elif weight.dim() == 1:
            weight.normal_(0.0, 0.2, generator=generator)
        else:
            weight.normal_(0.0, 1.2 * weight.shape[-1] ** -0.5, generator=generator)
    return weights


def decoder_of(
    spec: ModelSpec, weights: dict[str, Tensor], collectives: Collectives | None, adapters: AdapterTable | None = None
) -> Decoder:
    """The head of `weights` may differ from the embedding that it is tied to."""
    if collectives is None:
        named = sharded_weights(spec, WHOLE)
        made = {name: weight.view(named[name].shape) if name in named else weight for name, weight in weights.items()}
        return Decoder(spec, made, POSITIONS, adapters=adapters)
    held = sharded_weights(spec, collectives.shard)
    parts = {name: held_parts(weights[part.source_name], part) for name, part in held.items()}
    made = {name: torch.cat([part.contiguous() for part in rows]).view(held[name].shape) for name, rows in parts.items()}
    return Decoder(spec, made, POSITIONS, collectives=collectives, adapters=adapters)


def layouts(chunks: Sequence[Sequence[tuple[int, int]]]) -> list[StepLayout]:
    """Of steps of pairs of a sequence and how many of its tokens are computed, decodes first."""
    num_rows = 1 + max(row for step in chunks for row, _ in step)
    pages = POSITIONS // PAGE
    table = (1 + np.random.default_rng(0).permutation(num_rows * pages)).reshape(1, num_rows, pages).astype(np.int32)
    computed = np.zeros(num_rows, dtype=np.int32)
    steps = []
    for step in chunks:
        rows, lengths = (np.ascontiguousarray(column) for column in np.array(step, dtype=np.int32).T)
        steps.append(build_layout(rows, int((lengths == 1).sum()), computed[rows], lengths, table, PAGE))
        computed[rows] += lengths
    return steps


def backend_of(spec: ModelSpec) -> TorchNativeBackend:
    """Of the heads of a rank."""
    kinds = [layer.attention for layer in spec.layers]
    scoring = tuple(kind.scoring for kind in kinds)
    shape = kinds[0].num_heads, kinds[0].num_kv_heads, kinds[0].key_dim
    heads = tuple(kind.heads for kind in kinds)
    described = AttentionSpec(*shape, scoring, PAGE, torch.float32, CPU, value_dim=kinds[0].value_dim, heads=heads)
    backend = TorchNativeBackend(described)
    backend.allocate(1 + 4 * POSITIONS // PAGE)
    return backend


def all_logits(
    decoder: Decoder, own_spec: ModelSpec, steps: Sequence[StepLayout], backend: TorchNativeBackend | None = None, first: int = 0
) -> list[Tensor]:
    """Of all tokens of each step, of which the first has the number `first`. `backend`: with the KV of those before."""
    backend, out = backend or backend_of(own_spec), []
    for number, layout in enumerate(steps, first):
        metadata = AttentionMetadata(layout, *(torch.from_numpy(getattr(layout, name)) for name in ARRAYS))
        ids = np.random.default_rng(number).integers(0, decoder.head_shape[0], layout.num_tokens).astype(np.int32)
        indices = np.arange(layout.num_tokens, dtype=np.int32)
        batch = ForwardBatch(*map(torch.from_numpy, (ids, layout.positions, indices)), backend.plan(metadata))
        out.append(decoder.logits(decoder(batch), batch.logits_indices))
    return out


def logits_of_ranks(
    spec: ModelSpec, weights: dict[str, Tensor], size: int, steps: Sequence[StepLayout], *, exact: bool
) -> list[list[Tensor]]:
    def work(collectives: Collectives) -> list[Tensor]:
        return all_logits(decoder_of(spec, weights, collectives), sharded_spec(spec, collectives.shard), steps)

    return with_collectives(size, work, exact=exact)
