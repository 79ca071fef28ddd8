"""What connects the ranks of a stage: the collectives of the torch decoder, the exchange of the CPU kernels. And replicas that share
experts.

Steps that other ranks or replicas compute, too. If a `DrivenStep` fails because of one of them, the error says which. `Stages` is a rank
of one of several stages, between the one before and the one behind it.

Each stage computes its layers of a step and sends the hidden states on. The first one, which has the output head, gets those at the logits
indices back. Knows nothing of what computes them: states that are sent and received are in host memory.

The exchange between the ranks of a model: over memory that processes of one host share, or by a process group of torch.

Owns the memory. What an exchange is for the kernels is `SharedMemoryExchange` in `src/abi.h`, and how rounds work in `src/exchange.h`.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.arrays import Array
from aengine.kernels.cpu.library import CExchange, CpuKernels, CSharedRanks, ExchangeError
from aengine.layers.collectives import CollectiveError, Collectives
from aengine.parallel.driver import CHECK_SECONDS, VERDICT_SECONDS, DriverRanks
from aengine.parallel.expert_replicas import Replicas
from aengine.parallel.ring import WAITED, WAITED_IN_STAGE, Ring, StageError
from aengine.parallel.shard import Shard
from aengine.runner.contract import Executor, InFlightStep, IntArray, LazyStep, Step
from aengine.runner.setup import ExecutorSetup
from aengine.scheduler.plan import NO_INTS, StepResult

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

MAX_RANKS = 64
SLOT_BYTES = 1 << 20
"""Of a rank and a round: what is more takes several rounds."""
_HEADER, _COUNTER = 16384, 128  # bytes before the slots, and of one of the counters there: `SharedRounds` of exchange.cpp
_ABORTED, _TIMED_OUT = 11, 12  # `Status`
_MOST_READ = 16 << 20  # bytes of pages that ranks are asked for at once
_log = logging.getLogger("aengine")


def exchange_bytes(num_ranks: int) -> int:
    """Bytes of the memory that so many ranks share."""
    return _HEADER + 2 * num_ranks * SLOT_BYTES


class SharedMemoryExchange:
    """Satisfies `RankExchange`, over shared memory. Its memory lives as long as the object, in each rank."""

    def __init__(self, kernels: CpuKernels, fd: int, index: int, size: int, timeout: float) -> None:
        """`fd`: a file of `exchange_bytes(size)`, zero when the first of the `size` ranks begins; it can be closed afterwards. When a rank
        waits for another one longer than `timeout` seconds the exchange fails on all of them."""
        if not 0 <= index < size <= MAX_RANKS:
            raise ValueError(f"rank {index} is not one of {size} ranks, or these are more than {MAX_RANKS}")
        memory = np.frombuffer(mmap.mmap(fd, exchange_bytes(size)), np.uint8)
        self._counters = memory[: (1 + size) * _COUNTER].view(np.int64)[:: _COUNTER // 8]  # whether it was aborted, then rounds by rank
        self._shared = CSharedRanks(memory.ctypes.data, timeout, index, size, size > (os.cpu_count() or 1))
        slots = [memory.ctypes.data + _HEADER + number * SLOT_BYTES for number in range(2 * size)]
        self._slots = (ctypes.c_void_p * (2 * size))(*slots)
        meet = ctypes.cast(kernels.meet_in_memory, ctypes.c_void_p)
        self.c = CExchange(ctypes.addressof(self._shared), meet, self._slots, SLOT_BYTES, 0, index, size, 0, 0)

    def abort(self) -> None:
        """Ends all waits of all ranks, now and from now on. From any thread and process."""
        self._counters[0] = 1

    def lagging(self) -> tuple[int, ...]:
        rounds = self._counters[1:]
        return tuple(np.flatnonzero(rounds < rounds.max()).tolist())


class GroupExchange:
    """Satisfies `RankExchange`, by a process group with tensors on the CPU, such as one of gloo. For ranks on several hosts."""

    def __init__(self, group: ProcessGroup) -> None:
        """What the group raises, such as after its own timeout, makes the exchange fail; it is logged."""
        import torch

        self._group = group
        size = group.size()
        self._memory = torch.empty(2, size, SLOT_BYTES, dtype=torch.uint8)
        self._slots = (ctypes.c_void_p * (2 * size))(*(slot.data_ptr() for slot in self._memory.flatten(0, 1)))
        self._meet = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(self._exchange)
        meet = ctypes.cast(self._meet, ctypes.c_void_p)
        self.c = CExchange(None, meet, self._slots, SLOT_BYTES, 0, group.rank(), size, 0, 0)

    def abort(self) -> None:
        """Ends all waits of this rank; the others notice it when their connections to it end."""
        self._group.abort()

    def lagging(self) -> tuple[int, ...]:
        """Which one of several others did not come in time is not known."""
        return (1 - self.c.index,) if self.c.size == 2 and self.c.status == _TIMED_OUT else ()

    def _exchange(self, _: object, count: int) -> int:
        slots = list(self._memory[self.c.round % 2, :, :count])
        try:
            self._group.allgather([slots], [slots[self.c.index].clone()]).wait()
        except RuntimeError as error:
            _log.error("the exchange between ranks failed: %s", error)
            return _TIMED_OUT if "timed out" in str(error).lower() else _ABORTED
        return 0


_CONNECT = timedelta(minutes=10)
"""Time for all ranks to begin."""
_CONNECT_AT_ONCE = timedelta(minutes=1)
"""The same, where all have just been heard of."""


def connect_ranks(setup: ExecutorSetup, check: Callable[[], object]) -> Collectives | None:
    """Waits for the other ranks of the stage; None: there are none. `check` is called meanwhile, and may raise. When a rank fails, what
    waits for it raises CollectiveError."""
    if setup.shard.size == 1:
        return None
    return Collectives(replace(setup.shard, splits_embedding=True), _group(setup, check))


def connect_replicas(setup: ExecutorSetup) -> Collectives | None:
    """Waits for the other replicas that share the experts; None: there are none. When one fails, what waits for it raises
    CollectiveError."""
    replicas = setup.replicas
    if replicas is None:
        return None
    store = _store(replicas.store, replicas.store_fd, _CONNECT_AT_ONCE)
    return Collectives(replicas.shard, _gloo(store, replicas.shard, replicas.store[0], _waited(setup)))


def exchange_of(setup: ExecutorSetup, kernels: CpuKernels) -> SharedMemoryExchange | GroupExchange:
    """With the other ranks of the stage: over shared memory if they are all on this host, else by a process group. If any rank fails, what
    waits for it raises an error."""
    ranks, shard = setup.ranks, setup.shard
    assert ranks is not None
    if ranks.exchange_fd is None:
        return GroupExchange(_group(setup))
    driver = setup.followers
    if driver is not None and driver.num_local < shard.num_ranks:
        driver.answers = _store(driver.store, driver.store_fd)  # to the ranks of later stages, which are on other hosts
    exchange = SharedMemoryExchange(kernels, ranks.exchange_fd, shard.index, shard.size, _waited(setup))
    ranks.on_failure(exchange.abort)
    return exchange


def _waited(setup: ExecutorSetup) -> float:
    """Seconds after which a rank counts as hung."""
    return (WAITED if setup.shard.num_stages == 1 else WAITED_IN_STAGE) * setup.config.step_timeout


def _group(setup: ExecutorSetup, check: Callable[[], object] = lambda: None) -> ProcessGroup:
    from torch._C._distributed_c10d import PrefixStore

    from aengine.layers.collectives import nccl_group  # not every torch has what it imports

    ranks, shard, driver = setup.ranks, setup.shard, setup.followers
    assert ranks is not None
    store = PrefixStore(f"stage {shard.stage}", _store(ranks.store, None if driver is None else driver.store_fd))
    if setup.device.type == "cuda":

        def check_ranks() -> None:
            check()
            if driver is not None:
                driver.check()

        group = _waited_for(lambda: nccl_group(store, shard.index, shard.size, setup.torch_device), check_ranks)
        ranks.on_failure(lambda: threading.Thread(target=group.abort, name="aengine-abort", daemon=True).start())
        return group
    return _gloo(store, shard, ranks.store[0], _waited(setup))


def _waited_for(connect: Callable[[], ProcessGroup], check: Callable[[], object]) -> ProcessGroup:
    """What `connect` returns. NCCL waits for ever for a rank that ended before it came, and cannot be told to stop: a thread of its own
    waits there, while this one calls `check`, which raises."""
    connected: Future[ProcessGroup] = Future()

    def run() -> None:
        try:
            connected.set_result(connect())
        except BaseException as error:  # the caller raises it
            connected.set_exception(error)

    threading.Thread(target=run, name="aengine-connect", daemon=True).start()
    while not wait([connected], CHECK_SECONDS).done:
        check()
    return connected.result()


def _store(address: tuple[str, int], listening_fd: int | None, timeout: timedelta = _CONNECT) -> Store:
    """`listening_fd` listens there, if this process is the one that does."""
    from torch._C._distributed_c10d import TCPStore

    listens = None if listening_fd is None else os.dup(listening_fd)
    return TCPStore(*address, None, listens is not None, timeout, wait_for_workers=False, master_listen_fd=listens)


def _gloo(store: Store, shard: Shard, host: str, waited: float) -> ProcessGroup:
    """It ends by itself what waits for a rank that is gone."""
    from aengine.layers.collectives import gloo_group

    return gloo_group(store, shard.index, shard.size, timedelta(seconds=waited), host)


@contextmanager
def naming_ranks(ranks: DriverRanks | Replicas) -> Iterator[None]:
    """A context around what needs other ranks, or replicas: if one of them fails, the error names it."""
    try:
        yield
    except ExchangeError as error:
        ranks.check()
        if not error.lagging:
            raise
        raise ranks.hung(error.lagging[0]) from error
    except CollectiveError as error:
        ranks.check(0.0 if error.timed_out else VERDICT_SECONDS)
        if not error.timed_out or ranks.shard.size > 2:
            raise
        raise ranks.hung(1 - ranks.shard.index) from error
    except StageError as error:
        ranks.check(0.0 if error.hung else VERDICT_SECONDS)
        if not error.hung:
            raise
        raise ranks.hung(error.rank) from error
    except BaseException:
        ranks.close(at_once=True)  # they wait for what this rank did not come to
        raise


class DrivenStep:
    """The `InFlightStep` of a step that other ranks or replicas compute, too. If it fails because of one of them, the error names it."""

    def __init__(self, step: InFlightStep, ranks: DriverRanks | Replicas) -> None:
        self._step = step
        self._ranks = ranks

    @property
    def overlaps(self) -> bool:
        return self._step.overlaps

    def wait(self) -> None:
        with naming_ranks(self._ranks):
            self._step.wait()

    def result(self) -> StepResult:
        with naming_ranks(self._ranks):
            return self._step.result()

    def withdraw(self) -> bool:
        """Returns False always: the others compute the step, too."""
        return False


@dataclass(eq=False, slots=True)
class _PageRead:
    parts: list[NDArray[np.uint8]]  # [n, bytes] by rank: of this one, until the others' have come


class PagesOfRanks:
    """Pages of KV that are divided over ranks: what one holds is what each rank holds of it, by rank."""

    def __init__(self, ranks: DriverRanks, executor: Executor) -> None:
        """`executor`: of this rank."""
        self._ranks, self._executor = ranks, executor
        self._sizes: list[int] = []  # bytes of a page, by rank, once they are known
        self._reads: deque[_PageRead] = deque()  # of which the other ranks' parts have not come

    def begin_read(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> Callable[[], NDArray[np.uint8]]:
        """Asks for pages, and returns what waits for them, as `Runner.begin_read`."""
        count = max(1, _MOST_READ // sum(self._sizes)) if self._sizes else 1
        reads = [self._begin_read(pages[begin : begin + count]) for begin in range(0, len(pages), count)]

        def result() -> NDArray[np.uint8]:
            for read in reads:
                while read in self._reads:  # answers come in the order of the questions
                    self._take_answer()
            content = np.empty((len(pages), sum(self._sizes)), np.uint8) if out is None else out
            for read, begin in zip(reads, range(0, len(pages), count), strict=True):
                np.concatenate(read.parts, axis=1, out=content[begin : begin + count])
            return content

        return result

    def write(self, pages: IntArray, content: NDArray[np.uint8]) -> None:
        """Writes as `Runner.write_pages`."""
        if not self._sizes:
            self.begin_read(pages[:1])()
        own, *others = np.split(content, np.cumsum(self._sizes)[:-1], axis=1)
        with naming_ranks(self._ranks):
            self._ranks.send_write(pages, others)
            self._executor.write_pages(pages, np.ascontiguousarray(own))

    def _begin_read(self, pages: IntArray) -> _PageRead:
        with naming_ranks(self._ranks):
            self._ranks.send_read(pages)
            self._reads.append(_PageRead([self._executor.read_pages(pages)]))
        return self._reads[-1]

    def _take_answer(self) -> None:
        with naming_ranks(self._ranks):
            answers = self._ranks.take_read()
        read = self._reads.popleft()
        read.parts += [part.reshape(len(read.parts[0]), -1) for part in answers]
        self._sizes = [part.shape[1] for part in read.parts]


Compute = Callable[[Step, Array | None], Array]
"""This stage of a step: the hidden states of the stage before [T, hidden_size] -> its own, of all T tokens. The first stage is given None.
The last one returns them normed: [m, hidden_size] at the logits indices, or of all tokens if prompts are scored."""


class Stages:
    def __init__(self, setup: ExecutorSetup, ring: Ring, compute: Compute) -> None:
        self._ring = ring
        self._compute = compute
        self._is_first = setup.shard.stage == 0
        self._width, self._dtype = setup.native_spec.hidden_size, setup.dtype

    @classmethod
    def of(cls, setup: ExecutorSetup, compute: Compute) -> Stages | None:
        """Waits for the other stages. None: the model has one stage."""
        if setup.shard.num_stages == 1:
            return None
        assert setup.ranks is not None
        return cls(setup, setup.ranks.connect_stages(), compute)

    def launch(self, step: Step, make_result: Callable[[Array], StepResult]) -> InFlightStep:
        """Computes this stage of a step. Returns when its hidden states are on their way. `make_result`: on the first stage, its end, from
        what the last stage returns."""
        inputs = None if self._is_first else self._receive(step, step.layout.num_tokens)
        self._ring.send(step.number, _words(self._compute(step, inputs)))
        if self._is_first:
            return LazyStep(partial(self._finished, step), make_result)
        return LazyStep(partial(StepResult, step.number, NO_INTS), lambda result: result)  # later stages bring no result

    def _finished(self, step: Step) -> Array:
        """On the first stage: what the last one returns. Waits for it."""
        return self._receive(step, step.layout.num_tokens if step.scores_prompts else len(step.logits_indices))

    def close(self) -> None:
        self._ring.close()

    def _receive(self, step: Step, num_rows: int) -> Array:
        words = self._ring.receive(step.number)
        return words.view(self._dtype)[: num_rows * self._width].reshape(num_rows, self._width)


def _words(states: Array) -> IntArray:
    """The bytes of the states as int32 words, padded to a whole number of these."""
    flat = np.ascontiguousarray(states).reshape(-1)
    if flat.nbytes % 4:
        flat = np.append(flat, flat[:1])
    return flat.view(np.int32)
