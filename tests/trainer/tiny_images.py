"""Models that read images, small enough for a test, and groups with images."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from example_trainer.images import ImageSupport, image_support

VOCAB = 300
IMAGE, VISION_START, VISION_END, VIDEO = 260, 261, 262, 263
KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 1, 2],
        "rope_theta": 10000.0,
    },
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_VISION = {
    **_PATCHES,
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "num_heads": 2,
}


def tiny_vl(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A model of one of `KINDS` with some ten thousand parameters, in training mode."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    torch.manual_seed(seed)
    common = {**_IDS, **config}
    model: Any
    if kind == "qwen2_vl":
        vision = {**_PATCHES, "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
        model = Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(text_config=_TEXT, vision_config={**vision, "mlp_ratio": 2}, **common)
        )
    elif kind == "qwen2_5_vl":
        vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=_TEXT, vision_config=vision, **common)
        )
    else:
        text = {**_TEXT, "head_dim": 8}
        vision = {**_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
        model = Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(text_config=text, vision_config=vision, **common)
        )
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start, so that images matter
            parameter.normal_(0.0, 0.2)
    return model.to(dtype).train()


def save_tiny_vl(directory: Path, kind: str = "qwen2_vl", **config: Any) -> Path:
    """A model directory with a tokenizer of single characters and an image processor."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiny_vl(kind, **config).save_pretrained(directory)
    characters = {chr(i) if i < 256 else f"<{i}>": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    save_processor(directory)
    return directory


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<261><260><262>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<264>"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURN_END = 264


def save_tiny_chat_vl(directory: Path, kind: str, **config: Any) -> Path:
    """As `save_tiny_vl`, with a chat template and names of the tokens of images."""
    from transformers import AddedToken, AutoTokenizer

    save_tiny_vl(directory, kind, **config)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    names = [f"<{i}>" for i in (IMAGE, VISION_START, VISION_END, VIDEO, TURN_END)]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.eos_token = f"<{TURN_END}>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def save_processor(directory: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 1024},
    ).save_pretrained(directory)


def support(model: Any, directory: Path) -> ImageSupport:
    """The reader of images for a model, with the processor of `save_processor`."""
    save_processor(directory)
    found = image_support(model, str(directory))
    assert found.reader is not None, found.obstacle
    return found


def picture(width: int, height: int, *, seed: int = 0, kind: str = "PNG", mode: str = "RGB") -> str:
    """An image of noise as base64."""
    torch.manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8).numpy()
    return encoded(Image.fromarray(pixels).convert(mode), kind)


def encoded(image: Image.Image, kind: str = "PNG") -> str:
    content = io.BytesIO()
    image.save(content, kind)
    return base64.b64encode(content.getvalue()).decode()


def image_tokens(num_tokens: int = 1) -> list[int]:
    """The tokens of an image in a chat: `num_tokens` between those of its start and end."""
    return [VISION_START, *[IMAGE] * num_tokens, VISION_END]


def image_group(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    images: Any,
    **extra: Any,
) -> dict[str, Any]:
    """A scored group of trajectories with their own prompts and images, scored 1, 0, 1, ..."""
    pairs = list(zip(prompts, completions, strict=True))
    return {
        "tokens": [[*prompt, *completion] for prompt, completion in pairs],
        "masks": [[-100] * len(prompt) + [*completion] for prompt, completion in pairs],
        "scores": [float(1 - i % 2) for i in range(len(pairs))],
        "inference_logprobs": [
            [1.0] * len(prompt) + [-3.0] * len(completion) for prompt, completion in pairs
        ],
        "images": images,
        **extra,
    }
