"""The config of a model, be it a config.json or the metadata of a GGUF file. The text part of a model that also takes images or audio:
where its config lies, and which tensors of a checkpoint are its own.

Owns what such models have in common, whoever made them. Knows no family beyond how its names begin, and nothing of the other parts.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from aengine.api.errors import ModelLoadError
from aengine.models.config.reader import CONFIG_JSON, ConfigSource
from aengine.models.gguf.gguf_config import read_config as read_gguf
from aengine.models.gguf.gguf_file import is_gguf
from aengine.models.loading.hub import shortened
from aengine.models.model_files import read_json

_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
_FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Model types whose config.json has the keys of its text part among those of the whole -> the model type of that part."""
_OF_THE_WHOLE = ("architectures", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "quantization")
_TIED = "tie_word_embeddings"
_LEADING = frozenset({"model", "language_model", "text_model", "llm", "thinker"})


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the part that reads and writes text, with what the whole says of all parts; None for a model of text alone. Raises
    ModelLoadError.

    The head is tied to the embedding if the whole or the part says so, or neither says anything: Transformers looks into the one or the
    other, by the type of the whole. A head of its own in the checkpoint decides, see `has_own_head`.
    """
    part: Mapping[str, Any] = config
    while (key := next((key for key in _KEYS if part.get(key) is not None), None)) is not None:
        if not isinstance(part[key], dict):
            raise ModelLoadError(f"{key} {part[key]!r} in config.json is not an object")
        part = part[key]
    if part is config:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in _FLAT:
            return None
        part = {**config, "model_type": _FLAT[model_type]}
    of_the_whole = {key: config[key] for key in _OF_THE_WHOLE if config.get(key) is not None}
    said = [each[_TIED] for each in (config, part) if each.get(_TIED) is not None]
    wrong = [value for value in said if not isinstance(value, bool)]
    return {**part, **of_the_whole, _TIED: wrong[0] if wrong else any(said) or not said}


def text_names(shapes: Mapping[str, tuple[int, ...]], embedding: str, head: str, embedding_shape: tuple[int, ...]) -> dict[str, str]:
    """The names of a checkpoint's tensors that belong to its text part -> the names that a model of text alone has for them.

    `shapes` are those of the checkpoint, by name; `embedding` and `head` the names of these modules in a model of text alone, such as
    model.embed_tokens and lm_head. The part is what begins as the name of its embedding does; the head stands beside the part, or in a
    module around it. Raises ModelLoadError for a checkpoint with several such embeddings of `embedding_shape`.
    """
    first_word, dot, rest = embedding.partition(".")
    ending = f"{rest}.weight"
    begins = [name.removesuffix(ending) for name in shapes if name == ending or name.endswith(f".{ending}")]
    if len(begins) > 1:
        begins = [begin for begin in begins if shapes[begin + ending] == embedding_shape]
    if len(begins) > 1:
        raise ModelLoadError(f"the checkpoint has several embeddings of text: {shortened([begin + ending for begin in begins])}")
    if not begins:
        return {name: name for name in shapes}
    (begin,) = begins
    modules = {name.rpartition(".")[0] for name in shapes}
    own_head = next((around + head for around in _around(begin) if around + head in modules), head)
    found = {name: first_word + dot + name.removeprefix(begin) for name in shapes if name.startswith(begin)}
    return found | {name: head + name.removeprefix(own_head) for name in shapes if name.startswith(f"{own_head}.")}


def _around(begin: str) -> Iterator[str]:
    """Yield a prefix and all that are around it: for `a.b.` itself, `a.`, and nothing."""
    words = begin.split(".")[:-1]
    for count in range(len(words), -1, -1):
        yield "".join(f"{word}." for word in words[:count])


def text_module(module: str) -> str:
    """The name of a module of the text part without the words that it begins with: layers.0.mlp for model.language_model.layers.0.mlp."""
    words = module.split(".")
    while len(words) > 1 and words[0] in _LEADING:
        words.pop(0)
    return ".".join(words)


def read_config(model: pathlib.Path) -> tuple[dict[str, Any], ConfigSource]:
    """Read the config of a directory with a config.json, or of a GGUF file; the `ConfigSource` says what errors about it name. Raises
    ModelLoadError."""
    if is_gguf(model):
        return read_gguf(model)
    config, of_modelopt, of_quanto = read_json(model / "config.json"), model / "hf_quant_config.json", model / "quanto_qmap.json"
    if not config.get("quantization_config") and of_modelopt.is_file():  # where older versions of ModelOpt wrote it
        config["quantization_config"] = {"quant_method": "modelopt", **(read_json(of_modelopt).get("quantization") or {})}
    if not config.get("quantization_config") and of_quanto.is_file():
        config["quantization_config"] = {"quant_method": "quanto", "modules": read_json(of_quanto)}
    return config, CONFIG_JSON


def read_text_config(model: pathlib.Path) -> dict[str, Any]:
    """Read the config of the part for text, or the whole config if the model is all text. Raises ModelLoadError."""
    config, _ = read_config(model)
    return text_config(config) or config
