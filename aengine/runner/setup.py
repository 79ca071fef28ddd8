"""Dummy steps, which read and write no KV but page 0: the widest one, to measure what a device needs besides weights and KV cache, and
warm-up steps with every kind of row, so that no request waits for what a step compiles or loads at its first use (Triton's kernels,
modules of torch and of libraries).

`ExecutorSetup`: what an executor is built from; and what a configuration has drafts proposed by in the runner, another model or a draft
head."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError
from aengine.api.outputs import DraftSource
from aengine.attention import AttentionSpec, IndexShape, StepStates, build_layout
from aengine.cache import LayerGroups, PageNeeds, layer_groups
from aengine.kernels.arrays import FLOAT8, INT4, INT8, torch_dtype
from aengine.kernels.paged_cache import StateLayout
from aengine.kernels.quantized import Rows
from aengine.models.choice import AnySpec, eagle_spec, find_spec, mtp_spec
from aengine.models.config.model_config import load_spec
from aengine.models.fallback import FallbackSpec, LayerCall
from aengine.models.images import ImagePositions
from aengine.models.loading.checkpoint import WeightsDigest
from aengine.models.loading.hub import resolve_model
from aengine.models.loading.weights import stored_kv_scales, stored_weights
from aengine.models.named_weights import named_weights
from aengine.models.quantization.quantization_config import load_quantization
from aengine.models.sharding import random_weights, sharded_spec
from aengine.models.spec import Attention, HeadKind, LatentAttention, ModelSpec
from aengine.parallel.driver import DriverRanks
from aengine.parallel.expert_replicas import Replicas
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.contract import Device, IntArray, Step
from aengine.scheduler.plan import Features, NewRow, RowParams

if TYPE_CHECKING:
    import torch

    from aengine.runner.torch.capture import Capture

GREEDY = RowParams()
_HEAVIEST = RowParams(temperature=1.0, top_p=0.9, logit_bias=((0, 1.0),), logprobs=20)
_PROMPT_LEN = 2
_FEW_TOKENS = (16, 32, 64, 65)


class DummyStep(NamedTuple):
    new_rows: tuple[NewRow, ...]  # to be assigned before
    step: Step


def widest_step(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, page_size: int, num_groups: int, state_pages: int = 0
) -> DummyStep:
    """All tokens of a step's budget over as many rows as may run, all sampled, one of them at the end of its context."""
    count = min(max_num_seqs, max_num_batched_tokens)
    lengths = np.full(count, max_num_batched_tokens // count, dtype=np.int32)
    lengths[0] += max_num_batched_tokens % count
    lengths = np.minimum(lengths, max_model_len).astype(np.int32)
    starts = np.zeros(count, dtype=np.int32)
    starts[0] = max_model_len - lengths[0]
    return _dummy_step([NewRow(row, _HEAVIEST) for row in range(count)], 0, starts, lengths, page_size, num_groups, state_pages)


def warm_up_params(vocab_size: int) -> tuple[RowParams, ...]:
    """One of each kind that the sampler treats in a way of its own, over `vocab_size` >= 2 ids; without grammars, which need a
    vocabulary."""

    def random(**changes: Any) -> RowParams:
        return replace(GREEDY, temperature=1.0, **changes)

    last = vocab_size - 1
    return (
        GREEDY,
        random(),
        random(min_p=0.1),
        random(top_p=0.9),
        random(top_p=0.9, min_p=0.1),
        *(random(top_k=k, top_p=0.9, min_p=0.1) for k in (1, 100, 2000) if k < vocab_size),
        random(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
        random(logit_bias=((0, 1.0),), allowed_token_ids=(0, last), banned_token_ids=(last,), min_tokens=2, stop_ids=(last,)),
        random(bad_words=((last,), (0, last))),
        random(logprobs=20, prompt_logprobs=1),
        random(pooling="mean"),
        random(pooling="last"),
        random(processors=(lambda logits, tokens: None,)),
    )


def warm_up_steps(
    max_num_seqs: int,
    vocab_size: int,
    page_size: int,
    num_groups: int,
    state_pages: int = 0,
    most_drafts: int = 0,
    most_tokens: int = 0,
) -> Iterator[DummyStep]:
    """For as many rows at a time as there may be: a step that computes their prompts, one that decodes some beside prompts, and one that
    decodes all; with speculation also one that verifies a draft of each. Then prompts of few tokens, up to `most_tokens`, for which GPUs
    have kernels of their own."""
    params = warm_up_params(vocab_size)
    tokens = np.zeros(_PROMPT_LEN, dtype=np.int32)
    for begin in range(0, len(params), max_num_seqs):
        new_rows = [NewRow(row, one, _PROMPT_LEN, tokens) for row, one in enumerate(params[begin : begin + max_num_seqs])]
        for num_decodes in (0, len(new_rows) // 2, len(new_rows)):
            decodes = np.arange(len(new_rows)) < num_decodes
            starts = np.where(decodes, _PROMPT_LEN, 0).astype(np.int32)
            lengths = np.where(decodes, 1, _PROMPT_LEN).astype(np.int32)
            yield _dummy_step(new_rows, num_decodes, starts, lengths, page_size, num_groups, state_pages)
        if most_drafts:
            assigned, step = _dummy_step(new_rows, 0, np.zeros_like(lengths), np.full_like(lengths, 2), page_size, num_groups, state_pages)
            rows, positions = np.repeat(step.rows, 2), step.layout.positions
            drafts = np.where(positions == 0, 0, -1).astype(np.int32)
            indices = np.arange(len(rows), dtype=np.int32)
            yield DummyStep(assigned, replace(step, logits_indices=indices, sampled_rows=rows, next_positions=positions + 1, drafts=drafts))
    for length in _FEW_TOKENS:
        if length <= most_tokens:
            lengths = np.array([length], dtype=np.int32)
            yield _dummy_step([NewRow(0, GREEDY)], 0, np.zeros_like(lengths), lengths, page_size, num_groups, state_pages)


def _dummy_step(
    new_rows: Sequence[NewRow], num_decodes: int, starts: IntArray, lengths: IntArray, page_size: int, num_groups: int, state_pages: int
) -> DummyStep:
    count = len(new_rows)
    rows = np.arange(count, dtype=np.int32)
    page_table = np.zeros((num_groups, count, -(-int((starts + lengths).max()) // page_size)), dtype=np.int32)
    layout = build_layout(rows, num_decodes, starts, lengths, page_table, page_size)
    layout.slot_mapping.fill(-1)
    if state_pages:
        layout = replace(layout, states=StepStates.none(count, state_pages))
    token_ids = np.zeros(int(lengths[num_decodes:].sum()), dtype=np.int32)
    ends = layout.qo_indptr[1:] - 1
    scores_prompts = any(bool(new_row.params.features & Features.OF_PROMPTS) for new_row in new_rows[num_decodes:])
    step = Step(0, layout, rows, token_ids, ends, rows, layout.seq_lens, scores_prompts=scores_prompts)
    return DummyStep(tuple(new_rows), step)


_log = logging.getLogger("aengine")
DEFAULT_ADAPTERS = 8
"""Most adapters of a step of the torch decoder, where nothing is configured."""


@dataclass(frozen=True, slots=True)
class ExecutorSetup:
    config: EngineConfig
    spec: AnySpec
    model_dir: pathlib.Path
    dtype: np.dtype[Any]  # of weights, activations and KV cache
    device: Device
    threads: int  # of a step, on a CPU
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens of the longest sequence, unless the KV cache turns out to hold less
    quantization: str = ""  # as in `ModelInfo`
    capture: Callable[[torch.device], Capture] | None = None  # makes what records graphs; None: there are none
    draft: ExecutorSetup | None = None  # of the draft model, if there is one
    shard: Shard = WHOLE  # what this rank holds of the model
    ranks: DriverRanks | FollowerRanks | None = None  # the others, if there are any
    replicas: Replicas | None = None  # the others that share the experts of the model, if there are any
    target: ExecutorSetup | None = None  # of a draft head that reads the embedding and output head of its target whole; ranks hold parts
    digest: WeightsDigest | None = None  # what is read of the model is added to it; of drafts and heads None
    is_draft: bool = False  # a draft model has pages of its own under the numbers of a group of the model that keeps all tokens

    @property
    def native_spec(self) -> ModelSpec:
        """The spec of a model that does not run in the code of transformers."""
        assert isinstance(self.spec, ModelSpec)
        if self.target is None:
            return self.spec
        assert self.spec.draft_head is not None
        return replace(self.spec, tied_head=False, draft_head=replace(self.spec.draft_head, own_embedding=True, own_head=True))

    @property
    def followers(self) -> DriverRanks | None:
        """The ranks that follow this one, if there are any."""
        return self.ranks if isinstance(self.ranks, DriverRanks) else None

    @property
    def num_local(self) -> int:
        """Ranks on this host, this one included, which take from its memory at the same time."""
        return 1 if self.ranks is None else self.ranks.num_local

    @property
    def most_drafts(self) -> int:
        """The most drafts that a row may have in a step; 0: drafts are off."""
        return 0 if self.config.speculative == "off" else self.config.max_drafts

    @property
    def max_adapters(self) -> int:
        """Most adapters of the rows of one step of the CPU kernels. 0: none can be loaded."""
        return self.max_num_seqs if self.config.max_adapters is None else self.config.max_adapters

    @property
    def adapter_slots(self) -> int:
        """Most adapters of the rows of one step of the torch decoder, which takes the memory for so many when it is loaded. 0: none can be
        loaded."""
        config = self.config
        if self.is_draft or isinstance(self.spec, FallbackSpec):
            return 0
        wanted = min(len(config.adapters), DEFAULT_ADAPTERS) if config.max_adapters is None else config.max_adapters
        return min(wanted, self.max_num_seqs)

    @property
    def batch_invariant(self) -> bool:
        """Whether no order of sums may depend on which tokens a step has."""
        return self.config.numerics == "batch_invariant"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The `dtype` of tensors."""
        return torch_dtype(self.dtype)

    @property
    def torch_device(self) -> torch.device:
        """The `device` of tensors."""
        return self.device.of_torch()

    @property
    def kv_dtype(self) -> np.dtype[Any] | None:
        """The dtype of the KV cache; None: the same as `dtype`."""

        return {"fp8": FLOAT8, "int8": INT8, "int4": INT4}.get(self.config.kv_cache_dtype)

    @property
    def weight_form(self) -> str:
        """What logs call the weights: how they are quantised, or their dtype."""
        return self.quantization or self.dtype.name

    @property
    def num_positions(self) -> int:
        """Rows of tables of angles: one for each position, and for each token of a step that has three of its own."""
        images = self.spec.images if isinstance(self.spec, ModelSpec) else None
        mixes = images is not None and images.positions is ImagePositions.GRID
        return self.max_model_len + mixes * self.max_num_batched_tokens

    @property
    def groups(self) -> LayerGroups:
        """The places of layers of this rank's stage, grouped by their windows. A window that no sequence outgrows counts as none."""
        limit = 0 if self.is_draft else self.max_model_len
        windows = [None if window is None or window >= limit else window for window in self.spec.place_windows]
        groups = layer_groups(windows, self.spec.layers_per_place)
        if self.shard.num_stages == 1 or not self.native_spec.attends:
            return groups
        of_layers = self.native_spec.places
        return groups.of_layers(sorted({place for index in self.shard.layers(len(of_layers)) for place in of_layers[index]}))

    @property
    def needs(self) -> PageNeeds:
        return PageNeeds(self.groups.windows, self.config.page_size, self.max_num_batched_tokens, self.state_pages)

    @property
    def states(self) -> StateLayout | None:
        """Where the recurrent states of the layers that this rank holds are in its pages; None: the model has no such layers."""
        if not isinstance(self.spec, ModelSpec) or not self.spec.states:
            return None
        held = sharded_spec(self.spec, self.shard)
        attention, dtype = held.widest_attention, self.kv_dtype or self.dtype
        is_latent = isinstance(attention, LatentAttention)
        width = attention.key_dim if is_latent else min(attention.key_dim, attention.value_dim)
        pieces = self.groups.layers_per_page * (1 if is_latent else 2)
        piece_bytes = self.config.page_size * attention.num_kv_heads * width * dtype.itemsize
        pending = self.most_drafts and self.most_drafts + 1
        return StateLayout.of(held.states, pieces, piece_bytes, self.dtype.itemsize, pending)

    @property
    def index(self) -> IndexShape | None:
        """What chooses some of the tokens of a sequence."""
        attentions = self.spec.attentions if isinstance(self.spec, ModelSpec) else ()
        found = {attention.index for attention in attentions if isinstance(attention, LatentAttention) and attention.index is not None}
        if not found:
            return None
        (index,) = found
        top_k = index.top_k if index.top_k < self.max_model_len else 0
        return IndexShape(index.num_heads, index.head_dim, top_k, self.max_model_len)

    @property
    def state_pages(self) -> int:
        """Pages of a recurrent state, the most that it takes of any rank; 0: the model has no recurrent layers."""
        ranks = {replace(self.shard, stage=stage) for stage in range(self.shard.num_stages)}
        return max(0 if (layout := self.of(rank).states) is None else layout.num_pages for rank in ranks)

    def of(self, shard: Shard) -> ExecutorSetup:
        return self if shard == self.shard else replace(self, shard=shard)

    def weights(self, check: Callable[[], object]) -> Iterator[tuple[str, tuple[Rows, ...]]]:
        """Each named weight that the rank holds of the `native_spec` with its parts, read or made when it is asked for. Calls `check`
        before each; raises what that raises, ModelLoadError or ConfigError."""
        spec, config = self.spec, self.config
        assert isinstance(spec, ModelSpec)
        if config.load_format == "dummy":
            weights: Iterator[tuple[str, tuple[Rows, ...]]] = random_weights(spec, self.dtype, config.seed, self.shard)
        else:
            quantization, report = load_quantization(self.model_dir), None if self.ranks is None else self.ranks.progress
            weights = stored_weights(spec, self.model_dir, config.load_format, quantization, self.shard, report, self.digest)
        if self.target is not None:
            lent = named_weights(self.native_spec).keys() - named_weights(spec).keys()
            weights = chain(weights, ((name, parts) for name, parts in self.target._ends() if name in lent))
        for weight in weights:
            check()
            yield weight

    def _ends(self) -> Iterator[tuple[str, tuple[Rows, ...]]]:
        """Embedding and output head of the whole model, in the form that `weights` has."""
        without_layers = Shard(num_stages=self.native_spec.num_layers + 1)
        for name, parts in replace(self, shard=without_layers, ranks=None).weights(lambda: None):
            yield name, parts
            if name == "embedding.weight" and self.native_spec.tied_head:
                yield "head.weight", parts

    def attention(self) -> AttentionSpec:
        """What attention backends need to know of the layers that this rank holds. Reads the scales of an fp8 KV cache. Raises
        ModelLoadError."""

        spec, fp8 = self.spec, self.kv_dtype == FLOAT8
        scales = None
        kinds: Sequence[LayerCall | Attention | LatentAttention]
        if isinstance(spec, FallbackSpec):
            kinds = spec.attention
        else:
            kinds = sharded_spec(spec, self.shard).attentions
            if fp8 and self.config.load_format != "dummy":
                scales = stored_kv_scales(spec, self.model_dir, self.config.load_format)
                scales = scales and tuple(scales[index] for index in self.shard.layers(spec.num_layers))
        if fp8:
            _log.info("fp8 KV cache: %s", "its scales are 1" if scales is None else "scaled as the checkpoint says")
        groups = self.groups
        heads = [each.heads for each in kinds]
        widest = max(heads, key=lambda each: each.width)
        return AttentionSpec(
            num_heads=widest.num_heads,
            num_kv_heads=widest.num_kv_heads,
            head_dim=widest.key_dim,
            scoring=tuple(each.scoring for each in kinds),
            page_size=self.config.page_size,
            dtype=self.torch_dtype,
            device=self.torch_device,
            kv_dtype=None if self.kv_dtype is None else torch_dtype(self.kv_dtype),
            kv_scales=scales,
            value_dim=widest.value_dim,
            places=groups.places,
            parts=groups.parts,
            heads=tuple(heads) if len(set(heads)) > 1 else (),
            batch_invariant=self.batch_invariant,
            num_groups=len(groups.windows),
            latent=isinstance(kinds[0], LatentAttention),
            states=self.states,
            index=self.index,
        )


_NOT_NATIVE = "the model runs in the code of transformers, where no hidden states are read"


def with_draft_model(setup: ExecutorSetup) -> ExecutorSetup:
    """The setup, with the draft model or draft head of `EngineConfig.speculative` if there is one. Raises ModelLoadError, and ConfigError
    for one that is not possible."""
    config = setup.config
    named = "speculative_model" if config.speculative_model is not None else "speculative"
    if config.speculative in ("off", "ngram"):
        return setup
    draft, reason = _of_checkpoint(setup) if config.speculative_model is None else _of_directory(setup, config.speculative_model)
    head = None if draft is None else draft.native_spec.draft_head
    if head is not None and setup.shard.num_stages > 1:
        draft, reason = None, "it reads hidden states of all stages: choose pipeline_parallel_size 1"
    if draft is not None and None not in setup.groups.windows:
        draft, reason = None, "all layers of the model have windows"
    if draft is not None:
        reads_target = head is not None and setup.shard.size > 1 and not (head.own_embedding and head.own_head)
        return replace(setup, draft=replace(draft, target=setup if reads_target else None, is_draft=True, shard=WHOLE, ranks=None))
    if (named, config.speculative) == ("speculative", "auto"):
        return setup
    raise ConfigError.of(named, f"{getattr(config, named)!r} is not possible: {reason}")


def draft_source(setup: ExecutorSetup) -> DraftSource | None:
    if setup.draft is None:
        return None
    head = setup.draft.native_spec.draft_head
    return DraftSource.MODEL if head is None else DraftSource.MTP if head.kind is HeadKind.MTP else DraftSource.HEAD


def _of_checkpoint(setup: ExecutorSetup) -> tuple[ExecutorSetup | None, str]:
    """The setup of the draft head that an MTP layer of the model is; or None, and why there can be none."""
    if not isinstance(setup.spec, ModelSpec):
        return None, _NOT_NATIVE
    spec = mtp_spec(setup.model_dir, setup.spec, setup.config.load_format)
    if spec is None:
        return None, "the checkpoint carries no MTP layer of a kind that is supported"
    return replace(setup, spec=spec), ""


def _of_directory(setup: ExecutorSetup, model: str) -> tuple[ExecutorSetup | None, str]:
    config = setup.config
    model_dir = resolve_model(model, None, config.load_format)
    if config.speculative == "eagle" or (config.speculative == "auto" and load_spec(model_dir).draft_head is not None):
        if not isinstance(setup.spec, ModelSpec):
            return None, _NOT_NATIVE
        return replace(setup, spec=eagle_spec(model_dir, setup.spec, config.load_format), model_dir=model_dir), ""
    spec = find_spec(model_dir, "native", setup.max_model_len)
    if isinstance(spec, ModelSpec) and (spec.convolutions or spec.states):
        return None, "it has convolutions or recurrent layers, for whose states its pages have no room"
    if spec.max_position_embeddings < setup.max_model_len:
        lengths = f"{spec.max_position_embeddings} tokens, and sequences may have {setup.max_model_len}"
        return None, f"it has a context of {lengths}: lower max_model_len"
    return replace(setup, spec=spec, model_dir=model_dir), ""
