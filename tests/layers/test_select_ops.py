"""Which layer ops go with which attention backend, and that nothing of a device is imported for a CPU."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from aengine.layers.ops import LayerOps, TorchOps
from aengine.runner.torch import loading as select
from aengine.runner.torch.loading import select_ops

CUDA = torch.device("cuda")  # naming it needs none


def chosen(backend: str, device: torch.device = CUDA) -> str:
    return select_ops(backend, torch.bfloat16, 128, device).name


@pytest.mark.parametrize("backend", ["torch_native", "triton", "flashinfer"])
def test_a_cpu_has_torch(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert isinstance(select_ops(backend, torch.float32, 64, torch.device("cpu")), TorchOps)
    assert not caplog.records


def test_the_reference_has_the_reference() -> None:
    assert chosen("torch_native") == "torch"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[LayerOps]:
    """What is run once, in place of running it on a device that may not be there."""
    pytest.importorskip("triton")
    found: list[LayerOps] = []
    monkeypatch.setattr(select, "run_once", lambda ops, dtype, head_dim, device: found.append(ops))
    return found


def test_triton(tried: list[LayerOps], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    assert chosen("triton") == "triton"
    (record,) = caplog.records
    assert record.getMessage() == "layer ops: triton (as the attention backend)"
    assert [ops.name for ops in tried] == ["triton"], "so that nothing is compiled in a step"


def test_triton_that_cannot_compile(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")

    def fails(*given: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(select, "run_once", fails)
    caplog.set_level(logging.INFO, "aengine")
    assert chosen("triton") == "torch"
    assert caplog.records[0].getMessage() == "layer ops: torch (several times slower; triton cannot run: Failed to find C compiler)"


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_without_triton(backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "aengine.kernels.triton.layer_ops", None)  # an import of it fails
    monkeypatch.delattr("aengine.kernels.triton.layer_ops", raising=False)
    monkeypatch.delitem(sys.modules, "aengine.layers.flashinfer_ops", raising=False)  # it needs that import
    caplog.set_level(logging.INFO, "aengine")
    assert chosen(backend) == "torch"
    assert "triton cannot run: " in caplog.records[0].getMessage()


@pytest.mark.skipif(torch.cuda.is_available(), reason="FlashInfer may be possible where there is CUDA")
def test_flashinfer_that_is_not_possible(tried: list[LayerOps], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine")
    assert chosen("flashinfer") == "triton"
    assert caplog.records[-1].getMessage().startswith("layer ops: triton (not flashinfer: ")


@pytest.mark.slow
def test_nothing_of_a_device_is_imported_for_a_cpu() -> None:
    code = """
import sys, torch
import aengine.runner.torch.loading, aengine.sampling.sampler, aengine.runner.torch.executor
cpu = torch.device("cpu")
aengine.runner.torch.loading.select_ops("torch_native", torch.float32, 64, cpu)
aengine.sampling.draw.select_draw(100, cpu)
assert not {"triton", "flashinfer"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
