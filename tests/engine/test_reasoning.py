"""Reasoning through the whole engine: the bundled model, against Transformers, with drafts and without, and with other tokenizers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import anyio
import grammar_decoding
import pytest
import tiny_tokenizers
import torch
from every_draft import use_every_draft
from oracle_engine import DEMO_DIR, idle

from aengine import AsyncEngine, Completion, FinishReason, InvalidRequestError, Reasoning, SamplingParams, StructuredOutput
from aengine.sampling.sampler import Sampler
from aengine.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
PROMPT = "It is a truth universally acknowledged: "
THINKS = Reasoning(closing="\n</think>\n\n", opened=True, max_tokens=8)
SENTENCE = Reasoning(closing=".", opened=True)  # which the model writes by itself
CHOICES = ("It is a truth.", "It is not so.")
SAMPLED = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=120, seed=1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def by_hand(prompt: list[int], tokenizer: Tokenizer, closing: list[int], budget: int) -> list[int]:
    """What the model writes greedily: `budget` tokens that do not end it, `closing`, and one of CHOICES behind white space."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    pieces = [tokenizer.decode([token_id]) for token_id in range(model.config.vocab_size)]
    output: list[int] = []
    while not output or output[-1] not in ends:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        written = "".join(pieces[token_id] for token_id in output[budget + len(closing) :])
        allowed: list[int]
        if len(output) < budget:
            allowed = [token_id for token_id in range(len(pieces)) if token_id not in ends]
        elif len(output) < budget + len(closing):
            allowed = [closing[len(output) - budget]]
        elif written.lstrip() in CHOICES:
            allowed = ends
        else:
            texts = [(token_id, (written + piece).lstrip()) for token_id, piece in enumerate(pieces) if piece]
            allowed = [token_id for token_id, text in texts if any(choice.startswith(text) for choice in CHOICES)]
            allowed = [token_id for token_id in allowed if re.match(r"\s{0,8}(?!\s)", written + pieces[token_id])]
        output.append(max(allowed, key=lambda token_id: float(logits[token_id])))
    return output


