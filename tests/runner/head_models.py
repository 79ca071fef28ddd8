"""Tiny random models with a draft head, and what transformers and plain float32 torch make of both."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers
from hybrid_cases import DELTA, EXPERTS
from reference import FAMILIES, TINY, save_random
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, SIZE, HEADS, KV_HEADS, DIM = TINY["vocab_size"], TINY["hidden_size"], 4, 2, 24
TARGET_LAYERS = 6
DRAFT_IDS = 50
Head = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Embeddings of tokens [n, size] and hidden states of the positions before theirs [n, size] -> logits of the tokens after them, in the
vocabulary of the model, and the hidden states for the next positions."""


@dataclass(frozen=True)
class Drafting:
    """A model with a head, and how it is to draft."""

    model_dir: pathlib.Path
    options: dict[str, str]  # of the engine
    model: transformers.PreTrainedModel
    hidden: Callable[[Sequence[Tensor]], Tensor]  # of what the model puts out between its layers: what the head reads
    head: Head

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Those that the head proposes greedily behind a sequence, of whose tokens the model has computed all but the last."""
        ids = torch.tensor(tokens)
        embedding = self.model.get_input_embeddings()
        if len(tokens) > 1:
            hidden = self.hidden([state[0] for state in self.model(ids[None, :-1], output_hidden_states=True).hidden_states])
        else:
            hidden = torch.zeros(0, SIZE)
        found: list[int] = []
        for _ in range(count):
            logits, carried = self.head(embedding(ids[1:]), hidden)
            found.append(int(logits[-1].argmax()))
            ids, hidden = torch.cat((ids, torch.tensor(found[-1:]))), torch.cat((hidden, carried[-1:]))
        return found


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def eagle(path: pathlib.Path, *, own_ids: bool, normed_residual: bool = False) -> Drafting:
    """A Llama, and an EAGLE-3 head in a directory beside it: with logits of some tokens alone, or with the model's output head and an
    embedding of its own."""
    model = save_random("Llama", {**TINY, "num_hidden_layers": TARGET_LAYERS}, path / "model", 1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5

    weights = {"fc.weight": matrix(SIZE, 3 * SIZE), "norm.weight": torch.rand(SIZE, generator=generator) + 0.5}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = torch.rand(SIZE, generator=generator) + 0.5
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        weights[f"midlayer.self_attn.{name}_proj.weight"] = matrix(heads * DIM, 2 * SIZE)
    weights["midlayer.self_attn.o_proj.weight"] = matrix(SIZE, HEADS * DIM)
    weights |= {f"midlayer.mlp.{name}_proj.weight": matrix(80, SIZE) for name in ("gate", "up")}
    weights["midlayer.mlp.down_proj.weight"] = matrix(SIZE, 80)
    ids = torch.arange(VOCAB)
    if own_ids:
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_IDS].sort().values
        weights |= {"lm_head.weight": matrix(DRAFT_IDS, SIZE), "d2t": ids - torch.arange(DRAFT_IDS)}
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    else:
        weights["embed_tokens.weight"] = matrix(VOCAB, SIZE)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{"vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 80, "num_hidden_layers": 1, "max_position_embeddings": 32},
        **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": 1e-6},
        **{"norm_before_residual": normed_residual, "draft_vocab_size": DRAFT_IDS if own_ids else None},
    }
    head_dir = path / "head"
    head_dir.mkdir()
    (head_dir / "config.json").write_text(json.dumps(config))
    save_file(weights, head_dir / "model.safetensors")

    def rotated(x: Tensor) -> Tensor:
        """[n, heads, DIM] -> the same, as transformers rotates it with the default rope."""
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
        return x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin

    def head(embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if not own_ids:  # `embeddings` are the model's
            distances = torch.cdist(embeddings, model.get_input_embeddings().weight)
            embeddings = weights["embed_tokens.weight"][distances.argmin(-1)]
        normed = rms(hidden, weights["midlayer.hidden_norm.weight"])
        x = torch.cat((rms(embeddings, weights["midlayer.input_layernorm.weight"]), normed), -1)
        q, k, v = (F.linear(x, weights[f"midlayer.self_attn.{name}_proj.weight"]).view(len(x), -1, DIM) for name in "qkv")
        q, (k, v) = rotated(q), (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        residual = (normed if normed_residual else hidden) + F.linear(attended, weights["midlayer.self_attn.o_proj.weight"])
        y = rms(residual, weights["midlayer.post_attention_layernorm.weight"])
        gate, up = (F.linear(y, weights[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        residual = residual + F.linear(F.silu(gate) * up, weights["midlayer.mlp.down_proj.weight"])
        lm_head = weights["lm_head.weight"] if own_ids else model.get_output_embeddings().weight
        logits = torch.full((len(x), VOCAB), -math.inf)
        logits[:, ids] = F.linear(rms(residual, weights["norm.weight"]), lm_head)
        return logits, residual

    taps = (2, TARGET_LAYERS // 2, TARGET_LAYERS - 3)
    options = {"speculative": "eagle", "speculative_model": str(head_dir)}

    def fused(states: Sequence[Tensor]) -> Tensor:
        return F.linear(torch.cat([states[tap] for tap in taps], -1), weights["fc.weight"])

    return Drafting(path / "model", options, model, fused, head)


MTP = {  # family of transformers, config, names of the layer with {layer} for its number, whether hidden states come first in `combine`
    "deepseek-v3": (
        "DeepseekV3",
        {**FAMILIES["deepseek-v3"][1], "kv_lora_rank": 48},
        "model.layers.{layer}",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        False,
    ),
    "glm4-moe": (
        "Glm4Moe",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 16},
        "model.layers.{layer}",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        False,
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        {**DELTA, "num_hidden_layers": 5, "layer_types": ["linear_attention", "full_attention"] * 2 + ["full_attention"]},
        "mtp.layers.0",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        False,
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**DELTA, **EXPERTS, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
        "mtp.layers.0",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        False,
    ),
    "mimo": (
        "Qwen2",
        {},
        "model.mtp_layers.0",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        True,
    ),
}


def mtp(path: pathlib.Path, name: str, *, from_last_token: bool = False) -> Drafting:
    """A model whose checkpoint has an MTP layer: it is made as one with a layer more, of which that becomes the MTP layer.

    `from_last_token`: the next token depends on the last one alone, and the MTP layer says the same as the model.
    """
    prefix, changes, layer_name, (enorm, hnorm, combine, norm), hidden_first = MTP[name]
    config, offset = {**TINY, **changes}, float(name.startswith("qwen"))  # of the weights of norms
    num_layers = config["num_hidden_layers"] - 1
    larger = save_random(prefix, config, path, 3, dtype=torch.float32)
    weights = load_file(path / "model.safetensors")
    if from_last_token:
        for key in weights:
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                weights[key].zero_()
    theirs, ours = f"model.layers.{num_layers}.", layer_name.format(layer=num_layers) + "."
    weights = {key.replace(theirs, ours) if key.startswith(theirs) else key: tensor for key, tensor in weights.items()}
    generator = torch.Generator().manual_seed(4)
    own = {each: torch.rand(SIZE, generator=generator) + 0.5 for each in (enorm, hnorm, norm)}
    own[combine] = torch.randn(SIZE, 2 * SIZE, generator=generator) * SIZE**-0.5
    if from_last_token:
        identity, zeros = torch.eye(SIZE), torch.zeros(SIZE, SIZE)
        own |= {enorm: torch.ones(SIZE), norm: weights["model.norm.weight"]}
        own[combine] = torch.cat((zeros, identity) if hidden_first else (identity, zeros), 1)
    around = ours.removesuffix("layers.0.") if ours.startswith("mtp.") else ours
    weights |= {f"{around}{key}.weight": tensor.clone() for key, tensor in own.items()}
    if layer_name.startswith("model.layers"):  # copies that nobody reads
        weights |= {f"{ours}embed_tokens.weight": torch.zeros(1), f"{ours}shared_head.head.weight": torch.zeros(1)}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    written |= {"num_hidden_layers": num_layers, "mtp_num_hidden_layers" if name == "qwen3.5" else "num_nextn_predict_layers": 1}
    if name == "mimo":
        written["architectures"] = ["MiMoForCausalLM"]
    for key in ("layer_types", "mlp_layer_types"):
        if written.get(key):
            written[key] = written[key][:num_layers]
    (path / "config.json").write_text(json.dumps(written))
    config_class = type(larger.config)
    model_class = type(larger)
    kinds = config.pop("layer_types", None)
    some_kinds, last_kind = ({}, {}) if kinds is None else ({"layer_types": kinds[:num_layers]}, {"layer_types": kinds[num_layers:]})
    model = model_class(config_class(**{**config, **some_kinds, "num_hidden_layers": num_layers})).eval()
    model.load_state_dict({key: tensor for key, tensor in larger.state_dict().items() if not key.startswith(theirs)})
    layer = larger.model.layers[num_layers]
    if from_last_token:
        with torch.no_grad():
            for each in (*model.model.layers, layer):
                for key, parameter in each.named_parameters():
                    if key.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                        parameter.zero_()
    alone = model_class(
        config_class(**{**config, **last_kind, "num_hidden_layers": 1})
    ).eval()  # the layer of the head with what stands around it
    layer.self_attn.layer_idx = 0
    alone.model.layers[0] = layer
    alone.model.norm.weight.data = own[norm]
    alone.lm_head.weight.data = model.lm_head.weight.data

    def head(embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = [rms(embeddings, own[enorm] + offset), rms(hidden, own[hnorm] + offset)]
        out = alone(inputs_embeds=F.linear(torch.cat(x[::-1] if hidden_first else x, -1), own[combine])[None], output_hidden_states=True)
        return out.logits[0], out.hidden_states[-1][0]

    return Drafting(path, {"speculative": "mtp"}, model, lambda states: states[-1], head)
