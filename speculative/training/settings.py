"""The settings of `distil`. This file imports nothing slow, so that a command can show the defaults."""

from dataclasses import dataclass

MEASURED_DEPTHS = 5  # levels below the root at which a draft's overlap with the target is measured
LOSS_NAMES = ("tv-kl", "lk")  # of `training.losses`


@dataclass(frozen=True)
class DistilSettings:
    """Settings of a training with `distil`.

    epochs:           number of passes through the rows
    length:           tokens of a row; a head drafts worse in sequences that are longer than its rows
    tokens_per_step:  tokens of a batch
    depths:           levels below the root for which a draft is trained. For a head, the number of steps of its
                      training-time test, default 5. For a block draft, its block_size or None; for Medusa heads, their
                      number or None. For a draft model, None
    decay:            factor of the loss from one depth to the next; default: a head and Medusa heads 0.8, a block draft
                      0.85. None for a draft model
    one_head:         whether each step trains one of the Medusa heads alone, drawn at random. A step then computes the
                      logits of one head, which takes less memory. Only for Medusa heads
    loss:             "tv-kl" or "lk", see `training.losses`
    rate:             Muon's peak learning rate; AdamW's is two thirds of it. Default: 2 / hidden size of the draft. The
                      shipped head, of size 320, learnt best at 0.006; the best rate falls with the size (Yang et al.
                      2022)
    written:          share of the documents that are replaced by the target's output: after the document's prompt, or
                      after the first prompt_tokens of each piece of `length` tokens. In decoding a draft sees the
                      target's output and not the data's text, but generating is slow. The shipped head had 0.3
    prompt_tokens:    see `written`
    held_out:         share of the data that is never trained on, at most 128 rows. The record's overlaps are measured
                      with these rows
    keep:             whether the target reads the rows once, and its hidden states are kept on disk until the training
                      ends. Default: if there are several epochs, on a CPU, and at most 16 GB to keep
    checkpoint_steps: steps between checkpoints
    seed:             seed for the rows' choice and order, and for generating

    Raises ValueError for values out of range.
    """

    epochs: float = 3.0
    length: int = 1024
    tokens_per_step: int = 8192
    depths: int | None = None
    decay: float | None = None
    one_head: bool = False
    loss: str = "tv-kl"
    rate: float | None = None
    written: float = 0.3
    prompt_tokens: int = 32
    held_out: float = 0.05
    keep: bool | None = None
    checkpoint_steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "epochs": (self.epochs > 0, "above 0"),
            "depths": (self.depths is None or self.depths >= 1, "1 or more"),
            "length": (self.length > max(self.depths or 0, MEASURED_DEPTHS) + 1, "larger than the depths, and than 6"),
            "tokens_per_step": (self.tokens_per_step >= self.length, "a row's length or more"),
            "decay": (self.decay is None or 0 < self.decay <= 1, "in (0, 1]"),
            "loss": (self.loss in LOSS_NAMES, f"one of {', '.join(LOSS_NAMES)}"),
            "rate": (self.rate is None or self.rate > 0, "above 0"),
            "written": (0 <= self.written <= 1, "in [0, 1]"),
            "prompt_tokens": (0 < self.prompt_tokens < self.length, "1 or more, and fewer than a row's"),
            "held_out": (0 < self.held_out < 1, "in (0, 1)"),
            "checkpoint_steps": (self.checkpoint_steps >= 1, "1 or more"),
        }
        for name, (is_right, expected) in checks.items():
            if not is_right:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    @property
    def rows_per_step(self) -> int:
        """The number of rows in a batch."""
        return self.tokens_per_step // self.length
