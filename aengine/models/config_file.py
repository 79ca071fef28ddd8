"""The config.json of a model, whether it is a file or is made of the metadata of a GGUF file."""

from __future__ import annotations

import pathlib
from typing import Any

from aengine.models.config_reader import CONFIG_JSON, Source
from aengine.models.gguf.config import read_config as read_gguf
from aengine.models.gguf.file import is_gguf
from aengine.models.json_file import read_json


def read_config(model: pathlib.Path) -> tuple[dict[str, Any], Source]:
    """Of a directory with a config.json, or of a GGUF file; and what errors about it name. Raises ModelLoadError."""
    return read_gguf(model) if is_gguf(model) else (read_json(model / "config.json"), CONFIG_JSON)
