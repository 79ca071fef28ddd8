"""A family of models as a test sees it: a tiny random model made from its Transformers config, and what Transformers makes of it.

The families' cases are lists in the files named `*_cases.py` beside this one.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

VOCAB = 199
COUNT = 40  # tokens generated for each prompt
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""What most configs have; a case changes it."""


@dataclass(frozen=True)
class Case:
    name: str
    config: str  # the name of the Transformers config class, without "Config" at its end
    changes: dict[str, Any] = field(default_factory=dict)  # of `TINY`, or where `whole`, the whole config
    whole: bool = False
    max_model_len: int | None = None  # of the engine
    lengths: tuple[int, ...] = (1, 2, 5, 9, 17, 24, 33, 48)  # of the prompts; windows are to be a third of the longest sequence at most
    attention: str = "eager"  # the implementation of Transformers: others leave out soft caps or sinks
    adjust: Callable[[transformers.PreTrainedModel], None] = lambda model: None  # to weights that `randomize` does not draw well
    padded: bool = True  # Transformers generates for all prompts at once; else it counts padding as positions, and each runs alone
    in_kernels: bool = True  # of the CPU; else it runs in torch

    def make(self) -> transformers.PreTrainedModel:
        """The model, float32."""
        values = self.changes if self.whole else {**TINY, **self.changes}
        config = getattr(transformers, f"{self.config}Config")(**values)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=self.attention).float().eval()
        randomize(model, sum(map(ord, self.name)))
        self.adjust(model)
        return model


@torch.no_grad()
def randomize(model: transformers.PreTrainedModel, seed: int) -> None:
    """Draws all parameters such that every layer changes the logits: matrices that make activations a little larger, norms that weight
    each number differently, biases that are not zero, and embeddings that layers outweigh where they are the head, too."""
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            spread = 0.2 if name.endswith("bias") else 1.0  # a large bias of the last norm would choose the tokens
            parameter.add_((torch.rand(parameter.shape, generator=generator) - 0.5) * spread)
        elif parameter is embedding:
            parameter.normal_(0.0, 0.05 if tied else 0.7, generator=generator)
        elif parameter.dim() > 1:
            parameter.normal_(0.0, 1.2 * parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.normal_(0.0, 0.2, generator=generator)


@dataclass(frozen=True)
class Reference:
    """What Transformers computes for the prompts of a case."""

    path: pathlib.Path  # of the saved model
    prompts: list[list[int]]
    tokens: list[list[int]]  # `COUNT` greedy ones for each prompt
    logits: list[Tensor]  # [COUNT, vocab_size] for each prompt, those that the tokens are the argmax of
    prompt_logprobs: list[Tensor]  # [len(prompt) - 1] for each prompt


WRONG_IN_5_17 = {
    *("bamba", "falcon-h1-normed", "gemma3n", "granite-hybrid-moe", "internlm3", "iquestcoder", "mamba2", "minimax-m2"),
    *("nemotron-h", "nemotron-h-moe"),
}
"""Cases whose tokens Transformers 5.23 and all our backends have alike."""


@torch.no_grad()
def reference(case: Case, path: pathlib.Path) -> Reference:
    """Makes the case's model and saves it to `path`. Tokens are those of `generate`, logits those of a forward pass without a cache."""
    if Version(transformers.__version__) < Version("5.18") and case.name in WRONG_IN_5_17:
        pytest.skip("Transformers 5.17 does not have the model, or computes something else than later releases")
    model = case.make()
    model.save_pretrained(path)
    rng = np.random.default_rng(1)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in case.lengths]
    batches = [prompts] if case.padded else [[prompt] for prompt in prompts]
    tokens = [row for batch in batches for row in generate(model, batch)]
    whole = [prompt + output for prompt, output in zip(prompts, tokens, strict=True)]
    longest = max(map(len, whole))
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in whole])  # on the right, which causal attention does not see
    logits = model(padded, use_cache=False).logits.float()
    after = [logits[row, len(prompt) - 1 : len(prompt) - 1 + COUNT] for row, prompt in enumerate(prompts)]
    before = [
        logits[row, : len(prompt) - 1].log_softmax(-1).gather(-1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
        for row, prompt in enumerate(prompts)
    ]
    return Reference(path, prompts, tokens, after, before)


def generate(model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """`COUNT` greedy tokens each; prompts are padded on the left, masked."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = transformers.GenerationConfig(max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
