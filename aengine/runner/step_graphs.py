"""`StepGraphs`: all graphs of a model on one device. Owns their recording, and which of them runs a step."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from aengine.attention import AttentionBackend
from aengine.models.decoder import Decoder
from aengine.runner.buckets import GraphBytes, GraphSizes
from aengine.runner.capture import Capture
from aengine.runner.decode_graphs import DecodeGraphs
from aengine.runner.memory import show_bytes
from aengine.runner.piecewise import PiecewiseGraphs

_log = logging.getLogger("aengine")
_T = TypeVar("_T")


class StepGraphs:
    """There are decode graphs of one size at least, and pieces if there are sizes for them."""

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        sizes: GraphSizes,
        last_tokens: Tensor,
        pages_per_row: int,
        capture: Capture,
    ) -> None:
        """`last_tokens`, `pages_per_row`: as of `DecodeGraphs`."""
        self._sizes = sizes
        self._capture = capture
        self._backend_name = backend.name
        self._used = capture.memory()
        self.decodes = DecodeGraphs(model, backend, sizes.rows, last_tokens, pages_per_row, capture)
        self.pieces = PiecewiseGraphs(model, backend.spec, sizes.tokens, capture) if sizes.tokens else None
        self._buffers = self._take_memory()

    def record(self) -> GraphBytes | None:
        """Records all sizes, largest first. None: the attention backend is not for graphs, and these are not to be used.

        What it raises says which graph could not be recorded; none is to be used then.
        """
        from tqdm import tqdm  # type: ignore[import-untyped]

        sizes, begin = self._sizes, time.perf_counter()
        rows: list[int] = []
        tokens: list[int] = []
        with (
            self._capture.session(),
            tqdm(
                total=len(sizes.rows) + len(sizes.tokens),
                desc="Recording graphs",
                unit="graph",
                leave=False,
                disable=not sys.stderr.isatty(),
            ) as bar,
        ):
            for size in reversed(sizes.rows):
                if not _telling(self.decodes.record, size, "sequences"):
                    _log.info("no graphs: the attention backend %s is not for them", self._backend_name)
                    return None
                rows.append(self._take_memory())
                bar.update()
            if self.pieces is not None:
                for size in reversed(sizes.tokens):
                    _telling(self.pieces.record, size, "tokens")
                    tokens.append(self._take_memory())
                    bar.update()
        taken = GraphBytes(self._buffers, tuple(rows), tuple(tokens))
        _log.info(
            "recorded graphs of decode steps for %s sequences and of steps for %s tokens in %.1f s: %s",
            _range(sizes.rows),
            _range(sizes.tokens),
            time.perf_counter() - begin,
            show_bytes(taken.total()),
        )
        return taken

    def _take_memory(self) -> int:
        """Since it was asked last."""
        before, self._used = self._used, self._capture.memory()
        return self._used - before


def _telling(record: Callable[[int], _T], size: int, what: str) -> _T:
    try:
        return record(size)
    except Exception as error:
        raise RuntimeError(f"recording a graph for {size} {what} failed: {error}") from error


def _range(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}..{sizes[-1]} ({len(sizes)})" if sizes else "no"
