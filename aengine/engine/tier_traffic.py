"""`TierTraffic`: what the step thread does for tiers of KV. Columns that a step has computed are read from the pool and put there; what has
been loaded is written to the pool, a little at a time, so that no step waits long.

Knows neither files nor what pages mean. To be used from the step thread alone.
"""

from __future__ import annotations

import logging
import math
import pathlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError
from aengine.cache import Column, PageTiers, StoredPrefix, TierCounts, page_name
from aengine.engine.edges import FindKV, StepStats
from aengine.runner.contract import Runner
from aengine.scheduler.plan import IntArray
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sessions import SessionName, note_name
from aengine.scheduler.tier_loads import PageLoad, PageSave

_log = logging.getLogger("aengine")
_LOOKS = 64  # at what tiers keep, each time that something else has changed
_MOST_KEPT = 1 << 18
_BYTES_AT_A_TIME = 4 << 20  # of what was loaded that are written to the pool between two steps
_BLOCK = 2 << 20  # bytes of memory that pages are read into
_MOST_SPARE = 8  # blocks that wait to be used again


def tiers_of(config: EngineConfig, runner: Runner) -> Callable[[str], PageTiers] | None:
    """What opens the tiers that an engine is configured to have, for an identity of the model; None: none. Raises ConfigError."""
    folder, memory = config.kv_disk_path, config.host_kv_memory
    if folder is None and not memory:
        return None
    field = "host_kv_memory" if folder is None else "kv_disk_path"
    if not config.enable_prefix_cache:
        raise ConfigError.of(field, "it is not possible without enable_prefix_cache")
    if config.expert_parallel_size > 1:
        raise ConfigError.of(field, "it is not possible with expert_parallel_size > 1")
    sizes = [_bytes_of(runner, count) for count in (len(runner.windows), runner.state_pages) if count]

    def open_tiers(identity: str) -> PageTiers:
        path = None if folder is None else pathlib.Path(folder).expanduser()
        try:
            return PageTiers(identity, memory, path, config.kv_disk_size, sizes, config.role == "prefill")
        except OSError as error:
            raise ConfigError.of("kv_disk_path", f"{folder} cannot be used: {error.strerror}") from None

    return open_tiers


def _bytes_of(runner: Runner, num_pages: int) -> int:
    return num_pages * int(runner.read_pages(np.zeros(1, np.int32)).shape[1])


@dataclass(slots=True)
class _Loading:
    columns: Future[list[Column]]
    num_written: int = 0


class PageMemory:
    """Memory that pages are read into. It is used again when no array of it is left, for to be given fresh memory by the system takes
    several times as long as the copy."""

    def __init__(self) -> None:
        self._spare: list[NDArray[np.uint8]] = []
        self._block: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._used = 0  # bytes of the block

    def take_pages(self, num_pages: int, page_bytes: int) -> NDArray[np.uint8]:
        """[num_pages, page_bytes], of any content."""
        size = num_pages * page_bytes
        if size > _BLOCK:
            return np.empty((num_pages, page_bytes), np.uint8)
        if self._used + size > len(self._block):
            block = self._spare.pop() if self._spare else np.empty(_BLOCK, np.uint8)
            self._block, self._used = np.frombuffer(block.data, np.uint8), 0  # what is cut out of it refers to it, not to `block`
            weakref.finalize(self._block, self._give_back, block).atexit = False
        first, self._used = self._used, self._used + size
        return self._block[first : self._used].reshape(num_pages, page_bytes)

    def _give_back(self, block: NDArray[np.uint8]) -> None:
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(block)


