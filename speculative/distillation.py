"""`distil` trains a draft for a target on the user's data: a head, a block draft, Medusa heads, or a draft model.

Rows of tokens are cut from the documents and from the target's continuations of their prompts. The target reads a batch
when it is due. If there are several epochs on a CPU, it reads all rows once, and its hidden states are kept on disk,
see `training.kept`: those of a million tokens take 4.6 GB for a target that is 576 wide, and 33 GB for one of 4,096.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.blocks.saving import save_block
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.heads.saving import save_head
from heavypath.speculative.drafts.medusa.heads import MedusaHeads
from heavypath.speculative.drafts.medusa.saving import save_medusa
from heavypath.speculative.training.blocks import check_trains
from heavypath.speculative.training.documents import Document, check_tokens
from heavypath.speculative.training.kept import KeptStates, bytes_kept
from heavypath.speculative.training.learning import Learnt, learn, measure_agreement
from heavypath.speculative.training.loop import Checkpoints, train
from heavypath.speculative.training.losses import LOSSES
from heavypath.speculative.training.medusa import check_medusa, one_at_random, student_of_medusa
from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.optimization import Optimization, Schedule, TrainingProgress, save_whole, say_now
from heavypath.speculative.training.own_text import write_texts
from heavypath.speculative.training.record import environment
from heavypath.speculative.training.rows import Rows, RowSettings, Texts, batches_of, make_rows
from heavypath.speculative.training.settings import MEASURED_DEPTHS, DistilSettings
from heavypath.speculative.training.student import Student, student_of_block, student_of_head, student_of_model
from heavypath.speculative.training.teacher import Logits, Taught, Teacher

KEPT_AT_MOST = 16e9  # bytes on disk that a training takes without being asked
CHECKPOINT_FOLDER = "training"  # inside the result's folder; deleted when the result is saved
Learner = EagleHead | BlockHead | MedusaHeads | PreTrainedModel  # kinds of drafts that are trained


def distil(
    draft: Learner,
    target: PreTrainedModel,
    documents: list[Document],
    folder: str | Path,
    settings: DistilSettings = DistilSettings(),
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    resume: bool = False,
    say: Callable[[str], object] = say_now,
) -> dict[str, Any]:
    """Train a draft for a target, in place, and save it with a record of the training, which is also returned.

        head = new_head(target)  # or new_block(target), new_medusa(target), draft_of_layers(target, [0, 7]), any model
        distil(head, target, read_documents(["chats.jsonl"], tokenizer), "my-head", tokenizer=tokenizer)
        decoder = SpeculativeDecoder(target, head)                  # later: load_draft("my-head", target)

    draft: an EAGLE head, a block draft, Medusa heads, or a causal language model with the target's vocabulary.
        Afterwards it is on the target's device, in its dtype, in eval mode and without gradients
    documents: the texts to train on, from `read_documents`
    folder: where the draft and record.json are saved. It must be new or empty, except with resume; until training has
        finished it has checkpoints and rows of tokens
    settings: length of rows, epochs, rates, loss and the rest
    tokenizer: saved with a plain draft model, so that `load_draft` finds it
    resume: continue from the folder's last checkpoint with its rows; the result is the same as without interruption.
        Of the settings only `keep` may differ
    say: called with lines that report progress

    Where bf16 is faster (`multiplies_bf16_faster`), the draft's passes are in bf16 and the trained weights in fp32.
    A batch that does not fit into memory is processed in parts, with the same gradients. Ctrl-C saves a checkpoint
    and ends the training.

    Raises ValueError for a draft that does not fit the target, for documents that are too short, for a folder with
    other content, for settings that differ from the checkpoint's, and for settings that this kind of draft does not
    have. Raises torch.OutOfMemoryError if a single row does not fit.
    """
    folder = Path(folder)
    settings = _settings_for(draft, settings)
    _check(draft, target, settings)
    check_tokens(documents, target.config.get_text_config(decoder=True).vocab_size)
    parameters = sum(weight.numel() for weight in draft.parameters())
    work = folder / CHECKPOINT_FOLDER
    _check_folder(folder, resume)
    draft.to(device=target.device, dtype=torch.float32)  # pyright: ignore[reportCallIssue]
    student = _student(draft, target)
    teacher = Teacher(target, draft.config.taps if isinstance(draft, EagleHead | BlockHead) else ())
    with _without_gradients(target):
        made_for = {**asdict(settings), "draft": draft.config.model_type, "parameters": parameters}
        del made_for["keep"]  # may change: errors that advise another value come after the target has written its texts
        rows = _saved_rows(work / "rows.pt", made_for) if resume else _new_rows(documents, target, settings, say)
        if not resume:
            work.mkdir(parents=True, exist_ok=True)
            sides = {name: side._asdict() for name, side in rows._asdict().items()}
            try:
                save_whole({"made_for": made_for, **sides}, work / "rows.pt")
            except OSError:
                work.rmdir()  # it has nothing to resume
                raise
        state = _train(student, teacher, rows, settings, work / "checkpoint.pt", say)
    if not isinstance(draft, PreTrainedModel):
        *_, last = state["held_out"].values()
        measured = last["same_likeliest_token"][0], last["overlap"][0]
        if any(map(math.isnan, measured)):  # no held-out answer is where the draft predicts its first token
            measured = None
        config: Any = replace(draft.config, acceptance=measured)
        draft.config = config
    draft.requires_grad_(False)
    for weight in draft.parameters():  # only parameters: rotary frequencies, which are buffers, stay fp32
        weight.data = weight.data.to(target.dtype)
    if isinstance(draft, EagleHead):
        save_head(draft, folder)
    elif isinstance(draft, BlockHead):
        save_block(draft, folder, target.config.get_text_config(decoder=True).num_hidden_layers)
    elif isinstance(draft, MedusaHeads):
        save_medusa(draft, folder, target.name_or_path)
    else:
        draft.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    record = {
        "target": target.name_or_path,
        "draft": draft.config.model_type,
        "parameters": parameters,
        "settings": asdict(settings),
        "rows": {"train": len(rows.train.tokens), "held_out": len(rows.held_out.tokens)},
        "predicted_tokens": {"train": int(rows.train.predicts.sum()), "held_out": int(rows.held_out.predicts.sum())},
        **state,
        **environment(),
    }
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(work)
    return record


def schedule_of(settings: DistilSettings, rows: int, width: int) -> Schedule:
    """The number of steps and the learning rates of a training. rows: of the data; width: hidden size of the draft."""
    steps = max(1, round(settings.epochs * rows / settings.rows_per_step))
    rate = settings.rate or 2 / width
    return Schedule(
        steps=steps,
        warmup_steps=max(1, steps // 25),
        decay_steps=max(1, steps * 3 // 5),
        matrix_rate=rate,
        vector_rate=rate * 2 / 3,
        weight_decay=0.01,
    )


def _train(
    student: Student,
    teacher: Teacher,
    rows: Rows,
    settings: DistilSettings,
    checkpoint: Path,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Train the student in place, with checkpoints. Returns what to record: steps, tokens, seconds, loss, agreement.

    rows: of tokens, to train on and held out; checkpoint: the file of the checkpoint, from which training continues if
    it exists
    """
    size = settings.rows_per_step
    config: Any = student.module.config
    schedule = schedule_of(settings, len(rows.train.tokens), config.hidden_size)
    optimization = Optimization(student.module, schedule)
    loss = LOSSES[settings.loss]
    depths = settings.depths or 1
    states, target_logits = _states(student, teacher, rows.train, settings, checkpoint.parent, say)
    every = [(settings.decay or 1.0) ** depth for depth in range(depths)]
    weights = one_at_random(every, settings.seed) if settings.one_head else repeat(every)
    parts = RowsAtATime(
        size, f"lower length ({settings.length})" + (f" or depths ({depths})" if depths > 1 else ""), say
    )
    state: dict[str, Any] = {"loss": None, "held_out": {}, "rows_at_once": size}

    def gradients(batch: tuple[int, Tensor, list[float]]) -> Learnt:
        step, chosen, by_depth = batch
        begin = step % student.stride
        parts.rows = state["rows_at_once"]
        predicts = rows.train.predicts[chosen, begin:]

        def of_part(part: Tensor) -> Learnt:
            return learn(student, states(part, begin), target_logits, loss, by_depth, predicts)

        found = parts.run(chosen, of_part, optimization.clear)
        state["rows_at_once"] = parts.rows
        return Learnt(*(torch.stack(values).sum(0) for values in zip(*found, strict=True)))

    def note(step: int, learnt: Learnt | None = None) -> None:
        overlaps, same = measure_agreement(
            student, teacher, rows.held_out.tokens, MEASURED_DEPTHS, parts, rows.held_out.predicts
        )
        shown = {"overlap": overlaps.tolist(), "same_likeliest_token": same.tolist()}
        state["held_out"][step] = {name: [round(value, 4) for value in values] for name, values in shown.items()}
        state["loss"] = None if learnt is None else round(learnt.loss.item(), 4)
        say(f"held-out overlap after {step} steps: {' '.join(f'{value:.3f}' for value in overlaps.tolist())}")

    if not checkpoint.exists():
        note(0)
    numbers = torch.arange(len(rows.train.tokens), device="cpu")
    seconds = train(
        optimization,
        zip(count(), batches_of(numbers, size, settings.seed), weights, strict=False),
        gradients,
        Checkpoints(checkpoint, settings.checkpoint_steps, resume=checkpoint.exists(), state=state),
        TrainingProgress(schedule.steps, size * settings.length, say),
        note,
    )
    tokens = schedule.steps * size * settings.length
    return {"steps": schedule.steps, "tokens": tokens, "seconds": round(seconds), **state}


