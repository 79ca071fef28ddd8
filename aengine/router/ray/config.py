"""`RayConfig`: where and how many replicas run in a Ray cluster. Validates what can be known without the cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from aengine.api.errors import ConfigError
from aengine.api.fields import NOT_NEGATIVE, FieldChecks, check_fields, check_names, integer, text

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
            check.add("max_replicas", f"{self.max_replicas} is less than min_replicas ({self.min_replicas})")
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
