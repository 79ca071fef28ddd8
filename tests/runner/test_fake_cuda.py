"""The CUDA device without a GPU notices what it is there to notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_cuda import CUDA, FakeCuda, HostWaitError
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._device import _device_constructors
from triton_mode import INTERPRETED  # before triton is imported

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is a device")


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.empty(4).copy_(x, non_blocking=True),
        lambda x: torch.empty(4, pin_memory=True).copy_(x),
        lambda x: x.copy_(torch.ones(4), non_blocking=True),
        lambda x: torch.ones(4).to(CUDA),
        lambda x: torch.ones(4).pin_memory().to(CUDA),
        lambda x: torch.tensor([1, 2], device=CUDA),
        lambda x: x[torch.tensor([1, 2])],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
    ],
)
def test_host_waits(wait: Callable[[Tensor], object]) -> None:
    fake = FakeCuda()
    with fake.active():
        x = torch.ones(4, device=CUDA)
        wait(x)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        with pytest.raises(HostWaitError):
            wait(x)
        graph.capture_end()
        fake.strict = True
        with pytest.raises(HostWaitError):
            wait(x)


@pytest.mark.parametrize("shape", [lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.masked_select(x > 0), lambda x: x.unique()])
def test_shapes_that_depend_on_numbers(shape: Callable[[Tensor], object]) -> None:
    with FakeCuda().active(), pytest.raises(DynamicOutputShapeException):
        shape(torch.ones(4, device=CUDA))


def test_two_devices_in_an_operation() -> None:
    with FakeCuda().active(), pytest.raises(RuntimeError, match=r"same device|different devices"):
        torch.ones(4, device=CUDA) + torch.ones(4)


def test_launches() -> None:
    fake = FakeCuda()
    with fake.active():
        x = torch.zeros(4, 6, device=CUDA)
        (x.view(6, 4).t()[1:] @ x.new_empty(6, 2)).relu_()
        host = torch.empty(4, 6, pin_memory=True)
        x.copy_(host, non_blocking=True)
        host.add_(1.0)
    assert fake.launches == ["zeros", "mm", "relu_"]


def test_what_torch_keeps_is_not_of_the_fake_device() -> None:
    """Transformers asks in this way whether a model is made without numbers; its rotary frequencies were garbage."""
    _device_constructors.cache_clear()
    with FakeCuda().active(), torch.device("cpu"):
        torch.zeros(1)
    with torch.device("meta"):
        assert torch.tensor([]).device.type == "meta"
