"""Train the demo pair from nothing: tokenizer, target, draft, a head for the target, and records of what they reach.

    python bench/train_demo_pair.py                          # everything, about three hours on two CPU cores
    python bench/train_demo_pair.py --stage target --resume
    python bench/train_demo_pair.py --stage head             # for the package's target if there is no other

Checkpoints and half-made models stay in the work folder; speculative/demo/ changes only when the pair is whole. Its
record.json and head/record.json are what the stages measure and measure-head write.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_pair import corpus
from demo_pair.distillation import DraftTraining, LongDraftTraining, fast_autocast, train_draft
from demo_pair.head_training import (
    DeepHeadTraining,
    GentleHeadTraining,
    HeadTraining,
    LongHeadTraining,
    ask_for_taps,
    head_config,
    train_head,
)
from demo_pair.measurement import agreement_on, measure_pair
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from heavypath.speculative.demo import FOLDER, load_demo_pair
from heavypath.speculative.drafts.heads.checkpoint import load_head
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.heads.saving import save_head
from heavypath.speculative.files.typed_json import read_json
from heavypath.speculative.training.learning import Learnt
from heavypath.speculative.training.loop import Checkpoints, train
from heavypath.speculative.training.optimization import Optimization, Schedule, TrainingProgress

STAGES = ("tokenizer", "target", "draft", "measure", "head", "measure-head")
HEAD_PHASES = (HeadTraining(), GentleHeadTraining(), LongHeadTraining(), DeepHeadTraining())


@dataclass(frozen=True)
class Phase:
    """Optimiser steps at one sequence length."""

    steps: int
    length: int


@dataclass(frozen=True)
class TargetTraining(Schedule):
    """Every setting of the target's training; attention costs little on short rows, so most steps see those."""

    steps: int = 1260
    warmup_steps: int = 30
    decay_steps: int = 460
    matrix_rate: float = 4e-3
    vector_rate: float = 3e-3
    weight_decay: float = 0.1
    phases: tuple[Phase, ...] = (Phase(1000, 256), Phase(200, 512), Phase(60, 1024))
    tokens_per_step: int = 4096
    seed: int = 1


def target_config() -> LlamaConfig:
    """Llama of 9.4 million parameters: 8 layers of width 320."""
    return _llama_config(
        hidden_size=320, intermediate_size=864, num_hidden_layers=8, num_attention_heads=10, num_key_value_heads=5
    )


def draft_config() -> LlamaConfig:
    """Llama of 0.44 million parameters: 1 layer of width 160."""
    return _llama_config(
        hidden_size=160, intermediate_size=432, num_hidden_layers=1, num_attention_heads=5, num_key_value_heads=1
    )


def _llama_config(**shape: Any) -> LlamaConfig:
    return LlamaConfig(
        **shape,
        vocab_size=corpus.VOCABULARY,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=corpus.END_OF_TEXT_ID,
        eos_token_id=corpus.END_OF_TEXT_ID,
    )


def make_tokenizer(work: Path) -> None:
    """Train the tokenizer, encode the corpus and choose the prompts."""
    sources = corpus.read_corpus()
    tokenizer = corpus.train_tokenizer(sources)
    tokenizer.save_pretrained(work / "tokenizer")
    write_json(work / "prompts.json", corpus.choose_prompts(sources, tokenizer))
    train, held_out = encode_corpus(sources, tokenizer, work)
    facts = {
        "source": "the Python standard library, its own .py files without tests and generated tables",
        "licence": "PSF-2.0",
        "sha256": corpus.corpus_hash(sources),
        "files": {"train": len(train), "held_out": len(held_out)},
        "tokens": {"train": sum(map(len, train)), "held_out": sum(map(len, held_out))},
        "characters": sum(len(source.text) for source in sources),
    }
    write_json(work / "data.json", facts)
    print(facts, flush=True)


