"""Receipts of every kind of request, through every door and over replicas that die: all of them are derived again to the last bit."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from children import end, pids_of_replicas
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from every_draft import use_every_draft
from grpc_harness import serving
from http_harness import serving_http
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import BY_HAND
from workload import make_cases

from aengine import AsyncEngine, ConfigError, EngineBase, InvalidRequestError, Reasoning, Router, SamplingParams, StructuredOutput
from aengine.api.engine import run_all as each
from aengine.api.outputs import FinishReason
from aengine.api.receipt import Receipt, ReceiptOutput, read_receipt_key
from aengine.client import AsyncClient
from aengine.kernels.cpu.compiler import CANONICAL, Level, supported_levels
from aengine.terminal.replay import Outcome, ReceiptReplay, Verdict, main, read_receipts

pytestmark = pytest.mark.anyio
SMALL: dict[str, Any] = {"kv_cache_memory": 3 << 20, "max_num_seqs": 32, "max_model_len": 512, "speculative": "ngram"}
PARAMS = SamplingParams(max_tokens=12, temperature=0.9, logprobs=1, seed=5)
PROMPT = [5, 300, 7, 1000]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    with pytest.MonkeyPatch.context() as patch:
        use_every_draft(patch)
        async with AsyncEngine("demo", **SMALL, adapters={"lora": "demo-lora"}) as engine:
            yield engine


async def collect(engine: EngineBase, count: int, seed: int, on_token: Callable[[], object] = lambda: None) -> list[Receipt]:
    """Of mixed requests at once: some with adapters, output that is known, and some that are cancelled."""
    random_, found, limit = random.Random(seed), list[Receipt](), anyio.CapacityLimiter(64)

    async def run(case: Any, draw: random.Random) -> None:
        params = case.params
        if params.logprobs is None and draw.random() < 0.7:
            params = replace(params, logprobs=draw.choice((0, 2)))
        fields: dict[str, Any] = {"receipt": True}
        if draw.random() < 0.2 and engine.adapters:
            fields["adapter"] = "lora"
        if draw.random() < 0.1 and params.n == 1 and params.structured_output is None and not params.stop and params.reasoning is None:
            fields["known_outputs"] = [[draw.randrange(4, 4000) for _ in range(5)]]
        most = draw.randrange(1, 20) if draw.random() < 0.1 else 10**9
        async with limit:
            stream = engine.stream(case.prompt, params, **fields)
            async for _ in stream:
                on_token()
                if stream.usage.completion_tokens >= most:
                    await stream.aclose()
        receipt = stream.receipt
        assert receipt is not None
        assert receipt == stream.completion().receipt
        assert receipt.num_tokens == stream.usage.completion_tokens - sum(len(ids) for ids in fields.get("known_outputs", []))
        found.append(receipt)

    async with anyio.create_task_group() as group:
        for case in make_cases(count, seed, 60):
            group.start_soon(run, case, random.Random(random_.random()))
    return found


async def outcomes_of(engine: EngineBase, receipts: list[Receipt]) -> list[Outcome]:
    """Of each, as it is read from JSON."""
    replay = ReceiptReplay(engine)  # type: ignore[arg-type]  # any engine does
    return await each([partial(replay.outcome, Receipt.from_json(receipt.to_json())) for receipt in receipts], 256)


@pytest.mark.parametrize("count", [128, pytest.param(10_000, marks=BY_HAND)])
async def test_all_are_derived_again(engine: AsyncEngine, count: int) -> None:
    receipts = await collect(engine, count, seed=count)
    assert engine.stats().preemptions > 0
    assert engine.stats().accepted_draft_tokens > 0
    reasons = {output.finish_reason for one in receipts for output in one.outputs if output}
    assert reasons >= {FinishReason.CANCELLED, FinishReason.MAX_TOKENS}
    async with AsyncEngine("demo", kv_cache_memory=64 << 20, max_num_batched_tokens=300, adapters={"lora": "demo-lora"}) as other:
        outcomes = await outcomes_of(other, receipts)
        assert ReceiptReplay(other).warnings(receipts) == []
    assert [one for one in outcomes if one.verdict is not Verdict.SAME] == []
    assert sum(one.num_tokens for one in outcomes) == sum(one.num_tokens for one in receipts)


@pytest.mark.parametrize("count", [pytest.param(48, marks=BY_HAND), pytest.param(10_000, marks=BY_HAND)])
async def test_other_cpus_and_ranks_derive_them(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With canonical numerics, kernels for older CPUs derive the same, and so do two ranks."""
    options: dict[str, Any] = {"numerics": "canonical", "adapters": {"lora": "demo-lora"}}
    with pytest.MonkeyPatch.context() as patch:
        use_every_draft(patch)
        async with AsyncEngine("demo", **SMALL, **options) as engine:
            receipts = await collect(engine, count, seed=count + 1)
    levels = {CANONICAL.get(level, level) for level in supported_levels()} - ({Level.FUSED} if count > 48 else set())
    for index, level in enumerate(sorted(levels, key=lambda level: level.value)):
        monkeypatch.setenv("AENGINE_CPU_LEVEL", level.value)
        ranks = {"tensor_parallel_size": 2} if index == 0 else {}
        async with AsyncEngine("demo", kv_cache_memory=64 << 20, **options, **ranks) as other:
            outcomes = await outcomes_of(other, receipts)
            assert ranks or ReceiptReplay(other).warnings(receipts) == []
        assert Counter(one.verdict for one in outcomes) == {Verdict.SAME: count}, level


