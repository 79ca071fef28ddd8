"""`ExecutorSetup`: what an executor is built from."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch

from aengine.attention import AttentionSpec
from aengine.cache import LayerGroups, PageNeeds, layer_groups
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.kernels.paged_cache import Scoring
from aengine.kernels.quantized import Rows
from aengine.models.choice import AnySpec
from aengine.models.fallback.spec import FallbackSpec, LayerCall
from aengine.models.kv_scales import stored_kv_scales
from aengine.models.named_weights import named_weights
from aengine.models.quantization.config import load_quantization
from aengine.models.sharding import sharded_spec
from aengine.models.spec import Attention, LatentAttention, ModelSpec
from aengine.models.weights import random_weights, stored_weights
from aengine.parallel.driver import DriverRanks
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.replicas import Replicas
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.capture import Capture

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
        """Of a row in a step."""
        return 0 if self.config.speculative == "off" else self.config.max_drafts

    @property
    def max_adapters(self) -> int:
        """Most adapters of the rows of one step of the CPU kernels. 0: none can be loaded."""
        return self.max_num_seqs if self.config.max_adapters is None else self.config.max_adapters

    @property
    def adapter_slots(self) -> int:
        """The same of the torch decoder, which has their memory from the beginning."""
        config = self.config
        if self.is_draft or isinstance(self.spec, FallbackSpec):
            return 0
        wanted = min(len(config.adapters), DEFAULT_ADAPTERS) if config.max_adapters is None else config.max_adapters
        return min(wanted, self.max_num_seqs)

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Of the KV cache; None: `dtype`."""
        return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(self.config.kv_cache_dtype)

    @property
    def weight_form(self) -> str:
        """What logs call the weights: how they are quantised, or their dtype."""
        return self.quantization or str(self.dtype).removeprefix("torch.")

    @property
    def groups(self) -> LayerGroups:
        """Of the layers of this rank's stage. Windows that no sequence outgrows are none."""
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
            weights = stored_weights(spec, self.model_dir, config.load_format, quantization, self.shard, report)
        if self.target is not None:
            lent = named_weights(self.native_spec).keys() - named_weights(spec).keys()
            weights = chain(weights, ((name, parts) for name, parts in self.target._ends() if name in lent))
        for weight in weights:
            check()
            yield weight

    def _ends(self) -> Iterator[tuple[str, tuple[Rows, ...]]]:
        """Embedding and output head of the whole model, as `weights`."""
        without_layers = Shard(num_stages=self.native_spec.num_layers + 1)
        for name, parts in replace(self, shard=without_layers, ranks=None).weights(lambda: None):
            yield name, parts
            if name == "embedding.weight" and self.native_spec.tied_head:
                yield "head.weight", parts

    def attention(self) -> AttentionSpec:
        """Of what the rank holds. Reads the scales of an fp8 KV cache. Raises ModelLoadError."""
        spec, fp8 = self.spec, self.kv_dtype is torch.float8_e4m3fn
        scales = None
        attention: LayerCall | Attention | LatentAttention
        if isinstance(spec, FallbackSpec):
            attention, scoring = spec.attention[0], tuple(call.scoring for call in spec.attention)
            _check_equal_shapes(spec)
        else:
            kinds = [layer.attention for layer in sharded_spec(spec, self.shard).layers]
            attention, scoring = kinds[0], tuple(Scoring(each.scale, each.window, each.soft_cap, each.sinks) for each in kinds)
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
