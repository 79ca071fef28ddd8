"""What belongs to the process: Python's garbage collector where it is paused, what errors and the C library keep of memory, how much
things take that are remembered after their end, what waits for a reader and what one has read, and how soon a thread gives up the GIL to
another, which only programs change that own their process.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import pathlib
import sys
import traceback
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar, overload

from aengine.api.errors import ModelLoadError
from aengine.api.outputs import Token


@contextmanager
def paused_collection() -> Iterator[None]:
    """No garbage collection in this process. Objects alive at the end count as old, so the next collections do not look through them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else somebody has frozen what is to stay frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if collects:
            gc.enable()


@contextmanager
def imports_of(what: str) -> Iterator[None]:
    """Around imports of torch or transformers for `what`, which most starts on a CPU do without. Raises ModelLoadError where these are not
    installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "transformers"):
            raise
        raise ModelLoadError(f"{what} takes {package}, which is not installed: pip install {package}") from None


def forget_locals(error: BaseException) -> None:
    """Clear the locals of the functions that have ended with `error`, and with those that it came from: it would keep them alive as long as
    it is kept. Not for errors that coroutines have seen: one that handles the error and waits meanwhile would be closed."""
    for one in _with_causes(error):
        traceback.clear_frames(one.__traceback__)


def forget_tracebacks(error: BaseException) -> None:
    """Take the tracebacks from `error` and from those that it came from: they keep alive what the functions in them have as locals, in a
    cycle where such a function has the error itself."""
    for one in _with_causes(error):
        one.__traceback__ = None


def _with_causes(error: BaseException) -> list[BaseException]:
    found: dict[int, BaseException] = {}
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            errors += one.__cause__, one.__context__
    return [*found.values()]


def trim_heap() -> None:
    """Returns what the C library holds of freed memory to the system, where it can. Other threads run meanwhile."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache  # each handle of a library is a type of ctypes, which only a full garbage collection frees
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


SWITCH_INTERVAL = 2e-4
"""Seconds. The step thread waits for the GIL once per step, and Python's default of 5 ms would add up to as much to each step
beside a busy event loop."""


def switch_often() -> None:
    """Let no thread hold the GIL for longer than SWITCH_INTERVAL while another one waits for it."""
    if sys.getswitchinterval() > SWITCH_INTERVAL:
        sys.setswitchinterval(SWITCH_INTERVAL)


MOST_REMEMBERED = 4096
REMEMBERED_BYTES = 64 << 20
"""How many things are remembered of each kind, and how much memory they take."""
K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """The latest things by their keys, at most MOST_REMEMBERED of them, and of REMEMBERED_BYTES."""

    def __init__(self) -> None:
        self._things: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._num_bytes = 0

    def find(self, key: K) -> V | None:
        found = self._things.get(key)
        return None if found is None else found[0]

    def remember(self, key: K, thing: V, num_bytes: int) -> None:
        self._num_bytes += num_bytes - self._things.pop(key, (None, 0))[1]
        self._things[key] = thing, num_bytes
        while len(self._things) > MOST_REMEMBERED or self._num_bytes > REMEMBERED_BYTES:
            self._num_bytes -= self._things.popitem(last=False)[1][1]


ItemT = TypeVar("ItemT")


class UnreadBuffer(Generic[ItemT]):
    """What waits for a reader, oldest first. `on_lag(True)` is called when more than `limit` items wait, and `on_lag(False)` when half of
    them or fewer are left after that."""

    __slots__ = ("_items", "_lags", "_limit", "_on_lag")

    def __init__(self, limit: int, on_lag: Callable[[bool], object]) -> None:
        self._items: deque[ItemT] = deque()
        self._limit = limit
        self._on_lag = on_lag
        self._lags = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def lags(self) -> bool:
        """Whether the reader lags: `on_lag` was called with True last."""
        return self._lags

    def append(self, item: ItemT) -> None:
        self._items.append(item)
        if len(self._items) > self._limit:
            self._lag()

    def extend(self, items: Iterable[ItemT]) -> None:
        self._items.extend(items)
        if len(self._items) > self._limit:
            self._lag()

    def popleft(self) -> ItemT | None:
        """The oldest item; None if there is none."""
        if not self._items:
            return None
        item = self._items.popleft()
        if self._lags and len(self._items) <= self._limit // 2:
            self._lags = False
            self._on_lag(False)
        return item

    def replace(self, items: Iterable[ItemT]) -> None:
        """Have these few items in place of all others. `on_lag` is not called: nothing follows them."""
        self._items.clear()
        self._items.extend(items)

    def _lag(self) -> None:
        if not self._lags:
            self._lags = True
            self._on_lag(True)


class ReadTokens(Sequence[Token]):
    """The tokens of one sequence that were read. Most are an id and a text, and are kept as these alone: objects that stay would have
    Python's garbage collector look at all of them again and again."""

    __slots__ = ("_index", "_others", "ids", "texts")

    def __init__(self, index: int) -> None:
        self._index = index
        self._others: dict[int, Token] = {}  # those that have more, by place
        self.ids = array("i")
        self.texts: list[str] = []

    def append(self, token: Token) -> None:
        if token.logprob is not None or token.finish_reason is not None or token.weights_version:
            self._others[len(self.ids)] = token
        self.ids.append(token.token_id)
        self.texts.append(token.text)

    def cut(self, length: int) -> None:
        """Forget the tokens behind the first `length`."""
        del self.ids[length:], self.texts[length:]
        self._others = {place: token for place, token in self._others.items() if place < length}

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> Token: ...

    @overload
    def __getitem__(self, place: slice) -> list[Token]: ...

    def __getitem__(self, place: int | slice) -> Token | list[Token]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self.ids))[place]]
        place = range(len(self.ids))[place]
        return self._others.get(place) or Token(self._index, self.ids[place], self.texts[place])


def num_cores() -> int:
    """How many threads a computation is fastest with: OMP_NUM_THREADS, or one for each core that this process may run on, however many
    threads a core has."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    siblings = set()
    for number in os.sched_getaffinity(0):
        try:
            siblings.add(pathlib.Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii"))
        except OSError:
            siblings.add(str(number))
    return len(siblings)
