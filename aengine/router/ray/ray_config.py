"""`RayConfig`: where and how many replicas run in a Ray cluster. Validates what can be known without the cluster.

How many replicas there should be, by how many sequences wait and run. Knows neither replicas nor a clock: time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from aengine.api.errors import ConfigError
from aengine.api.fields import NOT_NEGATIVE, FieldChecks, check_fields, check_names, integer, text
from aengine.api.outputs import EngineStats

MOST_REPLICAS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Raises `ConfigError` naming every field that is out of range."""

    ray_address: Annotated[str, text("auto, or an address host:port")] = "auto"
    """The cluster: auto (the one that this host belongs to, or that of RAY_ADDRESS), or host:port of its head. Ignored where the program is
    connected to a cluster already."""
    min_replicas: Annotated[int, integer(1, MOST_REPLICAS)] = 1
    """Replicas there are at least."""
    max_replicas: Annotated[int | None, integer(1, MOST_REPLICAS)] = None
    """Replicas there are at most. Default: min_replicas."""
    ranks_per_node: Annotated[int | None, integer(1, 64)] = None
    """Ranks of a stage that are placed together on one node; a divisor of tensor_parallel_size. Default: all of a stage."""
    queue_depth: Annotated[int, integer(1)] = 4
    """Waiting sequences per replica, from which on there are too few replicas."""
    up_seconds: Annotated[float, NOT_NEGATIVE] = 5.0
    """How long there are too few replicas before one more is started."""
    down_seconds: Annotated[float, NOT_NEGATIVE] = 120.0
    """How long there is one too many before one is drained and ended."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check = FieldChecks()
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            check.add_violation("max_replicas", f"{self.max_replicas} is less than min_replicas ({self.min_replicas})")
        check.finish(ConfigError)

    @property
    def most_replicas(self) -> int:
        """`max_replicas`, or its default beside the other fields."""
        return self.max_replicas or self.min_replicas

    @classmethod
    def of(cls, config: RayConfig | None = None, **overrides: Any) -> RayConfig:
        """`config`, or the defaults, with `overrides`; an unknown name is refused with the names there are."""
        check_names(cls, overrides)
        return replace(config or cls(), **overrides)


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
