"""What steps ask of a CUDA device, on one without numbers: for all families and kinds of steps nothing makes the host wait or depends on
numbers, neither step by step nor while graphs are captured; and how many kernels a layer launches."""

from __future__ import annotations

import json
import pathlib
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import dense_cases
import hybrid_cases
import mixture_cases
import plain_cases
import pytest
import transformers
from driver import GREEDY, Driver, sampled
from fake_cuda import FakeCuda
from family_cases import TINY, Case
from slow_cases import slow_but
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from triton_mode import INTERPRETED

from aengine.api.config import EngineConfig
from aengine.attention.flashinfer.wrappers import UnevenDecodes
from aengine.runner.runner import ModelRunner
from aengine.scheduler.plan import RowParams

CASES = {case.name: case for case in (*dense_cases.CASES, *mixture_cases.CASES, *plain_cases.CASES, *hybrid_cases.CASES)}
IN_CI = ["gemma2", "gpt-oss", "deepseek-v3", "opt"]

pytestmark = [pytest.mark.skipif(not INTERPRETED, reason="there is a device"), pytest.mark.slow]


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> FakeCuda:
    return FakeCuda()


def make_runner(case: Case, path: pathlib.Path, **options: Any) -> ModelRunner:
    """Of random weights, with graphs for few rows and tokens."""
    values = case.changes if case.whole else {**TINY, **case.changes}
    config = getattr(transformers, f"{case.config}Config")(**values)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    described = config.to_dict() | {"architectures": [architecture if isinstance(architecture, str) else architecture[0]]}
    (path / "config.json").write_text(json.dumps(described))
    settings = {
        "attention_backend": "triton",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "device": "cuda",
        "kv_cache_memory": 16 << 20,
        "max_model_len": case.max_model_len,
        "max_num_seqs": 4,
        "graph_sizes": (4,),
        "graph_tokens": 8,
        "page_size": 4,
    }
    return ModelRunner(EngineConfig(model=str(path), **(settings | options)), path)


@pytest.mark.parametrize("name", slow_but(IN_CI, list(CASES)))
def test_steps_of_families(name: str, fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    with fake.active():
        runner = make_runner(CASES[name], tmp_path)
        assert runner._executor._model.graphs.pieces is not None
        fake.strict = True
        for chunk in (40, 5):  # operation by operation, and in graphs
            replays = fake.replays
            Driver(runner, chunk=chunk).generate([[1, 2, 3], [4] * 9, [5] * 17], 3)
            assert fake.replays > replays
        fake.strict = False


ROWS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.1},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    {"logit_bias": ((3, 1.0), (4, -2.0)), "banned_token_ids": (5, 6), "bad_words": ((3,), (4, 5)), "min_tokens": 5, "stop_ids": (7,)},
    {"allowed_token_ids": (1, 2, 3), "logprobs": 3},
    {"prompt_logprobs": 2},
    {"pooling": "last"},
    {"pooling": "mean"},
]


def test_steps_of_all_kinds_of_rows(fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    """By themselves, and beside greedy and drawn ones."""
    with fake.active():
        runner = make_runner(Case("rows", "Qwen3", {"head_dim": 32}), tmp_path)
        fake.strict = True
        for changes in ROWS:
            row = replace(GREEDY, seed=3, **changes)
            Driver(runner, chunk=5).generate([[1, 2, 3], [4] * 9], 3, row)
            Driver(runner).generate([[1, 2, 3], [4] * 9, [5] * 12], 3, [row, GREEDY, sampled(1, 0.7, top_p=0.8)])
        fake.strict = False


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3-moe", {"quantization": "fp8", "kv_cache_dtype": "fp8", "max_adapters": 2}),
    ("qwen3-moe", {"quantization": "int4", "dtype": "float16"}),
    ("gemma2", {"attention_backend": "torch_native", "eager": True}),
    ("mistral", {"dtype": "float32", "kv_cache_dtype": "fp8"}),
    ("qwen2-moe", {"speculative": "ngram"}),
]


