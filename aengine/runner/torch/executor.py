"""`TorchExecutor`: a model in torch over an attention backend, with graphs where they can be recorded. It runs on CUDA, is the reference,
and runs on CPUs without our kernels. `TorchFollower` is one on a rank that follows another one, which samples.

Owns the upload of a step and the rows' last tokens, from which decodes go on without the host, and the step from its launch to its result.

`GraphRecording`: the graphs of all models of an executor.

Owns which sizes are recorded, what follows where one cannot be, and how much memory all will take. To be used on the stream of the steps.
"""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.arrays import Array, as_array, as_tensor, to_device, to_host, upload
from aengine.layers.adapters import PackedAdapter
from aengine.layers.collectives import ExpertExchange
from aengine.models.adapters import Adapter, packed_adapter
from aengine.models.torch.blocks import Weight
from aengine.models.torch.decoder import Decoder
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.messages import Logits
from aengine.runner.contract import InFlightStep, IntArray, LazyStep, ReadWeights, Step
from aengine.runner.memory import cpu_budget, free_host_memory, show_bytes
from aengine.runner.rank_steps import Stages, connect_ranks, connect_replicas
from aengine.runner.results import PromptScorer, PromptScores, step_result
from aengine.runner.setup import GREEDY, DummyStep, ExecutorSetup, warm_up_steps, widest_step
from aengine.runner.torch.asleep import Asleep, DeviceAdapters
from aengine.runner.torch.buckets import GraphBytes, GraphSizes
from aengine.runner.torch.device import DeviceStream, cuda_kv_budget, give_back_memory, give_back_pinned_memory, thread_count
from aengine.runner.torch.graphs import Forward
from aengine.runner.torch.model import PagedTorchModel, TorchDraftModel
from aengine.runner.torch.sampling import ResultBuffer, Results, TorchSampling
from aengine.sampling.arrays import DeviceArrays
from aengine.sampling.draw import log_sums, select_draw
from aengine.sampling.sampler import SampledTokens, Sampler
from aengine.scheduler.drafters import BY_MODEL
from aengine.scheduler.drafts import MOST_BEHIND
from aengine.scheduler.plan import NO_INTS, NewRow, StepResult

_log = logging.getLogger("aengine")


class GraphRecording:
    def __init__(self, setup: ExecutorSetup, models: Sequence[PagedTorchModel], adapters: DeviceAdapters | None) -> None:
        self._setup = setup
        self._models = models
        self._adapters = adapters
        self._capture = setup.capture
        config = setup.config
        self.sizes = GraphSizes.of(
            config.graph_sizes,
            config.graph_tokens,
            setup.max_num_seqs,
            setup.max_num_batched_tokens,
            setup.most_drafts,
            adapters=adapters is not None,
        )

    def record(self, sizes: GraphSizes, max_model_len: int) -> GraphBytes | None:
        """Records graphs of steps over the pages that there are. None: there is nothing that records, or one of decodes could not be
        recorded; then none is used. Raises that error if there are other ranks, which may have graphs. What could not be recorded is not
        tried again."""
        self.drop()
        if self._capture is None:
            return None
        table = None if self._adapters is None else self._adapters.table
        if table is not None:
            table.on = True
        try:
            capture = self._capture(self._setup.torch_device)
            others = replace(sizes, plain=())  # draft heads have no adapters
            taken = [model.record(others if at else sizes, max_model_len, capture, table) for at, model in enumerate(self._models)]
        except Exception as error:  # the same steps run without graphs
            if self._setup.shard.size > 1:
                raise
            _log.warning("no graphs, so that steps take longer: %s", str(error), exc_info=_log.isEnabledFor(logging.DEBUG))
            taken = [None]
        recorded = [one for one in taken if one is not None]
        if len(recorded) < len(taken):
            self.drop()
            self._capture = None
            return None
        every: GraphBytes = functools.reduce(operator.add, recorded)
        kept = {kind: getattr(self.sizes, kind) if getattr(every, kind) else () for kind in ("tokens", "uneven", "plain")}
        self.sizes = replace(self.sizes, **kept)
        return every

    def foresee(self, max_model_len: int) -> int:
        """Bytes that all graphs will take, from recording the largest two of each kind, which are dropped again."""
        taken = self.record(self.sizes.largest_two(), max_model_len)
        self.drop()
        if taken is None:
            return 0
        needed = taken.of_all(self.sizes)
        _log.info("graphs are expected to take %s", show_bytes(needed))
        return needed

    def drop(self) -> None:
        for model in self._models:
            model.graphs = None


