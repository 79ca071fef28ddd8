"""Train the bundled model by GRPO, with the engine that samples in the same process: python examples/grpo.py [STEPS]

The reward is computed by a program: the share of letters of a continuation that are an "e". What training computes of the sampled tokens
is what the engine sampled them with, to the last bit, so the ratio of the two is 1 and nothing has to be corrected for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from aengine import LLM, Completion, SamplingParams
from aengine.torch_twin import TorchTwin

PROMPTS = ("It is a truth", "In the beginning", "She was not at all", "And it came to pass")
GROUP = 5  # rollouts of one prompt
TOKENS = 24


def reward_of(text: str) -> float:
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return letters.count("e") / max(1, len(letters))


def rollouts(llm: LLM, prompt: Sequence[int], seed: int) -> list[Completion]:
    params = SamplingParams(n=GROUP, seed=seed, max_tokens=TOKENS, temperature=1.0, top_p=1.0, logprobs=0, ignore_eos=True)
    first = llm.generate(list(prompt), params, progress=False)
    return [first, *first.others]


def main(num_steps: int = 200) -> tuple[list[float], float]:
    """Returns the mean reward of each step, and the largest difference between a logprob in training and in sampling."""
    rewards: list[float] = []
    largest = 0.0
    with LLM("demo", dtype="float32", kv_cache_memory=64 << 20) as llm:
        twin = TorchTwin(llm)
        optimizer = torch.optim.Adam(twin.parameters(), lr=2e-4)
        prompts = [llm.call(lambda engine, text=text: engine.tokenize(text)) for text in PROMPTS]  # type: ignore[misc]
        for step in range(num_steps):
            prompt = prompts[step % len(prompts)]
            group = rollouts(llm, prompt, step)
            scores = torch.tensor([reward_of(one.text) for one in group])
            advantages = (scores - scores.mean()) / (scores.std() + 1e-4)

            trained = twin([prompt] * GROUP, [one.token_ids for one in group])
            sampled = [torch.tensor([each.logprob for each in one.logprobs or ()]) for one in group]
            difference = max(float((ours.detach() - theirs).abs().max()) for ours, theirs in zip(trained, sampled, strict=True))
            largest = max(largest, difference)
            ratios = [(ours - theirs).exp() for ours, theirs in zip(trained, sampled, strict=True)]
            loss = -sum((ratio * advantage).mean() for ratio, advantage in zip(ratios, advantages, strict=True)) / GROUP

            optimizer.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            optimizer.step()
            twin.publish()
            rewards.append(float(scores.mean()))
            if step % 10 == 9:
                recent = sum(rewards[-10:]) / 10
                print(f"step {step + 1}: reward {recent:.3f}, max |logp_train - logp_rollout| = {difference}", flush=True)
    return rewards, largest


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
