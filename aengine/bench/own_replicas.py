"""What becomes of a load at a router's replicas: how it was shared among them, and how much of its prompts they had cached."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from aengine.api.outputs import EngineStats
from aengine.router.router import Router

REPORT_SECONDS = 1.1
"""Servers tell their load at least once a second."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica did, in tokens."""

    name: str
    prompt: int
    cached: int  # of the prompt tokens
    completion: int


async def counted(router: Router) -> Mapping[str, EngineStats]:
    """What the replicas have done by now, by name."""
    await asyncio.sleep(REPORT_SECONDS)
    return {replica.name: replica.report.stats for replica in router.replicas() if replica.report is not None}


def shares(before: Mapping[str, EngineStats], after: Mapping[str, EngineStats]) -> list[Share]:
    """What was done between. A replica that was restarted meanwhile counts from its restart."""
    found = []
    for name, now in after.items():
        then = before.get(name)
        if then is None or now.steps < then.steps:
            then = EngineStats()
        prompt, cached = now.prompt_tokens - then.prompt_tokens, now.cached_prompt_tokens - then.cached_prompt_tokens
        found.append(Share(name, prompt, cached, now.completion_tokens - then.completion_tokens))
    return found


def show(found: list[Share]) -> list[str]:
    """Describes the shares in lines for people: one for each replica, and one about prefix hits and balance."""
    prompt, cached = sum(one.prompt for one in found), sum(one.cached for one in found)
    computed = [one.prompt - one.cached + one.completion for one in found]
    mean = sum(computed) / len(computed)
    lines = [f"{one.name}: {one.prompt} prompt tokens, {one.cached} of them cached, {one.completion} generated" for one in found]
    if prompt and mean:
        lines.append(f"prefix hits: {cached / prompt:.1%} of prompt tokens; the busiest computed {max(computed) / mean:.2f} of the mean")
    return lines
