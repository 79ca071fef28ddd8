"""`GrammarCompiler`: what an output must look like, compiled for one model. Owns the threads that compile, and the cache.

Knows requests only by their `StructuredOutput`; what that means as a grammar is `grammar_source`'s.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from aengine.engine.grammar_source import build_grammar, refusal
from aengine.engine.tokenizer import Tokenizer
from aengine.engine.vocabulary import NotConcatenative, Vocabulary, read_vocabulary
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.params import StructuredOutput
from aengine.scheduler.plan import NewRow, RowParams

if TYPE_CHECKING:
    import torch

    from aengine.sampling.grammar import CompiledGrammar

COMPILE_TIMEOUT = 30.0
"""Seconds after which a request stops waiting for its grammar. Sensible ones take milliseconds."""
MAX_THREADS = 2
MAX_ABANDONED = 4
"""Compiles that nobody waits for any more cannot be stopped; this many of them do not count among the threads."""
MAX_CACHED = 256
MAX_CACHED_BYTES = 512 << 20

_LOCATION = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")  # in the compiler's sources


@dataclass(eq=False, slots=True)
class _Job:
    wanted: StructuredOutput
    future: Future[CompiledGrammar]
    running: bool = False
    counted: bool = False  # among the threads that compile for somebody
    settled: bool = False  # the future has its result, or is about to


@dataclass(eq=False, slots=True)
class _Cache:
    """The grammars used last, within a limit on their number and one on their bytes."""

    max_bytes: int
    entries: OrderedDict[StructuredOutput, tuple[CompiledGrammar, int]] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def get(self, wanted: StructuredOutput) -> CompiledGrammar | None:
        entry = self.entries.get(wanted)
        if entry is None:
            return None
        self.entries.move_to_end(wanted)
        return entry[0]

    def put(self, wanted: StructuredOutput, compiled: CompiledGrammar) -> None:
        size = compiled.grammar.memory_size_bytes
        if size > self.max_bytes or wanted in self.entries:
            return
        self.entries[wanted] = (compiled, size)
        self.num_bytes += size
        while len(self.entries) > MAX_CACHED or self.num_bytes > self.max_bytes:
            _, (_, dropped) = self.entries.popitem(last=False)
            self.num_bytes -= dropped


class GrammarCompiler:
    """Compiles for one model; made once per engine. Every method may be called from any thread.

    Nothing is read or imported before the first grammar is asked for. xgrammar lets go of the GIL while it compiles.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        timeout: float = COMPILE_TIMEOUT,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        """`vocab_size`: the length of the model's logits, which may differ from the tokenizer's. `eos_token_ids`: what ends an output."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._timeout = timeout
        self._lock = threading.RLock()
        self._backend_lock = threading.Lock()
        self._backend: _Backend | None = None
        self._cache = _Cache(max_cached_bytes)
        self._jobs: dict[StructuredOutput, _Job] = {}  # not finished; requests for the same grammar share one
        self._queue: deque[_Job] = deque()
        self._threads = 0  # that compile for somebody, at most MAX_THREADS
        self._abandoned = 0

    def compile(self, wanted: StructuredOutput) -> Future[CompiledGrammar]:
        """The grammar, now or later: a future that is done at once if it is known. Cancelling the future stops nothing.

        It fails with `InvalidRequestError` (structured_output.json_schema and so on): with the compiler's own message when it does
        not compile, or when it has not after `timeout` seconds; with advice when xgrammar is missing; and when the model's
        vocabulary cannot write any such output.
        """
        future: Future[CompiledGrammar] = Future()
        with self._lock:
            compiled = self._cache.get(wanted)
            if compiled is not None:
                future.set_result(compiled)
                return future
            job = self._jobs.get(wanted)
            if job is None:
                job = self._jobs[wanted] = _Job(wanted, Future())
                self._queue.append(job)
                self._start_threads()
        # To a future of its own, which may be cancelled without harm to the others.
        job.future.add_done_callback(functools.partial(_hand_on, future))
        return future

    def _start_threads(self) -> None:
        while self._queue and self._threads < MAX_THREADS:
            job = self._queue.popleft()
            job.running = job.counted = True
            self._threads += 1
            # Not of a pool: the interpreter would wait for its threads at exit, however long they compile.
            threading.Thread(target=self._run, args=(job,), name="aengine-grammar", daemon=True).start()

    def _run(self, job: _Job) -> None:
        timer = threading.Timer(self._timeout, self._give_up, (job,))
        timer.daemon = True
        timer.start()
        compiled: CompiledGrammar | None = None
        error: BaseException | None = None
        try:
            compiled = self._compile(job.wanted)
        except BaseException as caught:  # belongs to those who wait
            error = caught
        timer.cancel()
        with self._lock:
            if job.counted:
                self._threads -= 1
            else:
                self._abandoned -= 1
            del self._jobs[job.wanted]
            if compiled is not None:
                self._cache.put(job.wanted, compiled)
            late, job.settled = job.settled, True
            self._start_threads()
        if late:
            return
        if error is not None:
            job.future.set_exception(error)
        else:
            assert compiled is not None
            job.future.set_result(compiled)

    def _give_up(self, job: _Job) -> None:
        """Called in a timer's thread. The job stays known until it ends, so that the same grammar is not compiled once more."""
        refusals = []
        with self._lock:
            if job.settled:
                return
            job.settled = True
            refusals.append((job, f"did not compile within {self._timeout:g} seconds"))
            if self._abandoned < MAX_ABANDONED:
                job.counted = False
                self._threads -= 1
                self._abandoned += 1
                self._start_threads()
            elif all(other.settled for other in self._jobs.values() if other.running):  # nobody is left to take the queue
                while self._queue:
                    waiting = self._queue.popleft()
                    waiting.settled = True
                    del self._jobs[waiting.wanted]
                    refusals.append((waiting, "cannot be compiled: all compiling threads are stuck with other grammars"))
        for refused, reason in refusals:
            refused.future.set_exception(refusal(refused.wanted, reason))

    def _compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        with self._backend_lock:
            if self._backend is None:
                self._backend = _Backend.make(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._backend.compile(wanted)


def _hand_on(target: Future[CompiledGrammar], source: Future[CompiledGrammar]) -> None:
    if not target.set_running_or_notify_cancel():
        return
    error = source.exception()
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


def _impossible(description: str) -> InvalidRequestError:
    return InvalidRequestError((FieldViolation("structured_output", description),))


class _Backend:
    """xgrammar, with what it needs to know of the model."""

    def __init__(self, compiler: Any, vocab_size: int, drops_first_space: bool, first: torch.Tensor | None) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._drops_first_space = drops_first_space
        self._first = first

    @classmethod
    def make(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> _Backend:
        """Raises `InvalidRequestError` where structured output is not possible at all."""
        if not eos_token_ids:
            raise _impossible("the model has no end-of-sequence id, which is what ends structured output")
        try:
            import xgrammar
        except ImportError as error:
            raise _impossible(f"needs xgrammar, which is not installed here ({error}): pip install aengine[structured]") from error
        try:
            vocabulary = read_vocabulary(tokenizer, vocab_size)
        except NotConcatenative as error:
            raise _impossible(f"is not possible with the model's tokenizer: {error}") from error
        # End-of-sequence ids end the output wherever they stand, so they must not stand for text as well.
        texts = [b"" if token_id in eos_token_ids else text for token_id, text in enumerate(vocabulary.texts)]
        info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))
        threads = min(8, (os.cpu_count() or 1) // 4 or 1)  # of each compile: most of the machine stays with the model
        compiler = xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
        return cls(compiler, vocab_size, vocabulary.drops_first_space, _first_tokens(vocabulary, eos_token_ids))

    def compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        """Raises `InvalidRequestError`."""
        import xgrammar

        from aengine.sampling.grammar import CompiledGrammar, GrammarRows

        try:
            grammar = build_grammar(wanted)
            if self._drops_first_space:
                grammar = xgrammar.Grammar.concat(xgrammar.Grammar.from_ebnf('root ::= " "'), grammar)
            compiled = CompiledGrammar(self._compiler.compile_grammar(grammar), self._first)
        except RuntimeError as error:  # all that xgrammar raises
            raise refusal(wanted, _LOCATION.sub("", str(error)).strip()) from error
        rows = GrammarRows(self._vocab_size)
        rows.update((NewRow(0, RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, grammar=compiled)),))
        if (first := rows.allowed(0)) is not None and not first.any():
            raise refusal(wanted, "nothing that the model's vocabulary can write matches")
        return compiled


def _first_tokens(vocabulary: Vocabulary, eos_token_ids: Sequence[int]) -> torch.Tensor | None:
    """The limit on first tokens as a bitmask [ceil(vocab_size / 32)] int32; None if all that have a text may begin one."""
    import torch

    allowed = np.array(vocabulary.may_begin)
    if all(allowed[token_id] for token_id, text in enumerate(vocabulary.texts) if text):
        return None
    allowed[list(eos_token_ids)] = True
    bits = np.packbits(allowed, bitorder="little")
    return torch.from_numpy(np.pad(bits, (0, -len(bits) % 4)).view("<i4").astype(np.int32))
