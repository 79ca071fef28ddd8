"""Random ragged steps over a pool of scattered pages, and what the float32 reference makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from cpu_reference import attention, quantized
from torch import Tensor

from aengine.attention import AttentionBackend, AttentionMetadata, AttentionSpec, StepLayout, build_layout

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def metadata_on(device: torch.device, layout: StepLayout) -> AttentionMetadata:
    names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
    return AttentionMetadata(layout, *(torch.from_numpy(getattr(layout, name)).to(device) for name in names))


def as_stored(x: Tensor, spec: AttentionSpec, scale: float) -> Tensor:
    """Float32 on the CPU, rounded as the cache rounds."""
    wide = x.float().cpu()
    if spec.cache_dtype is torch.int8:
        return torch.mul(*quantized(wide))
    if spec.cache_dtype.itemsize > 1:
        return wide
    limit = torch.finfo(spec.cache_dtype).max
    return (wide / scale).clamp(-limit, limit).to(spec.cache_dtype).float() * scale


@dataclass
class Crowd:
    """Rows that grow step by step, in pages that lie anywhere."""

    spec: AttentionSpec
    backend: AttentionBackend
    seed: int
    num_rows: int = 6
    max_len: int = 60
    tolerance: float | None = None  # None: that of the dtype
    computed: np.ndarray = field(init=False)
    table: np.ndarray = field(init=False)
    stored: list[list[tuple[Tensor, Tensor]]] = field(init=False)  # by row and layer: [length, num_kv_heads, width] float32 keys and values

    def __post_init__(self) -> None:
        spec = self.spec
        self.rng = np.random.default_rng(self.seed)
        self.torch_rng = torch.Generator().manual_seed(self.seed)
        shape = spec.num_groups, self.num_rows, -(-self.max_len // spec.page_size)
        self.num_pages = 1 + int(np.prod(shape))
        self.backend.allocate(self.num_pages)
        self.table = (1 + self.rng.permutation(self.num_pages - 1)).reshape(shape).astype(np.int32)
        self.computed = np.zeros(self.num_rows, dtype=np.int32)
        empty = torch.empty(0, spec.num_kv_heads, spec.head_dim), torch.empty(0, spec.num_kv_heads, spec.value_dim)
        self.stored = [[empty for _ in spec.scoring] for _ in range(self.num_rows)]

    def layout(self, decoding: list[int], prefilling: dict[int, int]) -> StepLayout:
        """Of one token of each row that decodes, then so many of each that prefills."""
        rows = np.array([*decoding, *prefilling], dtype=np.int32)
        lengths = np.array([1] * len(decoding) + list(prefilling.values()), dtype=np.int32)
        for group in range(self.spec.num_groups):
            windows = {scoring.window for scoring, (own, _) in zip(self.spec.scoring, self.spec.places, strict=True) if own == group}
            if None not in windows:  # pages that no layer of the group sees are given back
                for row in rows:
                    self.table[group, row, : max(0, self.computed[row] - max(windows) + 1) // self.spec.page_size] = 0
        return build_layout(rows, len(decoding), self.computed[rows], lengths, self.table, self.spec.page_size)

    def fork(self, source: int, targets: list[int]) -> None:
        """Rows that begin with the full pages of another."""
        for row in targets:
            pages = self.computed[source] // self.spec.page_size
            self.table[:, row, :pages] = self.table[:, source, :pages]
            self.computed[row] = pages * self.spec.page_size
            self.stored[row] = [tuple(each[: self.computed[row]] for each in pair) for pair in self.stored[source]]

    def random_step(self, longest: int) -> tuple[list[int], dict[int, int]]:
        """Rows with something stored decode or extend it, others begin; some rest."""
        rows = [int(row) for row in self.rng.permutation(self.num_rows)[: self.rng.integers(2, self.num_rows + 1)]]
        rows = [row for row in rows if self.computed[row] + longest <= self.max_len]
        decoding = [row for row in rows if self.computed[row] and self.rng.random() < 0.5]
        return decoding, {row: int(self.rng.integers(1, longest + 1)) for row in rows if row not in decoding}

    def fused(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random queries, keys and values as views of one tensor, as a model makes them."""
        spec = self.spec
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        drawn = torch.randn((num_tokens, sum(heads), spec.head_dim), generator=self.torch_rng)
        if spec.cache_dtype == torch.float8_e4m3fn and spec.device.type == "cpu":
            # Triton's interpreter rounds float8 wrongly where the mantissa overflows: numbers that it holds exactly
            drawn = drawn.to(spec.cache_dtype).float()
        query, key, value = drawn.to(spec.dtype).to(spec.device).split(heads, dim=1)
        return query, key, key[..., -spec.value_dim :] if spec.latent else value[..., : spec.value_dim]

    def run(self, decoding: list[int], prefilling: dict[int, int]) -> None:
        """Writes and attends in every layer, and compares."""
        rows = [*decoding, *prefilling]
        layout = self.layout(decoding, prefilling)
        step = self.backend.plan(metadata_on(self.spec.device, layout))
        for layer in range(len(self.spec.scoring)):
            query, key, value = self.fused(layout.num_tokens)
            step.write(layer, key, value)
            sinks = None
            if self.spec.scoring[layer].sinks:
                sinks = torch.randn(self.spec.num_heads, generator=self.torch_rng).mul(3.0).to(self.spec.dtype).to(self.spec.device)
            given = query.new_full((*query.shape[:2], self.spec.value_dim), torch.nan) if layer % 2 else None
            out = step.attend(layer, query, sinks, given)
            assert given is None or out.data_ptr() == given.data_ptr()
            assert out.dtype == query.dtype
            assert out.shape == (*query.shape[:2], self.spec.value_dim)
            self.check(layer, layout, rows, query, key, value, out, sinks)
        self.computed[rows] += np.diff(layout.qo_indptr)

    def check(
        self,
        layer: int,
        layout: StepLayout,
        rows: list[int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """What `rows`, the first of the layout, stored and got; remembers what they stored."""
        spec = self.spec
        scales, scoring = spec.scales(layer), spec.scoring[layer]
        for i, row in enumerate(rows):
            mine = slice(layout.qo_indptr[i], layout.qo_indptr[i + 1])
            new = (as_stored(x[mine], spec, scale) for x, scale in zip((key, value), scales, strict=True))
            keys, values = (torch.cat(pair) for pair in zip(self.stored[row][layer], new, strict=True))
            self.stored[row][layer] = keys, values
        lengths = [int(length) for length in np.diff(layout.qo_indptr[: len(rows) + 1])]
        total = sum(lengths)
        expected = attention(
            query[:total].cpu(),
            [self.stored[row][layer][0] for row in rows],
            [self.stored[row][layer][1] for row in rows],
            lengths,
            scale=scoring.scale,
            window=scoring.window,
            chunked=scoring.chunked,
            soft_cap=scoring.soft_cap,
            sinks=None if sinks is None else sinks.cpu(),
            slopes=torch.tensor(scoring.slopes) if scoring.slopes else None,
        )
        tolerance = self.tolerance or TOLERANCE[spec.dtype]
        torch.testing.assert_close(out[:total].float().cpu(), expected, rtol=tolerance, atol=tolerance)
