"""Our Triton attention against the float32 reference: interpreted on a CPU, compiled on CUDA."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from ragged import Crowd, metadata_on
from slow_cases import slow_but
from triton_mode import DEVICES

from aengine.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    BackendUnavailableError,
    Scoring,
    StepLayout,
    build_layout,
)
from aengine.attention.torch_native import TorchNativeBackend
from aengine.attention.triton import TritonBackend
from aengine.kernels.paged_cache import KvTarget
from aengine.kernels.triton import attention
from aengine.kernels.triton import attention as kernels

pytestmark = pytest.mark.slow

FLOAT8 = torch.float8_e4m3fn
FINE = kernels.BlockSizes(keys=16, queries=16, split_keys=16)
"""So small that short rows have many blocks and shares."""


def make_spec(
    device: str,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    page_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    dtype: torch.dtype = torch.float32,
    soft_cap: float = 0.0,
    sinks: bool = False,
    float8_scales: tuple[float, float] | None = None,
    value_dim: int = 0,
    places: tuple[tuple[int, int], ...] = (),
    latent: bool = False,
    slopes: tuple[float, ...] = (),
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        scoring=tuple(Scoring(0.3 + 0.1 * layer, window, soft_cap, sinks, slopes) for layer, window in enumerate(windows)),
        page_size=page_size,
        dtype=dtype,
        device=torch.device(device),
        kv_dtype=FLOAT8 if float8_scales else None,
        kv_scales=(float8_scales,) * len(windows) if float8_scales else None,
        places=places,
        value_dim=value_dim,
        latent=latent,
    )


def make(spec: AttentionSpec, blocks: kernels.BlockSizes | None = FINE) -> TritonBackend:
    return TritonBackend(spec, blocks)


def make_crowd(spec: AttentionSpec, backend: TritonBackend, seed: int, **sizes: Any) -> Crowd:
    """Every page but the reserved one is full of NaN until a row has written it."""
    crowd = Crowd(spec, backend, seed, **sizes)
    for cache in backend.caches:
        for pages in (cache.keys[1:], cache.values[1:]):
            pages.view(torch.uint8).fill_(0x7F) if pages.dtype == FLOAT8 else pages.fill_(torch.nan)
    return crowd


SLOPES = (4.0, 1.0, 0.5, 0.2, 0.1, 0.01)
CASES = {
    "one page per token, odd head_dim": {"heads": (2, 2), "head_dim": 40, "page_size": 1},
    "pairs of heads": {"heads": (4, 2), "page_size": 4, "windows": (20,)},
    "a tiny window": {"heads": (4, 1), "page_size": 16, "windows": (3,)},
    "five heads, soft cap": {"heads": (5, 1), "head_dim": 128, "page_size": 16, "soft_cap": 0.7},
    "seven heads, window, soft cap": {"heads": (14, 2), "head_dim": 64, "page_size": 4, "windows": (9,), "soft_cap": 2.0},
    "sinks": {"heads": (6, 2), "page_size": 4, "windows": (None, 9), "sinks": True},
    "slopes": {"heads": (6, 2), "page_size": 4, "windows": (None, 9), "slopes": SLOPES},
    "slopes, soft cap, float8": {"heads": (6, 2), "soft_cap": 2.0, "float8_scales": (0.5, 0.25), "slopes": SLOPES},
    "a page beyond a block": {"heads": (2, 1), "page_size": 64},
    "windows by layer": {"heads": (2, 1), "head_dim": 10, "page_size": 3, "windows": (None, 7)},
    "narrow values": {"heads": (4, 2), "head_dim": 40, "value_dim": 32, "windows": (None, 9)},
    "a latent cache": {"heads": (20, 1), "head_dim": 40, "value_dim": 32, "latent": True, "windows": (None, 9)},
    "a latent cache in float16": {
        **{"heads": (20, 1), "head_dim": 40, "value_dim": 32, "latent": True, "windows": (None, 9), "dtype": torch.float16}
    },
    "a latent cache in float8": {
        **{"heads": (3, 1), "head_dim": 24, "value_dim": 16, "latent": True, "float8_scales": (0.5, 0.5), "sinks": True}
    },
    "float8": {"heads": (4, 2), "page_size": 4, "float8_scales": (0.5, 0.25)},
    "float16": {"heads": (2, 1), "dtype": torch.float16},
    "groups of layers": {"heads": (2, 1), "windows": (None, 7), "places": ((0, 0), (1, 0))},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", slow_but(["windows by layer", "float8", "groups of layers", "slopes"], CASES))
def test_ragged_steps(device: str, case: str) -> None:
    """Prompts, chunks on a cached prefix and decodes in one step, then decodes alone."""
    spec = make_spec(device, **CASES[case])
    crowd = make_crowd(spec, make(spec), seed=len(case), num_rows=4)
    crowd.run([], {0: 33, 1: 1, 2: 18})
    crowd.run([2, 1], {3: 5, 0: 7})
    crowd.run([3, 0, 2, 1], {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "float8_scales"),
    [
        ((40, 8), 128, torch.bfloat16, None),
        ((40, 8), 128, torch.bfloat16, (0.02, 0.03)),
        ((14, 2), 64, torch.float16, None),
        ((8, 8), 80, torch.bfloat16, (1.0, 1.0)),
        ((8, 1), 16, torch.float16, (0.02, 0.03)),
        ((8, 2), 256, torch.bfloat16, None),
        ((8, 2), 256, torch.bfloat16, (0.02, 0.03)),
        ((16, 1), 576, torch.bfloat16, None),
        ((20, 1), 576, torch.float16, None),
        ((4, 1), 576, torch.float32, None),
        ((16, 1), 576, torch.bfloat16, (0.02, 0.02)),
    ],
    ids=str,
)
def test_long_steps(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, float8_scales: tuple[float, float] | None) -> None:
    """With the blocks that are used, over rows longer than several of them."""
    value_dim = 512 if head_dim == 576 else head_dim
    latent = head_dim == 576
    spec = make_spec("cuda", heads, head_dim, 16, (None, 300), dtype, float8_scales=float8_scales, value_dim=value_dim, latent=latent)
    # Sums of 576 products one after another, of scores up to a hundred: 6e-5 from the result in float64.
    tolerance = 1e-4 if dtype is torch.float32 else None
    crowd = make_crowd(spec, make(spec, None), seed=head_dim, num_rows=8, max_len=1100, tolerance=tolerance)
    crowd.run([], {0: 1000, 1: 1, 2: 257, 3: 256})
    for _ in range(6):
        crowd.run(*crowd.random_step(longest=90))
    crowd.run([row for row in range(8) if crowd.computed[row]], {})


SHARED = {
    "more rows than a program's": {"heads": (8, 2)},
    "three heads, windows": {"heads": (3, 1), "windows": (None, 50)},
    "sinks, float8": {"heads": (4, 1), "sinks": True, "float8_scales": (0.5, 0.25)},
    "slopes": {"heads": (6, 1), "slopes": SLOPES},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", slow_but(["more rows than a program's"], SHARED))
def test_rows_that_share_a_prefix(device: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In items of many rows, some of whose results are merged in several rounds."""
    monkeypatch.setattr(attention, "_COMBINED_NUMBERS", 32)
    spec = make_spec(device, **SHARED[case])
    backend = make(spec, kernels.BlockSizes(keys=16, queries=32, split_keys=16))
    crowd = make_crowd(spec, backend, seed=len(case), num_rows=8, max_len=70)
    crowd.run([], {0: 50, 6: 20})
    crowd.fork(0, [1, 2, 3, 4, 5])
    crowd.run([6], {row: row for row in range(1, 6)})
    sharing = [5, 1, 6, 0, 2, 4, 3]
    counts = [set(work.items[:, 4]) for work in backend.decodes.host_plan(crowd.layout(sharing, {}), len(sharing))]
    assert max(counts[0]) * spec.num_heads // spec.num_kv_heads > 16
    assert min(counts[0]) == 1
    crowd.run(sharing, {7: 3})
    crowd.run([3, 2], {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((8, 8), 64), ((12, 4), 256)], ids=str)