@pytest.mark.parametrize(("count", "kills"), [pytest.param(60, 3, marks=pytest.mark.slow), pytest.param(1000, 20, marks=BY_HAND)])
async def test_replicas_that_die(engine: AsyncEngine, count: int, kills: int) -> None:
    """The receipt is of the request, whichever replicas it was at: nothing in it counts as known."""
    num_tokens = num_kills = 0

    def kill() -> None:
        nonlocal num_tokens, num_kills
        num_tokens += 1
        if num_kills < kills and num_tokens > (num_kills + 1) * count * 15 // (kills + 1):
            end(pids_of_replicas()[0], signal.SIGKILL)
            num_kills += 1

    async with Router("demo", replicas=2, kv_cache_memory=64 << 20, wait_seconds=120.0) as router:
        receipts = await collect(router, count, seed=3, on_token=kill)
    assert num_kills == kills
    outcomes = await outcomes_of(engine, receipts)
    assert Counter(one.verdict for one in outcomes) == {Verdict.SAME: count}


async def test_what_differs_is_told(engine: AsyncEngine) -> None:
    receipt = (await engine.generate(PROMPT, PARAMS, receipt=True)).receipt
    assert receipt is not None
    (output,) = receipt.outputs
    assert output is not None
    assert output.logprobs is not None
    replay = ReceiptReplay(engine)

    async def difference(**changed: Any) -> Any:
        outcome = await replay.outcome(replace(receipt, outputs=(replace(output, **changed),)))
        assert outcome.verdict is Verdict.DIFFERS
        assert outcome.difference is not None
        return outcome.difference

    ids = list(output.token_ids)
    ids[4] = 77
    found = await difference(token_ids=tuple(ids))
    assert (found.index, found.what, found.told, found.found) == (4, "token", 77, output.token_ids[4])
    scores = await engine.score([*PROMPT, *ids[:4]], [[77], [output.token_ids[4]]])
    assert found.gap == pytest.approx(abs(scores[0].logprob - scores[1].logprob))
    changed = list(output.logprobs)
    changed[2] = changed[2] * (1 + 2**-22)  # the last bits of a float32
    found = await difference(logprobs=tuple(changed))
    assert (found.index, found.what) == (2, "logprob")
    assert 0 < found.gap < 1e-5
    found = await difference(token_ids=output.token_ids[:5], logprobs=output.logprobs[:5])
    assert (found.index, found.what, found.told) == (5, "token", "the end")
    found = await difference(finish_reason=FinishReason.EOS)
    assert (found.index, found.what, found.told, found.found) == (12, "finish_reason", "eos", "max_tokens")
    assert "output 0, token 12: finish_reason eos was told, max_tokens comes" in str(found)