Output = tuple[ResultBuffer, SampledTokens | None, PromptScores | None]
"""Tensors are in host memory once the buffer's `wait` has returned."""


_log = logging.getLogger("aengine")


class TorchExecutor:
    """The `Executor` of a model in torch over an attention backend. `TorchFollower` is that of a rank which follows the first one."""

    name = "torch"

    def __init__(self, setup: ExecutorSetup, check: Callable[[], object]) -> None:
        """Connects the ranks and loads the model. Parameters and errors are those of `build_executor`."""
        self._collectives, self._with_replicas = connect_ranks(setup, check), connect_replicas(setup)
        exchange = None if self._with_replicas is None else ExpertExchange(self._with_replicas, setup.shard)
        if self._collectives is not None:
            setup = replace(setup, shard=self._collectives.shard)
        self._setup, self.shard, self.max_adapters = setup, setup.shard, setup.adapter_slots
        self._stream = DeviceStream(setup.torch_device, setup.batch_invariant)
        with self._stream.enter_stream():
            self._last_tokens = torch.zeros(
                setup.max_num_seqs + setup.max_num_batched_tokens + 1, dtype=torch.int32, device=setup.torch_device
            )
            """As of `DecodeGraphs`."""
            self._no_tokens = self._last_tokens[:0]
            self._model = PagedTorchModel(setup, self._last_tokens, check, collectives=self._collectives, exchange=exchange)
            table = self._model.model.adapters if isinstance(self._model.model, Decoder) else None
            self._adapters = None if table is None else DeviceAdapters(table)
            self._draft = None if setup.draft is None else TorchDraftModel(setup.draft, self._model, setup.spec.vocab_size, check)
            self._models = [self._model] if self._draft is None else [self._model, self._draft.model]
            self._recording = GraphRecording(setup, self._models, self._adapters)
            draw = select_draw(setup.spec.vocab_size, setup.torch_device, setup.torch_dtype)
            arrays = DeviceArrays(setup.torch_device)
            self._sampler = Sampler(setup.max_num_seqs, setup.spec.vocab_size, arrays, draw, log_sums)
            model: Any = self._model.model  # of transformers, where it classifies
            label_pooling = getattr(model, "label_pooling", "")
            classify = model.classify if label_pooling else None
            self._scorer = PromptScorer(setup.spec.vocab_size, arrays, log_sums, classify=classify, label_pooling=label_pooling)
            self._sampling = TorchSampling(setup, self._sampler, self._scorer, self._draft, self._last_tokens)
        if setup.replicas is not None and exchange is not None:
            setup.replicas.connect(exchange.begin_step, self._compute_for_others)
        self._stages = Stages.of(setup, self._stage_on_host)
        self._free_buffers: list[ResultBuffer] = []
        self._unstarted: LazyStep[Output] | None = None  # the latest step, on a CPU
        self._asleep: Asleep | None = None

    @property
    def exchange_seconds(self) -> float:
        return 0.0

    def bytes_per_page(self) -> int:
        hidden = 0 if self._draft is None else self._draft.bytes_per_page()
        return hidden + sum(model.backend.bytes_per_page() for model in self._models)

    def kv_budget(self) -> int:
        """On CUDA what is left beside weights, the widest step, graphs, and other users of the device."""
        setup = self._setup
        if setup.torch_device.type == "cpu":
            return cpu_budget() // setup.num_local
        with self._stream.enter_stream():
            self._allocate_pages(1)
            graphs = functools.partial(self._recording.foresee, setup.max_model_len)
            return cuda_kv_budget(setup.torch_device, setup.config.gpu_memory_utilization, self._run_widest, graphs)

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        self._sizes = num_pages, max_model_len
        with self._stream.enter_stream():
            self._allocate_pages(num_pages)
            self._recording.record(self._recording.sizes, max_model_len)
        if self._setup.torch_device.type != "cpu":
            self.warm_up()

    def sleep(self, level: int, pages: IntArray) -> None:
        with self._stream.enter_stream():
            if self._asleep is None:
                available = free_host_memory() // self._setup.num_local
                self._asleep = Asleep(self._models, self._draft, self._adapters, pages, level, available)
            if level == 2:
                self._asleep.drop_weights()

    def wake(self) -> None:
        assert self._asleep is not None
        num_pages, max_model_len = self._sizes
        with self._stream.enter_stream():
            self._asleep.wake(num_pages)
            self._asleep = None
            self._recording.record(self._recording.sizes, max_model_len)

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        self._start_latest()
        with self._stream.enter_stream():
            self._sampler.update(new_rows)
            self._scorer.update(new_rows)

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter:
        assert self._adapters is not None, "max_adapters is not 0"
        return packed_adapter(self._adapters.table, adapter)

    def set_adapter(self, key: int, packed: object | None) -> None:
        assert self._adapters is not None, "max_adapters is not 0"
        assert packed is None or isinstance(packed, PackedAdapter)
        self._start_latest()
        self._adapters.set(key, packed)

    def read_pages(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        self._start_latest()
        with self._stream.enter_stream():
            parts = [part for model in self._models for part in model.backend.read_pages(pages)]
        return np.concatenate([part.view(len(pages), -1).view(torch.uint8).numpy() for part in parts], axis=1, out=out)

    def write_pages(self, pages: IntArray, content: NDArray[np.uint8]) -> None:
        self._start_latest()
        first = 0
        with self._stream.enter_stream():
            for model in self._models:
                parts = []
                for tensor in model.backend.tensors:
                    size = tensor[0].numel() * tensor.itemsize
                    part = torch.from_numpy(np.ascontiguousarray(content[:, first : first + size]))
                    part = part if tensor.itemsize == 1 else part.view(tensor.dtype)
                    parts.append(part.view(len(pages), *tensor.shape[1:]))
                    first += size
                model.backend.write_pages(pages, parts)

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._start_latest()
        with self._stream.enter_stream():
            for model in self._models:
                model.backend.copy_pages(sources, destinations)
            if self._draft is not None:
                self._draft.copy_pages(sources, destinations)

    def prepare_weights(self, read: ReadWeights, threads: int, partial: bool) -> object:
        with torch.inference_mode(), thread_count(threads):
            return self._model.prepare_weights(read, partial)

    def use_weights(self, prepared: object) -> None:
        self._start_latest()
        with self._stream.enter_stream():
            if self._asleep is not None:
                self._asleep.give_weights()
            weights = cast("dict[str, Weight]", prepared)
            self._model.use_weights(weights)
            self._stream.finish()  # the copies read memory of the host
            weights.clear()
            give_back_pinned_memory(self._setup.torch_device)

    def draft(self, step: Step) -> IntArray:
        """The tokens stay on the device until the step in which the model checks them; until then `BY_MODEL` stands for each."""
        assert self._draft is not None
        self._start_latest()
        with self._stream.enter_stream():
            self._draft.run(step, self._sampler)
        return np.full(len(step.sampled_rows), BY_MODEL, np.int32)

    def launch(self, step: Step) -> InFlightStep:
        """On a CPU the step is computed when its result is asked for, so that the results of the step before are reported first; of a step
        of several stages the first one is computed at once."""
        if self._stages is not None:
            return self._stages.launch(step, lambda hidden: self._end(step, as_tensor(hidden)))
        self._start_latest()
        on_cpu = self._setup.torch_device.type == "cpu"
        launched = LazyStep(
            functools.partial(self.start, step),
            lambda output: self.finish(step, *output),
            lambda output: output[0].wait(),
            overlaps=not on_cpu,
        )
        if on_cpu:
            self._unstarted = launched
        else:
            launched.start()
        return launched

    def start(self, step: Step, hidden: Tensor | None = None) -> Output:
        """Puts a step and the copies of its results on the stream, without waiting for the device. `hidden`: as of `_run`."""
        with self._stream.enter_stream():
            self._begin(step)
            if self._setup.replicas is not None:
                self._setup.replicas.begin_step(step.layout.num_tokens)
            output = self._run(step, hidden)
            buffer = (
                self._free_buffers.pop()
                if self._free_buffers
                else ResultBuffer(self._setup.max_num_batched_tokens, self._setup.torch_device)
            )
            return buffer, *buffer.copy(*output)

    def finish(self, step: Step, buffer: ResultBuffer, sampled: SampledTokens | None, scores: PromptScores | None) -> StepResult:
        """The result of a step that has finished. Its buffer can be used again. Raises what happened to another rank, without which there
        are no results, or wrong ones."""
        if self._setup.followers is not None:
            self._setup.followers.check()
        result = step_result(step, sampled, scores, self._sampler)
        self._free_buffers.append(buffer)
        return result

    def hold(self, held: bool) -> None:
        """Changes nothing: a step begins when it is launched, or on a CPU when its result is asked for."""

    def close(self) -> None:
        with suppress(RuntimeError):  # of CUDA: the step that met with it has raised it
            self._stream.finish()
        if self._stages is not None:
            self._stages.close()
            self._stages = None  # which refers to this
        self._unstarted = None
        self._recording.drop()
        if self._collectives is not None:
            self._collectives.close()
            self._collectives = None  # with its connections
        if self._with_replicas is not None:
            self._with_replicas.close()
            self._with_replicas = None
        self._asleep = None
        del (
            self._model,
            self._adapters,
            self._draft,
            self._models,
            self._recording,
            self._sampler,
            self._scorer,
            self._sampling,
            self._last_tokens,
            self._no_tokens,
            self._free_buffers,
        )
        if self._setup.torch_device.type != "cpu":
            give_back_memory(self._setup.torch_device)

    def warm_up(self) -> None:
        """Runs dummy steps with every kind of row, so that no request waits for what is compiled or loaded at its first use, and the widest
        one, whose memory torch keeps for others: what does not fit beside the KV pages is found out now."""
        setup, begin = self._setup, time.perf_counter()
        with self._stream.enter_stream():
            num_groups = self._model.backend.spec.num_groups
            most_tokens = min(setup.max_num_batched_tokens, self._sizes[1])
            sizes = setup.max_num_seqs, setup.spec.vocab_size, setup.config.page_size, num_groups, setup.state_pages
            for dummy in warm_up_steps(*sizes, setup.most_drafts, most_tokens):
                self._run_dummy(dummy)
            self._run_widest()
            self.assign_rows([NewRow(row, GREEDY) for row in range(setup.max_num_seqs)])  # so that no dummy parameters are left
        self._stream.finish()
        _log.info("every kind of step was tried in %.1f s", time.perf_counter() - begin)

    def _compute_for_others(self) -> None:
        with self._stream.enter_stream():
            assert isinstance(self._model.model, Decoder)
            self._model.model.compute_for_others()

    def _start_latest(self) -> None:
        if self._unstarted is not None:
            self._unstarted.start()
            self._unstarted = None

    def _begin(self, step: Step) -> None:
        if self._adapters is not None:
            self._adapters.begin(step)

    def _stage_on_host(self, step: Step, inputs: Array | None) -> Array:
        return as_array(self._stage(step, None if inputs is None else as_tensor(inputs)))

    def _stage(self, step: Step, inputs: Tensor | None) -> Tensor:
        """Computes this stage of a step, as `Compute` says: `inputs` are the hidden states of the stage before, None on the first stage."""
        with self._stream.enter_stream():
            self._begin(step)
            given = None if inputs is None else inputs.to(self._setup.torch_device)
            forward = self._model.forward(step, self._token_ids(step), given)
            hidden = forward.hidden
            assert hidden is not None
            at_indices = self._setup.shard.is_last_stage and not step.scores_prompts
            return to_host(hidden.index_select(0, forward.logits_indices) if at_indices else hidden)

    def _end(self, step: Step, hidden: Tensor) -> StepResult:
        """The result of a step of several stages, on the first one, from the `hidden` states that the last stage returns."""
        with self._stream.enter_stream():
            given = hidden.to(self._setup.torch_device)
        output = self.start(step, given)
        output[0].wait()
        return self.finish(step, *output)

    def _run(self, step: Step, hidden: Tensor | None = None) -> Results:
        """Runs the model and what follows from its logits, on all ranks in the same order; what follows alone if `hidden` are what the last
        stage returns. To be called on the stream."""
        forward = self._model.forward(step, self._token_ids(step)) if hidden is None else self._model.of_stages(step, hidden)
        results = self._results(step, forward)
        if self._collectives is not None and len(step.sampled_rows):
            self._collectives.broadcast(self._last_tokens[: self._setup.max_num_seqs])
        return results

    def _results(self, step: Step, forward: Forward) -> Results:
        """Samples from what the model made of a step, and scores its prompts, on the device."""
        return self._sampling.results(step, forward)

    def _token_ids(self, step: Step) -> Tensor:
        """The ids of a step's chunks, int32 on the device, with the drafts that the draft model of the first rank proposed."""
        if not len(step.token_ids):
            return self._no_tokens
        (token_ids,) = upload((step.token_ids,), self._setup.torch_device)
        layout, at = step.layout, np.flatnonzero(step.token_ids == BY_MODEL)
        if not len(at):
            return token_ids
        if self._draft is not None:
            rows = np.repeat(step.rows, np.diff(layout.qo_indptr))
            token_ids = self._draft.fill(token_ids, at, rows[layout.num_decodes + at], layout.positions[layout.num_decodes + at])
        if self._collectives is not None:
            self._collectives.broadcast(token_ids)
        return token_ids

    def _run_widest(self) -> None:
        setup, num_groups = self._setup, self._model.backend.spec.num_groups
        sizes = setup.max_model_len, setup.config.page_size, num_groups, setup.state_pages
        widest = widest_step(setup.max_num_seqs, setup.max_num_batched_tokens, *sizes)
        self.assign_rows(widest.new_rows)
        self._run_alone(widest.step)
        if self._draft is not None:
            tokens = setup.max_num_batched_tokens + MOST_BEHIND * setup.max_num_seqs
            self._draft.run(widest_step(setup.max_num_seqs, tokens, *sizes).step, self._sampler)

    def _run_dummy(self, dummy: DummyStep) -> None:
        self.assign_rows(dummy.new_rows)
        step = dummy.step
        if self._draft is not None:
            self._draft.run(step, self._sampler)
            if step.drafts is not None and self._collectives is None:  # other ranks do not know of the draft model
                by_model = np.full_like(step.drafts, BY_MODEL)  # each token is sampled
                step = replace(step, token_ids=by_model, drafts=by_model)
        self._run_alone(step)

    def _run_alone(self, step: Step) -> None:
        """Runs a dummy step without the other stages."""
        shard = self._setup.shard
        if shard.num_stages == 1:
            self._run(step)
            return
        zeros = torch.zeros(step.layout.num_tokens, self._setup.native_spec.hidden_size, dtype=self._setup.torch_dtype)
        self._stage(step, zeros if shard.stage else None)
        if shard.stage == 0:
            count = len(zeros) if step.scores_prompts else len(step.logits_indices)
            self._run(step, zeros[:count].to(self._setup.torch_device))

    def _allocate_pages(self, num_pages: int) -> None:
        for model in self._models:
            model.backend.allocate(num_pages)
        if self._draft is not None:
            self._draft.allocate(num_pages)


class TorchFollower(TorchExecutor):
    """Takes part in what all ranks compute together: the steps of the model, and the logits that the first rank samples from. Its last
    tokens are those of the first rank."""

    def __init__(self, setup: ExecutorSetup, ranks: FollowerRanks, check: Callable[[], object]) -> None:
        """Loads this rank's part of the model, as `TorchExecutor` does, and no draft model. `ranks` receives what the first rank says
        during a step."""
        super().__init__(replace(setup, draft=None), check)
        self._ranks = ranks
        self._nothing = ResultBuffer(0, setup.torch_device)

    def assign_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Does nothing: rows matter to sampling alone, which the first rank does."""

    def start(self, step: Step, hidden: Tensor | None = None) -> Output:
        with self._stream.enter_stream():
            self._begin(step)
            return self._nothing, *self._run(step, hidden)

    def finish(self, step: Step, buffer: ResultBuffer, sampled: SampledTokens | None, scores: PromptScores | None) -> StepResult:
        return StepResult(step.number, NO_INTS)

    def _results(self, step: Step, forward: Forward) -> Results:
        told = step.scores_prompts or self._setup.shard.num_stages > 1
        while told and isinstance(message := self._ranks.receive(), Logits):
            forward.logits(to_device(message.indices, self._setup.torch_device))
        if len(step.sampled_rows) and forward.greedy is None:  # else a graph has computed them
            forward.logits(forward.logits_indices)
        return None, None