def test_long_prefixes(heads: tuple[int, int], head_dim: int) -> None:
    """With the blocks that are used: two prompts with several rows each, and rows alone."""
    spec = make_spec("cuda", heads, head_dim, 16, (None, 300), torch.bfloat16)
    backend = make(spec, None)
    crowd = make_crowd(spec, backend, seed=head_dim, num_rows=30, max_len=3000)
    crowd.run([], {0: 2500, 1: 700, 2: 1})
    crowd.fork(0, list(range(3, 24)))
    crowd.fork(1, [24, 25])
    crowd.run([], {row: 1 + 7 * row for row in range(3, 27)})
    for _ in range(2):
        rows = [int(row) for row in crowd.rng.permutation(27)]
        assert (backend.decodes.host_plan(crowd.layout(rows, {}), 27)[0].items[:, 4] > 1).any()
        crowd.run(rows, {})


@pytest.mark.parametrize("device", DEVICES)
def test_the_blocks_that_are_used(device: str) -> None:
    spec = make_spec(device, (2, 1), head_dim=64)
    crowd = make_crowd(spec, make(spec, None), seed=1, num_rows=2, max_len=280)
    crowd.run([], {0: 270, 1: 20})
    crowd.run([0, 1], {})


@pytest.mark.parametrize("device", DEVICES)
def test_slot_minus_one_writes_nothing(device: str) -> None:
    spec = make_spec(device)
    backend = make(spec)
    crowd = make_crowd(spec, backend, seed=2, num_rows=1)
    crowd.run([], {0: 6})
    layout = crowd.layout([], {0: 5})
    layout.slot_mapping[:, [0, 3]] = -1
    before = backend.caches[0].keys.clone()
    _, key, value = crowd.fused(5)
    backend.plan(metadata_on(spec.device, layout)).write(0, key, value)
    for cache, new in ((backend.caches[0].keys, key), (backend.caches[0].values, value)):
        flat = cache.view(-1, spec.num_kv_heads, spec.head_dim)
        written = layout.slot_mapping[0, [1, 2, 4]]
        assert torch.equal(flat[written], new[[1, 2, 4]])
        rest = np.setdiff1d(np.arange(len(flat)), written)
        assert torch.equal(backend.caches[0].keys.view(flat.shape)[rest].nan_to_num(7), before.view(flat.shape)[rest].nan_to_num(7))
        assert not flat[: spec.page_size].any()


