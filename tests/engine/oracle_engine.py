"""An engine whose runner is the KV-content oracle: no model, but the real scheduler, thread and streams.

The next token is a hash of all tokens before it, so every stream can be compared with its solo run. Hooks let a test hold,
count or break steps.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import numpy as np
from hang_guard import HANG_SECONDS, let_others_run
from kv_oracle import OracleFlight, OracleRunner, make_request, solo_run

import aengine
from aengine import AsyncEngine, SamplingParams
from aengine.api.errors import InsufficientMemoryError
from aengine.api.outputs import AdapterInfo, FinishReason, ModelInfo
from aengine.api.params import derive_seed
from aengine.api.request import RequestOptions
from aengine.engine.core import EngineCore
from aengine.engine.loading import LoadedModel
from aengine.engine.workers import Steps, Workers
from aengine.runner.contract import Change, LoadAdapter, Prepared, UnloadAdapter
from aengine.runner.cpu.executor import CpuStep, HostQueue
from aengine.scheduler.plan import IntArray, StepPlan, StepResult
from aengine.scheduler.sequence import Request
from aengine.tokenizer.tokenizer import Tokenizer

VOCAB_SIZE = 50
DEMO_DIR = Path(aengine.__file__).parent / "models" / "demo_model"


class Ahead(enum.Enum):
    """When a step may be launched before the one before it is done."""

    NEVER = enum.auto()
    DEVICE = enum.auto()  # always: the device has a queue
    HOST = enum.auto()  # when that is of decodes alone; and it begins when that is done, or is withdrawn
    STAGES = enum.auto()  # when they have no row in common: the model has three stages


@dataclass(frozen=True)
class HookedFlight:
    flight: OracleFlight
    before: Callable[[], None]
    overlaps: bool

    def wait(self) -> None:
        self.before()

    def withdraw(self) -> bool:
        return False

    def result(self) -> StepResult:
        return self.flight.result()


class HookedCall:
    """Stands in for a `PreparedStep`."""

    def __init__(self, runner: HookedRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan
        self._flight: OracleFlight | None = None

    def begin(self) -> None:
        self._flight = OracleRunner.launch(self._runner, self._plan)

    @property
    def has_begun(self) -> bool:
        return self._flight is not None

    def run(self, following: HookedCall | None, hold: ctypes.c_int32) -> None:
        self._runner.before_step(self._plan)
        if following is not None and not hold.value:
            following.begin()

    def result(self) -> StepResult:
        assert self._flight is not None, "begun"
        return self._flight.result()


class HookedRunner(OracleRunner):
    """Hooks run in the step thread: `before_launch(plan)` first of all, `before_step(plan)` before a step is computed, which is in
    `launch` on a device, and else when it is waited for."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        ahead: Ahead,
        max_adapters: int | None = None,
    ) -> None:
        in_flight = 3 if ahead is Ahead.STAGES else 1
        super().__init__(num_pages, page_size, max_num_seqs, max_num_batched_tokens, max_in_flight=in_flight)
        self.num_pages = num_pages
        self.max_model_len = 400
        self.draft_source = None
        self.max_adapters = max_num_seqs if max_adapters is None else max_adapters
        self.max_num_seqs = max_num_seqs
        self._ahead = ahead
        self.queue = HostQueue()
        self.before_launch: Callable[[StepPlan], None] = lambda plan: None
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.before_prepare: Callable[[Change], object] = lambda change: None
        self.adapters = {0}  # keys
        self.applied: list[Change] = []
        self.discarded: list[Change] = []
        self.asleep = 0  # level
        self.too_little_memory = False
        self.closed = threading.Event()

    def launch(self, plan: StepPlan) -> HookedFlight | CpuStep:  # type: ignore[override]
        assert not self.asleep
        self.before_launch(plan)
        assert self.adapters.issuperset(plan.adapters.tolist()), "rows have adapters that are not loaded"
        if self._ahead is Ahead.HOST:
            if plan.new_rows or len(plan.copy_from):
                self.queue.compute_through()
            call: Any = HookedCall(self, plan)
            return self.queue.add_step(call, call.result, can_run_ahead=True, overlaps=plan.num_decodes == len(plan.rows))
        if self._ahead is Ahead.DEVICE:
            self.before_step(plan)
            return HookedFlight(super().launch(plan), lambda: None, overlaps=True)
        return HookedFlight(super().launch(plan), lambda: self.before_step(plan), overlaps=False)

    def prepare(self, change: Change) -> Prepared:
        self.before_prepare(change)
        info = AdapterInfo(change.name, 8, ("q_proj",), 1000) if isinstance(change, LoadAdapter) else None
        return Prepared(change, None, adapter=info)

    def apply(self, prepared: Prepared) -> None:
        self.applied.append(prepared.change)
        if isinstance(prepared.change, LoadAdapter):
            self.adapters.add(prepared.change.key)
        elif isinstance(prepared.change, UnloadAdapter):
            self.adapters.remove(prepared.change.key)
        else:
            assert not self.queue._steps
            self.version += 1
            self.weights_digest = f"{prepared.change.source}"

    def discard(self, prepared: Prepared) -> None:
        self.discarded.append(prepared.change)

    def sleep(self, level: int, pages: IntArray) -> None:
        """The content of all other pages is lost."""
        assert not self.queue._steps
        self.asleep = level
        self.keep(pages)

    def wake(self, prepared: Prepared | None) -> None:
        if self.too_little_memory:
            raise InsufficientMemoryError("there is too little memory to wake")
        assert (prepared is not None) == (self.asleep == 2)
        self.asleep = 0

    def memory_used(self) -> int:
        return 100 - self.asleep

    def join_step(self) -> bool:
        return False

    def on_wanted(self, callback: Callable[[], object]) -> None:
        """Nobody ever does."""

    def abandon(self) -> None:
        pass

    def hold(self, held: bool) -> None:
        self.queue.hold.value = held

    def close(self) -> None:
        self.closed.set()


