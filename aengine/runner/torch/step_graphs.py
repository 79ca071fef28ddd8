"""`record_graphs`: all graphs of a model on one device, and the memory that they take."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from aengine.attention import AttentionBackend
from aengine.layers.adapters import AdapterTable
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.memory import show_bytes
from aengine.runner.torch.buckets import GraphBytes, GraphSizes
from aengine.runner.torch.capture import Capture
from aengine.runner.torch.graphs import DecodeGraphs, PiecewiseGraphs
from aengine.runner.torch.loading import TorchModel

_log = logging.getLogger("aengine")


class StepGraphs(NamedTuple):
    decodes: DecodeGraphs
    pieces: PiecewiseGraphs | None


class _Kind(NamedTuple):
    """Graphs of one kind: `record` makes that of a size, or refuses."""

    record: Callable[[int], bool]
    sizes: tuple[int, ...]
    what: str


def record_graphs(
    model: TorchModel,
    backend: AttentionBackend,
    sizes: GraphSizes,
    last_tokens: Tensor,
    pages_per_row: int,
    capture: Capture,
    num_rows: int,
    shard: Shard = WHOLE,
    adapters: AdapterTable | None = None,
) -> tuple[StepGraphs, GraphBytes] | None:
    """Graphs of all sizes, the largest recorded first; at least one of decodes. None: the attention backend does not support graphs.

    `last_tokens`, `pages_per_row`, `num_rows`, `shard`, `adapters`: as of `DecodeGraphs`. If one of decodes cannot be recorded, an error
    says which; none may be used then. If one of another kind cannot be, a warning does, and there are none of this kind. With other ranks,
    which may have them, that is an error, too.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    begin = time.perf_counter()
    before = capture.memory()
    decodes = DecodeGraphs(model, backend, sizes, last_tokens, pages_per_row, capture, num_rows, shard, adapters)
    pieces = PiecewiseGraphs(model, backend, sizes.tokens, capture, shard) if sizes.tokens else None
    buffers = capture.memory() - before
    record_others = _record if shard.size > 1 else _record_or_warn
    count = sum(map(len, sizes.kinds))
    with capture.session(), tqdm(total=count, desc="Recording graphs", unit="graph", leave=False, disable=not sys.stderr.isatty()) as bar:
        of_rows = _record(_Kind(decodes.record, sizes.rows, "sequences"), capture, bar.update)
        if not of_rows:
            _log.info("no graphs: the attention backend %s does not support them", backend.name)
            return None
        of_tokens = () if pieces is None else record_others(_Kind(pieces.record, sizes.tokens, "tokens"), capture, bar.update)
        of_uneven = record_others(_Kind(decodes.record_uneven, sizes.uneven, "uneven sequences"), capture, bar.update)
        of_plain = record_others(_Kind(decodes.record_plain, sizes.plain, "sequences without adapters"), capture, bar.update)
    if not of_uneven:
        decodes.drop_uneven()
    if not of_plain:
        decodes.drop_plain()
    taken = GraphBytes(buffers, of_rows, of_tokens, of_uneven, of_plain)
    _log.info(
        "recorded graphs of decode steps for %s sequences%s%s and of steps for %s tokens in %.1f s: %s",
        _range(sizes.rows),
        f", or {_range(sizes.uneven)} of uneven lengths," if of_uneven else "",
        f", or {_range(sizes.plain)} without adapters," if of_plain else "",
        _range(sizes.tokens if of_tokens else ()),
        time.perf_counter() - begin,
        show_bytes(taken.total()),
    )
    return StepGraphs(decodes, pieces if of_tokens else None), taken


def _record(kind: _Kind, capture: Capture, progress: Callable[[], object]) -> tuple[int, ...]:
    """The bytes that each graph of a kind takes, largest first; empty if one is refused. Calls `progress` after each."""
    taken, used = [], capture.memory()
    for size in reversed(kind.sizes):
        try:
            if not kind.record(size):
                return ()
        except Exception as error:
            raise RuntimeError(f"recording a graph for {size} {kind.what} failed: {error}") from error
        before, used = used, capture.memory()
        taken.append(used - before)
        progress()
    return tuple(taken)


def _record_or_warn(kind: _Kind, capture: Capture, progress: Callable[[], object]) -> tuple[int, ...]:
    """The bytes that each graph of a kind takes, as of `_record`; empty, with a warning, if one cannot be recorded."""
    try:
        return _record(kind, capture, progress)
    except RuntimeError as error:
        told = _log.isEnabledFor(logging.DEBUG)
        # Not the error itself: a handler that keeps records would keep what is to be freed.
        _log.warning("no graphs for %s, so that such steps take longer: %s", kind.what, str(error), exc_info=told)
        return ()


def _range(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}..{sizes[-1]} ({len(sizes)})" if sizes else "no"
