"""The torch decoder on several ranks against the whole one, for every kind of block."""

from __future__ import annotations

import itertools

import dense_cases
import hybrid_cases
import mixture_cases
import plain_cases
import pytest
import torch
import transformers
from family_cases import TINY, Case
from slow_cases import slow_but
from tensor_ranks import all_logits, decoder_of, layouts, logits_of_ranks, whole_weights

from aengine.models.config.model_config import read_spec
from aengine.models.spec import ModelSpec

ODD = {"hidden_size": 52, "head_dim": 12, "intermediate_size": 71, "vocab_size": 101}
CASES = {case.name: case for case in (*dense_cases.CASES, *mixture_cases.CASES, *plain_cases.CASES)}
CASES |= {case.name: case for case in hybrid_cases.CASES if case.name in ("gemma4", "gemma4-experts", "mimo-v2")}
CASES["llama-odd"] = Case("llama-odd", "Llama", {**ODD, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True})
QUICK = ("llama-odd", "gemma3", "gemma4-experts", "olmo2", "qwen2-moe", "gpt-oss", "deepseek-v3", "stablelm-parallel", "gpt2", "bloom")
CHUNKS = [[(0, 17)], [(0, 1), (1, 9), (2, 3)], [(0, 1), (1, 1), (2, 1)]]


def spec_of(case: Case) -> ModelSpec:
    config = getattr(transformers, f"{case.config}Config")(**(case.changes if case.whole else {**TINY, **case.changes}))
    return read_spec({key: value for key, value in config.to_dict().items() if key != "architectures"})


def is_quick(case: tuple[str, int, bool]) -> bool:
    return (case[0] in QUICK and case[1] == 2) or case[0] == "llama-odd"


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("name", "size", "exact"),
    slow_but(is_quick, [case for i, case in enumerate(itertools.product(CASES, (2, 4), (True, False))) if is_quick(case) or not i % 5]),
)
def test_logits_are_those_of_one_rank(name: str, size: int, exact: bool) -> None:
    """With 2 KV heads most models have fewer than 4 ranks. Tokens are the same, and bits on all ranks."""
    spec, steps = spec_of(CASES[name]), layouts(CHUNKS)
    weights = whole_weights(spec)
    with torch.inference_mode():
        expected = all_logits(decoder_of(spec, weights, None), spec, steps)
    found = logits_of_ranks(spec, weights, size, steps, exact=exact)
    for step, whole in enumerate(expected):
        ours = found[0][step]
        assert all(torch.equal(ours, others[step]) for others in found[1:])
        assert torch.equal(ours.argmax(-1), whole.argmax(-1))
        limit = 1e-4 if name.startswith("gemma4") else 1e-5  # norms of what each block makes magnify what is rounded
        assert ((ours - whole).abs().amax() / whole.abs().amax()).item() < limit