class StepGate:
    """Holds the engine in step number `at`, or a later one, until it is opened for good."""

    def __init__(self, engine: OracleEngine, *, at: int = 0) -> None:
        self.held = threading.Event()  # a step has come to the gate
        self._open = threading.Event()
        self._at = at
        engine.runner.before_step = self._pass
        engine.gates.append(self)

    def open(self) -> None:
        self._open.set()

    def _pass(self, plan: StepPlan) -> None:
        if plan.step >= self._at and not self._open.is_set():
            self.held.set()
            assert self._open.wait(HANG_SECONDS), "the gate is never opened"


def step_with_the_loop(engine: OracleEngine) -> None:
    """No step begins before the event loop has seen what the steps before it brought, so that a lag parks within two steps."""

    def wait(plan: StepPlan) -> None:
        seen = threading.Event()
        engine._core.edge.call_soon(seen.set)
        assert seen.wait(HANG_SECONDS), "the event loop is blocked"

    engine.runner.before_step = wait


class OracleEngine(AsyncEngine):
    defaults: ClassVar[dict[str, Any]] = {}  # of its configuration

    def __init__(self, *, num_pages: int = 1000, ahead: Ahead = Ahead.NEVER, **overrides: Any) -> None:
        super().__init__("demo", **{"page_size": 4, "max_num_seqs": 32, "max_num_batched_tokens": 64, **self.defaults, **overrides})
        config = self.config
        self.runner = HookedRunner(
            num_pages=num_pages,
            page_size=config.page_size,
            max_num_seqs=config.num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            ahead=ahead,
            max_adapters=config.max_adapters,
        )
        self.gates: list[StepGate] = []

    async def __aexit__(self, *exc_info: Any) -> None:
        """A test that fails leaves its gates closed, which would hold up the end."""
        if exc_info[0] is not None:
            for gate in self.gates:
                gate.open()
        await super().__aexit__(*exc_info)

    def _load(self, core: EngineCore) -> LoadedModel:
        info = ModelInfo("oracle", "Oracle", self.runner.max_model_len, VOCAB_SIZE, (7,), "none", 0, False, SamplingParams())
        return LoadedModel(self.runner, Tokenizer.load(DEMO_DIR), info)

    def _open(self, prompt: Any, params: SamplingParams | None, options: RequestOptions | None, fields: Any, *, whole: bool) -> Any:
        """The oracle must know a request before its first step: its prompt, and its seed, by which it tells requests apart."""
        if isinstance(prompt, np.ndarray):  # as the server hands ids on
            prompt = prompt.tolist()
        known = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if known and isinstance(params, SamplingParams) and params.seed is not None:
            for seed in seeds_of(params):
                request = self.request(prompt, replace(params, seed=seed), fields.get("cache_salt", options and options.cache_salt))
                adapter = self._core.serving.adapters._by_name.get(fields.get("adapter", options and options.adapter))
                self.runner.truths[seed] = solo_run(replace(request, adapter=adapter.key if adapter else 0), VOCAB_SIZE)
        return super()._open(prompt, params, options, fields, whole=whole)

    def request(self, prompt: list[int], params: SamplingParams, cache_salt: str | None = None) -> Request:
        room = max(0, self.runner.max_model_len - len(prompt))
        return make_request(
            params.seed or 0,
            prompt,
            params.max_tokens or room,
            fills_context=params.max_tokens is None,
            eos_token_ids=frozenset() if params.ignore_eos else frozenset({7}),
            stop_token_ids=frozenset(params.stop_token_ids),
            cache_salt=cache_salt or "",
        )

    def solo(self, seed: int) -> tuple[list[int], FinishReason]:
        truth = self.runner.truths[seed]
        return truth.output, truth.reason


def seeds_of(params: SamplingParams) -> list[int]:
    """The seed of each sequence."""
    assert params.seed is not None
    return [params.seed, *(derive_seed(params.seed, index) for index in range(1, params.n))]


@contextmanager
def busy_worker(engine: AsyncEngine, *, size: int = 0, workers: Workers | None = None) -> Iterator[Callable[[], object]]:
    """Nothing whose text is about as long as `size` is prepared before the end of the block, or before what it gives is called. `workers`:
    others than those that prepare requests."""
    may_go_on = threading.Event()

    def wait() -> Steps[None]:
        assert may_go_on.wait(HANG_SECONDS), "the block does not end"
        yield 0

    (workers or engine._core.workers).submit(wait(), size)
    try:
        yield may_go_on.set
    finally:
        may_go_on.set()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until `condition()` holds."""
    with anyio.fail_after(HANG_SECONDS):
        for _ in range(20):
            if condition():
                return
            await anyio.lowlevel.checkpoint()
        while not condition():
            await let_others_run()


def idle(engine: AsyncEngine) -> bool:
    """Whether nothing of any request is left."""
    stats = engine.stats()
    return (
        (stats.running, stats.waiting, stats.parked, stats.pages_used) == (0, 0, 0, 0)
        and not engine._core.serving.registry._streams
        and not engine._core.serving.registry._by_id
    )
