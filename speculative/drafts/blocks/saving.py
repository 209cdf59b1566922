"""Save a block draft in DeepSpec's layout (DSpark), whose keys are at the top level of config.json."""

from pathlib import Path

from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.heads.saving import common_settings, save_checkpoint


def save_block(head: BlockHead, folder: str | Path, target_layers: int) -> None:
    """Write a block draft, without a term or with one of DSpark's, in its dtype. `load_block` reads it.

    target_layers: number of the target's layers; loaders compare it with their target's
    """
    config = head.config
    settings = {
        "architectures": ["Qwen3DSparkModel" if config.term == "dspark" else "Qwen3DFlashModel"],
        "model_type": "qwen3",
        **common_settings(config),
        "layer_types": ["full_attention"] * config.layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [tap - 1 for tap in config.taps],
        "num_target_layers": target_layers,
        "is_causal": all(config.causal),
        "markov_rank": config.options.get("rank", 0),
        "enable_confidence_head": False,
    }
    if config.term == "dspark":
        settings["markov_head_type"] = config.options["variant"]
    if config.multiplier != 1:
        settings["output_multiplier"] = config.multiplier
    if config.softcap is not None:
        settings["final_logit_softcapping"] = config.softcap
    save_checkpoint(folder, settings, head.state_dict(), config)
