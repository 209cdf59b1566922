"""Work on rows in parts that fit into memory: out of memory halves them."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class RowsAtATime:
    """Runs a function on so many rows at a time, and on half as many once these are too many.

    rows: at a time
    at_one_row: what to do where even one row is too large, for the error
    say:  told of each halving, in one line
    """

    def __init__(self, rows: int, at_one_row: str, say: Callable[[str], object]):
        self.rows, self.at_one_row, self.say = rows, at_one_row, say

    def run(
        self, batch: Tensor, function: Callable[[Tensor], Result], start_again: Callable[[], object] = lambda: None
    ) -> list[Result]:
        """The results of the function for each part of a batch [R, ..].

        start_again: called where memory ran out, before the whole batch is done again in smaller parts: what was
                     computed of it so far is to be forgotten

        Raises torch.OutOfMemoryError if one row is too large.
        """
        while True:
            try:
                return [function(part) for part in batch.split(self.rows)]
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.rows == 1:
                    raise torch.OutOfMemoryError(f"out of memory with one row; {self.at_one_row}") from error
            # After the except clause, since the error's traceback holds the tensors of the failed pass.
            start_again()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.rows = min(self.rows, len(batch)) // 2 or 1
            self.say(f"out of memory; going on with {self.rows} row{'' if self.rows == 1 else 's'} at a time")


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if a GPU or the CPU's allocator had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
