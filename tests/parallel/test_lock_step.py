"""`LockStep` in threads, with random work: all take the same turns in the same order, all work is done, and then nobody computes."""

from __future__ import annotations

import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from meeting import SECONDS, Meeting

from aengine.parallel.expert_replicas import LockStep


class Replica:
    """What a step thread does: steps while there is work, joins while it is awaited, else waits until it is woken."""

    def __init__(self, index: int, meeting: Meeting, everyone: list[Replica], post_office: ThreadPoolExecutor) -> None:
        self.log: list[tuple[int, ...]] = []
        self.joined = 0  # turns without work of its own
        self._work: deque[int] = deque()
        self._woken = threading.Event()
        self._ends = False

        def tell_others(turn: int) -> None:
            for other in everyone:
                if other is not self:
                    post_office.submit(other.hear, turn)  # by threads of others, at any time, in any order

        self.lock_step = LockStep(lambda number: meeting.exchange(index, number), tell_others)

    def hear(self, turn: int) -> None:
        self.lock_step.others_want(turn)
        self._woken.set()

    def give(self, tokens: int) -> None:
        self._work.append(tokens)
        self._woken.set()

    def end(self) -> None:
        self._ends = True
        self._woken.set()

    def run(self) -> None:
        while True:
            self._woken.clear()
            ends = self._ends
            if self._work:
                self.log.append(self.lock_step.take_turn(self._work.popleft()))
            elif self.lock_step.is_awaited:
                self.joined += 1
                self.log.append(self.lock_step.take_turn(0))
            elif ends:
                return
            else:
                assert self._woken.wait(SECONDS), "nobody wakes it"


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("seed", range(12))
def test_all_take_the_same_turns(seed: int) -> None:
    choose = random.Random(seed)
    size = choose.choice((2, 2, 3, 5))
    meeting, everyone = Meeting(size), list[Replica]()
    with ThreadPoolExecutor(4) as post_office, ThreadPoolExecutor(size) as pool:
        everyone += [Replica(index, meeting, everyone, post_office) for index in range(size)]
        runs = [pool.submit(replica.run) for replica in everyone]
        given = [0] * size
        for _ in range(300):
            index, tokens = choose.randrange(size) if seed % 3 else 0, choose.randint(1, 9)
            given[index] += tokens
            everyone[index].give(tokens)
            if choose.random() < 0.2:
                threading.Event().wait(choose.random() * 1e-3)  # so that they come to rest now and then
        done = threading.Event()

        def all_is_done() -> bool:
            return all(sum(counts[index] for counts in everyone[index].log) == given[index] for index in range(size))

        for _ in range(SECONDS * 100):
            if all_is_done() and not any(replica.lock_step.is_awaited for replica in everyone):
                break
            done.wait(0.01)
        for replica in everyone:
            replica.end()
        for run in runs:
            run.result(SECONDS)
    assert all_is_done()
    first = everyone[0].log
    assert all(replica.log == first for replica in everyone)
    for before, counts in zip([(0,) * size, *first], first, strict=False):
        assert any(before) or any(counts), "after a turn without tokens there is one only where one has some"
    assert not any(first[-1]), "the last turn shows all that there is no more"


def test_nobody_is_told_of_a_turn_that_all_take() -> None:
    told: list[int] = []
    lock_step = LockStep(lambda number: [number, 3], told.append)
    assert not lock_step.is_awaited
    assert lock_step.take_turn(2) == (2, 3)
    assert lock_step.is_awaited
    assert lock_step.take_turn(2) == (2, 3)
    assert told == [0]


def test_a_turn_that_is_over_is_no_longer_wanted() -> None:
    lock_step = LockStep(lambda number: [number, 0], lambda turn: None)
    lock_step.others_want(0)
    assert lock_step.is_awaited
    lock_step.take_turn(0)
    assert not lock_step.is_awaited
    lock_step.others_want(0)
    assert not lock_step.is_awaited
    lock_step.others_want(1)
    assert lock_step.is_awaited
