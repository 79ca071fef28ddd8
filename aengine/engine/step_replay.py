"""Recorded steps, computed again: the same plans, one after the other, by a runner of this process.

A recording that begins with the engine is computed as it was, and its scheduler's decisions can be made again, too. One that begins later
lacks what the KV pages held. So before a row's first step here, what its steps need is computed from its tokens: KV and states depend on
nothing else. Then a step that fails, hangs or differs does so again. Owns none of the recording; knows no event loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.params import SamplingParams
from aengine.engine.loading import LoadedModel, drafter_of, load_model
from aengine.engine.recorder import Called, CommittedStep, Planned, Recording, RowPlaces
from aengine.runner.contract import LoadAdapter
from aengine.scheduler.plan import NO_INTS, Features, IntArray, NewRow, StateRows, StepPlan, StepResult
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request
from aengine.tokenizer.vocabulary import grammar_compiler


@dataclass(frozen=True, slots=True)
class StepDifference:
    """What a step gave here, and in the recording."""

    key: int  # of the request
    index: int  # of the token, in prompt and output
    what: str  # token, logprob, or failure
    told: object
    found: object

    def __str__(self) -> str:
        return f"request {self.key}, token {self.index}: {self.what} {self.told} was recorded, {self.found} comes"


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step that was computed again."""

    plan: StepPlan  # as it was recorded
    result: StepResult | None  # None: it raised
    difference: StepDifference | None  # the first one
    error: BaseException | None = None  # what it raised
    digest: str = ""  # of all that it gave, and of the KV pages that it wrote

    @property
    def number(self) -> int:
        return self.plan.step


