"""The matrices of a model that adapters may change, as a rank holds them on a device."""

from __future__ import annotations

from itertools import accumulate

from aengine.layers.adapters import AdapterShape, AdapterTable, PackedAdapter
from aengine.models.adapters import Adapter
from aengine.models.named_weights import NEVER_QUANTIZED, named_weights
from aengine.models.sharding import own, pieces, sharded_weights, vocab_bounds
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import Shard


def adapter_shapes(spec: ModelSpec, shard: Shard) -> dict[str, AdapterShape]:
    """By the name of a parameter without `.weight`. The rows of a parameter are in parts, as in the checkpoint. An embedding is seen as the
    matrix that multiplies with a one-hot row of its vocabulary; a head has a shape of its own even if it is tied to it."""
    named, shapes = named_weights(spec), {}
    for name, part in sharded_weights(spec, shard).items():
        stem = name.removesuffix(".weight")
        if stem == name or len(part.shape) != 2 or stem.rpartition(".")[2] in NEVER_QUANTIZED:
            continue
        if stem == "embedding":
            shapes[stem] = AdapterShape(part.shape[0], (0, part.shape[1]))
            continue
        counts: dict[int, int] = {}
        for number, rows in pieces([each.num_rows for each in named[part.source_name].parts], part):
            counts[number] = counts.get(number, 0) + len(rows)
        shapes[stem] = AdapterShape(part.shape[1], (0, *accumulate(counts.values())))
    if spec.tied_head and shard.stage == 0:
        shapes["head"] = AdapterShape(spec.hidden_size, (0, len(own(vocab_bounds(spec, shard), shard))))
    return shapes


def adapter_bytes(spec: ModelSpec, shard: Shard, num_slots: int, low_rank: int, itemsize: int) -> int:
    """Of the table of a device."""
    return num_slots * low_rank * itemsize * sum(shape.size for shape in adapter_shapes(spec, shard).values())


def packed_adapter(table: AdapterTable, adapter: Adapter) -> PackedAdapter:
    """An adapter of the table's shard, as `AdapterTable.put` takes it. May be called from any thread."""
    return table.pack({name: {part.rows: (part.a, part.b) for part in parts} for name, parts in adapter.parts.items()})