def _states(
    student: Student,
    teacher: Teacher,
    rows: Texts,
    settings: DistilSettings,
    work: Path,
    say: Callable[[str], object],
) -> tuple[Callable[[Tensor, int], Taught], Logits]:
    """How the target's hidden states are found: computed when they are needed, or computed once and kept on disk.

    Returns a function from (numbers of rows, how many tokens to leave out at their beginning) to hidden states, and a
    function from these to the target's logits. Raises OSError if the disk has no room.

    work: a folder for the states
    """
    target = teacher.target
    width = target.config.get_text_config(decoder=True).hidden_size
    size = bytes_kept(rows.tokens, width, len(teacher.taps))
    keep = settings.keep
    if keep is None:
        keep = settings.epochs > 1 and target.device.type == "cpu" and size <= KEPT_AT_MOST
    if not keep:

        def computed(chosen: Tensor, begin: int) -> Taught:
            taught = teacher(rows.tokens[chosen, begin:])
            return taught._replace(predicts=rows.predicts[chosen, begin:])

        return computed, teacher.logits
    taken = sum(512 * file.stat().st_blocks for file in (work / "kept").glob("*"))  # by the run that is resumed
    free = shutil.disk_usage(work).free + taken
    if size > free:
        raise OSError(
            f"the target's hidden states of {rows.tokens.numel()} tokens take {size / 1e9:.2g} GB, and there are "
            f"{free / 1e9:.2g} GB in {str(work)!r}; give another folder, or keep=False, which computes them again"
        )
    parts = RowsAtATime(settings.rows_per_step, f"lower length ({settings.length})", say)
    kept = KeptStates(teacher, rows, student.tokens, work / "kept", parts, student.autocast, say)
    return kept, kept.logits


