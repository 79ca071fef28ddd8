"""FlashInfer's layer ops against plain torch: over the stand-in and Triton's interpreter on a CPU, and over the real package on a GPU."""

from __future__ import annotations

import pytest
import torch
from attention_backends import backend_marks
from flashinfer_standin import StandIn
from torch import Tensor
from triton_mode import INTERPRETER, needs_interpreter

from aengine.attention import BackendUnavailableError
from aengine.kernels.params import Activation
from aengine.layers.flashinfer_ops import FlashInferOps
from aengine.layers.ops import LayerOps, TorchOps

EPS = 1.0  # large, so that it counts
HEAD_DIM = 128
DEVICES = [INTERPRETER, pytest.param("cuda", marks=backend_marks("flashinfer"))]


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def library(device: torch.device) -> StandIn | None:
    return StandIn() if device.type == "cpu" else None


@pytest.fixture
def ops(dtype: torch.dtype, device: torch.device, library: StandIn | None) -> LayerOps:
    made = FlashInferOps(dtype, HEAD_DIM, device, library)
    if library is not None:
        library.calls.clear()
    return made


def numbers(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device=device, dtype=dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """To what rounding once instead of twice may change."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=3 * eps, atol=3 * eps)


@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (3, 1024), (5, 1536), (2, 100)])
def test_rms_norm(ops: LayerOps, dtype: torch.dtype, device: torch.device, tokens: int, size: int) -> None:
    x, weight = numbers(device, dtype, tokens, size, scale=3.0), numbers(device, dtype, size, seed=1)
    before = x.clone()
    assert_near(ops.rms_norm(x, weight, EPS), TorchOps().rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (3, 2560)])
def test_add_rms_norm(ops: LayerOps, dtype: torch.dtype, device: torch.device, tokens: int, size: int) -> None:
    x, residual = numbers(device, dtype, tokens, size), numbers(device, dtype, tokens, size, seed=1, scale=9.0)
    weight = numbers(device, dtype, size, seed=2)
    expected = TorchOps().add_rms_norm(x, residual, weight, EPS)
    normed, total = ops.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(total, expected[1])
    assert_near(normed, expected[0])


@pytest.mark.parametrize(
    ("tokens", "size", "activation", "kernel"),
    [(1, 8, Activation.SILU, True), (3, 3072, Activation.SILU, True), (2, 100, Activation.SILU, False), (2, 8, Activation.GELU, False)],
)
def test_gated(
    ops: LayerOps,
    dtype: torch.dtype,
    device: torch.device,
    library: StandIn | None,
    tokens: int,
    size: int,
    activation: Activation,
    kernel: bool,
) -> None:
    """By Triton where the halves of a row are not aligned, and where it is not SiLU."""
    gate_up = numbers(device, dtype, tokens, 2 * size, scale=2.0)
    assert_near(ops.gated(gate_up, activation), TorchOps().gated(gate_up, activation))
    if library is not None:
        assert (library.calls == ["silu_and_mul"]) == kernel


def test_weights_of_another_dtype_are_refused(ops: LayerOps, dtype: torch.dtype, device: torch.device) -> None:
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    x, weight = numbers(device, dtype, 2, HEAD_DIM), torch.ones(HEAD_DIM, device=device, dtype=other)
    for call in (
        lambda: ops.rms_norm(x, weight, EPS),
        lambda: ops.add_rms_norm(x, x.clone(), weight, EPS),
        lambda: ops.add_rms_norm(x, x.float(), weight.to(dtype), EPS),
    ):
        with pytest.raises(TypeError, match=r"as the activations are, not torch.(b?float16|float32)"):
            call()


def test_float32_weights(ops: LayerOps, dtype: torch.dtype, device: torch.device) -> None:
    """Gemma's, by Triton here: the product alone is rounded."""
    x, residual = numbers(device, dtype, 2, 3 * HEAD_DIM), numbers(device, dtype, 2, 3 * HEAD_DIM, seed=1)
    wide = numbers(device, torch.float32, 3 * HEAD_DIM, seed=2)
    torch_ops = TorchOps()
    for name, *given in (
        ("rms_norm", x, wide, EPS),
        ("add_rms_norm", x, residual, wide, EPS),
    ):
        expected = getattr(torch_ops, name)(*given)
        found = getattr(ops, name)(*(value.clone() if isinstance(value, Tensor) else value for value in given))
        for one, two in zip(found, expected, strict=True):
            assert_near(one, two)


def test_models_without_kernels_are_refused() -> None:
    cpu = torch.device("cpu")
    for arguments, reason in (
        ((torch.float32, 128, cpu, StandIn()), "not torch.float32"),
        ((torch.bfloat16, 96, cpu, StandIn()), "not 96"),
        ((torch.bfloat16, 128, cpu), "needs a CUDA device"),
    ):
        with pytest.raises(BackendUnavailableError, match=reason):
            FlashInferOps(*arguments)


@needs_interpreter
def test_everything_runs_once_at_the_start() -> None:
    library = StandIn()
    FlashInferOps(torch.bfloat16, 64, torch.device("cpu"), library)
    assert set(library.calls) == {"rmsnorm", "fused_add_rmsnorm", "silu_and_mul"}
