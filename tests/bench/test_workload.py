"""Workloads: sizes, sharing, order and arrival times, all from the seed."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from pathlib import Path

import pytest

from aengine.api.params import SamplingParams
from aengine.bench.load_run import (
    NANO_TEMPERATURE,
    EngineTarget,
    Item,
    LengthRange,
    Lengths,
    arriving,
    multi_turn,
    nano_vllm,
    random_lengths,
    shared_prefix,
    trace,
)

LENGTHS = Lengths(50, LengthRange(10, 20), LengthRange(3, 7), vocab_size=100, seed=1)


def test_random_lengths_keep_their_ranges_and_follow_the_seed() -> None:
    items = random_lengths(LENGTHS)
    assert len(items) == 50
    assert {len(item.prompt) for item in items} <= set(range(10, 21))
    assert {item.output_tokens for item in items} == set(range(3, 8))
    assert all(10 <= token < 100 for item in items for token in item.prompt)
    assert items == random_lengths(LENGTHS)
    assert items != random_lengths(Lengths(50, LengthRange(10, 20), LengthRange(3, 7), vocab_size=100, seed=2))


def test_equal_ends_are_a_fixed_length() -> None:
    items = random_lengths(Lengths(5, LengthRange.parse("16"), LengthRange.parse("4-4"), vocab_size=100))
    assert {(len(item.prompt), item.output_tokens) for item in items} == {(16, 4)}


@pytest.mark.parametrize("text", ["0", "5-4", "x", "-3", ""])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        LengthRange.parse(text)


def test_prefixes_are_shared_in_turn() -> None:
    items = shared_prefix(LENGTHS, prefix_len=8, num_prefixes=2)
    heads = [item.prompt[:8] for item in items]
    assert heads[0] == heads[2] != heads[1] == heads[3]
    assert [item.prompt[8:] for item in items] == [item.prompt for item in random_lengths(LENGTHS)]


def test_turns_follow_each_other() -> None:
    items = multi_turn(Lengths(2, LengthRange(4, 4), LengthRange(2, 2), 100), num_turns=3)
    assert [item.after for item in items] == [None, 0, 1, None, 3, 4]


def test_the_nano_workload_is_the_published_one() -> None:
    """What `random` draws after `seed(0)` in nano-vllm's bench.py."""
    items = nano_vllm(256, vocab_size=151_936)
    assert (sum(len(item.prompt) for item in items), sum(item.output_tokens for item in items)) == (142_827, 133_966)
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    assert [(list(item.prompt), item.output_tokens) for item in items] == list(zip(prompts, outputs, strict=True))
    assert nano_vllm(3, 4096) == [Item(tuple(token % 4096 for token in item.prompt), item.output_tokens) for item in items[:3]]
    for count in (0, 257):
        with pytest.raises(ValueError, match="1 to 256"):
            nano_vllm(count, 4096)


def test_arrivals_have_the_rate() -> None:
    items = arriving([Item((1,), 1)] * 4000, rate=10.0)
    gaps = [after.arrival - before.arrival for before, after in itertools.pairwise(items)]
    assert items[0].arrival == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(0.1, rel=0.15)  # of a Poisson process: as large as the mean
    even = arriving([Item((1,), 1)] * 4000, rate=10.0, burstiness=100.0)
    assert statistics.pstdev([b.arrival - a.arrival for a, b in itertools.pairwise(even)]) < 0.02
    assert {item.arrival for item in arriving(items[:9], rate=float("inf"))} == {0.0}


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100.5, "input_length": 4, "output_length": 2}, {"timestamp": 100.0, "input_length": 3, "output_length": 1}]
    path.write_text("\n".join(map(json.dumps, reversed(rows))) + "\n\n")
    items = trace(path, vocab_size=50)
    assert [(item.arrival, len(item.prompt), item.output_tokens) for item in items] == [(0.0, 3, 1), (0.5, 4, 2)]


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"timestamp": 0, "input_length": 0, "output_length": 1}'])
def test_a_trace_that_is_none_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        trace(path, vocab_size=50)


def test_an_engine_is_asked_at_the_temperature_of_the_workload() -> None:
    class Engine:
        def __init__(self) -> None:
            self.asked: list[SamplingParams] = []

        def stream(self, prompt: list[int], params: SamplingParams) -> None:
            self.asked.append(params)
            raise LookupError

    async def ask(target: EngineTarget) -> None:
        with pytest.raises(LookupError):
            await anext(target.send([1, 2], 3))

    engine = Engine()
    asyncio.run(ask(EngineTarget(engine)))
    asyncio.run(ask(EngineTarget(engine, NANO_TEMPERATURE)))
    greedy, nano = engine.asked
    assert (greedy.temperature, nano.temperature) == (0.0, 0.6)
    assert (nano.top_k, nano.top_p, nano.min_p, nano.max_tokens, nano.ignore_eos) == (0, 1.0, 0.0, 3, True)
