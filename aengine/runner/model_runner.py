"""`ModelRunner`: executes plans on one device.

Owns the weights, the KV pool and the state of every row: its last token, its pages, its sampling parameters. A plan changes
what it names and nothing else, so a step uploads only what is new. Knows nothing of requests, queues or why a row runs.
"""

from __future__ import annotations

import logging
import pathlib

import numpy as np
import torch
from numpy.typing import NDArray

from aengine.attention import AttentionMetadata, StepLayout, build_layout
from aengine.config import EngineConfig
from aengine.errors import ConfigError, ModelLoadError
from aengine.models.generation import load_generation
from aengine.models.named_weights import num_parameters
from aengine.models.spec import ModelSpec, load_spec
from aengine.models.weights import checkpoint_dtype
from aengine.runner.executor import ExecutorSetup, StepInput, build_executor
from aengine.runner.in_flight import LaunchedStep
from aengine.runner.memory import cpu_budget, show_bytes, size_pool
from aengine.runner.profile import widest_step
from aengine.runner.prompt_logprobs import PromptScorer, PromptScores
from aengine.runner.upload import upload
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

    def __init__(self, config: EngineConfig, model_dir: pathlib.Path) -> None:
        """Loads the model and sizes the KV pool.

        Raises ModelLoadError, InsufficientMemoryError, or ConfigError for what this model or machine cannot do.
        """
        self.device = _device(config.device)
        self.asynchronous = self.device.type != "cpu"
        self.spec = load_spec(model_dir)
        self.generation = load_generation(model_dir, self.spec)
        self.page_size = config.page_size
        self.max_num_seqs = config.max_num_seqs
        default = ACCELERATOR_TOKENS if self.asynchronous else CPU_TOKENS
        self.max_num_batched_tokens = config.max_num_batched_tokens or max(config.max_num_seqs, default)
        context = self.spec.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > context:
            raise ConfigError.of("max_model_len", f"{config.max_model_len} is more than the model's context of {context} tokens")
        wanted_len = config.max_model_len or context
        if not self.asynchronous:
            _set_threads(config.threads, self.spec)
        with torch.inference_mode():
            self.dtype = _dtype(config, self.spec, model_dir)
            self._executor = build_executor(ExecutorSetup(config, self.spec, model_dir, self.dtype, self.device, wanted_len))
            self._sampler = Sampler(config.max_num_seqs, self.spec.vocab_size, self.device)
            self._scorer = PromptScorer(self.spec.vocab_size, self.device)
            self._last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=self.device)
            budget = config.kv_cache_memory
            if budget is None:
                budget = self._gpu_budget(config, wanted_len) if self.asynchronous else cpu_budget()
            bytes_per_page = self._executor.bytes_per_page()
            pool = size_pool(
                budget, bytes_per_page, self.page_size, self.max_num_seqs, wanted_len, may_shorten=config.max_model_len is None
            )
            self.num_pages, self.max_model_len = pool.num_pages, pool.max_model_len
            self._executor.allocate(self.num_pages)
        if self.max_model_len < wanted_len:
            _log.warning("max_model_len lowered from %d to %d tokens: that is what the KV cache holds", wanted_len, self.max_model_len)
        self._page_table = np.zeros((self.max_num_seqs, -(-self.max_model_len // self.page_size)), dtype=np.int32)
        _log.info(
            "%s: %s weights on %s, %d KV pages of %d tokens (%s)",
            self.spec.architecture,
            str(self.dtype).removeprefix("torch."),
            self.device,
            self.num_pages,
            self.page_size,
            show_bytes(self.num_pages * bytes_per_page),
        )

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Applies the plan's row changes, runs the model over its tokens and samples. Returns before the device is done."""
        with torch.inference_mode():
            self._take_over(plan.new_rows)
            if len(plan.copy_from):
                self._executor.copy_pages(plan.copy_from, plan.copy_to)
            self._page_table[plan.page_rows, plan.page_cols] = plan.page_ids
            layout = build_layout(plan.rows, plan.num_decodes, plan.starts, plan.lengths, self._page_table, self.page_size)
            sampled, scores = self.forward(layout, plan.rows, plan.samples, plan.token_ids)
            return LaunchedStep.of(plan.step, plan.rows[plan.samples], sampled, scores, self._sampler)

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

        Must run in inference mode. Writes the tokens to the rows' last tokens. None where there is nothing to sample or to score.
        """
        sampled = np.flatnonzero(samples)
        sampled_rows = rows[sampled]
        logits_indices = layout.qo_indptr[sampled + 1] - 1
        next_positions = layout.seq_lens[sampled]
        arrays = (
            layout.qo_indptr,
            layout.kv_indptr,
            layout.kv_indices,
            layout.last_page_len,
            layout.slot_mapping,
            layout.positions,
            token_ids,
            rows[: layout.num_decodes],
            logits_indices,
            sampled_rows,
            next_positions,
        )
        *metadata, positions, prompt_ids, decode_rows, indices, device_rows, device_positions = upload(arrays, self.device)
        input_ids = torch.cat((self._last_tokens.index_select(0, decode_rows), prompt_ids)) if layout.num_decodes else prompt_ids
        hidden = self._executor.forward(
            StepInput(AttentionMetadata(layout, *metadata), input_ids, positions, indices, all_hidden=self._scorer.has_prompts)
        )
        scores = self._scorer.score(rows, layout, hidden.logits)
        if len(sampled) == 0:
            return None, scores
        if self._sampler.only_argmax(sampled_rows):
            chosen = SampledTokens(hidden.argmax(indices))
        else:
            chosen = self._sampler.sample(hidden.logits(indices), sampled_rows, next_positions, device_rows, device_positions)
        self._last_tokens.index_copy_(0, device_rows.long(), chosen.tokens.to(torch.int32))
        return chosen, scores

    def close(self) -> None:
        """Releases the weights and the KV cache. The runner cannot be used afterwards."""
        del self._executor, self._sampler, self._scorer, self._last_tokens
        if self.asynchronous:
            torch.cuda.empty_cache()

    def _gpu_budget(self, config: EngineConfig, max_model_len: int) -> int:
        """Bytes that gpu_memory_utilization leaves for KV beside weights, the widest step and other users of the device."""
        self._executor.allocate(1)
        step = widest_step(self.max_num_seqs, self.max_num_batched_tokens, max_model_len, self.page_size)
        self._sampler.update(step.new_rows)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.forward(step.layout, step.rows, step.samples, step.token_ids)
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        ours = torch.cuda.max_memory_reserved(self.device)
        torch.cuda.empty_cache()
        return int(total * config.gpu_memory_utilization) - others - ours


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if available else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not available:
        raise ConfigError.of("device", f"{name!r} is not possible here: torch finds no CUDA device")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError.of("device", f"{name!r} is not possible here: there are {torch.cuda.device_count()} CUDA devices")
    return device


def _set_threads(threads: int | None, spec: ModelSpec) -> None:
    """OpenMP keeps the number per thread that starts parallel work, so this is the step thread's own."""
    if threads is None and num_parameters(spec) < SMALL_MODEL:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def _dtype(config: EngineConfig, spec: ModelSpec, model_dir: pathlib.Path) -> torch.dtype:
    """Of weights and KV cache: the configured one, else what config.json names, else what the checkpoint holds."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if spec.dtype is None:
        return torch.float32 if config.load_format == "dummy" else checkpoint_dtype(model_dir)
    if spec.dtype not in _DTYPES:
        raise ModelLoadError(f"dtype {spec.dtype!r} in config.json is not supported; choose one of {', '.join(_DTYPES)}")
    return _DTYPES[spec.dtype]
