"""Speculation against none, on the same requests, in turns: `aengine-bench speculation`.

Owns the requests and the comparison. All engines are
loaded at once, and each turn sends the same requests, so that what disturbs the machine disturbs all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import NamedTuple, TypeVar

from aengine.api.config import EngineConfig
from aengine.api.outputs import DraftUsage
from aengine.api.params import SamplingParams, StructuredOutput
from aengine.bench.load_run import LengthRange, Lengths, random_lengths
from aengine.bench.probes import HELD_TEXT
from aengine.bench.report import Speculation
from aengine.engine.async_engine import AsyncEngine
from aengine.engine.core import EngineCore
from aengine.engine.loading import LoadedModel
from tools.lab.planted import PROMPT, EditDrafter, Planted, PlantedDrafter

EngineT = TypeVar("EngineT", bound=AsyncEngine)

HEADER = (
    "workload",
    "users",
    "speculative",
    "off tok/s",
    "tok/s",
    "ratio",
    "from",
    "to",
    "drafted",
    "right %",
    "with drafts",
    "per step",
    "same",
)
PLANTED = {"planted", "edit"}
"""Workloads with drafters of their own. The others have those of the modes."""
_ANSWERS = 5  # of each user
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 12},
            "date_of_birth": {"type": "integer", "maximum": 9999},
            "place_of_residence": {"enum": ["Paris and its suburbs", "Rome, the eternal city"]},
            "occupation_category": {"enum": ["unemployed person", "clergyman of the parish"]},
        },
        "required": ["first_name", "date_of_birth", "place_of_residence", "occupation_category"],
        "additionalProperties": False,
    }
)


class Case(NamedTuple):
    workload: str
    users: int
    acceptance: float = 0.0  # of planted drafts


@dataclass(frozen=True, slots=True)
class Load:
    """How long the turns are, and what they send."""

    output_len: int  # tokens of each answer, JSON aside; it also takes a while until an engine has learned which drafts pay
    rounds: int
    seconds: float  # of a turn at least: the requests are sent again until it has taken so long
    temperature: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens per second while all users wait for tokens; each ratio is of a turn to the mean of the turns without speculation around it."""

    case: Case
    speculative: str
    off: float  # tokens per second, the median of the turns
    on: float
    ratios: Sequence[float]
    speculation: Speculation | None
    same: bool  # whether all tokens are those without speculation

    @property
    def cells(self) -> Sequence[object]:
        """Of the table with `HEADER`."""
        drafts = self.speculation.drafts if self.speculation is not None else ()
        drafted, accepted = (sum(getattr(one, name) for one in drafts) for name in ("drafted", "accepted"))
        means = (self.speculation.acceptance_length, self.speculation.tokens_per_step) if self.speculation is not None else (1.0, 1.0)
        ratios = (f"{ratio:.3f}" for ratio in (median(self.ratios), min(self.ratios), max(self.ratios)))
        rates = (f"{rate:.1f}" for rate in (self.off, self.on))
        right = f"{100 * accepted / drafted:.0f}" if drafted else "-"
        workload = f"planted {self.case.acceptance:g}" if self.case.workload == "planted" else self.case.workload
        counts = (drafted, right, *(f"{one:.2f}" for one in means))
        return (workload, self.case.users, self.speculative, *rates, *ratios, *counts, "yes" if self.same else "NO")


class _PlantedEngine(AsyncEngine):
    """An engine whose drafts come from a drafter that can be told what will come."""

    drafter: Planted  # once it is started

    def __init__(self, config: EngineConfig, workload: str) -> None:
        super().__init__(replace(config, speculative="ngram", speculative_model=None))
        self._workload = workload

    def _load(self, core: EngineCore) -> LoadedModel:
        loaded = super()._load(core)
        edits = self._workload == "edit"
        self.drafter = EditDrafter(loaded.info.vocab_size, loaded.runner.max_num_seqs) if edits else PlantedDrafter()
        return replace(loaded, drafter=self.drafter)


class _Ask(NamedTuple):
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(slots=True)
class _Answers:
    """Of one user, one after another."""

    times: list[float] = field(default_factory=list)  # when each token came
    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    drafts: list[tuple[DraftUsage, ...]] = field(default_factory=list)


class _Turn(NamedTuple):
    rate: float  # tokens per second
    answers: Sequence[_Answers]

    @property
    def token_ids(self) -> Sequence[Sequence[tuple[int, ...]]]:
        return [user.token_ids for user in self.answers]


