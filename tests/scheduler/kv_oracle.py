"""The KV-content oracle: a runner without a model that knows what every page slot must hold.

A slot's content is the hash of the salt, of the adapter, of the layer group and of every token up to its own position, and of the versions
of the weights that computed these. A page of a recurrent state has the hash of all tokens that the state is of, and of which of the state's
pages it is. So a read of a wrong, stale or foreign slot is seen at once. The next token is a function of the hash
without the versions, so the right output of a request is known in advance: its solo run. Requests are told apart by their seed, which is
their key.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from aengine.api.outputs import FinishReason
from aengine.cache import Windows
from aengine.scheduler.drafters import BY_MODEL
from aengine.scheduler.drafts import MOST_BEHIND
from aengine.scheduler.plan import DraftRows, RowParams, StepPlan, StepResult
from aengine.scheduler.sequence import Request

MASK = (1 << 61) - 1


def _mix(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token * 1442695040888963407 + 11400714819323198485) % MASK


@dataclass(frozen=True)
class Truth:
    """A request's solo run."""

    request: Request
    tokens: np.ndarray  # prompt and output
    hashes: np.ndarray  # [j]: hash of the salt, the adapter and tokens[: j + 1]
    reason: FinishReason

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :].tolist()


def solo_run(request: Request, vocab_size: int) -> Truth:
    state = _mix(sum((i + 1) * ord(c) for i, c in enumerate(request.cache_salt)) + 17, request.adapter)
    tokens: list[int] = []
    hashes: list[int] = []

    def push(token: int) -> None:
        nonlocal state
        state = _mix(state, token)
        tokens.append(token)
        hashes.append(state)

    for token in [*request.prompt.tolist(), *request.output.tolist()]:
        push(token)
    limit = len(request.prompt) + request.max_tokens
    if not request.max_tokens:
        return Truth(request, np.array(tokens), np.array(hashes), FinishReason.MAX_TOKENS)
    while True:
        token = int((_mix(state, request.key) >> 20) % vocab_size)
        push(token)
        if token in request.stop_token_ids:
            reason = FinishReason.STOP_TOKEN
        elif token in request.eos_token_ids:
            reason = FinishReason.EOS
        elif len(tokens) == limit:
            reason = FinishReason.CONTEXT_LENGTH if request.fills_context else FinishReason.MAX_TOKENS
        else:
            continue
        return Truth(request, np.array(tokens), np.array(hashes), reason)


class OracleError(AssertionError):
    pass


class OracleFlight:
    def __init__(self, runner: OracleRunner, plan: StepPlan, ends: list[int], sampled: dict[int, int], result: StepResult) -> None:
        """`ends`: of each row, the position of its first wrong draft, or behind its last token. `sampled`: by row, its last token when
        the step has returned."""
        self._runner, self._plan, self._sampled, self._result = runner, plan, sampled, result
        self._reads = [
            (runner.slots_of(row, group, first, end), runner.contents_of(row, group, first, end))
            for row, start, end in zip(plan.rows.tolist(), plan.starts.tolist(), ends, strict=True)
            for group, window in enumerate(runner.windows)
            for first in [0 if window is None else max(0, start - window + 1)]
        ]
        self._sources = [] if plan.states is None else [(pages, runner.states[pages]) for pages in plan.states.sources]
        self.check()

    def check(self) -> None:
        """What the step reads is there, and stays there until it returned."""
        for slots, hashes in self._reads:
            if not np.array_equal(self._runner.slots[slots], hashes):
                raise OracleError(f"step {self._plan.step} reads wrong KV")
        if any(not np.array_equal(self._runner.states[pages], content) for pages, content in self._sources):
            raise OracleError(f"a state that step {self._plan.step} begins with was given away")

    def result(self) -> StepResult:
        self.check()
        self._runner.last_tokens |= self._sampled
        return self._result


