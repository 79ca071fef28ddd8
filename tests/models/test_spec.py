"""What a config.json means, and which ones are refused and how."""

from __future__ import annotations

import pathlib

import pytest

from aengine.api.errors import ModelLoadError
from aengine.layers.rotary import RopeSpec, llama3, unscaled, yarn
from aengine.models.config.model_config import load_spec, read_spec
from aengine.models.spec import Attention, Layer, Mlp, Norm, QkNorm

BASE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def config(architecture: str = "LlamaForCausalLM", **changes):
    return {**BASE, "architectures": [architecture], **changes}


def test_defaults_are_those_of_the_family() -> None:
    bare = {key: value for key, value in config().items() if key not in ("num_key_value_heads", "max_position_embeddings")}
    llama = read_spec(bare)
    rope = RopeSpec.of(unscaled(16, 10000.0))
    assert (llama.max_position_embeddings, llama.tied_head, llama.windows) == (2048, False, (None,) * 4)
    layer = Layer(Attention(4, 4, 16, 0.25, rope), Mlp(128), attention_norm=Norm(), mlp_norm=Norm())
    assert llama.layers == (layer,) * 4
    qwen3 = read_spec(config("Qwen3ForCausalLM")).layers[0].attention
    assert qwen3 == Attention(4, 2, 128, 128**-0.5, RopeSpec.of(unscaled(128, 10000.0)), qk_norm=QkNorm(Norm()))
    qwen2 = read_spec(config("Qwen2ForCausalLM")).layers[0].attention
    assert qwen2 == Attention(4, 2, 16, 0.25, rope, qkv_bias=True)
    assert read_spec(config("MistralForCausalLM", max_position_embeddings=4097)).windows == (4096,) * 4


