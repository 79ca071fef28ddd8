"""Random ragged steps over scattered pages, run through a backend and the float32 reference side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aengine.attention import AttentionBackend, AttentionMetadata, AttentionSpec, Scoring, StepLayout, build_layout
from aengine.attention.torch_native import TorchNativeBackend

CPU = torch.device("cpu")
NUM_ROWS = 8
_LONGEST = 20  # chunk of a random step


@dataclass(frozen=True)
class Case:
    name: str
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    soft_cap: float = 0.0
    scores: tuple[tuple[float, float], ...] | None = None  # given: scale and soft cap by layer
    kv_scales: tuple[tuple[float, float], ...] | None = None  # given: the cache is float8
    dtype: torch.dtype = torch.bfloat16
    places: tuple[tuple[int, int], ...] = ()
    decodes: float = 0.5  # the share of rows that decode, once they have tokens

    def spec(self, device: torch.device) -> AttentionSpec:
        scores = self.scores or ((0.11, self.soft_cap),) * len(self.windows)
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scoring=tuple(Scoring(scale, window, cap) for window, (scale, cap) in zip(self.windows, scores, strict=True)),
            page_size=self.page_size,
            dtype=self.dtype,
            device=device,
            kv_dtype=torch.float8_e4m3fn if self.kv_scales else None,
            kv_scales=self.kv_scales,
            places=self.places,
        )

    @property
    def num_groups(self) -> int:
        return self.spec(CPU).num_groups


# On a GPU each combination of head_dim, dtypes, window or none and soft cap or none is a module to build: minutes where none is cached.
CASES = [
    Case("mixed"),
    Case("decode only", decodes=1.0, num_heads=6, num_kv_heads=2),
    Case("prefill only", decodes=0.0, page_size=32),
    Case("page of one token", page_size=1, head_dim=64),
    Case("one KV head", num_heads=7, num_kv_heads=1, page_size=4),
    Case("groups of five", num_heads=10, num_kv_heads=2, dtype=torch.float16),
    Case("no groups", num_heads=3, num_kv_heads=3, head_dim=256, page_size=5),
    Case("windows", windows=(None, 1, 20, None, 20)),
    Case("groups of layers", windows=(None, 9, 9, 20, 9), places=((0, 0), (1, 0), (1, 1), (2, 0), (3, 0))),
    Case("soft cap", soft_cap=0.7),
    Case("float8", windows=(None, None), kv_scales=((0.005, 0.5), (1.0, 1.0))),  # the first saturates
]


def on(device: torch.device, layout: StepLayout) -> AttentionMetadata:
    names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
    return AttentionMetadata(layout, *(torch.from_numpy(getattr(layout, name)).to(device, copy=True) for name in names))


class Rows:
    """What rows have computed so far, and steps of some of them."""

    def __init__(self, case: Case, seed: int, max_len: int = 90) -> None:
        self.case = case
        self.max_len = max_len
        self.rng = np.random.default_rng(seed)
        shape = case.num_groups, NUM_ROWS, -(-max_len // case.page_size)
        self.num_pages = 1 + int(np.prod(shape))
        self.table = (1 + self.rng.permutation(self.num_pages - 1)).reshape(shape).astype(np.int32)
        self.computed = np.zeros(NUM_ROWS, dtype=np.int32)

    def prefills(self, lengths: np.ndarray) -> StepLayout:
        """The next tokens of all rows."""
        return self.mixed(np.arange(NUM_ROWS), 0, lengths)

    def decodes(self, rows: np.ndarray) -> StepLayout:
        return self.mixed(rows, len(rows), np.ones(len(rows)))

    def random_step(self) -> StepLayout:
        rng = self.rng
        rows = rng.permutation(NUM_ROWS)[: rng.integers(2, NUM_ROWS + 1)]
        rows = rows[self.computed[rows] < self.max_len - _LONGEST]
        decoding = rows[(self.computed[rows] > 0) & (rng.random(len(rows)) < self.case.decodes)]
        if self.case.decodes == 1.0 and len(decoding):
            return self.decodes(decoding)
        rows = np.concatenate([decoding, np.setdiff1d(rows, decoding)])
        lengths = np.where(np.arange(len(rows)) < len(decoding), 1, rng.integers(1, _LONGEST, len(rows)))
        return self.mixed(rows, len(decoding), lengths)

    def mixed(self, rows: np.ndarray, num_decodes: int, lengths: np.ndarray) -> StepLayout:
        rows, lengths = rows.astype(np.int32), lengths.astype(np.int32)
        layout = build_layout(rows, num_decodes, self.computed[rows], lengths, self.table, self.case.page_size)
        self.computed[rows] += lengths
        return layout


class Pair:
    """A backend and the reference on the CPU with the same KV in them; every step is written and compared in all layers."""

    def __init__(self, case: Case, backend: AttentionBackend, device: torch.device, placed: Callable[[AttentionMetadata], None]) -> None:
        self.case, self.backend, self.device, self.placed = case, backend, device, placed
        self.reference = TorchNativeBackend(case.spec(CPU))
        self.generator = torch.Generator().manual_seed(1)

    def allocate(self, num_pages: int) -> None:
        self.backend.allocate(num_pages)
        self.reference.allocate(num_pages)

    def poison(self, num_pages: int) -> None:
        """Fills all pages but page 0 with NaN, as a former owner may leave them: one row owns them all."""
        case = self.case
        length = (num_pages - 1) * case.page_size
        table = np.tile(np.arange(1, num_pages, dtype=np.int32), (case.num_groups, 1, 1))
        zero = np.zeros(1, dtype=np.int32)
        layout = build_layout(zero, 0, zero, np.array([length], dtype=np.int32), table, case.page_size)
        metadata = on(self.device, layout)
        self.placed(metadata)
        bad = torch.full((length, case.num_kv_heads, case.head_dim), torch.nan, dtype=case.dtype)
        for step, values in ((self.backend.plan(metadata), bad.to(self.device)), (self.reference.plan(on(CPU, layout)), bad)):
            for layer in range(len(case.windows)):
                step.write(layer, values, values)

    def copy_pages(self, sources: list[int], destinations: list[int]) -> None:
        pages = np.array([sources, destinations], dtype=np.int32)
        self.backend.copy_pages(*pages)
        self.reference.copy_pages(*pages)

    def compare(self, layout: StepLayout) -> None:
        metadata = on(self.device, layout)
        self.placed(metadata)
        self.compare_steps(layout, self.backend.plan(metadata), layout.num_tokens)

    def compare_steps(self, layout: StepLayout, step, num_tokens: int) -> None:
        """`step` is of `num_tokens` tokens, the last of which are padding."""
        case = self.case
        expected_step = self.reference.plan(on(CPU, layout))
        for layer in range(len(case.windows)):
            fused = self.drawn(num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim)
            here = fused.to(self.device)
            results = []
            for tensor, which in ((here, step), (fused[: layout.num_tokens], expected_step)):
                query, key, value = tensor.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
                which.write(layer, key, value)
                given = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format) if layer % 2 else None
                results.append(which.attend(layer, query, None, given))
                assert given is None or results[-1].data_ptr() == given.data_ptr()
            found, expected = results
            assert found.shape == (num_tokens, case.num_heads, case.head_dim)
            self.assert_near(found[: layout.num_tokens], expected)

    def assert_near(self, found: Tensor, expected: Tensor) -> None:
        assert found.dtype == expected.dtype == self.case.dtype
        rough = 3e-2 if self.case.dtype == torch.bfloat16 else 5e-3
        torch.testing.assert_close(found.cpu().float(), expected.cpu().float(), rtol=rough, atol=rough)

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.case.dtype)


def padded(layout: StepLayout, num_rows: int) -> StepLayout:
    """Decode rows with padding up to `num_rows`: page 0, length 1, slot -1."""
    more = num_rows - layout.num_rows
    tail = np.arange(1, more + 1, dtype=np.int32)
    ones, zeros = np.ones(more, dtype=np.int32), np.zeros(more, dtype=np.int32)
    group_ones = np.ones((len(layout.kv_indices), more), dtype=np.int32)
    return dataclasses.replace(
        layout,
        num_decodes=num_rows,
        qo_indptr=np.arange(num_rows + 1, dtype=np.int32),
        kv_indptr=np.concatenate([layout.kv_indptr, layout.kv_indptr[-1] + tail]),
        kv_indices=np.concatenate([layout.kv_indices, 0 * group_ones], axis=1),
        last_page_len=np.concatenate([layout.last_page_len, ones]),
        seq_lens=np.concatenate([layout.seq_lens, ones]),
        positions=np.concatenate([layout.positions, zeros]),
        slot_mapping=np.concatenate([layout.slot_mapping, -group_ones], axis=1),
    )


class Buffers:
    """What graphs of a fixed number of rows read: filled by a copy, as before each replay."""

    def __init__(self, num_rows: int, num_indices: int, device: torch.device, num_groups: int = 1) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.num_rows = num_rows
        self.tensors = {
            "qo_indptr": zeros(num_rows + 1),
            "kv_indptr": zeros(num_rows + 1),
            "kv_indices": zeros(num_groups, num_indices),
            "last_page_len": zeros(num_rows),
            "slot_mapping": zeros(num_groups, num_rows),
        }

    def metadata(self, layout: StepLayout) -> AttentionMetadata:
        return AttentionMetadata(host=layout, **self.tensors)

    def fill(self, layout: StepLayout) -> None:
        for name, tensor in self.tensors.items():
            array = getattr(layout, name)
            tensor[..., : array.shape[-1]].copy_(torch.from_numpy(array))
