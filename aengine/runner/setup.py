"""`ExecutorSetup`: what an executor is built from."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.attention import AttentionSpec
from aengine.config import EngineConfig
from aengine.kernels.paged_cache import Scoring
from aengine.models.kv_scales import stored_kv_scales
from aengine.models.spec import ModelSpec
from aengine.models.weights import random_weights, stored_weights
from aengine.runner.capture import Capture

_log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True)
class ExecutorSetup:
    config: EngineConfig
    spec: ModelSpec
    model_dir: pathlib.Path
    dtype: torch.dtype  # of weights, activations and KV cache
    device: torch.device
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens of the longest sequence, unless the KV cache turns out to hold less
    capture: Callable[[torch.device], Capture] | None = None  # makes what records graphs; None: there are none

    def weights(self, check: Callable[[], object]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Each named weight with its parts, read or made when it is asked for. Calls `check` before each; raises what that raises, or
        ModelLoadError."""
        if self.config.load_format == "dummy":
            weights = random_weights(self.spec, self.dtype, self.device, self.config.seed)
        else:
            weights = stored_weights(self.spec, self.model_dir, self.config.load_format)
        for weight in weights:
            check()
            yield weight

    def attention(self) -> AttentionSpec:
        """Reads the scales of an fp8 KV cache. Raises ModelLoadError."""
        spec, fp8 = self.spec, self.config.kv_cache_dtype == "fp8"
        attention = spec.layers[0].attention
        scales = stored_kv_scales(spec, self.model_dir, self.config.load_format) if fp8 and self.config.load_format != "dummy" else None
        if fp8:
            _log.info("fp8 KV cache: %s", "its scales are 1" if scales is None else "scaled as the checkpoint says")
        return AttentionSpec(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.key_dim,
            scoring=tuple(
                Scoring(each.scale, each.window, each.soft_cap, each.sinks) for each in (layer.attention for layer in spec.layers)
            ),
            page_size=self.config.page_size,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=torch.float8_e4m3fn if fp8 else None,
            kv_scales=scales,
        )
