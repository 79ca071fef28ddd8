"""Set-up of a runner: what it refuses, how it sizes itself; and that sampled tokens follow the request alone."""

from __future__ import annotations

import json
import logging
import pathlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from driver import GREEDY, Driver, record_logits, sampled
from reference import greedy, save_tiny
from tensor_sampler import tensor_sampler
from test_greedy import make_runner

from aengine.api.errors import ConfigError, InsufficientMemoryError, ModelLoadError
from aengine.kernels.arrays import BFLOAT16
from aengine.kernels.cpu.ops import KvPool
from aengine.models.cpu.stack import DecoderStack
from aengine.models.loading.hub import resolve_model
from aengine.runner import memory
from aengine.runner.setup import widest_step
from aengine.scheduler.plan import NewRow, RowsFailed

DEMO_PAGE = 5 * 2 * 2 * 64 * 16 * 4  # layers, K and V, KV heads, head_dim, page_size, float32


@pytest.fixture(scope="module")
def demo() -> pathlib.Path:
    return resolve_model("demo")


def test_pool_from_bytes(demo: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="aengine")
    runner = make_runner(demo, kv_cache_memory=300 * DEMO_PAGE + 5)
    assert (runner.num_pages, runner.page_size, runner.max_model_len, runner.max_num_seqs) == (300, 16, 2048, 24)
    assert caplog.messages[-1] == "Qwen3ForCausalLM: float32 weights on cpu, 300 KV pages of 16 tokens (23.44 MiB)"


def test_pool_is_no_larger_than_the_sequences_need(demo: pathlib.Path) -> None:
    assert make_runner(demo, max_num_seqs=3, max_model_len=100, kv_cache_memory=1 << 30).num_pages == 3 * 7 + 1


def test_a_cache_that_the_host_has_no_memory_for_is_refused(demo: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InsufficientMemoryError, match=r"^kv_cache_memory is 1048576\.00 GiB, but this host has [0-9.]+ GiB$"):
        make_runner(demo, kv_cache_memory=1 << 50)
    monkeypatch.setattr(memory, "free_host_memory", lambda: 100 * DEMO_PAGE)
    make_runner(demo, kv_cache_memory=100 * DEMO_PAGE)
    with pytest.raises(
        InsufficientMemoryError, match=r"^the KV cache needs .* MiB of host memory beside what is in use, but .* are available$"
    ):
        make_runner(demo, kv_cache_memory=101 * DEMO_PAGE)


def test_default_pool_is_modest(demo: pathlib.Path) -> None:
    runner = make_runner(demo, kv_cache_memory=None, max_num_seqs=1000)
    assert runner.num_pages * DEMO_PAGE <= 1 << 30


