"""Several sequences, stop strings, logprobs and effective parameters, through the whole engine."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from hang_guard import HANG_SECONDS, let_others_run
from oracle_engine import DEMO_DIR, Ahead, OracleEngine, idle, seeds_of, step_with_the_loop
from speculating import also_with_drafts, demo

from aengine import ContextLengthError, FinishReason, InvalidRequestError, SamplingParams
from aengine.api.outputs import RequestState
from aengine.engine import requests

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"


class TestSeveralSequences:
    @pytest.mark.parametrize("ahead", list(Ahead))
    async def test_each_is_the_solo_run_of_its_seed(self, ahead: Ahead, speculation: bool) -> None:
        params = SamplingParams(seed=9, n=5, max_tokens=30)
        async with OracleEngine(ahead=ahead) as engine:
            stream = engine.stream([1, 2, 3, 4, 5, 6], params)
            got: list[list[int]] = [[] for _ in range(5)]
            ends = []
            async for token in stream:
                got[token.index].append(token.token_id)
                if token.finish_reason is not None:
                    ends.append(token.index)
            assert got == [engine.solo(seed)[0] for seed in seeds_of(params)]
            assert sorted(ends) == [0, 1, 2, 3, 4]
            completion = stream.completion()
            assert [list(one.token_ids) for one in (completion, *completion.others)] == got
            assert completion.usage.completion_tokens == sum(map(len, got))
            await stream.aclose()
            assert idle(engine)
            expected = 6 + 4 + sum(len(ids) - 1 for ids in got)  # the prompt once, its last token for each fork, and the output
            most = expected + 5 * (ahead is not Ahead.NEVER)  # one step ahead runs past an end
            assert expected <= engine.runner.num_computed <= (most if not speculation else most + engine.stats().draft_tokens)

    @pytest.mark.quick_cases(1)
    @also_with_drafts
    async def test_each_can_be_replayed_alone(self) -> None:
        """With the formula of docs/sampling.md, which is kept for users."""
        (formula,) = re.findall(r"`(int\.from_bytes\(blake2b.*)`", DOCS.read_text(encoding="utf-8"))

        def seed_of(seed: int, index: int) -> int:
            return int(eval(formula, {"blake2b": blake2b, "seed": seed, "index": index})) if index else seed

        assert [seed_of(seed, index) for seed, index in ((7, 1), (7, 2), (2**64 - 1, 127))] == [
            0x6182815F44B0FBF2,
            0x97C5176B42908772,
            0xFD98994DC2FCFAC0,
        ]
        async with demo(dtype="float32") as engine:
            params = SamplingParams(n=4, max_tokens=20, ignore_eos=True)
            stream = engine.stream("The morning was so fine", params)
            async for _ in stream:
                pass
            whole = stream.completion()
            for index, one in enumerate((whole, *whole.others)):
                alone = replace(params, n=1, seed=seed_of(stream.seed, index))
                again = await engine.generate("The morning was so fine", alone)
                assert (again.token_ids, again.text) == (one.token_ids, one.text)

    @also_with_drafts
    async def test_leaving_ends_all_of_them(self) -> None:
        async with OracleEngine() as engine:
            async with engine.stream([1, 2], SamplingParams(seed=1, n=4, ignore_eos=True)) as stream:
                await stream.__anext__()
            assert idle(engine)

    @also_with_drafts
    async def test_a_slow_reader_parks_all_of_them(self) -> None:
        async with OracleEngine(max_unread_tokens=8) as engine:
            step_with_the_loop(engine)
            params = SamplingParams(seed=1, n=3, ignore_eos=True, max_tokens=100)
            stream = engine.stream([1, 2], params)
            with anyio.fail_after(HANG_SECONDS):
                while engine.stats().parked < 3:
                    await let_others_run()
            got: list[list[int]] = [[], [], []]
            async for token in stream:
                got[token.index].append(token.token_id)
            assert got == [engine.solo(seed)[0] for seed in seeds_of(params)]

    async def test_greedy_is_refused(self) -> None:
        async with demo() as engine:
            with pytest.raises(InvalidRequestError, match="n: 2 greedy"):
                engine.stream("a", SamplingParams(n=2, temperature=0.0))


class TestStopStrings:
    @pytest.mark.quick_cases(1)
    async def test_ends_at_the_earliest_match(self, speculation: bool) -> None:
        num_accepted = 0
        async with demo(dtype="float32") as engine:
            free = SamplingParams(seed=3, max_tokens=60, ignore_eos=True, temperature=0.9)
            whole = await engine.generate("The morning was so fine", free)
            rng = random.Random(1)
            for _ in range(12):
                start = rng.randrange(5, len(whole.text) - 12)
                stop = whole.text[start : start + rng.randint(1, 8)]
                for include in (False, True):
                    stream = engine.stream("The morning was so fine", replace(free, stop=stop, include_stop_str_in_output=include))
                    tokens = [token async for token in stream]
                    pieces = [token.text for token in tokens]
                    assert tokens[-1].stop_reason == stop
                    completion = stream.completion()
                    end = whole.text.index(stop)
                    assert completion.text == "".join(pieces) == whole.text[: end + len(stop) * include]
                    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP_STRING, stop)
                    usage, ids = completion.usage, completion.token_ids
                    assert ids == whole.token_ids[: len(ids)]
                    assert engine.tokenizer.decode(ids).startswith(completion.text)
                    assert stop not in engine.tokenizer.decode(ids[:-1])
                    assert (usage.completion_tokens, usage.accepted_draft_tokens < len(ids)) == (len(ids), True)
                    num_accepted += usage.accepted_draft_tokens
                    await stream.aclose()
                    assert idle(engine)
            assert (num_accepted > 100) == speculation
            async with engine.stream("The morning was so fine", replace(free, stop=whole.text[0])) as stream:
                assert len([token async for token in stream]) == 1
            assert (stream.usage.completion_tokens, stream.usage.draft_tokens) == (1, 0), "what comes behind the end is not counted"

    @pytest.mark.quick_cases(1)
    @also_with_drafts
    async def test_a_slow_reader_does_not_keep_it_running(self) -> None:
        async with demo(dtype="float32") as engine:
            stream = engine.stream("The morning was", SamplingParams(seed=3, max_tokens=250, ignore_eos=True, stop=(" the", " a", ",")))
            with anyio.fail_after(HANG_SECONDS):
                await stream._source.released.wait()
            assert 0 < len(stream._source.items) < 100
            async for _ in stream:
                pass
            assert stream.completion().finish_reason is FinishReason.STOP_STRING

    @pytest.mark.quick_cases(1)
    @also_with_drafts
    async def test_min_tokens_delay_every_kind_of_stop(self) -> None:
        async with demo(dtype="float32") as engine:
            params = SamplingParams(temperature=0.0, max_tokens=40, stop=("i", "e"))
            soon = await engine.generate([{"role": "user", "content": "How do you do today?"}], params)
            assert len(soon.token_ids) < 12
            late = await engine.generate([{"role": "user", "content": "How do you do today?"}], replace(params, min_tokens=25))
            assert len(late.token_ids) > 25
            assert late.finish_reason is FinishReason.STOP_STRING
            assert not {4093, 4095} & set(late.token_ids[:25])

    async def test_no_text(self) -> None:
        async with demo() as engine:
            completion = await engine.generate("The", SamplingParams(max_tokens=5, detokenize=False, ignore_eos=True))
            assert (completion.text, len(completion.token_ids)) == ("", 5)

    async def test_special_tokens_on_request(self) -> None:
        async with demo() as engine:
            chat = [{"role": "user", "content": "How do you do today?"}]
            params = SamplingParams(temperature=0.0, max_tokens=40, skip_special_tokens=False, include_stop_str_in_output=True)
            assert (await engine.generate(chat, params)).text.endswith("<|im_end|>")

    @pytest.mark.quick_cases(2)
    @also_with_drafts
    @pytest.mark.parametrize("stop_token", [False, True])
    async def test_what_ends_a_sequence_does_not_depend_on_what_its_text_keeps(self, stop_token: bool) -> None:
        """A stop string that is the text of the token that ends the sequence: the token does, and the string is not looked for in it."""
        async with demo() as engine:
            chat = [{"role": "user", "content": "How do you do today?"}]
            params = SamplingParams(temperature=0.0, max_tokens=40, skip_special_tokens=False)
            tokens = [token async for token in engine.stream(chat, replace(params, include_stop_str_in_output=True))]
            if stop_token:
                assert tokens[2].text.strip()
                params, tokens = replace(params, stop_token_ids=(tokens[2].token_id,)), tokens[:3]
            ends = []
            for include in (False, True):
                for stop in ((), (tokens[-1].text,), (tokens[-1].text[-1:],)):
                    if not any(stop[0] in token.text for token in tokens[:-1]) if stop else True:
                        one = await engine.generate(chat, replace(params, stop=stop, include_stop_str_in_output=include))
                        assert one.text == "".join(token.text for token in tokens[: len(tokens) - (not include)])
                        ends.append((one.finish_reason, one.stop_reason, one.token_ids))
            kind = (FinishReason.STOP_TOKEN, tokens[-1].token_id) if stop_token else (FinishReason.EOS, None)
            assert set(ends) == {(*kind, tuple(token.token_id for token in tokens))}
            assert len(ends) >= 4


async def test_effective_params() -> None:
    async with demo() as engine:
        stream = engine.stream("The", SamplingParams(top_k=5, max_tokens=3))
        params = stream.effective_params
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.8, 0.95, 5, 1.0)
        assert params.seed == stream.seed
        again = await engine.generate("The", params)
        async for _ in stream:
            pass
        assert again.token_ids == stream.completion().token_ids


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int]], torch.Tensor]:
    """The logprobs of the token after each position under Transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32)

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