async def test_what_cannot_be_derived(engine: AsyncEngine) -> None:
    receipt = (await engine.generate(PROMPT, PARAMS, receipt=True, adapter="lora")).receipt
    assert receipt is not None
    assert receipt.adapter_number == next(one.key for one in engine.adapters)
    replay = ReceiptReplay(engine)
    for changed, reason in (
        ({"image_tokens": 4}, "its prompt has images (4 tokens), which a receipt does not hold"),
        ({"weights_versions": (0, 2)}, "its tokens are of several weights (versions 0, 2)"),
        ({"adapter_number": 1}, "adapter 'lora' is another one here"),
        ({"adapter": "x"}, "adapter 'x' is not loaded: give it with --adapters"),
        ({"prompt": (10**6,)}, "output 0: prompt: token id 1000000 is not in [0, 4095]"),
    ):
        outcome = await replay.outcome(replace(receipt, **changed))  # type: ignore[arg-type]
        assert (outcome.verdict, outcome.reason) == (Verdict.SKIPPED, reason)
    assert replay.warnings([receipt, replace(receipt, model={**receipt.model, "weights": "f00"})]) == [
        f"warning: weights is {receipt.model['weights']} here, and f00 in 1 receipts"
    ]
    with pytest.raises(InvalidRequestError, match="receipt: an embedding has no output"):
        await engine.embed(PROMPT, receipt=True)
    with pytest.raises(InvalidRequestError, match="receipt: not possible with logits_processors"):
        engine.stream(PROMPT, SamplingParams(logits_processors=(lambda *_: None,)), receipt=True)


async def test_new_weights_and_rewinds(tmp_path: Path) -> None:
    """Tokens of old weights are told by the digest of these, also when the engine has others by now."""
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
        before = await engine.generate(PROMPT, PARAMS, receipt=True)
        stream = engine.stream(PROMPT, PARAMS, receipt=True)
        async for _ in stream:
            if stream.usage.completion_tokens == 6:
                break
        stream.rewind(3, receipt=True)
        async for _ in stream:
            pass
        assert stream.receipt is not None
        assert stream.receipt.outputs == (replace(before.receipt.outputs[0], num_known=3, logprobs=before.receipt.outputs[0].logprobs[3:]),)  # type: ignore[union-attr, index, arg-type]
        old = engine.stats().fingerprint
        await engine.update_weights("demo")
        after = await engine.generate(PROMPT, PARAMS, receipt=True)
        assert before.receipt is not None
        assert after.receipt is not None
        assert (before.receipt.weights_versions, after.receipt.weights_versions) == ((0,), (1,))
        assert engine.stats().fingerprint == old  # the same weights again
        assert before.receipt.model == after.receipt.model == engine.engine_info.fingerprint_parts