def test_context_is_lowered_to_the_pool_unless_it_was_asked_for(demo: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(demo, kv_cache_memory=11 * DEMO_PAGE)
    assert (runner.num_pages, runner.max_model_len) == (11, 160)
    assert "max_model_len lowered from 2048 to 160 tokens" in caplog.text
    with pytest.raises(
        InsufficientMemoryError, match=r"may take 880\.00 KiB, but one sequence of 500 tokens needs 2\.58 MiB \(32 \+ 1 pages"
    ):
        make_runner(demo, kv_cache_memory=11 * DEMO_PAGE, max_model_len=500)
    with pytest.raises(InsufficientMemoryError, match=r"one sequence of 2 tokens needs 160\.00 KiB"):
        make_runner(demo, kv_cache_memory=DEMO_PAGE)


def test_context_of_the_pool_can_be_used(demo: pathlib.Path) -> None:
    runner = make_runner(demo, kv_cache_memory=11 * DEMO_PAGE, max_num_seqs=1)
    assert len(Driver(runner).generate([list(range(100))], 60)[0]) == 60


def test_context_beyond_the_model_is_refused(demo: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: 2049 is more than the model's context of 2048 tokens") as caught:
        make_runner(demo, max_model_len=2049)
    assert caught.value.field == "max_model_len"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_cuda_without_cuda_is_refused(demo: pathlib.Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device: '{device}' is not possible here"):
        make_runner(demo, device=device)


@pytest.mark.parametrize(
    ("option", "value"), [("attention_backend", "flashinfer"), ("attention_backend", "triton"), ("kv_cache_dtype", "fp8")]
)
def test_what_needs_cuda_is_refused_elsewhere(demo: pathlib.Path, option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: '{value}' needs device cuda"):
        make_runner(demo, **{option: value})


@pytest.mark.parametrize(("options", "expected"), [({}, 512), ({"max_num_seqs": 600}, 600), ({"max_num_batched_tokens": 64}, 64)])
def test_tokens_of_a_step_on_a_cpu(demo: pathlib.Path, options: dict[str, int], expected: int) -> None:
    assert make_runner(demo, **options).max_num_batched_tokens == expected


def test_the_default_number_of_sequences_gives_way_to_the_tokens_of_a_step(demo: pathlib.Path) -> None:
    runner = make_runner(demo, max_num_seqs=None, max_num_batched_tokens=16)
    assert (runner.max_num_seqs, runner.max_num_batched_tokens) == (16, 16)


def test_auto_dtype_is_the_checkpoints(demo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert make_runner(demo, dtype="auto").dtype == BFLOAT16
    save_tiny("qwen2", tmp_path, dtype=torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    for dtype, expected in ((None, np.dtype(np.float32)), ("bfloat16", BFLOAT16)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        assert make_runner(tmp_path, dtype="auto").dtype == expected
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float8"}))
    with pytest.raises(ModelLoadError, match=r"dtype 'float8' in config\.json is not supported"):
        make_runner(tmp_path, dtype="auto")


def test_dummy_weights_need_only_a_config(tmp_path: pathlib.Path) -> None:
    save_tiny("llama-llama3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    outputs = [Driver(make_runner(tmp_path, load_format="dummy", seed=seed)).generate([[1, 2, 3]], 8) for seed in (1, 1, 2)]
    assert outputs[0] == outputs[1] != outputs[2]


def test_two_runners_do_not_disturb_each_other(demo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = save_tiny("mistral-windowed", tmp_path)
    tiny, other = Driver(make_runner(tmp_path)), Driver(make_runner(demo))
    sequence, noise = tiny.add(list(range(30))), other.add(list(range(30)))
    for _ in range(10):
        tiny.run_step([sequence])
        other.run_step([noise])
    assert [sequence.output] == greedy(model, [list(range(30))], 10)


def test_sampled_tokens_follow_the_request_alone(tmp_path: pathlib.Path) -> None:
    """Alone or in a crowd, in any row, prompt whole or in chunks: the same request gives the same tokens."""
    save_tiny("llama", tmp_path)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 199, 20).tolist() for _ in range(6)]
    params = [sampled(1), sampled(2, 0.7, top_p=0.9), GREEDY, sampled(3, top_k=5), sampled(2**64 - 1, min_p=0.1), sampled(1)]
    together = Driver(make_runner(tmp_path), chunk=7).generate(prompts, 12, params)
    alone = [
        Driver(make_runner(tmp_path, page_size=4), seed=9).generate([prompt], 12, one)[0]
        for prompt, one in zip(prompts, params, strict=True)
    ]
    assert together == alone
    reseeded = Driver(make_runner(tmp_path)).generate(prompts[:1], 12, sampled(4))
    assert reseeded[0] != together[0]


def test_noise_is_keyed_by_the_position_of_the_new_token(tmp_path: pathlib.Path) -> None:
    save_tiny("llama", tmp_path)
    runner = make_runner(tmp_path)
    seen = record_logits(runner)
    prompt, one = [5, 6, 7], sampled(11)
    output = Driver(runner).generate([prompt], 5, one)[0]
    sampler = tensor_sampler(1, runner.spec.vocab_size, torch.device("cpu"))
    sampler.update([NewRow(0, one)])
    row = np.zeros(1, dtype=np.int32)
    positions = [np.array([len(prompt) + i], dtype=np.int32) for i in range(5)]
    expected = [
        sampler.sample(logits, row, at, torch.from_numpy(row), torch.from_numpy(at)).tokens.item()
        for logits, at in zip(seen, positions, strict=True)
    ]
    assert output == expected


def test_a_row_that_cannot_be_built_is_told_from_the_others(demo: pathlib.Path) -> None:
    runner = make_runner(demo)
    driver = Driver(runner)
    good, bad = driver.add([1, 2, 3]), driver.add([4, 5], replace(GREEDY, seed=-1))  # no unsigned number
    alone = Driver(runner).generate([[1, 2, 3]], 4)[0]
    with pytest.raises(RowsFailed) as caught:
        driver.run_step([good, bad])
    assert caught.value.errors.keys() == {bad.row}
    assert isinstance(caught.value.errors[bad.row], OverflowError)
    again = Driver(runner)
    assert again.generate([[1, 2, 3]], 4)[0] == alone
    runner.close()


def test_a_step_that_samples_nothing(demo: pathlib.Path) -> None:
    runner = make_runner(demo)
    driver = Driver(runner, chunk=4)
    sequence = driver.add(list(range(10)))
    driver.run_step([sequence])
    assert (sequence.computed, sequence.output) == (4, [])


def test_widest_step_runs_and_leaves_no_trace(tmp_path: pathlib.Path) -> None:
    """What a GPU is measured with: the whole budget, a full context, and no slot written."""
    model = save_tiny("qwen3", tmp_path)
    runner = make_runner(tmp_path, max_num_seqs=6)
    driver = Driver(runner)
    sequence = driver.add(list(range(40)))
    driver.run_step([sequence])
    dummy = widest_step(6, 200, runner.max_model_len, runner.page_size, 1)
    step = dummy.step
    assert (step.layout.num_tokens, step.layout.num_rows) == (200, 6)
    assert step.layout.seq_lens.max() == runner.max_model_len
    last_tokens = runner._executor._model.last_tokens.copy()
    assert len(runner._executor.launch(step).result().tokens) == 6
    runner._executor._model.last_tokens[:] = last_tokens
    for _ in range(7):
        driver.run_step([sequence])
    assert [sequence.output] == greedy(model, [list(range(40))], 8)


def test_close_frees_the_pool(demo: pathlib.Path) -> None:
    runner = make_runner(demo)
    runner.close()
    held = {**vars(runner), **vars(runner._executor)}.values()
    assert not any(isinstance(value, (torch.nn.Module, DecoderStack, KvPool)) for value in held)
    runner.hold(True)  # as a command does that a destructor posts


def test_the_contract_is_light() -> None:
    code = "import sys, aengine.runner.contract; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_transformers_is_not_needed(demo: pathlib.Path) -> None:
    code = (
        "import sys\nfrom aengine.api.config import EngineConfig\nfrom aengine.models.loading.hub import resolve_model\n"
        "from aengine.runner.runner import ModelRunner\n"
        "ModelRunner(EngineConfig(model='demo', device='cpu'), resolve_model('demo'))\n"
        "assert 'transformers' not in sys.modules and 'huggingface_hub' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
