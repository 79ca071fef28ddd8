"""Files of a model: regular ones, mapped ones, those that are JSON, and those that are there whole or not at all. And what a model is that
cannot be loaded as it is: checkpoints in the formats of other programs, and models that generate no text.

Owns one sentence for each, which names what the files are and what to take instead. Imports no torch.
"""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from aengine.api.errors import ModelLoadError

_CONVERTED = "take the checkpoint of the same model with config.json and model*.safetensors"
_META = f"the original format of Meta: {_CONVERTED}, or convert it with convert_llama_weights_to_hf.py of transformers"
_MISTRAL = f"the format of Mistral's own library: {_CONVERTED}, or convert it with convert_mistral_weights_to_hf.py of transformers"
_EITHER = f"the format of Meta or Mistral: {_CONVERTED}"
_MLX = "an old format of MLX: take the checkpoint that it was converted from, or one quantised as GPTQ, AWQ, FP8 or GGUF"
_HEADS = {
    "TokenClassification": "gives labels of tokens",
    "QuestionAnswering": "finds answers in a given text",
    "MultipleChoice": "chooses one of several given answers",
    "NextSentencePrediction": "tells whether one sentence follows another",
    "ImageClassification": "gives labels of images",
    "AudioClassification": "gives labels of recordings",
}
_HEAD = re.compile(rf"\w+For({'|'.join(_HEADS)})")
_ENCODERS = frozenset(
    [
        *("albert", "bert", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm"),
        *("eurobert", "flaubert", "gte", "ibert", "jina_embeddings_v3", "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert"),
        *("modernbert", "mpnet", "nomic_bert", "nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roformer", "squeezebert"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    ]
)
CLASSIFIER = "ForSequenceClassification"
"""The end of the architecture of a model that gives scores of whole texts."""


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class that a config.json names; empty if there is none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def is_encoder(model_type: str, architecture: str, is_decoder: bool) -> bool:
    """Whether a model gives vectors, and no next token."""
    return model_type in _ENCODERS and not is_decoder and not architecture.endswith(("ForCausalLM", "LMHeadModel"))


def refuse_config(config: Mapping[str, Any]) -> None:
    """Raises ModelLoadError for the config.json of a model that generates no text."""
    name = architecture_of(config)
    head = _HEAD.fullmatch(name)
    if head is not None:
        raise ModelLoadError(
            f"{name} is a model that {_HEADS[head[1]]} and generates none: take a ...ForCausalLM checkpoint, or run this one with a"
            " pipeline of transformers"
        )


def format_without_config(names: Collection[str]) -> str:
    """The format of a directory without config.json that has files of these names, and what to do; empty for one that is not known."""
    if any(re.fullmatch(r"weights.*\.npz", name) for name in names):
        return f"its *.npz files are in {_MLX}"
    if "params.json" not in names:
        return ""
    if any(re.fullmatch(r"consolidated.*\.pth", name) for name in names):
        return f"its params.json and consolidated.*.pth are in {_META}"
    if any(re.fullmatch(r"tekken\.json|consolidated.*\.safetensors", name) for name in names):
        return f"its params.json and consolidated*.safetensors are in {_MISTRAL}"
    return f"its params.json is of {_EITHER}"


def format_of_tensors(names: Collection[str]) -> str:
    """The format of a checkpoint whose tensors have these names, and what to do; empty for that of Hugging Face, and an unknown one."""
    if "layers.0.attention.wq.weight" in names and "tok_embeddings.weight" in names:
        return _META if "rope.freqs" in names else _EITHER
    return ""


def require_regular(path: pathlib.Path) -> None:
    """Raises ModelLoadError for what is there and is no file of bytes: to read a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        raise ModelLoadError(f"{path} is not a regular file")


def mapped(file: BinaryIO) -> mmap.mmap:
    """A file that is not empty, mapped. What is written to it changes the memory alone: torch takes no arrays that cannot be written."""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


@contextmanager
def whole_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Another name, under which the file is written that is then at `path`, on the disk and in one move; its name tells which process
    writes. Nothing new is at `path`, nor under that name, where the block raises."""
    writing = path.with_name(f"{path.name}.{threading.get_native_id()}.{os.getpid()}.writing")
    try:
        yield writing
        _sync(writing, os.O_RDONLY)
        os.rename(writing, path)
        _sync(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise


def _sync(path: pathlib.Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object. Raises ModelLoadError when the file is missing or is something else."""
    require_regular(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return value
