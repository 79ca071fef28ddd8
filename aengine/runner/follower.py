"""`run_follower`: what a rank does that follows another one: it computes its part of every plan that comes.

`aengine-worker`: a rank of a model, started by the engine or, on another host, by hand."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

from aengine.api.errors import RankHungError
from aengine.kernels.cpu.library import ExchangeError
from aengine.layers.collectives import CollectiveError
from aengine.parallel.driver import VERDICT_SECONDS
from aengine.parallel.follower import FollowerRanks, run_worker
from aengine.parallel.messages import (
    ApplyChange,
    ChangePrepared,
    DiscardChange,
    PagesRead,
    PrepareChange,
    ReadPages,
    SleepRank,
    WakeRank,
    WritePages,
)
from aengine.parallel.ring import StageError
from aengine.runner.contract import InFlightStep, Prepared, change_from_json
from aengine.runner.runner import ModelRunner


def run_follower(ranks: FollowerRanks) -> None:
    """Returns when the driver has closed the connection. Raises what loading raises, and what a step raises: then this rank can go on no
    more, and neither can the others. Raises RankHungError for a rank that it waits for in vain."""
    try:
        _run(ranks)
    except ExchangeError as error:
        if not error.lagging:
            raise
        rank = ranks.shard.stage * ranks.shard.size + error.lagging[0]
        raise RankHungError(f"rank {rank}: {error}", rank) from error
    except CollectiveError as error:
        if not error.timed_out:
            time.sleep(VERDICT_SECONDS)  # the driver knows why it is gone, and ends all ranks
        if not error.timed_out or ranks.shard.size > 2:
            raise
        rank = ranks.shard.stage * 2 + 1 - ranks.shard.index  # the other one of the stage
        raise RankHungError(f"rank {rank}: {error}", rank) from error
    except StageError as error:
        if not error.hung:
            time.sleep(VERDICT_SECONDS)  # as above
            raise
        raise RankHungError(str(error), error.rank) from error


def _run(ranks: FollowerRanks) -> None:
    runner = ModelRunner(ranks.config, ranks.model_dir, ranks=ranks)
    changes = _Changes(ranks, runner)
    try:
        staged = deque[InFlightStep]()  # that later stages compute
        while True:
            if staged and ranks.ends_step():
                staged.popleft().result()
                continue
            task = ranks.next_task()
            match task:
                case None:
                    return
                case ApplyChange(number):
                    runner.apply(changes.take(number))
                    continue
                case SleepRank(level, pages):
                    runner.sleep(level, pages)
                    continue
                case WakeRank():
                    runner.wake(None)
                    continue
                case ReadPages(pages):
                    ranks.send(PagesRead(runner.read_pages(pages).reshape(-1)))
                    continue
                case WritePages(pages, content):
                    runner.write_pages(pages, content.reshape(len(pages), -1))
                    continue
            step = runner.launch(task)
            if runner.max_in_flight > 1 and ranks.shard.stage == 0:
                staged.append(step)
            elif not step.overlaps:
                step.result()
    finally:
        changes.close()
        runner.close()


class _Changes:
    """Prepares what the driver asks for, in a thread of its own."""

    def __init__(self, ranks: FollowerRanks, runner: ModelRunner) -> None:
        self._ranks = ranks
        self._runner = runner
        self._prepared: dict[int, Prepared] = {}  # by number of the change
        self._messages: SimpleQueue[PrepareChange | DiscardChange | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="aengine-changes", daemon=True)
        self._thread.start()
        ranks.on_change = self._messages.put

    def take(self, number: int) -> Prepared:
        """The driver was told that it is prepared."""
        return self._prepared.pop(number)

    def close(self) -> None:
        """Returns when nothing more is prepared."""
        self._messages.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (message := self._messages.get()) is not None:
            if isinstance(message, DiscardChange):
                prepared = self._prepared.pop(message.number, None)
                if prepared is not None:
                    self._runner.discard(prepared)
            else:
                self._ranks.send(self._prepare(message))

    def _prepare(self, message: PrepareChange) -> ChangePrepared:
        try:
            prepared = self._prepared[message.number] = self._runner.prepare(change_from_json(message.change))
        except Exception as error:  # the driver raises it
            return ChangePrepared(message.number, type(error).__name__, str(error), "")
        return ChangePrepared(message.number, "", "", prepared.weights_digest)


def main(arguments: Sequence[str] | None = None, name: str = "aengine-worker") -> int:
    """Returns the exit code. `name`: what the program is called."""
    return run_worker(sys.argv[1:] if arguments is None else arguments, os.environ, run_follower, name)


if __name__ == "__main__":
    sys.exit(main())
