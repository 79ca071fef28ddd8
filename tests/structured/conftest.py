"""The tokenizer that the tests of grammars share."""

from __future__ import annotations

from pathlib import Path

import pytest

import aengine
from aengine.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(aengine.__file__).parent / "models" / "demo_model")