class TestLogprobs:
    @pytest.mark.quick_cases(2)
    @also_with_drafts
    @pytest.mark.parametrize("options", [{}, {"max_num_seqs": 16, "max_num_batched_tokens": 16}], ids=["whole", "chunked"])
    async def test_equal_transformers_cold_and_warm(self, reference: Callable[[list[int]], torch.Tensor], options: dict[str, int]) -> None:
        async with demo(dtype="float32", **options) as engine:
            params = SamplingParams(seed=1, max_tokens=12, logprobs=4, prompt_logprobs=3, temperature=1.3, presence_penalty=1.0)
            prompt = engine._core.serving.model.tokenizer.encode(
                "She had always wanted to see London, and now it was impossible to be employed; " * 3
            )
            for _ in range(2):
                completion = await engine.generate(prompt, replace(params, ignore_eos=True))
                expected = reference([*prompt, *completion.token_ids])
                assert completion.logprobs is not None
                assert completion.prompt_logprobs is not None
                assert len(completion.logprobs) == 12
                assert len(completion.prompt_logprobs) == len(prompt)
                assert completion.prompt_logprobs[0] is None
                tokens = [*prompt[1:], *completion.token_ids]
                for position, (token_id, one) in enumerate(
                    zip(tokens, (*completion.prompt_logprobs[1:], *completion.logprobs), strict=True)
                ):
                    assert one is not None
                    row = expected[position]
                    assert one.token_id == token_id
                    assert one.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
                    assert (
                        one.rank == int((row > row[token_id] + 1e-5).sum()) + 1 or one.rank == int((row > row[token_id] - 1e-5).sum()) + 1
                    )
                    top = row.topk(4 if position >= len(prompt) - 1 else 3)
                    assert list(one.top_logprobs.values()) == pytest.approx(top.values.tolist(), abs=1e-4)

    async def test_more_than_the_engine_allows(self) -> None:
        async with demo(max_logprobs=2) as engine:
            for name in ("logprobs", "prompt_logprobs"):
                with pytest.raises(InvalidRequestError, match=rf"{name}: 3 is not in \[0, 2\]"):
                    engine.stream("a", SamplingParams(**{name: 3}))

    async def test_nothing_unless_asked_for(self) -> None:
        async with demo() as engine:
            stream = engine.stream("a", SamplingParams(max_tokens=2, ignore_eos=True))
            assert [(token.logprob, token.top_logprobs) async for token in stream] == [(None, None)] * 2
            assert stream.completion().logprobs is None
            assert stream.completion().prompt_logprobs is None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {4096: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (1, 5000)}, "allowed_token_ids"),
        ({"banned_token_ids": (4096,)}, "banned_token_ids"),
        ({"min_tokens": 2048}, "min_tokens"),
    ],
)
async def test_ids_and_lengths_beyond_the_model(params: dict[str, object], field: str) -> None:
    async with demo() as engine:
        with pytest.raises(InvalidRequestError) as caught:
            engine.stream("a", SamplingParams(**params))  # type: ignore[arg-type]
        assert caught.value.field == field


