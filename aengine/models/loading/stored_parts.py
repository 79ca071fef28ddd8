"""`StoredPart`: the tensors of a checkpoint that a part of a parameter is read from; one, or those of a quantised module.

Owns the choice between the two. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.kernels.quantized import Rows
from aengine.models.gguf.gguf_file import BLOCKS
from aengine.models.loading.checkpoint import DTYPES, StoredTensor
from aengine.models.named_weights import NamedWeight, Part
from aengine.models.quantization.quantization_config import Quantization
from aengine.models.quantization.scheme import EMBEDDING, LINEAR, Scheme, Stored

_GGUF_SCALE = 32  # or 16
_LARGEST = 3.3895313892515355e38  # of bfloat16
_FLOAT8_CODES = 1 << 18  # looked at together


@dataclass(frozen=True, slots=True)
class StoredPart:
    part: Part
    scheme: Scheme | None  # None: the part is one tensor, as it is
    expected: Mapping[str, Stored]  # by name; those without dtypes are not read
    endings: Mapping[str, str]  # of the tensors that are read: name -> what it has behind the module's, as the scheme calls it

    @property
    def is_plain(self) -> bool:
        """Whether its rows are those of its tensor, as they are."""
        return self.scheme is None and self.part.transform is None

    def scale_columns(self, tensors: Mapping[str, StoredTensor]) -> int:
        """How many consecutive columns share a scale, of which parts of the rows are to be multiples; 1 if parts can be of any columns."""
        if self.scheme is not None:
            return self.scheme.scale_columns() or 1
        return _GGUF_SCALE if any(name in tensors and tensors[name].dtype in BLOCKS for name in self.endings) else 1

    def rows(self, tensors: Sequence[Rows]) -> Rows:
        """The rows of the parameter, of the tensors of `endings` in their order. Raises ModelLoadError for numbers that cannot be."""
        from torch import Tensor

        if self.scheme is None:
            return self.part.rows(tensors[0])
        named = {ending: tensor for ending, tensor in zip(self.endings.values(), tensors, strict=True) if isinstance(tensor, Tensor)}
        try:
            rows = self.scheme.rows(self.part.matrix_shape, named)
            if not are_finite(rows):
                raise ValueError("a product of its scales has numbers that are not finite")
            return self.part.rows(rows)
        except ValueError as error:
            raise ModelLoadError(f"the quantized weight of {_module(self.part)} is not what it should be: {error}") from error


def stored_parts(
    weights: Mapping[str, NamedWeight], quantization: Quantization | None, tensors: Mapping[str, StoredTensor]
) -> dict[str, tuple[StoredPart, ...]]:
    """Return what each parameter is read from, by its name, in a checkpoint that has `tensors`.

    A module is quantised if the config says so, unless the checkpoint has its weight in one of `DTYPES`: what a checkpoint leaves alone
    is not always listed.

    Raises ModelLoadError for a module whose shape the format of its weight cannot have.
    """
    sources = {part.source for weight in weights.values() for part in weight.parts}
    found = {}
    for name, weight in weights.items():
        kind = EMBEDDING if name in ("embedding.weight", "positions.weight") else LINEAR
        parts = []
        for part in weight.parts:
            is_matrix = len(part.shape) > 1 and not name.endswith(".bias")
            is_plain = part.source in tensors and tensors[part.source].dtype in DTYPES
            scheme = None
            if quantization is not None and name.endswith(".weight") and len(part.shape) > 1 and not is_plain:
                scheme = quantization.scheme(_module(part), kind)
            if scheme is None:
                expected = {part.source: Stored((part.shape,), (*DTYPES, *BLOCKS) if is_matrix else tuple(DTYPES))}
                parts.append(StoredPart(part, None, expected, {part.source: ""}))
            else:
                parts.append(_quantized(part, scheme, sources, tensors))
        found[name] = tuple(parts)
    return found


def _quantized(part: Part, scheme: Scheme, sources: Collection[str], tensors: Mapping[str, StoredTensor]) -> StoredPart:
    module = _module(part)
    try:
        described = scheme.tensors(part.matrix_shape)
    except ValueError as error:
        raise ModelLoadError(f"{module} cannot be stored as quantization_config says: {error}") from error
    expected, endings = {}, {}
    for ending, stored in described.items():
        name = module + ending
        if stored.other_name is not None and name not in tensors and module + stored.other_name in tensors:
            name = module + stored.other_name
        if stored.optional and (name not in tensors or (name in sources and name != part.source)):
            continue
        expected[name] = stored
        if stored.dtypes:
            endings[name] = ending
    return StoredPart(part, scheme, expected, endings)


def are_finite(rows: Rows) -> bool:
    """Whether all numbers are finite, in bfloat16 too: of quantised rows, what many codes share. One pass, with little memory."""
    import torch
    from torch import Tensor

    if not isinstance(rows, Tensor):
        return are_finite(rows.scales if rows.offsets is None else rows.scales + rows.offsets)
    if not rows.numel() or not rows.dtype.is_floating_point:
        return True
    if rows.dtype is torch.float8_e8m0fnu:
        rows = rows.float()
    if rows.dtype is torch.float8_e4m3fn:  # has no infinity
        return all(int((codes & 0x7F).max()) < 0x7F for codes in torch.split(rows.view(torch.uint8).flatten(), _FLOAT8_CODES))
    low, high = torch.aminmax(rows)  # NaN where one number is
    return float(low) >= -_LARGEST and float(high) <= _LARGEST


def _module(part: Part) -> str:
    return part.source.removesuffix(".weight")
