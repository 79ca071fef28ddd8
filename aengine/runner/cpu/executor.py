"""`HostQueue`: steps of a CPU, which has no queue of its own. They are computed in order, each no later than its result is asked for.

Owns the order, and that a step which can run on the kernels' own threads begins as soon as the step before it finishes, unless it is held.
Knows nothing of what a step computes.

The CPU stack, which runs all layers of a step in one call of our own kernels: `CpuExecutor`, which samples, and `CpuFollower`, on a
rank that follows another one; its step ends when the first rank has told the last tokens of its rows.

The time that `launch` takes is a visible part of a small model's step, so it does as few operations as it can."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.arrays import Array, Numbers
from aengine.kernels.cpu import ops
from aengine.kernels.warm_memory import WarmMemory
from aengine.models.adapters import Adapter
from aengine.models.cpu.stack import PreparedStep
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.messages import Logits
from aengine.runner.contract import InFlightStep, IntArray, LazyStep, ReadWeights, Step
from aengine.runner.cpu.model import PagedCpuModel
from aengine.runner.rank_steps import Stages
from aengine.runner.results import Capture, PromptScorer, step_result
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch.device import set_thread_count
from aengine.sampling.arrays import HostArrays, num_accepted_on_host
from aengine.sampling.sampler import SampledTokens, Sampler
from aengine.scheduler.plan import NO_INTS, NewRow, StepResult


class CpuStep:
    """The `InFlightStep` of a `HostQueue`, which computes it when its turn has come."""

    def __init__(
        self, queue: HostQueue, prepared: PreparedStep, make_result: Callable[[], StepResult], *, can_run_ahead: bool, overlaps: bool
    ) -> None:
        self.overlaps = overlaps
        self._queue = queue
        self._prepared = prepared
        self._make_result = make_result
        self._can_run_ahead = can_run_ahead
        self._reached_front = False
        self._result: StepResult | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it may have begun, and so cannot be withdrawn."""
        return self._reached_front or self._prepared.has_begun

    def begin(self) -> None:
        """To be called when the results of all steps before are known. Starts it if it can run ahead."""
        if self._can_run_ahead and not self.has_begun:
            self._prepared.begin()
        self._reached_front = True

    def compute(self, following: CpuStep | None, hold: ctypes.c_int32) -> None:
        self.begin()
        self._prepared.run(following._prepared if following is not None and following._can_run_ahead else None, hold)
        self._result = self._make_result()

    def wait(self) -> None:
        if self._result is None:
            self._queue.compute_through(self)

    def result(self) -> StepResult:
        self.wait()
        self._queue.begin_first()  # not in `wait`: between the two a step that was held can still be withdrawn
        assert self._result is not None, "computed"
        return self._result

    def withdraw(self) -> bool:
        return self._queue.withdraw(self)


class HostQueue:
    def __init__(self) -> None:
        self.hold = ctypes.c_int32()
        """Not 0: a step that finishes does not begin the one after it. The kernels read it without the GIL, any thread may write it."""
        self._steps: deque[CpuStep] = deque()  # that are not computed

    def add_step(self, prepared: PreparedStep, make_result: Callable[[], StepResult], *, can_run_ahead: bool, overlaps: bool) -> CpuStep:
        """`make_result` is called when `prepared` has run. `can_run_ahead`: on the kernels' own threads, before its result is asked for.
        `overlaps`: the next step may be planned meanwhile."""
        step = CpuStep(self, prepared, make_result, can_run_ahead=can_run_ahead, overlaps=overlaps)
        self._steps.append(step)
        if len(self._steps) == 1:
            step.begin()
        return step

    def begin_first(self) -> None:
        if self._steps:
            self._steps[0].begin()

    def compute_through(self, last: CpuStep | None = None) -> None:
        """Computes all steps up to `last`, or all."""
        while self._steps:
            step = self._steps.popleft()
            step.compute(self._steps[0] if self._steps else None, self.hold)
            if step is last:
                return

    def withdraw(self, step: CpuStep) -> bool:
        """Takes back `step`, the latest one, as if it had not been added. False: it has begun, and cannot be taken back."""
        if step.has_begun:
            return False
        assert self._steps[-1] is step, "the latest"
        self._steps.pop()
        return True

    def close(self) -> None:
        """Finishes the step that has begun, since its threads use the model, and forgets the others."""
        if self._steps and self._steps[0].has_begun:
            with contextlib.suppress(Exception):
                self._steps.popleft().compute(None, self.hold)
        self._steps.clear()


