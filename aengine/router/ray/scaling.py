"""How many replicas there should be, by how many sequences wait and run. Knows neither replicas nor a clock: time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aengine.api.outputs import EngineStats
from aengine.router.ray.config import RayConfig

SPARE = 0.5
"""Of the rows and pages of the replicas that would be left: what may be in use for one to be too many. Far from where one more is started,
so that their number does not swing."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas there should be, and since when that has been too few or too many, in seconds on any one clock."""

    replicas: int
    short_since: float | None = None
    spare_since: float | None = None


def next_scale(scale: Scale, loads: Sequence[EngineStats], rows: int, config: RayConfig, now: float) -> Scale:
    """What becomes of `scale`. `loads`: of the replicas that serve, others being started or lost; `rows`: sequences that a replica runs at
    once, at most."""
    short = is_short(loads, config.queue_depth) and len(loads) >= scale.replicas < config.most_replicas
    spare = not short and scale.replicas > config.min_replicas and has_spare(loads, scale.replicas - 1, rows)
    scale = replace(
        scale,
        short_since=(now if scale.short_since is None else scale.short_since) if short else None,
        spare_since=(now if scale.spare_since is None else scale.spare_since) if spare else None,
    )
    if scale.short_since is not None and now - scale.short_since >= config.up_seconds:
        waiting = sum(load.waiting for load in loads)
        wanted = scale.replicas + min(scale.replicas, -(-waiting // rows))  # at most twice as many at a time
        return Scale(min(wanted, config.most_replicas))
    if scale.spare_since is not None and now - scale.spare_since >= config.down_seconds:
        return Scale(scale.replicas - 1)
    return scale


def is_short(loads: Sequence[EngineStats], queue_depth: int) -> bool:
    """Whether these replicas are too few."""
    return sum(load.waiting for load in loads) >= queue_depth * max(1, len(loads))


def has_spare(loads: Sequence[EngineStats], fewer: int, rows: int) -> bool:
    """Whether `fewer` replicas would do for all that these have: nothing waits, and rows and pages would be free by half."""
    in_rows = sum(load.running + load.parked for load in loads)
    used = sum(load.pages_used for load in loads)
    pages = min((load.pages_total for load in loads), default=0)
    return bool(loads) and not any(load.waiting for load in loads) and in_rows <= SPARE * fewer * rows and used <= SPARE * fewer * pages
