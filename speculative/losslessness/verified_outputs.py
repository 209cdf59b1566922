"""What a verification returns: accepted tokens and the next one. It is refused if it is no path of the drafted tree."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heavypath.speculative.losslessness.chi_square import described
from heavypath.speculative.losslessness.drawn_trees import depths_of

INTEGERS = (torch.int64, torch.int32)


def in_one_tensor(rows: list[Any], most: int) -> Tensor:
    """Outputs of B trees as LongTensor[B, most], with -1 after the tokens.

    rows: for each tree a list of integers, or a Tensor [T]; most: the largest number of tokens

    Raises TypeError for anything else, and ValueError for more tokens.
    """
    padded = []
    for number, row in enumerate(rows):
        row = row.tolist() if isinstance(row, Tensor) else row
        if not isinstance(row, list | tuple) or not all(isinstance(token, int) for token in row):
            raise TypeError(
                f"verify must return a list of integers or a Tensor [T] of them, got {row!r} in call {number}"
            )
        if len(row) > most:
            raise ValueError(
                f"verify must return at most {most} tokens, the tree's depth + 1, "
                f"got {len(row)} in call {number}: {row}"
            )
        padded.append([*row, *[-1] * (most - len(row))])
    return torch.tensor(padded, dtype=torch.long, device="cpu")


def checked_outputs(outputs: Any, tokens: Tensor, parents: Sequence[int], vocab_size: int) -> Tensor:
    """Check what a verification returned; returns it as LongTensor[B, L], with -1 after the tokens.

    tokens:  LongTensor[B, N], of the drafted trees
    parents: the parent of each node, -1 for node 0

    Raises TypeError and ValueError for another type or shape, for rows without tokens, tokens out of range or after a
    -1, and for accepted tokens that are no path of the tree.
    """
    depths = depths_of(parents)
    batch = len(tokens)
    most = max(depths) + 1
    shape = f"integers [{batch}, at most {most}]"
    if not isinstance(outputs, Tensor) or outputs.dtype not in INTEGERS:
        got = described(outputs)
        raise TypeError(f"verify must return {shape}: accepted tokens, the next one, then -1; got {got}")
    if outputs.ndim != 2 or len(outputs) != batch or not 1 <= outputs.shape[1] <= most:
        raise ValueError(f"verify must return {shape}: accepted tokens, the next one, then -1; got {[*outputs.shape]}")
    outputs = torch.nn.functional.pad(outputs.long().cpu(), (0, most - outputs.shape[1]), value=-1)
    if not -1 <= int(outputs.min()) <= int(outputs.max()) < vocab_size:
        raise ValueError(
            f"verify must return tokens in 0 .. {vocab_size - 1}, and -1 after them, "
            f"got {int(outputs.min())} .. {int(outputs.max())}"
        )
    there = outputs >= 0
    _refuse(~there[:, 0], "returned no token", outputs, tokens)
    _refuse((there[:, 1:] & ~there[:, :-1]).any(1), "returned a token after a -1", outputs, tokens)
    _refuse(~_is_path(outputs, there.sum(1) - 1, tokens, parents), "accepted no path of the tree", outputs, tokens)
    return outputs


def _is_path(outputs: Tensor, accepted: Tensor, tokens: Tensor, parents: Sequence[int]) -> Tensor:
    """Whether the first `accepted` (LongTensor[B]) tokens of each output spell a path of its tree, BoolTensor[B]."""
    depths = depths_of(parents)
    reached = [torch.ones_like(accepted, dtype=torch.bool)]
    for node in range(1, len(parents)):
        reached.append(reached[parents[node]] & (tokens[:, node] == outputs[:, depths[node] - 1]))
    ends = torch.stack(reached, 1) & (torch.tensor(depths, device="cpu") == accepted[:, None])
    return ends.any(1)


def _refuse(wrong: Tensor, what: str, outputs: Tensor, tokens: Tensor) -> None:
    """Raise ValueError if any row is wrong (BoolTensor[B]), with `what` it did and the first such row."""
    if wrong.any():
        row = int(wrong.int().argmax())
        raise ValueError(
            f"verify {what} in {int(wrong.sum())} of {len(wrong)} rows: in row {row} it returned "
            f"{outputs[row].tolist()} for a tree with tokens {tokens[row].tolist()}"
        )
