"""Find the folder of a model: a local folder, or by name in the Hugging Face cache.

Download it from the Hub if missing.

Files in the cache are used without network access. If files are missing, config.json is downloaded first, then settings
and tokenizer, and one set of weights: no code, no second format, and no pickle files if there is another format.
"""

import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from heavypath.speculative.files.typed_json import weight_map

TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")  # at least one is needed
SAFE = ("model.safetensors", "model.safetensors.index.json")
_HEAD = (*SAFE, "pytorch_model.bin", "pytorch_model.bin.index.json")
_MEDUSA = ("medusa_lm_head.safetensors", "medusa_lm_head.safetensors.index.json", "medusa_lm_head.pt")
# By role, and for trained heads; the first existing file is used.
WEIGHTS = {"target": SAFE, "draft": (*_MEDUSA, *_HEAD), "head": _HEAD, "medusa": _MEDUSA}
# Files with parts of drafts, which trainers write besides the weights. Others, such as an optimizer's, are ignored.
PART = re.compile(
    r"(mask_embeddings?|embeddings?|embed_tokens|lm_head|head|fc|[dt]2[dt]|vocab_mapping|markov_head|adapter_model)"
    r"\.(pt|pth|bin|safetensors)"
)
BESIDE = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # suffixes of settings and tokenizer files
A_FOLDER = "give a folder with config.json and safetensors weights, as save_pretrained makes it"
LOG_IN = "log in by `hf auth login` or set HF_TOKEN"


def find_folder(
    role: str, name: str, local_files_only: bool = False, check: Callable[[Path], object] | None = None
) -> Path:
    """The folder with a model's files, from that folder's path or the model's name. Missing files are downloaded.

    role: "target" or "draft": which weights to look for, and what messages call the model
    local_files_only: download nothing, as with HF_HUB_OFFLINE
    check: called with a folder that has config.json, before the weights of a name are downloaded

    Raises FileNotFoundError or OSError, with one line that says what to do, for something that is neither a folder of a
    model nor a name, and for a name that cannot be downloaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"the {role} folder {name!r} has no config.json; {A_FOLDER}")
        return folder
    if folder.suffix.lower() == ".gguf":
        raise FileNotFoundError(f"the {role} {name!r} is a GGUF file, which is not read here; {A_FOLDER}")
    if folder.is_file():
        raise FileNotFoundError(f"the {role} {name!r} is a file; {A_FOLDER}, a GGUF file (.gguf), or a name on the Hub")
    cached = _in_cache(role, name)
    lacking = None if cached is None else _lacking(role, cached)
    if cached is not None and lacking is None:
        return cached
    try:
        if local_files_only or constants.is_offline_mode():
            what = "is not" if cached is None else f"has no {lacking}"
            raise FileNotFoundError(
                f"the {role} {name!r} is no folder here and {what} in the Hugging Face cache, and nothing may be "
                f"fetched (--offline, local_files_only or HF_HUB_OFFLINE); allow that, run `hf download {name}` "
                f"first, or {A_FOLDER}"
            )
        return _fetched(role, name, check)
    except FileNotFoundError:
        if cached is not None and role == "draft" and lacking == "tokenizer":  # heads have none
            return cached
        raise


def _in_cache(role: str, name: str) -> Path | None:
    """The folder of a name in the Hugging Face cache; None if it has no config.json there.

    Raises FileNotFoundError for a text that cannot be a name of the Hub.
    """
    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise FileNotFoundError(
            f"the {role} {name!r} is neither a folder nor a name of the Hugging Face Hub, such as Qwen/Qwen3-0.6B; "
            f"{A_FOLDER}, or such a name"
        ) from None
    return Path(config).parent if isinstance(config, str) else None


def _lacking(role: str, folder: Path) -> str | None:
    """What a folder lacks of the files that a target or draft (`role`) needs: "weights" or "tokenizer"; else None."""
    first = next((folder / file for file in WEIGHTS[role] if (folder / file).is_file()), None)
    if first is None:
        return "weights"
    if first.suffix == ".json" and not all((folder / file).is_file() for file in weight_map(first).values()):
        return "weights"
    return None if any((folder / file).is_file() for file in TOKENIZER) else "tokenizer"


def _fetched(role: str, name: str, check: Callable[[Path], object] | None) -> Path:
    """The cache folder of a name, after downloading what was missing; the Hub shows its own progress bars.

    role, check: as in `find_folder`. Raises FileNotFoundError or OSError for a name that cannot be downloaded.
    """
    hub = constants.ENDPOINT
    try:
        files = {
            one.rfilename for one in HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT).siblings or ()
        }
    except Exception as error:  # of the Hub's client, of its HTTP client, and of the disk
        raise FileNotFoundError(_in_words(role, name, error)) from error
    if "config.json" not in files:
        raise FileNotFoundError(
            f"the {role} {name!r} on {hub} has no config.json, so it is not in transformers' format (adapters alone "
            f"are not read; a GGUF file is, after `hf download {name} FILE.gguf --local-dir .`); give another name, "
            f"or {A_FOLDER}"
        )
    weights = {*[file for file in WEIGHTS[role] if file in files][:1]}
    try:
        config = hf_hub_download(name, "config.json")
        for index in [file for file in weights if file.endswith(".json")]:
            weights |= {*weight_map(hf_hub_download(name, index)).values()}
    except Exception as error:
        raise FileNotFoundError(_in_words(role, name, error)) from error
    if check is not None:
        check(Path(config).parent)
    if not weights or not weights <= files:
        raise FileNotFoundError(
            f"the {role} {name!r} on {hub} has no weights that are read, expected {' or '.join(WEIGHTS[role])}, with "
            f"all files of an index; give another name, or {A_FOLDER}"
        )
    beside = {file for file in files if "/" not in file and file.endswith(BESIDE)}
    if role == "draft":
        beside |= {file for file in files if PART.fullmatch(file)}
    try:
        return Path(snapshot_download(name, allow_patterns=sorted(beside | weights)))
    except Exception as error:
        raise FileNotFoundError(_in_words(role, name, error)) from error


def _in_words(role: str, name: str, error: Exception) -> str:
    """Why a name could not be downloaded, and what to do, in one line."""
    hub = constants.ENDPOINT
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        return (
            f"there is no folder {name!r} here for the {role}, and no model of that name on {hub} that you may read: "
            f"check its spelling, {LOG_IN} if it is private, or {A_FOLDER}"
        )
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return (
            f"the {role} {name!r} is on {hub} for those alone who may read it: ask for access on {hub}/{name} and "
            f"{LOG_IN}, or {A_FOLDER}"
        )
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    return (
        f"the {role} {name!r} is no folder here, is not wholly in the Hugging Face cache, and cannot be fetched from "
        f"{hub} ({' '.join(str(cause).split()) or type(cause).__name__}); connect to it, or run `hf download {name}` "
        f"where you can, or {A_FOLDER}"
    )
