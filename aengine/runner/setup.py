"""`ExecutorSetup`: what an executor is built from; and what a configuration has drafts proposed by in the runner, another model or a draft
head."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError, ModelLoadError
from aengine.attention import AttentionSpec
from aengine.cache import LayerGroups, PageNeeds, layer_groups
from aengine.kernels.quantized import Rows
from aengine.models.choice import AnySpec, find_spec
from aengine.models.config.model import load_spec
from aengine.models.draft_heads import eagle_spec, mtp_spec
from aengine.models.fallback.spec import FallbackSpec, LayerCall
from aengine.models.loading.hub import resolve_model
from aengine.models.loading.weights import random_weights, stored_kv_scales, stored_weights
from aengine.models.loading.weights_digest import WeightsDigest
from aengine.models.named_weights import named_weights
from aengine.models.quantization.config import load_quantization
from aengine.models.sharding import sharded_spec
from aengine.models.spec import Attention, HeadKind, LatentAttention, ModelSpec
from aengine.parallel.driver import DriverRanks
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.replicas import Replicas
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.torch.capture import Capture
from aengine.scheduler.drafters import DraftSource

_log = logging.getLogger("aengine")
DEFAULT_ADAPTERS = 8
"""Most adapters of a step of the torch decoder, where nothing is configured."""


@dataclass(frozen=True, slots=True)
class ExecutorSetup:
    config: EngineConfig
    spec: AnySpec
    model_dir: pathlib.Path
    dtype: torch.dtype  # of weights, activations and KV cache
    device: torch.device
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
    def kv_dtype(self) -> torch.dtype | None:
        """The dtype of the KV cache; None: the same as `dtype`."""
        return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(self.config.kv_cache_dtype)

    @property
    def weight_form(self) -> str:
        """What logs call the weights: how they are quantised, or their dtype."""
        return self.quantization or str(self.dtype).removeprefix("torch.")

    @property
    def groups(self) -> LayerGroups:
        """The layers of this rank's stage, grouped by their windows. A window that no sequence outgrows counts as none."""
        windows = self.spec.windows
        groups = layer_groups([None if window is None or self.is_draft or window >= self.max_model_len else window for window in windows])
        return groups if self.shard.num_stages == 1 else groups.of_layers(self.shard.layers(len(windows)))

    @property
    def needs(self) -> PageNeeds:
        return PageNeeds(self.groups.windows, self.config.page_size, self.max_num_batched_tokens)

    def of(self, shard: Shard) -> ExecutorSetup:
        return self if shard == self.shard else replace(self, shard=shard)

    def weights(self, check: Callable[[], object]) -> Iterator[tuple[str, tuple[Rows, ...]]]:
        """Each named weight that the rank holds of the `native_spec` with its parts, read or made when it is asked for. Calls `check`
        before each; raises what that raises, ModelLoadError or ConfigError."""
        spec, config = self.spec, self.config
        assert isinstance(spec, ModelSpec)
        if config.load_format == "dummy":
            weights: Iterator[tuple[str, tuple[Rows, ...]]] = random_weights(spec, self.dtype, self.device, config.seed, self.shard)
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
        spec, fp8 = self.spec, self.kv_dtype is torch.float8_e4m3fn
        scales = None
        attention: LayerCall | Attention | LatentAttention
        if isinstance(spec, FallbackSpec):
            attention, scoring = spec.attention[0], tuple(call.scoring for call in spec.attention)
            _check_equal_shapes(spec)
        else:
            kinds = [layer.attention for layer in sharded_spec(spec, self.shard).layers]
            attention, scoring = kinds[0], tuple(each.scoring for each in kinds)
            if fp8 and self.config.load_format != "dummy":
                scales = stored_kv_scales(spec, self.model_dir, self.config.load_format)
                scales = scales and tuple(scales[index] for index in self.shard.layers(spec.num_layers))
        if fp8:
            _log.info("fp8 KV cache: %s", "its scales are 1" if scales is None else "scaled as the checkpoint says")
        return AttentionSpec(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.key_dim,
            scoring=scoring,
            page_size=self.config.page_size,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=self.kv_dtype,
            kv_scales=scales,
            value_dim=attention.value_dim,
            places=self.groups.places,
            num_groups=len(self.groups.windows),
            latent=isinstance(attention, LatentAttention),
        )


def _check_equal_shapes(spec: FallbackSpec) -> None:
    first = spec.attention[0]
    for call in spec.attention:
        if replace(call, name=first.name, scoring=first.scoring) != first:
            raise ModelLoadError(
                f"{call.name} has {call.num_heads} heads and {call.num_kv_heads} KV heads of {call.key_dim} numbers, {first.name} has"
                f" {first.num_heads} and {first.num_kv_heads} of {first.key_dim}: heads that differ by layer are not supported"
            )


_NOT_NATIVE = "the model runs in the code of transformers, where no hidden states are read"


def with_draft_model(setup: ExecutorSetup) -> ExecutorSetup:
    """The setup, with the draft model or draft head of `EngineConfig.speculative` if there is one. Raises ModelLoadError, and ConfigError
    for one that is not possible."""
    config = setup.config
    if config.speculative in ("off", "ngram"):
        return setup
    named = "speculative_model" if config.speculative_model is not None else "speculative"
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
    if spec.max_position_embeddings < setup.max_model_len:
        lengths = f"{spec.max_position_embeddings} tokens, and sequences may have {setup.max_model_len}"
        return None, f"it has a context of {lengths}: lower max_model_len"
    return replace(setup, spec=spec, model_dir=model_dir), ""
