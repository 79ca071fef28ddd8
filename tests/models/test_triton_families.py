"""What a GPU computes of a model: attention, norms, ropes and experts together, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pathlib

import pytest
import torch
from driver import Driver, record_logits
from family_cases import reference
from slow_cases import slow_but
from test_families import CASES, assert_near, config_of
from triton_mode import DEVICES  # before triton is imported

from aengine.attention.triton import TritonBackend
from aengine.kernels.triton.layer_ops import TritonOps
from aengine.runner.runner import ModelRunner
from aengine.runner.torch import loading

pytestmark = pytest.mark.slow


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and layers are Triton's on any device."""
    monkeypatch.setattr(loading, "select_backend", lambda name, spec: TritonBackend(spec))
    monkeypatch.setattr(loading, "select_ops", lambda *given: TritonOps())


@pytest.mark.parametrize("device", DEVICES[:1])
@pytest.mark.parametrize(
    "name", slow_but(["deepseek-v3"], ["gpt-oss", "llama4", "deepseek-v3", "bloom", "gemma4", "gemma4-experts", "mimo-v2"])
)
def test_tokens_and_logits(name: str, device: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(CASES[name], tmp_path)
    use_triton(monkeypatch)
    runner = ModelRunner(config_of(CASES[name], tmp_path, "torch_native"), tmp_path)
    seen = record_logits(runner)
    some = slice(2, 4)
    assert Driver(runner, chunk=5).generate(expected.prompts[some], 2) == [output[:2] for output in expected.tokens[some]]
    assert_near(seen[-1], expected.logits[3][None, 1])


OF_EACH_BLOCK = [
    *("gemma2", "gemma3", "phi4-partial", "glm4", "olmo2", "smollm3", "granite", "cohere2", "qwen2-moe", "qwen3-moe", "gpt-oss", "llama4"),
    *("deepseek-v2-lite", "deepseek-v3", "glm4-moe", "stablelm-parallel", "gpt2", "gpt-neox", "opt", "bloom", "falcon-new", "codegen"),
    *("lfm2", "gemma4", "gemma4-experts", "mimo-v2"),
]
"""Families that have between them every kind of block, norm, rope and head."""
FEW = 16  # tokens of each prompt


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("name", slow_but(OF_EACH_BLOCK, CASES))
def test_on_a_gpu(name: str, device: str, tmp_path: pathlib.Path) -> None:
    """Chunks of prompts and decodes, in graphs and operation by operation."""
    expected = reference(CASES[name], tmp_path)
    sizes = {"max_num_seqs": 8, "graph_sizes": (8,), "graph_tokens": 16}
    runner = ModelRunner(config_of(CASES[name], tmp_path, "triton", device=device, **sizes), tmp_path)
    known = [tokens[:FEW] for tokens in expected.tokens]
    assert Driver(runner, chunk=12).generate(expected.prompts, FEW) == known
    seen = record_logits(runner)
    assert Driver(runner).generate(expected.prompts, FEW) == known
    for step, logits in enumerate(seen):
        assert_near(logits.cpu(), torch.stack([of_prompt[step] for of_prompt in expected.logits]))
    runner.close()


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(
    ("name", "options"), [("gemma2", {}), ("gpt-oss", {}), ("deepseek-v3", {}), ("qwen3-moe", {"quantization": "int4"})], ids=str
)
def test_batch_invariant_numerics(name: str, options: dict[str, str], device: str, tmp_path: pathlib.Path) -> None:
    """Logits of a prompt in a crowd, and alone and in chunks, in graphs and without, are the same bits."""
    expected = reference(CASES[name], tmp_path)
    sizes = {"max_num_seqs": 4, "graph_sizes": (1,), "graph_tokens": 8, "dtype": "bfloat16", **options}
    runner = ModelRunner(config_of(CASES[name], tmp_path, "triton", device=device, numerics="batch_invariant", **sizes), tmp_path)
    seen = record_logits(runner)

    def logits(prompts: list[list[int]], chunk: int | None) -> torch.Tensor:
        seen.clear()
        Driver(runner, chunk=chunk).generate(prompts, 3)
        return torch.stack([one.cpu() for one in seen if len(one)])  # [3, prompts, vocab_size]

    prompts = [list(prompt) for prompt in expected.prompts[:4]]
    together = logits(prompts, None)
    for at in (1, 3):
        assert torch.equal(logits([prompts[at]], 5)[:, 0].view(torch.int16), together[:, at].view(torch.int16))
