"""JSON files of a model. Imports no torch."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from aengine.errors import ModelLoadError


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object. Raises ModelLoadError when the file is missing or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return value
