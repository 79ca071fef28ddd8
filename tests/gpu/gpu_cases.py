"""What the GPU suite runs on: small models that every attention backend can run, and each device with each of its backends.

The cases on a CPU prove the tests; those on CUDA are marked `gpu`. FlashInfer takes neither float32 nor head sizes below 64, so the models
here have heads of 128, and what is compared is logprobs within a tolerance rather than tokens alone.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attention_backends import backend_marks
from eager_capture import EagerCapture
from reference import LLAMA3, TINY, YARN, save_random

from aengine.api.config import EngineConfig
from aengine.runner.runner import ModelRunner

SMALL = {**TINY, "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.06}
FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN}),
    "llama": ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "mistral-windowed": ("Mistral", {"sliding_window": 11}),
}


@dataclass(frozen=True)
class Tolerance:
    """How far logprobs may be from what they should be, and how many greedy tokens must be the reference's."""

    worst: float
    mean: float
    same: float = 0.8


# What rounding to bfloat16 between operations costs these models, measured with torch_native on a CPU, and as much again.
BFLOAT16 = Tolerance(worst=0.3, mean=0.02)
FLOAT32 = Tolerance(worst=5e-4, mean=5e-5)
FLOAT8 = Tolerance(worst=0.8, mean=0.1)  # of the KV cache


@dataclass(frozen=True)
class Case:
    """A way to run a model, and how exact it is."""

    device: str
    backend: str
    dtype: str
    tolerance: Tolerance
    options: dict[str, Any] = field(default_factory=dict)
    records: bool = True  # whether graphs are recorded; on a CPU with what stands in for them

    @property
    def name(self) -> str:
        more = [f"{key}={value}" for key, value in self.options.items()] + ([] if self.records else ["eager"])
        return "-".join([self.device, self.backend, self.dtype, *more])

    def runner(self, model_dir: pathlib.Path, **options: Any) -> ModelRunner:
        settings = {"max_num_seqs": 24, "kv_cache_memory": 64 << 20, "graph_sizes": (1, 2, 4, 8, 16), "graph_tokens": 64}
        config = EngineConfig(
            model=str(model_dir),
            device=self.device,
            dtype=self.dtype,
            attention_backend=self.backend,
            eager=not self.records,
            **{**settings, **self.options, **options},
        )
        return ModelRunner(config, model_dir, EagerCapture if self.device == "cpu" and self.records else None)

    def check(self, differences: np.ndarray) -> None:
        """Of logprobs, all of them at least 0."""
        worst, mean = float(differences.max()), float(differences.mean())
        assert worst <= self.tolerance.worst, (worst, mean, self.tolerance)
        assert mean <= self.tolerance.mean, (worst, mean, self.tolerance)


ON_CPU = (
    Case("cpu", "auto", "float32", FLOAT32, records=False),
    Case("cpu", "torch_native", "float32", FLOAT32),
    Case("cpu", "torch_native", "bfloat16", BFLOAT16, records=False),
)
ON_CUDA = (
    Case("cuda", "torch_native", "float32", FLOAT32),
    Case("cuda", "triton", "float32", FLOAT32),
    Case("cuda", "triton", "bfloat16", BFLOAT16),
    Case("cuda", "triton", "bfloat16", BFLOAT16, records=False),
    Case("cuda", "flashinfer", "bfloat16", BFLOAT16),
    Case("cuda", "flashinfer", "bfloat16", BFLOAT16, records=False),
)
FP8_ON_CUDA = (
    Case("cuda", "triton", "bfloat16", FLOAT8, {"kv_cache_dtype": "fp8"}),
    Case("cuda", "flashinfer", "bfloat16", FLOAT8, {"kv_cache_dtype": "fp8"}),
)


def params(cases: Sequence[Case]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: those on CUDA have the marks of their backend."""
    return [pytest.param(case, id=case.name, marks=backend_marks(case.backend) if case.device == "cuda" else []) for case in cases]


def save_small(family: str, path: pathlib.Path, dtype: str) -> transformers.PreTrainedModel:
    """Makes the family, saves it as `dtype`, and returns the very same weights in float32."""
    prefix, changes = FAMILIES[family]
    return save_random(prefix, {**SMALL, **changes}, path, sum(map(ord, family)), dtype=getattr(torch, dtype)).float()
