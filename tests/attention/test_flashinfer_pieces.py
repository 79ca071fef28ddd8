"""Pieces of graphs over a backend that says where keys and values are written: FlashInfer's, over the stand-in for its library."""

from __future__ import annotations

import json
import pathlib

import pytest
from driver import GREEDY, sampled
from eager_capture import EagerCapture, PlannedStep
from flashinfer_standin import StandIn
from workloads import compare_with_eager, random_steps

from aengine.api.config import EngineConfig
from aengine.attention import AttentionMetadata, AttentionSpec
from aengine.attention.flashinfer.backend import FlashInferBackend
from aengine.runner.runner import ModelRunner
from aengine.runner.torch import graphs, loading

pytestmark = pytest.mark.slow

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 1,
    "torch_dtype": "bfloat16",
}


class Backend(FlashInferBackend):
    name = "torch_native"  # whose operations are plain torch

    def __init__(self, spec: AttentionSpec) -> None:
        library = StandIn()
        super().__init__(spec, library, library.event, library.processors)

    def graph_step(self, buffers: AttentionMetadata) -> PlannedStep:
        return PlannedStep(self, buffers)


def test_keys_and_values_are_written_in_the_pieces(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two groups of layers; nothing is left to be written between the pieces."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    monkeypatch.setattr(loading, "select_backend", lambda name, spec: Backend(spec))
    config = EngineConfig(
        model=str(tmp_path),
        device="cpu",
        attention_backend="torch_native",
        load_format="dummy",
        max_num_seqs=24,
        page_size=4,
        kv_cache_memory=16 << 20,
        graph_sizes=(8, 20),
        graph_tokens=120,
    )
    monkeypatch.setattr(graphs._Attention, "write", lambda *given: pytest.fail("left to be written"))
    runner = ModelRunner(config, tmp_path, EagerCapture)
    compared = compare_with_eager(runner)
    random_steps(runner, 1, 24, params=(GREEDY, sampled(1)))
    assert compared.in_pieces > 4
    assert compared.worst < 0.2
