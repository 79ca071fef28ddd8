"""Drives a Scheduler against the KV-content oracle as the step loop would, one step ahead where `overlap` is set, or with as many steps of
different rows in flight as the configuration says, and checks the scheduler's invariants after every commit."""

from __future__ import annotations

import dataclasses
import random
from collections import deque

import numpy as np
from every_draft import EveryDraft
from kv_oracle import OracleFlight, OracleRunner, Truth, solo_run
from page_invariants import check_pages
from random_drafts import RandomDrafts
from simulated_tiers import SimulatedTiers

from aengine.api.outputs import FinishReason
from aengine.scheduler.plan import StepPlan, StepResult
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Finished, Request, SchedulerConfig, SequenceState


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Simulation:
    def __init__(
        self,
        config: SchedulerConfig,
        *,
        overlap: bool = False,
        vocab_size: int = 50,
        rng: random.Random | None = None,
        drafts: random.Random | None = None,
        tiers: random.Random | None = None,
    ) -> None:
        """With `rng`, one step in twenty fails for one of its rows before it runs, one in twenty is withdrawn before it begins, and one
        row in five that no step may run ahead of gets no token, for lack of time."""
        self.config = config
        self.withdrawn: list[int] = []  # rows that got their prefixes in a step that did not run
        self.clock = FakeClock()
        sizes = config.num_pages, config.page_size, config.max_num_seqs, config.max_num_batched_tokens
        self.runner = OracleRunner(*sizes, config.windows, config.max_in_flight, config.max_adapters, config.state_pages)
        self.runner.draft_is_head = config.has_draft_head
        drafter = None if drafts is None else RandomDrafts(self.runner.truth_of, drafts, has_model=config.has_draft_model)
        self.scheduler = Scheduler(config, self.clock, drafter)
        if self.scheduler._drafts is not None:
            self.scheduler._drafts._lengths = EveryDraft(config.max_num_seqs, drafts)
        self.tiers = None if tiers is None else SimulatedTiers(self.scheduler, self.runner, tiers)
        self.scheduler.prefix_index.log_changes(True)
        self._logged_names: set[bytes] = set()
        self._most_in_flight = max(config.max_in_flight, 1 + overlap)
        self.rng = rng
        self.vocab_size = vocab_size
        self.flights: deque[tuple[StepPlan, OracleFlight]] = deque()
        self.received: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.finished: dict[int, Finished] = {}
        self.released: set[int] = set()
        self.plans: list[StepPlan] = []
        self.at_once: list[tuple[StepPlan, StepPlan]] = []  # pairs that were in flight together
        self.forced: set[int] = set()  # ended from outside
        self.changing: str | None = None  # to other weights, once no step is in flight: keep, recompute, finish or abort

    def submit(self, request: Request) -> Truth:
        truth = solo_run(request, self.vocab_size)
        self.runner.truths[request.key] = truth
        self.received[request.key] = []
        self.scheduler.submit(request)
        return truth

    def cancel(self, key: int) -> None:
        if key not in self.finished:
            self.forced.add(key)
        self.scheduler.cancel(key)

    def _use_weights(self) -> None:
        if self.changing == "abort":
            self.forced.update(key for key, sequence in self.scheduler._live.by_key.items() if sequence.begun)
            self.scheduler.cancel_begun()
        if self.changing == "keep":
            self.runner.admitted = dict.fromkeys(self.withdrawn, self.runner.version)
        self.runner.version += 1
        self.scheduler.use_weights(recompute=self.changing == "recompute")
        if self.tiers is not None:
            self.tiers.use()
        self.scheduler.end_draining()
        self.changing = None

    def step(self) -> bool:
        """One turn of the step loop; False when there was nothing to run and nothing in flight."""
        if self.tiers is not None:
            self.tiers.save()
        waits = self.changing is not None and not (self.changing == "finish" and self.scheduler.drain())
        if waits and not self.flights:
            self._use_weights()
            waits = False
        if not self.flights and self.rng is not None and self.rng.random() < 0.02:
            self.scheduler.abandon_loads()
            self.scheduler.flush_cache()  # sleep and wake
            self.runner.keep(self.scheduler.held_pages())
        if self.tiers is not None:
            self.tiers.end_loads(every=False)
        plan = None if waits else self.scheduler.schedule()
        if plan is not None and self.rng is not None and self.rng.random() < 0.05:
            row = self.rng.choice(plan.rows.tolist())
            sequence = self.scheduler._rows.sequences[row]
            assert sequence is not None
            self.forced.add(sequence.request.key)
            self.scheduler.rollback(plan, {row: RuntimeError("this row cannot be built")})
            if self.tiers is not None:
                self.tiers.save()
            plan = self.scheduler.schedule()
        if plan is not None and self.flights and self.rng is not None and self.rng.random() < 0.05:
            self.scheduler.rollback(plan, {})
            self.withdrawn = [new.row for new in plan.new_rows]
            plan = None
        if plan is not None:
            self.withdrawn = []
            self.plans.append(plan)
            self.at_once.extend((other, plan) for other, _ in self.flights)
            self.flights.append((plan, self.runner.launch(plan)))
        if self.flights and (plan is None or len(self.flights) >= self._most_in_flight):
            returned, flight = self.flights.popleft()
            self.scheduler.commit(returned, self._postponed(returned, flight.result()))
            worked = True
        else:
            worked = plan is not None or (self.changing is not None and not self.scheduler.drain())
        if self.tiers is not None:
            self.tiers.save()
            self.tiers.begin_loads()
            worked = worked or self.tiers.end_loads(every=True)
        self._receive()
        self._check()
        return worked

    def _postponed(self, plan: StepPlan, result: StepResult) -> StepResult:
        samples = plan.num_sampled > 0
        rows, known = plan.rows[samples], self.scheduler._rows
        waits = known.lockstep[rows] & ((plan.starts + plan.lengths)[samples] >= known.lockstep_from[rows])
        late = np.array([wait and self.rng is not None and self.rng.random() < 0.2 for wait in waits], np.bool_)
        if not late.any():
            return result
        accepted = np.ones(len(rows), np.int32) if result.accepted is None else result.accepted
        tokens = np.where(np.repeat(late, plan.num_sampled[plan.num_sampled > 0]), 31, result.tokens)
        return dataclasses.replace(result, tokens=tokens, accepted=np.where(late, 0, accepted))

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"still not done after {max_steps} steps")

    def _receive(self) -> None:
        updates = self.scheduler.take_updates()
        for key, cached, loaded, _ in updates.started:
            assert key not in self.cached, "started twice"
            assert loaded <= cached <= len(self.runner.truths[key].request.prompt)
            self.cached[key] = cached
        for key, token in zip(updates.keys, updates.token_ids, strict=True):
            assert key not in self.finished, "a token after the end"
            self.received[key].append(token)
        for finished in updates.finished:
            assert finished.key not in self.finished, "ended twice"
            self.finished[finished.key] = finished
        for key in updates.released:
            assert key in self.finished
            assert key not in self.released
            self.released.add(key)

    def _check(self) -> None:
        rows, cache = self.scheduler._rows, self.scheduler._cache
        check_pages(cache)
        refs, states = np.zeros_like(cache.refs), self.scheduler._kv_cache.states
        for row, sequence in enumerate(rows.sequences):
            if sequence is not None:
                np.add.at(refs, rows.pages(row), 1)
                for pages in [] if states is None else states.pages(row):
                    np.add.at(refs, pages, 1)
        loads = self.scheduler._kv_cache.loads
        for load in [] if loads is None else loads._loads:
            held = np.concatenate(load.pages)
            np.add.at(refs, held[held > 0], 1)
        assert np.array_equal(refs, cache.refs), "ref counts do not add up"
        assert self.config.max_adapters is None or len(rows.adapters) <= self.config.max_adapters
        windows_end = rows.window_ends[rows.decoding & rows.active]
        assert not self.config.windows[-1] or np.array_equal(windows_end, rows.num_pages[rows.decoding & rows.active])
        free = set(cache._free[: cache._num_free].tolist())
        for plan, _ in self.flights:
            for row in plan.rows.tolist():
                assert not free & set(rows.pages(row).tolist()), "a page of a step in flight is free"

        for name, is_there in self.scheduler.prefix_index.take_changes().items():
            (self._logged_names.add if is_there else self._logged_names.discard)(name)
        assert self._logged_names == set(self.scheduler.prefix_index.names(self.config.num_pages)), "the log of names is not what happened"
        live, total = self.scheduler._live, 0
        for sequence in live.by_key.values():
            waits = sequence.state is SequenceState.WAITING and not sequence.parked
            assert waits == (0 < sequence.num_expected <= len(sequence.tokens))
            total += sequence.num_expected
        assert live.num_expected == total

    def check_finished(self) -> None:
        """Everything ended as in its solo run (or was ended from outside), and nothing is left."""
        for key, truth in self.runner.truths.items():
            output = truth.output[len(truth.request.output) :]
            assert truth.request.params.most_cached != 0 or not self.cached.get(key)
            if key in self.forced or self.finished[key].reason is FinishReason.DEADLINE:
                assert self.received[key] == output[: len(self.received[key])]
            else:
                assert self.received[key] == output, f"request {key} differs from its solo run"
                assert self.finished[key].reason is truth.reason
        assert self.released == set(self.runner.truths)
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.parked, stats.pages_used, stats.uncomputed_tokens) == (0, 0, 0, 0, 0)
        assert not self.scheduler._live.by_key
        assert not self.scheduler._rows.adapters
        assert not self.scheduler._kv_cache.num_awaiting
        assert not self.scheduler._kv_cache.prefixes._owner
        assert not self.scheduler._kv_cache.prefixes._awaiting
        assert not self.scheduler._kv_cache.prefixes._claims
        assert self.scheduler._rows.num_free == self.config.max_num_seqs
