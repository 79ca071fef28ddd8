"""`record_graphs`: all graphs of a model on one device, and the memory that they take."""

from __future__ import annotations

import logging
import sys
import time
from typing import NamedTuple

import numpy as np
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
    used = [capture.memory()]
    decodes = DecodeGraphs(model, backend, sizes.rows, last_tokens, pages_per_row, capture, num_rows, shard)
    pieces = PiecewiseGraphs(model, backend.spec, sizes.tokens, capture, shard) if sizes.tokens else None
    used.append(capture.memory())
    graphs = [(decodes.record, size, "sequences") for size in reversed(sizes.rows)]
    if pieces is not None:
        graphs += [(pieces.record, size, "tokens") for size in reversed(sizes.tokens)]
    with capture.session():
        for record, size, what in tqdm(graphs, desc="Recording graphs", unit="graph", leave=False, disable=not sys.stderr.isatty()):
            try:
                recorded = record(size)
            except Exception as error:
                raise RuntimeError(f"recording a graph for {size} {what} failed: {error}") from error
            if not recorded:
                _log.info("no graphs: the attention backend %s does not support them", backend.name)
                return None
            used.append(capture.memory())
    buffers, *each = np.diff(used).tolist()
    taken = GraphBytes(buffers, tuple(each[: len(sizes.rows)]), tuple(each[len(sizes.rows) :]))
    _log.info(
        "recorded graphs of decode steps for %s sequences and of steps for %s tokens in %.1f s: %s",
        _range(sizes.rows),
        _range(sizes.tokens),
        time.perf_counter() - begin,
        show_bytes(taken.total()),
    )
    return StepGraphs(decodes, pieces), taken


def _range(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}..{sizes[-1]} ({len(sizes)})" if sizes else "no"
