"""`build_executor`: who runs the model on this device, with this configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aengine.errors import ConfigError
from aengine.kernels.cpu.levels import KernelsUnavailableError
from aengine.kernels.warm_memory import WarmMemory
from aengine.models.fallback.spec import FallbackSpec
from aengine.parallel.follower import FollowerRanks
from aengine.runner.base import Executor
from aengine.runner.device_executor import DeviceExecutor
from aengine.runner.device_follower import DeviceFollower
from aengine.runner.host_executor import HostExecutor
from aengine.runner.host_follower import HostFollower
from aengine.runner.setup import ExecutorSetup

_log = logging.getLogger("aengine")
_DEVICE_BOUND = {
    "attention_backend": {"cpu": "cpu", "flashinfer": "cuda", "triton": "cuda"},
    "kv_cache_dtype": {"fp8": "cuda", "int8": "cpu"},
}


def build_executor(setup: ExecutorSetup, warm: WarmMemory | None, check: Callable[[], object]) -> Executor:
    """The executor for this device, model and configuration, with one log line that says which and why.

    `warm` is host memory to put weights in. `check` is called before each weight is loaded, and may raise.
    Raises ConfigError for a configured one that is not possible, InsufficientMemoryError before the weights are read, ModelLoadError, and
    what `check` raises.
    """
    config = setup.config
    on_cpu = setup.device.type == "cpu"
    for name, devices in _DEVICE_BOUND.items():
        value = getattr(config, name)
        if value in devices and (devices[value] == "cpu") != on_cpu:
            raise ConfigError.of(name, f"{value!r} needs device {devices[value]}")
    fallback = isinstance(setup.spec, FallbackSpec)
    shares_experts = setup.replicas is not None
    if shares_experts:
        _log.info("experts are shared with other replicas, so the model runs in torch")
    if on_cpu and config.attention_backend != "torch_native" and not fallback and not shares_experts:
        try:
            if isinstance(setup.ranks, FollowerRanks):
                return HostFollower(setup, setup.ranks, warm, check)
            return HostExecutor(setup, warm, check)
        except KernelsUnavailableError as reason:
            if config.attention_backend == "cpu":
                raise ConfigError.of("attention_backend", f"'cpu' is not possible here: {reason}") from None
            _log.warning("running in plain torch, which is several times slower than the CPU kernels: %s", reason)
    if config.quantization != "none" and (on_cpu or fallback):
        needs = " and ".join(["the CPU kernels"] * on_cpu + ["a native model"] * fallback)
        raise ConfigError.of("quantization", f"{config.quantization!r} needs {needs}")
    return DeviceFollower(setup, setup.ranks, check) if isinstance(setup.ranks, FollowerRanks) else DeviceExecutor(setup, check)