async def test_as_by_hand_with_the_logits_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_every_draft(monkeypatch)
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0.0, max_tokens=60, reasoning=THINKS, structured_output=StructuredOutput(choice=CHOICES))
    expected: list[int] = []
    for speculative in ("off", "ngram"):
        async with AsyncEngine("demo", dtype="float32", kv_cache_memory=32 << 20, speculative=speculative) as engine:
            closing = await engine.tokenize(THINKS.closing, add_special_tokens=False)
            completion = await engine.generate(PROMPT, params)
            expected = expected or by_hand(await engine.tokenize(PROMPT), engine.tokenizer, closing, 8)
            assert list(completion.token_ids) == expected
            assert completion.finish_reason is FinishReason.EOS
            assert completion.usage.reasoning_tokens == 8 + len(await engine.tokenize("\n</think>", add_special_tokens=False))
            assert (completion.usage.accepted_draft_tokens > len(closing) // 2) == (speculative == "ngram"), "the closing is drafted"
            assert idle(engine)


def reasoning_of(text: str, tokens: tuple[int, ...], tokenizer: Tokenizer, closing: str) -> int:
    """How many tokens there are up to the first closing; all if there is none."""
    return next((count for count in range(1, len(tokens)) if closing in tokenizer.decode(tokens[:count], False)), len(tokens))


async def generate_all(engine: AsyncEngine, wanted: list[SamplingParams]) -> list[Completion]:
    results: dict[int, Completion] = {}

    async def run(i: int) -> None:
        results[i] = await engine.generate(PROMPT, wanted[i])

    async with anyio.create_task_group() as group:
        for i in range(len(wanted)):
            group.start_soon(run, i)
    return [results[i] for i in range(len(wanted))]


@pytest.mark.slow
async def test_preemption_and_drafts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many requests at once: with a budget alone, with a grammar behind a closing of the model's own, and of several sequences."""
    use_every_draft(monkeypatch)
    pytest.importorskip("llguidance")
    answer = StructuredOutput(regex="([a-z]{6,9}[,.] ){10,12}")
    wanted = [
        *(replace(SAMPLED, seed=seed, reasoning=replace(THINKS, max_tokens=20 * seed), ignore_eos=True) for seed in range(4)),
        *(replace(SAMPLED, seed=seed, reasoning=replace(SENTENCE, max_tokens=60), structured_output=answer) for seed in range(4)),
        replace(SAMPLED, n=3, reasoning=replace(SENTENCE, closing="e ", max_tokens=9), structured_output=answer, repetition_penalty=1.1),
    ]
    bytes_per_page = 5 * 2 * 2 * 64 * 16 * 4  # layers, K and V, heads, head_dim, tokens, float32
    outputs: list[list[Completion]] = []
    for num_pages, speculative in ((2000, "off"), (17 + 16, "off"), (17 + 16, "ngram")):
        options = {"kv_cache_memory": num_pages * bytes_per_page, "speculative": speculative}
        async with AsyncEngine("demo", dtype="float32", max_model_len=256, **options) as engine:  # type: ignore[arg-type]
            outputs.append(await generate_all(engine, wanted))
            assert (engine.stats().preemptions > 0) == (num_pages < 2000)
            assert idle(engine)
            tokenizer = engine.tokenizer
    texts = [
        [(one.text, one.usage.reasoning_tokens) for all_of_it in output for one in (all_of_it, *all_of_it.others)] for output in outputs
    ]
    assert texts[0] == texts[1] == texts[2]
    for params, first in zip(wanted, outputs[0], strict=True):
        assert params.reasoning is not None
        count = 0
        for one in (first, *first.others):
            closing = params.reasoning.closing.strip()
            _, closed, behind = one.text.partition(closing)
            count += reasoning_of(one.text, one.token_ids, tokenizer, closing)
            if params.structured_output is not None and closed:
                assert re.match(r"\s{0,8}([a-z]{1,9}[,.]? ?)*$", behind), one.text
            assert closed or len(one.token_ids) == params.max_tokens
        assert first.usage.reasoning_tokens == count


async def test_only_the_closing_takes_more_than_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    processed: list[int] = []
    sample = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", lambda self, *given: (processed.append(len(given[1])), sample(self, *given))[1])
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
        wanted = [replace(SAMPLED, seed=seed, reasoning=replace(THINKS, max_tokens=30), ignore_eos=True) for seed in range(3)]
        completions = await generate_all(engine, wanted)
        closing = len(await engine.tokenize(THINKS.closing, add_special_tokens=False))
    assert closing <= len(processed) <= 3 * closing
    assert all(THINKS.closing in one.text for one in completions)


async def test_a_decoder_that_fails_does_not_stop_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
        params = replace(SAMPLED, reasoning=replace(THINKS, max_tokens=20), ignore_eos=True, detokenize=False)
        before = await engine.generate(PROMPT, replace(params, max_tokens=3))
        monkeypatch.setattr(engine.tokenizer._codec, "decode", lambda *given: 1 / 0)
        assert len((await engine.generate(PROMPT, params)).token_ids) == params.max_tokens
        assert before.token_ids == (await engine.generate(PROMPT, replace(params, max_tokens=3))).token_ids


async def test_a_budget_may_be_any_number() -> None:
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
        plain = await engine.generate(PROMPT, SAMPLED)
        budget = await engine.generate(PROMPT, replace(SAMPLED, reasoning=replace(THINKS, max_tokens=2**31 - 1)))
        assert budget.token_ids == plain.token_ids


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
async def test_the_model_may_open_it(backend: str) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    async with AsyncEngine("demo", dtype="float32", kv_cache_memory=32 << 20, attention_backend=backend) as engine:
        plain = await engine.generate(PROMPT, free)
        words = plain.text.split()
        cut = await engine.generate(PROMPT, replace(free, reasoning=Reasoning(opening=words[0], closing="~~", max_tokens=3)))
        assert "~~" in cut.text
        assert cut.token_ids[:3] == plain.token_ids[:3]
        assert cut.usage.reasoning_tokens == reasoning_of(cut.text, cut.token_ids, engine.tokenizer, "~~")
        other = await engine.generate(PROMPT, replace(free, reasoning=Reasoning(opening="~", closing=words[1], max_tokens=0)))
        assert (other.text, other.usage.reasoning_tokens) == (plain.text, 0)


async def test_a_budget_needs_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
        params = replace(SAMPLED, reasoning=THINKS, ignore_eos=True)
        completion = await engine.generate(PROMPT, params)
        prefix = await engine.generate(PROMPT, replace(params, reasoning=None, max_tokens=8))
        assert completion.text.startswith(f"{prefix.text}\n</think>\n\n")


@pytest.mark.parametrize("name", ["byte_level", "unigram_byte_fallback", "bpe_byte_fallback", "metaspace", "wordpiece"])
def test_markers_in_the_tokens_of_other_models(name: str, tmp_path: Path) -> None:
    tiny_tokenizers.ALL[name]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    compiler = grammar_decoding.compiler_for(tokenizer, tokenizer.vocab_size, (1,))
    wanted = Reasoning(opening="<think>", closing="\n</think>\n", max_tokens=99)
    if name == "wordpiece":
        with pytest.raises(InvalidRequestError, match=r"reasoning\.closing: '\\n</think>\\n' cannot be found"):
            compiler.compile_reasoning(wanted, None).result()
        assert compiler.compile_reasoning(replace(wanted, max_tokens=None), None).result().markers.closing == "</think>"
        return
    assert compiler.compile_reasoning(wanted, None).done(), "it waits for no grammar"
    for has_grammar in (False, True):
        compiled = compiler.compile_reasoning(wanted, StructuredOutput(choice=("you",)) if has_grammar else None).result()
        assert tokenizer.decode(compiled.closing_ids, False).strip() == "</think>"
        matcher = compiled.start()
        texts = {begin: {begin + tokenizer.decode([token_id]) for token_id in banned} for begin, banned in compiled.banned_behind.items()}
        assert all("</think>" in text and not text.endswith("</think>") for some in texts.values() for text in some)
        if has_grammar and compiled.opening_id is None:
            continue
        ids = tokenizer.encode("<think>the</think> you", add_special_tokens=False)
        assert any(matcher.accept(token_id) for token_id in ids) != has_grammar