@pytest.mark.parametrize("device", DEVICES)
def test_float8_saturates(device: str) -> None:
    spec = make_spec(device, (1, 1), 4, float8_scales=(0.5, 2.0))
    backend = make(spec)
    backend.allocate(2)
    new = torch.tensor([1000.0, -1000.0, torch.nan, 6.0], device=device).view(1, 1, 4)
    attention.write(new, new, KvTarget(backend.caches[0], torch.tensor([5], dtype=torch.int32, device=device)))
    keys, values = (cache[1, 1, 0].float().tolist() for cache in (backend.caches[0].keys, backend.caches[0].values))
    assert [keys[0], keys[1], keys[3]] == [448.0, -448.0, 12.0]
    assert [values[0], values[1], values[3]] == [448.0, -448.0, 3.0]
    if device == "cuda":  # the interpreter makes a number of NaN
        assert np.isnan([keys[2], values[2]]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{}, {"float8_scales": (1.0, 1.0)}, {"heads": (4, 1), "value_dim": 8, "latent": True}], ids=["", "float8", "latent"]
)
def test_copied_pages(device: str, options: dict[str, Any]) -> None:
    """All sources are read before a destination is written: two pages change places."""
    spec = make_spec(device, windows=(None, None), **options)
    backend = make(spec)
    crowd = make_crowd(spec, backend, seed=3, num_rows=2, max_len=8)
    crowd.run([], {0: 8, 1: 3})
    pools = [pages for cache in backend.caches for pages in (cache.keys, cache.values)]
    before = [cache.float().clone() for cache in pools]
    backend.copy_pages(np.array([1, 2, 3], dtype=np.int32), np.array([2, 1, 4], dtype=np.int32))
    for old, new in zip(before, [cache.float() for cache in pools], strict=True):
        assert torch.equal(new.nan_to_num(7), old[[0, 2, 1, 3, 3]].nan_to_num(7))


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_per_page(device: str) -> None:
    assert make(make_spec(device, (4, 2), 16, 4, (None, 3))).bytes_per_page() == 2 * 2 * 2 * 4 * 16 * 4
    assert make(make_spec(device, (4, 2), 16, 4, (None, 3), float8_scales=(1.0, 1.0))).bytes_per_page() == 2 * 2 * 2 * 4 * 16
    assert make(make_spec(device, (4, 1), 40, 4, value_dim=32)).bytes_per_page() == (40 + 32) * 4 * 4
    assert make(make_spec(device, (4, 1), 40, 4, value_dim=32, latent=True)).bytes_per_page() == 40 * 4 * 4


