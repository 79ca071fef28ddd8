"""Shapes of public models, so that a benchmark needs no download: a config.json with what decides their shape, and the demo tokenizer.

Owns the numbers, which are those of the published config files (Qwen/Qwen3-0.6B, Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B), and the folder
they are written to. Weights are random (`load_format` dummy): a step takes as long whatever they are. The tokenizer knows far fewer ids
than the models; ids that it lacks decode to nothing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aengine.models.hub import DEMO, resolve_model


def _qwen3(
    *, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, vocab: int = 151_936, tied_head: bool = True
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643 if vocab > 151643 else None,
        "eos_token_id": 151645 if vocab > 151645 else None,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied_head,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": vocab,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    # The first is of no published model: it is small enough for a CPU.
    "qwen3-60m": _qwen3(layers=8, hidden=512, intermediate=1536, heads=8, kv_heads=4, head_dim=64, vocab=65_536),
    "qwen3-0.6b": _qwen3(layers=28, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128),
    "qwen3-8b": _qwen3(layers=36, hidden=4096, intermediate=12_288, heads=32, kv_heads=8, head_dim=128, tied_head=False),
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def describe(name: str) -> str:
    """One line for a person."""
    config = SHAPES[name]
    heads = f"{config['num_attention_heads']}/{config['num_key_value_heads']} heads"
    return f"{name} ({config['num_hidden_layers']} layers, hidden {config['hidden_size']}, {heads}, vocabulary {config['vocab_size']})"


@contextmanager
def shape_folder(name: str) -> Iterator[Path]:
    """A folder with config.json and tokenizer, called like the shape, that is there while inside. Raises ValueError for an unknown name."""
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; there are {', '.join(SHAPES)}")
    demo = resolve_model(DEMO)
    with tempfile.TemporaryDirectory(prefix="aengine-shape-") as parent:
        folder = Path(parent) / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=2) + "\n")
        for file in _TOKENIZER_FILES:
            shutil.copyfile(demo / file, folder / file)
        yield folder
