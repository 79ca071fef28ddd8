"""Train the bundled model with TRL's GRPOTrainer, whose rollouts come from an engine in its process: python examples/trl_grpo.py [STEPS]

Needs `pip install trl`. TRL's forward pass is that of Transformers, so its logprobs are near those of the sampled tokens (float32: 1e-5)
and not equal to the last bit, as they are in examples/grpo.py.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from aengine import LLM, SamplingParams
from aengine.models.loading.hub import resolve_model

PROMPTS = ("It is a truth", "In the beginning", "She was not at all", "And it came to pass")
GROUP = 8  # rollouts of one prompt
TOKENS = 24


def rewards_of(completions: list[str], **_: Any) -> list[float]:
    """The share of letters that are an "e"."""
    letters = [[letter for letter in text.lower() if letter.isalpha()] for text in completions]
    return [each.count("e") / max(1, len(each)) for each in letters]


class Rollouts:
    """TRL's `rollout_func`: completions of an engine that has the weights of the trainer's model."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._step = 0  # whose weights the engine has

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        if trainer.state.global_step != self._step:
            self._step = trainer.state.global_step
            self._llm.call(lambda engine: engine.update_weights(dict(trainer.model.named_parameters())))
        params = [
            SamplingParams(max_tokens=TOKENS, temperature=1.0, top_p=1.0, logprobs=0, ignore_eos=True, seed=1000 * self._step + number)
            for number in range(len(prompts))
        ]
        completions = self._llm.generate(prompts, params, progress=False)
        return {
            "prompt_ids": [list(self._llm.call(lambda engine, text=text: engine.tokenize(text))) for text in prompts],  # type: ignore[misc]
            "completion_ids": [list(one.token_ids) for one in completions],
            "logprobs": [[each.logprob for each in one.logprobs or ()] for one in completions],
        }


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """Notes how far TRL's logprobs are from those of the sampled tokens."""

    largest = 0.0

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        with torch.no_grad():
            ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), dim=1)
            mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), dim=1)
            trained = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]
        apart = ((trained - inputs["sampling_per_token_logps"]) * inputs["completion_mask"]).abs().max()
        self.largest = max(self.largest, float(apart))
        return super()._compute_loss(model, inputs)


def main(num_steps: int = 40) -> tuple[list[float], float]:
    """Returns the mean reward of each step, and the largest difference between a logprob of TRL's and that of the sampled token."""
    folder = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as output, LLM("demo", dtype="float32", kv_cache_memory=64 << 20) as llm:
        trainer = Trainer(
            model=model,
            reward_funcs=rewards_of,
            args=GRPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,  # TRL would compute in it
                max_steps=num_steps,
                per_device_train_batch_size=GROUP,
                num_generations=GROUP,
                max_completion_length=TOKENS,
                learning_rate=2e-4,
                lr_scheduler_type="constant",
                beta=0.0,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": PROMPTS[number % len(PROMPTS)]} for number in range(num_steps)]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_func=Rollouts(llm),
        )
        trainer.train()
        rewards = [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]
    for first in range(0, len(rewards), 10):
        print(f"steps {first + 1} to {first + 10}: reward {sum(rewards[first : first + 10]) / len(rewards[first : first + 10]):.3f}")
    print(f"max |logp_train - logp_rollout| = {trainer.largest:.2e}")
    return rewards, trainer.largest


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
