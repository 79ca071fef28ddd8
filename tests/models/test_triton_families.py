"""What a GPU computes of a model, in Triton's interpreter: attention, norms, ropes and experts together."""

from __future__ import annotations

import pathlib

import pytest
from driver import Driver, record_logits
from family_cases import reference
from slow_cases import slow_but
from test_families import CASES, assert_near, config_of
from triton_mode import DEVICES  # before triton is imported

from aengine.attention.triton import TritonBackend
from aengine.kernels.triton.layer_ops import TritonOps
from aengine.runner import torch_models
from aengine.runner.model_runner import ModelRunner


@pytest.mark.parametrize("device", DEVICES[:1])
@pytest.mark.parametrize("name", slow_but(["deepseek-v3"], ["gpt-oss", "deepseek-v3"]))
def test_tokens_and_logits(name: str, device: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference(CASES[name], tmp_path)
    monkeypatch.setattr(torch_models, "select_backend", lambda name, spec: TritonBackend(spec))
    monkeypatch.setattr(torch_models, "select_ops", lambda *given: TritonOps())
    runner = ModelRunner(config_of(CASES[name], tmp_path, "torch_native"), tmp_path)
    seen = record_logits(runner)
    some = slice(2, 4)
    assert Driver(runner, chunk=5).generate(expected.prompts[some], 2) == [output[:2] for output in expected.tokens[some]]
    assert_near(seen[-1], expected.logits[3][None, 1])
