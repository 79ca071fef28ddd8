"""Small random models of every family that takes images: checkpoint, tokenizer, image processor and chat template, as they are published;
and what transformers makes of a chat."""

from __future__ import annotations

import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

from aengine.images.processor import ImageProcessor

HIDDEN = 64
_TEXT: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Family:
    tokens: Sequence[str]  # that stand for images in its vocabulary, from id 300 on; the first stands for an image's rows
    part: str  # what a chat template writes for an image
    processor: str
    settings: Mapping[str, Any]  # of the image processor
    vision: Mapping[str, Any]
    whole: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)  # special tokens by the names that the tokenizer has for them
    own: Mapping[str, Any] = field(default_factory=dict)  # of processor_config.json


def _mrope(*sections: int, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **others}}


_QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_QWEN_IDS = {"image_token_id": 300, "vision_start_token_id": 301, "vision_end_token_id": 302, "video_token_id": 303}
_QWEN_PART = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_PART = "<|vision_start|><|video_pad|><|vision_end|>"
_QWEN3_VISION = {"depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 16, "out_hidden_size": HIDDEN}
_QWEN3_VISION |= {"num_position_embeddings": 64}
_QWEN3 = {
    "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 40},
    "patch_size": 16,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_HYBRID = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_HYBRID |= {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 32}
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_SIGLIP = {"model_type": "siglip_vision_model", **_SMALL, "image_size": 56, "patch_size": 14}
_GEMMA_TOKENS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
_GEMMA_NAMES = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
_IDEFICS_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_IDEFICS_TOKENS += tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))

FAMILIES = {
    "qwen2_5_vl": Family(
        _QWEN_TOKENS,
        _QWEN_PART,
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 60}},
        {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": HIDDEN, "fullatt_block_indexes": [1]},
        _QWEN_IDS,
        _mrope(2, 3, 3),
    ),
    "qwen3_vl": Family(
        _QWEN_TOKENS,
        _QWEN_PART,
        "Qwen2VLImageProcessorPil",
        _QWEN3,
        {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1, 2]},
        _QWEN_IDS,
        _mrope(4, 2, 2, mrope_interleaved=True),
    ),
    "qwen3_vl_moe": Family(
        _QWEN_TOKENS,
        _QWEN_PART,
        "Qwen2VLImageProcessorPil",
        _QWEN3,
        {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]},
        _QWEN_IDS,
        {**_mrope(4, 2, 2, mrope_interleaved=True), **_MOE, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 48},
    ),
    "qwen3_5": Family(
        _QWEN_TOKENS,
        _QWEN_PART,
        "Qwen2VLImageProcessorPil",
        _QWEN3,
        _QWEN3_VISION,
        _QWEN_IDS,
        {**_HYBRID, **_mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25)},
    ),
    "qwen3_5_moe": Family(
        _QWEN_TOKENS,
        _QWEN_PART,
        "Qwen2VLImageProcessorPil",
        _QWEN3,
        _QWEN3_VISION,
        _QWEN_IDS,
        {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 32, **_mrope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25)},
    ),
    "gemma3": Family(
        _GEMMA_TOKENS,
        "<start_of_image>",
        "Gemma3ImageProcessorPil",
        {"size": {"height": 56, "width": 56}},
        _SIGLIP,
        {"image_token_id": 300, "boi_token_id": 301, "eoi_token_id": 302, "mm_tokens_per_image": 4},
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 16},
        _GEMMA_NAMES,
        {"image_seq_length": 4},
    ),
    "mistral3": Family(
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 224}, "patch_size": {"height": 28, "width": 28}},
        {"model_type": "pixtral", **_SMALL, "image_size": 224, "patch_size": 14, "head_dim": 16},
        {"image_token_index": 300, "spatial_merge_size": 2},
        {"model_type": "mistral", "sliding_window": None},
        own={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "llava": Family(  # Pixtral
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 224}, "patch_size": {"height": 14, "width": 14}},
        {"model_type": "pixtral", **_SMALL, "image_size": 224, "patch_size": 14, "head_dim": 16},
        {"image_token_index": 300, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"model_type": "mistral", "sliding_window": None},
        own={"patch_size": 14, "processor_class": "PixtralProcessor"},
    ),
    "llava_onevision": Family(
        ("<image>", "<video>"),
        "<image>",
        "LlavaOnevisionImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]]},
        _SIGLIP,
        {"image_token_index": 300, "video_token_index": 301, "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112]]},
        {"model_type": "qwen2"},
        own={"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
    ),
    "internvl": Family(
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        "<IMG_CONTEXT>",
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        {**_SMALL, "image_size": [56, 56], "patch_size": [14, 14]},
        {"image_token_id": 300, "image_seq_length": 4, "downsample_ratio": 0.5},
        {"model_type": "qwen2"},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
        {"image_seq_length": 4},
    ),
    "idefics3": Family(
        _IDEFICS_TOKENS,
        "<image>",
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True},
        {**_SMALL, "image_size": 56, "patch_size": 14},
        {"image_token_id": 300, "scale_factor": 2},
        {"model_type": "llama"},
        own={"image_seq_len": 4},
    ),
    "smolvlm": Family(
        _IDEFICS_TOKENS,
        "<image>",
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True},
        {**_SMALL, "image_size": 56, "patch_size": 14},
        {"image_token_id": 300, "scale_factor": 2},
        {"model_type": "llama"},
        own={"image_seq_len": 4},
    ),
    "llama4": Family(
        ("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        "<|image|>",
        "Llama4ImageProcessor",
        {"size": {"height": 56, "width": 56}, "max_patches": 4},
        {**_SMALL, "image_size": 56, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
        | {"intermediate_size": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"image_token_index": 300, "boi_token_index": 302, "eoi_token_index": 303},
        {"attention_chunk_size": 21, "num_local_experts": 4, "intermediate_size": 32, "intermediate_size_mlp": 96, "floor_scale": 16},
    ),
    "gemma4": Family(
        ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        "<|image|>",
        "Gemma4ImageProcessorPil",
        {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 70},
        {**_SMALL, "head_dim": 16, "num_key_value_heads": 2, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 64},
        {
            "image_token_id": 300,
            "boi_token_id": 301,
            "eoi_token_id": 302,
            "video_token_id": 303,
            "audio_token_id": 304,
            "audio_config": None,
        },
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16}
        | {"vocab_size_per_layer_input": 400, "global_head_dim": 16, "num_kv_shared_layers": 0, "final_logit_softcapping": None},
        {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "video_token": "<|video|>"}
        | {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
        {"image_seq_length": 70},
    ),
}

FAMILIES["gemma4 with images that see themselves"] = replace(
    FAMILIES["gemma4"], text={**FAMILIES["gemma4"].text, "use_bidirectional_attention": "vision"}
)


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<bos>", "<eos>", *(f"<unused{number}>" for number in range(42)), *family.tokens])
    assert core.token_to_id(family.tokens[0]) == 300
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="!", extra_special_tokens=dict(family.named)
    )


