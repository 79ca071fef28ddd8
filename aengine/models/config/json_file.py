"""Files of a model: regular ones, and those that are JSON. Imports no torch."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from aengine.api.errors import ModelLoadError


def require_regular(path: pathlib.Path) -> None:
    """Raises ModelLoadError for what is there and is no file of bytes: to read a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        raise ModelLoadError(f"{path} is not a regular file")


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
