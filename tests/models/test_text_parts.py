"""The text parts of models that take images or audio, too: as Transformers computes them for text alone."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from driver import GREEDY, Driver, record_logits
from multimodal_models import DESCRIBED, LOADED, NOT_MADE, REFUSED, any_config, make, tiny_config
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from aengine.api.config import EngineConfig
from aengine.api.errors import ModelLoadError
from aengine.kernels.arrays import as_tensor
from aengine.models.choice import find_spec, implementation_of
from aengine.models.config.model_config import load_spec, read_spec
from aengine.models.families import FAMILIES
from aengine.models.loading.weights import open_weights
from aengine.runner.runner import ModelRunner

QUICK = ("llava", "qwen2_5_vl", "mistral3", "paligemma")
LENGTHS = (1, 30, 3, 9)
COUNT = 12


def make_runner(path: pathlib.Path, **options: Any) -> ModelRunner:
    settings = {"dtype": "float32", "device": "cpu", "page_size": 4, "max_num_seqs": 4, "kv_cache_memory": 16 << 20, **options}
    return ModelRunner(EngineConfig(model=str(path), **settings), path)


@torch.no_grad()
def check(runner: ModelRunner, model: Any, chunk: int | None = None) -> None:
    """Every greedy token is that of the whole model in Transformers after those before it; its logits are within 1e-4."""
    prompts = [np.random.default_rng(length).integers(3, 200, length).tolist() for length in LENGTHS]
    seen = record_logits(runner)
    outputs = Driver(runner, chunk=chunk).generate(prompts, COUNT, [GREEDY] * len(prompts))
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        expected = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
        assert expected.argmax(-1).tolist() == output
        if chunk is None:
            error = (torch.stack([logits[row] for logits in seen]) - expected).abs().amax(-1) / expected.abs().amax(-1)
            assert float(error.max()) < 1e-4
    assert len({token for output in outputs for token in output}) > 3, "the reference is degenerate"


@pytest.mark.parametrize("model_type", slow_but(QUICK, LOADED))
def test_a_type_generates_what_transformers_does(model_type: str, tmp_path: pathlib.Path) -> None:
    model = make(tiny_config(model_type))
    model.save_pretrained(tmp_path)
    needs_images = model_type in ("blip-2", "instructblip", "instructblipvideo")  # for its own forward pass; its text part does not
    runner = make_runner(tmp_path)
    assert implementation_of(runner.spec) == LOADED[model_type]
    check(runner, model.language_model if needs_images else model)
    runner.close()


def test_every_type_is_known() -> None:
    tables = (LOADED.keys(), REFUSED.keys(), DESCRIBED.keys(), NOT_MADE)
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) <= set().union(*tables)


def save_config(model_type: str, path: pathlib.Path) -> None:
    config = any_config(model_type)
    config.architectures = [MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[model_type]]
    config.save_pretrained(path)


@pytest.mark.parametrize("model_type", slow_but(("inkling2", "florence2"), REFUSED))
def test_a_type_is_refused_in_a_sentence(model_type: str, tmp_path: pathlib.Path) -> None:
    save_config(model_type, tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        find_spec(tmp_path, "auto")
    assert REFUSED[model_type] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", slow_but((), DESCRIBED))
def test_a_type_is_described(model_type: str, tmp_path: pathlib.Path) -> None:
    save_config(model_type, tmp_path)
    assert implementation_of(find_spec(tmp_path, "auto")) == DESCRIBED[model_type]


@pytest.mark.slow
def test_a_part_whose_whole_cannot_be_built(tmp_path: pathlib.Path) -> None:
    """Gemma 3n, whose vision tower needs a library that is not there."""
    config = tiny_config("gemma3n")
    text = AutoModelForCausalLM.from_config(config.text_config, attn_implementation="eager").float().eval()
    for parameter in text.parameters():
        parameter.data.normal_(0.0, 0.2)
    config.architectures = ["Gemma3nForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    text.save_pretrained(tmp_path / "text")
    stored = load_file(tmp_path / "text/model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    save_file({**renamed, "model.vision_tower.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    runner = make_runner(tmp_path)
    assert implementation_of(runner.spec) == "native"
    check(runner, text)
    runner.close()


def published_llava(**text: Any) -> dict[str, Any]:
    return {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}


@pytest.mark.parametrize("model_type", [key for key, family in FAMILIES.items() if family.part_defaults])
def test_what_a_text_config_leaves_out(model_type: str) -> None:
    """It has what differs from the class of Transformers alone: not even sizes, as that of LLaVA 1.5."""
    unscaled = {"logit_scale": 1.0} if model_type == "cohere2" else {}
    whole = CONFIG_MAPPING[model_type](**unscaled).to_dict()
    found = read_spec(published_llava(model_type=model_type, tie_word_embeddings=False, **unscaled))
    expected = read_spec(published_llava(**{**whole, "tie_word_embeddings": False, "eos_token_id": None}))
    assert found.is_part
    assert (found.layers, found.vocab_size, found.hidden_size, found.norm) == (
        *(expected.layers, expected.vocab_size, expected.hidden_size),
        expected.norm,
    )
    assert found.max_position_embeddings == expected.max_position_embeddings


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Any]:
    path = tmp_path_factory.mktemp("llava")
    model = make(tiny_config("llava"))
    model.save_pretrained(path)
    return path, model


FORMS = {  # of the text part and its head, in published checkpoints
    "language_model.model.": "language_model.lm_head.",
    "model.language_model.": "lm_head.",
    "model.text_model.": "lm_head.",
    "thinker.model.": "thinker.lm_head.",
    "model.": "lm_head.",
}


@pytest.mark.parametrize("begin", FORMS)
def test_names_of_published_checkpoints(begin: str, llava: tuple[pathlib.Path, Any], tmp_path: pathlib.Path) -> None:
    path, model = llava
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    text = model.model.language_model.state_dict()
    tensors = {begin + name: tensor.clone() for name, tensor in text.items()}
    tensors |= {f"{FORMS[begin]}weight": model.lm_head.weight.detach().clone(), "visual.blocks.0.weight": torch.zeros(1)}
    tensors["talker.model.embed_tokens.weight"] = torch.zeros(7, 64)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    spec = load_spec(tmp_path)
    found = open_weights(spec, tmp_path).tensors
    assert not spec.tied_head
    assert found.keys() == {"lm_head.weight", *(f"model.{name}" for name in text)}
    assert torch.equal(as_tensor(found["model.layers.1.mlp.up_proj.weight"].read_numbers()), text["layers.1.mlp.up_proj.weight"])
    assert torch.equal(as_tensor(found["lm_head.weight"].read_numbers()), model.lm_head.weight)


def test_two_texts(llava: tuple[pathlib.Path, Any], tmp_path: pathlib.Path) -> None:
    path, _ = llava
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    save_file({**tensors, "other.embed_tokens.weight": tensors[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"has several embeddings of text: .*other\.embed_tokens\.weight"):
        open_weights(load_spec(path), tmp_path)


@pytest.mark.parametrize(
    ("stored", "outer", "inner", "tied"), [(True, False, True, False), (False, None, None, True), (False, False, True, True)]
)
def test_a_head_in_the_checkpoint_decides(
    stored: bool, outer: bool | None, inner: bool | None, tied: bool, llava: tuple[pathlib.Path, Any], tmp_path: pathlib.Path
) -> None:
    """Which of the two configs says whether it is tied depends on the type."""
    path, _ = llava
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = outer, inner
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor for name, tensor in load_file(path / "model.safetensors").items() if stored or "lm_head" not in name}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_spec(tmp_path).tied_head == tied


def test_a_flat_config(tmp_path: pathlib.Path) -> None:
    """Qwen2-VL and 2.5-VL are published with the keys of the text among those of the whole."""
    config = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vision_config": {"hidden_size": 9}}
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    flat = read_spec({**config, **sizes, **rope, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False})
    text = CONFIG_MAPPING["qwen2_vl"](**sizes, **rope, num_key_value_heads=2, rms_norm_eps=1e-6).to_dict()
    nested = read_spec({**config, "text_config": text["text_config"], "tie_word_embeddings": False})
    assert (flat.layers, flat.norm, flat.tied_head) == (nested.layers, nested.norm, nested.tied_head)
    assert flat.layers[0].attention.num_kv_heads == 2


def test_experts_as_they_are_published(tmp_path: pathlib.Path) -> None:
    """Qwen3-VL's stand transposed in one tensor; Transformers saves them as its own modules have them."""
    model = make(tiny_config("qwen3_vl_moe"))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    published = {name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(published, tmp_path / "model.safetensors", {"format": "pt"})
    runner = make_runner(tmp_path)
    assert implementation_of(runner.spec) == "native"
    check(runner, model, chunk=7)
    runner.close()