def template_of(family: Family) -> str:
    return (
        "{% for message in messages %}<bos>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}"
        + family.part
        + "{% elif part['type'] == 'video' %}"
        + VIDEO_PART
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<eos>"
        "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
    )


def config_of(model_type: str, **text: Any) -> Any:
    family = FAMILIES[model_type]
    return CONFIG_MAPPING[model_type.partition(" ")[0]](
        text_config={**_TEXT, **family.text, **text}, vision_config=dict(family.vision), tie_word_embeddings=False, **family.whole
    )


def save_model(model_type: str, folder: pathlib.Path, seed: int = 0, **text: Any) -> transformers.PreTrainedModel:
    """Saves a model with everything beside it, and returns it: float32, eager attention."""
    family, config = FAMILIES[model_type], config_of(model_type, **text)
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08 if "language" in name or "text" in name else 0.15)
            elif "norm" not in name and "layernorm" not in name:
                parameter.normal_(0.0, 0.05)
    model.save_pretrained(folder)
    tokenizer = tokenizer_of(family)
    tokenizer.chat_template = template_of(family)
    tokenizer.save_pretrained(folder)
    processor = getattr(transformers, family.processor)(**family.settings)
    processor.save_pretrained(folder)
    if family.own:
        (folder / "processor_config.json").write_text(json.dumps(dict(family.own)))
    return model


def publish(model_type: str, folder: pathlib.Path) -> None:
    """Stores a saved model as it is published, where transformers saves it otherwise: Qwen3-VL's experts are [experts, in, out]."""
    if model_type == "qwen3_vl_moe":
        path = folder / "model.safetensors"
        tensors = load_file(path)
        moved = {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}
        save_file(moved, path, {"format": "pt"})


