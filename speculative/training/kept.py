"""The target's hidden states of all rows, computed once and kept on disk: for trainings that read the rows repeatedly.

A position takes 2 H (T + 1) + 4 bytes: T hidden states that a head reads and the last one, H wide in 16 bits, and one
fp32 number,

    s = log sum exp(logits)              over all V tokens

With s, log P of the draft's tokens is their logits minus s. So no later epoch runs the target, and none computes V
logits: it multiplies the last hidden state with the Vd rows of the lm_head. s is 0 after tokens of a prompt, where a
draft predicts nothing.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heavypath.speculative.training.memory import RowsAtATime
from heavypath.speculative.training.optimization import TrainingProgress
from heavypath.speculative.training.rows import Texts
from heavypath.speculative.training.teacher import Taught, Teacher

# Inside a model hidden states may be too large for fp16. The last one, after the final norm, needs its precision.
TAPS = torch.bfloat16
HIDDEN = torch.float16


def bytes_kept(rows: Tensor, width: int, taps: int) -> int:
    """The bytes of the files for rows [R, L]. width: hidden columns of the target; taps: states besides the last."""
    return rows.numel() * (2 * width * (taps + 1) + 4)


class KeptStates:
    """A teacher's hidden states for rows, in files, so that the target runs once. `teacher` computes them.

    rows: R rows of L tokens
    tokens: LongTensor[Vd], the target's tokens that the draft can propose; None for all
    folder: for the files. They are made now, unless an earlier run has finished them
    parts: decides how many rows the target reads at a time
    context: a function that makes the context in which the target's layers run, for matrix products in bf16
    say: called with lines of progress

    Raises ValueError if the target's logits of some tokens cannot be computed alone, and OSError for a full disk.
    """

    def __init__(
        self,
        teacher: Teacher,
        rows: Texts,
        tokens: Tensor | None,
        folder: Path,
        parts: RowsAtATime,
        context: Callable[[], AbstractContextManager[object]],
        say: Callable[[str], object],
    ):
        self._teacher = teacher
        self._rows = rows
        self._narrow = None if tokens is None else _rows_of(teacher.target.get_output_embeddings(), tokens)
        width = teacher.target.config.get_text_config(decoder=True).hidden_size
        taps = len(teacher.taps)
        shapes = {"taps": (taps, width if taps else 0), "hidden": (width,), "sums": ()}
        types = {"taps": TAPS, "hidden": HIDDEN, "sums": torch.float32}
        folder.mkdir(parents=True, exist_ok=True)
        self._kept = {
            name: _on_disk(folder / name, (*rows.tokens.shape, *shape), types[name]) for name, shape in shapes.items()
        }
        if not (folder / "whole").exists():
            self._compute(parts, context, say)
            (folder / "whole").touch()
        if tokens is not None:
            self._check(tokens)

    def __call__(self, chosen: Tensor, begin: int) -> Taught:
        """The hidden states of the rows with numbers LongTensor[R], without their first `begin` tokens."""
        device = self._teacher.target.device
        dtype = self._teacher.target.dtype
        taps, hidden = (self._kept[name][chosen, begin:].to(device, dtype) for name in ("taps", "hidden"))
        sums = self._kept["sums"][chosen, begin:].to(device)
        tokens = self._rows.tokens[chosen, begin:].to(device, torch.long)
        return Taught(tokens, taps, hidden, sums, self._rows.predicts[chosen, begin:])

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [R, N, Vd] of the draft's tokens, for its last hidden states [R, N, H]."""
        target = self._teacher.target
        if self._narrow is None:
            return self._teacher.logits(hidden)
        whole = target.get_output_embeddings()
        target.set_output_embeddings(self._narrow)
        try:
            return self._teacher.logits(hidden)
        finally:
            target.set_output_embeddings(whole)

    def _compute(
        self,
        parts: RowsAtATime,
        context: Callable[[], AbstractContextManager[object]],
        say: Callable[[str], object],
    ) -> None:
        size = sum(each.numel() * each.element_size() for each in self._kept.values())
        rows, length = self._rows.tokens.shape
        say(f"the target reads {rows * length} tokens once; {size / 1e9:.2g} GB on disk until the training ends")
        progress = TrainingProgress(rows, length, say)
        target = self._teacher.target

        def keep(chosen: Tensor) -> None:
            with context():
                taught = self._teacher(self._rows.tokens[chosen])
            for row, number in enumerate(chosen.tolist()):
                self._kept["taps"][number] = taught.taps[row].to(TAPS)
                self._kept["hidden"][number] = taught.hidden[row].to(HIDDEN)
                # Of the hidden state that is kept, and in full precision, as P of the draft's tokens is computed later.
                predicts = self._rows.predicts[number]
                own = self._kept["hidden"][number, predicts][None].to(target.device, target.dtype)
                self._kept["sums"][number, predicts] = self._teacher.logits(own)[0].float().logsumexp(-1).cpu()
            done = int(chosen[-1]) + 1
            if progress.is_due(done):
                progress.report(done, "reading")

        parts.run(torch.arange(rows, device="cpu"), keep)

    def _check(self, tokens: Tensor) -> None:
        """Raise ValueError if the logits of the draft's tokens alone differ from those among all, at one position."""
        hidden = self._kept["hidden"][:1, :1].to(self._teacher.target.device, self._teacher.target.dtype)
        expected = self._teacher.logits(hidden)[..., tokens]
        if not torch.allclose(self.logits(hidden), expected, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"the logits of a {type(self._teacher.target).__name__} depend on other tokens'; set keep=False"
            )


def _on_disk(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A CPU tensor whose memory is a file, so that writes go there. A missing file is made, with zeros."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(shape)


def _rows_of(lm_head: Any, tokens: Tensor) -> nn.Linear:
    """A linear layer with the rows of the lm_head, and of its bias, for tokens LongTensor[Vd] alone."""
    chosen = tokens.to(lm_head.weight.device)
    narrow = nn.Linear(lm_head.weight.shape[1], len(tokens), bias=False, device="meta")
    narrow.weight = nn.Parameter(lm_head.weight.detach()[chosen], requires_grad=False)
    if getattr(lm_head, "bias", None) is not None:
        narrow.bias = nn.Parameter(lm_head.bias.detach()[chosen], requires_grad=False)
    return narrow
