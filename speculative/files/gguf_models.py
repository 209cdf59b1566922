"""Models in GGUF files, the format of llama.cpp: transformers reads them, and the result is kept in the user's cache.

transformers makes plain weights of the quantised ones, which takes longer than any other start. So the model, its
tokenizer and its chat template are then kept as safetensors in `$XDG_CACHE_HOME/heavypath/gguf`, in a folder that is
named by the SHA-256 of the file, the dtype and transformers' version. Remove that folder to free its space.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from heavypath.kernels.native.library import cache_folder
from heavypath.speculative.files.gguf_header import GgufHeader, read_header
from heavypath.speculative.files.gguf_positions import FACTORS, scaling_of

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf")
INSTALL = "`pip install gguf accelerate`, or `pip install '.[gguf]'` in a checkout"
INSTEAD = "give a folder with config.json and safetensors weights"
_MAKING = ".making-"  # prefix of folders under construction
_HEADS = ("dflash", "dflash-draft", "eagle3")  # llama.cpp's names of drafts that read a target's hidden states


def gguf_file(role: str, name: str) -> Path | None:
    """The GGUF file that a target or a draft is named by: the file, or a folder with nothing but this one model.

    None for another kind of folder, and for a name of the Hub. Raises FileNotFoundError for a missing file, and
    ValueError for a folder with several.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == SUFFIX:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {name!r} for the {role}; expected a GGUF file")
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    if len(files) > 1 and not all(SPLIT.search(file.name) for file in files):
        names = ", ".join(file.name for file in files)
        raise ValueError(f"the {role} folder {name!r} has {len(files)} GGUF files; give one of {names}")
    return files[0] if files else None


def check_gguf(role: str, file: Path) -> GgufHeader:
    """Check that a GGUF file is whole, in one piece, and can be read here; return its header.

    role: "target" or "draft", for messages

    Raises ImportError if packages are missing, OSError, and ValueError for another format, one part of several, a
    trained draft, and a file that was cut off.
    """
    try:
        header = read_header(file)
        _check_whole_model(header)
        _check_unsplit(file, header)
        _check_packages(role, file)
        _check_size(file, header)
    except ValueError as error:
        raise ValueError(f"cannot read the {role} {str(file)!r}: {error}") from error
    return header


def _check_whole_model(header: GgufHeader) -> None:
    kind = header.architecture
    if kind not in _HEADS:
        return
    window = f"{kind}.attention.sliding_window"
    without = "" if window in header.metadata else f", and this file has no {window}"
    raise ValueError(
        f"it is a trained draft of architecture {kind!r}; files of this kind need not give the layers' windows, or "
        f"whether a block's rows are causal{without}. Only the number of accepted tokens would show an error in that; "
        "give the folder with config.json and safetensors that it was made from"
    )


def _check_packages(role: str, file: Path) -> None:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise ImportError(f"the {role} {str(file)!r} needs the package {' and '.join(missing)}: {INSTALL}")


def _check_unsplit(file: Path, header: GgufHeader) -> None:
    named = SPLIT.search(file.name)
    count = int(named[2]) if named else header.metadata.get("split.count", 1)
    if count > 1:
        first = SPLIT.sub(f"-00001-of-{count:05}{SUFFIX}", file.name)
        whole = SPLIT.sub(SUFFIX, file.name)
        raise ValueError(
            f"it is one of {count} parts of a model, and transformers reads models in one file alone; join them by "
            f"`llama-gguf-split --merge {first} {whole}` of llama.cpp, or {INSTEAD}"
        )


def _check_size(file: Path, header: GgufHeader) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType}
    for tensor in header.tensors:
        if tensor.kind not in known:
            raise ValueError(f"its tensor {tensor.name!r} is of type {tensor.kind}, which the package gguf lacks")
        block, size = known[tensor.kind]
        end = header.data_start + tensor.offset + tensor.elements // block * size
        if end > file.stat().st_size:
            raise ValueError(
                f"it is cut off: its tensor {tensor.name!r} ends at byte {end}, and the file has "
                f"{file.stat().st_size}; fetch it again"
            )


