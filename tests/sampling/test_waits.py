"""Sampling never makes the host wait for a device.

torch's device "meta" stands in for one: its tensors have no contents, so whatever the host would have to wait for raises an error. It takes
the paths of devices other than a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parity import TakingTurns
from plain import GREEDY
from tensor_sampler import tensor_sampler
from torch.utils._python_dispatch import TorchDispatchMode

from aengine.kernels.params import DRAW_PARAMS
from aengine.runner.setup import warm_up_params
from aengine.sampling.draw import TorchDraw
from aengine.sampling.sampler import SampledTokens
from aengine.scheduler.plan import Features, NewRow, RowParams

META = torch.device("meta")
VOCAB = 3000
CUSTOM = len(warm_up_params(VOCAB)) - 1  # its processors


class NoWaits(TorchDispatchMode):
    """Of copies too: those to the device are from pinned memory, and there are none back."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            assert args[0].device.type == "cpu", "a copy to the host"
            assert kwargs.get("non_blocking"), "a copy that the host waits for"
            self.uploads += 1
        return func(*args, **kwargs)


def sample(params: list[RowParams], dtype: torch.dtype, drafts_of_each: int = 0) -> SampledTokens:
    sampler = tensor_sampler(len(params), VOCAB, META, TorchDraw(VOCAB, META))
    sampler.update([NewRow(row, one, 2, np.array([1, 2, 4], np.int32)) for row, one in enumerate(params)])
    each = 1 + drafts_of_each
    rows = np.repeat(np.arange(len(params), dtype=np.int32), each)
    positions = 3 + np.tile(np.arange(each, dtype=np.int32), len(params))
    drafts = np.tile(np.append(np.full(drafts_of_each, 4, np.int32), np.int32(-1)), len(params)) if drafts_of_each else None
    on_device = (torch.empty(len(rows), dtype=torch.int32, device=META) for _ in range(2))
    return sampler.sample(torch.empty(len(rows), VOCAB, dtype=dtype, device=META), rows, positions, *on_device, drafts)


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to pin memory for here."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_every_kind_of_row(num_drafts: int) -> None:
    kinds = [*warm_up_params(VOCAB)[: CUSTOM if num_drafts else None]]
    kinds += [replace(GREEDY, grammar=TakingTurns(VOCAB, in_bits)) for in_bits in (False, True)]
    with NoWaits() as copies:
        sampled = sample(kinds, torch.float32, num_drafts)
    count = len(kinds) * (1 + num_drafts)
    assert (sampled.tokens.shape, sampled.tokens.dtype) == ((count,), torch.int64)
    assert sampled.impossible is not None
    assert (sampled.accepted is not None) == (num_drafts > 0)
    assert sampled.logprobs is not None
    assert [column.dtype for column in sampled.logprobs] == [torch.float32, torch.int64, torch.int64, torch.float32]
    assert copies.uploads > 10


def test_draws_of_a_model_in_bfloat16() -> None:
    with NoWaits():
        sampled = sample([one for one in warm_up_params(VOCAB) if not one.features & Features.PROCESSED], torch.bfloat16)
    assert sampled.impossible is not None
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_logprobs.dtype == torch.float32


def test_waits_are_noticed() -> None:
    params = np.zeros(1, DRAW_PARAMS)
    with NoWaits(), pytest.raises(NotImplementedError):
        torch.empty(1, device=META).nonzero()
    with NoWaits(), pytest.raises((NotImplementedError, RuntimeError)):
        torch.empty(1, device=META).item()
    with NoWaits(), pytest.raises(AssertionError, match="that the host waits for"):
        torch.from_numpy(params["temperature"].copy()).to(META)
