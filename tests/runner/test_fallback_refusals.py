"""What the fallback refuses: models that our KV pages cannot serve, by name, before or in the self-check; and checkpoints of others."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from fallback_models import TINY, save_model, tiny_config
from planted_models import LAYERS, PlantedConfig
from safetensors.torch import load_file, save_file
from test_fallback import make_runner
from transformers import CONFIG_MAPPING

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError, ModelLoadError
from aengine.models.fallback.attention import _NO_WINDOW, _UNSUPPORTED, _window
from aengine.runner.runner import ModelRunner


def save_planted(path: pathlib.Path, planted: str) -> None:
    PlantedConfig(**{key: value for key, value in TINY.items() if hasattr(PlantedConfig(), key)}, planted=planted).save_pretrained(path)


WRONG = {
    "IgnoresPositions": "takes the positions of tokens from their order and not from position_ids",
    "IsRecurrent": "carries a state from token to token beside its attention, so that sequences of a batch mix",
    "Remembers": "keeps a state from one forward pass to the next",
    "LooksAhead": "looks ahead: later tokens change the logits of earlier ones",
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("planted", WRONG)
def test_the_self_check_refuses_by_name(planted: str, dtype: str, tmp_path: pathlib.Path) -> None:
    save_planted(tmp_path, planted)
    with pytest.raises(ModelLoadError) as caught:
        make_runner(tmp_path, load_format="dummy", dtype=dtype)
    message = str(caught.value)
    assert message.startswith(f"the self-check failed: layer model.layers.2 ({planted}) {WRONG[planted]}")
    assert "--skip-self-check" in message
    make_runner(tmp_path, load_format="dummy", dtype=dtype, skip_self_check=True).close()


def test_the_same_model_with_nothing_planted(tmp_path: pathlib.Path) -> None:
    save_planted(tmp_path, "nothing")
    for dtype in ("float32", "bfloat16"):
        make_runner(tmp_path, load_format="dummy", dtype=dtype).close()


def test_what_rounding_does_to_experts_is_no_difference(tmp_path: pathlib.Path) -> None:
    """In bfloat16 many tokens of a random model of many layers go to other experts, each time that it is computed in another way."""
    config = tiny_config("flex_olmo", num_hidden_layers=16, initializer_range=0.02)
    config.save_pretrained(tmp_path)
    make_runner(tmp_path, load_format="dummy", dtype="bfloat16").close()


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        ("HasNoAttention", r"layer 2 of planted \(HasNoAttention\) never calls the attention function"),
        ("AttendsTwice", r"model.layers.2.self_attn \(LlamaAttention\) computes attention more than once"),
    ],
)
def test_the_probe_refuses_by_name(planted: str, reason: str, tmp_path: pathlib.Path) -> None:
    save_planted(tmp_path, planted)
    with pytest.raises(ModelLoadError, match=reason):
        make_runner(tmp_path, load_format="dummy", skip_self_check=True)


def test_every_planted_layer_is_tested() -> None:
    assert LAYERS.keys() == {"nothing", *WRONG, "HasNoAttention", "AttendsTwice"}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bart", {}, "bart is an encoder-decoder"),
        ("mamba", {}, "layers of the type 'linear_attention'"),
        ("rwkv", {}, "rwkv has layers with a recurrent state"),
        ("qwen3_next", {}, "qwen3_next has layers of the type 'linear_attention'"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "lfm2 has layers of the type 'conv'"),
        ("llama4_text", {}, "layers of the type 'chunked_attention'"),
        ("bert", {"is_decoder": True}, "bert.embeddings.token_type_embeddings: token_type_ids are not supported"),
        ("bert-generation", {}, "masks its attention other than causally"),
        ("clip_vision_model", {}, "clip_vision_model is not a model that generates text"),
        ("bloom", {}, "bloom never calls the attention function"),
        ("gptj", {}, "gptj never calls the attention function"),
        ("gpt2", {"add_cross_attention": True}, "gpt2 with add_cross_attention attends to an encoder"),
        ("llama", {"quantization_config": {"quant_method": "quark"}}, "quantization_config is not supported .quant_method 'quark'."),
    ],
)
def test_a_model_is_refused_by_name(model_type: str, changes: dict, reason: str, tmp_path: pathlib.Path) -> None:
    known = CONFIG_MAPPING[model_type]()
    values = {key: value for key, value in TINY.items() if hasattr(known, key) and not known.sub_configs}
    config = CONFIG_MAPPING[model_type](**{**values, **changes})
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        make_runner(tmp_path, load_format="dummy")


def test_what_the_fallback_does_not_have(tmp_path: pathlib.Path) -> None:
    tiny_config("arcee").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantization: 'int8' needs the CPU kernels and a native model"):
        make_runner(tmp_path, load_format="dummy", quantization="int8")


@pytest.mark.slow
def test_tensors_of_another_model_are_named(tmp_path: pathlib.Path) -> None:
    save_model(tiny_config("arcee"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(3)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"it lacks model.layers.1.mlp.up_proj.weight; it has unexpected model.layers.1.mlp.extra.weight"
    ):
        make_runner(tmp_path)
    del tensors["model.layers.1.mlp.extra.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model.layers.1.mlp.up_proj.weight \[3, 4\] instead of \[64, 48\]"):
        make_runner(tmp_path)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4, dtype=torch.int8)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"dtypes other than .*: model.layers.1.mlp.up_proj.weight int8"):
        make_runner(tmp_path)
    file.write_bytes(b"broken")
    with pytest.raises(ModelLoadError, match="is not a safetensors file, or corrupt or truncated"):
        make_runner(tmp_path)


@pytest.mark.parametrize("model_impl", ["auto", "native", "transformers"])
def test_what_nobody_knows(model_impl: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}))
    with pytest.raises(ModelLoadError) as caught:
        ModelRunner(EngineConfig(model=str(tmp_path), model_impl=model_impl, load_format="dummy", device="cpu"), tmp_path)
    message = str(caught.value)
    assert ("architecture 'NoSuchForCausalLM' has no native implementation" in message) == (model_impl != "transformers")
    assert ("transformers" in message) == (model_impl != "native")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' in config.json is not supported; supported are silu"),
        ({"rope_parameters": {"rope_type": "magic", "rope_theta": 1e4}}, "magic"),
        ({"quantization_config": {"quant_method": "quark"}}, "quantization_config is not supported .quant_method 'quark'."),
    ],
)
def test_options_that_native_models_lack(changes: dict, reason: str, tmp_path: pathlib.Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelLoadError, match=reason) as caught:
        make_runner(tmp_path, load_format="dummy", model_impl="native")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 10**18}, f"num_hidden_layers {10**18} in config.json is not an integer in 0 .. 4096$"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1 in config.json"),
        ({"x_config": {"n_routed_experts": 5000}}, "n_routed_experts 5000 in config.json"),
        ({"max_position_embeddings": -1}, "max_position_embeddings -1 in config.json is not an integer in 1 .. 16777216"),
        ({"max_position_embeddings": 10**18}, f"max_position_embeddings {10**18} in config.json"),
        ({"eos_token_id": 2**31}, "eos_token_id 2147483648 is not a token id"),
        ({"text_config": {}}, "the config.json of a arcee has a dict where its text part is described"),
        ({"vocab_size": -1}, "transformers cannot build a arcee as its config.json says: "),
        ({"hidden_size": 7}, "the model that config.json describes: .* is not a multiple of the number of attention heads"),
        (
            {"rms_norm_eps": float("nan")},
            "the self-check failed: a value of config.json or the weights makes logits that are all equal, or",
        ),
        (
            {"rms_norm_eps": float("inf")},
            "the self-check failed: a value of config.json or the weights makes logits that are all equal, or",
        ),
    ],
)
def test_values_that_transformers_takes_or_fails_on(changes: dict, reason: str, tmp_path: pathlib.Path) -> None:
    tiny_config("arcee").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelLoadError, match=reason) as caught:
        make_runner(tmp_path, load_format="dummy")
    assert "\n" not in str(caught.value)


def test_code_of_a_model_is_never_run(tmp_path: pathlib.Path) -> None:
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Config: pass\n")
    config = {"model_type": "no_such", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"needs code of its own .auto_map in config.json., which is never run"):
        make_runner(tmp_path, load_format="dummy")
    assert not (tmp_path / "run").exists()


def test_pytorch_files(tmp_path: pathlib.Path) -> None:
    model = save_model(tiny_config("arcee"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    make_runner(tmp_path).close()


def causal(first: int):
    """A mask function whose queries see the latest tokens from `first(query)` on."""
    return lambda batch, head, query, key: (key <= query) & (key >= first(int(query)))


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (causal(lambda query: 0), _NO_WINDOW),
        (causal(lambda query: query - 6), 7),
        (causal(lambda query: query - 5000), _NO_WINDOW),  # longer than the sequence
        (causal(lambda query: query // 8 * 8), _UNSUPPORTED),  # in chunks
        (causal(lambda query: query + 1), _UNSUPPORTED),  # nothing
        (lambda batch, head, query, key: key >= 0, _UNSUPPORTED),  # everything, also what is ahead
        (lambda batch, head, query, key: (key - query).abs() < 5, _UNSUPPORTED),
        (lambda batch, head, query, key: (key <= query) & (key % 2 == 0), _UNSUPPORTED),
        (lambda batch, head, query, key: torch.tensor([True, False])[key], _UNSUPPORTED),
    ],
)
def test_the_window_of_a_mask(function, window: int) -> None:
    assert _window(function, 1000) == window