def load_recorded(recording: Recording, **overrides: Any) -> LoadedModel:
    """The model that the steps are of, with room for the pages of what is computed before them. `overrides` are fields of `EngineConfig`.
    Raises what `load_model` raises."""
    fields, limits = dict(recording.config), recording.scheduler
    for name in ("kv_disk_path", "kv_disk_size", "host_kv_memory", "recording_dir"):
        fields.pop(name, None)
    needed, num_seqs = _needed_pages(recording), limits.max_num_seqs
    memory = -(-recording.kv_bytes * needed // limits.num_pages)
    while True:
        sizes = {
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": max(num_seqs, limits.max_num_batched_tokens),
            "kv_cache_memory": memory,
        }
        loaded = load_model(EngineConfig(**{**fields, "recorded_steps": 0, **sizes, **overrides}), lambda: None)
        missing = needed - loaded.runner.num_pages
        if missing <= 0 or not sizes.keys().isdisjoint(overrides):
            return loaded
        # There are no more pages than all sequences can have, and a page holds more than the model's KV where there is a draft model.
        num_seqs += -(-missing * num_seqs // loaded.runner.num_pages)
        memory = max(memory, memory * (needed + 1) // loaded.runner.num_pages)
        loaded.runner.close()


def _needed_pages(recording: Recording) -> int:
    limits = recording.scheduler
    spare = 0 if recording.is_whole and not _uses_tiers(recording) else -(-limits.max_model_len // limits.page_size)
    return limits.num_pages + len(limits.windows) * spare


def _uses_tiers(recording: Recording) -> bool:
    return bool(recording.config.get("host_kv_memory") or recording.config.get("kv_disk_path"))


class StepReplay:
    """To be used by the thread that loaded the model."""

    def __init__(self, recording: Recording, loaded: LoadedModel) -> None:
        """Raises `ValueError` for a model whose steps cannot be those of the recording."""
        self._recording, self._runner = recording, loaded.runner
        self._plans = list(recording.plans)
        limits = recording.scheduler
        mine = (self._runner.page_size, self._runner.windows, self._runner.state_pages)
        if mine != (limits.page_size, limits.windows, limits.state_pages):
            raise ValueError(f"page_size, windows and pages of a state are {mine} here; recorded were others")
        self.is_whole = recording.is_whole and not _uses_tiers(recording)
        self._first_spare = limits.num_pages
        if self._runner.num_pages < (needed := _needed_pages(recording)):
            raise ValueError(f"{needed} KV pages are needed, and there are {self._runner.num_pages}: give it more kv_cache_memory")
        self._grammars: dict[Any, object] = {}
        info, tokenizer = loaded.info, loaded.tokenizer
        self._compiler = None if tokenizer is None else grammar_compiler(tokenizer, info.vocab_size, info.eos_token_ids)
        self._places = RowPlaces(recording.row_keys.copy(), recording.page_table.copy(), recording.state_pages.copy())
        self._restored = np.zeros(len(recording.row_keys), np.bool_)
        self._new: dict[int, NewRow] = {}
        self._num_steps = 0
        for key, (name, path) in recording.adapters.items():
            self._runner.apply(self._runner.prepare(LoadAdapter(key, name, path)))

    def steps(self, *, digests: bool = False) -> Iterator[ReplayedStep]:
        """Compute the steps. The last one may be one that raises. `digests`: whether what they give is digested."""
        for plan, keys, told in self._plans:
            new_rows = tuple([self._with_grammar(new) for new in plan.new_rows])
            self._places.follow(plan, keys)
            for new in plan.new_rows:
                self._restored[new.row], self._new[new.row] = False, new
            mine = replace(plan, new_rows=new_rows)
            if not self.is_whole:
                mine = self._without_history(plan, mine, told)
            try:
                result = self._compute(mine)
            except Exception as error:
                yield ReplayedStep(plan, None, None, error)
                return
            difference = None if told is None else self._difference(plan, told, result)
            yield ReplayedStep(plan, result, difference, None, self._digest(plan, result) if digests else "")

    def _compute(self, plan: StepPlan) -> StepResult:
        step = self._runner.launch(replace(plan, step=self._num_steps))
        self._num_steps += 1
        step.wait()
        return step.result()

    def _with_grammar(self, new: NewRow) -> NewRow:
        source, params = new.params.grammar_source, replace(new.params, processors=())
        if source == (None, None):
            return replace(new, params=params)
        if source not in self._grammars:
            if self._compiler is None:
                raise ValueError("grammars were recorded, and the model has no tokenizer")
            compiling = self._compiler.compile_both(*source)
            assert compiling is not None
            self._grammars[source] = compiling.result()
        return replace(new, params=replace(params, grammar=self._grammars[source]))

    # ---- recordings that begin later ------------------------------------------------------------------------------------

    def _without_history(self, recorded: StepPlan, plan: StepPlan, told: StepResult | None) -> StepPlan:
        """The plan, after what its rows need was computed: nothing in it refers to pages of before, or to the draft model."""
        for number, row in enumerate(plan.rows.tolist()):
            if not self._restored[row]:
                self._restored[row] = True
                if start := int(plan.starts[number]):
                    self._restore(row, start, decodes=number < plan.num_decodes)
        plan = replace(plan, copy_from=NO_INTS, copy_to=NO_INTS, draft_rows=None)
        if plan.states is not None:
            known = self._restored[plan.states.rows] & np.isin(plan.states.rows, plan.rows[plan.starts > 0])
            sources = np.where(known[:, None], plan.states.pages, plan.states.sources)
            plan = replace(plan, states=replace(plan.states, sources=sources))
        if recorded.draft_rows is None or told is None:
            return plan
        return replace(plan, token_ids=_settled_drafts(recorded, told))

    def _restore(self, row: int, start: int, *, decodes: bool) -> None:
        """Compute the KV and the states of a row's tokens before `start`, and where it decodes sample the one there."""
        key = int(self._places.row_keys[row])
        request, tokens = self._recording.requests[key], self._recording.tokens[key]
        new, limits, runner = self._first_of(row, request, tokens, start, decodes=decodes), self._recording.scheduler, self._runner
        columns = -(-start // limits.page_size)
        pages = self._places.page_table[:, row, :columns].copy()
        spare = self._first_spare + np.arange(pages.size, dtype=np.int32).reshape(pages.shape)
        pages = np.where(pages == 0, spare, pages)  # pages behind the windows
        groups, cols = (one.ravel().astype(np.int32) for one in np.indices(pages.shape))
        done = 0
        while done < start:
            length = min(start - done, runner.max_num_batched_tokens)
            if request.images is not None:
                length = request.images.chunk(done, length) or length
            is_first, is_last = done == 0, done + length == start
            states = None
            if limits.state_pages and is_first:
                none = np.zeros((0, limits.state_pages), np.int32)
                mine = self._places.state_pages[row : row + 1]
                states = StateRows(np.array([row], np.int32), mine, np.zeros_like(mine), NO_INTS, NO_INTS, none)
            plan = StepPlan(
                step=0,
                rows=np.array([row], np.int32),
                num_decodes=0,
                starts=np.array([done], np.int32),
                lengths=np.array([length], np.int32),
                num_sampled=np.array([int(is_last and decodes)], np.int32),
                token_ids=tokens[done : done + length].astype(np.int32),
                new_rows=(new,) if is_first else (),
                page_groups=groups if is_first else NO_INTS,
                page_rows=np.full(len(groups), row, np.int32) if is_first else NO_INTS,
                page_cols=cols if is_first else NO_INTS,
                page_ids=pages.ravel() if is_first else NO_INTS,
                states=states,
                adapters=np.array([request.adapter], np.int32) if request.adapter else NO_INTS,
            )
            self._compute(plan)
            done += length

    def _first_of(self, row: int, request: Request, tokens: IntArray, start: int, *, decodes: bool) -> NewRow:
        """The row as it was assigned, of a sequence with these `tokens` in the end. It had those before `start`, or all of its prompt."""
        params = replace(request.params, prompt_logprobs=None, pooling=None)  # nothing is told of what is computed before
        known = NO_INTS
        if params.features & Features.HISTORY:
            given = self._new.get(row)
            known = tokens[:start] if decodes else tokens[: self._first_sampled(row, start)] if given is None else given.tokens
        return self._with_grammar(NewRow(row, params, len(request.prompt), known, request.images))

    def _first_sampled(self, row: int, start: int) -> int:
        """Where the first token is that a row samples which has computed up to `start` before the recording begins."""
        for plan, *_ in self._plans:
            for number in np.flatnonzero(plan.rows == row).tolist():
                start = int(plan.starts[number] + plan.lengths[number])
                if plan.num_sampled[number]:
                    return start
        return start

    # ---- what comes -----------------------------------------------------------------------------------------------------

    def _difference(self, plan: StepPlan, told: StepResult, found: StepResult) -> StepDifference | None:
        firsts = np.cumsum(plan.num_sampled) - plan.num_sampled
        sampled = np.flatnonzero(plan.num_sampled)
        accepted = {int(number): 1 for number in sampled}
        if told.accepted is not None:
            accepted = {int(number): int(count) for number, count in zip(sampled, told.accepted, strict=True)}
        for number, count in accepted.items():
            row, first = int(plan.rows[number]), int(firsts[number])
            key, position = int(self._places.row_keys[row]), int(plan.starts[number] + plan.lengths[number] - plan.num_sampled[number]) + 1
            if row in told.failures or row in found.failures:
                pair = [type(one.failures[row]).__name__ if row in one.failures else None for one in (told, found)]
                told_name = None if row not in told.failures else str(told.failures[row]).partition(":")[0]
                if told_name != pair[1]:
                    return StepDifference(key, position, "failure", told_name, pair[1])
                continue
            request = self._recording.requests.get(key)
            if request is not None and request.params.processors:
                continue  # custom code of the program that recorded it
            for i in range(first, first + count):
                at = position + i - first
                if told.tokens[i] != found.tokens[i]:
                    return StepDifference(key, at, "token", int(told.tokens[i]), int(found.tokens[i]))
                if request is None or request.params.logprobs is None or told.logprobs is None or found.logprobs is None:
                    continue
                bits = [one.logprobs.token_logprobs[i] for one in (told, found) if one.logprobs is not None]
                if bits[0].tobytes() != bits[1].tobytes():
                    return StepDifference(key, at, "logprob", float(bits[0]), float(bits[1]))
        return None

    def _digest(self, plan: StepPlan, result: StepResult) -> str:
        digest, size = hashlib.sha256(result.tokens.tobytes()), self._recording.scheduler.page_size
        if result.logprobs is not None:
            digest.update(result.logprobs.token_logprobs.tobytes())
        pages: set[int] = set()
        for row, start, length in zip(plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True):
            pages.update(self._places.page_table[:, row, start // size : -(-(start + length) // size)].ravel().tolist())
        written = np.array(sorted(pages - {0}), np.int32)
        digest.update(self._runner.read_pages(written).tobytes())
        return digest.hexdigest()[:16]


def _settled_drafts(plan: StepPlan, told: StepResult) -> IntArray:
    """The ids of a plan with drafts that are accepted where the recorded ones were, whatever the draft model proposed."""
    ids = plan.token_ids.copy()
    firsts = np.cumsum(plan.num_sampled) - plan.num_sampled
    accepted = np.ones(len(plan.rows), np.int64)
    if told.accepted is not None:
        accepted[np.flatnonzero(plan.num_sampled)] = told.accepted
    at = 0
    for number in range(plan.num_decodes, len(plan.rows)):
        length, count = int(plan.lengths[number]), int(plan.num_sampled[number])
        for draft in range(1, count):
            if ids[at + draft] == -1:
                sampled = int(told.tokens[firsts[number] + draft - 1])
                ids[at + draft] = sampled if draft < accepted[number] else (sampled + 1) % 2
        at += length
    return ids


def decisions_of(recording: Recording, loaded: LoadedModel) -> Iterator[tuple[int, str]]:
    """Make the scheduler's decisions of a whole recording again, with the results that steps had. Gives the number of each plan, and the
    first field in which it is another one; empty: none. Raises `ValueError` for a recording that does not begin with the engine."""
    if not recording.is_whole or _uses_tiers(recording):
        raise ValueError("it begins later than the engine, or tiers of KV took part: the scheduler had a state that is not recorded")
    ticks: list[float] = []
    config = EngineConfig(**recording.config)
    scheduler = Scheduler(recording.scheduler, lambda: ticks.pop(0) if ticks else 0.0, drafter_of(config, loaded))
    plans: dict[int, StepPlan] = {}
    for event in recording.events:
        ticks[:] = event.clock
        match event:
            case Called("submit", (key,)):
                scheduler.submit(recording.requests[key])
            case Called("rollback", (step, rows)):
                scheduler.rollback(plans[step], {row: RuntimeError("it was recorded") for row in rows})
            case Called(method, arguments):
                getattr(scheduler, method)(*arguments)
            case Planned(told):
                plan = scheduler.schedule()
                if plan is not None or told is not None:
                    number = (told or plan).step  # type: ignore[union-attr]
                    yield number, _first_difference(told, plan)
                if plan is None:
                    continue
                plans[plan.step] = plan
            case CommittedStep(result):
                scheduler.commit(plans.pop(result.step), result)
        scheduler.take_updates()


def _first_difference(told: Any, found: Any) -> str:
    if (told is None) != (found is None):
        return "whether there is one"
    for name in StepPlan.__slots__:
        if not _same(getattr(told, name), getattr(found, name)):
            return name
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, NewRow):
        names = ("row", "prompt_len", "tokens")
        return isinstance(other, NewRow) and all(_same(getattr(one, name), getattr(other, name)) for name in names)
    if hasattr(one, "__slots__") and not isinstance(one, SamplingParams):
        return type(one) is type(other) and all(_same(getattr(one, name), getattr(other, name)) for name in one.__slots__)
    return bool(one == other)
