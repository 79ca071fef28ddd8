"""`record_graphs`: all graphs of a model on one device, and the memory that they take."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from aengine.attention import AttentionBackend
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.buckets import GraphBytes, GraphSizes
from aengine.runner.capture import Capture
from aengine.runner.decode_graphs import DecodeGraphs
from aengine.runner.memory import show_bytes
from aengine.runner.piecewise import PiecewiseGraphs
from aengine.runner.torch_models import TorchModel

_log = logging.getLogger("aengine")


class StepGraphs(NamedTuple):
    decodes: DecodeGraphs
    pieces: PiecewiseGraphs | None


class _Kind(NamedTuple):
    """Graphs of one kind, all sizes of which are recorded, or none."""

    record: Callable[[int], bool]
    sizes: tuple[int, ...]
    what: str
    taken: list[int]  # bytes, of those that are recorded


def record_graphs(
    model: TorchModel,
    backend: AttentionBackend,
    sizes: GraphSizes,
    last_tokens: Tensor,
    pages_per_row: int,
    capture: Capture,
    num_rows: int,
    shard: Shard = WHOLE,
) -> tuple[StepGraphs, GraphBytes] | None:
    """Graphs of all sizes, the largest recorded first; at least one of decodes. None: the attention backend does not support graphs.

    `last_tokens`, `pages_per_row`, `num_rows`, `shard`: as of `DecodeGraphs`. An error says which graph could not be recorded; none may be
    used then.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    begin = time.perf_counter()
    before = capture.memory()
    decodes = DecodeGraphs(model, backend, sizes, last_tokens, pages_per_row, capture, num_rows, shard)
    pieces = PiecewiseGraphs(model, backend, sizes.tokens, capture, shard) if sizes.tokens else None
    used = capture.memory()
    buffers = used - before
    rows = _Kind(decodes.record, sizes.rows, "sequences", [])
    uneven = _Kind(decodes.record_uneven, sizes.uneven, "uneven sequences", [])
    tokens = None if pieces is None else _Kind(pieces.record, sizes.tokens, "tokens", [])
    graphs = [(kind, size) for kind in (rows, tokens, uneven) if kind is not None for size in reversed(kind.sizes)]
    with capture.session():
        for kind, size in tqdm(graphs, desc="Recording graphs", unit="graph", leave=False, disable=not sys.stderr.isatty()):
            try:
                recorded = kind.record(size)
            except Exception as error:
                raise RuntimeError(f"recording a graph for {size} {kind.what} failed: {error}") from error
            if recorded:
                before, used = used, capture.memory()
                kind.taken.append(used - before)
            elif kind is rows:
                _log.info("no graphs: the attention backend %s does not support them", backend.name)
                return None
    taken = GraphBytes(buffers, tuple(rows.taken), tuple(tokens.taken if tokens else ()), tuple(uneven.taken))
    _log.info(
        "recorded graphs of decode steps for %s sequences%s and of steps for %s tokens in %.1f s: %s",
        _range(sizes.rows),
        f", or {_range(sizes.uneven)} of uneven lengths," if uneven.taken else "",
        _range(sizes.tokens),
        time.perf_counter() - begin,
        show_bytes(taken.total()),
    )
    return StepGraphs(decodes, pieces), taken


def _range(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}..{sizes[-1]} ({len(sizes)})" if sizes else "no"
