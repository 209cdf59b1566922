"""Tiny models that see or hear, with prompts for them, as a processor would make them."""

import torch
from texts_with_rules import left_padded
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    BatchFeature,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
)

SHOWN = 60  # the token in whose place the target reads a part of an image, or of a sound
FILMED = 59  # and of a video
TEXT = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.3, "head_dim": 8,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
SEES = {"hidden_size": 16, "intermediate_size": 16}
SQUARE = SEES | {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2}
GRIDS = SEES | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
QWEN = {"image_token_id": SHOWN, "video_token_id": FILMED, "vision_start_token_id": 58, "vision_end_token_id": 57}
KINDS = {
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 8}, "vision_config": SQUARE, "image_token_index": SHOWN,
        "boi_token_index": 59, "eoi_token_index": 58, "mm_tokens_per_image": 4, "tie_word_embeddings": False,
    },
    "qwen2_5_vl": QWEN | {"text_config": TEXT | MROPE, "vision_config": GRIDS},
    "llava": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": SQUARE | {"model_type": "clip_vision_model"},
        "image_token_index": SHOWN,
    },
    "qwen3_vl": QWEN | {
        "text_config": TEXT | MROPE,
        "vision_config": GRIDS | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "voxtral": {
        "text_config": TEXT | {"model_type": "llama"}, "audio_token_id": SHOWN,
        "audio_config": SEES | {
            "model_type": "voxtral_encoder", "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 4,
            "max_source_positions": 4,
        },
    },
}  # fmt: skip


def multimodal(kind: str):
    """A random model, no weight at its neutral initial value."""
    torch.manual_seed(3)
    if kind == "voxtral":
        model = VoxtralForConditionalGeneration(VoxtralConfig(**KINDS[kind]))
    else:
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **KINDS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.lm_head.weight[[SHOWN, FILMED]] = 0  # transformers refuses them in a text without images
    return model.eval()


def shown(kind: str, batch: int = 1, seed: int = 5) -> dict[str, torch.Tensor]:
    """Prompts with an image or a sound in each, all the arguments of `generate`; seed: of what is seen."""
    noise, sizes = torch.Generator().manual_seed(seed), [4, 4][:batch]
    if kind.startswith("qwen"):  # two and three rows of 2 x 2 patches, whose positions go on before so many tokens
        grids = torch.tensor([[1, 4, 6], [1, 4, 4]][:batch])
        sizes = (grids.prod(1) // 4).tolist()
        pixels = torch.randn(int(grids.prod(1).sum()), 3 * 2 * 14 * 14, generator=noise)
        inputs = {"pixel_values": pixels, "image_grid_thw": grids}
    elif kind == "voxtral":
        inputs = {"input_features": torch.randn(batch, 4, 8, generator=noise)}
    else:
        inputs = {"pixel_values": torch.randn(batch, 3, 28, 28, generator=noise)}
    texts = [([5, 58], [57, 7, 8, 9]), ([11], [12, 13])]
    prompts = [before + [SHOWN] * size + after for (before, after), size in zip(texts, sizes, strict=False)]
    if kind == "voxtral":  # where one sound has as many tokens as the encoder has numbers for it
        prompts = [before + [SHOWN] * 4 + after for before, after in texts[:batch]]
    made = left_padded(prompts)
    types = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
    if kind in types:
        inputs[types[kind]] = (made["input_ids"] == SHOWN).long()
    return made | inputs


def filmed() -> dict[str, torch.Tensor]:
    """A prompt with a video for "qwen2_5_vl", whose positions go on behind more than its tokens."""
    prompt, noise = left_padded([[5, 58, *[FILMED] * 8, 57, 7, 8]]), torch.Generator().manual_seed(5)
    return prompt | {
        "pixel_values_videos": torch.randn(32, 3 * 2 * 14 * 14, generator=noise),
        "video_grid_thw": torch.tensor([[4, 2, 4]]),
        "second_per_grid_ts": torch.tensor([1.0]),
        "mm_token_type_ids": 2 * (prompt["input_ids"] == FILMED).long(),
    }


def apart(prompt: dict[str, torch.Tensor]) -> dict:
    """The same prompts, as arguments of the decoder's own generate."""
    tokens = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    inputs = {name: value for name, value in prompt.items() if name not in tokens}
    return tokens | {"model_inputs": BatchFeature(inputs)}  # as processors return them
