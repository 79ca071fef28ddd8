"""Random decode and mixed steps for a runner, the same ones for the same seed; and what compares recorded steps with plain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from driver import GREEDY, Driver, Sequence_

from aengine.runner.contract import Runner, Step
from aengine.runner.runner import ModelRunner
from aengine.runner.torch.graphs import Forward
from aengine.scheduler.plan import RowParams

VOCAB = 199


def random_steps(
    runner: Runner,
    seed: int,
    steps: int = 60,
    *,
    most: int = 20,
    params: Sequence[RowParams] = (GREEDY,),
    adapters: Sequence[int] = (0,),
    before: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """The outputs of all sequences: up to `most` at once that come and go, are cut into chunks, and sometimes begin anew elsewhere.

    Between arrivals there are spells of decodes alone. `before` is called before each step.
    """
    rng = np.random.default_rng(seed)
    driver = Driver(runner, seed=seed)
    everyone: list[Sequence_] = []
    running: list[Sequence_] = []
    crowd = 1
    for step in range(steps):
        if step % 12 == 0:
            crowd = round(most ** rng.random())
        if step % 12 < 3 or not running:
            while len(running) < crowd:
                one, adapter = (given[len(everyone) % len(given)] for given in (params, adapters))
                running.append(driver.add(rng.integers(0, VOCAB, int(rng.integers(1, 50))).tolist(), one, adapter))
                everyone.append(running[-1])
        driver.chunk = int(rng.integers(1, 40))
        before()
        driver.run_step(running)
        for sequence in [s for s in running if len(s.output) > 25 or (len(running) > crowd and rng.random() < 0.3)]:
            running.remove(sequence)
            driver.free_rows.insert(0, sequence.row)
        if running and rng.random() < 0.05:
            driver.preempt(running[int(rng.integers(len(running)))])
    return [sequence.output for sequence in everyone]


@dataclass
class Compared:
    """What was compared so far."""

    by_graph: int = 0  # steps of decodes alone
    in_pieces: int = 0
    worst: float = 0.0  # difference of a logit, relative to the spread of its row's


def compare_with_eager(runner: ModelRunner) -> Compared:
    """From here on the runner computes each step again without graphs, from the same last tokens and into the same KV slots, and holds
    the logits of both against each other. What graphs sampled counts."""
    compared = Compared()
    executor: Any = runner._executor
    model, last_tokens = executor._model, executor._last_tokens
    forward = model.forward

    def forward_twice(step: Step, token_ids: torch.Tensor) -> Forward:
        before = last_tokens.clone()
        done = forward(step, token_ids)
        logits = done.logits(done.logits_indices) if len(step.sampled_rows) else None
        after = last_tokens.clone()
        graphs, model.graphs = model.graphs, None
        last_tokens.copy_(before)
        plain = forward(step, token_ids)
        model.graphs = graphs
        last_tokens.copy_(after)
        if done.greedy is not None:
            compared.by_graph += 1
            assert torch.equal(done.greedy.tokens, logits.argmax(-1))
            if not len(token_ids):
                assert torch.equal(after.index_select(0, done.rows), done.greedy.tokens.to(torch.int32))
        elif step.layout.num_tokens <= max(graphs.pieces._sizes):
            compared.in_pieces += 1
        if logits is not None:
            expected = plain.logits(plain.logits_indices)
            assert torch.equal(done.rows, plain.rows)
            assert torch.equal(done.next_positions, plain.next_positions)
            worst = (logits - expected).abs().amax(-1) / expected.std(-1)
            compared.worst = max(compared.worst, worst.max().item())
        return done

    model.forward = forward_twice
    return compared
