"""From the columns of a step's logprobs to the `TokenLogprob` of a token. Pure functions."""

from __future__ import annotations

from aengine.outputs import TokenLogprob
from aengine.scheduler import PromptLogprobs, TokenLogprobs


def token_logprob(token_id: int, columns: TokenLogprobs, i: int, num_top: int) -> TokenLogprob:
    """The i-th token of `columns`, with its `num_top` most likely alternatives."""
    return TokenLogprob(
        token_id,
        float(columns.token_logprobs[i]),
        int(columns.ranks[i]),
        dict(zip(columns.top_ids[i, :num_top].tolist(), columns.top_logprobs[i, :num_top].tolist(), strict=True)),
    )


def add_prompt_logprobs(known: list[TokenLogprob | None], token_ids: list[int], piece: PromptLogprobs, num_top: int) -> None:
    """Extend `known`, whose i-th entry belongs to the i-th token of the prompt, by the new positions of `piece`.

    A prompt that was preempted is computed again from its start, so pieces may repeat positions.
    """
    for i in range(len(known) - piece.start, len(piece.logprobs.token_logprobs)):
        known.append(token_logprob(token_ids[piece.start + i], piece.logprobs, i, num_top))
