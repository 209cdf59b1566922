"""A program as the machine takes it: rows, each of them a function and numbers that it reads its operands from."""

from typing import NamedTuple

from ptx.meaning import Meaning, meaning
from ptx.parse import BITS, Instruction, Program
from ptx.places import BRANCH, TOGETHER, Form, Places, Row
from ptx.units import UNITS

WARPS = {"shfl", "vote", "redux", "ldmatrix", "stmatrix", "mma", "wgmma"}  # that all lanes of a warp do together
NOTHING = {"membar", "griddepcontrol", "discard", "applypriority", "setmaxnreg"}  # to be done here


class Lowered(NamedTuple):
    """A program for the machine.

    constants:  bytes of the last registers of a warp: of what is special, parameters, immediates
    parameters: for each its register's place within these, and its bytes
    size:       bytes of a warp's registers
    """

    rows: list[Row]
    constants: bytes
    parameters: list[tuple[int, int]]
    size: int


class UnknownInstructionError(NotImplementedError):
    """An instruction that this machine does not have."""


def lower(program: Program) -> Lowered:
    """The rows of a program; raises UnknownInstructionError."""
    places = Places(program)
    starts, rows = [], []
    for instruction in program.instructions:
        starts.append(len(rows))
        guard, sense = -1, 1
        if instruction.guard:
            guard, sense = places.place(instruction.guard.lstrip("!"), 1), int(instruction.guard[0] != "!")
        rows += [row._replace(guard=guard, sense=sense) for row in _rows_of(instruction, places)]
    starts.append(len(rows))
    rows = [row if row.kind != BRANCH else row._replace(target=starts[row.target]) for row in rows]
    constants, parameters = bytes(places.data), [*places.parameters.values()]
    return Lowered(rows, constants, parameters, places.first + len(constants))


def _rows_of(given: Instruction, places: Places) -> list[Row]:
    try:
        meanings = meaning(given)
        if meanings is not None:
            return _computing(given, meanings, places)
        if given.name in NOTHING:
            return []
        rows = UNITS[given.name](places, given)
        return [row._replace(kind=TOGETHER) for row in rows] if given.name in WARPS else rows
    except (KeyError, ValueError, IndexError, StopIteration) as error:
        raise UnknownInstructionError(f"{given.text} ({error!r})") from error


def _computing(given: Instruction, meanings: list[Meaning], places: Places) -> list[Row]:
    """A row for each result. A condition with "!" before it becomes one that is negated in the formula."""
    first = given.operands[0]
    several = str(first).split("|") if meanings[0].result == "pred" else [first]
    results = first if isinstance(first, tuple) else several
    operands = [one for each in given.operands[1:] for one in (each if isinstance(each, tuple) else (each,))]
    rows = []
    for result, each in zip(results, meanings, strict=True):
        if result == "_":
            continue
        at, widths, formula = [], [], each.formula
        taken = zip((result, *operands[: len(each.sources)]), (each.result, *each.sources), strict=True)
        for letter, (operand, kind) in zip("_abcdefgh", taken, strict=False):
            bits, name = BITS[kind.partition(".")[0]], str(operand)  # of a half of two, the bits of both
            if name.startswith("!"):
                formula = f"[&](bool {letter}) {{ return {formula}; }}(!{letter})"
            at.append(places.place(name.lstrip("!"), bits))
            widths.append(places.width(name.lstrip("!"), bits))
        rows.append(Row(given.text, Form(each._replace(formula=formula), tuple(widths)), at))
    return rows
