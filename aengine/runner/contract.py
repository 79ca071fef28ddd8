"""The contracts of this package: what an engine calls (`Runner`), what a runner calls (`Executor`), what goes between them, and what can
change of a model that runs: its adapters and its weights. A change is prepared beside the steps, which may fail and touches nothing, and
then applied between two steps.

Imports neither torch nor a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.outputs import AdapterInfo, DraftSource
from aengine.cache import Windows
from aengine.parallel.shard import Shard
from aengine.scheduler.plan import NO_INTS, NewRow, StepPlan, StepResult

if TYPE_CHECKING:
    import torch

    from aengine.attention import StepLayout
    from aengine.kernels.quantized import Rows
    from aengine.models.adapters import Adapter
    from aengine.models.images import StepImages


@dataclass(frozen=True, slots=True)
class Device:
    """Where steps run."""

    type: str  # cpu or cuda
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def of_torch(self) -> torch.device:
        """The device of tensors. Imports torch."""
        import torch

        return torch.device(str(self))


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    key: int  # >= 1, never used before
    name: str
    path: str  # a directory, as PEFT writes it


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """The removal of an adapter that no row has any more."""

    key: int


@dataclass(frozen=True, slots=True)
class NewWeights:
    source: Any  # a directory, or what else `AsyncEngine.update_weights` takes
    partial: bool = False  # what the source lacks stays as it is


Change = LoadAdapter | UnloadAdapter | NewWeights


@dataclass(frozen=True, slots=True)
class Prepared:
    """A change that is ready to be applied."""

    change: Change
    content: object  # for the executor alone
    number: int = 0  # of the change among those of several ranks
    adapter: AdapterInfo | None = None  # that is loaded
    weights_digest: str = ""  # of new weights


def change_to_json(change: Change) -> str:
    return json.dumps({"kind": type(change).__name__, **asdict(change)})


def change_from_json(text: str) -> Change:
    fields = json.loads(text)
    kind = fields.pop("kind")
    change: Change = next(each for each in get_args(Change) if each.__name__ == kind)(**fields)
    return change


T = TypeVar("T")
IntArray = NDArray[np.int32]
ReadWeights: TypeAlias = "Callable[[Shard], Iterable[tuple[str, Sequence[Rows]]]]"
"""Each named weight of a shard with its parts, as `ExecutorSetup.weights` has them."""


class InFlightStep(Protocol):
    """A step that was launched. It may still be running on the device, or not have begun."""

    @property
    def overlaps(self) -> bool:
        """Whether it runs by itself, so that the next step may be planned and launched before its result is there."""

    def wait(self) -> None:
        """Waits until the step has finished."""

    def result(self) -> StepResult:
        """Waits until the step has finished. If the next step was held, it begins now. May be called more than once."""

    def withdraw(self) -> bool:
        """Takes back the latest launched step, as if it had not been launched. False: it has begun, and cannot be taken back."""


class LazyStep(Generic[T]):
    """The `InFlightStep` of all but the CPU kernels, whose queue can take one back. It starts at the latest when it is waited for."""

    def __init__(
        self,
        start: Callable[[], T],
        finish: Callable[[T], StepResult],
        wait: Callable[[T], object] | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        """`start` puts the step on its device, or computes it; `wait` waits for what that gave, where it may not be there yet; `finish`
        makes the result of it. `start` and `finish` are called once, and again if they raise."""
        self.overlaps = overlaps
        self._start = start
        self._wait = wait
        self._finish = finish
        self._output: T | None = None
        self._result: StepResult | None = None

    def start(self) -> T:
        """Starts the step, unless that was done."""
        if self._output is None:
            self._output = self._start()
        return self._output

    def wait(self) -> None:
        output = self.start()
        if self._wait is not None and self._result is None:
            self._wait(output)

    def result(self) -> StepResult:
        if self._result is None:
            self.wait()
            self._result = self._finish(self.start())
        return self._result

    def withdraw(self) -> bool:
        return False


class Runner(Protocol):
    """Executes plans in the order of their step numbers. All methods but `hold`, `abandon`, `prepare`, `discard` and `memory_used` are
    called from the thread that created it."""

    num_pages: int  # of the pool, the reserved page 0 included
    page_size: int  # tokens
    windows: Windows  # of the layer groups
    state_pages: int  # of a recurrent state; 0: the model has none
    state_bytes: int  # the same in bytes of all ranks
    state_interval: int  # tokens of a prompt between states that are kept; 0: none are
    max_model_len: int  # tokens
    max_num_seqs: int  # rows are 0 .. max_num_seqs - 1
    max_num_batched_tokens: int  # of one step
    max_adapters: int  # of the rows of one step; 0: none can be loaded
    max_in_flight: int  # steps of different rows; with 1 the next step may run ahead of the newest one if that `overlaps`

    @property
    def weights_digest(self) -> str:
        """Tells the weights that steps compute with from others."""

    def join_step(self) -> bool:
        """Takes part in a step of other replicas, if they wait for this one, which has none. False: none waits."""

    def on_wanted(self, callback: Callable[[], object]) -> None:
        """`callback` is called, by another thread, when other replicas begin to wait for this one. Must not wait."""

    @property
    def draft_source(self) -> DraftSource | None:
        """What computes `StepPlan.draft_rows`; None: nothing does."""

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Starts a step, or prepares one that is computed when its result is asked for. Its input includes the tokens sampled in earlier
        steps, also when their results were not asked for yet."""

    def prepare(self, change: Change) -> Prepared:
        """Reads and checks what a change needs, beside the steps; nothing of the model changes. May be called from any thread, but from one
        at a time. Raises AdapterError, ModelLoadError or InsufficientMemoryError."""

    def apply(self, prepared: Prepared) -> None:
        """Has the steps that are launched from now on compute with the change. No step is in flight if it is one of weights."""

    def discard(self, prepared: Prepared) -> None:
        """In place of `apply`. May be called from any thread."""

    def read_pages(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """[n, bytes of a page] of pages that committed steps have written, in `out` if it is given; without those of a draft model."""

    def begin_read(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> Callable[[], NDArray[np.uint8]]:
        """What returns that, as it is now, whatever later steps write. To be called at once; where ranks have parts of the pages, they may
        come to it only behind the steps in flight, and the result waits for them."""

    def write_pages(self, pages: IntArray, content: NDArray[np.uint8]) -> None:
        """Writes what was read of as many pages, for steps that are launched from now on. No step in flight has these pages."""

    def sleep(self, level: int, pages: IntArray) -> None:
        """Gives memory back: KV pages and what steps need beside them, with level 2 the weights, too. No step is in flight, and none is
        launched before `wake`. The content of `pages` is kept in host memory. May be called again with a higher level. Raises
        InvalidRequestError for a level that is not possible."""

    def wake(self, prepared: Prepared | None) -> None:
        """Ends a sleep, one of level 2 with weights that were prepared. Raises InsufficientMemoryError if that may be tried again."""

    def memory_used(self) -> int:
        """Bytes of the GPU that are in use, by whomever, or on a CPU those of this process. May be called from any thread."""

    def hold(self, held: bool) -> None:
        """While held, a launched step does not begin by itself when the step before it finishes; it begins when the result of that step
        is asked for. May be called from any thread, also by a destructor, and after `close`."""

    def abandon(self) -> None:
        """Ends other processes that compute the same steps: the thread that `close` belongs to hangs. May be called from any thread."""

    def close(self) -> None:
        """Releases the weights and the KV cache."""


@dataclass(frozen=True, slots=True)
class Step:
    """The model's input of a `StepPlan`, on the host. Of its n rows the first `layout.num_decodes` go on from their last tokens, which the
    executor holds. From the logits of m tokens the token behind each is sampled."""

    number: int
    layout: StepLayout
    rows: IntArray  # [n]
    token_ids: IntArray  # of the chunks, in the order of rows; ~i: row i of the images
    logits_indices: IntArray  # [m], the tokens of the step from whose logits the next token is sampled
    sampled_rows: IntArray  # [m], their rows; several tokens of a row follow each other
    next_positions: IntArray  # [m], positions of the tokens to be sampled
    wants_forced: bool = False  # as of the plan
    scores_prompts: bool = False  # the same
    drafts: IntArray | None = None  # [m], the drafts at these positions, -1 where there is none; None: there are none at all
    kept_slots: IntArray = field(default_factory=lambda: NO_INTS)  # [m], of a draft head: the slots that its next positions have
    adapters: IntArray = field(default_factory=lambda: NO_INTS)  # as of the plan
    positions: IntArray | None = None  # [T], the rows of tables of angles, where they are not the positions of the layout
    images: StepImages | None = None

    @property
    def angles(self) -> IntArray:
        """[T], of each token its row in tables of angles, or of learned positions."""
        return self.layout.positions if self.positions is None else self.positions

    @classmethod
    def of(cls, plan: StepPlan, layout: StepLayout) -> Step:
        rows, num_sampled, token_ids = plan.rows, plan.num_sampled, plan.token_ids
        if layout.num_decodes == len(rows):
            sampled = layout.qo_indptr[:-1], rows, layout.seq_lens
            return cls(plan.step, layout, rows, token_ids, *sampled, plan.wants_forced, plan.scores_prompts, adapters=plan.adapters)
        if not np.count_nonzero(num_sampled > 1):
            at = num_sampled.nonzero()[0]
            sampled = layout.qo_indptr[1:][at] - 1, rows[at], layout.seq_lens[at]
            return cls(plan.step, layout, rows, token_ids, *sampled, plan.wants_forced, plan.scores_prompts, adapters=plan.adapters)
        firsts = np.cumsum(num_sampled, dtype=np.int32) - num_sampled
        indices = np.arange(num_sampled.sum(), dtype=np.int32) + np.repeat(layout.qo_indptr[1:] - num_sampled - firsts, num_sampled)
        sampled = indices, np.repeat(rows, num_sampled), layout.positions[indices] + 1
        ids = np.concatenate((np.full(layout.num_decodes, -1, np.int32), token_ids, [-1]), dtype=np.int32)
        drafts = ids[indices + 1]
        drafts[(firsts + num_sampled - 1)[num_sampled > 0]] = -1
        return cls(plan.step, layout, rows, token_ids, *sampled, plan.wants_forced, plan.scores_prompts, drafts, adapters=plan.adapters)

    def first_samples(self) -> NDArray[np.int64]:
        """[sampled rows], the index of each row's first among the m tokens."""
        return np.flatnonzero(np.append(True, self.sampled_rows[1:] != self.sampled_rows[:-1]))

    def rows_that_sample(self) -> IntArray:
        """[sampled rows] int32: the rows from which a token is sampled, each once, in the order of `sampled_rows`."""
        return self.sampled_rows if self.drafts is None else self.sampled_rows[self.first_samples()]


class Executor(Protocol):
    """A model on a device, with its KV pages, the last token of every row, and the sampling. Steps run in the order of their launches.

    All methods but `hold`, `pack_adapter` and `prepare_weights` are called from one thread. `allocate` comes before all that follow here.
    """

    name: str
    shard: Shard  # of the model, that it holds
    max_adapters: int  # as of `Runner`

    @property
    def exchange_seconds(self) -> float:
        """Seconds that this rank has spent in exchanges with others: copying, and waiting for them. Only the CPU kernels count them;
        elsewhere it is 0.0."""

    def bytes_per_page(self) -> int:
        """Bytes of one KV page: K and V of the layers of a group."""

    def kv_budget(self) -> int:
        """Bytes that the KV pages may take where nothing is configured."""

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Creates the KV pages, zeroed, the reserved page 0 included, and whatever else steps of sequences of up to `max_model_len` tokens
        need, so that no request waits for it."""

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Assigns rows to new sequences. What it raises may be the fault of any of them; it can be called again with the others."""

    def pack_adapter(self, adapter: Adapter) -> object:
        """An adapter in the form that `set_adapter` takes. May be called from any thread, but from one at a time, while steps run. Raises
        AdapterError for one that the executor cannot add, or InsufficientMemoryError."""

    def set_adapter(self, key: int, packed: object | None) -> None:
        """From now on rows of steps can have the adapter with this key; None: they have it no more."""

    def read_pages(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """[n, bytes of a page] of pages that steps whose results were asked for have written, as `write_pages` takes them; in `out`
        if it is given."""

    def write_pages(self, pages: IntArray, content: NDArray[np.uint8]) -> None:
        """Writes what was read of as many pages, for steps that are launched from now on. No step in flight has these pages."""

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        """Copies page sources[i] to page destinations[i], all of its layers, after the writes of the steps before. No page is twice a
        destination, and all sources are read before any destination is written."""

    def prepare_weights(self, read: ReadWeights, threads: int, partial: bool) -> object:
        """Makes what `use_weights` takes of weights that are read as for loading, with so many threads; of `partial` ones, some may be
        missing, which stay as they are. May be called from any thread, one at a time, while steps run. Raises InsufficientMemoryError
        before it reads any, and what reading raises."""

    def use_weights(self, prepared: object) -> None:
        """The steps that are launched from now on compute with these weights. No step is in flight."""

    def draft(self, step: Step) -> IntArray:
        """Runs a step of the draft model, after all steps before; returns the [m] tokens that it samples. Its decodes go on from what it
        sampled last for their rows."""

    def launch(self, step: Step) -> InFlightStep:
        """Starts a step, or prepares one that is computed when its result is asked for. Its decodes go on from the tokens sampled in
        earlier steps, also when the results of these were not asked for yet."""

    def sleep(self, level: int, pages: IntArray) -> None:
        """Gives back the memory of the KV pages and of what steps need beside them, with level 2 that of the weights, too. The content of
        `pages` is kept in host memory. No step is in flight, and none is launched before `wake`. May be called again with a higher
        level."""

    def wake(self) -> None:
        """Ends a sleep; after one of level 2 there are weights again. Raises InsufficientMemoryError if that may be tried again."""

    def hold(self, held: bool) -> None:
        """While held, a launched step does not begin by itself when the step before it finishes; it begins when the result of that step is
        asked for. May be called from any thread, also after `close`."""

    def close(self) -> None:
        """Releases the weights and the KV cache. Steps in flight are finished or forgotten."""