class Buffers:
    """What a graph reads: arrays of a fixed number of rows that steps are copied into."""

    def __init__(self, crowd: Crowd, num_rows: int) -> None:
        self.num_rows, self.page_size = num_rows, crowd.spec.page_size
        # Twice the pages: the reserved page stands in `kv_indices` once for every padding row.
        num_groups = crowd.spec.num_groups
        sizes = {
            "qo_indptr": (num_rows + 1,),
            "kv_indptr": (num_rows + 1,),
            "kv_indices": (num_groups, 2 * crowd.num_pages),
            "last_page_len": (num_rows,),
            "slot_mapping": (num_groups, num_rows),
        }
        self.tensors = {name: torch.zeros(size, dtype=torch.int32, device=crowd.spec.device) for name, size in sizes.items()}
        self.metadata = AttentionMetadata(self.fill(crowd.layout([], {})), **self.tensors)

    def fill(self, layout: StepLayout) -> StepLayout:
        """Pads the layout to all rows, and puts it into the buffers."""
        missing = self.num_rows - layout.num_rows
        ones = np.ones(missing, dtype=np.int32)
        group_ones = np.ones((len(layout.kv_indices), missing), dtype=np.int32)

        def indptr(old: np.ndarray) -> np.ndarray:
            return np.concatenate((old, old[-1] + np.arange(1, missing + 1, dtype=np.int32)))

        padded = dataclasses.replace(
            layout,
            num_decodes=self.num_rows,
            qo_indptr=indptr(layout.qo_indptr),
            kv_indptr=indptr(layout.kv_indptr),
            kv_indices=np.concatenate((layout.kv_indices, 0 * group_ones), axis=1),
            last_page_len=np.concatenate((layout.last_page_len, ones)),
            seq_lens=np.concatenate((layout.seq_lens, ones)),
            positions=np.concatenate((layout.positions, 0 * ones)),
            slot_mapping=np.concatenate((layout.slot_mapping, -group_ones), axis=1),
        )
        for name, tensor in self.tensors.items():
            array = getattr(padded, name)
            tensor[..., : array.shape[-1]].copy_(torch.from_numpy(array))
        return padded


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_step_follows_its_buffers(device: str) -> None:
    """Lengths, rows and padding change beneath it, and which rows share a prefix."""
    spec = make_spec(device, (2, 1), windows=(None, 9), places=((0, 0), (1, 0)))
    backend = make(spec)
    crowd = make_crowd(spec, backend, seed=4, num_rows=4)
    crowd.run([], {0: 37, 1: 3, 2: 16})
    crowd.fork(0, [3])
    buffers = Buffers(crowd, 4)
    graph_step = backend.graph_step(buffers.metadata)
    assert graph_step is not None
    for rows in ([0, 1, 2, 3], [2], [3, 0], [], [1, 2, 3]):
        layout = buffers.fill(crowd.layout(rows, {}))
        graph_step.prepare(layout)
        for layer in range(2):
            query, key, value = crowd.fused(4)
            graph_step.write(layer, key, value)
            out = graph_step.attend(layer, query)
            crowd.check(layer, layout, rows, query, key, value, out)
            assert not out[len(rows) :].any()  # the reserved page was not written
        crowd.computed[rows] += 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("float8_scales", [None, (0.02, 0.03)], ids=["", "float8"])
