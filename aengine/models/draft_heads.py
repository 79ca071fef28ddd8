"""Draft heads of a model: the EAGLE-3 head of a directory of its own, or the first MTP layer of the model's checkpoint.

Owns what makes a head fit its target. Knows nothing of how either is executed.
"""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aengine.api.errors import ConfigError, ModelLoadError
from aengine.models.config.model_config import load_spec
from aengine.models.families import FAMILIES
from aengine.models.loading.weights import open_weights
from aengine.models.named_weights import named_weights
from aengine.models.spec import DraftHead, HeadKind, ModelSpec
from aengine.models.text_part import read_text_config


def eagle_spec(head_dir: pathlib.Path, target: ModelSpec, load_format: str = "auto") -> ModelSpec:
    """That of an EAGLE-3 head for the `target`. It has an embedding and an output head of its own if its checkpoint has them.

    Without `eagle_aux_hidden_state_layer_ids` it taps the layers 2, n / 2 and n - 3 of the n of its target, as in the published code.
    Raises ModelLoadError, and ConfigError for what is no such head, or one of another model.
    """
    spec = load_spec(head_dir)
    head, num_layers = spec.draft_head, target.num_layers
    if head is None:
        raise _refused(head_dir, f"it is a whole model ({spec.architecture}), which speculative 'draft' takes")
    taps = head.taps or (2, num_layers // 2, num_layers - 3)
    dummy = load_format == "dummy"
    stored = set() if dummy else open_weights(spec, head_dir, load_format).tensors.keys()
    names = FAMILIES[spec.family].names
    head = replace(
        head,
        taps=taps,
        target_layers=num_layers,
        own_embedding=f"{names['embedding']}.weight" in stored,
        own_head=dummy or f"{names['head']}.weight" in stored,
    )
    if head.target_size != target.hidden_size:
        raise _refused(head_dir, f"it reads hidden states of {head.target_size} numbers, and the model's have {target.hidden_size}")
    if spec.vocab_size != target.vocab_size:
        raise _refused(head_dir, f"it is for {spec.vocab_size} tokens, and the model has {target.vocab_size}")
    if not all(0 <= tap <= num_layers for tap in taps):
        raise _refused(head_dir, f"it reads hidden states between layers {list(taps)}, and the model has {num_layers} layers")
    if spec.hidden_size != target.hidden_size and not (head.own_embedding and head.own_head):
        raise _refused(head_dir, f"its hidden_size {spec.hidden_size} is not the model's, so it needs embed_tokens and lm_head of its own")
    return replace(spec, draft_head=head, max_position_embeddings=target.max_position_embeddings)


def mtp_spec(model_dir: pathlib.Path, target: ModelSpec, load_format: str = "auto") -> ModelSpec | None:
    """That of the first MTP layer of the checkpoint of `target`, of the kind of the model's last layer; None if it carries none.

    Embedding and output head are the model's: those that some checkpoints have beside the layer are copies. Raises ModelLoadError.
    """
    config = read_text_config(model_dir)
    named = any(config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if not FAMILIES[target.family].mtp_names or not named or target.layers[-1].attention is None:
        return None
    assert target.norm is not None, "all of these families have one"
    head = DraftHead(HeadKind.MTP, target.norm, target_size=target.hidden_size, target_layers=target.num_layers)
    spec = replace(target, layers=target.layers[-1:], tied_head=False, draft_head=head)
    combine = named_weights(spec)["combine.weight"].parts[0].source
    if load_format != "dummy" and combine not in open_weights(target, model_dir, load_format).tensors:
        return None  # copies of checkpoints are often saved without it
    return spec


def draft_token_ids(spec: ModelSpec, head_dir: pathlib.Path, load_format: str = "auto") -> NDArray[np.int64] | None:
    """[num_draft_ids], the token that each row of the output head stands for; None if these are all tokens. The checkpoint has them as
    `d2t`: differences from the row's number. Raises ModelLoadError."""
    head = spec.draft_head
    if head is None or not head.own_head or head.num_draft_ids is None:
        return None
    rows = np.arange(head.num_draft_ids)
    stored = None if load_format == "dummy" else open_weights(spec, head_dir, load_format).tensors.get("d2t")
    if stored is None:
        if load_format != "dummy" and head.num_draft_ids != spec.vocab_size:
            raise ModelLoadError(f"{head_dir} lacks d2t, the tokens of its {head.num_draft_ids} logits")
        return None if head.num_draft_ids == spec.vocab_size else rows
    if stored.shape != rows.shape or stored.dtype not in ("int64", "int32"):
        raise ModelLoadError(f"d2t of {head_dir} is {stored.dtype} {list(stored.shape)}, not int64 [{head.num_draft_ids}]")
    ids: NDArray[np.int64] = stored.read_numbers() + rows
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= spec.vocab_size:
        raise ModelLoadError(f"d2t of {head_dir} does not give each logit a token of its own below {spec.vocab_size}")
    return ids


def _refused(head_dir: pathlib.Path, reason: str) -> ConfigError:
    return ConfigError.of("speculative_model", f"{str(head_dir)!r} is not possible: {reason}")
