"""Load a target, its draft and the tokenizer from folders, from GGUF files, or by their names on the Hugging Face Hub.

No code that comes with a model is run. Weights must be safetensors, or in a GGUF file; only those of trained heads may
also be pickles that contain nothing but tensors, because some were published so.
"""

import difflib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from heavypath.speculative.demo import FOLDER, load_demo_pair
from heavypath.speculative.drafts.blocks.pard import Pard
from heavypath.speculative.drafts.composite import Cascade, Mixture
from heavypath.speculative.drafts.draft import Draftable
from heavypath.speculative.drafts.lookahead import Lookahead
from heavypath.speculative.drafts.lookup import PromptLookup
from heavypath.speculative.drafts.merge import Merge
from heavypath.speculative.drafts.model import EarlyExit
from heavypath.speculative.drafts.recall import Recall
from heavypath.speculative.drafts.retrieval import Retrieval
from heavypath.speculative.drafts.trained import is_trained_head, load_trained_head
from heavypath.speculative.drafts.translated import Translated
from heavypath.speculative.files.gguf_models import check_gguf, gguf_file, unpacked
from heavypath.speculative.files.hub import TOKENIZER, find_folder
from heavypath.speculative.streaming.load import load_streamed

logger = logging.getLogger(__name__)

DEMO_HEAD = "demo-head"
SHIPPED = {  # drafts that ship with the package: the head of the shipped pair, and texts that SmolLM2 wrote
    DEMO_HEAD: str(FOLDER / "head"),
    "smollm2-texts": f"retrieval:{FOLDER / 'texts' / 'smollm2.safetensors'}",
}
MERGE = "merge:"  # prefix of the drafts of a `Merge`
_WORDS = (*SHIPPED, "prompt-lookup", "recall", "lookahead")  # drafts that are not loaded from a folder


# Threads that load wait for each other. While transformers loads, it replaces `PreTrainedModel.tie_weights`. Two loads
# that overlap may leave the replacement there, and then each later model of the process has an untied lm_head.
_LOADING = threading.RLock()


class Pair(NamedTuple):
    """A target, a draft for it, and the target's tokenizer. Models are in eval mode and on one device.

    draft: a model, or any other kind of draft; None for plain decoding
    """

    target: PreTrainedModel
    draft: PreTrainedModel | Draftable | None
    tokenizer: PreTrainedTokenizerBase

    @property
    def eos_token_ids(self) -> list[int]:
        """The end-of-sequence tokens: those of the target's generation config, else the tokenizer's."""
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
    ranks: int = 1,
    memory: int | str | None = None,
    host_memory: int | str | None = None,
    local_files_only: bool = False,
) -> Pair:
    """Load a target and a draft, each from a folder, a GGUF file, or by its name on the Hugging Face Hub.

    target, draft: default: the shipped pair. GGUF files are read as in `load_target`. draft may be a model, an EAGLE
        head ("demo-head" is the shipped one), Medusa heads or a block draft. "prompt-lookup", "recall",
        "lookahead", "early-exit:LAYERS" and "retrieval:PATH" need no second model; PATH is a file that `Retrieval.save`
        wrote, a text file, or a folder of text files. "smollm2-texts" is such a file for SmolLM2-135M-Instruct, of
        texts that it wrote itself. Drafts can be combined: "demo-head+prompt-lookup" is a `Mixture`,
        "merge:demo-head+prompt-lookup" a `Merge`, and "2*demo-head+4*prompt-lookup" a `Cascade` with the levels of each
    device: default: a GPU if there is one
    dtype: of both models; default: as they were saved, float32 for the shipped pair, for GGUF files see `load_target`.
        A head has the target's dtype
    ranks: number of processes that the target is split over, by its own tensor-parallel plan. Call this in each of
        them, with torch.distributed initialised. Each process has the whole draft
    memory: bytes that the target's weights may take on the device, or a string such as "8G". Weights beyond that are
        read from its folder, or copied to a GPU, in each forward pass, see `load_streamed`. Needs the default dtype,
        and one process
    host_memory: with `memory` on a GPU: the host memory for the layers that are copied, see `load_streamed`. Default:
        as much as they need
    local_files_only: use only what is in the Hugging Face cache and fetch nothing, as with HF_HUB_OFFLINE

    A draft model with another tokenizer becomes a `Translated`; the log says how many tokens are common.

    Raises ValueError, TypeError or OSError with a one-line message: for a missing folder, an unsupported model type,
    files that do not fit together, a missing tokenizer, and a trained draft with another tokenizer.
    """
    if memory is not None and (target is None or dtype is not None):
        raise ValueError(
            "memory is for a target in a folder of its own and in the type that it was saved in; got "
            f"target {target!r}, dtype {dtype}"
        )
    if memory is not None and ranks > 1:
        raise ValueError(f"a target is either split over processes or streamed, got {ranks} and memory {memory!r}")
    if memory is None and host_memory is not None:
        raise ValueError(f"host_memory goes with memory, that of the GPU; got {host_memory!r} alone")
    if target is None and ranks > 1:
        raise ValueError(f"the shipped target has 5 key heads, which {ranks} processes cannot share; give a target")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def load_target(folder: Path) -> PreTrainedModel:
        if memory is None:
            return _load_model("target", folder, device, dtype, ranks)
        return load_streamed(folder, memory, resident=_exit_layers(draft), device=device, host_memory=host_memory)

    find_models(target, [] if draft is None else [draft], local_files_only)  # before anything is loaded
    return _load_pair(target, draft, device, dtype, load_target)


