"""`DeviceModel`: a model in torch with its KV pages, and the graphs of its steps. Knows nothing of sampling."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from aengine.api.errors import ModelLoadError
from aengine.attention import AttentionBackend, AttentionMetadata
from aengine.kernels.upload import to_device, upload
from aengine.layers.collectives import Collectives, ExpertExchange
from aengine.models.spec import ModelSpec
from aengine.models.torch.blocks import Weight
from aengine.models.torch.decoder import Decoder, ForwardBatch
from aengine.runner.contract import ReadWeights, Step
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch.buckets import GraphBytes, GraphSizes
from aengine.runner.torch.capture import Capture
from aengine.runner.torch.graphs import Forward
from aengine.runner.torch.loading import TorchModel, load_torch_model, weights_on_host
from aengine.runner.torch.step_graphs import StepGraphs, record_graphs


class DeviceModel:
    def __init__(
        self,
        setup: ExecutorSetup,
        last_tokens: Tensor,
        check: Callable[[], object],
        target: DeviceModel | None = None,
        collectives: Collectives | None = None,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """Loads the model; `check` and errors are those of `build_executor`. `last_tokens`: as of `DecodeGraphs`. `target`: the model of a
        draft head, which must not have run. `collectives` and `exchange`: as of `Decoder`. To be called on the stream of the steps."""
        self._setup = setup
        self._last_tokens = last_tokens
        self.model: TorchModel
        self.backend: AttentionBackend
        of_target = None if target is None else target.model
        self.model, self.backend, self._linears = load_torch_model(setup, check, of_target, collectives, exchange)
        self._is_head = isinstance(setup.spec, ModelSpec) and setup.spec.draft_head is not None
        self.graphs: StepGraphs | None = None

    def prepare_weights(self, read: ReadWeights) -> dict[str, Weight]:
        """Reads weights into host memory, for `use_weights`. May be called from any thread while steps run. Raises ModelLoadError for
        weights that cannot replace the present ones, and InsufficientMemoryError before it reads any."""
        if not isinstance(self.model, Decoder):
            raise ModelLoadError("weights of a model that runs in the code of transformers cannot be replaced")
        prepared = weights_on_host(self._setup, read(self._setup.shard), self._linears)
        self.model.check_same_form(prepared)
        return prepared

    def use_weights(self, prepared: dict[str, Weight]) -> None:
        """Writes them over the present ones, so that graphs stay. To be called on the stream of the steps."""
        assert isinstance(self.model, Decoder)
        self.model.copy(prepared)

    def record(self, sizes: GraphSizes, max_model_len: int, capture: Capture) -> GraphBytes | None:
        """Records graphs of steps over the pages that there are. None: the backend does not support them."""
        setup = self._setup
        pages_per_row = -(-max_model_len // setup.config.page_size)
        rows = setup.max_num_seqs
        recorded = record_graphs(self.model, self.backend, sizes, self._last_tokens, pages_per_row, capture, rows, setup.shard)
        if recorded is None:
            return None
        self.graphs, taken = recorded
        return taken

    def forward(self, step: Step, token_ids: Tensor, inputs: Tensor | None = None) -> Forward:
        """Replays a graph if one holds the step, else runs the model over uploaded arrays. `token_ids` int32 are the step's, on the
        device; `inputs` as of `ForwardBatch`."""
        layout, graphs, next_slots = step.layout, self.graphs, self._next_slots(step)
        if graphs is not None and not step.scores_prompts and self._is_short(step):
            replayed = graphs.decodes.run(step, token_ids, next_slots, inputs)
            if replayed is not None:
                return replayed
        arrays = (
            layout.qo_indptr,
            layout.kv_indptr,
            layout.kv_indices,
            layout.last_page_len,
            layout.slot_mapping,
            layout.positions,
            step.rows[: layout.num_decodes],
            step.logits_indices,
            step.sampled_rows,
            step.next_positions,
        )
        *metadata, positions, decode_rows, logits_indices, rows, next_positions = upload(arrays, self._setup.device)
        input_ids = torch.cat((self._last_tokens.index_select(0, decode_rows), token_ids)) if layout.num_decodes else token_ids
        slots = metadata[-1][0] if isinstance(self.model, Decoder) and self.model.kept is not None else None
        attention = self.backend.plan(AttentionMetadata(layout, *metadata))
        batch = ForwardBatch(input_ids, positions, logits_indices, attention, slots, next_slots, inputs)
        in_pieces = None if graphs is None or graphs.pieces is None else graphs.pieces.forward(batch)
        hidden = self.model(batch) if in_pieces is None else in_pieces

        return Forward(functools.partial(self.model.logits, hidden), logits_indices, rows, next_positions, hidden=hidden)

    def of_stages(self, step: Step, hidden: Tensor) -> Forward:
        """A step, on the first stage, from the hidden states on the device that the last one returns."""
        arrays = step.logits_indices, step.sampled_rows, step.next_positions
        logits_indices, rows, next_positions = upload(arrays, self._setup.device)
        num_tokens = step.layout.num_tokens
        if not step.scores_prompts:
            hidden = hidden.new_zeros(num_tokens, hidden.shape[1]).index_copy_(0, logits_indices.long(), hidden)
        if isinstance(self.model, Decoder) and self.model.adapters is not None:
            self.model.adapters.begin(num_tokens)  # other steps have begun since
        return Forward(functools.partial(self.model.logits, hidden), logits_indices, rows, next_positions, hidden=hidden)

    def _next_slots(self, step: Step) -> Tensor | None:
        """[T] int32 slots where a draft head keeps what it carries to the next position, which it does at the logits indices; -1 elsewhere.
        None for a model that is no draft head."""
        if not self._is_head:
            return None
        next_slots = np.full(step.layout.num_tokens, -1, np.int32)
        if len(step.kept_slots):
            next_slots[step.logits_indices] = step.kept_slots
        return to_device(next_slots, self._setup.device)

    def _is_short(self, step: Step) -> bool:
        """Whether no row has more tokens than one with drafts may have."""
        lengths = np.diff(step.layout.qo_indptr[step.layout.num_decodes :])
        return not np.count_nonzero(lengths > 1 + self._setup.most_drafts)
