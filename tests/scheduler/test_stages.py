"""Several steps of different rows in flight, as many as the model has stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from kv_oracle import OracleError, make_request
from simulation import Simulation
from slow_cases import slow_but
from test_kv_oracle import run_workload

from aengine.api.outputs import FinishReason
from aengine.scheduler.live_sequences import LiveSequences
from aengine.scheduler.rows import RowTable
from aengine.scheduler.sequence import SchedulerConfig, Sequence

CONFIG = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=200, num_pages=400, page_size=4, max_in_flight=3)
STAGES = (2, 3, 4)
WORKLOADS = 450


def config(**changes: object) -> SchedulerConfig:
    return dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("stages", "part"), slow_but(lambda case: not case[1], [(stages, part) for stages in STAGES for part in range(30)])
)
def test_random_workloads(stages: int, part: int) -> None:
    for seed in range(part, WORKLOADS, 30):
        print(f"workload {seed}")
        run_workload(seed, stages)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("num_requests", [1, 3, 11])
def test_every_stage_has_its_share(stages: int, num_requests: int) -> None:
    """And each request gets a token in every round of steps."""
    simulation = Simulation(config(max_in_flight=stages))
    for key in range(num_requests):
        simulation.submit(make_request(key, [key] * 5, 60))
    for _ in range(3 * stages):
        simulation.step()
    for _ in range(30):
        simulation.step()
        steps = simulation.plans[-min(stages, num_requests) :]
        assert max(len(plan.rows) for plan in steps) == -(-num_requests // stages)
        assert sorted(np.concatenate([plan.rows for plan in steps]).tolist()) == list(range(num_requests))
        assert num_requests < stages or len(simulation.flights) == stages - 1
    simulation.run()
    simulation.check_finished()


@pytest.mark.parametrize("stages", STAGES)
def test_a_lone_request_takes_no_more_steps(stages: int) -> None:
    for length in (5, 30):
        plans = []
        for max_in_flight, budget in ((1, 30), (stages, 30 * stages)):
            simulation = Simulation(config(max_in_flight=max_in_flight, max_num_batched_tokens=budget))
            simulation.submit(make_request(0, [1] * length, 20))
            simulation.run()
            simulation.check_finished()
            plans.append([plan.lengths.tolist() for plan in simulation.plans])
        assert plans[0] == plans[1]


def test_chunks_of_a_prompt_do_not_wait_for_each_other() -> None:
    simulation = Simulation(CONFIG)
    simulation.submit(make_request(0, list(range(100)), 2))
    simulation.submit(make_request(1, [3, 2, 1], 9))
    for _ in range(3):
        simulation.step()
    assert [plan.lengths.tolist() for plan in simulation.plans] == [[22], [22], [22]]
    simulation.run()
    simulation.check_finished()


def test_those_that_decode_take_turns() -> None:
    """The readers of two requests lag in every other step, in which the others are fewer, and so have smaller shares."""
    simulation = Simulation(config(max_in_flight=2))
    for key in range(6):
        simulation.submit(make_request(key, [key], 100))
    for step in range(61):
        for key in (4, 5):
            simulation.scheduler.set_parked(key, step % 2 == 1)
        simulation.step()
    assert min(map(len, simulation.received.values())) > 10
    simulation.run()
    simulation.check_finished()


class TestTheOracleCanFail:
    def test_a_row_is_planned_while_it_is_in_flight(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assign = RowTable.assign

        def unlocked(self: RowTable, sequence: Sequence, tenant: int) -> int:
            row = assign(self, sequence, tenant)
            self.lockstep[row] = False
            return row

        monkeypatch.setattr(RowTable, "assign", unlocked)
        with pytest.raises(KeyError):
            test_random_workloads(2, 0)

    def test_release_one_step_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = LiveSequences.finish

        def finish(self: LiveSequences, sequence: Sequence, reason: FinishReason, **details: Any) -> None:
            if sequence.row >= 0:
                self._rows.flights[sequence.row] = 0
            real(self, sequence, reason, **details)

        monkeypatch.setattr(LiveSequences, "finish", finish)
        with pytest.raises((OracleError, AssertionError, KeyError)):
            test_random_workloads(3, 0)
