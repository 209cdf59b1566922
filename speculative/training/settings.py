"""The settings of a training. Nothing here is slow to import, so that a command can show their defaults."""

from dataclasses import dataclass

MEASURED_DEPTHS = 5  # levels below the root at which a draft's overlap with the target is measured
LOSS_NAMES = ("tv-kl", "lk")  # of `training.losses`


@dataclass(frozen=True)
class DistilSettings:
    """Settings by which `distil` trains.

    epochs:          how often it goes through the rows
    length:          tokens of a row; a head drafts worse in texts that are longer than its rows
    tokens_per_step: of a batch
    depths:          levels below the root that a draft is trained for. A head has so many steps of its training-time
                     test, default 5. A block draft has those of its block alone, and a plain draft has none
    decay:           of the loss at each next depth; default 0.8 of a head, 0.85 of a block draft. A plain draft has
                     none
    loss:            "tv-kl" or "lk", see `training.losses`
    rate:            Muon's peak rate, AdamW's is two thirds; default 2 / width of the draft. The shipped head, of
                     width 320, learnt best at 0.006, and the best rate falls with the width (Yang et al. 2022)
    written:         share of the documents whose text the target writes anew after their prompts, or after the first
                     prompt_tokens of each `length` of a text. In decoding a draft meets the target's own text, not the
                     data's; but writing takes the target many passes where reading takes one. The shipped head had 0.3
    held_out:        share of the data that is never trained on, at most 128 rows: the record's overlaps are of these
    checkpoint_steps: steps between checkpoints

    Raises ValueError for values out of range.
    """

    epochs: float = 3.0
    length: int = 1024
    tokens_per_step: int = 8192
    depths: int | None = None
    decay: float | None = None
    loss: str = "tv-kl"
    rate: float | None = None
    written: float = 0.3
    prompt_tokens: int = 32
    held_out: float = 0.05
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
        """Rows of a batch."""
        return self.tokens_per_step // self.length
