"""A remark on generations whose speculation costs more than it brings."""

import logging

from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.drafts.draft import Draft

logger = logging.getLogger(__name__)


class Remark:
    """Says it in the log, once for a decoder."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, stats: Statistics, draft: Draft | None) -> None:
        """Look at a generation that has ended."""
        if self._said or draft is None or not stats.does_not_pay:
            return
        self._said = True
        can_calibrate = draft.extra_nodes == 0
        hint = "; `heavypath calibrate` finds out which trees pay" if can_calibrate else ""
        logger.warning("%s%s", stats.does_not_pay, hint)
