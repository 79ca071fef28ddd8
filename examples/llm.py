"""Prompts of a file, or some, in a program without an event loop: python examples/llm.py [MODEL] [FILE with a prompt in each line]"""

import sys

from aengine import LLM, SamplingParams

model, *files = sys.argv[1:] or ["demo"]
prompts = ["It is a truth universally", "My dear Mr. Bennet", "What is his name?"]
if files:
    with open(files[0], encoding="utf-8") as file:
        prompts = file.read().splitlines()

with LLM(model) as llm:
    for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=24, seed=1)), strict=True):
        print(f"{prompt!r}: {output.text!r}")
    for token in llm.stream(prompts[0], SamplingParams(max_tokens=24, seed=2)):
        print(token.text, end="", flush=True)
    print()
