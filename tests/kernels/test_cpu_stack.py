"""Whole stacks against `models/torch/decoder.py`: random models of each family, over chunked prompts and decodes."""

from __future__ import annotations

import dataclasses
import itertools

import cpu_ops
import numpy as np
import pytest
import torch
from cpu_ops import NO_LAST_TOKENS, pool_of_heads
from numpy.typing import NDArray
from row_tensors import initial_tensors, named_arrays
from slow_cases import slow_but
from torch import Tensor

from aengine.attention import AttentionMetadata, AttentionSpec, StepLayout, build_layout
from aengine.attention.torch_native import TorchNativeBackend
from aengine.cache import LayerGroups, layer_groups
from aengine.kernels.arrays import as_tensor
from aengine.kernels.cpu.library import CpuKernels, Workspace
from aengine.kernels.cpu.ops import KvPool
from aengine.models.config.model_config import read_spec
from aengine.models.cpu.stack import DecoderStack, unsupported
from aengine.models.spec import Experts, ModelSpec
from aengine.models.torch.decoder import Decoder, ForwardBatch
from aengine.runner.torch.loading import fused

IntArray = NDArray[np.int32]
CPU = torch.device("cpu")
POSITIONS = 256
TINY = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.15,
}
FAMILIES = {
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied-biased-odd": (
        "Qwen3",
        {"head_dim": 48, "tie_word_embeddings": True, "attention_bias": True, "hidden_size": 50, "intermediate_size": 71},
    ),
    "qwen3-partly-windowed": ("Qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2": ("Qwen2", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4, "head_dim": 12}),
    "llama-all-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "mistral-windowed": ("Mistral", {"sliding_window": 11, "head_dim": 80}),
}
CHUNKS = [  # per step: pairs of a sequence and how many of its tokens are computed
    [(0, 37)],
    [(0, 1), (1, 20), (2, 3)],
    [(0, 1), (2, 1), (1, 45)],
    [(0, 1), (1, 1), (2, 1), (3, 130)],
    [(3, 1)],
    [(0, 1), (1, 1), (2, 1), (3, 1)],
]


def tiny_spec(name: str) -> ModelSpec:
    prefix, changes = FAMILIES[name]
    return read_spec({"architectures": [f"{prefix}ForCausalLM"], **TINY, **changes})


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    weights = initial_tensors(spec)
    torch.manual_seed(4)
    for name, weight in weights.items():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            weight.normal_(0.0, 0.1)
    return weights


