"""Random mixed steps for a runner, one ahead of what is read: prompts in chunks, decodes, prefixes shared with copied pages, rows that lose
everything and begin anew, pages that are used again at once. What every sequence got is kept, for comparing it with the sequence alone.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from driver import GREEDY

from aengine.runner.contract import InFlightStep
from aengine.runner.runner import ModelRunner
from aengine.scheduler.plan import NewRow, RowParams, StepPlan

VOCAB = 199
MOST = 12  # sequences at once


@dataclass(eq=False)
class Member:
    """A sequence. Its first `planned` positions are computed, or on their way."""

    tokens: list[int]  # prompt and output, as far as it was read
    prompt_len: int
    target: int  # tokens at its end
    params: RowParams
    logprobs: list[float] = field(default_factory=list)  # of the output, where `params` ask for them
    row: int = -1
    pages: list[list[int]] = field(default_factory=list)  # by column, one in each layer group
    planned: int = 0
    unread: int = 0  # tokens sampled by steps that were not read yet
    announced: bool = False  # whether the runner was told of the row, and of how many pages
    told_pages: int = 0
    sampled: bool = False  # whether the runner holds its last token

    @property
    def length(self) -> int:
        return len(self.tokens) + self.unread

    @property
    def decodes(self) -> bool:
        return self.sampled and self.planned == self.length - 1


class Crowd:
    """Makes up steps and launches them. `everyone` are all sequences there ever were."""

    def __init__(self, runner: ModelRunner, seed: int, prompts: Callable[[np.random.Generator], list[int]]) -> None:
        self.runner = runner
        self.rng = np.random.default_rng(seed)
        self.everyone: list[Member] = []
        self.copies = self.preemptions = 0
        self._prompts = prompts
        self._running: list[Member] = []
        self._flights: deque[tuple[list[Member], InFlightStep]] = deque()
        self._free_pages = [int(page) for page in self.rng.permutation(np.arange(1, runner.num_pages))]
        self._free_rows = [int(row) for row in self.rng.permutation(runner.max_num_seqs)]
        self._users = Counter[int]()  # of a page
        self._copies: list[tuple[int, int]] = []  # of the step that is made up
        self._step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._one_step()
        self._settle()

    def _one_step(self) -> None:
        if self.rng.random() < 0.3:
            self._settle()  # only what was read can leave, be forked or begin anew
            self._shake()
        while not (chosen := self._choose()):
            self._settle()
            self._shake()
        self._launch(chosen)
        if len(self._flights) > 1:  # one step ahead
            self._read()

    def _shake(self) -> None:
        for member in [member for member in self._running if len(member.tokens) >= member.target]:
            self._running.remove(member)
            self._release(member)
        if self._running and self.rng.random() < 0.3:
            self.preemptions += 1
            self._release(self._running[self.rng.integers(len(self._running))])
        parents = [member for member in self._running if member.planned > 0]
        if parents and len(self._running) < MOST and self.rng.random() < 0.5:
            self._fork(parents[self.rng.integers(len(parents))])
        while len(self._running) < MOST and self.rng.random() < 0.6:
            self._join(self._prompts(self.rng))
        if not self._running:
            self._join(self._prompts(self.rng))

    def _join(self, prompt: list[int]) -> Member:
        params = replace(GREEDY, logprobs=1) if self.rng.random() < 0.5 else GREEDY
        member = Member(prompt, len(prompt), len(prompt) + int(self.rng.integers(1, 40)), params)
        self._running.append(member)
        self.everyone.append(member)
        return member

    def _fork(self, parent: Member) -> None:
        """A sequence that begins with all that `parent` has computed: shares its full pages, and copies the one that both go on to fill."""
        suffix = self.rng.integers(0, VOCAB, int(self.rng.integers(1, 6))).tolist()
        child = self._join(parent.tokens[: parent.planned] + suffix)
        child.planned = parent.planned
        full, rest = divmod(parent.planned, self.runner.page_size)
        child.pages = parent.pages[:full]
        self._users.update(itertools.chain(*child.pages))
        if rest:
            self._copies += zip(parent.pages[full], self._take_pages(child), strict=True)
            self.copies += 1

    def _release(self, member: Member) -> None:
        pages = [*itertools.chain(*member.pages)]
        self._users.subtract(pages)
        self._free_pages += [page for page in pages if self._users[page] == 0]
        if member.row >= 0:
            self._free_rows.append(member.row)
        member.row, member.pages, member.planned, member.told_pages = -1, [], 0, 0
        member.announced = member.sampled = False

    def _take_pages(self, member: Member) -> list[int]:
        pages = [self._free_pages.pop() for _ in self.runner.windows]  # what was freed last, so that it still holds another sequence's KV
        member.pages.append(pages)
        self._users.update(pages)
        return pages

    def _choose(self) -> list[tuple[Member, int]]:
        """Who computes how many tokens; decodes first."""
        decodes = [member for member in self._running if member.decodes and member.length < member.target]
        prefills = [member for member in self._running if not member.sampled and member.planned < len(member.tokens)]
        forked = [member for member in prefills if member.pages and not member.announced]  # their copies are of this step
        if not forked and decodes and self.rng.random() < 0.5:
            prefills = []
        plain = [member for member in decodes if member.params.logprobs is None]
        if plain and self.rng.random() < 0.5:
            decodes = plain  # where none wants logprobs, the argmax alone is computed
        decodes = [member for member in decodes if self.rng.random() < 0.9]
        chunks = [(member, int(self.rng.integers(1, 1 + len(member.tokens) - member.planned))) for member in prefills]
        return [(member, 1) for member in decodes] + [(m, n) for m, n in chunks if m in forked or self.rng.random() < 0.8]

    def _launch(self, entries: list[tuple[Member, int]]) -> None:
        page_writes: list[tuple[int, int, int, int]] = []
        new_rows: list[NewRow] = []
        ids: list[int] = []
        sampled: list[Member] = []
        rows, starts, samples = [], [], []
        num_decodes = sum(member.decodes for member, _ in entries)
        for member, length in entries:
            if not member.announced:
                member.announced, member.row = True, self._free_rows.pop()
                new_rows.append(NewRow(member.row, member.params, member.prompt_len))
            while len(member.pages) * self.runner.page_size < member.planned + length:
                self._take_pages(member)
            new_columns = range(member.told_pages, len(member.pages))
            page_writes += [(group, member.row, column, page) for column in new_columns for group, page in enumerate(member.pages[column])]
            member.told_pages = len(member.pages)
            if not member.decodes:
                ids += member.tokens[member.planned : member.planned + length]
            rows.append(member.row)
            starts.append(member.planned)
            samples.append(member.planned + length == member.length)
        for (member, length), samples_now in zip(entries, samples, strict=True):
            member.planned += length
            if samples_now:
                member.sampled, member.unread = True, member.unread + 1
                sampled.append(member)
        copies, self._copies = np.array(self._copies, np.int32).reshape(-1, 2), []
        page_groups, page_rows, page_cols, page_ids = np.array(page_writes, np.int32).reshape(-1, 4).T
        plan = StepPlan(
            step=self._step,
            rows=np.array(rows, np.int32),
            num_decodes=num_decodes,
            starts=np.array(starts, np.int32),
            lengths=np.array([length for _, length in entries], np.int32),
            num_sampled=np.array(samples, np.int32),
            token_ids=np.array(ids, np.int32),
            new_rows=tuple(new_rows),
            page_groups=page_groups,
            page_rows=page_rows,
            page_cols=page_cols,
            page_ids=page_ids,
            copy_from=copies[:, 0],
            copy_to=copies[:, 1],
        )
        self._step += 1
        self._flights.append((sampled, self.runner.launch(plan)))

    def _read(self) -> None:
        sampled, flight = self._flights.popleft()
        result = flight.result()
        for index, (member, token) in enumerate(zip(sampled, result.tokens.tolist(), strict=True)):
            member.tokens.append(token)
            member.unread -= 1
            if member.params.logprobs is not None:
                assert result.logprobs is not None
                member.logprobs.append(float(result.logprobs.token_logprobs[index]))

    def _settle(self) -> None:
        while self._flights:
            self._read()
