"""Writing to the pages of a layer in plain torch, the reference of the kernels."""

from __future__ import annotations

import torch

from aengine.kernels.paged_cache import KvTarget, PagedCache, write_torch


def test_tokens_without_a_slot_and_slots_without_a_token() -> None:
    cache = PagedCache(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4))
    key, value = torch.full((2, 1, 4), 5.0), torch.full((2, 1, 4), 7.0)
    write_torch(key, value, KvTarget(cache, torch.tensor([-1, 3, 5], dtype=torch.int32)))
    for pages, number in ((cache.keys, 5.0), (cache.values, 7.0)):
        written = pages.view(6, 4)
        assert torch.equal(written[3], torch.full((4,), number))
        assert not written[[1, 2, 4, 5]].any(), "slot 0 is nobody's"
