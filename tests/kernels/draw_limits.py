"""Parameters at the limits of their types, where float32 has no such number, and what every implementation of the draw makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensor_sampler import tensor_sampler
from torch import Tensor

from aengine.api.params import GREEDY_BELOW
from aengine.sampling.draw import Draw
from aengine.scheduler.plan import NewRow, RowParams

VOCAB = 700
FIRST, SECOND, CLOSE = 30, 600, 400  # the likeliest two are equally likely, the third nearly so


@dataclass(frozen=True)
class Limit:
    changes: dict[str, Any]
    tokens: set[int] | None  # exactly these are drawn, over the seeds; None: many


LIMITS = [
    *(Limit({"top_p": value}, {FIRST}) for value in (5e-324, 1e-300, 1e-46, 1e-45, 1e-40, 1.1754944e-38, 1e-30)),
    *(Limit({"top_p": value, "top_k": 50}, {FIRST}) for value in (5e-324, 1e-46, 1e-40, 1e-30)),
    *(Limit({"top_p": value, "min_p": 0.5}, {FIRST}) for value in (5e-324, 1e-40)),
    *(Limit({"top_p": value, "min_p": value}, {FIRST}) for value in (5e-324, 1e-40)),
    Limit({"top_p": 1 - 2**-53, "temperature": 100.0}, None),
    Limit({"top_p": 1 - 2**-24, "temperature": 100.0}, None),
    *(Limit({"min_p": value, "temperature": 100.0}, None) for value in (5e-324, 1e-46, 1e-40)),
    *(Limit({"min_p": value}, {FIRST, SECOND}) for value in (1.0, 1 - 2**-53, 1 - 2**-25)),
    *(Limit({"temperature": value}, {FIRST}) for value in (0.0, 5e-324, 1e-46, 9.9e-6, float(np.nextafter(GREEDY_BELOW, 0)))),
    *(Limit({"temperature": value}, {FIRST, SECOND}) for value in (GREEDY_BELOW, float(np.nextafter(GREEDY_BELOW, 1)), 1.01e-5)),
    *(Limit({"temperature": GREEDY_BELOW, "top_k": k, "top_p": p}, {FIRST, SECOND}) for k, p in ((9, 1.0), (0, 0.9), (9, 0.9))),
    Limit({"top_k": 2**31 - 1, "temperature": 100.0}, None),
    Limit({"top_k": VOCAB, "temperature": 100.0}, None),
]


def logits_of(rows: int) -> Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, [FIRST, SECOND]] = 9.0
    logits[:, CLOSE] = 9.0 - 2e-3
    return logits


@contextmanager
def denormals(flushed: bool) -> Iterator[None]:
    """Whether this thread takes numbers below the smallest normal one for zero, as a host program may have asked for."""
    torch.set_flush_denormal(flushed)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def wrong(draw: Draw, device: torch.device, seeds: tuple[int, ...] = tuple(range(8))) -> dict[str, set[int]]:
    """Of which limits `draw` makes something else, and the tokens."""
    base = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rows = [RowParams(**{**base, **limit.changes, "seed": seed}) for limit in LIMITS for seed in seeds]
    sampler = tensor_sampler(len(rows), VOCAB, device, draw)
    sampler.update([NewRow(at, one) for at, one in enumerate(rows)])
    indices = np.arange(len(rows), dtype=np.int32)
    positions = np.full(len(rows), 5, dtype=np.int32)
    on_device = (torch.from_numpy(array).to(device) for array in (indices, positions))
    drawn = sampler.sample(logits_of(len(rows)).to(device), indices, positions, *on_device).tokens.view(-1, len(seeds))
    found = {str(limit.changes): (limit.tokens, set(tokens)) for limit, tokens in zip(LIMITS, drawn.tolist(), strict=True)}
    return {name: got for name, (wanted, got) in found.items() if got != wanted and (wanted is not None or len(got) < len(seeds) * 0.8)}
