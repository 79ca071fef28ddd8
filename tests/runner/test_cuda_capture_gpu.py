"""Recordings in pieces on a device: their memory, and what a failed one leaves in torch's allocator."""

from __future__ import annotations

import pytest
import torch

from aengine.runner.torch.capture import CudaCapture, Pieces
from aengine.runner.torch.device import DeviceStream, find_device, give_back_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_pieces_use_the_memory_again_that_the_work_gives_up() -> None:
    device = find_device("cuda")
    with DeviceStream(device).enter_stream():
        capture = CudaCapture(device)
        pieces = Pieces(capture)
        x, out = (torch.ones(1 << 20, dtype=torch.bfloat16, device=device) for _ in range(2))
        places = []

        def work() -> None:
            twice = (x * 2.0).view(1024, 1024)
            places.append(twice.data_ptr())
            pieces.interrupt(lambda given: out.copy_(given.reshape(-1)), twice.t())
            del twice
            thrice = x * 3.0
            places.append(thrice.data_ptr())
            out.add_(thrice)

        before = torch.cuda.memory_allocated(device)
        with capture.session():
            pieces.record(work)
        assert torch.cuda.memory_allocated(device) - before < 1 << 20, "nothing of 2 MiB is kept"
        assert places[2] == places[3], "what is made after an interruption is where that before it was"
        for value in (5.0, 7.0):
            x.fill_(value)
            pieces.replay()
            assert (out == 5 * value).all()


def test_a_capture_that_fails_leaves_nothing_in_the_allocator() -> None:
    device = find_device("cuda")
    with DeviceStream(device).enter_stream():
        x, out = (torch.ones(1 << 24, device=device) for _ in range(2))
        give_back_memory(device)
        before = torch.cuda.memory_reserved(device)

        def recorded(*, waits: bool) -> Pieces:
            capture = CudaCapture(device)
            pieces = Pieces(capture)

            def work() -> None:
                out.copy_(x * 2.0)
                if waits:
                    out[0].item()

            with capture.session():
                pieces.record(work)
            return pieces

        with pytest.raises(RuntimeError, match="captur"):
            recorded(waits=True)
        give_back_memory(device)
        assert torch.cuda.memory_reserved(device) - before < 32 << 20, "the pool of 64 MiB is gone"
        pieces = recorded(waits=False)
        x.fill_(4.0)
        pieces.replay()
        assert (out == 8.0).all()
