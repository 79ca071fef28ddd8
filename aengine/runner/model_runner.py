"""`ModelRunner`: executes plans on one device.

Owns the weights, the KV pool and the state of every row: its last token, its pages, its sampling parameters. A plan changes
what it names and nothing else, so a step uploads only what is new. Knows nothing of requests, queues or why a row runs.
"""

from __future__ import annotations

import functools
import logging
import pathlib
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention import Layouts, StepLayout
from aengine.config import EngineConfig
from aengine.errors import ConfigError, ModelLoadError
from aengine.kernels.warm_memory import WarmMemory
from aengine.models.generation import load_generation
from aengine.models.named_weights import num_parameters
from aengine.models.spec import ModelSpec, load_spec
from aengine.models.weights import checkpoint_dtype
from aengine.runner.base import InFlightStep
from aengine.runner.buckets import GraphSizes
from aengine.runner.capture import Capture
from aengine.runner.cuda_capture import CudaCapture
from aengine.runner.delayed import DelayedSteps
from aengine.runner.device import Lane, find_device, kv_budget
from aengine.runner.executor import ExecutorSetup, GraphPlan, HostExecutor, StepRun, build_executor
from aengine.runner.host_passes import HostPasses
from aengine.runner.in_flight import LaunchedStep
from aengine.runner.landing import Landings
from aengine.runner.memory import cpu_budget, show_bytes, size_pool
from aengine.runner.passes import HostStep, Passes
from aengine.runner.profile import MadeUpStep, widest_step
from aengine.runner.prompt_logprobs import PromptScorer, PromptScores
from aengine.runner.rehearsal import GREEDY, rehearsal
from aengine.runner.threads import own_threads
from aengine.sampling import SampledTokens, Sampler
from aengine.scheduler.plan import NewRow, RowsFailed, StepPlan