@pytest.mark.parametrize(("name", "options"), slow_but(OPTIONS[:1], OPTIONS))
def test_steps_with_options(name: str, options: dict[str, Any], fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    with fake.active():
        runner = make_runner(CASES[name], tmp_path, **options)
        fake.strict = True
        for chunk in (40, 5):
            Driver(runner, chunk=chunk).generate([[1, 2, 3], [4] * 9, [5] * 17], 3)
        fake.strict = False


@pytest.mark.parametrize(
    ("backend", "layer"),
    [
        ("triton", ["_rms_norm", "_rotate", "decode_kernel", "combine_kernel", "_rms_norm", "_gated"]),
        ("flashinfer", ["fused_add_rmsnorm", "_rotate", "attention", "merge_states", "fused_add_rmsnorm", "silu_and_mul"]),
    ],
)
def test_launches_of_a_layer(
    backend: str, layer: list[str], fake: FakeCuda, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside four matrix products Qwen3 has six in a decode step: what is new in a step of one layer more."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake.library())
    steps = []
    for layers in (2, 3):
        case = Case("launches", "Qwen3", {"head_dim": 64, "num_hidden_layers": layers})
        with fake.active():
            steps.append(Counter(launches_of_decode(fake, make_runner(case, tmp_path, attention_backend=backend))))
    assert steps[1] - steps[0] == Counter([*layer, *["mm"] * 4])


def test_decodes_without_adapters_launch_what_a_model_without_them_does(fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    case = Case("launches", "Qwen3", {"head_dim": 64})
    with fake.active():
        without, with_some = (launches_of_decode(fake, make_runner(case, tmp_path, max_adapters=count)) for count in (0, 4))
    assert Counter(with_some) == Counter(without)


_LATENT = ["_rotate_latent", "bmm", "decode_kernel", "combine_kernel", "bmm"]


@pytest.mark.parametrize(
    ("name", "query"), [("deepseek-v2-lite", ["mm"]), ("deepseek-v3", ["addmm", "_rms_norm", "mm"])], ids=["direct", "low rank"]
)
def test_launches_of_latent_attention(name: str, query: list[str], fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    """In a decode step, between the norms around a block: products write where they are read, and nothing is copied."""
    with fake.active():
        launches = launches_of_decode(fake, make_runner(CASES[name], tmp_path))
    linear = query[0]  # the same kind as that of the keys and of the output
    begin = launches.index("_rms_norm") + 1
    expected = [*query, linear, *_LATENT, linear, "_rms_norm"]
    assert launches[begin : begin + len(expected)] == expected


_EXPERTS = ["_route", "_group_choices", "_grouped_linear", "_gated", "_grouped_linear", "_add_choices"]
_SHARED = ["mm", "_gated", "mm"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-moe-windowed", _EXPERTS),
        ("gpt-oss", _EXPERTS),
        ("deepseek-v3", ["_route", *_SHARED, *_EXPERTS[1:]]),
        ("qwen2-moe-normalized", ["_route", *_SHARED, "mm", *_EXPERTS[1:]]),
    ],
)
def test_launches_of_experts(name: str, expected: list[str], fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    """In a decode step, from the choice, which follows the router's product, to the next norm."""
    with fake.active():
        launches = launches_of_decode(fake, make_runner(CASES[name], tmp_path))
    begin = launches.index("_route")
    assert launches[begin : launches.index("_rms_norm", begin)] == expected


def test_launches_with_float8(fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    """Norms and gates of any kind make float8 themselves: what is left is the outcome of attention."""
    with fake.active():
        launches = Counter(launches_of_decode(fake, make_runner(CASES["gemma2"], tmp_path, quantization="fp8")))
    assert launches["_quantize"] == launches["_gated"] == launches["decode_kernel"] > 0
    assert not launches.keys() & {"gelu", "mul"}


@pytest.mark.parametrize(
    ("params", "kernels"),
    [
        ({}, ["_block_parts", "_token_of_block"]),
        ({"top_k": 20, "top_p": 0.95}, ["_find_likeliest", "_draw_from_likeliest"]),
        ({"top_p": 0.95}, ["amax", *["_try_candidates"] * 3, "_finish"]),
    ],
    ids=["temperature", "Qwen3's", "top_p"],
)
def test_launches_of_a_draw(params: dict[str, Any], kernels: list[str], fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    """Beside the draw itself there are the rows' parameters, and what makes the tokens the last ones of their rows."""
    launches = launches_of_rows({"temperature": 0.6, **params}, fake, tmp_path)
    assert launches == Counter(["index_select", *kernels, "_to_copy", "_to_copy", "index_copy_"])


@pytest.mark.parametrize(
    ("params", "at_most"),
    [
        ({"logit_bias": ((3, 1.0),), "banned_token_ids": (5,), "min_tokens": 9, "stop_ids": (7,)}, 11),
        ({"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.5}, 35),
        ({"logprobs": 0}, 19),
        ({"logprobs": 5}, 55),
    ],
    ids=["masks", "penalties", "logprobs", "alternatives"],
)
def test_launches_around_a_draw(params: dict[str, Any], at_most: int, fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    """Whatever the number of rows: no loop over them is hidden here."""
    assert launches_of_rows(params, fake, tmp_path).total() <= at_most


def launches_of_rows(params: dict[str, Any], fake: FakeCuda, path: pathlib.Path) -> Counter[str]:
    """What a decode step of such rows has more than one of greedy rows."""
    steps = []
    with fake.active():
        runner = make_runner(Case("rows", "Qwen3", {"head_dim": 32, "vocab_size": 151_936}), path)
        for row in (GREEDY, replace(GREEDY, **params)):
            steps.append(Counter(launches_of_decode(fake, runner, row, row)))
    return steps[1] - steps[0]


def launches_of_decode(fake: FakeCuda, runner: ModelRunner, *rows: RowParams) -> list[str]:
    """In the first decode step of such rows, by default of a greedy one."""
    driver = Driver(runner)
    sequences = [driver.add(prompt, row) for prompt, row in zip(([1, 2, 3], [4, 5]), rows or (GREEDY,), strict=False)]
    driver.run_step(sequences)
    fake.launches.clear()
    driver.run_step(sequences)
    return list(fake.launches)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_uneven_decodes_beside_flashinfer(graphs: bool, fake: FakeCuda, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel is planned and launched without a wait, and FlashInfer's is not."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake.library())
    monkeypatch.setattr(UnevenDecodes, "has", lambda self, layout: True)
    case = Case("uneven", "Qwen3", {"head_dim": 64})
    with fake.active():
        runner = make_runner(case, tmp_path, attention_backend="flashinfer", max_num_seqs=32, graph_sizes=(32,), eager=not graphs)
        driver = Driver(runner)
        rows = [driver.add([1, 2, 3], GREEDY), driver.add([1] * 20, GREEDY)]
        driver.run_step(rows)
        fake.launches.clear()
        fake.strict = True
        replays = fake.replays
        driver.run_step(rows)
        assert (fake.replays > replays) == graphs
        assert "decode_kernel" in fake.launches
        assert "attention" not in fake.launches
        fake.strict = False
