"""Words of a decoder: what it consists of, and a remark if its speculation costs more than it brings."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from heavypath.speculative.decoding.statistics import ENOUGH_STEPS, Statistics
from heavypath.speculative.drafts.draft import Draft

logger = logging.getLogger(__name__)


@contextmanager
def without_remarks() -> Iterator[None]:
    """Keep decoders quiet in the block, of which some are tried that do not pay."""
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


class Remark:
    """Says it in the log, once for a decoder."""

    def __init__(self) -> None:
        self._said = self._said_positions = False

    def at_positions(self, draft: Draft | None, tokens: int) -> None:
        """Look at texts that are to have up to so many tokens."""
        if draft is not None and tokens > draft.positions and not self._said_positions:
            self._said_positions = True
            logger.warning("the draft has %d positions: longer texts go on without it", draft.positions)

    def __call__(self, stats: Statistics, draft: Draft | None, expected: float | None) -> None:
        """Look at a generation that has ended; expected: the gain of a default tree by estimated costs."""
        if self._said or draft is None:
            return
        why, batch = stats.does_not_pay, len(stats.tokens_of)
        if not why and expected is not None and expected < 1 and stats.steps >= ENOUGH_STEPS:
            why = (
                f"the draft does not pay: {stats.tokens_per_step:.2f} tokens a step, by costs estimated for a batch of "
                f"{batch}, are {expected:.2f} times the speed of method 'autoregressive'. Sampled texts would change "
                "with the tree, so it stays; give tree_size=2, or take method 'ersd', which then drafts less"
            )
        if why:
            self._said = True
            can_calibrate = not draft.why_not_measured
            logger.warning("%s%s", why, "; `heavypath calibrate` finds out which trees pay" if can_calibrate else "")


def in_words(decoder: Any, given: object) -> str:
    """The parts of a decoder and the draft that it was given, as its repr."""
    target = type(decoder.target).__name__
    draft = None if given is None else type(given).__name__
    tree = "by profile" if decoder.tree is None else f"{len(decoder.tree)} nodes"
    return f"SpeculativeDecoder(target={target}, draft={draft}, method={decoder.method!r}, tree={tree})"
