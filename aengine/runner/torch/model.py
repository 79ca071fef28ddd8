"""`PagedTorchModel`: a model in torch with its KV pages, and the graphs of its steps. Knows nothing of sampling.

`TorchDraftModel`: in torch, a smaller model of the same vocabulary or a draft head. It proposes tokens for the model to check,
which stay on the device.

`record_graphs`: all graphs of a model on one device, and the memory that they take."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.api.errors import ModelLoadError
from aengine.attention import AttentionBackend, AttentionMetadata
from aengine.kernels.arrays import as_tensor, to_device, upload
from aengine.layers.adapters import AdapterTable
from aengine.layers.collectives import Collectives, ExpertExchange
from aengine.models.choice import draft_token_ids
from aengine.models.images import StepImages
from aengine.models.spec import ModelSpec
from aengine.models.torch.blocks import Weight
from aengine.models.torch.decoder import Decoder, ForwardBatch, ImageTensors
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.contract import IntArray, ReadWeights, Step
from aengine.runner.memory import show_bytes
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch.buckets import GraphBytes, GraphSizes
from aengine.runner.torch.capture import Capture
from aengine.runner.torch.graphs import DecodeGraphs, Forward, PiecewiseGraphs
from aengine.runner.torch.loading import TorchModel, load_torch_model, weights_on_host
from aengine.sampling.draw import select_draw
from aengine.sampling.sampler import Sampler

_log = logging.getLogger("aengine")


class StepGraphs(NamedTuple):
    decodes: DecodeGraphs
    pieces: PiecewiseGraphs | None


class _Kind(NamedTuple):
    """Graphs of one kind: `record` makes that of a size, or refuses."""

    record: Callable[[int], bool]
    sizes: tuple[int, ...]
    what: str


def record_graphs(
    model: TorchModel,
    backend: AttentionBackend,
    sizes: GraphSizes,
    last_tokens: Tensor,
    pages_per_row: int,
    capture: Capture,
    num_rows: int,
    shard: Shard = WHOLE,
    adapters: AdapterTable | None = None,
) -> tuple[StepGraphs, GraphBytes] | None:
    """Graphs of all sizes, the largest recorded first; at least one of decodes. None: the attention backend does not support graphs.

    `last_tokens`, `pages_per_row`, `num_rows`, `shard`, `adapters`: as of `DecodeGraphs`. If one of decodes cannot be recorded, an error
    says which; none may be used then. If one of another kind cannot be, a warning does, and there are none of this kind. With other ranks,
    which may have them, that is an error, too.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    begin = time.perf_counter()
    before = capture.memory()
    decodes = DecodeGraphs(model, backend, sizes, last_tokens, pages_per_row, capture, num_rows, shard, adapters)
    pieces = PiecewiseGraphs(model, backend, sizes.tokens, capture, shard) if sizes.tokens else None
    buffers = capture.memory() - before
    record_others = _record if shard.size > 1 else _record_or_warn
    count = sum(map(len, sizes.kinds))
    with capture.session(), tqdm(total=count, desc="Recording graphs", unit="graph", leave=False, disable=not sys.stderr.isatty()) as bar:
        of_rows = _record(_Kind(decodes.record, sizes.rows, "sequences"), capture, bar.update)
        if not of_rows:
            _log.info("no graphs: the attention backend %s does not support them", backend.name)
            return None
        of_tokens = () if pieces is None else record_others(_Kind(pieces.record, sizes.tokens, "tokens"), capture, bar.update)
        of_uneven = record_others(_Kind(decodes.record_uneven, sizes.uneven, "uneven sequences"), capture, bar.update)
        of_plain = record_others(_Kind(decodes.record_plain, sizes.plain, "sequences without adapters"), capture, bar.update)
    if not of_uneven:
        decodes.drop_uneven()
    if not of_plain:
        decodes.drop_plain()
    taken = GraphBytes(buffers, of_rows, of_tokens, of_uneven, of_plain)
    _log.info(
        "recorded graphs of decode steps for %s sequences%s%s and of steps for %s tokens in %.1f s: %s",
        _range(sizes.rows),
        f", or {_range(sizes.uneven)} of uneven lengths," if of_uneven else "",
        f", or {_range(sizes.plain)} without adapters," if of_plain else "",
        _range(sizes.tokens if of_tokens else ()),
        time.perf_counter() - begin,
        show_bytes(taken.total()),
    )
    return StepGraphs(decodes, pieces if of_tokens else None), taken


