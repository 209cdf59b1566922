"""`heavypath distil`: train a draft for a target on the user's texts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heavypath.speculative.cli.options import Device, Dtype, Offline, Target, Threads
from heavypath.speculative.cli.progress import starting
from heavypath.speculative.training.settings import LOSS_NAMES, DistilSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from heavypath.speculative.drafts.blocks.head import BlockHead
    from heavypath.speculative.drafts.heads.eagle import EagleHead
    from heavypath.speculative.drafts.medusa.heads import MedusaHeads
    from heavypath.speculative.training.documents import Document

DEFAULTS = DistilSettings()
KINDS = {  # kind of draft -> the options that only this kind, or some kinds, have
    "head": ("--draft-vocab-size", "--depths"),
    "model": ("--layers", "--config"),
    "block": ("--draft-vocab-size", "--depths", "--term"),
    "medusa": ("--depths", "--one-head"),
}
TERMS = ("gated", "vanilla", "rnn", "none")
LARGEST_VOCABULARY = 32000  # default limit of a head; EAGLE-3's published heads for 128,256 tokens have it, too


def distil(
    data: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            help='Text files, folders of them, or .jsonl files with "text", "messages" or "prompt" on each line.',
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder for the draft: a new one, or an empty one.")],
    target: Target = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="head (EAGLE-3, the default), block (all levels in one pass, DSpark), medusa (a head for each level), "
            "or model, which --layers and --config imply."
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Train a model of these layers of the target, as 0,1,..., instead of a head.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Train a new model with this config.json, instead of a head.")
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help=f"Tokens that a head or block can propose; default: all, at most {LARGEST_VOCABULARY}."),
    ] = None,
    term: Annotated[
        str | None,
        typer.Option(help=f"What a block adds to a node's logits, one of {', '.join(TERMS)}; default: {TERMS[0]}."),
    ] = None,
    loss: Annotated[str, typer.Option(help=f"One of {', '.join(LOSS_NAMES)}.")] = DEFAULTS.loss,
    epochs: Annotated[float, typer.Option(help="How often to go through the data.")] = DEFAULTS.epochs,
    length: Annotated[int, typer.Option(help="Tokens of a row of text.")] = DEFAULTS.length,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens of a batch.")] = DEFAULTS.tokens_per_step,
    depths: Annotated[
        int | None,
        typer.Option(help="Levels below the root to train; default: 5 for a head, 7 for a block, 5 for medusa."),
    ] = None,
    one_head: Annotated[
        bool, typer.Option("--one-head", help="In each step train one of the Medusa heads, drawn at random.")
    ] = DEFAULTS.one_head,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate; default: 2 / width of the draft.")] = None,
    written: Annotated[
        float, typer.Option(help="Share of the texts whose continuations the target generates, from their beginnings.")
    ] = DEFAULTS.written,
    held_out: Annotated[
        float, typer.Option(help="Share of the texts that are used only to measure, never to train.")
    ] = DEFAULTS.held_out,
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep",
            help="Keep the target's hidden states on disk, so that it reads the texts once. Default: on a CPU with "
            "several epochs, up to 16 GB.",
        ),
    ] = DEFAULTS.keep,
    checkpoint_steps: Annotated[int, typer.Option(help="Steps between checkpoints.")] = DEFAULTS.checkpoint_steps,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the order of texts, and generated texts.")] = 0,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    offline: Offline = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the folder's last checkpoint.")] = False,
) -> None:
    """Train a head, a block draft, Medusa heads or a draft model for a target, on texts like those to be continued."""
    settings = DistilSettings(
        epochs=epochs,
        length=length,
        tokens_per_step=tokens_per_step,
        depths=depths,
        one_head=one_head,
        loss=loss,
        rate=rate,
        written=written,
        held_out=held_out,
        keep=keep,
        checkpoint_steps=checkpoint_steps,
        seed=seed,
    )
    kind = _kind(
        {
            "--layers": layers,
            "--config": config,
            "--draft-vocab-size": draft_vocab_size,
            "--depths": depths,
            "--term": term,
            "--one-head": one_head or None,
        },
        kind,
    )
    chosen = None if layers is None else _numbers(layers)
    for path in data:
        if not path.expanduser().exists():
            raise FileNotFoundError(f"there is no file or folder {str(path)!r} to train on")
    import torch

    with starting():
        from heavypath.speculative.cli.support import load
        from heavypath.speculative.distillation import distil as train
        from heavypath.speculative.training.beginnings import draft_of_layers, new_block, new_head, new_medusa
        from heavypath.speculative.training.documents import read_documents

    pair = load(target, None, dtype, device=device, threads=threads, offline=offline)
    documents = read_documents(data, pair.tokenizer)
    torch.manual_seed(seed)
    if chosen is not None:
        draft: EagleHead | BlockHead | MedusaHeads | PreTrainedModel = draft_of_layers(pair.target, chosen)
    elif config is not None:
        draft = _model_of(config)
    elif kind == "medusa":
        draft = new_medusa(pair.target, heads=depths or 5)
    else:
        tokens = _tokens(pair.target, documents, draft_vocab_size)
        blocks: dict[str, Any] = {"block_size": depths, "term": "" if term == "none" else term}
        blocks = {name: value for name, value in blocks.items() if value is not None}
        draft = new_block(pair.target, tokens, **blocks) if kind == "block" else new_head(pair.target, tokens)
    record = train(
        draft,
        pair.target,
        documents,
        out,
        settings,
        tokenizer=pair.tokenizer,
        resume=resume,
        say=lambda line: typer.echo(line, err=True),
    )
    typer.echo(f"wrote {out}, {record['parameters']:,} parameters; `--draft {out}` drafts with it", err=True)


def _kind(given: dict[str, object], kind: str | None) -> str:
    """Return the kind of draft by --kind and the kinds' options; ValueError for options that do not go together."""
    if given["--layers"] is not None and given["--config"] is not None:
        raise ValueError("--layers and --config are of different kinds of drafts; give one of them")
    of_model = [name for name in KINDS["model"] if given[name] is not None]
    kind = kind or ("model" if of_model else "head")
    if kind not in KINDS:
        raise ValueError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}")
    for name, value in given.items():
        if value is not None and name not in KINDS[kind]:
            others = " or ".join(other for other, options in KINDS.items() if name in options)
            raise ValueError(f"{name} is of --kind {others}, not of {kind}")
    if given["--term"] not in (None, *TERMS):
        raise ValueError(f"--term must be one of {', '.join(TERMS)}, got {given['--term']!r}")
    if kind == "model" and not of_model:
        raise ValueError("--kind model needs --layers, the target's layers to copy, or --config, a config.json")
    return kind


def _tokens(
    target: "PreTrainedModel", documents: "list[Document]", draft_vocab_size: int | None
) -> "torch.Tensor | None":
    """Return the tokens that a head or a block draft can propose; None for all."""
    from heavypath.speculative.training.beginnings import most_frequent

    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    size = min(vocab_size, LARGEST_VOCABULARY) if draft_vocab_size is None else draft_vocab_size
    return None if size == vocab_size else most_frequent(documents, size, vocab_size)


def _numbers(layers: str) -> list[int]:
    numbers = layers.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise ValueError(f"--layers must be numbers of the target's layers, as 0,1,..., got {layers!r}")
    return [int(number) for number in numbers]


def _model_of(file: Path) -> "PreTrainedModel":
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise ValueError(f"cannot make a causal language model of --config {str(file)!r}: {error}") from error