def layouts(page_size: int) -> list[StepLayout]:
    pages = -(-POSITIONS // page_size)
    table = (1 + np.random.default_rng(0).permutation(4 * pages)).reshape(1, 4, pages).astype(np.int32)
    computed = np.zeros(4, dtype=np.int32)
    steps = []
    for chunks in CHUNKS:
        rows, lengths = np.array(chunks, dtype=np.int32).T
        rows, lengths = np.ascontiguousarray(rows), np.ascontiguousarray(lengths)
        decodes = int((lengths == 1).sum())
        steps.append(build_layout(rows, decodes, computed[rows], lengths, table, page_size))
        computed[rows] += lengths
    return steps


def num_pages(page_size: int) -> int:
    return 1 + 4 * -(-POSITIONS // page_size)


def token_ids(layout: StepLayout, step: int) -> IntArray:
    return np.random.default_rng(step).integers(0, TINY["vocab_size"], layout.num_tokens).astype(np.int32)


def everything(layout: StepLayout) -> IntArray:
    return np.arange(layout.num_tokens, dtype=np.int32)


@torch.no_grad()
def torch_logits(spec: ModelSpec, weights: dict[str, Tensor], dtype: torch.dtype, steps: list[StepLayout]) -> list[Tensor]:
    """Of all tokens of each step."""
    decoder = Decoder(spec, fused(spec, named_arrays((name, (weight,)) for name, weight in weights.items()), dtype, CPU), POSITIONS)
    page_size = steps[0].page_size
    kinds = [layer.attention for layer in spec.layers]
    scoring = tuple(kind.scoring for kind in kinds)
    shape = kinds[0].num_heads, kinds[0].num_kv_heads, kinds[0].key_dim
    attention = AttentionSpec(*shape, scoring, page_size, dtype, CPU, value_dim=kinds[0].value_dim)
    backend = TorchNativeBackend(attention)
    backend.allocate(num_pages(page_size))
    names = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "slot_mapping")
    out = []
    for number, layout in enumerate(steps):
        metadata = AttentionMetadata(layout, *(torch.from_numpy(getattr(layout, name)) for name in names))
        ids, positions, indices = map(torch.from_numpy, (token_ids(layout, number), layout.positions, everything(layout)))
        batch = ForwardBatch(ids, positions, indices, backend.plan(metadata))
        out.append(decoder.logits(decoder(batch), batch.logits_indices))
    return out


def stack_of(workspace: Workspace, spec: ModelSpec, weights: dict[str, Tensor], dtype: torch.dtype, **options) -> DecoderStack:
    """Fused weights are handed over in two parts."""
    parts = ((name, weight.to(dtype).tensor_split(2) if weight.dim() == 2 else [weight]) for name, weight in weights.items())
    return cpu_ops.packed_stack(workspace, spec, parts, POSITIONS, dtype=dtype, **options)


def pool_of(spec: ModelSpec, dtype: torch.dtype, page_size: int) -> KvPool:
    attention = spec.layers[0].attention
    shape = {"layers_per_page": spec.num_layers, "num_kv_heads": attention.num_kv_heads}
    shape |= {"key_dim": attention.key_dim, "value_dim": attention.value_dim}
    return pool_of_heads(**shape, num_pages=num_pages(page_size), page_size=page_size, dtype=dtype)


def run_step(stack: DecoderStack, workspace: Workspace, pool: KvPool, layout: StepLayout, ids: IntArray, indices: IntArray) -> Tensor:
    """The hidden states at the logits indices of one step."""
    step = stack.prepare(workspace, pool, layout, ids, indices, last_tokens=NO_LAST_TOKENS)
    step.run()
    assert step.hidden is not None
    return as_tensor(step.hidden)


def hidden_states(workspace: Workspace, stack: DecoderStack, pool: KvPool, steps: list[StepLayout]) -> list[Tensor]:
    return [run_step(stack, workspace, pool, layout, token_ids(layout, number), everything(layout)) for number, layout in enumerate(steps)]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("family", "page_size"),
    slow_but(lambda case: case[1] == 16 or case == ("qwen3-partly-windowed", 4), itertools.product(FAMILIES, [4, 16, 32])),
)
def test_float32_gives_the_decoders_logits(kernels: CpuKernels, family: str, page_size: int) -> None:
    spec = tiny_spec(family)
    weights, steps = random_weights(spec), layouts(page_size)
    workspace = Workspace(kernels, 2)
    stack = stack_of(workspace, spec, weights, torch.float32)
    hidden = hidden_states(workspace, stack, pool_of(spec, torch.float32, page_size), steps)
    for mine, expected in zip(hidden, torch_logits(spec, weights, torch.float32, steps), strict=True):
        torch.testing.assert_close(cpu_ops.stack_logits(stack, workspace, mine), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page_size", [4, 16])
def test_layers_in_groups_give_the_same_bits(kernels: CpuKernels, page_size: int) -> None:
    """Each group has pages of its own; those behind its window are the reserved page. One layer of a page is not used."""
    spec = tiny_spec("qwen3-partly-windowed")
    weights, steps, workspace = random_weights(spec), layouts(page_size), Workspace(kernels, 2)
    groups = LayerGroups((None, 9, 9), 1, ((0, 0), (1, 0), (2, 0)), (1, 1, 1), (0, 0, 0))
    assert layer_groups(spec.windows) == groups
    grouped = []
    for layout in steps:
        far = (num_pages(page_size) - 1) * np.arange(3)[:, None]
        pages = (layout.kv_indices + far).astype(np.int32)
        for row, end in enumerate(layout.seq_lens):
            first_query = end - (layout.qo_indptr[row + 1] - layout.qo_indptr[row])
            pages[1:, layout.kv_indptr[row] :][:, : max(0, first_query - 8) // page_size] = 0
        grouped.append(dataclasses.replace(layout, kv_indices=pages, slot_mapping=(layout.slot_mapping + far * page_size).astype(np.int32)))
    pool = {"num_kv_heads": 2, "key_dim": 16, "value_dim": 16, "page_size": page_size, "dtype": torch.float32}
    big = pool_of_heads(layers_per_page=1, num_pages=3 * num_pages(page_size), **pool)
    expected = hidden_states(workspace, stack_of(workspace, spec, weights, torch.float32), pool_of(spec, torch.float32, page_size), steps)
    stack = stack_of(workspace, spec, weights, torch.float32, groups=groups)
    for mine, other in zip(hidden_states(workspace, stack, big, grouped), expected, strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(ValueError, match="1 layer groups, not 3"):
        hidden_states(workspace, stack, big, steps)


def distance(spec: ModelSpec, logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Rounding makes routers choose other experts for some tokens: of a mixture the median token counts."""
    rows = (logits - exact).norm(dim=-1)
    return float(rows.median() if any(isinstance(layer.mlp, Experts) for layer in spec.layers) else rows.norm())


def check_bf16_is_as_near_as_torch(kernels: CpuKernels, spec: ModelSpec, weights: dict[str, Tensor]) -> None:
    """Both round activations at the same places, to different bits: the distances to float32 are equal within 5 %."""
    steps = layouts(16)
    rounded = {name: weight.bfloat16().float() for name, weight in weights.items()}
    exact = torch.cat(torch_logits(spec, rounded, torch.float32, steps))
    torchs = torch.cat(torch_logits(spec, weights, torch.bfloat16, steps))
    workspace = Workspace(kernels, 2)
    stack = stack_of(workspace, spec, weights, torch.bfloat16)
    hidden = torch.cat(hidden_states(workspace, stack, pool_of(spec, torch.bfloat16, 16), steps))
    assert distance(spec, cpu_ops.stack_logits(stack, workspace, hidden), exact) <= 1.05 * distance(spec, torchs, exact)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_bf16_is_as_near_to_float32_as_torch(kernels: CpuKernels, family: str) -> None:
    spec = tiny_spec(family)
    check_bf16_is_as_near_as_torch(kernels, spec, random_weights(spec))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_near(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Relative error of the logits of these three layers: about 4 %."""
    spec = tiny_spec("qwen3")
    weights, steps = random_weights(spec), layouts(16)
    exact = torch.cat(torch_logits(spec, weights, torch.float32, steps))
    workspace = Workspace(kernels, 2)
    stack = stack_of(workspace, spec, weights, dtype, quantization="int8")
    assert stack.nbytes < 1.2 * sum(weight.numel() for weight in weights.values())
    logits = cpu_ops.stack_logits(stack, workspace, torch.cat(hidden_states(workspace, stack, pool_of(spec, dtype, 16), steps)))
    assert (logits - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
def test_bits_do_not_depend_on_threads_or_on_the_logits_indices(kernels: CpuKernels, dtype: torch.dtype, int8: bool) -> None:
    spec = tiny_spec("qwen3-partly-windowed")
    weights, steps = random_weights(spec), layouts(16)
    stack = stack_of(Workspace(kernels, 1), spec, weights, dtype, quantization="int8" if int8 else "none")
    expected = hidden_states(Workspace(kernels, 1), stack, pool_of(spec, dtype, 16), steps)
    for threads in (2, 4, 7):
        workspace, pool = Workspace(kernels, threads), pool_of(spec, dtype, 16)
        for number, layout in enumerate(steps):
            last = (layout.qo_indptr[1:] - 1)[::-1]
            indices = {2: last, 4: last[:0], 7: last[:1].repeat(3000)}[threads]  # also none, and more than there are tokens
            hidden = run_step(stack, workspace, pool, layout, token_ids(layout, number), indices)
            assert torch.equal(hidden, expected[number][torch.from_numpy(indices.astype(np.int64))])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied-biased-odd"])
def test_a_greedy_step_brings_the_argmax(kernels: CpuKernels, family: str, dtype: torch.dtype, int8: bool) -> None:
    spec = tiny_spec(family)
    stack = stack_of(Workspace(kernels, 1), spec, random_weights(spec), dtype, quantization="int8" if int8 else "none")
    for threads in (1, 3):
        workspace, pool = Workspace(kernels, threads), pool_of(spec, dtype, 16)
        for number, layout in enumerate(layouts(16)):
            step = stack.prepare(
                workspace, pool, layout, token_ids(layout, number), everything(layout)[::-1], greedy=True, last_tokens=NO_LAST_TOKENS
            )
            step.run()
            assert step.sampled is not None
            hidden = run_step(stack, workspace, pool, layout, token_ids(layout, number), everything(layout)[::-1])
            assert step.sampled.tolist() == cpu_ops.stack_logits(stack, workspace, hidden).argmax(-1).tolist()
            nobody = stack.prepare(
                workspace, pool, layout, token_ids(layout, number), everything(layout)[:0], greedy=True, last_tokens=NO_LAST_TOKENS
            )
            nobody.run()
            assert nobody.sampled is not None
            assert nobody.sampled.shape == (0,)


def test_two_engines_in_one_process(kernels: CpuKernels) -> None:
    """Steps of two models of different sizes, alternating, each with its own workspace and pool."""
    results = []
    for alternating in (False, True):
        made = []
        for family in ("qwen3", "llama-mha"):
            spec, workspace = tiny_spec(family), Workspace(kernels, 2)
            stack = stack_of(workspace, spec, random_weights(spec), torch.float32)
            made.append((workspace, stack, pool_of(spec, torch.float32, 16)))
        steps = layouts(16)
        if alternating:
            rows = [[], []]
            for number, layout in enumerate(steps):
                for one, (workspace, stack, pool) in zip(rows, made, strict=True):
                    one.append(run_step(stack, workspace, pool, layout, token_ids(layout, number), everything(layout)))
            results.append(rows)
        else:
            results.append([hidden_states(workspace, stack, pool, steps) for workspace, stack, pool in made])
    for apart, mixed in zip(*results, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(apart, mixed, strict=True))


def test_a_refused_step_writes_nothing(kernels: CpuKernels) -> None:
    spec = tiny_spec("qwen3")
    workspace = Workspace(kernels, 1)
    stack = stack_of(workspace, spec, random_weights(spec), torch.float32)
    pool = pool_of(spec, torch.float32, 16)
    layout = layouts(16)[0]
    ids, indices = token_ids(layout, 0), np.array([36], np.int32)
    for bad in (-1, spec.vocab_size):
        changed = ids.copy()
        changed[36] = bad
        with pytest.raises(ValueError, match="a token id"):
            run_step(stack, workspace, pool, layout, changed, indices)
    for bad_token in (-1, 37):
        with pytest.raises(ValueError, match="a logits index"):
            run_step(stack, workspace, pool, layout, ids, np.array([bad_token], np.int32))
    with pytest.raises(ValueError, match="a position"):
        run_step(stack, workspace, pool, dataclasses.replace(layout, positions=layout.positions + POSITIONS), ids, indices)
    with pytest.raises(ValueError, match="36 token ids for 37"):
        run_step(stack, workspace, pool, layout, ids[:36], indices)
    assert not any(memory.any() for memory in pool._memory)
    with pytest.raises(ValueError, match="are not the model's"):
        run_step(stack, workspace, pool_of(spec, torch.bfloat16, 16), layout, ids, indices)


def test_weights_are_checked(kernels: CpuKernels) -> None:
    spec = tiny_spec("llama-all-biases")
    weights = random_weights(spec)
    workspace = Workspace(kernels, 1)
    without = {name: weight for name, weight in weights.items() if name != "layers.2.down.weight" and name != "layers.2.down.bias"}
    with pytest.raises(ValueError, match=r"layers\.2\.down\.weight is missing"):
        stack_of(workspace, spec, without, torch.float32)
    with pytest.raises(ValueError, match=r"layers\.9\.down\.weight is not a weight"):
        stack_of(workspace, spec, {**weights, "layers.9.down.weight": weights["layers.2.down.weight"]}, torch.float32)
    with pytest.raises(ValueError, match=r"norm\.weight has shape \(63,\); the model's is \(64,\)"):
        stack_of(workspace, spec, {**weights, "norm.weight": torch.ones(63)}, torch.float32)


def test_what_is_not_supported() -> None:
    spec = tiny_spec("qwen3")
    assert unsupported(spec, np.dtype("float32")) is None
    assert unsupported(spec, np.dtype("bfloat16")) is None
    assert "float16" in (unsupported(spec, np.dtype("float16")) or "")
    for head_dim in (15, 514):
        layer = spec.layers[0]
        layer = dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, head_dim=head_dim))
        assert f"head_dim {head_dim}" in (unsupported(dataclasses.replace(spec, layers=(layer,)), np.dtype("float32")) or "")
