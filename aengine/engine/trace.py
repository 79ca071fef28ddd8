"""`StepTrace`: when the parts of the next steps begin and end, in the step thread and in the event loop, as Chrome and Perfetto draw them.

The methods that it times are replaced on their objects while it lasts, so nothing is paid when there is none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from aengine.scheduler.plan import StepPlan

Tell = Callable[[Any], dict[str, Any]]
_LOOP, _STEPS = 1, 2  # numbers of the threads


class StepTrace:
    """To be begun and ended in the step thread, `time_method` and `to_json` in any."""

    def __init__(self, num_steps: int, ended: Future[Any]) -> None:
        """`ended` gets a result when so many steps have been computed."""
        self._left = num_steps
        self._ended = ended
        self._events: list[dict[str, Any]] = []
        self._timed: list[tuple[object, str]] = []

    def time_method(self, owner: object, name: str, shown: str, thread: int = _STEPS, tell: Tell | None = None) -> None:
        """From now on each call of a method is an event, with what `tell` says of its result."""
        call = getattr(owner, name)
        events, clock = self._events, time.perf_counter_ns

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = clock()
            result = call(*arguments, **named)
            event = {"name": shown, "ph": "X", "pid": os.getpid(), "tid": thread, "ts": begin / 1000, "dur": (clock() - begin) / 1000}
            if tell is not None:
                event["args"] = tell(result)
            events.append(event)
            return result

        setattr(owner, name, timed)
        self._timed.append((owner, name))

    def time_loop(self, registry: object) -> None:
        """Time what the event loop does with the results of a step."""
        self.time_method(registry, "update", "give tokens to streams", _LOOP)

    def time_steps(self, driver: object, scheduler: object, runner: object) -> None:
        """Time the parts of a turn of the step thread."""
        self.time_method(driver, "_take_commands", "take commands")
        self.time_method(scheduler, "schedule", "schedule", tell=_told_of)
        self.time_method(runner, "launch", "launch")
        self.time_method(driver, "_wait_for", "compute")
        self.time_method(scheduler, "commit", "commit", tell=self._count)
        self.time_method(driver, "notify", "report")

    def _count(self, result: object) -> dict[str, Any]:
        self._left -= 1
        if self._left == 0 and not self._ended.done():
            self._ended.set_result(None)
        return {}

    def stop_timing(self) -> None:
        """Time nothing more."""
        for owner, name in self._timed:
            vars(owner).pop(name, None)
        self._timed.clear()

    def to_json(self) -> bytes:
        """The events, in the trace event format of Chrome; times are in microseconds."""
        names = {_LOOP: "event loop", _STEPS: "step thread"}
        of_process = {"ph": "M", "pid": os.getpid()}
        metadata = [{**of_process, "name": "thread_name", "tid": thread, "args": {"name": name}} for thread, name in names.items()]
        metadata.append({**of_process, "name": "process_name", "args": {"name": "aengine"}})
        return json.dumps({"traceEvents": [*metadata, *self._events], "displayTimeUnit": "ms"}).encode()


def _told_of(plan: StepPlan | None) -> dict[str, Any]:
    if plan is None:
        return {"step": None}
    drafts = int((plan.num_sampled[plan.num_sampled > 1] - 1).sum())
    told = {"step": plan.step, "sequences": len(plan.rows), "decodes": plan.num_decodes, "prefill_tokens": plan.num_prefill}
    return {**told, "drafts": drafts, "new_sequences": len(plan.new_rows), "new_pages": len(plan.page_ids)}