class CpuExecutorBase:
    """The part of `Executor` that its `PagedCpuModel` does."""

    name = "cpu"

    def __init__(self, setup: ExecutorSetup, warm: WarmMemory | None, check: Callable[[], object]) -> None:
        """Loads the model. Parameters and errors are those of `build_executor`; it also raises KernelsUnavailableError, before it reads any
        weights."""
        self._model = PagedCpuModel(setup, warm, check)
        self._stages = Stages.of(setup, self._model.stage)
        self.shard, self.max_adapters = setup.shard, setup.max_adapters

    @property
    def level(self) -> str:
        """The level of the kernels that compute its steps."""
        return self._model.workspace.kernels.level.value

    @property
    def sources(self) -> str:
        """A digest of the sources of these kernels."""
        return self._model.workspace.kernels.sources

    @property
    def exchange_seconds(self) -> float:
        return self._model.exchange_seconds

    def bytes_per_page(self) -> int:
        return self._model.bytes_per_page()

    def kv_budget(self) -> int:
        return self._model.kv_budget()

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        self._model.allocate(num_pages)

    def sleep(self, level: int, pages: IntArray) -> None:
        self._model.sleep(level, pages)

    def wake(self) -> None:
        """Pages are committed again when they are written."""

    def pack_adapter(self, adapter: Adapter) -> object:
        return self._model.pack_adapter(adapter)

    def set_adapter(self, key: int, packed: object | None) -> None:
        self._model.set_adapter(key, packed)

    def read_pages(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        return self._model.read_pages(pages, out)

    def write_pages(self, pages: IntArray, content: NDArray[np.uint8]) -> None:
        self._model.write_pages(pages, content)

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._model.copy_pages(sources, destinations)

    def prepare_weights(self, read: ReadWeights, threads: int, partial: bool) -> object:
        return self._model.prepare_weights(read, threads, partial)

    def use_weights(self, prepared: object) -> None:
        self._model.use_weights(prepared)

    def close(self) -> None:
        if self._stages is not None:
            self._stages.close()
        self._model.close()
        del self._model, self._stages


class CpuExecutor(CpuExecutorBase):
    """The `Executor` of the CPU kernels on a single or first rank. The kernels sample what they can, and `Sampler` the rest, from their
    logits."""

    def __init__(self, setup: ExecutorSetup, warm: WarmMemory | None, check: Callable[[], object]) -> None:
        super().__init__(setup, warm, check)
        model = self._model
        arrays, sums, vocab_size = HostArrays(), functools.partial(ops.log_sums, model.workspace), setup.native_spec.vocab_size
        self._sampler = Sampler(setup.max_num_seqs, vocab_size, arrays, self._draw, sums)
        self._setup = setup
        self._ranks = setup.followers
        spec = setup.native_spec
        self._scorer = PromptScorer(
            spec.vocab_size,
            arrays,
            sums,
            spec.logit_scale,  # which the kernels' last norm has as a factor
        )
        self._queue = HostQueue()

    def _draw(self, logits: Numbers, params: NDArray[np.void], _: object, chosen: Numbers) -> Numbers:
        tokens = ops.draw(self._model.workspace, logits, params)
        chosen[:] = logits[np.arange(len(tokens)), tokens]
        return tokens

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        self._queue.compute_through()  # they need the rows as they are
        if any(new.params.processors for new in new_rows):  # which are given tensors of torch
            set_thread_count(self._model.workspace.threads)
        self._sampler.update(new_rows)
        self._scorer.update(new_rows)

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._queue.compute_through()
        super().copy_pages(sources, destinations)

    def draft(self, step: Step) -> IntArray:
        assert self._model.draft is not None
        self._queue.compute_through()
        return self._model.draft.run(step, self._sampler.draft_params(step.sampled_rows, step.next_positions))

    def launch(self, step: Step) -> InFlightStep:
        if self._stages is not None:
            return self._stages.launch(step, functools.partial(self._sampled_result, step))
        rows = step.sampled_rows
        needs_logits = step.scores_prompts or self._ranks is not None  # of several ranks each has a part of the vocabulary
        greedy = not needs_logits and self._sampler.is_greedy(rows, step.next_positions)
        draw_params = None if needs_logits or greedy else self._sampler.draw_params(rows, step.next_positions)
        kernels_sample = greedy or draw_params is not None
        wanted = self._scorer.captures(step)
        captured = None if wanted is None else self._model.captured(*wanted)
        call = self._model.prepare(step, greedy=greedy, draw_params=draw_params, captured=captured)
        # Otherwise the step has its result only when `Sampler` has run, and the next one needs that.
        can_run_ahead = kernels_sample and self._model.workspace.threads > 1
        if call.hidden is None:
            make_result = functools.partial(self._kernel_result, step, call)
        else:
            capture = None if captured is None else functools.partial(self._model.token_states, call, captured)
            make_result = functools.partial(self._sampled_result, step, call.hidden, capture)
        overlaps = can_run_ahead and step.layout.num_decodes == step.layout.num_rows
        return self._queue.add_step(call, make_result, can_run_ahead=can_run_ahead, overlaps=overlaps)

    def hold(self, held: bool) -> None:
        self._queue.hold.value = held

    def close(self) -> None:
        self._queue.close()
        super().close()
        del self._sampler, self._scorer

    def _kernel_result(self, step: Step, call: PreparedStep) -> StepResult:
        """The result of a step that the kernels sampled. The next step waits for this."""
        assert call.sampled is not None
        tokens = call.sampled.astype(np.int32)
        accepted = None if step.drafts is None else num_accepted_on_host(tokens, step.drafts, step.first_samples())
        if accepted is not None:
            self._keep_last_tokens(step, tokens, accepted)
        self._sampler.observe_later(step.sampled_rows, tokens, accepted)
        forced = self._sampler.forced(step.sampled_rows) if step.wants_forced else {}
        failures: dict[int, Exception] = {}
        if call.impossible is not None:
            failures = self._sampler.refusals(step.sampled_rows, step.next_positions, call.impossible, accepted)
        return StepResult(step.number, tokens, accepted=accepted, forced=forced, failures=failures)

    def _keep_last_tokens(self, step: Step, tokens: NDArray[np.int32 | np.int64], accepted: IntArray | None) -> None:
        """Stores the last token of each row from the [m] sampled `tokens`. `accepted` counts those of each row that stay; None: there are
        no drafts."""
        if accepted is None:
            self._model.last_tokens[step.sampled_rows] = tokens
        else:
            firsts = step.first_samples()
            self._model.last_tokens[step.sampled_rows[firsts]] = tokens[firsts + np.maximum(accepted - 1, 0)]

    def _sampled_result(self, step: Step, hidden: Array, capture: Capture | None = None) -> StepResult:
        """Scores prompts and samples, from the hidden states of a step that the kernels did not sample: at its logits indices, or of all
        tokens if prompts are scored."""

        def logits(indices: IntArray) -> Array:
            if self._ranks is not None and (step.scores_prompts or self._stages is not None):
                self._ranks.send_logits(indices if step.scores_prompts else np.arange(len(hidden), dtype=np.int32))
            return self._model.logits(step, hidden, indices if step.scores_prompts else None)

        scores = self._scorer.score(step.rows, step.layout, logits, hidden if step.scores_prompts else None, capture)
        sampled: SampledTokens | None = None
        if len(step.sampled_rows):
            rows, positions = step.sampled_rows, step.next_positions
            sampled = self._sampler.sample(logits(step.logits_indices), rows, positions, rows, positions, step.drafts)
            self._keep_last_tokens(step, sampled.tokens, sampled.accepted)
        if self._ranks is not None:
            self._ranks.send_last_tokens(self._model.last_tokens[step.rows_that_sample()])
        return step_result(step, sampled, scores, self._sampler)


class CpuFollower(CpuExecutorBase):
    """The `Executor` of the CPU kernels on a rank that follows the first one. Its steps bring no tokens, since the first rank samples."""

    def __init__(self, setup: ExecutorSetup, ranks: FollowerRanks, warm: WarmMemory | None, check: Callable[[], object]) -> None:
        """Loads this rank's part of the model, as `CpuExecutorBase` does. `ranks` receives what the first rank says during a step."""
        super().__init__(setup, warm, check)
        self._ranks = ranks

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        raise AssertionError("plans of a follower have no new rows")

    def draft(self, step: Step) -> IntArray:
        raise AssertionError("drafts are in the plans of a follower")

    def launch(self, step: Step) -> InFlightStep:
        if self._stages is not None:
            return self._stages.launch(step, functools.partial(self._follow, step))
        return LazyStep(functools.partial(self._compute, step, self._model.prepare(step)), lambda result: result)

    def hold(self, held: bool) -> None:
        """Changes nothing: a follower's step is never withdrawn."""

    def _compute(self, step: Step, call: PreparedStep) -> StepResult:
        call.run()
        assert call.hidden is not None
        if len(step.sampled_rows) and not step.scores_prompts:
            self._model.logits(step, call.hidden)
        return self._follow(step, call.hidden)

    def _follow(self, step: Step, hidden: Array) -> StepResult:
        """The end of a step, as the first rank says: of the hidden states as they are in `CpuExecutor`."""
        while isinstance(message := self._ranks.receive(), Logits):
            self._model.logits(step, hidden, message.indices)
        self._model.last_tokens[step.rows_that_sample()] = message.tokens
        return StepResult(step.number, NO_INTS)
