"""What a scheduler is held to, and what it holds at a moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int  # >= max_num_seqs
    max_model_len: int
    num_pages: int  # the reserved page 0 included
    page_size: int
    enable_prefix_cache: bool = True
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    ageing_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    running: int
    waiting: int
    parked: int
    pages_used: int
    pages_total: int
    cached_tokens: int
    preemptions: int
    prompt_tokens: int  # of requests that began
    cached_prompt_tokens: int  # those of them that were found in the prefix cache
