"""What the replicas of a router are together: their statistics and memory as those of one engine."""

from __future__ import annotations

from collections.abc import Collection

from aengine.outputs import DraftUsage, EngineStats, MemoryUse

_COUNTS = (
    *("running", "waiting", "parked", "pages_used", "pages_total", "cached_tokens", "steps", "preemptions", "prompt_tokens"),
    *("cached_prompt_tokens", "completion_tokens", "uncomputed_tokens", "prefill_tokens_per_second"),
)


def total_memory(uses: Collection[MemoryUse]) -> MemoryUse:
    return MemoryUse(sum(use.before for use in uses), sum(use.after for use in uses))


def total_stats(all_stats: Collection[EngineStats]) -> EngineStats:
    """Counts add up, also the tokens a second; a step takes what it takes on average; paused and asleep is what all are."""
    if not all_stats:
        return EngineStats()
    total = {name: sum(getattr(stats, name) for stats in all_stats) for name in _COUNTS}
    drafts: dict[str, DraftUsage] = {}
    for one in (one for stats in all_stats for one in stats.drafts):
        drafts[one.drafter] = drafts.get(one.drafter, DraftUsage(one.drafter)).plus(one.drafted, one.accepted, one.steps)
    steps = [stats.mean_step_seconds for stats in all_stats if stats.mean_step_seconds]
    return EngineStats(
        **total,
        drafts=tuple(drafts.values()),
        paused=all(stats.paused for stats in all_stats),
        sleep_level=min(stats.sleep_level for stats in all_stats),
        weights_version=max(stats.weights_version for stats in all_stats),
        mean_step_seconds=sum(steps) / len(steps) if steps else 0.0,
    )