def load_target(
    path_or_name: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    local_files_only: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a target, in eval mode, and its tokenizer, from a folder, a GGUF file, or by its name on the Hub.

    path_or_name: a GGUF file, or a folder with one and no other model, is read by transformers, which makes plain
        weights of its quantised ones (packages: `pip install '.[gguf]'` in a checkout). The result is kept in
        `$XDG_CACHE_HOME/heavypath/gguf`, so that the next start takes seconds
    device: default: a GPU if there is one
    dtype: default: as saved; for a GGUF file float32 on a CPU and bfloat16 on a GPU
    local_files_only: fetch nothing, as with HF_HUB_OFFLINE

    Raises ImportError for missing packages, and the errors of `load_pair`: for a GGUF file ValueError if it is cut
    off, is one part of several, or has an architecture that transformers does not read.
    """
    pair = load_pair(str(path_or_name), None, device, dtype, local_files_only=local_files_only)
    return pair.target, pair.tokenizer


def find_models(target: str | None, drafts: Sequence[str] = (), local_files_only: bool = False) -> None:
    """Check that a target and drafts can be loaded, and fetch what the cache lacks, without reading weights.

    target, drafts: names as for `load_pair`; target None for the shipped model
    local_files_only: fetch nothing

    Raises the errors of `load_pair` that can be found without reading weights.
    """
    parts = [name for draft in drafts for _, name in _parts(draft) or [("", draft)]]
    named = [name for name in parts if name not in SHIPPED and not _check_modelless(name)]
    if target is None:
        for name in named:
            if not is_trained_head(name):
                raise _lacks_target(name)
        return
    if (file := gguf_file("target", target)) is not None:
        check_gguf("target", file)
    else:
        _config_of("target", find_folder("target", target, local_files_only, partial(_config_of, "target")))
    for name in named:
        if (file := gguf_file("draft", name)) is not None:
            check_gguf("draft", file)
        else:
            _find_draft(name, local_files_only)


def _folder_of(
    role: str, name: str, device: torch.device | str, dtype: torch.dtype | None, local_files_only: bool = True
) -> Path:
    """The folder of a target or a draft. A GGUF file is first unpacked to a folder of the cache.

    role: "target" or "draft", for messages; name: a folder, a GGUF file, or a name on the Hub
    dtype: of the unpacked weights; None for float32 if the device is a CPU, else bfloat16
    """
    file = gguf_file(role, name)
    if file is None:
        return _find_draft(name, local_files_only) if role == "draft" else find_folder(role, name, local_files_only)
    with _LOADING:
        return unpacked(role, file, dtype or (torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16))


def _find_draft(name: str, local_files_only: bool) -> Path:
    """The folder of a draft. Raises FileNotFoundError, which suggests the right word if the name is misspelt."""
    try:
        return find_folder("draft", name, local_files_only)
    except FileNotFoundError as error:
        if near := difflib.get_close_matches(name, _WORDS, n=1):
            raise FileNotFoundError(f"did you mean {near[0]}? {error}") from error
        raise


def _load_pair(
    target: str | None,
    draft: str | None,
    device: torch.device | str,
    dtype: torch.dtype | None,
    load_target: Callable[[Path], PreTrainedModel],
) -> Pair:
    """Load a pair as `load_pair` does, once all folders have been found or fetched.

    load_target: loads the target from its folder
    """
    if draft is not None and _parts(draft):
        alone = _load_pair(target, None, device, dtype, load_target)
        return alone._replace(draft=load_draft(draft, alone, target, dtype, local_files_only=True))
    draft = None if draft is None else SHIPPED.get(draft, draft)
    modelless = draft is not None and _check_modelless(draft)
    if target is None:
        shipped = Pair(*load_demo_pair(dtype or torch.float32, device))
        return shipped if draft is None else shipped._replace(draft=load_draft(draft, shipped, local_files_only=True))
    named = {"target": target} | ({} if draft is None or modelless else {"draft": draft})
    folders = {role: _folder_of(role, name, device, dtype) for role, name in named.items()}
    config = _config_of("target", folders["target"])
    head = folders.pop("draft") if "draft" in folders and is_trained_head(folders["draft"], config) else None
    if "draft" in folders:
        _config_of("draft", folders["draft"])
    if not _has_tokenizer(folders["target"]):
        raise ValueError(
            f"the target folder {str(folders['target'])!r} has no tokenizer; save one there "
            f"(tokenizer.save_pretrained), so that it has one of {', '.join(TOKENIZER)}"
        )
    tokenizer = _load_tokenizer("target", folders["target"])
    if head is not None:
        _check_vocabularies(tokenizer, _tokenizer_in("draft", head))
    with _LOADING:
        models = {
            role: load_target(folder) if role == "target" else _load_model(role, folder, device, dtype)
            for role, folder in folders.items()
        }
    if head is not None:
        return Pair(models["target"], load_trained_head(head, models["target"]), tokenizer)
    if "draft" in models:
        own = _tokenizer_in("draft", folders["draft"])
        return Pair(models["target"], _as_trained(models["draft"], own, tokenizer), tokenizer)
    return Pair(models["target"], _modelless(draft, tokenizer) if modelless else None, tokenizer)


def load_draft(
    path_or_name: str | Path,
    target: PreTrainedModel | Pair,
    target_name: str | None = None,
    dtype: torch.dtype | None = None,
    local_files_only: bool = False,
) -> PreTrainedModel | Draftable:
    """Load a draft for a target: a model, or a trained head of any kind as published; from a folder or by its name.

    path_or_name: a folder, a GGUF file, or a name on the Hugging Face Hub; what the cache lacks is fetched. Also
        "demo-head", "prompt-lookup", "recall", "lookahead", "early-exit:LAYERS", for a pair "smollm2-texts" and
        "retrieval:PATH", and combinations of these, as in `load_pair`
    target: the model, or a pair that `load_pair` loaded. A draft model becomes a `Translated` if its tokenizer differs
        from the pair's, or from the one in the model's folder
    target_name: the name that the pair's target was loaded by; None for the shipped pair
    dtype: default: the target's for a head, as saved for a model, as in `load_target` for a GGUF file
    local_files_only: fetch nothing, as with HF_HUB_OFFLINE

    Raises the errors of `load_pair`, and ValueError for a head that does not fit the target, with the tensor's name.
    """
    if not isinstance(path_or_name, str | Path):
        raise TypeError(f"path_or_name must be a folder or a name, got {path_or_name!r}")
    if parts := _parts(str(path_or_name)):
        drafts = [load_draft(part, target, target_name, dtype, local_files_only) for _, part in parts]
        levels = [int(count) for count, _ in parts if count]
        if str(path_or_name).startswith(MERGE):
            return Merge(drafts)
        return Cascade(drafts, levels) if levels else Mixture(drafts)
    name = SHIPPED.get(str(path_or_name), str(path_or_name))
    if _check_modelless(name):
        return _modelless(name, target.tokenizer if isinstance(target, Pair) else None)
    model = target.target if isinstance(target, Pair) else target
    if isinstance(target, Pair) and target_name is None and not is_trained_head(name, model.config):
        raise _lacks_target(name)
    folder = _folder_of("draft", name, model.device, dtype, local_files_only)
    head = is_trained_head(folder, model.config)
    if not head:
        _config_of("draft", folder)
    own = _tokenizer_in("draft", folder)
    if head:
        if isinstance(target, Pair):
            _check_vocabularies(target.tokenizer, own)
        return load_trained_head(folder, model, dtype)
    tokenizer = target.tokenizer if isinstance(target, Pair) else _tokenizer_of(target)
    with _LOADING:
        draft = _load_model("draft", folder, model.device, dtype)
    return _as_trained(draft, own, tokenizer)


def _as_trained(
    model: PreTrainedModel, own: PreTrainedTokenizerBase | None, target: PreTrainedTokenizerBase | None
) -> PreTrainedModel | Draftable:
    """The draft for a loaded model: a `Pard` if it was trained to draft all levels at once, a `Translated` if its
    tokenizer differs from the target's, else the model.

    own, target: the tokenizers of the draft and of the target; None if not known
    """
    mask = getattr(model.config, "pard_token", None)
    if mask is not None:
        if target is not None:
            _check_vocabularies(target, own)
        return Pard(model, mask)
    if own is None or target is None or own.get_vocab() == target.get_vocab():
        return model
    translated = Translated(model, own, target)
    logger.warning("the draft has another tokenizer: it drafts %s", translated.vocabularies)
    return translated


def _lacks_target(draft: str) -> ValueError:
    return ValueError(
        f"a draft ({draft!r}) needs its target. Without one the target is the shipped model, and its drafts are "
        f"{DEMO_HEAD}, heads of it, prompt-lookup, recall, lookahead, early-exit:LAYERS and retrieval:PATH"
    )


def _parts(draft: str) -> list[tuple[str, str]]:
    """The drafts of a combination such as "2*demo-head+recall", each as (levels or "", name); empty for a single draft.

    Raises ValueError if only some drafts have levels, and for a merge of one draft or with levels.
    """
    merges = draft.startswith(MERGE)
    path = Path(draft.removeprefix("retrieval:")).expanduser()  # which may have a + in its name
    if ("+" not in draft and not merges) or path.exists():
        return []
    parts: list[tuple[str, str]] = []
    for part in draft.removeprefix(MERGE).split("+"):
        levels, star, name = part.partition("*")
        parts.append((levels, name) if star and levels.isdecimal() else ("", part))
    if merges and (len(parts) == 1 or any(levels or not name for levels, name in parts)):
        raise ValueError(f"expected drafts as in {MERGE}demo-head+prompt-lookup, got {draft!r}")
    if len({bool(levels) for levels, _ in parts}) > 1 or not all(name for _, name in parts):
        raise ValueError(
            f"expected drafts as in demo-head+prompt-lookup, or all with their levels, as in "
            f"2*demo-head+4*prompt-lookup; got {draft!r}"
        )
    return parts


def _check_modelless(draft: str) -> bool:
    """Whether the string names a draft without a model, such as "recall" or "early-exit:2".

    Raises ValueError or FileNotFoundError if the part after the colon is wrong.
    """
    kind, _, what = draft.partition(":")
    if kind == "early-exit" and not all(part.isdecimal() for part in what.split(",")):
        raise ValueError(
            f"expected early-exit:LAYERS, the number of the first layers to run, or which, such as 0,1,5; got {draft!r}"
        )
    if kind == "retrieval":
        if not what:
            raise ValueError("expected retrieval:PATH, a file that Retrieval.save wrote, a text or a folder of texts")
        if not Path(what).expanduser().exists():
            if draft in SHIPPED.values():
                raise FileNotFoundError(
                    f"no texts in {what!r}: heavypath was built with HEAVYPATH_DEMO=0; install it without that, or "
                    "take the draft recall"
                )
            raise FileNotFoundError(f"expected retrieval:PATH, and there is no file or folder {what!r}")
    return draft in ("prompt-lookup", "recall", "lookahead") or kind in ("early-exit", "retrieval")


def _exit_layers(draft: str | None) -> set[int]:
    """The indices of the target's layers that the early-exit drafts named in this string run; empty without any."""
    texts = [name for _, name in _parts(draft or "")] or [draft]
    exits = [_modelless(text, None) for text in texts if text is not None and text.startswith("early-exit:")]
    return {index for one in exits if isinstance(one, EarlyExit) for index in one.indices}


def _modelless(draft: str | None, tokenizer: PreTrainedTokenizerBase | None) -> Draftable:
    """The draft that a string names, for which `_check_modelless` is true. tokenizer: the target's, for "retrieval"."""
    kind, _, what = (draft or "").partition(":")
    if kind == "early-exit":
        return EarlyExit([int(layer) for layer in what.split(",")] if "," in what else int(what))
    if kind == "prompt-lookup":
        return PromptLookup()
    if kind == "recall":
        return Recall()
    if kind == "lookahead":
        return Lookahead()
    if tokenizer is None:
        raise ValueError(
            f"{draft!r} needs a tokenizer, got a target alone; load both by load_pair, or use "
            "Retrieval(texts, tokenizer)"
        )
    path = Path(what).expanduser()
    return Retrieval.load(path, tokenizer) if path.suffix == ".safetensors" else Retrieval([path], tokenizer)


def _config_of(role: str, folder: Path) -> PreTrainedConfig:
    """The config of a causal language model. Raises ValueError or TypeError if the folder has none."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"cannot read the {role}'s config in {str(folder)!r}: {error}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        given = f"the {role} in {str(folder)!r} is of type {config.model_type!r}"
        raise TypeError(f"{given}; expected a causal language model")
    return config


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER)


def _load_tokenizer(role: str, folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"cannot load the {role}'s tokenizer from {str(folder)!r}: {error}") from error


def _tokenizer_in(role: str, folder: Path) -> PreTrainedTokenizerBase | None:
    return _load_tokenizer(role, folder) if _has_tokenizer(folder) else None


def _tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the folder that a model was loaded from; None if there is none."""
    try:
        return _tokenizer_in("target", find_folder("target", model.name_or_path, True)) if model.name_or_path else None
    except FileNotFoundError:
        return None


def _check_vocabularies(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase | None) -> None:
    if draft is None:
        return
    target_vocab = target.get_vocab()
    draft_vocab = draft.get_vocab()
    if target_vocab == draft_vocab:
        return
    target_tokens, draft_tokens = ({index: text for text, index in v.items()} for v in (target_vocab, draft_vocab))
    index = min(i for i in {*target_tokens, *draft_tokens} if target_tokens.get(i) != draft_tokens.get(i))
    raise ValueError(
        f"target and draft must share one vocabulary, got tokenizers of {len(target_vocab)} and {len(draft_vocab)} "
        f"tokens; the first difference is token {index}, {target_tokens.get(index)!r} and {draft_tokens.get(index)!r}"
    )


def _load_model(
    role: str, folder: Path, device: torch.device | str, dtype: torch.dtype | None, ranks: int = 1
) -> PreTrainedModel:
    split = {} if ranks == 1 else {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=ranks)}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **split,
        )
    except Exception as error:
        raise ValueError(f"cannot load the {role} from {str(folder)!r}: {error}") from error
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(f"the {role}'s weights in {str(folder)!r} lack {len(missing)} tensors, first {missing[0]!r}")
    return (model if split else model.to(device)).eval()
