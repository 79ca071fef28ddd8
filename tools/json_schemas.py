"""Counts the JSON Schemas in a folder that are enforced, and checks random outputs of them with jsonschema.

    python tools/json_schemas.py FOLDER [--sample N] [--outputs N] [--tokens N] [--exact-one-of]

A .json file below the folder is a schema, or a list of cases as in the JSON-Schema-Test-Suite, whose tests are tried too. The tokens are
those of the bundled model, chosen at random among those that the grammar allows.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

import aengine
from aengine.api.errors import InvalidRequestError
from aengine.api.params import StructuredOutput
from aengine.sampling.grammar import CompiledGrammar
from aengine.structured.grammars import GrammarCompiler
from aengine.tokenizer.tokenizer import Tokenizer
from aengine.tokenizer.vocabulary import ids_within, read_vocabulary, text_of_tokens

EOS = 4095


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, help="so many files, chosen at random; default: all")
    parser.add_argument("--outputs", type=int, default=1, help="random outputs of each schema (default 1)")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of an output; longer ones are not judged (default 200)")
    parser.add_argument("--exact-one-of", action="store_true")
    options = parser.parse_args()
    files = sorted(options.folder.rglob("*.json"))
    draw = random.Random(0)
    if options.sample is not None and options.sample < len(files):
        files = draw.sample(files, options.sample)
    tokenizer = Tokenizer.load(Path(aengine.__file__).parent / "models" / "demo_model")
    compiler = GrammarCompiler(
        partial(read_vocabulary, tokenizer, EOS + 1), (EOS,), text_of_tokens(tokenizer), partial(ids_within, tokenizer)
    )
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for name, schema, tests in _cases(files):
        counts["schemas"] += 1
        wanted = StructuredOutput(json_schema=json.dumps(schema), exact_one_of=options.exact_one_of)
        try:
            compiled = compiler.compile(wanted).result()
        except InvalidRequestError as error:
            reasons[re.sub(r"#/\S*|'[^']*'|\d+", "_", error.violations[0].description)[:100]] += 1
            continue
        counts["enforced"] += 1
        validator = _validator(schema)
        for test in tests:
            counts["valid instances"] += test["valid"]
            accepted = _accepts(compiled, json.dumps(test["data"]))
            counts["valid instances that can be written"] += test["valid"] and accepted
            if accepted and not test["valid"] and _is_valid(validator, test["data"]) is False:
                print(f"accepted, and not valid: {name}: {test['data']!r}")
        for _ in range(options.outputs):
            text = _random_output(compiled, tokenizer, draw, options.tokens)
            if text is not None and (valid := _is_valid(validator, json.loads(text, parse_float=Decimal))) is not None:
                counts["outputs"] += 1
                counts["valid outputs"] += valid
                if not valid:
                    print(f"not valid: {name}: {text}")
    for key, num in counts.items():
        print(f"{num:7} {key}")
    print(f"{counts['enforced'] / counts['schemas']:7.1%} of the schemas are enforced")
    for reason, num in reasons.most_common():
        print(f"{num:7} {reason}")


def _cases(files: list[Path]) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    for file in files:
        content = json.loads(file.read_text("utf-8"))
        if isinstance(content, list):
            for case in content:
                yield f"{file.name}: {case['description']}", case["schema"], case["tests"]
        else:
            yield file.name, content, []


def _validator(schema: Any) -> Any:
    exact = json.loads(json.dumps(schema), parse_float=Decimal)  # so that multiples are
    default = jsonschema.Draft202012Validator
    kind = jsonschema.validators.validator_for(schema, default=default)
    return kind(exact, format_checker=default.FORMAT_CHECKER)


def _is_valid(validator: Any, value: object) -> bool | None:
    """None if it cannot be told: the schema is not one, or has expressions that Python's have no words for."""
    try:
        return bool(validator.is_valid(value))
    except Exception:
        return None


def _accepts(compiled: CompiledGrammar, text: str) -> bool:
    """Whether the longest tokens that are allowed write the text."""
    matcher, texts, left = compiled.start(), compiled.texts, text.encode()
    while left:
        allowed = np.flatnonzero(matcher.allowed(len(texts))).tolist()
        fitting = [token for token in allowed if texts[token] and left.startswith(texts[token])]
        if not fitting:
            return False
        token = max(fitting, key=lambda token: len(texts[token]))
        matcher.accept(token)
        left = left[len(texts[token]) :]
    return bool(matcher.allowed(len(texts))[EOS])


def _random_output(compiled: CompiledGrammar, tokenizer: Tokenizer, draw: random.Random, most: int) -> str | None:
    matcher = compiled.start()
    ids: list[int] = []
    while len(ids) < most:
        allowed = np.flatnonzero(matcher.allowed(len(compiled.texts)))
        if not len(allowed):
            raise RuntimeError(f"nothing can follow {tokenizer.decode(ids)!r}")
        chosen = EOS if EOS in allowed and draw.random() < 0.3 else int(draw.choice(allowed))
        if matcher.accept(chosen):
            return tokenizer.decode(ids)
        ids.append(chosen)
    return None


if __name__ == "__main__":
    main()