class TierTraffic:
    def __init__(self, scheduler: Scheduler, runner: Runner, stats: StepStats, wake_up: Callable[[], object]) -> None:
        """`wake_up` is called, from any thread, when something was loaded."""
        self._scheduler, self._runner, self._stats, self._wake_up = scheduler, runner, stats, wake_up
        self._tiers: PageTiers | None = None
        self._loading: dict[PageLoad, _Loading] = {}
        self._kept: OrderedDict[bytes, None] = OrderedDict()  # names that have left the pool, and that tiers keep
        self._recalls: list[tuple[SessionName, Future[int], Future[list[Column]]]] = []
        self._reads: list[tuple[Sequence[PageSave], Callable[[], NDArray[np.uint8]]]] = []  # that have begun
        self._memory = PageMemory()
        self._page_bytes = _bytes_of(runner, 1)
        self._column_bytes = len(runner.windows) * self._page_bytes

    def use(self, tiers: PageTiers) -> None:
        """Other weights came into use, whose KV these tiers hold."""
        self._end_reads()
        before, self._tiers = self._tiers, tiers
        self._loading.clear()
        self._scheduler.use_tiers(tiers, self._is_worth)
        if before is not None:
            before.close(at_once=True)

    def _is_worth(self, num_loaded: float, num_computed: int) -> bool:
        """Whether what takes as much as so many columns is loaded faster than so many columns are computed, as far as is known."""
        assert self._tiers is not None
        each, rate = self._tiers.seconds_per_byte * self._column_bytes, self._stats.prefill_rate
        return not each or not rate or each * num_loaded * rate < self._runner.page_size * num_computed

    def set_idle(self, is_idle: bool) -> None:
        """Whether no step runs, so that what is written disturbs none."""
        if self._tiers is not None:
            if is_idle:
                self._end_reads()
            self._tiers.set_idle(is_idle)

    def begin_loads(self) -> None:
        """Loads that a plan has begun."""
        loads = self._scheduler.loads
        for load in [] if loads is None else loads.take_loads():
            assert self._tiers is not None
            self._loading[load] = _Loading(self._tiers.load(load.names, self._wake_up))

    def write_loaded(self) -> None:
        """Writes some of what was loaded to the pool, from which sequences can take it when their load is whole."""
        left, loads = _BYTES_AT_A_TIME, self._scheduler.loads
        assert loads is not None
        for load, loading in list(self._loading.items()):
            if not loads.is_loading(load):
                del self._loading[load]
            elif loading.columns.done() and left > 0:
                columns = loading.columns.result()
                right = 0  # a name could be that of other tokens
                while right < len(columns) and columns[right].tokens == load.tokens[right]:
                    right += 1
                begin = loading.num_written
                end = min(right, begin + max(left // self._column_bytes, 1))
                left -= self._write(load.pages[begin:end], columns[begin:end])
                loading.num_written = end
                if end == right:
                    del self._loading[load]
                    self._scheduler.end_load(load, end)
        if any(loading.columns.done() for loading in self._loading.values()):
            self._wake_up()  # the rest follows the next step, or nothing

    def _write(self, pages: Sequence[IntArray], columns: Sequence[Column]) -> int:
        if not columns:
            return 0
        content = np.concatenate([column.pages.reshape(len(held), -1) for held, column in zip(pages, columns, strict=True)])
        needed = (held := np.concatenate(pages)) > 0
        self._runner.write_pages(held[needed], content[needed])
        return content.nbytes

    def save(self, *, everything: bool = False) -> None:
        """Puts what was computed into the tiers: as much as they can write soon, or everything. To be called before a plan, which may give
        its pages to others."""
        loads, tiers = self._scheduler.loads, self._tiers
        if loads is None or tiers is None:
            return
        self._end_reads()
        if not loads.has_saves:
            return
        if saves := loads.take_saves(math.inf if everything else tiers.room / self._page_bytes):
            pages = np.concatenate([save.pages for save in saves])
            shape = len(pages), self._page_bytes
            content = np.empty(shape, np.uint8) if tiers.has_host else self._memory.take_pages(*shape)
            self._reads.append((saves, self._runner.begin_read(pages, content) if len(pages) else lambda: content))
            if everything or self._runner.max_in_flight == 1:  # else later stages come to it behind their steps
                self._end_reads()
        if loads.has_saves:
            tiers.call_with_room(self._wake_up)

    def _end_reads(self) -> None:
        tiers, reads, self._reads = self._tiers, self._reads, []
        for saves, read in reads:
            assert tiers is not None
            ends = np.cumsum([len(save.pages) for save in saves])
            for save, pages in zip(saves, np.split(read(), ends[:-1]), strict=True):
                tiers.put_column(Column(save.name, save.tokens, pages))

    def stored(self, asked: FindKV) -> StoredPrefix | None:
        """What the tiers hold of a prompt, with what the last step has computed of it."""
        self.save(everything=True)
        chain, token_ids = asked.chain, asked.token_ids
        if self._tiers is None or chain.version != self._scheduler.weights_version:
            return None
        size, num_groups, has_states = self._runner.page_size, len(self._runner.windows), bool(self._runner.state_pages)
        tokens = [token_ids[begin : begin + size].tobytes() for begin in range(0, len(chain.digests) * size, size)]
        states = [page_name(name, num_groups) for name in chain.digests] if has_states else []
        found = self._tiers.find(chain.digests)
        if has_states:
            found = next((end for end in range(found, 0, -1) if self._tiers.find([states[end - 1]])), 0)
        sizes = self._column_bytes, self._runner.state_pages * self._page_bytes
        return StoredPrefix(self._tiers, chain.digests, tokens, states, found, sizes)

    def recall(self, session: SessionName, reply: Future[int]) -> None:
        """Read what tiers have noted of a session that is not known."""
        assert self._tiers is not None
        self._recalls.append((session, reply, self._tiers.load([note_name(session)], self._wake_up)))

    def end_recalls(self) -> Iterator[tuple[Future[int], int]]:
        """Touches the sessions whose notes have been read; gives their replies and numbers of tokens, 0 where there was no note."""
        for recall in [recall for recall in self._recalls if recall[2].done()]:
            self._recalls.remove(recall)
            session, reply, columns = recall
            yield reply, self._scheduler.touch(session, columns.result()[0].tokens) if columns.result() else 0

    def with_kept(self, changes: Mapping[bytes, bool]) -> dict[bytes, bool]:
        """Changes of what the pool has (names, and whether they are there now) as changes of what the pool and the tiers have."""
        assert self._tiers is not None
        result, kept = dict(changes), self._kept
        for name, is_there in changes.items():
            if is_there:
                kept.pop(name, None)
            elif self._tiers.holds(name):
                kept[name] = None
                del result[name]
        for _ in range(min(len(kept), _LOOKS)):  # tiers do not tell what they drop
            name, _ = kept.popitem(last=False)
            if len(kept) < _MOST_KEPT and self._tiers.holds(name):
                kept[name] = None
            else:
                result[name] = False
        return result

    def counts(self) -> TierCounts:
        return TierCounts() if self._tiers is None else self._tiers.counts()

    def close(self) -> None:
        if self._tiers is not None:
            try:
                self.save(everything=True)
            except Exception as error:  # of a runner that has failed
                _log.warning("what waits in the pool is not saved: %s: %s", type(error).__name__, error)
            self._tiers.close()
