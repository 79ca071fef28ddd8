"""A custom logits processor: code of your own that changes what a request may say, here by forbidding a letter.

python examples/logits_processor.py e
"""

import asyncio
import sys

import torch

from aengine import AsyncEngine, SamplingParams


class Without:
    """Never choose a token whose text holds `letter`."""

    def __init__(self, letter: str, texts: list[str]) -> None:
        self.banned = torch.tensor([letter in text.lower() for text in texts])

    def __call__(self, logits: torch.Tensor, token_ids: list[int]) -> None:
        logits.masked_fill_(self.banned, float("-inf"))


async def main() -> None:
    letter = sys.argv[1] if len(sys.argv) > 1 else "e"
    async with AsyncEngine("demo") as engine:
        texts = [engine.tokenizer.decode([token_id]) for token_id in range(engine.model_info.vocab_size)]
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=48, logits_processors=(Without(letter, texts),))
        async for token in engine.stream("It is", params):
            print(token.text, end="", flush=True)
        print()


asyncio.run(main())
