"""From the start to steps in graphs as on CUDA, on a device without numbers: how much memory is found, what is recorded, and which graphs
steps of even and of uneven lengths replay."""

from __future__ import annotations

import json
import logging
import pathlib
import sys
from typing import Any

import pytest
from driver import Driver
from fake_cuda import FakeCuda
from triton_mode import INTERPRETED

from aengine.api.config import EngineConfig
from aengine.runner.runner import ModelRunner

pytestmark = [pytest.mark.skipif(not INTERPRETED, reason="there is a device"), pytest.mark.slow]

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def make_runner(path: pathlib.Path, backend: str, **options: Any) -> ModelRunner:
    (path / "config.json").write_text(json.dumps(MODEL))
    settings = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "attention_backend": backend, **options}
    return ModelRunner(EngineConfig(model=str(path), **settings), path)


def test_the_kv_cache_gets_what_is_left(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of 80 GiB others have 10, and the widest step takes 1."""
    caplog.set_level(logging.INFO, logger="aengine")
    with FakeCuda().active():
        runner = make_runner(tmp_path, "triton", gpu_memory_utilization=0.2, max_num_seqs=256, graph_sizes=(8, 24, 40), graph_tokens=48)
        per_token = 2 * 2 * 8 * 64 * 2
        assert runner.num_pages == (5 << 30) // (16 * per_token)
        start = [message for message in caplog.messages if "graphs" in message]
        assert [message.partition(" tokens in ")[0] for message in start] == [
            "recorded graphs of decode steps for 24..40 (2) sequences and of steps for 32..48 (2)",
            "graphs are expected to take 0 bytes",
            "recorded graphs of decode steps for 8..40 (3) sequences and of steps for 16..48 (3)",
        ]
        assert len(Driver(runner).generate([[1, 2, 3]], 3)[0]) == 3


@pytest.mark.parametrize("eager", [False, True])
def test_uneven_decodes_beside_flashinfer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    """One long row among short ones is computed by our kernel, all short ones by FlashInfer's; without waiting for the device."""
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "flashinfer", fake.library())
    options = {"kv_cache_memory": 64 << 20, "max_num_seqs": 48, "graph_sizes": (8, 48), "graph_tokens": 0, "max_num_batched_tokens": 8192}
    with fake.active():
        runner = make_runner(tmp_path, "flashinfer", eager=eager, **options)
        driver = Driver(runner)
        rows = [driver.add([1] * length) for length in (4000, *[9] * 40)]
        driver.run_step(rows)
        fake.strict = True
        for step, kernels in ((rows, {"decode_kernel", "combine_kernel"}), (rows[1:], {"attention", "merge_states"})):
            fake.launches.clear()
            replays = fake.replays
            driver.run_step(step)
            assert {"decode_kernel", "combine_kernel", "attention", "merge_states"}.intersection(fake.launches) == kernels
            assert fake.replays == replays + (not eager)
        fake.strict = False