def picture(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """[height, width, 3]: noise over a ramp, so that no two are alike."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 200, width)[None, :, None] + np.zeros((height, 1, 3))
    return (ramp + rng.integers(0, 56, (height, width, 3))).astype(np.uint8)


def as_file(pixels: NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


Part = str | int
"""Text, or the number of a picture."""


def chat_of(parts: Sequence[Part], pictures: Sequence[Any]) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": pictures[part]} for part in parts]
    return [{"role": "user", "content": content}]


@dataclass(frozen=True)
class Expected:
    num_prompt_tokens: int
    token_ids: list[int]
    logprobs: torch.Tensor  # [tokens, vocab_size]


class Reference:
    """A saved model in the code of transformers; tokens that follow a chat are the likeliest."""

    def __init__(self, model_type: str, folder: pathlib.Path) -> None:
        self._type, self.folder = model_type, folder
        kind = transformers.AutoModelForImageTextToText
        self._model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.processor = ImageProcessor(folder, 1024)

    def generate(self, parts: Sequence[Part], pictures: Sequence[NDArray[np.uint8]], num_tokens: int) -> Expected:
        shown = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
        chat = [{"role": "user", "content": shown}]
        text, given = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), {}
        images = [Image.fromarray(pictures[part]) for part in parts if not isinstance(part, str)]
        if images:
            processor = self.processor
            made, texts = processor._processor._process_images(
                [images] if self._type == "llava_onevision" else images, return_tensors="pt", **processor._settings
            )
            pieces = text.split(processor.placeholder)
            text = pieces[0] + "".join(one + piece for one, piece in zip(texts, pieces[1:], strict=True))
            unused = ("num_crops", "num_patches", "num_soft_tokens_per_image", "aspect_ratios")
            given = {name: value for name, value in made.items() if isinstance(value, torch.Tensor) and name not in unused}
            given = {name: value.float() if value.is_floating_point() else value for name, value in given.items()}
        ids = self._tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        if self._type.startswith(("qwen", "gemma")):
            name = "token_type_ids" if self._type == "gemma3" else "mm_token_type_ids"
            given[name] = (ids == self.processor.token_id).long()
        return self._run(ids, given, num_tokens)

    def generate_after_video(self, question: str, frames: Sequence[NDArray[np.uint8]], fps: float, num_tokens: int) -> Expected:
        """Of frames whose sides are multiples of what a token covers, which are not resized. What a prompt has for them is as in
        `processing_qwen3_vl.py` of transformers 4.57 and in `processing_qwen2_5_vl.py`."""
        vision, together = self._model.config.vision_config, 2
        side, merge = vision.patch_size, vision.spatial_merge_size
        settings = self.processor._images
        pixels = torch.from_numpy(np.stack([*frames, *([frames[-1]] * (len(frames) % together))])).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in (settings.image_mean, settings.image_std))
        count, (rows, columns) = len(pixels) // together, (length // side for length in pixels.shape[2:])
        split = ((pixels - mean) / std).view(count, together, 3, rows // merge, merge, side, columns // merge, merge, side)
        patches = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(count * rows * columns, -1)
        run = "<|video_pad|>" * (rows * columns // merge**2)
        given: dict[str, Any] = {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[count, rows, columns]])}
        if self._type == "qwen2_5_vl":
            given["second_per_grid_ts"] = torch.tensor([together / fps])
            shown = f"<|vision_start|>{run * count}<|vision_end|>"
        else:
            times = [(min(2 * one, len(frames) - 1) + min(2 * one + 1, len(frames) - 1)) / 2 / fps for one in range(count)]
            shown = "".join(f"<{time:.1f} seconds><|vision_start|>{run}<|vision_end|>" for time in times)
        chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).replace(VIDEO_PART, shown)
        ids = self._tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        given["mm_token_type_ids"] = 2 * (ids == self._tokenizer.convert_tokens_to_ids("<|video_pad|>")).long()
        return self._run(ids, given, num_tokens)

    def _run(self, ids: torch.Tensor, given: Mapping[str, Any], num_tokens: int) -> Expected:
        self._model.generation_config.eos_token_id = None
        with torch.inference_mode():
            found = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=0,
                **given,
            )
        logprobs = torch.stack(found.logits)[:, 0].log_softmax(-1)
        return Expected(ids.shape[1], found.sequences[0, ids.shape[1] :].tolist(), logprobs)
