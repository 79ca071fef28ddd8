"""An engine whose model costs nothing: steps come at a given pace, tokens from a text.

Everything around the model is real: scheduler, step thread, streams, detokenizer. What is measured with it is what serving costs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aengine.api.config import EngineConfig
from aengine.api.outputs import ModelInfo
from aengine.api.params import SamplingParams
from aengine.cache import Windows
from aengine.engine.async_engine import AsyncEngine
from aengine.engine.core import EngineCore
from aengine.engine.loading import LoadedModel
from aengine.models.loading.hub import DEMO, resolve_model
from aengine.runner.contract import Change, Prepared
from aengine.scheduler.plan import IntArray, StepPlan, StepResult
from aengine.tokenizer.tokenizer import Tokenizer

PAGE_SIZE = 256
MAX_MODEL_LEN = 64 * 1024
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "
    "However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well "
    "fixed in the minds of the surrounding families, that he is considered the rightful property of some one or other of their daughters."
)


@dataclass(frozen=True, slots=True)
class _PacedStep:
    step: StepResult
    until_due: Callable[[], None]
    overlaps: ClassVar[bool] = False

    def wait(self) -> None:
        self.until_due()

    def result(self) -> StepResult:
        return self.step

    def withdraw(self) -> bool:
        return False


class PacedRunner:
    """A sequence goes on with the token of `token_ids` that its length points at."""

    def __init__(self, token_ids: list[int], max_num_seqs: int, call_soon: Callable[[Callable[[], None]], None]) -> None:
        """`call_soon`: has a function run by the event loop."""
        self.page_size = PAGE_SIZE
        self.windows: Windows = (None,)
        self.num_pages = 1 + max_num_seqs * (MAX_MODEL_LEN // PAGE_SIZE)
        self.max_model_len = MAX_MODEL_LEN
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max(8192, max_num_seqs)
        self.max_in_flight = 1
        self.max_adapters = 0
        self.draft_source = None
        self.state_pages = self.state_bytes = self.state_interval = 0
        self.weights_digest = ""
        self.steps_per_second: float | None = None  # None: as the event loop keeps up. May be changed in any thread
        self._token_ids = np.array(token_ids, np.int32)
        self._due = 0.0  # when the next step may begin
        self._call_soon = call_soon

    def launch(self, plan: StepPlan) -> _PacedStep:
        lengths = (plan.starts + plan.lengths)[plan.num_sampled > 0]
        return _PacedStep(StepResult(plan.step, self._token_ids[lengths % len(self._token_ids)]), self._pace)

    def prepare(self, change: Change) -> Prepared:
        return Prepared(change, None)

    def apply(self, prepared: Prepared) -> None:
        """Its tokens are always the same."""

    def discard(self, prepared: Prepared) -> None:
        pass

    def read_pages(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        return np.zeros((len(pages), 1), np.uint8)

    def begin_read(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> Callable[[], NDArray[np.uint8]]:
        return lambda: self.read_pages(pages, out)

    def write_pages(self, pages: IntArray, content: NDArray[np.uint8]) -> None:
        """KV is not what this is about."""

    def sleep(self, level: int, pages: IntArray) -> None:
        """KV is not what this is about."""

    def wake(self, prepared: Prepared | None) -> None:
        """As `sleep`."""

    def memory_used(self) -> int:
        return 0

    def join_step(self) -> bool:
        return False

    def on_wanted(self, callback: Callable[[], object]) -> None:
        """Nobody ever does."""

    def abandon(self) -> None:
        """There are no other processes."""

    def hold(self, held: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def _pace(self) -> None:
        pace = self.steps_per_second
        if pace is None:
            turn = threading.Event()  # free steps would bury the event loop
            self._call_soon(turn.set)
            turn.wait(1.0)
        else:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due = max(self._due + 1 / pace, time.monotonic())  # steps that were missed are not made up


class PacedEngine(AsyncEngine):
    """`AsyncEngine` on a `PacedRunner`, with the bundled model's tokenizer."""

    runner: PacedRunner  # once started

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(EngineConfig(model=DEMO, max_num_seqs=max_num_seqs))

    @property
    def num_unread(self) -> int:
        """How many tokens wait for their readers, here or in a door of the server: up to `max_unread_tokens` a stream."""
        streams = self._check_serving().registry._streams
        return sum(state.unread for state in set(streams.values()))

    def _load(self, core: EngineCore) -> LoadedModel:
        tokenizer = Tokenizer.load(resolve_model(DEMO))
        self.runner = PacedRunner(tokenizer.encode(TEXT), self.config.num_seqs, core.edge.call_soon)
        info = ModelInfo(
            name="paced",
            architecture="none",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=(),
            dtype="none",
            num_parameters=0,
            chat_template=False,
            generation_defaults=SamplingParams(),
        )
        return LoadedModel(self.runner, tokenizer, info)
