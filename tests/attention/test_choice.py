"""Which backend is chosen, and what is said about it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
import torch
from fresh_process import run_fresh

from aengine.api.errors import ConfigError
from aengine.attention import AttentionSpec, BackendUnavailableError, Scoring, select_backend

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")


def make_spec(device: str) -> AttentionSpec:
    return AttentionSpec(
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        scoring=(Scoring(1.0),),
        page_size=4,
        dtype=torch.float32,
        device=torch.device(device),
    )


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, backend: str, make: Callable[[AttentionSpec], object]) -> None:
    module = types.ModuleType(f"aengine.attention.{'flashinfer.backend' if name == 'flashinfer' else name}")
    setattr(module, backend, make)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def unavailable(reason: str) -> Callable[[AttentionSpec], object]:
    def make(_: AttentionSpec) -> object:
        raise BackendUnavailableError(reason)

    return make


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level("INFO", logger="aengine")
    return lambda: [record.message for record in caplog.records]


def test_flashinfer_comes_first(monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    made = object()
    stand_in(monkeypatch, "flashinfer", "FlashInferBackend", lambda spec: made)
    stand_in(monkeypatch, "triton", "TritonBackend", unavailable("not asked"))
    assert select_backend("auto", make_spec("cuda")) is made
    assert lines() == ["attention backend: flashinfer (the first choice on cuda)"]


def test_triton_comes_next(monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    made = object()
    stand_in(monkeypatch, "flashinfer", "FlashInferBackend", unavailable("not installed"))
    stand_in(monkeypatch, "triton", "TritonBackend", lambda spec: made)
    assert select_backend("auto", make_spec("cuda")) is made
    assert lines() == ["attention backend: triton (flashinfer: not installed)"]


def test_torch_native_comes_last(monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    stand_in(monkeypatch, "flashinfer", "FlashInferBackend", unavailable("not installed"))
    stand_in(monkeypatch, "triton", "TritonBackend", unavailable("no compiler"))
    assert select_backend("auto", make_spec("cuda")).name == "torch_native"
    assert lines() == ["attention backend: torch_native (flashinfer: not installed; triton: no compiler)"]


def test_a_fault_in_a_backend_is_not_taken_for_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: AttentionSpec) -> object:
        raise ZeroDivisionError

    stand_in(monkeypatch, "flashinfer", "FlashInferBackend", fail)
    with pytest.raises(ZeroDivisionError):
        select_backend("auto", make_spec("cuda"))


def test_on_a_cpu(lines: Callable[[], list[str]]) -> None:
    assert select_backend("auto", make_spec("cpu")).name == "cpu"
    assert lines() == ["attention backend: cpu (the first choice on cpu)"]


def test_on_a_cpu_without_kernels(monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]) -> None:
    stand_in(monkeypatch, "cpu", "CpuBackend", unavailable("no compiler"))
    assert select_backend("auto", make_spec("cpu")).name == "torch_native"
    assert lines() == ["attention backend: torch_native (cpu: no compiler)"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_native_can_be_asked_for(device: str, lines: Callable[[], list[str]]) -> None:
    assert select_backend("torch_native", make_spec(device)).name == "torch_native"
    assert lines() == ["attention backend: torch_native (asked for)"]


@pytest.mark.parametrize(("name", "backend"), [("flashinfer", "FlashInferBackend"), ("triton", "TritonBackend")])
def test_what_was_asked_for_is_not_replaced(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], list[str]]
) -> None:
    stand_in(monkeypatch, name, backend, unavailable("head_dim 7 is too odd"))
    with pytest.raises(ConfigError, match=f"attention_backend: '{name}' is not possible here: head_dim 7 is too odd"):
        select_backend(name, make_spec("cuda"))
    assert not lines()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="attention_backend: 'flash' is not one of auto, cpu, flashinfer, triton, torch_native"):
        select_backend("flash", make_spec("cpu"))


@NO_GPU
def test_real_absences(lines: Callable[[], list[str]]) -> None:
    """The backends' own reasons, on a machine that has no device, whatever is installed."""
    assert select_backend("auto", make_spec("cuda")).name == "torch_native"
    (line,) = lines()
    assert line.startswith("attention backend: torch_native (flashinfer: ")
    assert "; triton: " in line
    for name in ("flashinfer", "triton"):
        with pytest.raises(ConfigError, match=f"attention_backend: '{name}' is not possible here: "):
            select_backend(name, make_spec("cuda"))


@pytest.mark.slow
def test_without_triton() -> None:
    """And on a CPU nobody tries to import it."""
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from aengine.attention import AttentionSpec, Scoring, select_backend
        from aengine.api.errors import ConfigError

        def spec(device):
            return AttentionSpec(2, 1, 16, (Scoring(1.0),), 4, torch.float32, torch.device(device))

        select_backend("auto", spec("cpu"))
        assert not [name for name in sys.modules if name.startswith("aengine.kernels.triton")]
        assert "flashinfer" not in sys.modules
        try:
            select_backend("triton", spec("cuda"))
        except ConfigError as error:
            assert "'triton' is not possible here: Triton cannot be imported: " in str(error), error
        else:
            raise AssertionError("no error")
    """
    run_fresh(code)
