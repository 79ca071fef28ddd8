"""Expressions of a quantization_config against Python's `re`, and those that `re` would never be done with."""

from __future__ import annotations

import random
import re

import pytest

from aengine.api.errors import ModelLoadError
from aengine.models.quantization import scheme
from aengine.models.quantization.quantization_config import read_quantization
from aengine.models.quantization.scheme import Expression

PATTERNS = [
    r".*a.*b.*c.*x.*",
    r"(?:re.*(?:x|y)+z?)+",
    r"^model\.layers\.(?:\d+)\.(?!mlp).*\.[qkv]_proj.*",
    r"(?:.*\.)?(?:lm_head)(?:\..*)?",
    r"(a|b)*?c{2,4}.*",
    r"(?<!x)a*.*[^b-d].*$",
    r"(?:.*mlp.*experts.*).*",
]
NAMES = [f"model.layers.{i}.{block}.{one}_proj" for i in (0, 13) for block in ("self_attn", "mlp", "mlp.experts.3") for one in "qkvg"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_against_re(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    names = [*NAMES, "lm_head", "model.lm_head.x", "", *("".join(rng.choices("abcxyz.re", k=rng.randrange(9))) for _ in range(200))]
    found = Expression(pattern)
    monkeypatch.setattr(scheme, "_MOST_CHOICES", -1)
    followed = Expression(pattern)
    assert not followed._is_quick
    for name in names:
        assert found.matches(name) is followed.matches(name) is (re.fullmatch(pattern, name) is not None), name


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*)*b", ".*.*.*.*.*.*.*.*.*b", "(a?){40}b", "((a*)*)*b"])
def test_what_re_is_never_done_with(pattern: str) -> None:
    name = "a" * 30
    quantization = read_quantization(
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {f"-:{pattern}": {}}}}
    )
    assert quantization is not None
    assert quantization.scheme(name) is not None
    assert quantization.scheme(name + "b") is None


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern, why in {
        "(": "is not a regular expression",
        "(?:" * 300 + ")" * 300: "more than 1000 characters",
        "a{99999999999999999999}": "is not a regular expression",
        r"(?:(a)\1)+": "beside groupref, which is not supported",
        "(?i)(a+)+": "has flags",
    }.items():
        with pytest.raises(ModelLoadError, match=f"^quantization_config has '.*', which .*(?:{why})"):
            Expression(pattern).matches("aaaa")
    monkeypatch.setattr(scheme, "_MOST_STEPS", 500)
    many = {"quant_method": "gptq", "bits": 4, "group_size": 32, "modules_to_not_convert": [f"(a+)+{i}" for i in range(9)]}
    few = read_quantization({"quantization_config": {**many, "modules_to_not_convert": ["(a+)+0"]}})
    assert few is not None
    assert few.scheme("a" * 9) is not None
    quantization = read_quantization({"quantization_config": many})
    assert quantization is not None
    with pytest.raises(ModelLoadError, match="takes too long to compare"):
        quantization.scheme("a" * 9)
    monkeypatch.setattr(scheme, "_MOST_STEPS", 100)
    with pytest.raises(ModelLoadError, match="takes too long to compare"):
        Expression("(a+)+b").matches("a" * 1000)