def _settings_for(draft: Learner, settings: DistilSettings) -> DistilSettings:
    """The settings, with None replaced by the defaults of this kind of draft.

    Raises ValueError for settings that this kind does not have.
    """
    if settings.one_head and not isinstance(draft, MedusaHeads):
        raise ValueError(f"one_head is for Medusa heads, got a draft of type {type(draft).__name__}")
    if isinstance(draft, EagleHead):
        return replace(settings, depths=settings.depths or 5, decay=settings.decay or 0.8)
    if isinstance(draft, MedusaHeads):
        heads = draft.config.heads
        if settings.depths not in (None, heads):
            raise ValueError(f"depths of Medusa heads is their number, {heads}, got {settings.depths}")
        return replace(settings, depths=heads, decay=settings.decay or 0.8)
    if isinstance(draft, BlockHead):
        size = draft.config.block_size
        if settings.depths not in (None, size):
            raise ValueError(f"depths of a block draft is its block_size, {size}, got {settings.depths}")
        return replace(settings, depths=size, decay=settings.decay or 0.85)
    given = [name for name in ("depths", "decay") if getattr(settings, name) is not None]
    if given:
        raise ValueError(f"{' and '.join(given)} must be None for a plain draft, all of whose depths are alike")
    return settings


def _new_rows(
    documents: list[Document], target: PreTrainedModel, settings: DistilSettings, say: Callable[[str], object]
) -> Rows:
    def write(prompts: list[Tensor]) -> list[Document]:
        say(f"the target writes {len(prompts)} texts")
        generate = SpeculativeDecoder(target, method="autoregressive").generate
        return write_texts(target, generate, prompts, settings.length - settings.prompt_tokens, settings.seed, say)

    wanted = RowSettings(settings.length, settings.held_out, settings.written, settings.prompt_tokens, settings.seed)
    rows = make_rows(documents, wanted, write)
    count = len(rows.train.tokens)
    if count < settings.rows_per_step:
        raise ValueError(
            f"a step takes {settings.rows_per_step} rows, the data have {count} to train on; give more text, "
            f"or lower tokens_per_step ({settings.tokens_per_step})"
        )
    return rows