def test_a_captured_graph(float8_scales: tuple[float, float] | None) -> None:
    spec = make_spec("cuda", (8, 2), 128, 16, (None, 40), torch.bfloat16, float8_scales=float8_scales)
    backend = make(spec, None)
    crowd = make_crowd(spec, backend, seed=5, num_rows=8, max_len=900)
    crowd.run([], {row: 1 + 160 * row for row in range(6)})
    crowd.fork(5, [6, 7])
    buffers = Buffers(crowd, 8)
    graph_step = backend.graph_step(buffers.metadata)
    assert graph_step is not None
    inputs = [torch.zeros(8, 12, 128, dtype=spec.dtype, device="cuda") for _ in range(2)]

    def forward() -> list[torch.Tensor]:
        outs = []
        for layer, fused in enumerate(inputs):
            query, key, value = fused.split([8, 2, 2], dim=1)
            graph_step.write(layer, key, value)
            outs.append(graph_step.attend(layer, query))
        return outs

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = forward()
        for rows in ([0, 1, 2, 3, 4, 5, 6, 7], [6], [7, 0, 3], [5, 4, 3, 2, 1]):
            layout = buffers.fill(crowd.layout(rows, {}))
            graph_step.prepare(layout)
            for fused in inputs:
                fused.copy_(torch.randn(fused.shape))
            graph.replay()
            for layer, fused in enumerate(inputs):
                query, key, value = fused.split([8, 2, 2], dim=1)
                crowd.check(layer, layout, rows, query, key, value, outs[layer])
            crowd.computed[rows] += 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_step_refuses_what_does_not_fit(device: str) -> None:
    spec = make_spec(device)
    backend = make(spec)
    crowd = make_crowd(spec, backend, seed=6, num_rows=2, max_len=12)
    crowd.run([], {0: 2, 1: 2})
    buffers = Buffers(crowd, 2)
    graph_step = backend.graph_step(buffers.metadata)
    assert graph_step is not None
    with pytest.raises(ValueError, match="2 decode rows was given 1 rows, 1 of them decoding, with 1 tokens"):
        graph_step.prepare(crowd.layout([0], {}))
    with pytest.raises(ValueError, match="given 2 rows, 1 of them decoding"):
        graph_step.prepare(crowd.layout([0], {1: 1}))
    crowd.run([], {0: 9})
    small = dataclasses.replace(buffers.metadata, kv_indices=buffers.metadata.kv_indices[:, :3])
    with pytest.raises(ValueError, match="room for 3 pages was given 4"):
        backend.graph_step(small).prepare(crowd.layout([0, 1], {}))


