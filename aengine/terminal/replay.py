"""`aengine-replay`: receipts in, and whether this machine derives the same tokens, and the same bits of their logprobs, from each of them.
Or a recording of steps, which are computed again.

Owns what of receipts is compared. Every sequence is a request of its own with the seed that it had, so whatever ran beside it, and whatever
drafts, preemptions or replicas it went through, plays no part.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aengine.api.dataclass import dataclass
from aengine.api.engine import ServedEngine, run_all
from aengine.api.errors import AEngineError, ConfigError
from aengine.api.outputs import Completion, FinishReason
from aengine.api.receipt import Receipt, ReceiptOutput
from aengine.client.client_config import exit_code
from aengine.server.config.settings import add_general, add_model, add_options, parse, read_settings
from aengine.terminal.batch import AT_ONCE
from aengine.terminal.cli import COMMON, ENGINE_OPTIONS, engine_flags, engine_of

if TYPE_CHECKING:
    from aengine.engine.step_replay import StepReplay

_FROM_OUTSIDE = (None, FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR)
_NO_BITS = ("max_model_len", "page_size")  # parts of a model's fingerprint that change limits, and no token before them
MOST_SHOWN = 20
"""Receipts that are told of one by one."""


class Verdict(enum.Enum):
    """What became of a receipt."""

    SAME = "same"  # all tokens, and all logprobs to the last bit
    DIFFERS = "differs"
    UNSIGNED = "unsigned"  # not by the key that was asked for
    SKIPPED = "skipped"  # nothing can be derived of it here


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an output is another one."""

    sequence: int
    index: int  # of the token in the output
    what: str  # token, logprob or finish_reason
    told: object  # by the receipt
    found: object
    gap: float | None = None  # between the logprobs of the two tokens, or of the two logprobs, as this machine computes them

    def __str__(self) -> str:
        gap = "" if self.gap is None else f", {self.gap:.3g} apart in logprob"
        return f"output {self.sequence}, token {self.index}: {self.what} {self.told} was told, {self.found} comes{gap}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one receipt."""

    request_id: str
    verdict: Verdict
    num_tokens: int = 0  # derived again
    difference: Difference | None = None
    reason: str = ""  # for what was not derived

    def to_json(self) -> str:
        plain: dict[str, Any] = {"request_id": self.request_id, "verdict": self.verdict.value, "tokens": self.num_tokens}
        if self.difference is not None:
            names = ("sequence", "index", "what", "told", "found", "gap")
            plain["difference"] = {name: getattr(self.difference, name) for name in names}
        if self.reason:
            plain["reason"] = self.reason
        return json.dumps(plain)


def main(arguments: Sequence[str] | None = None, name: str = "aengine-replay") -> int:
    """Returns the exit code: 0 where everything that could be derived is the same, 1 for a difference, an error or nothing to derive, 2 for
    wrong flags, 130 after Ctrl-C. `name`: what the program is called."""
    parser = build_parser(name)
    return exit_code(name, partial(_run, parse(parser, arguments)))


def build_parser(name: str = "aengine-replay", *, whole: bool = False) -> argparse.ArgumentParser:
    """`whole`: the help shows all options."""
    parser = argparse.ArgumentParser(
        prog=name,
        usage="%(prog)s RECEIPTS.jsonl|FILE.recording [MODEL] [options]",
        allow_abbrev=False,
        description="Derive the tokens of receipts again, or compute recorded steps again, and tell where they differ.",
    )
    parser.add_argument("input", metavar="FILE", help="a receipt, or an answer that has some, in each line; or a recording; - is stdin")
    add_model(parser, "MODEL", "a Hugging Face id, a directory, or demo (the default), that the receipts are of")
    parser.add_argument("--public-key", metavar="HEX", help="only receipts that this Ed25519 key has signed count")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each receipt")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help=f"sequences under way (default: {AT_ONCE})")
    parser.add_argument("--save", metavar="PATH", help="of receipts: at the first difference write a recording of the latest steps")
    parser.add_argument("--bisect", metavar="PYTHON", help="of a recording: the first step that this Python's aengine gives otherwise")
    parser.add_argument("--digests", metavar="PATH", help="of a recording: write a digest of what each step gives, its KV included")
    parser.add_argument("--hang-seconds", type=float, default=60.0, metavar="S", help="a recorded step that takes longer hangs (60)")
    add_general(parser, partial(build_parser, name, whole=True))
    add_options(parser, ENGINE_OPTIONS, COMMON, whole=whole, help_of=lambda option: option.help.replace("%", "%%"))
    return parser