class OracleRunner:
    rejected = 3  # what is sampled behind a wrong draft: a stop id of some requests

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        windows: Windows = (None,),
        max_in_flight: int = 1,
        max_adapters: int | None = None,
        state_pages: int = 0,
    ) -> None:
        self.state_pages, self.state_bytes, self.state_interval = state_pages, 0, 0
        self.states = np.full(num_pages, -1, np.int64)  # by page
        self._state_of: dict[int, np.ndarray] = {}  # row -> the pages that its next step reads,
        self._next_state_of: dict[int, np.ndarray] = {}  # and those that it writes
        self._inputs_of: dict[int, tuple[int, list[int]]] = {}  # row -> of how many tokens its state is, and those behind them
        self.max_in_flight = max_in_flight
        self.max_adapters = max_adapters
        self.page_size = page_size
        self.windows = windows
        self.slots = np.full(num_pages * page_size, -1, np.int64)
        self.draft_slots = self.slots.copy()  # of the draft model, in the pages of the first group
        self.draft_is_head = False
        self._rng = random.Random(0)
        self.truths: dict[int, Truth] = {}  # by key
        self.num_computed = 0  # tokens computed in all steps
        self._key: dict[int, int] = {}  # row -> key
        self._pages: dict[int, list[list[int]]] = {}  # row -> by group
        self.version = 0  # of the weights
        self.weights_digest = ""
        self._versions: dict[int, list[int]] = {}  # row -> by position, what stands for the versions up to there
        self.admitted: dict[int, int] = {}  # row that got its prefix in a step that did not run -> version of the weights then
        self.last_tokens: dict[int, int] = {}
        self._next_step = 0
        self._max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens

    def truth_of(self, row: int) -> Truth:
        return self.truths[self._key[row]]

    def slots_of(self, row: int, group: int, first: int, end: int) -> np.ndarray:
        positions = np.arange(first, end)
        pages = np.array(self._pages[row][group])[positions // self.page_size]
        if not pages.all():
            raise OracleError("a page that a query sees was given back")
        return pages * self.page_size + positions % self.page_size

    def contents_of(self, row: int, group: int, first: int, end: int) -> np.ndarray:
        """What the row computed there, or has to find there: of shared pages all is of the weights in use when it got its row."""
        versions = self._versions[row]
        versions += [self._pure] * (end - len(versions))
        return self.draft_contents_of(row, group, first, end) ^ np.array(versions[first:end], np.int64)

    def draft_contents_of(self, row: int, group: int, first: int, end: int) -> np.ndarray:
        return self.truth_of(row).hashes[first:end] ^ (group << 48)

    @property
    def _pure(self) -> int:
        return self.version << 32

    def _compute(self, row: int, start: int, end: int) -> None:
        """Positions that the row computes with the weights in use."""
        versions = self._versions[row]
        versions += [self._pure] * (start - len(versions))
        del versions[start:]
        for _ in range(start, end):
            before = versions[-1] if versions else self._pure
            versions.append(before if before == self._pure else _mix(before, self._pure))

    def keep(self, pages: np.ndarray) -> None:
        """The content of all other pages is lost."""
        for slots in (self.slots, self.draft_slots):
            by_page = slots.reshape(-1, self.page_size)
            by_page[np.setdiff1d(np.arange(len(by_page)), pages)] = -1
        self.states[np.setdiff1d(np.arange(len(self.states)), pages)] = -1

    def launch(self, plan: StepPlan) -> OracleFlight:
        assert plan.step == self._next_step
        self._next_step += 1
        assert len(set(plan.rows.tolist())) == len(plan.rows) <= self._max_num_seqs
        assert int(plan.lengths.sum()) <= self.max_num_batched_tokens
        assert (plan.lengths >= 1).all()
        assert (plan.lengths[: plan.num_decodes] == 1).all()
        assert (plan.num_sampled[: plan.num_decodes] == 1).all()
        for source, target in zip(plan.copy_from.tolist(), plan.copy_to.tolist(), strict=True):
            size = self.page_size
            for slots in (self.slots, self.draft_slots):
                slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]
            self.states[target] = self.states[source]
        for new in plan.new_rows:
            self._key[new.row], self._pages[new.row] = new.params.seed, [[] for _ in self.windows]
            start = int(plan.starts[plan.rows == new.row].sum())
            self._versions[new.row] = [self.admitted.get(new.row, self.version) << 32] * start
            self.last_tokens.pop(new.row, None)
        self.admitted.clear()
        writes = (plan.page_groups, plan.page_rows, plan.page_cols, plan.page_ids)
        for group, row, column, page in zip(*(array.tolist() for array in writes), strict=True):
            pages = self._pages[row][group]
            assert page or self.windows[group], "the reserved page was handed out"
            assert not page or column <= len(pages)
            pages[column : column + 1] = [page]
        self._check_adapters(plan)
        if plan.states is not None:
            self._state_of.update(zip(plan.states.rows.tolist(), plan.states.sources, strict=True))
            self._next_state_of.update(zip(plan.states.rows.tolist(), plan.states.pages, strict=True))
            for row in plan.states.rows.tolist():
                self._inputs_of.pop(row, None)
        proposed = {} if plan.draft_rows is None else self._propose(plan.draft_rows)
        given = 0
        tokens: list[int] = []
        accepted: list[int] = []
        ends: list[int] = []
        sampled: dict[int, int] = {}
        columns = (plan.rows, plan.starts, plan.lengths, plan.num_sampled)
        for i, (row, start, length, num_sampled) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            truth = self.truth_of(row)
            if i < plan.num_decodes:
                ids = [self.last_tokens[row]]
            else:
                ids = plan.token_ids[given : given + length].tolist()
                given += length
            num_drafts = max(num_sampled, 1) - 1
            certain = length - num_drafts
            if row in proposed:
                assert ids[certain:] == [BY_MODEL] * num_drafts
                ids[certain:] = proposed[row]
            assert BY_MODEL not in ids
            following = truth.tokens[start + certain :].tolist()
            if ids[:certain] != truth.tokens[start : start + certain].tolist():
                raise OracleError(f"step {plan.step} computes other tokens than the sequence has at {start}")
            right = 0  # drafts
            while right < num_drafts and following[right : right + 1] == [ids[certain + right]]:
                right += 1
            self._compute(row, start, start + certain + right)
            if self.state_pages:
                self._continue_state(plan, row, start, ids, has_drafts=num_sampled > 1)
            for group in range(len(self.windows)):
                contents = np.full(length, -2)  # at wrong drafts, and behind them
                contents[: certain + right] = self.contents_of(row, group, start, start + certain + right)
                slots = self.slots_of(row, group, start, start + length)
                self.slots[slots] = contents
                self.states[slots // self.page_size] = -1
            ends.append(start + certain + right)
            self.num_computed += length
            if num_sampled:
                # A row that ended in a step still in flight runs once more; what it samples is dropped.
                tokens += (following[: right + 1] + [self.rejected] * num_sampled)[:num_sampled]
                accepted.append(right + 1)
                self.last_tokens.pop(row, None)
                sampled[row] = tokens[len(tokens) - num_sampled + right]
        assert given == len(plan.token_ids)
        any_drafts = bool((plan.num_sampled > 1).any())
        result = StepResult(plan.step, np.array(tokens, np.int32), accepted=np.array(accepted, np.int32) if any_drafts else None)
        if self.max_in_flight == 1:  # else they are sampled when the last stage is done
            self.last_tokens |= sampled
            sampled = {}
        return OracleFlight(self, plan, ends, sampled, result)

    def _continue_state(self, plan: StepPlan, row: int, start: int, ids: list[int], *, has_drafts: bool) -> None:
        """Reads a row's state, and writes that of the tokens which are certain: all of the first `start`, and if there are no drafts those
        of the step, `ids`. With drafts the state gets the inputs of these, some of which the next step computes again."""
        states = plan.states

        def content(length: int) -> np.ndarray:
            of_tokens = int(self.contents_of(row, len(self.windows), length - 1, length)[0])
            return np.array([_mix(of_tokens, number) for number in range(self.state_pages)], np.int64)

        def write(pages: np.ndarray, length: int) -> None:
            assert len(set(pages.tolist())) == len(pages) == self.state_pages
            assert pages.all(), "the reserved page was handed out"
            self.states[pages] = content(length)
            self.slots.reshape(-1, self.page_size)[pages] = -1

        read = self._state_of[row]
        known, inputs = self._inputs_of.get(row, (start, []))
        if start < known:
            raise OracleError(f"step {plan.step} continues the state of row {row} before its end, at {start}")
        if inputs[: start - known] != self.truth_of(row).tokens[known:start].tolist():
            raise OracleError(f"step {plan.step} computes other tokens of row {row} again than the sequence has at {known}")
        if (not read.any()) != (known == 0) or (known and not np.array_equal(self.states[read], content(known))):
            raise OracleError(f"step {plan.step} continues a wrong state of row {row} at {known}")
        end = start if has_drafts else start + len(ids)
        if states is not None:
            for kept in np.flatnonzero(states.kept_rows == row).tolist():
                assert known < states.kept_lengths[kept] <= end
                write(states.kept_pages[kept], int(states.kept_lengths[kept]))
        self._state_of[row] = self._next_state_of[row]
        write(self._state_of[row], end)
        self._inputs_of[row] = end, ids if has_drafts else []

    def _check_adapters(self, plan: StepPlan) -> None:
        expected = [self.truth_of(row).request.adapter for row in plan.rows.tolist()]
        if plan.adapters.tolist() != (expected if any(expected) else []):
            raise OracleError(f"step {plan.step} computes rows with other adapters than their requests have")
        assert self.max_adapters is None or len({*expected} - {0}) <= self.max_adapters

    def _propose(self, drafted: DraftRows) -> dict[int, list[int]]:
        """The draft model's steps: drafts that are right, wrong and half right, by row."""
        proposed: dict[int, list[int]] = {}
        assert drafted.lengths[drafted.num_drafts == 0].sum() <= self.max_num_batched_tokens
        assert (drafted.lengths[drafted.num_drafts > 0] <= MOST_BEHIND).all()
        assert len(set(drafted.rows.tolist())) == len(drafted.rows)
        given = 0
        columns = (drafted.rows, drafted.starts, drafted.lengths, drafted.num_drafts)
        for row, start, length, num_drafts in zip(*(column.tolist() for column in columns), strict=True):
            truth, end = self.truth_of(row).tokens, start + length
            if drafted.token_ids[given : given + length].tolist() != truth[start:end].tolist():
                raise OracleError(f"the draft model computes other tokens than the sequence has at {start}")
            given += length
            if not np.array_equal(self.draft_slots[self.slots_of(row, 0, 0, start)], self.draft_contents_of(row, 0, 0, start)):
                raise OracleError("the draft model reads wrong KV")
            read = max(0, start - 1), end - 1  # positions of the model's hidden states
            if self.draft_is_head and not np.array_equal(self.slots[self.slots_of(row, 0, *read)], self.contents_of(row, 0, *read)):
                raise OracleError("a draft head reads hidden states of tokens that the model has not computed")
            following = truth[end : end + self._rng.choice([0, self._rng.randint(0, num_drafts), num_drafts])].tolist()
            drafts = (following + [self._rng.randrange(50) for _ in range(num_drafts)])[:num_drafts]
            right = 0
            while right < num_drafts and truth[end + right : end + right + 1].tolist() == [drafts[right]]:
                right += 1
            written = max(end, end + num_drafts - 1)  # it does not compute its last draft
            contents = np.full(written - start, -2)
            # What a head computes of its own hidden states does not count.
            known = self.draft_contents_of(row, 0, start, end if self.draft_is_head else min(end + right, written))
            contents[: len(known)] = known
            self.draft_slots[self.slots_of(row, 0, start, written)] = contents
            if num_drafts:
                proposed[row] = drafts
        assert given == len(drafted.token_ids)
        return proposed


def make_request(key: int, prompt: list[int], max_tokens: int, **fields: object) -> Request:
    params = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=key)
    return Request(key=key, prompt=np.array(prompt, np.int32), params=params, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
