"""Steps with several tokens of a row: they give the bits that as many decodes give, one after another.

Drafts are checked in such steps, so outputs with and without them are equal only if this holds, at every level and for every width.
"""

from __future__ import annotations

import itertools

import cpu_ops
import numpy as np
import pytest
import torch
from cpu_ops import NO_LAST_TOKENS, pool_of_heads
from slow_cases import slow_but
from test_cpu_stack import random_weights
from torch import Tensor

from aengine.attention import build_layout
from aengine.kernels.arrays import as_tensor
from aengine.kernels.cpu.library import CpuKernels, Workspace
from aengine.models.config.model_config import read_spec
from aengine.models.cpu.stack import DecoderStack
from aengine.models.spec import ModelSpec

ROWS = 32
MOST = 17  # tokens of a row in a step: the last one and 16 drafts
WIDTHS = [[1], [2], [3], [4], [5], [6], [7], [8], [9], [12], [13], [16], [17], [4] * 3, [2] * 7]
TINY = {
    "vocab_size": 199,
    "hidden_size": 144,
    "intermediate_size": 336,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
LATENT = {
    **{"kv_lora_rank": 32, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 20, "rms_norm_eps": 1e-5},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1},
    **{"n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "norm_topk_prob": True, "num_key_value_heads": 4},
    **{"routed_scaling_factor": 1.7, "rope_interleave": True},
}
MODELS = {
    "plain": ("Qwen3", {"head_dim": 32}),
    "windowed": ("Mistral", {"sliding_window": 11, "head_dim": 24}),
    "capped": ("Gemma2", {"head_dim": 32, "sliding_window": 40, "query_pre_attn_scalar": 24, "hidden_activation": "gelu_pytorch_tanh"}),
    "experts": ("Qwen3Moe", {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}),
    "latent": ("DeepseekV3", LATENT),
}
NUMBERS = [  # dtype, quantization of the weights, dtype of the KV
    *((dtype, quantization, dtype) for dtype in (torch.float32, torch.bfloat16) for quantization in ("none", "int8", "int4")),
    *((dtype, "none", torch.int8) for dtype in (torch.float32, torch.bfloat16)),
]


def spec_of(name: str) -> ModelSpec:
    prefix, changes = MODELS[name]
    return read_spec({"architectures": [f"{prefix}ForCausalLM"], **TINY, **changes})


class Sequences:
    """Sequences in a pool of a stack, each with a prompt that is computed and `MOST` tokens that follow it."""

    def __init__(self, stack: DecoderStack, workspace: Workspace, kv_dtype: torch.dtype, page_size: int) -> None:
        self.stack, self.page_size = stack, page_size
        rng = np.random.default_rng(7)
        self.starts = rng.integers(1, 60, ROWS).astype(np.int32)
        self.starts[:4] = 250, 256, 15, 16  # the ends of a partition of attention, and of a block
        columns = -(-(int(self.starts.max()) + MOST) // page_size)
        self.table = (1 + rng.permutation(ROWS * columns)).reshape(1, ROWS, columns).astype(np.int32)
        attention = stack.spec.layers[0].attention
        self.pool = pool_of_heads(
            layers_per_page=stack.spec.num_layers,
            num_pages=1 + ROWS * columns,
            page_size=page_size,
            num_kv_heads=attention.num_kv_heads,
            key_dim=attention.key_dim,
            value_dim=attention.value_dim,
            dtype=kv_dtype,
        )
        vocab_size = stack.spec.vocab_size
        self.tokens = rng.integers(0, vocab_size, (ROWS, MOST)).astype(np.int32)
        prompts = rng.integers(0, vocab_size, int(self.starts.sum())).astype(np.int32)
        self.step(workspace, np.arange(ROWS, dtype=np.int32), np.zeros(ROWS, np.int32), self.starts, prompts)
        self.before = self.kv()

    def kv(self) -> list[np.ndarray]:
        return [memory.copy() for memory in self.pool._memory]

    def reset(self) -> None:
        for memory, before in zip(self.pool._memory, self.before, strict=True):
            memory[:] = before

    def step(
        self, workspace: Workspace, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, ids: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of all tokens."""
        layout = build_layout(rows, int((lengths == 1).sum()), starts, lengths, self.table, self.page_size)
        call = self.stack.prepare(workspace, self.pool, layout, ids, np.arange(len(ids), dtype=np.int32), last_tokens=NO_LAST_TOKENS)
        call.run()
        assert call.hidden is not None
        hidden = as_tensor(call.hidden)
        return hidden, cpu_ops.stack_logits(self.stack, workspace, hidden)

    def chunks(self, workspace: Workspace, rows: np.ndarray, lengths: np.ndarray) -> list[tuple[Tensor, Tensor]]:
        """In one step the first tokens of each row that follow its prompt; by row."""
        hidden, logits = self.step(
            workspace,
            rows,
            self.starts[rows],
            lengths,
            np.concatenate([self.tokens[row, :length] for row, length in zip(rows, lengths, strict=True)]),
        )
        sizes = lengths.tolist()
        return list(zip(hidden.split(sizes), logits.split(sizes), strict=True))

    def decodes(self, workspace: Workspace) -> list[tuple[Tensor, Tensor]]:
        """All tokens of each row, one by one and alone; by row."""
        found = []
        for row in range(ROWS):
            one = np.array([row], np.int32)
            steps = [self.step(workspace, one, self.starts[one] + i, one * 0 + 1, self.tokens[row, i : i + 1]) for i in range(MOST)]
            found.append(tuple(torch.cat(parts) for parts in zip(*steps, strict=True)))
        return found


QUICK = [
    *(("plain", numbers, 16) for numbers in NUMBERS[1:6] + NUMBERS[7:]),
    ("windowed", NUMBERS[3], 4),
    ("capped", NUMBERS[0], 16),
    ("experts", NUMBERS[3], 16),
    ("latent", NUMBERS[3], 16),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("model", "numbers", "page_size"), slow_but(QUICK, itertools.product(MODELS, NUMBERS, [4, 16])))
def test_a_chunk_gives_the_bits_of_decodes(
    kernels: CpuKernels, model: str, numbers: tuple[torch.dtype, str, torch.dtype], page_size: int
) -> None:
    """Hidden states, logits and KV: of one row with 1 to 17 tokens, of some, and of 32 with as many each or as many as they like."""
    dtype, quantization, kv_dtype = numbers
    spec, alone = spec_of(model), Workspace(kernels, 1)
    weights = ((name, [weight.to(dtype)]) for name, weight in random_weights(spec).items())
    stack = cpu_ops.packed_stack(alone, spec, weights, TINY["max_position_embeddings"], dtype=dtype, quantization=quantization)
    sequences = Sequences(stack, alone, kv_dtype, page_size)
    expected = sequences.decodes(alone)
    expected_kv = sequences.kv()
    rng = np.random.default_rng(3)
    for widths in [*WIDTHS, *(np.sort(rng.integers(1, MOST + 1, ROWS)).tolist() for _ in range(4)), [MOST] * ROWS]:
        sequences.reset()
        rows, lengths = rng.permutation(ROWS)[: len(widths)].astype(np.int32), np.array(widths, np.int32)
        for row, (hidden, logits) in zip(rows, sequences.chunks(Workspace(kernels, 3), rows, lengths), strict=True):
            assert torch.equal(hidden, expected[row][0][: len(hidden)]), (widths, row)
            assert torch.equal(logits, expected[row][1][: len(hidden)]), (widths, row)
    for memory, wanted in zip(sequences.pool._memory, expected_kv, strict=True):
        assert np.array_equal(memory, wanted)
