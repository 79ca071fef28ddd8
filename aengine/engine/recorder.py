"""The flight recorder: the latest steps of an engine, what led to them and what they gave, kept so that they can be computed again.

`RecordedScheduler` notes what its thread calls and what it plans, in a ring of so many plans. `Recording` is what can be made of that at
any moment, and its file: lines of JSON, compressed, without pickle, so that a file of somebody else can be read safely. It holds the token
ids of prompts and outputs. Knows nothing of devices, and not how a recording is computed again.
"""

from __future__ import annotations

import base64
import gzip
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from aengine.api.dataclass import dataclass
from aengine.api.params import Reasoning, RepetitionStop, StructuredOutput
from aengine.scheduler import plan as plans
from aengine.scheduler.drafters import Drafter
from aengine.scheduler.plan import IntArray, NewRow, PromptImages, RowParams, StepPlan, StepResult
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig, Sequence
from aengine.scheduler.sessions import SessionName

FORMAT = 1
EVENTS_PER_PLAN = 64
"""How many events the ring keeps for each plan, on average: a flood of requests that never run would be without end."""
MOST_TOKENS = 1 << 22
"""Most tokens of requests that have ended in the ring; more of them make it shorter."""
_log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True)
class Called:
    """A method of the scheduler that changes what it plans. Of `submit` the argument is the key."""

    method: str
    arguments: tuple[Any, ...] = ()
    clock: tuple[float, ...] = ()  # what the scheduler's clock said meanwhile