@pytest.mark.parametrize("seed", range(20))
def test_every_query_is_in_one_tile(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, rng.integers(1, 6)).astype(np.int32)
    seq_lens = lengths + rng.integers(0, 50, len(lengths)).astype(np.int32)
    group = int(rng.integers(1, 9))
    rows, begins = kernels.prefill_tiles(lengths, seq_lens, 3, group, FINE)
    assert rows.dtype == begins.dtype == np.int32
    covered = [(row, at) for row, begin in zip(rows, begins, strict=True) for at in range(begin, begin + FINE.prompt_queries)]
    wanted = [(3 + i, at) for i, length in enumerate(lengths) for at in range(-(-length * group // 16) * 16)]
    assert sorted(covered) == wanted
    last = np.minimum((begins + 15) // group, lengths[rows - 3] - 1)
    assert (np.diff((seq_lens - lengths)[rows - 3] + last) <= 0).all()  # longest first


def test_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("cuda" if torch.cuda.is_available() else "cpu")
    for head_dim, value_dim in [(520, 520), (16, 32), (600, 512), (640, 576)]:
        with pytest.raises(BackendUnavailableError, match=f"no room for keys of {head_dim} and values of {value_dim} numbers"):
            TritonBackend(dataclasses.replace(spec, head_dim=head_dim, value_dim=value_dim))
    with pytest.raises(BackendUnavailableError, match=r"a KV cache of torch.float32 or float8_e4m3fn, not torch.int8"):
        TritonBackend(dataclasses.replace(spec, kv_dtype=torch.int8))
    with pytest.raises(BackendUnavailableError, match="no kernels for device meta"):
        TritonBackend(dataclasses.replace(spec, device=torch.device("meta")))

    def broken(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nMore.")

    monkeypatch.setattr(attention, "write", broken)
    with pytest.raises(BackendUnavailableError, match=r"do not run here: RuntimeError: Failed to find C compiler\.$"):
        TritonBackend(spec)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("channels", "taps"), [(64, 3), (72, 7), (30, 1)], ids=str)
@pytest.mark.parametrize("kind", [TritonBackend, TorchNativeBackend])
def test_convolutions(device: str, kind: type[AttentionBackend], channels: int, taps: int, biased: bool) -> None:
    """Over steps of chunks and decodes of several rows, whose inputs lie in one place of pages or in two, the second one in part. Pages
    that nothing was written to hold NaN."""
    generator, page, num_rows = torch.Generator().manual_seed(channels), 4, 3
    spec = make_spec(device, (2, 2), head_dim=16, page_size=page, places=((0, 0), (1, 0), (1, 1)))
    backend = kind(spec)
    backend.allocate(100)
    for cache in backend.caches:
        for pages in (cache.keys, cache.values):
            pages[0].zero_()
            pages[1:].fill_(torch.nan)
    weight = torch.randn(channels, taps, generator=generator)
    bias = torch.randn(channels, generator=generator) if biased else None
    whole = torch.randn(num_rows, 40, channels, generator=generator)
    padded = torch.nn.functional.pad(whole.transpose(1, 2), (taps - 1, 0))
    expected = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels).transpose(1, 2)
    table = np.random.default_rng(1).permutation(np.arange(1, 61, dtype=np.int32)).reshape(2, num_rows, 10)
    places = range(1, 2 if channels <= 64 else 3)
    done = np.zeros(num_rows, dtype=np.int32)
    for num_decodes, lengths in ((0, [5, 1, 9]), (1, [1, 2, 4]), (3, [1, 1, 1]), (2, [1, 1, 11]), (3, [1, 1, 1]), (0, [17, 20, 3])):
        rows, taken = np.arange(num_rows, dtype=np.int32), np.array(lengths, dtype=np.int32)
        layout = build_layout(rows, num_decodes, done, taken, table, page)
        spans = [(row, slice(start, start + length)) for row, (start, length) in enumerate(zip(done.tolist(), lengths, strict=True))]
        step = backend.plan(metadata_on(spec.device, layout))
        given = torch.cat([whole[row, span] for row, span in spans]).to(device)
        found = step.convolve(places, given, weight.to(device), None if bias is None else bias.to(device))
        torch.testing.assert_close(found.cpu(), torch.cat([expected[row, span] for row, span in spans]), rtol=1e-5, atol=1e-5)
        done = done + taken
