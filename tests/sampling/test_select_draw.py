from __future__ import annotations

import numpy as np
import pytest
import torch

from aengine.kernels.params import DRAW_PARAMS, DrawParams
from aengine.sampling.draw import TorchDraw, select_draw

CPU = torch.device("cpu")


def test_torch_draws_where_kernels_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    """On a device that has no kernels of any sort."""
    assert isinstance(select_draw(8, torch.device("meta")), TorchDraw)
    assert "because triton cannot" in caplog.text


def test_a_cpu_has_no_choice(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(select_draw(8, torch.device("cpu")), TorchDraw)
    assert not caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_draw_on_cuda(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    from aengine.sampling.draw import TritonDraw

    assert isinstance(select_draw(151_936, torch.device("cuda"), dtype), TritonDraw)
    assert not caplog.text


def test_top_k_of_more_tokens_than_there_are() -> None:
    """A draft model may have fewer than the model that the parameters are for."""
    host = np.zeros(2, DRAW_PARAMS)
    host["temperature"], host["top_p"], host["top_k"] = 1.0, 1.0, (9, 8)
    params = DrawParams(torch.from_numpy(host.view(np.int32).reshape(2, -1)), torch.zeros(2, dtype=torch.int32))
    logits = torch.zeros(2, 8)
    assert torch.equal(TorchDraw(8, CPU)(logits, host, params), TorchDraw(8, CPU).top_k(logits, params, 8))