async def test_every_door_signs(engine: AsyncEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, file = Ed25519PrivateKey.generate(), tmp_path / "key.pem"
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes_raw().hex()
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "receipt": True}
    answers: list[Any] = []
    async with serving(engine, receipt_key=str(file)) as serve, AsyncClient(serve.server.address) as client:
        completion = await client.generate(PROMPT, PARAMS, receipt=True)
        assert completion.receipt is not None
        assert completion.receipt.outputs == (await engine.generate(PROMPT, PARAMS, receipt=True)).receipt.outputs  # type: ignore[union-attr]
        assert (await client.generate(PROMPT, PARAMS)).receipt is None
        answers.append(json.loads(completion.receipt.to_json()))
    async with serving_http(engine, receipt_key=str(file)) as http:
        answers.append((await http.post("/v1/completions", {**body, "prompt": [PROMPT, PROMPT[:2]]})).json())
        assert len(answers[-1]["receipts"]) == 2
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "receipt": True}
        answers.append({"response": {"body": (await http.post("/v1/chat/completions", chat)).json()}})
        for path, sent in (("/v1/completions", body), ("/v1/chat/completions", chat)):
            lines = (await http.post(path, {**sent, "stream": True})).text.splitlines()
            told = [json.loads(line[6:]) for line in lines if line.startswith("data: {") and "receipts" in line]
            assert len(told) == 1
            assert told[0]["choices"] == []
            answers += told
        assert "receipts" not in (await http.post("/v1/completions", {**body, "receipt": False})).json()
        for path, sent in (("/v1/messages", chat), ("/v1/responses", {"input": "hi", "max_output_tokens": 6, "receipt": True})):
            answer = (await http.post(path, sent)).json()
            lines = (await http.post(path, {**sent, "stream": True})).text.splitlines()
            last = next(json.loads(line[6:]) for line in lines if line.startswith("data: {") and "receipts" in line)
            assert last["type"] in ("message_delta", "response.incomplete", "response.completed")
            for found in (answer, last.get("response", last)):
                assert len(found["receipts"]) == 1
                answers.append({"receipts": found["receipts"]})
            assert "receipts" not in (await http.post(path, {**sent, "receipt": False})).json()
    written = tmp_path / "answers.jsonl"
    written.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    receipts = list(read_receipts(str(written)))
    assert len(receipts) == 10
    assert {one.verdict for one in await outcomes_of(engine, receipts)} == {Verdict.SAME}
    assert all(one.is_signed_by(public) for one in receipts)
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    for forged in (replace(receipts[0], request_id="x"), replace(receipts[0], signature="00" * 64), replace(receipts[0], signature="zz")):
        assert not forged.is_signed_by(public)
    assert not receipts[0].is_signed_by(other)
    with pytest.raises(ConfigError, match="public_key: is no Ed25519 key"):
        replace(receipts[0], public_key="ab").is_signed_by("ab")
    outcome = await ReceiptReplay(engine).outcome(receipts[0], other)
    assert (outcome.verdict, outcome.num_tokens) == (Verdict.UNSIGNED, 0)


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from aengine import LLM

    with LLM("demo", kv_cache_memory=32 << 20) as llm:
        completions = llm.generate([PROMPT, PROMPT[:2]], SamplingParams(max_tokens=5, seed=1), receipt=True)
        lines = [one.receipt.to_json() for one in completions]  # type: ignore[union-attr]
    file = tmp_path / "receipts.jsonl"
    flags = [str(file), "--kv-cache-memory", "32MiB"]
    file.write_text("\n".join(lines) + "\n")
    assert main(flags) == 0
    assert "2 receipts: 2 same; 10 tokens in " in capsys.readouterr().err
    changed = json.loads(lines[1])
    changed["outputs"][0]["token_ids"][3] = 9
    file.write_text(lines[0] + "\n" + json.dumps(changed) + "\n")
    assert main([*flags, "--json"]) == 1
    out, err = capsys.readouterr()
    assert "2 receipts: 1 same, 1 differs; " in err
    found = {one["verdict"]: one for one in map(json.loads, out.splitlines())}
    assert found["differs"]["difference"]["index"] == 3
    assert main([*flags, "--public-key", "00" * 32]) == 1
    assert capsys.readouterr().out.count("unsigned: it is not signed by the key") == 2
    wrong = {"{}": "line 1 has no receipt", "x": "line 1", "": "has no receipts", '{"aengine_receipt":2}': "is no receipt"}
    for text, said in wrong.items():
        file.write_text(text)
        assert main(flags) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "is no receipt: aengine_receipt is not 1"),
        ('{"aengine_receipt":1}', "lacks model, outputs, params, prompt, request_id"),
        ('{"aengine_receipt":1,"model":{},"outputs":[],"params":{},"prompt":[],"request_id":"a","x":1}', "has x, which no receipt has"),
        ('{"aengine_receipt":1,"model":{},"outputs":[],"params":{"top_p":7},"prompt":[],"request_id":"a"}', "cannot be read: top_p: "),
        ('{"aengine_receipt":1,"model":{},"outputs":[{}],"params":{},"prompt":[],"request_id":"a"}', "cannot be read: 'token_ids'"),
    ],
)
def test_what_is_no_receipt(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        Receipt.from_json(text)
    assert str(raised.value).startswith(said)


def test_keys_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("x")
    for path in (file, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"receipt_key: .* is no private key in a PEM file"):
            read_receipt_key(path)


FLOATS = st.floats(width=32, allow_nan=False)
PARAMETERS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "temperature": st.floats(0.1, 2)},
    optional={
        "top_k": st.integers(0, 9),
        "stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=4), max_size=2).map(tuple),
        "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-9, 9), max_size=3),
        "allowed_token_ids": st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True).map(tuple),
        "structured_output": st.sampled_from([StructuredOutput(json_schema={"type": "string"}), StructuredOutput(choice=("a", "b"))]),
        "reasoning": st.just(Reasoning(opening="<a>", closing="</a>", max_tokens=0)),
        "stop_on_repetition": st.just({"min_count": 3}),
        "prompt_logprobs": st.just(0),
    },
)
OUTPUTS = st.builds(
    ReceiptOutput,
    st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    st.just(0),
    st.sampled_from([None, *FinishReason]),
    st.one_of(st.none(), st.integers(0, 9), st.text(max_size=3)),
    st.none() | st.lists(FLOATS | st.just(float("-inf")), max_size=3).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(PARAMETERS, st.lists(st.none() | OUTPUTS, max_size=2).map(tuple))
def test_what_is_written_is_read(params: dict[str, Any], outputs: Any) -> None:
    receipt = Receipt("id", {"weights": "w"}, (1, 2), SamplingParams(**params), outputs, "a", 2**40, 1, (0, 1), "s", "k")
    assert Receipt.from_json(receipt.to_json()) == receipt
    assert "\n" not in receipt.to_json()