async def compare(
    config: EngineConfig, modes: Mapping[str, EngineConfig], cases: Sequence[Case], load: Load
) -> AsyncGenerator[Comparison, None]:
    """Of each case, each of `modes` with an engine without speculation; of planted drafts there is one. Engines are loaded as `config` says
    but for their speculation. Raises what an engine raises."""
    async with AsyncExitStack() as stack:

        async def start(engine: EngineT) -> EngineT:
            await engine.start()
            return await stack.enter_async_context(aclosing(engine))

        off = await start(AsyncEngine(replace(config, speculative="off", speculative_model=None)))
        workloads = {case.workload for case in cases}
        planted = {workload: await start(_PlantedEngine(config, workload)) for workload in sorted(workloads & PLANTED)}
        others = {mode: await start(AsyncEngine(one)) for mode, one in modes.items()} if workloads - PLANTED else {}
        for case in cases:
            asks = _asks(case, load, off)
            known = await _turn(off, asks, load.seconds)  # the first turn of each engine is not counted
            engines: dict[str, AsyncEngine] = dict(others)
            if case.workload in PLANTED:
                drafter = planted[case.workload].drafter
                if isinstance(drafter, PlantedDrafter):
                    drafter.acceptance = case.acceptance
                for user, answers in zip(asks, known.answers, strict=True):
                    drafter.plant(user[0].prompt, answers.token_ids[0])
                engines = {"planted": planted[case.workload]}
            same = {mode: (await _turn(engine, asks, load.seconds)).token_ids == known.token_ids for mode, engine in engines.items()}
            offs = [await _turn(off, asks, load.seconds)]
            turns: dict[str, list[_Turn]] = {mode: [] for mode in engines}
            for _ in range(load.rounds):
                for mode, engine in engines.items():
                    turns[mode].append(await _turn(engine, asks, load.seconds))
                offs.append(await _turn(off, asks, load.seconds))
            around = [mean((before.rate, after.rate)) for before, after in itertools.pairwise(offs)]
            for mode, ons in turns.items():
                yield Comparison(
                    case,
                    mode,
                    off=median(turn.rate for turn in offs),
                    on=median(turn.rate for turn in ons),
                    ratios=[on.rate / rate for on, rate in zip(ons, around, strict=True)],
                    speculation=_speculation(user for on in ons for user in on.answers),
                    same=same[mode] and all(on.token_ids == known.token_ids for on in ons),
                )


def _asks(case: Case, load: Load, engine: AsyncEngine) -> list[list[_Ask]]:
    """The requests of each user."""
    params = SamplingParams(
        temperature=load.temperature, top_k=0, top_p=1.0, min_p=0.0, max_tokens=load.output_len, ignore_eos=True, detokenize=True
    )
    users = range(case.users)
    match case.workload:
        case "text":
            ids = tuple(engine.tokenizer.encode(HELD_TEXT.read_text(encoding="utf-8")))
            starts = (user * PROMPT % (len(ids) - PROMPT) for user in users)
            prompts = [ids[start : start + PROMPT] for start in starts]
        case "json":
            params = replace(params, ignore_eos=False, structured_output=StructuredOutput(json_schema=_SCHEMA))
            return [
                [_Ask(tuple(engine.tokenizer.encode("It is a truth")), replace(params, seed=user * _ANSWERS + i)) for i in range(_ANSWERS)]
                for user in users
            ]
        case _:
            lengths = Lengths(case.users, LengthRange(PROMPT, PROMPT), LengthRange(1, 1), engine.model_info.vocab_size)
            prompts = [item.prompt for item in random_lengths(lengths)]
    return [[_Ask(prompt, replace(params, seed=user))] for user, prompt in enumerate(prompts)]


async def _turn(engine: AsyncEngine, asks: Sequence[Sequence[_Ask]], seconds: float = 0.0) -> _Turn:
    """Counts the tokens that come from when all users have one until the first of them has all. Of requests that are sent again, the
    answers are the last ones."""
    num_tokens, counted = 0, 0.0
    start = time.perf_counter()
    while True:
        users = await asyncio.gather(*(_user(engine, ask) for ask in asks))
        begin, end = max(user.times[0] for user in users), min(user.times[-1] for user in users)
        num_tokens += sum(begin < moment <= end for user in users for moment in user.times)
        counted += max(end - begin, 0.0)
        if time.perf_counter() - start >= seconds:
            return _Turn(num_tokens / max(counted, 1e-9), users)


async def _user(engine: AsyncEngine, asks: Iterable[_Ask]) -> _Answers:
    answers = _Answers()
    for ask in asks:
        token_ids = []
        async with engine.stream(list(ask.prompt), ask.params) as stream:
            async for token in stream:
                answers.times.append(time.perf_counter())
                token_ids.append(token.token_id)
        answers.token_ids.append(tuple(token_ids))
        answers.drafts.append(stream.usage.drafts)
    return answers


def _speculation(users: Iterable[_Answers]) -> Speculation | None:
    users = list(users)
    return Speculation.of(sum(len(user.times) for user in users), (drafts for user in users for drafts in user.drafts))