def test_model_type_is_enough() -> None:
    assert read_spec({**BASE, "model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 9}, (9,) * 4),
        ("MistralForCausalLM", {"sliding_window": 511}, (511,) * 4),
        ("MistralForCausalLM", {"sliding_window": 512}, (None,) * 4),
        ("LlamaForCausalLM", {"sliding_window": 9}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 9}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 9)),
        ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None,) * 4),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 9, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (9, None, 9, None),
        ),
    ],
)
def test_windows(architecture: str, changes, windows) -> None:
    assert read_spec(config(architecture, **changes)).windows == windows


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_both_forms_of_rope(form: str, type_key: str) -> None:
    def read(rope, **changes):
        if form == "rope_parameters":
            return read_spec(config(rope_parameters={**rope, "rope_theta": 5000.0}, **changes))
        return read_spec(config(rope_scaling=rope, rope_theta=5000.0, **changes))

    plain = unscaled(16, 5000.0)
    assert read({type_key: "linear", "factor": 2}).ropes[0] == RopeSpec.of(plain / 2.0)
    llama = read({type_key: "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64})
    assert llama.ropes[0] == RopeSpec.of(llama3(plain, 8.0, 1.0, 4.0, 64))
    assert llama.max_position_embeddings == 512
    longer = read({type_key: "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    frequencies = yarn(plain, 5000.0, 4.0, 32.0, 1.0, 512, truncate=True)
    assert longer.ropes[0] == RopeSpec.of(frequencies, pytest.approx(1.1386294))
    assert longer.max_position_embeddings == 2048
    assert read({type_key: "default"}).ropes[0] == RopeSpec.of(plain)


def test_ids_of_the_end() -> None:
    assert read_spec(config(eos_token_id=3)).eos_token_ids == (3,)
    assert read_spec(config(eos_token_id=[3, 5, 3])).eos_token_ids == (3, 5)
    assert read_spec(config()).eos_token_ids == ()


REFUSED = [
    (config("T5Model"), "architecture 'T5Model' has no native implementation"),
    ({**BASE, "model_type": "gemma3n"}, "has no architectures, and its model_type 'gemma3n' has no native implementation"),
    ({**BASE, "architectures": "LlamaForCausalLM"}, "architectures 'LlamaForCausalLM' in config.json is not a list of names"),
    ({**BASE, "architectures": [1]}, r"architectures \[1\]"),
    (config(quantization_config="awq"), "quantization_config 'awq' in config.json is not an object"),
    (config(quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": 8}), "kv_cache_scheme 8"),
    (config(quantization_config={"quant_method": "quark"}), "quantization_config .*'quark'"),
    (config(hidden_act="softplus"), "hidden_act 'softplus' .* silu"),
    (config(rope_scaling={"rope_type": "spiral"}), "rope type 'spiral' .* default, linear, llama3, yarn, dynamic, longrope"),
    (
        config(rope_scaling={"type": "longrope", "long_factor": [1.0]}),
        "rope parameter short_factor None is not a list of 8 positive numbers",
    ),
    (config(rope_scaling={"type": "su", "short_factor": [1.0] * 7}), "rope parameter short_factor .* is not a list of 8 positive numbers"),
    (config("Olmo3ForCausalLM", rope_parameters={"rope_type": "default"}), "not an object with sliding_attention and full_attention"),
    (config("Gemma3ForCausalLM", use_bidirectional_attention=True), "use_bidirectional_attention True .* supported is False"),
    (config("Gemma3ForCausalLM", attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0 .* supported is None"),
    (config("Gemma3ForConditionalGeneration", text_config=[]), "text_config"),
    (config("SmolLM3ForCausalLM", no_rope_layers=[1, 0]), "no_rope_layers .* 4 layers"),
    (config("Cohere2ForCausalLM", sliding_window=None), "lacks sliding_window"),
    (config(rope_scaling={"type": "linear", "factor": 2.0, "mrope_interleaved": True}), "rope parameter 'mrope_interleaved'"),
    (config(rope_parameters={"rope_type": "default", "factor": 2.0}), "rope parameter 'factor' is not supported for rope type 'default'"),
    (config(rope_scaling={"type": "linear"}), "rope type 'linear' needs 'factor'"),
    (config(rope_scaling={"type": "linear", "factor": "2"}), "factor '2' is not a positive number"),
    (config(rope_scaling=[1]), "rope_scaling"),
    (config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5"),
    (config(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    (config(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    (config(hidden_size=66), "hidden_size 66 is not a multiple"),
    (config(head_dim=15), "head_dim 15 is odd"),
    (config(head_dim=2**31), "head_dim 2147483648 in config.json is not an integer of at most 65536"),
    (config(num_hidden_layers=2**31), "num_hidden_layers 2147483648 in config.json is not an integer of at most 1024"),
    (config(max_position_embeddings=2**31), "max_position_embeddings 2147483648 in config.json is not an integer of at most 16777216"),
    (config(rope_scaling={"type": "yarn", "factor": 2.0**40}), "the rope parameters in config.json are for .* positions"),
    (config(rms_norm_eps=10**400), "rms_norm_eps 1000+ in config.json is not a number"),
    (config(rope_scaling={"type": "yarn", "factor": 2.0}, rope_theta=1.0), "the rope parameters in config.json are out of range"),
    (config(vocab_size=None), "lacks vocab_size"),
    (config(vocab_size="100"), "vocab_size '100' in config.json is not a positive integer"),
    (config(eos_token_id="</s>"), "eos_token_id '</s>'"),
    (config("Qwen3ForCausalLM", layer_types=["chunked_attention"] * 4), "layer_types 'chunked_attention'"),
    (config("Qwen3ForCausalLM", layer_types=["full_attention"]), "layer_types in config.json has 1 entries for num_hidden_layers 4"),
    (config("MistralForCausalLM", layer_types=["full_attention", "sliding_attention"] * 2), "layer_types other than sliding_attention"),
    (config("LlamaForCausalLM", layer_types=["sliding_attention"] * 4), "layer_types other than full_attention"),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals_name_the_feature(refused, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec(refused)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "does not hold a JSON object"), (None, "cannot read")])
def test_unreadable_config(tmp_path: pathlib.Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        load_spec(tmp_path)
