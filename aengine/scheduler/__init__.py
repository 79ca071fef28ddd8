"""Who runs in a step, with how many tokens, on which pages; and what the outcome changes.

Owns requests from submission to release. Must not know torch, threads, streams or text: plans go down and results come up as
plain data (`plan.py`), updates go out as plain data (`request.py`).
"""

from aengine.scheduler.plan import NewRow, PromptLogprobs, RowParams, RowsFailed, StepPlan, StepResult, TokenLogprobs
from aengine.scheduler.request import Finished, Request, SchedulerConfig, Updates
from aengine.scheduler.scheduler import Scheduler

__all__ = [
    "Finished",
    "NewRow",
    "PromptLogprobs",
    "Request",
    "RowParams",
    "RowsFailed",
    "Scheduler",
    "SchedulerConfig",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "Updates",
]
