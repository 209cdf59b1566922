"""Decide how many layers stay in a given amount of memory, and which; and parse sizes such as "8G"."""

import re
from collections.abc import Collection, Sequence

SLOTS = 2  # layers that pass through memory at a time: one that computes, and the next
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def bytes_of(memory: int | str) -> int:
    """The number of bytes that a number, or a number with a unit, stands for: "8G" and "8GB" are 8e9, "8GiB" 8 * 2**30.

    Raises ValueError for anything else.
    """
    given = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B?)\s*", str(memory), re.IGNORECASE)
    if given is None or given[3].lower() == "i" or float(given[1]) <= 0:
        raise ValueError(f"expected a size of memory such as 8G, 500M or 8GiB, got {memory!r}")
    return int(float(given[1]) * (1024 if given[3].lower() == "ib" else 1000) ** _UNITS[given[2].upper()])


def resident_layers(sizes: Sequence[int], memory: int, wanted: Collection[int], others: int) -> list[int]:
    """Choose the layers that stay in memory: the wanted ones, and as many of the others as fit. Returns their indices.

    The others are spread evenly over the model, because what is read while a resident layer computes is needed soon
    after. All layers stay if they fit; otherwise there is room left for two that pass.

    sizes:  bytes of each layer
    memory: bytes for all layers together
    wanted: indices of layers that must stay
    others: bytes of the model outside of its layers, for the error message

    Raises ValueError if the memory is too small for the wanted layers and two others.
    """
    if sum(sizes) <= memory:
        return [*range(len(sizes))]
    chosen = sorted({*wanted})
    free = [index for index in range(len(sizes)) if index not in chosen]
    least = sum(sizes[index] for index in chosen) + SLOTS * max((sizes[index] for index in free), default=0)
    if least > memory:
        raise ValueError(
            f"a memory of {(memory + others) / 1e9:.3f}G is too little: the model takes {others / 1e9:.3f}G beside its "
            f"layers, {len(chosen)} resident layers and {SLOTS} that pass {least / 1e9:.3f}G; give at least "
            f"{-(-(least + others) // 10**6)}M"
        )
    best = chosen
    for count in range(1, len(free) - SLOTS + 1):
        spread = [free[(2 * number + 1) * len(free) // (2 * count)] for number in range(count)]
        passing = [sizes[index] for index in free if index not in spread]
        if sum(sizes[index] for index in [*chosen, *spread]) + SLOTS * max(passing) > memory:
            break
        best = sorted([*chosen, *spread])
    return best
