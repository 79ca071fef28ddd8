"""What is asked of CUDA around a model, without a device: a stand-in for its memory and its allocator, and one for NCCL."""

from __future__ import annotations

import os
import pathlib
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reference import save_tiny
from torch import Tensor

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError, InsufficientMemoryError, ModelLoadError, RankDiedError
from aengine.layers import collectives
from aengine.parallel.join import listen
from aengine.parallel.shard import Shard
from aengine.runner import contract, rank_steps
from aengine.runner.memory import pinned_bytes
from aengine.runner.runner import ModelRunner
from aengine.runner.torch import device, loading
from aengine.runner.torch import executor as device_executor
from aengine.runner.torch.asleep import Asleep
from aengine.runner.torch.executor import TorchExecutor

GIB = 1 << 30
CUDA = torch.device("cuda", 0)


@dataclass
class Device:
    """Its memory, and torch's allocator, which keeps what is freed until it is emptied."""

    total: int = 80 * GIB
    others: int = 3 * GIB  # other processes, and what is not torch's
    held: list[int] = field(default_factory=list)
    cached: int = 0
    peak: int = 0

    @property
    def reserved(self) -> int:
        return sum(self.held) + self.cached

    def take(self, size: int) -> None:
        self.cached = max(0, self.cached - size)
        self.held.append(size)
        self.peak = max(self.peak, self.reserved)

    def free(self, size: int) -> None:
        self.held.remove(size)
        self.cached += size

    def empty(self) -> None:
        self.cached = 0

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fakes: dict[str, Callable[..., Any]] = {
            "mem_get_info": lambda of: (self.total - self.others - self.reserved, self.total),
            "memory_reserved": lambda of: self.reserved,
            "max_memory_reserved": lambda of: self.peak,
            "reset_peak_memory_stats": lambda of: setattr(self, "peak", self.reserved),
            "empty_cache": self.empty,
            "current_stream": lambda of: SimpleNamespace(synchronize=lambda: None),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_the_kv_cache_gets_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside another engine of this process, and behind one that has left memory to torch."""
    for beside, left in ((0, 0), (20 * GIB, 0), (0, 7 * GIB)):
        memory = Device(held=[16 * GIB, *([beside] if beside else [])], cached=left)
        memory.use(monkeypatch)

        def widest(memory: Device = memory) -> None:
            memory.take(2 * GIB)
            memory.free(2 * GIB)

        def graphs(memory: Device = memory) -> int:
            memory.take(GIB)
            memory.free(GIB)
            return 4 * GIB

        budget = device.cuda_kv_budget(CUDA, 0.9, widest, graphs)
        assert budget == int(0.9 * memory.total) - memory.others - beside - (16 + 2 + 4) * GIB
        assert memory.cached == 0


def test_memory_that_torch_keeps_is_free_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Device(cached=30 * GIB)
    memory.use(monkeypatch)
    assert device.free_cuda_memory(CUDA, 0.9) == int(0.9 * memory.total) - memory.others


@pytest.mark.parametrize(
    ("name", "local_index", "found"),
    [("auto", None, 0), ("cuda", None, 0), ("cuda:1", None, 1), ("cuda", 0, 0), ("auto", 1, 1), ("cuda:1", 1, 2), ("cuda:3", 0, 3)],
)
def test_each_rank_has_a_device(monkeypatch: pytest.MonkeyPatch, name: str, local_index: int | None, found: int) -> None:
    for key, value in {"is_available": True, "device_count": 4, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, key, lambda value=value: value)
    assert device.find_device(name, local_index) == contract.Device("cuda", found)
    assert device.find_device("cpu", local_index) == contract.Device("cpu")
    with pytest.raises(ConfigError, match=r"'cuda:3' for rank 2 of a host is not possible here: there are 4 CUDA devices"):
        device.find_device("cuda:3", 2)
    with pytest.raises(ConfigError, match=r"'cuda:7' is not possible here: there are 4 CUDA devices"):
        device.find_device("cuda:7")


def test_pinned_memory_is_counted_as_torch_takes_it() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]


class _Group:
    """Has the constructor and the methods of `ProcessGroupNCCL` that are used."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
        self.made_with = os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), rank, size, options._timeout, options.config.blocking
        self.connected_with: tuple[object, str | None] | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected_with = device, os.environ.get("TORCH_NCCL_BLOCKING_WAIT")