async def test_all_violations_that_show_without_work_are_named_at_once() -> None:
    params = SamplingParams(
        logprobs=21, prompt_logprobs=22, stop_token_ids=[5000], logit_bias={4096: 1.0}, max_tokens=2048, n=2, bad_words=["x"]
    )
    found = {"logprobs", "prompt_logprobs", "stop_token_ids", "logit_bias", "max_tokens"}
    async with demo() as engine:
        for prompt in ("a", "a" * 2000, [1, 2], [{"role": "user", "content": "a"}]):
            with pytest.raises(InvalidRequestError) as caught:
                engine.stream(prompt, params, priority=1000, timeout=-1, tenant="x" * 129)
            assert type(caught.value) is InvalidRequestError, "not about capacity alone"
            assert [violation.field for violation in caught.value.violations] == [
                "priority", "tenant", "timeout", "max_tokens", "stop_token_ids", "logit_bias", "logprobs", "prompt_logprobs"
            ]  # fmt: skip
            assert {violation.field for violation in await engine.violations(prompt, params)} == found
        for prompt in ([-1], [4096], [0.5], [], [1] * 2048, [1] * 10**6, np.ones(10**6, np.int64), 5):  # type: ignore[assignment]
            with pytest.raises(InvalidRequestError) as caught:
                engine.stream(prompt, params)
            assert {violation.field for violation in caught.value.violations} == {*found, "prompt"}
        assert not engine.stats().waiting


