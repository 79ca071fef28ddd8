"""`RouterConfig`: which replicas there are and what a router does when one is lost. Validates what can be known without the network.

`RayConfig`: where and how many replicas run in a Ray cluster. Validates what can be known without the cluster.

How many replicas there should be, by how many sequences wait and run. Knows neither replicas nor a clock: time is an argument.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError
from aengine.api.fields import NOT_NEGATIVE, POSITIVE, Accepts, FieldChecks, check_fields, check_names, integer, one_of, text
from aengine.api.outputs import EngineStats
from aengine.client.client_config import ClientConfig
from aengine.router.replica_load import RoutingPolicy

MOST_REPLICAS = 4096
FILE, DNS = "file:", "dns:"
_NAME = re.compile(r"dns:(///)?(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_BACKENDS = Accepts(
    lambda backends: isinstance(backends, tuple) and all(isinstance(one, str) and one.strip() for one in backends),
    "a tuple of addresses",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything that is fixed for the life of a router. Raises `ConfigError` naming every field that is out of range."""

    replicas: Annotated[int | None, integer(1, MOST_REPLICAS)] = None
    """Engines to run as processes on this host, which share its cores and GPUs. Default: none, but those of `backends`."""
    prefill_replicas: Annotated[int, integer(0, MOST_REPLICAS)] = 0
    """How many of `replicas` have the role "prefill"; the others have "decode". 0: all do both."""
    ray: bool = False
    """Run the engines as actors of a Ray cluster."""
    backends: Annotated[tuple[str, ...], _BACKENDS] = ()
    """Addresses of running servers: host:port; dns:///host:port for all addresses of a name, which is resolved every few seconds;
    file:PATH for those in a file, one a line, which is read again when it changes."""
    backend_token_file: Annotated[str | None, text("a path")] = None
    """File with the token that is sent to the servers with every call. Those that take it for an administrator's tell what is in their
    caches."""
    backend_tls: bool = False
    """Whether the connections to the servers have TLS."""
    backend_ca: Annotated[str | None, text("a path")] = None
    """PEM file with the authorities that sign the servers' certificates. Default: those of gRPC."""
    backend_cert: Annotated[str | None, text("a path")] = None
    """PEM file with the router's certificate, for servers that ask for one."""
    backend_key: Annotated[str | None, text("a path")] = None
    """PEM file with its private key."""
    backend_name: Annotated[str | None, text("a name")] = None
    """The name that the servers' certificates must have, where it is not the one in their addresses."""
    routing_policy: Annotated[str, one_of(*(policy.value for policy in RoutingPolicy))] = RoutingPolicy.PREFIX.value
    """How replicas are chosen: prefix (where the first token is expected soonest, by cached prefixes and load), round_robin,
    least_loaded, hash (by the beginning of the prompt)."""
    connect_timeout: Annotated[float, POSITIVE] = 30.0
    """Seconds that start() waits for a first replica that serves. Processes of this host may take longer, as long as they load."""
    hang_seconds: Annotated[float, POSITIVE] = 10.0
    """A replica that says nothing for so long is taken to be lost, at least 2: servers tell their load every second."""
    wait_seconds: Annotated[float, NOT_NEGATIVE] = 30.0
    """How long a request waits while no replica can take it; then it fails with NoReplicaError."""
    max_moves: Annotated[int, integer(0, 1000)] = 8
    """How often a request goes on at another replica before its next token; then it fails."""
    prefill_tokens: Annotated[int, integer(1)] = 512
    """Prompts with so many tokens to compute go to a replica with the role "prefill", if there is one, and on to another at their first
    token."""
    hedge_seconds: Annotated[float | None, POSITIVE] = None
    """A request without a first token after so long is sent to a second replica, too, and the first token wins. None: never."""
    slow_start_seconds: Annotated[float, NOT_NEGATIVE] = 10.0
    """A replica that has come back gets less than its share for so long."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check = FieldChecks()
        given = [name for name in ("replicas", "ray", "backends") if getattr(self, name)]
        for name in given[1:]:
            check.add_violation(name, f"is not possible beside {given[0]}")
        if self.prefill_replicas and self.prefill_replicas >= (self.replicas or 0):
            check.add_violation("prefill_replicas", f"{self.prefill_replicas} is not below replicas ({self.replicas})")
        if self.hang_seconds < 2.0:
            check.add_violation("hang_seconds", f"{self.hang_seconds} is not at least 2: servers tell their load every second")
        for name in ("backend_ca", "backend_cert", "backend_key", "backend_name"):
            if getattr(self, name) is not None and not self.backend_tls:
                check.add_violation(name, f"{getattr(self, name)!r} needs backend_tls as well")
        if (self.backend_cert is None) != (self.backend_key is None):
            missing = "backend_cert" if self.backend_cert is None else "backend_key"
            check.add_violation(missing, "is missing: certificate and key belong together")
        for backend in self.backends:
            if backend.startswith(DNS):
                if split_name(backend) is None:
                    check.add_violation("backends", f"{backend!r} is not dns:///host:port")
            elif not backend.startswith(FILE):
                try:
                    ClientConfig(address=backend)
                except ConfigError as error:
                    check.add_violation("backends", error.violations[0].description)
        check.finish(ConfigError)

    def client_config(self, address: str, token: str | None) -> ClientConfig:
        """The configuration of the client for the replica at `address`, with the `token` that it wants. Raises `ConfigError`."""
        return ClientConfig(
            address=address,
            token=token,
            tls=self.backend_ca or self.backend_tls,
            client_cert=self.backend_cert,
            client_key=self.backend_key,
            server_name=self.backend_name,
            connect_timeout=min(self.hang_seconds, self.connect_timeout / 2),
            multiplex=True,
            max_retries=0,  # another replica is asked instead
        )

    @classmethod
    def of(cls, config: RouterConfig | None, **overrides: Any) -> RouterConfig:
        """A config with some fields replaced. Raises `ConfigError` for unknown names."""
        check_names(cls, overrides)
        return cls(**overrides) if config is None else replace(config, **overrides)


def split_name(backend: str) -> tuple[str, int] | None:
    """Host and port of dns:///host:port; None if it is something else."""
    match = _NAME.fullmatch(backend)
    return (match["host"].strip("[]"), int(match["port"])) if match and int(match["port"]) <= 65535 else None


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
