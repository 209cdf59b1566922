"""Save a block draft as DSpark's authors publish theirs (DeepSpec's layout, whose keys lie at the top level)."""

from pathlib import Path

from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.heads.saving import common_settings, save_checkpoint


def save_block(head: BlockHead, folder: str | Path, target_layers: int) -> None:
    """Write a block draft with a term of DSpark's, or with none, in its own dtype; `load_block` gives it back.

    target_layers: of the target, for others to see whether theirs is of its kind
    """
    config = head.config
    settings = {
        "architectures": ["Qwen3DSparkModel" if config.term else "Qwen3DFlashModel"],
        "model_type": "qwen3",
        **common_settings(config),
        "layer_types": ["full_attention"] * config.layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [tap - 1 for tap in config.taps],
        "num_target_layers": target_layers,
        "is_causal": all(config.causal),
        "markov_rank": config.rank,
        "enable_confidence_head": False,
    }
    if config.term:
        settings["markov_head_type"] = config.term
    if config.multiplier != 1:
        settings["output_multiplier"] = config.multiplier
    if config.softcap is not None:
        settings["final_logit_softcapping"] = config.softcap
    save_checkpoint(folder, settings, head.state_dict(), config)
