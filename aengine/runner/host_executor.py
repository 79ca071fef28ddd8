"""`HostExecutor`: the CPU stack, which runs all layers of a step in one call of our own kernels.

The time that `launch` takes is a visible part of a small model's step, so it does as few operations as it can.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.cpu import ops
from aengine.kernels.cpu.levels import KernelsUnavailableError
from aengine.kernels.cpu.library import Workspace, load_kernels
from aengine.kernels.cpu.pool import KvPool, page_bytes
from aengine.kernels.warm_memory import WarmMemory, lazy_bytes
from aengine.models.cpu_stack import DecoderStack, LastTokens, PreparedStep, unsupported
from aengine.models.weight_bytes import quantized_bytes, weight_bytes
from aengine.runner.base import InFlightStep, IntArray, Step
from aengine.runner.draft_model import DraftModel
from aengine.runner.host_queue import HostQueue
from aengine.runner.memory import check_memory, cpu_budget, free_host_memory, show_bytes
from aengine.runner.prompt_logprobs import PromptScorer
from aengine.runner.results import step_result
from aengine.runner.setup import ExecutorSetup
from aengine.sampling.acceptance import num_accepted_on_host
from aengine.sampling.sampler import SampledTokens, Sampler
from aengine.scheduler.plan import NewRow, StepResult

_log = logging.getLogger("aengine")
_NO_ROWS: IntArray = np.zeros(0, np.int32)


class HostExecutor:
    """Satisfies `Executor`."""

    name = "cpu"

    def __init__(self, setup: ExecutorSetup, warm: WarmMemory | None, check: Callable[[], object]) -> None:
        """As `build_executor`. Raises KernelsUnavailableError before it reads any weights."""
        spec, dtype = setup.native_spec, setup.dtype
        reason = unsupported(spec, dtype)
        if reason is not None:
            raise KernelsUnavailableError(reason)
        kernels = load_kernels()
        workspace = self._workspace = Workspace(kernels, torch.get_num_threads())
        attention = spec.layers[0].attention
        kv_dtype = setup.kv_dtype or dtype
        self._page_shape = (setup.config.page_size, attention.num_kv_heads, attention.key_dim, attention.value_dim, kv_dtype)
        self._layers_per_page = setup.groups.layers_per_page
        quantization = setup.config.quantization
        quantized = quantized_bytes(setup.config, spec, setup.model_dir)
        mapped = setup.config.load_format != "dummy" and setup.config.dtype in ("auto", spec.dtype) and "embedding.weight" not in quantized
        copied = spec.vocab_size * spec.hidden_size * dtype.itemsize if spec.tied_head and not mapped else 0  # beside the packed head
        committed = 0 if warm is None else warm.touched
        weights = sum(weight_bytes(setup.config, spec, dtype.itemsize, quantized).values()) + copied
        self._draft: DraftModel | None = None
        if setup.draft is not None:
            self._draft = DraftModel(setup.draft, workspace, spec.vocab_size)
            weights += self._draft.weight_bytes()
        check_memory(weights, self.bytes_per_page(), setup.needs, setup.config, free_host_memory() + committed)
        allocate = lazy_bytes if warm is None else warm.allocate
        start = time.perf_counter()
        with torch.inference_mode():
            self._stack = DecoderStack(
                workspace,
                spec,
                setup.weights(check),
                setup.max_model_len,
                dtype=dtype,
                groups=setup.groups,
                quantization=quantization,
                allocate=allocate,
            )
            self._sampler = Sampler(
                setup.max_num_seqs, spec.vocab_size, setup.device, draw=lambda logits, params, _: ops.draw(workspace, logits, params)
            )
            if self._draft is not None:
                self._draft.load(check, self._stack)
        self._scorer = PromptScorer(spec.vocab_size, setup.device)
        self._last_tokens = np.zeros(setup.max_num_seqs, dtype=np.int32)  # by row
        self._queue = HostQueue()
        _log.info(
            "CPU kernels: level %s, %d threads, %s of %s weights packed in %.2f s",
            kernels.level.value,
            workspace.threads,
            show_bytes(self._stack.nbytes),
            setup.weight_form,
            time.perf_counter() - start,
        )

    def bytes_per_page(self) -> int:
        own = self._layers_per_page * page_bytes(*self._page_shape)
        return own if self._draft is None else own + self._draft.bytes_per_page()

    def kv_budget(self) -> int:
        return cpu_budget()

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        self._pool = KvPool(self._layers_per_page, num_pages, *self._page_shape)

        if self._draft is not None:
            self._draft.allocate(num_pages)

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        self._queue.compute_through()  # they need the rows as they are
        with torch.inference_mode():
            self._sampler.update(new_rows)
            self._scorer.update(new_rows)

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._queue.compute_through()
        self._pool.copy_pages(self._workspace, sources, destinations)
        if self._draft is not None:
            self._draft.copy_pages(sources, destinations)

    def draft(self, step: Step) -> IntArray:
        assert self._draft is not None
        self._queue.compute_through()
        return self._draft.run(step, self._sampler.draft_params(step.sampled_rows, step.next_positions))

    def launch(self, step: Step) -> InFlightStep:
        layout, rows = step.layout, step.sampled_rows
        num_decodes = layout.num_decodes
        decodes_only = num_decodes == layout.num_rows
        token_ids = np.empty(num_decodes, np.int32)  # filled with last tokens when the step begins
        if not decodes_only:
            token_ids = np.concatenate((token_ids, step.token_ids))
        scores_prompts = self._scorer.has_prompts  # from the hidden states of all tokens
        greedy = not scores_prompts and self._sampler.is_greedy(rows)
        draw_params = None if scores_prompts or greedy else self._sampler.draw_params(rows, step.next_positions)
        kernels_sample = greedy or draw_params is not None
        call = self._stack.prepare(
            self._workspace,
            self._pool,
            layout,
            token_ids,
            np.arange(len(token_ids), dtype=np.int32) if scores_prompts else step.logits_indices,
            greedy=greedy,
            draw_params=draw_params,
            last_tokens=LastTokens(self._last_tokens, step.rows[:num_decodes], rows if kernels_sample else _NO_ROWS),
            kept=None if self._draft is None else self._draft.kept(layout.slot_mapping[0]),
        )
        # Sampling in torch follows otherwise, whose threads then spin on the cores that the next step needs.
        can_run_ahead = kernels_sample and self._workspace.threads > 1
        if kernels_sample:
            make_result = functools.partial(self._kernel_result, step, call)
        else:
            make_result = functools.partial(self._torch_result, step, call, scores_prompts)
        return self._queue.add(call, make_result, can_run_ahead=can_run_ahead, overlaps=can_run_ahead and decodes_only)

    def hold(self, held: bool) -> None:
        self._queue.hold.value = held

    def close(self) -> None:
        self._queue.close()
        del self._stack, self._pool, self._draft, self._sampler, self._scorer

    def _kernel_result(self, step: Step, call: PreparedStep) -> StepResult:
        """The result of a step that the kernels sampled. The next step waits for this, so it uses nothing of torch."""
        assert call.sampled is not None
        tokens = call.sampled.astype(np.int32)
        if step.drafts is None:
            return StepResult(step.number, tokens)
        accepted = num_accepted_on_host(tokens, step.drafts, step.first_samples())
        self._keep_last_tokens(step, tokens, accepted)
        return StepResult(step.number, tokens, accepted=accepted)

    def _keep_last_tokens(self, step: Step, tokens: NDArray[np.int32 | np.int64], accepted: IntArray | None) -> None:
        """Of [m] sampled tokens."""
        if accepted is None:
            self._last_tokens[step.sampled_rows] = tokens
        else:
            firsts = step.first_samples()
            self._last_tokens[step.sampled_rows[firsts]] = tokens[firsts + np.maximum(accepted - 1, 0)]

    def _torch_result(self, step: Step, call: PreparedStep, scores_prompts: bool) -> StepResult:
        """Scores prompts and samples, from the hidden states of a step that the kernels did not sample."""

        def logits(indices: Tensor) -> Tensor:
            assert call.hidden is not None
            return self._stack.logits(self._workspace, call.hidden.index_select(0, indices) if scores_prompts else call.hidden)

        with torch.inference_mode():
            scores = self._scorer.score(step.rows, step.layout, logits)
            sampled: SampledTokens | None = None
            if len(step.sampled_rows):
                rows, positions = torch.from_numpy(step.sampled_rows), torch.from_numpy(step.next_positions)
                sampled_logits = logits(torch.from_numpy(step.logits_indices))
                sampled = self._sampler.sample(sampled_logits, step.sampled_rows, step.next_positions, rows, positions, step.drafts)
                self._keep_last_tokens(step, sampled.tokens.numpy(), None if sampled.accepted is None else sampled.accepted.numpy())
            return step_result(step, sampled, scores, self._sampler)
