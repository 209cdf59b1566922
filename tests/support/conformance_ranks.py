"""Conformance rows in several processes, each of which has a part of the target."""

import torch
from conformance_parts import Case
from conformance_texts import texts
from rank_work import split_target


def texts_of(folder, rows):
    """The texts of each row, by a target that was saved under its family's name and is split."""
    found = []
    for row in rows:
        torch.manual_seed(0)
        case = Case(row)
        case.target = split_target(folder, row["target"])
        found.append(texts(case, case.decoder(), way="compiled"))
    return found
