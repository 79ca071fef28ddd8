"""Cases of dense decoders: Llama and what grew from it, Gemma, GLM, OLMo, Phi, Granite, Cohere."""

from __future__ import annotations

from family_cases import Case

SLIDING = "sliding_attention"
FULL = "full_attention"

CASES = [
    Case("llama", "Llama"),
    Case("mistral-windowed", "Mistral", {"sliding_window": 12}),
]
