"""The graphs of a runner that records them, and how often each is replayed."""

from __future__ import annotations

from aengine.runner.runner import ModelRunner
from aengine.runner.torch.model import StepGraphs


def graphs_of(runner: ModelRunner) -> StepGraphs:
    graphs = runner._executor._model.graphs
    assert graphs is not None
    return graphs


def count_replays(runner: ModelRunner) -> dict[tuple[str, int], int]:
    """How often each graph was replayed from here on, by kind and size."""
    graphs = graphs_of(runner)
    counts: dict[tuple[str, int], int] = {}
    every = {("decode", size): graph.pieces for size, graph in graphs.decodes._graphs.items()}
    every |= {("uneven", size): graph.pieces for size, graph in graphs.decodes._uneven.items()}
    every |= {("pieces", size): pieces for size, pieces in graphs.pieces._pieces.items()}
    for key, pieces in every.items():
        counts[key] = 0

        def replay(key=key, inner=pieces.replay) -> None:
            counts[key] += 1
            inner()

        pieces.replay = replay
    return counts
