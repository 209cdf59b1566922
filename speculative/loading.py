"""Load a target, its draft and their tokenizer from local folders or the Hugging Face cache.

Nothing is downloaded, no code that comes with a model is run, and weights must be safetensors.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from heavypath.speculative.demo import load_demo_pair
from heavypath.speculative.drafts import EarlyExit, PromptLookup, Retrieval

Modelless = PromptLookup | Retrieval | EarlyExit

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Pair(NamedTuple):
    """Models in eval mode on one device, and the target's tokenizer. Without a draft only plain decoding works."""

    target: PreTrainedModel
    draft: PreTrainedModel | Modelless | None
    tokenizer: PreTrainedTokenizerBase

    @property
    def eos_token_ids(self) -> list[int]:
        """The tokens that end a text: those of the target's generation config, or else the tokenizer's."""
        config = self.target.generation_config
        eos = config.eos_token_id if config is not None else None
        if eos is None:
            eos = self.tokenizer.eos_token_id
        return [] if eos is None else [eos] if isinstance(eos, int) else [int(token) for token in eos]


def load_pair(
    target: str | None = None,
    draft: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Pair:
    """Load a target and a draft, each from a folder or by its name in the Hugging Face cache.

    target, draft: default the shipped pair. draft may also be "prompt-lookup", "early-exit:LAYERS" or "retrieval:PATH",
        which need no model; PATH is a file that `Retrieval.save` wrote, or a text or a folder of texts.
    device: default a GPU if there is one.
    dtype: precision of both models; by default they keep the one they were saved in, and the shipped pair is float32.

    Raises ValueError, TypeError or OSError, in one line, for a missing folder, a model type that is not supported,
    files that do not fit together, no tokenizer, and tokenizers with different vocabularies.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    modelless = draft is not None and _check_modelless(draft)
    if target is None:
        if draft is not None and not modelless:
            raise ValueError(f"a draft ({draft!r}) needs its target; only the shipped pair loads without one")
        pair = load_demo_pair(dtype or torch.float32, device)
        return Pair(pair.target, _modelless(draft, pair.tokenizer) if modelless else pair.draft, pair.tokenizer)
    named = {"target": target} | ({} if draft is None or modelless else {"draft": draft})
    folders = {role: find_folder(role, name) for role, name in named.items()}
    for role, folder in folders.items():
        _check_type(role, folder)
    if not _has_tokenizer(folders["target"]):
        raise ValueError(
            f"the target folder {str(folders['target'])!r} has no tokenizer; save one there "
            f"(tokenizer.save_pretrained), so that it has one of {', '.join(_TOKENIZER_FILES)}"
        )
    tokenizer = _load_tokenizer("target", folders["target"])
    if "draft" in folders and _has_tokenizer(folders["draft"]):
        _check_vocabularies(tokenizer, _load_tokenizer("draft", folders["draft"]))
    models = {role: _load_model(role, folder, device, dtype) for role, folder in folders.items()}
    return Pair(models["target"], _modelless(draft, tokenizer) if modelless else models.get("draft"), tokenizer)


def load_draft(
    draft: str, pair: Pair, target: str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel | Modelless:
    """Load one more draft for the target of a pair, which `load_pair` loaded by the name `target`; raises as that."""
    if _check_modelless(draft):
        return _modelless(draft, pair.tokenizer)
    if target is None:
        raise ValueError(f"a draft ({draft!r}) needs its target; only the shipped pair loads without one")
    folder = find_folder("draft", draft)
    _check_type("draft", folder)
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        _check_vocabularies(pair.tokenizer, _load_tokenizer("draft", folder))
    return _load_model("draft", folder, pair.target.device, dtype)


def _check_modelless(draft: str) -> bool:
    """Whether the text names a draft without a model; raises ValueError or FileNotFoundError if it does so wrongly."""
    kind, _, what = draft.partition(":")
    if kind == "early-exit" and not what.isdecimal():
        raise ValueError(f"expected early-exit:LAYERS, a number of the target's layers, got {draft!r}")
    if kind == "retrieval":
        if not what:
            raise ValueError("expected retrieval:PATH, a file that Retrieval.save wrote, a text or a folder of texts")
        if not Path(what).expanduser().exists():
            raise FileNotFoundError(f"expected retrieval:PATH, and there is no file or folder {what!r}")
    return draft == "prompt-lookup" or kind in ("early-exit", "retrieval")


def _modelless(draft: str | None, tokenizer: PreTrainedTokenizerBase) -> Modelless:
    """The draft without a model that the text names, once it has been checked."""
    kind, _, what = (draft or "").partition(":")
    if kind == "early-exit":
        return EarlyExit(int(what))
    if kind == "prompt-lookup":
        return PromptLookup()
    path = Path(what).expanduser()
    return Retrieval.load(path, tokenizer) if path.suffix == ".safetensors" else Retrieval([path], tokenizer)


def find_folder(role: str, name: str) -> Path:
    """The folder that has a model's files, from that folder or the model's name.

    role: "target" or "draft", for the FileNotFoundError that says what was looked for.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"the {role} folder {name!r} has no config.json; give a folder that save_pretrained or hf download made"
            )
        return folder
    try:
        config = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        config = None
    if config is None:
        raise FileNotFoundError(
            f"the {role} {name!r} is neither a folder nor a model in the Hugging Face cache; "
            "give a folder with config.json and safetensors weights, or fetch the model first with `hf download`"
        )
    return Path(config).parent


def _check_type(role: str, folder: Path) -> None:
    try:
        kind = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
    except Exception as error:
        raise ValueError(f"cannot read the {role}'s config in {str(folder)!r}: {error}") from error
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise TypeError(f"the {role} in {str(folder)!r} is of type {kind!r}; expected a causal language model")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _load_tokenizer(role: str, folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"cannot load the {role}'s tokenizer from {str(folder)!r}: {error}") from error


def _check_vocabularies(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    if target_vocab == draft_vocab:
        return
    target_tokens, draft_tokens = ({index: text for text, index in v.items()} for v in (target_vocab, draft_vocab))
    index = min(i for i in {*target_tokens, *draft_tokens} if target_tokens.get(i) != draft_tokens.get(i))
    raise ValueError(
        f"target and draft must share one vocabulary, got tokenizers of {len(target_vocab)} and {len(draft_vocab)} "
        f"tokens; the first difference is token {index}, {target_tokens.get(index)!r} and {draft_tokens.get(index)!r}"
    )


def _load_model(role: str, folder: Path, device: torch.device | str, dtype: torch.dtype | None) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise ValueError(f"cannot load the {role} from {str(folder)!r}: {error}") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(f"the {role}'s weights in {str(folder)!r} lack {len(missing)} tensors, first {missing[0]!r}")
    return model.to(device).eval()
