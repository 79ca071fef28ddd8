"""python -m tools.gpu.facts: hardware and versions as one line of JSON, with "gpu" only where torch finds a CUDA device."""

from __future__ import annotations

import json
from typing import Any


def facts() -> dict[str, Any]:
    """What is wrong with our own package is told under "problem": its tests will show it, and say more."""
    import torch

    if not torch.cuda.is_available():
        return {"torch": torch.__version__}
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    try:
        from aengine.bench.report import environment

        return found | environment()
    except Exception as error:
        return {**found, "problem": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    print(json.dumps(facts()))
