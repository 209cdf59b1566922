"""Helpers of tests/options/test_processing.py and its neighbours."""

import torch

EOS = 5
PROMPTS = [[3, 1, 4, 1, 6, 2], [6, 2], [1, 1, 2, 0, 4], [2]]


def left_padded(prompts, pad=0):
    """input_ids and attention_mask [B, T]."""
    width = max(map(len, prompts))
    rows = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