def unpacked(role: str, file: Path, dtype: torch.dtype) -> Path:
    """The folder with the model of a GGUF file in transformers' format: from the user's cache, or made now.

    role: "target" or "draft", for messages; dtype: of the weights in the folder

    Processes wait for each other, so that one of them makes it. Raises the errors of `check_gguf`, OSError if the
    cache cannot be written, and ValueError for a model that transformers cannot read.
    """
    header = check_gguf(role, file)
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    name = f"{digest[:32]}-{str(dtype).removeprefix('torch.')}-transformers-{transformers.__version__}"
    place = _place()
    if (place / name).is_dir():
        return place / name
    with _alone(place):
        if not (place / name).is_dir():
            logger.warning("reading the GGUF file %s once, for some minutes; kept in %s", file, place / name)
            _check_room(place, header.elements * dtype.itemsize)
            with tempfile.TemporaryDirectory(prefix=_MAKING, dir=place) as made:
                try:
                    _save(file, header, dtype, Path(made) / "model")
                except Exception as error:
                    raise ValueError(
                        f"transformers {transformers.__version__} cannot read the {role} {str(file)!r}, a GGUF file of "
                        f"architecture {header.architecture!r}: {error}; {INSTEAD}"
                    ) from error
                (Path(made) / "model").rename(place / name)
    return place / name


def _place() -> Path:
    """The folder of all unpacked models, in the user's cache; made if missing. Raises OSError if that is impossible."""
    try:
        place = cache_folder() / "gguf"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise OSError(f"unpacked GGUF files need a folder for caches: {error}; set XDG_CACHE_HOME") from error
    return place


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """A context in which only one process at a time works in the folder `place`.

    Unfinished folders of processes that were killed are removed first.
    """
    with (place / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in place.glob(f"{_MAKING}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _check_room(place: Path, needed: int) -> None:
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OSError(
            f"the unpacked model needs {needed / 1e9:.1f} GB in {str(place)!r}, where {free / 1e9:.1f} GB are free; "
            "make room, set XDG_CACHE_HOME to another disk, or take bfloat16 (--dtype, dtype=)"
        )


def _save(file: Path, header: GgufHeader, dtype: torch.dtype, folder: Path) -> None:
    """Write the model and the tokenizer of a file into a new folder. Raises the errors of transformers."""
    folder.mkdir()
    # An absolute name, since transformers prefers a file of this name in the working directory. The folder is still
    # empty, so that nothing besides the file is read.
    source = {"gguf_file": os.path.abspath(file), "local_files_only": True, "trust_remote_code": False}
    with _without_bar():
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **source)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"the file lacks {len(missing)} tensors of the model, first {missing[0]!r}")
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    _plain(model, file, header).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if len(tokenizer) > (count := header.metadata["tokenizer.ggml.tokens"]):
        _drop_tokens(folder / "tokenizer.json", count)


def _drop_tokens(file: Path, count: int) -> None:
    """Remove added tokens with numbers of `count` or more, which transformers' classes add, from a tokenizer.json."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < count]
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _plain(model: PreTrainedModel, file: Path, header: GgufHeader) -> PreTrainedModel:
    """A copy of a model, over its weights, that can be saved: transformers refuses to save a model read as quantised.

    It also gets the file's scaling of positions and its end-of-turn token. Logs a warning if the model has fewer
    numbers than the file.
    """
    config: Any = model.config
    del config.quantization_config
    config.name_or_path = ""
    _scale_positions(config, file, header)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    numbers = sum(parameter.numel() for parameter in plain.parameters())
    read = sum(tensor.elements for tensor in header.tensors if tensor.name != FACTORS)
    if numbers < read:
        logger.warning(
            "transformers makes a model of %d parameters of this file, whose tensors have %d numbers: what it leaves "
            "out may change the text",
            numbers,
            read,
        )
    _end_answers(plain, header.metadata.get("tokenizer.ggml.eot_token_id"))
    return plain


def _end_answers(model: PreTrainedModel, end_of_turn: int | None) -> None:
    """Add the token for the end of a turn to the model's end-of-sequence tokens, as llama.cpp does; None adds none."""
    settings = model.generation_config
    ends = settings.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    if end_of_turn is not None and end_of_turn not in ends:
        settings.eos_token_id = [*ends, end_of_turn]


def _scale_positions(config: transformers.PreTrainedConfig, file: Path, header: GgufHeader) -> None:
    """Add the file's scaling of rotary positions to a config, in place; for Gemma 3 only to full attention's.

    Raises ValueError if the config has no rotary embeddings, but the file scales positions.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    scaling = scaling_of(file, header, float(rope.get("rope_theta", 0.0)))
    if scaling and not rope:
        raise ValueError(f"it scales positions, {scaling}, and its config has no rotary embeddings")
    rope.update(scaling)


@contextmanager
def _without_bar() -> Iterator[None]:
    """A context without the progress bar that transformers shows for GGUF files, which its own setting leaves on."""
    reading: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    bar = reading.tqdm
    reading.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        reading.tqdm = bar