def _run(given: argparse.Namespace) -> int:
    if given.at_once < 1:
        raise ConfigError.of("at_once", f"{given.at_once} is not at least 1")
    flags = engine_flags(given)
    if given.input != "-" and is_recording(given.input):
        return _replay_steps(given, flags)
    receipts = list(read_receipts(given.input))
    if not receipts:
        raise ConfigError.of("input", f"{given.input} has no receipts")
    return asyncio.run(_replay_all(given, flags, receipts))


def read_receipts(path: str) -> Iterator[Receipt]:
    """The receipts of a file, wherever they stand in its lines. Raises `ConfigError` (input), naming the line, for what is none."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("input", f"{path} cannot be read: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = list(_receipts_in(json.loads(line)))
            if not found:
                raise ValueError("has no receipt")
            yield from (Receipt.from_json(one) for one in found)
        except (ValueError, RecursionError) as error:
            raise ConfigError.of("input", f"{path}, line {number} {error}") from None


def _receipts_in(value: Any) -> Iterator[str]:
    """The receipts of an answer: its own, or those of the answer that it holds, as lines of batches do."""
    if isinstance(value, Mapping):
        if "aengine_receipt" in value:
            yield json.dumps(value)
            return
        for name, one in value.items():
            if name in ("receipts", "receipt") and one:
                yield from (one,) if isinstance(one, str) else one
            else:
                yield from _receipts_in(one)


async def _replay_all(given: argparse.Namespace, flags: Mapping[str, Any], receipts: Sequence[Receipt]) -> int:
    start = time.monotonic()
    async with engine_of(flags) as engine:
        replay = ReceiptReplay(engine)
        for line in replay.warnings(receipts):
            print(line, file=sys.stderr)
        counts, shown = Counter[Verdict](), 0

        def tell(outcome: Outcome) -> None:
            nonlocal shown
            counts[outcome.verdict] += 1
            if given.json:
                print(outcome.to_json(), flush=True)
            elif outcome.verdict is not Verdict.SAME and shown < MOST_SHOWN:
                shown += 1
                print(f"{outcome.request_id}: {outcome.verdict.value}: {outcome.difference or outcome.reason}")

        work = [partial(replay.outcome, receipt, given.public_key) for receipt in receipts]
        outcomes = await run_all(work, given.at_once, tell)
        if given.save is not None and counts[Verdict.DIFFERS]:
            first = next(at for at, one in enumerate(outcomes) if one.verdict is Verdict.DIFFERS)
            await replay.outcome(receipts[first])  # once more, so that its steps are the latest
            print(f"{await engine.save_recording(given.save)} steps are in {given.save}", file=sys.stderr)
    seconds, tokens = time.monotonic() - start, sum(one.num_tokens for one in outcomes)
    told = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict] or verdict is Verdict.SAME)
    print(f"{len(receipts)} receipts: {told}; {tokens} tokens in {seconds:.1f} s", file=sys.stderr)
    return 0 if counts[Verdict.SAME] and not counts[Verdict.DIFFERS] and not counts[Verdict.UNSIGNED] else 1


class ReceiptReplay:
    """Derives receipts again with one engine, which is started."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._adapters = {adapter.name: adapter.key for adapter in engine.adapters}
        self._parts = engine.engine_info.fingerprint_parts

    def warnings(self, receipts: Sequence[Receipt]) -> list[str]:
        """A line for each thing that is not here as it was where the receipts were made."""
        differs: Counter[tuple[str, str, str]] = Counter()
        for receipt in receipts:
            for name in sorted({*receipt.model, *self._parts} - {*_NO_BITS}):
                told, here = receipt.model.get(name, "none"), self._parts.get(name, "none")
                differs[name, told, here] += told != here
        found = [(*key, count) for key, count in sorted(differs.items()) if count]
        return [f"warning: {name} is {here} here, and {told} in {count} receipts" for name, told, here, count in found]

    async def outcome(self, receipt: Receipt, public_key: str | None = None) -> Outcome:
        """`public_key`: that must have signed it; None: it need not be signed."""
        if public_key is not None and not receipt.is_signed_by(public_key):
            return Outcome(receipt.request_id, Verdict.UNSIGNED, reason="it is not signed by the key, or not as it is here")
        reason = receipt.why_not_replayed
        if receipt.adapter and self._adapters.get(receipt.adapter) != receipt.adapter_number:
            is_there = receipt.adapter in self._adapters
            reason = f"adapter {receipt.adapter!r} is {'another one here' if is_there else 'not loaded: give it with --adapters'}"
        if reason:
            return Outcome(receipt.request_id, Verdict.SKIPPED, reason=reason)
        num_tokens = 0
        for index, output in enumerate(receipt.outputs):
            if output is None or len(output.token_ids) == output.num_known:
                continue
            try:
                completion = await self._completion(receipt, index, output)
            except AEngineError as error:
                return Outcome(receipt.request_id, Verdict.SKIPPED, num_tokens, reason=f"output {index}: {error}")
            num_tokens += len(completion.token_ids)
            if (difference := await self._difference(receipt, index, output, completion)) is not None:
                return Outcome(receipt.request_id, Verdict.DIFFERS, num_tokens, difference)
        return Outcome(receipt.request_id, Verdict.SAME, num_tokens)

    async def _completion(self, receipt: Receipt, index: int, output: ReceiptOutput) -> Completion:
        params = receipt.params.of_sequence(index)
        if output.finish_reason in _FROM_OUTSIDE:
            count = len(output.token_ids)
            params = replace(params, max_tokens=count, min_tokens=min(params.min_tokens, count))
        known = [output.token_ids[: output.num_known]] if output.num_known else None
        return await self._engine.generate(receipt.prompt, params, known_outputs=known, adapter=receipt.adapter or None)

    async def _difference(self, receipt: Receipt, index: int, output: ReceiptOutput, completion: Completion) -> Difference | None:
        start, told, found = output.num_known, output.token_ids[output.num_known :], completion.token_ids
        at = next((i for i, (one, other) in enumerate(zip(told, found, strict=False)) if one != other), min(len(told), len(found)))
        if output.logprobs is not None and completion.logprobs is not None:
            for i, (one, entry) in enumerate(zip(output.logprobs[:at], completion.logprobs, strict=False)):
                if _bits(one) != _bits(entry.logprob):
                    return Difference(index, start + i, "logprob", one, entry.logprob, abs(one - entry.logprob))
        if at < len(told) and at < len(found):
            gap = await self._gap(receipt, output.token_ids[: start + at], told[at], found[at])
            return Difference(index, start + at, "token", told[at], found[at], gap)
        if len(told) != len(found):
            ends = [token[at] if at < len(token) else "the end" for token in (told, found)]
            return Difference(index, start + at, "token", ends[0], ends[1])
        if output.finish_reason in _FROM_OUTSIDE or output.finish_reason is completion.finish_reason:
            return None
        reasons = [reason and reason.value for reason in (output.finish_reason, completion.finish_reason)]
        return Difference(index, start + at, "finish_reason", reasons[0], reasons[1])

    async def _gap(self, receipt: Receipt, before: Sequence[int], told: int, found: int) -> float:
        """How far the logprobs of two tokens behind `before` are apart."""
        scores = await self._engine.score([*receipt.prompt, *before], [[told], [found]], adapter=receipt.adapter or None)
        return abs(scores[0].logprob - scores[1].logprob)


