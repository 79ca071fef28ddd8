"""Models that differ from the bundled one in nothing that shows but their tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from aengine.models.loading.hub import resolve_model


def changed_model(path: Path) -> Path:
    """The bundled model with other weights and another chat template."""
    model = shutil.copytree(resolve_model("demo"), path)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}, said")
    return model
