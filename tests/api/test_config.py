"""Every option of an engine: what is accepted, what is refused and how. Runs in a second; touches no model and no device."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError
from aengine.api.fields import shown

HUGE = 10**400  # an integer that no float holds

INTEGERS: dict[str, tuple[int, int | None, bool]] = {  # lowest, highest, whether None is accepted
    "threads": (1, 1024, True),
    "max_model_len": (2, None, True),
    "max_num_seqs": (1, 65536, True),
    "max_num_batched_tokens": (1, None, True),
    "kv_cache_memory": (1, None, True),
    "state_interval": (0, None, True),
    "max_images": (0, 32, False),
    "image_max_tokens": (16, 65536, True),
    "image_cache_memory": (0, None, False),
    "host_kv_memory": (0, None, False),
    "weights_cache_size": (0, None, False),
    "kv_disk_size": (0, None, False),
    "max_queued_requests": (1, None, True),
    "max_queued_tokens": (1, None, True),
    "graph_tokens": (0, 8192, False),
    "max_logprobs": (0, None, False),
    "max_unread_tokens": (1, None, False),
    "max_drafts": (1, 16, False),
    "max_adapters": (0, 1024, True),
    "max_adapter_rank": (1, 256, False),
    "tensor_parallel_size": (1, 64, False),
    "pipeline_parallel_size": (1, 64, False),
    "recorded_steps": (0, 65536, False),
    "seed": (0, 2**64 - 1, False),
}
POSITIVE = ("ageing_seconds", "step_timeout", "session_seconds")
CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention_backend": ("auto", "cpu", "flashinfer", "triton", "torch_native"),
    "kv_cache_dtype": ("auto", "fp8", "int8", "int4"),
    "quantization": ("none", "int8", "int4", "fp8"),
    "numerics": ("fast", "canonical", "batch_invariant"),
    "speculative": ("off", "ngram", "draft", "eagle", "mtp", "auto"),
    "tensor_parallel_mode": ("exact", "fast"),
    "load_format": ("auto", "safetensors", "pt", "dummy"),
    "model_impl": ("auto", "native", "transformers"),
    "role": ("both", "prefill", "decode"),
}
SWITCHES = ("enable_prefix_cache", "eager", "skip_self_check", "content_special_tokens")
OTHERS = {"model", "revision", "device", "page_size", "gpu_memory_utilization", "graph_sizes", "tenant_weights", "speculative_model"}
OTHERS |= {
    "adapters",
    "local_ranks",
    "rank_address",
    "rank_secret_file",
    "expert_parallel_size",
    "expert_parallel_rank",
    "kv_disk_path",
    "weights_cache",
}
OTHERS |= {"session_share", "recording_dir", "weights_cache"}


def config(**given: Any) -> EngineConfig:
    """A config with room for any number of sequences in a step and in it."""
    return EngineConfig(**{"model": "demo", "max_num_seqs": 1, "max_num_batched_tokens": 65536, **given})


def refused(**given: Any) -> dict[str, str]:
    """The fields that are refused, with what is said of them."""
    with pytest.raises(ConfigError) as caught:
        config(**given)
    violations = caught.value.violations
    assert len({violation.field for violation in violations}) == len(violations), "one violation per field"
    return {violation.field: violation.description for violation in violations}


def accepted(name: str, value: Any) -> None:
    needed = {"speculative_model": "demo"} if value in ("draft", "eagle") else {}
    assert getattr(config(**{name: value}, **needed), name) == value


def test_every_option_is_tested_here() -> None:
    assert {option.name for option in dataclasses.fields(EngineConfig)} == {*INTEGERS, *POSITIVE, *CHOICES, *SWITCHES, *OTHERS}


def test_defaults() -> None:
    with pytest.raises(TypeError, match="model"):
        EngineConfig()  # type: ignore[call-arg]
    assert dataclasses.asdict(EngineConfig(model="demo")) == {
        "model": "demo",
        "revision": None,
        "dtype": "auto",
        "device": "auto",
        "threads": None,
        "max_model_len": None,
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "page_size": 16,
        "kv_cache_memory": None,
        "gpu_memory_utilization": 0.9,
        "attention_backend": "auto",
        "kv_cache_dtype": "auto",
        "quantization": "none",
        "numerics": "fast",
        "speculative": "off",
        "speculative_model": None,
        "max_drafts": 8,
        "eager": False,
        "graph_sizes": None,
        "graph_tokens": 2048,
        "load_format": "auto",
        "model_impl": "auto",
        "skip_self_check": False,
        "content_special_tokens": False,
        "tensor_parallel_size": 1,
        "tensor_parallel_mode": "exact",
        "pipeline_parallel_size": 1,
        "expert_parallel_size": 1,
        "expert_parallel_rank": 0,
        "local_ranks": None,
        "rank_address": None,
        "rank_secret_file": None,
        "max_images": 32,
        "image_max_tokens": None,
        "image_cache_memory": 256 << 20,
        "role": "both",
        "session_seconds": 600.0,
        "session_share": 0.5,
        "host_kv_memory": 0,
        "weights_cache": "auto",
        "weights_cache_size": 64 << 30,
        "kv_disk_path": None,
        "kv_disk_size": 16 << 30,
        "enable_prefix_cache": True,
        "state_interval": None,
        "max_queued_requests": 4096,
        "max_queued_tokens": None,
        "tenant_weights": {},
        "ageing_seconds": 30.0,
        "max_logprobs": 20,
        "adapters": {},
        "max_adapters": None,
        "max_adapter_rank": 64,
        "max_unread_tokens": 256,
        "step_timeout": 300.0,
        "recorded_steps": 256,
        "recording_dir": None,
        "seed": 0,
    }


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    low, high, optional = INTEGERS[name]
    accepted(name, low)
    accepted(name, high or 2**40)
    range_said = f"is not an integer >= {low}" if high is None else f"is not an integer in [{low}, {high}]"
    outside: list[Any] = [low - 1, -(2**40), 16.0, 1.5, True, [16], math.nan] + ([] if high is None else [high + 1, HUGE])
    if not name.endswith("_memory") and name not in ("kv_disk_size", "weights_cache_size"):  # which are sizes
        outside.append("16")
    for value in outside:
        assert refused(**{name: value}) == {name: f"{shown(value)} {range_said}"}
    if optional:
        accepted(name, None)
    else:
        assert list(refused(**{name: None})) == [name]


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("8GB", 8 * 1000**3),
        ("8g", 8 * 1000**3),
        ("512MiB", 512 * 1024**2),
        ("512 Mi", 512 * 1024**2),
        ("1.5G", 1_500_000_000),
        ("1.5GiB", 1_610_612_736),
        ("2tb", 2 * 1000**4),
        ("1kib", 1024),
        ("0.0015k", 1),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_sizes(given: object, number: int) -> None:
    """With an i a unit is a power of 1024, without one a power of 1000."""
    assert EngineConfig(model="demo", kv_cache_memory=given).kv_cache_memory == number  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["", "GB", "8XB", "8 G B", "1.5", "-1G", "1e9", "8GiBs", "x" * 9])
def test_what_is_no_size(given: str) -> None:
    told = f"{given!r} is not a number of bytes such as 8GB (8 * 1000^3) or 512MiB (512 * 1024^2)"
    assert refused(kv_cache_memory=given) == {"kv_cache_memory": told}


def test_a_size_out_of_range() -> None:
    assert refused(kv_cache_memory="0.0001k") == {"kv_cache_memory": "0 is not an integer >= 1"}


def test_dtypes_have_short_names() -> None:
    names = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "auto": "auto"}
    assert {name: EngineConfig(model="demo", dtype=name).dtype for name in names} == names
    assert refused(dtype="fp8") == {"dtype": "'fp8' is not one of auto, float32, bfloat16, float16"}


@pytest.mark.parametrize("name", POSITIVE)
def test_durations(name: str) -> None:
    for value in (math.ulp(0.0), 1, 0.5, 1e300, np.float64(2.5)):
        accepted(name, value)
    for value in (0, 0.0, -1.0, math.inf, math.nan, None, "1", True, [1.0], -HUGE):
        assert refused(**{name: value}) == {name: f"{shown(value)} is not a finite number > 0"}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    for value in CHOICES[name]:
        accepted(name, value)
    for value in ("", "AUTO", "auto ", "int9", None, 5, ["auto"]):
        assert refused(**{name: value}) == {name: f"{value!r} is not one of {', '.join(CHOICES[name])}"}


def test_model_and_revision() -> None:
    accepted("model", "Qwen/Qwen3-0.6B")
    for value in ("", None, 5, b"demo", ["demo"]):
        assert list(refused(model=value)) == ["model"]
    accepted("revision", "main")
    accepted("revision", None)
    for value in (5, b"main"):
        assert list(refused(revision=value)) == ["revision"]


def test_device() -> None:
    for value in ("auto", "cpu", "cuda", "cuda:0", "cuda:13"):
        accepted("device", value)
    for value in ("", "gpu", "CPU", "cuda:", "cpu:", "cpu:0", "auto:", "cuda:x", "cuda:-1", "cuda:0:1", "cuda:²", "cuda:0\n", None, 0):
        assert refused(device=value) == {"device": f"{value!r} is not one of auto, cpu, cuda, cuda:N"}


def test_page_size() -> None:
    for exponent in range(9):
        accepted("page_size", 2**exponent)
    for value in (0, -1, -16, 3, 12, 255, 257, 300, 512, 16.0, True, "16", None):
        assert refused(page_size=value) == {"page_size": f"{value!r} is not a power of two in [1, 256]"}


def test_session_share() -> None:
    for value in (0.0, 0.3, 1.0):
        accepted("session_share", value)
    for value in (-0.1, 1.1, "much", float("nan")):
        assert set(refused(session_share=value)) == {"session_share"}


def test_gpu_memory_utilization() -> None:
    for value in (math.ulp(0.0), 0.5, 1.0, 1):
        accepted("gpu_memory_utilization", value)
    for value in (0, 0.0, -0.5, math.nextafter(1.0, 2.0), 2, HUGE, math.nan, math.inf, True, None, "0.9"):
        assert refused(gpu_memory_utilization=value) == {"gpu_memory_utilization": f"{shown(value)} is not a number in (0, 1]"}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name: str) -> None:
    accepted(name, True)
    accepted(name, False)
    for value in (0, 1, None, "true"):
        assert refused(**{name: value}) == {name: f"{value!r} is not true or false"}


def test_graph_sizes() -> None:
    accepted("graph_sizes", None)
    accepted("graph_sizes", (1,))
    assert config(graph_sizes=(8, 1, 8), max_num_seqs=8).graph_sizes == (8, 1, 8)
    for value in ((), (0,), (1, -1), (65537,), (1.0,), (True,), ("1",), [1], 1, "1,2"):
        assert refused(graph_sizes=value) == {"graph_sizes": f"{value!r} is not one or more integers in [1, 65536]"}
    said = refused(graph_sizes=(1, 9), max_num_seqs=8)
    assert said == {"graph_sizes": "(1, 9) is not at most max_num_seqs (8): no step has more sequences"}


def test_adapters() -> None:
    accepted("adapters", {"a.b-c:d_1": "some/where", "x" * 128: "/tmp"})
    values: list[Any] = [[], "a=b", {"": "x"}, {"a b": "x"}, {"x" * 129: "x"}, {"a": ""}, {"a": 1}, {1: "a"}]
    for value in values:
        words = f"{shown(value)} is not a mapping from names that match [A-Za-z0-9._:/-]{{1,128}} to paths"
        assert refused(adapters=value) == {"adapters": words}
    assert refused(adapters={"a": "x"}, max_adapters=0) == {"max_adapters": "0 is too few: adapters names 1"}


def test_tenant_weights() -> None:
    accepted("tenant_weights", {})
    accepted("tenant_weights", {"a": 2, "b": 0.5, "": 1.0})
    for value in (None, ["a"], {"a": 0}, {"a": -1}, {"a": math.inf}, {"a": math.nan}, {"a": "1"}, {"a": True}, {"a": None}, {5: 1.0}):
        assert refused(tenant_weights=value) == {"tenant_weights": f"{value!r} is not a mapping from tenant to a finite number > 0"}


def test_a_step_must_hold_a_token_of_each_sequence() -> None:
    assert config(max_num_seqs=64, max_num_batched_tokens=64).max_num_batched_tokens == 64
    said = refused(max_num_seqs=65, max_num_batched_tokens=64)
    assert said == {"max_num_batched_tokens": "64 is not >= max_num_seqs (65): a step must hold one token of each sequence"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 256),
        ({"max_num_batched_tokens": 16}, 16),
        ({"max_num_batched_tokens": 8192}, 256),
        ({"graph_sizes": (8, 512)}, 512),
        ({"graph_sizes": (8, 16)}, 256),
        ({"graph_sizes": (8, 16), "max_num_batched_tokens": 16}, 16),
        ({"graph_sizes": (1024,), "max_num_batched_tokens": 512}, "graph_sizes"),
        ({"max_num_seqs": 300, "max_num_batched_tokens": 299}, "max_num_batched_tokens"),
        ({"max_num_seqs": 256, "graph_sizes": (512,)}, "graph_sizes"),
    ],
    ids=str,
)
def test_the_default_number_of_sequences_gives_way_to_what_was_asked_for(given: dict[str, Any], expected: int | str) -> None:
    if isinstance(expected, int):
        assert EngineConfig(model="demo", **given).num_seqs == expected
    else:
        with pytest.raises(ConfigError) as caught:
            EngineConfig(model="demo", **given)
        assert caught.value.field == expected


def test_all_violations_are_named_at_once() -> None:
    names = [option.name for option in dataclasses.fields(EngineConfig)]
    wrong: dict[str, Any] = {**dict.fromkeys(names, (5,)), "graph_sizes": 5}
    assert set(refused(**wrong)) == set(names)
    with pytest.raises(ConfigError, match=r"^page_size: 3 is not a power of two in \[1, 256\]; seed: -1 is not an integer in ") as caught:
        EngineConfig(model="demo", seed=-1, page_size=3)
    assert caught.value.field == "page_size"
    assert isinstance(caught.value, ValueError)


def test_a_config_of_a_name_of_a_config_and_of_overrides() -> None:
    assert EngineConfig.of("demo") == EngineConfig(model="demo")
    base = EngineConfig.of("demo", page_size=8, seed=3)
    assert base == EngineConfig(model="demo", page_size=8, seed=3)
    assert EngineConfig.of(base) == base
    assert EngineConfig.of(base, seed=4, model="other") == EngineConfig(model="other", page_size=8, seed=4)
    assert base.seed == 3
    with pytest.raises(ConfigError, match="page_size: 3 is not"):
        EngineConfig.of(base, page_size=3)


def test_unknown_options_are_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of("demo", pagesize=8, seed=-1, max_seqs=2)
    assert [violation.field for violation in caught.value.violations] == ["pagesize", "max_seqs"]
    for option in dataclasses.fields(EngineConfig):
        assert option.name in caught.value.violations[0].description


def test_a_config_is_frozen_and_travels() -> None:
    base = EngineConfig(model="demo", tenant_weights={"a": 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.seed = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        EngineConfig("demo")  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(base)) == base
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="")
    assert pickle.loads(pickle.dumps(caught.value)).violations == caught.value.violations


@pytest.mark.parametrize(
    ("mode", "needs", "takes"),
    [
        ("off", None, False),
        ("ngram", None, False),
        ("mtp", None, False),
        ("auto", None, True),
        ("draft", "a draft model", True),
        ("eagle", "an EAGLE-3 head", True),
    ],
)
def test_a_speculative_model_is_for_modes_that_use_it(mode: str, needs: str | None, takes: bool) -> None:
    if needs is not None:
        assert refused(speculative=mode) == {"speculative_model": f"is missing: speculative {mode!r} needs {needs}"}
    else:
        assert config(speculative=mode).speculative_model is None
    if takes:
        assert config(speculative=mode, speculative_model="demo").speculative_model == "demo"
        assert set(refused(speculative=mode, speculative_model="")) == {"speculative_model"}
    else:
        message = f"is for speculative 'draft', 'eagle' or 'auto', not {mode!r}"
        assert refused(speculative=mode, speculative_model="demo") == {"speculative_model": message}


def test_engines_that_share_experts() -> None:
    group = {"expert_parallel_size": 3, "rank_address": "host:7000", "rank_secret_file": "secret"}
    assert config(**group, expert_parallel_rank=2).num_ranks == 1
    for value in (0, 65, True, 2.0, "2"):
        assert list(refused(**{**group, "expert_parallel_size": value})) == ["expert_parallel_size"]
    for value in (-1, 64, True, 1.0, "1"):
        assert list(refused(**group, expert_parallel_rank=value)) == ["expert_parallel_rank"]
    assert refused(**group, expert_parallel_rank=3) == {"expert_parallel_rank": "3 is not below expert_parallel_size (3)"}
    assert refused(expert_parallel_rank=1) == {"expert_parallel_rank": "1 is not below expert_parallel_size (1)"}
    for name in ("rank_address", "rank_secret_file"):
        missing = "is missing: 3 engines share experts, and join rank 0 there with a secret"
        assert refused(**{**group, name: None}) == {name: missing}
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "local_ranks"):
        assert refused(**group, **{name: 2}) == {name: "2 is not possible with expert_parallel_size 3; choose 1"}


def test_ranks_of_other_hosts() -> None:
    there = {"rank_address": "[::1]:7000", "rank_secret_file": "secret"}
    assert config(tensor_parallel_size=2, pipeline_parallel_size=3).num_local_ranks == 6
    assert config(tensor_parallel_size=2, **there).num_local_ranks == 1
    assert config(tensor_parallel_size=4, local_ranks=2, **there).num_local_ranks == 2
    for value in (0, -1, True, 1.0, "1"):
        assert list(refused(local_ranks=value)) == ["local_ranks"]
    for address in ("", "host", "host:", "host:port", 7000):
        assert list(refused(tensor_parallel_size=2, **{**there, "rank_address": address})) == ["rank_address"]
    assert refused(local_ranks=2) == {"local_ranks": "2 is more than all ranks: tensor_parallel_size * pipeline_parallel_size is 1"}
    assert refused(tensor_parallel_size=4, local_ranks=1) == {"rank_address": "is missing: 3 of 4 ranks are on other hosts"}
    one = {"rank_address": "host:7000"}
    assert refused(tensor_parallel_size=2, **one) == {"rank_secret_file": "is missing: 1 of 2 ranks are on other hosts"}
    assert refused(**there) == {"rank_address": "is for ranks of other hosts, but all 1 are on this one"}