_log = logging.getLogger("aengine")
CPU_TOKENS, ACCELERATOR_TOKENS = 512, 2048
"""Of a step, where max_num_batched_tokens is left open."""
SMALL_MODEL = 20_000_000
"""Parameters below which a second thread costs more in waiting than it saves in work."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """Satisfies `Runner`. Create, launch and close it in one thread: CUDA streams and inference mode are thread-local."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: pathlib.Path,
        capture: Callable[[torch.device], Capture] | None = None,
        warm: WarmMemory | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Loads the model and sizes the KV pool. `capture` makes what records graphs; None: CUDA's, on CUDA, unless the config says eager.
        `warm` is host memory to put weights in. `check` is called before each weight, and raises where loading is to be left.

        Raises ModelLoadError, InsufficientMemoryError, or ConfigError for what this model or machine cannot do.
        """
        self.device = find_device(config.device)
        on_cpu = self.device.type == "cpu"
        self.spec = load_spec(model_dir)
        self.generation = load_generation(model_dir, self.spec)
        self.page_size = config.page_size
        self.max_num_seqs = config.num_seqs
        default = CPU_TOKENS if on_cpu else ACCELERATOR_TOKENS
        self.max_num_batched_tokens = config.max_num_batched_tokens or max(config.num_seqs, default)
        context = self.spec.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > context:
            raise ConfigError.of("max_model_len", f"{config.max_model_len} is more than the model's context of {context} tokens")
        wanted_len = config.max_model_len or context
        if on_cpu:
            _set_threads(config.threads, self.spec)
        if capture is None and not on_cpu and not config.eager:
            capture = CudaCapture
        self._lane = Lane(self.device)
        with self._lane.enter():
            self.dtype = _dtype(config, self.spec, model_dir)
            self._executor = build_executor(ExecutorSetup(config, self.spec, model_dir, self.dtype, self.device, wanted_len, warm, check))
            host_draw = self._executor.draw if isinstance(self._executor, HostExecutor) else None
            draw = None if host_draw is None else lambda logits, host_params, _: host_draw(logits, host_params)
            self._sampler = Sampler(self.max_num_seqs, self.spec.vocab_size, self.device, draw)
            self._scorer = PromptScorer(self.spec.vocab_size, self.device)
            self._landings: Landings | None = None
            self._passes: Passes | HostPasses
            if isinstance(self._executor, HostExecutor) and capture is None:
                self._passes = HostPasses(self._executor, self.max_num_seqs, self._sampler.draw_params)
            else:
                self._passes = Passes(self._executor, self.max_num_seqs, self.device)
                self._landings = Landings(self.max_num_seqs, self.device)
            sizes = GraphSizes.of(config.graph_sizes, config.graph_tokens, self.max_num_seqs, self.max_num_batched_tokens)
            budget = config.kv_cache_memory
            if budget is None and on_cpu:
                budget = cpu_budget()
            elif budget is None:
                self._executor.allocate(1)
                budget = kv_budget(
                    self.device,
                    config.gpu_memory_utilization,
                    lambda: self._run_widest(wanted_len),
                    lambda: 0 if capture is None else self._measure_graphs(capture, sizes, wanted_len),
                )
            bytes_per_page = self._executor.bytes_per_page()
            pool = size_pool(
                budget, bytes_per_page, self.page_size, self.max_num_seqs, wanted_len, may_shorten=config.max_model_len is None
            )
            self.num_pages, self.max_model_len = pool.num_pages, pool.max_model_len
            self._executor.allocate(self.num_pages)
            if capture is not None:
                self._executor.record(self._graph_plan(sizes, self.max_model_len), capture(self.device))
        if self.max_model_len < wanted_len:
            _log.warning("max_model_len lowered from %d to %d tokens: that is what the KV cache holds", wanted_len, self.max_model_len)
        if not on_cpu:
            self._rehearse()
        self._delayed = DelayedSteps()
        self._page_table = np.zeros((self.max_num_seqs, -(-self.max_model_len // self.page_size)), dtype=np.int32)
        self._layouts = Layouts(self._page_table, self.page_size)
        _log.info(
            "%s: %s weights on %s, %d KV pages of %d tokens (%s)",
            self.spec.architecture,
            str(self.dtype).removeprefix("torch."),
            self.device,
            self.num_pages,
            self.page_size,
            show_bytes(self.num_pages * bytes_per_page),
        )

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Applies the plan's row changes, then runs the model over its tokens and samples: at once and without waiting for the device, or
        on a CPU when the result is asked for, so that the step thread can hand on the step before meanwhile."""
        if plan.new_rows or len(plan.copy_from):
            self._delayed.compute()  # they are as those steps left them
            with self._lane.enter():
                self._take_over(plan.new_rows)
                if len(plan.copy_from):
                    self._executor.copy_pages(plan.copy_from, plan.copy_to)
        if len(plan.page_rows):
            self._page_table[plan.page_rows, plan.page_cols] = plan.page_ids
        layout = self._layouts.next(plan.rows, plan.num_decodes, plan.starts, plan.lengths, same_pages=not len(plan.page_rows))
        step, run = self._prepare(layout, plan.rows, plan.samples, plan.token_ids)
        if self.device.type != "cpu":
            return self._compute(plan.step, step, run)
        compute = functools.partial(self._compute, plan.step, step, run)
        return self._delayed.add(run, compute, overlaps=run.overlaps and plan.num_decodes == len(plan.rows))

    def _compute(self, number: int, step: HostStep, run: StepRun) -> LaunchedStep:
        if run.chooses:  # the next step waits for this, and nothing is in the caches: least of all torch
            chosen = run.run().chosen
            assert chosen is not None, "as it said"
            return LaunchedStep(number, step.sampled_rows, SampledTokens(chosen), None, None, None, None)
        with self._lane.enter():
            sampled, scores = self._run(step, run)
            sampler = None if step.greedy else self._sampler
            return LaunchedStep.of(number, step.sampled_rows, sampled, scores, sampler, self._landings)

    def _update(self, new_rows: tuple[NewRow, ...]) -> None:
        self._sampler.update(new_rows)
        self._scorer.update(new_rows)

    def _take_over(self, new_rows: tuple[NewRow, ...]) -> None:
        """Prepares the rows that changed hands. Raises `RowsFailed` for those for which that fails."""
        try:
            self._update(new_rows)
        except Exception:
            errors: dict[int, BaseException] = {}
            for new_row in new_rows:
                try:
                    self._update((new_row,))
                except Exception as error:  # belongs to this row alone
                    errors[new_row.row] = error
            if not errors:
                raise
            raise RowsFailed(errors) from None

    def forward(
        self, layout: StepLayout, rows: NDArray[np.int32], samples: NDArray[np.bool_], token_ids: NDArray[np.int32]
    ) -> tuple[SampledTokens | None, PromptScores | None]:
        """One pass over a layout: the model, the sampler for the rows with `samples`, prompt logprobs for rows that want them.

        Must run in the lane. Writes the tokens to the rows' last tokens. None where there is nothing to sample or to score.
        """
        return self._run(*self._prepare(layout, rows, samples, token_ids))

    def _prepare(
        self, layout: StepLayout, rows: NDArray[np.int32], samples: NDArray[np.bool_], token_ids: NDArray[np.int32]
    ) -> tuple[HostStep, StepRun]:
        """The step, and its way through the model."""
        step = HostStep.of(layout, rows, samples, token_ids, all_hidden=self._scorer.has_prompts, greedy=self._sampler.is_greedy)
        return step, self._passes.prepare(step)

    def _run(self, step: HostStep, run: StepRun) -> tuple[SampledTokens | None, PromptScores | None]:
        done = run.run()
        scores = self._scorer.score(step.rows, step.layout, done.hidden.logits)
        if len(step.sampled) == 0:
            return None, scores
        if done.chosen is not None:
            return SampledTokens(done.chosen), scores
        if step.greedy:
            tokens = done.argmax()
            if not done.keeps_argmax:
                self._passes.keep(done, tokens)
            return SampledTokens(tokens), scores
        chosen = self._sampler.sample(done.logits(), step.sampled_rows, step.next_positions, done.rows, done.next_positions)
        assert isinstance(chosen.tokens, Tensor), "on the device"
        self._passes.keep(done, chosen.tokens)
        return chosen, scores

    def close(self) -> None:
        """Releases the weights and the KV cache. The runner cannot be used afterwards."""
        self._delayed.abandon()
        self._lane.finish()
        del self._executor, self._sampler, self._scorer, self._passes, self._landings
        if self.device.type != "cpu":
            torch.cuda.empty_cache()

    def _run_widest(self, max_model_len: int) -> None:
        self._run_made_up(widest_step(self.max_num_seqs, self.max_num_batched_tokens, max_model_len, self.page_size))

    def _rehearse(self) -> None:
        begin = time.perf_counter()
        with self._lane.enter():
            for step in rehearsal(self.max_num_seqs, self.spec.vocab_size, self.page_size):
                self._run_made_up(step)
            self._update(tuple(NewRow(row, GREEDY) for row in range(self.max_num_seqs)))  # nothing of it is left
        self._lane.finish()
        _log.info("every kind of step was tried in %.1f s", time.perf_counter() - begin)

    def _run_made_up(self, step: MadeUpStep) -> None:
        self._update(step.new_rows)
        self.forward(step.layout, step.rows, step.samples, step.token_ids)

    def _graph_plan(self, sizes: GraphSizes, max_model_len: int) -> GraphPlan:
        return GraphPlan(
            sizes=sizes,
            last_tokens=self._passes.last_tokens,
            pages_per_row=-(-max_model_len // self.page_size),
            page_size=self.page_size,
            num_heads=self.spec.num_heads,
            head_dim=self.spec.head_dim,
        )

    def _measure_graphs(self, capture: Callable[[torch.device], Capture], sizes: GraphSizes, max_model_len: int) -> int:
        """Bytes that all graphs will take, from recording the largest two of each kind on a pool of one page."""
        taken = self._executor.record(self._graph_plan(sizes.largest_two(), max_model_len), capture(self.device))
        self._executor.allocate(1)  # drops them
        if taken is None:
            return 0
        needed = taken.of_all(sizes)
        _log.info("graphs are expected to take %s", show_bytes(needed))
        return needed


def _set_threads(threads: int | None, spec: ModelSpec) -> None:
    """Of the steps of this thread; other engines and the host keep theirs."""
    if threads is None and num_parameters(spec) < SMALL_MODEL:
        threads = 1
    if threads is not None:
        own_threads(threads)


def _dtype(config: EngineConfig, spec: ModelSpec, model_dir: pathlib.Path) -> torch.dtype:
    """Of weights and KV cache: the configured one, else what config.json names, else what the checkpoint holds."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if spec.dtype is None:
        return torch.float32 if config.load_format == "dummy" else checkpoint_dtype(model_dir)
    if spec.dtype not in _DTYPES:
        raise ModelLoadError(f"dtype {spec.dtype!r} in config.json is not supported; choose one of {', '.join(_DTYPES)}")
    return _DTYPES[spec.dtype]
