"""`aengine-bench quality`: which tokens are scored, and with what before them."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from slow_cases import NOT_IN_CI

from aengine.api.config import EngineConfig
from aengine.bench import cli
from aengine.bench.probes import HELD_TEXT, Quality, Scores, Windows, score_text
from aengine.models.loading.hub import resolve_model

CONFIG = EngineConfig(model="demo", device="cpu", dtype="float32", kv_cache_memory=16 << 20)
TEXT = HELD_TEXT.read_text(encoding="utf-8")


def test_each_token_is_scored_once_behind_those_of_its_window() -> None:
    scores = asyncio.run(score_text(CONFIG, TEXT, Windows(size=24, stride=10), num_tokens=61))
    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model("demo"), dtype=torch.float32)
    ids = torch.tensor(scores.token_ids)
    assert len(ids) == 61
    with torch.inference_mode():
        windows = [model(ids[None, start : start + 24]).logits[0].log_softmax(-1) for start in range(0, 60, 10)]
    rows = []  # the one that predicts each token
    for place in range(1, 61):
        window = max(0, math.ceil((place - 23) / 10))  # the first one that reaches the token
        rows.append(windows[window][place - 1 - 10 * window])
    expected = torch.stack(rows)
    np.testing.assert_allclose(scores.logprobs, expected.gather(1, ids[1:, None])[:, 0], atol=2e-4)
    assert np.array_equal(scores.top_ids, expected.argmax(-1).numpy())


def test_figures_are_against_the_first_configuration() -> None:
    first = Scores((1, 2, 3, 4), np.log([0.5, 0.25, 0.5]), np.array([1, 1, 1]), [])
    other = Scores((1, 2, 3, 4), np.log([0.5, 0.125, 0.25]), np.array([1, 1, 2]), [])
    found = Quality.of(CONFIG, "demo", other, first)
    assert found.perplexity == pytest.approx(4.0)
    assert found.rise == pytest.approx(2 ** (2 / 3) - 1)
    assert found.same_top == pytest.approx(2 / 3)
    assert Quality.of(CONFIG, "demo", other, Scores((1, 2, 3), np.zeros(2), np.zeros(2), [])).rise is None


@pytest.mark.slow
@NOT_IN_CI
def test_8_bits_cost_less_than_a_percent_and_4_less_than_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert cli.main(["quality", "--kv-cache-memory", str(64 << 20), "--num-tokens", "4000", "--json", str(path)]) == 0
    assert "held_text.txt in prompts of 512 tokens, 256 apart" in capsys.readouterr().out
    results = {result["quantization"]: result for result in json.loads(path.read_text())["figures"]["results"]}
    assert list(results) == ["none", "int8", "int4", "fp8"]
    assert results["none"]["rise"] == 0.0
    assert max(results["int8"]["rise"], results["fp8"]["rise"]) < 0.01
    assert 0 < results["int4"]["rise"] < 0.05


def test_what_cannot_be_measured_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quality", "--window", "8", "--stride", "8"]) == 1
    assert capsys.readouterr().err == "aengine-bench: --stride: 8 is not in [1, 7], below --window\n"
    assert cli.main(["quality", "--quantization", "int3"]) == 1
    assert "quantization" in capsys.readouterr().err