def _saved_rows(file: Path, made_for: dict[str, Any]) -> Rows:
    """The rows that an interrupted training saved. made_for: settings and draft now.

    Raises ValueError if they were different then.
    """
    saved = torch.load(file, weights_only=True)
    before = saved.pop("made_for")
    changed = [
        f"{name} {value!r}, before {before[name]!r}" for name, value in made_for.items() if value != before[name]
    ]
    if changed:
        raise ValueError(f"a training goes on with its own settings; got {', '.join(changed)}")
    return Rows(*(Texts(**saved[side]) for side in Rows._fields))


def _student(draft: Learner, target: PreTrainedModel) -> Student:
    """The draft in the form in which it is trained. Embedding and lm_head of a head or block draft are not trained."""
    draft.eval()  # no dropout: the draft learns from distributions, not from samples
    dtype = torch.bfloat16 if multiplies_bf16_faster(target.device) else None
    if isinstance(draft, EagleHead | BlockHead):
        draft.requires_grad_(True)
        for module in (draft.embed_tokens, draft.lm_head):
            if module is not None:
                module.requires_grad_(False)
    if isinstance(draft, EagleHead):
        return student_of_head(draft, target, dtype)
    if isinstance(draft, BlockHead):
        return student_of_block(draft, target, dtype)
    if isinstance(draft, MedusaHeads):
        return student_of_medusa(draft, target, dtype)
    return student_of_model(draft, dtype)


def multiplies_bf16_faster(device: torch.device) -> bool:
    """Whether a device has instructions that multiply bf16: GPUs since Ampere, CPUs with AVX512_BF16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    here = torch.cpu.get_capabilities()
    return bool(here.get("avx512_bf16") or here.get("amx_bf16"))


def _check(draft: Learner, target: PreTrainedModel, settings: DistilSettings) -> None:
    text: Any = target.config.get_text_config(decoder=True)
    if target.training:
        raise ValueError("target is in training mode; call target.eval() first")
    own: Any = draft.config.get_text_config(decoder=True) if isinstance(draft, PreTrainedModel) else draft.config
    if own.vocab_size != text.vocab_size:
        raise ValueError(
            f"target and draft must share a vocabulary, got {text.vocab_size} and {own.vocab_size} tokens; give a "
            "draft of the target's"
        )
    if isinstance(draft, EagleHead) and own.mask_token_id is not None:
        raise ValueError("a head that drafts all levels at once (P-EAGLE) is not trained here, got one")
    if isinstance(draft, BlockHead):
        check_trains(draft)
        if settings.length < 2 * own.block_size:
            raise ValueError(f"length must be at least two blocks of {own.block_size} tokens, got {settings.length}")
    if isinstance(draft, MedusaHeads):
        check_medusa(draft, text.hidden_size)
    if isinstance(draft, EagleHead | BlockHead):
        read = (own.target_hidden_size, text.hidden_size if draft.embed_tokens is not None else own.hidden_size)
        if read != (text.hidden_size, text.hidden_size):
            raise ValueError(
                f"the head, {own.hidden_size} wide, is for a target of width {own.target_hidden_size}, got a target of "
                f"width {text.hidden_size}; make one by new_head(target) or new_block(target)"
            )
    for model, config in {"target": text, "draft": own}.items():
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and settings.length > longest:
            raise ValueError(f"length must be at most {longest}, the {model}'s positions, got {settings.length}")


def _check_folder(folder: Path, resume: bool) -> None:
    if resume and not (folder / CHECKPOINT_FOLDER / "rows.pt").exists():
        raise ValueError(f"there is no training to resume in {str(folder)!r}")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"the folder {str(folder)!r} is not empty; give a new one, or resume what it has")


@contextmanager
def _without_gradients(target: PreTrainedModel) -> Iterator[None]:
    """A context in which the target's weights get no gradients, so that drafts that share some do not train them."""
    learning = [weight for weight in target.parameters() if weight.requires_grad]
    for weight in learning:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in learning:
            weight.requires_grad_(True)
