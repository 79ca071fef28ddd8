"""From an `EngineConfig` to a loaded model: files, runner, tokenizer. Runs in the step thread, which will own the device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aengine.config import EngineConfig
from aengine.engine.tokenizer import Tokenizer
from aengine.outputs import ModelInfo
from aengine.params import SamplingParams
from aengine.runner.base import Runner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    runner: Runner
    tokenizer: Tokenizer
    info: ModelInfo


def load_model(config: EngineConfig) -> LoadedModel:
    """Raises `ModelLoadError`, `InsufficientMemoryError` or `ConfigError`."""
    # Imported here: the device side brings torch, and importing the engine should not.
    from aengine.models.hub import resolve_model
    from aengine.models.named_weights import num_parameters
    from aengine.runner.model_runner import ModelRunner

    model_dir = resolve_model(config.model, config.revision, weights=config.load_format != "dummy")
    with ThreadPoolExecutor(1, thread_name_prefix="aengine-load") as pool:  # beside the weights, large vocabularies take long
        tokenizer_future = pool.submit(Tokenizer.load, model_dir)
        runner = ModelRunner(config, model_dir)
        try:
            tokenizer = tokenizer_future.result()
        except BaseException:
            runner.close()
            raise
    info = ModelInfo(
        name=config.model,
        architecture=runner.spec.architecture,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        eos_token_ids=runner.generation.eos_token_ids,
        dtype=str(runner.dtype).removeprefix("torch."),
        num_parameters=num_parameters(runner.spec),
        chat_template=tokenizer.has_chat_template,
        generation_defaults=SamplingParams(**runner.generation.sampling),
        device=str(runner.device),
    )
    return LoadedModel(runner, tokenizer, info)
