"""What a configuration has drafts proposed by in the runner: another model, or a draft head."""

from __future__ import annotations

from dataclasses import replace

from aengine.errors import ConfigError
from aengine.models.choice import find_spec
from aengine.models.draft_heads import eagle_spec, mtp_spec
from aengine.models.hub import resolve_model
from aengine.models.model_config import load_spec
from aengine.models.spec import HeadKind, ModelSpec
from aengine.parallel.shard import WHOLE
from aengine.runner.setup import ExecutorSetup
from aengine.scheduler.drafter import DraftSource

_NOT_NATIVE = "the model runs in the code of transformers, where no hidden states are read"


def with_draft_model(setup: ExecutorSetup) -> ExecutorSetup:
    """With that of `EngineConfig.speculative` if there is one. Raises ModelLoadError, and ConfigError for one that is not possible."""
    config = setup.config
    if config.speculative in ("off", "ngram"):
        return setup
    named = "speculative_model" if config.speculative_model is not None else "speculative"
    draft, reason = _of_checkpoint(setup) if config.speculative_model is None else _of_directory(setup, config.speculative_model)
    head = None if draft is None else draft.native_spec.draft_head
    if head is not None and setup.shard.num_stages > 1:
        draft, reason = None, "it reads hidden states of all stages: choose pipeline_parallel_size 1"
    if draft is not None and None not in setup.groups.windows:
        draft, reason = None, "all layers of the model have windows"
    if draft is not None:
        reads_target = head is not None and setup.shard.size > 1 and not (head.own_embedding and head.own_head)
        return replace(setup, draft=replace(draft, target=setup if reads_target else None, is_draft=True, shard=WHOLE, ranks=None))
    if (named, config.speculative) == ("speculative", "auto"):
        return setup
    raise ConfigError.of(named, f"{getattr(config, named)!r} is not possible: {reason}")


def draft_source(setup: ExecutorSetup) -> DraftSource | None:
    if setup.draft is None:
        return None
    head = setup.draft.native_spec.draft_head
    return DraftSource.MODEL if head is None else DraftSource.MTP if head.kind is HeadKind.MTP else DraftSource.HEAD


def _of_checkpoint(setup: ExecutorSetup) -> tuple[ExecutorSetup | None, str]:
    """That of an MTP layer of the model; or None, and why there can be none."""
    if not isinstance(setup.spec, ModelSpec):
        return None, _NOT_NATIVE
    spec = mtp_spec(setup.model_dir, setup.spec, setup.config.load_format)
    if spec is None:
        return None, "the checkpoint carries no MTP layer of a kind that is supported"
    return replace(setup, spec=spec), ""


def _of_directory(setup: ExecutorSetup, model: str) -> tuple[ExecutorSetup | None, str]:
    config = setup.config
    model_dir = resolve_model(model, None, config.load_format)
    if config.speculative == "eagle" or (config.speculative == "auto" and load_spec(model_dir).draft_head is not None):
        if not isinstance(setup.spec, ModelSpec):
            return None, _NOT_NATIVE
        return replace(setup, spec=eagle_spec(model_dir, setup.spec, config.load_format), model_dir=model_dir), ""
    spec = find_spec(model_dir, "native", setup.max_model_len)
    if spec.max_position_embeddings < setup.max_model_len:
        lengths = f"{spec.max_position_embeddings} tokens, and sequences may have {setup.max_model_len}"
        return None, f"it has a context of {lengths}: lower max_model_len"
    return replace(setup, spec=spec, model_dir=model_dir), ""
