"""Sessions of an engine: what of the history of a conversation was rewritten, and how many are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracle_engine import OracleEngine

from aengine import InvalidRequestError, SamplingParams
from aengine.api import runtime

pytestmark = pytest.mark.anyio
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
PARAMS = SamplingParams(seed=9, max_tokens=20, ignore_eos=True)


async def test_what_was_rewritten_is_told() -> None:
    async with OracleEngine() as engine:
        first = await engine.generate(PROMPT, PARAMS, session="a")
        assert first.usage.rewritten_tokens == 0
        history = [*PROMPT, *first.token_ids]
        for seed, (prompt, session, rewritten) in enumerate(
            [
                ([*history, 4, 4], "a", 0),
                ([*history[:7], 49, 4], "b", 0),
                ([*history, 4], None, 0),
            ],
            10,
        ):
            usage = (await engine.generate(prompt, replace(PARAMS, seed=seed), session=session)).usage
            assert usage.rewritten_tokens == rewritten, session
        third = await engine.generate([*history[:7], 49, 4], replace(PARAMS, seed=20), session="a")
        assert third.usage.rewritten_tokens == len(history) + 2 + 20 - 1 - 7
        fourth = await engine.generate([*history[:7], 49], replace(PARAMS, seed=21), session="a", tenant="other")
        assert fourth.usage.rewritten_tokens == 0
        assert engine.stats().sessions == 3
        assert engine.stats().session_tokens > 0


async def test_only_so_many_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MOST_REMEMBERED", 2)
    async with OracleEngine() as engine:
        for number in range(3):
            await engine.generate(PROMPT, replace(PARAMS, seed=number), session=str(number))
        assert [(await engine.generate([5], replace(PARAMS, seed=7 + n), session=str(n))).usage.rewritten_tokens > 0 for n in (2, 0)] == [
            True,
            False,
        ]


@pytest.mark.parametrize("session", ["", "x" * 129, 5])
async def test_names(session: object) -> None:
    async with OracleEngine() as engine:
        with pytest.raises(InvalidRequestError, match="session: "):
            engine.stream(PROMPT, PARAMS, session=session)  # type: ignore[arg-type]
