"""New weights in the scheduler: what running sequences keep, what is shared, who waits. The oracle knows which weights computed what."""

from __future__ import annotations

import dataclasses

import pytest
from kv_oracle import OracleError, make_request
from simulation import Simulation

from aengine.api.outputs import FinishReason
from aengine.cache import PageChain
from aengine.scheduler.sequence import SchedulerConfig, Sequence

PROMPT = list(range(12))
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=40, num_pages=60, page_size=4)


def change(simulation: Simulation, running: str) -> None:
    simulation.changing = running
    simulation.step()


def two_with_one_prompt() -> Simulation:
    """The first has computed 8 tokens of its prompt when weights change, the second begins afterwards; then a third with the prompt."""
    simulation = Simulation(CONFIG)
    simulation.submit(make_request(0, PROMPT, 8))
    simulation.step()
    simulation.submit(make_request(1, PROMPT, 8))
    change(simulation, "keep")
    while len(simulation.received[0]) < 2:
        simulation.step()
    return simulation


def test_pages_of_a_sequence_that_goes_on_are_its_own() -> None:
    simulation = two_with_one_prompt()
    simulation.submit(make_request(2, [*PROMPT, 1], 8))
    simulation.run()
    simulation.check_finished()
    assert (simulation.cached[1], simulation.cached[2]) == (0, 12)


def test_names_without_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PageChain.__init__

    def init(self: PageChain, size: int, salt: str = "", adapter: int = 0, version: int = 0) -> None:
        real(self, size, salt, adapter)
        self.version = version

    monkeypatch.setattr(PageChain, "__init__", init)
    with pytest.raises(OracleError, match="reads wrong KV"):
        test_pages_of_a_sequence_that_goes_on_are_its_own()


@pytest.mark.parametrize("running", ["keep", "recompute"])
def test_nothing_that_was_cached_is_used(running: str) -> None:
    simulation = Simulation(CONFIG)
    simulation.submit(make_request(0, PROMPT, 1))
    simulation.run()
    change(simulation, running)
    simulation.submit(make_request(1, PROMPT, 1))
    simulation.run()
    simulation.check_finished()
    assert simulation.cached[1] == 0


def test_recompute() -> None:
    simulation = Simulation(CONFIG, overlap=True)
    for key in range(4):
        simulation.submit(make_request(key, [*PROMPT, key], 20))
    while len(simulation.received[3]) < 3:
        simulation.step()
    simulation.scheduler.set_parked(2, True)
    before = simulation.runner.num_computed
    change(simulation, "recompute")
    while simulation.changing:
        simulation.step()
    assert simulation.scheduler.stats().preemptions == 0
    simulation.scheduler.set_parked(2, False)
    simulation.run()
    simulation.check_finished()
    assert simulation.runner.num_computed - before >= 3 * 8 + 13 + 3 * 17  # prompts share two pages


def test_sequences_that_give_way_later_are_of_the_new_weights() -> None:
    """The second has half a page of each. The first recomputes what is before that, which the second then finds; but not its own page."""
    simulation = Simulation(dataclasses.replace(CONFIG, max_num_batched_tokens=3, max_model_len=90))
    simulation.submit(make_request(0, list(range(17)), 60))
    while len(simulation.received[0]) < 2:
        simulation.step()
    simulation.submit(make_request(1, list(range(30)), 60))
    simulation.step()
    first, second = (simulation.scheduler._live.by_key[key] for key in (0, 1))
    assert simulation.scheduler._rows.num_computed[second.row] == 18
    change(simulation, "keep")
    while simulation.scheduler._rows.num_computed[second.row] < 21:
        simulation.step()
    simulation.scheduler._live.preempt(first)
    while not simulation.scheduler._rows.decoding[first.row]:
        simulation.step()
    simulation.scheduler._live.preempt(second)
    simulation.run()
    simulation.check_finished()


def test_forks_of_a_sequence_that_goes_on() -> None:
    simulation = Simulation(CONFIG)
    first = dataclasses.replace(make_request(0, PROMPT, 8), num_forks=2)
    simulation.submit(first)
    for key in (1, 2):
        simulation.submit(dataclasses.replace(make_request(key, PROMPT, 8), fork_of=0))
    simulation.step()
    change(simulation, "keep")
    simulation.run()
    simulation.check_finished()


def test_forks_that_share_a_prompt_of_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sequence.name_pages

    def name_pages(self: Sequence, page_size: int, version: int) -> None:
        real(self, page_size, version)
        self.chain.version = 0

    monkeypatch.setattr(Sequence, "name_pages", name_pages)
    with pytest.raises(OracleError, match="reads wrong KV"):
        test_forks_of_a_sequence_that_goes_on()


def test_finish() -> None:
    simulation = Simulation(CONFIG)
    simulation.submit(dataclasses.replace(make_request(0, PROMPT, 8), num_forks=1))
    simulation.step()
    simulation.submit(dataclasses.replace(make_request(1, PROMPT, 8), fork_of=0))
    simulation.changing = "finish"
    for key in (2, 3, 4):
        simulation.submit(make_request(key, PROMPT, 8))
    simulation.step()
    simulation.cancel(3)
    simulation.scheduler.set_parked(4, True)
    while simulation.changing:
        assert simulation.runner.version == 0
        assert not simulation.received[2]
        assert simulation.step()
    assert {0, 1} <= simulation.finished.keys()
    simulation.scheduler.set_parked(4, False)
    simulation.run()
    simulation.check_finished()
    assert simulation.cached[2] == 0


def test_finish_with_a_deadline() -> None:
    """The last one that has begun ends without a step."""
    simulation = Simulation(CONFIG)
    simulation.submit(dataclasses.replace(make_request(0, PROMPT, 8), deadline=5.0))
    simulation.step()
    simulation.scheduler.set_parked(0, True)
    simulation.submit(make_request(1, PROMPT, 8))
    simulation.changing = "finish"
    assert not simulation.step()
    simulation.clock.now = 6.0
    assert simulation.step()
    simulation.run()
    simulation.check_finished()
    assert simulation.finished[0].reason is FinishReason.DEADLINE


def test_abort() -> None:
    simulation = Simulation(CONFIG)
    simulation.submit(make_request(0, PROMPT, 8))
    simulation.step()
    simulation.submit(make_request(1, PROMPT, 8))
    change(simulation, "abort")
    simulation.run()
    simulation.check_finished()
    assert simulation.finished[0].reason is FinishReason.CANCELLED
    assert simulation.finished[1].reason is FinishReason.MAX_TOKENS
