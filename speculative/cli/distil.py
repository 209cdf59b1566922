"""`heavypath distil` trains a draft for a target on texts of one's own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli.options import Device, Dtype, Target, Threads
from heavypath.speculative.cli.progress import starting
from heavypath.speculative.training.settings import LOSS_NAMES, DistilSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from heavypath.speculative.drafts.heads.eagle import EagleHead
    from heavypath.speculative.training.documents import Document

DEFAULTS = DistilSettings()
LARGEST_VOCABULARY = 32000  # of a head, unless told; that of EAGLE-3's own heads for targets of 128,256 tokens


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
    layers: Annotated[
        str | None, typer.Option(help="Train a model of these layers of the target, as 0,1,..., in place of a head.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Train a new model of this config.json, in place of a head.")
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help=f"Tokens that a head can propose; default: all, at most {LARGEST_VOCABULARY}.")
    ] = None,
    loss: Annotated[str, typer.Option(help=f"One of {', '.join(LOSS_NAMES)}.")] = DEFAULTS.loss,
    epochs: Annotated[float, typer.Option(help="How often to go through the data.")] = DEFAULTS.epochs,
    length: Annotated[int, typer.Option(help="Tokens of a row of text.")] = DEFAULTS.length,
    tokens_per_step: Annotated[int, typer.Option(help="Tokens of a batch.")] = DEFAULTS.tokens_per_step,
    depths: Annotated[int, typer.Option(help="Levels below the root that a head is trained for.")] = DEFAULTS.depths,
    rate: Annotated[float | None, typer.Option(help="Peak learning rate; default: 2 / width of the draft.")] = None,
    written: Annotated[
        float, typer.Option(help="Share of the texts that the target writes anew, from their beginnings.")
    ] = DEFAULTS.written,
    held_out: Annotated[
        float, typer.Option(help="Share of the texts to measure on, and never to train on.")
    ] = DEFAULTS.held_out,
    checkpoint_steps: Annotated[int, typer.Option(help="Steps between checkpoints.")] = DEFAULTS.checkpoint_steps,
    seed: Annotated[int, typer.Option(help="Of the weights, the order of texts, and the text written.")] = 0,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
) -> None:
    """Train an EAGLE-3 head for a target, or a draft model, on texts like those to be continued."""
    settings = DistilSettings(
        epochs=epochs,
        length=length,
        tokens_per_step=tokens_per_step,
        depths=depths,
        loss=loss,
        rate=rate,
        written=written,
        held_out=held_out,
        checkpoint_steps=checkpoint_steps,
        seed=seed,
    )
    given = [
        name for name, value in {"--layers": layers, "--config": config, "--draft-vocab-size": draft_vocab_size}.items()
        if value is not None
    ]  # fmt: skip
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are of different kinds of drafts; give one of them")
    chosen = None if layers is None else _numbers(layers)
    for path in data:
        if not path.expanduser().exists():
            raise FileNotFoundError(f"there is no file or folder {str(path)!r} to train on")
    import torch

    with starting():
        from heavypath.speculative.cli.support import load
        from heavypath.speculative.distillation import distil as train
        from heavypath.speculative.training.beginnings import draft_of_layers
        from heavypath.speculative.training.documents import read_documents

    pair = load(target, None, dtype, device=device, threads=threads)
    documents = read_documents(data, pair.tokenizer)
    torch.manual_seed(seed)
    if chosen is not None:
        draft: EagleHead | PreTrainedModel = draft_of_layers(pair.target, chosen)
    elif config is not None:
        draft = _model_of(config)
    else:
        draft = _head(pair.target, documents, draft_vocab_size)
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


def _head(target: "PreTrainedModel", documents: "list[Document]", draft_vocab_size: int | None) -> "EagleHead":
    from heavypath.speculative.training.beginnings import most_frequent, new_head

    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    size = min(vocab_size, LARGEST_VOCABULARY) if draft_vocab_size is None else draft_vocab_size
    return new_head(target, None if size == vocab_size else most_frequent(documents, size, vocab_size))


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