def encode_corpus(
    sources: list[corpus.Source], tokenizer: PreTrainedTokenizerFast, work: Path
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Leave the encoded files at `tokens.pt`; the training files and the held-out ones, int16 each."""
    train, held_out = (
        corpus.encode_documents(tokenizer, [source.text for source in sources if source.held_out == wanted])
        for wanted in (False, True)
    )
    torch.save({"train": train, "held_out": held_out}, work / "tokens.pt")
    return train, held_out


def train_target(work: Path, settings: TargetTraining, resume: bool) -> None:
    """Next-token training; leaves `target/` in the work folder."""
    documents, held_out = load_documents(work)
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(target_config())
    compiled_loss = torch.compile(next_token_loss, dynamic=False)  # 6 to 17 % faster than eager on two cores

    def gradients(rows: torch.Tensor) -> Learnt:
        with fast_autocast():
            loss = compiled_loss(model.train(), rows)
        loss.backward()
        return Learnt(loss.detach(), torch.zeros(0))

    def say_loss(step: int, learnt: Learnt) -> None:
        print(f"  held-out loss {mean_loss(model, corpus.windows(held_out, 513)[:48]):.3f}", flush=True)

    optimization, progress = Optimization(model, settings), TrainingProgress(settings.steps, settings.tokens_per_step)
    checkpoints = Checkpoints(work / "target.pt", every=100, resume=resume)
    seconds = train(optimization, target_batches(documents, settings), gradients, checkpoints, progress, say_loss)
    finish(model, work, "target", asdict(settings), seconds)


def target_batches(documents: list[torch.Tensor], settings: TargetTraining) -> Iterator[torch.Tensor]:
    """One batch [rows, length + 1] per optimiser step, through all phases."""
    for index, phase in enumerate(settings.phases):
        rows = settings.tokens_per_step // phase.length
        yield from islice(corpus.training_batches(documents, phase.length, rows, settings.seed + index), phase.steps)


def next_token_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over rows [rows, length + 1]."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits  # [rows, length, V]
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Mean cross-entropy over many rows, int16 [rows, length + 1]."""
    model.eval()
    with fast_autocast():
        return sum(next_token_loss(model, part.long()).item() * len(part) for part in rows.split(8)) / len(rows)


def distil_draft(work: Path, phases: tuple[DraftTraining, ...], resume: bool) -> None:
    """Train the draft on the target's distributions; leaves `draft/` in the work folder."""
    documents, _ = load_documents(work)
    target = LlamaForCausalLM.from_pretrained(work / "target", dtype=torch.float32, local_files_only=True).eval()
    torch.manual_seed(phases[0].seed)
    draft = LlamaForCausalLM(draft_config())
    seconds = sum(train_draft(draft, target, documents, phase, work, resume) for phase in phases)
    finish(draft, work, "draft", {"phases": [asdict(phase) for phase in phases]}, seconds)


def distil_head(work: Path, phases: tuple[HeadTraining, ...], resume: bool) -> None:
    """Train the head for the target of the work folder or, where there is none, of the package; leaves `head/`."""
    documents, _ = load_documents(work)
    folder = work / "target" if (work / "target").exists() else FOLDER / "target"
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    torch.manual_seed(phases[0].seed)
    head = EagleHead(head_config())
    seconds: list[float] = []
    for _, on_same_rows in groupby(phases, lambda phase: phase.corpus_sets):
        first, *others = on_same_rows
        teacher = ask_for_taps(target, documents, head.config.taps, first, work, resume)
        seconds += [train_head(head, target, teacher, phase, work, resume) for phase in (first, *others)]
    save_head(head.half(), work / "head")
    facts = {
        "wall_seconds": round(sum(seconds)),
        "wall_seconds_by_phase": [round(each) for each in seconds],
        "threads": torch.get_num_threads(),
    }
    write_json(work / "head.json", {**facts, "phases": [asdict(phase) for phase in phases]})


def finish(model: LlamaForCausalLM, work: Path, name: str, settings: dict[str, Any], seconds: float) -> None:
    """Save the model in fp16, as it ships, and how it was trained."""
    model.half().save_pretrained(work / name)
    write_json(work / f"{name}.json", {"wall_seconds": round(seconds), **settings})


def export(work: Path) -> None:
    """Replace the package's pair by the one in the work folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(work / "tokenizer" / name, FOLDER / name)
    for name in ("target", "draft"):
        shutil.copytree(work / name, FOLDER / name, copy_function=shutil.copyfile, dirs_exist_ok=True)
    shutil.copyfile(work / "prompts.json", FOLDER / "prompts.json")


def export_head(work: Path) -> None:
    """Replace the package's head by the one in the work folder."""
    shutil.copytree(work / "head", FOLDER / "head", copy_function=shutil.copyfile, dirs_exist_ok=True)


def measure(work: Path) -> None:
    """Measure the package's pair and write its record.json."""
    started = time.monotonic()
    documents, held_out = load_documents(work)
    pair = load_demo_pair()
    record = {
        "data": read_json(work / "data.json"),
        "licence_of_weights": "Apache-2.0",
        "training": {name: read_json(work / f"{name}.json") for name in ("target", "draft")},
        **measure_pair(pair.target, pair.draft, documents, held_out),
        "measurement_wall_seconds": round(time.monotonic() - started),
    }
    write_json(FOLDER / "record.json", record)
    print(json.dumps(record, indent=1))


def measure_head(work: Path) -> None:
    """Measure the package's head and write its record.json. Without one in `work` the record of training stays."""
    started = time.monotonic()
    trained, recorded = work / "head.json", FOLDER / "head" / "record.json"
    training = read_json(trained) if trained.exists() else read_json(recorded)["training"]
    _, held_out = load_documents(work)
    target = load_demo_pair().target
    record = {
        "licence_of_weights": "Apache-2.0",
        "training": training,
        **agreement_on(load_head(FOLDER / "head", target), target, held_out),
        "measurement_wall_seconds": round(time.monotonic() - started),
    }
    write_json(recorded, record)
    print(json.dumps(record, indent=1))


def load_documents(work: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The encoded training files and the held-out ones, int16 each; encoded by the package's tokenizer if not yet."""
    if not (work / "tokens.pt").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER, local_files_only=True)
        encode_corpus(corpus.read_corpus(), tokenizer, work)
    tokens = torch.load(work / "tokens.pt", weights_only=True)
    return tokens["train"], tokens["held_out"]


def write_json(path: Path, content: object) -> None:
    """Store `content` at `path`, readable by people."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Run the stages asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=(*STAGES, "all"), default="all")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "heavypath-demo")
    parser.add_argument("--resume", action="store_true", help="continue from the work folder's checkpoints")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    work, resume = arguments.work, arguments.resume
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    stages = STAGES if arguments.stage == "all" else (arguments.stage,)
    if "tokenizer" in stages:
        make_tokenizer(work)
    if "target" in stages:
        train_target(work, TargetTraining(), resume)
    if "draft" in stages:
        distil_draft(work, (DraftTraining(), LongDraftTraining()), resume)
        export(work)
    if "measure" in stages:
        measure(work)
    if "head" in stages:
        distil_head(work, HEAD_PHASES, resume)
        export_head(work)
    if "measure-head" in stages:
        measure_head(work)


if __name__ == "__main__":
    main()
