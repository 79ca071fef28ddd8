"""Random `QuantizedRows` of every kind that kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from row_tensors import dequantized
from torch import Tensor

from aengine.kernels.quantized import QuantizedRows

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Kind:
    codes: str  # int4, e2m1, table, int8, uint8 or float8
    group_size: int | None  # None: one group
    offsets: str = ""  # "": none; "zero": 8 times the negative scales; "any"
    ordered: bool = False
    scale_dtype: torch.dtype = torch.float32  # that has all scales exactly

    def __str__(self) -> str:
        return "-".join(filter(None, (self.codes, str(self.group_size), self.offsets, "ordered" if self.ordered else "")))

    def rows(self, rows: int, columns: int, seed: int = 0) -> QuantizedRows:
        random = torch.Generator().manual_seed(seed)
        groups = -(-columns // (self.group_size or columns))
        codes = torch.randint(0, 16 if self.bits == 4 else 256, (rows, columns), generator=random, dtype=torch.uint8)
        if self.codes == "float8":
            numbers = torch.randn(rows, columns, generator=random) * 100
            codes = numbers.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)  # of larger ones some versions of torch make NaN
        scales = (torch.rand(rows, groups, generator=random) + 0.1).to(self.scale_dtype).float()
        offsets = {"": None, "zero": -8.0 * scales, "any": torch.randn(rows, groups, generator=random)}[self.offsets]
        return QuantizedRows(
            codes=codes.view(torch.int8) if self.codes == "int8" else codes,
            scales=scales,
            group_size=self.group_size or columns,
            bits=self.bits,
            offsets=offsets,
            table={"e2m1": torch.cat((E2M1, -E2M1)), "table": torch.linspace(-1.0, 1.0, 16).sin()}.get(self.codes),
            order=torch.randperm(columns, generator=random) if self.ordered else None,
        )

    @property
    def bits(self) -> int:
        return 4 if self.codes in ("int4", "e2m1", "table") else 8


def magnitudes(rows: QuantizedRows) -> Tensor:
    """[rows, columns]: the largest that anything is which is added up for a number; roundings are relative to it."""
    numbers = (rows.codes.float() if rows.table is None else rows.table[rows.codes.long()]).abs()
    if rows.table is None:
        offsets = None if rows.offsets is None else rows.offsets.abs()
        return dequantized(replace(rows, codes=numbers, scales=rows.scales.abs(), offsets=offsets))
    return dequantized(rows).abs() + (0.0 if rows.offsets is None else rows.offsets.abs().max())
