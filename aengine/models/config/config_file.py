"""The config.json of a model, whether it is a file or is made of the metadata of a GGUF file."""

from __future__ import annotations

import pathlib
from typing import Any

from aengine.models.config.json_file import read_json
from aengine.models.config.reader import CONFIG_JSON, ConfigSource
from aengine.models.gguf.gguf_config import read_config as read_gguf
from aengine.models.gguf.gguf_file import is_gguf
from aengine.models.text_part import text_config


def read_config(model: pathlib.Path) -> tuple[dict[str, Any], ConfigSource]:
    """Read the config of a directory with a config.json, or of a GGUF file; the `ConfigSource` says what errors about it name. Raises
    ModelLoadError."""
    return read_gguf(model) if is_gguf(model) else (read_json(model / "config.json"), CONFIG_JSON)


def read_text_config(model: pathlib.Path) -> dict[str, Any]:
    """Read the config of the part for text, or the whole config if the model is all text. Raises ModelLoadError."""
    config, _ = read_config(model)
    return text_config(config) or config