@pytest.mark.parametrize("given", [None, "0"])
def test_a_group_of_nccl_has_no_watchdog(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """And those of the user keep theirs."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", _Group, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if given is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", given)
    group: Any = collectives.nccl_group(torch.distributed.HashStore(), 1, 2, torch.device("cuda", 1))
    assert group.made_with == ("1", 1, 2, timedelta(days=365), 1)
    assert group.connected_with == (torch.device("cuda", 1), given)


def test_a_rank_that_never_connects_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, connects = threading.Event(), threading.Event()

    def nccl_group(*given: object) -> object:
        begun.set()
        connects.wait()
        return given

    def check() -> None:
        if begun.is_set():
            raise RankDiedError("rank 1 (pid 1) was killed by SIGKILL", 1)

    monkeypatch.setattr(collectives, "nccl_group", nccl_group)
    with listen("127.0.0.1:0") as store:
        driver = SimpleNamespace(store=store.getsockname(), store_fd=store.fileno(), check=check, on_failure=lambda callback: None)
        setup: Any = SimpleNamespace(
            shard=Shard(0, 2), ranks=driver, followers=driver, device=contract.Device("cuda", 0), torch_device=CUDA
        )
        with pytest.raises(RankDiedError, match="SIGKILL"):
            rank_steps.connect_ranks(setup, lambda: None)
        connects.set()
        begun.clear()
        connected = rank_steps.connect_ranks(setup, lambda: None)
        assert connected is not None
        assert connected.shard == Shard(0, 2, splits_embedding=True)


@pytest.mark.parametrize(
    ("size", "device", "compared"), [(2, CUDA, {"number of multiprocessors": "114"}), (1, CUDA, {}), (2, torch.device("cpu"), {})]
)
def test_ranks_of_a_stage_compare_their_devices(
    monkeypatch: pytest.MonkeyPatch, size: int, device: torch.device, compared: dict[str, str]
) -> None:
    """Else they might replay graphs of different numbers of rows in one step."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda of: SimpleNamespace(multi_processor_count=114))
    setup: Any = SimpleNamespace(torch_device=device, shard=Shard(0, size))
    backend: Any = SimpleNamespace(name="flashinfer")
    assert loading._kernel_facts(setup, backend) == {"attention backend": "flashinfer", **compared}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("qwen3")
    save_tiny("qwen3", path)
    return path


@pytest.mark.parametrize("where", ["__init__", "kv_budget", "allocate"])
def test_what_does_not_fit_is_released(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Though the error is kept, which refers to everything that was there when it came."""
    loaded: list[weakref.ref[Any]] = []
    closed: list[TorchExecutor] = []

    def fail(executor: TorchExecutor, *given: object) -> None:
        loaded.extend(map(weakref.ref, executor._model.model.weights))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Including non-PyTorch memory, this process has")

    close, make = TorchExecutor.close, TorchExecutor.__init__

    def make_and_fail(executor: TorchExecutor, *given: Any) -> None:
        make(executor, *given)
        fail(executor)

    monkeypatch.setattr(TorchExecutor, where, make_and_fail if where == "__init__" else fail)
    monkeypatch.setattr(TorchExecutor, "close", lambda executor: (close(executor), closed.append(executor)))
    config = EngineConfig(model=str(tiny), device="cpu", attention_backend="torch_native", dtype="bfloat16")
    with pytest.raises(InsufficientMemoryError, match=r"CUDA out of memory. Tried to allocate 2.00 GiB. Lower gpu_memory_ut") as caught:
        ModelRunner(config, tiny)
    assert len(closed) == (where != "__init__")
    closed.clear()
    assert loaded
    assert all(weight() is None for weight in loaded)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("text", "kind"),
    [("CUDA error: out of memory", InsufficientMemoryError), ("CUDA error: CUDA-capable device(s) is/are busy", ModelLoadError)],
)
def test_a_device_that_fails_while_a_model_is_loaded(
    tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception]
) -> None:
    def fail(device: torch.device, batch_invariant: bool) -> None:
        raise torch.AcceleratorError(f"{text}\nCUDA kernel errors might be asynchronously reported at some other API call")

    monkeypatch.setattr(device_executor, "DeviceStream", fail)
    with pytest.raises(kind, match=rf"^the device fails: {re.escape(text)}$"):
        ModelRunner(EngineConfig(model=str(tiny), device="cpu", attention_backend="torch_native"), tiny)


def test_new_weights_are_pinned_one_by_one(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has them twice at no time; and it is asked for what pinning takes."""
    config = EngineConfig(model=str(tiny), device="cpu", attention_backend="torch_native", kv_cache_memory=8 << 20)
    runner: Any = ModelRunner(config, tiny)
    setup, pinned, alive = runner._executor._setup, list[weakref.ref[Tensor]](), list[int]()

    def pin_memory(weight: Tensor) -> Tensor:
        alive.append(sum(one() is not None for one in pinned))
        pinned.append(weakref.ref(weight))
        return weight.clone()

    asked: list[int] = []
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(loading, "check_addition", lambda what, needed, available: asked.append(needed))
    made = loading.weights_on_host(replace(setup, device=contract.Device("cuda", 0)), setup.weights(lambda: None), None, False)
    assert len(pinned) == len(made) > 10
    assert max(alive) <= 1
    assert asked == [sum(pinned_bytes(weight.nbytes) for weight in made.values())]
    runner.close()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_the_host_has_no_memory_for_changes_nothing(level: int, tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, whose weights would move to the host, but not at level 2."""
    config = EngineConfig(model=str(tiny), device="cpu", attention_backend="torch_native", kv_cache_memory=8 << 20)
    runner: Any = ModelRunner(config, tiny)
    executor, device = runner._executor, SimpleNamespace(type="cuda")
    backend = SimpleNamespace(spec=SimpleNamespace(device=device), bytes_per_page=executor.bytes_per_page)
    model: Any = SimpleNamespace(backend=backend, model=executor._model.model)
    of_pages = 3 * executor.bytes_per_page()
    of_weights = sum(pinned_bytes(size) for size in {w.data_ptr(): w.nbytes for w in executor._model.model.weights}.values())
    with pytest.raises(InsufficientMemoryError, match=r"what the device is to give back needs .* of host memory"):
        Asleep([model], None, None, np.arange(3, dtype=np.int32), level, of_pages + (of_weights if level == 1 else 0) - 1)
    runner.close()