def _bits(logprob: float) -> bytes:
    return struct.pack("<f", logprob)


# ---- recordings -----------------------------------------------------------------------------------------------------------


def is_recording(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"\x1f\x8b"  # of gzip
    except OSError:
        return False


def _replay_steps(given: argparse.Namespace, flags: Mapping[str, Any]) -> int:
    from aengine.engine.recorder import Recording

    try:
        recording = Recording.read_file(given.input)
    except (OSError, ValueError) as error:
        raise ConfigError.of("input", f"{given.input} {error}") from None
    if given.bisect is not None:
        return _bisect(given)
    from aengine.engine.step_replay import StepReplay, decisions_of, load_recorded

    given_engine = read_settings(flags, {}).engine
    overrides = {name: getattr(given_engine, name) for name in flags}
    numbers = [plan.step for plan, *_ in recording.plans]
    ends = f"; then it failed: {recording.failure}" if recording.failure else ""
    print(f"{len(numbers)} steps{f', {numbers[0]} to {numbers[-1]}' if numbers else ''}{ends}", file=sys.stderr)
    loaded = load_recorded(recording, **overrides)
    try:
        here = {**loaded.facts, "weights": loaded.runner.weights_digest}
        for name in sorted({*here, *recording.parts}):
            if here.get(name) != recording.parts.get(name):
                print(f"warning: {name} is {here.get(name)} here, and {recording.parts.get(name)} in the recording", file=sys.stderr)
        try:
            replay = StepReplay(recording, loaded)
        except ValueError as error:
            raise ConfigError.of("input", str(error)) from None
        if replay.is_whole:
            for number, field in decisions_of(recording, loaded):
                if field:
                    print(f"step {number}: the scheduler plans something else: {field}")
                    return 1
        return _compute(replay, numbers, given, recording.failure)
    finally:
        loaded.runner.close()


def _compute(replay: StepReplay, numbers: Sequence[int], given: argparse.Namespace, failure: str) -> int:
    """Returns the exit code."""
    began, at, ended = time.monotonic(), 0, threading.Event()

    def watch() -> None:
        while not ended.wait(min(1.0, given.hang_seconds)):
            if time.monotonic() - began > given.hang_seconds:
                print(f"step {numbers[at]} hangs: it takes more than {given.hang_seconds:g} s", flush=True)
                os._exit(1)  # the step cannot be ended

    threading.Thread(target=watch, daemon=True).start()
    start = time.monotonic()
    try:
        with ExitStack() as stack:
            digests = None if given.digests is None else stack.enter_context(open(given.digests, "w", encoding="ascii"))
            for step in replay.steps(digests=digests is not None):
                began, at = time.monotonic(), min(at + 1, len(numbers) - 1)
                if digests is not None:
                    print(step.number, step.digest or "raised", file=digests, flush=True)
                if given.json:
                    print(json.dumps({"step": step.number, "difference": str(step.difference or "") or None}), flush=True)
                if step.error is not None:
                    again = " again" if f"{type(step.error).__name__}: {step.error}" == failure else ""
                    print(f"step {step.number} fails{again}: {type(step.error).__name__}: {step.error}")
                    return 1
                if step.difference is not None and digests is None:
                    print(f"step {step.number}: {step.difference}")
                    return 1
    finally:
        ended.set()
    print(f"{len(numbers)} steps give the same, in {time.monotonic() - start:.1f} s", file=sys.stderr)
    return 0


def _resolved(path: str) -> str:
    """A path as it is found from any directory; other names as they are."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def _bisect(given: argparse.Namespace) -> int:
    """The first step at which two releases differ: each computes all of them in a process of its own."""
    pythons, named = (sys.executable, _resolved(given.bisect)), getattr(given, "model", None)
    model = [] if named is None else [_resolved(named)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("here", "there")]
        for python, file in zip(pythons, files, strict=True):
            command = [python, "-m", "aengine.terminal.replay", str(Path(given.input).resolve()), *model, "--digests", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
            if not file.exists() or (done.returncode and not file.read_text()):
                raise ConfigError.of("bisect", f"{python} computes no step: {(done.stderr or done.stdout).strip()[-300:]}")
        ours, theirs = (file.read_text().splitlines() for file in files)
    for one, other in zip_longest(ours, theirs):
        if one != other:
            step = (one or other or "").split()[0]
            print(f"step {step} is the first that differs: {one or 'nothing'} here, {other or 'nothing'} with {given.bisect}")
            return 1
    print(f"{len(ours)} steps give the same with both", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
