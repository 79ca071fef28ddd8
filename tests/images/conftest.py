from __future__ import annotations

from collections.abc import Callable

import pytest
from image_models import Reference, publish, save_model


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """A saved model by its type, in the code of transformers; made once."""
    made: dict[str, Reference] = {}

    def find(model_type: str) -> Reference:
        if model_type == "llama4":
            pytest.importorskip("torchvision", reason="its image processor is written for torchvision alone")
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            save_model(model_type, folder)
            made[model_type] = Reference(model_type, folder)
            publish(model_type, folder)
        return made[model_type]

    return find
