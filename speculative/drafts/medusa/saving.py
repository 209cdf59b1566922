"""Save Medusa heads in their authors' layout, which `checkpoint.py` describes."""

import json
from pathlib import Path

from safetensors.torch import save_file

from heavypath.speculative.drafts.heads.saving import own_settings
from heavypath.speculative.drafts.medusa.heads import MedusaHeads
from heavypath.speculative.files.hub import WEIGHTS


def save_medusa(heads: MedusaHeads, folder: str | Path, target_name: str | None) -> None:
    """Write heads to a folder, in their own dtype; `load_medusa` returns equal heads.

    target_name: the target's folder or name, which other programs read in config.json; None if it has none
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = heads.config
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in heads.by_name().items()}
    file = WEIGHTS["medusa"][0]
    unfinished = folder / f"{file}.new"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / file)  # not overwritten: the heads' tensors may be mapped from this file
    settings = {
        "medusa_num_heads": config.heads,
        "medusa_num_layers": config.layers,
        "base_model_name_or_path": target_name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "torch_dtype": str(heads.weight.dtype).removeprefix("torch."),
        **own_settings(config.acceptance),
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
