"""What a configuration has drafts proposed by in the runner: another model, or a draft head."""

from __future__ import annotations

from dataclasses import replace

from aengine.errors import ConfigError
from aengine.models.choice import find_spec
from aengine.models.draft_heads import eagle_spec, mtp_spec
from aengine.models.hub import resolve_model
from aengine.models.model_config import load_spec
from aengine.models.spec import HeadKind, ModelSpec
from aengine.runner.setup import ExecutorSetup
from aengine.scheduler.drafter import DraftSource


def with_draft_model(setup: ExecutorSetup) -> ExecutorSetup:
    """With that of `EngineConfig.speculative` if there is one. Raises ModelLoadError, and ConfigError for one that is not possible."""
    config = setup.config
    if config.speculative in ("off", "ngram"):
        return setup
    named = "speculative_model" if config.speculative_model is not None else "speculative"
    value = getattr(config, named)
    if not isinstance(setup.spec, ModelSpec):
        if named == "speculative" and value == "auto":
            return setup
        raise ConfigError.of(named, f"{value!r} is not possible: the model runs in the code of transformers")
    if config.speculative_model is not None:
        draft = _of_directory(setup, setup.spec, config.speculative_model)
    else:
        spec = mtp_spec(setup.model_dir, setup.spec, config.load_format)
        if spec is None:
            if value == "auto":
                return setup
            raise ConfigError.of(named, "'mtp' is not possible: the checkpoint carries no MTP layer of a kind that is supported")
        draft = replace(setup, spec=spec)
    if None not in setup.groups.windows:
        raise ConfigError.of(named, f"{value!r} is not possible: all layers of the model have windows")
    return replace(setup, draft=replace(draft, is_draft=True))


def draft_source(setup: ExecutorSetup) -> DraftSource | None:
    if setup.draft is None:
        return None
    head = setup.draft.native_spec.draft_head
    return DraftSource.MODEL if head is None else DraftSource.MTP if head.kind is HeadKind.MTP else DraftSource.HEAD


def _of_directory(setup: ExecutorSetup, target: ModelSpec, model: str) -> ExecutorSetup:
    config = setup.config
    model_dir = resolve_model(model, None, config.load_format)
    if config.speculative == "eagle" or (config.speculative == "auto" and load_spec(model_dir).draft_head is not None):
        return replace(setup, spec=eagle_spec(model_dir, target, config.load_format), model_dir=model_dir)
    spec = find_spec(model_dir, "native", setup.max_model_len)
    if spec.max_position_embeddings < setup.max_model_len:
        lengths = f"{spec.max_position_embeddings} tokens, and sequences may have {setup.max_model_len}: lower max_model_len"
        raise ConfigError.of("speculative_model", f"{model!r} has a context of {lengths}")
    return replace(setup, spec=spec, model_dir=model_dir)
