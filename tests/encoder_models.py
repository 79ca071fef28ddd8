"""Tiny encoders, and models that classify, with random weights and a tokenizer, as Transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = tuple(f"w{index}" for index in range(116))
SMALL: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 200,
    "pad_token_id": 0,
}
_MODERN = {"local_attention": 16, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
_QWEN = {"head_dim": 16, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", SMALL),
    "masked": ("BertForMaskedLM", "BertConfig", SMALL),
    "xlm-r": ("XLMRobertaModel", "XLMRobertaConfig", {**SMALL, "type_vocab_size": 1}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", {**SMALL, **_MODERN}),
    "nomic": ("NomicBertModel", "NomicBertConfig", SMALL),
    "gte": ("GteModel", "GteConfig", SMALL),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 120, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 200},
    ),
    "bert-labels": ("BertForSequenceClassification", "BertConfig", {**SMALL, "num_labels": 3}),
    "bert-one": ("BertForSequenceClassification", "BertConfig", {**SMALL, "num_labels": 1}),
    "xlm-r-one": ("XLMRobertaForSequenceClassification", "XLMRobertaConfig", {**SMALL, "type_vocab_size": 1, "num_labels": 1}),
    "modernbert-mean": (
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**SMALL, **_MODERN, "num_labels": 2, "classifier_pooling": "mean"},
    ),
    "qwen3-one": ("Qwen3ForSequenceClassification", "Qwen3Config", {**SMALL, **_QWEN, "num_labels": 1}),
}


def save_encoder(name: str, folder: Path) -> Any:
    """The model of `MODELS`, in float32, which is saved to `folder` with a tokenizer of words."""
    kind, config, fields = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**fields)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    core = Tokenizer(WordLevel({word: index for index, word in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    core.add_special_tokens(list(SPECIAL))
    ends = [(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")]
    core.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends)
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **tokens).save_pretrained(folder)
    return model
