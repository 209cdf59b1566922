"""Process rows in parts that fit into memory: the parts are halved when memory runs out."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class RowsAtATime:
    """Runs a function on `rows` rows at a time, and on half as many after memory has run out.

    rows: number of rows at a time
    at_one_row: advice for the error message if even one row is too large
    say: called with one line after each halving
    """

    def __init__(self, rows: int, at_one_row: str, say: Callable[[str], object]):
        self.rows = rows
        self.at_one_row = at_one_row
        self.say = say

    def run(
        self, batch: Tensor, function: Callable[[Tensor], Result], start_again: Callable[[], object] = lambda: None
    ) -> list[Result]:
        """The results of the function, in order, for the parts of a batch [R, ...] of `rows` rows each.

        start_again: called when memory has run out, before the whole batch is processed again in smaller parts. It must
                     discard everything that was computed for the batch so far

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
            # After the except clause, because the error's traceback keeps the tensors of the failed pass alive.
            start_again()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.rows = min(self.rows, len(batch)) // 2 or 1
            self.say(f"out of memory; going on with {self.rows} row{'' if self.rows == 1 else 's'} at a time")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error means that a GPU or the CPU has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
