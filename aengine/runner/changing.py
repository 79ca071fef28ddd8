"""`Changing`: how the changes of a model are prepared, and applied between two steps, here and on the ranks that follow."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch

from aengine.errors import AdapterError, AEngineError, InsufficientMemoryError, InvalidRequestError, ModelLoadError
from aengine.models.adapters import load_adapter
from aengine.models.fallback.spec import FallbackSpec
from aengine.models.spec import ModelSpec
from aengine.outputs import AdapterInfo
from aengine.parallel.driver import DriverRanks
from aengine.runner.base import Executor, IntArray
from aengine.runner.changes import Change, LoadAdapter, NewWeights, Prepared, UnloadAdapter, change_to_json
from aengine.runner.device import set_thread_count
from aengine.runner.driven_step import naming_ranks
from aengine.runner.memory import check_addition, free_host_memory
from aengine.runner.new_weights import as_path, new_weights
from aengine.runner.setup import ExecutorSetup


class Changing:
    """The methods are those of `Runner`. With several ranks none applies a change before all have prepared it."""

    def __init__(self, setup: ExecutorSetup, executor: Executor, check: Callable[[], object]) -> None:
        """`check` is called before each weight, and may raise to end the preparation."""
        self._setup = setup
        self._executor = executor
        self._check = check
        self._numbers = itertools.count(1)
        self._threads = torch.get_num_threads()  # of steps
        self._asleep = False

    def prepare(self, change: Change) -> Prepared:
        threads = torch.get_num_threads()  # of this thread
        set_thread_count(self._threads if self._asleep else 1)  # else the cores are the steps'
        try:
            return self._prepare(change) if self._setup.followers is None else self._prepare_on(self._setup.followers, change)
        finally:
            set_thread_count(threads)

    def apply(self, prepared: Prepared) -> None:
        with self._on_all_ranks() as ranks:
            if ranks is not None:
                ranks.apply_change(prepared.number)
            self._apply(prepared)

    def discard(self, prepared: Prepared) -> None:
        if self._setup.followers is not None:
            with suppress(AEngineError):  # a rank is gone, and with it the engine
                self._setup.followers.discard_change(prepared.number)

    def sleep(self, level: int, pages: IntArray) -> None:
        if level == 2 and isinstance(self._setup.spec, FallbackSpec):
            raise InvalidRequestError.of("level", "2 is not possible with a model in the code of transformers, which cannot be read again")
        if level == 2 and self._setup.replicas is not None:
            raise InvalidRequestError.of(
                "level", "2 is not possible with expert_parallel_size > 1: others compute with the experts held here"
            )
        with self._on_all_ranks() as ranks:
            if ranks is not None:
                ranks.send_sleep(level, pages)
            self._executor.sleep(level, pages)
        self._asleep = True

    def wake(self, prepared: Prepared | None) -> None:
        if prepared is not None:
            self.apply(prepared)
        with self._on_all_ranks() as ranks:
            if ranks is not None:
                ranks.send_wake()
            self._executor.wake()
        self._asleep = False

    @contextmanager
    def _on_all_ranks(self) -> Iterator[DriverRanks | None]:
        """Around what no rank can take back if it fails on another one, for lack of memory, too."""
        ranks = self._setup.followers
        if ranks is None:
            yield None
            return
        with naming_ranks(ranks):
            try:
                yield ranks
            except InsufficientMemoryError as error:
                raise ModelLoadError(f"rank 0: {error}") from error

    def _prepare_on(self, ranks: DriverRanks, change: Change) -> Prepared:
        if isinstance(change, NewWeights):
            with as_path(change.source, self._setup, self._check) as path:
                return self._prepare_with(ranks, NewWeights(path))
        return self._prepare_with(ranks, change)

    def _prepare_with(self, ranks: DriverRanks, change: Change) -> Prepared:
        number = next(self._numbers)
        ranks.prepare_change(number, change_to_json(change))
        try:
            prepared = self._prepare(change, number)
            ranks.wait_prepared(number)
        except BaseException:
            with suppress(AEngineError):  # of those, the first one counts
                ranks.discard_change(number)
            raise
        return prepared

    def _prepare(self, change: Change, number: int = 0) -> Prepared:
        """On this rank."""
        match change:
            case LoadAdapter(_, name, path):
                return self._load_adapter(change, name, path, number)
            case UnloadAdapter():
                return Prepared(change, None, number)
            case NewWeights() if self._setup.replicas is not None:
                raise ModelLoadError(
                    "weights are not replaced with expert_parallel_size > 1: the other engines would go on with the old ones"
                )
            case NewWeights(source):
                return Prepared(change, self._executor.prepare_weights(partial(new_weights, self._setup, source, self._check)), number)

    def _load_adapter(self, change: LoadAdapter, name: str, path: str, number: int) -> Prepared:
        setup = self._setup
        if not self._executor.max_adapters and isinstance(setup.spec, ModelSpec):
            raise AdapterError("no adapter can be loaded: max_adapters is 0")
        with torch.inference_mode():
            adapter = load_adapter(pathlib.Path(path), setup.spec, setup.dtype, self._executor.shard, setup.config.max_adapter_rank)
            check_addition(f"adapter {name!r} needs", adapter.nbytes, free_host_memory() // setup.num_local)
            packed = self._executor.pack_adapter(adapter)
        return Prepared(change, packed, number, AdapterInfo(name, adapter.low_rank, adapter.modules, adapter.nbytes))

    def _apply(self, prepared: Prepared) -> None:
        match prepared.change:
            case LoadAdapter(key):
                self._executor.set_adapter(key, prepared.content)
            case UnloadAdapter(key):
                self._executor.set_adapter(key, None)
            case NewWeights():
                self._executor.use_weights(prepared.content)
