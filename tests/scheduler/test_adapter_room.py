"""Sequences wait for the place of an adapter: who goes first, and that nobody waits forever."""

from __future__ import annotations

import dataclasses

import pytest
from kv_oracle import make_request
from simulation import Simulation

from aengine.scheduler.sequence import Request, SchedulerConfig
from aengine.scheduler.waiting import AdapterRoom

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, num_pages=200, page_size=4, max_adapters=1)


def request(key: int, adapter: int, max_tokens: int = 8, arrival: float = 0.0) -> Request:
    return make_request(key, [key % 50, 1, 2], max_tokens, adapter=adapter, arrival=arrival)


def simulation(**changes: object) -> Simulation:
    return Simulation(dataclasses.replace(CONFIG, **changes), overlap=True)  # type: ignore[arg-type]


def test_others_pass_one_that_waits() -> None:
    run = simulation()
    for key, adapter in enumerate((1, 2, 1, 0)):
        run.submit(request(key, adapter))
    run.step()
    assert run.cached.keys() == {0, 2, 3}
    assert run.scheduler.stats().waiting == 1
    run.run()
    run.check_finished()


def with_a_stream_of_others(run: Simulation, steps: int) -> list[int]:
    """One sequence of adapter 2 among those of adapter 1, of which there is always one more. Returns the keys in the order in which they
    have begun."""
    run.submit(request(0, 1))
    run.step()
    run.submit(request(1, 2, arrival=1.0))
    for key in range(2, 2 + steps):
        run.submit(request(key, 1, arrival=float(key)))
        run.clock.now += 1.0
        run.step()
    return list(run.cached)


@pytest.mark.parametrize("max_num_seqs", [2, 4])
def test_as_many_pass_as_there_are_rows(max_num_seqs: int) -> None:
    run = simulation(max_num_seqs=max_num_seqs)
    started = with_a_stream_of_others(run, 60)
    assert 2 < started.index(1) + 1 <= max_num_seqs + 2  # after the one before it, and those that passed
    run.run()
    run.check_finished()


def test_without_the_bound_one_would_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterRoom, "admit", lambda self, sequence: None)
    assert 1 not in with_a_stream_of_others(simulation(), 60)


def test_many_adapters_are_served_in_the_order_of_arrival() -> None:
    run = simulation(max_adapters=2)
    for key in range(20):
        run.submit(request(key, 1 + key % 10, max_tokens=3, arrival=float(key)))
    run.run()
    run.check_finished()
    assert [key for key in run.cached if key < 10] == list(range(10))


@pytest.mark.parametrize("parked_first", [False, True])
def test_parked_sequences_give_up_the_place_of_their_adapter(*, parked_first: bool) -> None:
    run = simulation()
    first = run.submit(request(0, 1, max_tokens=20))
    run.step()
    run.step()
    if parked_first:
        run.scheduler.set_parked(0, True)
    run.submit(request(1, 2))
    run.step()
    run.scheduler.set_parked(0, True)
    run.run()
    assert run.finished.keys() == {1}
    run.scheduler.set_parked(0, False)
    run.run()
    run.check_finished()
    assert run.received[0] == first.output


def test_one_of_two_that_is_not_parked_keeps_the_place() -> None:
    run = simulation()
    for key in (0, 1):
        run.submit(request(key, 1, max_tokens=20))
    run.step()
    run.step()
    run.scheduler.set_parked(0, True)
    run.submit(request(2, 2))
    run.run()
    assert list(run.finished) == [1, 2]
    run.scheduler.set_parked(0, False)
    run.run()
    run.check_finished()


def test_who_waits_can_be_cancelled_or_parked() -> None:
    run = simulation()
    for key, adapter in enumerate((1, 2, 3)):
        run.submit(request(key, adapter))
    run.step()
    run.cancel(1)
    run.scheduler.set_parked(2, True)
    assert run.scheduler.stats().waiting == 0
    run.run()
    assert run.finished.keys() == {0, 1}
    run.scheduler.set_parked(2, False)
    run.run()
    run.check_finished()