@dataclass(frozen=True, slots=True)
class Planned:
    """The scheduler was asked for a plan."""

    plan: StepPlan | None
    keys: tuple[int, ...] = ()  # of the requests that its new rows are of, in their order
    clock: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A step came back."""

    result: StepResult
    clock: tuple[float, ...] = ()


RecordedEvent = Called | Planned | CommittedStep


@dataclass(frozen=True, slots=True)
class Recording:
    """Some steps of an engine, in the order in which its thread took them."""

    config: Mapping[str, Any]  # fields of the `EngineConfig`
    parts: Mapping[str, str]  # as of `EngineInfo.fingerprint_parts`
    scheduler: SchedulerConfig
    failure: str  # why the thread ended; empty: it had not
    is_whole: bool  # it begins with the first step of the engine
    kv_bytes: int  # of the whole pool of pages
    adapters: Mapping[int, tuple[str, str]]  # name and path by key, of those that were loaded after the start
    requests: Mapping[int, Request]  # by key; without custom code
    tokens: Mapping[int, IntArray]  # every known token of those that ran, at the end of the recording or of the request
    events: tuple[RecordedEvent, ...]
    # Where rows were before the first of the events.
    row_keys: IntArray  # [rows], -1: none
    page_table: IntArray  # [groups, rows, columns]
    state_pages: IntArray  # [rows, pages of a state]

    @property
    def plans(self) -> Iterator[tuple[StepPlan, tuple[int, ...], StepResult | None]]:
        """The steps that ran, with the keys of their new rows; None: it did not come back."""
        found: dict[int, tuple[StepPlan, tuple[int, ...], StepResult | None]] = {}
        for event in self.events:
            match event:
                case Planned(StepPlan() as plan, keys):
                    found[plan.step] = plan, keys, None
                case Called("rollback", (step,)):
                    found.pop(step, None)
                case CommittedStep(result) if result.step in found:
                    found[result.step] = (*found[result.step][:2], result)
        yield from found.values()

    def write_file(self, path: str | Path) -> None:
        """Write the recording, readable by its user alone. Raises OSError."""
        head = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("requests", "tokens", "events")}
        target = Path(path)
        target.touch(mode=0o600)
        with gzip.open(target, "wt", compresslevel=3, encoding="ascii") as file:
            file.write(_encoded({"aengine_recording": FORMAT, **head}))
            for key, request in self.requests.items():
                file.write(_encoded({"key": key, "request": request, "tokens": self.tokens.get(key)}))
            for event in self.events:
                file.write(_encoded(event))

    @classmethod
    def read_file(cls, path: str | Path) -> Recording:
        """Raises `ValueError` for what is no recording, and OSError."""
        try:
            with gzip.open(path, "rt", encoding="ascii") as file:
                head = _decoded(file.readline())
                if not isinstance(head, dict) or head.pop("aengine_recording", None) != FORMAT:
                    raise ValueError(f"aengine_recording is not {FORMAT}")
                lines = [_decoded(line) for line in file]
        except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile, RecursionError) as error:
            raise ValueError(f"is no recording: {error}") from None
        requests = {line["key"]: line["request"] for line in lines if isinstance(line, dict)}
        tokens = {line["key"]: line["tokens"] for line in lines if isinstance(line, dict) and line["tokens"] is not None}
        events = tuple([line for line in lines if not isinstance(line, dict)])
        head["adapters"] = {int(key): tuple(value) for key, value in head["adapters"].items()}
        return cls(**head, requests=requests, tokens=tokens, events=events)


# ---- as JSON -------------------------------------------------------------------------------------------------------------

_TYPES: dict[str, type[Any]] = {
    one.__name__: one
    for one in (
        *(plans.StateRows, plans.DraftRows, plans.TokenLogprobs, plans.PromptLogprobs, plans.PooledStates),
        *(Called, Planned, CommittedStep, StepPlan, StepResult, NewRow, RowParams, Request, PromptImages, SchedulerConfig),
        *(StructuredOutput, Reasoning, RepetitionStop),
    )
}


def _encoded(value: Any) -> str:
    return json.dumps(_plain(value), separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, RowParams):  # objects of this process are not told, and it is seen that there were some
            value = replace(value, grammar=None if value.grammar is None else True, processors=_marks(value.processors))
        return {"$": type(value).__name__, **{one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.init}}
    if isinstance(value, np.ndarray):
        return {"$a": [value.dtype.str, value.shape, base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, frozenset):
        return {"$s": sorted(value)}
    if isinstance(value, Mapping):
        return (
            {"$m": [[_plain(key), _plain(one)] for key, one in value.items()]}
            if any(not isinstance(key, str) for key in value)
            else {key: _plain(one) for key, one in value.items()}
        )
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if value is None or isinstance(value, str | int | float):
        return value
    import torch  # a tensor of images

    assert isinstance(value, torch.Tensor), type(value)
    data = value.contiguous().view(torch.uint8).numpy().tobytes()
    return {"$t": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(data).decode()]}


def _marks(objects: tuple[Any, ...]) -> tuple[Any, ...]:
    return (True,) * len(objects)


def _decoded(line: str) -> Any:
    return json.loads(line, object_hook=_object_of)


def _object_of(plain: dict[str, Any]) -> Any:
    match plain:
        case {"$a": [dtype, shape, data]}:
            return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
        case {"$s": items}:
            return frozenset(items)
        case {"$m": items}:
            return {_tuples(key): value for key, value in items}
        case {"$t": [dtype, shape, data]}:
            import torch

            return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype)).reshape(shape)
        case {"$": kind, **given}:
            return _TYPES[kind](**{name: _tuples(value) for name, value in given.items()})
    return plain


def _tuples(value: Any) -> Any:
    return tuple([_tuples(one) for one in value]) if isinstance(value, list) else value


# ---- while an engine runs ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ended:
    request: Request
    tokens: IntArray
    step: int  # the next one when it ended


@dataclass(slots=True)
class RowPlaces:
    """Which requests the rows have, and where their KV and states are. The arrays are as of `Recording`, and written to."""

    row_keys: IntArray
    page_table: IntArray
    state_pages: IntArray

    def follow(self, plan: StepPlan, keys: tuple[int, ...]) -> None:
        """A plan comes. `keys`: as of `Planned`."""
        for new, key in zip(plan.new_rows, keys, strict=True):
            self.row_keys[new.row] = key
            self.page_table[:, new.row] = 0
        if len(plan.page_rows):
            self.page_table[plan.page_groups, plan.page_rows, plan.page_cols] = plan.page_ids
        if plan.states is not None:
            self.state_pages[plan.states.rows] = plan.states.pages


_PLANNED = 3  # fields


class RecordedScheduler(Scheduler):
    """A scheduler whose latest `most_plans` plans can be recorded. `recording` may also be called from another thread, when its own one
    hangs or has ended."""

    def __init__(
        self,
        config: SchedulerConfig,
        most_plans: int,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        engine_config: Mapping[str, Any],
        kv_bytes: int,
    ) -> None:
        """`engine_config`, `kv_bytes`: `config` and `kv_bytes` of the recordings."""
        super().__init__(config, self._tick, drafter)
        self._time = clock
        self._most_plans, self._engine_config, self._kv_bytes = most_plans, engine_config, kv_bytes
        self._ticks: list[float] = []  # what the clock has said since the latest event
        self._events: deque[tuple[Any, ...]] = deque()  # the fields of a `Planned`, of a `CommittedStep`, or of a `Called` and None
        self._num_plans = 0  # among them
        self._most_events = EVENTS_PER_PLAN * (most_plans + 1)
        self._ended: dict[int, _Ended] = {}  # requests that ran in the ring, by key
        self._num_tokens = 0  # of these
        self._live.on_release.append(self._keep)
        shape = (config.max_num_seqs, max(1, config.state_pages))
        columns = -(-config.max_model_len // config.page_size)
        self._is_whole = True  # nothing was dropped
        self._before = RowPlaces(
            np.full(config.max_num_seqs, -1, np.int32),
            np.zeros((len(config.windows), config.max_num_seqs, columns), np.int32),
            np.zeros(shape, np.int32),
        )

    def _tick(self) -> float:
        now = self._time()
        self._ticks.append(now)
        return now

    def _clock_said(self) -> list[float]:
        said, self._ticks = self._ticks, []
        return said

    def _note(self, event: tuple[Any, ...]) -> None:
        self._events.append(event)
        if len(self._events) > self._most_events:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Up to the first plan, and what came before the second; where there is no second, one event."""
        events, has_plan, oldest = self._events, False, self._num_steps
        self._is_whole = False
        while events:
            event = events[0]
            if len(event) == _PLANNED and (plan := event[0]) is not None:
                if has_plan:
                    oldest = plan.step
                    break
                has_plan = True
                self._before.follow(plan, event[1])
                self._num_plans -= 1
            events.popleft()
            if not self._num_plans:
                break
        while self._ended and (ended := self._ended[key := next(iter(self._ended))]).step <= oldest:
            self._num_tokens -= len(ended.tokens)
            del self._ended[key]

    def _keep(self, sequence: Sequence) -> None:
        rows, row = self._rows, sequence.row
        tokens = rows.tokens[row, : rows.num_known[row]].copy()
        self._ended[sequence.request.key] = _Ended(sequence.request, tokens, self._num_steps)
        self._num_tokens += len(tokens)
        while self._num_tokens > MOST_TOKENS and self._num_plans > 1:
            self._drop_oldest()

    # ---- what is recorded ----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._note(("submit", (request,), self._clock_said(), None))

    def cancel(self, key: int) -> None:
        super().cancel(key)
        self._note(("cancel", (key,), self._clock_said(), None))

    def set_parked(self, key: int, parked: bool) -> None:
        super().set_parked(key, parked)
        self._note(("set_parked", (key, parked), self._clock_said(), None))

    def flush_cache(self) -> int:
        num_pages = super().flush_cache()
        self._note(("flush_cache", (), self._clock_said(), None))
        return num_pages

    def touch(self, name: SessionName, note: bytes | None = None) -> int:
        num_tokens = super().touch(name, note)
        self._note(("touch", (name,), self._clock_said(), None))
        return num_tokens

    def use_weights(self, *, recompute: bool = False) -> None:
        """What was recorded is of other weights, and can be computed no more."""
        super().use_weights(recompute=recompute)
        self._clock_said()
        for event in self._events:
            if len(event) == _PLANNED and event[0] is not None:
                self._before.follow(event[0], event[1])
        self._events.clear()
        self._num_plans, self._is_whole = 0, False
        self._ended.clear()
        self._num_tokens = 0

    def drain(self) -> bool:
        is_left = super().drain()
        self._note(("drain", (), self._clock_said(), None))
        return is_left

    def pause(self) -> None:
        super().pause()
        if said := self._clock_said():
            self._note(("pause", (), said, None))

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        keys: tuple[int, ...] = ()
        if plan is not None:
            if plan.new_rows:
                sequences = [self._rows.sequences[new.row] for new in plan.new_rows]
                keys = tuple([-1 if one is None else one.request.key for one in sequences])
            self._num_plans += 1
        self._note((plan, keys, self._clock_said()))
        if self._num_plans > self._most_plans:
            self._drop_oldest()
        return plan

    def rollback(self, plan: StepPlan, errors: Mapping[int, BaseException]) -> None:
        super().rollback(plan, errors)
        self._note(("rollback", (plan.step, tuple(errors)), self._clock_said(), None))

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        super().commit(plan, result)
        self._note((result, self._clock_said()))

    # ---- recordings ----------------------------------------------------------------------------------------------------

    def recording(self, parts: Mapping[str, str], adapters: Mapping[int, tuple[str, str]], failure: str = "") -> Recording:
        """What is in the ring. The parameters are as of `Recording`."""
        requests = {key: ended.request for key, ended in list(self._ended.items())}
        tokens = {key: ended.tokens for key, ended in list(self._ended.items())}
        for key, sequence in list(self._live.by_key.items()):
            requests[key] = sequence.request
            row = sequence.row
            holds_row = row >= 0 and self._rows.sequences[row] is sequence
            tokens[key] = self._rows.tokens[row, : self._rows.num_known[row]].copy() if holds_row else sequence.tokens
        events: list[RecordedEvent] = []
        for event in list(self._events):
            match event:
                case (plan, keys, said):
                    events.append(Planned(plan, keys, tuple(said)))
                case (result, said):
                    events.append(CommittedStep(result, tuple(said)))
                case ("submit", (request,), said, _):
                    requests[request.key] = request
                    events.append(Called("submit", (request.key,), tuple(said)))
                case (method, arguments, said, _):
                    events.append(Called(method, arguments, tuple(said)))
        before = self._before
        return Recording(
            self._engine_config,
            dict(parts),
            self._config,
            failure,
            self._is_whole,
            self._kv_bytes,
            dict(adapters),
            requests,
            tokens,
            tuple(events),
            before.row_keys.copy(),
            before.page_table.copy(),
            before.state_pages.copy(),
        )


def write_recording(recording: Recording, path: Path) -> None:
    """Write it, and say in the log where."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recording.write_file(path)
    except OSError as error:
        _log.warning("the latest steps cannot be written to %s: %s", path, error)
    else:
        _log.warning("the latest steps are in %s: aengine-replay computes them again", path)