async def test_what_is_only_too_long_is_told_with_its_limit() -> None:
    async with demo() as engine:
        for prompt, params, got in (
            ([1] * 3000, SamplingParams(), 3001),
            ("a", SamplingParams(max_tokens=3000), 3001),
            ([1] * 3000, SamplingParams(max_tokens=3000, min_tokens=2900), 3001),
        ):
            with pytest.raises(ContextLengthError) as caught:
                engine.stream(prompt, params)
            assert (caught.value.limit, caught.value.got) == (2048, got)


async def test_a_list_that_takes_long_to_read_is_read_in_the_background_as_it_was() -> None:
    async with demo() as engine:
        ids, allowed = [50, 60] * 8, list(range(4096))
        params = SamplingParams(max_tokens=4, temperature=0, allowed_token_ids=allowed)
        expected = await engine.generate(ids, SamplingParams(max_tokens=4, temperature=0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(requests, "INLINE_ENTRIES", 3)
            stream = engine.stream(ids, params)
            assert engine.request_info(stream.request_id).state is RequestState.PREPARING  # type: ignore[union-attr]
            ids.clear()
            assert [token.token_id async for token in stream] == list(expected.token_ids)
            broken = engine.stream([1, 2, 3, 4096], params)
            with pytest.raises(InvalidRequestError, match=r"prompt: token id 4096 is not in \[0, 4095\]"):
                await broken.started()
