"""What adapters add to linear layers: in plain torch and in Triton's kernels, against one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_mode import DEVICES  # before triton is imported

from aengine.kernels.triton.adapters import TritonAdapterOps
from aengine.layers.adapters import AdapterOps, AdapterShape, AdapterTable, TorchAdapterOps

SLOTS, LOW_RANK, HIDDEN, TOKENS = 3, 40, 72, 100
SHAPES = {
    "qkv": AdapterShape(HIDDEN, (0, 70, 90, 110)),
    "down": AdapterShape(2100, (0, HIDDEN)),
    "embedding": AdapterShape(19, (0, HIDDEN)),
}
CHANGED = {"qkv": [{0: 4, 2: 7}, {1: 40}, {}], "down": [{0: 1}, {}, {0: 17}], "embedding": [{0: 3}, {0: 20}, {}]}
"""The rank of each part, of each adapter."""


def table_of(ops: AdapterOps, device: str, dtype: torch.dtype) -> tuple[AdapterTable, dict[str, list[dict[int, tuple[Tensor, Tensor]]]]]:
    """With an adapter in each slot, one after another that had all ranks; and their matrices by part, in float32."""
    torch.manual_seed(0)
    table = AdapterTable(SHAPES, SLOTS, LOW_RANK, TOKENS, dtype, torch.device(device), ops)

    def matrices(name: str, part: int, rank: int) -> tuple[Tensor, Tensor]:
        first, stop = SHAPES[name].bounds[part : part + 2]
        depth = SHAPES[name].in_features
        return (torch.randn(rank, depth) / depth**0.5).to(dtype), torch.randn(stop - first, rank).to(dtype)

    def put(slot: int, adapter: dict[str, dict[int, tuple[Tensor, Tensor]]]) -> None:
        rows = {name: [range(*SHAPES[name].bounds[part : part + 2]) for part in each] for name, each in adapter.items()}
        table.put_adapter(slot, table.pack({name: dict(zip(rows[name], each.values(), strict=True)) for name, each in adapter.items()}))

    full = {name: {part: matrices(name, part, LOW_RANK) for part in range(shape.num_parts)} for name, shape in SHAPES.items()}
    made = {
        name: [{part: matrices(name, part, rank) for part, rank in each.items()} for each in changed] for name, changed in CHANGED.items()
    }
    for slot in range(SLOTS):
        put(slot, full)
        put(slot, {name: each[slot] for name, each in made.items()})
    return table, made


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter has no products of bfloat16
@pytest.mark.parametrize("tokens", [0, 1, 5, TOKENS])
@pytest.mark.parametrize("ops", [TorchAdapterOps(), TritonAdapterOps()], ids=["torch", "triton"])
def test_each_token_gets_what_its_adapter_adds(ops: AdapterOps, tokens: int, dtype: torch.dtype, device: str) -> None:
    """All ranks and parts of an adapter, also if the one before it in its slot had more; nothing for tokens without one."""
    table, made = table_of(ops, device, dtype)
    slots = np.random.default_rng(tokens).integers(0, SLOTS + 1, tokens).astype(np.int32)
    ids = torch.arange(tokens, dtype=torch.int32) % 19
    with torch.inference_mode():
        table.write_slots(slots)
        table.begin(tokens)
        for name, shape in SHAPES.items():
            out = torch.randn(tokens, shape.bounds[-1]).to(dtype)
            x = torch.nn.functional.one_hot(ids.long(), 19).to(dtype) if name == "embedding" else torch.randn(tokens, shape.in_features)
            x = x.to(dtype)
            expected = out.to(torch.float32, copy=True)
            for token, slot in enumerate(slots):
                for part, (a, b) in made[name][slot].items() if slot < SLOTS else ():
                    first, stop = shape.bounds[part : part + 2]
                    expected[token, first:stop] += b.float() @ (a.float() @ x[token].float())
            given = out.to(device, copy=True)
            if name == "embedding":
                found = table.add_embedded(given, ids.to(device))
            else:
                found = table.linear(name, lambda x, out=given: out)(x.to(device))
            assert found is given
            limit = 1e-5 if dtype is torch.float32 else 0.02
            torch.testing.assert_close(found.cpu().float(), expected, atol=limit, rtol=limit, msg=lambda text, name=name: f"{name}: {text}")
            without = torch.from_numpy(slots == SLOTS)
            assert torch.equal(found.cpu()[without], out[without])


@pytest.mark.parametrize("device", DEVICES)
def test_some_tokens_of_a_pass(device: str) -> None:
    """As those of which logits are computed; and a pass in which no token has an adapter."""
    table, made = table_of(TritonAdapterOps(), device, torch.float32)
    (a, b), x = made["down"][2][0], torch.randn(2, 2100)
    table.write_slots(np.array([2, 3, 0, 2], dtype=np.int32))
    table.begin(4)
    found = table.add_products("down", torch.zeros(2, HIDDEN, device=device), x.to(device), torch.tensor([3, 1], device=device))
    torch.testing.assert_close(found.cpu(), torch.stack((b @ (a @ x[0]), torch.zeros(HIDDEN))), atol=1e-5, rtol=1e-5)
    table.on = False
    table.begin(4)
    assert not table.add_products("down", torch.zeros(4, HIDDEN, device=device), torch.randn(4, 2100, device=device)).any()


@pytest.mark.parametrize("device", DEVICES[1:])  # those of the interpreter depend on NumPy
def test_a_token_gets_the_same_bits_in_any_crowd(device: str) -> None:
    table, _ = table_of(TritonAdapterOps(), device, torch.float32)
    x = torch.randn(60, 2100, device=device)
    slots = np.arange(60, dtype=np.int32) % (SLOTS + 1)

    def added(some: slice) -> Tensor:
        table.write_slots(slots[some])
        table.begin(len(x[some]))
        return table.add_products("down", torch.zeros(len(x[some]), HIDDEN, device=device), x[some])

    together = added(slice(None))
    for begin in (0, 2, 40):
        assert torch.equal(added(slice(begin, begin + 3)), together[begin : begin + 3])