def _record(kind: _Kind, capture: Capture, progress: Callable[[], object]) -> tuple[int, ...]:
    """The bytes that each graph of a kind takes, largest first; empty if one is refused. Calls `progress` after each."""
    taken, used = [], capture.memory()
    for size in reversed(kind.sizes):
        try:
            if not kind.record(size):
                return ()
        except Exception as error:
            raise RuntimeError(f"recording a graph for {size} {kind.what} failed: {error}") from error
        before, used = used, capture.memory()
        taken.append(used - before)
        progress()
    return tuple(taken)


def _record_or_warn(kind: _Kind, capture: Capture, progress: Callable[[], object]) -> tuple[int, ...]:
    """The bytes that each graph of a kind takes, as of `_record`; empty, with a warning, if one cannot be recorded."""
    try:
        return _record(kind, capture, progress)
    except RuntimeError as error:
        told = _log.isEnabledFor(logging.DEBUG)
        # Not the error itself: a handler that keeps records would keep what is to be freed.
        _log.warning("no graphs for %s, so that such steps take longer: %s", kind.what, str(error), exc_info=told)
        return ()


def _range(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}..{sizes[-1]} ({len(sizes)})" if sizes else "no"


class PagedTorchModel:
    def __init__(
        self,
        setup: ExecutorSetup,
        last_tokens: Tensor,
        check: Callable[[], object],
        target: PagedTorchModel | None = None,
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

    def prepare_weights(self, read: ReadWeights, partial: bool) -> dict[str, Weight]:
        """Reads weights into host memory, for `use_weights`. May be called from any thread while steps run. Raises ModelLoadError for
        weights that cannot replace the present ones, and InsufficientMemoryError before it reads any."""
        if not isinstance(self.model, Decoder):
            raise ModelLoadError("weights of a model that runs in the code of transformers cannot be replaced")
        prepared = weights_on_host(self._setup, read(self._setup.shard), self._linears, partial)
        self.model.check_same_form(prepared)
        return prepared

    def use_weights(self, prepared: dict[str, Weight]) -> None:
        """Writes them over the present ones, so that graphs stay. To be called on the stream of the steps."""
        assert isinstance(self.model, Decoder)
        self.model.copy(prepared)

    def record(self, sizes: GraphSizes, max_model_len: int, capture: Capture, adapters: AdapterTable | None) -> GraphBytes | None:
        """Records graphs of steps over the pages that there are. None: the backend does not support them. `adapters`: those of the model,
        which are on."""
        setup = self._setup
        pages_per_row = -(-max_model_len // setup.config.page_size)
        rows = setup.max_num_seqs
        recorded = record_graphs(self.model, self.backend, sizes, self._last_tokens, pages_per_row, capture, rows, setup.shard, adapters)
        if recorded is None:
            return None
        self.graphs, taken = recorded
        return taken

    def forward(self, step: Step, token_ids: Tensor, inputs: Tensor | None = None) -> Forward:
        """Replays a graph if one holds the step, else runs the model over uploaded arrays. `token_ids` int32 are the step's, on the
        device; `inputs` as of `ForwardBatch`."""
        layout, graphs, next_slots = step.layout, self.graphs, self._next_slots(step)
        if graphs is not None and step.images is None and not step.scores_prompts and self._is_short(step):
            replayed = graphs.decodes.run(step, token_ids, next_slots, inputs)
            if replayed is not None:
                return replayed
        arrays = (
            layout.qo_indptr,
            layout.kv_indptr,
            layout.kv_indices,
            layout.last_page_len,
            layout.slot_mapping,
            step.angles,
            step.rows[: layout.num_decodes],
            step.logits_indices,
            step.sampled_rows,
            step.next_positions,
        )
        *metadata, positions, decode_rows, logits_indices, rows, next_positions = upload(arrays, self._setup.torch_device)
        input_ids = torch.cat((self._last_tokens.index_select(0, decode_rows), token_ids)) if layout.num_decodes else token_ids
        slots = metadata[-1][0] if isinstance(self.model, Decoder) and self.model.kept is not None else None
        attention = self.backend.plan(AttentionMetadata(layout, *metadata))
        images = None if step.images is None else self._upload_images(step.images)
        if step.images is not None and images is not None:
            input_ids.index_fill_(0, images.tokens, self._layer_input_id(step.images))
        batch = ForwardBatch(input_ids, positions, logits_indices, attention, slots, next_slots, inputs, images)
        in_pieces = None if graphs is None or graphs.pieces is None or images is not None else graphs.pieces.forward(batch)
        hidden = self.model(batch) if in_pieces is None else in_pieces

        return Forward(functools.partial(self.model.logits, hidden), logits_indices, rows, next_positions, hidden=hidden)

    def _upload_images(self, images: StepImages) -> ImageTensors:
        """A step's images on the device; tables of angles get the rows that the step names."""
        assert isinstance(self.model, Decoder)
        device, dtype = self._setup.torch_device, self._setup.torch_dtype
        self.model.mix_positions(images.first_mixed, torch.from_numpy(images.mixed))
        rows = as_tensor(images.rows).to(device, dtype)
        additions = None if images.additions is None else as_tensor(images.additions).to(device, dtype)
        return ImageTensors(to_device(images.tokens.astype(np.int64), device), rows, additions)

    def _layer_input_id(self, images: StepImages) -> int:
        described = self._setup.native_spec.images
        return images.placeholder if described is None or described.layer_input_id is None else described.layer_input_id

    def of_stages(self, step: Step, hidden: Tensor) -> Forward:
        """A step, on the first stage, from the hidden states on the device that the last one returns."""
        arrays = step.logits_indices, step.sampled_rows, step.next_positions
        logits_indices, rows, next_positions = upload(arrays, self._setup.torch_device)
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
        return to_device(next_slots, self._setup.torch_device)

    def _is_short(self, step: Step) -> bool:
        """Whether no row has more tokens than one with drafts may have."""
        lengths = np.diff(step.layout.qo_indptr[step.layout.num_decodes :])
        return not np.count_nonzero(lengths > 1 + self._setup.most_drafts)


class TorchDraftModel:
    """Has KV pages of its own, with the numbers of the model's. For a head there are hidden states beside them, a row for each slot."""

    def __init__(self, setup: ExecutorSetup, target: PagedTorchModel, vocab_size: int, check: Callable[[], object]) -> None:
        """`setup` is the draft model's, `target` and `vocab_size` are the model's. To be called on the stream of the steps. Raises what
        loading raises."""
        device = setup.torch_device
        self._device = device
        self._vocab_size = vocab_size
        self._draft_vocab_size = setup.spec.vocab_size
        self._most = setup.most_drafts
        self._last_tokens = torch.zeros(setup.max_num_seqs + setup.max_num_batched_tokens + 1, dtype=torch.int32, device=device)
        self._proposed = torch.zeros(setup.max_num_seqs * self._most, dtype=torch.int32, device=device)
        """By row, a draft at position p of a sequence at p % `most_drafts`: no row has more in a step."""
        self.model = PagedTorchModel(setup, self._last_tokens, check, target)
        self._draw = select_draw(self._draft_vocab_size, device, setup.torch_dtype)
        ids = draft_token_ids(setup.native_spec, setup.model_dir, setup.config.load_format)
        self._token_ids = None if ids is None else to_device(ids, device)  # of the logits, where these are of some tokens alone
        self._page_size, self._dtype = setup.config.page_size, setup.torch_dtype
        decoder = self.model.model
        self._kept = decoder.kept if isinstance(decoder, Decoder) else None
        self._kept_width = 0 if self._kept is None else setup.native_spec.hidden_size

    def bytes_per_page(self) -> int:
        """Bytes of the hidden states of one page, which come beside its KV; 0 for a model that is no draft head."""
        return self._page_size * self._kept_width * self._dtype.itemsize

    def allocate(self, num_pages: int) -> None:
        """Allocates the hidden states of `num_pages` pages, zeroed. Does nothing for a model that is no draft head."""
        if self._kept is not None:
            self._kept.states = torch.zeros(num_pages * self._page_size, self._kept_width, dtype=self._dtype, device=self._device)

    def free(self) -> None:
        if self._kept is not None:
            self._kept.states = self._kept.states.new_empty(0)

    def read_pages(self, pages: IntArray) -> Tensor | None:
        """The hidden states of these pages, in host memory, for `write_pages`; None for a model that is no draft head."""
        if self._kept is None:
            return None
        return self._kept.states.view(-1, self._page_size, self._kept_width).index_select(0, to_device(pages, self._device)).cpu()

    def write_pages(self, pages: IntArray, content: Tensor | None) -> None:
        if self._kept is not None and content is not None:
            write = to_device(pages, self._device).long()
            self._kept.states.view(-1, self._page_size, self._kept_width).index_copy_(0, write, content.to(self._device))

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        """Copies the hidden states of page sources[i] to page destinations[i]. Does nothing for a model that is no draft head."""
        if self._kept is not None:
            pages = self._kept.states.view(-1, self._page_size, self._kept_width)
            read, write = upload((sources, destinations), self._device)
            pages.index_copy_(0, write.long(), pages.index_select(0, read))

    def run(self, step: Step, sampler: Sampler) -> None:
        """Proposes the tokens that are sampled in the step, with the noise of the model, so that both likely draw the same. Decodes go on
        from what was proposed last for their rows.

        Vocabularies may be padded differently: ids that it does not have become its last one, and those that the model does not have
        the model's last one.
        """
        (token_ids,) = upload((np.minimum(step.token_ids, self._draft_vocab_size - 1),), self._device)
        forward = self.model.forward(step, token_ids)
        if not len(step.sampled_rows):
            return
        params = sampler.draft_params(step.sampled_rows, step.next_positions)
        tokens = None if forward.greedy is None else forward.greedy.tokens
        if params is not None or tokens is None:
            logits = self._of_all(forward.logits(forward.logits_indices))
            on_device = sampler.device_params(forward.rows, forward.next_positions)
            tokens = logits.argmax(-1) if params is None else self._draw(logits, params, on_device, None)
        elif self._token_ids is not None:
            tokens = self._token_ids.index_select(0, tokens)
        tokens = tokens.to(torch.int32)
        self._last_tokens.index_copy_(0, forward.rows.long(), tokens)
        at = forward.rows * self._most + forward.next_positions % self._most
        self._proposed.index_copy_(0, at.long(), tokens.clamp(max=self._vocab_size - 1))

    def _of_all(self, logits: Tensor) -> Tensor:
        """The logits of all tokens: the noise of a token belongs to its id among all."""
        if self._token_ids is None:
            return logits
        return logits.new_full((len(logits), self._draft_vocab_size), -math.inf).index_copy_(1, self._token_ids, logits)

    def fill(self, token_ids: Tensor, at: NDArray[np.int64], rows: IntArray, positions: IntArray) -> Tensor:
        """[n] int32 ids, those `at` these indices replaced by what was proposed for `rows` at `positions`."""
        if not len(at):
            return token_ids
        places, proposed = upload((at.astype(np.int32), rows * self._most + positions % self._most), self._device)
        return token_ids.index_copy(0, places.long(), self._proposed.index_select(0, proposed))
