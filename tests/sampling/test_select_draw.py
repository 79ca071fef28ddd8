from __future__ import annotations

import pytest
import torch

from aengine.sampling.draw import select_draw
from aengine.sampling.torch_draw import TorchDraw


def test_torch_draws_where_kernels_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    """On a device that has no kernels of any sort."""
    assert isinstance(select_draw(8, torch.device("meta")), TorchDraw)
    assert "because triton cannot" in caplog.text


def test_a_cpu_has_no_choice(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(select_draw(8, torch.device("cpu")), TorchDraw)
    assert not caplog.text
