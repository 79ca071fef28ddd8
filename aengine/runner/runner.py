"""`ModelRunner`: executes plans on one device; `build_executor`: who runs the model there, with this configuration.

Owns the sizes (of the KV pool, of steps), the page table, and how a plan becomes the input of an executor. State that a plan
does not name stays. Knows nothing of requests, queues or why a row runs.

The steps of a draft model that precede a step of the model: one for the tokens that it lacks, and one for each further draft of a row.

Knows nothing of the models. The page table is that of the model: a draft model has pages of its own under the same numbers.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aengine.api import VERSION
from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError, InsufficientMemoryError, ModelLoadError
from aengine.api.outputs import DraftSource
from aengine.api.runtime import forget_locals, imports_of
from aengine.attention import Layouts, StepLayout, StepStates, build_layout
from aengine.kernels.cpu.compiler import KernelsUnavailableError
from aengine.kernels.cpu.library import load_kernels
from aengine.kernels.warm_memory import WarmMemory
from aengine.models.fallback import FallbackSpec
from aengine.models.loading.hub import checkpoint_digest
from aengine.parallel.driver import DriverRanks, start_ranks
from aengine.parallel.expert_replicas import Replicas, join_replicas
from aengine.parallel.follower import FollowerRanks
from aengine.runner.contract import Change, Executor, InFlightStep, IntArray, Prepared, Step
from aengine.runner.cpu.executor import CpuExecutor, CpuExecutorBase, CpuFollower
from aengine.runner.memory import resident_memory, show_bytes
from aengine.runner.model_plan import plan_model, plan_pool
from aengine.runner.rank_steps import DrivenStep, PagesOfRanks, naming_ranks
from aengine.runner.row_images import RowImages
from aengine.runner.setup import ExecutorSetup, draft_source
from aengine.runner.torch.device import (
    device_kind,
    find_device,
    give_back_memory,
    is_lost,
    is_out_of_memory,
    set_thread_count,
    used_cuda_memory,
)
from aengine.runner.weight_changes import Changing
from aengine.scheduler.plan import NO_INTS, DraftRows, NewRow, RowsFailed, StepPlan

if TYPE_CHECKING:
    import torch

    from aengine.runner.torch.capture import Capture


def with_drafts(
    plan: StepPlan, drafted: DraftRows, page_table: IntArray, page_size: int, run: Callable[[Step], IntArray], *, is_head: bool
) -> IntArray:
    """The `token_ids` of a plan with the drafts that the draft model proposes for the rows that are `drafted`. `run` computes a step of it
    and returns its tokens; decodes go on from what it sampled last for their rows.

    `page_table` [1, rows, columns] is of a group without a window. A head has a token at the position before it, beside the model's hidden
    state of that position. So it has no first tokens.
    """
    behind = int(is_head)  # how far its positions are behind those of its tokens
    starts, lengths, ids = drafted.starts - behind, drafted.lengths, drafted.token_ids
    all_rows, num_drafts = drafted.rows, drafted.num_drafts
    if (starts < 0).any():
        numbers = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # within their rows
        lengths, starts, ids = lengths + np.minimum(starts, 0), np.maximum(starts, 0), ids[numbers + np.repeat(starts, lengths) >= 0]
        all_rows, starts, lengths, num_drafts = (array[lengths > 0] for array in (all_rows, starts, lengths, num_drafts))
        if not len(all_rows):
            return plan.token_ids

    def next_slots(rows: IntArray, layout: StepLayout, of: slice | NDArray[np.int64] = slice(None)) -> IntArray:
        positions = layout.seq_lens[of]
        return page_table[0, rows, positions // page_size] * page_size + positions % page_size if is_head else NO_INTS

    layout = build_layout(all_rows, 0, starts, lengths, page_table, page_size)
    at = num_drafts.nonzero()[0]
    rows, num_drafts, positions = all_rows[at], num_drafts[at], layout.seq_lens[at]  # the latter behind those of the step
    step = plan.step, layout, all_rows, ids, layout.qo_indptr[1:][at] - 1, rows, positions + behind
    tokens = run(Step(*step, kept_slots=next_slots(rows, layout, at)))
    if not len(at):
        return plan.token_ids
    ends = np.zeros(len(page_table[0]), np.int64)  # by row, in token_ids
    ends[plan.rows] = np.cumsum(np.where(np.arange(len(plan.rows)) < plan.num_decodes, 0, plan.lengths))
    token_ids, places = plan.token_ids.copy(), ends[rows] - num_drafts
    token_ids[places] = tokens
    going = [(num_drafts > number).nonzero()[0] for number in range(1, num_drafts.max())]  # in each further step
    for number, (of, layout) in enumerate(zip(going, _decodes(rows, positions, going, page_table, page_size), strict=True), 1):
        step = plan.step, layout, rows[of], NO_INTS, layout.qo_indptr[:-1], rows[of], layout.seq_lens + behind
        token_ids[places[of] + number] = run(Step(*step, kept_slots=next_slots(rows[of], layout)))
    return token_ids


def _decodes(
    rows: IntArray, positions: IntArray, going: list[NDArray[np.int64]], page_table: IntArray, page_size: int
) -> Iterator[StepLayout]:
    """The layouts of steps that follow one another, in which those of the rows that are `going` decode, at first at `positions`. They are
    made at once, since a draft model may take no longer for a step than one layout takes."""
    if not going:
        return
    joined = np.concatenate(going)
    numbers = np.repeat(np.arange(len(going), dtype=np.int32), [len(of) for of in going])
    every = build_layout(rows[joined], len(joined), positions[joined] + numbers, np.ones(len(joined), np.int32), page_table, page_size)
    begin = 0
    for of in going:
        end = begin + len(of)
        first_page, end_page = every.kv_indptr[begin], every.kv_indptr[end]
        yield StepLayout(
            page_size=page_size,
            num_decodes=len(of),
            qo_indptr=every.qo_indptr[: len(of) + 1],
            kv_indptr=every.kv_indptr[begin : end + 1] - first_page,
            kv_indices=every.kv_indices[:, first_page:end_page],
            last_page_len=every.last_page_len[begin:end],
            seq_lens=every.seq_lens[begin:end],
            positions=every.positions[begin:end],
            slot_mapping=every.slot_mapping[:, begin:end],
        )
        begin = end


_log = logging.getLogger("aengine")
_DEVICE_BOUND = {
    "attention_backend": {"cpu": "cpu", "flashinfer": "cuda", "triton": "cuda"},
    "kv_cache_dtype": {"fp8": "cuda", "int8": "cpu", "int4": "cpu"},
}


def build_executor(setup: ExecutorSetup, warm: WarmMemory | None, check: Callable[[], object]) -> Executor:
    """The executor for this device, model and configuration, with one log line that says which and why.

    `warm` is host memory to put weights in. `check` is called before each weight is loaded, and may raise.
    Raises ConfigError for a configured one that is not possible, InsufficientMemoryError before the weights are read, ModelLoadError, and
    what `check` raises.
    """
    config = setup.config
    on_cpu = setup.device.type == "cpu"
    for name, devices in _DEVICE_BOUND.items():
        value = getattr(config, name)
        if value in devices and (devices[value] == "cpu") != on_cpu:
            raise ConfigError.of(name, f"{value!r} needs device {devices[value]}")
    fallback = isinstance(setup.spec, FallbackSpec)
    shares_experts = setup.replicas is not None
    if shares_experts:
        _log.info("experts are shared with other replicas, so the model runs in torch")
    if on_cpu and config.attention_backend != "torch_native" and not fallback and not shares_experts:
        try:
            if isinstance(setup.ranks, FollowerRanks):
                return CpuFollower(setup, setup.ranks, warm, check)
            return CpuExecutor(setup, warm, check)
        except KernelsUnavailableError as reason:
            if config.attention_backend == "cpu":
                raise ConfigError.of("attention_backend", f"'cpu' is not possible here: {reason}") from None
            _log.warning("running in plain torch, which is several times slower than the CPU kernels: %s", reason)
    for name, value in (("numerics", "canonical"), ("kv_cache_dtype", "int4")):
        if getattr(config, name) == value:
            raise ConfigError.of(name, f"{value!r} needs the CPU kernels and a native model that they run")
    if config.numerics == "batch_invariant" and (fallback or setup.ranks is not None or shares_experts):
        raise ConfigError.of("numerics", "'batch_invariant' on CUDA needs a native model on one device")
    if config.quantization != "none" and (on_cpu or fallback):
        needs = " and ".join(["the CPU kernels"] * on_cpu + ["a native model"] * fallback)
        raise ConfigError.of("quantization", f"{config.quantization!r} needs {needs}")
    with imports_of("a model that the CPU kernels do not run"):
        from aengine.runner.torch.executor import TorchExecutor, TorchFollower

    if on_cpu:
        set_thread_count(setup.threads)  # of this thread; other engines and the host program keep theirs

    return TorchFollower(setup, setup.ranks, check) if isinstance(setup.ranks, FollowerRanks) else TorchExecutor(setup, check)


class StateTable:
    """Which pages the recurrent states of rows are in, from step to step, and how many tokens their matrices have."""

    def __init__(self, num_rows: int, num_pages: int) -> None:
        """`num_pages`: of a state."""
        self._pages = np.zeros((num_rows, num_pages), dtype=np.int32)  # that the rows write
        self._reads = self._pages.copy()  # that their next steps read
        self._lengths = np.zeros(num_rows, dtype=np.int32)  # of what the matrices have, in tokens; -1: as many as precede the next step

    def of_step(self, plan: StepPlan) -> StepStates:
        rows, starts, changes = plan.rows, plan.starts, plan.states
        if changes is not None:  # rows that begin may compute nothing before a later step
            self._pages[changes.rows], self._reads[changes.rows], self._lengths[changes.rows] = changes.pages, changes.sources, -1
        reads, writes, known = self._reads[rows], self._pages[rows], self._lengths[rows]
        replays, drafts = np.where(known < 0, 0, starts - known), (plan.num_sampled > 1).astype(np.int32)
        self._reads[rows] = writes
        self._lengths[rows] = np.where(drafts, starts, starts + plan.lengths)
        if changes is None:
            return StepStates(reads, writes, replays, drafts, NO_INTS, NO_INTS, writes[:0])
        numbers = np.full(len(self._pages), -1, dtype=np.int32)
        numbers[rows] = np.arange(len(rows), dtype=np.int32)
        kept = numbers[changes.kept_rows]
        lengths = changes.kept_lengths - (starts - replays)[kept]
        order = np.lexsort((lengths, kept))
        return StepStates(reads, writes, replays, drafts, kept[order], lengths[order], changes.kept_pages[order])


class ModelRunner:
    """Satisfies `Runner`. All methods but `hold`, `abandon`, `prepare` and `discard` belong to the thread that creates it: CUDA streams and
    inference mode are thread-local."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: pathlib.Path,
        capture: Callable[[torch.device], Capture] | None = None,
        warm: WarmMemory | None = None,
        check: Callable[[], object] = lambda: None,
        ranks: DriverRanks | FollowerRanks | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """Loads the model and sizes the KV pool. `capture` makes the recorder of graphs; None: of CUDA graphs, or eager.
        `warm` is host memory to put weights in. `check` is called before each weight, and may raise to end the loading. `ranks`: the others
        that the model is divided over, which the runner closes with itself; None: it starts them, if there are any. `replicas`: the others
        that share its experts, in the same way.

        Raises ModelLoadError, InsufficientMemoryError, or ConfigError for what this model or machine cannot do.
        """
        self._ranks = ranks or (start_ranks(config, model_dir, lambda error: None, check=check) if config.num_ranks > 1 else None)
        self._replicas = replicas
        undo = ExitStack()  # what was loaded until an error
        try:
            if replicas is None and config.expert_parallel_size > 1:
                self._replicas = join_replicas(config, lambda error: None, check)
            self._load(config, model_dir, capture, warm, check, undo)
        except BaseException as error:
            forget_locals(error)
            undo.close()
            self._close_ranks()
            if is_out_of_memory(error):
                fields = "gpu_memory_utilization, kv_cache_memory, max_num_seqs or max_num_batched_tokens"
                raise InsufficientMemoryError(f"{_first_sentences(error)} Lower {fields}") from error
            if is_lost(error):
                kind = InsufficientMemoryError if "out of memory" in str(error) else ModelLoadError
                raise kind(f"the device fails: {str(error).partition(chr(10))[0]}") from error
            raise

    def _load(
        self,
        config: EngineConfig,
        model_dir: pathlib.Path,
        capture: Callable[[torch.device], Capture] | None,
        warm: WarmMemory | None,
        check: Callable[[], object],
        undo: ExitStack,
    ) -> None:
        self.device = find_device(config.device, None if self._ranks is None else self._ranks.local_index)
        undo.callback(give_back_memory, self.device)
        plan = plan_model(config, model_dir, self.device, capture, self._ranks, self._replicas)
        setup = plan.setup
        self.spec, self.dtype, self.quantization = setup.spec, setup.dtype, setup.quantization
        self.has_output_head, self.eos_token_ids, self.sampling_defaults = plan.has_output_head, plan.eos_token_ids, plan.sampling_defaults
        self.page_size, self.windows, self.state_pages = config.page_size, setup.groups.windows, setup.state_pages
        self.max_num_seqs, self.max_num_batched_tokens = setup.max_num_seqs, setup.max_num_batched_tokens
        self.max_in_flight = config.pipeline_parallel_size
        self.draft_source = draft_source(setup)
        self.draft_vocab_size = None if setup.draft is None else setup.draft.native_spec.vocab_size
        self._compare(config, model_dir)
        self._executor = build_executor(setup, warm, check)
        undo.callback(_close_failed, self._executor)
        self._divided_pages = PagesOfRanks(self._ranks, self._executor) if isinstance(self._ranks, DriverRanks) else None
        self.executor_name, self.max_adapters = self._executor.name, self._executor.max_adapters
        pool = plan_pool(setup, self._executor)
        self._changing = Changing(setup, self._executor, check, pool.weights_digest)
        self.num_pages, self.max_model_len = pool.num_pages, pool.max_model_len
        self.kv_bytes_per_token, self.state_bytes = pool.bytes_per_token, pool.state_bytes
        self._executor.allocate(self.num_pages, self.max_model_len)
        columns = -(-self.max_model_len // self.page_size)
        self._page_table = np.zeros((len(self.windows), self.max_num_seqs, columns), dtype=np.int32)
        self._layouts = Layouts(self._page_table, self.page_size)
        self._images = RowImages(setup.max_model_len)
        self.state_interval = setup.needs.state_interval(config.state_interval)
        self._states = StateTable(self.max_num_seqs, self.state_pages) if self.state_pages else None
        _log.info(
            "%s: %s weights on %s, %d KV pages of %d tokens%s (%s)",
            self.spec.architecture,
            setup.weight_form,
            self.device,
            self.num_pages,
            self.page_size,
            "" if config.kv_cache_dtype == "auto" else f" in {config.kv_cache_dtype}",
            show_bytes(self.num_pages * self._executor.bytes_per_page()),
        )
        self.facts = self._facts(config, model_dir)
        """What decides tokens beside the weights, by name: values, or digests of them."""

    def _facts(self, config: EngineConfig, model_dir: pathlib.Path) -> dict[str, str]:
        facts = {
            "version": VERSION,
            "model": _digest(repr(self.spec)),
            "defaults": _digest(repr((self.eos_token_ids, sorted(self.sampling_defaults.items())))),
            "dtype": self.dtype.name,
            "quantization": self.quantization or "none",
            "kv_cache_dtype": config.kv_cache_dtype,
            "page_size": str(self.page_size),
            "max_model_len": str(self.max_model_len),
            "executor": self.executor_name,
        }
        if isinstance(self._executor, CpuExecutorBase):
            level = config.numerics if config.numerics == "canonical" else self._executor.level
            facts["kernels"] = f"{level} {self._executor.sources}"
        else:
            facts["kernels"] = f"{config.attention_backend}, {device_kind(self.device.of_torch())}, {config.numerics}"
        if config.load_format == "dummy":
            facts["random weights"] = f"seed {config.seed}"
        if self._ranks is not None or self._replicas is not None:  # this one holds a part of the weights
            facts["files"] = checkpoint_digest(model_dir, config.load_format)
        if self._ranks is not None:
            facts["ranks"] = f"{config.tensor_parallel_size} {config.tensor_parallel_mode}, {config.pipeline_parallel_size} stages"
        return facts

    @property
    def weights_digest(self) -> str:
        return self._changing.weights_digest

    def _compare(self, config: EngineConfig, model_dir: pathlib.Path) -> None:
        """Compares the checkpoint, dtype and kind of device with those of the other ranks, or replicas."""
        if self._ranks is None and self._replicas is None:
            return
        digest, dtype = checkpoint_digest(model_dir, config.load_format), self.dtype.name
        facts = {"model": digest, "dtype": dtype, "device": self.device.type}
        if self._ranks is not None:
            level = _level(config) if self.device.type == "cpu" else ""
            self._ranks.same({**facts, "level of the CPU kernels": level})
        if self._replicas is not None:
            self._replicas.same({**facts, "expert_parallel_size": str(config.expert_parallel_size)})

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Raises `RowsFailed` for new rows that cannot be assigned, and for all rows of a step that the device has no memory for."""
        if plan.new_rows:
            self._assign_rows(plan.new_rows)
            self._images.assign(plan.new_rows)
        try:
            return self._launch(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error) or self._ranks is not None or self._replicas is not None:
                raise  # of what is no lack of memory, or where others compute the step
            _log.warning("a step of %d sequences fails: %s", len(plan.rows), error)
            what = f"the step does not fit into memory: {_first_sentences(error)}"
            raise RowsFailed({row: InsufficientMemoryError(what) for row in plan.rows.tolist()}) from None

    def _launch(self, plan: StepPlan) -> InFlightStep:
        if len(plan.copy_from):
            self._executor.copy_pages(plan.copy_from, plan.copy_to)
        if len(plan.page_rows):
            self._page_table[plan.page_groups, plan.page_rows, plan.page_cols] = plan.page_ids
        layout = self._layouts.build(plan.rows, plan.num_decodes, plan.starts, plan.lengths, same_pages=not len(plan.page_rows))
        if self._states is not None:
            layout = replace(layout, states=self._states.of_step(plan))
        if plan.draft_rows is not None:
            is_head = self.draft_source in (DraftSource.HEAD, DraftSource.MTP)
            table = self._page_table[:1]
            token_ids = with_drafts(plan, plan.draft_rows, table, self.page_size, self._executor.draft, is_head=is_head)
            plan = replace(plan, token_ids=token_ids)
        step = self._images.added(Step.of(plan, layout))
        if self._replicas is not None:
            with naming_ranks(self._replicas):
                return DrivenStep(self._executor.launch(step), self._replicas)
        if not isinstance(self._ranks, DriverRanks):
            return self._executor.launch(step)
        with naming_ranks(self._ranks):
            self._ranks.send_plan(plan)  # nothing in it can be refused any more
            return DrivenStep(self._executor.launch(step), self._ranks)

    def join_step(self) -> bool:
        if self._replicas is None:
            return False
        with naming_ranks(self._replicas):
            return self._replicas.join_step()

    def on_wanted(self, callback: Callable[[], object]) -> None:
        if self._replicas is not None:
            self._replicas.on_wanted = callback

    @property
    def exchange_seconds(self) -> float:
        """Seconds that this rank has spent in exchanges with others; 0.0 where its executor does not count them."""
        return self._executor.exchange_seconds

    def prepare(self, change: Change) -> Prepared:
        return self._changing.prepare(change)

    def apply(self, prepared: Prepared) -> None:
        self._changing.apply(prepared)

    def discard(self, prepared: Prepared) -> None:
        self._changing.discard(prepared)

    def read_pages(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        return self.begin_read(pages, out)()

    def begin_read(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> Callable[[], NDArray[np.uint8]]:
        if self._divided_pages is not None:
            return self._divided_pages.begin_read(pages, out)
        content = self._executor.read_pages(pages, out)
        return lambda: content

    def write_pages(self, pages: IntArray, content: NDArray[np.uint8]) -> None:
        if self._divided_pages is None:
            self._executor.write_pages(pages, content)
        else:
            self._divided_pages.write(pages, content)

    def sleep(self, level: int, pages: IntArray) -> None:
        self._changing.sleep(level, pages)

    def wake(self, prepared: Prepared | None) -> None:
        self._changing.wake(prepared)

    def memory_used(self) -> int:
        return resident_memory() if self.device.type == "cpu" else used_cuda_memory(self.device.of_torch())

    def hold(self, held: bool) -> None:
        self._executor.hold(held)

    def abandon(self) -> None:
        if isinstance(self._ranks, DriverRanks):
            self._ranks.close(at_once=True)
        if self._replicas is not None:
            self._replicas.close()

    def close(self) -> None:
        """The runner cannot be used afterwards."""
        try:
            self._executor.close()
        finally:
            self._close_ranks()

    def _close_ranks(self) -> None:
        if isinstance(self._ranks, DriverRanks):
            self._ranks.close()
        if self._replicas is not None:
            self._replicas.close()

    def _assign_rows(self, new_rows: tuple[NewRow, ...]) -> None:
        try:
            self._executor.assign_rows(new_rows)
        except Exception:
            errors: dict[int, BaseException] = {}
            for new_row in new_rows:
                try:
                    self._executor.assign_rows((new_row,))
                except Exception as error:  # belongs to this row alone
                    errors[new_row.row] = error
            if not errors:
                raise
            raise RowsFailed(errors) from None


def _close_failed(executor: Executor) -> None:
    with suppress(Exception):  # comes of the error that ended the loading
        executor.close()


def _first_sentences(error: BaseException) -> str:
    """The message of the error without the sentences on who uses how much memory, and on torch's settings."""
    return re.split(" (?:Including|Process|Of the allocated|If reserved)", str(error))[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _level(config: EngineConfig) -> str:
    if config.numerics == "canonical":
        return config.numerics
    try:
        return load_kernels().level.value
    except KernelsUnavailableError:
        return ""
