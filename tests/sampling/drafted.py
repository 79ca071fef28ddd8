"""Sequences whose tokens are sampled with drafts and without, on any device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from tensor_sampler import tensor_sampler

from aengine.runner.torch.sampling import ResultBuffer
from aengine.scheduler.plan import NewRow, RowParams

VOCAB_SIZE = 70
LIKELY = 6  # ids below this, among which those that limits are about
CPU = torch.device("cpu")
STOPS = (3, 40)
END = 4


@dataclass
class Sequence:
    row: int
    params: RowParams
    seed: int
    tokens: list[int]
    prompt_len: int
    output: list[tuple[object, ...]] = field(default_factory=list)  # tokens with logprobs; at last why it failed
    failed: bool = False
    num_accepted: int = 0

    def logits(self, position: int) -> torch.Tensor:
        logits = np.random.default_rng((self.seed, position)).normal(0, 2, VOCAB_SIZE).astype(np.float32)
        logits[:LIKELY] += 4.0
        return torch.from_numpy(logits)


class NotTwice:
    """A processor with a state: it is to be called once for each token."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, logits: torch.Tensor, token_ids: list[int]) -> None:
        self.shown.append(token_ids)
        logits[token_ids[-1]] = -torch.inf
        if len(self.shown) > 12:
            raise ValueError("called too often")


def random_params(rng: random.Random, key: int, grammars: SequenceOf[object]) -> RowParams:
    some = lambda share, value, off: value if rng.random() < share else off  # noqa: E731
    return RowParams(
        temperature=rng.choice([0.0, 0.8, 1.5]),
        top_k=rng.choice([0, 4]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=some(0.3, 0.05, 0.0),
        seed=key,
        presence_penalty=some(0.3, 0.7, 0.0),
        frequency_penalty=some(0.3, 0.9, 0.0),
        repetition_penalty=some(0.3, 1.4, 1.0),
        logit_bias=some(0.3, ((rng.randrange(8), 3.0), (END, -2.0)), ()),
        allowed_token_ids=some(0.1, tuple(range(0, VOCAB_SIZE, 1 + rng.randrange(2))), None),
        bad_words=some(0.4, ((0, 0), (1, 3, 0), (rng.randrange(8),)), ()),
        min_tokens=some(0.4, rng.randint(1, 9), 0),
        stop_ids=STOPS,
        logprobs=some(0.4, 2, None),
        processors=some(0.2, (NotTwice(),), ()),
        grammar=some(0.7, rng.choice(grammars), None),
    )


def random_sequences(seed: int, grammars: SequenceOf[object]) -> list[Sequence]:
    rng = random.Random(seed)
    rows = rng.sample(range(9), rng.randint(1, 5))
    prompts = [[rng.randrange(8) for _ in range(rng.randint(1, 5))] for _ in rows]
    return [
        Sequence(row, random_params(rng, 1000 * seed + row, grammars), 1000 * seed + row, prompt, len(prompt))
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def run(sequences: list[Sequence], steps: Iterator[dict[int, list[int]]], length: int, device: torch.device = CPU) -> None:
    """Samples until all have `length` tokens or failed. `steps`: the drafts of each step by row."""
    sampler, buffer = tensor_sampler(9, VOCAB_SIZE, device), ResultBuffer(200, device)
    sampler.update([NewRow(one.row, one.params, one.prompt_len, np.array(one.tokens, np.int32)) for one in sequences])
    while going := [one for one in sequences if not one.failed and len(one.output) < length]:
        drafts = {one.row: [] for one in going} | next(steps)
        going = [one for one in going if one.row in drafts]
        rows = np.array([one.row for one in going for _ in range(1 + len(drafts[one.row]))], np.int32)
        positions = np.array([len(one.tokens) + i for one in going for i in range(1 + len(drafts[one.row]))], np.int32)
        logits = torch.stack([one.logits(len(one.tokens) + i) for one in going for i in range(1 + len(drafts[one.row]))])
        given = np.array([draft for one in going for draft in (*drafts[one.row], -1)], np.int32) if any(drafts.values()) else None
        on_device = (torch.from_numpy(array).to(device) for array in (rows, positions))
        sampled, _ = buffer.copy(sampler.sample(logits.to(device), rows, positions, *on_device, given), None)
        assert sampled is not None
        buffer.wait()
        failures = sampler.observe(sampled)
        accepted = [1] * len(going) if sampled.accepted is None else sampled.accepted.tolist()
        lines = [] if sampled.logprob_rows is None else sampled.logprob_rows.tolist()
        first = 0
        for one, count in zip(going, accepted, strict=True):
            for index in range(first, first + count if one.row not in failures else first):
                token = int(sampled.tokens[index])
                one.tokens.append(token)
                scores: tuple[object, ...] = ()
                if one.params.logprobs is not None:
                    scores = tuple(column[lines.index(index)].tolist() for column in sampled.logprobs)  # type: ignore[union-attr]
                one.output.append((token, *scores))
            one.num_accepted += max(0, count - 1)
            if one.row in failures:
                one.failed = True
                one.output.append((str(failures[one.row]),))
            first += 1 + len(drafts[one.row])


def random_drafts(rng: random.Random, sequences: list[Sequence], known: dict[int, list[int]]) -> Iterator[dict[int, list[int]]]:
    """Right, wrong and half right ones."""
    while True:
        drafts = {}
        for one in sequences:
            right = known[one.row][len(one.tokens) :][: rng.randrange(7)]
            if right and rng.random() < 0.4:
                right[-1] = rng.randrange(8)
            drafts[one.row] = right + [rng.randrange(8)] * rng.randrange(2)
        yield drafts
